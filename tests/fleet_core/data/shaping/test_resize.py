"""Images at a fleet's size."""

from __future__ import annotations

import hashlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from PIL import Image

from fleet_core.base.errors import DataError
from fleet_core.data.shaping import resize

SIDES = st.integers(1, 60)
PIXELS = np.random.default_rng(0).integers(0, 256, (2, 3, 37, 53), dtype=np.uint8)


@given(SIDES, SIDES, SIDES, SIDES)
def test_stretched_pixels_are_pillows_within_its_rounding(height: int, width: int, high: int, wide: int) -> None:
    pixels = np.random.default_rng(0).integers(0, 256, (height, width), dtype=np.uint8)
    found = resize.fitted(pixels[None, None], (1, high, wide), "stretch")[0, 0]
    wanted = np.asarray(Image.fromarray(pixels).resize((wide, high), Image.Resampling.BILINEAR))
    assert np.abs(found.astype(int) - wanted).max() <= 1


@given(SIDES, SIDES, SIDES, SIDES)
def test_a_letterboxed_image_keeps_its_proportions_and_lies_in_the_middle(
    height: int, width: int, high: int, wide: int
) -> None:
    white = np.full((1, 1, height, width), 255, np.uint8)
    found = resize.fitted(white, (1, high, wide), "letterbox")[0, 0]
    rows, columns = np.flatnonzero(found.any(1)), np.flatnonzero(found.any(0))
    assert found[rows[0] : rows[-1] + 1, columns[0] : columns[-1] + 1].min() == 255
    assert len(rows) == high or len(columns) == wide
    assert abs(len(rows) * width / height - len(columns)) <= max(1, width / height)
    assert abs(rows[0] - (high - 1 - rows[-1])) <= 1
    assert abs(columns[0] - (wide - 1 - columns[-1])) <= 1


@pytest.mark.parametrize("fit", ["letterbox", "stretch"])
def test_each_image_is_fitted_by_itself_and_floats_agree_with_bytes(fit: str) -> None:
    whole = resize.fitted(PIXELS, (3, 20, 20), fit)
    for one, alone in zip(whole, PIXELS, strict=True):
        np.testing.assert_array_equal(resize.fitted(alone[None], (3, 20, 20), fit)[0], one)
    floats = resize.fitted(PIXELS.astype(np.float64), (3, 20, 20), fit)
    assert floats.dtype == np.float32
    np.testing.assert_array_equal(floats, resize.fitted(PIXELS.astype(np.float32), (3, 20, 20), fit))
    assert np.abs(floats - whole).max() <= 0.5


def test_the_bits_are_those_of_every_machine() -> None:
    found = resize.fitted(PIXELS.astype(np.float32), (3, 20, 31), "stretch")
    assert hashlib.sha256(found.astype("<f4").tobytes()).hexdigest() == DIGEST


DIGEST = "f0c183abf08cbc90f3628915522baa06197a866ea1f027622e83713dcb222699"


def test_what_fits_or_is_no_image_is_returned_as_it_is() -> None:
    for x, shape in ((PIXELS, (3, 37, 53)), (PIXELS, (1, 20, 20)), (PIXELS[0], (3, 20, 20)), (PIXELS[:, 0], (37, 53))):
        assert resize.fitted(x, shape, "stretch") is x
    assert resize.fitted(PIXELS, (3, 20, 20), "refuse") is PIXELS


def test_impossible_sizes_are_refused() -> None:
    with pytest.raises(DataError, match="sides of 1 to"):
        resize.fitted(np.zeros((1, 3, 0, 5), np.uint8), (3, 4, 4), "stretch")
    for text in ("0", "64x", "x64", "12345", "64 x 64"):
        with pytest.raises(DataError, match="is not an image size"):
            resize.size_of(text, None)


def test_a_size_is_width_by_height() -> None:
    assert resize.size_of("96x64", None) == ((64, 96), "letterbox")
    assert resize.size_of("32", "stretch") == ((32, 32), "stretch")
    assert resize.size_of(None, None) == (None, "refuse")
