"""The choice of one way, which the mixture replaced.

The first way is kept unless another is more accurate by more than one standard error of their paired difference
(Breiman et al., "Classification and Regression Trees", 1984, §3.4.3).
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from fleet_core.tasks.calibration import likelihoods

Array = np.ndarray[Any, Any]

LEAST = 10
"""With fewer judged samples the first way is kept."""


def chosen(left_out: Mapping[str, Array], y_n: Array) -> str:
    """The way that is surely better than the first. left_out: probabilities [n, N] of samples that were left out."""
    first = next(iter(left_out))
    if len(y_n) < LEAST:
        return first
    right = {name: found.argmax(1) == y_n for name, found in left_out.items()}
    better = [name for name in left_out if name == first or _surely_better(right[name], right[first])]
    return max(better, key=lambda name: (right[name].mean(), likelihoods(left_out[name], y_n).mean()))


def _surely_better(right_n: Array, first_n: Array) -> bool:
    difference_n = right_n.astype(np.float64) - first_n
    return bool(difference_n.mean() > difference_n.std(ddof=1) / np.sqrt(len(difference_n)))
