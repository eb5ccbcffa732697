"""Random crops and flips of training images: compared with a loop, and in a device's round."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from fleet_core.base.errors import ConfigError
from fleet_core.learning import models
from fleet_core.learning.torch_augment import augmented
from fleet_core.model.layout import InputSpec
from fleet_core.training import augment
from fleet_core.training.augment import PADDING
from tests.support.simulation import Fleet, equal_bits, hyper_of, max_difference

Array = np.ndarray[Any, Any]


def images(number: int, dtype: str = "uint8", seed: int = 0) -> Array:
    return np.random.default_rng(seed).integers(1, 255, (number, 3, 10, 12)).astype(dtype)


def choices(image: Array) -> list[Array]:
    """Every crop of the image's size from the image in its black frame, and its mirror image."""
    around = np.pad(image, ((0, 0), (PADDING, PADDING), (PADDING, PADDING)))
    _, height, width = image.shape
    crops = [
        around[:, top : top + height, left : left + width]
        for top in range(2 * PADDING + 1) for left in range(2 * PADDING + 1)
    ]  # fmt: skip
    return [*crops, *(crop[:, :, ::-1] for crop in crops)]


@pytest.mark.parametrize("dtype", ["uint8", "float32"])
def test_a_changed_image_is_one_of_its_crops_or_their_mirror_images(dtype: str) -> None:
    x = images(60, dtype)
    found = augmented("crop-flip", torch.from_numpy(x), np.random.default_rng(0)).numpy()
    assert (found.dtype, found.shape) == (x.dtype, x.shape)
    picked = []
    for image, changed in zip(x, found, strict=True):
        matches = [i for i, choice in enumerate(choices(image)) if np.array_equal(choice, changed)]
        assert len(matches) == 1
        picked += matches
    crops = (2 * PADDING + 1) ** 2
    assert 15 < sum(i >= crops for i in picked) < 45  # half of 60 are mirrored
    assert len({i % crops for i in picked}) > 35


def test_without_torch_the_same_images_come_out() -> None:
    x = images(12)
    one, other = (np.random.default_rng(3) for _ in range(2))
    found = augment.augmented("crop-flip", x, one)
    assert np.array_equal(found, augmented("crop-flip", torch.from_numpy(x), other).numpy())
    assert found.flags.c_contiguous
    assert one.random() == other.random()


def test_every_corner_is_drawn_and_the_middle_is_the_image_itself() -> None:
    x = torch.arange(3 * 4).reshape(1, 1, 3, 4).repeat(3000, 1, 1, 1)
    found = augmented("crop-flip", x, np.random.default_rng(0)).numpy()
    kinds = {changed.tobytes() for changed in found}
    middle = x[0].numpy()
    assert {middle.tobytes(), np.ascontiguousarray(middle[:, :, ::-1]).tobytes()} <= kinds
    assert any((changed == 0).sum() == 12 for changed in found)  # all frame: 4 to a side of 3 and of 4


def test_no_augmentation_gives_the_samples_and_no_images_are_refused() -> None:
    x = torch.from_numpy(images(2))
    assert augmented("none", x, np.random.default_rng(0)) is x
    empty = x[:0]
    assert augmented("crop-flip", empty, np.random.default_rng(0)) is empty
    with pytest.raises(ConfigError, match="augment 'crop-flip' is for images"):
        augmented("crop-flip", torch.zeros(4, 6), np.random.default_rng(0))


def test_a_round_changes_its_images_anew_in_every_step_and_side_by_side_alike() -> None:
    rng, layout = np.random.default_rng(0), models.describe(
        "lenet-lim", InputSpec((3, 10, 12), "uint8", 1 / 255), ("a", "b"), {"hidden": [9, 8]}
    )
    data = [(images(n, seed=n), rng.integers(0, 2, n)) for n in (20, 24)]
    plain, changed, again, together = (
        Fleet("p-avg-proto", hyper_of("p-avg-proto", augment=kind, local_steps=3), data, layout, side_by_side)
        for kind, side_by_side in (("none", False), ("crop-flip", False), ("crop-flip", False), ("crop-flip", True))
    )
    for i in range(2):
        one, two, three, four = (fleet.trained()[i].update.groups for fleet in (plain, changed, again, together))
        assert not equal_bits(one, two)
        assert equal_bits(two, three)
        assert max_difference(two, four) < 1e-5
