"""pFedGP: the posterior compared with numerical integration, the loss with finite differences in float64 and with
numpy's answers, and the tree of classes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch

from fleet_core.algorithms.methods.pfedgp import Gaussian, gaussian_of
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.errors import StateError
from fleet_core.data.samples import stratified
from fleet_core.learning import gaussian_loss as learned
from fleet_core.personalization import gaussian_process
from fleet_core.personalization.gaussian_process import Processes

RBF, LINEAR = Gaussian(length_scale=1.5), Gaussian(kernel="linear", output_scale=0.5, length_scale=1.2)
each_kernel = pytest.mark.parametrize("how", [RBF, LINEAR], ids=["rbf", "linear"])


def samples(number: int = 40, classes: int = 3, seed: int = 0) -> tuple[Any, Any]:
    rng = np.random.default_rng(seed)
    y = np.resize(np.arange(classes), number)
    return rng.normal(size=(number, 5)) + 3 * np.eye(5)[y], y


def numbers(*arrays: Any) -> Any:
    return tuple(torch.tensor(array) for array in arrays)


def loss_of(z: Any, y: Any, asked: Any, labels: Any, how: Gaussian) -> torch.Tensor:
    return learned.loss(torch.tensor(z), torch.tensor(y), torch.tensor(asked), torch.tensor(labels), how)


def gradient_of(loss: torch.Tensor, *leaves: torch.Tensor) -> Any:
    return torch.autograd.grad(loss, leaves)


@each_kernel
def test_the_loss_is_what_the_answers_of_numpy_say(how: Gaussian) -> None:
    z, y = samples(60, 4)
    answers = Processes.of(z[:40], y[:40], 6, how).probabilities(z[40:])
    found = loss_of(z[:40], y[:40], z[40:], y[40:], how)
    assert float(found) == pytest.approx(-np.log(answers[np.arange(20), y[40:]].astype(np.float64)).mean(), rel=1e-5)
    np.testing.assert_allclose(answers.sum(1), 1, rtol=1e-6)
    assert (answers[:, 4:] == 0).all(), "of classes without samples"


@each_kernel
def test_the_gradient_is_that_of_finite_differences_with_the_augmentation_held(
    monkeypatch: pytest.MonkeyPatch, how: Gaussian
) -> None:
    z, y = samples(24, 2)
    support, query = (torch.tensor(part, requires_grad=True) for part in (z[:16], z[16:]))
    held = gaussian_process.augmentation(
        gaussian_process.kernel(z[:16], z[:16], how), np.where(y[:16] == side(z, y), 1.0, -1.0), 10
    )
    monkeypatch.setattr(gaussian_process, "augmentation", lambda *arguments: held)
    labels = torch.tensor(y)
    slopes = gradient_of(learned.loss(support, labels[:16], query, labels[16:], how), support, query)

    def at(moved_support: Any, moved_query: Any) -> float:
        return float(loss_of(moved_support, y[:16], moved_query, y[16:], how))

    for row, column in ((0, 0), (3, 1), (7, 4)):
        unit = np.zeros((16, 5))
        unit[row, column] = 1e-6
        slope = (at(z[:16] + unit, z[16:]) - at(z[:16] - unit, z[16:])) / 2e-6
        assert float(slopes[0][row, column]) == pytest.approx(slope, rel=1e-5, abs=1e-8)
        unit = unit[:8]
        slope = (at(z[:16], z[16:] + unit) - at(z[:16], z[16:] - unit)) / 2e-6
        assert float(slopes[1][row, column]) == pytest.approx(slope, rel=1e-5, abs=1e-8)


def side(z: Any, y: Any) -> int:
    """The left class of the root."""
    (node,) = gaussian_process.tree(z[:16], y[:16])
    return node.left[0]


def test_the_augmentation_comes_to_rest_and_its_posterior_is_near_the_true_one() -> None:
    """One sample with the label 1 under the prior N(0, 1): the posterior ∝ N(f; 0, 1) σ(f), integrated densely."""
    k, one = np.array([[1.0]]), np.ones(1)
    omega = gaussian_process.augmentation(k, one, 60)
    np.testing.assert_allclose(gaussian_process.augmentation(k, one, 61), omega, rtol=1e-9)
    mean = float(k[0, 0] * 0.5 / (1 + k[0, 0] * omega[0]))
    variance = float(k[0, 0] / (1 + k[0, 0] * omega[0]))
    c = np.sqrt(mean**2 + variance)
    assert omega[0] == pytest.approx(np.tanh(c / 2) / (2 * c), rel=1e-9)
    f = np.linspace(-20, 20, 200_001)
    dense = np.exp(-(f**2) / 2) / (1 + np.exp(-f))
    dense /= dense.sum()
    assert mean == pytest.approx(float((f * dense).sum()), rel=0.05)
    assert variance == pytest.approx(float((f**2 * dense).sum() - (f * dense).sum() ** 2), rel=0.05)


def test_the_likelihood_is_the_integral_of_the_sigmoid() -> None:
    mean, variance = numbers([0.3, -2.0], [0.5, 4.0])
    f = np.linspace(-40, 40, 400_001)
    for row in range(2):
        density = np.exp(-((f - float(mean[row])) ** 2) / (2 * float(variance[row])))
        dense = (density / (1 + np.exp(-f))).sum() / density.sum()
        found = learned.log_likelihood(mean, variance, torch.ones(2, dtype=torch.float64))[row]
        assert float(found.exp()) == pytest.approx(dense, rel=1e-4)


@each_kernel
def test_answers_follow_the_samples_and_not_the_numbers_of_their_classes(how: Gaussian) -> None:
    z, y = samples(90, 3)
    answers = Processes.of(z[:60], y[:60], 3, how).probabilities(z[60:])
    assert (answers.argmax(1) == y[60:]).mean() > 0.8
    other = np.array([2, 0, 1])
    again = Processes.of(z[:60], other[y[:60]], 3, how).probabilities(z[60:])
    np.testing.assert_allclose(again[:, other], answers, atol=1e-6)


def test_a_tree_has_a_leaf_for_every_class_and_divides_what_is_far_apart_first() -> None:
    z = np.array([[0.0, 0], [0, 1], [9, 0], [9, 1], [9.5, 0.5]])
    nodes = gaussian_process.tree(z, np.arange(5))
    assert {nodes[0].left, nodes[0].right} == {(0, 1), (2, 3, 4)}
    assert len(nodes) == 4
    assert gaussian_process.tree(z, np.zeros(5, np.int64)) == []
    same = gaussian_process.tree(np.ones((4, 2)), np.arange(4))
    assert sorted(len(node.left) + len(node.right) for node in same) == [2, 2, 4]


def test_a_device_with_a_single_class_answers_with_it_and_one_without_samples_not_at_all() -> None:
    z, _ = samples(5)
    found = Processes.of(z, np.full(5, 2), 4, RBF).probabilities(z)
    assert found.tolist() == [[0, 0, 1, 0]] * 5
    assert float(loss_of(z, np.full(5, 2), z, np.full(5, 2), RBF)) == 0
    with pytest.raises(StateError, match="no labelled sample"):
        Processes.of(z[:0], np.zeros(0, np.int64), 4, RBF)


def test_of_many_samples_as_many_of_each_class_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaussian_process, "MAX_SAMPLES", 20)
    z, y = samples(100, 2)
    y[:90] = 0
    processes = Processes.of(z, y, 3, RBF)
    assert len(processes.z) == 20
    rows = stratified(y, 20)
    assert np.bincount(y[rows]).tolist() == [20 - (y == 1).sum(), (y == 1).sum()]


def test_the_kernels_settings_are_the_methods() -> None:
    hyper = METHODS["pfedgp"].hyper(length_scale=2.0, local_steps=3)
    assert gaussian_of(hyper) == replace(Gaussian(), length_scale=2.0)
