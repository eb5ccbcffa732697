"""Adam and Yogi compared with torch, with Algorithm 2 of Reddi et al. written out, and as a server's rule."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fleet_core.algorithms import optimizers
from fleet_core.algorithms.interface import LocalSgd, Payload, ServerRule, Update, descend
from fleet_core.algorithms.methods.average import AverageServer, Averaging
from fleet_core.algorithms.methods.meta import FedMeta, GradientServer
from fleet_core.algorithms.optimizers import ClassMoments
from fleet_core.base import trees
from tests.support.quadratics import SIZE, Vector, tree, vector

DIRECTIONS = np.random.default_rng(0).normal(size=(20, SIZE)) * np.logspace(-3, 3, SIZE)
LR = 0.01


def walked(lr: float, **how: Any) -> list[Vector]:
    """Where steps along ``DIRECTIONS`` lead, downhill from 0."""
    at, moments, found = tree(np.zeros(SIZE)), None, []
    for direction in DIRECTIONS:
        step, moments = optimizers.adam(tree(direction), moments, **how)
        at = trees.axpy(-lr, step, at)
        found.append(vector(at))
    return found


def torchs(lr: float, beta1: float, beta2: float, epsilon: float) -> list[Vector]:
    w = torch.zeros(SIZE, dtype=torch.float64, requires_grad=True)
    optimizer = torch.optim.Adam([w], lr=lr, betas=(beta1, beta2), eps=epsilon)
    found = []
    for direction in DIRECTIONS:
        w.grad = torch.tensor(direction)
        optimizer.step()
        found.append(w.detach().numpy().copy())
    return found


def reddis(lr: float, beta1: float, beta2: float, tau: float, start: float, *, yogi: bool) -> list[Vector]:
    """Reddi et al. 2021, Algorithm 2, coordinate by coordinate; their Δ points uphill."""
    x, m, v = np.zeros(SIZE), np.zeros(SIZE), np.full(SIZE, start)
    found = []
    for delta in -DIRECTIONS:
        for j in range(SIZE):
            m[j] = beta1 * m[j] + (1 - beta1) * delta[j]
            square = delta[j] ** 2
            v[j] = v[j] - (1 - beta2) * square * np.sign(v[j] - square) if yogi else beta2 * v[j] + (1 - beta2) * square
            x[j] = x[j] + lr * m[j] / (np.sqrt(v[j]) + tau)
        found.append(x.copy())
    return found


@pytest.mark.parametrize(("beta1", "beta2", "epsilon"), [(0.9, 0.999, 1e-8), (0.5, 0.9, 1e-3)])
def test_adam_is_torchs(beta1: float, beta2: float, epsilon: float) -> None:
    found = walked(LR, beta1=beta1, beta2=beta2, epsilon=epsilon)
    np.testing.assert_allclose(found, torchs(LR, beta1, beta2, epsilon), rtol=1e-12)


@pytest.mark.parametrize("yogi", [False, True])
@pytest.mark.parametrize("start", [0.0, 1e-6, 1.0])
def test_without_a_correction_of_the_start_it_is_reddis_algorithm_2(yogi: bool, start: float) -> None:
    found = walked(LR, beta1=0.9, beta2=0.99, epsilon=1e-3, corrected=False, start=start, yogi=yogi)
    np.testing.assert_allclose(found, reddis(LR, 0.9, 0.99, 1e-3, start, yogi=yogi), rtol=1e-12)


def test_yogi_forgets_a_large_gradient_slower_than_adam() -> None:
    """Its second moment falls by the value of the new square, not by a share of itself."""
    big, small = tree(np.full(SIZE, 10.0)), tree(np.full(SIZE, 0.1))
    after = {}
    for yogi in (False, True):
        _, moments = optimizers.adam(big, None, yogi=yogi)
        for _ in range(50):
            _, moments = optimizers.adam(small, moments, yogi=yogi)
        after[yogi] = vector(moments.second)[0]
    assert after[False] < 0.096
    assert after[True] > 0.099


def test_a_direction_of_zero_is_no_step() -> None:
    step, moments = optimizers.adam(tree(np.zeros(SIZE)), None)
    assert vector(step).tolist() == [0.0] * SIZE
    assert isinstance(moments, ClassMoments)


def test_a_devices_adam_remembers_from_step_to_step() -> None:
    """``descend`` with default moments equals torch's."""
    coming = iter(DIRECTIONS)
    hyper = LocalSgd(local_optimizer="adam", clip_norm=0.0)
    found = descend(tree(np.zeros(SIZE)), [lambda at: tree(next(coming))] * len(DIRECTIONS), hyper, LR)
    np.testing.assert_allclose(vector(found), torchs(LR, 0.9, 0.999, 1e-8)[-1], rtol=1e-12)


# On the server --------------------------------------------------------------------------------------------------------


def served(rule: ServerRule, hyper: Any, sign: float) -> list[Vector]:
    """The models after rounds in which two devices' mean is ``sign`` times the direction."""
    state, found = rule.init(tree(np.zeros(SIZE)), hyper), []
    for number, direction in enumerate(DIRECTIONS, start=1):
        updates = [Update(n, Payload(tree(sign * share * direction))) for n, share in (("a", 0.5), ("b", 1.5))]
        state = rule.apply(replace(state, round=number), updates, 9, hyper)
        assert state.served is state.model
        found.append(vector(state.model))
    return found


@pytest.mark.parametrize(
    ("rule", "kind", "sign"), [(AverageServer(), Averaging, -1.0), (GradientServer(), FedMeta, 1.0)],
    ids=["changes", "gradients"],
)  # fmt: skip
def test_a_servers_adam_goes_along_the_mean_change_and_against_the_mean_gradient(
    rule: ServerRule, kind: type[Any], sign: float
) -> None:
    hyper = kind(
        server_optimizer="adam", server_lr=LR, server_beta1=0.8, server_beta2=0.95, server_epsilon=1e-4
    )
    np.testing.assert_allclose(served(rule, hyper, sign), torchs(LR, 0.8, 0.95, 1e-4), rtol=1e-12)


@pytest.mark.parametrize("optimizer", ["adam", "yogi"])
def test_a_server_start_is_reddis_form(optimizer: str) -> None:
    hyper = Averaging(server_optimizer=optimizer, server_lr=LR, server_start=1e-6)
    wanted = reddis(LR, 0.9, 0.99, 1e-3, 1e-6, yogi=optimizer == "yogi")
    np.testing.assert_allclose(served(AverageServer(), hyper, -1.0), wanted, rtol=1e-12)


def test_a_servers_sgd_on_gradients_is_fedmetas_algorithm_1() -> None:
    hyper = FedMeta(server_optimizer="sgd", server_lr=LR)
    np.testing.assert_allclose(served(GradientServer(), hyper, 1.0), -LR * np.cumsum(DIRECTIONS, 0), rtol=1e-12)
