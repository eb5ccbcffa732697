"""Makes a frozen backbone of an ONNX file, which may come from somebody else.

Everything is checked before onnxruntime opens the file: its size, that its weights are inside, its operators' sets, its
input. The preprocessing is put in front, the mean over positions and the cut to the chosen node behind.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, compose, helper, numpy_helper

from export.graph import IR_VERSION, MIN_ONNXRUNTIME, samples
from fleet_core.backbone.backbone_file import FORMAT, MAX_BYTES, MAX_SAMPLE, BackboneFile, BackboneInfo, difference
from fleet_core.backbone.onnx_runtime import CPU, open_on
from fleet_core.base import schema, storage
from fleet_core.base.errors import BundleError, ConfigError
from fleet_core.model.layout import InputSpec

Array = np.ndarray[Any, Any]

MIN_OPSET, MAX_OPSET = 13, 25
REDUCE_TAKES_AXES = 18
"""From this opset on ReduceMean has its axes as an input."""

MAX_NODES = 100_000
MAX_WIDTH = 65_536
DOMAINS = ("", "ai.onnx", "com.microsoft")
GOLDEN = 4
FLOAT_TOLERANCE, INT8_TOLERANCE = 2e-3, 5e-2
"""Tolerances of golden features: kernels of other processors round differently, those of int8 more so."""

DTYPES = {TensorProto.FLOAT: "float32", TensorProto.UINT8: "uint8", TensorProto.INT64: "int64"}
FORMER, OWN = "file/", "metafleet/"
"""Prefixes of the names of the file's own values, and of added ones."""

X, Z = "x", "z"


@dataclass(frozen=True)
class Preprocessing:
    """What an ONNX file expects: (x · scale − mean) / std per channel. dtype: dtype of the users' samples; None: that
    of the file. scale None: 1/255 for bytes, else 1. shape: shape of a sample, where the file leaves it open."""

    dtype: str | None = None
    scale: float | None = None
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    shape: tuple[int, ...] | None = None


AS_IT_IS = Preprocessing()


def from_onnx(
    path: Path, prepared: Preprocessing = AS_IT_IS, output: str | None = None, name: str | None = None
) -> BackboneFile:
    """The backbone in an ONNX file. output: the value that is the features; None: the file's first output. Raises
    ConfigError for a file that is not fit."""
    where = str(path)
    data = storage.read_bytes(path, limit=MAX_BYTES)
    try:
        model = onnx.load_model_from_string(data)
    except Exception as error:  # protobuf raises errors of many classes
        raise ConfigError("is not an ONNX file", where=where, hint="--backbone takes FILE.onnx") from error
    return of_model(model, prepared, output, name or path.name, where)


def of_model(
    model: onnx.ModelProto, prepared: Preprocessing, output: str | None, name: str, where: str
) -> BackboneFile:
    """Like ``from_onnx``."""
    opset = check(model, where)
    spec = _input_spec(model, prepared, where)
    chosen = _chosen(model, output, where)
    _cut(model, chosen)
    model, value = compose.add_prefix(model, FORMER), FORMER + chosen
    _put_in_front(model, spec)
    _put_behind(model, value, _shape(model, value, spec, where), opset)
    model.ir_version = min(model.ir_version, IR_VERSION)
    del model.metadata_props[:]
    model.doc_string = ""
    x, z = golden(made := bytes(model.SerializeToString(deterministic=True)), spec, where)
    info = BackboneInfo(FORMAT, name[:200], chosen, spec, z.shape[1], FLOAT_TOLERANCE, model.ir_version, opset,
                        MIN_ONNXRUNTIME)
    return BackboneFile(info, made, {"x": x, "z": z})


def check(model: onnx.ModelProto, where: str) -> int:
    """The opset. Raises ConfigError for a file that onnxruntime should not open."""
    tensors = [*model.graph.initializer, *(a.t for n in model.graph.node for a in n.attribute if a.HasField("t"))]
    if any(tensor.data_location == TensorProto.EXTERNAL or tensor.external_data for tensor in tensors):
        raise ConfigError("has its weights in another file", where=where,
                          hint="save it as one: onnx.save(onnx.load(FILE), NEW)")
    if len(model.graph.node) > MAX_NODES:
        raise ConfigError(f"has {len(model.graph.node)} nodes", where=where, expected=f"at most {MAX_NODES}")
    foreign = sorted({o.domain for o in model.opset_import} - set(DOMAINS))
    if foreign:
        raise ConfigError(f"needs operators of {', '.join(foreign)[:200]}", where=where, expected="those of ONNX alone")
    opset = max((o.version for o in model.opset_import if o.domain in ("", "ai.onnx")), default=0)
    if not MIN_OPSET <= opset <= MAX_OPSET:
        raise ConfigError(f"has opset {opset}", where=where, expected=f"{MIN_OPSET} to {MAX_OPSET}",
                          hint="export it again, or use onnx.version_converter")
    try:
        onnx.checker.check_model(model)
    except Exception as error:  # the checker raises errors of many classes
        raise ConfigError(f"is not a valid ONNX file: {str(error)[:300]}", where=where) from error
    return opset


