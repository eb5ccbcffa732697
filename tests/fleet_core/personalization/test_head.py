"""The head that a device fits on its embedded samples: compared with torch's optimizer, and its invariants."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fleet_core.base.errors import DataError, StateError
from fleet_core.personalization.linear_head import DECAY, Head, LabelHead
from fleet_core.personalization.nearest import softmax
from fleet_core.tasks.labels import sigmoid

Array = np.ndarray[Any, Any]


def cloud(number: int = 60, width: int = 5, classes: int = 3, *, noise: float = 1.5, seed: int = 0) -> tuple[Any, Any]:
    """Classes that overlap, far from the origin."""
    rng = np.random.default_rng(seed)
    y = np.arange(number) % classes
    z = rng.normal(size=(classes, width))[y] + noise * rng.normal(size=(number, width)) + 7
    return z.astype(np.float32), y.astype(np.int64)


def by_torch(z: Array, y: Array, classes: int, decay: float = DECAY) -> Any:
    """Probabilities of the minimiser of the same loss, found by L-BFGS in float64: z -> [n, N]."""
    mean = z.mean(0, dtype=np.float64)
    size = float(np.sqrt(((z - mean) ** 2).mean()))

    def scaled(at: Array) -> torch.Tensor:
        return torch.tensor((at - mean) / size)

    weight = torch.zeros(classes, z.shape[1], dtype=torch.float64, requires_grad=True)
    bias = torch.zeros(classes, dtype=torch.float64, requires_grad=True)
    search: Any = torch.optim.LBFGS([weight, bias], max_iter=2000, tolerance_grad=1e-12, tolerance_change=1e-16,
                               line_search_fn="strong_wolfe")

    def loss() -> Any:
        search.zero_grad()
        value = torch.nn.functional.cross_entropy(scaled(z) @ weight.T + bias, torch.tensor(y))
        value = value + decay / 2 * weight.square().sum()
        torch.autograd.backward(value)
        return value

    search.step(loss)
    return lambda at: torch.softmax(scaled(at) @ weight.T + bias, 1).detach().numpy()


@pytest.mark.parametrize(("number", "width"), [(60, 5), (12, 40), (7, 3)])
def test_with_enough_steps_the_head_is_the_minimiser_that_torch_finds(number: int, width: int) -> None:
    z, y = cloud(number, width)
    found, wanted = Head.fit(z, y, 3, steps=6_000), by_torch(z, y, 3)
    asked = np.concatenate([z, cloud(30, width, seed=1)[0]])
    np.testing.assert_allclose(found.probabilities(asked), wanted(asked), atol=1e-4)


def test_the_usual_steps_answer_nearly_as_the_minimiser_does() -> None:
    z, y = cloud(90, 20)
    asked, _ = cloud(300, 20, seed=2)
    found, wanted = Head.fit(z, y, 3).probabilities(asked), by_torch(z, y, 3)(asked)
    assert (found.argmax(1) == wanted.argmax(1)).mean() > 0.95
    assert np.abs(found - wanted).mean() < 0.02


def test_every_further_step_brings_the_loss_down_over_a_stretch() -> None:
    z, y = cloud()
    losses = [float(-np.log(Head.fit(z, y, 3, steps=s).probabilities(z)[np.arange(60), y]).mean()) for s in (0, 5, 50)]
    assert losses[0] == pytest.approx(np.log(3), rel=1e-6)
    assert losses[0] > losses[1] > losses[2]


def test_a_class_without_samples_is_never_answered_and_does_not_affect_the_others() -> None:
    z, y = cloud(classes=2)
    alone, among = Head.fit(z, y, 2), Head.fit(z, y * 3, 5)  # classes 0 and 3 of five
    found = among.probabilities(z)
    assert (found[:, [1, 2, 4]] == 0).all()
    np.testing.assert_allclose(found[:, [0, 3]], alone.probabilities(z), atol=1e-6)


def test_one_class_alone_is_answered_for_certain() -> None:
    z, _ = cloud(5)
    assert (Head.fit(z, np.full(5, 2), 4).probabilities(z + 100) == np.eye(4)[2]).all()


@pytest.mark.parametrize("classes", [2, 5])
def test_one_sample_per_class_is_enough(classes: int) -> None:
    z, y = cloud(classes, 8, classes)
    assert (Head.fit(z, y, classes).probabilities(z).argmax(1) == y).all()


def test_equal_samples_of_two_classes_are_answered_evenly() -> None:
    z = np.ones((4, 3), np.float32)
    np.testing.assert_allclose(Head.fit(z, np.array([0, 1, 0, 1]), 2).probabilities(z), 0.5)


@pytest.mark.parametrize("scale", [1e-6, 1.0, 1e6])
def test_the_scale_of_the_embeddings_does_not_matter(scale: float) -> None:
    z, y = cloud()
    z -= 7
    usual, scaled = Head.fit(z, y, 3), Head.fit((z * scale).astype(np.float32), y, 3)
    np.testing.assert_allclose(scaled.probabilities((z * scale).astype(np.float32)), usual.probabilities(z), atol=1e-4)


def test_the_order_of_the_samples_hardly_matters_and_the_same_order_gives_the_same_bits() -> None:
    z, y = cloud()
    one, again, turned = Head.fit(z, y, 3), Head.fit(z, y, 3), Head.fit(z[::-1], y[::-1], 3)
    assert np.array_equal(one.weight, again.weight)
    assert np.array_equal(one.bias, again.bias)
    np.testing.assert_allclose(turned.probabilities(z), one.probabilities(z), atol=1e-5)


def test_answers_are_the_softmax_of_a_linear_map_in_float32() -> None:
    z, y = cloud()
    head = Head.fit(z, y, 3)
    assert (head.weight.dtype, head.bias.dtype, head.weight.shape) == (np.float32, np.float32, (3, 5))
    np.testing.assert_array_equal(head.probabilities(z), softmax(z @ head.weight.T + head.bias))
    np.testing.assert_allclose(head.probabilities(z).sum(1), 1, rtol=1e-6)


def test_what_is_no_support_set_is_refused() -> None:
    z, y = cloud(6)
    with pytest.raises(StateError, match="no labelled sample"):
        Head.fit(z[:0], y[:0], 3)
    for labels, classes in ((y[:5], 3), (y, 2), (y - 1, 3)):
        with pytest.raises(DataError, match="labels"):
            Head.fit(z, labels, classes)
    with pytest.raises(DataError, match="not finite"):
        Head.fit(np.where(z == z[0, 0], np.nan, z), y, 3)


# Any number of labels -------------------------------------------------------------------------------------------------


def test_a_head_of_labels_minimises_the_cross_entropy_of_each_of_them() -> None:
    z, y = cloud()
    labels = np.stack([y == 0, y != 2], 1).astype(np.float64)
    head = LabelHead.fit(z, labels, steps=4000)
    size = np.sqrt(np.square(z - z.mean(0, dtype=np.float64)).mean())
    wrong = sigmoid(head.answers(z)) - labels  # the loss has no slope: by weights in units of the scaled embeddings
    slope = wrong.T @ (z - z.mean(0)) / size / len(z) + DECAY * head.weight * size
    np.testing.assert_allclose(slope, 0, atol=1e-4)
    np.testing.assert_allclose(wrong.mean(0), 0, atol=1e-4)


def test_a_label_that_no_sample_carries_gets_a_bias_only_and_is_not_answered() -> None:
    z, y = cloud()
    head = LabelHead.fit(z, np.stack([y == 0, np.zeros(len(y))], 1).astype(np.float64))
    np.testing.assert_allclose(head.weight[1], 0, atol=1e-6)
    assert (head.answers(z)[:, 1] < 0).all()


def test_a_head_of_labels_refuses_other_shapes() -> None:
    z, y = cloud()
    with pytest.raises(StateError, match="no labelled sample"):
        LabelHead.fit(z[:0], np.zeros((0, 2)))
    with pytest.raises(DataError, match=r"expected \[S, D\] with \[S, N\]"):
        LabelHead.fit(z, y.astype(np.float64))
    with pytest.raises(DataError, match="not finite"):
        LabelHead.fit(np.full_like(z, np.nan), np.zeros((len(z), 2)))
