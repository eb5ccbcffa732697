"""A table of numbers with named columns, built line by line from a .csv or .ndjson file."""

from __future__ import annotations

import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.readers.raw import bound

KEYS = ("label", "client", "time")
"""Columns that describe a row; all others are numbers of the sample."""
MAX_NAME = 256  # characters of a label or a client


@dataclass(frozen=True, eq=False)
class Names:
    """A column of text. names: distinct values in order of appearance. codes: int64 [N], index into names per row."""

    names: NDArray[np.str_]
    codes: NDArray[np.int64]

    def at(self, rows: NDArray[np.int64]) -> NDArray[np.str_]:
        return self.names[self.codes[rows]]


@dataclass(frozen=True, eq=False)
class Table:
    """values: float64 [N, F] of the columns ``names``, all finite. time: float64 [N] in seconds. lines: int64 [N], line
    numbers from 1. where: the file. limit_bytes: the largest size of arrays made from the table. outputs, targets:
    names and float64 [N, K] of the columns to predict; None where samples have classes."""

    where: str
    names: tuple[str, ...]
    values: NDArray[np.float64]
    label: Names | None
    client: Names | None
    time: NDArray[np.float64] | None
    lines: NDArray[np.int64]
    limit_bytes: int
    outputs: tuple[str, ...] = ()
    targets: NDArray[np.float64] | None = None

    def __len__(self) -> int:
        return len(self.lines)

    def row(self, index: int) -> str:
        return f"line {self.lines[index]}"

    def text(self, column: Names | None, rows: NDArray[np.int64]) -> NDArray[np.str_] | None:
        """The column's text in these rows. Raises DataError when it is over the limit."""
        if column is None:
            return None
        bound(len(rows) * column.names.itemsize, self.limit_bytes, self.where)
        return column.at(rows)

    def y(self, rows: NDArray[np.int64]) -> NDArray[Any]:
        """The labels of these rows, or their targets [n, K]; empty when the table has neither."""
        if self.targets is not None:
            return self.targets[rows]
        label = self.text(self.label, rows)
        return np.empty(0, np.str_) if label is None else label


class Lines:
    """Collects the lines of a file for a table. keys: those of KEYS that the file has. outputs: columns of targets,
    whose numbers follow those of ``names`` in each row."""

    def __init__(
        self, path: Path, names: Sequence[str], keys: Sequence[str], limit_bytes: int, outputs: Sequence[str] = ()
    ):
        self._path, self._names, self._limit, self._outputs = path, tuple(names), limit_bytes, tuple(outputs)
        self._values, self._times, self._lines = array.array("d"), array.array("d"), array.array("q")
        self._text = {key: (array.array("q"), dict[str, int]()) for key in keys if key != "time"}

    def add(self, line: int, numbers: Iterable[float], about: Mapping[str, Any]) -> None:
        """Adds a row. about: label and client as text, time as a number. Raises DataError; and ValueError or
        OverflowError for a value that is not a number or too large."""
        self._values.extend(numbers)
        self._lines.append(line)
        if "time" in about:
            self._times.append(about["time"])
        for key, (codes, code_of) in self._text.items():
            name = about[key]
            if len(name) > MAX_NAME:
                raise DataError(f"has a {key} of {len(name)} characters", where=f"{self._path}: line {line}",
                                expected=f"at most {MAX_NAME}")
            codes.append(code_of.setdefault(name, len(code_of)))
        if len(self._values) * 8 > self._limit:
            bound(len(self._values) * 8, self._limit, self._path)

    def table(self) -> Table:
        """Raises DataError for a number that is not finite."""
        lines = np.frombuffer(self._lines, np.int64)
        columns, width = (*self._names, *self._outputs), len(self._names)
        values = np.frombuffer(self._values, np.float64).reshape(len(lines), len(columns))
        times = np.frombuffer(self._times, np.float64) if self._times else None
        self._check_finite(values, lines, columns)
        if times is not None:
            self._check_finite(times[:, None], lines, ("time",))
        text = {
            key: Names(np.array(list(code_of), np.str_), np.frombuffer(codes, np.int64))
            for key, (codes, code_of) in self._text.items()
        }
        targets = values[:, width:] if self._outputs else None
        return Table(str(self._path), self._names, values[:, :width], text.get("label"), text.get("client"), times,
                     lines, self._limit, self._outputs, targets)

    def _check_finite(self, values: NDArray[np.float64], lines: NDArray[np.int64], names: Sequence[str]) -> None:
        if not np.isfinite(values).all():
            row, column = np.argwhere(~np.isfinite(values))[0]
            raise DataError(f"holds {values[row, column]}", expected="a finite number",
                            where=f"{self._path}: line {lines[row]}: column {names[column]}")
