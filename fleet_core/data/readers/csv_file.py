"""Reads samples from a .csv file: a header with column names, then one row per line."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any

from fleet_core.base import schema
from fleet_core.base.errors import DataError
from fleet_core.data.readers.forms import arranged
from fleet_core.data.readers.raw import Cut, Raw, check_file
from fleet_core.data.readers.table import KEYS, Lines, Table


def read_csv(path: Path, limit_bytes: int, cut: Cut = Cut(), *, labelled: bool = True) -> Raw:  # noqa: B008 (frozen)
    """The header has ``label``, or the columns ``cut.targets``, and optionally ``client`` and ``time``; all other
    columns are numbers, which ``forms`` interprets. labelled: False ignores label and targets, which may be absent.

    Raises DataError that names the line and the column.
    """
    try:
        check_file(path, limit_bytes)
        with open(path, encoding="utf-8-sig", newline="") as file:
            return arranged(_table(csv.reader(file, strict=True), path, limit_bytes, labelled, cut), cut)
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"cannot be read: {error}", where=str(path), expected="a .csv file in UTF-8") from error


def _table(reader: Any, path: Path, limit_bytes: int, labelled: bool, cut: Cut) -> Table:
    try:
        header = [name.strip() for name in next(reader, [])]
        features = _features(header, path, labelled, cut)
        keys = [key for key in KEYS if key in header and (key != "label" or (labelled and cut.outputs is None))]
        targets = cut.targets if labelled else ()
        lines = Lines(path, [header[i] for i in features], keys, limit_bytes, targets)
        _read(reader, header, [*features, *map(header.index, targets)], keys, lines, path)
    except csv.Error as error:
        raise DataError(f"is not valid .csv: {error}", where=f"{path}: line {reader.line_num}") from error
    return lines.table()


def _features(header: list[str], path: Path, labelled: bool, cut: Cut) -> list[int]:
    """Positions of the columns with a sample's numbers."""
    for name in (("label",) if cut.outputs is None else cut.targets) if labelled else ():
        if name not in header:
            near = schema.suggest(name, header)
            hint = f"the first line names the columns; one of them is '{name}'"
            raise DataError(f"has no column '{name}'", where=f"{path}: line 1",
                            hint=cut.one_class(header) or (f"rename the column '{near}'" if near else hint))
    for name, times in Counter(header).items():
        if times > 1:
            raise DataError(f"has {times} columns named '{name}'", where=f"{path}: line 1")
    features = [i for i, name in enumerate(header) if name not in (*KEYS, *cut.targets)]
    if not features:
        raise DataError("has no feature column", where=f"{path}: line 1", expected="a column beside label")
    return features


def _read(
    reader: Any, header: Sequence[str], features: Sequence[int], keys: Sequence[str], lines: Lines, path: Path
) -> None:
    numbers, places = _getter(features), {key: header.index(key) for key in keys}
    for cells in reader:
        if not cells:
            continue
        if len(cells) != len(header):
            raise DataError(f"has {len(cells)} cells", where=f"{path}: line {reader.line_num}",
                            expected=f"{len(header)}, as in the header")
        try:
            about: dict[str, Any] = {key: cells[i].strip() for key, i in places.items()}
            if "time" in about:
                about["time"] = float(about["time"])
            lines.add(reader.line_num, map(float, numbers(cells)), about)
        except ValueError:
            raise _no_number(cells, header, [*features, *places.values()], f"{path}: line {reader.line_num}") from None


def _getter(places: Sequence[int]) -> Callable[[list[str]], Sequence[str]]:
    """A function that returns a row's cells at ``places``, as a sequence even for one place."""
    return itemgetter(*places) if len(places) > 1 else itemgetter(slice(places[0], places[0] + 1))


def _no_number(cells: Sequence[str], header: Sequence[str], places: Sequence[int], where: str) -> DataError:
    for i in places:
        try:
            float(cells[i])
        except ValueError:
            if header[i] not in ("label", "client"):
                return DataError(f"'{cells[i][:40]}' is not a number", where=f"{where}: column {header[i]}")
    return DataError("has a value that is not a number", where=where)
