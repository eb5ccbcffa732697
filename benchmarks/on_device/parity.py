"""The same personalization by the device without torch and by the trainer with it: how far apart the results are.

    python -m benchmarks.on_device.parity --out benchmarks/on_device/parity.json

Limits: probabilities by class means 1e-5; weights after one step 1e-6; logits after ten 1e-3 of the largest. The
device's side runs in a process that must not import torch (``apart.py``); torch's is
``fleet_core.learning.personal_model``, which the trainer personalizes with. Every seed has its own first weights and
samples.

Two values of a max-pool's window, or a value and ReLU's 0, can be so close that the last bit decides where the gradient
goes; ten steps later two correct computations are far apart. So torch in double precision is the reference: each side
is compared with it too, and the file says for every figure on how many seeds it is within its limit. In addition,
``no_farther`` counts the seeds on which a side is as near to double precision as can be expected: within the limit of
it, or no farther from it than the other side.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.on_device.cases import CASES, LR, STEPS, SUPPORT, drawn, plain
from cloud_server.results.result import environment
from export.adapt_graph import with_adapt
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage, trees
from fleet_core.base.storage import write_json
from fleet_core.base.trees import Params
from fleet_core.learning import models, personal_model
from fleet_core.learning.gradient_estimators import entropy
from fleet_core.learning.gradients import leaves, value_and_gradient
from fleet_core.learning.models import Network, outputs, to_torch
from fleet_core.model import graph_bundle
from fleet_core.model.layout import Layout

Array = np.ndarray[Any, Any]

BARS = {"proto_probabilities": 1e-5, "weights_after_1": 1e-6, "logits_after_10": 1e-3}
WAYS: dict[str, tuple[str, str, dict[str, float]]] = {
    "proto": ("Proto", "plain", {}),
    "one": ("MAML", "all", {"lr": LR, "steps": 1}),
    "ten": ("MAML", "all", {"lr": LR, "steps": STEPS}),
    "learned": ("Meta-SGD", "rates", {}),
}
"""What is compared: the personalizer of ``ways.py``, its bundle, its setting."""
MAML = {"one": 1, "ten": STEPS}
RATE = 0.02
"""Learned rates lie between 0 and this."""
PAIRS = (("device", "torch"), ("device", "exact"), ("torch", "exact"))
"""exact: torch in double precision."""


def bundles(layout: Layout, folder: Path) -> dict[str, Path]:
    """The files of a layout's bundles, by the groups that their ``adapt`` moves."""
    base = plain(layout)
    made = {"plain": base, "all": with_adapt(base, rates=False), "rates": with_adapt(base, rates=True)}
    paths = {kind: folder / f"{kind}.bundle" for kind in made}
    for kind, graph in made.items():
        paths[kind].write_bytes(graph_bundle.pack(graph))
    return paths


def differences(
    layout: Layout, paths: dict[str, Path], folder: Path, seed: int, support: int
) -> dict[str, dict[str, float]]:
    """figure -> pair of ``PAIRS`` -> their distance, for one seed's weights and samples."""
    weights = models.initial(layout, seed)
    wide = layout.extended(("rates",), ("body", "head"))
    rates = {n: (RATE * np.abs(a) / np.abs(a).max()).astype(np.float32) for n, a in wide.seeded(seed)["rates"].items()}
    x, y = drawn(layout, support, seed)
    query, _ = drawn(layout, SUPPORT, seed + 1000)
    sides = {
        "device": _apart(folder, paths, {**weights, "rates": rates}, x, y, query),
        "torch": _in_torch(layout, weights, rates, x, y, query),
        "exact": _exactly(layout, weights, rates, x, y, query),
    }
    found: dict[str, dict[str, float]] = {figure: {} for figure in BARS}
    for a, b in PAIRS:
        one, other = sides[a], sides[b]
        found["proto_probabilities"][f"{a}-{b}"] = _distance(one, other, ["proto/probabilities"])
        found["weights_after_1"][f"{a}-{b}"] = _distance(one, other, _adapted(other, "one", "learned"))
        size = float(np.abs(sides["exact"]["ten/logits"]).max())
        found["logits_after_10"][f"{a}-{b}"] = _distance(one, other, ["ten/logits"]) / size
    return found


def _apart(folder: Path, paths: dict[str, Path], weights: Any, x: Array, y: Array, query: Array) -> dict[str, Array]:
    """The device's results."""
    storage.write_arrays(folder / "weights.safetensors", storage.flatten(weights))
    np.savez(folder / "data.npz", x=x, y=y, query=query)
    jobs = {name: {"way": way, "graph": str(paths[kind]), "weights": str(folder / "weights.safetensors"),
                   "setting": setting} for name, (way, kind, setting) in WAYS.items()}
    (folder / "job.json").write_text(json.dumps(jobs))
    subprocess.run([sys.executable, "-m", "benchmarks.on_device.apart", str(folder)], check=True)
    with np.load(folder / "found.npz", allow_pickle=False) as file:
        return dict(file)


