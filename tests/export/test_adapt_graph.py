"""The graph ``adapt``: its steps equal torch's, the check refuses wrong steps, and a device needs no torch for it."""

from __future__ import annotations

import json
import subprocess
import sys
import types
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, numpy_helper
from torch import Tensor, nn

from export import adapt_graph, gate, lowering
from export.adapt_graph import export_adapt, with_adapt
from export.graph import export_graph, samples
from export.loops import PASS
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage, trees
from fleet_core.base.errors import BundleError
from fleet_core.learning import models, personal_model
from fleet_core.learning.local_training import first_personal
from fleet_core.model import graph_bundle
from fleet_core.model.layout import MODEL_GROUPS, InputSpec, Layout
from fleet_core.tasks.regression import Regression
from fleet_core.training.round_plans import CHUNK
from tests.support.bundles import newer, node_of, one_batch_size
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

aten = torch.ops.aten

IMAGE = InputSpec((1, 2, 3), "uint8", 1 / 255, (0.4,), (0.2,))
CASES: dict[str, tuple[str, InputSpec, dict[str, Any], tuple[str, ...], bool]] = {
    "mlp": ("mlp", IMAGE, {"hidden": [5]}, ("head",), False),
    "rates": ("mlp", IMAGE, {"hidden": [5], "activation": "elu"}, MODEL_GROUPS, True),
    "cnn1d": ("cnn1d", InputSpec((2, 24)), {"channels": [8], "width": 6}, MODEL_GROUPS, False),
    "ds-cnn": ("ds-cnn", InputSpec((2, 24)), {"channels": [8, 6]}, MODEL_GROUPS, False),
    "image": ("ds-cnn", InputSpec((1, 9, 6)), {"channels": [6, 8]}, MODEL_GROUPS, True),
    "lenet": ("lenet", InputSpec((1, 16, 16)), {}, ("body",), False),
    "lstm": ("char-lstm", InputSpec((4,), "int64"), {"width": 5, "layers": 1}, ("head",), False),
    "own": ("bring_own:build", InputSpec((2, 14, 14)), {}, MODEL_GROUPS, False),
    "numbers": ("mlp", IMAGE, {"hidden": [5], "activation": "elu"}, MODEL_GROUPS, False),
    "squared": ("mlp", IMAGE, {"hidden": [5]}, ("head",), False),
}
"""Model, input, options, groups that move, whether rates are learned."""

TASKS = {
    "numbers": Regression(("speed", "load"), (100.0, 0.5), (20.0, 0.1)),
    "squared": Regression(("speed",), (100.0,), (20.0,), "squared"),
}
"""Models that answer with numbers."""


class OwnModel(nn.Module):
    """A user's model of ordinary layers; ``fault`` makes its steps impossible to export."""

    def __init__(self, classes: int, fault: str) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Conv2d(2, 4, 3, stride=2, padding=1), nn.SiLU(), nn.MaxPool2d(3, 2, padding=1),
            nn.Conv2d(4, 8, 2, groups=2, bias=False), nn.BatchNorm2d(8, track_running_stats=False), nn.GELU(),
            nn.AvgPool2d(2), nn.Flatten(), nn.Dropout(),
        )  # fmt: skip
        self.fault = fault
        if fault != "headless":
            self.head = nn.Linear(8, classes)

    def embed(self, x: Tensor) -> Tensor:
        z: Tensor = self.layers(x)
        return -z if self.fault == "branch" and z.sum() > 0 else z


@pytest.fixture(scope="module", autouse=True)
def small_passes() -> Iterator[None]:
    """A user's model, with passes so small that a few samples take several."""
    module = types.ModuleType("bring_own")
    module.__dict__["build"] = lambda shape, classes, fault="": OwnModel(classes, fault)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "bring_own", module)
        patch.setattr(adapt_graph, "PASS_BYTES", 20_000)
        patch.setattr(adapt_graph, "HEAD_PASS", 2)
        patch.setattr(adapt_graph, "EMBEDDED_AT_ONCE", 2)
        yield


