"""The synthetic federated set: sizes, inputs, and models that differ between devices."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.partitions import PARTITIONS, partition
from fleet_core.data.partitions.synthetic import device_sizes, synthetic
from fleet_core.data.samples import Samples


def means(samples: Samples) -> NDArray[np.float64]:
    """The mean input of each device, [devices, 60]."""
    assert samples.client is not None
    _, first, counts = np.unique(samples.client, return_index=True, return_counts=True)
    return np.add.reduceat(samples.x.astype(np.float64), first) / counts[:, None]


def test_seed_zero_gives_the_sizes_of_pfedme() -> None:
    sizes = device_sizes(100, 0, 250, 25_810)
    assert (sizes.min(), sizes.max(), sizes.sum()) == (250, 25_810, 205_795)
    np.testing.assert_array_equal(device_sizes(100, 0, 250, 10**9), sizes)  # no size of theirs is cut


def test_sizes_stay_between_the_least_and_the_most() -> None:
    for seed in range(20):
        sizes = device_sizes(200, seed, 50, 1_000)
        assert 50 <= sizes.min() < 60
        assert sizes.max() == 1_000
        assert np.median(sizes) < sizes.mean()
    assert device_sizes(3, 2**53, 1, 9).tolist() == device_sizes(3, 2**53 % 2**32, 1, 9).tolist()


def test_devices_have_the_samples_of_their_size_in_a_row() -> None:
    samples = synthetic(devices=12, seed=4, least=20, most=60)
    assert samples.x.shape == (len(samples), 60)
    assert [str(samples.x.dtype), str(samples.y.dtype)] == ["float32", "int64"]
    assert samples.clients == tuple(f"device-{k:02}" for k in range(12))
    assert samples.client is not None
    runs = samples.client[np.flatnonzero(np.append(True, samples.client[1:] != samples.client[:-1]))]
    assert runs.tolist() == list(samples.clients)
    counts = np.unique(samples.client, return_counts=True)[1]
    np.testing.assert_array_equal(counts, device_sizes(12, 4, 20, 60))
    assert samples.classes == tuple("0123456789")
    assert 0 <= samples.y.min() <= samples.y.max() <= 9


def test_synthetic_samples_repeat_with_their_seed() -> None:
    first, again, other = (synthetic(devices=3, seed=seed, least=10, most=20) for seed in (1, 1, 2))
    np.testing.assert_array_equal(first.x, again.x)
    np.testing.assert_array_equal(first.y, again.y)
    assert len(first) != len(other) or (first.x != other.x).any()


def test_inputs_have_the_covariance_of_the_paper() -> None:
    samples = synthetic(devices=1, seed=0, least=20_000, most=20_000)
    covariance = np.cov(samples.x.T)
    expected = np.arange(1, 61) ** -1.2
    np.testing.assert_allclose(np.diag(covariance), expected, rtol=0.05)
    off = covariance / np.sqrt(np.outer(expected, expected)) - np.eye(60)
    assert np.abs(off).max() < 0.05


@pytest.mark.parametrize(("spread", "variance"), [("variance", 4.0), ("deviation", 16.0)])
def test_the_inputs_of_devices_lie_around_means_that_beta_spreads(spread: str, variance: float) -> None:
    v = means(synthetic(0.5, 4.0, 600, seed=0, least=1, most=5, spread=spread))
    assert v.mean(axis=1).var() == pytest.approx(variance + 1 / 60, rel=0.15)
    assert v.var(axis=1).mean() == pytest.approx(1, rel=0.2)


def test_with_beta_zero_no_device_is_off_on_the_whole() -> None:
    v = means(synthetic(0.5, 0.0, 400, seed=0, least=1, most=5))
    assert v.mean(axis=1).var() == pytest.approx(1 / 60, rel=0.3)


def test_a_linear_model_learns_a_device_and_is_of_little_use_to_others() -> None:
    samples = synthetic(0.5, 0.0, 5, seed=5, least=1500, most=1500)
    first, *others = (samples.of_client(name) for name in samples.clients)

    def features(part: Samples) -> Any:
        return np.hstack([part.x, np.ones((len(part), 1))])

    weights = np.linalg.lstsq(features(first)[:1000], np.eye(10)[first.y[:1000]], rcond=None)[0]

    def accuracy(part: Samples) -> float:
        return float((np.argmax(features(part) @ weights, axis=1) == part.y).mean())

    unseen = first.take(range(1000, 1500))
    assert accuracy(unseen) > 0.8 > 0.7 > np.bincount(unseen.y).max() / 500
    assert np.mean([accuracy(part) for part in others]) < 0.3


class Spy:
    """A generator that records what it drew."""

    def __init__(self, rng: np.random.Generator):
        self.rng, self.drawn = rng, list[NDArray[np.float64]]()

    def normal(self, *arguments: Any) -> Any:
        self.drawn.append(self.rng.normal(*arguments))
        return self.drawn[-1]

    def of_shape(self, *shape: int) -> list[NDArray[np.float64]]:
        return [array for array in self.drawn if array.shape == shape]


def test_every_device_labels_its_inputs_by_weights_of_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    spy = Spy(np.random.default_rng(0))
    monkeypatch.setattr("fleet_core.data.partitions.synthetic.generator", lambda *_: spy)
    samples = synthetic(0.5, 0.5, 4, seed=0, least=300, most=300)
    weights, biases = spy.of_shape(60, 10), spy.of_shape(10)
    assert (len(weights), len(biases)) == (4, 4)
    for k, (w, b) in enumerate(zip(weights, biases, strict=True)):
        own = samples.take(range(300 * k, 300 * k + 300))
        np.testing.assert_array_equal(own.y, np.argmax(own.x @ w + b, axis=1))
    assert np.abs(np.corrcoef([w.ravel() for w in weights]) - np.eye(4)).max() < 0.2
    assert np.std([w.std() for w in weights]) < 0.1 < np.mean([w.std() for w in weights]) - 0.8


def test_alpha_moves_all_classes_of_a_device_alike_so_that_no_label_changes() -> None:
    near, far = (synthetic(alpha, 0.5, 5, seed=0, least=200, most=400) for alpha in (0.0, 9.0))
    np.testing.assert_array_equal(near.x, far.x)
    assert (near.y == far.y).mean() > 0.999


def test_the_clients_of_the_set_are_the_devices_of_its_natural_partition() -> None:
    samples = synthetic(devices=6, seed=0, least=40, most=80)
    shares = partition("natural", PARTITIONS["natural"].options(), samples, seed=0)
    assert tuple(share.name for share in shares) == samples.clients
    assert sum(share.rows.size for share in shares) == len(samples)


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"alpha": -0.5}, "alpha is -0.5"),
        ({"beta": float("nan")}, "beta is nan"),
        ({"devices": 0}, "devices is 0"),
        ({"least": 0}, "least is 0"),
        ({"least": 30, "most": 20}, "least is 30, most is 20"),
        ({"spread": "std"}, "spread is 'std', not variance or deviation"),
        ({"alpha": -1, "devices": -2}, "alpha is -1\ndevices is -2"),
        ({"seed": -1}, "a seed of -1"),
    ],
)
def test_a_set_that_cannot_be_made_is_refused(wrong: dict[str, Any], message: str) -> None:
    with pytest.raises(DataError, match=message):
        synthetic(**{"seed": 0, **wrong})
