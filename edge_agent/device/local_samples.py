"""The device's own samples: what it trains and personalizes on, and the later part on which it is evaluated.

The recording is divided in time. Samples that were labelled by hand later (``edge-agent samples add``) lie in a file of
their own beside it and always belong to the part that is learned from. They may be of classes that the fleet does not
have: those are this device's alone, come after the fleet's, and nothing trains on them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from fleet_core.base.errors import DataError, shortened
from fleet_core.data import samples, time_split
from fleet_core.data.samples import Samples
from fleet_core.model.layout import Layout

ADDED = "added.npz"
MAX_OWN_CLASSES = 1000
HOW = ("train_fraction", "support_seconds", "stride")
FEW = 5
"""Labelled samples of a class, below which answers that come of them alone are doubtful."""


def few_labels(per_class: Mapping[str, int]) -> str:
    """A note where some class has fewer than ``FEW`` labelled samples; empty where none has. A class without any is
    not this device's to answer. per_class: labelled samples by class."""
    rare = [f"{name} {number}" for name, number in per_class.items() if 0 < number < FEW]
    if not rare:
        return ""
    return (f"note: few labelled samples ({', '.join(shortened(rare))}): answers come of them alone, and {FEW} or more "
            "of each class may give better ones: edge-agent samples add")


