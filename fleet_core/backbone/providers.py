"""Chooses what computes a backbone: the fastest of onnxruntime's providers that gives its golden features.

XNNPACK has kernels for ARM processors, CUDA and TensorRT for NVIDIA's; a wheel of onnxruntime offers what it was built
with. Each is measured once, and again after an update of onnxruntime.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

from fleet_core.backbone.backbone_file import BackboneFile, difference
from fleet_core.backbone.onnx_runtime import CPU, Run
from fleet_core.base import schema, storage
from fleet_core.base.errors import BundleError, FleetError, StateError

TRIED = (CPU, "XnnpackExecutionProvider", "CUDAExecutionProvider")
"""Providers that are measured wherever onnxruntime offers them. Others, such as TensorRT, which compiles a backbone for
minutes, are measured where the board's profile names them."""

REPEATS = 5
MUCH = 0.9
"""Another provider must take less than this share of the processor's time."""


@dataclass(frozen=True)
class Choice:
    """provider: the chosen one. seconds: provider -> time for a golden sample. refused: provider -> why it is not used.
    of: the backbone, onnxruntime and providers that were measured."""

    provider: str
    seconds: Mapping[str, float] = field(default_factory=dict)
    refused: Mapping[str, str] = field(default_factory=dict)
    of: tuple[str, ...] = ()


def candidates(offered: Sequence[str], named: Sequence[str] = ()) -> tuple[str, ...]:
    """What to measure, the processor first. offered: by onnxruntime. named: by the board's profile."""
    return tuple(p for p in dict.fromkeys((*TRIED, *named)) if p in offered)


def choose(
    backbone: BackboneFile, offered: Sequence[str], open_: Callable[[str], Run], of: tuple[str, ...] = (), *,
    clock: Callable[[], float] = time.perf_counter,
) -> tuple[Choice, Run]:
    """(the choice, the backbone opened on it). offered: of ``candidates``. Raises BundleError if no provider gives the
    golden features."""
    x, wanted = backbone.golden["x"], backbone.golden["z"]
    seconds, refused, opened = dict[str, float](), dict[str, str](), dict[str, Run]()
    for provider in offered:
        try:
            run = open_(provider)
            off = difference(run(x), wanted)
            if not off <= backbone.info.tolerance:
                raise BundleError(f"golden features are off by {off:.2g}", expected=f"{backbone.info.tolerance:g}")
        except Exception as error:  # onnxruntime raises errors of many classes, none of them documented
            refused[provider] = (error.what if isinstance(error, FleetError) else str(error))[:300]
            continue
        seconds[provider], opened[provider] = _fastest(partial(run, x), clock) / len(x), run
    if not opened:
        raise BundleError(
            "the backbone does not give its golden features here: "
            + "; ".join(f"{name}: {why}" for name, why in refused.items()),
            expected=f"onnxruntime {backbone.info.min_onnxruntime} or newer", hint="update onnxruntime",
        )
    best = min(opened, key=lambda name: seconds[name] * (MUCH if name == CPU else 1))
    return Choice(best, seconds, refused, of), opened[best]


def _fastest(action: Callable[[], object], clock: Callable[[], float]) -> float:
    times = []
    for _ in range(REPEATS):
        began = clock()
        action()
        times.append(clock() - began)
    return min(times)


def load(path: Path) -> Choice | None:
    """The choice in a file; None if it is absent or damaged."""
    with suppress(StateError, ValueError, RecursionError):
        return schema.read(Choice, json.loads(storage.read_bytes(path, limit=1 << 16)), unknown="ignore")[0]
    return None


def save(path: Path, choice: Choice) -> None:
    """Raises StateError."""
    storage.write_json(path, schema.plain(choice))
