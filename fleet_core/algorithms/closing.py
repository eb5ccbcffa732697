"""Sums over updates that have the same bits for any arrival order and any number of workers.

Float addition is not associative, so the order is fixed: devices by name within 64 hash buckets, bucket sums merged in
bucket order. A worker may own any set of buckets; merging their partial sums in bucket order gives what one worker
gives.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Iterable, Iterator
from itertools import groupby

from fleet_core.algorithms import trees
from fleet_core.algorithms.seam import Update
from fleet_core.algorithms.trees import Params

BUCKETS = 64


def bucket(device: str) -> int:
    """The bucket of a device: the first byte of its name's sha256, modulo 64."""
    return hashlib.sha256(device.encode()).digest()[0] % BUCKETS


def order(devices: Iterable[str]) -> list[str]:
    """Devices in closing order."""
    return sorted(devices, key=lambda name: (bucket(name), name))


def bucket_sums(updates: Iterable[Update], value: Callable[[Update], Params]) -> Iterator[tuple[int, Params, int]]:
    """(bucket, sum, count) for updates in closing order, one entry per bucket that has any; holds one sum at a time."""
    for here, group in groupby(updates, key=lambda update: bucket(update.device)):
        partial, count = _sum(value(update) for update in group)
        yield here, partial, count


def merge(sums: Iterable[tuple[int, Params, int]]) -> tuple[Params, int]:
    """Bucket sums, in bucket order, merged: (total, count). Raises ValueError when there are none."""
    counts: list[int] = []

    def partials() -> Iterator[Params]:
        for _, partial, count in sums:
            counts.append(count)
            yield partial

    result, _ = _sum(partials())
    return result, sum(counts)


def _sum(parts: Iterable[Params]) -> tuple[Params, int]:
    """(sum in float64 from left to right, number of parts) with memory for one sum and one part. Raises ValueError for
    none."""
    result: Params | None = None
    count = 0
    for part in parts:
        count += 1
        if result is None:
            result = trees.widened(part)
        else:
            trees.accumulate(result, part)
    if result is None:
        raise ValueError("no updates to sum")
    return result, count


def total(updates: Iterable[Update], value: Callable[[Update], Params]) -> tuple[Params, int]:
    """Sum of ``value(update)`` in closing order, and the number of updates. Raises ValueError when there are none."""
    return merge(bucket_sums(updates, value))
