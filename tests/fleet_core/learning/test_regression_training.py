"""Training of numbers instead of classes: losses, refusals, and every method that can, against plain baselines."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage
from fleet_core.base.errors import BundleError, ConfigError, DataError
from fleet_core.learning import local_training, losses, models
from fleet_core.model.layout import InputSpec, Layout
from fleet_core.personalization.ridge_head import RidgeHead
from fleet_core.tasks.regression import Errors, Regression
from tests.support.simulation import Fleet, Samples, hyper_of

VALUES, DEVICES = 8, 5
ABLE = sorted(name for name, method in METHODS.items() if not method.needs_classes)
UNABLE = sorted(set(METHODS) - set(ABLE))


def drawn(number: int, seed: int, offset: float = 0.0) -> Samples:
    """Degrees: a smooth function of two directions, and a device's own offset; noise in all values."""
    directions = np.random.default_rng(4).normal(size=(VALUES, 2)) / VALUES**0.5
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(number, VALUES))
    signal = np.tanh(x @ directions) @ [1.0, -0.7]
    return x.astype(np.float32), 20 + offset + 4 * signal + 0.2 * rng.normal(size=number)


def fleet_of(name: str, loss: str = "huber", offsets: float = 0.0, **changes: Any) -> Fleet:
    data = [drawn(40, i, offsets * (i - 2)) for i in range(DEVICES)]
    task = Regression.of(("celsius",), np.concatenate([y for _, y in data]), loss)
    layout = models.describe("mlp", InputSpec((VALUES,)), (), {"hidden": [16], "activation": "elu"}, task)
    return Fleet(name, hyper_of(name, **changes), data, layout)


def errors_of(fleet: Fleet, params: Any, later: Samples) -> Errors:
    task = fleet.layout.task
    assert isinstance(task, Regression)
    answers = local_training.predict_logits(fleet.model, params, later[0])
    return Errors.of(task, later[1], task.in_units(answers))


# Losses ---------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("loss", ["squared", "huber"])
def test_the_losses_are_those_of_torch(loss: str) -> None:
    task = Regression(("a", "b"), (0.0, 0.0), (1.0, 1.0), loss)
    answers, y = torch.randn(30, 2, dtype=torch.float64) * 3, torch.randn(30, 2, dtype=torch.float64)
    wanted = {"squared": torch.nn.functional.mse_loss(answers, y) / 2,
              "huber": torch.nn.functional.huber_loss(answers, y)}[loss]
    torch.testing.assert_close(losses.of_task(task)(answers, y), wanted)


def test_targets_that_are_nan_neither_count_nor_give_a_gradient() -> None:
    task = Regression(("a",), (0.0,), (1.0,))
    answers = torch.tensor([[3.0], [5.0]], requires_grad=True)
    value = losses.known_of_task(task)(answers, torch.tensor([[1.0], [torch.nan]]))
    (slope,) = torch.autograd.grad(value, answers)
    assert value.item() == 1.5
    assert slope.tolist() == [[1.0], [0.0]]
    assert losses.known_of_task(task)(answers, torch.full((2, 1), torch.nan)).item() == 0


# Layout ---------------------------------------------------------------------------------------------------------------


def test_a_task_belongs_to_the_layout_and_its_hash() -> None:
    layout = fleet_of("fedavg").layout
    assert layout.answers == ("celsius",)
    assert Layout.from_json(layout.to_json()) == layout
    assert layout.hash != fleet_of("fedavg", loss="squared").layout.hash


def test_a_layout_of_classes_says_nothing_of_tasks() -> None:
    layout = models.describe("mlp", InputSpec((3,)), ("a", "b"), {"hidden": [4]})
    assert "task" not in layout.to_json()
    assert layout.answers == ("a", "b")


def test_a_malformed_task_is_a_malformed_layout() -> None:
    text = fleet_of("fedavg").layout.to_json()
    for changed in (text.replace('"outputs":["celsius"]', '"outputs":[]'), text.replace("regression", "ranking")):
        assert changed != text
        with pytest.raises(BundleError, match="malformed"):
            Layout.from_json(changed)


