"""An engine whose gradients come from the graph ``train`` of a fleet: no torch, one client at a time."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from fleet_core.algorithms.interface import Method
from fleet_core.base import storage, trees
from fleet_core.base.errors import BundleError, RoundError
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.base.trees import Params
from fleet_core.data.episodes import Draw
from fleet_core.model.layout import Layout
from fleet_core.model.train_graph import TrainGraph, digest, episode, golden_inputs
from fleet_core.training import flops, inner_steps
from fleet_core.training.augment import augmented
from fleet_core.training.inner_steps import Gradient
from fleet_core.training.local_round import NumpyParams
from fleet_core.training.round_plans import Plan, Samples
from fleet_core.training.subnormals import flushed

Array = np.ndarray[Any, Any]
Function = Callable[[dict[str, Array]], Mapping[str, Array]]
"""An opened graph: inputs to outputs, by name."""

NEAR_ZERO = 1e-2
"""Share of the largest golden norm below which a gradient counts as zero: one that cancels (that of a bias before
GroupNorm) consists of rounding alone."""


@dataclass(frozen=True)
class Opened:
    """A fleet's graphs, opened. embed: (weights, samples) to z float32 [N, D], for methods that measure class means."""

    graph: TrainGraph
    functions: Mapping[str, Function]
    embed: Callable[[Params, Array], Array] | None = None


def check_golden(opened: Opened) -> None:
    """Raises BundleError unless every graph gives its golden outputs here."""
    graph = opened.graph
    for kind, function in opened.functions.items():
        feed = golden_inputs(graph, kind, graph.info.seed, graph.golden["x"], graph.golden["y"])
        try:
            found = digest(function(feed), graph.outputs(kind))
        except Exception as error:  # onnxruntime raises errors of many classes, none of them documented
            raise BundleError(f"the graph '{kind}' does not run: {str(error)[:300]}") from error
        wanted = graph.golden[kind]
        lengths = wanted[:, :1] + NEAR_ZERO * wanted[:, 0].max()
        if not (np.abs(found - wanted) <= graph.info.rtol * lengths * _spread(graph, kind)).all():
            raise BundleError(
                f"the graph '{kind}' does not give its golden outputs here",
                expected=f"onnxruntime {graph.info.min_onnxruntime} or newer, and the graph as it was published",
                hint="fetch the graph again, then update onnxruntime",
            )


def _spread(graph: TrainGraph, kind: str) -> Array:
    """[outputs, 2]: factors of the tolerance of an output's norm, 1, and of the sum of its n values, √n."""
    shapes = graph.parameters
    sizes = [int(np.prod(shapes.get(name.partition("/")[2], ()))) for name in graph.outputs(kind)]
    return np.stack([np.ones(len(sizes)), np.sqrt(sizes)], 1)


class GraphEngine:
    """Gradients by onnxruntime, arrays of numpy."""

    def __init__(self, opened: Opened) -> None:
        self._opened = opened

    def arrays(self, params: Params) -> Params:
        return trees.apply(lambda a: np.array(a, np.float32, order="C"), params)

    def numpy(self, params: Params) -> NumpyParams:
        return trees.apply(lambda a: np.array(a, np.float32, order="C"), params)

    def stacked(self, several: Sequence[Params]) -> Params:
        raise RoundError("the engine onnx trains one client at a time")

    def holds(self, frozen: Params) -> bool:
        return False

    def first_personal(self, method: Method, layout: Layout, scalars: Mapping[str, float]) -> Params:
        """Raises BundleError if the graph has no initial values."""
        first = trees.only(self._opened.graph.first, method.personal)
        if set(first) != {g for g in method.personal if layout.parameters((g,))}:
            raise BundleError("the graph 'train' has no initial values of the groups that stay on a device",
                              hint="'metafleet init' makes it again")
        return first

    @contextlib.contextmanager
    def running(self, seed: int) -> Iterator[None]:
        with flushed(), np.errstate(all="ignore"):
            yield

    def adapting(self) -> contextlib.AbstractContextManager[None]:
        return self.running(0)

    def entropy(self, x: Samples, y: Samples) -> Gradient:
        """Raises BundleError if the graph has another loss."""
        if self._opened.graph.info.loss != "entropy":
            raise BundleError("the fleet's graph for training is not of the cross-entropy",
                              hint="'metafleet init' makes it again")
        return GraphSteps(self._opened, "none", 0, None, x, y, np.random.default_rng()).entropy(x, y)

    def steps(
        self, adaptation: str, classes: int, hyper: Any, data: Sequence[tuple[Samples, Samples, np.random.Generator]]
    ) -> GraphSteps:
        """Raises BundleError for an adaptation that the graph does not compute."""
        why = self._opened.graph.info.refuses(adaptation, hyper)
        if why:
            raise BundleError(why, hint="'metafleet init' makes it again; a device with torch needs none")
        (one,) = data
        return GraphSteps(self._opened, adaptation, classes, hyper, *one)

    def losses(self, values: Sequence[Any]) -> Samples:
        return np.array([[float(value) for value in values]])

    def flops(self, method: Method, layout: Layout, hyper: Any, plan: Plan, moving: Moving) -> int | None:
        """Of all arrays: the graph computes the gradients of frozen ones too."""
        forward = self._opened.graph.info.forward
        layers = None if forward is None else (flops.Layer(frozenset(), forward),)
        return flops.round_flops(method, layers, layout, hyper, plan, EVERYTHING)


