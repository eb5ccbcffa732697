"""Masks that cancel in a sum: each pair of devices adds and subtracts the same numbers, modulo 2^16 or 2^32.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, the masks of Figure
4: y_i = x_i + PRG(b_i) + sum over j > i of PRG(s_ij) - sum over j < i of PRG(s_ij). Values are whole multiples of a
scale that all devices share, so their sum is exact. ``secure_sum`` says who gets which share of which key.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from fleet_core.codecs.kinds.common_scale import LARGEST

KEY_BYTES = 32
Array = np.ndarray[Any, Any]


def bits_for(devices: int) -> int:
    """16 or 32: the fewest bits in which the sum over this many devices does not wrap."""
    return 16 if devices * LARGEST < 1 << 15 else 32


def dtype(bits: int) -> Any:
    return np.dtype(f"<u{bits // 8}")


def stream(key: bytes, count: int, bits: int) -> Array:
    """Unsigned [count] from a key of 32 bytes, by ChaCha20; a key is used for one round."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(count * bits // 8)), dtype=dtype(bits))


def pair_key(own: bytes, other: bytes, context: bytes) -> bytes:
    """The key that two devices share. own: a raw private X25519 key; other: a raw public one. context: what the key is
    for. Raises ValueError for a public key that gives none."""
    secret = X25519PrivateKey.from_private_bytes(own).exchange(X25519PublicKey.from_public_bytes(other))
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"metafleet secure aggregation " + context).derive(secret)


def pair_mask(device: str, other: str, key: bytes, count: int, bits: int) -> Array:
    """What ``device`` adds for its pair with ``other``, which adds the negative."""
    part = stream(key, count, bits)
    return part if other > device else -part


def mask(device: str, own: bytes, pairs: Mapping[str, bytes], count: int, bits: int) -> Array:
    """Unsigned [count]: what ``device`` adds. own: its seed b_i. pairs: other device -> the key of the pair."""
    total = stream(own, count, bits).copy()
    for other, key in pairs.items():
        total += pair_mask(device, other, key, count, bits)
    return total


def whole(total: Array) -> Array:
    """int64: a sum of unsigned values as the signed number that it stands for."""
    return total.view(np.dtype(f"<i{total.dtype.itemsize}")).astype(np.int64)
