"""Experiments on samples with several labels, and on anomalies: what a fleet computes, figures, comparisons."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.figures.scores import FIGURES
from cloud_server.integrations import tracking
from cloud_server.laboratory.compare import comparison, comparison_files, finished_runs, tables
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload as workloads
from cloud_server.laboratory.plan.planned_bytes import Asked
from cloud_server.laboratory.run import rehearsal, simulate
from cloud_server.laboratory.run.run_progress import Progress
from cloud_server.ledger.ledger_tables import TaskEvaluation
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.errors import ConfigError, DataError
from fleet_core.learning import models
from fleet_core.model.layout import InputSpec
from fleet_core.tasks.anomaly import Anomaly
from fleet_core.tasks.labels import MultiLabel
from fleet_core.tasks.task import Task, together
from tests.support import lab
from tests.support.task_fleets import FP32, NAMES, TaskFleet

pytestmark = [pytest.mark.slow, pytest.mark.usefixtures("no_fsync", "torch_threads")]

LABELS = ("low", "high")
COUNT = 60
Arrays = dict[str, Any]


def labelled(seed: int, gain: float = 1.0) -> Arrays:
    """Two waves of which a sample holds any number."""
    rng = np.random.default_rng(seed)
    y = rng.random((COUNT, 2)) < 0.5
    waves = np.sin(2 * np.pi * np.outer((1, 4), np.arange(16)) / 16)
    x = gain * y @ waves + 0.1 * rng.normal(size=(COUNT, 16))
    return {"x": x[:, None].astype(np.float32), "y": y, "time": np.arange(float(COUNT)), "labels": np.array(LABELS)}


def spiked(seed: int, gain: float = 1.0) -> Arrays:
    """A sine; one reading of every fifth sample stands out."""
    rng = np.random.default_rng(seed)
    x = gain * np.sin(2 * np.pi * (2 * np.arange(16) / 16 + rng.random((COUNT, 1))))
    x += 0.05 * rng.normal(size=x.shape)
    y = np.arange(COUNT) % 5 == 4
    x[np.flatnonzero(y), rng.integers(0, 16, y.sum())] += 4
    return {"x": x[:, None].astype(np.float32), "y": np.where(y, "V", "N"), "time": np.arange(float(COUNT))}


def saved(drawn: Callable[[int, float], Arrays]) -> Callable[[Path, int, float], None]:
    return lambda path, seed, gain: np.savez(path, **drawn(seed, gain))


@dataclass(frozen=True)
class Kind:
    """drawn(seed, gain): a device's samples. data, model: keys of an experiment's tables. figure: by which runs are
    compared."""

    fleet: TaskFleet
    drawn: Callable[[int, float], Arrays]
    data: dict[str, Any]
    model: dict[str, Any]
    hyper: dict[str, Any]
    figure: str

    def recordings(self, path: Path, devices: int = 2) -> Path:
        """All devices' samples in one file."""
        parts = [self.drawn(number, 1 + number / 5) for number in range(devices)]
        client = np.repeat([f"{'abcdef'[number]}" for number in range(devices)], COUNT)
        whole: Arrays = {name: np.concatenate([part[name] for part in parts]) for name in ("x", "y", "time")}
        np.savez(path, client=client, **whole, **{name: one for name, one in parts[0].items() if name == "labels"})
        return path

    def settings(self, path: Path, **more: Any) -> dict[str, Any]:
        return {
            "data": {"path": str(path), **self.data},
            "partition": {"kind": "natural", "options": {"split": "time", "train_fraction": 0.6}},
            "model": self.model, "budget": {"rounds": 4}, "evaluation": {"every": 2},
            "method": [{"name": "fedavg", "hyper": self.hyper}, {"name": "local", "hyper": self.hyper}], **more,
        }


OF_LABELS = Kind(
    TaskFleet('kind = "multi-label"\noutputs = ["low", "high"]', saved(labelled), "local_steps = 10\nbatch = 20\n"
              "client_lr = 0.2\nfinetune_steps = 2", method="fedavg"),
    labelled, {}, {"name": "mlp", "options": {"hidden": [16]}, "task": "multi-label"},
    {"local_steps": 10, "batch": 20, "client_lr": 0.2, "finetune_steps": 2}, "micro_f1",
)
OF_ANOMALIES = Kind(
    TaskFleet('kind = "anomaly"\nwidth = 16\nnormal = ["N"]\nshare = 0.05', saved(spiked),
              "local_steps = 40\nbatch = 20\nclient_lr = 1.0\nfinetune_steps = 2",
              'hidden = [16, 4, 16], activation = "elu"', "fedavg"),
    spiked, {"normal": ["N"]},
    {"name": "mlp", "options": {"hidden": [16, 4, 16], "activation": "elu"}, "task": "anomaly", "share": 0.05},
    {"local_steps": 40, "batch": 20, "client_lr": 1.0, "finetune_steps": 2}, "auroc",
)
KINDS = {"multi-label": OF_LABELS, "anomaly": OF_ANOMALIES}