def layout_of(name: str, **options: Any) -> Layout:
    model, spec, usual, _, _ = CASES[name]
    task = TASKS.get(name)
    return models.describe(model, spec, () if task else ("a", "b", "c"), {**usual, **options}, task)


@cache
def made(name: str) -> graph_bundle.Graph:
    *_, groups, rates = CASES[name]
    return with_adapt(export_graph(layout_of(name), kinds=("predict",), seed=3), rates=rates, groups=groups)


def network_of(graph: graph_bundle.Graph) -> models.Network:
    return models.build(graph.layout).eval()


def in_a_pass(name: str, number: str = PASS) -> int:
    tensors = onnx.load_model_from_string(made(name).adapt).graph.initializer
    return int(next(numpy_helper.to_array(t) for t in tensors if t.name == number))


# The steps


@pytest.mark.parametrize("name", CASES)
def test_every_parameter_and_rate_is_external_under_its_group_and_name(name: str) -> None:
    graph = made(name)
    tensors = onnx.load_model_from_string(graph.adapt).graph.initializer
    wanted = {f"{t.group}/{t.name}": list(t.shape) for t in graph.layout.tensors}
    if CASES[name][4]:
        wanted |= {f"rates/{key.replace('/', '.')}": shape for key, shape in wanted.items()}
    assert {t.name: list(t.dims) for t in tensors if t.data_location == TensorProto.EXTERNAL} == wanted


@pytest.mark.parametrize("number", [1, 2, 7])
@pytest.mark.parametrize(
    ("name", "method", "steps"),
    [
        ("mlp", "fedrep", 10),
        ("rates", "fedmeta-metasgd", 1),
        pytest.param("cnn1d", "per-fedavg-fo", 1, marks=pytest.mark.slow),
        pytest.param("ds-cnn", "pfldyn-maml", 10, marks=pytest.mark.slow),
        pytest.param("image", "fedmeta-metasgd", 1, marks=pytest.mark.slow),
        pytest.param("lenet", "lg-fedavg", 10, marks=pytest.mark.slow),
        pytest.param("lstm", "fedper", 10, marks=pytest.mark.slow),
        ("own", "scaffold", 1),
        ("numbers", "fedavg-meta", 10),
        ("squared", "fedper", 10),
    ],
)
def test_a_device_steps_as_its_trainer_does(name: str, method: str, steps: int, number: int) -> None:
    graph, chosen = made(name), METHODS[method]
    assert graph.info.adapt is not None
    rate = 20 * graph.info.adapt.lr
    known = {"inner_lr": rate, "inner_steps": steps, "finetune_lr": rate, "finetune_steps": steps}
    hyper = chosen.hyper(**{n: v for n, v in known.items() if hasattr(chosen.hyper(), n)})
    weights = {**graph.adapt_weights(70 + number), **first_personal(chosen, graph.layout, {})}
    x, y, task = samples(graph.layout.input, number, number), np.arange(number) * 2 % 3, graph.layout.task
    if task is not None:
        y = task.in_units(np.random.default_rng(number).normal(size=(number, len(task.outputs))))
    served = trees.only(weights, chosen.shared)
    wanted = personal_model.adapt(chosen, network_of(graph), graph.layout, served, x, y, hyper)
    faster = replace(graph, info=replace(graph.info, adapt=replace(graph.info.adapt, lr=rate)))
    got = gate.run_adapt(faster, weights, x, graph.layout.truths(y), (0, steps))
    start, there = storage.flatten(weights), storage.flatten(wanted)
    assert {key.partition("/")[0] for key in got[0]} == set(CASES[name][3])
    for key, array in got[steps].items():
        np.testing.assert_array_equal(got[0][key], start[key])
        allowed = gate.MAX_RELATIVE[steps] * np.abs(there[key]).max()
        np.testing.assert_allclose(array, there[key], rtol=0, atol=allowed)
    assert max(np.abs(array - start[key]).max() for key, array in got[steps].items()) > 1e-4


