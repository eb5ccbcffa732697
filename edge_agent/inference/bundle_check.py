"""Checks a bundle with ONNX Runtime, without torch: at export, and on the device before it is installed.

The golden weights are outside the graphs, and batch sizes differ from the traced one. ONNX Runtime refuses a graph with
a parameter that is not external, missing or superfluous (``onnx_session.open_session``).

    python -m edge_agent.inference.bundle_check BUNDLE     checks it in its own process and prints the result as JSON

Shapes: n golden samples, K classes.
"""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.compute.onnx_session import BATCH, Session, check_golden, open_kind, open_session, open_steps
from fleet_core.backbone import backbone_file, providers
from fleet_core.backbone.onnx_runtime import CPU, open_on, runtime
from fleet_core.base import processes as process
from fleet_core.base import schema, storage, trees
from fleet_core.base.errors import BundleError
from fleet_core.base.trees import Params
from fleet_core.model.graph_bundle import GOLDEN_STEPS, GRAPH_GROUPS, Graph
from fleet_core.model.layout import MODEL_GROUPS
from fleet_core.personalization import device_bundle
from fleet_core.personalization.bundle_format import Bundle

Array = np.ndarray[Any, Any]

CHECKED_SAMPLES = 2 * BATCH + 1
"""A device answers so many in whole batches and one of a single sample."""

SUPPORT_REPEATS = 65
"""Repetitions of the golden samples in a larger support set: more samples than any graph takes in a pass."""

LOGITS_TOLERANCE, STEP_TOLERANCE = 2e-2, 2e-3
"""Tolerated errors of logits after gradient steps, and of weights after one step, relative to what the steps change."""

ROUNDING = 1e-6
"""Tolerated rounding error of a weight, relative to the largest of its array."""


@dataclass(frozen=True)
class Passed:
    """The largest error of each check. graphs: graph -> error of its golden outputs. steps: number of gradient steps ->
    error of the golden logits. int8: error of the quantized encoder, relative to the norm of the embeddings; None
    without one."""

    onnxruntime: str
    graphs: Mapping[str, float]
    steps: Mapping[str, float]
    int8: float | None


def check(bundle: Bundle) -> Passed:
    """Raises BundleError that says which graph is wrong, and how."""
    graph = bundle.graph
    _check_runtime(graph.info.min_onnxruntime)
    _check_golden(graph)
    outputs = {kind: _check_other_batches(graph, kind) for kind in graph.graphs}
    steps = _check_steps(graph) if graph.info.adapt is not None else {}
    _check_bundled_weights(bundle)
    if bundle.backbone:
        _check_backbone(bundle)
    return Passed(runtime().__version__, outputs, steps, _check_int8(bundle) if bundle.int8 else None)


def _check_runtime(minimum: str) -> None:
    installed = runtime().__version__
    have, need = (tuple(int(n) for n in re.findall(r"\d+", version)[:3]) for version in (installed, minimum))
    if have < need:
        raise BundleError(f"onnxruntime {installed} is too old", expected=f"{minimum} or newer",
                          hint="update onnxruntime")


def _check_golden(graph: Graph) -> None:
    try:
        check_golden(graph)
    except BundleError:
        raise
    except Exception as error:  # onnxruntime raises errors of many classes
        raise BundleError(f"a graph does not run on its golden samples: {str(error)[:300]}") from error


def _check_other_batches(graph: Graph, kind: str) -> float:
    """The largest error of the golden outputs in batches of other sizes."""
    rows = np.arange(CHECKED_SAMPLES) % len(graph.golden["x"])
    session = open_kind(graph, kind, graph.layout.seeded(graph.info.seed))
    got, wanted = _outputs(kind, session, graph.golden["x"][rows]), graph.golden[kind][rows]
    if got.shape != wanted.shape or not np.allclose(got, wanted, atol=graph.info.atol, rtol=graph.info.rtol):
        raise BundleError(f"the graph '{kind}' does not give its golden outputs on {len(got)} samples")
    return float(np.abs(got - wanted).max())


def _outputs(kind: str, session: Session, x: Array) -> Array:
    try:
        return session.run(x)
    except Exception as error:  # onnxruntime raises errors of many classes, none of them documented
        raise BundleError(f"the graph '{kind}' does not run on {len(x)} samples: {str(error)[:300]}") from error


# Gradient steps -------------------------------------------------------------------------------------------------------


def _check_steps(graph: Graph) -> dict[str, float]:
    """0 steps must change nothing, 1 and 10 give the golden logits, and repeated samples give the same step. Returns
    the largest error of the logits by number of steps."""
    weights, x, y = graph.adapt_weights(graph.info.seed), graph.golden["x"], graph.golden["y"]
    start, adapted = storage.flatten(weights), {}
    for steps in (0, *GOLDEN_STEPS):
        adapted[steps] = _adapted(graph, weights, x, y, steps)
        _check_arrays(graph, adapted[steps])
    for key, array in adapted[0].items():
        if not np.array_equal(array, start[key]):
            raise BundleError(f"the graph 'adapt' changes {key} in 0 steps")
    errors = {str(n): _check_golden_steps(graph, weights, adapted[n], n) for n in GOLDEN_STEPS}
    _check_larger_support(graph, weights, adapted[1])
    return errors


