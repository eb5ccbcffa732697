"""Generated windows of sensors, to compare models: families of series, each cut freely or aligned.

    python -m benchmarks.own_data.series --out build/own-data [--families vibration event] [--seed 0]

writes FAMILY-free.npz and FAMILY-aligned.npz with x float32 [N, C, T], y (names), client (names) and time (seconds), as
``metafleet init --data`` takes them. Equal seeds give equal files; another seed gives other classes and devices.

| family | a class is | free: drawn for every window |
|---|---|---|
| vibration | a spectrum: two tones of its own | the phases |
| event | the form of a short burst | where the burst is |
| level | how the level changes: up, down, a ramp, or not | when it changes |
| chirp | how the pitch moves: up, down, up and down | where the sweep begins, and its phase |
| delay | how long after the trigger the answer comes | aligned only: the trigger is always at one place |

In an aligned file the values drawn for free windows are the same in all of them, as in windows cut at a trigger. Every
device has its own mounting (its triples of channels are rotated), gain and offset.

Shapes: N windows, C channels, T steps.
"""

from __future__ import annotations

import argparse
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

Array = NDArray[Any]
Window = Callable[[np.random.Generator, int], Array]
"""(generator, number of a class) -> a clean window [C, T]."""

DEVICES, PER_CLASS = 10, 40
STEP_S = 1.0  # between the starts of two windows
GAIN, OFFSET = 0.3, 0.5  # standard deviations over devices: of the gain's logarithm, and of the offset


@dataclass(frozen=True)
class Family:
    """window: makes the function that draws the windows, from the family's own generator and ``aligned``. noise:
    standard deviation of the white noise. rotated: whether devices are mounted differently."""

    classes: tuple[str, ...]
    shape: tuple[int, int]
    noise: float
    window: Callable[[np.random.Generator, bool, tuple[int, int]], Window]
    rotated: bool = True
    free: bool = True


def vibration(pattern: np.random.Generator, aligned: bool, shape: tuple[int, int]) -> Window:
    channels, steps = shape
    tones = np.linspace(0.08, 0.32, 9)  # cycles per step, two bins of the spectrum apart
    chosen = pattern.permutation(9)[:6].reshape(3, 2)
    size, lag = pattern.uniform(0.4, 1.0, (2, channels)), pattern.uniform(0, 2 * np.pi, (2, channels))

    def window(rng: np.random.Generator, kind: int) -> Array:
        total = np.zeros(shape)
        for k, tone in enumerate(chosen[kind]):
            pitch = tones[tone] * rng.uniform(0.98, 1.02)
            phase = lag[k] if aligned else rng.uniform(0, 2 * np.pi, channels)
            total += size[k][:, None] * np.sin(2 * np.pi * pitch * np.arange(steps) + phase[:, None])
        return total

    return window


def event(pattern: np.random.Generator, aligned: bool, shape: tuple[int, int]) -> Window:
    channels, steps = shape
    length = 24
    pitch, fall = pattern.permutation([0.06, 0.12, 0.2]), pattern.permutation([4.0, 8.0, 8.0])
    rising = pattern.permutation([False, False, True])
    size = pattern.uniform(0.4, 1.0, (3, channels))

    def window(rng: np.random.Generator, kind: int) -> Array:
        t = np.arange(length)
        burst = np.exp(-t / fall[kind]) * np.sin(2 * np.pi * pitch[kind] * t)
        burst = burst[::-1] if rising[kind] else burst
        total = np.zeros(shape)
        start = steps // 3 if aligned else int(rng.integers(0, steps - length + 1))
        total[:, start : start + length] += 3 * size[kind][:, None] * burst * rng.uniform(0.7, 1.3)
        return total

    return window


def level(pattern: np.random.Generator, aligned: bool, shape: tuple[int, int]) -> Window:
    channels, steps = shape
    share = pattern.uniform(0.5, 1.0, channels)

    def window(rng: np.random.Generator, kind: int) -> Array:
        middle = steps // 2 if aligned else rng.uniform(0.15, 0.85) * steps
        late = np.arange(steps) - middle
        form = [np.sign(late) / 2, -np.sign(late) / 2, np.arange(steps) / steps - 0.5, np.zeros(steps)][kind]
        return share[:, None] * (form * rng.uniform(0.8, 1.2) + rng.normal(0, 0.3))

    return window