@pytest.mark.parametrize("name", KINDS)
def test_a_run_computes_and_measures_what_a_fleet_of_real_agents_does(tmp_path: Path, name: str) -> None:
    kind = KINDS[name]
    w = kind.fleet.trained(tmp_path, link=FP32)
    asked = experiments.read(kind.settings(kind.recordings(tmp_path / "all.npz"), budget={"rounds": kind.fleet.rounds},
                                           codec_up="fp32", codec_down="fp32"))
    store = lab.run_first(asked, tmp_path / "run", first=w.fleet.weights(w.server.layout))
    state = w.server.checkpoint.state
    ours = {key: value for key, value in lab.server_state(store).items() if key.startswith("model/")}
    assert ours == lab.flat({"model": state.model})
    task = w.server.layout.task
    assert task is not None
    last = store.rounds()[-1]
    for stage, figures in (("after", last), ("before", last["before"])):
        rows = w.server.ledger.rows(TaskEvaluation, round=kind.fleet.rounds, stage=stage)
        theirs = {row.device: task.of_sums(row.samples, row.sums) for row in rows}
        assert set(theirs) == set(NAMES)
        pooled = together(task, list(theirs.values()))
        assert figures["measures"] == {key: pytest.approx(of, rel=1e-4) for key, of in pooled.figures.items()}
        if stage == "after":
            assert last["devices"] == pytest.approx({key: one.compared[kind.figure] for key, one in theirs.items()})
    w.close()


