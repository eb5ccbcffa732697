"""The device's own samples: what it trains and personalizes on, and the later part on which it is judged.

The recording is divided in time. Samples that were labelled by hand later (``edge-agent samples add``) lie in a file of
their own beside it and always belong to the part that is learned from.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from fleet_core.data import samples, split
from fleet_core.data.samples import Samples
from fleet_core.errors import DataError

ADDED = "added.npz"


@dataclass(frozen=True)
class LocalData:
    """A file of samples and how it is divided in time.

    train_fraction: share of the recorded time that is the device's own to learn from; the rest judges.
    support_seconds: instead of a share, the first seconds of the recording.
    """

    path: Path
    classes: tuple[str, ...]
    train_fraction: float = 0.6
    support_seconds: float | None = None

    @property
    def added_path(self) -> Path:
        return self.path.with_name(ADDED)

    def own(self) -> Samples:
        """Samples to train and personalize on. Raises DataError when there are none."""
        recorded = self._parts()[0] if self.path.exists() else None
        added = samples.load(self.added_path, classes=self.classes) if self.added_path.exists() else None
        found = [part for part in (recorded, added) if part is not None]
        if not found:
            raise DataError("there are no samples yet", where=str(self.path), hint="edge-agent samples add")
        x = np.concatenate([part.x.astype(found[0].x.dtype) for part in found])
        return Samples(x, np.concatenate([part.y for part in found]), classes=self.classes)

    def judge(self) -> Samples | None:
        """Samples that nothing on this device learns from, or None without a recording."""
        return self._parts()[1] if self.path.exists() else None

    def add(self, x: np.ndarray[tuple[int, ...], np.dtype[np.generic]], labels: Sequence[str]) -> int:
        """Samples [n, *shape] with the names of their classes, written beside the recording; how many were added in all
        by now."""
        y = np.array([self.classes.index(label) for label in labels], np.int64)
        return len(samples.append(self.added_path, Samples(x, y, classes=self.classes)))

    def stamp(self) -> str:
        """Changes whenever the files do."""
        times = [p.stat().st_mtime_ns for p in (self.path, self.added_path) if p.exists()]
        return f"{self}{times}"

    def _parts(self) -> tuple[Samples, Samples]:
        everything = samples.load(self.path, classes=self.classes)
        if self.support_seconds is not None:
            return split.first_seconds(everything, self.support_seconds)
        return split.by_time(everything, self.train_fraction)
