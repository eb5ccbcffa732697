"""Omniglot (Lake, Salakhutdinov, Tenenbaum, Science 2015), with drawings reduced to 28×28.

The originals are black and white 105×105 PNGs ``ALPHABET/characterNN/CCCC_DD.png``: CCCC is the character's number, 1
to 1623, and DD is one of the 20 people who drew that alphabet. The label is the character's number minus one. The train
part is the background set (30 alphabets), the test part the evaluation set (20 others). Pixels are the share of ink in
each cell of Pillow's box filter: ink is 255, paper 0. Client: ``ALPHABET/DD``.
"""

from __future__ import annotations

import io
import re
from collections.abc import Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.readers.images import pillow
from fleet_core.data.samples import Samples
from fleet_core.data.sets.archives import zip_files

SIDE, ORIGINAL_SIDE = 28, 105
CHARACTERS = 1623
CLASSES = tuple(f"{number:04d}" for number in range(1, CHARACTERS + 1))
LIMIT_BYTES = 128 << 20
NAME = re.compile(r"images_(?:background|evaluation)/([^/]+)/character\d\d/(\d{4})_(\d\d)\.png")


def omniglot(files: Mapping[str, Path]) -> tuple[Samples, Samples]:
    """x uint8 [N, 1, 28, 28], y int64 [N] over all 1,623 characters, client: a drawer of an alphabet."""
    return _part(files["images_background.zip"]), _part(files["images_evaluation.zip"])


def reduce(image: NDArray[np.uint8], where: str) -> NDArray[np.uint8]:
    """Reduces uint8 [105, 105], 255 = ink, to uint8 [28, 28]."""
    Image = pillow("Omniglot")
    if image.shape != (ORIGINAL_SIDE, ORIGINAL_SIDE):
        raise DataError(f"is {image.shape}", where=where, expected=f"{ORIGINAL_SIDE} by {ORIGINAL_SIDE} pixels")
    return np.asarray(Image.fromarray(image).resize((SIDE, SIDE), Image.Resampling.BOX), dtype=np.uint8)


def _part(path: Path) -> Samples:
    drawings = []
    for name, data in zip_files(path, NAME.fullmatch, LIMIT_BYTES, str(path)):
        match = NAME.fullmatch(name)
        assert match is not None
        number = int(match[2])
        if not 1 <= number <= CHARACTERS:
            raise DataError("has a number out of range", where=f"{path}: {name}", expected=f"1 to {CHARACTERS}")
        drawings.append((number, f"{match[1]}/{match[3]}", _read(data, f"{path}: {name}")))
    if not drawings:
        raise DataError("has no drawing", where=str(path), expected="ALPHABET/characterNN/CCCC_DD.png")
    drawings.sort(key=lambda drawing: drawing[:2])
    return Samples(
        np.stack([image for _, _, image in drawings])[:, None],
        np.array([number - 1 for number, _, _ in drawings], dtype=np.int64),
        np.array([drawer for _, drawer, _ in drawings], dtype=np.str_),
        classes=CLASSES,
    )


def _read(data: bytes, where: str) -> NDArray[np.uint8]:
    Image = pillow("Omniglot")
    try:
        with Image.open(io.BytesIO(data), formats=("PNG",)) as image:
            if image.size != (ORIGINAL_SIDE, ORIGINAL_SIDE):
                raise DataError(f"is {image.size}", where=where, expected=f"{ORIGINAL_SIDE} by {ORIGINAL_SIDE} pixels")
            paper = np.asarray(image.convert("L"), dtype=np.uint8)
    except (OSError, EOFError, ValueError, SyntaxError, Image.DecompressionBombError) as error:
        raise DataError(f"cannot be read as an image: {error}", where=where) from error
    return reduce(255 - paper, where)
