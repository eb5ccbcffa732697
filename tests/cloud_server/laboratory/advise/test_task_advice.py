"""Advice on samples with several labels, and on anomalies."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from cloud_server.choices.first_settings import load_data, tried_task
from cloud_server.commands import cli, lab
from cloud_server.laboratory.advise import model_trial, task_baselines
from cloud_server.laboratory.advise import recordings as reading
from cloud_server.laboratory.advise import short_comparison as advising
from cloud_server.laboratory.advise.recommendation import sentences, table, to_json
from cloud_server.laboratory.advise.recordings import REPEATING_MODELS, Model, recordings
from cloud_server.laboratory.advise.short_comparison import Options
from cloud_server.laboratory.advise.task_baselines import TaskBaselines
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload as workloads
from cloud_server.laboratory.plan.experiment import Experiment
from cloud_server.laboratory.plan.workload import Workload
from cloud_server.laboratory.run import simulate
from cloud_server.records.fleet_settings import FleetConfig
from fleet_core.base import config
from fleet_core.base.errors import ConfigError, DataError
from fleet_core.tasks import anomaly, labels
from fleet_core.tasks.anomaly import Anomaly
from fleet_core.tasks.labels import MultiLabel
from tests.cloud_server.laboratory.advise.test_advise import of_numbers
from tests.cloud_server.laboratory.run.test_simulated_tasks import COUNT, OF_ANOMALIES, OF_LABELS, Kind

pytestmark = pytest.mark.usefixtures("no_fsync", "torch_threads")

CASES = {
    "multi-label": (OF_LABELS, (), "own_logistic", Model("mlp", "mlp")),
    "anomaly": (OF_ANOMALIES, ("N",), "nearest", REPEATING_MODELS[0]),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_a_real_advice_ranks_by_the_tasks_figure_beside_plain_models(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    kind, names, plain, model = CASES[name]
    for constant, value in {"FINALISTS": 1, "MAX_ROUNDS": 5, "MORE_SEEDS": (1,)}.items():
        monkeypatch.setattr(advising, constant, value)
    monkeypatch.setattr(reading, "models_for", lambda *_: (model,))
    monkeypatch.setattr(reading, "REPEATING_MODELS", (model,))

    def engine(asked: Experiment, folder: Path, title: str) -> tuple[list[Path], list[str]]:
        return simulate.simulate(asked, folder, simulate.Options(jobs=1, device="cpu")), []

    options = Options(str(kind.recordings(tmp_path / "mine.npz", 5)), 60, codecs=("int8",), task=name, names=names)
    assert options.methods == ("local", "fedavg-meta", "per-fedavg-fo")
    found = advising.advise(options, tmp_path / "out", engine, cores=1)
    scores = [one.score.mean for one in found.advice.ranked]
    assert scores == sorted(scores, reverse=True)
    assert all(one.measure == kind.figure and one.pooled is None for one in found.advice.ranked)
    assert found.facts["measure"] == kind.figure
    assert 0.5 < found.facts[plain] <= 1
    text = "\n".join([*sentences(found.advice, found.facts), table(found.advice, found.facts)])
    figure = found.advice.chosen.figure.name
    assert f"A device then has the {figure} " in text
    assert task_baselines.TITLES[plain] in text
    assert not {"macro-F1", "accuracy", "most frequent class"} & set(text.replace(",", "").split())
    json.dumps({**to_json(found.advice), "facts": found.facts}, allow_nan=False)
    assert found.command is not None
    assert f"--task {name}" + (" --normal N" if names else "") in found.command
    assert found.fleet_toml is not None
    settings = config.parse(FleetConfig, found.fleet_toml, "fleet.toml")
    wanted = {"multi-label": MultiLabel(("low", "high")), "anomaly": Anomaly(16, ("N",))}
    assert settings.model.task == wanted[name]
    assert settings.model.classes == ()


@pytest.mark.parametrize(("name", "figure"), [("regression", "MAE in deviations"), ("multi-label", "micro-F1")])
def test_init_tries_models_by_the_tasks_figure_and_names_plain_ones_that_are_better(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], name: str, figure: str
) -> None:
    monkeypatch.setattr(model_trial, "MAX_ROUNDS", 1)
    tried = (Model("mlp", "mlp", {"hidden": [8]}), Model("mlp-4", "mlp", {"hidden": [4]}))
    monkeypatch.setattr(model_trial, "models_for", lambda samples: tried)
    if name == "multi-label":
        data, labelled, plain = str(OF_LABELS.recordings(tmp_path / "mine.npz", 4)), True, "own_logistic"
    else:
        data, labelled, plain = of_numbers(tmp_path / "mine.npz"), False, "ridge"
    samples, spec = load_data(data, outputs=(), labels=labelled)
    chosen = lab.choose_model(samples, spec, "fedavg", 0, tried_task((), labelled, None))
    assert chosen in tried
    printed = capsys.readouterr()
    assert f"{figure} " in printed.out
    assert "accuracy" not in printed.out
    assert task_baselines.TITLES[plain] in printed.out
    (warning,) = [line for line in printed.out.splitlines() if "without a fleet, has" in line]
    assert f"{figure} " in warning
    assert "a trial of mlp, mlp-4 on" in printed.err


def test_what_cannot_be_tried_is_said(tmp_path: Path) -> None:
    samples, _ = load_data(str(OF_LABELS.recordings(tmp_path / "l.npz", 4)), outputs=(), labels=True)
    assert model_trial.reason_to_skip(samples) == ""
    same = replace(samples, y=np.ones_like(samples.y))
    assert model_trial.reason_to_skip(same) == "no client has samples that differ in what is to be learned"
    with pytest.raises(ConfigError, match="no models are tried on quiet samples alone"):
        cli.init(tmp_path / "fleet", str(OF_ANOMALIES.recordings(tmp_path / "a.npz")), task="anomaly", normal="N",
                 trial=True)


def built(kind: Kind, path: Path) -> Workload:
    return workloads.build(experiments.read(kind.settings(kind.recordings(path, 2))))


def test_plain_answers_without_a_fleet_are_measured_as_models_are(tmp_path: Path) -> None:
    of_labels = task_baselines.on_test_samples(built(OF_LABELS, tmp_path / "l.npz"))
    assert of_labels.figure == labels.COMPARED[0]
    assert of_labels.constant[0] == "own_labels"
    assert of_labels.plain["logistic"] > 0.9
    assert of_labels.plain["own_logistic"] > 0.9
    of_alarms = task_baselines.on_test_samples(built(OF_ANOMALIES, tmp_path / "a.npz"))
    assert of_alarms.figure == anomaly.COMPARED[0]
    assert of_alarms.constant == ("guess", 0.5)
    assert of_alarms.plain["nearest"] > 0.95
    work = built(OF_ANOMALIES, tmp_path / "a.npz")
    own, later = work.own(work.train[0]), work.later(work.train[0])
    apart = later.x.reshape(len(later.x), 1, -1) - own.x.reshape(1, len(own.x), -1)
    nearest = np.square(apart).mean(2).min(1, keepdims=True)
    answers = task_baselines.MAKERS["anomaly"](work, [own])["nearest"]
    assert answers(own, later.x) == pytest.approx(nearest)


def test_a_model_that_a_plain_one_beats_is_named() -> None:
    f1, auroc = labels.COMPARED[0], anomaly.COMPARED[0]
    beside = TaskBaselines(f1, ("own_labels", 0.5), {"logistic": 0.7, "own_logistic": 0.9})
    assert beside.warnings("a", 0.5, 5, plain=True) == [
        "a: micro-F1 0.500 after 5 rounds, and each device's most frequent labels has 0.500",
        "a: micro-F1 0.500 after 5 rounds, and each device's own logistic regression, without a fleet, has 0.900",
    ]
    assert beside.warnings("a", 0.95, 5, plain=True) == []
    assert TaskBaselines(auroc, ("guess", 0.5), {}).near_constant(0.505)
    assert not TaskBaselines(auroc, ("guess", 0.5), {}).near_constant(0.6)


def test_what_cannot_be_compared_is_refused_or_remarked(tmp_path: Path) -> None:
    with np.load(OF_ANOMALIES.recordings(tmp_path / "all.npz", 5)) as held:
        quiet = held["y"] == "N"
        np.savez(tmp_path / "quiet.npz", **{name: held[name][quiet] for name in ("x", "client", "time")})
    found = recordings(str(tmp_path / "quiet.npz"), task="anomaly")
    assert any("no sample is labelled as an anomaly" in remark for remark in found.remarks)
    assert not any("one class" in remark for remark in found.remarks)
    known = recordings(str(tmp_path / "all.npz"), task="anomaly", names=("N",))
    assert known.section["normal"] == ["N"]
    assert not known.remarks
    with np.load(OF_LABELS.recordings(tmp_path / "l.npz", 5)) as held:
        np.savez(tmp_path / "same.npz", **{**held, "y": np.ones((5 * COUNT, 2), bool)})
    with pytest.raises(DataError, match="labels never change"):
        recordings(str(tmp_path / "same.npz"), task="multi-label")
    with pytest.raises(DataError, match="leave out --task anomaly"):
        recordings("heartbeat", task="anomaly")
