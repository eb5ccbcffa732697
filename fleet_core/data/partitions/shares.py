"""Shares: the rows of a data set that a device has, and how partitions deal them.

A partition draws from a train set and a test set, or from one set, which it divides. Rows are numbered through both
sets: row r of the test set is row len(train) + r, and ``pool`` returns the Samples that they index. No row is dealt
twice.

M: devices. C: classes that occur. N: rows of the pool.
"""

from __future__ import annotations

import contextlib
import zlib
from collections.abc import Collection, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import ArrayLike, NDArray

from fleet_core.base import schema
from fleet_core.base.errors import DataError, shortened
from fleet_core.data.samples import Samples
from fleet_core.data.time_split import by_time

Rows = NDArray[np.int64]
Counts = NDArray[np.int64]
Hand = tuple[Rows, Rows]  # training rows, test rows


@dataclass(frozen=True, eq=False)
class Share:
    """The rows of one device.

    train, test: int64 [n] and [m], disjoint rows of the pool in ascending order.
    labels: None, or the device's own numbering: its label k is class labels[k].
    """

    name: str
    train: Rows
    test: Rows
    labels: tuple[int, ...] | None = None

    @property
    def rows(self) -> Rows:
        """All of the device's rows, int64 [n + m]."""
        return np.concatenate([self.train, self.test])

    def relabelled(self, y: NDArray[np.int64]) -> NDArray[np.int64]:
        """Classes int64 [n] in the device's numbering. Raises DataError for a class that the device does not have."""
        if self.labels is None:
            return y
        own = np.array(self.labels, np.int64)
        order = np.argsort(own)
        places = np.minimum(np.searchsorted(own[order], y), own.size - 1)
        strange = np.flatnonzero(own[order[places]] != y)
        if strange.size:
            known = ", ".join(map(str, sorted(self.labels)))
            raise DataError(f"has no class {y[strange[0]]}", where=self.name, expected=f"one of {known}")
        return order[places].astype(np.int64)

    def take(self, samples: Samples, rows: Rows) -> Samples:
        """Samples of some of the device's rows, with the device's own labels and class names."""
        taken = samples.take(rows)
        names = taken.classes
        if self.labels is not None and names is not None:
            names = tuple(names[label] for label in self.labels)
        return replace(taken, y=self.relabelled(taken.y), classes=names)


def pool(train: Samples, test: Samples | None = None) -> Samples:
    """The concatenated sets, which the rows of shares index. Raises DataError when the sets do not match."""
    if test is None:
        return train
    for what, first, second in (
        ("samples", (train.x.dtype, train.x.shape[1:]), (test.x.dtype, test.x.shape[1:])),
        ("classes", train.classes, test.classes), ("outputs", train.outputs, test.outputs),
    ):
        if first != second:
            raise DataError(f"its {what} are {second}", where="test set", expected=f"{first}, as in the train set")
    return Samples(
        np.concatenate([train.x, test.x]),
        np.concatenate([train.y, test.y]),
        _both("client", train.client, test.client),
        _both("time", train.time, test.time),
        train.classes,
        outputs=train.outputs,
    )


def _both(name: str, train: NDArray[Any] | None, test: NDArray[Any] | None) -> NDArray[Any] | None:
    if (train is None) != (test is None):
        raise DataError(f"only one of the two sets has '{name}'", expected="both or neither")
    return None if train is None or test is None else np.concatenate([train, test])


def generator(seed: int, *words: str) -> np.random.Generator:
    """A random generator for one use of a seed; ``words`` name the use. Raises DataError for a negative seed."""
    if seed < 0:
        raise DataError(f"a seed of {seed}", expected="0 or more")
    return np.random.default_rng([seed, *(zlib.crc32(word.encode()) for word in words)])


@contextlib.contextmanager
def checked(options: Any, where: str) -> Iterator[None]:
    """Raises DataError that lists every option outside its limits; DataErrors raised inside get ``where``."""
    _, problems = schema.read(type(options), schema.plain(options))
    if problems:
        raise DataError("\n".join(map(str, problems)), where=where)
    try:
        yield
    except DataError as error:
        raise DataError(error.what, where=where, expected=error.expected, hint=error.hint) from None


