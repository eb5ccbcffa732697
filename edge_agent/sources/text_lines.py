"""Readings in lines of text: CSV with or without a header, numbers alone, or JSON. Nothing is evaluated.

A line is ``0.1,9.8`` or ``0.1 9.8``; ``{"ax": 0.1, "ay": 9.8}``; ``[0.1, 9.8]``; ``0.1``; or a whole sample
``{"x": [[…], […]]}``. ``time`` (seconds) and ``label`` are a column or a key like the others, and no channels;
``client`` is ignored.
"""

from __future__ import annotations

import csv
import json
import math
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from edge_agent.sources.interface import Item, Lost
from fleet_core.base.errors import shortened
from fleet_core.data.live import Readings, Taken

MAX_LINE_BYTES = 1 << 16
MAX_LABEL = 64
ABOUT = ("label", "time", "client")
UNIX_S = 1e9
"""Smaller times count from the sensor's start, not from 1970."""


@dataclass(frozen=True)
class Row:
    """One reading. time: the sensor's; None if it gives none."""

    values: tuple[float, ...]
    time: float | None = None
    label: str | None = None


class TextLines:
    """Parses text into items. columns: as in ``source_settings.Lines``. partial: the first line may have lost its
    beginning."""

    def __init__(self, columns: Sequence[str] = (), *, partial: bool = False, clock: Callable[[], float] = time.time):
        self._columns, self._clock = tuple(columns), clock
        self._names: tuple[str, ...] | None = None  # of the cells of a line
        self._header: list[str] = []
        self._rest, self._skip = b"", partial

    def more(self, data: bytes) -> list[Item]:
        """The items of the lines that end in ``data``, which continues what came before."""
        *lines, self._rest = (self._rest + data).split(b"\n")
        found: list[Item | Row] = []
        for line in lines:
            if self._skip:
                self._skip = False
            elif len(line) > MAX_LINE_BYTES:
                found.append(Lost(f"a line of over {MAX_LINE_BYTES} bytes"))
            else:
                found += self._line(line)
        if len(self._rest) > MAX_LINE_BYTES:
            found.append(Lost(f"a line of over {MAX_LINE_BYTES} bytes"))
            self._rest, self._skip = b"", True
        return list(self._together(found))

    def last(self) -> list[Item]:
        """The item of a last line without an end."""
        return self.more(b"\n") if self._rest else []

    def message(self, text: bytes) -> list[Item]:
        """The items of one message, which is a line or several."""
        return [*self.more(text), *self.last()]

    def _together(self, found: Iterable[Item | Row]) -> Iterable[Item]:
        """Joins rows that follow each other and have the same columns."""
        rows: list[Row] = []
        for one in [*found, None]:
            if isinstance(one, Row) and (not rows or _form(one) == _form(rows[0])):
                rows.append(one)
                continue
            if rows:
                yield self._readings(rows)
            rows = [one] if isinstance(one, Row) else []
            if one is not None and not isinstance(one, Row):
                yield one

    def _readings(self, rows: list[Row]) -> Readings:
        now, timed = self._clock(), rows[0].time is not None
        times = np.array([now if row.time is None else row.time for row in rows], np.float64)
        labels = None if rows[0].label is None else [row.label or "" for row in rows]
        return Readings(np.array([row.values for row in rows], np.float64), times, labels, timed)

    def _line(self, line: bytes) -> list[Item | Row]:
        try:
            text = line.decode("utf-8-sig").strip()
            if not text:
                return []
            found = self._json(text) if text[0] in "{[" else self._cells(text)
        except _Unusable as error:
            return [Lost(str(error))]
        except (ValueError, RecursionError, csv.Error) as error:
            return [Lost(f"a line cannot be read: {str(error)[:100]}")]
        return [] if found is None else [found]

    # CSV --------------------------------------------------------------------------------------------------------------

    def _cells(self, text: str) -> Item | Row | None:
        cells = [cell.strip() for cell in (next(csv.reader([text], strict=True)) if "," in text else text.split())]
        if self._names is None:
            if self._is_header(cells):
                self._names, self._header = tuple(cells), cells
                return None
            self._names = self._columns or tuple(f"channel {n}" for n in range(1, len(cells) + 1))
        if cells == self._header:
            return Lost()  # the program started again
        if len(cells) != len(self._names):
            raise _Unusable(f"a line has {len(cells)} cells; expected {len(self._names)}: {text[:60]}")
        about = dict(zip(self._names, cells, strict=True))
        told = about.get("time")
        return Row(tuple(_number(about[name], name) for name in self._channels(self._names)),
                   None if told is None else _number(told, "time"), _label(about.get("label")))

    def _is_header(self, cells: list[str]) -> bool:
        if self._columns and not set(self._columns) <= set(cells):
            return False
        return any(not _is_number(cell) for cell in cells) and len(set(cells)) == len(cells)

    def _channels(self, names: Iterable[str]) -> list[str]:
        """The channels among ``names``, in order."""
        return [name for name in self._columns or names if name not in ABOUT]

    # JSON -------------------------------------------------------------------------------------------------------------

    def _json(self, text: str) -> Item | Row:
        found = json.loads(text, parse_constant=_no_number)
        if isinstance(found, list):
            return Row(tuple(_value(value, f"number {n}") for n, value in enumerate(found, 1)))
        told = None if found.get("time") is None else _value(found["time"], "time")
        label = None if "label" not in found else _label(found["label"] if found["label"] is not None else "")
        if isinstance(found.get("x"), list):
            return Taken(_array(found["x"]), self.unix(told), label or "")
        if self._names is None:
            self._names = tuple(found)
        channels = self._channels(self._names)
        missing = [name for name in channels if name not in found]
        if missing or not channels:
            raise _Unusable(f"a line has no '{', '.join(shortened(missing))}'" if missing else "a line has no number")
        return Row(tuple(_value(found[name], name) for name in channels), told, label)

    def unix(self, told: float | None) -> float:
        """The time as Unix seconds: now, if the sensor did not give the time of day."""
        return self._clock() if told is None or told < UNIX_S else told


