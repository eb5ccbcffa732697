"""Builds the ONNX loops around a traced gradient: over the steps, and within a step over passes of a few samples.

The activations that a pass keeps for its backward pass do not grow with the support set, and stay in the processor's
cache. Gradients are summed over the samples, and multiplied by the rate divided by their number. If only the head is
adapted, the body embeds the samples once, before the steps.

An ONNX subgraph sees the names around it, so every value in the file has a unique name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from fleet_core.model.layout import Layout

PASS = "constant/pass"
"""The initializer with the number of samples per pass of the steps; the gate reads it in graphs of any version."""

_TYPES = {"float32": TensorProto.FLOAT, "uint8": TensorProto.UINT8, "int64": TensorProto.INT64}


class Loops:
    """Builds the graph ``adapt``. adapted: keys of the parameters whose gradient is computed. at_once: samples per pass
    of the steps, ``pass``, and of the body, ``embedding``, if it embeds before the steps."""

    def __init__(self, layout: Layout, adapted: list[str], *, rates: bool, at_once: Mapping[str, int]) -> None:
        self._layout, self._adapted, self._rates, self._at_once = layout, adapted, rates, at_once
        self._shapes = {f"{t.group}/{t.name}": t.shape for t in layout.tensors}

    def graph(self, gradient: onnx.GraphProto, embed: onnx.GraphProto | None) -> onnx.GraphProto:
        """The whole graph. embed: the body's graph, if only the head is adapted."""
        step = self._step(gradient, "support_x" if embed is None else "support/z")
        truths = [] if self._layout.task is None else [len(self._layout.answers)]
        nodes = [
            _node("Shape", ["support_y"], "support/sizes", **({"end": 1} if truths else {})),
            _node("Squeeze", ["support/sizes"], "support/size"),
            _node("Cast", ["support/size"], "support/number", to=TensorProto.FLOAT),
            *_passes("pass"),
            *([] if embed is None else _embedded(embed)),
            *self._rate_nodes(),
            *(_node("ConstantOfShape", [f"shape/{key}"], f"zero/{key}") for key in self._adapted),
            helper.make_node("Loop", ["steps", "", *self._adapted], self._named("adapted"), body=step),
        ]
        spec = self._layout.input
        inputs = [
            _info("support_x", _TYPES[spec.dtype], ["support", *spec.shape]),
            _info("support_y", TensorProto.FLOAT if truths else TensorProto.INT64, ["support", *truths]),
            _info("steps", TensorProto.INT64, []),
            *([] if self._rates else [_info("lr", TensorProto.FLOAT, [])]),
        ]
        constants = self._constants() if embed is None else [*self._constants(), *_inside(embed)]
        return helper.make_graph(nodes, "adapt", inputs, self._infos("adapted"), [*constants, *self._external()])

    def _rate_nodes(self) -> list[onnx.NodeProto]:
        """Divides the rates by the number of samples, because gradients are summed over them."""
        if not self._rates:
            return [_node("Div", ["lr", "support/number"], "rate")]
        return [_node("Div", [_rate_of(key), "support/number"], f"rate/{key}") for key in self._adapted]

    def _step(self, gradient: onnx.GraphProto, source: str) -> onnx.GraphProto:
        """The loop body now -> next: now − rate · Σ gradient."""
        one_pass = self._pass(gradient, source)
        zeros = [f"zero/{key}" for key in self._adapted]
        nodes = [helper.make_node("Loop", ["pass/passes", "", *zeros], self._named("total"), body=one_pass)]
        for key in self._adapted:
            rate = f"rate/{key}" if self._rates else "rate"
            nodes.append(_node("Mul", [rate, f"total/{key}"], f"change/{key}"))
            nodes.append(_node("Sub", [f"now/{key}", f"change/{key}"], f"next/{key}"))
        return _body("step", nodes, self._infos("now"), self._infos("next"))

    def _pass(self, gradient: onnx.GraphProto, source: str) -> onnx.GraphProto:
        """The loop body sum -> added: adds the gradient of a pass's samples."""
        nodes = [*_turn("pass", {"pass/x": source, "pass/y": "support_y"}), *gradient.node]
        nodes += [_node("Add", [f"sum/{key}", f"gradient/{key}"], f"added/{key}") for key in self._adapted]
        return _body("pass", nodes, self._infos("sum"), self._infos("added"), list(gradient.initializer))

    def _constants(self) -> list[TensorProto]:
        whole: dict[str, int | list[int]] = {"constant/first": [0]}
        for loop, number in self._at_once.items():
            whole |= {f"constant/{loop}": number, f"{loop}/rest": number - 1, f"{loop}/width": [number]}
        arrays = {name: np.array(value, np.int64) for name, value in whole.items()}
        arrays |= {f"shape/{key}": np.array(self._shapes[key], np.int64) for key in self._adapted}
        return [numpy_helper.from_array(array, name) for name, array in arrays.items()]

    def _external(self) -> list[TensorProto]:
        """External initializers of every parameter, and of the learned rate of each adapted one."""
        rates = {_rate_of(key): self._shapes[key] for key in self._adapted} if self._rates else {}
        return [_external(name, shape) for name, shape in {**self._shapes, **rates}.items()]

    def _named(self, what: str) -> list[str]:
        return [f"{what}/{key}" for key in self._adapted]

    def _infos(self, what: str) -> list[onnx.ValueInfoProto]:
        return [_info(f"{what}/{key}", TensorProto.FLOAT, self._shapes[key]) for key in self._adapted]


