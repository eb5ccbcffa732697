"""Sums over updates with the same bits for any order of arrival and any number of workers.

Float addition is not associative, so the order is fixed: devices are in 64 buckets by hash, sorted by name within a
bucket, and bucket sums are merged in bucket order. Workers may each sum some of the buckets.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator

from fleet_core.algorithms.interface import Update
from fleet_core.base import trees
from fleet_core.base.trees import Params

BUCKETS = 64


def bucket(device: str) -> int:
    """The bucket of a device: the first byte of its name's sha256, modulo 64."""
    import hashlib  # loads OpenSSL, 4 MB that a process which only answers does not need

    return hashlib.sha256(device.encode()).digest()[0] % BUCKETS


def order(devices: Iterable[str]) -> list[str]:
    """Devices in closing order: by bucket, then by name."""
    return sorted(devices, key=lambda name: (bucket(name), name))


def bucket_sums(updates: Iterable[Update], value: Callable[[Update], Params]) -> Iterator[tuple[int, Params, int]]:
    """(bucket, sum, count) of each non-empty bucket, for updates in closing order. Holds one sum at a time."""
    for here, group in itertools.groupby(updates, key=lambda update: bucket(update.device)):
        partial, count = _sum(value(update) for update in group)
        yield here, partial, count


def merge(sums: Iterable[tuple[int, Params, int]]) -> tuple[Params, int]:
    """(total, count) of bucket sums in bucket order, merged in float64. Raises ValueError when there are none."""
    ordered = iter(sums)
    try:
        _, first, count = next(ordered)
    except StopIteration:
        raise ValueError("no updates to sum") from None
    result = trees.widened(first)
    for _, partial, number in ordered:
        trees.accumulate(result, partial)
        count += number
    return result, count


def _sum(parts: Iterator[Params]) -> tuple[Params, int]:
    """(sum in float64 from left to right, number of parts); a single part is returned as it is."""
    first, second = next(parts), next(parts, None)
    if second is None:
        return first, 1
    result, count = trees.widened(first), 1
    for part in itertools.chain((second,), parts):
        trees.accumulate(result, part)
        count += 1
    return result, count


def running_mean(before: Params, mean: Params, count: int, members: int) -> Params:
    """``before`` + min(1, count / members) · (``mean`` − ``before``). mean: of the models of ``count`` devices."""
    share = min(1.0, count / members)
    return trees.apply(lambda old, new: old + (new - old) * share, before, mean)


def total(updates: Iterable[Update], value: Callable[[Update], Params]) -> tuple[Params, int]:
    """(sum of ``value(update)``, number of updates), for updates in closing order. Raises ValueError without any."""
    return merge(bucket_sums(updates, value))
