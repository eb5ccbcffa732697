"""The two data sets of pFedMe's paper as the authors' published program draws them, for ``data.path`` of experiments.

    METAFLEET_SHARED=FOLDER python -m benchmarks.papers.pfedme.published [--out FOLDER]

Writes ``pfedme-mnist.npz`` and ``pfedme-synthetic.npz``, every sample with the device that holds it.

mnist (``data/Mnist/generate_niid_20users.py`` of the program): 20 devices with the digits i and i + 1. Every digit's
images are cut into four sizes, drawn one after the other between a fifth and a half of the rest. But all four pieces
begin at the digit's first or second image, because the place where the next one should begin is kept in a boolean mask.
So the devices of a digit share images, and other devices train on nearly everything that a device is evaluated on. Only
in this way do the sizes become the paper's 1165 to 3834 training samples (``MNIST_SIZES``). Not reproduced: one wrong
label on most devices, which have one or two more labels than images; the order of the images.

synthetic (``data/Synthetic/generate_synthetic_05_05.py``): Synthetic(0.5, 0.5) of Li et al. 2020 with 100 devices, 0.5
being deviations, drawn with seed 0 by numpy's legacy generator in the program's order.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from benchmarks.papers import prepare
from fleet_core.base.errors import FleetError
from fleet_core.data.samples import Samples, save

OUT = Path("build/papers/cache")
DIGITS, DEVICES, PIECES = 10, 20, 4
MNIST_SIZES = (1165, 3834)
"""Training samples of the smallest and the largest device, 75 % of its samples, in the paper."""
FIRST_NINE = 4
"""The index of the first nine among the first ten images of MNIST. The program's mask is that of the nines."""
FEATURES, SPREAD, SYNTHETIC_DEVICES = 60, 0.5, 100


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=OUT, metavar="FOLDER")
    options = parser.parse_args()
    try:
        (train, test), _ = prepare.mnist(prepare.shared_folder())
        assert test is not None
        x, y = np.concatenate([train.x, test.x]), np.concatenate([train.y, test.y])
        for name, samples in (("pfedme-mnist", mnist(x, y)), ("pfedme-synthetic", synthetic())):
            path = options.out / f"{name}.npz"
            save(path, samples)
            different, shared = common(samples)
            print(f"{path}: {len(samples)} samples, {different} of them different, {shared:.0%} also on another device;"
                  f" {len(samples.clients)} devices", flush=True)
    except FleetError as error:
        print(error, file=sys.stderr)
        sys.exit(error.exit_code)


def mnist(x: NDArray[np.uint8], y: NDArray[np.int64]) -> Samples:
    """The devices' samples, of MNIST's training and test images, uint8 [70000, 1, 28, 28], and digits int64 [70000]."""
    rows = [np.flatnonzero(y == digit) for digit in range(DIGITS)]
    sizes = pieces([len(of_digit) for of_digit in rows])
    begun = [digit == FIRST_NINE for digit in range(DIGITS)]
    held: list[NDArray[np.int64]] = []
    device: list[int] = []
    for i in range(DEVICES):
        for j in range(2):
            digit = (i + j) % DIGITS
            taken = rows[digit][int(begun[digit]) : sizes[2 * i + j]]
            begun[digit] = True
            held.append(taken)
            device += [i] * len(taken)
    chosen = np.concatenate(held)
    return Samples(x[chosen], y[chosen], _names(np.array(device)), classes=tuple(map(str, range(DIGITS))))


def common(samples: Samples) -> tuple[int, float]:
    """(the number of different samples, the share of samples that another device has too)."""
    flat = np.ascontiguousarray(samples.x).reshape(len(samples), -1)
    rows = flat.view(np.dtype((np.void, flat.dtype.itemsize * flat.shape[1])))[:, 0]
    kind_N = np.unique(rows, return_inverse=True)[1]
    held = np.unique(np.stack([kind_N, np.unique(np.asarray(samples.client), return_inverse=True)[1]]), axis=1)
    devices_K = np.bincount(held[0])
    return len(devices_K), float(np.mean(devices_K[kind_N] > 1))


def pieces(counts: list[int]) -> list[int]:
    """How many images the devices take, two numbers per device: the first piece of every digit, the second of every
    digit, …, for digits of ``counts`` images. The legacy generator with the program's seed."""
    rng = np.random.RandomState(1)
    by_digit = []
    for left in counts:
        drawn = []
        for _ in range(PIECES - 1):
            drawn.append(int(rng.randint(left // (PIECES + 1), left // 2)))
            left -= drawn[-1]
        by_digit.append([*drawn, left])
    return [of_digit[k] for k in range(PIECES) for of_digit in by_digit]


def synthetic() -> Samples:
    """x float32 [N, 60] and y int64 [N] of 100 devices. u, B, v, W, b as in
    ``fleet_core.data.partitions.synthetic``."""
    rng = np.random.RandomState(0)
    sizes = 5 * (rng.lognormal(4, 2, SYNTHETIC_DEVICES).astype(int) + 50)
    u, B = (rng.normal(0, SPREAD, SYNTHETIC_DEVICES) for _ in range(2))
    covariance_FF = np.diag(np.arange(1, FEATURES + 1) ** -1.2)
    means = [rng.normal(B[k], 1, FEATURES) for k in range(SYNTHETIC_DEVICES)]
    xs, ys = [], []
    for k, size in enumerate(sizes):
        W_FC, b_C = rng.normal(u[k], 1, (FEATURES, DIGITS)), rng.normal(u[k], 1, DIGITS)
        x = rng.multivariate_normal(means[k], covariance_FF, size)
        xs.append(x.astype(np.float32))
        ys.append(np.argmax(x @ W_FC + b_C, axis=1))
    client = _names(np.repeat(np.arange(SYNTHETIC_DEVICES), sizes))
    return Samples(np.concatenate(xs), np.concatenate(ys), client, classes=tuple(map(str, range(DIGITS))))


def _names(device_N: NDArray[np.int64]) -> NDArray[np.str_]:
    return np.char.add("device-", np.char.zfill(device_N.astype(np.str_), len(str(int(device_N.max())))))


if __name__ == "__main__":
    main()
