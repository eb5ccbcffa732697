"""Partitions that choose how many samples of each class a device has.

ACID-c and ALID-c: Acar et al., "Debiasing Model Updates for Improving Personalized Federated Training", ICML 2021,
Section 4. Device i has the c consecutive classes i, i+1, … (mod classes) in equal parts; a remainder goes to its first
classes. Deviation: a class with too few samples is an error; the authors' program deals the whole set sample by sample
and then exchanges samples between devices.

half-and-half: Fallah et al., "Personalized Federated Learning with Theoretical Guarantees: A Model-Agnostic
Meta-Learning Approach", NeurIPS 2020, Section 5. The paper does not say which two classes a device of the second half
has: here the pairs of one of the first five and one of the last five classes in turn, each once with 50 devices. The
paper divides the test data "with the same distribution" and gives no number: here a is scaled by the sizes of the two
sets and rounded to an even number (MNIST 32, CIFAR-10 14).

power-law: Dinh et al., "Personalized Federated Learning with Moreau Envelopes" (pFedMe), NeurIPS 2020, Section 5.1.
From the paper: 20 devices, 2 labels each, 1165 to 3834 samples, 75 % of them for training, drawn from the training and
test images together. Chosen here: the device of rank r has most · r^-γ samples with γ such that the last one has
``least``, and the seed deals the ranks; labels i and i+1 (mod classes) in equal parts, as in the authors' program; a
stratified split. Deviation: no image is on two devices, and 34,935 images are used. In the authors' program the range
is that of the training samples, and the devices of a label have the same first images; ``benchmarks/papers/pfedme``
draws those.

dirichlet: Hsu, Qi and Brown, "Measuring the Effects of Non-Identical Data Distribution for Federated Visual
Classification", 2019. A device's class proportions are drawn from Dir(α p), where p are those of the train set; α is
the sum of the parameters (a program with one number for every class means α / C). All devices have one size, as in the
paper: the largest that every class allows, so that the drawn proportions are exact to one sample. Remaining samples are
not used.

classes: Lim et al., "MetaVers: Meta-Learned Versatile Representations for Personalized Federated Learning", WACV 2024,
Table 2, which takes the setting of Shamsian et al., "Personalized Federated Learning using Hypernetworks", ICML 2021:
each device draws its classes among those that the fewest devices have, and a class is divided among its devices in
proportion to numbers from U(0.4, 0.6), the same in both sets. Deviations: classes may have different numbers of
devices; no sample is lost by rounding; 10,000 images for validation are not set aside.

M: devices. C: classes that occur. c: classes of a device.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.partitions.shares import Counts, Share, Source, apportion, on_classes, shares_of

DEVICES: dict[str, Any] = {"min": 1, "max": 100_000}
SAMPLES: dict[str, Any] = {"min": 1, "max": 10_000_000}
CLASSES: dict[str, Any] = {"min": 1, "max": 10_000}
FRACTION: dict[str, Any] = {"min": 0.01, "max": 0.99}
MAX_DRAWS = 100
HOLDER_SHARE = (0.4, 0.6)


@dataclass(frozen=True)
class Acid:
    """devices: m. classes_per_device: c. train_per_device, test_per_device: samples."""

    devices: int = field(default=100, metadata=DEVICES)
    classes_per_device: int = field(default=5, metadata=CLASSES)
    train_per_device: int = field(default=500, metadata=SAMPLES)
    test_per_device: int = field(default=100, metadata=SAMPLES)


@dataclass(frozen=True)
class HalfAndHalf:
    """devices: n. a: images of each of the first five classes (196 MNIST, 68 CIFAR-10), an even number. a_test: the
    same for the test set; None scales a. mixed: False gives the second half of the devices no images of the first five
    classes instead of a/2 images of one of them ("diff. hetero." in Table 1)."""

    devices: int = field(default=50, metadata={"min": 2, "max": 100_000})
    a: int = field(default=196, metadata={"min": 2, "max": 10_000_000})
    a_test: int | None = field(default=None, metadata={"min": 2, "max": 10_000_000})
    mixed: bool = True


@dataclass(frozen=True)
class PowerLaw:
    """least, most: samples of the smallest and the largest device. train_fraction: share of a device's samples for
    training. A train and a test set are combined."""

    devices: int = field(default=20, metadata=DEVICES)
    classes_per_device: int = field(default=2, metadata=CLASSES)
    least: int = field(default=1165, metadata=SAMPLES)
    most: int = field(default=3834, metadata=SAMPLES)
    train_fraction: float = field(default=0.75, metadata=FRACTION)


@dataclass(frozen=True)
class Dirichlet:
    """concentration: α. min_samples: least samples of a device (with one set: training and test samples together, else
    training samples); proportions that allow fewer are drawn again, up to 100 times. train_fraction: share of a
    device's samples for training, if there is one set."""

    devices: int = field(default=100, metadata=DEVICES)
    concentration: float = field(default=0.5, metadata={"min": 1e-3, "max": 1e6})
    min_samples: int = field(default=10, metadata={"min": 2, "max": 10_000_000})
    train_fraction: float = field(default=0.75, metadata=FRACTION)


