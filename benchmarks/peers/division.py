"""Images among twenty devices, for both sides: the same samples of the same devices, in the form that each reads.

All images of MNIST (70,000) or CIFAR-10 (60,000) are divided by the product's partition ``dirichlet`` with 0.1 for each
class (a concentration of 1), three quarters of a device's images for training, as in PFLlib. Then a device keeps some
of its images, drawn at random: all devices have equally many, and an epoch is a whole number of batches.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from benchmarks.peers.methods import DATA_SET, DEVICES
from fleet_core.data import samples
from fleet_core.data.partitions import partition, pool
from fleet_core.data.partitions.by_class import Dirichlet
from fleet_core.data.partitions.shares import generator
from fleet_core.data.samples import Samples

PER_CLASS, TRAIN_FRACTION = 0.1, 0.75


def divided(train: Samples, test: Samples, kept: tuple[int, int], seed: int = 0, devices: int = DEVICES) -> Samples:
    """The kept samples, x in [-1, 1] as PFLlib scales it, with their devices. time: 0 for training, 1 for the test.
    kept: training and test samples of a device."""
    whole = pool(train, test)
    options = Dirichlet(devices=devices, concentration=PER_CLASS * len(np.unique(whole.y)), min_samples=2 * sum(kept),
                        train_fraction=TRAIN_FRACTION)
    rng = generator(seed, "peers")
    rows, names, times = [], [], []
    for share in partition("dirichlet", options, Samples(whole.x, whole.y, classes=whole.classes), seed=seed):
        for time, (held, number) in enumerate(zip((share.train, share.test), kept, strict=True)):
            rows.append(np.sort(rng.choice(held, number, replace=False)))
            names += [share.name] * number
            times += [float(time)] * number
    chosen = np.concatenate(rows)
    x = whole.x[chosen].astype(np.float32) / 127.5 - 1
    return Samples(x, whole.y[chosen], np.array(names), np.array(times), whole.classes)


def write(held: Samples, folder: Path) -> None:
    """``samples.npz`` for an experiment; ``dataset/division/train/0.npz`` and so on for PFLlib."""
    samples.save(folder / "samples.npz", held)
    assert held.client is not None
    assert held.time is not None
    for number, client in enumerate(np.unique(held.client)):
        for time, part in enumerate(("train", "test")):
            rows = (held.client == client) & (held.time == time)
            path = folder / "dataset" / DATA_SET / part / f"{number}.npz"
            path.parent.mkdir(parents=True, exist_ok=True)
            np.savez_compressed(path, data=np.array({"x": held.x[rows], "y": held.y[rows]}))
