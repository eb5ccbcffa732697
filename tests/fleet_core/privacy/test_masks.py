"""Masks: they cancel in the sum, leave those of devices that are missing, and hide a single device's numbers."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fleet_core.privacy.masks import mask, pair_key, stream, values, whole

COUNT, DEVICES = 1000, 5


def keys() -> tuple[dict[int, bytes], dict[int, dict[int, bytes]]]:
    """(own keys, keys of pairs) of devices 1 to ``DEVICES``."""
    private = {k: X25519PrivateKey.generate() for k in range(1, DEVICES + 1)}
    raw = {k: (key.private_bytes_raw(), key.public_key().public_bytes_raw()) for k, key in private.items()}
    pairs = {i: {j: pair_key(raw[i][0], raw[j][1], b"t/1") for j in raw if j != i} for i in raw}
    return {k: secrets.token_bytes(32) for k in raw}, pairs


def test_both_devices_of_a_pair_have_its_key() -> None:
    _, pairs = keys()
    assert all(pairs[i][j] == pairs[j][i] for i in pairs for j in pairs[i])


@pytest.mark.parametrize("missing", [(), (3,), (1, 5)])
def test_the_sum_of_those_that_sent_is_exact_once_the_known_masks_are_taken_away(missing: tuple[int, ...]) -> None:
    own, pairs = keys()
    numbers = {k: np.random.default_rng(k).normal(size=COUNT) for k in own}
    there = [k for k in own if k not in missing]
    sent = {k: whole(numbers[k], 2.0**-16, DEVICES) + mask(k, own[k], pairs[k], COUNT) for k in there}
    total = sum(sent.values(), np.zeros(COUNT, np.uint32))
    for k in there:
        known = {j: pairs[k][j] for j in missing}
        total = total - mask(k, own[k], known, COUNT)
    exact = sum(np.rint(numbers[k] * 2.0**16) for k in there) / 2.0**16
    assert np.array_equal(values(total, 2.0**-16), exact)


def test_what_one_device_sends_is_as_even_as_a_draw_and_zeros_look_like_ones() -> None:
    own, pairs = keys()
    sent = whole(np.zeros(COUNT), 1.0, DEVICES) + mask(1, own[1], pairs[1], COUNT)
    assert abs(sent.mean() / 2**32 - 0.5) < 5 / np.sqrt(12 * COUNT)
    assert len(set(sent.tolist())) > COUNT - 5
    assert not np.array_equal(sent, sent - stream(own[1], COUNT))


def test_numbers_that_would_wrap_are_clipped() -> None:
    big = whole(np.array([1e30, -1e30]), 1.0, 4)
    total = big + big + big + big
    assert values(total, 1.0)[0] > 2e9
    assert values(total, 1.0)[1] < -2e9