def _input_spec(model: onnx.ModelProto, prepared: Preprocessing, where: str) -> InputSpec:
    """The samples that users send. Raises ConfigError unless the file has one input of samples whose shape is known."""
    weights = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in weights]
    if len(inputs) != 1:
        raise ConfigError(f"has the inputs {', '.join(v.name for v in inputs)[:200] or 'none'}", where=where,
                          expected="one, the samples")
    kind = inputs[0].type.tensor_type
    own = DTYPES.get(kind.elem_type)
    sizes = [d.dim_value if d.HasField("dim_value") else 0 for d in kind.shape.dim]
    if own is None or not 2 <= len(sizes) <= 5:
        raise ConfigError(f"takes {TensorProto.DataType.Name(kind.elem_type)} with {len(sizes)} axes", where=where,
                          expected="samples [N, …] of float32, uint8 or int64")
    found = tuple(sizes[1:])
    if prepared.shape is not None and _fits(found, prepared.shape):
        found = prepared.shape
    if not all(found) or math.prod(found) > MAX_SAMPLE:
        raise ConfigError(f"takes samples {[n or '?' for n in found]}", where=where,
                          expected=f"a known shape of at most {MAX_SAMPLE} values",
                          hint="--data with samples of the right shape, or export it with fixed sizes")
    dtype = prepared.dtype or own
    if dtype != own and own != "float32":
        raise ConfigError(f"takes {own}, and the samples are {dtype}", where=where)
    scale = prepared.scale if prepared.scale is not None else 1 / 255 if (dtype, own) == ("uint8", "float32") else 1.0
    for title, values in (("mean", prepared.mean), ("std", prepared.std)):
        if values and len(values) != found[0]:
            raise ConfigError(f"{title} has {len(values)} values", where=where, expected=f"{found[0]}, one per channel")
    if any(value <= 0 for value in prepared.std):
        raise ConfigError("std has a value that is not above 0", where=where)
    if own != "float32" and (scale != 1.0 or prepared.mean or prepared.std):
        raise ConfigError(f"takes {own} as it is: no scale, mean or std", where=where)
    return InputSpec(found, dtype, scale, prepared.mean, prepared.std)


def _fits(found: Sequence[int], shape: Sequence[int]) -> bool:
    return len(found) == len(shape) and all(a in (0, b) for a, b in zip(found, shape, strict=True))


def _chosen(model: onnx.ModelProto, output: str | None, where: str) -> str:
    """The name of the value that is the features. Raises ConfigError."""
    if output is None:
        return str(model.graph.output[0].name)
    made = {name: node.name for node in model.graph.node for name in node.output if name}
    of_node = {node.name: node.output[0] for node in model.graph.node if node.name and node.output}
    found = output if output in made else of_node.get(output)
    if found is None:
        near = schema.did_you_mean(output, [*made, *of_node])
        last = ", ".join(list(made)[-8:])
        raise ConfigError(f"has no node '{output[:200]}'{near}", where=where, expected=f"one such as {last}",
                          hint="metafleet backbone show FILE.onnx lists them")
    return found


def _cut(model: onnx.ModelProto, chosen: str) -> None:
    """Leaves the nodes and weights that ``chosen`` needs."""
    needed, kept = {chosen}, []
    for node in reversed(model.graph.node):
        if needed & set(node.output):
            kept.append(node)
            needed |= {*node.input, *_of_subgraphs(node)}
    weights = [tensor for tensor in model.graph.initializer if tensor.name in needed]
    names = {tensor.name for tensor in model.graph.initializer}
    inputs = [value for value in model.graph.input if value.name not in names]
    for field, values in (("node", kept[::-1]), ("initializer", weights), ("input", inputs)):
        copies = [type(value).FromString(value.SerializeToString()) for value in values]
        model.graph.ClearField(field)
        getattr(model.graph, field).extend(copies)
    del model.graph.value_info[:], model.graph.output[:]


def _of_subgraphs(node: onnx.NodeProto) -> set[str]:
    """Outer values that the branches and loops of a node may use."""
    graphs = [a.g for a in node.attribute if a.HasField("g")] + [g for a in node.attribute for g in a.graphs]
    return {name for g in graphs for inner in g.node for name in (*inner.input, *_of_subgraphs(inner))} | {
        value.name for g in graphs for value in g.output}  # fmt: skip


