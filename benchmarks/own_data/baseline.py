"""A baseline without a fleet: on every device alone, the nearest class mean on a window's spectrum and statistics.

Its features are finer than those of ``fleet_core.personalization.plain_baseline``, which are limited for small boards.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

from cloud_server.figures.scores import macro_f1
from cloud_server.laboratory.plan.workload import Part, Workload
from fleet_core.personalization.plain_baseline import counted

Array = NDArray[Any]


def statistics(x: Array) -> Array:
    """float32 [N, 4·C]: mean, deviation, minimum and maximum of each channel of windows x [N, C, ...]."""
    flat = x.reshape(*x.shape[:2], -1).astype(np.float32)
    return np.concatenate([flat.mean(2), flat.std(2), flat.min(2), flat.max(2)], 1)


def features(x: Array) -> Array:
    """Spectrum and statistics of windows x [N, C, ...]; rows x [N, F] unchanged."""
    if x.ndim == 2:
        return x.astype(np.float64)
    flat = x.reshape(*x.shape[:2], -1).astype(np.float64)
    spectrum = np.abs(np.fft.rfft(flat - flat.mean(2, keepdims=True)))
    return np.concatenate([spectrum.reshape(len(x), -1), statistics(x)], 1)


def nearest_mean(workload: Workload, support: float) -> float:
    """Macro-F1 over the devices that train and the new ones; all devices weigh the same."""
    groups = [[(workload.own(share), workload.later(share)) for share in workload.train],
              [workload.divided(share, support, 0) for share in workload.new]]
    scored = [(_macro_f1(group, len(workload.classes)), len(group)) for group in groups if group]
    return sum(value * number for value, number in scored) / sum(number for _, number in scored)


def _macro_f1(devices: list[tuple[Part, Part]], classes: int) -> float:
    counts = sum(counted(later.y, _answers(own, later), classes) for own, later in devices)
    return macro_f1(np.asarray(counts).tolist(), classes_present_only=False) or 0.0


def _answers(own: Part, later: Part) -> Array:
    known, asked = features(own.x), features(later.x)
    mean, deviation = known.mean(0), known.std(0) + 1e-9
    known, asked = (known - mean) / deviation, (asked - mean) / deviation
    labels = np.unique(own.y)
    means = np.stack([known[own.y == label].mean(0) for label in labels])
    return np.asarray(labels[((asked[:, None] - means) ** 2).sum(2).argmin(1)])
