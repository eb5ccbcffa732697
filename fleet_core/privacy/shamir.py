"""Shamir's secret sharing of 32-byte secrets: any ``threshold`` shares give the secret, fewer reveal nothing.

Shamir, "How to Share a Secret", CACM 1979. The field is that of the prime 2^521 − 1, which is above every secret.
"""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence

PRIME = (1 << 521) - 1
SECRET_BYTES, SHARE_BYTES = 32, 66


def split(secret: bytes, holders: Sequence[int], threshold: int) -> dict[int, bytes]:
    """Holder (1, 2, …, all different) -> share. Raises ValueError for a threshold that cannot be met."""
    if not 1 <= threshold <= len(set(holders)) == len(holders) or min(holders) < 1 or len(secret) != SECRET_BYTES:
        raise ValueError(f"{threshold} of {len(holders)} shares of {len(secret)} bytes")
    terms = [int.from_bytes(secret, "big"), *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    made = {}
    for at in holders:
        value = 0
        for term in reversed(terms):
            value = (value * at + term) % PRIME
        made[at] = value.to_bytes(SHARE_BYTES, "big")
    return made


def join(shares: Mapping[int, bytes]) -> bytes:
    """The secret of ``threshold`` or more shares. Raises ValueError if they are visibly not of one secret."""
    value = 0
    for at, share in shares.items():
        above = below = 1
        for other in shares:
            if other != at:
                above, below = above * other % PRIME, below * (other - at) % PRIME
        value = (value + int.from_bytes(share, "big") * above * pow(below, -1, PRIME)) % PRIME
    if value >> (8 * SECRET_BYTES):
        raise ValueError("the shares are not of one secret")
    return value.to_bytes(SECRET_BYTES, "big")
