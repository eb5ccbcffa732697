"""tariff.toml: what it may hold, and what it makes of bytes and joules."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_server.records import tariff
from cloud_server.records.tariff import Tariff
from fleet_core.base.errors import ConfigError
from tests.support.paths import ROOT

HEAD = 'currency = "EUR"\nsource = "an example"\n'


def loaded(folder: Path, text: str) -> Tariff:
    (folder / tariff.FILE).write_text(HEAD + text)
    found = tariff.of_folder(folder)
    assert found is not None
    return found


def test_one_price_is_for_both_directions_and_two_are_for_one_each(tmp_path: Path) -> None:
    assert loaded(tmp_path, "per_mb = 2").data(1e6, 3e6) == pytest.approx(8)
    assert loaded(tmp_path, "per_mb_up = 2\nper_mb_down = 1").data(1e6, 3e6) == pytest.approx(5)


def test_a_price_that_is_not_there_is_unknown_and_not_nothing(tmp_path: Path) -> None:
    found = loaded(tmp_path, "monthly_fee = 1")
    assert found.data(1e6, 1e6) is None
    assert found.month_of_data(1e6, 1e6) is None
    assert found.energy(3.6e6) is None
    assert loaded(tmp_path, "per_kwh = 0.25").energy(3.6e6) == pytest.approx(0.25)


def test_the_included_volume_is_free_and_is_taken_from_both_directions_in_proportion(tmp_path: Path) -> None:
    found = loaded(tmp_path, "per_mb_up = 4\nper_mb_down = 1\nincluded_mb = 10")
    assert found.month_of_data(2e6, 8e6) == 0
    assert found.month_of_data(10e6, 10e6) == pytest.approx(5 * 4 + 5 * 1)
    assert found.month_of_data(0, 0) == 0


def test_every_mistake_is_told_at_once_with_its_line(tmp_path: Path) -> None:
    path = tmp_path / tariff.FILE
    path.write_text('currency = "euro"\nper_mb = -1\nper_mb_up = 1\nper_gb = 2\n')
    with pytest.raises(ConfigError) as raised:
        tariff.load(path)
    lines = str(raised.value).splitlines()
    assert [line.partition(": ")[2].partition(":")[0] for line in lines] == [
        "per_gb", "currency", "source", "per_mb", "per_mb"
    ]
    assert f"{path}:1: currency: 'euro' does not match, expected three capital letters, such as EUR" in lines


@pytest.mark.parametrize(("text", "problem"), [
    ("per_mb_up = 1", "per_mb_down: missing beside per_mb_up"),
    ("included_mb = 5", "included_mb: without a price"),
    ("per_mb = 1\nper_mb_up = 1\nper_mb_down = 1", "per_mb: is the price of both directions"),
])
def test_prices_that_contradict_each_other_are_refused(tmp_path: Path, text: str, problem: str) -> None:
    with pytest.raises(ConfigError, match=problem):
        loaded(tmp_path, text)


def test_a_folder_without_a_tariff_has_none_and_a_named_file_has_to_be_there(tmp_path: Path) -> None:
    assert tariff.of_folder(tmp_path) is None
    with pytest.raises(ConfigError, match="cannot be read"):
        tariff.of_folder(tmp_path, tmp_path / "other.toml")


@pytest.mark.parametrize("path", sorted((ROOT / "docs" / "tariffs").glob("*.toml")), ids=lambda path: path.stem)
def test_the_examples_have_prices_and_name_their_source(path: Path) -> None:
    example = tariff.load(path)
    assert example.source.partition(":")[0] in ("Telnyx IoT data plans, US zone 1, up to 100 MB a month",
                                               "Eurostat nrg_pc_204")
    assert example.data(1e6, 1e6) is not None