def _check_larger_support(graph: Graph, weights: Params, adapted: Mapping[str, Array]) -> None:
    """Checks that repeated samples give the same step. adapted: the arrays after one step on the golden samples."""
    x, y, start = graph.golden["x"], graph.golden["y"], storage.flatten(weights)
    repeated = _adapted(graph, weights, _repeated(x, SUPPORT_REPEATS), _repeated(y, SUPPORT_REPEATS), 1)
    for key, once in adapted.items():
        change, size = np.abs(once - start[key]).max(initial=0), np.abs(start[key]).max(initial=0)
        if not np.abs(repeated[key] - once).max(initial=0) <= STEP_TOLERANCE * change + ROUNDING * size:
            raise BundleError(
                f"the graph 'adapt' gives another {key} for {len(y)} samples repeated {SUPPORT_REPEATS} times than for "
                "the same samples once"
            )


def _adapted(graph: Graph, weights: Params, x: Array, y: Array, steps: int) -> dict[str, Array]:
    """The arrays after ``steps`` gradient steps on samples x with labels y, as ``group/name``."""
    info = graph.info.adapt
    rate = {} if info is None or info.rates else {"lr": np.array(info.lr, np.float32)}
    try:
        run = open_steps(graph.adapt, weights)
        return run({"support_x": x, "support_y": y, "steps": np.array(steps, np.int64), **rate})
    except BundleError as error:
        raise BundleError(f"the graph 'adapt': {error.what}", hint=error.hint) from error
    except Exception as error:  # onnxruntime raises errors of many classes, none of them documented
        raise BundleError(f"the graph 'adapt' does not run on {len(y)} samples: {str(error)[:300]}") from error


def _check_arrays(graph: Graph, adapted: Mapping[str, Array]) -> None:
    """The graph must give every parameter of the adapted groups, in its shape, and no other."""
    groups = () if graph.info.adapt is None else graph.info.adapt.groups
    wanted = {f"{t.group}/{t.name}": t.shape for t in graph.layout.tensors if t.group in groups}
    if {key: array.shape for key, array in adapted.items()} != wanted:
        raise BundleError(
            f"the graph 'adapt' gives {', '.join(sorted(adapted))[:200]}", expected=", ".join(sorted(wanted))[:200]
        )
    if not all(np.isfinite(array).all() for array in adapted.values()):
        raise BundleError("the graph 'adapt' gives a value that is not finite")


def _check_golden_steps(graph: Graph, weights: Params, adapted: Mapping[str, Array], steps: int) -> float:
    """The largest error of the logits after ``steps``, which must also be small against what the steps change."""
    params = trees.only(storage.unflatten({**storage.flatten(weights), **adapted}), MODEL_GROUPS)
    got = _outputs("predict", open_kind(graph, "predict", params), graph.golden["x"])
    wanted = graph.golden["adapt"][GOLDEN_STEPS.index(steps)]
    off, change = np.abs(got - wanted), np.abs(wanted - graph.golden["predict"]).max()
    within = (off <= graph.info.atol + graph.info.rtol * np.abs(wanted)).all()
    if not (within and off.max() <= LOGITS_TOLERANCE * change):
        raise BundleError(f"the graph 'adapt' does not give its golden outputs after {steps} steps")
    return float(off.max())


# The weights of the bundle --------------------------------------------------------------------------------------------


def _check_bundled_weights(bundle: Bundle) -> None:
    """Checks that each graph gives finite values with the bundle's weights, if the bundle has all its groups."""
    graph = bundle.graph
    params = {**graph.first, **bundle.params}
    for kind in graph.graphs:
        complete = {t.group for t in graph.layout.tensors} & set(GRAPH_GROUPS[kind]) <= params.keys()
        if complete and not np.isfinite(_outputs(kind, open_kind(graph, kind, params), graph.golden["x"])).all():
            raise BundleError(f"the graph '{kind}' gives a value that is not finite with the bundle's weights")


def _check_backbone(bundle: Bundle) -> None:
    """Checks that the backbone gives its golden features here."""
    found = backbone_file.parsed(bundle.backbone)
    providers.choose(found, (CPU,), lambda provider: open_on(found.onnx, provider))


def _check_int8(bundle: Bundle) -> float:
    """The quantized encoder's error against the encoder, relative to the norm of the embeddings; it must be about what
    the manifest says."""
    graph, stated = bundle.graph, bundle.manifest.int8
    x = graph.golden["x"]
    got = _outputs("embed-int8", open_session(bundle.int8, {}), x)
    wanted = open_kind(graph, "embed", {**graph.first, **bundle.params}).run(x)
    off = relative(got, wanted) if got.shape == wanted.shape else float("inf")
    if stated is None or not off <= 1.5 * stated.difference + 0.02:  # kernels of other processors round differently
        raise BundleError(
            f"the quantized encoder is off by {off:.3g} of the embeddings' length",
            expected="no more" if stated is None else f"about {stated.difference:.3g}, as the manifest says",
        )
    return off


def relative(got: Array, wanted: Array) -> float:
    """The norm of the difference over that of ``wanted``."""
    return float(np.linalg.norm(got - wanted) / max(float(np.linalg.norm(wanted)), 1e-30))


def _repeated(array: Array, times: int) -> Array:
    return np.concatenate([array] * times)


# In its own process ---------------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Prints the result as JSON. Raises BundleError for a wrong bundle, and if torch was imported, which a device
    lacks."""
    passed = check(device_bundle.read(Path(arguments[0])))
    if "torch" in sys.modules:
        raise BundleError("the check imported torch, which a device does not have")
    print(json.dumps(schema.plain(passed)))


if __name__ == "__main__":
    process.guarded(lambda: main(sys.argv[1:]))