def chirp(pattern: np.random.Generator, aligned: bool, shape: tuple[int, int]) -> Window:
    channels, steps = shape
    length, low, high = 64, 0.04, 0.3
    size = pattern.uniform(0.4, 1.0, channels)

    def window(rng: np.random.Generator, kind: int) -> Array:
        s = np.linspace(0, 1, length)
        pitch = low + (high - low) * [s, 1 - s, 1 - np.abs(2 * s - 1)][kind]
        phase = 0.0 if aligned else rng.uniform(0, 2 * np.pi)
        sweep = np.sin(2 * np.pi * np.cumsum(pitch * rng.uniform(0.9, 1.1)) + phase)
        total = np.zeros(shape)
        start = (steps - length) // 2 if aligned else int(rng.integers(0, steps - length + 1))
        total[:, start : start + length] = size[:, None] * sweep
        return total

    return window


def delay(pattern: np.random.Generator, aligned: bool, shape: tuple[int, int]) -> Window:
    steps = shape[1]
    delays, width = np.array([0.25, 0.4, 0.55]) * steps, 3.0
    size = pattern.uniform(0.6, 1.0, shape[0])

    def window(rng: np.random.Generator, kind: int) -> Array:
        t = np.arange(steps)
        trigger = steps // 8
        answer = trigger + delays[kind] + rng.normal(0, 0.03 * steps)
        pulses = np.exp(-0.5 * ((t - trigger) / width) ** 2) + 0.8 * np.exp(-0.5 * ((t - answer) / width) ** 2)
        return 2 * size[:, None] * pulses

    return window


FAMILIES = {
    "vibration": Family(("idle", "loaded", "worn"), (6, 64), 0.8, vibration),
    "event": Family(("knock", "click", "scrape"), (3, 128), 0.5, event),
    "level": Family(("up", "down", "ramp", "steady"), (1, 100), 0.25, level, rotated=False),
    "chirp": Family(("up", "down", "up-down"), (3, 96), 0.5, chirp),
    "delay": Family(("early", "middle", "late"), (2, 128), 0.5, delay, rotated=False, free=False),
}


def names() -> tuple[str, ...]:
    """The names of all files, without their suffix."""
    return tuple(f"{name}-{cut}" for name, family in FAMILIES.items() for cut in ("free", "aligned")
                 if family.free or cut == "aligned")


def generated(name: str, seed: int = 0, devices: int = DEVICES, per_class: int = PER_CLASS) -> dict[str, Array]:
    """The arrays x, y, client, time of ``FAMILY-free`` or ``FAMILY-aligned``; rows of a device lie together, in time.

    Raises KeyError for a name that is not in ``names()``.
    """
    if name not in names():
        raise KeyError(name)
    family_name, _, cut = name.rpartition("-")
    family = FAMILIES[family_name]
    key = zlib.crc32(family_name.encode())
    window = family.window(np.random.default_rng([seed, key]), cut == "aligned", family.shape)
    x, y = [], []
    for device in range(devices):
        rng = np.random.default_rng([seed, key, device + 1])
        kinds = rng.permutation(np.repeat(np.arange(len(family.classes)), per_class))
        mounting = _mounting(rng, family)
        gain, offset = np.exp(rng.normal(0, GAIN)), rng.normal(0, OFFSET, (family.shape[0], 1))
        clean = np.stack([window(rng, int(kind)) for kind in kinds])
        noisy = clean + rng.normal(0, family.noise, clean.shape)
        x.append(gain * np.einsum("cd,ndt->nct", mounting, noisy) + offset)
        y.append(kinds)
    number = devices * len(y[0])
    return {
        "x": np.concatenate(x).astype(np.float32),
        "y": np.array(family.classes)[np.concatenate(y)],
        "client": np.repeat([f"sensor-{k + 1}" for k in range(devices)], len(y[0])),
        "time": np.tile(np.arange(len(y[0])) * STEP_S, devices)[:number],
    }


def _mounting(rng: np.random.Generator, family: Family) -> Array:
    """[C, C]: a rotation of every triple of channels; the identity if a family's devices are not rotated."""
    channels = family.shape[0]
    mounting = np.eye(channels)
    for first in range(0, channels - 2, 3) if family.rotated else ():
        turned, _ = np.linalg.qr(rng.normal(size=(3, 3)))
        mounting[first : first + 3, first : first + 3] = turned
    return mounting


def write(folder: Path, name: str, seed: int = 0) -> Path:
    """The file of ``generated(name, seed)``, made if it is missing."""
    path = folder / f"{name}-{seed}.npz"
    if not path.exists():
        folder.mkdir(parents=True, exist_ok=True)
        partial = path.with_suffix(".partial.npz")
        np.savez(partial, allow_pickle=False, **generated(name, seed))
        partial.replace(path)
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, default=Path("build/own-data"))
    parser.add_argument("--families", nargs="+", choices=tuple(FAMILIES), default=tuple(FAMILIES))
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for name in names():
        if name.rpartition("-")[0] in options.families:
            print(write(options.out, name, options.seed))


if __name__ == "__main__":
    main()
