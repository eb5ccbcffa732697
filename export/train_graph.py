"""Exports the gradient of a method's estimator as the graph ``train``, and checks it against torch.

One graph per loss (``fleet_core.model.train_graph``), traced by ``export.trace`` with symbolic numbers of samples and
of classes. MAML, Meta-SGD and Moreau steps are composed on the device of the head's gradient and, where a method is
exact, of the graph ``product``, the Hessian times a direction: the gradient, differentiated once more along it.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import onnxruntime
import torch
from onnx import helper
from torch import Tensor, nn

from export.graph import GOLDEN_SAMPLES, IR_VERSION, MIN_ONNXRUNTIME, OPSET, TRACED_SAMPLES, samples
from export.second_derivatives import Twice
from export.trace import bytes_per_sample, exported
from fleet_core.algorithms.interface import Method
from fleet_core.base import schema, storage, trees
from fleet_core.base.errors import BundleError
from fleet_core.base.trees import Params
from fleet_core.learning import gradients
from fleet_core.learning.gradient_estimators import Estimators, entropy
from fleet_core.learning.layer_flops import flops_per_sample
from fleet_core.learning.models import Network, build
from fleet_core.model.graph_bundle import golden_truths
from fleet_core.model.layout import Layout
from fleet_core.model.train_graph import FORMAT, NEEDS, TrainGraph, TrainInfo, digest, golden_inputs
from fleet_core.training.graph_engine import Function, Opened, check_golden
from fleet_core.training.local_round import check_task

MAX_FIRST_BYTES = 16 << 20
RTOL = 1e-3
MAX_RELATIVE = 2e-5
"""Tolerated error of an output against torch's, relative to the largest value of its kind."""

TIMES = 4

SIZES = ((1, 1), (3, 2), (8, 5))
"""(samples, classes) that the graph is checked with, beside those it was traced with."""

PASS_BYTES, FEWEST_IN_PASS = 8 << 20, 8
"""Bytes that the operations of a pass may output, and its fewest samples: smaller passes save little and take
longer."""

APART = 1e-9
"""Tolerated rounding error, relative to the largest value in double precision."""

MAX_UNROLLED = 20
"""Steps of a recurrent layer in a graph, where each has nodes of its own."""

HINT = "devices of this fleet need torch to train"


