"""Masks that cancel in a sum: each pair of devices adds and subtracts the same numbers modulo 2^32.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, Figure 4, its masks:
y_i = x_i + PRG(b_i) + sum over j > i of PRG(s_ij) - sum over j < i of PRG(s_ij). Values are whole numbers of a
scale that all devices share, so their sum is exact. Who gets which share of which key is not decided here.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey, X25519PublicKey
from cryptography.hazmat.primitives.ciphers import Cipher, algorithms
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

KEY_BYTES = 32
Array = np.ndarray[Any, Any]


def stream(key: bytes, count: int) -> Array:
    """uint32 [count] of a key of 32 bytes, by ChaCha20; a key is used for one round."""
    cipher = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()
    return np.frombuffer(cipher.update(bytes(4 * count)), dtype="<u4")


def pair_key(own: bytes, other: bytes, context: bytes) -> bytes:
    """The key that two devices share. own: a raw private X25519 key; other: a raw public one. context: of the fleet and
    the round. Raises ValueError for a public key that gives none."""
    secret = X25519PrivateKey.from_private_bytes(own).exchange(X25519PublicKey.from_public_bytes(other))
    return HKDF(SHA256(), KEY_BYTES, salt=None, info=b"metafleet secure aggregation " + context).derive(secret)


def whole(values: Array, scale: float, most: int) -> Array:
    """uint32: ``values`` as multiples of ``scale``, two's complement, clipped so that ``most`` of them do not wrap."""
    limit = ((1 << 31) - 1) // most
    return np.clip(np.rint(values / scale), -limit, limit).astype(np.int64).astype(np.uint32)


def values(total: Array, scale: float) -> Array:
    """float64: the sum of ``whole`` numbers, as values again."""
    return total.astype(np.uint32).view(np.int32) * scale


def mask(device: int, own: bytes, pairs: Mapping[int, bytes], count: int) -> Array:
    """uint32 [count]: what device number ``device`` adds. own: its key b_i. pairs: other device -> the key of the pair.
    """
    total = stream(own, count).copy()
    for other, key in pairs.items():
        part = stream(key, count)
        total = total + part if other > device else total - part
    return total
