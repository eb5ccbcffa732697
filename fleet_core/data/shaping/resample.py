"""Brings series of readings to another rate, with the same bits whether they come at once or piece by piece.

The filter is that of ``resize``; output s lies at (s + ½) · from / to − ½ of the inputs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.data.shaping import resize

Array = NDArray[np.float32]


class Resampler:
    """Takes readings [n, ...] piece by piece. from_hz, to_hz: readings a second."""

    def __init__(self, from_hz: float, to_hz: float):
        self._from_hz, self._to_hz = from_hz, to_hz
        self._factor = from_hz / to_hz
        self._reach = max(1.0, self._factor)
        self._begin()

    def more(self, x: Array) -> Array:
        """Takes the next readings, and returns the output readings that no later input can change."""
        self._hold(x)
        return self._until(math.floor((self._came - 0.5 - self._reach) / self._factor - 0.5) + 1)

    def last(self, x: Array) -> Array:
        """Takes the last readings, and returns the rest of the output; later readings are another series."""
        self._hold(x)
        size = math.floor(self._came * self._to_hz / self._from_hz + 0.5)
        rest = self._until(max(1, size) if self._came else 0)
        self._begin()
        return rest

    def _begin(self) -> None:
        self._held: NDArray[Any] | None = None
        self._came = self._dropped = self._made = 0

    def _hold(self, x: Array) -> None:
        self._held = x if self._held is None else np.concatenate([self._held, x])
        self._came += len(x)

    def _until(self, end: int) -> Array:
        """The output readings from the first that was not returned yet up to number ``end``."""
        held = self._held
        assert held is not None
        if end <= self._made:
            return np.empty((0, *held.shape[1:]), np.float32)
        places_KS, weights_KS = resize.taps(self._came, end, self._factor, self._made)
        within_KS = np.clip(places_KS - self._dropped, 0, len(held) - 1)
        found: Array = resize.summed(held, 0, within_KS, weights_KS).astype(np.float32)
        self._made = end
        unused = math.floor((end + 0.5) * self._factor - 0.5 - self._reach) - self._dropped
        if unused > 0:
            self._held, self._dropped = held[unused:].copy(), self._dropped + min(unused, len(held))
        return found