class _Unusable(Exception):
    """A line that cannot be used, and why."""


def _form(row: Row) -> tuple[int, bool, bool]:
    return len(row.values), row.time is None, row.label is None


def _is_number(cell: str) -> bool:
    try:
        float(cell)
    except ValueError:
        return False
    return True


def _number(cell: str, name: str) -> float:
    try:
        found = float(cell)
    except ValueError:
        raise _Unusable(f"'{cell[:40]}' of {name[:40]} is not a number") from None
    return _finite(found, name)


def _value(value: Any, name: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise _Unusable(f"{json.dumps(value)[:40]} of {name[:40]} is not a number")
    try:
        return _finite(float(value), name)
    except OverflowError:
        raise _Unusable(f"a number of {name[:40]} is too large") from None


def _finite(number: float, name: str) -> float:
    if not math.isfinite(number):
        raise _Unusable(f"{number} of {name[:40]} is not finite")
    return number


def _label(label: Any) -> str | None:
    if label is None:
        return None
    if isinstance(label, bool) or not isinstance(label, (str, int)) or len(str(label)) > MAX_LABEL:
        raise _Unusable(f"the label {json.dumps(label)[:40]} is not text of at most {MAX_LABEL} characters")
    return str(label).strip()


def _array(x: list[Any]) -> np.ndarray[Any, Any]:
    try:
        found = np.array(x)
    except (ValueError, OverflowError, TypeError):
        found = np.array([])
    if found.dtype.kind not in "iuf" or not found.size or not np.isfinite(found).all():
        raise _Unusable("x is empty, ragged, or has values that are not finite numbers")
    return found.astype(np.float64) if found.dtype.kind == "f" else found


def _no_number(constant: str) -> float:
    raise _Unusable(f"{constant} is not a JSON number")