@dataclass(frozen=True)
class SomeClasses:
    """train_fraction: share of a device's samples for training, if there is one set."""

    devices: int = field(default=100, metadata=DEVICES)
    classes_per_device: int = field(default=2, metadata=CLASSES)
    train_fraction: float = field(default=0.75, metadata=FRACTION)


def acid(options: Acid, source: Source, rng: np.random.Generator) -> list[Share]:
    held = _consecutive(options.devices, options.classes_per_device, len(source.classes))
    return shares_of(source.deal(*_acid_counts(options, held, source), rng))


def alid(options: Acid, source: Source, rng: np.random.Generator) -> list[Share]:
    held = _consecutive(options.devices, options.classes_per_device, len(source.classes))
    hands = source.deal(*_acid_counts(options, held, source), rng)
    return shares_of(hands, [own_labels(source, row, rng) for row in held])


def half_and_half(options: HalfAndHalf, source: Source, rng: np.random.Generator) -> list[Share]:
    if len(source.classes) != 10:
        raise DataError(f"{len(source.classes)} classes occur", expected="ten: five and five")
    a_test = options.a_test or _scaled(options.a, source)
    if options.a % 2 or a_test % 2:
        raise DataError(f"half of {options.a if options.a % 2 else a_test} images", expected="an even a and a_test")
    return shares_of(source.deal(_halves(options, options.a), _halves(options, a_test), rng))


def power_law(options: PowerLaw, source: Source, rng: np.random.Generator) -> list[Share]:
    if options.least > options.most:
        raise DataError(f"least is {options.least}", expected=f"no more than most, {options.most}")
    held = _consecutive(options.devices, options.classes_per_device, len(source.classes))
    sizes = rng.permutation(falling_sizes(options.devices, options.least, options.most))
    counts = _even(sizes, held, len(source.classes))
    return shares_of(source.as_one().divide(counts, options.train_fraction, rng))


def dirichlet(options: Dirichlet, source: Source, rng: np.random.Generator) -> list[Share]:
    if (source.train.counts == 0).any():
        missing = source.classes[int(np.argmin(source.train.counts))]
        raise DataError(f"class {missing} has no sample in the train set", expected="all classes of the test set")
    prior_C = source.train.counts / source.train.counts.sum()
    largest = 0
    for _ in range(MAX_DRAWS):
        proportions = rng.dirichlet(options.concentration * prior_C, options.devices)
        train = _of_equal_size(proportions, source.train.counts)
        size = int(train[0].sum())
        largest = max(largest, size)
        if size >= options.min_samples:
            if source.test is None:
                return shares_of(source.divide(train, options.train_fraction, rng))
            return shares_of(source.deal(train, _of_equal_size(proportions, source.test.counts), rng))
    raise DataError(
        f"{MAX_DRAWS} draws of the proportions gave each device {largest} samples at most",
        expected=f"min_samples, {options.min_samples}",
        hint="use fewer devices or a larger concentration",
    )


