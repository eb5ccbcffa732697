"""ONNX graphs, the checks that a graph must pass, and the bundle's bytes."""

from __future__ import annotations

import inspect
import sys
import types
from dataclasses import replace
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

from export import gate
from export.graph import export_graph, samples
from fleet_core.base import storage, trees
from fleet_core.base.errors import BundleError, CodecError
from fleet_core.learning import models
from fleet_core.model import graph_bundle
from fleet_core.model.layout import InputSpec, Layout
from tests.support.bundles import newer, one_batch_size
from tests.support.paths import ROOT

BOTH = ("embed", "predict")


@pytest.fixture(scope="module")
def layout() -> Layout:
    spec = InputSpec((3, 128), scale=2.0, mean=(0.1, 0.2, 0.3), std=(1.0, 2.0, 0.5))
    return models.describe("cnn1d", spec, ("N", "S", "V"), {})


@pytest.fixture(scope="module")
def graph(layout: Layout) -> graph_bundle.Graph:
    return export_graph(layout, kinds=BOTH, seed=3)


@pytest.fixture(scope="module")
def network(layout: Layout) -> models.Network:
    return models.build(layout).eval()


def initializers(data: bytes) -> dict[str, int]:
    return {t.name: t.data_location for t in onnx.load_model_from_string(data).graph.initializer}


@pytest.mark.slow
def test_every_parameter_is_external_under_its_group_and_name(layout: Layout, graph: graph_bundle.Graph) -> None:
    for kind in BOTH:
        external = {n for n, place in initializers(graph.graphs[kind]).items() if place == TensorProto.EXTERNAL}
        groups = graph_bundle.GRAPH_GROUPS[kind]
        assert external == {f"{t.group}/{t.name}" for t in layout.tensors if t.group in groups}
    assert "body/norms.0.weight" in initializers(graph.graphs["embed"])
    assert not any(name.startswith("head/") for name in initializers(graph.graphs["embed"]))


def test_a_graph_gives_torchs_numbers_for_any_weights_and_batch(
    graph: graph_bundle.Graph, network: models.Network
) -> None:
    for kind in BOTH:
        for seed, batch in ((50, 1), (51, 2), (52, 33)):
            weights = trees.only(graph.layout.seeded(seed), graph_bundle.GRAPH_GROUPS[kind])
            x = samples(graph.layout.input, batch, seed)
            wanted = models.outputs(network, models.to_torch(weights), torch.tensor(x), kind).detach().numpy()
            assert np.ptp(wanted) > 0.1
            np.testing.assert_allclose(gate.run(graph.graphs[kind], weights, x), wanted, atol=1e-5)


def test_a_graph_says_nothing_about_the_machine_that_made_it(graph: graph_bundle.Graph) -> None:
    for data in graph.graphs.values():
        assert str(ROOT).encode() not in data
        assert b"stack_trace" not in data
        assert len(data) < 50_000


@pytest.mark.slow
def test_exporting_again_gives_the_same_bytes_and_reads_the_source_of_no_operator_again(
    monkeypatch: pytest.MonkeyPatch
) -> None:
    layout = models.describe("mlp", InputSpec((2, 3), "uint8", 1 / 255, (0.4, 0.6), (0.2, 0.3)), ("a", "b"), {})
    first = graph_bundle.pack(export_graph(layout))
    read, getsource = list[str](), inspect.getsource

    def noted(what: Any) -> str:
        read.append(str(getattr(what, "__module__", "")))
        return getsource(what)

    monkeypatch.setattr(inspect, "getsource", noted)
    assert graph_bundle.pack(export_graph(layout)) == first
    assert [name for name in read if name.startswith("onnxscript.")] == []


def test_the_golden_outputs_belong_to_the_seeded_weights(graph: graph_bundle.Graph, network: models.Network) -> None:
    weights = models.to_torch(graph.layout.seeded(3))
    for kind in BOTH:
        wanted = models.outputs(network, weights, torch.tensor(graph.golden["x"]), kind).detach().numpy()
        np.testing.assert_array_equal(graph.golden[kind], wanted)


