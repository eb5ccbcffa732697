"""Joules of bytes, and the kind of link, on constructed file trees."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet_core.base.error_bounds import Spread
from fleet_core.board.profile import Profile, Radio
from fleet_core.power.energy_model import STATED
from fleet_core.power.joules_by_phase import NO_METER, JoulesByPhase
from fleet_core.power.meter import Interval
from fleet_core.power.radio import HUANG, OTHER_HARDWARE, RadioModel, kind_of_link, radio_of

MBIT = 125_000  # bytes
HEADER = "Iface\tDestination\tGateway\tFlags\n"


@pytest.mark.parametrize(
    ("kind", "up_mj", "down_mj"), [("wifi", 283.17, 137.01), ("lte", 438.39, 51.97)]
)
def test_a_megabit_costs_what_table_4_says_and_the_base_is_named_as_left_out(
    kind: str, up_mj: float, down_mj: float
) -> None:
    radio = radio_of(kind)
    assert radio.joules(MBIT, 0) == pytest.approx(up_mj / 1000)
    assert radio.joules(0, MBIT) == pytest.approx(down_mj / 1000)
    assert "modelled on other hardware (Huang et al. 2012, Table 4)" in radio.source
    assert radio.absent.startswith("without the base power")
    assert radio.spread == OTHER_HARDWARE


def test_the_users_constant_comes_before_the_boards_and_the_boards_before_the_default() -> None:
    board = Profile("b", "B", "aarch64", radio=Radio(2e-6, "a sheet"))
    assert radio_of("wifi", board, 3e-6).joules(1e6, 1e6) == pytest.approx(6)
    assert radio_of("wifi", board) == RadioModel(2e-6, 2e-6, "a sheet", spread=STATED)
    assert radio_of("wifi", Profile("b", "B", "aarch64", radio=Radio(2e-6))) == HUANG["wifi"], "it has no source"


@pytest.mark.parametrize(("kind", "reason"), [("ethernet", "no radio"), (None, "[radio] kind")])
def test_without_a_radio_or_a_known_link_there_is_a_reason_and_no_figure(kind: str | None, reason: str) -> None:
    book = JoulesByPhase(None, radio_of(kind))
    book.moved(up_bytes=10**9)
    assert book.figures() == {}
    assert any(reason in line for line in book.absent_terms())
    assert f"compute: {NO_METER}" in book.absent_terms()


class Whole:
    """A sensor of the whole board."""

    source, measured, absent_terms, includes_radio = "meter", True, {"radio": "not separated"}, True
    spreads: dict[str, Spread] = {}  # noqa: RUF012

    def interval(self) -> Interval:
        return Interval(1.0, 2.0)

    def compute_j(self, flops: float) -> None:
        return None


def test_a_sensor_of_the_whole_board_is_not_added_to_by_a_model_of_its_radio() -> None:
    book = JoulesByPhase(Whole(), HUANG["wifi"])
    book.moved(up_bytes=MBIT)
    book.update()
    assert set(book.figures()) == {"other", "idle"}
    assert book.absent_terms() == ("radio: not separated",)


@pytest.mark.parametrize(
    ("interface", "folder", "kind"),
    [("wlan0", "wireless", "wifi"), ("mlan0", "phy80211", "wifi"), ("wwan0", "", "lte"), ("ppp0", "", "lte"),
     ("eth0", "", "ethernet")],
)
def test_the_link_is_that_of_the_default_route(tmp_path: Path, interface: str, folder: str, kind: str) -> None:
    (tmp_path / "proc/net").mkdir(parents=True)
    other, route = "usb0\t0002A8C0\t00000000\t0001\n", f"{interface}\t00000000\t0102A8C0\t0003\n"
    (tmp_path / "proc/net/route").write_text(HEADER + other + route)
    (tmp_path / "sys/class/net" / interface / folder).mkdir(parents=True)
    assert kind_of_link(tmp_path) == kind


@pytest.mark.parametrize("routes", [None, "", HEADER, HEADER + "usb0\t0002A8C0\t00000000\t0001\n", HEADER + "\n"])
def test_a_machine_without_a_default_route_has_a_link_of_unknown_kind(tmp_path: Path, routes: str | None) -> None:
    if routes is not None:
        (tmp_path / "proc/net").mkdir(parents=True)
        (tmp_path / "proc/net/route").write_text(routes)
    assert kind_of_link(tmp_path) is None
