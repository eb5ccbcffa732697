"""The device's own samples: what it trains and personalizes on, and the later part on which it is judged."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from fleet_core.data import samples, split
from fleet_core.data.samples import Samples


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

    def own(self) -> Samples:
        """Samples to train and personalize on."""
        return self._parts()[0]

    def judge(self) -> Samples:
        """Samples that nothing on this device learns from."""
        return self._parts()[1]

    def _parts(self) -> tuple[Samples, Samples]:
        everything = samples.load(self.path, classes=self.classes)
        if self.support_seconds is not None:
            return split.first_seconds(everything, self.support_seconds)
        return split.by_time(everything, self.train_fraction)
