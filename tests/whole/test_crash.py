"""Real processes on a real mosquitto are killed at any moment: the run ends as an undisturbed one does, bit for bit."""

from __future__ import annotations

import os
import random
import shutil
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest

from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device, Update
from fleet_core.link.interface import Message
from fleet_core.protocol import topics
from tests.support.brokers import NEEDS_MOSQUITTO
from tests.support.faults import Mosquitto, Proxy, mosquitto
from tests.support.fleet_processes import (
    FLEET,
    LONG,
    Processes,
    check_duals,
    check_end,
    json_of,
    processes,
    reference_run,
    tiny_fleet,
)
from tests.support.stepped_fleet import SteppedFleet, stepped

pytestmark = [NEEDS_MOSQUITTO, pytest.mark.slow]

ROUNDS = 100 if LONG else 16  # two for each step: one may be over before it is awaited
RANDOM_KILLS = 60 if LONG else 6
SEED = int(os.environ.get("METAFLEET_SEED", "1"))
ONNX, DEVICE = "d0", "d1"
"""The device that trains without torch, in its own process, and the one with a trainer."""

Step = Callable[[Message], bool]


def steps_of(device: str) -> dict[str, Step]:
    """What happens to a device in any round, in order."""

    def part(part: int | str) -> Step:
        return lambda m: m.topic.startswith(f"fl1/{FLEET}/a/{device}/up/") and m.topic.endswith(f"/{part}")

    def down(kind: str) -> Step:
        return lambda m: m.topic == topics.down(FLEET, device) and json_of(m).get("t") == kind

    return {
        "a round is announced, with what was counted": lambda m: m.topic == topics.current(FLEET) and not m.retain,
        "it trains": lambda m: m.topic == topics.presence(FLEET, device) and json_of(m).get("ph") == "train",
        "it offers": part("m"),
        "it is granted chunks": down("need"),
        "the first chunk comes": part(0),
        "another chunk comes": part(1),
        "it is told done": down("done"),
    }


STEPS = steps_of(DEVICE)


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A fleet of two devices that has not run yet; one trains with torch, one without."""
    return tiny_fleet(tmp_path_factory.mktemp("founded"), rounds=ROUNDS, onnx=(ONNX,))


@pytest.fixture(scope="module")
def whole(founded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The same fleet after a run without faults."""
    return reference_run(founded, tmp_path_factory.mktemp("whole") / "run")


@contextmanager
def fleet_of(founded: Path, folder: Path, *, without: str = "") -> Iterator[tuple[Mosquitto, Processes]]:
    shutil.copytree(founded, folder)
    with mosquitto(folder.with_name("broker")) as broker, processes(folder, broker.url) as running:
        running.start("server", *(name for name in running.devices() if name != without))
        yield broker, running


def end_one(broker: Mosquitto, running: Processes, victim: str, *, forget: bool = True) -> None:
    """SIGKILL and restart, as a service manager does."""
    if victim == "broker":
        broker.kill(forget=forget)
        broker.start()
        running.watcher.link.abort()
        running.watcher.renew()
        return
    running.kill(victim)
    if victim in ("server", *running.devices()):
        running.start(victim)


@pytest.mark.parametrize("victim", [DEVICE, ONNX, "server", "broker"])
def test_a_kill_at_every_step_of_the_protocol_changes_nothing(
    founded: Path, whole: Path, tmp_path: Path, victim: str
) -> None:
    with fleet_of(founded, tmp_path / "run") as (broker, running):
        for count, (name, step) in enumerate(steps_of(ONNX if victim == ONNX else DEVICE).items()):
            running.message(step, what=name)
            end_one(broker, running, victim, forget=count % 2 == 0)
        running.finish()
    check_end(tmp_path / "run", whole)


def test_a_trainer_that_is_killed_at_work_costs_only_time(founded: Path, whole: Path, tmp_path: Path) -> None:
    with fleet_of(founded, tmp_path / "run") as (_, running):
        for name in ("it trains", "it is told done"):
            running.message(STEPS[name], what=name)
            running.until(lambda: running.trainers(DEVICE), what="a trainer")
            running.kill(f"{DEVICE}'s trainer")
        running.finish()
        assert "the trainer process ended with exit code -9" in running.log_of(DEVICE)
    check_end(tmp_path / "run", whole)


def test_kills_at_random_moments_change_nothing(founded: Path, whole: Path, tmp_path: Path) -> None:
    draw = random.Random(SEED)
    print(f"METAFLEET_SEED={SEED}")
    with fleet_of(founded, tmp_path / "run") as (broker, running):
        running.until(lambda: running.closed() >= 1, what="the first round")
        for _ in range(RANDOM_KILLS):
            at_s = time.monotonic() + draw.uniform(0, 0.8)
            running.until(partial(passed, at_s))
            victim = draw.choice([ONNX, ONNX, DEVICE, f"{DEVICE}'s trainer", "server", "broker"])
            print(f"round {running.closed() + 1}: {victim}")
            end_one(broker, running, victim, forget=draw.random() < 0.5)
        running.finish()
    check_end(tmp_path / "run", whole)


def passed(at_s: float) -> bool:
    return time.monotonic() > at_s


# The identity of the duals, after every round -------------------------------------------------------------------------

VICTIMS = [DEVICE, "broker", "server", f"{DEVICE}'s trainer"]
MOMENTS = ("m", "need", "0", "1", "done")
GATE = "d2"


