"""Differential privacy: an update is scaled down to norm C, and Gaussian noise of standard deviation z C hides it.

McMahan, Ramage, Talwar, Zhang, "Learning Differentially Private Recurrent Language Models", ICLR 2018, Algorithm 1
(``central``); the same mechanism before anything leaves the device is ``local``. Both clip the whole update, over all
arrays that are sent. Everything after the noise (codec, error feedback, duals, the server rule) uses only noised
values, so it reveals nothing more.

The noise is made from a stream of ChaCha20, whose key is the operating system's in a fleet and a function of the run's
seed in a simulation. It is float64 until it is added; there is no defence against the weakness of floating-point noise
(Mironov 2012).
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from fleet_core.algorithms.interface import Payload, Update
from fleet_core.base import trees
from fleet_core.base.trees import Params

KEY_BYTES = 32
AT_ONCE = 1 << 16
"""Values that are drawn at once, so that noise for a large array takes little memory."""
Array = np.ndarray[Any, Any]


class Normal:
    """Standard normal values from a key of 32 bytes, by the transform of Box and Muller."""

    def __init__(self, key: bytes):
        from cryptography.hazmat.primitives.ciphers import Cipher, algorithms  # 4 MB that serving does not need

        self._stream = Cipher(algorithms.ChaCha20(key, bytes(16)), mode=None).encryptor()

    def draw(self, count: int) -> Array:
        """float64 [count]."""
        parts = [self._few(min(AT_ONCE, count - at)) for at in range(0, count, AT_ONCE)]
        return np.concatenate(parts) if parts else np.zeros(0)

    def _few(self, count: int) -> Array:
        pairs = (count + 1) // 2
        bits = np.frombuffer(self._stream.update(bytes(16 * pairs)), dtype="<u8").reshape(2, pairs) >> np.uint64(11)
        first, second = (bits.astype(np.float64) + (1.0, 0.0)[k] for k, bits in enumerate(bits))
        radius, angle = np.sqrt(-2 * np.log(first * 2.0**-53)), 2 * math.pi * 2.0**-53 * second
        return np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])[:count]


@dataclass(frozen=True)
class Private:
    """Clips and noises one update. noise: z, 0 for none. key: of the noise, used for this update only."""

    clip: float
    noise: float
    key: bytes

    def of(self, update: Params) -> dict[str, dict[str, Any]]:
        """The update, scaled down to norm C and noised, in float32."""
        made = clipped(update, self.clip)
        if self.noise:
            made = noised(made, self.noise * self.clip, self.key)
        return trees.apply(lambda array: array.astype(np.float32), made)


class NoisedSum(Iterable[Update]):
    """A round's ``updates``, each scaled down to norm ``clip``, the first with the noise of their sum. Every pass gives
    the same values."""

    def __init__(self, updates: Iterable[Update], clip: float, noise: float, key: bytes):
        self._updates, self._clip, self._noise, self._key = updates, clip, noise, key

    def __iter__(self) -> Iterator[Update]:
        for k, update in enumerate(self._updates):
            groups = clipped(update.payload.groups, self._clip)
            if k == 0:
                groups = noised(groups, self._noise * self._clip, self._key)
            yield replace(update, payload=Payload(groups, update.payload.scalars))


def clipped(update: Params, clip: float) -> dict[str, dict[str, Any]]:
    """The update in float64, scaled down to a norm of ``clip`` if it is longer. Unlike ``trees.clip``, an update with a
    NaN becomes NaN everywhere, so that no unbounded value leaves the device."""
    wide = trees.apply(lambda array: np.asarray(array, np.float64), update)
    length = math.sqrt(sum(float(np.vdot(a, a)) for named in wide.values() for a in named.values()))
    return wide if length <= clip else trees.apply(lambda array: array * (clip / length), wide)


def noised(update: Params, deviation: float, key: bytes) -> dict[str, dict[str, Any]]:
    normal = Normal(key)
    return trees.apply(lambda array: array + deviation * normal.draw(array.size).reshape(array.shape), update)


def key_of(*names: object) -> bytes:
    """The key of a simulation's noise: the same for the same names."""
    return hashlib.sha256("/".join(map(str, ("privacy", *names))).encode()).digest()