def edited(graph: graph_bundle.Graph, edit: Any) -> graph_bundle.Graph:
    """The bundle with its embed graph changed by ``edit``."""
    model = onnx.load_model_from_string(graph.graphs["embed"])
    edit(model)
    return replace(graph, graphs={"embed": model.SerializeToString()})


def fold(name: str) -> Any:
    """Fold a parameter's value into the file, as the exporter's optimizer would."""

    def edit(model: onnx.ModelProto) -> None:
        (tensor,) = (t for t in model.graph.initializer if t.name == name)
        values = np.ones(tuple(tensor.dims), np.float32)
        tensor.CopyFrom(numpy_helper.from_array(values, name))

    return edit


def another_activation(model: onnx.ModelProto) -> None:
    [n for n in model.graph.node if n.op_type == "Relu"][-1].op_type = "Softplus"


def exchanged(model: onnx.ModelProto) -> None:
    """Exchange two parameters of equal shape."""
    names = {"body/norms.1.weight": "body/norms.1.bias", "body/norms.1.bias": "body/norms.1.weight"}
    for node in model.graph.node:
        node.input[:] = [names.get(name, name) for name in node.input]


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (fold("body/norms.0.weight"), "does not take body/norms.0.weight"),
        (another_activation, "differs from torch"),
        (exchanged, "differs from torch"),
        (one_batch_size, "does not run on 1 samples"),
        (newer, "IR and opset"),
    ],
)
def test_the_gate_refuses_a_graph_that_would_give_wrong_numbers(
    graph: graph_bundle.Graph, network: models.Network, edit: Any, complaint: str
) -> None:
    gate.check(edited(graph, lambda model: None), network)
    with pytest.raises(BundleError, match=complaint):
        gate.check(edited(graph, edit), network)


class Odd(nn.Module):
    """A user's model that cannot become a graph."""

    def __init__(self, fault: str) -> None:
        super().__init__()
        self.layer, self.fault = nn.Linear(4, 3), fault
        self.spare = nn.Linear(2, 2) if fault == "unused" else nn.Identity()

    def embed(self, x: Tensor) -> Tensor:
        if self.fault == "branch" and x.sum() > 0:
            x = -x
        z: Tensor = self.layer(x)
        return z


@pytest.mark.slow
@pytest.mark.parametrize(
    ("fault", "complaint"), [("branch", "cannot be exported .*data-dependent"), ("unused", "spare")]
)
def test_a_model_that_cannot_become_a_graph_is_refused(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], fault: str, complaint: str
) -> None:
    module = types.ModuleType("bring_odd")
    module.__dict__["build"] = lambda shape, classes: Odd(fault)
    monkeypatch.setitem(sys.modules, "bring_odd", module)
    layout = models.describe("bring_odd:build", InputSpec((4,)), ("a", "b"), {})
    with pytest.raises(BundleError, match=complaint):
        export_graph(layout)
    assert capfd.readouterr() == ("", "")


# The container


def test_a_bundle_survives_its_bytes(graph: graph_bundle.Graph) -> None:
    again = graph_bundle.unpack(graph_bundle.pack(graph))
    assert (again.layout, again.graphs, again.info) == (graph.layout, graph.graphs, graph.info)
    assert again.layout.hash == graph.layout.hash
    for name, array in graph.golden.items():
        np.testing.assert_array_equal(again.golden[name], array)


def repacked(graph: graph_bundle.Graph, metadata: dict[str, str] | None = None, **arrays: Any) -> bytes:
    """The bundle's bytes with other arrays (None removes one) or metadata; two underscores stand for a slash."""
    parts, head = storage.unpack(graph_bundle.pack(graph))
    parts |= {name.replace("__", "/"): array for name, array in arrays.items()}
    return storage.pack({n: a for n, a in parts.items() if a is not None}, head if metadata is None else metadata)