def test_a_pass_takes_fewer_samples_the_more_a_model_computes_of_each() -> None:
    assert 1 == in_a_pass("lenet") < in_a_pass("cnn1d") < in_a_pass("rates") <= CHUNK


def test_a_model_that_mixes_its_samples_takes_as_many_in_a_pass_as_torch() -> None:
    assert in_a_pass("own") == CHUNK


def test_a_body_that_stays_embeds_few_samples_at_a_time() -> None:
    assert in_a_pass("mlp", "constant/embedding") == in_a_pass("lstm", "constant/embedding") == 2


def test_the_gate_reads_graphs_of_every_version() -> None:
    assert PASS == "constant/pass", "what graphs have had from the first version on"


def test_exporting_again_gives_the_same_bytes_and_says_nothing(
    capfd: pytest.CaptureFixture[str], recwarn: pytest.WarningsRecorder
) -> None:
    assert export_adapt(layout_of("rates"), rates=True, seed=3) == made("rates").adapt
    assert capfd.readouterr() == ("", "")
    assert [str(warning.message) for warning in recwarn] == []


# What has no such graph


@pytest.mark.parametrize(
    ("layout", "complaint", "instead"),
    [
        (lambda: layout_of("lstm"), r"char-lstm.* recurrent layers \(LSTM\)", ("proto", "only the head")),
        (lambda: layout_of("own", fault="branch"), "cannot be exported: .*data-dependent", ("proto", "only the head")),
        (lambda: layout_of("own", fault="headless"), "no head", ("proto",)),
    ],
)
def test_a_model_whose_steps_become_no_graph_is_told_what_to_take_instead(
    layout: Callable[[], Layout], complaint: str, instead: tuple[str, ...], capfd: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(BundleError, match=complaint) as caught:
        export_adapt(layout(), rates=False)
    assert all(word in str(caught.value.hint) for word in instead)
    assert capfd.readouterr() == ("", "")


def test_a_bundle_that_cannot_answer_with_adapted_weights_is_refused() -> None:
    with pytest.raises(BundleError, match="no graph 'predict'"):
        with_adapt(replace(made("mlp"), graphs={}), rates=False)


# The gate


NEXT = "next/head/head.bias"


def becomes(output: str, kind: str, *inputs: str) -> Callable[[onnx.ModelProto], None]:
    """Compute one value in another way."""

    def edit(model: onnx.ModelProto) -> None:
        model.graph.initializer.append(numpy_helper.from_array(np.array(1), "one"))
        node = node_of(model, output)
        node.op_type, node.input[:] = kind, inputs

    return edit


def folded(model: onnx.ModelProto) -> None:
    (tensor,) = (t for t in model.graph.initializer if t.name == "body/norms.0.weight")
    tensor.CopyFrom(numpy_helper.from_array(np.ones(tuple(tensor.dims), np.float32), tensor.name))


def at_most_one_step(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array(1), "one"))
    loop = node_of(model, "adapted/head/head.weight")
    model.graph.node.insert(0, onnx.helper.make_node("Min", ["steps", "one"], ["few"]))
    next(node for node in model.graph.node if node.output == loop.output).input[0] = "few"


def exchanged(model: onnx.ModelProto) -> None:
    names = {"body/norms.0.weight": "body/norms.0.bias", "body/norms.0.bias": "body/norms.0.weight"}
    loop = node_of(model, "adapted/head/head.weight")
    loop.input[:] = [names.get(name, name) for name in loop.input]


def kept_back(model: onnx.ModelProto) -> None:
    model.graph.output.remove(next(o for o in model.graph.output if o.name == "adapted/head/head.bias"))


