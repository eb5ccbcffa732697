"""Raw samples to the features of a backbone: the one function of devices, simulations and the operator's commands.

Shapes: n samples, D features.
"""

from __future__ import annotations

import functools
import math
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np

from fleet_core.backbone import backbone_file, providers
from fleet_core.backbone.onnx_runtime import CPU, Run, open_on, runtime
from fleet_core.base import storage
from fleet_core.base.errors import BundleError, DataError, StateError
from fleet_core.data import model_input
from fleet_core.data.samples import Samples
from fleet_core.model.layout import Backbone, InputSpec

Array = np.ndarray[Any, Any]

BATCH, BATCH_VALUES = 4, 1 << 18
"""The most samples, and the most raw values, of a batch. More need more memory, and for a large model more time."""

QUOTA_BYTES = 256 << 20


@dataclass(frozen=True)
class Features:
    """Turns raw samples into features. path: the backbone's file; measurements and cached features lie beside it.
    named: providers that the board's profile names. threads: of onnxruntime. quota: bytes of cached features."""

    path: Path
    backbone: Backbone
    named: tuple[str, ...] = field(default=(), compare=False)
    threads: int = 1
    quota: int = QUOTA_BYTES

    def of(self, x: Array) -> Array:
        """float32 [n, D] of raw samples [n, *shape]. Raises DataError for other samples, BundleError for a backbone
        that does not run here, StateError if its file is not here."""
        model_input.check(x, self.backbone.input)
        if x.dtype.kind == "f" and not np.isfinite(x).all():
            raise DataError("a sample holds a value that is not finite")
        run, size = _opened(self)[1], _batch(self.backbone.input)
        return np.concatenate([self._batch(run, x[k : k + size]) for k in range(0, len(x), size)])

    def cached(self, x: Array) -> Array:
        """Like ``of``; the features stay on the disk, so that the same samples are computed once."""
        from fleet_core.backbone.feature_cache import FeatureCache, keys_of  # hashlib, which answering does not need

        model_input.check(x, self.backbone.input)
        keys, cache = keys_of(x), FeatureCache(self.beside("features"), self.backbone.width, self.quota)
        known = cache.get(keys)
        rows = {key: row for row, key in enumerate(keys) if key not in known}
        if rows:
            new = dict(zip(rows, self.of(x[list(rows.values())]), strict=True))
            with suppress(StateError):  # a full disk costs only time
                cache.put(new, keys)
            known |= new
        return np.stack([known[key] for key in keys])

    def samples(self, raw: Samples, *, keep: bool = True) -> Samples:
        """``raw`` with features in place of its samples. keep: on the disk."""
        return replace(raw, x=self.cached(raw.x) if keep else self.of(raw.x))

    def choice(self) -> providers.Choice | None:
        """The provider that was chosen here, with the measurements; None before the first start."""
        return providers.load(self.beside("providers.json"))

    def beside(self, kind: str) -> Path:
        return self.path.with_name(f"{self.path.stem}.{kind}")

    def _batch(self, run: Run, x: Array) -> Array:
        try:
            z = np.asarray(run(x), np.float32)
        except Exception as error:  # onnxruntime raises errors of many classes, none of them documented
            raise DataError(f"the backbone does not take these samples: {str(error)[-200:]}") from error
        if z.shape != (len(x), self.backbone.width) or not np.isfinite(z).all():
            raise DataError(f"the backbone gives {list(z.shape)} with {np.isfinite(z).sum()} finite values",
                            expected=f"finite features [{len(x)}, {self.backbone.width}]")
        return z


def of_file(path: Path, **options: Any) -> Features:
    """The features of the backbone in a file. options: as in ``Features``. Raises StateError, BundleError."""
    data = storage.read_bytes(path, limit=backbone_file.MAX_BYTES)
    return Features(path, backbone_file.described(data, str(path)), **options)


def input_of(z: Array) -> InputSpec:
    """The input of a model of features z [n, D]: they are divided by their deviation over all samples and features."""
    deviation = float(z.std(dtype=np.float64))
    return InputSpec(z.shape[1:], "float32", float(f"{1 / deviation:.9g}") if deviation > 0 else 1.0)


def _batch(spec: InputSpec) -> int:
    return max(1, min(BATCH, BATCH_VALUES // math.prod(spec.shape)))


@functools.lru_cache(maxsize=2)
def _opened(features: Features) -> tuple[providers.Choice, Run]:
    """The backbone on its fastest provider. The providers are measured unless that was done here before."""
    data = storage.read_bytes(features.path, limit=backbone_file.MAX_BYTES)
    if backbone_file.identity(data) != features.backbone.id:
        raise BundleError("is not the fleet's backbone", where=str(features.path), expected=features.backbone.id,
                          hint="delete it: the agent fetches it again")
    backbone, onnxruntime = backbone_file.parsed(data, str(features.path)), runtime()
    offered = providers.candidates(onnxruntime.get_available_providers(), features.named)
    of, kept = (features.backbone.id, onnxruntime.__version__, *offered), features.beside("providers.json")
    before = features.choice()

    def open_(provider: str) -> Run:
        return open_on(backbone.onnx, provider, threads=features.threads)

    if before is not None and before.of == of and (before.provider == CPU or before.provider in offered):
        return before, open_(before.provider)
    choice, run = providers.choose(backbone, offered, open_, of)
    with suppress(StateError):  # it is measured again
        providers.save(kept, choice)
    return choice, run


def measured(features: Features) -> providers.Choice:
    """Opens the backbone, and says what was chosen. Raises BundleError, StateError."""
    return _opened(features)[0]
