"""A first fleet does not stall: the wait before round 1, devices that arrive one by one, and devices that fail in
it."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from dataclasses import fields
from pathlib import Path
from typing import Any

import pytest

from cloud_server.choices.first_settings import HEAD
from cloud_server.identity.create_fleet import create_fleet
from cloud_server.ledger.ledger_tables import Invitation, Update
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.fleet_settings import NOTES, FleetConfig, FleetSection, KeepSection, LinkSection
from edge_agent.compute.trainer import InlineTrainer
from edge_agent.compute.worker import Job
from fleet_core.base import config, schema
from tests.support.inprocess import World, config_text, toy, world
from tests.support.paths import ROOT
from tests.support.programs import small_fleet
from tests.support.world_checks import check_duals, settled

pytestmark = pytest.mark.usefixtures("no_fsync")

TICK_S = 0.1


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(method: str = "pfldyn-proto", **options: Any) -> World:
        made.append(world(tmp_path / str(len(made)), config_text(method, **{"devices": 1, **options})))
        return made[-1]

    yield make
    for each in made:
        each.close()


class Never(InlineTrainer):
    """A trainer that never finishes."""

    def submit(self, job: Job) -> None:
        pass

    @property
    def busy(self) -> bool:
        return True

    def poll(self) -> None:
        return None


def counted(w: World, number: int) -> set[str]:
    return {u.device for u in w.server.ledger.rows(Update, round=number, status="counted")}


def start(w: World, devices: int) -> None:
    w.start_server()
    for n in range(devices):
        w.start_agent(f"d{n}", toy(n))


def opened(w: World, number: int) -> bool:
    return w.server is not None and w.server.open is not None and w.server.open.number == number


def seconds(w: World, until: Callable[[], bool]) -> float:
    began = w.clock.seconds
    assert w.pump(until, tick_s=TICK_S), w.lines
    return w.clock.seconds - began


def enroll(w: World, *names: str) -> None:
    for name in names:
        w.server.ledger.request(f"enroll/{name}", "1.0")
    assert w.pump(lambda: not w.server.ledger.requests(), tick_s=TICK_S)


# Before round 1 -----------------------------------------------------------------------------------------------------


def test_round_1_waits_for_enrolled_devices_and_begins_when_the_last_of_them_is_on(fleet):
    w = fleet()
    w.start_server()
    enroll(w, "d0", "d1", "d2", "d3")
    for n in range(3):
        w.start_agent(f"d{n}", toy(n))
        for _ in range(50):
            w.step(TICK_S)
    assert not opened(w, 1)
    assert w.closed() == 0
    assert w.logged("round 1 waits up to 30 s for d1, d2, d3 (1 of 4 enrolled devices on; first_wait_s in fleet.toml")
    w.start_agent("d3", toy(3))
    assert seconds(w, lambda: opened(w, 1) or w.closed() == 1) < 1
    assert w.pump(lambda: w.closed() == 1, tick_s=TICK_S)
    assert counted(w, 1) == {"d0", "d1", "d2", "d3"}


def test_round_1_begins_without_those_that_do_not_come_in_time_and_they_join_later(fleet):
    w = fleet(rounds=40)
    w.start_server()
    enroll(w, "d0", "d1")
    w.start_agent("d0", toy(0))
    assert 29 < seconds(w, lambda: w.closed() == 1) < 34
    assert w.logged("round 1 begins: 1 of 2 enrolled devices on")
    w.start_agent("d1", toy(1))
    assert seconds(w, lambda: "d1" in counted(w, w.closed())) < 5
    assert w.logged("begins: 2 of 2 enrolled devices on")


def test_round_1_waits_for_a_device_that_a_token_waits_for(fleet):
    w = fleet()
    w.start_server()
    invited = Invitation(id="0" * 32, device="d9", public="p", made_at=0.0, expires_at=9e9)
    w.server.ledger.put(invited)
    w.start_agent("d0", toy(0))
    assert seconds(w, lambda: w.logged("round 1 waits up to 30 s for d9")) < 2
    assert 28 < seconds(w, lambda: w.closed() == 1) < 34


@pytest.mark.parametrize("wait", ["", "first_wait_s = 0"])
def test_nothing_waits_where_nobody_was_enrolled_or_the_wait_is_0(fleet, wait):
    w = fleet(fleet=wait)
    w.start_server()
    if wait:
        enroll(w, "d0", "d1")
    w.start_agent("d0", toy(0))
    assert seconds(w, lambda: w.closed() == 1) < 2
    assert not w.logged("waits up to")


def test_what_min_devices_waits_for_is_reported_once(fleet):
    w = fleet(devices=3)
    w.start_server()
    w.start_agent("d0", toy(0))
    for _ in range(60):
        w.step(TICK_S)
    said = [line for line in w.lines if "min_devices" in line]
    assert said == ["round 1 begins when 3 devices are on and can train (min_devices in fleet.toml): "
                    "1 of 1 enrolled devices on"]


# In a round -----------------------------------------------------------------------------------------------------------


def test_a_first_device_without_samples_holds_up_nobody_who_comes_later(fleet):
    w = fleet(rounds=2)
    w.start_server()
    w.start_agent("d0")
    assert w.pump(lambda: w.logged("they are asked again in 120 s"), tick_s=TICK_S)
    for n in range(1, 4):
        w.start_agent(f"d{n}", toy(n))
    assert seconds(w, lambda: w.closed() == 2) < 5
    assert counted(w, 2) == {"d1", "d2", "d3"}
    assert w.logged("round 1: no update will come from d0; asked instead: d1")


def test_a_first_device_that_dies_holds_up_the_others_for_its_grace_and_no_longer(fleet):
    w = fleet(rounds=2)
    w.start_server()
    w.start_agent("d0", toy(0))
    w.trainers["d0"].inner = Never()
    assert w.pump(lambda: opened(w, 1), tick_s=TICK_S)
    w.kill_agent("d0")
    for n in range(1, 4):
        w.start_agent(f"d{n}", toy(n))
    assert 4 < seconds(w, lambda: w.closed() == 1) < 8
    assert counted(w, 1) == {"d1", "d2", "d3"}
    w.start_agent("d0")
    assert w.pump(lambda: w.closed() == 2, tick_s=TICK_S)


def test_a_device_that_leaves_in_order_is_not_waited_for_at_all(fleet):
    w = fleet(rounds=1, devices=3)
    start(w, 3)
    w.trainers["d2"].inner = Never()
    assert w.pump(lambda: opened(w, 1) and len(w.server.open.received) == 2, tick_s=TICK_S)
    w.agents.pop("d2").close()
    assert seconds(w, lambda: w.closed() == 1) < 1
    assert counted(w, 1) == {"d0", "d1"}


def test_a_device_whose_connection_breaks_for_a_moment_is_still_counted(fleet):
    w = fleet(rounds=1, devices=3)
    start(w, 3)
    slow = w.trainers["d2"].inner
    w.trainers["d2"].inner = Never()
    assert w.pump(lambda: opened(w, 1) and len(w.server.open.received) == 2, tick_s=TICK_S)
    w.kill_agent("d2")
    for _ in range(30):
        w.step(TICK_S)
    assert w.closed() == 0, "three seconds"
    w.start_agent("d2")
    w.trainers["d2"].inner = slow
    assert w.pump(lambda: w.closed() == 1, tick_s=TICK_S)
    assert counted(w, 1) == {"d0", "d1", "d2"}


def test_one_that_is_on_and_silent_is_waited_for_until_the_deadline(fleet):
    w = fleet(rounds=1, devices=3, fleet="deadline_s = 20")
    start(w, 3)
    w.trainers["d2"].inner = Never()
    assert 19 < seconds(w, lambda: w.closed() == 1) < 22
    assert counted(w, 1) == {"d0", "d1"}


def test_others_take_the_places_of_the_gone_and_as_many_updates_are_needed_as_before(fleet):
    """Of four, three die: one update and one newcomer are each below the quorum of two, and enough together."""
    w = fleet(rounds=1, devices=4)
    start(w, 4)
    for n in range(1, 4):
        w.trainers[f"d{n}"].inner = Never()
    assert w.pump(lambda: opened(w, 1) and len(w.server.open.received) == 1, tick_s=TICK_S)
    for n in range(1, 4):
        w.kill_agent(f"d{n}")
    for _ in range(100):
        w.step(TICK_S)
    assert w.closed() == 0
    w.start_agent("d4", toy(4))
    assert w.pump(lambda: w.closed() == 1, tick_s=TICK_S)
    (row,) = w.server.ledger.rounds()
    assert len(row.cohort) == 4
    assert counted(w, 1) == {"d0", "d4"}


def test_a_round_whose_cohort_changed_continues_after_a_kill_with_what_was_received(fleet):
    w = fleet(rounds=1, devices=2, fleet="quorum = 1.0")
    start(w, 2)
    w.trainers["d1"].inner = Never()
    assert w.pump(lambda: opened(w, 1) and len(w.server.open.received) == 1, tick_s=TICK_S)
    w.kill_agent("d1")
    w.start_agent("d2", toy(2))
    w.trainers["d2"].inner = Never()
    assert w.pump(lambda: w.logged("asked instead: d2"), tick_s=TICK_S)
    w.kill_server()
    w.trainers["d2"].inner = InlineTrainer()
    w.kill_agent("d2")
    w.start_server()
    w.start_agent("d2")
    assert w.pump(lambda: w.closed() == 1, tick_s=TICK_S)
    assert counted(w, 1) == {"d0", "d2"}


@pytest.mark.slow
@pytest.mark.parametrize("killed", [False, True])
def test_the_servers_dual_is_the_devices_duals_when_a_newcomer_took_a_place_in_mid_run(fleet, killed):
    w = fleet(rounds=6, devices=2, fleet="quorum = 1.0", hyper="penalty = 0.1")
    start(w, 2)
    assert w.pump(lambda: opened(w, 3))
    w.trainers["d1"].inner = Never()
    assert w.pump(lambda: w.server.open is not None and len(w.server.open.received) == 1 and w.closed() >= 2)
    w.kill_agent("d1")
    w.start_agent("d2", toy(2))
    assert w.pump(lambda: w.logged("asked instead: d2"), tick_s=TICK_S)
    if killed:
        w.kill_server()
        w.start_server()
    assert w.pump(lambda: w.closed() == 6 and settled(w), tick_s=TICK_S)
    w.start_agent("d1")
    assert w.pump(lambda: w.agents["d1"].manifest is not None and settled(w), tick_s=TICK_S)
    assert w.server.checkpoint.state.dual_epoch == 0
    check_duals(w, feedback=True)


def test_devices_that_all_fail_are_asked_once_each_until_the_deadline(fleet):
    w = fleet(rounds=1, fleet="cohort = 2\ndeadline_s = 60")
    w.start_server()
    for n in range(5):
        w.start_agent(f"d{n}")
    for _ in range(300):
        w.step(TICK_S)
    assert sum("asked instead" in line for line in w.lines) == 2
    failures = [line for line in w.lines if line.startswith("round 1: d") and ": train: " in line]
    assert len(failures) <= 8


def test_a_late_joiner_takes_part_in_the_next_round_and_nothing_stalls(fleet):
    w = fleet(rounds=60, devices=2)
    start(w, 2)
    assert w.pump(lambda: opened(w, 3))
    w.start_agent("late", toy(7))
    assert seconds(w, lambda: "late" in counted(w, w.closed())) < 5


# fleet.toml -----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_made_fleet_toml_has_every_key_of_the_fleet_with_a_comment_above_it(tmp_path):
    text = (small_fleet(tmp_path / "fleet").folder / "fleet.toml").read_text()
    lines = text.splitlines()
    assert lines[0] == HEAD
    besides = {"up", "down", "skip_below", "rule", "share", "quarantine", "roll_back", "audit_files"}
    for key in schema.plain(FleetSection("x")).keys() | besides:
        at = next(n for n, line in enumerate(lines) if line.startswith(f"{key} = "))
        assert lines[at - 1].startswith("# ")
    assert all(len(line) < 120 for line in lines if line.startswith("#"))
    assert {note.partition(".")[2] for note in NOTES} <= {line.partition(" = ")[0] for line in lines}


@pytest.mark.parametrize(
    ("heading", "section"), [("fleet", FleetSection), ("link", LinkSection), ("keep", KeepSection)],
)
def test_the_page_about_fleet_toml_has_every_key_with_its_default(heading, section):
    page = (ROOT / "docs" / "fleet.md").read_text().partition(f"## `[{heading}]`")[2].partition("\n## ")[0]
    for key in fields(section):
        shown = re.search(rf"^\| `{key.name}` \| (.+?) \|", page, re.MULTILINE)
        assert shown, key.name
        if isinstance(key.default, (int, float)) and not isinstance(key.default, bool):
            assert float(shown[1]) == key.default


def test_a_made_fleet_toml_is_read_as_the_defaults_that_it_shows(tmp_path):
    made = small_fleet(tmp_path / "fleet", rounds=7)
    assert made.config.fleet == FleetSection("desk", rounds=7)
    assert made.config.link == LinkSection()
    again = config.parse(FleetConfig, config.toml(schema.plain(made.config), notes=NOTES), "again")
    assert again == made.config


@pytest.mark.slow
def test_init_again_accepts_a_fleet_toml_without_the_keys_that_are_written_now(tmp_path):
    made = small_fleet(tmp_path / "fleet")
    path = made.folder / "fleet.toml"
    text = path.read_text()
    left_out = ("#", "cohort", "quorum", "deadline_s", "first_wait_s", "serve_every", "enrolment", "rule", "quarantine",
                "roll_back", "audit_files")
    older = "\n".join(line for line in text.splitlines() if not line.startswith(left_out))
    path.write_text(older)
    assert create_fleet(made.folder, text, lambda settings, head: (b"", b"")).config == made.config
    assert path.read_text() == older


def test_more_rounds_in_fleet_toml_go_on_after_the_last_one(fleet):
    w = fleet(rounds=1)
    w.start_server()
    w.start_agent("d0", toy(0))
    assert w.pump(lambda: w.server.finished and w.server.settled)
    w.kill_server()
    path = w.fleet.folder / "fleet.toml"
    path.write_text(path.read_text().replace("rounds = 1", "rounds = 3", 1))
    w.fleet = Fleet.load(w.fleet.folder)
    w.start_server()
    assert w.pump(lambda: w.closed() == 3, tick_s=TICK_S)
    assert [counted(w, n) for n in (1, 2, 3)] == [{"d0"}] * 3
