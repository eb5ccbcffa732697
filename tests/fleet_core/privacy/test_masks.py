"""Masks: they cancel in the sum, leave those of devices that are missing, and hide a single device's numbers."""

from __future__ import annotations

import secrets

import numpy as np
import pytest
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fleet_core.codecs.kinds.common_scale import LARGEST
from fleet_core.privacy import masks
from fleet_core.privacy.masks import bits_for, mask, pair_key, stream, whole

COUNT, DEVICES = 1000, 5
NAMES = [f"d{k}" for k in range(DEVICES)]


def keys() -> tuple[dict[str, bytes], dict[str, dict[str, bytes]]]:
    """(own seeds, keys of pairs) of the devices."""
    private = {name: X25519PrivateKey.generate() for name in NAMES}
    raw = {name: (key.private_bytes_raw(), key.public_key().public_bytes_raw()) for name, key in private.items()}
    pairs = {i: {j: pair_key(raw[i][0], raw[j][1], b"t/1") for j in raw if j != i} for i in raw}
    return {name: secrets.token_bytes(32) for name in raw}, pairs


def test_both_devices_of_a_pair_have_its_key() -> None:
    _, pairs = keys()
    assert all(pairs[i][j] == pairs[j][i] for i in pairs for j in pairs[i])


@pytest.mark.parametrize("bits", [16, 32])
@pytest.mark.parametrize("missing", [(), ("d3",), ("d0", "d4")])
def test_the_sum_of_those_that_sent_is_exact_once_the_known_masks_are_taken_away(
    missing: tuple[str, ...], bits: int
) -> None:
    own, pairs = keys()
    numbers = {name: np.random.default_rng(k).integers(-127, 128, COUNT) for k, name in enumerate(NAMES)}
    there = [name for name in own if name not in missing]
    kind = masks.dtype(bits)
    sent = {name: numbers[name].astype(kind) + mask(name, own[name], pairs[name], COUNT, bits) for name in there}
    total = sum(sent.values(), np.zeros(COUNT, kind))
    for name in there:
        total = total - mask(name, own[name], {j: pairs[name][j] for j in missing}, COUNT, bits)
    assert np.array_equal(whole(total), sum(numbers[name] for name in there))


def test_what_one_device_sends_is_as_even_as_a_draw_and_zeros_look_like_ones() -> None:
    own, pairs = keys()
    sent = mask("d1", own["d1"], pairs["d1"], COUNT, 32)
    assert abs(sent.mean() / 2**32 - 0.5) < 5 / np.sqrt(12 * COUNT)
    assert len(set(sent.tolist())) > COUNT - 5
    assert not np.array_equal(sent, stream(own["d1"], COUNT, 32))


@pytest.mark.parametrize("devices", [1, 258, 259, 100_000])
def test_the_largest_sum_does_not_wrap(devices: int) -> None:
    kind = masks.dtype(bits_for(devices))
    total = np.array([devices * LARGEST, -devices * LARGEST]).astype(kind)
    assert whole(total).tolist() == [devices * LARGEST, -devices * LARGEST]
    assert bits_for(devices) == (16 if devices < 259 else 32)
