"""Labelled samples: loading, checking and saving them.

N: samples. C: classes. K: outputs.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base import schema
from fleet_core.base.errors import DataError
from fleet_core.base.storage import write_atomic
from fleet_core.data import model_input
from fleet_core.data.prepare import prepared
from fleet_core.data.shaping import sound
from fleet_core.model.layout import FITS, InputSpec
from fleet_core.tasks import anomaly

if TYPE_CHECKING:
    from fleet_core.data.readers import Raw

LIMIT_BYTES = 4 << 30
MAX_LABEL = 1_000_000
MAX_CLASSES = 10_000
NUMBERS = "a fleet that predicts numbers: metafleet init --task regression"
SEVERAL = "a fleet whose samples have any number of labels: metafleet init --task multi-label"
FILES = (".csv", ".jsonl", ".ndjson", ".npz")
FORMS = (
    ".npz with x and y, .csv with a label column, .ndjson with a label in each line, or a folder of images or of .wav "
    "files with one subfolder per class"
)


@dataclass(frozen=True, eq=False)
class Samples:
    """x [N, ...] float32 (readings), uint8 (bytes, such as images) or int64 (tokens, such as texts); y int64 [N], or
    targets float64 [N, K]; client str [N] or None; time float64 [N] in seconds or None.

    classes: names of the labels 0..C-1, or None. notes: sentences for the user about how the file was read. outputs:
    names of the targets; empty for labels.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    client: NDArray[np.str_] | None = None
    time: NDArray[np.float64] | None = None
    classes: tuple[str, ...] | None = None
    notes: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        for name, column in (("y", self.y), ("client", self.client), ("time", self.time)):
            width = (len(self.outputs),) if name == "y" and self.outputs else ()
            if column is not None and column.shape != (len(self.x), *width):
                raise DataError(
                    f"{name} has shape {column.shape}", expected=f"one value for each of {len(self.x)} rows"
                )

    def __len__(self) -> int:
        return len(self.x)

    @property
    def clients(self) -> tuple[str, ...]:
        """Names of the clients, sorted; empty when the samples name none."""
        return () if self.client is None else tuple(str(name) for name in np.unique(self.client))

    @property
    def strata(self) -> NDArray[np.int64]:
        """int64 [N]: what a random division keeps in proportion, the labels; 0 for targets."""
        return np.zeros(len(self), np.int64) if self.outputs else self.y

    def take(self, indices: NDArray[np.integer[Any]] | NDArray[np.bool_] | Sequence[int]) -> Samples:
        """The rows at ``indices`` (positions or a mask of N), in that order."""
        rows = np.asarray(indices)
        rows = rows if rows.size else rows.astype(np.int64)
        return Samples(
            self.x[rows],
            self.y[rows],
            None if self.client is None else self.client[rows],
            None if self.time is None else self.time[rows],
            self.classes,
            self.notes,
            self.outputs,
        )

    def of_client(self, name: str) -> Samples:
        """The rows of one client, in order. Raises DataError when there are none."""
        if name not in self.clients:
            known = ", ".join(self.clients[:20]) or "none"
            raise DataError(
                f"has no client '{name}'{schema.did_you_mean(name, self.clients)}", expected=f"one of {known}"
            )
        assert self.client is not None
        return self.take(self.client == name)


