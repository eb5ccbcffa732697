"""A stranger's files: each set in a form that a user may have, for a fleet and for its devices.

| set | form |
|---|---|
| event-free | a wide .csv: a row is a window, its columns ax_0 … |
| level-free | a long .csv: a row is a reading; ``--window`` says how many make a window |
| chirp-free | .ndjson: a line is a whole window |
| vibration-rows | a .csv of features: mean, deviation, minimum and maximum of each channel |
| marks-image | .npz of grey images of 16 × 16 bytes: a disc, a cross or stripes, anywhere |
| mixed-labels | .npz; vibration-free with its labels shuffled, so that nothing can be learned |
| the others | .npz, as ``benchmarks.own_data.series`` makes them |

Shapes: N samples, C channels, T steps.
"""

from __future__ import annotations

import csv
import json
import zlib
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from benchmarks.own_data import series
from benchmarks.own_data.baseline import statistics

Array = NDArray[Any]

WIDE, LONG, NDJSON, FEATURES, NPZ = "wide .csv", "long .csv", ".ndjson", ".csv of features", ".npz"
FORMS = {"event-free": WIDE, "level-free": LONG, "chirp-free": NDJSON, "vibration-rows": FEATURES}
SUFFIXES = {WIDE: ".csv", LONG: ".csv", NDJSON: ".ndjson", FEATURES: ".csv", NPZ: ".npz"}
ROWS, IMAGES, MIXED = "vibration-rows", "marks-image", "mixed-labels"
MARKS, SIDE = ("cross", "disc", "stripes"), 16


@dataclass(frozen=True, eq=False)
class Part:
    """x [N, …]. y, client: names [N]. time: seconds [N], rising within a client."""

    x: Array
    y: Array
    client: Array
    time: Array

    def take(self, rows: Array | slice) -> Part:
        return Part(self.x[rows], self.y[rows], self.client[rows], self.time[rows])

    def of(self, client: str) -> Part:
        return self.take(self.client == client)

    @property
    def clients(self) -> list[str]:
        """In the order of the rows."""
        return list(dict.fromkeys(map(str, self.client)))


def names() -> tuple[str, ...]:
    return (*series.names(), ROWS, IMAGES, MIXED)


def made(name: str, devices: int, per_class: int, seed: int = 0) -> Part:
    """The samples of a set. Raises KeyError for a name that is not in ``names()``."""
    if name == IMAGES:
        return _images(devices, per_class, seed)
    if name == ROWS:
        found = made("vibration-free", devices, per_class, seed)
        return replace(found, x=statistics(found.x))
    if name == MIXED:
        found = made("vibration-free", devices, per_class, seed)
        return replace(found, y=np.random.default_rng(seed).permutation(found.y))
    arrays = series.generated(name, seed, devices, per_class)
    return Part(arrays["x"], arrays["y"], arrays["client"], arrays["time"])


def _images(devices: int, per_class: int, seed: int) -> Part:
    """uint8 [N, 1, 16, 16]; every device has its own brightness and contrast."""
    parts = []
    across, down = np.meshgrid(np.arange(SIDE), np.arange(SIDE))
    for device in range(devices):
        rng = np.random.default_rng([seed, zlib.crc32(IMAGES.encode()), device])
        kinds = rng.permutation(np.repeat(np.arange(len(MARKS)), per_class))
        dark, contrast = rng.uniform(20, 80), rng.uniform(60, 120)
        images = []
        for kind in kinds:
            size, (left, top) = rng.uniform(2.5, 4.0), rng.uniform(4, SIDE - 5, 2)
            x, y = across - left, down - top
            inside = np.maximum(abs(x), abs(y)) <= size
            mark = [inside & (np.minimum(abs(x), abs(y)) < 1), np.hypot(x, y) <= size, inside & (np.floor(y) % 3 == 0)]
            images.append(dark + contrast * mark[kind] + rng.normal(0, 25, (SIDE, SIDE)))
        count = len(kinds)
        parts.append(Part(np.clip(images, 0, 255).astype(np.uint8)[:, None], np.array(MARKS)[kinds],
                          np.full(count, f"camera-{device + 1}"), np.arange(count) * series.STEP_S))
    return Part(*(np.concatenate([getattr(part, key) for part in parts]) for key in ("x", "y", "client", "time")))


# Forms ----------------------------------------------------------------------------------------------------------------


def form_of(name: str) -> str:
    return FORMS.get(name, NPZ)


def write(part: Part, stem: Path, form: str) -> Path:
    """Writes the samples in this form; returns the path, which is ``stem`` with the form's suffix."""
    path = stem.with_name(stem.name + SUFFIXES[form])
    path.parent.mkdir(parents=True, exist_ok=True)
    if form == NPZ:
        np.savez(path, x=part.x, y=part.y, client=part.client, time=part.time)
    elif form == NDJSON:
        with path.open("w", encoding="utf-8") as file:
            for x, y, client, time in _rows(part):
                line = {"client": client, "time": float(time), "label": y, "x": [[_short(v) for v in c] for c in x]}
                file.write(json.dumps(line) + "\n")
    else:
        with path.open("w", encoding="utf-8", newline="") as file:
            csv.writer(file).writerows({WIDE: _wide, LONG: _long, FEATURES: _features}[form](part))
    return path


def _rows(part: Part) -> Any:
    return zip(part.x, map(str, part.y), map(str, part.client), part.time, strict=True)


def _short(value: float) -> float:
    """Rounded to nine digits, more than float32 has."""
    return float(f"{value:.9g}")


def _channels(count: int) -> list[str]:
    return [f"a{'xyzuvw'[k]}" for k in range(count)]


def _wide(part: Part) -> Any:
    channels, steps = part.x.shape[1:]
    yield ["client", "time", "label", *(f"{name}_{k}" for name in _channels(channels) for k in range(steps))]
    for x, y, client, time in _rows(part):
        yield [client, time, y, *map(_short, x.ravel())]


def _long(part: Part) -> Any:
    channels, steps = part.x.shape[1:]
    yield ["client", "time", "label", *_channels(channels)]
    for x, y, client, time in _rows(part):
        for k in range(steps):
            yield [client, round(time + k * series.STEP_S / steps, 6), y, *map(_short, x[:, k])]


def _features(part: Part) -> Any:
    yield ["client", "time", "label", *(f"feature-{k + 1}" for k in range(part.x.shape[1]))]
    for x, y, client, time in _rows(part):
        yield [client, time, y, *map(_short, x)]
