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
        partial: Params | None = None
        count = 0
        for update in group:
            tree = value(update)
            partial, count = tree if partial is None else trees.add(partial, tree), count + 1
        if partial is not None:
            yield here, partial, count


def merge(sums: Iterable[tuple[int, Params, int]]) -> tuple[Params, int]:
    """Bucket sums, in bucket order, merged: (total, count). Raises ValueError when there are none."""
    ordered = iter(sums)
    try:
        _, result, count = next(ordered)
    except StopIteration:
        raise ValueError("no updates to sum") from None
    for _, partial, number in ordered:
        result, count = trees.add(result, partial), count + number
    return result, count


def total(updates: Iterable[Update], value: Callable[[Update], Params]) -> tuple[Params, int]:
    """Sum of ``value(update)`` in closing order, and the number of updates. Raises ValueError when there are none."""
    return merge(bucket_sums(updates, value))
