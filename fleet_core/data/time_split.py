"""Splits by time: a device trains on earlier samples and is evaluated on later ones.

Each client is split separately; both parts are ordered by client, then by time. Unlike in a random split, overlapping
windows and other neighbours are not on both sides.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.samples import Samples

Rows = NDArray[np.int64]


def by_time(samples: Samples, fraction: float = 0.6) -> tuple[Samples, Samples]:
    """(train, test): the first ``fraction`` of the time from each client's first to its last sample, and the rest.

    Without times, or if all are equal: the first ``fraction`` of its rows. Neither part is empty for a client with two
    samples or more; a single sample goes to train.
    """
    if not 0 < fraction < 1:
        raise DataError(f"a fraction of {fraction} leaves one part empty", expected="a number between 0 and 1")

    def train_rows(rows: Rows) -> int:
        if samples.time is not None:
            time = samples.time[rows]
            if time[0] < time[-1]:
                end = time[0] * (1 - fraction) + time[-1] * fraction
                return _nonempty_parts(int(np.searchsorted(time, end, side="left")), len(rows))
        return _nonempty_parts(math.ceil(fraction * len(rows)), len(rows))

    return _cut(samples, train_rows)


def learned(samples: Samples, fraction: float = 0.6, seconds: float | None = None) -> tuple[Samples, Samples]:
    """(training samples, test samples): by ``first_seconds`` if ``seconds`` is given, else ``by_time``."""
    return by_time(samples, fraction) if seconds is None else first_seconds(samples, seconds)


def first_seconds(samples: Samples, seconds: float) -> tuple[Samples, Samples]:
    """(support, rest): the samples less than ``seconds`` after each client's first, and the rest.

    Raises DataError when the samples have no time.
    """
    if samples.time is None:
        raise DataError(f"the first {seconds:g} s are unknown", expected="a 'time' array or column in seconds")
    time = samples.time
    return _cut(samples, lambda rows: int(np.searchsorted(time[rows], time[rows[0]] + seconds, side="left")))


def _nonempty_parts(count: int, total: int) -> int:
    """``count``, limited to 1 … total − 1 (at least 1)."""
    return max(1, min(total - 1, count))


def _cut(samples: Samples, first_rows: Callable[[Rows], int]) -> tuple[Samples, Samples]:
    """Cuts each client's rows, sorted by time, after ``first_rows(rows)`` of them."""
    first, second = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for rows in _ordered(samples):
        count = first_rows(rows)
        first.append(rows[:count])
        second.append(rows[count:])
    return samples.take(np.concatenate(first)), samples.take(np.concatenate(second))


def _ordered(samples: Samples) -> list[Rows]:
    everyone = np.arange(len(samples))
    groups = [everyone] if samples.client is None else [everyone[samples.client == c] for c in samples.clients]
    if samples.time is None:
        return [rows for rows in groups if len(rows)]
    time = samples.time
    return [rows[np.argsort(time[rows], kind="stable")] for rows in groups if len(rows)]
