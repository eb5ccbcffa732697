"""The heartbeat data set: single heart beats of ten patients; each patient is a device. Not for medical use.

MIT-BIH Arrhythmia Database (Moody and Mark 2001, PhysioNet, ODC-By 1.0; see LICENSE-heartbeat.md): lead MLII, classes
N, S and V of AAMI EC57, without fusion (F) and unclassifiable (Q) beats. ``benchmarks/heartbeat/build.py`` makes the
file beside this module.

N: beats. Time is in seconds from the start of a patient's recording of 30 minutes.
"""

from __future__ import annotations

import zipfile
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.samples import Samples

DEVICES = ("106", "119", "124", "201", "203", "207", "208", "209")
NEW_DEVICES = ("118", "223")
CLASSES = ("N", "S", "V")

FILE = Path(__file__).with_name("heartbeat.npz")
STEPS_PER_MV = 400
CLOCK_HZ = 360
MEDIAN_S = 300
MAX_RATIO = 4.0


def load_heartbeat() -> Samples:
    """x float32 [N, 3, 128]: the beat in mV (128 samples at 180 Hz, the R peak at 50), and the RR intervals before and
    after it relative to the patient's median; y int64: 0 N, 1 S, 2 V; client: the patient; time: seconds."""
    try:
        with np.load(FILE, allow_pickle=False) as file:
            arrays = {name: file[name] for name in ("beats", "y", "patient", "rr", "pos")}
    except (OSError, EOFError, ValueError, KeyError, zipfile.BadZipFile) as error:
        raise DataError(f"cannot be read: {error}", where=str(FILE), hint="install the package again") from error
    return expand(unpack_beats(arrays.pop("beats")), **arrays)


def expand(
    beats: NDArray[np.int16],
    y: NDArray[np.uint8],
    patient: NDArray[np.int16],
    rr: NDArray[np.int16],
    pos: NDArray[np.int32],
) -> Samples:
    """Converts annotated beats to Samples.

    Args:
        beats: int16 [M, 128] in 1/400 mV.
        y: uint8 [M], 0 to 4 for N, S, V, F, Q. F and Q beats count for the median and are then left out.
        patient: int16 [M].
        rr: int16 [M, 2], samples at 360 Hz to the beat before and after; 0 if there is none (ratio 1).
        pos: int32 [M], the R peak's sample number at 360 Hz.

    The median is over the patient's first five minutes only, so that no value depends on the future. Ratios are clipped
    at 4, because longer intervals are gaps in the annotation (flutter).
    """
    ratio = np.ones(rr.shape, np.float32)
    for one in np.unique(patient):
        rows = patient == one
        early = rr[rows & (pos < MEDIAN_S * CLOCK_HZ), 0]
        if not (early > 0).any():
            raise DataError(f"patient {one} has no interval in the first {MEDIAN_S} s")
        ratio[rows] = np.where(rr[rows] > 0, rr[rows] / np.median(early[early > 0]), 1)
    kept = y < len(CLASSES)
    x = np.empty((int(kept.sum()), 3, beats.shape[1]), np.float32)
    x[:, 0] = beats[kept] / np.float32(STEPS_PER_MV)
    x[:, 1:] = np.minimum(ratio[kept], MAX_RATIO)[:, :, None]
    return Samples(
        x, y[kept].astype(np.int64), patient[kept].astype(np.str_), pos[kept].astype(np.float64) / CLOCK_HZ, CLASSES
    )


def pack_beats(beats: NDArray[np.int16]) -> NDArray[np.uint8]:
    """int16 [M, 128] as differences along the beat, with low and high bytes separated to compress better: uint8
    [2, M, 128]."""
    steps: NDArray[Any] = np.diff(beats, axis=1, prepend=np.int16(0)).astype("<i2")
    return np.ascontiguousarray(np.moveaxis(steps[..., None].view(np.uint8), -1, 0))


def unpack_beats(planes: NDArray[np.uint8]) -> NDArray[np.int16]:
    """The inverse of ``pack_beats``."""
    steps = np.ascontiguousarray(np.moveaxis(planes, 0, -1)).view("<i2")[..., 0]
    return np.cumsum(steps, axis=1, dtype=np.int16)
