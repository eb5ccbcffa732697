"""Losses in float64 compared with loops in numpy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from fleet_core.learning import losses
from fleet_core.tasks.labels import MultiLabel

Array = np.ndarray[Any, Any]
DISTANCE: dict[str, Callable[[Array, Array], float]] = {
    "squared": lambda a, b: float(((a - b) ** 2).sum()),
    "norm": lambda a, b: float(np.sqrt(((a - b) ** 2).sum())),
}
kinds = pytest.mark.parametrize("kind", DISTANCE)


def cloud(number: int = 11, seed: int = 0, missing: int | None = 2) -> tuple[Array, Array]:
    """z float64 [number, 4], and labels of five classes of different sizes, one without samples."""
    rng = np.random.default_rng(seed)
    y = rng.choice([k for k in range(5) if k != missing], number, p=None if missing is None else [0.4, 0.3, 0.2, 0.1])
    return rng.normal(size=(number, 4)), y


def centroids(z: Array, y: Array) -> dict[int, Array]:
    return {int(k): z[y == k].mean(0) for k in np.unique(y)}


def tensors(*arrays: Array) -> list[torch.Tensor]:
    return [torch.tensor(array) for array in arrays]


# Cross-entropy, of logits and of distances ----------------------------------------------------------------------------


def test_cross_entropy_is_torchs() -> None:
    logits, y = tensors(np.random.default_rng(0).normal(size=(7, 4)), np.arange(7) % 4)
    torch.testing.assert_close(losses.cross_entropy(logits, y), nn.functional.cross_entropy(logits, y))


def plain_proto_loss(z_support: Array, y_support: Array, z: Array, y: Array, kind: str) -> float:
    means, terms = centroids(z_support, y_support), []
    for one, label in zip(z, y, strict=True):
        if int(label) in means:
            scores = {k: -DISTANCE[kind](one, mean) for k, mean in means.items()}
            terms.append(np.log(sum(np.exp(score) for score in scores.values())) - scores[int(label)])
    return float(np.mean(terms)) if terms else 0.0


@kinds
@pytest.mark.parametrize("seed", range(4))
def test_proto_loss_is_the_cross_entropy_of_distances_to_class_means(kind: str, seed: int) -> None:
    (z_support, y_support), (z, y) = cloud(12, seed), cloud(9, seed + 10, missing=None)
    one, of_one, other, of_other = tensors(z_support, y_support, z, y)
    found = losses.proto_loss(one, of_one, other, of_other, 5, kind)
    assert float(found) == pytest.approx(plain_proto_loss(z_support, y_support, z, y, kind), rel=1e-12)


def test_proto_loss_by_hand() -> None:
    z_support = torch.tensor([[0.0, 0.0], [2.0, 0.0], [0.0, 3.0]], dtype=torch.float64)
    query = torch.tensor([[1.0, 1.0]], dtype=torch.float64)
    found = losses.proto_loss(z_support, torch.tensor([0, 0, 1]), query, torch.tensor([1]), classes=2)
    near, far = np.exp(-1.0), np.exp(-5.0)  # to (1, 0) and to (0, 3)
    assert float(found) == pytest.approx(-np.log(far / (near + far)), rel=1e-12)


@kinds
def test_a_class_that_the_support_lacks_changes_nothing(kind: str) -> None:
    z, y, query_y = *tensors(cloud(9)[0]), torch.tensor([0, 1, 0, 1, 0]), torch.tensor([0, 1, 1, 0])
    few, many = (losses.proto_loss(z[:5], y, z[5:], query_y, classes, kind) for classes in (2, 7))
    assert float(few) == pytest.approx(float(many), rel=1e-14)
    with_stranger = losses.proto_loss(z[:5], y, z[5:8], torch.tensor([0, 1, 6]), 7, kind)
    without = losses.proto_loss(z[:5], y, z[5:7], torch.tensor([0, 1]), 7, kind)
    assert float(with_stranger) == pytest.approx(float(without), rel=1e-14)


def test_an_episode_without_a_common_class_has_loss_and_gradient_zero() -> None:
    z = torch.tensor(cloud(4)[0], requires_grad=True)
    loss = losses.proto_loss(z[:2], torch.tensor([0, 0]), z[2:], torch.tensor([1, 1]), classes=2)
    (gradient,) = torch.autograd.grad(loss, [z])
    assert float(loss.detach()) == 0
    assert not gradient.any()


@kinds
def test_coinciding_points_have_a_finite_gradient(kind: str) -> None:
    z = torch.ones(6, 4, dtype=torch.float64, requires_grad=True)
    y = torch.arange(6) % 2
    margin = torch.tensor(1.0, dtype=torch.float64)
    every = losses.proto_loss(z[:4], y[:4], z[4:], y[4:], 2, kind)
    every = every + losses.centroid_triplets(z, y, 2, margin, kind, total=True, to_centroid=False)
    every = every + losses.spread(z, y, 2, kind, printed=True) + losses.pull(z, y, torch.ones(2, 4), torch.ones(2))
    (gradient,) = torch.autograd.grad(every, [z])
    assert bool(torch.isfinite(gradient).all())


# MetaVers -------------------------------------------------------------------------------------------------------------


@kinds
@pytest.mark.parametrize("printed", [True, False])
def test_the_margin_is_the_mean_distance_between_centroids(kind: str, printed: bool) -> None:
    """Lim, eq. 3: over ordered pairs, divided by (N − 1)² as printed, or by their number."""
    z, y = cloud()
    means = centroids(z, y)
    n = len(means)
    assert n == 4
    pairs = [DISTANCE[kind](means[k], means[j]) for k in means for j in means if j != k]
    found = losses.spread(torch.tensor(z), torch.tensor(y), 5, kind, printed)
    assert float(found) == pytest.approx(sum(pairs) / ((n - 1) ** 2 if printed else n * (n - 1)), rel=1e-9)


def test_a_single_class_has_no_margin() -> None:
    z, y = tensors(cloud()[0], np.full(11, 3))
    assert float(losses.spread(z, y, 5, "norm", True)) == float(losses.spread(z, y, 5, "norm", False)) == 0
    triplets = losses.centroid_triplets(z, y, 5, torch.tensor(9.0), "norm", total=True, to_centroid=False)
    assert float(triplets) == 0


@kinds
@pytest.mark.parametrize("to_centroid", [False, True])
@pytest.mark.parametrize("total", [True, False])
def test_triplets_are_those_of_the_loop(kind: str, to_centroid: bool, total: bool) -> None:
    """Lim, eq. 4: max(d(a_k, x_p) − d(x_p, x_n) + m, 0), or the program's max(d(a_k, x_p) − d(a_k, x_n) + m, 0)."""
    z, y = cloud()
    means, away, margin, terms = centroids(z, y), DISTANCE[kind], 1.25, []
    for p in range(len(z)):
        for n in range(len(z)):
            if y[n] != y[p]:
                anchor = means[int(y[p])]
                negative = away(anchor, z[n]) if to_centroid else away(z[p], z[n])
                terms.append(max(away(anchor, z[p]) - negative + margin, 0.0))
    assert min(terms) == 0 < max(terms)
    found = losses.centroid_triplets(
        torch.tensor(z), torch.tensor(y), 5, torch.tensor(margin, dtype=torch.float64), kind,
        total=total, to_centroid=to_centroid,
    )  # fmt: skip
    assert float(found) == pytest.approx(sum(terms) if total else np.mean(terms), rel=1e-9)


