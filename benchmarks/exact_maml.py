"""Ways to compute the exact gradient of MAML in one inner step, and clients computed together.

    python -m benchmarks.exact_maml [--repeat 15] --out benchmarks/exact_maml.json

CPU seconds of one thread for each client and step, the ways in turn, as multiples of a plain gradient of the same
batch; and how far each gradient is from the one in double precision, relative to its norm. The product's way
differentiates through the inner step (``gradients.maml_exact``). The others compute ∇query(w') − lr·H(w)·∇query(w'),
w' = w − lr·∇support(w), with the Hessian-vector product by two backward passes (``gradients.hessian_product``) or by a
forward pass over a backward pass. Clients together are stacked, as an experiment does with small networks.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.func import grad, jvp

from benchmarks import markdown
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage, trees
from fleet_core.base.trees import Params
from fleet_core.learning import gradients, models
from fleet_core.learning.gradient_estimators import Episode, Estimators, entropy
from fleet_core.model.layout import InputSpec
from fleet_core.training.inner_steps import Product

LR, TOGETHER = 0.01, (2, 8)
MODELS = {
    "MLP": ("mlp", InputSpec((1, 28, 28)), 10, 20),
    "1-D CNN": ("cnn1d", InputSpec((3, 128)), 6, 20),
    "LeNet": ("lenet", InputSpec((3, 32, 32)), 10, 50),
    "Conv-4": ("conv4", InputSpec((1, 28, 28)), 10, 20),
    "LeNet (Lim), 16 by 16": ("lenet-lim", InputSpec((3, 16, 16)), 10, 10),
}
Way = Callable[[], Params]


def forward_over_reverse(loss: gradients.Loss) -> Product:
    def product(w: Params, v: Params) -> Params:
        return jvp(grad(loss), (w,), (v,))[1]

    return product


def episode(spec: InputSpec, classes: int, size: int, seed: int) -> Episode:
    draw = torch.Generator().manual_seed(seed)
    x = [torch.randn((size, *spec.shape), generator=draw) for _ in range(2)]
    y = [torch.randint(classes, (size,), generator=draw) for _ in range(2)]
    return Episode(x[0], y[0], x[1], y[1])


def ways_of(name: str) -> tuple[dict[str, Way], dict[str, int], Params]:
    """(way -> gradient of MAML, way -> clients that it computes, the gradient in double precision)."""
    model, spec, classes, size = MODELS[name]
    layout = models.describe(model, spec, [str(k) for k in range(classes)], {})
    network = models.build(layout)
    hyper = METHODS["per-fedavg-exact"].hyper(inner_lr=LR)
    first = trees.apply(torch.from_numpy, models.initial(layout, 0))
    several = [episode(spec, classes, size, seed) for seed in range(max(TOGETHER))]
    alone, beside = Estimators(network, classes, hyper), Estimators(network, classes, hyper, clients=True)
    one = several[0]
    support, query = entropy(network, one.support_x, one.support_y), entropy(network, one.query_x, one.query_y)
    whole = gradients.maml_with_hessian

    def together(count: int) -> Way:
        stacked = Episode.stacked(several[:count])
        at = trees.apply(lambda a: a.expand(count, *a.shape).clone(), first)
        return lambda: trees.apply(lambda a: a[0], beside.of("maml-exact")(stacked)(at)[1])

    ways: dict[str, Way] = {
        "plain": lambda: gradients.direct(query)(first)[1],
        "through the step": lambda: alone.of("maml-exact")(one)(first)[1],
        "two backward passes": lambda: whole(support, query, LR, 1, gradients.hessian_product(support))(first)[1],
        "forward over backward": lambda: whole(support, query, LR, 1, forward_over_reverse(support))(first)[1],
        **{f"{count} clients": together(count) for count in TOGETHER},
    }
    exact = Estimators(models.build(layout).double(), classes, hyper)
    wide = Episode(one.support_x.double(), one.support_y, one.query_x.double(), one.query_y)
    reference = exact.of("maml-exact")(wide)(trees.apply(lambda a: a.double(), first))[1]
    return ways, {f"{count} clients": count for count in TOGETHER}, reference


def measured(name: str, repeat: int) -> dict[str, dict[str, float]]:
    ways, clients, reference = ways_of(name)
    seconds: dict[str, list[float]] = {way: [] for way in ways}
    found = {way: run() for way, run in ways.items()}
    for _ in range(repeat):
        for way, run in ways.items():
            began = time.process_time()
            run()
            seconds[way].append((time.process_time() - began) / clients.get(way, 1))
    plain = statistics.median(seconds["plain"])
    return {
        way: {"ms": 1e3 * statistics.median(taken), "times_plain": statistics.median(taken) / plain}
        | ({} if way == "plain" else {"difference": _difference(found[way], reference)})
        for way, taken in seconds.items()
    }


def _difference(made: Params, reference: Params) -> float:
    gap = trees.apply(lambda a, b: a.double() - b, made, reference)
    return float(_norm(gap) / _norm(reference))


def _norm(tree: Params) -> Tensor:
    return torch.cat([array.flatten() for array in gradients.flat(tree)]).norm()


def row(name: str, one: dict[str, dict[str, float]]) -> list[str]:
    ways = [way for way in one if way != "plain"]
    worst = max(one[way]["difference"] for way in ways)
    return [name, f"{one['plain']['ms']:.1f}", *(f"{one[way]['times_plain']:.2f}" for way in ways), f"{worst:.0e}"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True)
    parser.add_argument("--repeat", type=int, default=15)
    options = parser.parse_args()
    torch.set_num_threads(1)
    result: dict[str, Any] = {name: measured(name, options.repeat) for name in MODELS}
    storage.write_json(options.out, result)
    ways = [way for way in next(iter(result.values())) if way != "plain"]
    rows = (row(name, one) for name, one in result.items())
    print(markdown.table(["model", "plain, ms", *ways, "difference, at most"], rows))


if __name__ == "__main__":
    main()
