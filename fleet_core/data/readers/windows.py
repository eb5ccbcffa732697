"""Cuts windows from a recording in which each row is a reading.

A window has one client, one label or the mean of its readings' targets, and no gap in time. A gap is a step back, or
one of more than 1.5 times the client's median step. The readings of a client are in the order of the file, even when
clients alternate.
"""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.readers.raw import Raw, bound
from fleet_core.data.readers.table import Table

GAP = 1.5  # median steps: a lost reading is a gap, an uneven clock is not

Rows = NDArray[np.int64]


def cut(table: Table, length: int, stride: int, *, labels: bool = False) -> Raw:
    """x float32 [W, C, length]. A window has the label of its readings, or the mean of their targets, and the time of
    the last one. labels: targets are labels, and a window has those that half of its readings or more have. Readings
    with an empty label are skipped. Raises DataError when there is no window."""
    if not len(table):
        raise DataError("holds no samples", where=table.where)
    order = np.arange(len(table)) if table.client is None else np.argsort(table.client.codes, kind="stable")
    starts, gaps = _stretches(table, order)
    lengths = np.diff(starts, append=len(table))
    taken = _labelled(table, order[starts])
    counts = np.where(taken & (lengths >= length), (lengths - length) // stride + 1, 0)
    if not counts.sum():
        raise DataError(
            f"gives no window of {length} readings: the longest stretch has {lengths.max()}", where=table.where,
            expected="stretches of one client and one label without a gap in time", hint="a shorter window",
        )
    bound(int(counts.sum()) * length * len(table.names) * 4, table.limit_bytes, f"{table.where}: windows")
    within = np.arange(counts.sum()) - np.repeat(np.cumsum(counts) - counts, counts)
    first = np.repeat(starts, counts) + stride * within
    heads, tails = order[first], order[first + length - 1]
    run = _single(table)[order]
    x = np.empty((len(first), run.shape[1], length), np.float32)
    for channel in range(run.shape[1]):
        x[:, channel] = sliding_window_view(run[:, channel], length)[first]
    left = np.where(counts, lengths - (counts - 1) * stride - length, lengths)
    return Raw(
        x=x,
        y=_truths(table, heads, order, first, length, labels=labels),
        client=table.text(table.client, heads),
        time=None if table.time is None else table.time[tails],
        classes=None,
        row=lambda i: f"{table.row(int(heads[i]))} to {table.row(int(tails[i]))}",
        notes=(_note(len(table), len(first), length, stride, len(starts), gaps, left, taken, lengths),),
        outputs=table.outputs,
    )


def _truths(table: Table, heads: Rows, order: Rows, first: Rows, length: int, *, labels: bool) -> NDArray[Any]:
    if table.targets is None:
        return table.y(heads)
    if not labels:
        return _means(table.targets[order], first, length)
    bad = np.flatnonzero(~((table.targets == 0) | (table.targets == 1)).all(1))
    if bad.size:
        raise DataError(f"holds {table.targets[bad[0]].tolist()}", where=f"{table.where}, {table.row(int(bad[0]))}",
                        expected="0 or 1 for each label")
    return (_means(table.targets[order], first, length) >= 0.5).astype(np.float64)


def _means(targets_NK: NDArray[np.float64], first: Rows, length: int) -> NDArray[np.float64]:
    """[W, K]: of the windows that start at ``first``."""
    return np.stack([sliding_window_view(one, length)[first].mean(-1) for one in targets_NK.T], 1)


def _stretches(table: Table, order: Rows) -> tuple[Rows, int]:
    """(positions in ``order`` where stretches of one client and one label without a gap begin, number of gaps)."""
    begins = np.zeros(len(order), bool)
    begins[0] = True
    if table.client is not None:
        begins[1:] |= np.diff(table.client.codes[order]) != 0
    gaps = np.zeros(len(order), bool)
    if table.time is not None:
        bounds = [*np.flatnonzero(begins), len(order)]
        times = table.time[order]
        for start, end in pairwise(bounds):
            steps = np.diff(times[start:end])
            usual = np.median(steps[steps > 0]) if (steps > 0).any() else np.inf
            gaps[start + 1 : end] = (steps < 0) | (steps > GAP * usual)
    if table.label is not None:
        begins[1:] |= np.diff(table.label.codes[order]) != 0
    return np.flatnonzero(begins | gaps), int((gaps & ~begins).sum())


def _labelled(table: Table, rows: Rows) -> NDArray[np.bool_]:
    """Which rows have a label; all rows when there is no column of labels."""
    return np.ones(len(rows), bool) if table.label is None else table.label.at(rows) != ""


def _single(table: Table) -> NDArray[np.float32]:
    with np.errstate(over="ignore"):
        single = table.values.astype(np.float32)
    if not np.isfinite(single).all():
        row, column = np.argwhere(~np.isfinite(single))[0]
        raise DataError(f"holds {single[row, column]}", expected="finite float32 values",
                        where=f"{table.where}: x, {table.row(row)}: column {table.names[column]}")
    return single


def _note(
    readings: int, made: int, length: int, stride: int, stretches: int, gaps: int, left: Rows,
    taken: NDArray[np.bool_], lengths: Rows,
) -> str:
    note = f"{readings} readings give {made} windows of {length}, one every {stride}"
    over, short = int(left[taken].sum()), int((taken & (lengths < length)).sum())
    if over:
        ended = f", {short} of them too short for a window" * (short > 0)
        note += f"; {over} readings are left over at the ends of {stretches} stretches{ended}"
    if gaps:
        note += f"; {gaps} gaps in time (a step back, or over {GAP} median steps) end a stretch"
    unlabelled = int(lengths[~taken].sum())
    return note + (f"; {unlabelled} readings without a label are skipped" if unlabelled else "")