def export_train(layout: Layout, method: Method, hyper: Any, initial: Params, seed: int = 0) -> TrainGraph:
    """The checked graph for ``method``. initial: the model's first weights; the graph gets the personal groups. Raises
    BundleError, which says by name what cannot become a graph, and ConfigError for a method that the layout's task
    refuses."""
    check_task(method, layout)
    if method.adaptation not in NEEDS:
        raise BundleError(f"the estimator {method.adaptation} of {method.name} cannot become a graph", hint=HINT)
    if 4 * layout.parameters(method.personal) > MAX_FIRST_BYTES:
        raise BundleError(f"the personal groups of {method.name} are over {MAX_FIRST_BYTES >> 20} MiB", hint=HINT)
    loss, product, constants = NEEDS[method.adaptation]
    network = build(layout)
    _check_recurrent(layout, network, product)
    info = TrainInfo(
        FORMAT, layout.hash, seed, loss, {name: schema.plain(getattr(hyper, name)) for name in constants}, product,
        flops_per_sample(network, layout), RTOL, IR_VERSION, OPSET, MIN_ONNXRUNTIME,
    )
    network.train()
    x, y = samples(layout.input, GOLDEN_SAMPLES, seed), golden_truths(layout, GOLDEN_SAMPLES)
    graph = TrainGraph(layout, info, {}, {}, trees.only(initial, method.personal))
    reference = Reference(graph, network, hyper)
    made = {kind: _onnx_file(graph, kind, reference, seed) for kind in ("train", *(["product"] if product else []))}
    graphs = {kind: data for kind, (data, _) in made.items()}
    if loss == "entropy" and _apart(reference, golden_inputs(graph, "train", seed, x, y)):
        largest = max(sample_bytes for _, sample_bytes in made.values())
        info = replace(info, pass_of=max(FEWEST_IN_PASS, PASS_BYTES // largest))
    golden = {kind: digest(reference.run(kind, golden_inputs(graph, kind, seed, x, y)), graph.outputs(kind))
              for kind in graphs}
    graph = TrainGraph(layout, info, graphs, {"x": x, "y": y, **golden}, graph.first)
    check(graph, reference)
    return graph


def _check_recurrent(layout: Layout, network: Network, product: bool) -> None:
    layer = next((type(m).__name__ for m in network.modules() if isinstance(m, nn.RNNBase)), None)
    steps = layout.input.shape[-1]
    if layer is not None and (product or steps > MAX_UNROLLED):
        why = "whose second derivative is no graph" if product else f"over {steps} steps"
        raise BundleError(f"the model '{layout.model}' has recurrent layers ({layer}), {why}",
                          expected=f"at most {MAX_UNROLLED} steps, and a method of first derivatives", hint=HINT)


class Reference:
    """The outputs of a graph by torch, for tensors of any size."""

    def __init__(self, graph: TrainGraph, network: Network, hyper: Any) -> None:
        self._graph, self._network, self._hyper = graph, network, hyper
        self._keys = list(graph.parameters)

    def function(self, kind: str, names: Sequence[str]) -> Callable[..., Sequence[Tensor]]:
        """Tensors of the inputs ``names``, which require gradients where they are parameters, to the outputs."""

        def outputs(*tensors: Tensor) -> Sequence[Tensor]:
            given = dict(zip(names, tensors, strict=True))
            w = {key: given[key] for key in self._keys}
            return self._product(w, given) if kind == "product" else self._train(w, given)

        return outputs

    def _train(self, w: dict[str, Tensor], given: dict[str, Tensor]) -> list[Tensor]:
        value, *own = self._loss(storage.unflatten(w), given)
        slope = torch.autograd.grad(value, list(w.values()), allow_unused=True, materialize_grads=True)
        return [value, *own, *slope]

    def _loss(self, w: Params, given: dict[str, Tensor]) -> list[Tensor]:
        if "x" in given:
            estimators = Estimators(self._network, len(self._graph.layout.classes), self._hyper)
        else:
            estimators = Estimators(self._network, given["classes"].shape[0], self._hyper)
        batch = ("x", "y") if "x" in given else ("support_x", "support_y", "query_x", "query_y")
        tensors = [given[name] for name in batch]
        match self._graph.info.loss:
            case "entropy":
                return [entropy(self._network, *tensors)(w)]
            case "proto":
                return [estimators.proto_loss(w, *tensors)]
            case "joint":
                return [estimators.joint_loss(w, *tensors)]
            case "metavers":
                return list(estimators.vers_loss(w, given["margin"], given["share"], *tensors))
            case _:
                return [estimators.fedproto_loss(w, given["total"], given["count"], *tensors)]

    def _product(self, w: dict[str, Tensor], given: dict[str, Tensor]) -> list[Tensor]:
        with Twice():
            value = entropy(self._network, given["x"], given["y"])(storage.unflatten(w))
            slope = torch.autograd.grad(
                value, list(w.values()), create_graph=True, allow_unused=True, materialize_grads=True)
            along = [given[f"along/{key}"] for key in self._keys]
            total = torch.stack([(g * d).sum() for g, d in zip(slope, along, strict=True)]).sum()
            return list(torch.autograd.grad(total, list(w.values()), allow_unused=True, materialize_grads=True))

    def exact(self, kind: str, feed: dict[str, Any]) -> dict[str, Any]:
        """The outputs in double precision."""
        wide = {name: a.astype(np.float64) if a.dtype == np.float32 else a for name, a in feed.items()}
        return Reference(self._graph, copy.deepcopy(self._network).double(), self._hyper).run(kind, wide)

    def run(self, kind: str, feed: dict[str, Any]) -> dict[str, Any]:
        """The outputs for numpy inputs. ``product`` is computed by torch's own second derivatives."""
        given = {name: torch.tensor(array) for name, array in feed.items()}
        if kind == "product":
            w, along = (storage.unflatten({k: given[p + k] for k in self._keys}) for p in ("", "along/"))
            found = gradients.hessian_product(entropy(self._network, given["x"], given["y"]))(w, along)
            return {f"product/{key}": array.detach().numpy() for key, array in storage.flatten(found).items()}
        leaf = {key: given[key].requires_grad_() for key in self._keys}
        outputs = self.function(kind, list(given))(*{**given, **leaf}.values())
        return {n: a.detach().numpy() for n, a in zip(self._graph.outputs(kind), outputs, strict=True)}


def _apart(reference: Reference, feed: dict[str, Any]) -> bool:
    """Whether the gradient of a batch is the mean of its samples': not if a layer mixes them, as BatchNorm does."""
    whole, number = reference.exact("train", feed), len(feed["y"])
    single = [reference.exact("train", {**feed, "x": feed["x"][k : k + 1], "y": feed["y"][k : k + 1]})
              for k in range(number)]
    largest = max(float(np.abs(array).max(initial=0)) for array in whole.values())
    return all(
        np.abs(sum(one[name] for one in single) / number - array).max(initial=0) <= APART * largest
        for name, array in whole.items()
    )


def _onnx_file(graph: TrainGraph, kind: str, reference: Reference, seed: int) -> tuple[bytes, int]:
    """(the graph, the bytes that its operations output per sample)"""
    layout, info = graph.layout, graph.info
    x, y = samples(layout.input, TRACED_SAMPLES, seed + 1), golden_truths(layout, TRACED_SAMPLES)
    feed = golden_inputs(graph, kind, seed + 1, x, y)
    if "classes" in feed:  # sizes that differ, so that none is taken for another
        feed |= {"query_x": np.concatenate([x, x[:2]]), "query_y": np.concatenate([y, y[:2]]),
                 "classes": np.zeros(len(layout.classes) + 4, np.int64)}
    inputs = {name: torch.tensor(array) for name, array in feed.items()}
    for key in graph.parameters:
        inputs[key].requires_grad_()
    batches = [("x", "y"), ("support_x", "support_y"), ("query_x", "query_y"), ("classes",)]
    proto, traced = exported(
        reference.function(kind, list(inputs)), inputs, graph.outputs(kind), [b for b in batches if b[0] in inputs],
        f"{'the second derivative' if kind == 'product' else 'the gradient'} of the model '{layout.model}'", HINT,
    )
    model = helper.make_model(proto, ir_version=info.ir_version, opset_imports=[helper.make_opsetid("", info.opset)])
    return bytes(model.SerializeToString(deterministic=True)), bytes_per_sample(traced)


# The gate -------------------------------------------------------------------------------------------------------------


def check(graph: TrainGraph, reference: Reference) -> None:
    """Raises BundleError unless every graph gives torch's outputs, with other weights, numbers of samples and numbers
    of classes than it was traced with, and its golden outputs. Its error is at most ``MAX_RELATIVE``, or ``TIMES`` that
    of torch, both against double precision: where a value and ReLU's 0 are within rounding of each other, torch errs
    too.
    """
    functions = {kind: _opened(data) for kind, data in graph.graphs.items()}
    for kind, function in functions.items():
        for round_, (number, classes) in enumerate(SIZES):
            seed = graph.info.seed + 300 + round_
            x = samples(graph.layout.input, number, seed)
            y = golden_truths(graph.layout, number)
            if graph.layout.task is None:
                y %= classes
            _check_numbers(graph, kind, function, reference, golden_inputs(graph, kind, seed, x, y))
    check_golden(Opened(graph, functions))


def _check_numbers(
    graph: TrainGraph, kind: str, function: Function, reference: Reference, feed: dict[str, Any]
) -> None:
    wanted, torchs = reference.exact(kind, feed), reference.run(kind, feed)
    try:
        found = function(feed)
    except Exception as error:  # onnxruntime raises errors of many classes, none of them documented
        raise BundleError(f"the graph '{kind}' does not run: {str(error)[:300]}") from error
    arrays = [name for name in graph.outputs(kind) if "/" in name]
    largest = max((float(np.abs(wanted[name]).max(initial=0)) for name in arrays), default=0.0)
    for name in graph.outputs(kind):
        scale = max(float(np.abs(wanted[name]).max(initial=0)), 1e-2 * largest if name in arrays else 1.0, 1e-30)
        same = name in found and found[name].shape == wanted[name].shape
        difference = float(np.abs(found[name] - wanted[name]).max(initial=0)) / scale if same else float("inf")
        allowed = max(MAX_RELATIVE, TIMES * float(np.abs(torchs[name] - wanted[name]).max(initial=0)) / scale)
        if not difference <= allowed:
            raise BundleError(f"the graph '{kind}' differs from torch by {difference:.1e} in {name}",
                              expected=f"at most {allowed:.0e}", hint=HINT)


def _opened(data: bytes) -> Function:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads, options.log_severity_level = 1, 4
    try:
        session = onnxruntime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
    except Exception as error:  # of many undocumented classes
        raise BundleError(f"the graph for training cannot be opened: {str(error)[:300]}", hint=HINT) from error
    names = [output.name for output in session.get_outputs()]
    return lambda feed: dict(zip(names, session.run(None, feed), strict=True))
