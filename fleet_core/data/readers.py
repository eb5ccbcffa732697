"""The three forms of data that people bring (.npz, .csv, a folder of images), read within bounds and not yet checked.

Each reader returns ``Raw``; ``fleet_core.data.samples`` checks it and makes ``Samples`` of it.
"""

from __future__ import annotations

import array
import csv
import io
import math
import struct
import tokenize
import zipfile
import zlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fleet_core import schema
from fleet_core.errors import DataError

if TYPE_CHECKING:
    from PIL import Image as PillowImage

ARRAYS = ("x", "y", "client", "time", "classes")
CSV_COLUMNS = ("label", "client", "time")
GREY_MODES = ("1", "L")
COLOUR_MODES = ("RGB", "RGBA", "P", "LA", "PA", "CMYK", "YCbCr")


@dataclass(frozen=True)
class Raw:
    """Arrays as a file has them: x [N, ...], y [N], client [N] | None, time [N] | None, classes [C] | None. y is empty
    where nobody asked for labels and there are none.

    row: the name of sample i in messages ("row 3" of an array, "line 5" of a text file, "cat/1.png" of a folder).
    """

    x: NDArray[Any]
    y: NDArray[Any]
    client: NDArray[Any] | None
    time: NDArray[Any] | None
    classes: NDArray[Any] | None
    row: Callable[[int], str]


def row_number(index: int) -> str:
    return f"row {index}"


# .npz ---------------------------------------------------------------------------------------------------------------


def read_npz(path: Path, limit_bytes: int, *, labelled: bool = True) -> Raw:
    """The arrays x, y and, where present, client, time and classes; other arrays are not read. Not labelled: y too may
    be absent.

    Raises DataError for what is no .npz, an object array, or arrays of more than ``limit_bytes`` unpacked.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            members = {info.filename.removesuffix(".npy"): info for info in archive.infolist()}
            _require(members, path, ("x", "y") if labelled else ("x",))
            wanted = {name: members[name] for name in ARRAYS if name in members}
            _bound(sum(info.file_size for info in wanted.values()), limit_bytes, path)
            _known_compression(wanted, path)
            arrays = {name: _read_member(archive, info, f"{path}: {name}") for name, info in wanted.items()}
    except (OSError, ValueError, EOFError, NotImplementedError, zipfile.BadZipFile, zlib.error, struct.error) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), expected="a .npz file of numpy.savez") from error
    y = arrays.get("y", np.empty(0, np.int64))
    return Raw(arrays["x"], y, arrays.get("client"), arrays.get("time"), arrays.get("classes"), row_number)


def _require(members: dict[str, zipfile.ZipInfo], path: Path, names: tuple[str, ...]) -> None:
    for name in names:
        if name not in members:
            near = schema.suggest(name, members)
            found = ", ".join(list(members)[:20]) or "none"
            raise DataError(
                f"has no array '{name}'" + (f" (did you mean '{near}'?)" if near else ""),
                where=str(path),
                expected=f"{'arrays x [N, ...] and y [N]' if 'y' in names else 'an array x [N, ...]'}, found {found}",
            )


def _known_compression(members: dict[str, zipfile.ZipInfo], path: Path) -> None:
    for name, info in members.items():
        if info.compress_type not in (zipfile.ZIP_STORED, zipfile.ZIP_DEFLATED) or info.flag_bits & 1:
            raise DataError("is encrypted or compressed in a way numpy does not write", where=f"{path}: {name}")


def _bound(size_bytes: int, limit_bytes: int, where: Path) -> None:
    if size_bytes > limit_bytes:
        raise DataError(f"{size_bytes} bytes are over the limit of {limit_bytes}", where=str(where))


def _read_member(archive: zipfile.ZipFile, info: zipfile.ZipInfo, where: str) -> NDArray[Any]:
    """One array, whose header must not announce more than the member holds: numpy allocates what the header says."""
    try:
        with archive.open(info) as member:
            shape, dtype = _header(member)
            if dtype.hasobject or dtype.fields is not None:
                raise DataError("holds Python objects or records", where=where, expected="numbers or text")
            if dtype.itemsize == 0:
                raise DataError("holds empty text alone", where=where)
            if math.prod(shape) * dtype.itemsize > info.file_size:
                raise DataError(f"announces shape {shape}, more than the file holds", where=where)
        with archive.open(info) as member:
            return np.asarray(np.lib.format.read_array(member, allow_pickle=False))
    except (ValueError, SyntaxError, TypeError, tokenize.TokenError, RecursionError) as error:
        raise DataError(f"is no array: {error}", where=where) from error


def _header(member: IO[bytes]) -> tuple[tuple[int, ...], np.dtype[Any]]:
    version = np.lib.format.read_magic(member)
    if version not in ((1, 0), (2, 0)):
        raise ValueError(f"npy version {version}")
    read = np.lib.format.read_array_header_1_0 if version == (1, 0) else np.lib.format.read_array_header_2_0
    shape, _, dtype = read(member)
    if any(extent < 0 for extent in shape):
        raise ValueError(f"shape {shape}")
    return shape, dtype


# .csv ---------------------------------------------------------------------------------------------------------------


def read_csv(path: Path, limit_bytes: int, *, labelled: bool = True) -> Raw:
    """A header with ``label`` and optionally ``client`` and ``time``; every other column is a float feature. Not
    labelled: ``label`` too may be absent.

    Raises DataError with the line and the column.
    """
    try:
        _bound(path.stat().st_size, limit_bytes, path)
        text = path.read_text(encoding="utf-8-sig")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), expected="a .csv file in UTF-8") from error
    reader = csv.reader(io.StringIO(text, newline=""), strict=True)
    try:
        header = [name.strip() for name in next(reader, [])]
        features = _csv_features(header, path, labelled)
        return _csv_rows(reader, header, features, path)
    except csv.Error as error:
        raise DataError(f"is no .csv: {error}", where=f"{path}: line {reader.line_num}") from error


def _csv_features(header: list[str], path: Path, labelled: bool) -> list[int]:
    """Positions of the feature columns."""
    if labelled and "label" not in header:
        near = schema.suggest("label", header)
        hint = f"rename the column '{near}'" if near else "the first line names the columns; one of them is 'label'"
        raise DataError("has no column 'label'", where=f"{path}: line 1", hint=hint)
    for name in header:
        if header.count(name) > 1:
            raise DataError(f"names the column '{name}' {header.count(name)} times", where=f"{path}: line 1")
    features = [i for i, name in enumerate(header) if name not in CSV_COLUMNS]
    if not features:
        raise DataError("has no feature column", where=f"{path}: line 1", expected="a column beside label")
    return features


def _csv_rows(reader: Any, header: list[str], features: list[int], path: Path) -> Raw:
    values = array.array("d")
    columns: dict[str, list[str]] = {name: [] for name in CSV_COLUMNS if name in header}
    lines: list[int] = []
    for cells in reader:
        if not cells:
            continue
        where = f"{path}: line {reader.line_num}"
        if len(cells) != len(header):
            raise DataError(f"has {len(cells)} cells", where=where, expected=f"{len(header)}, as the header has")
        values.extend(_number(cells[i], where, header[i]) for i in features)
        for name, column in columns.items():
            column.append(cells[header.index(name)].strip())
        lines.append(reader.line_num)
    times = columns.get("time")
    return Raw(
        x=np.frombuffer(values, dtype=np.float64).reshape(len(lines), len(features)),
        y=np.array(columns.get("label", []), dtype=np.str_),
        client=np.array(columns["client"], dtype=np.str_) if "client" in columns else None,
        time=np.array([_number(t, f"{path}: line {n}", "time") for t, n in zip(times, lines, strict=True)], np.float64)
        if times is not None
        else None,
        classes=None,
        row=lambda i: f"line {lines[i]}",
    )


def _number(cell: str, where: str, column: str) -> float:
    try:
        value = float(cell)
    except ValueError:
        raise DataError(f"'{cell[:40]}' is no number", where=f"{where}: column {column}") from None
    if not math.isfinite(value):
        raise DataError(f"holds {value}", where=f"{where}: column {column}", expected="a finite number")
    return value


# a folder of images -------------------------------------------------------------------------------------------------


def read_images(folder: Path, limit_bytes: int) -> Raw:
    """One subfolder per class, named as the class; x uint8 [N, C, H, W], C = 1 when all are grey, else 3 (RGB).

    Hidden files and files beside the subfolders are passed over. Raises DataError.
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
    """x uint8 [N, C, H, W] of an image, or of the images in a folder in the order of their names; a folder without any
    is read as ``read_images`` reads it, subfolder by subfolder. Raises DataError."""
    try:
        files = [path] if path.is_file() else [file for file in sorted(path.iterdir()) if _visible(file)]
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(path)) from error
    return _stacked([("", file) for file in files], limit_bytes) if files else read_images(path, limit_bytes).x


