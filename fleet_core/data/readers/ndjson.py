"""Samples as JSON, one object a line (.ndjson, .jsonl): whole samples ``{"x": [[…], […]], "label": …}``, or a table's
rows ``{"time": …, "ax": …, "ay": …, "label": …}``, which ``forms`` reads as it reads those of a .csv.
"""

from __future__ import annotations

import array
import json
import math
import typing
from collections.abc import Iterator, Mapping, Sequence
from itertools import chain
from operator import itemgetter
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base import schema
from fleet_core.base.errors import DataError
from fleet_core.data.readers.forms import arranged
from fleet_core.data.readers.raw import Cut, Raw, bound
from fleet_core.data.readers.table import KEYS, Lines

MAX_LINE_BYTES = 16 << 20
MAX_AXES = 4
MAX_EXACT = 1 << 53  # whole numbers below it are exact as float64

Object = dict[str, Any]


def read_ndjson(path: Path, limit_bytes: int, cut: Cut = Cut(), *, labelled: bool = True) -> Raw:  # noqa: B008 (frozen)
    """The first line says whether a line is a sample, with ``x``, or a row of a table, and whether there are ``client``
    and ``time``. Not labelled: ``label`` may be absent, and is passed over.

    Raises DataError with the line.
    """
    try:
        if not path.is_file():
            raise DataError("is no file", where=str(path))
        bound(path.stat().st_size, limit_bytes, path)
        with open(path, "rb") as file:
            objects = _objects(file, path, labelled)
            line, first = next(objects, (1, {}))
            if not first:
                raise DataError("holds no samples", where=f"{path}: line {line}")
            keys = [key for key in KEYS if key in first]
            if labelled and "label" not in keys:
                near = schema.suggest("label", first)
                raise DataError("has no 'label'", where=f"{path}: line {line}",
                                hint=f"rename '{near}'" if near else None)
            rows = chain([(line, first)], objects)
            if isinstance(first.get("x"), list):
                return _samples(rows, keys, path, limit_bytes, cut)
            return _table(rows, [name for name in first if name not in keys], keys, path, limit_bytes, cut)
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(path)) from error


def _objects(file: typing.BinaryIO, path: Path, labelled: bool) -> Iterator[tuple[int, Object]]:
    """(number of the line, its object), blank lines left out."""
    decoder = json.JSONDecoder(parse_constant=_no_number)
    for number, line in enumerate(iter(lambda: file.readline(MAX_LINE_BYTES + 1), b""), 1):
        where = f"{path}: line {number}"
        if len(line) > MAX_LINE_BYTES:
            raise DataError("is too long", where=where, expected=f"at most {MAX_LINE_BYTES} bytes")
        text = line.removeprefix(b"\xef\xbb\xbf") if number == 1 else line
        if not text.strip():
            continue
        try:
            found = decoder.decode(text.decode())
        except (ValueError, RecursionError) as error:
            raise DataError(f"is no JSON: {str(error)[:200]}", where=where, expected="one object a line") from error
        if not isinstance(found, dict):
            raise DataError("is no JSON object", where=where, expected='{"x": …, "label": …}')
        if not labelled:
            found.pop("label", None)
        yield number, found


def _no_number(constant: str) -> typing.NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


# A table's rows -------------------------------------------------------------------------------------------------------


def _table(
    rows: Iterator[tuple[int, Object]], names: Sequence[str], keys: Sequence[str], path: Path, limit_bytes: int,
    cut: Cut,
) -> Raw:  # fmt: skip
    if not names:
        raise DataError("has no number beside its " + ", ".join(keys), where=f"{path}: line 1",
                        expected="'x', or a name for each channel")
    lines = Lines(path, names, keys, limit_bytes)
    numbers = itemgetter(*names, names[0])  # a tuple, also of one
    for line, found in rows:
        where = f"{path}: line {line}"
        if len(found) != len(names) + len(keys) or not found.keys() >= {*names, *keys}:
            raise _other_keys(found, [*names, *keys], where)
        cells = numbers(found)[:-1]
        if not set(map(type, cells)) <= {int, float}:
            name = next(name for name, cell in zip(names, cells, strict=True) if type(cell) not in (int, float))
            raise DataError(f"'{name}' is {_shown(found[name])}", where=where, expected="a number")
        try:
            lines.add(line, cells, _about(found, keys, where))
        except OverflowError:
            raise DataError("holds a number that is too large", where=where) from None
    return arranged(lines.table(), cut)


