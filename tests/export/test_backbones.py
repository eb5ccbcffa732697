"""Backbones of ONNX files and torch modules."""

from __future__ import annotations

import re
import sys
import types
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from safetensors.torch import save_file
from torch import nn

from export.backbones import from_torch
from export.backbones.from_onnx import Preprocessing, from_onnx, nodes, of_model
from export.backbones.quantize import quantized
from fleet_core.backbone import backbone_file
from fleet_core.backbone.onnx_runtime import CPU, open_on
from fleet_core.base.errors import ConfigError, DataError
from fleet_core.model.layout import InputSpec
from tests.support.backbones import SHAPE, WIDTH, backbone, model


def numpy_features(x: np.ndarray, seed: int = 0) -> np.ndarray:
    """The small model's features of prepared samples, by torch."""
    weight = np.random.default_rng(seed).normal(size=(WIDTH, x.shape[1], 3, 3)).astype(np.float32)
    found = torch.nn.functional.conv2d(torch.tensor(x), torch.tensor(weight), padding=1).relu().mean((2, 3))
    return found.numpy()


def test_an_onnx_file_gives_its_features(tmp_path):
    onnx.save(model(), tmp_path / "small.onnx")
    made = from_onnx(tmp_path / "small.onnx")
    x = np.random.default_rng(1).normal(size=(5, *SHAPE)).astype(np.float32)
    assert made.info.input == InputSpec(SHAPE)
    assert made.info.width == WIDTH
    assert made.info.output == "pooled"
    np.testing.assert_allclose(open_on(made.onnx, CPU)(x), numpy_features(x), rtol=1e-4, atol=1e-5)


