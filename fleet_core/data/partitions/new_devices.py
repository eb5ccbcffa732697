"""New devices, which took no part in training: held out by client, or with classes that no other device has.

``hold_out`` and ``support_query``: Chen et al., "Federated Meta-Learning with Fast Convergence and Efficient
Communication", 2018, Section 4.1: 80 % of the clients are for training, 10 % for validation and 10 % for testing, on a
query set after adaptation to a support set of 20, 50 or 90 % of their samples. ``newcomers``: Lim et al. (MetaVers),
WACV 2024, Section 4.2, 5-way 5-shot on classes that ``partition(…, without=classes)`` keeps from all other devices.
Deviation: the number of samples of a device is an option; the authors' program divides all images of five classes among
ten devices.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.partitions.by_class import CLASSES, DEVICES, SAMPLES, own_labels, spread
from fleet_core.data.partitions.shares import (
    Rows,
    Share,
    Source,
    apportion,
    checked,
    cut,
    generator,
    on_classes,
    shares_of,
    split_rows,
    split_rows_by_time,
)
from fleet_core.data.samples import Samples


@dataclass(frozen=True)
class Newcomers:
    """classes_per_device: ways. shots, queries: training and test samples of each class on a device."""

    devices: int = field(default=10, metadata=DEVICES)
    classes_per_device: int = field(default=5, metadata=CLASSES)
    shots: int = field(default=5, metadata=SAMPLES)
    queries: int = field(default=15, metadata=SAMPLES)


def hold_out(
    shares: Sequence[Share], fractions: tuple[float, float, float] = (0.8, 0.1, 0.1), *, seed: int
) -> tuple[tuple[Share, ...], tuple[Share, ...], tuple[Share, ...]]:
    """(train, validation, test) devices, chosen at random, each in the order of ``shares``.

    A part with a fraction above 0 has at least one device. Raises DataError for fractions that do not sum to 1, or
    fewer devices than parts.
    """
    if min(fractions) < 0 or not abs(sum(fractions) - 1) < 1e-9:
        raise DataError(f"fractions of {fractions}", expected="three numbers of 0 or more that sum to 1")
    nonempty = np.array(fractions) > 0
    if len(shares) < nonempty.sum():
        raise DataError(f"{len(shares)} devices for {nonempty.sum()} parts", expected="at least one device per part")
    counts = apportion(np.array([fractions]), np.array([len(shares)]))[0]
    while (counts < nonempty).any():
        counts[np.argmin(counts - nonempty)] += 1
        counts[np.argmax(counts)] -= 1
    order = generator(seed, "hold-out").permutation(len(shares))
    train, validation, test = np.split(order, np.cumsum(counts)[:-1])
    return _taken(shares, train), _taken(shares, validation), _taken(shares, test)


def _taken(shares: Sequence[Share], places: NDArray[np.int64]) -> tuple[Share, ...]:
    return tuple(shares[i] for i in sorted(places))


def support_query(share: Share, y: NDArray[np.int64], support_fraction: float, *, seed: int) -> tuple[Rows, Rows]:
    """(support, query): all rows of the device, for training and test, split at random and stratified by class.

    Every class is in the support, which may exceed its fraction for that; a class with one sample is not in the query.
    y: int64 [N], the strata of the pool. Raises DataError when no class has two samples.
    """
    if not 0 < support_fraction < 1:
        raise DataError(f"a support fraction of {support_fraction}", expected="a number between 0 and 1")
    rows = share.rows
    counts = np.unique(y[rows], return_counts=True)[1]
    if not (counts > 1).any():
        raise DataError(f"no class has two samples among {rows.size}", where=share.name)
    before = np.maximum(cut(counts[None], support_fraction)[0], 1)
    return split_rows(rows, y[rows], before, generator(seed, "support", share.name))


def time_split(share: Share, samples: Samples, fraction: float) -> tuple[Rows, Rows]:
    """(support, query): all rows of the device, split after the first ``fraction`` of its time (``by_time``). A class
    that occurs only later is not in the support. samples: the pool."""
    return split_rows_by_time(np.sort(share.rows), samples.strata, samples.time, fraction)


def within(shares: Sequence[Share], samples: Samples, split: str, fraction: float, *, seed: int) -> tuple[Share, ...]:
    """The same devices with only their training rows, split again into training and test rows: by ``time``, or at
    ``random`` by class. Their original test rows are not used."""
    alone = [replace(share, test=share.train[:0]) for share in shares]
    if split == "time":
        parts = [time_split(share, samples, fraction) for share in alone]
    else:
        parts = [support_query(share, samples.strata, fraction, seed=seed) for share in alone]
    return tuple(replace(share, train=own, test=later) for share, (own, later) in zip(alone, parts, strict=True))


def newcomers(
    options: Newcomers, train: Samples, test: Samples | None, classes: Collection[int], *, seed: int
) -> tuple[Share, ...]:
    """Devices new-0, new-1, … that have only ``classes``; each device numbers them in its own order.

    Rows come from both sets, and no row is on two devices. Raises DataError when classes or samples are too few.
    """
    y = train.y if test is None else np.concatenate([train.y, test.y])
    occurring = set(np.unique(y).tolist())
    with checked(options, "newcomers"):
        absent = sorted(set(classes) - occurring)
        if absent:
            raise DataError(f"no sample is of class {absent[0]}", expected="classes that occur")
        source = Source.of(train, test, occurring - set(classes)).as_one()
        rng = generator(seed, "newcomers")
        held = spread(options.devices, options.classes_per_device, len(source.classes), rng)
        held_MC = on_classes(held, 1, len(source.classes))
        hands = source.deal(options.shots * held_MC, options.queries * held_MC, rng)
    return tuple(shares_of(hands, [own_labels(source, row, rng) for row in held], "new"))