# counts -------------------------------------------------------------------------------------------------------------


def apportion(shares: NDArray[np.float64], totals: Counts) -> Counts:
    """Integers [M, C] in proportion to ``shares``, whose rows sum to ``totals`` [M], by largest remainders. A row of
    zero shares must have the total 0."""
    weight = shares.sum(axis=1, keepdims=True)
    exact = shares / np.where(weight > 0, weight, 1) * totals[:, None]
    whole: Counts = np.floor(exact).astype(np.int64)
    rank = np.argsort(np.argsort(whole - exact, axis=1, kind="stable"), axis=1)
    whole += rank < (totals - whole.sum(axis=1))[:, None]
    return whole


def on_classes(held_Mc: NDArray[np.int64], values: ArrayLike, classes: int) -> Counts:
    """Counts [M, C]: ``values``, one number or [M, c], at the classes of each device, 0 elsewhere."""
    counts = np.zeros((len(held_Mc), classes), np.int64)
    np.put_along_axis(counts, held_Mc, values, axis=1)
    return counts


def cut(counts_MC: Counts, fraction: float) -> Counts:
    """The stratified counts [M, C] of the first part, when ``fraction`` of each device's samples are in it.

    With two samples or more, both parts of a device are non-empty; a single sample is in the first part. A class with
    two samples or more has at least one in the first part, which may therefore exceed ``fraction``.
    """
    sizes = counts_MC.sum(axis=1)
    wanted = np.floor(sizes * fraction + 0.5).astype(np.int64)
    first = np.minimum(np.clip(wanted, 1, np.maximum(sizes - 1, 1)), sizes)
    return np.maximum(apportion(counts_MC.astype(np.float64), first), np.minimum(counts_MC // 2, 1))


def split_rows(rows: Rows, y: NDArray[np.int64], before: Counts, rng: np.random.Generator) -> Hand:
    """Splits rows [n] with classes y [n] at random: ``before[k]`` rows of the k-th class that occurs, and the rest."""
    kinds = np.unique(y, return_inverse=True)[1]
    order = rng.permutation(rows.size)
    order = order[np.argsort(kinds[order], kind="stable")]  # sorted by class, random within a class
    sizes = np.bincount(kinds)
    place = np.arange(rows.size) - np.repeat(np.cumsum(sizes) - sizes, sizes)
    first = place < np.repeat(before, sizes)
    return np.sort(rows[order[first]]), np.sort(rows[order[~first]])


def split_rows_by_time(
    rows: Rows, y: NDArray[np.int64], time: NDArray[np.float64] | None, fraction: float
) -> Hand:
    """Splits one device's rows [n] after the first ``fraction`` of its time (``by_time``). y, time: of the pool."""
    of_rows = Samples(rows[:, None], y[rows], time=None if time is None else time[rows])
    first, second = by_time(of_rows, fraction)
    return np.sort(first.x[:, 0]), np.sort(second.x[:, 0])


# dealing ------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, eq=False)
class Stock:
    """A set to draw from. rows: int64 [n], rows of the pool. kinds: int64 [n], their classes as indices into
    ``Source.classes``. counts: int64 [C], rows per class."""

    name: str
    rows: Rows
    kinds: NDArray[np.int64]
    counts: Counts

    def shortages(self, wanted_C: Counts, classes: tuple[int, ...]) -> list[str]:
        return [
            f"class {classes[k]} has {self.counts[k]} samples in the {self.name}, {wanted_C[k]} are wanted"
            for k in np.flatnonzero(wanted_C > self.counts)
        ]

    def deal(self, wanted_MC: Counts, rng: np.random.Generator) -> list[Rows]:
        """Deals ``wanted_MC[i, k]`` random rows of class k to device i."""
        devices = len(wanted_MC)
        owner = np.full(self.rows.size, devices)
        for k, column in enumerate(wanted_MC.T):
            places = rng.permutation(np.flatnonzero(self.kinds == k))
            owner[places[: column.sum()]] = np.repeat(np.arange(devices), column)
        order = np.argsort(owner, kind="stable")
        return np.split(self.rows[order], np.searchsorted(owner[order], np.arange(1, devices + 1)))[:devices]


@dataclass(frozen=True, eq=False)
class Source:
    """What a partition draws from. classes: the labels that occur, ascending; 0 for targets. test: None with one set.
    y int64 [N] (``Samples.strata``), client str [N] or None, time float64 [N] or None: columns of the pool."""

    classes: tuple[int, ...]
    train: Stock
    test: Stock | None
    y: NDArray[np.int64]
    client: NDArray[np.str_] | None
    time: NDArray[np.float64] | None

    @staticmethod
    def of(train: Samples, test: Samples | None, without: Collection[int] = ()) -> Source:
        """Excludes the rows of the classes ``without``. Raises DataError when such a class does not occur, or no row is
        left."""
        y = train.strata if test is None else np.concatenate([train.strata, test.strata])
        absent = sorted(set(without) - set(np.unique(y).tolist()))
        if absent:
            raise DataError(f"has no class {absent[0]} to exclude", expected="classes that occur")
        rows = np.flatnonzero(~np.isin(y, list(without)))
        if not rows.size:
            raise DataError("has no samples to divide")
        classes, kinds = np.unique(y[rows], return_inverse=True)
        early = rows < len(train)

        def stock(name: str, chosen: NDArray[np.bool_]) -> Stock:
            return Stock(name, rows[chosen], kinds[chosen], np.bincount(kinds[chosen], minlength=classes.size))

        return Source(
            tuple(classes.tolist()),
            stock("set" if test is None else "train set", early),
            None if test is None else stock("test set", ~early),
            y,
            train.client if test is None else _both("client", train.client, test.client),
            train.time if test is None else _both("time", train.time, test.time),
        )

    def as_one(self) -> Source:
        """The two sets combined."""
        if self.test is None:
            return self
        first, second = self.train, self.test
        whole = Stock(
            "two sets together",
            np.concatenate([first.rows, second.rows]),
            np.concatenate([first.kinds, second.kinds]),
            first.counts + second.counts,
        )
        return replace(self, train=whole, test=None)

    def check(self, train_MC: Counts, test_MC: Counts) -> None:
        """Raises DataError that lists the classes with too few samples and the number of devices without samples."""
        train_C, test_C = train_MC.sum(axis=0), test_MC.sum(axis=0)
        if self.test is None:
            short = self.train.shortages(train_C + test_C, self.classes)
        else:
            short = self.train.shortages(train_C, self.classes) + self.test.shortages(test_C, self.classes)
        empty = np.flatnonzero((train_MC.sum(axis=1) == 0) | (test_MC.sum(axis=1) == 0)).tolist()
        if empty:
            short.append(f"{len(empty)} of {len(train_MC)} devices would have no training or no test samples")
        if short:
            hint = "use fewer devices, or fewer samples for each"
            raise DataError("\n".join(shortened(short)), hint=hint)

    def deal(self, train_MC: Counts, test_MC: Counts, rng: np.random.Generator) -> list[Hand]:
        """Deals rows to every device. Raises DataError like ``check``, before any row is drawn."""
        self.check(train_MC, test_MC)
        if self.test is None:
            hands = self.train.deal(np.concatenate([train_MC, test_MC]), rng)
            return list(zip(hands[: len(train_MC)], hands[len(train_MC) :], strict=True))
        return list(zip(self.train.deal(train_MC, rng), self.test.deal(test_MC, rng), strict=True))


    def divide(self, counts_MC: Counts, fraction: float, rng: np.random.Generator) -> list[Hand]:
        """Deals ``counts_MC`` rows of one set, ``fraction`` of each device's for training (``cut``)."""
        first = cut(counts_MC, fraction)
        return self.deal(first, counts_MC - first, rng)


def shares_of(hands: list[Hand], labels: list[tuple[int, ...]] | None = None, prefix: str = "device") -> list[Share]:
    """Shares named device-0, device-1, …, with numbers of equal width."""
    width = len(str(len(hands) - 1))
    return [
        Share(f"{prefix}-{i:0{width}}", *hand, None if labels is None else labels[i]) for i, hand in enumerate(hands)
    ]
