"""benchmarks/auto: its page has the figures of its result, and what is evaluated was not seen before."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from benchmarks.auto import command, devices, old_choice, run
from benchmarks.auto.devices import Device, Set
from benchmarks.on_device import homes
from benchmarks.on_device.cases import Case
from fleet_core.model.layout import InputSpec


def test_the_page_has_the_figures_of_the_result() -> None:
    assert run.page() == (run.HERE / "README.md").read_text(encoding="utf-8")


@pytest.fixture
def people() -> Set:
    """Six people with two easy classes, one after the other."""
    names = [f"p{k}" for k in range(6)]
    y = np.tile(np.repeat([0, 1], 20), 6)
    x = np.random.default_rng(0).normal(size=(240, 2, 16)).astype(np.float32)
    x[:, 0] += 2 * y[:, None]
    return Set(x, y, np.repeat(names, 40), "ds-cnn", devices._split(names, names[4:], (3, 1, 2)), gap=1)


def test_evaluated_people_neither_train_nor_validate_with_any_seed(people: Set) -> None:
    roles = [people.split(np.random.default_rng(seed)) for seed in range(5)]
    assert {name for _, _, evaluated in roles for name in evaluated} == {"p4", "p5"}
    assert {name for train, validate, _ in roles for name in (*train, *validate)} == {"p0", "p1", "p2", "p3"}
    assert all(not set(train) & set(validate) for train, validate, _ in roles)
    assert len({tuple(train) for train, _, _ in roles}) > 1


def test_every_strategy_answers_the_later_samples_of_each_class(people: Set) -> None:
    network = devices.trained(people, ["p0", "p1", "p2"], seed=0, steps=20)
    device = devices.device_of(people, "p4", network)
    assert (device.y.tolist(), device.query_y.tolist()) == ([0] * 12 + [1] * 12, [0] * 7 + [1] * 7)
    for labels in devices.LABELS:
        trial = run.tried(device, labels)
        found = run.answered(trial, [trial])
        assert set(found) == {*run.MAIN, *run.OPTIONS, *run.STEPPED, *run.PRIOR_ROWS}
        assert all(answer.shape == (14, 2) for answer in found.values())
        assert trial.seconds["mixture"] > 0
    accuracy = run.pooled([(found[run.MIXTURE], device.query_y, 2)])["accuracy"]
    assert accuracy > 0.9


def test_a_simulated_fleet_trains_an_encoder_whose_ways_answer(people: Set) -> None:
    network = devices.trained_by_fleet(people, ["p0", "p1", "p2"], seed=0, rounds=3)
    device = devices.device_of(people, "p4", network, with_steps=False)
    assert not device.stepped
    trial = run.tried(device, "all")
    assert {*run.MAIN} <= set(run.answered(trial, []))
    assert all(run.pooled([(trial.found[way], device.query_y, 2)])["accuracy"] > 0.9 for way in ("none", "head"))


def test_the_figures_are_by_role_and_labels_and_the_costs_by_role(people: Set) -> None:
    network = devices.trained(people, ["p0", "p1", "p2"], seed=0, steps=20)
    found = {(role, name): devices.device_of(people, name, network)
             for role, name in (("validation", "p3"), ("evaluated", "p4"), ("evaluated", "p5"))}
    figures = run.figures(found)
    for role, names in (("validation", ["p3"]), ("evaluated", ["p4", "p5"])):
        assert set(figures[role]) == {*devices.LABELS, "cost"}
        assert all(ratio > 0 for ratio in figures[role]["cost"])
        rows = [(run.tried(found[role, name], "few").found["head"], found[role, name].query_y, 2) for name in names]
        assert figures[role]["few"]["head"] == run.pooled(rows)


def test_a_prior_of_the_fleet_draws_a_devices_weights_towards_those_of_the_others(people: Set) -> None:
    network = devices.trained(people, ["p0", "p1", "p2"], seed=0, steps=20)
    trial = run.tried(devices.device_of(people, "p4", network), "few")
    one = replace(trial.plain, ways={name: replace(way, weight=float(name == "knn"))
                                     for name, way in trial.plain.ways.items()})
    found = [trial.with_prior([one], weight).ways["knn"].weight for weight in (0, 20, 2000)]
    assert found[0] == pytest.approx(trial.plain.ways["knn"].weight)
    assert found[0] < found[1] < 0.9 < found[2]
    assert trial.with_prior([], 20) is trial.plain


def test_a_device_survives_its_file() -> None:
    stepped = {"few": {0.01: np.ones((3, 2))}}
    one = Device(np.ones((2, 3)), np.array([0, 1]), None, np.zeros((1, 3)), np.array([1]), None, 2, 0.5, stepped)
    again = Device.of(one.arrays())
    np.testing.assert_array_equal(again.stepped["few"][0.01], stepped["few"][0.01])
    assert (again.head, again.classes, again.embed_s) == (None, 2, 0.5)
    np.testing.assert_array_equal(again.z, one.z)


def test_the_former_choice_keeps_the_first_way_unless_another_is_surely_better() -> None:
    y = np.zeros(60, np.int64)

    def right(number: int) -> np.ndarray:
        return np.where((np.arange(60) < number)[:, None], [0.9, 0.1], [0.1, 0.9])

    assert old_choice.chosen({"none": right(30), "head": right(31)}, y) == "none"
    assert old_choice.chosen({"none": right(30), "head": right(40)}, y) == "head"
    assert old_choice.chosen({"none": right(0)[:9], "head": right(9)[:9]}, y[:9]) == "none"


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads a process's highest memory as Linux has it")
def test_the_command_personalizes_without_stored_embeddings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(command, "WAYS", ("head", "auto"))
    case = Case("tiny", "mlp", InputSpec((1, 2, 3), "uint8", 1 / 255, (0.4,), (0.2,)), {"hidden": [5]})
    home = homes.made(case, tmp_path / "made", support=20).homes["maml"]
    found = command.measured(home, tmp_path, repeats=1)
    assert set(found) == {"head", "auto"}
    assert all(one["cpu_s"] > 0 and one["peak"] > 1 << 20 for one in found.values())