def test_the_servers_dual_is_the_mean_of_the_devices_after_every_round_whoever_dies(tmp_path: Path) -> None:
    """No round closes without the third device, which continues only after the test has read all disks."""
    founded = tiny_fleet(tmp_path / "founded", rounds=len(VICTIMS), devices=3)
    folder, draw = tmp_path / "run", random.Random(SEED)
    with fleet_of(founded, folder, without=GATE) as (broker, running), stepped(folder, broker.url) as gate:
        gate.start_agent(GATE)
        for number, victim in enumerate(VICTIMS, 1):
            moment = draw.choice(MOMENTS)
            gate_at_work(running, gate, partial(announced, running, number))
            running.until(partial(reached, running, number, moment), what=f"{moment} of round {number}")
            end_one(broker, running, victim)
            assert running.closed() == number - 1
            if number > 1:
                check_duals(folder)
        gate_at_work(running, gate, running.settled)
        running.finish()
    check_end(folder, reference_run(founded, tmp_path / "whole"))


def gate_at_work(running: Processes, gate: SteppedFleet, condition: Callable[[], bool]) -> None:
    """Let the third device take part until ``condition`` holds."""

    def after_a_step() -> bool:
        gate.step()
        return condition()

    running.until(after_a_step, what="what the third device waits for")


def announced(running: Processes, number: int) -> bool:
    return any(m.topic == topics.current(FLEET) and json_of(m).get("round") == number for m in running.watcher.seen)


def reached(running: Processes, number: int, moment: str) -> bool:
    """Whether the device has reached this point of the round: part of an upload, or a message to it."""
    return any(
        m.topic == topics.upload(FLEET, DEVICE, number, moment)
        or (m.topic == topics.down(FLEET, DEVICE) and (json_of(m).get("t"), json_of(m).get("r")) == (moment, number))
        for m in running.watcher.seen
    )


# Devices that die and stay away for a while --------------------------------------------------------------------------


def test_dead_devices_are_noticed_and_the_round_closes_on_quorum(tmp_path: Path) -> None:
    """A killed device is noticed by its will; a silent one, as after a power cut, by its silence at work. The deadline
    is an hour away. tests/cloud_server/rounds/test_fleet.py tests how many seconds it takes by the aggregator's
    clock."""
    founded = tiny_fleet(tmp_path / "founded", rounds=5, quorum=0.5, deadline_s=3600.0)
    trains = STEPS["it trains"]
    with fleet_of(founded, tmp_path / "run") as (_, running):
        running.message(trains, what="d1 trains")
        running.kill(DEVICE)
        presence = topics.presence(FLEET, DEVICE)
        running.message(lambda m: m.topic == presence and json_of(m).get("st") == "off", "its will")
        running.until(lambda: state_of(running, DEVICE) == "off", "the ledger's off")
        running.until(lambda: running.closed() >= 1, "a round without d1")

        running.start(DEVICE)
        running.message(trains, what="d1 trains again")
        os.kill(running.running[DEVICE].process.pid, signal.SIGSTOP)
        try:
            number = running.closed() + 1
            running.until(lambda: running.closed() >= number, "the round that d1 was in")
        finally:
            os.kill(running.running[DEVICE].process.pid, signal.SIGCONT)
        running.finish()
        assert "at the deadline" not in running.log_of("server")


def test_an_update_that_comes_after_the_close_is_late_and_without_effect(tmp_path: Path) -> None:
    """The network delays the update, it does not lose it: the update arrives during the next round. The other device is
    delayed until then, because a round ends without a device that still trains."""
    folder = tiny_fleet(tmp_path / "run", rounds=3, quorum=0.5, deadline_s=2.0)
    with (
        mosquitto(tmp_path / "broker") as broker,
        Proxy(broker.port) as proxy,
        Proxy(broker.port) as others,
        processes(folder, broker.url) as running,
    ):
        running.urls |= {DEVICE: proxy.url, "d0": others.url}
        running.start("server", "d0", DEVICE)
        running.until(seen(running, "a round is announced, with what was counted"), what="round 1")
        others.faults.half_open = True
        running.until(seen(running, "it trains"), what="d1 trains")
        proxy.faults.half_open = True
        running.until(lambda: list(folder.glob(f"{DEVICE}/methods/*/pending.safetensors")), what="an update of d1")
        others.faults.half_open = False
        running.until(lambda: running.closed() >= 1, "a round without d1")
        proxy.faults.half_open = False
        running.until(lambda: fate(folder, 1, DEVICE) is not None, "what d1 sent")
        running.finish()
    assert [fate(folder, 1, name) for name in ("d0", DEVICE)] == ["counted", "late"]
    assert fate(folder, 3, DEVICE) == "counted", "it is one of the fleet as before"
    check_duals(folder)


def seen(running: Processes, step: str) -> Callable[[], bool]:
    """Whether such a message has been seen since the processes started."""
    return lambda: any(STEPS[step](message) for message in running.watcher.seen)


def fate(folder: Path, number: int, device: str) -> str | None:
    """The status of a device's update in the ledger."""
    with Ledger(folder / "fleet" / "ledger.sqlite", create=False) as ledger:
        rows = ledger.rows(Update, round=number, device=device)
    return rows[0].status if rows else None


def state_of(running: Processes, device: str) -> str:
    with Ledger(running.folder / "fleet" / "ledger.sqlite", create=False) as ledger:
        return ledger.rows(Device, name=device)[0].state
