"""An agent that personalizes by gradient steps learns samples that were added between rounds."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from cloud_server.results.evaluations import evaluated
from edge_agent.compute import adapter
from edge_agent.compute.worker import Done, Inline
from edge_agent.inference.service import Service
from edge_agent.rounds.served_model_update import BETWEEN_S, QUIET_S, AddedSamples
from fleet_core.model import graph_bundle
from fleet_core.protocol.round_messages import Manifest
from tests.support import homes
from tests.support.inprocess import Clock, World, config_text, toy, world

LOOKS_S = 6.0  # after which an agent looks again
CLASSES = ("a", "b", "c")


def ended(folder: Path) -> World:
    """A fleet of FedAvg after its last round, whose devices have taken gradient steps; d2 has no trainer."""
    made = world(folder, config_text("fedavg-meta", rounds=1, devices=2))
    (made.fleet.folder / "graph.safetensors").write_bytes(graph_bundle.pack(homes.graph_for("fedavg-meta")))
    made.start_server()
    for number in range(3):
        made.start_agent(f"d{number}", toy(number), trainer=number != 2)
    assert made.pump(lambda: evaluated(made.server.ledger, 1) == {"d0", "d1", "d2"})
    made.clock.seconds += BETWEEN_S
    settle(made, 3 * LOOKS_S)
    assert not made.logged("personalized again")
    return made


def settle(fleet: World, seconds: float) -> None:
    """Lets time pass, in which the agents look at what was added."""
    until = fleet.clock.seconds + seconds
    while fleet.clock.seconds < until:
        fleet.clock.seconds += LOOKS_S
        for _ in range(4):
            fleet.step(0.02)


def add(fleet: World, count: int, name: str = "d0", *, right: bool = True) -> None:
    """Adds samples as another process does. right: with their own labels, else with the next class."""
    samples = toy(50 + count, count)
    service = fleet.agents[name].service
    with service.slots.writing():
        service.local().add(samples.x, [CLASSES[(y + (not right)) % 3] for y in samples.y])


def personal(service: Service) -> tuple[int, str, bytes]:
    """(added samples that were learned, personalizer, its arrays)."""
    now = service.answering
    assert now is not None
    found = service.stored.personalization(now.slot)
    assert found is not None
    return found.settings["added"], found.how, b"".join(found.arrays[key].tobytes() for key in sorted(found.arrays))


@pytest.mark.slow
def test_samples_that_come_together_are_learned_together_a_minute_after_the_last(tmp_path: Path) -> None:
    fleet = ended(tmp_path)
    service = fleet.agents["d0"].service
    before = personal(service)
    x = toy(9, 5).x
    answers = service.predict(x)
    assert before[0] == 0
    add(fleet, 3)
    settle(fleet, QUIET_S - 2 * LOOKS_S)
    add(fleet, 4)
    settle(fleet, QUIET_S - 2 * LOOKS_S)
    assert personal(service) == before
    settle(fleet, 3 * LOOKS_S)
    after = personal(service)
    assert (after[0], after[1]) == (7, before[1])
    assert after[2] != before[2]
    assert not np.array_equal(service.predict(x), answers)
    assert sum("d0: personalized again, with 7 added samples" in line for line in fleet.lines) == 1
    add(fleet, 2)
    settle(fleet, BETWEEN_S - QUIET_S)
    assert personal(service) == after, "not so soon after the last steps"
    settle(fleet, QUIET_S + LOOKS_S)
    assert personal(service)[0] == 9
    settle(fleet, 2 * BETWEEN_S)
    assert sum("personalized again" in line for line in fleet.lines) == 2, "nothing new, no steps"
    fleet.close()


@pytest.mark.slow
def test_a_device_without_a_trainer_takes_the_steps_by_the_graph(tmp_path: Path) -> None:
    fleet = ended(tmp_path)
    add(fleet, 3, "d2")
    settle(fleet, BETWEEN_S + QUIET_S)
    assert personal(fleet.agents["d2"].service)[0] == 3
    assert fleet.logged("d2: personalized again, with 3 added samples")
    fleet.close()


@pytest.mark.slow
def test_the_first_samples_of_a_device_are_learned_without_another_round(tmp_path: Path) -> None:
    fleet = ended(tmp_path)
    fleet.start_agent("bare", trainer=False)
    assert fleet.pump(lambda: fleet.logged("bare: serve: "))
    service = fleet.agents["bare"].service
    assert service.answering is not None
    assert service.answering.how == "none"
    settle(fleet, BETWEEN_S)
    add(fleet, 30, "bare")
    settle(fleet, BETWEEN_S + QUIET_S)
    assert personal(service)[:2] == (30, "sgd")
    fleet.close()


@pytest.mark.slow
def test_samples_that_make_answers_worse_change_nothing_and_are_tried_once(tmp_path: Path) -> None:
    fleet = ended(tmp_path)
    service = fleet.agents["d0"].service
    before = personal(service)
    add(fleet, 300, right=False)
    settle(fleet, 2 * BETWEEN_S)
    assert personal(service) == before
    assert service.rolled_back is None
    said = [line for line in fleet.lines if "not personalized again, with 300 added samples: " in line]
    assert len(said) == 1
    fleet.close()


@pytest.mark.slow
def test_steps_and_a_rounds_training_are_never_at_the_same_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A round that opens while the steps are taken waits for them."""
    made = ended(tmp_path)
    agent = made.agents["d2"]
    tasks = agent._tasks

    class Slow(Inline):
        """Ends when it is told."""

        free = False

        def poll(self) -> Done | None:
            return super().poll() if self.free else None

    slow = tasks._adapter = tasks.serving._adapter = Slow(adapter.handle)
    add(made, 3, "d2")
    settle(made, QUIET_S + 3 * LOOKS_S)
    assert tasks.busy_workers() == [slow]
    manifest = agent.manifest
    assert manifest is not None
    began: list[Manifest] = []
    monkeypatch.setattr(tasks.training, "wanted", lambda manifest: True)
    monkeypatch.setattr(tasks, "_take_part", began.append)
    tasks.advance()
    assert began == []
    slow.free = True
    assert made.pump(lambda: bool(began))
    assert personal(agent.service)[0] == 3
    add(made, 4, "d2")
    settle(made, BETWEEN_S + 2 * QUIET_S)
    assert tasks.busy_workers() == [], "while training is wanted, no steps begin"
    made.close()


def test_who_adds_without_a_pause_waits_ten_minutes() -> None:
    clock = Clock()
    added = AddedSamples(clock)
    for second in range(int(BETWEEN_S)):
        clock.seconds = 1000.0 + second
        assert not added.due(second)
    clock.seconds = 1000.0 + BETWEEN_S
    assert added.due(9999)
    added.stepped()
    added.learned()
    clock.seconds += 2 * BETWEEN_S
    assert not added.due(9999)
