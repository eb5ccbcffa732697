"""A model's layout: its input, answers and named arrays, on which aggregator and devices must agree."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from fleet_core.base import schema
from fleet_core.base.errors import BundleError, CodecError, DataError
from fleet_core.base.moving_arrays import EVERYTHING, MIRRORED, Moving
from fleet_core.base.trees import Params
from fleet_core.protocol import chunks
from fleet_core.protocol.messages import ID
from fleet_core.tasks.anomaly import Anomaly
from fleet_core.tasks.task import VARIANTS, Task, reading_of

MODEL_GROUPS = ("body", "head")
GROUPS = (*MODEL_GROUPS, "buffers", "rates", "control", "prototypes")
NAME = r"[A-Za-z0-9_.\-]{1,128}"
FITS = ("refuse", "letterbox", "stretch")


@dataclass(frozen=True)
class InputSpec:
    """A raw sample: ``shape`` is without the batch axis. The graph computes (x · scale − mean) / std per channel.

    mean, std: one value per channel (axis 0), or empty. fit: how images of another size are brought to ``shape``
    (``fleet_core.data.shaping.resize``); ``refuse``: they are not. sound_hz: samples are spectrograms of sound at this
    rate (``fleet_core.data.shaping.sound``); 0: they are not. rate_hz: readings a second in a window, to which a
    device resamples its sensor's; 0: not known. stride: readings from one window to the next, where a device's settings
    say nothing; 0: windows do not overlap. No hash depends on these two.
    """

    shape: tuple[int, ...] = field(metadata={"min": 1, "max": 1_000_000, "max_length": 4})
    dtype: str = field(default="float32", metadata={"choices": ("float32", "uint8", "int64")})
    scale: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    fit: str = field(default="refuse", metadata={"choices": FITS, "sparse": True})
    sound_hz: int = field(default=0, metadata={"min": 0, "max": 192_000, "sparse": True})
    rate_hz: float = field(default=0.0, metadata={"min": 0, "max": 1_000_000, "sparse": True})
    stride: int = field(default=0, metadata={"min": 0, "max": 1_000_000, "sparse": True})

    @property
    def unhashed(self) -> InputSpec:
        """This input without what no hash depends on: an agent that does not know those keys has the same hash."""
        return replace(self, rate_hz=0.0, stride=0)


@dataclass(frozen=True)
class Backbone:
    """A frozen network that turns raw samples into features, which are the model's input.

    id: the first 32 hex digits of the sha256 of its file (``fleet_core.backbone.backbone_file``). name: of what it was
    made from, for people. input: a raw sample. width: features of a sample.
    """

    id: str = field(metadata={"pattern": ID})
    name: str = field(metadata={"max_length": 200})
    input: InputSpec
    width: int = field(metadata={"min": 1, "max": 1_000_000})


@dataclass(frozen=True)
class TensorSpec:
    """One named array: its group and shape."""

    name: str = field(metadata={"pattern": NAME})
    group: str = field(metadata={"choices": GROUPS})
    shape: tuple[int, ...] = field(metadata={"min": 0, "max": 100_000_000, "max_length": 8})
    dtype: str = field(default="float32", metadata={"choices": ("float32",)})

    @property
    def size(self) -> int:
        return int(np.prod(self.shape, dtype=np.int64))


@dataclass(frozen=True)
class Layout:
    """model: a name in ``fleet_core.learning.models`` or ``package.module:build``. options: its keyword arguments.
    classes: names in the order of the labels; empty with a task. embedding: width D of the representation that Proto
    compares. backbone: computes the model's input from raw samples; None for a model that takes raw samples. task: what
    the model answers if it is not one of ``classes``."""

    model: str = field(metadata={"max_length": 200})
    input: InputSpec
    classes: tuple[str, ...] = field(metadata={"max_length": 10_000})
    embedding: int = field(metadata={"min": 1, "max": 1_000_000})
    tensors: tuple[TensorSpec, ...] = field(metadata={"max_length": 10_000})
    options: Mapping[str, Any] = field(default_factory=dict)
    backbone: Backbone | None = field(default=None, metadata={"sparse": True})
    task: Task | None = field(default=None, metadata={"sparse": True, "variants": VARIANTS})

    @property
    def sample(self) -> InputSpec:
        """A raw sample, as users send it."""
        return self.input if self.backbone is None else self.backbone.input

    @property
    def answers(self) -> tuple[str, ...]:
        """Names of what the head computes for a sample: classes, or the outputs of the task."""
        if isinstance(self.task, Anomaly):
            return self.task.differences
        return self.classes if self.task is None else self.task.outputs

    @property
    def outputs(self) -> tuple[str, ...] | None:
        """Names of the targets or labels that samples come with; None for classes, and for samples without any."""
        return None if self.task is None else self.task.columns or None

    @property
    def reading(self) -> dict[str, Any]:
        """Options with which ``samples.load`` reads samples: the classes, or what the task asks for."""
        return reading_of(self.task, self.classes)

    def truths(self, y: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
        """What losses and graphs compare answers with: labels int64 [N], or standardized targets, or labels as 0
        and 1, float32 [N, K]. Raises DataError."""
        return y.astype(np.int64) if self.task is None else self.task.standardized(y)

    @cached_property
    def hash(self) -> str:
        """The first 16 hex digits of the sha256 of the layout's JSON; states and updates carry it."""
        import hashlib  # loads OpenSSL, 4 MB that a process which only answers does not need

        backbone = self.backbone and replace(self.backbone, input=self.backbone.input.unhashed)
        plain = replace(self, input=self.input.unhashed, backbone=backbone)
        return hashlib.sha256(plain.to_json().encode()).hexdigest()[:16]

    def extended(self, groups: tuple[str, ...], mirrored: tuple[str, ...]) -> Layout:
        """This layout plus the arrays of those ``groups`` that are not the model's own.

        ``rates``, ``control``: one array for each array of the ``mirrored`` groups, of its shape. ``prototypes``: the
        total [K, D] and the count [K] of each class.
        """
        more = [
            TensorSpec(f"{t.group}.{t.name}", group, t.shape)
            for group in MIRRORED if group in groups
            for t in self.tensors if t.group in mirrored
        ]
        if "prototypes" in groups:
            k = len(self.classes)
            more += [TensorSpec("count", "prototypes", (k,)), TensorSpec("total", "prototypes", (k, self.embedding))]
        return replace(self, tensors=(*self.tensors, *more)) if more else self

    def part(self, moving: Moving) -> Layout:
        """This layout with only the arrays that move."""
        if moving.everything:
            return self
        return replace(self, tensors=tuple(t for t in self.tensors if moving.has(t.group, t.name)))

    @cached_property
    def keys(self) -> tuple[str, ...]:
        """"group/name" of the model's own arrays, in order."""
        return tuple(f"{t.group}/{t.name}" for t in self.tensors if t.group in MODEL_GROUPS)

    def places(self, moving: Moving) -> str | None:
        """The moving arrays in the form of messages: places in ``keys``, ``0-3,7``; None for everything."""
        if moving.everything:
            return None
        return chunks.as_ranges([k for k, key in enumerate(self.keys) if key not in moving.frozen])

    def moving(self, places: str | None) -> Moving:
        """The inverse of ``places``. Raises MessageError."""
        if places is None:
            return EVERYTHING
        found = set(chunks.from_ranges(places, len(self.keys)))
        return Moving(frozenset(key for k, key in enumerate(self.keys) if k not in found))

    def zeros(self, groups: tuple[str, ...]) -> dict[str, dict[str, Any]]:
        """float32 zeros in the shapes of ``groups``."""
        tree: dict[str, dict[str, Any]] = {}
        for tensor in self.tensors:
            if tensor.group in groups:
                tree.setdefault(tensor.group, {})[tensor.name] = np.zeros(tensor.shape, np.float32)
        return tree

    def to_json(self) -> str:
        return json.dumps(schema.plain(self), sort_keys=True, separators=(",", ":"))

    @staticmethod
    def from_json(text: str | bytes) -> Layout:
        """Raises BundleError."""
        try:
            data = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise BundleError("the layout is not JSON", hint="fetch the graph again") from error
        try:
            layout, problems = schema.read(Layout, data, unknown="ignore")
        except DataError as error:
            raise BundleError(f"the layout's task is malformed: {error.what}", expected=error.expected) from error
        if layout is None:
            raise BundleError("the layout is malformed: " + "; ".join(map(str, problems[:5])))
        return layout

    def parameters(self, groups: tuple[str, ...]) -> int:
        """Number of values in ``groups``."""
        return sum(t.size for t in self.tensors if t.group in groups)

    def others(self, groups: tuple[str, ...]) -> int:
        """Number of values of the model that are not in ``groups``."""
        return self.parameters(tuple(group for group in MODEL_GROUPS if group not in groups))

    def shapes(self, groups: tuple[str, ...]) -> dict[str, tuple[int, ...]]:
        """"group/name" -> shape of the arrays of ``groups``."""
        return {f"{t.group}/{t.name}": t.shape for t in self.tensors if t.group in groups}

    def check(self, params: Params, groups: tuple[str, ...]) -> None:
        """Raises CodecError unless ``params`` has exactly the arrays of ``groups``, with their shapes, all finite."""
        wanted = {(t.group, t.name): t.shape for t in self.tensors if t.group in groups}
        found = {(g, n): tuple(a.shape) for g, named in params.items() for n, a in named.items()}
        for key in wanted.keys() | found.keys():
            if wanted.get(key) != found.get(key):
                raise CodecError(
                    f"array {'/'.join(key)} has shape {found.get(key, 'none')}", expected=f"{wanted.get(key, 'none')}"
                )
        for group, named in params.items():
            for name, array in named.items():
                if not np.isfinite(array).all():
                    raise CodecError(f"array {group}/{name} holds a value that is not finite")

    def ordered(self, params: Params) -> dict[str, dict[str, Any]]:
        """``params`` in this layout's order, so that sums do not depend on the order in a file."""
        tree: dict[str, dict[str, Any]] = {}
        for tensor in self.tensors:
            if tensor.group in params and tensor.name in params[tensor.group]:
                tree.setdefault(tensor.group, {})[tensor.name] = params[tensor.group][tensor.name]
        return tree

    def seeded(self, seed: int) -> dict[str, dict[str, Any]]:
        """Weights for golden outputs, the same on every machine for a seed: float32, uniform, scaled by fan-in."""
        rng = np.random.default_rng(seed)
        tree: dict[str, dict[str, Any]] = {}
        for tensor in self.tensors:
            fan_in = max(1, tensor.size // tensor.shape[0] if len(tensor.shape) > 1 else tensor.size)
            values = (rng.random(tensor.shape) - 0.5) * 2 * (3 / fan_in) ** 0.5
            tree.setdefault(tensor.group, {})[tensor.name] = values.astype(np.float32)
        return tree