def _embedded(embed: onnx.GraphProto) -> list[onnx.NodeProto]:
    """The nodes support_x -> support/z, in passes."""
    names = ("embedding/before", "embedding/after")
    before, after = (helper.make_tensor_sequence_value_info(name, TensorProto.FLOAT, None) for name in names)
    insert = _node("SequenceInsert", [before.name, embed.output[0].name], after.name)
    nodes = [*_turn("embedding", {embed.input[0].name: "support_x"}), *embed.node, insert]
    loop = _body("embedding", nodes, [before], [after])
    return [
        *_passes("embedding"),
        _node("SequenceEmpty", [], "embedding/none", dtype=TensorProto.FLOAT),
        helper.make_node("Loop", ["embedding/passes", "", "embedding/none"], ["embedding/all"], body=loop),
        _node("ConcatFromSequence", ["embedding/all"], "support/z", axis=0),
    ]


def _passes(loop: str) -> list[onnx.NodeProto]:
    """The number of a loop's passes over the support set."""
    return [
        _node("Add", ["support/size", f"{loop}/rest"], f"{loop}/rounded"),
        _node("Div", [f"{loop}/rounded", f"constant/{loop}"], f"{loop}/passes"),
    ]


def _turn(loop: str, parts: dict[str, str]) -> list[onnx.NodeProto]:
    """Slices the samples of a loop's turn. parts: {name of the slice: what it is cut from}."""
    bounds = [f"{loop}/start", f"{loop}/end", "constant/first"]
    return [
        _node("Mul", [f"{loop}/turn", f"{loop}/width"], f"{loop}/start"),
        _node("Add", [f"{loop}/start", f"{loop}/width"], f"{loop}/end"),
        *(_node("Slice", [source, *bounds], name) for name, source in parts.items()),
    ]


def _body(
    loop: str, nodes: list[onnx.NodeProto], carried: list[onnx.ValueInfoProto], out: list[onnx.ValueInfoProto],
    inside: list[TensorProto] | None = None,
) -> onnx.GraphProto:  # fmt: skip
    """The body of a Loop without an early exit."""
    turn, go, on = _info(f"{loop}/turn", TensorProto.INT64, []), _bool(f"{loop}/go"), _bool(f"{loop}/on")
    nodes = [*nodes, _node("Identity", [go.name], on.name)]
    return helper.make_graph(nodes, loop, [turn, go, *carried], [on, *out], inside or [])


def _inside(graph: onnx.GraphProto) -> list[TensorProto]:
    """A graph's initializers that are not external."""
    return [t for t in graph.initializer if t.data_location != TensorProto.EXTERNAL]


def _external(name: str, shape: Sequence[int]) -> TensorProto:
    tensor = TensorProto(name=name, dims=shape, data_type=TensorProto.FLOAT, data_location=TensorProto.EXTERNAL)
    length = 4 * int(np.prod(shape, dtype=np.int64))
    for key, value in {"location": "weights", "offset": "0", "length": str(length)}.items():
        tensor.external_data.add(key=key, value=value)
    return tensor


def _rate_of(key: str) -> str:
    return "rates/" + key.replace("/", ".", 1)


def _node(kind: str, inputs: list[str], output: str, **attributes: Any) -> onnx.NodeProto:
    return helper.make_node(kind, inputs, [output], **attributes)


def _info(name: str, kind: int, shape: Sequence[int | str]) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, shape)


def _bool(name: str) -> onnx.ValueInfoProto:
    return _info(name, TensorProto.BOOL, [])
