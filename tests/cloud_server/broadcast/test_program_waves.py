"""Updates that devices fetch, wave by wave: going on, halting, resuming, and an aggregator that is killed anywhere."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cloud_server.identity import audit_log
from cloud_server.records import signing_keys, update_record
from cloud_server.records.fleet_folder import Fleet
from edge_agent.rounds import reports
from firmware_profiles.pulled.update_package import UpdatePackage
from fleet_core.protocol import topics
from fleet_core.protocol.signing import key_id, load_public
from tests.support.deaths import Death, deadly
from tests.support.fake_root import an_update
from tests.support.inprocess import Killed, config_text, without_fsync, world
from tests.support.updating import NEW, UpdatingFleet, begin, signing

pytestmark = pytest.mark.slow

NAMES = ("a", "b", "c")
Make = Callable[..., UpdatingFleet]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    without_fsync(monkeypatch)

    def made(answers: dict[str, tuple[str, str]] | None = None) -> UpdatingFleet:
        w = world(tmp_path, config_text(devices=99))
        w.start_server()
        fleet = UpdatingFleet(w, NAMES, answers)
        monkeypatch.setattr(reports, "running", fleet.running)
        fleet.until(lambda: len([d for d in w.server.ledger.devices() if d.capabilities.get("update")]) == len(NAMES))
        return fleet

    return made


def package(fleet: UpdatingFleet, **options: Any) -> UpdatePackage:
    return an_update(fleet.world.folder, NEW, signing=signing(fleet.world), **options)


def retained(fleet: UpdatingFleet) -> list[str]:
    """The topics of the program at the broker."""
    top = fleet.world.name
    return [topic for topic, payload in fleet.world.broker.retained.items()
            if payload and topic.startswith((topics.program(top), topics.blobs(top).rstrip("#")))]


def test_waves_follow_each_other_and_nothing_of_the_program_stays_at_the_broker(make: Make) -> None:
    fleet = make()
    before = set(retained(fleet))
    fleet.begin(package(fleet), NAMES, sizes=(1, 2))
    fleet.until(lambda: fleet.st == "running" and fleet.update.devices["a"].st == "done")
    assert [fleet.update.devices[name].wave for name in NAMES] == [0, 1, 1]
    fleet.until(lambda: fleet.st == "ended")
    assert set(fleet.versions.values()) == {NEW}
    fleet.until(lambda: set(retained(fleet)) <= before)
    told = [entry["text"] for entry in audit_log.read(fleet.world.fleet.folder) if entry["action"] == "update"]
    assert [text.partition(": ")[2].partition(":")[0].partition(",")[0] for text in told] == [
        "begun for 3 devices", "wave 1", "wave 2", "ended"]


@pytest.mark.parametrize("outcome", ["back", "refused"])
def test_a_failure_halts_the_waves_with_its_reason_and_resume_tries_again(make: Make, outcome: str) -> None:
    fleet = make({"a": (outcome, "it does not start")})
    fleet.begin(package(fleet), NAMES, sizes=(1,))
    fleet.until(lambda: fleet.st == "halted")
    assert "it does not start" in fleet.update.devices["a"].why
    assert fleet.update.of("waiting") == ["b", "c"]
    assert [version == NEW for version in fleet.versions.values()] == [False, False, False]
    fleet.until(lambda: topics.program(fleet.world.name) not in retained(fleet))
    fleet.answers.clear()
    fleet.world.server.ledger.request("update", "resume 1")
    fleet.until(lambda: fleet.st == "ended")
    assert (fleet.update.attempt, fleet.update.of("done")) == (2, list(NAMES))


def test_as_many_failures_as_are_allowed_do_not_halt(make: Make) -> None:
    fleet = make({"a": ("back", "no")})
    fleet.begin(package(fleet), NAMES, sizes=(1,), most_failures=1)
    fleet.until(lambda: fleet.st == "ended")
    assert (fleet.update.of("failed"), fleet.update.of("done")) == (["a"], ["b", "c"])


def test_a_device_that_says_nothing_in_time_has_failed(make: Make) -> None:
    fleet = make({"a": ("silent", "")})
    fleet.begin(package(fleet), NAMES, sizes=(1,), within_s=100.0)
    fleet.until(lambda: fleet.st == "halted")
    assert fleet.update.devices["a"].why.startswith("not done within 100 s: it is installing")


def test_an_operator_ends_an_update(make: Make) -> None:
    fleet = make({"a": ("silent", "")})
    fleet.begin(package(fleet), NAMES, sizes=(1,))
    fleet.until(lambda: (fleet.home("a") / "update/asked").exists())
    fleet.world.server.ledger.request("update", "abort 1")
    fleet.until(lambda: fleet.st == "aborted" and topics.program(fleet.world.name) not in retained(fleet))
    assert fleet.versions["b"] != NEW


def test_a_device_for_another_system_tells_why_it_refuses(make: Make) -> None:
    fleet = make()
    fleet.begin(package(fleet, arch="riscv64"), NAMES, sizes=(1,))
    fleet.until(lambda: fleet.st == "halted")
    assert "refused it: the program is for riscv64" in fleet.update.devices["a"].why
    assert fleet.world.server.ledger.device("a").capabilities["update"]["st"] == "refused"


def test_a_package_that_is_gone_halts_the_update_and_not_the_aggregator(make: Make) -> None:
    fleet = make()
    made = package(fleet)
    fleet.begin(made, NAMES)
    for path in (fleet.world.fleet.folder / update_record.FOLDER).glob("*/program.tar.gz"):
        path.unlink()
    fleet.until(lambda: fleet.st == "halted")
    assert "cannot be read" in fleet.update.why


def test_an_aggregator_killed_at_any_write_row_or_publish_goes_on_with_its_waves(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make()
    w = fleet.world
    death = Death("server", None, w)
    deadly(monkeypatch, death)
    begin(w.fleet.folder, w.server.ledger, package(fleet), NAMES, sizes=(1, 2))
    deaths = 0
    for at in (1, 2, 3, 4, 5, 6, 8, 10, 13, 17, 22, 30, 40):  # acts since the last restart
        death.points, death.at = 0, at
        try:
            for _ in range(400):
                if fleet.st == "ended":
                    break
                fleet.step()
        except Killed:
            deaths += 1
            w.kill_server()
            death.at = None
            w.acting = ""
            w.start_server()
    death.at = None
    fleet.until(lambda: fleet.st == "ended")
    assert deaths >= 5
    assert set(fleet.versions.values()) == {NEW}
    assert fleet.update.attempt == 1
    fleet.until(lambda: topics.program(w.name) not in retained(fleet))


# Another key of the fleet ---------------------------------------------------------------------------------------------


def rolled(fleet: UpdatingFleet, monkeypatch: pytest.MonkeyPatch) -> str:
    """Rolls the fleet's key over and returns the new one; devices were given the first."""
    folder, first = fleet.world.fleet.folder, fleet.world.fleet.public_key()
    monkeypatch.setattr(Fleet, "public_key", lambda made: first)
    return signing_keys.roll(folder, fleet.world.name, fleet.world.clock.wall(), overlap_s=1000.0).new


def signs(fleet: UpdatingFleet, key: str) -> bool:
    return load_public(fleet.world.fleet.folder / "fleet.pub") == key


def test_devices_that_followed_another_key_fetch_what_it_has_signed(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make()
    new = rolled(fleet, monkeypatch)
    fleet.until(partial(signs, fleet, new))
    fleet.begin(package(fleet), NAMES, sizes=(1, 2))
    fleet.until(lambda: fleet.st == "ended")
    assert fleet.update.of("done") == list(NAMES)
    assert not fleet.world.logged("refused")


def test_a_wave_that_is_under_way_is_announced_again_when_another_key_signs(
    make: Make, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = make({"a": ("silent", "")})
    fleet.begin(package(fleet), NAMES, sizes=(1, 2))
    topic = topics.program(fleet.world.name)
    fleet.until(lambda: fleet.world.broker.retained.get(topic))
    new = rolled(fleet, monkeypatch)
    fleet.until(partial(signs, fleet, new))
    fleet.until(lambda: fleet.world.broker.retained[topic].split(b":")[1].decode() == key_id(new))
    assert fleet.update.devices["a"].st == "going"
