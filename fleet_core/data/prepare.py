"""Turns arrays that are not yet of the model's shape into samples: images of another size, and sound.

Every path to a model calls this: files, questions over MQTT, HTTP, and labelled samples. n: samples.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.shaping import resize, sound
from fleet_core.model.layout import InputSpec

Array = NDArray[Any]


def prepared(x: Array, spec: InputSpec, where: str | None = None) -> Array:
    """Samples [n, *spec.shape] of images of another size, if the fleet fits them, or of sound [n, L] or [n, 1, L] at
    the fleet's rate, if it learns from sound; any other x as it is. Sound that is shorter than a window is padded with
    silence. Raises DataError for images and sound that are too long."""
    if not spec.sound_hz:
        return resize.fitted(x, spec.shape, spec.fit, where)
    heard = (x.ndim == 2 and x.shape != spec.shape) or (x.ndim == 3 and x.shape[1] == 1 != spec.shape[0])
    if not heard or x.dtype.kind not in "if" or not len(x):
        return x
    longest = sound.length_of(spec.sound_hz, spec.shape[-1])
    if not 0 < x.shape[-1] <= longest:
        raise DataError(f"has {x.shape[-1]} readings of sound", where=where,
                        expected=f"at most {longest}, {longest / spec.sound_hz:.3g} s at {spec.sound_hz} Hz",
                        hint="cut it into windows, or give it as a .wav file")
    wave_nL = np.zeros((len(x), longest), np.float32)
    wave_nL[:, : x.shape[-1]] = sound.full_scale(x.reshape(len(x), -1))
    return sound.spectrograms(wave_nL, spec.sound_hz)


def takes(shape: Sequence[int], spec: InputSpec) -> bool:
    """Whether ``prepared`` makes a sample of an array of this shape."""
    if spec.sound_hz:
        inside = 0 < shape[-1] <= sound.length_of(spec.sound_hz, spec.shape[-1]) if shape else False
        return inside and (len(shape) == 1 or (len(shape) == 2 and shape[0] == 1))
    sized = spec.fit != "refuse" and len(shape) == 3 == len(spec.shape) and shape[0] == spec.shape[0]
    return sized and all(0 < side <= resize.MAX_SIDE for side in shape[1:])


def described(spec: InputSpec) -> tuple[str, ...]:
    """The axes of one sample in words, as an error message names them."""
    if spec.fit != "refuse" and len(spec.shape) == 3:
        return str(spec.shape[0]), "height", "width"
    return tuple(map(str, spec.shape))
