"""The update of a round by both engines: how far apart, how far from double precision, and what a step costs.

    python -m benchmarks.engines.parity --out benchmarks/engines/parity.json

Twenty steps from the same start with the same draws. ``methods``: every method on a small network; ``models``: an
estimator on each model; ``numbers``: estimators of a model that predicts numbers (``--numbers`` measures these alone,
again in the file). Distances are relative to the update in double precision, by torch. Every seed has its own
samples and first weights. Times: processor time of a step, the median of three rounds of each engine in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cloud_server.results.result import environment
from edge_agent.compute.onnx_session import open_function, open_kind
from export.graph import export_graph, samples
from export.train_graph import export_train
from fleet_core.algorithms.interface import Payload
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.errors import BundleError
from fleet_core.base.storage import write_json
from fleet_core.base.trees import Params
from fleet_core.learning import models
from fleet_core.learning.local_training import TorchEngine
from fleet_core.model.layout import InputSpec, Layout
from fleet_core.tasks.regression import LOSSES, Regression
from fleet_core.training.graph_engine import Array, GraphEngine, Opened
from fleet_core.training.local_round import Engine, TrainResult, train_one
from fleet_core.training.round_plans import Participant

STEPS, SAMPLES, SEEDS, ROUNDS = 20, 120, 5, 3
CLASSES = tuple("abcdefghij")
HYPER = {"client_lr": 0.01, "support_batch": 16, "query_batch": 16, "batch": 32, "shots": 2, "query_shots": 2}
CASES: dict[str, tuple[str, InputSpec, float]] = {
    "MLP": ("mlp", InputSpec((784,)), 1e-5),
    "1-D CNN": ("cnn1d", InputSpec((3, 128)), 1e-5),
    "LeNet": ("lenet", InputSpec((3, 32, 32)), 1e-4),
    "Conv-4": ("conv4", InputSpec((1, 28, 28)), 1e-4),
    "char-lstm, 20 characters": ("char-lstm", InputSpec((20,), "int64"), 1e-4),
}
"""{name: (model, input, limit of the distance between the engines)}."""
ESTIMATORS = ("fedavg", "pfldyn-proto", "per-fedavg-fo", "per-fedavg-exact")
SMALL = "mlp", InputSpec((20,))
NUMBERS = ("fedavg", "per-fedavg-fo", "per-fedavg-hf", "per-fedavg-exact", "fedmeta-metasgd")
"""A method for each estimator that takes numbers."""


class Double(TorchEngine):
    """Torch in double precision."""

    def arrays(self, params: Params) -> Params:
        return trees.apply(lambda a: torch.tensor(np.asarray(a), dtype=torch.float64), params)

    def numpy(self, params: Params) -> Any:
        return trees.apply(lambda a: a.detach().numpy(), params)

    def steps(self, adaptation: str, classes: int, hyper: Any, data: Sequence[Any]) -> Any:
        wide = [(x.astype(np.float64) if x.dtype.kind == "f" else x, y, rng) for x, y, rng in data]
        return super().steps(adaptation, classes, hyper, wide)


def compared(layout: Layout, name: str, seeds: int = SEEDS, timed: bool = True) -> dict[str, Any]:
    """Distances of the two engines and of double precision, for each seed; or ``why`` the method has no graph."""
    method = METHODS[name]
    known = method.hyper.__dataclass_fields__
    hyper = method.hyper(**{k: v for k, v in {**HYPER, "local_steps": STEPS}.items() if k in known})
    started = time.monotonic()
    try:
        graph = export_train(layout, method, hyper, models.initial(layout, 0))
    except BundleError as error:
        return {"why": error.what}
    found: dict[str, Any] = {
        "export_s": time.monotonic() - started, "bytes": sum(map(len, graph.graphs.values())), "loss": graph.info.loss,
        "onnx-torch": [], "onnx-double": [], "torch-double": [],
    }
    functions = {kind: open_function(data, flushed=True) for kind, data in graph.graphs.items()}
    embed = _embed(layout) if method.adaptation == "fedproto" else None
    for seed in range(seeds):
        first = models.initial(layout, seed)
        opened = Opened(replace(graph, first=trees.only(first, method.personal)), functions, embed)
        engines: dict[str, Engine] = {
            "torch": _of_seed(TorchEngine(models.build(layout)), first), "onnx": GraphEngine(opened),
            "double": _of_seed(Double(models.build(layout).double()), first),
        }
        results = {engine: _round(made, layout, name, hyper, first, seed) for engine, made in engines.items()}
        for one, other in (("onnx", "torch"), ("onnx", "double"), ("torch", "double")):
            found[f"{one}-{other}"].append(_distance(results[one], results[other], results["double"]))
    if timed:
        seconds: dict[str, list[float]] = {"torch": [], "onnx": []}
        for _ in range(ROUNDS):
            for engine, times in seconds.items():
                begun = time.process_time()
                _round(engines[engine], layout, name, hyper, first, 0)
                times.append((time.process_time() - begun) / STEPS)
        found["step_s"] = {engine: statistics.median(times) for engine, times in seconds.items()}
    return found


def _of_seed(engine: TorchEngine, first: Params) -> TorchEngine:
    """The engine; its devices start with the personal groups of ``first``."""
    seeded: Any = engine
    seeded.first_personal = lambda method, layout, scalars: trees.only(first, method.personal)
    return engine


def _embed(layout: Layout) -> Callable[[Params, Array], Array]:
    bundle = export_graph(layout)
    return lambda params, x: np.asarray(open_kind(bundle, "embed", params).run(x))


def _round(engine: Engine, layout: Layout, name: str, hyper: Any, first: Params, seed: int) -> TrainResult:
    method = METHODS[name]
    wire = layout.extended(method.down, method.shared)
    whole = wire.ordered({**wire.zeros(method.down), **first})
    state = method.server.init(trees.only(whole, method.received), hyper)
    sent = method.server.broadcast(state)
    broadcast = Payload(trees.apply(lambda a: a.astype(np.float32), sent.groups),
                        {**sent.scalars, "round": 1.0, "seed": 0.0})
    per_device = trees.apply(lambda a: a.astype(np.float32), method.server.per_device(state, "d"))
    x = samples(layout.input, SAMPLES, seed)
    y = np.arange(SAMPLES) % len(layout.classes) if layout.task is None else targets(x, seed)
    one = Participant({}, x, y, np.random.default_rng(seed), per_device)
    return train_one(engine, method, layout, broadcast, one, hyper)


def targets(x: Array, seed: int) -> Array:
    """[N, 2]: two levels of each sample, in units of their own, with noise that is often far off."""
    parts = x.reshape(len(x), 2, -1).mean(2)
    parts = (parts - parts.mean(0)) / parts.std(0)
    noise = np.random.default_rng(seed).standard_t(2, parts.shape)
    return np.asarray((parts + 0.3 * noise) * (40.0, 0.5) + (200.0, 0.0))


def of_numbers(model: str, spec: InputSpec, loss: str) -> Layout:
    return models.describe(model, spec, (), {}, Regression(("a", "b"), (200.0, 0.0), (45.0, 0.6), loss))


def numbers() -> dict[str, Any]:
    """case -> method -> distances; both losses on the small network, ``huber`` on the 1-D CNN."""
    model, spec, _ = CASES["1-D CNN"]
    cases = {**{f"MLP, {loss}": of_numbers(*SMALL, loss) for loss in LOSSES},
             "1-D CNN, huber": of_numbers(model, InputSpec((2, *spec.shape[1:])), "huber")}
    return {case: {name: compared(layout, name, timed=False) for name in NUMBERS} for case, layout in cases.items()}


def _distance(one: TrainResult, other: TrainResult, exact: TrainResult) -> float:
    """Between the updates, or between the states where an update is no model."""
    trees_of = [(r.update.groups or r.pending.get("personal", {})) for r in (one, other, exact)]
    wide = [trees.apply(lambda a: np.asarray(a, np.float64), tree) for tree in trees_of]
    return float(trees.norm(trees.subtract(wide[0], wide[1])) / (trees.norm(wide[2]) or 1.0))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--only", nargs=2, metavar=("MODEL", "METHOD"),
                        help="measures this again, in the file; MODEL 'methods': a row of that table")
    parser.add_argument("--numbers", action="store_true", help="measures 'numbers' again, in the file")
    options = parser.parse_args()
    torch.set_num_threads(1)
    if options.numbers:
        held = json.loads(options.out.read_text(encoding="utf-8"))
        return write_json(options.out, {**held, "numbers": numbers()})
    if options.only:
        return _again(options.out, *options.only)
    small = models.describe(SMALL[0], SMALL[1], CLASSES, {})
    methods = {name: compared(small, name, timed=False) for name in METHODS}
    found = {}
    for case, (model, spec, limit) in CASES.items():
        layout = models.describe(model, spec, CLASSES, {})
        found[case] = {"limit": limit, "parameters": layout.parameters(("body", "head")),
                       "estimators": {name: compared(layout, name) for name in ESTIMATORS}}
    write_json(options.out, {
        "environment": environment(), "steps": STEPS, "seeds": SEEDS, "methods": methods, "models": found,
        "numbers": numbers(),
    })
    return None


def _again(out: Path, case: str, method: str) -> None:
    held = json.loads(out.read_text(encoding="utf-8"))
    if case == "methods":
        held[case][method] = compared(models.describe(*SMALL, CLASSES, {}), method, timed=False)
        return write_json(out, held)
    model, spec, _ = CASES[case]
    held["models"][case]["estimators"][method] = compared(models.describe(model, spec, CLASSES, {}), method)
    write_json(out, held)


if __name__ == "__main__":
    main()
