"""The benchmark of hostile devices: its grid, its attacks, its tables."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks.hostile import attacks, hostile_agent, live, tables
from benchmarks.hostile.grid import (
    ATTACKS,
    BOUND,
    DATA,
    INNER,
    MEAN,
    NOBODY,
    SETTINGS,
    SHARES,
    SIGN,
    Cell,
    cells,
    experiment,
)
from cloud_server.laboratory.plan.workload import Workload
from cloud_server.laboratory.run.device_work import DeviceEvaluation, EvaluationTask, TrainedDevice, TrainingTask
from cloud_server.records.fleet_folder import Fleet
from edge_agent.commands import run as agent
from edge_agent.compute import trainer
from edge_agent.device.local_samples import LocalData
from fleet_core.algorithms.interface import Payload, Update
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import processes
from fleet_core.board.device_settings import settings_of
from fleet_core.data.partitions import Share
from fleet_core.data.samples import Samples
from fleet_core.model import payloads
from fleet_core.model.layout import InputSpec, Layout, TensorSpec
from fleet_core.robust.blocks import flat
from fleet_core.robust.norm_bound import refused
from fleet_core.robust.screening import Screening
from tests.support.paths import ROOT

HERE = Path(tables.__file__).parent
NAMES = tuple(f"d{n}" for n in range(10))


class Honest:
    """Every device sends ones, and a little of its own."""

    def evaluate(self, task: EvaluationTask) -> Iterator[DeviceEvaluation]:
        return iter(())

    def close(self) -> None:
        pass

    def learn(self, task: TrainingTask) -> Iterator[TrainedDevice]:
        for n, name in enumerate(task.clients):
            groups = {"body": {"w": np.full((2, 2), 1 + n / 100, np.float32)}}
            yield TrainedDevice(name, Payload(groups), 10)


def sent(attack: str, hostile: tuple[str, ...]) -> dict[str, Any]:
    task = TrainingTask(1, NAMES, Payload({}), 0, "none")
    found = attacks.Hostile(Honest(), hostile, attack, 0).learn(task)
    return {one.client: one.update.groups for one in found if one.update is not None}


def test_every_cell_is_there_once_and_can_be_run() -> None:
    for data in DATA:
        keys = [cell.key for cell in cells(data)]
        methods = len(DATA[data]["methods"])
        assert len(keys) == len({*keys}) == methods * len(SETTINGS) * (1 + len(ATTACKS) * len(SHARES))
        for method in DATA[data]["methods"]:
            experiment(Cell(data, method, "krum", SIGN, 0.2))
    assert experiment(Cell("mnist", "pfldyn-proto", "mean", NOBODY, 0.0)).max_update_norm == 1e4
    assert experiment(Cell("mnist", "pfldyn-proto", "adaptive", NOBODY, 0.0)).max_update_norm is None


def test_the_hostile_devices_of_a_smaller_share_are_among_those_of_a_larger_one() -> None:
    few, more = attacks.chosen(NAMES, 0.1, 0), attacks.chosen(NAMES, 0.3, 0)
    assert (len(few), len(more)) == (1, 3)
    assert {*few} < {*more}


@pytest.mark.parametrize("attack", ATTACKS)
def test_honest_devices_send_what_they_trained(attack: str) -> None:
    hostile = attacks.chosen(NAMES, 0.2, 0)
    found, honest = sent(attack, hostile), sent(attack, ())
    for name in {*NAMES} - {*hostile}:
        np.testing.assert_array_equal(flat(found[name]), flat(honest[name]))


def test_what_hostile_devices_send() -> None:
    hostile = attacks.chosen(NAMES, 0.2, 0)
    honest = np.mean([flat(one) for name, one in sent(SIGN, hostile).items() if name not in hostile], axis=0)
    for name in hostile:
        np.testing.assert_allclose(flat(sent(SIGN, hostile)[name]), -10 * flat(sent(SIGN, ())[name]), rtol=1e-6)
        np.testing.assert_allclose(flat(sent(INNER, hostile)[name]), -2 * honest, rtol=1e-6)
    screen = Screening(METHODS["fedavg"])
    found = {name: screen.measure(Update(name, Payload(one), 10)) for name, one in sent(BOUND, hostile).items()}
    assert not refused(found, {}, {}), "as long as the bound allows"
    found = {name: screen.measure(Update(name, Payload(one), 10)) for name, one in sent(SIGN, hostile).items()}
    assert set(refused(found, {}, {})) == {*hostile}


def test_false_samples_are_those_of_hostile_devices_and_test_samples_stay() -> None:
    x, y = np.ones((40, 1, 28, 28), np.uint8), np.zeros(40, np.int64)
    shares = tuple(Share(name, np.arange(4 * n, 4 * n + 3), np.array([4 * n + 3])) for n, name in enumerate(NAMES))
    clean = Workload(Samples(x, y), shares, (), (), InputSpec((1, 28, 28), "uint8"), ("a", "b", "c"))
    labels = attacks.poisoned(clean, ("d1",), "labels", 0).samples.y
    assert list(np.flatnonzero(labels != y)) == [4, 5, 6]
    found = attacks.poisoned(clean, ("d1",), "backdoor", 2).samples
    assert list(np.flatnonzero(found.y != y)) == [4, 6]
    assert list(np.flatnonzero((found.x != x).any(axis=(1, 2, 3)))) == [4, 6]
    tested = attacks.triggered(clean).samples.x
    assert list(np.flatnonzero((tested != x).any(axis=(1, 2, 3)))) == list(range(3, 40, 4))


@pytest.mark.parametrize(("page", "write"), [
    (HERE / "README.md", lambda found, page: tables.fill(found, tables.rows(HERE / "live.json"), page)),
    (ROOT / "docs" / "robust.md", tables.summarize),
])
def test_a_page_is_what_the_command_writes(tmp_path: Path, page: Path, write: Callable[[Any, Path], None]) -> None:
    text, again = page.read_text(encoding="utf-8"), tmp_path / page.name
    again.write_text(text, encoding="utf-8")
    write(tables.rows(HERE / "result.json"), again)
    assert again.read_text(encoding="utf-8") == text


def test_a_table_has_what_was_run_and_says_what_was_ruined() -> None:
    cell = asdict(Cell("mnist", "pfldyn-proto", "mean", SIGN, 0.2))
    text = tables.table([{**cell, "ruined": "not finite"}, {**cell, "setting": "krum", "accuracy": 0.5}], "mnist", 0.2)
    assert text.splitlines()[2] == "| `pfldyn-proto` | `sign` | ruined | - | - | - | - | 50.0 | - |"


def test_attacks_are_counted_for_which_a_rule_is_near_the_clean_fleet() -> None:
    def row(attack: str, setting: str, share: float, accuracy: float) -> dict[str, Any]:
        return {**asdict(Cell("mnist", "pfldyn-proto", setting, attack, share)), "accuracy": accuracy}

    rows = [row(NOBODY, MEAN, 0.0, 0.95)]
    for attack, best in ((SIGN, 0.93), (BOUND, 0.90)):
        rows += [row(attack, setting, 0.2, best if setting == "krum" else 0.1) for setting in SETTINGS]
    rows += [row(INNER, "krum", 0.2, 0.1)]
    lines = tables.within(rows).splitlines()
    assert lines[2:] == ["| mnist | 20% | 1 of 2 | `bound` on `pfldyn-proto`: `krum` 5.0 |"]


# Fleets of processes --------------------------------------------------------------------------------------------------


def test_a_hostile_agent_starts_a_trainer_whose_updates_are_false(monkeypatch: pytest.MonkeyPatch) -> None:
    started, sent = list[list[str]](), list[Any]()
    own = {"body": {"w": np.ones((2, 2), np.float32)}}
    monkeypatch.setattr(agent, "main", lambda given: started.extend((
        given, processes.command(hostile_agent.TRAINER, "--threads", "1"),
        processes.command("edge_agent.compute.adapter"))))
    monkeypatch.setattr(sys, "argv", ["hostile_agent", "-10", "home", "mqtt://h:1"])
    hostile_agent.main()
    given, trains, adapts = started
    assert given == ["--home", "home", hostile_agent.CONNECT_S, "mqtt://h:1"]
    assert trains[-5:] == ["benchmarks.hostile.hostile_agent", "-10", hostile_agent.TRAINER, "--threads", "1"]
    assert adapts[-1] == "edge_agent.compute.adapter"
    layout = Layout("m", InputSpec((2,)), ("a", "b"), 2, (TensorSpec("w", "body", (2, 2)),))

    def training(arguments: list[str]) -> int:
        sent.append((arguments, payloads.send("fp32", own, None, layout, ("body",))))
        return 0

    monkeypatch.setattr(trainer, "main", training)
    monkeypatch.setattr(sys, "argv", ["hostile_agent", *trains[-4:]])
    with pytest.raises(SystemExit) as ended:
        hostile_agent.main()
    (arguments, update), = sent
    assert (ended.value.code, arguments) == (0, ["--threads", "1"])
    np.testing.assert_array_equal(update.decoded["body"]["w"], -10 * own["body"]["w"])


@pytest.mark.parametrize(("train", "test"), [(2, 1), (84, 28), (250, 150), (3, 997)])
def test_a_live_device_holds_back_what_the_simulation_does(tmp_path: Path, fleet: Fleet, train: int, test: int) -> None:
    rows = np.random.default_rng(0).permutation(train + test)
    share = Share("d0", np.sort(rows[:train]), np.sort(rows[train:]))
    samples = Samples(np.arange(train + test, dtype=np.float32)[:, None], rows % 2, classes=("a", "b"))
    work = Workload(samples, (share,), (), (), InputSpec((1,)), ("a", "b"))
    home = live.home_of(fleet, work, share, tmp_path / "d0")
    fraction = settings_of(home).data.train_fraction
    data = LocalData(home / "samples.npz", ("a", "b"), "float32", train_fraction=fraction)
    held = data.held_back()
    assert held is not None
    np.testing.assert_array_equal(held.x[:, 0], share.test)
    np.testing.assert_array_equal(data.own().x[:, 0], share.train)


@pytest.mark.parametrize("data", DATA)
def test_cells_of_fleets_are_cells_of_the_grid(data: str) -> None:
    assert {cell.key for cell in live.cells(data)} <= {cell.key for cell in cells(data)}


def test_every_fleet_that_ends_has_the_accuracy_of_its_simulation() -> None:
    rows = tables.rows(live.RESULT)
    assert {tables.key_of(row) for row in rows} == {cell.key for data in DATA for cell in live.cells(data)}
    stopped = [row for row in rows if "stopped" in row["live"]]
    assert len(stopped) == 1
    assert [row["live"]["accuracy"] for row in rows if row not in stopped] == [
        row["simulated"] for row in rows if row not in stopped]
