"""Devices that are refused most of the time: named, quarantined by hand or by rule, released by hand."""

from __future__ import annotations

import json
from functools import partial
from pathlib import Path

import pytest

from cloud_server.commands import server as commands
from cloud_server.devices import devices, fleet_status
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device, Round, Update
from cloud_server.membership.quarantine import RELEASED, suspects
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base.errors import ConfigError
from tests.support.inprocess import World, config_text, without_fsync, world
from tests.support.liars import lie, started
from tests.support.world_checks import check_duals, settled

DEVICES = 4


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fsync(monkeypatch)


def fleet(folder: Path, robust: str = "") -> World:
    return started(folder, robust, devices=DEVICES, fewest=2, rounds=8)


def closed(w: World, number: int) -> bool:
    return w.closed() >= number and settled(w)


def asked(w: World, number: int) -> set[str]:
    return set(w.server.ledger.rows(Round, round=number)[0].cohort)


def ledger(folder: Path, statuses: dict[str, list[str]]) -> Ledger:
    """Rounds 1, 2, … in which each device's update was counted (c), refused (r), clipped away (k), or there was none
    (-)."""
    made = Ledger(folder / "ledger.sqlite")
    length = max(map(len, statuses.values()))
    made.put(*(Round(round=n, opened_at=0.0, status="closed") for n in range(1, length + 1)))
    made.put(*(Device(name=name) for name in statuses))
    for name, found in statuses.items():
        for number, one in enumerate(found, start=1):
            if one != "-":
                made.put(Update(round=number, device=name, update_id=f"{number}", received_at=0.0,
                                status="refused" if one == "r" else "counted", reason="" if one == "c" else "why"))
    return made


def test_who_is_named(tmp_path: Path) -> None:
    statuses = {
        "honest": "cccccccccccc", "hostile": "rrrrrrrrrrrr", "clipped": "kkkkkkkkkkkk", "late": "----------rr",
        "half": "rcrcrcrcrcrc", "better": "rrrcccccccccc"[:12], "mostly": "ccrrcrrcrrcr",
    }
    with ledger(tmp_path, {name: list(text) for name, text in statuses.items()}) as made:
        found = suspects(made)
        assert set(found) == {"hostile", "clipped", "mostly"}
        assert found["hostile"] == "10 of its last 10 updates were refused or clipped away: why"
        made.set_facts(**{RELEASED: json.dumps({"hostile": 9, "mostly": 12})})
        assert set(suspects(made)) == {"clipped", "hostile"}
        assert suspects(made)["hostile"].startswith("3 of its last 3")


@pytest.mark.slow
def test_an_operator_quarantines_a_device_that_status_names_and_releases_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    lie(monkeypatch, {"d2": -100.0})
    w = fleet(tmp_path)
    folder = w.fleet.folder
    assert w.pump(partial(closed, w, 3))
    commands.status(folder)
    assert "d2: 3 of its last 3 updates were refused or clipped away: the norm of its body" in capsys.readouterr().out
    commands.status(folder, as_json=True)
    assert set(json.loads(capsys.readouterr().out)["suspects"]) == {"d2"}

    devices.devices_quarantine(folder, "d2", as_json=True)
    assert json.loads(capsys.readouterr().out) == {"device": "d2", "asked": "quarantine", "aggregator": "off"}
    assert devices.pending_requests(w.server.ledger) == {"d2": "quarantine"}
    w.pump(lambda: "d2" in w.server._members.quarantined)
    before = w.closed()
    assert w.pump(partial(closed, w, before + 2))
    assert asked(w, before + 2) == {"d0", "d1", "d3"}
    assert w.server.checkpoint.facts["members"] == "3"
    check_duals(w, feedback=False)
    commands.status(folder)
    out = capsys.readouterr().out
    assert "d2 is quarantined: an operator asked for it; to ask it again: metafleet devices release" in out
    devices.devices_list(folder)
    assert "enrolled, quarantined" in capsys.readouterr().out

    w.kill_server()
    w.start_server()
    assert set(w.server._members.quarantined) == {"d2"}, "also after a restart"
    devices.devices_release(folder, "d2")
    assert w.pump(lambda: not w.server._members.quarantined)
    before = w.closed()
    assert w.pump(partial(closed, w, before + 2))
    assert "d2" in asked(w, before + 2)
    check_duals(w, feedback=False)
    w.close()


def test_an_update_of_the_open_round_is_withdrawn_with_its_device(tmp_path: Path) -> None:
    w = fleet(tmp_path)
    assert w.pump(partial(closed, w, 1))
    late = w.agents.pop("d3")
    assert w.pump(lambda: w.server.open is not None and len(w.server.open.received) == 3)
    number = w.server.open.number
    devices.devices_quarantine(w.fleet.folder, "d2")
    assert w.pump(lambda: "d2" in w.server._members.quarantined)
    w.kill_server()
    w.start_server()
    w.agents["d3"] = late
    assert w.pump(partial(closed, w, number))
    counted = {row.device for row in w.server.ledger.rows(Update, round=number, status="counted")}
    assert counted == {"d0", "d1", "d3"}
    w.close()


@pytest.mark.slow
def test_by_rule(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lie(monkeypatch, {"d1": -100.0})
    w = fleet(tmp_path, "quarantine = true")
    assert w.pump(partial(closed, w, 6))
    assert [("d1" in asked(w, number)) for number in range(1, 7)] == [True] * 3 + [False] * 3
    why = fleet_status.facts(Fleet.load(w.fleet.folder), w.server.ledger)["quarantined"]["d1"]
    assert why.startswith("3 of its last 3 updates were refused")
    assert w.logged("d1 is quarantined, no round asks it: 3 of its last 3")
    w.close()


def test_not_by_rule_where_honest_updates_are_dropped_in_every_round(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"robust\.quarantine: not with the rule krum"):
        world(tmp_path, f'{config_text("fedavg")}\n[robust]\nrule = "krum"\nquarantine = true\n')


def test_a_device_that_there_is_not_is_named(tmp_path: Path) -> None:
    w = fleet(tmp_path)
    assert w.pump(partial(closed, w, 1))
    with pytest.raises(ConfigError, match="no device 'd9'"):
        devices.devices_quarantine(w.fleet.folder, "d9")
    w.close()
