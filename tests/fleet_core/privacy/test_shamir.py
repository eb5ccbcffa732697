"""Shamir's sharing: enough shares give the secret, others are refused or give nothing."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_core.privacy.shamir import PRIME, SECRET_BYTES, join, split


@given(st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES), st.data())
def test_any_threshold_of_the_shares_gives_the_secret(secret: bytes, data: st.DataObject) -> None:
    count = data.draw(st.integers(1, 8))
    threshold = data.draw(st.integers(1, count))
    shares = split(secret, range(1, count + 1), threshold)
    chosen = data.draw(st.lists(st.sampled_from(sorted(shares)), min_size=threshold, unique=True))
    assert join({at: shares[at] for at in chosen}) == secret


@given(st.binary(min_size=SECRET_BYTES, max_size=SECRET_BYTES))
def test_one_share_too_few_fits_every_secret(other: bytes) -> None:
    """For any other secret there is a missing share that would give it, so what is there says nothing."""
    shares = split(bytes(range(SECRET_BYTES)), [1, 2, 3], 3)
    known = {at: int.from_bytes(shares[at], "big") for at in (1, 2)}
    wanted = int.from_bytes(other, "big")  # at 0: 3 s1 - 3 s2 + s3
    third = (wanted - 3 * known[1] + 3 * known[2]) % PRIME
    assert join({1: shares[1], 2: shares[2], 3: third.to_bytes(66, "big")}) == other


def test_shares_of_two_secrets_are_noticed_and_wrong_thresholds_refused() -> None:
    one, two = (split(bytes([k]) * SECRET_BYTES, [1, 2], 2) for k in (1, 2))
    with pytest.raises(ValueError, match="not of one secret"):
        join({1: one[1], 2: two[2]})
    for holders, threshold in (([1, 2], 3), ([1, 1], 1), ([0, 1], 1), ([1], 0)):
        with pytest.raises(ValueError, match="shares of"):
            split(bytes(SECRET_BYTES), holders, threshold)