@pytest.mark.parametrize(
    ("edit", "complaint"),
    [
        (folded, "does not take body/norms.0.weight"),
        (newer, "IR and opset"),
        (one_batch_size, "does not run on 1 samples"),
        (becomes("rate", "Identity", "lr"), "differs from torch .* 1 steps on 3 samples"),
        (becomes("pass/passes", "Identity", "one"), "differs from torch .* 1 steps on .* samples"),
        (becomes(NEXT, "Add", "now/head/head.bias", "change/head/head.bias"), "in head/head.bias after 1 steps"),
        (becomes(NEXT, "Identity", "now/head/head.bias"), "in head/head.bias after 1 steps"),
        (at_most_one_step, "differs from torch .* after 10 steps"),
        (exchanged, "after 0 steps"),
        (kept_back, "by inf in head/head.bias"),
    ],
)
def test_the_gate_refuses_steps_that_would_be_wrong(edit: Callable[[onnx.ModelProto], None], complaint: str) -> None:
    graph = made("cnn1d")
    model = onnx.load_model_from_string(graph.adapt)
    edit(model)
    with pytest.raises(BundleError, match=complaint):
        gate.check(replace(graph, adapt=model.SerializeToString()), network_of(graph))


def test_the_gate_refuses_golden_steps_that_the_graph_does_not_make() -> None:
    graph = made("mlp")
    gate.check(graph, network_of(graph))
    for index in (0, 1):
        golden = graph.golden["adapt"].copy()
        golden[index] += 0.01
        with pytest.raises(BundleError, match=rf"golden outputs after {graph_bundle.GOLDEN_STEPS[index]} steps"):
            gate.check(replace(graph, golden={**graph.golden, "adapt": golden}), network_of(graph))


# In a bundle


@pytest.mark.parametrize("name", ["mlp", "rates"])
def test_a_bundle_with_steps_survives_its_bytes(name: str) -> None:
    graph = made(name)
    again = graph_bundle.unpack(graph_bundle.pack(graph))
    assert (again.adapt, again.info, again.graphs) == (graph.adapt, graph.info, graph.graphs)
    assert again.golden.keys() == graph.golden.keys() == {"x", "y", "predict", "adapt"}
    for key, array in graph.golden.items():
        np.testing.assert_array_equal(again.golden[key], array)


def test_seeded_rates_lie_around_the_golden_rate() -> None:
    graph = made("rates")
    assert graph.info.adapt is not None
    rates = np.concatenate([rate.ravel() for rate in graph.adapt_weights(1)["rates"].values()])
    assert len(rates) == graph.layout.parameters(MODEL_GROUPS)
    assert 0 < np.ptp(rates) < 4 * graph.info.adapt.lr
    assert abs(rates.mean() - graph.info.adapt.lr) < graph.info.adapt.lr / 2


def test_a_bundle_from_before_there_were_steps_is_read() -> None:
    graph = made("mlp")
    plain = {key: array for key, array in graph.golden.items() if key not in ("y", "adapt")}
    graph = replace(graph, info=replace(graph.info, adapt=None), golden=plain, adapt=b"")
    arrays, metadata = storage.unpack(graph_bundle.pack(graph))
    head = json.loads(metadata["bundle"])
    assert head["info"].pop("adapt") is None
    again = graph_bundle.unpack(storage.pack(arrays, {"bundle": json.dumps(head)}))
    assert (again.graphs, again.info, again.adapt) == (graph.graphs, graph.info, b"")
    with pytest.raises(BundleError, match="no graph 'adapt'"):
        again.adapt_weights(0)


