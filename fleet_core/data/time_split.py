"""Splits along time: what a device trains on comes before what it is evaluated on.

Every client is split on its own; each part is in order of time, client after client. Overlapping windows and other
neighbours never mix, as they would in a random split.
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
    """(train, test): the first ``fraction`` of each client's time, from its first sample to its last, and the rest.

    Without times, or where all are equal, the first ``fraction`` of its rows. Neither part is empty for a client of
    two samples or more; a single sample goes to train.
    """
    if not 0 < fraction < 1:
        raise DataError(f"a fraction of {fraction} leaves one part empty", expected="a number between 0 and 1")

    def early(rows: Rows) -> int:
        if samples.time is not None:
            time = samples.time[rows]
            if time[0] < time[-1]:
                end = time[0] * (1 - fraction) + time[-1] * fraction
                return _both(int(np.searchsorted(time, end, side="left")), len(rows))
        return _both(math.ceil(fraction * len(rows)), len(rows))

    return _cut(samples, early)


def learned(samples: Samples, fraction: float = 0.6, seconds: float | None = None) -> tuple[Samples, Samples]:
    """(what a device learns from, what it is evaluated on): ``first_seconds`` where these are given, else
    ``by_time``."""
    return by_time(samples, fraction) if seconds is None else first_seconds(samples, seconds)


def first_seconds(samples: Samples, seconds: float) -> tuple[Samples, Samples]:
    """(support, rest): the samples less than ``seconds`` after each client's first, and the rest.

    Raises DataError where the samples have no time.
    """
    if samples.time is None:
        raise DataError(f"the first {seconds:g} s cannot be told", expected="a 'time' array or column in seconds")
    time = samples.time
    return _cut(samples, lambda rows: int(np.searchsorted(time[rows], time[rows[0]] + seconds, side="left")))


def _both(count: int, total: int) -> int:
    """``count`` of ``total``, neither none nor, of two or more, all."""
    return max(1, min(total - 1, count))


def _cut(samples: Samples, early: Callable[[Rows], int]) -> tuple[Samples, Samples]:
    """Each client's rows, sorted by time, cut after ``early(rows)`` of them."""
    first, second = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for rows in _ordered(samples):
        count = early(rows)
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