# FedProto -------------------------------------------------------------------------------------------------------------


def test_the_pull_is_the_distance_between_the_means_of_classes_that_both_have() -> None:
    """Tan, eq. 8. The fleet lacks class 0, the batch class 2."""
    (z, y), fleet = cloud(), np.random.default_rng(1).normal(size=(5, 4))
    count, means = np.array([0.0, 3, 2, 1, 8]), centroids(z, y)
    wanted = sum(DISTANCE["norm"](mean, fleet[k]) for k, mean in means.items() if count[k])
    assert {0, 1} <= set(means)
    assert float(losses.pull(*tensors(z, y, fleet, count))) == pytest.approx(wanted, rel=1e-12)
    assert float(losses.pull(*tensors(z, y, fleet, np.zeros(5)))) == 0


def test_the_pull_by_the_square_is_the_authors_mean_over_samples_and_features() -> None:
    (z, y), fleet = cloud(), np.random.default_rng(1).normal(size=(5, 4))
    count = np.array([0.0, 3, 2, 1, 8])
    goal = np.stack([fleet[label] if count[label] else own for own, label in zip(z, y, strict=True)])
    assert {0, 1} <= set(y.tolist())
    assert float(losses.pull(*tensors(z, y, fleet, count), square=True)) == pytest.approx(
        np.square(z - goal).mean(), rel=1e-12)
    assert float(losses.pull(*tensors(z, y, fleet, np.zeros(5)), square=True)) == 0


# Labels have no numbers -----------------------------------------------------------------------------------------------


@kinds
def test_no_loss_knows_the_numbers_of_the_labels(kind: str) -> None:
    (z, y), permuted = tensors(*cloud(30)), torch.tensor([2, 0, 3, 1, 4])
    margin = torch.tensor(0.5, dtype=torch.float64)

    def every(y: torch.Tensor) -> list[float]:
        triplets = losses.centroid_triplets(z, y, 5, margin, kind, total=True, to_centroid=False)
        return [
            float(losses.proto_loss(z[:20], y[:20], z[20:], y[20:], 5, kind)),
            float(losses.spread(z, y, 5, kind, printed=True)), float(triplets),
        ]  # fmt: skip

    assert every(permuted[y]) == pytest.approx(every(y), rel=1e-12)


def test_scores_follow_a_permutation_of_the_labels_to_the_bit() -> None:
    (z, y), permuted = tensors(*cloud(30)), torch.tensor([2, 0, 3, 1, 4])
    scores, again = (losses.proto_logits(z, *losses.prototypes(z[:20], labels[:20], 5)) for labels in (y, permuted[y]))
    assert torch.equal(again[:, permuted], scores)


def test_the_loss_of_labels_is_the_binary_cross_entropy_and_leaves_out_what_is_not_known() -> None:
    task = MultiLabel(("a", "b"))
    logits, y = 4 * torch.randn(30, 2, dtype=torch.float64), (torch.rand(30, 2) < 0.5).double()
    wanted = nn.functional.binary_cross_entropy_with_logits(logits, y)
    torch.testing.assert_close(losses.of_task(task)(logits, y), wanted)
    answers = torch.tensor([[0.0, 2.0]], requires_grad=True)
    (slope,) = torch.autograd.grad(losses.known_of_task(task)(answers, torch.tensor([[1.0, torch.nan]])), answers)
    assert slope.tolist() == [[-0.5, 0.0]]