def test_every_malformed_bundle_with_steps_is_refused() -> None:
    arrays, metadata = storage.unpack(graph_bundle.pack(made("mlp")))
    golden = arrays["golden/adapt"]
    wrong: dict[str, dict[str, Any]] = {
        "no graph": {"graph/adapt": None},
        "an empty graph": {"graph/adapt": np.zeros(0, np.uint8)},
        "no labels": {"golden/y": None},
        "labels of another kind": {"golden/y": arrays["golden/y"].astype(np.int32)},
        "too few labels": {"golden/y": arrays["golden/y"][:2]},
        "no logits": {"golden/adapt": None},
        "too few steps": {"golden/adapt": golden[:1]},
        "logits not finite": {"golden/adapt": golden * np.nan},
        "nothing to answer with": {
            "graph/predict": None, "golden/predict": None,
            "graph/embed": arrays["graph/predict"], "golden/embed": np.zeros((len(arrays["golden/x"]), 5), np.float32),
        },
    }
    accepted = []
    for name, changes in wrong.items():
        parts = {key: array for key, array in {**arrays, **changes}.items() if array is not None}
        with pytest.raises(BundleError):
            accepted.append((name, graph_bundle.unpack(storage.pack(parts, metadata))))
    assert accepted == []
    heads = {
        "steps unknown": ('"groups":["head"]', '"groups":["tail"]'),
        "no steps": ('"rates":false', '"rates":"no"'),
    }
    for old, new in heads.values():
        assert old in metadata["bundle"]
        with pytest.raises(BundleError):
            graph_bundle.unpack(storage.pack(arrays, {"bundle": metadata["bundle"].replace(old, new)}))


DEVICE = """
import sys
from pathlib import Path
import numpy as np, onnxruntime
from fleet_core.model import graph_bundle
from fleet_core.base import storage

def session(data, weights):
    options = onnxruntime.SessionOptions()
    values = [onnxruntime.OrtValue.ortvalue_from_numpy(array) for array in weights.values()]
    options.add_external_initializers(list(weights), values)
    return onnxruntime.InferenceSession(data, options)

graph = graph_bundle.unpack(Path("bundle").read_bytes())
weights = storage.flatten(graph.adapt_weights(graph.info.seed))
adapt = session(graph.adapt, weights)
names = [output.name for output in adapt.get_outputs()]
feed = {"support_x": graph.golden["x"], "support_y": graph.golden["y"], "lr": np.array(graph.info.adapt.lr, np.float32)}
for steps, wanted in zip(graph_bundle.GOLDEN_STEPS, graph.golden["adapt"]):
    adapted = dict(zip(names, adapt.run(names, {**feed, "steps": np.array(steps)})))
    now = {**weights, **{name.removeprefix("adapted/"): np.array(array) for name, array in adapted.items()}}
    logits = session(graph.graphs["predict"], now).run(None, {"x": graph.golden["x"]})[0]
    print(steps, bool(np.allclose(logits, wanted, atol=graph.info.atol, rtol=graph.info.rtol)))
print("torch" in sys.modules)
"""


def test_a_device_without_torch_makes_the_golden_steps(tmp_path: Path) -> None:
    (tmp_path / "bundle").write_bytes(graph_bundle.pack(made("lenet")))
    done = subprocess.run(
        [sys.executable, "-c", DEVICE], cwd=tmp_path, capture_output=True, text=True, timeout=PATIENCE_S
    )
    assert done.stdout.split("\n")[:3] == ["1 True", "10 True", "False"], done.stderr


# The lowering, against torch

lowered: Any = lowering


def value(found: Any) -> Any:
    """The numpy value of an ONNX operation that is called outside an export."""
    return getattr(found, "value", found)


