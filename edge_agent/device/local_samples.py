"""The device's samples: those it trains and personalizes on, and the later ones on which it is evaluated.

The recording is split by time. Samples that were labelled later (``edge-agent samples add``) are stored in a separate
file and are always learned from. They may have classes that the fleet does not have: these come after the fleet's
classes, belong to this device alone and are never trained on.

Files hold raw samples. Where the fleet has a backbone, what is learned from and held back are its features.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fleet_core.base.errors import DataError, shortened
from fleet_core.data import samples, time_split
from fleet_core.data.prepare import prepared
from fleet_core.data.samples import Samples
from fleet_core.model.layout import Layout
from fleet_core.tasks.anomaly import LABELS, Anomaly
from fleet_core.tasks.labels import MultiLabel
from fleet_core.tasks.task import Task, reading_of

if TYPE_CHECKING:
    from fleet_core.backbone.features import Features

ADDED = "added.npz"
MAX_OWN_CLASSES = 1000
SPLIT = ("train_fraction", "support_seconds", "stride")
FEW = 5
"""With fewer labelled samples of a class, answers that rest on them alone are unreliable."""


def few_labels(per_class: Mapping[str, int]) -> str:
    """A note if a class has fewer than ``FEW`` labelled samples, but at least one; else empty. per_class: labelled
    samples by class."""
    rare = [f"{name} {number}" for name, number in per_class.items() if 0 < number < FEW]
    if not rare:
        return ""
    return (f"note: few labelled samples ({', '.join(shortened(rare))}): answers come of them alone, and {FEW} or more "
            "of each class may give better ones: edge-agent samples add")


def features_of(home: Path, layout: Layout, named: Sequence[str] = ()) -> Features | None:
    """The backbone that turns raw samples into the model's input, in the device's folder ``home``; None for a model
    that takes raw samples. named: as in ``Features``."""
    if layout.backbone is None:
        return None
    from fleet_core.backbone.features import Features  # not loaded by a device whose model takes raw samples

    return Features(home / f"backbone-{layout.backbone.id}.safetensors", layout.backbone, tuple(named))


def as_input(home: Path, layout: Layout, x: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    """Raw samples [n, *shape] as the model takes them: images of another size and sound are prepared first. Raises
    DataError, BundleError, StateError."""
    features = features_of(home, layout)
    x = prepared(x, layout.sample)
    return x if features is None else features.of(x)


@dataclass(frozen=True)
class LocalData:
    """A file of samples and how it is split by time.

    dtype, shape: of raw samples; samples of another shape are refused.
    train_fraction: share of the recorded time to learn from; the rest is held back.
    support_seconds: instead of a share, the first seconds of the recording.
    stride: of windows that are cut from a file of readings.
    fit: how images of another size are brought to ``shape``. sound_hz: rate of sound, if samples are made of it.
    features: turns raw samples into the model's input; None for a model that takes raw samples.
    task: what is predicted, if it is not one of ``classes``; samples then have targets.
    """

    path: Path
    classes: tuple[str, ...]
    dtype: str
    train_fraction: float = 0.6
    support_seconds: float | None = None
    shape: tuple[int, ...] | None = None
    stride: int | None = None
    fit: str = "refuse"
    sound_hz: int = 0
    features: Features | None = None
    task: Task | None = None

    @staticmethod
    def of(home: Path, file: str, layout: Layout, table: Mapping[str, Any]) -> LocalData:
        """Samples for a model. home: the device's folder. file: beneath it, or absolute. table: ``[data]`` of
        device.toml, or the result of ``split``."""
        split, raw = {key: table[key] for key in SPLIT if key in table}, layout.sample
        split["stride"] = split.get("stride") or raw.stride or None
        return LocalData(home / file, layout.classes, raw.dtype, shape=tuple(raw.shape), fit=raw.fit,
                         sound_hz=raw.sound_hz, features=features_of(home, layout), task=layout.task, **split)

    def split(self) -> dict[str, Any]:
        """How the file is split by time and cut into windows, as plain values."""
        return {key: getattr(self, key) for key in SPLIT}

    @property
    def added_path(self) -> Path:
        return self.path.with_name(ADDED)

    @property
    def labels(self) -> tuple[str, ...]:
        """The fleet's classes, or the labels of samples of a fleet that detects anomalies."""
        return LABELS if isinstance(self.task, Anomaly) else self.classes

    def names(self) -> tuple[str, ...]:
        """The fleet's classes, then the device's own."""
        if isinstance(self.task, Anomaly) or not self.added_path.exists():
            return self.labels
        if self.task is not None:
            return ()
        return self._named(samples.count_and_classes(self.added_path)[1])

    def _named(self, of_file: Sequence[str] | None) -> tuple[str, ...]:
        return tuple(dict.fromkeys((*self.classes, *(of_file or ()))))

    def own(self) -> Samples:
        """The samples of the fleet's classes to learn from: training and gradient steps use these. Raises DataError if
        there are none."""
        every = self.every()
        if self.task is not None:
            return every
        own = every.take(every.y < len(self.classes))
        if not len(own):
            raise DataError(
                "there are no samples of the fleet's classes yet", where=str(self.path), hint="edge-agent samples add"
            )
        return Samples(own.x, own.y, classes=self.classes, notes=own.notes)

    def every(self) -> Samples:
        """The samples of all classes to learn from, the device's own included; of a fleet that detects anomalies the
        quiet ones. Raises DataError if there are none."""
        recorded = self._recorded()[0] if self.path.exists() else None
        added, names = self._load_added()
        parts = [part for part in (recorded, added) if part is not None]
        if not parts:
            raise DataError("there are no samples yet", where=str(self.path), hint=self._hint_without_samples())
        x = np.concatenate([part.x.astype(parts[0].x.dtype) for part in parts])
        y = np.concatenate([part.y for part in parts])
        found = Samples(x, y, classes=names or None, notes=parts[0].notes, outputs=self.outputs)
        return self._as_input(found) if not isinstance(self.task, Anomaly) else self._quiet(found, self.task)

    def _quiet(self, found: Samples, task: Anomaly) -> Samples:
        """The quiet samples with the targets of a model that repeats them. Raises DataError if there are none."""
        quiet = found.take(found.y == 0)
        if not len(quiet):
            raise DataError("there are no quiet samples to learn from", where=str(self.path),
                            hint="normal, under [model.task] of fleet.toml, names the labels of quiet samples")
        x = self._as_input(quiet).x
        return Samples(x, task.targets(len(x)), notes=found.notes, outputs=task.differences)

    @property
    def outputs(self) -> tuple[str, ...]:
        """Names of the targets; empty for classes."""
        return () if self.task is None else self.task.columns

    def _hint_without_samples(self) -> str:
        """Names a file of samples in the same folder, if there is one."""
        files: list[str] = []
        with suppress(OSError):
            files = sorted(p.name for p in self.path.parent.iterdir() if p.suffix.lower() in samples.FILES)
        named = f', or samples = "{files[0]}" under [data] in device.toml' if files else ""
        return "edge-agent samples add" + named

    def held_back(self) -> Samples | None:
        """The samples that are not learned from; None without a recording."""
        return self._as_input(self._recorded()[1]) if self.path.exists() else None

    def _as_input(self, raw: Samples) -> Samples:
        """``raw`` as the model takes them."""
        return raw if self.features is None or not len(raw) else self.features.samples(raw)

    def add_targets(self, x: np.ndarray[Any, Any], y: np.ndarray[Any, Any]) -> int:
        """Stores samples [n, *shape] with their targets [n, K] in the user's unit; returns how many are stored there.
        Raises DataError, StateError."""
        return len(samples.append(self.added_path, Samples(x, np.asarray(y, np.float64), outputs=self.outputs)))

    def add(self, x: np.ndarray[tuple[int, ...], np.dtype[np.generic]], labels: Sequence[str]) -> int:
        """Stores samples [n, *shape] with their class names beside the recording; returns how many are stored there.
        A name that the fleet does not have is a class of this device alone. Raises DataError, StateError."""
        old, known = self._load_added()
        names = tuple(dict.fromkeys((*known, *labels)))
        if len(names) > len(self.classes) + MAX_OWN_CLASSES:
            raise DataError(f"more than {MAX_OWN_CLASSES} classes of this device's own", where=str(self.added_path))
        whole = Samples(x, np.array([names.index(label) for label in labels], np.int64), classes=names)
        if old is not None:
            whole = samples.joined(Samples(old.x, old.y, classes=names), whole, str(self.added_path))
        samples.save(self.added_path, whole)
        return len(whole)

    def added_at(self) -> int:
        """When samples were added last, for comparison; 0: never."""
        return self.added_path.stat().st_mtime_ns if self.added_path.exists() else 0

    def added(self) -> int:
        """How many samples were added."""
        return samples.count_and_classes(self.added_path)[0] if self.added_path.exists() else 0

    def _load_added(self) -> tuple[Samples | None, tuple[str, ...]]:
        """(added samples, names of all classes)."""
        if not self.added_path.exists():
            return None, self.labels
        if isinstance(self.task, Anomaly):
            return samples.load(self.added_path, dtype=self.dtype, **self.task.reading), LABELS
        if self.task is not None:
            return samples.load(self.added_path, dtype=self.dtype, outputs=self.outputs), ()
        added = samples.load(self.added_path, dtype=self.dtype)
        names = self._named(added.classes)
        if added.classes is None or added.classes == names:
            return Samples(added.x, added.y, classes=names), names
        index = np.array([names.index(name) for name in added.classes], np.int64)
        return Samples(added.x, index[added.y], classes=names), names

    def is_added(self, index: int, x: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bool:
        """Whether the added sample with this index is x [*shape]. Raises DataError."""
        added = self._load_added()[0]
        return added is not None and index < len(added) and np.array_equal(added.x[index], x)

    def take_back(self, start: int, x: np.ndarray[tuple[int, ...], np.dtype[np.generic]]) -> bool:
        """Removes the samples x [n, *shape] that were added from index ``start`` on; False if other samples are stored
        there. Raises DataError, StateError."""
        added, end = self._load_added()[0], start + len(x)
        if added is None or not np.array_equal(added.x[start:end], x):
            return False
        self._replace_added(added.take(np.r_[0:start, end : len(added)]))
        return True

    def drop_last(self, number: int) -> int:
        """Removes the ``number`` samples that were added last; returns how many added ones are left. Raises DataError,
        StateError."""
        added = self._load_added()[0]
        if added is None or len(added) < number:
            raise DataError(f"{0 if added is None else len(added)} samples were added", where=str(self.added_path),
                            expected=f"at least {number}")
        self._replace_added(added.take(range(len(added) - number)))
        return len(added) - number

    def _replace_added(self, kept: Samples) -> None:
        """Stores ``kept`` as the only added samples, without own classes that have no sample left."""
        if not len(kept):
            return self.added_path.unlink()
        if self.task is not None:
            return samples.save(self.added_path, kept)
        names, fleet = kept.classes or (), len(self.classes)
        used = [k for k in range(len(names)) if k < fleet or (kept.y == k).any()]
        y = np.searchsorted(np.array(used), kept.y)
        samples.save(self.added_path, Samples(kept.x, y, classes=tuple(names[k] for k in used)))

    def counts(self, say: Callable[[str], None] = lambda note: None) -> list[tuple[str, int, int, int]]:
        """(class, recorded samples to learn from, recorded and held back, added) of each class, or of each label and
        then of all samples, or of all samples with targets. say: receives the notes of reading the recording."""
        added, names = self._load_added()
        recorded = self._recorded() if self.path.exists() else (None, None)
        for note in () if recorded[0] is None else recorded[0].notes:
            say(note)
        if self.outputs:
            numbers = [0 if part is None else len(part) for part in (*recorded, added)]
            whole = ("all samples", numbers[0], numbers[1], numbers[2])
            if not isinstance(self.task, MultiLabel):
                return [whole]
            of = [[0] * len(self.outputs) if part is None else part.y.sum(0).astype(int).tolist()
                  for part in (*recorded, added)]
            return [*((name, of[0][k], of[1][k], of[2][k]) for k, name in enumerate(self.outputs)), whole]
        to_learn, held_back, by_hand = (
            [0] * len(names) if part is None else np.bincount(part.y, minlength=len(names)).tolist()
            for part in (*recorded, added)
        )
        return [(name, to_learn[k], held_back[k], by_hand[k]) for k, name in enumerate(names)]

    def stamp(self) -> str:
        """Changes whenever the files do."""
        times = [p.stat().st_mtime_ns for p in (self.path, self.added_path) if p.exists()]
        return f"{self}{times}"

    def held_back_stamp(self) -> str:
        """Changes whenever the result of ``held_back`` does."""
        return f"{self}{self.path.stat().st_mtime_ns if self.path.exists() else 0}"

    def _recorded(self) -> tuple[Samples, Samples]:
        """(samples to learn from, held-back samples)."""
        everything = samples.load(
            self.path, dtype=self.dtype, shape=self.shape, stride=self.stride, fit=self.fit, sound_hz=self.sound_hz,
            **reading_of(self.task, self.classes),
        )
        return time_split.learned(everything, self.train_fraction, self.support_seconds)
