"""Reads samples as JSON, one object per line (.ndjson, .jsonl): whole samples ``{"x": [[…], […]], "label": …}``, or
rows of a table ``{"time": …, "ax": …, "ay": …, "label": …}``, which ``forms`` interprets like those of a .csv. In place
of the label a line may have targets, each under its name.
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
from fleet_core.data.readers.raw import Cut, Raw, bound, check_file
from fleet_core.data.readers.table import KEYS, Lines

MAX_LINE_BYTES = 16 << 20
MAX_AXES = 4
MAX_EXACT = 1 << 53  # whole numbers below it are exact as float64

Object = dict[str, Any]


def read_ndjson(path: Path, limit_bytes: int, cut: Cut = Cut(), *, labelled: bool = True) -> Raw:  # noqa: B008 (frozen)
    """The first line decides whether lines are samples (with ``x``) or rows of a table, and whether they have
    ``client`` and ``time``. labelled: False ignores label and targets, which may be absent.

    Raises DataError that names the line.
    """
    try:
        check_file(path, limit_bytes)
        with open(path, "rb") as file:
            ignored = () if labelled and cut.outputs is None else ("label",) if labelled else ("label", *cut.targets)
            objects = _objects(file, path, ignored)
            line, first = next(objects, (1, {}))
            if not first:
                raise DataError("holds no samples", where=f"{path}: line {line}")
            targets = cut.targets if labelled else ()
            keys = [key for key in KEYS if key in first]
            for name in (("label",) if cut.outputs is None else targets) if labelled else ():
                if name not in first:
                    near = schema.suggest(name, first)
                    raise DataError(f"has no '{name}'", where=f"{path}: line {line}",
                                    hint=f"rename '{near}'" if near else None)
            rows = chain([(line, first)], objects)
            if isinstance(first.get("x"), list):
                return _samples(rows, keys, targets, path, limit_bytes, cut)
            names = [name for name in first if name not in (*keys, *targets)]
            return _table(rows, names, keys, targets, path, limit_bytes, cut)
    except OSError as error:
        raise DataError(f"cannot be read: {error}", where=str(path)) from error


def _objects(file: typing.BinaryIO, path: Path, ignored: Sequence[str]) -> Iterator[tuple[int, Object]]:
    """(line number, object without the keys ``ignored``) of every line that is not blank."""
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
            raise DataError(f"is not JSON: {str(error)[:200]}", where=where, expected="one object per line") from error
        if not isinstance(found, dict):
            raise DataError("is not a JSON object", where=where, expected='{"x": …, "label": …}')
        for name in ignored:
            found.pop(name, None)
        yield number, found


def _no_number(constant: str) -> typing.NoReturn:
    raise ValueError(f"{constant} is not a JSON number")


# A table's rows -------------------------------------------------------------------------------------------------------


def _table(
    rows: Iterator[tuple[int, Object]], names: Sequence[str], keys: Sequence[str], targets: Sequence[str], path: Path,
    limit_bytes: int, cut: Cut,
) -> Raw:  # fmt: skip
    if not names:
        raise DataError("has no numbers beside " + ", ".join(keys), where=f"{path}: line 1",
                        expected="'x', or a name for each channel")
    lines, columns = Lines(path, names, keys, limit_bytes, targets), (*names, *targets)
    numbers = itemgetter(*columns, names[0])  # two or more names always give a tuple
    for line, found in rows:
        where = f"{path}: line {line}"
        if len(found) != len(columns) + len(keys) or not found.keys() >= {*columns, *keys}:
            raise _other_keys(found, [*columns, *keys], where)
        cells = numbers(found)[:-1]
        if not set(map(type, cells)) <= {int, float}:
            name = next(name for name, cell in zip(columns, cells, strict=True) if type(cell) not in (int, float))
            raise DataError(f"'{name}' is {_shown(found[name])}", where=where, expected="a number")
        try:
            lines.add(line, cells, _about(found, keys, where))
        except OverflowError:
            raise DataError("has a number that is too large", where=where) from None
    return arranged(lines.table(), cut)


def _other_keys(found: Object, known: Sequence[str], where: str) -> DataError:
    for name in known:
        if name not in found:
            return DataError(f"has no '{name}'", where=where, expected="all names of the first line")
    other = next(name for name in found if name not in known)
    return DataError(f"has '{other[:80]}'{schema.did_you_mean(other, known)}", where=where,
                     expected="only the names of the first line")


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
    rows: Iterator[tuple[int, Object]], keys: Sequence[str], targets: Sequence[str], path: Path, limit_bytes: int,
    cut: Cut,
) -> Raw:  # fmt: skip
    if cut.window is not None:
        raise DataError("has whole samples, which cannot be cut into windows", where=str(path),
                        hint="leave the window out")
    lines, values = Lines(path, (), keys, limit_bytes, targets), array.array("d")
    shape, all_integers = tuple[int, ...](), True
    for line, found in rows:
        where = f"{path}: line {line}"
        if found.keys() != {"x", *keys, *targets}:
            raise _other_keys(found, ["x", *keys, *targets], where)
        for name in targets:
            if type(found[name]) not in (int, float):
                raise DataError(f"'{name}' is {_shown(found[name])}", where=where, expected="a number")
        x = _array(found["x"], where)
        shape = shape or x.shape
        if x.shape != shape:
            raise DataError(f"x has shape {list(x.shape)}", where=where,
                            expected=f"{list(shape)}, as in the first sample")
        exact = x.dtype.kind in "iu" and bool(np.abs(x.astype(np.float64)).max() < MAX_EXACT)
        all_integers = all_integers and exact
        values.frombytes(x.astype(np.float64).tobytes())
        bound(len(values) * 8, limit_bytes, path)
        try:
            lines.add(line, [found[name] for name in targets], _about(found, keys, where))
        except OverflowError:
            raise DataError("has a number that is too large", where=where) from None
    table = lines.table()
    rows_N = np.arange(len(table))
    x_N = np.frombuffer(values, np.float64).reshape(len(table), *shape)
    return Raw(x_N.astype(np.int64) if all_integers else x_N, table.y(rows_N),
               table.text(table.client, rows_N), table.time, None, table.row, outputs=table.outputs)


def _array(x: Any, where: str) -> NDArray[Any]:
    """The numbers of one sample. Raises DataError unless they are finite numbers in a regular array."""
    expected = "lists of numbers of equal length"
    if not isinstance(x, list):
        raise DataError(f"x is {_shown(x)}", where=where, expected=expected)
    try:
        found = np.array(x)
    except (ValueError, OverflowError, TypeError) as error:
        raise DataError("x is ragged, or has values that are not numbers", where=where, expected=expected) from error
    if found.dtype.kind not in "iuf" or not 1 <= found.ndim <= MAX_AXES or not math.prod(found.shape):
        raise DataError("x is empty, ragged, or has values that are not numbers", where=where, expected=expected)
    if not np.isfinite(found).all():
        raise DataError("x has a number that is too large", where=where)
    return found