@pytest.mark.parametrize("axes", [1, 2])
@pytest.mark.parametrize(
    ("stride", "padding", "dilation", "groups", "transposed"),
    [(1, 0, 1, 1, False), (2, 1, 1, 1, False), (1, 2, 2, 2, False), (2, 0, 1, 4, False), (2, 1, 1, 1, True)],
)
@pytest.mark.parametrize("channels", [4, lowering.FEW])
def test_a_convolutions_gradients_are_torchs(
    axes: int, stride: int, padding: int, dilation: int, groups: int, transposed: bool, channels: int
) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((3, channels, *[8, 9][:axes]), generator=generator)
    weight = torch.randn((channels if transposed else 8, channels // groups, *[3] * axes), generator=generator)
    how: Any = [*([size] * axes for size in (stride, padding, dilation)), transposed, [0] * axes, groups]
    grad = torch.randn(aten.convolution(x, weight, None, *how).shape, generator=generator)
    wanted = aten.convolution_backward(grad, x, weight, [grad.shape[1]], *how, [True] * 3)
    got = lowered.convolution_backward(grad.numpy(), x.numpy(), weight.numpy(), None, *how, [True] * 3)
    for there, here in zip(wanted, got, strict=True):
        np.testing.assert_allclose(value(here), there.numpy(), rtol=0, atol=1e-4)


@pytest.mark.parametrize(
    ("kernel", "stride", "padding", "dilation", "ceil"),
    [(2, 2, 0, 1, False), (2, 3, 0, 1, False), (2, 2, 1, 1, False), (3, 2, 0, 1, False), (3, 3, 0, 1, True),
     (2, 2, 0, 2, False)],
)  # fmt: skip
def test_a_max_pools_gradient_goes_where_torchs_goes_among_equal_values_too(
    kernel: int, stride: int, padding: int, dilation: int, ceil: bool
) -> None:
    x = torch.randint(0, 3, (2, 3, 8, 9), generator=torch.Generator().manual_seed(0)).float()
    how: Any = [*([size] * 2 for size in (kernel, stride, padding, dilation)), ceil]
    best, where = aten.max_pool2d_with_indices(x, *how)
    grad = torch.arange(1.0, 1 + best.numel()).reshape(best.shape)
    found, indices = lowered.max_pool(x.numpy(), *how)
    np.testing.assert_array_equal(value(found), best.numpy())
    got = value(lowered.max_pool_backward(grad.numpy(), x.numpy(), *how, value(indices)))
    np.testing.assert_array_equal(got, aten.max_pool2d_with_indices_backward(grad, x, *how, where).numpy())


@pytest.mark.parametrize("affine", [True, False])
def test_group_norm_and_its_gradients_are_torchs(affine: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    x, grad = torch.randn((2, 3, 6, 5, 4), generator=generator) * 2 + 1
    weight, bias = torch.randn((2, 6), generator=generator) if affine else (None, None)
    sizes: Any = (3, 6, 20, 2)
    wanted = aten.native_group_norm(x, weight, bias, *sizes, 1e-5)
    arrays: Any = [None if part is None else part.numpy() for part in (weight, bias)]
    got = lowered.group_norm(x.numpy(), *arrays, *sizes, 1e-5)
    mask = [True, affine, affine]
    back = aten.native_group_norm_backward(grad, x, *wanted[1:], weight, *sizes, mask)
    stepped = lowered.group_norm_backward(grad.numpy(), x.numpy(), *map(value, got[1:]), arrays[0], *sizes, mask)
    for there, here in zip([*wanted, *back], [*got, *stepped], strict=True):
        if there is not None:
            np.testing.assert_allclose(value(here), there.numpy(), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    "how",
    [([2, 2], [2, 2], [0, 0], False, True, None), ([3, 2], [2, 1], [1, 1], False, True, None),
     ([2, 2], [], [1, 1], False, False, 3)],
)  # fmt: skip
def test_an_average_pools_gradient_is_torchs(how: Any) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randn((2, 3, 7, 8), generator=generator, dtype=torch.float64)
    grad = torch.randn(aten.avg_pool2d(x, *how).shape, generator=generator, dtype=torch.float64)
    torch.testing.assert_close(lowered.avg_pool2d_backward(grad, x, *how), aten.avg_pool2d_backward(grad, x, *how))


def test_average_pools_whose_windows_differ_in_size_are_refused() -> None:
    x = torch.zeros(1, 1, 7, 7)
    for how in (([2, 2], [2, 2], [0, 0], True, True, None), ([2, 2], [2, 2], [1, 1], False, False, None)):
        with pytest.raises(NotImplementedError, match="different sizes"):
            lowered.avg_pool2d_backward(torch.zeros(1, 1, 4, 4), x, *how)
    with pytest.raises(NotImplementedError, match="different sizes"):
        lowered.adaptive_avg_pool2d_backward(torch.zeros(1, 1, 3, 3), x)
    torch.testing.assert_close(
        lowered.adaptive_avg_pool2d_backward(torch.ones(1, 1, 7, 1), x), torch.full((1, 1, 7, 7), 1 / 7)
    )
