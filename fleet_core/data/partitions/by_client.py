"""Partitions that do not depend on classes: by the client that recorded a sample, and at random.

natural: every client of the samples is a device, as in Chen et al., "Federated Meta-Learning with Fast Convergence and
Efficient Communication", 2018, which leaves out clients with fewer than 10 (FEMNIST), 20 (Shakespeare) or 25 (Sent140)
records. iid: equal parts at random, the baseline without heterogeneity.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from fleet_core.base.errors import DataError
from fleet_core.data.partitions.by_class import DEVICES, FRACTION
from fleet_core.data.partitions.shares import (
    Hand,
    Rows,
    Share,
    Source,
    Stock,
    cut,
    shares_of,
    split_rows,
    split_rows_by_time,
)


@dataclass(frozen=True)
class Natural:
    """min_samples: clients with fewer are left out. max_clients: number of clients chosen at random, 0 for all.
    max_samples: number of samples of each client chosen at random, 0 for all. split: ``random``, stratified by class,
    or ``time`` (``by_time``). train_fraction: share of a client's samples, or of its time, for training. A train and
    a test set are combined."""

    min_samples: int = field(default=2, metadata={"min": 2, "max": 10_000_000})
    max_clients: int = field(default=0, metadata={"min": 0, "max": 10_000_000})
    split: str = field(default="random", metadata={"choices": ("random", "time")})
    train_fraction: float = field(default=0.75, metadata=FRACTION)
    max_samples: int = field(default=0, metadata={"min": 0, "max": 10_000_000})


@dataclass(frozen=True)
class Iid:
    """train_fraction: share of a device's samples for training, if there is one set."""

    devices: int = field(default=100, metadata=DEVICES)
    train_fraction: float = field(default=0.75, metadata=FRACTION)


def natural(options: Natural, source: Source, rng: np.random.Generator) -> list[Share]:
    if source.client is None:
        raise DataError("the samples name no client", expected="a 'client' array or column")
    rows = source.as_one().train.rows
    names, index, counts = np.unique(source.client[rows], return_inverse=True, return_counts=True)
    chosen = np.flatnonzero(counts >= options.min_samples)
    if not chosen.size:
        raise DataError(f"no client has {options.min_samples} samples", expected=f"min_samples up to {counts.max()}")
    if options.max_clients:
        chosen = np.sort(rng.permutation(chosen)[: options.max_clients])
    groups = np.split(rows[np.argsort(index, kind="stable")], np.cumsum(counts)[:-1])
    if options.max_samples:
        groups = [np.sort(rng.permutation(group)[: options.max_samples]) for group in groups]
    split = _in_time if options.split == "time" else _at_random
    return [Share(str(names[k]), *split(groups[k], source, options.train_fraction, rng)) for k in chosen]


def iid(options: Iid, source: Source, rng: np.random.Generator) -> list[Share]:
    needed = options.devices * (2 if source.test is None else 1)
    for stock in (source.train, source.test):
        if stock is not None and stock.rows.size < needed:
            raise DataError(
                f"{stock.rows.size} samples in the {stock.name} for {options.devices} devices",
                expected=f"{needed} or more",
            )
    parts = _parts(source.train, options.devices, rng)
    if source.test is not None:
        return shares_of(list(zip(parts, _parts(source.test, options.devices, rng), strict=True)))
    return shares_of([_at_random(rows, source, options.train_fraction, rng) for rows in parts])


def _parts(stock: Stock, devices: int, rng: np.random.Generator) -> list[Rows]:
    return [np.sort(part) for part in np.array_split(rng.permutation(stock.rows), devices)]


def _at_random(rows: Rows, source: Source, fraction: float, rng: np.random.Generator) -> Hand:
    counts = np.unique(source.y[rows], return_counts=True)[1]
    return split_rows(rows, source.y[rows], cut(counts[None], fraction)[0], rng)


def _in_time(rows: Rows, source: Source, fraction: float, rng: np.random.Generator) -> Hand:
    return split_rows_by_time(rows, source.y, source.time, fraction)
