"""Errors on the evaluated samples without a fleet's model: of each device's mean, and of plain ridge regression.

The counterpart of ``simple_baselines`` for models that predict numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from cloud_server.figures.scores import ERROR as MAE_IN_DEVIATIONS
from cloud_server.laboratory.compare.finished_runs import ERROR
from cloud_server.laboratory.plan.workload import Part, Workload
from fleet_core.personalization.ridge_head import RidgeHead
from fleet_core.tasks.regression import Errors, Regression

Array = np.ndarray[Any, Any]

BASELINES = (("ridge", "ridge regression on the samples of all devices"), ("own_mean", "each device's mean"))
"""(key of its facts, its title)"""
MOST_VALUES, MOST_SAMPLES = 2000, 5000
"""Values of a sample with which ridge regression is computed; samples that it learns from, spread over all."""
NO_BETTER = 0.98
"""A model whose error is more than this share of that of the means is no better than they are."""


@dataclass(frozen=True)
class ErrorBaselines:
    """own_mean: MAE in deviations if each device always answers the mean of its training targets. ridge: of ridge
    regression on the training samples of all devices; None for tokens and for large samples."""

    own_mean: float
    ridge: float | None

    def facts(self) -> dict[str, Any]:
        found = {"measure": ERROR, "own_mean": self.own_mean}
        return found if self.ridge is None else {**found, "ridge": self.ridge}

    def near_mean(self, error: float) -> bool:
        return error > NO_BETTER * self.own_mean

    def warnings(self, name: str, error: float, rounds: int, *, plain: bool) -> list[str]:
        """Warnings about a model that is no better than a baseline. plain: also than ridge regression."""
        after = f"{name}: {MAE_IN_DEVIATIONS} {error:.3f} after {rounds} rounds"
        found = [f"{after}, and each device's mean has {self.own_mean:.3f}"] if self.near_mean(error) else []
        if plain and self.ridge is not None and self.ridge < error:
            found.append(f"{after}, and plain ridge regression has {self.ridge:.3f}")
        return found


def on_test_samples(work: Workload) -> ErrorBaselines:
    """The baselines on the test samples of the devices that train."""
    task = work.task
    assert task is not None
    devices = [(work.own(share), work.later(share)) for share in work.train]
    mean = _error(task, devices, lambda own, x: np.tile(own.y.mean(0), (len(x), 1)))
    if work.samples.x.dtype == np.int64 or work.samples.x[0].size > MOST_VALUES:
        return ErrorBaselines(mean, None)
    x, y = (np.concatenate(parts) for parts in zip(*((own.x, own.y) for own, _ in devices), strict=True))
    step = -(-len(x) // MOST_SAMPLES)
    head = RidgeHead.fit(_flat(x[::step]), y[::step])
    return ErrorBaselines(mean, _error(task, devices, lambda own, x: head.answers(_flat(x))))


def _flat(x: Array) -> Array:
    return x.reshape(len(x), -1).astype(np.float32)


def _error(task: Regression, devices: list[tuple[Part, Part]], answers: Callable[[Part, Array], Array]) -> float:
    """Over all samples of all devices. answers: of a device that has these samples, to others."""
    first, *others = (Errors.of(task, later.y, answers(own, later.x)) for own, later in devices if len(later.y))
    return task.distance(sum(others, first))