def test_a_model_has_classes_or_a_task() -> None:
    with pytest.raises(ConfigError, match="regression with 2 classes"):
        models.describe("mlp", InputSpec((3,)), ("a", "b"), {}, Regression(("t",), (0.0,), (1.0,)))


# Training -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", UNABLE)
def test_a_method_that_needs_classes_is_refused_by_name(name: str) -> None:
    with pytest.raises(ConfigError, match=f"{name} cannot learn regression"):
        models.check_groups(METHODS[name], fleet_of("fedavg").layout)
    with pytest.raises(ConfigError, match=f"{name} cannot learn regression"):
        fleet_of(name).round()


@pytest.mark.slow
@pytest.mark.parametrize("name", ABLE)
def test_every_other_method_takes_a_round(name: str) -> None:
    fleet = fleet_of(name, local_steps=2)
    assert all(np.isfinite(result.loss) for result in fleet.round().values())


def test_targets_of_another_shape_are_refused_before_training() -> None:
    fleet = fleet_of("fedavg")
    x, y = fleet.data[0]
    fleet.data = [(x, np.stack([y, y], 1))]
    with pytest.raises(DataError, match=r"shape \[40, 2\]"):
        fleet.trained([0])


@pytest.mark.parametrize("name", ["fedavg", "per-fedavg-exact", "fedmeta-metasgd"])
def test_devices_side_by_side_and_padded_train_as_alone(name: str) -> None:
    fleet = fleet_of(name, local_steps=3)
    fleet.data = [(x[: 30 + 2 * i], y[: 30 + 2 * i]) for i, (x, y) in enumerate(fleet.data)]
    alone = fleet.trained()
    fleet.together = fleet.padded = True
    for i, result in fleet.trained().items():
        assert result.loss == pytest.approx(alone[i].loss, rel=1e-4)
        for key, array in storage.flatten(result.update.groups).items():
            np.testing.assert_allclose(array, storage.flatten(alone[i].update.groups)[key], atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("loss", ["huber", "squared"])
def test_a_fleet_answers_better_than_the_mean_and_than_a_device_alone(loss: str) -> None:
    """In degrees, on samples that no device has seen; alone is ridge regression on the device's own raw samples."""
    fleet = fleet_of("fedavg", loss, local_steps=20, client_lr=0.1)
    fleet.together = True
    for _ in range(40):
        fleet.round()
    later = [drawn(100, 100 + i) for i in range(DEVICES)]
    found = [errors_of(fleet, fleet.evaluated, samples) for samples in later]
    fleets = sum(found[1:], found[0])
    task = fleet.layout.task
    assert isinstance(task, Regression)
    alone = [Errors.of(task, y, RidgeHead.fit(one[0], one[1][:, None]).answers(x))
             for one, (x, y) in zip(fleet.data, later, strict=True)]
    device = sum(alone[1:], alone[0])
    assert fleets.r2[0] is not None
    assert device.r2[0] is not None
    assert fleets.r2[0] > max(device.r2[0], 0.5)
    assert fleets.mae is not None
    assert device.mae is not None
    assert fleets.mae < device.mae


@pytest.mark.slow
def test_fine_tuning_and_a_ridge_head_learn_a_new_devices_own_offset() -> None:
    hyper = {"local_steps": 20, "client_lr": 0.1, "inner_lr": 0.3, "inner_steps": 5}
    fleet = fleet_of("per-fedavg-fo", "squared", offsets=3.0, **hyper)
    fleet.together = True
    for _ in range(40):
        fleet.round()
    own, later = drawn(30, 50, 9.0), drawn(200, 51, 9.0)
    before, tuned = errors_of(fleet, fleet.evaluated, later), errors_of(fleet, fleet.own(own), later)
    z = local_training.embed(fleet.model, fleet.evaluated, own[0])
    head = RidgeHead.fit(z, own[1][:, None])
    task = fleet.layout.task
    assert isinstance(task, Regression)
    ridge = Errors.of(task, later[1], head.answers(local_training.embed(fleet.model, fleet.evaluated, later[0])))
    assert before.mae is not None
    assert tuned.mae is not None
    assert ridge.mae is not None
    assert tuned.mae[0] < 0.5 * before.mae[0]
    assert ridge.mae[0] < 0.5 * before.mae[0]