@dataclass(frozen=True)
class LocalData:
    """A file of samples and how it is divided in time.

    dtype: of the model's samples.
    train_fraction: share of the recorded time that is the device's own to learn from; the rest evaluates.
    support_seconds: instead of a share, the first seconds of the recording.
    shape: of the model's samples; others are refused. stride: of windows that are cut from a file of readings.
    """

    path: Path
    classes: tuple[str, ...]
    dtype: str
    train_fraction: float = 0.6
    support_seconds: float | None = None
    shape: tuple[int, ...] | None = None
    stride: int | None = None

    @staticmethod
    def of(path: Path, layout: Layout, how: Mapping[str, Any]) -> LocalData:
        """Samples for a model. how: the table ``[data]`` of device.toml, or what ``how`` gave."""
        taken = {key: how[key] for key in HOW if key in how}
        return LocalData(path, layout.classes, layout.input.dtype, shape=tuple(layout.input.shape), **taken)

    def how(self) -> dict[str, Any]:
        """How the file is divided and cut, as plain values."""
        return {key: getattr(self, key) for key in HOW}

    @property
    def added_path(self) -> Path:
        return self.path.with_name(ADDED)

    def names(self) -> tuple[str, ...]:
        """The fleet's classes, and then those of this device alone."""
        return self._added()[1]

    def own(self) -> Samples:
        """Samples of the fleet's classes, to train and to take gradient steps on. Raises DataError when there are none.
        """
        every = self.every()
        found = every.take(every.y < len(self.classes))
        if not len(found):
            raise DataError(
                "there are no samples of the fleet's classes yet", where=str(self.path), hint="edge-agent samples add"
            )
        return Samples(found.x, found.y, classes=self.classes, notes=found.notes)

    def every(self) -> Samples:
        """Samples of all classes, this device's own among them. Raises DataError when there are none."""
        recorded = self._parts()[0] if self.path.exists() else None
        added, names = self._added()
        found = [part for part in (recorded, added) if part is not None]
        if not found:
            raise DataError("there are no samples yet", where=str(self.path), hint=self._where_else())
        x = np.concatenate([part.x.astype(found[0].x.dtype) for part in found])
        return Samples(x, np.concatenate([part.y for part in found]), classes=names, notes=found[0].notes)

    def _where_else(self) -> str:
        """What to do without samples; a file of them that lies beside is named."""
        beside: list[str] = []
        with suppress(OSError):
            beside = sorted(p.name for p in self.path.parent.iterdir() if p.suffix.lower() in samples.FILES)
        named = f', or samples = "{beside[0]}" under [data] in device.toml' if beside else ""
        return "edge-agent samples add" + named

    def held_back(self) -> Samples | None:
        """Samples that nothing on this device learns from, or None without a recording."""
        return self._parts()[1] if self.path.exists() else None

    def add(self, x: np.ndarray[tuple[int, ...], np.dtype[np.generic]], labels: Sequence[str]) -> int:
        """Samples [n, *shape] with the names of their classes, written beside the recording; how many were added in all
        by now. A name that the fleet does not have is a class of this device alone. Raises DataError, StateError."""
        old, known = self._added()
        names = tuple(dict.fromkeys((*known, *labels)))
        if len(names) > len(self.classes) + MAX_OWN_CLASSES:
            raise DataError(f"more than {MAX_OWN_CLASSES} classes of this device's own", where=str(self.added_path))
        if old is not None and old.classes != names:
            samples.save(self.added_path, Samples(old.x, old.y, classes=names))
        y = np.array([names.index(label) for label in labels], np.int64)
        return len(samples.append(self.added_path, Samples(x, y, classes=names)))

    def added(self) -> int:
        """How many samples were added."""
        found = self._added()[0]
        return 0 if found is None else len(found)

    def _added(self) -> tuple[Samples | None, tuple[str, ...]]:
        """(samples that were added later, the names of all classes)."""
        if not self.added_path.exists():
            return None, self.classes
        found = samples.load(self.added_path, dtype=self.dtype)
        names = tuple(dict.fromkeys((*self.classes, *(found.classes or ()))))
        if found.classes is None or found.classes == names:
            return Samples(found.x, found.y, classes=names), names
        at = np.array([names.index(name) for name in found.classes], np.int64)
        return Samples(found.x, at[found.y], classes=names), names

    def take_back(self, start: int, x: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bool:
        """The samples x [n, *shape] that were added at the places ``start``… are gone again; False where others lie
        there. Raises DataError, StateError."""
        found, end = self._added()[0], start + len(x)
        if found is None or not np.array_equal(found.x[start:end], x):
            return False
        self._keep(found.take(np.r_[0:start, end : len(found)]))
        return True

    def drop_last(self, number: int) -> int:
        """The ``number`` samples that were added last are gone; how many are left of those that were added. Raises
        DataError, StateError."""
        found = self._added()[0]
        if found is None or len(found) < number:
            raise DataError(f"{0 if found is None else len(found)} samples were added", where=str(self.added_path),
                            expected=f"at least {number}")
        self._keep(found.take(range(len(found) - number)))
        return len(found) - number

    def _keep(self, kept: Samples) -> None:
        """Of the samples that were added these alone; a class of this device alone without a sample is gone too."""
        if not len(kept):
            return self.added_path.unlink()
        everyone, fleet = kept.classes or (), len(self.classes)
        used = [k for k in range(len(everyone)) if k < fleet or (kept.y == k).any()]
        y = np.searchsorted(np.array(used), kept.y)
        samples.save(self.added_path, Samples(kept.x, y, classes=tuple(everyone[k] for k in used)))

    def counts(self, say: Callable[[str], None] = lambda note: None) -> list[tuple[str, int, int, int]]:
        """(class, recorded samples that are learned from, recorded ones that are held back, added ones) of each class.
        say: takes how the recording was read."""
        added, names = self._added()
        recorded = self._parts() if self.path.exists() else (None, None)
        for note in () if recorded[0] is None else recorded[0].notes:
            say(note)
        own, later, more = (
            [0] * len(names) if part is None else np.bincount(part.y, minlength=len(names)).tolist()
            for part in (*recorded, added)
        )
        return [(name, own[k], later[k], more[k]) for k, name in enumerate(names)]

    def stamp(self) -> str:
        """Changes whenever the files do."""
        times = [p.stat().st_mtime_ns for p in (self.path, self.added_path) if p.exists()]
        return f"{self}{times}"

    def held_back_stamp(self) -> str:
        """Changes whenever what ``held_back`` gives does."""
        return f"{self}{self.path.stat().st_mtime_ns if self.path.exists() else 0}"

    def _parts(self) -> tuple[Samples, Samples]:
        everything = samples.load(
            self.path, classes=self.classes, dtype=self.dtype, shape=self.shape, stride=self.stride
        )
        return time_split.learned(everything, self.train_fraction, self.support_seconds)
