"""The gate of a bundle without torch: before it is let out, and on the device before it is installed.

The golden weights are no graph's own, and there are other samples than a graph was traced with. onnxruntime refuses to
open a graph of which a parameter is not external, is missing or is one too many (``session.open_session``).

    python -m edge_agent.inference.bundle_check BUNDLE     checks it in a process of its own; what was found, as JSON

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

from edge_agent.compute.onnx_session import Session, check_golden, open_kind, open_session, open_steps, runtime
from fleet_core.base import processes as process
from fleet_core.base import schema, storage, trees
from fleet_core.base.errors import BundleError
from fleet_core.base.trees import Params
from fleet_core.model.graph_bundle import GOLDEN_STEPS, GRAPH_GROUPS, Graph
from fleet_core.model.layout import MODEL_GROUPS
from fleet_core.personalization import device_bundle
from fleet_core.personalization.device_bundle import Bundle

Array = np.ndarray[Any, Any]

BATCHES = 3
"""How often the golden samples follow each other in a larger batch."""

SUPPORTS = 65
"""How often they do in a larger support: more samples than any graph takes in a pass."""

OF_LOGITS, OF_STEP = 2e-2, 2e-3
"""How far logits after gradient steps, and weights after one, may be off, relative to what the steps change."""

ROUNDING = 1e-6
"""How far a weight may be off by rounding alone, relative to the largest of its array."""


@dataclass(frozen=True)
class Passed:
    """What was checked, and how far it was off: golden outputs by graph, golden logits by number of gradient steps.
    int8: of the quantized encoder, relative to the length of the embeddings; None where there is none."""

    onnxruntime: str
    graphs: Mapping[str, float]
    steps: Mapping[str, float]
    int8: float | None


def check(made: Bundle) -> Passed:
    """Raises BundleError that says which graph is wrong, and how."""
    graph = made.graph
    _check_runtime(graph.info.min_onnxruntime)
    _golden(graph)
    outputs = {kind: _larger_batch(graph, kind) for kind in graph.graphs}
    steps = _steps(graph) if graph.info.adapt is not None else {}
    _own_weights(made)
    return Passed(runtime().__version__, outputs, steps, _quantized(made) if made.int8 else None)


def _check_runtime(least: str) -> None:
    here = runtime().__version__
    found, wanted = (tuple(int(n) for n in re.findall(r"\d+", version)[:3]) for version in (here, least))
    if found < wanted:
        raise BundleError(f"onnxruntime {here} is too old", expected=f"{least} or newer", hint="update onnxruntime")


def _golden(graph: Graph) -> None:
    try:
        check_golden(graph)
    except BundleError:
        raise
    except Exception as error:  # onnxruntime raises errors of many classes
        raise BundleError(f"a graph does not run on its golden samples: {str(error)[:300]}") from error


def _larger_batch(graph: Graph, kind: str) -> float:
    """The golden outputs once more, from a batch of another size."""
    x, wanted = graph.golden["x"], graph.golden[kind]
    session = open_kind(graph, kind, graph.layout.seeded(graph.info.seed))
    got, wanted = _outputs(kind, session, _repeated(x, BATCHES)), _repeated(wanted, BATCHES)
    if got.shape != wanted.shape or not np.allclose(got, wanted, atol=graph.info.atol, rtol=graph.info.rtol):
        raise BundleError(f"the graph '{kind}' does not give its golden outputs on a batch of {len(got)} samples")
    return float(np.abs(got - wanted).max())


def _outputs(kind: str, session: Session, x: Array) -> Array:
    try:
        return session.run(x)
    except Exception as error:  # onnxruntime raises errors of many classes, none of them documented
        raise BundleError(f"the graph '{kind}' does not run on {len(x)} samples: {str(error)[:300]}") from error


# Gradient steps -------------------------------------------------------------------------------------------------------


def _steps(graph: Graph) -> dict[str, float]:
    """No step changes nothing; one and ten give the golden logits; a support of the same samples, many times over,
    gives the same step."""
    weights, x, y = graph.adapt_weights(graph.info.seed), graph.golden["x"], graph.golden["y"]
    start, moved = storage.flatten(weights), {}
    for number in (0, *GOLDEN_STEPS):
        moved[number] = _moved(graph, weights, x, y, number)
        _check_names(graph, moved[number], start)
    for key, array in moved[0].items():
        if not np.array_equal(array, start[key]):
            raise BundleError(f"the graph 'adapt' changes {key} in 0 steps")
    found = {str(n): _golden_steps(graph, weights, moved[n], n) for n in GOLDEN_STEPS}
    often = _moved(graph, weights, _repeated(x, SUPPORTS), _repeated(y, SUPPORTS), 1)
    for key, once in moved[1].items():
        change, size = np.abs(once - start[key]).max(initial=0), np.abs(start[key]).max(initial=0)
        allowed = OF_STEP * change + ROUNDING * size
        if not np.abs(often[key] - once).max(initial=0) <= allowed:
            raise BundleError(
                f"the graph 'adapt' moves {key} otherwise on {SUPPORTS * len(y)} samples than on the same {len(y)} once"
            )
    return found


def _moved(graph: Graph, weights: Params, x: Array, y: Array, steps: int) -> dict[str, Array]:
    how = graph.info.adapt
    rate = {} if how is None or how.rates else {"lr": np.array(how.lr, np.float32)}
    try:
        run = open_steps(graph.adapt, weights)
        return run({"support_x": x, "support_y": y, "steps": np.array(steps, np.int64), **rate})
    except BundleError as error:
        raise BundleError(f"the graph 'adapt': {error.what}", hint=error.hint) from error
    except Exception as error:  # onnxruntime raises errors of many classes, none of them documented
        raise BundleError(f"the graph 'adapt' does not run on {len(y)} samples: {str(error)[:300]}") from error


def _check_names(graph: Graph, moved: Mapping[str, Array], start: Mapping[str, Any]) -> None:
    """The graph gives every parameter that moves, in its shape, and no other."""
    groups = () if graph.info.adapt is None else graph.info.adapt.groups
    wanted = {f"{t.group}/{t.name}": t.shape for t in graph.layout.tensors if t.group in groups}
    if {key: array.shape for key, array in moved.items()} != wanted:
        raise BundleError(
            f"the graph 'adapt' gives {', '.join(sorted(moved))[:200]}", expected=", ".join(sorted(wanted))[:200]
        )
    if not all(np.isfinite(array).all() for array in moved.values()):
        raise BundleError("the graph 'adapt' gives a value that is not finite")


def _golden_steps(graph: Graph, weights: Params, moved: Mapping[str, Array], number: int) -> float:
    """How far the logits after ``number`` steps are off; the change by the steps must be the golden one as well."""
    now = trees.only(storage.unflatten({**storage.flatten(weights), **moved}), MODEL_GROUPS)
    got = _outputs("predict", open_kind(graph, "predict", now), graph.golden["x"])
    wanted = graph.golden["adapt"][GOLDEN_STEPS.index(number)]
    off, change = np.abs(got - wanted), np.abs(wanted - graph.golden["predict"]).max()
    if not ((off <= graph.info.atol + graph.info.rtol * np.abs(wanted)).all() and off.max() <= OF_LOGITS * change):
        raise BundleError(f"the graph 'adapt' does not give its golden outputs after {number} steps")
    return float(off.max())


# The weights of the bundle --------------------------------------------------------------------------------------------


def _own_weights(made: Bundle) -> None:
    """The graphs answer with the bundle's weights as well, where all of them are there."""
    graph = made.graph
    params = {**graph.first, **made.params}
    for kind in graph.graphs:
        there = {t.group for t in graph.layout.tensors} & set(GRAPH_GROUPS[kind]) <= params.keys()
        if there and not np.isfinite(_outputs(kind, open_kind(graph, kind, params), graph.golden["x"])).all():
            raise BundleError(f"the graph '{kind}' gives a value that is not finite with the bundle's weights")


