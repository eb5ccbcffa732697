"""Reads images: a folder with one subfolder per class, or images without labels."""

from __future__ import annotations

import io
import struct
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.readers.raw import Cut, Raw, bound, spread
from fleet_core.data.shaping import resize

if TYPE_CHECKING:
    from PIL import Image as PillowImage

UNCUT = Cut()
ANY_SIZE = "give one size for all: --size 64, or --size 96x64 for width by height"
GREY_MODES = ("1", "L")
COLOUR_MODES = ("RGB", "RGBA", "P", "LA", "PA", "CMYK", "YCbCr")


def read_images(folder: Path, limit_bytes: int, cut: Cut = UNCUT) -> Raw:
    """Reads one subfolder per class, named like the class; x uint8 [N, C, H, W], C = 1 if all are grey, else 3 (RGB).
    cut: the size of the images; they must all have one if it says none.

    The order is that of ``spread``. Hidden files and files beside the subfolders are ignored. Raises DataError.
    """
    try:
        names = sorted(p.name for p in folder.iterdir() if p.is_dir() and not p.name.startswith("."))
        sorted_files = [(name, file) for name in names for file in sorted((folder / name).iterdir()) if _visible(file)]
        files = [sorted_files[k] for k in spread([name for name, _ in sorted_files])]
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(folder)) from error
    if not names:
        raise DataError("has no subfolder", where=str(folder), expected="one subfolder of images per class")
    return Raw(
        x=_stacked(files, limit_bytes, cut),
        y=np.array([name for name, _ in files], dtype=np.str_),
        client=None,
        time=None,
        classes=np.array(names, dtype=np.str_),
        row=lambda i: f"{files[i][0]}/{files[i][1].name}",
    )


def read_unsorted(path: Path, limit_bytes: int, cut: Cut = UNCUT) -> NDArray[np.uint8]:
    """x uint8 [N, C, H, W] of an image, or of the images in a folder in the order of their names. A folder without
    images is read subfolder by subfolder, as by ``read_images``. Raises DataError."""
    try:
        files = [path] if path.is_file() else [file for file in sorted(path.iterdir()) if _visible(file)]
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(path)) from error
    if not files:
        return read_images(path, limit_bytes, cut).x
    return _stacked([("", file) for file in files], limit_bytes, cut)


def has_images(path: Path) -> bool:
    """Whether files lie in the folder itself, not in subfolders."""
    return any(map(_visible, path.iterdir()))


def _stacked(files: list[tuple[str, Path]], limit_bytes: int, cut: Cut) -> NDArray[np.uint8]:
    """uint8 [N, C, H, W]: C is 1 if all are grey and ``cut`` asks for no colours, else 3."""
    images = list(_pixels(files, limit_bytes, cut))
    colour = cut.shape is not None and len(cut.shape) == 3 == cut.shape[0]
    channels = 3 if colour else max((image.shape[0] for image in images), default=1)
    same = [image if image.shape[0] == channels else np.repeat(image, channels, axis=0) for image in images]
    return np.stack(same) if same else np.empty((0, 1, 1, 1), np.uint8)


def _visible(file: Path) -> bool:
    return file.is_file() and not file.name.startswith(".")


def _pixels(files: list[tuple[str, Path]], limit_bytes: int, cut: Cut) -> Iterator[NDArray[np.uint8]]:
    """uint8 [C, H, W] of each file, all of one height and width."""
    wanted = cut.image(3)
    Image = pillow("a folder of images")
    first: tuple[int, int] | None = None
    for _, file in files:
        try:
            with Image.open(file) as image:
                first = first or image.size
                if wanted is None and image.size != first:
                    raise DataError(
                        f"is {image.size[0]} by {image.size[1]} pixels",
                        where=str(file),
                        expected=f"{first[0]} by {first[1]}, like {files[0][1]}",
                        hint=ANY_SIZE if cut.shape is None else None,
                    )
                width, height = image.size
                each = width * height if wanted is None else wanted[1] * wanted[2]
                bound(3 * max(width * height, each * len(files)), limit_bytes, file.parent.parent)
                pixels = _channels_first(image, file)
                yield pixels if wanted is None else _at_size(pixels, cut, str(file))
        except (OSError, EOFError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
            raise DataError(f"cannot be read as an image: {error}", where=str(file)) from error


def _at_size(pixels: NDArray[np.uint8], cut: Cut, where: str) -> NDArray[np.uint8]:
    """uint8 [C, H, W] at the size that ``cut`` says."""
    channels = len(pixels)
    found: NDArray[np.uint8] = resize.fitted(pixels[None], cut.image(channels) or (), cut.fit, where)[0]
    return found


def pillow(user: str) -> ModuleType:
    """``PIL.Image``. Raises DataError when Pillow is not installed; ``user`` is what needs it."""
    try:
        from PIL import Image
    except ImportError as error:
        hint = 'pip install "metafleet[images]"'
        raise DataError(f"{user} needs Pillow, which is not installed", hint=hint) from error
    return Image


def decoded(data: bytes, channels: int) -> NDArray[np.uint8]:
    """uint8 [channels, H, W] of the bytes of an image file: 1 channel, grey, or 3. Raises DataError."""
    Image = pillow("an image")
    try:
        with Image.open(io.BytesIO(data)) as image:
            pixels = _channels_first(image, Path("image"))
    except (OSError, EOFError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
        raise DataError(f"cannot be read as an image: {error}") from error
    return pixels if len(pixels) == channels else np.repeat(pixels, 3, axis=0) if channels == 3 else grey(pixels)


def grey(pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
    """uint8 [1, H, W] of colours [3, H, W], with Pillow's weights (ITU-R 601-2)."""
    red, green, blue = pixels.astype(np.uint32)
    found: NDArray[np.uint8] = ((red * 19_595 + green * 38_470 + blue * 7_471 + 0x8000) >> 16).astype(np.uint8)
    return found[None]


def _channels_first(image: PillowImage.Image, file: Path) -> NDArray[np.uint8]:
    if image.mode in GREY_MODES:
        return np.asarray(image.convert("L"), dtype=np.uint8)[None]
    if image.mode in COLOUR_MODES:
        return np.ascontiguousarray(np.asarray(image.convert("RGB"), dtype=np.uint8).transpose(2, 0, 1))
    raise DataError(f"has pixels of mode {image.mode}", where=str(file), expected="8 bits per channel, grey or colour")
