"""Small ONNX files that stand for models of others."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

from export.backbones.from_onnx import AS_IT_IS, Preprocessing, of_model
from fleet_core.backbone.backbone_file import NAME, BackboneFile, described, pack
from fleet_core.data.samples import Samples

SHAPE, WIDTH = (2, 5, 5), 6


def model(*, seed: int = 0, opset: int = 17, shape: tuple[int, ...] = SHAPE, batch: int | str = "n") -> onnx.ModelProto:
    """A convolution, ReLU and the mean over positions: values ``conv``, ``act`` [n, 6, 5, 5] and ``pooled`` [n, 6]."""
    rng = np.random.default_rng(seed)
    weight = rng.normal(size=(WIDTH, shape[0], 3, 3)).astype(np.float32)
    nodes = [
        helper.make_node("Conv", ["image", "weight"], ["conv"], name="first", pads=[1, 1, 1, 1]),
        helper.make_node("Relu", ["conv"], ["act"]),
        helper.make_node("GlobalAveragePool", ["act"], ["mean"]),
        helper.make_node("Flatten", ["mean"], ["pooled"]),
    ]
    graph = helper.make_graph(
        nodes,
        "small",
        [helper.make_tensor_value_info("image", TensorProto.FLOAT, [batch, *shape])],
        [helper.make_tensor_value_info("pooled", TensorProto.FLOAT, [batch, WIDTH])],
        [numpy_helper.from_array(weight, "weight")],
    )
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", opset)], ir_version=8)


def backbone(prepared: Preprocessing = AS_IT_IS, output: str | None = None, seed: int = 0) -> BackboneFile:
    return of_model(model(seed=seed), prepared, output, "small.onnx", "small.onnx")


def write(path: Path, prepared: Preprocessing = AS_IT_IS) -> bytes:
    """Writes a backbone's file and returns its bytes."""
    data = pack(backbone(prepared))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    return data


def fleet_text(folder: Path, method: str = "pfldyn-proto", *, rounds: int = 2, hyper: str = "", link: str = "") -> str:
    """fleet.toml of a fleet with three classes and a backbone, whose file is written to ``folder``."""
    found = described(write(folder / NAME))
    return f"""\
[fleet]
name = "t"
method = "{method}"
rounds = {rounds}
min_devices = 2
serve_every = {rounds}
[model]
name = "mlp"
classes = ["a", "b", "c"]
input = {{ shape = [{found.width}], scale = 0.5 }}
options = {{ hidden = [8] }}
[model.backbone]
id = "{found.id}"
name = "{found.name}"
width = {found.width}
input = {{ shape = {list(found.input.shape)} }}
[link]
{link}
[hyper]
{hyper}
"""


def samples(seed: int, count: int = 90) -> Samples:
    """Three classes of raw samples, which the small backbone tells apart, in the order of time."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, count)
    patterns = np.random.default_rng(7).normal(size=(3, *SHAPE))
    patterns += np.array([[3, -3], [-3, 3], [3, 3]])[:, :, None, None]
    x = (patterns[y] + rng.normal(size=(count, *SHAPE)) * 0.5).astype(np.float32)
    return Samples(x, y.astype(np.int64), None, np.arange(count, dtype=np.float64), ("a", "b", "c"))
