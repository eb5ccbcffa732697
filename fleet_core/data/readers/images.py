"""Reads images: a folder with one subfolder per class, or images without labels."""

from __future__ import annotations

import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.readers.raw import Raw, bound

if TYPE_CHECKING:
    from PIL import Image as PillowImage

GREY_MODES = ("1", "L")
COLOUR_MODES = ("RGB", "RGBA", "P", "LA", "PA", "CMYK", "YCbCr")


def read_images(folder: Path, limit_bytes: int) -> Raw:
    """Reads one subfolder per class, named like the class; x uint8 [N, C, H, W], C = 1 if all are grey, else 3 (RGB).

    Hidden files and files beside the subfolders are ignored. Raises DataError.
    """
    try:
        names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        files = [(name, file) for name in names for file in sorted((folder / name).iterdir()) if _visible(file)]
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(folder)) from error
    if not names:
        raise DataError("has no subfolder", where=str(folder), expected="one subfolder of images per class")
    return Raw(
        x=_stacked(files, limit_bytes),
        y=np.array([name for name, _ in files], dtype=np.str_),
        client=None,
        time=None,
        classes=np.array(names, dtype=np.str_),
        row=lambda i: f"{files[i][0]}/{files[i][1].name}",
    )


def read_unsorted(path: Path, limit_bytes: int) -> NDArray[np.uint8]:
    """x uint8 [N, C, H, W] of an image, or of the images in a folder in the order of their names. A folder without
    images is read subfolder by subfolder, as by ``read_images``. Raises DataError."""
    try:
        files = [path] if path.is_file() else [file for file in sorted(path.iterdir()) if _visible(file)]
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(path)) from error
    return _stacked([("", file) for file in files], limit_bytes) if files else read_images(path, limit_bytes).x


def _stacked(files: list[tuple[str, Path]], limit_bytes: int) -> NDArray[np.uint8]:
    """uint8 [N, C, H, W]: C is 1 if all are grey, else 3."""
    images = list(_pixels(files, limit_bytes))
    channels = max((image.shape[0] for image in images), default=1)
    same = [image if image.shape[0] == channels else np.repeat(image, channels, axis=0) for image in images]
    return np.stack(same) if same else np.empty((0, 1, 1, 1), np.uint8)


def _visible(file: Path) -> bool:
    return file.is_file() and not file.name.startswith(".")


def _pixels(files: list[tuple[str, Path]], limit_bytes: int) -> Iterator[NDArray[np.uint8]]:
    """uint8 [C, H, W] of each file, all of one height and width."""
    Image = pillow("a folder of images")
    first: tuple[int, int] | None = None
    for _, file in files:
        try:
            with Image.open(file) as image:
                first = first or image.size
                if image.size != first:
                    raise DataError(
                        f"is {image.size[0]} by {image.size[1]} pixels",
                        where=str(file),
                        expected=f"{first[0]} by {first[1]}, like {files[0][1]}",
                    )
                bound(3 * first[0] * first[1] * len(files), limit_bytes, file.parent.parent)
                yield _channels_first(image, file)
        except (OSError, EOFError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
            raise DataError(f"cannot be read as an image: {error}", where=str(file)) from error


def pillow(user: str) -> ModuleType:
    """``PIL.Image``. Raises DataError when Pillow is not installed; ``user`` is what needs it."""
    try:
        from PIL import Image
    except ImportError as error:
        hint = 'pip install "metafleet[images]"'
        raise DataError(f"{user} needs Pillow, which is not installed", hint=hint) from error
    return Image


def _channels_first(image: PillowImage.Image, file: Path) -> NDArray[np.uint8]:
    if image.mode in GREY_MODES:
        return np.asarray(image.convert("L"), dtype=np.uint8)[None]
    if image.mode in COLOUR_MODES:
        return np.ascontiguousarray(np.asarray(image.convert("RGB"), dtype=np.uint8).transpose(2, 0, 1))
    raise DataError(f"has pixels of mode {image.mode}", where=str(file), expected="8 bits per channel, grey or colour")