def some_classes(options: SomeClasses, source: Source, rng: np.random.Generator) -> list[Share]:
    held = spread(options.devices, options.classes_per_device, len(source.classes), rng)
    held_MC = on_classes(held, 1, len(source.classes))
    source.check(held_MC, held_MC)
    share_MC = held_MC * rng.uniform(*HOLDER_SHARE, held_MC.shape)

    def divided(counts_C: Counts) -> Counts:
        by_class: Counts = apportion(share_MC.T, np.where(held_MC.any(axis=0), counts_C, 0)).T
        return by_class

    train = divided(source.train.counts)
    if source.test is not None:
        return shares_of(source.deal(train, divided(source.test.counts), rng))
    return shares_of(source.divide(train, options.train_fraction, rng))


# parts of the above -------------------------------------------------------------------------------------------------


def own_labels(source: Source, held: NDArray[np.int64], rng: np.random.Generator) -> tuple[int, ...]:
    """A device's classes in random order."""
    return tuple(source.classes[k] for k in rng.permutation(held))


def spread(devices: int, each: int, classes: int, rng: np.random.Generator) -> NDArray[np.int64]:
    """Classes [M, c]: every device takes those that the fewest devices have so far, ties at random. The numbers of
    devices per class differ by at most one."""
    _enough_classes(each, classes)
    holders = np.zeros(classes, np.int64)
    held = np.empty((devices, each), np.int64)
    for i in range(devices):
        held[i] = np.lexsort((rng.random(classes), holders))[:each]
        holders[held[i]] += 1
    return held


def falling_sizes(devices: int, least: int, most: int) -> Counts:
    """most · r^-γ for the ranks r = 1 … M, with γ such that the last is ``least``."""
    exponent = np.log(most / least) / np.log(max(devices, 2))
    sizes: Counts = np.rint(most * np.arange(1, devices + 1) ** -exponent).astype(np.int64)
    return sizes


def _consecutive(devices: int, each: int, classes: int) -> NDArray[np.int64]:
    """Classes [M, c]: i, i+1, … of device i."""
    _enough_classes(each, classes)
    held: NDArray[np.int64] = (np.arange(devices)[:, None] + np.arange(each)) % classes
    return held


def _enough_classes(each: int, classes: int) -> None:
    if each > classes:
        expected = f"classes_per_device up to {classes}"
        raise DataError(f"{each} classes per device where {classes} occur", expected=expected)


def _even(sizes: Counts, held: NDArray[np.int64], classes: int) -> Counts:
    """Counts [M, C]: ``sizes[i]`` samples in equal parts of the classes ``held[i]``, a remainder to the first of them.
    """
    each = held.shape[1]
    if (sizes < each).any():
        raise DataError(f"{each} classes in {sizes.min()} samples of a device", expected="a sample of every class")
    return on_classes(held, sizes[:, None] // each + (np.arange(each) < sizes[:, None] % each), classes)


def _acid_counts(options: Acid, held: NDArray[np.int64], source: Source) -> tuple[Counts, Counts]:
    def even(size: int) -> Counts:
        return _even(np.full(options.devices, size), held, len(source.classes))

    return even(options.train_per_device), even(options.test_per_device)


def _halves(options: HalfAndHalf, a: int) -> Counts:
    counts = np.zeros((options.devices, 10), np.int64)
    first = options.devices // 2
    counts[:first, :5] = a
    for j, row in enumerate(counts[first:]):
        row[j % 5] = a // 2 if options.mixed else 0
        row[5 + (j + j // 5) % 5] = 2 * a
    return counts


def _scaled(a: int, source: Source) -> int:
    if source.test is None:
        raise DataError("a_test is missing, and one set has no proportion of its own", expected="a_test")
    return max(2, 2 * round(a * source.test.rows.size / max(1, source.train.rows.size) / 2))


def _of_equal_size(proportions_MC: NDArray[np.float64], counts_C: Counts) -> Counts:
    """Counts [M, C] of devices of equal size, the largest that the classes allow."""
    devices = len(proportions_MC)
    demand = proportions_MC.sum(axis=0)
    size = int(min(counts_C.sum() // devices, (counts_C[demand > 0] / demand[demand > 0]).min()))
    while True:
        counts = apportion(proportions_MC, np.full(devices, size))
        if (counts.sum(axis=0) <= counts_C).all():
            return counts
        size -= 1
