"""A device's check of a bundle: a sound one passes without torch, and every check refuses one kind of fault."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx
import pytest
from onnx import numpy_helper

from edge_agent.inference import bundle_check
from fleet_core.base import trees
from fleet_core.base.errors import BundleError
from fleet_core.personalization import device_bundle
from fleet_core.personalization.bundle_format import Bundle
from tests.support.bundles import bundle_of, node_of
from tests.support.waiting import PATIENCE_S

METHOD = "fedmeta-metasgd"
BIAS = "head/head.bias"
Edit = Callable[[onnx.ModelProto], None]


@pytest.mark.slow
@pytest.mark.parametrize("name", [METHOD, "fedper", "pfldyn-proto"])
def test_a_sound_bundle_passes_with_its_errors_reported(name: str) -> None:
    passed = bundle_check.check(bundle_of(name))
    assert passed.graphs.keys() == {"embed", "predict"}
    assert passed.steps.keys() == (set() if name == "pfldyn-proto" else {"1", "10"})
    assert max(*passed.graphs.values(), *passed.steps.values(), 0.0) < 1e-4
    assert passed.int8 is None


def edited(name: str, edit: Edit) -> Bundle:
    """The bundle with one graph changed by ``edit``."""
    made = bundle_of(METHOD)
    data = made.graph.adapt if name == "adapt" else made.graph.graphs[name]
    model = onnx.load_model_from_string(data)
    edit(model)
    data = model.SerializeToString()
    if name == "adapt":
        return replace(made, graph=replace(made.graph, adapt=data))
    return replace(made, graph=replace(made.graph, graphs={**made.graph.graphs, name: data}))


def becomes(output: str, kind: str, *inputs: str) -> Edit:
    """Compute one value in another way; ``one`` and ``four`` are numbers."""

    def edit(model: onnx.ModelProto) -> None:
        for name, value in {"one": np.array(1), "four": np.array(4, np.float32)}.items():
            model.graph.initializer.append(numpy_helper.from_array(value, name))
        node = node_of(model, output)
        node.op_type, node.input[:] = kind, inputs

    return edit


def folded(name: str) -> Edit:
    def edit(model: onnx.ModelProto) -> None:
        (tensor,) = (t for t in model.graph.initializer if t.name == name)
        tensor.CopyFrom(numpy_helper.from_array(np.ones(tuple(tensor.dims), np.float32), name))

    return edit


def another_activation(model: onnx.ModelProto) -> None:
    [node for node in model.graph.node if node.op_type == "Relu"][-1].op_type = "Softplus"


def of_four(model: onnx.ModelProto) -> None:
    model.graph.input[0].type.tensor_type.shape.dim[0].dim_value = 4


def newer(model: onnx.ModelProto) -> None:
    model.ir_version = 99


def at_most_one_step(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array(1), "one"))
    loop = node_of(model, f"adapted/{BIAS}")
    model.graph.node.insert(0, onnx.helper.make_node("Min", ["steps", "one"], ["few"]))
    next(node for node in model.graph.node if node.output == loop.output).input[0] = "few"


def one_step_more(model: onnx.ModelProto) -> None:
    model.graph.initializer.append(numpy_helper.from_array(np.array(1), "one"))
    loop = node_of(model, f"adapted/{BIAS}")
    model.graph.node.insert(0, onnx.helper.make_node("Add", ["steps", "one"], ["more"]))
    next(node for node in model.graph.node if node.output == loop.output).input[0] = "more"


def kept_back(model: onnx.ModelProto) -> None:
    model.graph.output.remove(next(o for o in model.graph.output if o.name == f"adapted/{BIAS}"))


STEP = f"next/{BIAS}"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("graph", "edit", "complaint"),
    [
        ("embed", folded("body/layers.0.weight"), "cannot be opened .* non-external"),
        ("predict", folded(BIAS), "cannot be opened .* non-external"),
        ("adapt", folded(BIAS), "'adapt': .*cannot be opened .* non-external"),
        ("adapt", folded("rates/head.head.bias"), "'adapt': .*cannot be opened .* non-external"),
        ("embed", newer, "cannot be opened .*Unsupported"),
        ("embed", another_activation, "'embed' does not give its golden outputs"),
        ("predict", another_activation, "'predict' does not give its golden outputs"),
        ("embed", of_four, "'embed' does not run on 9 samples"),
        ("adapt", of_four, "'adapt' does not run on 260 samples"),
        ("adapt", one_step_more, "changes .* in 0 steps"),
        ("adapt", kept_back, "gives .*; expected .*head/head.bias"),
        ("adapt", becomes(STEP, "Identity", f"now/{BIAS}"), "golden outputs after 1 steps"),
        ("adapt", becomes(STEP, "Add", f"now/{BIAS}", f"change/{BIAS}"), "golden outputs after 1 steps"),
        ("adapt", becomes(f"rate/{BIAS}", "Identity", "rates/head.head.bias"), "golden outputs after 1 steps"),
        ("adapt", at_most_one_step, "golden outputs after 10 steps"),
        ("adapt", becomes(f"rate/{BIAS}", "Div", "rates/head.head.bias", "four"), "samples repeated 65 times"),
        ("adapt", becomes("pass/passes", "Identity", "one"), "samples repeated 65 times"),
    ],
)
def test_a_graph_that_would_give_wrong_numbers_is_refused(graph: str, edit: Edit, complaint: str) -> None:
    with pytest.raises(BundleError, match=complaint):
        bundle_check.check(edited(graph, edit))


@pytest.mark.slow
def test_steps_that_do_nothing_are_refused_even_where_the_golden_outputs_hardly_change() -> None:
    """The tolerance of the logits does not hide that nothing was learned."""
    made = edited("adapt", becomes(STEP, "Identity", f"now/{BIAS}"))
    loose = replace(made.graph, info=replace(made.graph.info, atol=1.0))
    with pytest.raises(BundleError, match="golden outputs after 1 steps"):
        bundle_check.check(replace(made, graph=loose))


def test_a_value_that_is_not_finite_is_refused() -> None:
    made = bundle_of("pfldyn-proto")
    huge = trees.apply(lambda a: np.full_like(a, 3e38), made.params)
    with pytest.raises(BundleError, match="'embed' gives a value that is not finite with the bundle's weights"):
        bundle_check.check(replace(made, params=huge))
    edit = becomes(STEP, "Div", f"now/{BIAS}", f"zero/{BIAS}")
    with pytest.raises(BundleError, match="'adapt' gives a value that is not finite"):
        bundle_check.check(edited("adapt", edit))


def test_an_onnxruntime_that_is_too_old_for_the_bundle_is_refused() -> None:
    made = bundle_of("pfldyn-proto")
    newer = replace(made.graph, info=replace(made.graph.info, min_onnxruntime="99.1.0"))
    with pytest.raises(BundleError, match=r"is too old.*; expected 99\.1\.0 or newer"):
        bundle_check.check(replace(made, graph=newer))


# The quantized encoder ------------------------------------------------------------------------------------------------


def test_a_quantized_encoder_passes_with_its_cost_and_not_with_another() -> None:
    made = bundle_of("pfldyn-proto", int8=True)
    assert made.manifest.int8 is not None
    off = bundle_check.check(made).int8
    assert off is not None
    assert abs(off - made.manifest.int8.difference) < 0.02
    model = onnx.load_model_from_string(made.int8)
    scale = next(t for t in model.graph.initializer if t.name.endswith("_scale"))
    scale.CopyFrom(numpy_helper.from_array(numpy_helper.to_array(scale) * 3, scale.name))
    with pytest.raises(BundleError, match=r"the quantized encoder is off by .*; expected about"):
        bundle_check.check(replace(made, int8=model.SerializeToString()))
    with pytest.raises(BundleError, match="cannot be opened"):
        bundle_check.check(replace(made, int8=b"no graph"))


# In a child process ---------------------------------------------------------------------------------------------------


def gate(path: Path, before: str = "") -> subprocess.CompletedProcess[str]:
    program = f"import sys\n{before}\nfrom edge_agent.inference import bundle_check\n"
    program += "from fleet_core.base import processes\n"
    program += "processes.guarded(lambda: bundle_check.main(sys.argv[1:]))\nprint('torch' in sys.modules)"
    return subprocess.run(
        [sys.executable, "-c", program, str(path)], capture_output=True, text=True, timeout=PATIENCE_S
    )


@pytest.mark.slow
def test_the_check_imports_no_torch_and_fails_if_it_does(tmp_path: Path) -> None:
    device_bundle.write(tmp_path / "b", bundle_of(METHOD))
    done = gate(tmp_path / "b")
    passed, torch = done.stdout.splitlines()
    assert (json.loads(passed)["steps"].keys(), torch) == ({"1", "10"}, "False"), done.stderr
    done = gate(tmp_path / "b", "import types\nsys.modules['torch'] = types.ModuleType('torch')")
    assert (done.returncode, done.stdout) == (1, "")
    assert "error: the check imported torch" in done.stderr