def load(
    path: Path, *, classes: Sequence[str] | None = None, dtype: str | None = None, shape: Sequence[int] | None = None,
    window: int | None = None, stride: int | None = None, size: tuple[int, int] | None = None, fit: str = "refuse",
    sound_hz: int = 0, seconds: float | None = None, limit_bytes: int = LIMIT_BYTES,
    outputs: Sequence[str] | None = None, labels: bool = False, normal: Sequence[str] | None = None,
) -> Samples:  # fmt: skip
    """Loads samples from a .npz, .csv or .ndjson file, or a folder of images or of sound.

    classes: the fleet's names of the labels. Text labels are mapped to them, and so are whole numbers when the file
        names its own classes; other labels are refused. Without ``classes``: the file's own, or the sorted names that
        occur.
    dtype: dtype of the model's samples. Whole numbers are converted to it if it can represent them all; bytes are never
        converted to float32. Without ``dtype`` bytes stay bytes; other whole numbers are tokens (int64) if a sample has
        one axis and every number is below the number of classes, else readings (float32).
    shape: shape of the model's samples; others are refused. A table of readings is cut into windows of this shape.
    window, stride: without ``shape``, the readings in a window and between the starts of two windows, for a table of
        readings.
    size: without ``shape``, height and width of images.
    fit: how images of another size are brought to the size, as in ``resize.fitted``.
    sound_hz: rate of the sound that the model learns from; 0: of the recordings, if they are any. seconds: without
        ``shape``, the length of a window of sound.
    limit_bytes: the largest size of the file's arrays, unpacked.
    outputs: names of the numbers to predict, which are columns of a table, and of y in a .npz; empty for the file's own
        names. None for samples with classes.
    labels: the outputs are labels, 0 or 1 for each sample, which carries any number of them.
    normal: for a fleet that detects anomalies, the labels of quiet samples. The samples then have the classes of
        ``anomaly.LABELS``; without labels all of them are quiet.

    Raises DataError that names file, array and row.
    """
    from fleet_core.data import readers  # not needed, nor its memory, by a process that only answers

    if stride is not None and window is None and shape is None:
        raise DataError("a stride without a window", where=str(path), hint="give the number of readings in a window")
    cut = readers.Cut(None if shape is None else tuple(shape), window, stride, size, fit, sound_hz,
                      seconds or readers.SECONDS, None if outputs is None else tuple(outputs), labels)
    labelled = normal is None or readers.has_labels(path)
    raw = readers.read(path, limit_bytes, cut, expected=FORMS, labelled=labelled)
    wanted = (sound.BANDS, cut.frames(sound_hz)) if sound_hz else cut.image(raw.x.shape[1] if raw.x.ndim == 4 else 0)
    if wanted is not None:
        raw = replace(raw, x=prepared(raw.x, InputSpec(wanted, fit=fit, sound_hz=sound_hz), str(path)))
    if normal is not None and not labelled:
        raw = replace(raw, y=np.zeros(len(raw.x), np.int64), classes=np.array(anomaly.LABELS))
    found = checked(raw, str(path), classes, dtype or (None if normal is None else "float32"), cut.outputs,
                    labels=labels)
    found = found if normal is None else _quiet(found, normal)
    if shape is not None:
        model_input.check(found.x, InputSpec(tuple(shape), dtype or found.x.dtype.name), str(path))
    return found


def load_in_form(
    path: Path, *, window: int | None = None, stride: int | None = None, size: str | None = None,
    fit: str | None = None, rate: int | None = None, seconds: float | None = None, **reading: Any,
) -> tuple[Samples, InputSpec]:  # fmt: skip
    """The samples of a new fleet or an experiment, and their input as it is, with what devices do to theirs.

    window, stride, reading: as in ``load``. size, fit: of images, as in ``resize.size_of``. rate, seconds: of sound;
    with a window, rate is that of the readings, to which devices resample their sensors. Raises DataError.
    """
    from fleet_core.data.readers import rate_wanted
    from fleet_core.data.shaping import resize

    if fit is not None and fit not in FITS:
        raise DataError(f"'{fit[:40]}' is not a way to fit images", where="--fit", expected=" or ".join(FITS))
    pixels, how = resize.size_of(size, fit)
    sound_hz = rate_wanted(path, rate, seconds, window)
    found = load(path, window=window, stride=stride, size=pixels, fit=how, sound_hz=sound_hz, seconds=seconds,
                 **reading)
    if how != "refuse" and found.x.ndim != 4:
        raise DataError("holds no images", where=str(path), hint="leave out --size and --fit")
    return found, replace(model_input.plain(found.x), fit=how, sound_hz=sound_hz, stride=stride or 0,
                          rate_hz=float(rate or 0) if not sound_hz else 0.0)


def save(path: Path, samples: Samples) -> None:
    """Writes a .npz that ``load`` reads, atomically. Raises StateError."""
    arrays: dict[str, NDArray[Any]] = {"x": samples.x, "y": samples.y}
    if samples.client is not None:
        arrays["client"] = samples.client
    if samples.time is not None:
        arrays["time"] = samples.time
    if samples.classes is not None:
        arrays["classes"] = np.array(samples.classes, dtype=np.str_)
    if samples.outputs:
        arrays["outputs"] = np.array(samples.outputs, dtype=np.str_)
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_atomic(path, buffer.getvalue())


