"""Clipping and noise: the norm's bound, the noise's law, and what a device keeps of them."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_core.algorithms.interface import Payload, Update
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.model.encoded_update import RESIDUAL, encode_update
from fleet_core.model.layout import InputSpec, Layout, TensorSpec
from fleet_core.privacy import gaussian
from fleet_core.privacy.gaussian import NoisedSum, Normal, Private, clipped, key_of

KEY = key_of("a test")
VALUES = 40_000


def tree(values: list[float]) -> dict[str, dict[str, Any]]:
    half = len(values) // 2
    return {"body": {"w": np.array(values[:half], np.float32)}, "head": {"b": np.array(values[half:], np.float32)}}


def flat(params: Any) -> Any:
    return np.concatenate([np.ravel(a) for named in params.values() for a in named.values()])


@given(st.lists(st.floats(-(2.0**100), 2.0**100, width=32), min_size=1, max_size=20), st.floats(1e-3, 1e6))
def test_a_clipped_update_has_at_most_the_norm_and_the_same_direction(values: list[float], clip: float) -> None:
    update, made = tree(values), clipped(tree(values), clip)
    length = float(np.linalg.norm(flat(update).astype(np.float64)))
    assert np.linalg.norm(flat(made)) <= clip * (1 + 1e-9)
    factor = min(1.0, clip / length) if length else 1.0
    np.testing.assert_allclose(flat(made), flat(update).astype(np.float64) * factor, rtol=1e-9)


def test_an_update_below_the_norm_stays_bit_for_bit() -> None:
    update = tree([0.1, -0.2, 0.3])
    assert np.array_equal(flat(Private(1.0, 0.0, KEY).of(update)), flat(update))


def test_the_noise_is_normal_with_the_stated_deviation() -> None:
    drawn = np.sort(Normal(KEY).draw(VALUES))
    law = 0.5 * (1 + np.array([math.erf(x / math.sqrt(2)) for x in drawn]))
    distance = np.abs(law - (np.arange(VALUES) + 0.5) / VALUES).max()
    assert distance < 1.63 / math.sqrt(VALUES)  # Kolmogorov and Smirnov, one in a hundred
    made = flat(Private(0.5, 3.0, KEY).of(tree([0.0] * VALUES)))
    assert made.std() == pytest.approx(1.5, rel=4 / math.sqrt(2 * VALUES))
    assert abs(made.mean()) < 4 * 1.5 / math.sqrt(VALUES)


def test_arrays_and_blocks_have_noise_of_their_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gaussian, "AT_ONCE", 100)
    drawn = flat(Private(1.0, 1.0, KEY).of(tree([0.0] * 1000)))
    assert len(set(drawn.tolist())) == 1000
    for lag in (1, 50, 100, 500):
        assert abs(np.mean(drawn[:-lag] * drawn[lag:])) < 5 / math.sqrt(1000 - lag)


def test_a_key_gives_the_same_noise_again_and_another_key_another() -> None:
    assert np.array_equal(Normal(KEY).draw(9), Normal(KEY).draw(9))
    assert not np.array_equal(Normal(KEY).draw(9), Normal(key_of("another")).draw(9))


@pytest.mark.parametrize("devices", [1, 7])
def test_the_sum_has_noise_once_and_every_update_is_clipped(devices: int) -> None:
    updates = [Update(f"d{k}", Payload(tree([1.0] * VALUES)), 3) for k in range(devices)]
    taken = NoisedSum(updates, 0.5, 2.0, KEY)
    again = [flat(one.payload.groups) for one in taken]
    total = np.sum([flat(one.payload.groups) for one in taken], axis=0)
    assert np.array_equal(total, np.sum(again, axis=0))
    each = 0.5 / math.sqrt(VALUES)
    assert (total - devices * each).std() == pytest.approx(1.0, rel=4 / math.sqrt(2 * VALUES))
    assert [one.device for one in taken] == [f"d{k}" for k in range(devices)]


def layout() -> Layout:
    return Layout("toy", InputSpec((2,)), ("a", "b"), 3, (
        TensorSpec("w", "body", (3,)), TensorSpec("b", "head", (2,)),
    ))


@pytest.mark.parametrize("codec", ["fp32", "int8", "topk-10"])
def test_the_dual_follows_what_was_sent_and_the_residual_is_of_the_noised_update(codec: str) -> None:
    method = METHODS["pfldyn-proto"]
    hyper = method.hyper(penalty=0.5)
    update = {"body": {"w": np.array([3.0, 4.0, 0.0], np.float32)}}
    dual = trees.scale(update, -0.5)
    made = encode_update(
        codec, Payload(update), {"dual": dual}, {}, method=method, hyper=hyper, layout=layout(), round_number=1.0,
        seed=(0,), private=Private(1.0, 1.0, KEY),
    )
    sent, noised = made.update.groups, Private(1.0, 1.0, KEY).of(update)
    counted = trees.add(sent, made.state[RESIDUAL]) if RESIDUAL in made.state else sent
    if RESIDUAL in made.state or codec == "fp32":
        np.testing.assert_allclose(flat(counted), flat(noised), rtol=1e-5)
    np.testing.assert_allclose(flat(made.state["dual"]), -0.5 * flat(counted), rtol=1e-4, atol=1e-6)
