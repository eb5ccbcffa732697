"""An agent or the aggregator with the embedded broker is killed: the run ends as an undisturbed one, bit for bit. The
broker is the aggregator's child: it dies with it and restarts without retained messages."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from fleet_core.link.interface import Message
from fleet_core.link.mqtt import parse_url
from fleet_core.protocol import topics
from tests.support.brokers import accepts_connections, free_port, refuses_connections
from tests.support.fleet_processes import FLEET, Processes, check_end, json_of, processes, reference_run, tiny_fleet

pytestmark = pytest.mark.slow

DEVICE = "d1"
ROUNDS = 6  # two for each step: one may be over before it is awaited

Step = Callable[[Message], bool]

STEPS: dict[str, Step] = {
    "it trains": lambda m: m.topic == topics.presence(FLEET, DEVICE) and json_of(m).get("ph") == "train",
    "the first chunk comes": lambda m: m.topic.startswith(f"fl1/{FLEET}/a/{DEVICE}/up/") and m.topic.endswith("/0"),
    "it is told done": lambda m: m.topic == topics.down(FLEET, DEVICE) and json_of(m).get("t") == "done",
}


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_fleet(tmp_path_factory.mktemp("founded"), rounds=ROUNDS)


@pytest.fixture(scope="module")
def whole(founded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference_run(founded, tmp_path_factory.mktemp("whole") / "run")


def start_server(running: Processes) -> None:
    running.start("server")
    running.until(lambda: accepts_connections(parse_url(running.url).port), "the embedded broker")
    running.watcher.link.abort()
    running.watcher.renew()


def end_one(running: Processes, victim: str) -> None:
    """SIGKILL and restart, as a service manager does."""
    running.kill(victim)
    if victim != "server":
        return running.start(victim)
    running.until(lambda: refuses_connections(parse_url(running.url).port), "the end of the broker with its aggregator")
    start_server(running)


@pytest.mark.parametrize(
    ("victim", "steps"),
    [(DEVICE, tuple(STEPS)), *(("server", (step,)) for step in list(STEPS)[1:])],  # each death lengthens the backoff
    ids=lambda part: part if isinstance(part, str) else ", ".join(part),
)
def test_a_kill_changes_nothing(
    founded: Path, whole: Path, tmp_path: Path, victim: str, steps: tuple[str, ...]
) -> None:
    folder = shutil.copytree(founded, tmp_path / "run")
    with processes(folder, f"mqtt://127.0.0.1:{free_port()}", hosts_broker=True) as running:
        start_server(running)
        running.start(*running.devices())
        for name in steps:
            running.message(STEPS[name], what=name)
            end_one(running, victim)
        running.finish()
        assert "broker: amqtt at" in running.programs.started[0].text()
    check_end(folder, whole)
