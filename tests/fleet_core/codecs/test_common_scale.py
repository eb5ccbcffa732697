"""Numbers beside the arrays of a masked sum: digits that are added one by one and give the mean."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_core.codecs.frame import pack
from fleet_core.codecs.kinds.common_scale import LARGEST, MOST_NUMBER, means, sent_as, values_of, with_numbers
from fleet_core.privacy import masks

ARRAYS = np.array([3, -127, 0, 127], np.int8)


def test_numbers_follow_the_values_and_their_sums_give_the_means() -> None:
    rng = np.random.default_rng(0)
    several = rng.normal(0, 100, (50, 2))
    bits = masks.bits_for(len(several))
    total = np.zeros(len(ARRAYS) + 10, masks.dtype(bits))
    for row in several:
        values = values_of(with_numbers(pack(ARRAYS.tobytes()), row.tolist()))
        assert np.array_equal(values[:4], ARRAYS)
        assert values.min() >= -LARGEST
        total = total + values.astype(np.int64).astype(total.dtype)
    found = means(masks.whole(total)[4:], len(several))
    assert found == pytest.approx([np.mean([sent_as(x) for x in column]) for column in several.T], abs=1e-9)
    assert found == pytest.approx(several.mean(0), abs=2**-20)


def test_without_numbers_the_payload_stays_as_it_is() -> None:
    data = pack(ARRAYS.tobytes())
    assert with_numbers(data, []) == data
    assert means(np.zeros(0, np.int64), 3) == []


@pytest.mark.parametrize("number", [0.0, -2.5, 1e-9, 16_383.5, -16_384.0, 1e9, -1e9])
def test_a_number_is_sent_to_the_nearest_unit_and_kept_within_its_limits(number: float) -> None:
    digits = values_of(with_numbers(pack(b""), [number])).astype(np.int64)
    assert means(digits, 1) == [sent_as(number)]
    assert sent_as(number) == pytest.approx(min(max(number, -MOST_NUMBER), MOST_NUMBER), abs=2**-20)
