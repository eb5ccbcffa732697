"""Interprets the rows of a table: as samples of features, as windows, or as readings that are cut into windows.

* features: every column is a feature. x [N, F].
* wide: the columns ``ax_0 … ax_63, ay_0 … ay_63`` are a window of two channels. x [N, C, T], channels in order of
  appearance.
* long: a row is a reading and a column is a channel; ``windows`` cuts the rows. x [W, C, T].

The shape of the fleet's samples decides, if it is known. Otherwise a given window length means that rows are readings,
and two or more channels of numbered columns mean that rows are windows. Numbered columns of one name (``f_0 … f_63``)
are features, unless the given window has exactly that many readings.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError, shortened
from fleet_core.data.readers import windows
from fleet_core.data.readers.raw import Cut, Raw
from fleet_core.data.readers.table import Table

FEATURES, WIDE, LONG = "features", "wide", "long"
NUMBERED = re.compile(r"(.+)_([0-9]{1,7})")
Channels = dict[str, dict[int, int]]
"""Channel -> step -> position of the column."""


def arranged(table: Table, cut: Cut) -> Raw:
    """The samples of a table. Raises DataError for columns that are neither features nor windows."""
    channels, plain = _numbered(table.names)
    form = _form(cut, channels, plain, len(table.names))
    if form == LONG:
        length = cut.shape[1] if cut.shape else cut.window
        assert length is not None
        return windows.cut(table, length, cut.stride or length, labels=cut.labels)
    if form == FEATURES:
        return _rows(table, table.values, _notes_on_features(table, cut, channels, plain))
    places = _places(channels, plain, table.where)
    x = table.values[:, places.ravel()].reshape(len(table), *places.shape)
    note = (
        f"a row is read as a window of {places.shape[0]} channels ({', '.join(shortened(list(channels)))}) and "
        f"{places.shape[1]} steps; if its columns are features, name them without _0, _1, …"
    )
    return _rows(table, x, () if cut.shape else (note,))


def _form(cut: Cut, channels: Channels, plain: Sequence[str], columns: int) -> str:
    windowed = any(len(steps) > 1 for steps in channels.values())
    if cut.shape is not None:
        if len(cut.shape) != 2:
            return FEATURES
        if not plain and len(channels) == cut.shape[0] and _all_have(channels, cut.shape[1]):
            return WIDE
        return LONG if columns == cut.shape[0] else WIDE if windowed else FEATURES
    if cut.window is not None:
        return WIDE if not plain and _all_have(channels, cut.window) else LONG
    starting_at_0 = sum(0 in steps or len(steps) > 1 for steps in channels.values())  # pm_10 alone is not a window
    return WIDE if windowed and starting_at_0 > 1 else FEATURES


def _all_have(channels: Channels, steps: int) -> bool:
    """Whether every channel has exactly the steps 0 to ``steps`` - 1."""
    return all(len(own) == steps == max(own) + 1 for own in channels.values())


def _rows(table: Table, x: NDArray[np.float64], notes: tuple[str, ...]) -> Raw:
    rows = np.arange(len(table))
    return Raw(x, table.y(rows), table.text(table.client, rows), table.time, None, table.row, notes, table.outputs)


def _numbered(names: Sequence[str]) -> tuple[Channels, list[str]]:
    """(columns named channel_step, names of the others)."""
    channels: Channels = {}
    plain = []
    for position, name in enumerate(names):
        match = NUMBERED.fullmatch(name)
        steps = channels.setdefault(match[1], {}) if match else {}
        if match is None or int(match[2]) in steps:
            plain.append(name)
        else:
            steps[int(match[2])] = position
    return channels, plain


def _places(channels: Channels, plain: Sequence[str], where: str) -> NDArray[np.int64]:
    """Positions int64 [C, T] of the columns of windows. Raises DataError that names the channel and the column."""
    where = f"{where}: line 1"
    longest = max(channels, key=lambda name: len(channels[name]))
    last = len(channels[longest]) - 1
    if plain:
        raise DataError(
            f"mixes the columns of windows ({longest}_0 … {longest}_{last}) with plain ones: "
            f"{', '.join(shortened(list(plain)))}", where=where, expected="one or the other",
            hint="leave the plain ones out, or name the features without _0, _1, …",
        )
    length = 1 + max(max(steps) for steps in channels.values())
    for name, steps in channels.items():
        missing = next((step for step in range(length) if step not in steps), None)
        if missing is not None:
            of = max(channels, key=lambda other: max(channels[other]))
            raise DataError(
                f"channel {name} has no column '{name}_{missing}'", where=where,
                expected=f"{name}_0 to {name}_{length - 1}, because there is '{of}_{length - 1}'",
                hint="steps count from 0; if the columns are features, name them without _0, _1, …",
            )
    return np.array([[steps[step] for step in range(length)] for steps in channels.values()], np.int64)


def _notes_on_features(table: Table, cut: Cut, channels: Channels, plain: Sequence[str]) -> tuple[str, ...]:
    """Other readings of the columns, if no fleet decides it."""
    names = table.names
    if cut.shape is not None:
        return ()
    if len(channels) == 1 and not plain and len(names) > 1:
        return (
            f"the columns {names[0]} … {names[-1]} are read as {len(names)} features; if they are the steps of one "
            f"channel, say so by a window of {len(names)} (--window, data.window)",
        )
    if table.time is not None:
        return (
            f"a row is read as a sample of {len(names)} features; if it is one reading of a recording, say how many "
            "make a window (--window, data.window)",
        )
    return ()
