"""Synthetic(α, β): a synthetic federated data set whose models and inputs differ between devices.

Li et al., "Federated Optimization in Heterogeneous Networks", MLSys 2020, Section 5.1: 60 features, 10 classes,
y = argmax softmax(W_k x + b_k) with W_k, b_k ~ N(u_k, 1), u_k ~ N(0, α); x ~ N(v_k, Σ), Σ_jj = j^-1.2, v_k ~ N(B_k, 1),
B_k ~ N(0, β); sizes by a power law. Dinh et al. (pFedMe, NeurIPS 2020) use (0.5, 0.5), 100 devices and 250 to 25,810
samples. The paper's N(0, α) has the variance α, like its N(v_k, Σ); the authors' program uses α as the standard
deviation (``spread``). From the program: sizes are a minimum plus lognormal(4, 2), drawn by numpy's legacy generator;
seed 0 gives pFedMe's. Chosen here: no device has more than ``most``.

u_k shifts all logits of a sample equally, so labels do not depend on α. For any α the models of two devices differ by
their draws of W and b.

N: samples. F: features. C: classes.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.partitions.shares import generator
from fleet_core.data.samples import Samples

FEATURES = 60
CLASSES = 10
LEAST_OF_LI = 50  # samples of the smallest device in Li's program; sizes are scaled by ``least`` / 50
SPREADS = ("variance", "deviation")


def synthetic(
    alpha: float = 0.5,
    beta: float = 0.5,
    devices: int = 100,
    *,
    seed: int,
    least: int = 250,
    most: int = 25_810,
    spread: str = "variance",
) -> Samples:
    """x float32 [N, 60], y int64 [N], client: the device; its rows are consecutive.

    Args:
        alpha: how much the means of the devices' weights differ (labels do not depend on it, see above).
        beta: how much the means of their inputs differ.
        least, most: samples of a device.
        spread: whether alpha and beta are the ``variance`` or the standard ``deviation`` of their distributions.

    Raises DataError for values out of range.
    """
    _check(alpha, beta, devices, least, most, spread)
    rng = generator(seed, "synthetic")
    power = 0.5 if spread == "variance" else 1.0
    u, B = rng.normal(0, alpha**power, devices), rng.normal(0, beta**power, devices)
    deviation_F = np.arange(1, FEATURES + 1) ** -0.6  # the root of Σ_jj
    sizes = device_sizes(devices, seed, least, most)
    x_NF = np.empty((sizes.sum(), FEATURES), np.float32)
    y_N = np.empty(sizes.sum(), np.int64)
    ends = np.cumsum(sizes)
    for k, (start, end) in enumerate(zip(ends - sizes, ends, strict=True)):
        W_FC, b_C = rng.normal(u[k], 1, (FEATURES, CLASSES)), rng.normal(u[k], 1, CLASSES)
        v_F = rng.normal(B[k], 1, FEATURES)
        x_NF[start:end] = rng.normal(v_F, deviation_F, (end - start, FEATURES))
        y_N[start:end] = np.argmax(x_NF[start:end] @ W_FC + b_C, axis=1)
    width = len(str(devices - 1))
    names = np.array([f"device-{k:0{width}}" for k in range(devices)])
    return Samples(x_NF, y_N, np.repeat(names, sizes), classes=tuple(str(c) for c in range(CLASSES)))


def device_sizes(devices: int, seed: int, least: int, most: int) -> NDArray[np.int64]:
    """int64 [devices]: least / 50 · (50 + lognormal(4, 2)), at most ``most``, by the program's legacy generator."""
    drawn = np.random.RandomState(seed % 2**32).lognormal(4, 2, devices).astype(np.int64)
    return np.minimum(least * (LEAST_OF_LI + drawn) // LEAST_OF_LI, most)


def _check(alpha: float, beta: float, devices: int, least: int, most: int, spread: str) -> None:
    wrong = [f"{name} is {value}" for name, value in (("alpha", alpha), ("beta", beta)) if not 0 <= value < np.inf]
    wrong += [f"{name} is {value}" for name, value in (("devices", devices), ("least", least)) if value < 1]
    if least > most:
        wrong.append(f"least is {least}, most is {most}")
    if spread not in SPREADS:
        wrong.append(f"spread is '{spread}', not {' or '.join(SPREADS)}")
    if wrong:
        expected = "alpha and beta from 0, devices and samples from 1"
        raise DataError("\n".join(wrong), where="synthetic", expected=expected)