def _put_in_front(model: onnx.ModelProto, spec: InputSpec) -> None:
    """The input becomes ``x``, raw samples; the preprocessing makes what the file took."""
    inner = model.graph.input[0]
    number, former = inner.type.tensor_type.elem_type, inner.name
    ones, steps = (1,) * (len(spec.shape) - 1), []
    if spec.scale != 1.0:
        steps.append(("Mul", np.array(spec.scale, np.float32)))
    steps += [(kind, np.array(values, np.float32).reshape(1, -1, *ones))
              for kind, values in (("Sub", spec.mean), ("Div", spec.std)) if values]  # fmt: skip
    nodes, at = [helper.make_node("Cast", [X], [f"{OWN}cast"], to=number)], f"{OWN}cast"
    for kind, value in steps:
        name, after = f"{OWN}{kind.lower()}", f"{OWN}{kind.lower()}ed"
        model.graph.initializer.append(numpy_helper.from_array(value, name))
        nodes.append(helper.make_node(kind, [at, name], [after]))
        at = after
    nodes.append(helper.make_node("Identity", [at], [former]))
    rest = [onnx.NodeProto.FromString(node.SerializeToString()) for node in model.graph.node]
    del model.graph.node[:], model.graph.input[:]
    model.graph.node.extend([*nodes, *rest])
    raw = next(kind for kind, name in DTYPES.items() if name == spec.dtype)
    model.graph.input.append(helper.make_tensor_value_info(X, raw, ["n", *spec.shape]))


def _shape(model: onnx.ModelProto, chosen: str, spec: InputSpec, where: str) -> tuple[int, ...]:
    """The shape of the chosen value for one sample, found by running the file up to there."""
    trial = onnx.ModelProto.FromString(model.SerializeToString())
    trial.graph.output.append(helper.make_tensor_value_info(chosen, TensorProto.FLOAT, None))
    found = _run(bytes(trial.SerializeToString()), samples(spec, 2, 0), where)
    said = chosen.removeprefix(FORMER)
    if found.ndim < 2 or len(found) != 2 or found.dtype != np.float32 or not found.shape[1]:
        raise ConfigError(f"'{said}' is {found.dtype} {list(found.shape)} for two samples", where=where,
                          expected="float32 features [2, D], or channels first, [2, D, …]",
                          hint="choose another node, or export the file with a first axis of any size")
    shape: tuple[int, ...] = found.shape[1:]
    width = max(shape) if _one_position(shape) else shape[0]
    if width > MAX_WIDTH:
        raise ConfigError(f"'{said}' has {width} features", where=where, expected=f"at most {MAX_WIDTH}")
    return shape


def _one_position(shape: tuple[int, ...]) -> bool:
    """Whether the values are the features of one position, whichever axis they lie along: [D, 1, 1], [1, 1, D]."""
    return math.prod(shape) == max(shape)


def _put_behind(model: onnx.ModelProto, chosen: str, shape: tuple[int, ...], opset: int) -> None:
    """The output becomes ``z`` [n, D]: the mean over positions where the chosen value has several."""
    axes = list(range(2, 1 + len(shape)))
    if _one_position(shape):
        node = helper.make_node("Flatten", [chosen], [Z], axis=1)
    elif opset >= REDUCE_TAKES_AXES:
        model.graph.initializer.append(numpy_helper.from_array(np.array(axes, np.int64), f"{OWN}axes"))
        node = helper.make_node("ReduceMean", [chosen, f"{OWN}axes"], [Z], keepdims=0)
    else:
        node = helper.make_node("ReduceMean", [chosen], [Z], axes=axes, keepdims=0)
    model.graph.node.append(node)
    model.graph.output.append(helper.make_tensor_value_info(Z, TensorProto.FLOAT, ["n", None]))


def golden(data: bytes, spec: InputSpec, where: str) -> tuple[Array, Array]:
    """Random samples and their features. Raises ConfigError for a file that mixes samples or gives no numbers."""
    x = samples(spec, GOLDEN, 0)
    z = _run(data, x, where)
    if z.ndim != 2 or not np.isfinite(z).all():
        raise ConfigError("gives values that are not finite on random samples", where=where)
    alone = np.concatenate([_run(data, x[k : k + 1], where) for k in range(GOLDEN)])
    if not difference(alone, z) <= FLOAT_TOLERANCE:
        raise ConfigError("gives a sample other features alone than among others", where=where,
                          hint="export it in evaluation mode, so that samples are not mixed")
    return x, z


def _run(data: bytes, x: Array, where: str) -> Array:
    try:
        return open_on(data, CPU)(x)
    except BundleError as error:
        raise ConfigError(error.what, where=where) from error
    except Exception as error:  # onnxruntime raises errors of many classes, none of them documented
        raise ConfigError(
            f"does not run on {len(x)} samples: {str(error)[-300:]}", where=where,
            hint="export it with a first axis of any size (dynamic_axes, dynamic_shapes)",
        ) from error


def nodes(path: Path) -> list[tuple[str, str]]:
    """(operator, value) of every node of an ONNX file, in order. Raises ConfigError."""
    try:
        model = onnx.load_model_from_string(storage.read_bytes(path, limit=MAX_BYTES))
    except Exception as error:  # protobuf raises errors of many classes
        raise ConfigError("is not an ONNX file", where=str(path)) from error
    return [(node.op_type, name) for node in model.graph.node[:MAX_NODES] for name in node.output if name]