def _other_keys(found: Object, known: Sequence[str], where: str) -> DataError:
    for name in known:
        if name not in found:
            return DataError(f"has no '{name}'", where=where, expected="the names of the first line, all of them")
    other = next(name for name in found if name not in known)
    near = schema.suggest(other, known)
    return DataError(f"has '{other[:80]}'" + (f" (did you mean '{near}'?)" if near else ""), where=where,
                     expected="the names of the first line and no other")


def _about(found: Object, keys: Sequence[str], where: str) -> Mapping[str, Any]:
    """Label and client as text, the time as a number."""
    about: dict[str, Any] = {}
    for key in keys:
        value = found[key]
        kinds, wanted = ((int, float), "a number, in seconds") if key == "time" else ((str, int), "text")
        if type(value) not in kinds:
            raise DataError(f"'{key}' is {_shown(value)}", where=where, expected=wanted)
        about[key] = value if key == "time" else str(value).strip()
    return about


def _shown(value: Any) -> str:
    return json.dumps(value)[:80]


# Whole samples --------------------------------------------------------------------------------------------------------


def _samples(
    rows: Iterator[tuple[int, Object]], keys: Sequence[str], path: Path, limit_bytes: int, cut: Cut
) -> Raw:
    if cut.window is not None:
        raise DataError("holds whole samples, of which no windows are cut", where=str(path),
                        hint="leave the window out")
    lines, values = Lines(path, (), keys, limit_bytes), array.array("d")
    shape, whole = tuple[int, ...](), True
    for line, found in rows:
        where = f"{path}: line {line}"
        if found.keys() != {"x", *keys}:
            raise _other_keys(found, ["x", *keys], where)
        x = _array(found["x"], where)
        shape = shape or x.shape
        if x.shape != shape:
            raise DataError(f"x has shape {list(x.shape)}", where=where, expected=f"{list(shape)}, as before")
        whole = whole and x.dtype.kind in "iu" and bool(np.abs(x.astype(np.float64)).max() < MAX_EXACT)
        values.frombytes(x.astype(np.float64).tobytes())
        bound(len(values) * 8, limit_bytes, path)
        try:
            lines.add(line, (), _about(found, keys, where))
        except OverflowError:
            raise DataError("'time' is too large", where=where) from None
    table = lines.table()
    everyone = np.arange(len(table))
    label = table.text(table.label, everyone)
    made = np.frombuffer(values, np.float64).reshape(len(table), *shape)
    return Raw(made.astype(np.int64) if whole else made, np.empty(0, np.str_) if label is None else label,
               table.text(table.client, everyone), table.time, None, table.row)


def _array(x: Any, where: str) -> NDArray[Any]:
    """The numbers of one sample, finite. Raises DataError."""
    expected = "lists of numbers, all of one length"
    if not isinstance(x, list):
        raise DataError(f"x is {_shown(x)}", where=where, expected=expected)
    try:
        found = np.array(x)
    except (ValueError, OverflowError, TypeError) as error:
        raise DataError("x is ragged, or holds what is no number", where=where, expected=expected) from error
    if found.dtype.kind not in "iuf" or not 1 <= found.ndim <= MAX_AXES or not math.prod(found.shape):
        raise DataError("x is empty, ragged, or holds what is no number", where=where, expected=expected)
    if not np.isfinite(found).all():
        raise DataError("x holds a number that is too large", where=where)
    return found
