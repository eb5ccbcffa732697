"""Trying models before a fleet is made: which models on which samples, the choice and its text, and the time limit."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from cloud_server.choices import first_settings
from cloud_server.commands import cli, lab
from cloud_server.figures.scores import Score
from cloud_server.laboratory.advise import model_trial, simple_baselines
from cloud_server.laboratory.advise.model_trial import FewLabels, Outcome, TriedModel, reason_to_skip
from cloud_server.laboratory.advise.recordings import Model
from cloud_server.laboratory.advise.simple_baselines import SimpleBaselines
from cloud_server.records.fleet_settings import FleetConfig
from fleet_core.base import config
from fleet_core.data import model_input
from fleet_core.data.samples import Samples, load
from tests.support import waves
from tests.support.lab import ticking

pytestmark = pytest.mark.usefixtures("torch_threads")

SMALL = (Model("mlp", "mlp", {"hidden": [8]}), Model("logistic", "logistic"))
TRUTH = np.array([1000, 1000, 1000])
CHANCE = Score(accuracy=0.36, macro_f1=0.33)
GOOD = Score(accuracy=0.93, macro_f1=0.93, method="nearest mean on spectrum and statistics")


@pytest.fixture
def samples(tmp_path: Path) -> Samples:
    return load(waves.write_waves(tmp_path / "pumps.npz"))


def tried(samples: Samples, **more: Any) -> Outcome:
    options: dict[str, Any] = {"seconds": 60.0, "models": SMALL[:1], **more}
    spec = model_input.standardized(samples.x)
    return model_trial.try_models(samples, spec, options.pop("method", "fedavg"), **options)


def one(label: str, accuracy: float = 0.9, **changes: Any) -> TriedModel:
    evaluated = Score(accuracy=accuracy, macro_f1=accuracy)
    return replace(TriedModel(Model(label, label), 12, 0.5, accuracy, evaluated, 1000, 500.0), **changes)


def outcome(chosen: TriedModel, plain: Score | None = GOOD) -> Outcome:
    return Outcome("2 clients", (chosen,), chosen, SimpleBaselines(CHANCE, plain, TRUTH), ())


# What is tried on what ------------------------------------------------------------------------------------------------


def test_devices_that_do_not_train_evaluate_and_the_others_choose(samples: Samples, monkeypatch: Any) -> None:
    monkeypatch.setattr(model_trial, "MAX_ROUNDS", 3)
    lines: list[str] = []
    found = tried(samples, say=lines.append)
    assert found.on == "1 client that did not train"
    assert [line.partition(" on ")[0] for line in lines[:1]] == ["a trial of mlp"]
    assert "6 of 6 clients, 288 of 288 samples" in lines[0]
    (mlp,) = found.tried
    assert (found.chosen, mlp.rounds, mlp.parameters) == (mlp, 3, 64 * 8 + 8 + 8 * 3 + 3)
    assert 0 < mlp.payload < 8 * mlp.parameters
    assert isinstance(found.baselines, SimpleBaselines)
    assert found.baselines.truth.sum() == 38
    assert found.baselines.plain is not None
    assert found.baselines.plain.accuracy > 0.9 > found.baselines.frequent.accuracy
    assert all(len(row) == len(found.columns) for row in found.rows())


def test_with_few_clients_or_one_later_samples_evaluate(samples: Samples, monkeypatch: Any) -> None:
    monkeypatch.setattr(model_trial, "MAX_ROUNDS", 1)
    for clients in (["pump-0", "pump-1"], ["pump-0"]):
        assert samples.client is not None
        found = tried(samples.take(np.isin(samples.client, clients)))
        assert found.on.startswith("the last 40 % of each client")
        assert found.chosen is not None


@pytest.mark.parametrize(("rows", "client", "why"), [
    (39, False, "39 samples of one client are too few to hold some back: it takes 40, or several clients with 20 each"),
    (40, False, ""), (60, True, ""),
])
def test_too_few_samples_of_one_client_are_not_tried_and_why(
    samples: Samples, rows: int, client: bool, why: str
) -> None:
    part = samples.take(range(rows))
    assert reason_to_skip(part if client else replace(part, client=None)) == why
    assert reason_to_skip(replace(part, y=np.zeros_like(part.y), client=None)) != ""


def test_large_data_are_cut_to_a_few_clients_and_samples(samples: Samples, monkeypatch: Any) -> None:
    monkeypatch.setattr(model_trial, "MAX_DEVICES", 3)
    monkeypatch.setattr(model_trial, "MAX_OF_A_DEVICE", 10)
    part = model_trial._subset(samples, seed=0)
    assert (len(part.clients), len(part)) == (3, 30)
    assert part.time is not None
    assert samples.time is not None
    assert part.time.max() > 0.8 * samples.time.max()
    assert np.array_equal(part.x, model_trial._subset(samples, seed=0).x)


def test_a_model_that_the_method_or_the_samples_do_not_take_is_reported_and_the_others_are_tried(
    samples: Samples, monkeypatch: Any
) -> None:
    monkeypatch.setattr(model_trial, "MAX_ROUNDS", 1)
    found = tried(samples, method="pfldyn-proto", models=(*SMALL, Model("lenet", "lenet")))
    assert [row.model.label for row in found.tried] == ["mlp"]
    assert [text.partition(" was not tried")[0] for text in found.remarks] == ["logistic", "lenet"]


@pytest.mark.slow
def test_the_time_is_looked_at_after_every_round_and_one_round_is_always_evaluated(samples: Samples) -> None:
    late = tried(samples, seconds=0.0, models=SMALL)
    assert [row.rounds for row in late.tried] == [1, 1]
    ticks = tried(samples, seconds=40.0, clock=ticking(1.0))
    assert 1 < ticks.tried[0].rounds < model_trial.MAX_ROUNDS


def test_a_large_model_has_fewer_devices_a_round_and_one_that_takes_too_long_is_not_tried(
    samples: Samples, monkeypatch: Any
) -> None:
    monkeypatch.setattr(model_trial, "MAX_ROUNDS", 1)
    asked = list[int]()
    figures = model_trial._figures

    def noted(model: Model, trial: Any, experiment: Any, work: Any) -> TriedModel:
        asked.append(experiment.cohort)
        return figures(model, trial, experiment, work)

    monkeypatch.setattr(model_trial, "_figures", noted)
    for flops in (1e15, 1.0):
        monkeypatch.setattr(model_trial, "ROUND_FLOPS", flops)
        assert tried(samples).chosen is not None
    assert asked == [4, 1]
    monkeypatch.setattr(model_trial, "MOST_FLOPS", 1.0)
    found = tried(samples)
    assert (found.chosen, found.warnings) == (None, [])
    assert "too much for a trial" in found.remarks[0]


def test_the_same_samples_and_seed_give_the_same_figures(samples: Samples, monkeypatch: Any) -> None:
    monkeypatch.setattr(model_trial, "MAX_ROUNDS", 2)
    assert tried(samples, seed=3).tried == tried(samples, seed=3).tried


# What is chosen and said ----------------------------------------------------------------------------------------------


def test_the_best_by_validation_is_taken_and_of_equals_the_first() -> None:
    first, second = one("cnn1d", validation=0.9), one("mlp", validation=0.903)
    assert model_trial._best([first, second]) is first
    better = replace(second, validation=0.95)
    assert model_trial._best([first, better]) is better
    assert model_trial._best([]) is None


def test_a_model_that_memorises_is_said_to_and_a_better_baseline_is_named() -> None:
    memorised, better, hint = outcome(one("cnn1d", 0.395, loss=0.004)).warnings
    assert memorised.startswith("cnn1d: memorised: loss 0.004, accuracy near chance: 0.395 after 12 rounds, where the")
    assert better == ("cnn1d: a plain baseline (nearest mean on spectrum and statistics) reaches 0.930, this model "
                      "0.395 after 12 rounds")
    assert hint.startswith("try another model")
    assert [text[:28] for text in outcome(one("cnn1d", 0.71)).warnings] == ["cnn1d: a plain baseline (nea",
                                                                             "try another model (docs/mode"]
    assert outcome(one("cnn1d", 0.93)).warnings == []
    assert "labels are mixed up" in outcome(one("cnn1d", 0.36), Score(accuracy=0.35, macro_f1=0.3)).warnings[-1]


def test_labels_are_suspected_where_a_baseline_is_below_the_mark_by_less_than_the_noise() -> None:
    few = SimpleBaselines(CHANCE, Score(accuracy=0.42, macro_f1=0.41), TRUTH // 20)
    assert "labels are mixed up" in few.warnings("cnn1d", Score(accuracy=0.36, macro_f1=0.36), 1e-6, 12)[-1]


def test_a_model_that_does_not_carry_over_to_a_device_with_few_labels_is_warned_of() -> None:
    few = FewLabels(15, SimpleBaselines(CHANCE, GOOD, TRUTH))
    poor, good = (one("ds-cnn", 0.95, few=Score(accuracy=share, macro_f1=share)) for share in (0.7, 0.93))
    (said,) = replace(outcome(poor), few=few).warnings
    assert said.startswith("a device that joins with 15 labelled samples: ds-cnn reaches 0.700 there, a plain baseline")
    assert replace(outcome(good), few=few).warnings == []
    assert outcome(poor).warnings == []


def test_devices_that_do_not_train_are_evaluated_with_few_labels_too(
    samples: Samples, tmp_path: Path, monkeypatch: Any
) -> None:
    monkeypatch.setattr(model_trial, "MAX_ROUNDS", 2)
    assert tried(samples).few is None, "a fifth of 48 samples is few"
    found = tried(load(waves.write_waves(tmp_path / "more.npz", rows=120)))
    assert found.few is not None
    assert found.few.number == 5 * len(waves.CLASSES)
    assert found.tried[0].few is not None
    assert isinstance(found.baselines, SimpleBaselines)
    assert found.few.baselines.truth.sum() > found.baselines.truth.sum(), "fewer labels leave more to evaluate"


@pytest.mark.slow
def test_a_model_that_only_memorises_real_samples_is_warned_of_and_a_good_one_is_not(
    tmp_path: Path, monkeypatch: Any
) -> None:
    wide = (Model("mlp", "mlp", {"hidden": [64, 64]}),)
    for mixed_up in (True, False):
        samples = load(waves.write_waves(tmp_path / f"{mixed_up}.npz", clients=8, rows=120, mixed_up=mixed_up))
        found = tried(samples, models=wide, method="pfldyn-proto")
        said = [text for text in found.warnings if "memorised: loss 0.0" in text]
        assert bool(said) == mixed_up, (found.rows(), found.warnings)


def test_tokens_have_no_plain_baseline(monkeypatch: Any) -> None:
    part = SimpleNamespace(x=np.zeros((4, 3), np.int64), y=np.arange(4) % 2)
    work: Any = SimpleNamespace(train=["a"], own=lambda share: part, later=lambda share: part, classes=("p", "q"))
    found = simple_baselines.on_test_samples(work)
    assert (found.plain, found.frequent.accuracy) == (None, 0.5)


# The command ----------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_init_writes_the_chosen_model_shows_the_table_and_keeps_the_fleet_the_second_time(
    tmp_path: Path, monkeypatch: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    data, fleet = str(waves.write_waves(tmp_path / "pumps.npz")), tmp_path / "fleet"
    monkeypatch.setattr(model_trial, "MAX_ROUNDS", 1)
    monkeypatch.setattr(model_trial, "models_for", lambda samples: SMALL[:1])
    cli.init(fleet, data)
    printed = capsys.readouterr()
    assert "model " in printed.out
    assert "mlp *" in printed.out
    assert "nearest mean on spectrum" in printed.out
    assert "--no-trial" in printed.err
    made = config.load(FleetConfig, fleet / "fleet.toml").model
    assert (made.name, dict(made.options)) == ("mlp", {"hidden": [8]})
    monkeypatch.setattr(lab, "choose_model", lambda *arguments: pytest.fail("a fleet that is there keeps its model"))
    cli.init(fleet, data)


def test_nothing_is_tried_for_a_named_model_or_set_or_without_trial_unless_it_is_requested() -> None:
    assert first_settings.wants_trial("mine.npz", None, None)
    assert not first_settings.wants_trial("mine.npz", "mlp", None)
    assert not first_settings.wants_trial("mine.npz", None, False)
    assert not first_settings.wants_trial("heartbeat", None, None)
    assert first_settings.wants_trial("heartbeat", None, True)


def test_when_nothing_is_tried_the_reason_is_reported(samples: Samples, capsys: pytest.CaptureFixture[str]) -> None:
    few = replace(samples.take(range(6)), client=None)
    assert lab.choose_model(few, model_input.plain(few.x), "fedavg", 0) is None
    assert "no model was tried: 6 samples of one client are too few" in capsys.readouterr().err
