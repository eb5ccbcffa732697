"""What ``metafleet codecs`` lists, what ``--codec`` takes, and what a new fleet says of its codecs."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from cloud_server.choices import codec_catalogue
from cloud_server.commands import cli
from cloud_server.records.fleet_folder import Fleet
from cloud_server.running.demo_setup import Options, demo_fleet_toml
from fleet_core.base.errors import ConfigError
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.data import heartbeat
from fleet_core.data.sets.registry import entry
from fleet_core.learning import models
from fleet_core.model.choose_codec import AUTO, LADDERS, MOST_LEFT, REST, STAY, WINDOW
from fleet_core.model.layout import MODEL_GROUPS
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "codecs.md").read_text(encoding="utf-8")


def test_the_default_model_is_the_demos() -> None:
    demos = models.describe(entry("heartbeat").model, entry("heartbeat").input_spec, heartbeat.CLASSES, {})
    assert demos.shapes(MODEL_GROUPS) == codec_catalogue.DEFAULT_MODEL


def test_the_codecs_are_listed_with_their_bits(capsys: pytest.CaptureFixture[str]) -> None:
    cli.codecs(as_json=True)
    listed = {one["name"]: one for one in json.loads(capsys.readouterr().out)}
    assert list(listed) == [*CODECS, AUTO]
    assert listed[AUTO].keys() > listed["int8"].keys()
    assert listed[AUTO]["codecs"]["up"] == list(LADDERS["up"])
    assert (listed["int4"]["feedback"], listed["mask"]["unbiased"], listed["topk-1"]["feedback_down"]) == (1, 1, 0)
    assert 0.01 < listed["topk-01"]["bits"] < listed["topk-1"]["bits"] < listed["int4"]["bits"] < 4
    cli.codecs()
    assert [line.split()[0] for line in capsys.readouterr().out.splitlines()] == ["codec", *CODECS, AUTO]


def test_the_page_of_codecs_has_a_row_for_each_with_what_the_command_says() -> None:
    """The bits depend on the version of zstd, so a tenth either way is allowed."""
    rows = [[cell.strip(" `") for cell in line.strip("|").split("|")] for line in PAGE.splitlines()
            if line.startswith("| `") and line.count("|") == 6]
    assert [row[0] for row in rows] == list(CODECS)
    said = codec_catalogue.rows()[:-1]
    for shown, (name, bits, feedback, unbiased, _) in zip(rows, said, strict=True):
        assert (shown[0], *shown[2:4]) == (name, feedback, unbiased)
        assert float(shown[1]) == pytest.approx(float(bits), rel=0.1, abs=0.011)


@pytest.mark.parametrize(
    ("text", "ways"),
    [
        ("int4", {"up": "int4", "down": "int4"}), ("up:topk-1,down:int4", {"up": "topk-1", "down": "int4"}),
        ("down:bf16,up:mask", {"up": "mask", "down": "bf16"}), ("up:topk-1", {"up": "topk-1"}),
        ("auto", {"up": "auto", "down": "auto"}), ("up:auto,down:int8", {"up": "auto", "down": "int8"}),
    ],
)
def test_a_codec_is_chosen_for_both_ways_or_each(text: str, ways: dict[str, str]) -> None:
    assert codec_catalogue.chosen(text) == ways


@pytest.mark.parametrize(
    "text", ["int5", "up:int5", "up:int4,int4", "up:int4,up:int8", "sideways:int4", "", "up:", "int4,int8"]
)
def test_another_choice_is_refused_with_what_there_is(text: str) -> None:
    with pytest.raises(ConfigError, match=r"--codec: unknown codec .*expected fp32, .*up:NAME,down:NAME"):
        codec_catalogue.chosen(text)


def test_a_new_fleet_with_auto_has_no_remarks_of_codecs_and_one_with_sums_sends_fp32(tmp_path: Path) -> None:
    for method, codec in (("pfldyn-proto", "auto"), ("fedproto", "fp32")):
        (tmp_path / method).mkdir()
        text = demo_fleet_toml(Options(codec="auto", method=method))
        (tmp_path / method / "fleet.toml").write_text(text, encoding="utf-8")
        fleet = Fleet.load(tmp_path / method)
        assert (fleet.codec_up, fleet.codec_down) == (codec, codec)
        assert not [text for text in fleet.remarks() if "see docs/codecs.md" in text]


def test_the_page_names_the_codecs_and_limits_of_auto() -> None:
    section = PAGE.split("## Auto")[1].split("\n## ")[0]
    for name in LADDERS["up"]:
        assert f"`{name}`" in section
    for limit in (*MOST_LEFT.values(), STAY, REST, WINDOW):
        assert f"{limit:g}" in section


def test_the_demo_takes_a_codec_and_keeps_the_default_of_the_other_way() -> None:
    made = demo_fleet_toml(Options(codec="up:topk-10"))
    assert 'up = "topk-10"' in made
    assert 'down = "int8"' in made


@pytest.mark.slow
@pytest.mark.parametrize(
    ("codec", "method", "said"),
    [
        ("up:topk-1", "pfldyn-proto", ["pfldyn-proto with topk-1 up diverges on quadratics whose largest curvature"]),
        ("up:topk-1", "pflscaf-proto", []), ("down:topk-1", "pfldyn-proto", []), ("int4", "pfldyn-proto", []),
        ("lowrank", "feddyn", ["feddyn with lowrank up diverges on quadratics whose largest"]),
        ("topk-01", "scaffold", ["scaffold with topk-01 up is far from", "scaffold with topk-01 down is far from"]),
        ("mask", "fedavg", ["fedavg with mask up diverges", "fedavg with mask down diverges"]),
    ],
)
def test_a_new_fleet_says_where_its_method_misses_with_its_codec(
    tmp_path: Path, codec: str, method: str, said: list[str]
) -> None:
    (tmp_path / "fleet.toml").write_text(demo_fleet_toml(Options(method=method, codec=codec)))
    remarks = Fleet.load(tmp_path).remarks()
    assert len(remarks) == len(said)
    for remark, start in zip(remarks, said, strict=True):
        assert remark.startswith(start)
        assert remark.endswith("; see docs/codecs.md")