@pytest.fixture(scope="module", params=list(KINDS))
def runs(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[Kind, Path]:
    kind, folder = KINDS[request.param], tmp_path_factory.mktemp("tasks")
    evaluation = {"every": 2, "new_devices": 0.25, "support": [0.5], "support_split": "time", "also_test_step": True}
    asked = experiments.read(kind.settings(kind.recordings(folder / "r.npz", 4), evaluation=evaluation))
    simulate.simulate(asked, folder / "runs", simulate.Options(jobs=1))
    return kind, folder / "runs"


def test_a_run_has_the_tasks_figures_in_place_of_accuracies(runs: tuple[Kind, Path]) -> None:
    kind, folder = runs
    found = json.loads((folder / "fedavg-s0" / "result.json").read_text())
    last = found["rounds"][-1]
    assert not {"accuracy", "macro_f1", "error"} & set(last)
    spread = last[kind.figure]
    assert spread["worst"] <= spread["mean"] <= spread["best"] <= 1
    assert spread["mean"] > 0.8, "it learns"
    assert spread["mean"] == pytest.approx(np.mean(list(last["devices"].values())))
    assert kind.figure in last["new_devices"]["0.5"]
    assert kind.figure in last["test_step"]
    assert found["evaluated"][kind.figure] == spread["pooled"]
    assert found["evaluated"]["measures"] == last["measures"]


def test_a_comparison_ranks_and_names_the_tasks_figure(runs: tuple[Kind, Path], tmp_path: Path) -> None:
    kind, folder = runs
    found, _ = finished_runs.gather([folder])
    compared = comparison.compare(found)
    name = {"micro_f1": "micro-F1", "auroc": "AUROC"}[kind.figure]
    assert (compared.figure.key, compared.figure.name) == (kind.figure, name)
    first, second = compared.entries
    assert first.accuracy.mean >= second.accuracy.mean
    closing = tables.closing(compared)
    shown = {"micro_f1": ["micro-F1", "worst device", "macro-F1", "exact match", "F1 high", "F1 low"],
             "auroc": ["AUROC", "worst device", "alarms anomaly", "alarms quiet", "score anomaly", "score quiet"]}
    assert [title for _, title in tables.columns(compared)] == shown[kind.figure]
    assert all(title in closing for title in shown[kind.figure])
    assert "accuracy" not in closing
    pages = {path.name: path for path in comparison_files.write(compared, tmp_path)}
    page = pages["compare.html"].read_text()
    assert f"Highest {name}, mean over devices" in page
    assert f"{name[0].upper()}{name[1:]} against" in page
    assert json.loads(pages["compare.json"].read_text())["measured"] == kind.figure
    with pytest.raises(ConfigError, match="these runs have no macro-f1"):
        comparison.compare(found, target_of="macro-f1")
    row = json.loads((folder / "fedavg-s0" / "rounds.jsonl").read_text().splitlines()[-1])
    assert tracking._of_row(row)[f"{kind.figure}/mean"] == row[kind.figure]["mean"]
    progress = Progress(["a"], 9)
    progress.round_ended("a", row)
    assert f"{name} {row[kind.figure]['mean']:.3f}" in progress.line("a")


def test_of_a_measure_the_right_direction_is_better() -> None:
    compared = comparison.Comparison((), (), None, {}, (), measured="auroc")
    wanted = {"mean": False, "variance": True, "alarms quiet": True, "alarms anomaly": False, "score quiet": True,
              "score anomaly": None, "auroc all": False, "mae speed": True, "r2 speed": False, "f1 low": False}
    assert {key: tables.less_is_better(compared, key) for key in wanted} == wanted
    lower = comparison.Comparison((), (), None, {}, (), measured="difference")
    assert tables.less_is_better(lower, "mean") is True


def test_every_figure_is_read_from_results() -> None:
    assert set(FIGURES) <= set(finished_runs.Evaluated.__dataclass_fields__)


def test_without_labelled_anomalies_runs_are_compared_by_the_difference_of_quiet_samples(tmp_path: Path) -> None:
    path = OF_ANOMALIES.recordings(tmp_path / "all.npz")
    with np.load(path) as held:
        quiet = held["y"] == "N"
        np.savez(tmp_path / "quiet.npz", **{name: held[name][quiet] for name in ("x", "client", "time")})
    asked = experiments.read(OF_ANOMALIES.settings(tmp_path / "quiet.npz", data={"path": str(tmp_path / "quiet.npz")},
                                                   budget={"rounds": 2}))
    row = lab.run_first(asked, tmp_path / "run").rounds()[-1]
    assert "auroc" not in row
    assert row["difference"]["best"] <= row["difference"]["mean"] <= row["difference"]["worst"]
    assert row["measures"].keys() == {"alarms", "score"}


def test_only_quiet_samples_are_learned_from_and_the_later_part_keeps_the_order_of_time(tmp_path: Path) -> None:
    path = OF_ANOMALIES.recordings(tmp_path / "all.npz")
    with np.load(path) as held:
        turned = np.random.default_rng(0).permutation(len(held["x"]))
        np.savez(tmp_path / "turned.npz", **{name: held[name][turned] for name in held})
    first, second = (workloads.build(experiments.read(OF_ANOMALIES.settings(file)))
                     for file in (path, tmp_path / "turned.npz"))
    for one, other in zip(first.train, second.train, strict=True):
        assert not first.own(one).y.any()
        assert first.own(one).y.shape == (29, 16)
        assert first.later(one).y.tolist() == second.later(other).y.tolist()
        assert np.array_equal(first.later(one).x, second.later(other).x)


@pytest.mark.parametrize(("changed", "why"), [
    ({"partition": {"kind": "dirichlet"}}, "'dirichlet' divides classes"),
    ({"data": {"set": "har"}}, "has classes, and the task is anomaly"),
    ({"evaluation": {"novel_classes": [1]}}, "a model with the task anomaly has no classes"),
    ({"data": {"path": "r.npz", "outputs": ["a"]}}, "give model.task = 'regression or multi-label'"),
    ({"model": {"name": "mlp", "task": "multi-label", "share": 0.1}}, "give model.task = 'anomaly'"),
])
def test_what_does_not_go_with_a_task_is_refused_before_anything_is_read(changed: dict[str, Any], why: str) -> None:
    with pytest.raises(ConfigError, match=why):
        experiments.read(OF_ANOMALIES.settings(Path("r.npz"), **changed))


def test_what_a_task_cannot_learn_is_refused_by_name(tmp_path: Path) -> None:
    for kind, name in ((OF_LABELS, "multi-label"), (OF_ANOMALIES, "anomaly")):
        asked = experiments.read(kind.settings(kind.recordings(tmp_path / "r.npz"), method=[{"name": "p-avg-proto"}]))
        with pytest.raises(ConfigError, match=f"p-avg-proto cannot learn {name}"):
            simulate.checked(asked, experiments.runs(asked))
    nothing_quiet = experiments.read(OF_ANOMALIES.settings(OF_ANOMALIES.recordings(tmp_path / "r.npz"),
                                                           data={"path": str(tmp_path / "r.npz"), "normal": ["X"]}))
    with pytest.raises(DataError, match="a: no sample to train on"):
        simulate.checked(nothing_quiet, experiments.runs(nothing_quiet))
    np.savez(tmp_path / "wide.npz", x=np.zeros((8, 5000), np.float32), client=np.repeat(["a", "b"], 4))
    wide = experiments.read(OF_ANOMALIES.settings(tmp_path / "wide.npz", data={"path": str(tmp_path / "wide.npz")}))
    with pytest.raises(DataError, match="samples of 5000 numbers are too large"):
        workloads.build(wide)


TASKS: dict[str, Task] = {"multi-label": MultiLabel(LABELS), "anomaly": Anomaly(32)}


@pytest.mark.parametrize("name", TASKS)
def test_a_rehearsal_takes_the_task_on_generated_and_on_own_samples(name: str) -> None:
    task = TASKS[name]
    layout = models.describe("mlp", InputSpec((2, 16)), (), {"hidden": [8]}, task)
    asked = Asked(label="t", method=METHODS["fedavg"], hyper=METHODS["fedavg"].hyper(), layout=layout, rounds=10,
                  devices=2, codec_up="int8", codec_down="int8")
    work = rehearsal.generated(layout, 2)
    assert work.samples.y.shape[1:] == ((2,) if name == "multi-label" else ())
    for own in (None, rehearsal.divided(work.samples, layout)):
        found = rehearsal.rehearsed(asked, 1e6, own)
        assert 0 < found.up < 4 * layout.parameters(("body", "head"))