def append(path: Path, samples: Samples) -> Samples:
    """Appends rows to a .npz, which is created when absent, and returns all rows. Raises DataError and leaves the file
    unchanged when they do not fit."""
    if path.suffix.lower() != ".npz":
        raise DataError("cannot take new samples", where=str(path), expected="a .npz file")
    if path.exists():
        old = load(path, dtype=samples.x.dtype.name, outputs=samples.outputs or None)
        samples = joined(old, samples, str(path))
    save(path, samples)
    return samples


def count_and_classes(path: Path) -> tuple[int, tuple[str, ...] | None]:
    """How many samples a .npz has, and its names of classes if it has any, without reading the samples. Raises
    DataError."""
    from fleet_core.data.readers import npz

    count, classes = npz.rows_and_classes(path, LIMIT_BYTES)
    return count, _class_names(classes, str(path))


def joined(old: Samples, new: Samples, where: str) -> Samples:
    """The rows of both. Raises DataError when they do not fit."""
    if old.x.shape[1:] != new.x.shape[1:] or old.x.dtype != new.x.dtype:
        raise DataError(
            f"a new sample is {new.x.dtype} {new.x.shape[1:]}", where=where, expected=f"{old.x.dtype} {old.x.shape[1:]}"
        )
    if old.classes != new.classes:
        raise DataError(f"new samples have the classes {new.classes}", where=where, expected=f"{old.classes}")
    for name, first, second in (("client", old.client, new.client), ("time", old.time, new.time)):
        if (first is None) != (second is None):
            one = "have" if first is not None else "have no"
            raise DataError(f"the samples in the file {one} '{name}', unlike the new ones", where=where)
    return Samples(
        np.concatenate([old.x, new.x]),
        np.concatenate([old.y, new.y]),
        None if old.client is None or new.client is None else np.concatenate([old.client, new.client]),
        None if old.time is None or new.time is None else np.concatenate([old.time, new.time]),
        old.classes,
        outputs=old.outputs,
    )


# checks -------------------------------------------------------------------------------------------------------------


def checked(
    raw: Raw, where: str, classes: Sequence[str] | None = None, dtype: str | None = None,
    outputs: Sequence[str] | None = None, *, labels: bool = False,
) -> Samples:
    """Checks raw arrays and converts them to Samples. classes, dtype, outputs, labels: as in ``load``. Raises
    DataError that names file, array and row."""
    x = _features(raw, where)
    if outputs is not None:
        if labels:
            _check_labels(raw, f"{where}: y")
        y_NK, named = _targets(raw, where, tuple(outputs), len(x), "label" if labels else "target")
        x = _converted(x, dtype, 0)
        return Samples(x, y_NK, _clients(raw, where), _times(raw, where), None, raw.notes, named)
    for name, column in (("y", raw.y), ("client", raw.client), ("time", raw.time)):
        if column is not None and column.shape != (len(x),):
            raise DataError(
                f"has shape {column.shape}", where=f"{where}: {name}", expected=f"({len(x)},), one value per row of x",
                hint=None if name != "y" else NUMBERS if column.dtype.kind == "f" else
                SEVERAL if column.ndim == 2 else None,
            )
    y, names = _labels(raw, where, None if classes is None else tuple(classes))
    x = _converted(x, dtype, int(y.max()) + 1 if names is None else len(names))
    return Samples(x, y, _clients(raw, where), _times(raw, where), names, raw.notes)


def _quiet(found: Samples, normal: Sequence[str]) -> Samples:
    """Labelled samples with the classes of ``anomaly.LABELS``. normal: as in ``load``."""
    names = found.classes or tuple(map(str, range(int(found.y.max()) + 1)))
    wrong = np.array([name not in (*normal, anomaly.QUIET) for name in names], np.int64)
    return replace(found, y=wrong[found.y], classes=anomaly.LABELS)