def _in_torch(layout: Layout, weights: Any, rates: Any, x: Array, y: Array, query: Array) -> dict[str, Array]:
    """The trainer's results, under the same names."""
    network = models.build(layout).eval()
    maml, learned = METHODS["per-fedavg-fo"], METHODS["fedmeta-metasgd"]
    hyper = {name: replace(maml.hyper(), inner_lr=LR, inner_steps=steps) for name, steps in MAML.items()}
    own = {name: personal_model.adapt(maml, network, layout, weights, x, y, how) for name, how in hyper.items()}
    own["learned"] = personal_model.adapt(learned, network, layout, {**weights, "rates": rates}, x, y, learned.hyper())
    return {**_proto(network, to_torch(weights), x, y, query), **_named(network, own, query)}


def _exactly(layout: Layout, weights: Any, rates: Any, x: Array, y: Array, query: Array) -> dict[str, Array]:
    """The results in double precision, step by step."""
    network = models.build(layout).eval().double()
    w = trees.apply(torch.Tensor.double, to_torch(weights))
    learned = {g: {n: torch.tensor(rates[f"{g}.{n}"]).double() for n in named} for g, named in w.items()}
    same = trees.apply(lambda a: torch.full_like(a, float(np.float32(LR))), w)
    own = {name: _stepped(network, w, same, steps, x, y) for name, steps in MAML.items()}
    own["learned"] = _stepped(network, w, learned, 1, x, y)
    return {**_proto(network, w, x, y, query), **_named(network, own, query)}


def _stepped(network: Network, w: Params, rates: Params, steps: int, x: Array, y: Array) -> Params:
    for _ in range(steps):
        _, gradient = value_and_gradient(entropy(network, torch.tensor(x), torch.tensor(y)), leaves(w))
        w = trees.apply(lambda a, rate, g: a - rate * g, w, rates, gradient)
    return trees.apply(lambda a: a.detach().numpy(), w)


def _named(network: Network, own: Mapping[str, Params], query: Array) -> dict[str, Array]:
    """Adapted weights and their logits, by name."""
    arrays = {f"{name}/adapted/{key}": a for name, w in own.items() for key, a in storage.flatten(w).items()}
    with torch.no_grad():
        ten = trees.apply(lambda a: torch.tensor(a), own["ten"])
        return {**arrays, "ten/logits": outputs(network, ten, torch.tensor(query), "predict").numpy()}


def _proto(network: Network, w: Params, x: Array, y: Array, query: Array) -> dict[str, Array]:
    """softmax(−squared distance to the class means)."""
    with torch.no_grad():
        z, asked = (outputs(network, w, torch.tensor(samples), "embed") for samples in (x, query))
        means = torch.stack([z[torch.tensor(y == label)].mean(0) for label in range(int(y.max()) + 1)])
        found = torch.softmax(-(asked[:, None] - means).square().sum(2), 1)
        return {"proto/probabilities": found.numpy()}


def _adapted(side: Mapping[str, Array], *ways: str) -> list[str]:
    return [name for name in side if name.startswith(tuple(f"{way}/adapted/" for way in ways))]


def _distance(one: Mapping[str, Array], other: Mapping[str, Array], names: Sequence[str]) -> float:
    """The largest difference in the arrays ``names``."""
    return max(float(np.abs(one[name].astype(np.float64) - other[name]).max()) for name in names)


def measured(layout: Layout, seeds: Sequence[int], support: int) -> dict[str, dict[str, dict[str, Any]]]:
    """figure -> pair -> the largest and the median over ``seeds``, and on how many it is within its limit."""
    with tempfile.TemporaryDirectory() as name:
        paths = bundles(layout, Path(name))
        each = [differences(layout, paths, Path(name), seed, support) for seed in seeds]
    found = {figure: {pair: _summary([one[figure][pair] for one in each], BARS[figure]) for pair in pairs}
             for figure, pairs in each[0].items()}
    for figure, pairs in found.items():
        for side, other in (("device-exact", "torch-exact"), ("torch-exact", "device-exact")):
            both = zip(pairs[side]["seeds"], pairs[other]["seeds"], strict=True)
            pairs[side]["no_farther"] = sum(own <= max(others, BARS[figure]) for own, others in both)
    return found


def _summary(values: list[float], bar: float) -> dict[str, Any]:
    within = sum(value <= bar for value in values)
    return {"max": max(values), "median": statistics.median(values), "within": within, "seeds": values}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=list(range(10)))
    parser.add_argument("--supports", type=int, nargs="+", default=[10, SUPPORT], help="samples to personalize on")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    found: dict[str, Any] = {}
    for name, support in itertools.product(options.models, options.supports):
        figures = found.setdefault(name, {})[str(support)] = measured(CASES[name].layout(), options.seeds, support)
        for figure, pairs in figures.items():
            said = "  ".join(f"{p} {one['median']:.0e} {one['max']:.0e} {one['within']}" for p, one in pairs.items())
            print(f"{name} {support} {figure} (median, max, seeds within {BARS[figure]:.0e}): {said}", flush=True)
    write_json(options.out, {"lr": LR, "seeds": options.seeds, "bars": BARS, "environment": environment(),
                             "models": found})


if __name__ == "__main__":
    main()