class GraphSteps:
    """The gradients of a round on samples x, y, with labels below ``classes``."""

    def __init__(
        self, opened: Opened, adaptation: str, classes: int, hyper: Any, x: Samples, y: Samples,
        rng: np.random.Generator,
    ) -> None:
        self._opened, self._adaptation, self._hyper = opened, adaptation, hyper
        self._classes, self._x, self._y, self._rng = classes, x, y, rng

    def gradient(self, draws: Sequence[Draw]) -> Gradient:
        (draw,) = draws
        parts = [(augmented(self._hyper.augment, self._x[index], self._rng), self._y[index]) for index in draw]
        hyper = self._hyper
        if self._adaptation in ("proto", "metavers", "joint"):
            return self._episode(episode(*parts[0], *parts[1], self._classes))
        if self._adaptation == "fedproto":
            return self._fedproto(*parts[1])
        query = self.entropy(*parts[1])
        if self._adaptation == "none":
            return query
        support, third = self.entropy(*parts[0]), parts[2] if len(parts) > 2 else parts[0]
        if self._adaptation == "meta-sgd":
            return inner_steps.meta_sgd(support, query, self._product(*third))
        inner = hyper.inner_lr, hyper.inner_steps
        if self._adaptation == "maml-first-order":
            return inner_steps.first_order(support, query, *inner)
        if self._adaptation == "maml-exact":
            return inner_steps.with_hessian(support, query, *inner, self._product(*third))
        product = inner_steps.central_difference(self.entropy(*third), hyper.difference)
        return inner_steps.with_hessian(support, query, *inner, product)

    def measure(self) -> Gradient:
        def gradient(at: Params) -> tuple[Any, Params]:
            model = {g: named for g, named in at.items() if g != "prototypes"}
            embed = self._opened.embed
            if embed is None:
                raise BundleError("class means need the fleet's graph 'embed'")
            z = embed(model, self._x)
            member = (self._y[:, None] == np.arange(self._classes)).astype(np.float32)
            return 0.0, {**model, "prototypes": {"count": member.sum(0), "total": member.T @ z}}

        return gradient

    def entropy(self, x: Array, y: Array) -> Gradient:
        def gradient(at: Params) -> tuple[Any, Params]:
            found = self._mean("train", self._given(at), x, y)
            return found["loss"], _gradients(found, at)

        return gradient

    def _episode(self, batch: dict[str, Array]) -> Gradient:
        def gradient(at: Params) -> tuple[Any, Params]:
            w, given = {g: named for g, named in at.items() if g != "margin"}, at.get("margin")
            if given is None:
                return self._run(w, batch)[:2]
            margin, share = (np.array(given[name], np.float32) for name in ("value", "loss_share"))
            value, slope, found = self._run(w, {**batch, "margin": margin, "share": share})
            return value, {**slope, "margin": {"value": float(found["own"]), "loss_share": float(share)}}

        return gradient

    def _fedproto(self, x: Array, y: Array) -> Gradient:
        def gradient(at: Params) -> tuple[Any, Params]:
            w, fleet = {g: named for g, named in at.items() if g != "prototypes"}, at["prototypes"]
            value, slope, _ = self._run(w, {"x": x, "y": y, **fleet})
            return value, {**slope, "prototypes": fleet}

        return gradient

    def _product(self, x: Array, y: Array) -> inner_steps.Product:
        def product(w: Params, v: Params) -> Params:
            along = {f"along/{key}": array for key, array in storage.flatten(v).items()}
            found = self._mean("product", {**self._given(w), **along}, x, y)
            return {g: {n: found[f"product/{g}/{n}"] for n in named} for g, named in w.items()}

        return product

    def _run(self, w: Params, batch: Mapping[str, Array]) -> tuple[Any, Params, Mapping[str, Array]]:
        """(loss, gradient, all outputs)."""
        found = self._opened.functions["train"]({**self._given(w), **batch})
        return found["loss"], _gradients(found, w), found

    def _mean(self, kind: str, given: dict[str, Array], x: Array, y: Array) -> Mapping[str, Array]:
        """The outputs, each a mean over the samples, computed in passes of at most ``pass_of`` samples."""
        function, total = self._opened.functions[kind], dict[str, Array]()
        for xs, ys in zip(*(np.array_split(a, self._passes(len(y))) for a in (x, y)), strict=True):
            for name, array in function({**given, "x": xs, "y": ys}).items():
                if len(ys) < len(y):
                    array *= np.float32(len(ys) / len(y))
                total[name] = np.add(total[name], array, out=total[name]) if name in total else array
        return total

    def _passes(self, samples: int) -> int:
        most = self._opened.graph.info.pass_of
        return max(1, -(-samples // most)) if most else 1

    def _given(self, w: Params) -> dict[str, Array]:
        """The parameters that the graphs take. Raises BundleError without one of them."""
        flat, wanted = storage.flatten(w), self._opened.graph.parameters
        missing = [key for key in wanted if key not in flat]
        if missing:
            raise BundleError(f"the round gives no {', '.join(missing[:5])}, which the graph 'train' takes")
        return {key: np.asarray(flat[key], np.float32, order="C") for key in wanted}


def _gradients(found: Mapping[str, Array], w: Params) -> Params:
    """Of the arrays of ``w``; zeros for those that the loss does not use."""
    return {
        g: {n: found.get(f"gradient/{g}/{n}", np.zeros_like(a)) for n, a in named.items()} for g, named in w.items()
    }