def _targets(
    raw: Raw, where: str, wanted: tuple[str, ...], rows: int, default: str
) -> tuple[NDArray[np.float64], tuple[str, ...]]:
    """(targets float64 [N, K], their names). wanted: the names; empty for the file's own, or ``default``,
    numbered if there are several. Raises DataError."""
    where = f"{where}: y"
    if raw.y.dtype.kind not in ("biuf" if default == "label" else "iuf") or raw.classes is not None:
        raise DataError("holds class labels" if len(raw.y) else "is empty", where=where,
                        expected="numbers to predict, one or more for each sample", hint="leave out --task regression")
    y_NK = raw.y[:, None] if raw.y.ndim == 1 else raw.y
    own = raw.outputs or (wanted if len(wanted) == y_NK.shape[-1] else ())
    width = y_NK.shape[-1]
    own = own or tuple(default if width == 1 else f"{default}{k + 1}" for k in range(width))
    if y_NK.shape != (rows, len(own)):
        raise DataError(
            f"has shape {list(raw.y.shape)}", where=where,
            expected=f"[{rows}, {len(own)}]: a number for each sample and output ({', '.join(own[:20])})",
        )
    y_NK = y_NK.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(y_NK).all(1))
    if bad.size:
        raise DataError(f"holds {y_NK[bad[0]].tolist()}", where=f"{where}, {raw.row(int(bad[0]))}",
                        expected="finite numbers")
    if not wanted:
        return y_NK, own
    for name in wanted:
        if name not in own:
            raise DataError(f"has no output '{name}'{schema.did_you_mean(name, own)}", where=where,
                            expected=f"among {', '.join(own[:20])}")
    return y_NK[:, [own.index(name) for name in wanted]], wanted


def _check_labels(raw: Raw, where: str) -> None:
    """Raises DataError unless y is 0 or 1 for each sample and label."""
    if raw.y.ndim != 2 or raw.y.dtype.kind not in "biuf" or raw.classes is not None:
        raise DataError("has one class for each sample" if len(raw.y) else "is empty", where=where,
                        expected="[N, K], 0 or 1 for each label of a sample", hint="leave out --task multi-label")
    bad = np.flatnonzero(~((raw.y == 0) | (raw.y == 1)).all(1))
    if bad.size:
        raise DataError(f"holds {raw.y[bad[0]].tolist()}", where=f"{where}, {raw.row(int(bad[0]))}",
                        expected="0 or 1 for each label")


def _features(raw: Raw, where: str) -> NDArray[Any]:
    x = raw.x
    if x.ndim < 1 or len(x) == 0:
        raise DataError("holds no samples", where=where)
    if x.dtype.kind not in "biuf":
        raise DataError(f"has values of type {x.dtype}", where=f"{where}: x", expected="numbers")
    if x.ndim < 2 or x.size == 0:
        raise DataError(
            f"has shape {x.shape}", where=f"{where}: x", expected="[N, ...] with at least one feature per row"
        )
    if x.dtype.kind != "f":
        return x
    with np.errstate(over="ignore"):
        single = x.astype(np.float32, copy=False)
    bad = np.flatnonzero(~np.isfinite(single).reshape(len(x), -1).all(axis=1))
    if bad.size:
        worst = single[bad[0]].ravel()
        value = worst[~np.isfinite(worst)][0]
        raise DataError(f"holds {value}", where=f"{where}: x, {raw.row(int(bad[0]))}", expected="finite float32 values")
    return single


def _converted(x: NDArray[Any], wanted: str | None, labels: int) -> NDArray[Any]:
    """Converts whole numbers to ``wanted``, or to the dtype that they seem to need. Values that ``wanted`` cannot
    represent stay int64, which the model's check refuses."""
    if x.dtype.kind == "f" or (x.dtype == np.uint8 and wanted in (None, "float32")):
        return x
    if wanted is None:
        tokens = x.dtype.kind != "b" and x.ndim == 2 and x.min() >= 0 and x.max() < labels
        wanted = "int64" if tokens else "float32"
    found = x.astype(wanted)
    return found if wanted == "float32" or np.array_equal(found, x) else x.astype(np.int64)


