"""The named partitions of a data set over devices."""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_core.base import schema
from fleet_core.base.errors import DataError
from fleet_core.data.partitions import by_class, by_client
from fleet_core.data.partitions.shares import Share, Source, checked, generator
from fleet_core.data.samples import Samples


@dataclass(frozen=True)
class Partition:
    """source: the paper. options: the class of its options. make: (options, source, generator) -> shares."""

    name: str
    title: str
    source: str
    options: type[Any]
    make: Callable[[Any, Source, np.random.Generator], list[Share]]


ACAR = "Acar et al. 2021, Debiasing Model Updates for Improving Personalized Federated Training, Section 4"
FALLAH = "Fallah et al. 2020, Personalized Federated Learning with Theoretical Guarantees, Section 5"
PFEDME = "Dinh et al. 2020, Personalized Federated Learning with Moreau Envelopes, Section 5.1"
HSU = "Hsu et al. 2019, Measuring the Effects of Non-Identical Data Distribution for Federated Visual Classification"
LIM = "Lim et al. 2024, MetaVers, Table 2"
CHEN = "Chen et al. 2018, Federated Meta-Learning with Fast Convergence and Efficient Communication, Section 4"

PARTITIONS: dict[str, Partition] = {
    entry.name: entry
    for entry in (
        Partition("acid", "Consecutive classes in equal parts", ACAR, by_class.Acid, by_class.acid),
        Partition("alid", "As acid, with labels that each device numbers for itself", ACAR, by_class.Acid,
                  by_class.alid),
        Partition("half-and-half", "Five classes for one half, two for the other", FALLAH, by_class.HalfAndHalf,
                  by_class.half_and_half),
        Partition("power-law", "Few classes and sizes that fall by a power law", PFEDME, by_class.PowerLaw,
                  by_class.power_law),
        Partition("dirichlet", "Class proportions drawn from a Dirichlet distribution", HSU, by_class.Dirichlet,
                  by_class.dirichlet),
        Partition("classes", "A few classes for each device, each class divided among its devices", LIM,
                  by_class.SomeClasses, by_class.some_classes),
        Partition("natural", "Every client of the samples is a device", CHEN, by_client.Natural, by_client.natural),
        Partition("iid", "Equal parts at random", "baseline", by_client.Iid, by_client.iid),
    )
}


def partition(
    name: str, options: Any, train: Samples, test: Samples | None = None, *, seed: int, without: Collection[int] = ()
) -> tuple[Share, ...]:
    """The shares of all devices, a function of the arguments.

    Args:
        options: an object of the class ``PARTITIONS[name].options``.
        train: all samples, or only the training samples if ``test`` has the test samples.
        without: classes that no device gets.

    Raises DataError when options are out of their limits or the samples are too few.
    """
    if name not in PARTITIONS:
        raise DataError(
            f"there is no partition '{name}'{schema.did_you_mean(name, PARTITIONS)}",
            expected=f"one of {', '.join(PARTITIONS)}",
        )
    entry, where = PARTITIONS[name], f"partition '{name}'"
    if not isinstance(options, entry.options):
        raise DataError(f"options of {type(options).__name__}", where=where, expected=entry.options.__name__)
    with checked(options, where):
        return tuple(entry.make(options, Source.of(train, test, without), generator(seed, name)))