def _stacked(files: list[tuple[str, Path]], limit_bytes: int) -> NDArray[np.uint8]:
    """uint8 [N, C, H, W]: C is 1 where all are grey, else 3."""
    images = list(_pixels(files, limit_bytes))
    channels = max((image.shape[0] for image in images), default=1)
    same = [image if image.shape[0] == channels else np.repeat(image, channels, axis=0) for image in images]
    return np.stack(same) if same else np.empty((0, 1, 1, 1), np.uint8)


def _visible(file: Path) -> bool:
    return file.is_file() and not file.name.startswith(".")


def _pixels(files: list[tuple[str, Path]], limit_bytes: int) -> Iterator[NDArray[np.uint8]]:
    """uint8 [C, H, W] of each file, all of one height and width."""
    try:
        from PIL import Image
    except ImportError as error:
        raise DataError(
            "a folder of images needs Pillow, which is not installed", hint='pip install "metafleet[images]"'
        ) from error
    first: tuple[int, int] | None = None
    for _, file in files:
        try:
            with Image.open(file) as image:
                first = first or image.size
                if image.size != first:
                    raise DataError(
                        f"is {image.size[0]} by {image.size[1]} pixels",
                        where=str(file),
                        expected=f"{first[0]} by {first[1]}, as {files[0][1]} is",
                    )
                _bound(3 * first[0] * first[1] * len(files), limit_bytes, file.parent.parent)
                yield _channels_first(image, file)
        except (OSError, EOFError, ValueError, SyntaxError, struct.error, Image.DecompressionBombError) as error:
            raise DataError(f"is no image that can be read: {error}", where=str(file)) from error


def _channels_first(image: PillowImage.Image, file: Path) -> NDArray[np.uint8]:
    if image.mode in GREY_MODES:
        return np.asarray(image.convert("L"), dtype=np.uint8)[None]
    if image.mode in COLOUR_MODES:
        return np.ascontiguousarray(np.asarray(image.convert("RGB"), dtype=np.uint8).transpose(2, 0, 1))
    raise DataError(f"has pixels of mode {image.mode}", where=str(file), expected="8 bits a channel, grey or colour")