def _quantized(made: Bundle) -> float:
    """The quantized encoder against the encoder, relative to the length of the embeddings; no farther off than the
    manifest says."""
    graph, told = made.graph, made.manifest.int8
    x = graph.golden["x"]
    got = _outputs("embed-int8", open_session(made.int8, {}), x)
    wanted = open_kind(graph, "embed", {**graph.first, **made.params}).run(x)
    off = relative(got, wanted) if got.shape == wanted.shape else float("inf")
    if told is None or not off <= 1.5 * told.difference + 0.02:  # kernels round in other ways on other processors
        raise BundleError(
            f"the quantized encoder is off by {off:.3g} of the embeddings' length",
            expected="no more" if told is None else f"about {told.difference:.3g}, as the manifest says",
        )
    return off


def relative(got: Array, wanted: Array) -> float:
    """The length of the difference over that of ``wanted``."""
    return float(np.linalg.norm(got - wanted) / max(float(np.linalg.norm(wanted)), 1e-30))


def _repeated(array: Array, times: int) -> Array:
    return np.concatenate([array] * times)


# In a process of its own ----------------------------------------------------------------------------------------------


def main(arguments: list[str]) -> None:
    """Raises BundleError too where torch came into this process: a device has none."""
    passed = check(device_bundle.read(Path(arguments[0])))
    if "torch" in sys.modules:
        raise BundleError("torch was imported by what checks a bundle as a device does")
    print(json.dumps(schema.plain(passed)))


if __name__ == "__main__":
    process.guarded(lambda: main(sys.argv[1:]))