def _labels(raw: Raw, where: str, wanted: tuple[str, ...] | None) -> tuple[NDArray[np.int64], tuple[str, ...] | None]:
    own = _class_names(raw.classes, where)
    names, y = wanted or own, raw.y
    if y.dtype.kind == "U":
        occurring = {str(label) for label in np.unique(y)}
        numbers = all(re.fullmatch(r"[+-]?[0-9]{1,9}", label) for label in occurring)
        if not numbers or (names is not None and occurring <= set(names)):
            names = names or tuple(sorted(occurring))
            return _named(y, names, raw, where), names
        y = y.astype(np.int64)
    if y.dtype.kind not in "iu":
        raise DataError(f"has values of type {y.dtype}", where=f"{where}: y", expected="whole numbers or class names",
                        hint=NUMBERS if y.dtype.kind == "f" else None)
    _in_range(y, own or wanted, raw, where)
    y = y.astype(np.int64)
    if wanted is not None and own is not None and wanted != own:
        return _named(np.array(own, dtype=np.str_)[y], wanted, raw, where), wanted
    return y, names


def _class_names(classes: NDArray[Any] | None, where: str) -> tuple[str, ...] | None:
    if classes is None:
        return None
    if classes.dtype.kind != "U" or classes.ndim != 1 or classes.size > MAX_CLASSES:
        raise DataError(f"is {classes.dtype} {classes.shape}", where=f"{where}: classes", expected="a list of names")
    names = tuple(str(name) for name in classes)
    if not all(names) or len(set(names)) != len(names):
        raise DataError("has an empty or repeated class name", where=f"{where}: classes")
    return names


def _named(y: NDArray[np.str_], names: tuple[str, ...], raw: Raw, where: str) -> NDArray[np.int64]:
    """Converts class names to labels."""
    occurring, index = np.unique(y, return_inverse=True)
    number = {name: i for i, name in enumerate(names)}
    for i, label in enumerate(occurring):
        if str(label) not in number:
            raise DataError(
                f"label '{label}' is not among the classes{schema.did_you_mean(str(label), names)}",
                where=f"{where}: y, {raw.row(int(np.flatnonzero(index == i)[0]))}",
                expected=f"one of {', '.join(names[:20])}",
            )
    return np.array([number[str(label)] for label in occurring], dtype=np.int64)[index]


def _in_range(y: NDArray[Any], names: tuple[str, ...] | None, raw: Raw, where: str) -> None:
    most = MAX_LABEL if names is None else len(names) - 1
    bad = np.flatnonzero((y < 0) | (y > most))
    if bad.size:
        expected = f"0 to {most}" + (f", the labels of {', '.join(names[:20])}" if names else "")
        raise DataError(
            f"label {y[bad[0]]} is out of range", where=f"{where}: y, {raw.row(int(bad[0]))}", expected=expected
        )


def _clients(raw: Raw, where: str) -> NDArray[np.str_] | None:
    if raw.client is None:
        return None
    if raw.client.dtype.kind not in "Uiu":
        raise DataError(f"has values of type {raw.client.dtype}", where=f"{where}: client", expected="text")
    names = raw.client.astype(np.str_)
    empty = np.flatnonzero(names == "")
    if empty.size:
        raise DataError("is empty", where=f"{where}: client, {raw.row(int(empty[0]))}", expected="a client's name")
    return names


def _times(raw: Raw, where: str) -> NDArray[np.float64] | None:
    if raw.time is None:
        return None
    if raw.time.dtype.kind not in "iuf":
        raise DataError(f"has values of type {raw.time.dtype}", where=f"{where}: time", expected="seconds")
    seconds = raw.time.astype(np.float64)
    bad = np.flatnonzero(~np.isfinite(seconds))
    if bad.size:
        raise DataError(f"holds {seconds[bad[0]]}", where=f"{where}: time, {raw.row(int(bad[0]))}", expected="seconds")
    return seconds


def stratified(y_S: NDArray[Any], most: int) -> NDArray[np.int64]:
    """Ascending int64 rows of at most ``most`` samples with the labels y_S: all if they fit, else as equally many of
    each class as possible, evenly spaced within the class. Of targets [S, K]: evenly spaced."""
    if len(y_S) <= most:
        return np.arange(len(y_S))
    if y_S.ndim == 2:
        return np.arange(most) * len(y_S) // most
    rows = [np.flatnonzero(y_S == label) for label in np.unique(y_S)]
    left, chosen = most, []
    for number, own in enumerate(sorted(rows, key=len)):
        share = min(len(own), max(1, left // (len(rows) - number)))
        chosen.append(own[np.arange(share) * len(own) // share])
        left -= share
    return np.sort(np.concatenate(chosen))[:most]