def malformations(graph: graph_bundle.Graph) -> dict[str, bytes]:
    whole = graph_bundle.pack(graph)
    head = storage.unpack(whole)[1]["bundle"]
    golden = graph.golden
    return {
        "empty": b"",
        "cut": whole[: len(whole) // 2],
        "no metadata": repacked(graph, {}),
        "metadata no JSON": repacked(graph, {"bundle": "{"}),
        "metadata deep": repacked(graph, {"bundle": "[" * 100_000}),
        "metadata a list": repacked(graph, {"bundle": "[]"}),
        "another format": repacked(graph, {"bundle": head.replace('"format":1', '"format":2')}),
        "layout malformed": repacked(graph, {"bundle": head.replace('"embedding":64', '"embedding":"wide"')}),
        "golden of another width": repacked(graph, {"bundle": head.replace('"embedding":64', '"embedding":65')}),
        "an array too many": repacked(graph, extra=np.zeros(1, np.float32)),
        "a graph too few": repacked(graph, graph__embed=None),
        "no golden input": repacked(graph, golden__x=None),
        "no golden output": repacked(graph, golden__predict=None),
        "no graph": repacked(graph, graph__embed=None, graph__predict=None),
        "empty graph": repacked(graph, graph__embed=np.zeros(0, np.uint8)),
        "graph of floats": repacked(graph, graph__embed=np.zeros(4, np.float32)),
        "golden not finite": repacked(graph, golden__embed=golden["embed"] * np.nan),
        "golden in float64": repacked(graph, golden__embed=golden["embed"].astype(np.float64)),
        "golden input of another shape": repacked(graph, golden__x=golden["x"][:, :2]),
        "golden without samples": repacked(graph, None, **{f"golden__{n}": a[:0] for n, a in golden.items()}),
    }


def test_every_malformed_bundle_is_refused(graph: graph_bundle.Graph) -> None:
    accepted = []
    for name, data in malformations(graph).items():
        try:
            graph_bundle.unpack(data)
        except BundleError:
            continue
        accepted.append(name)
    assert accepted == []


def test_a_bundle_over_the_limit_is_not_read(graph: graph_bundle.Graph, monkeypatch: pytest.MonkeyPatch) -> None:
    data = graph_bundle.pack(graph)
    monkeypatch.setattr(graph_bundle, "MAX_BYTES", len(data) - 1)
    with pytest.raises(BundleError, match="over the limit"):
        graph_bundle.unpack(data)


def test_weights_survive_their_bytes(layout: Layout) -> None:
    for groups in (("body",), ("body", "head")):
        weights = trees.only(layout.seeded(1), groups)
        again = graph_bundle.weights_from_bytes(graph_bundle.weights_bytes(weights), layout, groups)
        assert [list(named) for named in again.values()] == [list(named) for named in weights.values()]
        for group, named in weights.items():
            for name, array in named.items():
                np.testing.assert_array_equal(again[group][name], array)


def test_weights_of_another_layout_are_refused(layout: Layout) -> None:
    weights = layout.seeded(1)
    wrong = {
        "no safetensors": b"12345678",
        "no group": storage.pack({"weight": np.zeros(3, np.float32)}),
        "a group too few": graph_bundle.weights_bytes(trees.only(weights, ("body",))),
        "float64": graph_bundle.weights_bytes(trees.apply(lambda a: a.astype(np.float64), weights)),
        "not finite": graph_bundle.weights_bytes(trees.apply(lambda a: a * np.nan, weights)),
        "another shape": graph_bundle.weights_bytes(trees.apply(lambda a: a[..., :1], weights)),
    }
    for data in wrong.values():
        with pytest.raises(CodecError):
            graph_bundle.weights_from_bytes(data, layout, ("body", "head"))
