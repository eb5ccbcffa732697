"""The bundle that a device installs: its files, their limits, and its manifest.

    manifest.json             describes the bundle; lists size and sha256 of every other file but the next
    manifest.sig              the signature of the manifest by the fleet's key, which the manifest names
    weights.safetensors       the served model and the initial values of groups that a device keeps, as ``group/name``
    rates.safetensors         learned rates (Meta-SGD), as ``rates/group.name``; always fp32
    embed.onnx, predict.onnx, adapt.onnx    the graphs of ``fleet_core.model.graph_bundle``, their parameters external
    embed-int8.onnx           the quantized encoder, including its weights
    backbone.safetensors      the frozen backbone, if the model has one (``fleet_core.backbone.backbone_file``)
    golden.npz                golden inputs and outputs of ``fleet_core.model.graph_bundle``

A bundle is a folder, or one file whose name ends in ``.bundle``: a safetensors container with each of these files as a
uint8 array. Unlike an archive it has no paths, links, owners or permissions to guard against.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet_core.algorithms.interface import Method
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import schema
from fleet_core.base.errors import BundleError
from fleet_core.base.trees import Params
from fleet_core.model.graph_bundle import GRAPH_GROUPS, Graph, GraphInfo
from fleet_core.model.layout import Layout
from fleet_core.personalization.gradient_steps import Steps
from fleet_core.protocol.round_messages import MethodRef

FORMAT = 1
SIGNED_AS = b"metafleet bundle 1\n"
"""The signed text is this prefix and the manifest, so that the signature is valid for nothing else."""
MANIFEST, SIGNATURE, WEIGHTS, RATES, GOLDEN, INT8, BACKBONE = (
    "manifest.json", "manifest.sig", "weights.safetensors", "rates.safetensors", "golden.npz", "embed-int8.onnx",
    "backbone.safetensors",
)  # fmt: skip
GRAPHS = {kind: f"{kind}.onnx" for kind in (*GRAPH_GROUPS, "adapt")}
STORED = {"fp32": "float32", "fp16": "float16"}
"""The types in which weights can be stored; they are float32 in use."""

LIMITS: Mapping[str, int] = {
    MANIFEST: 8 << 20, SIGNATURE: 1 << 10, WEIGHTS: 1 << 30, RATES: 1 << 30, GOLDEN: 64 << 20, INT8: 1 << 29,
    BACKBONE: 1 << 29,
    **dict.fromkeys(GRAPHS.values(), 64 << 20),
}  # fmt: skip
"""The largest size in bytes of each file of a bundle."""

MAX_BYTES = 2 << 30
SUFFIX = ".bundle"


@dataclass(frozen=True)
class FileInfo:
    """size: bytes."""

    size: int = field(metadata={"min": 1, "max": max(LIMITS.values())})
    sha256: str = field(metadata={"pattern": r"[0-9a-f]{64}"})


@dataclass(frozen=True)
class ModelInfo:
    """id: id of the served weights in float32 (``payloads.identity``). round: round of the served model. stored: type
    of the weights in the file."""

    id: str = field(metadata={"pattern": r"[0-9a-f]{32}"})
    round: int = field(metadata={"min": 0, "max": 2**53})
    stored: str = field(metadata={"choices": tuple(STORED)})


@dataclass(frozen=True)
class Int8Info:
    """What the quantized encoder loses.

    fp32, int8: accuracy of class means with each encoder, over ``tasks`` few-shot tasks with ``shots`` samples of each
    class and ``queries`` answers. calibrated: number of calibration samples, none of them among the queries.
    difference: between both encoders on the golden samples, relative to the length of the embeddings.
    """

    fp32: float = field(metadata={"min": 0.0, "max": 1.0})
    int8: float = field(metadata={"min": 0.0, "max": 1.0})
    tasks: int = field(metadata={"min": 1, "max": 1_000_000})
    shots: int = field(metadata={"min": 1, "max": 1_000_000})
    queries: int = field(metadata={"min": 1, "max": 1_000_000_000})
    calibrated: int = field(metadata={"min": 1, "max": 1_000_000_000})
    difference: float = field(metadata={"min": 0.0, "max": 10.0})


@dataclass(frozen=True)
class Manifest:
    """fleet: name of the fleet that trained the model. key: the fleet's public key, in hex. adaptation: the gradient
    steps of a device, None when it takes none. files: all files but manifest and signature."""

    format: int = field(metadata={"min": FORMAT, "max": FORMAT})
    fleet: str = field(metadata={"pattern": r"[A-Za-z0-9_-]{1,64}"})
    key: str = field(metadata={"pattern": r"[0-9a-f]{64}"})
    method: MethodRef
    model: ModelInfo
    adaptation: Steps | None
    graph: GraphInfo
    int8: Int8Info | None
    layout: Layout
    layout_hash: str = field(metadata={"pattern": r"[0-9a-f]{16}"})
    files: Mapping[str, FileInfo] = field(default_factory=dict)


@dataclass(frozen=True)
class Bundle:
    """A bundle in memory. params: the served model's groups, including ``rates`` where they are learned; the initial
    values of groups that a device keeps are in ``graph.first``. int8: the quantized encoder, empty when there is none.
    backbone: its file, empty when the model has none.
    signed: it was read, and signed with the key that its manifest names.
    """

    manifest: Manifest
    graph: Graph
    params: Params
    int8: bytes = b""
    signed: bool = field(default=False, compare=False)
    backbone: bytes = b""

    @property
    def method(self) -> Method:
        return METHODS[self.manifest.method.name]

    @property
    def hyper(self) -> Any:
        """The method's hyper-parameters. Raises BundleError."""
        found, problems = schema.read(self.method.hyper, self.manifest.method.hyper)
        if found is None:
            raise BundleError("the method's hyper-parameters are malformed: " + "; ".join(map(str, problems[:5])))
        return found