def test_the_preprocessing_is_inside():
    made = backbone(Preprocessing(dtype="uint8", mean=(0.5, 0.25), std=(0.5, 2.0)))
    x = np.random.default_rng(1).integers(0, 256, (3, *SHAPE), dtype=np.uint8)
    ready = (x / 255 - np.reshape([0.5, 0.25], (1, 2, 1, 1))) / np.reshape([0.5, 2.0], (1, 2, 1, 1))
    assert made.info.input == InputSpec(SHAPE, "uint8", 1 / 255, (0.5, 0.25), (0.5, 2.0))
    wanted = numpy_features(ready.astype(np.float32))
    np.testing.assert_allclose(open_on(made.onnx, CPU)(x), wanted, rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize("output", ["act", "mean", "first"])
def test_another_node_is_averaged_over_positions(output):
    made = backbone(output=output)
    x = made.golden["x"]
    wanted = numpy_features(x)
    if output == "first":  # the name of a node, whose value is before ReLU
        assert made.info.output == "conv"
    else:
        np.testing.assert_allclose(open_on(made.onnx, CPU)(x), wanted, rtol=1e-4, atol=1e-5)
    assert made.info.width == WIDTH


def test_features_of_one_position_are_taken_along_whichever_axis_they_lie():
    last = model()
    last.graph.node.append(helper.make_node("Transpose", ["mean"], ["channels last"], perm=[0, 2, 3, 1]))
    made = of_model(last, Preprocessing(), "channels last", "small", "small")
    assert made.info.width == WIDTH
    np.testing.assert_allclose(made.golden["z"], numpy_features(made.golden["x"]), rtol=1e-4, atol=1e-5)


def test_names_of_the_file_do_not_collide_with_ours():
    renamed = model()
    for node in renamed.graph.node:
        node.input[:] = [{"image": "z", "mean": "x"}.get(name, name) for name in node.input]
        node.output[:] = [{"mean": "x"}.get(name, name) for name in node.output]
    renamed.graph.input[0].name = "z"
    made = of_model(renamed, Preprocessing(), None, "small", "small")
    np.testing.assert_allclose(open_on(made.onnx, CPU)(made.golden["x"]), made.golden["z"], rtol=1e-5)


def test_the_file_is_read_again(tmp_path):
    data = backbone_file.pack(backbone())
    again = backbone_file.parsed(data)
    assert backbone_file.pack(again) == data
    spec = backbone_file.described(data)
    assert (spec.id, spec.width, spec.name) == (backbone_file.identity(data), WIDTH, "small.onnx")


def changed(**changes: Any) -> onnx.ModelProto:
    made = model(**{key: value for key, value in changes.items() if key in ("opset", "shape", "batch")})
    if "domain" in changes:
        made.opset_import.append(helper.make_opsetid(changes["domain"], 1))
    if "external" in changes:
        tensor = made.graph.initializer[0]
        tensor.data_location = TensorProto.EXTERNAL
        tensor.ClearField("raw_data")
        tensor.external_data.add(key="location", value="/etc/passwd")
    if "fixed" in changes:
        made.graph.initializer.append(numpy_helper.from_array(np.array([1, WIDTH]), "one"))
        made.graph.node.append(helper.make_node("Reshape", ["mean", "one"], ["fixed"]))
    if "inputs" in changes:
        made.graph.input.append(helper.make_tensor_value_info("more", TensorProto.FLOAT, ["n", 1]))
    if "dtype" in changes:
        made.graph.input[0].type.tensor_type.elem_type = changes["dtype"]
    return made


@pytest.mark.parametrize(
    ("changes", "prepared", "output", "text"),
    [
        ({"opset": 12}, Preprocessing(), None, "opset 12.*expected 13"),
        ({"domain": "evil"}, Preprocessing(), None, "operators of evil"),
        ({"external": True}, Preprocessing(), None, "weights in another file"),
        ({"inputs": True}, Preprocessing(), None, "the inputs image, more"),
        ({"dtype": TensorProto.DOUBLE}, Preprocessing(), None, "DOUBLE"),
        ({"fixed": True}, Preprocessing(), "fixed", "does not run on 2 samples"),
        ({}, Preprocessing(), "poold", "did you mean 'pooled'"),
        ({}, Preprocessing(mean=(0.1,)), None, "mean has 1 values"),
        ({}, Preprocessing(std=(0.0, 1.0)), None, "not above 0"),
    ],
)
def test_a_file_that_is_not_fit_is_refused_before_it_is_used(changes, prepared, output, text):
    with pytest.raises(ConfigError, match=text):
        of_model(changed(**changes), prepared, output, "small", "small")


def test_a_batch_size_that_the_file_merely_says_does_not_matter():
    made = of_model(model(batch=1), Preprocessing(), None, "small", "small")
    assert len(open_on(made.onnx, CPU)(np.zeros((5, *SHAPE), np.float32))) == 5


def test_what_is_no_onnx_file_is_refused(tmp_path):
    (tmp_path / "a.onnx").write_bytes(b"\x08 no")
    with pytest.raises(ConfigError, match="is not an ONNX file"):
        from_onnx(tmp_path / "a.onnx")


def test_a_shape_that_the_file_leaves_open_comes_from_the_samples():
    made = model()
    for axis in (2, 3):
        made.graph.input[0].type.tensor_type.shape.dim[axis].dim_param = "side"
    with pytest.raises(ConfigError, match="a known shape"):
        of_model(onnx.ModelProto.FromString(made.SerializeToString()), Preprocessing(), None, "small", "small")
    found = of_model(made, Preprocessing(shape=(2, 8, 8)), None, "small", "small")
    assert found.info.input.shape == (2, 8, 8)


def test_a_file_that_mixes_samples_is_refused():
    made = model()
    made.graph.node.append(helper.make_node("ReduceMean", ["pooled"], ["over"], axes=[0], keepdims=1))
    made.graph.node.append(helper.make_node("Sub", ["pooled", "over"], ["centred"]))
    with pytest.raises(ConfigError, match="other features alone"):
        of_model(made, Preprocessing(), "centred", "small", "small")


def test_nodes_are_listed(tmp_path):
    onnx.save(model(), tmp_path / "small.onnx")
    assert nodes(tmp_path / "small.onnx")[0] == ("Conv", "conv")


# int8 -----------------------------------------------------------------------------------------------------------------


def test_an_int8_backbone_says_what_it_loses():
    x = np.random.default_rng(1).normal(size=(40, *SHAPE)).astype(np.float32)
    small = quantized(backbone(), x)
    assert small.info.int8 is not None
    assert 0 < small.info.int8 < 0.1
    float_features = numpy_features(x)
    off = backbone_file.difference(open_on(small.onnx, CPU)(x), float_features)
    assert 0 < off < 0.1
    assert b"QuantizeLinear" in small.onnx


def test_too_few_samples_do_not_calibrate():
    with pytest.raises(DataError, match="do not calibrate"):
        quantized(backbone(), np.zeros((3, *SHAPE), np.float32))


# torch ----------------------------------------------------------------------------------------------------------------


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv, self.norm, self.fc = nn.Conv2d(2, 5, 3), nn.BatchNorm2d(5), nn.Linear(5, 7)

    def forward(self, x):
        return self.fc(self.norm(self.conv(x)).relu().mean((2, 3)))


def build() -> nn.Module:
    return Small()


@pytest.mark.slow
def test_a_torch_module_with_its_weights_becomes_a_backbone(tmp_path):
    module = Small().eval()
    save_file(module.state_dict(), tmp_path / "small.safetensors")
    scripted: Any = torch.jit
    scripted.script(module).save(str(tmp_path / "small.pt"))
    x = np.random.default_rng(1).normal(size=(3, *SHAPE)).astype(np.float32)
    for file in ("small.safetensors", "small.pt"):
        made = from_torch.from_torch(f"{__name__}:build", tmp_path / file, Preprocessing(shape=SHAPE))
        np.testing.assert_allclose(open_on(made.onnx, CPU)(x), module(torch.tensor(x)).detach(), rtol=1e-3, atol=1e-5)


@pytest.mark.parametrize(
    ("name", "text"),
    [("nothing", "is not a function"), ("json:dumps", "builds nothing"), ("types:SimpleNamespace", "SimpleNamespace"),
     ("timm:resnet18", "'timm' is not installed.*pip install timm"),
     ("torchvision:resnet18", "'torchvision.*' is not installed.*pip install torchvision")],
)
def test_what_builds_no_module_is_refused(name, text):
    with pytest.raises(ConfigError, match=re.compile(text, re.DOTALL)):
        from_torch.from_torch(name, None, Preprocessing(shape=SHAPE))


def test_weights_of_another_module_are_refused(tmp_path):
    save_file({"other": torch.zeros(2)}, tmp_path / "a.safetensors")
    with pytest.raises(ConfigError, match="does not fit the module"):
        from_torch.from_torch(f"{__name__}:build", tmp_path / "a.safetensors", Preprocessing(shape=SHAPE))


@pytest.mark.slow
def test_a_torchvision_model_loses_its_classifier_and_keeps_its_preprocessing(monkeypatch):
    tuned = types.SimpleNamespace(mean=[0.4, 0.5], std=[0.2, 0.3])
    weights = types.SimpleNamespace(DEFAULT=types.SimpleNamespace(transforms=lambda: tuned))
    models: Any = types.ModuleType("torchvision.models")
    models.get_model_weights = lambda name: weights
    models.get_model = lambda name, weights: Small()
    monkeypatch.setitem(sys.modules, "torchvision", types.ModuleType("torchvision"))
    monkeypatch.setitem(sys.modules, "torchvision.models", models)
    made = from_torch.from_torch("torchvision:small", None, Preprocessing(shape=SHAPE))
    assert made.info.width == 5
    assert made.info.input == InputSpec(SHAPE, "uint8", 1 / 255, (0.4, 0.5), (0.2, 0.3))


def test_features_of_a_golden_sample_are_as_they_were_written(tmp_path: Path):
    made = backbone()
    assert backbone_file.difference(open_on(made.onnx, CPU)(made.golden["x"]), made.golden["z"]) < 1e-6
