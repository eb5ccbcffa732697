"""A model's gradient steps as an ONNX graph ``adapt``, so that a device personalizes without torch.

w ← w − a∘∇f(w) over the whole support set, f the mean cross-entropy, as ``fleet_core.learning.personal_model`` steps:
MAML's inner steps and fine-tuning with one rate for all (``lr``), Meta-SGD with a learned rate for every value
(``rates``).

Inputs: ``support_x`` raw samples [S, *shape], ``support_y`` int64 [S], ``steps`` int64, and ``lr`` float32 unless the
rates are learned. Parameters are external initializers ``group/name``, rates ``rates/group.name``. Outputs:
``adapted/group/name`` for every parameter of the groups that move.

One gradient is traced here, by ``make_fx`` over autograd with the number of samples symbolic and then by torch's
exporter with what ``export.lowering`` adds to it; ``export.loops`` puts its loops around it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import onnx
import torch
from onnx import helper
from onnx_ir import to_proto
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants
from torch import Tensor, nn
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.func import functional_call
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from export import gate
from export.graph import IR_VERSION, OPSET, TRACED_SAMPLES, _cause, _quiet, export_graph, samples
from export.loops import Loops
from export.lowering import DECOMPOSED, TRANSLATED
from fleet_core.base import storage, trees
from fleet_core.base.errors import BundleError
from fleet_core.base.trees import Params
from fleet_core.learning import losses
from fleet_core.learning.gradient_estimators import entropy
from fleet_core.learning.gradients import leaves, value_and_gradient
from fleet_core.learning.local_training import CHUNK
from fleet_core.learning.models import Network, build, outputs, to_torch
from fleet_core.model.graph_bundle import GOLDEN_STEPS, AdaptInfo, Graph
from fleet_core.model.layout import MODEL_GROUPS, Layout

PASS_BYTES = 12 << 20
"""What one pass may compute at once, in bytes; it decides how many samples a pass takes."""

EMBEDDED = 64
"""Samples of a pass where the head alone moves, as many as a device embeds at once."""

WHOLE = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Layers that mix the samples of a pass, which then takes as many as torch takes at once, ``CHUNK``."""

HEAD = ("head",)

GOLDEN_SHARE = 1e-3
"""By how much the first golden step moves the weights, relative to their length."""

INSTEAD = "take a method of class means (proto), or one of which the head alone moves"

_CLEANING = (
    common.IdentityEliminationPass, common.CommonSubexpressionEliminationPass, common.RemoveUnusedNodesPass,
    common.ClearMetadataAndDocStringPass,
)  # fmt: skip


def with_adapt(graph: Graph, *, rates: bool, groups: tuple[str, ...] = MODEL_GROUPS) -> Graph:
    """The bundle ``graph``, which has ``predict``, with its graph ``adapt``, gated; arguments as of ``export_adapt``.

    Raises BundleError.
    """
    layout, seed, x = graph.layout, graph.info.seed, graph.golden["x"]
    if "predict" not in graph.graphs:
        raise BundleError("the bundle has no graph 'predict' to answer with adapted weights")
    data = export_adapt(layout, rates=rates, groups=groups, seed=seed, embed=graph.graphs.get("embed", b""))
    network, y = build(layout).eval(), np.arange(len(x)) % len(layout.classes)
    how = AdaptInfo(groups, rates, _golden_lr(network, trees.only(layout.seeded(seed), MODEL_GROUPS), groups, x, y))
    adapted = replace(graph, adapt=data, info=replace(graph.info, adapt=how))
    weights = adapted.adapt_weights(seed)
    stepped = gate.steps_in_torch(adapted, network, weights, x, y)
    golden = np.stack([_golden(network, weights, stepped[steps], x) for steps in GOLDEN_STEPS])
    adapted = replace(adapted, golden={**graph.golden, "y": y, "adapt": golden})
    gate.check_adapt(adapted, network)
    return adapted


def _golden_lr(network: Network, weights: Params, groups: tuple[str, ...], x: Any, y: Any) -> float:
    """The rate whose first step is ``GOLDEN_SHARE`` of the weights that move."""
    w = to_torch(weights)
    _, gradient = value_and_gradient(entropy(network, torch.tensor(x), torch.tensor(y)), leaves(w))
    length = trees.norm(trees.only(gradient, groups)) or 1.0
    return float(np.float32(GOLDEN_SHARE * trees.norm(trees.only(w, groups)) / length))


def _golden(network: Network, weights: Params, moved: dict[str, Any], x: Any) -> Any:
    """Logits of x under ``weights`` with the arrays ``moved`` in their place."""
    w = storage.unflatten({**storage.flatten(trees.only(weights, MODEL_GROUPS)), **moved})
    with torch.no_grad():
        return outputs(network, to_torch(w), torch.tensor(x), "predict").numpy()


def export_adapt(
    layout: Layout, *, rates: bool, groups: tuple[str, ...] = MODEL_GROUPS, seed: int = 0, embed: bytes = b""
) -> bytes:
    """The ONNX file ``adapt`` for ``layout``'s model, not yet gated.

    rates: learned rates in place of ``lr``. groups: those of ``body`` and ``head`` that move. seed: of the samples that
    are traced. embed: the layout's graph of that kind, where it is at hand. Raises BundleError for a model whose steps
    do not become a graph.
    """
    network = build(layout).eval()
    _check_groups(network, layout, groups)
    moving = _keys(layout, groups)
    body = None
    if groups == HEAD:
        body = onnx.load_model_from_string(embed or export_graph(layout, seed=seed).graphs["embed"]).graph
        z = torch.randn((TRACED_SAMPLES, layout.embedding), generator=torch.Generator().manual_seed(seed))
        gradient, bytes_each = _gradient(layout, _head_logits(network), moving, moving, z)
    else:
        x = torch.tensor(samples(layout.input, TRACED_SAMPLES, seed))
        gradient, bytes_each = _gradient(layout, _logits(network), _keys(layout, MODEL_GROUPS), moving, x)
    number = _samples_of_a_pass(network, groups, bytes_each)
    graph = Loops(layout, moving, rates=rates, number=number).graph(gradient, body)
    model = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)])
    return bytes(model.SerializeToString(deterministic=True))


def _check_groups(network: Network, layout: Layout, groups: tuple[str, ...]) -> None:
    if not layout.parameters(HEAD):
        raise BundleError(
            f"the model '{layout.model}' has no head to step with", hint="take a method of class means (proto)"
        )
    if not layout.parameters(groups):
        raise BundleError(f"the model '{layout.model}' has nothing in {' and '.join(groups)} to step with")
    recurrent = next((m for m in network.modules() if isinstance(m, nn.RNNBase)), None)
    if "body" in groups and recurrent is not None:
        layers = f"recurrent layers ({type(recurrent).__name__})"
        raise BundleError(f"the model '{layout.model}' has {layers}, whose steps do not become a graph", hint=INSTEAD)


def _samples_of_a_pass(network: Network, groups: tuple[str, ...], bytes_each: int) -> int:
    if any(isinstance(module, WHOLE) for module in network.modules()):
        return CHUNK
    return EMBEDDED if groups == HEAD else max(1, min(CHUNK, PASS_BYTES // bytes_each))


def _keys(layout: Layout, groups: tuple[str, ...]) -> list[str]:
    return [f"{t.group}/{t.name}" for t in layout.tensors if t.group in groups]


# One gradient, traced ------------------------------------------------------------------------------------------------

Logits = Callable[[dict[str, Tensor], Tensor], Tensor]


def _logits(network: Network) -> Logits:
    return lambda w, x: outputs(network, storage.unflatten(w), x, "predict")


def _head_logits(network: Network) -> Logits:
    head = cast(Any, network.core).head
    return lambda w, z: functional_call(head, {key.removeprefix("head/head."): a for key, a in w.items()}, (z,))


def _gradient(
    layout: Layout, logits: Logits, taken: list[str], moving: list[str], x: Tensor
) -> tuple[onnx.GraphProto, int]:
    """(graph from the parameters ``taken``, samples and labels to the gradients of ``moving``, summed over samples; the
    bytes that it computes for each sample)."""

    def gradient(parameters: Sequence[Tensor], x: Tensor, y: Tensor) -> Sequence[Tensor]:
        w = dict(zip(taken, parameters, strict=True))
        likely = torch.log_softmax(logits(w, x), 1)
        loss = -(likely * losses.one_hot(y, len(layout.classes), likely.dtype)).sum()
        return torch.autograd.grad(loss, [w[key] for key in moving], allow_unused=True, materialize_grads=True)

    shapes = {f"{t.group}/{t.name}": t.shape for t in layout.tensors}
    parameters, y = [torch.ones(shapes[key]) for key in taken], torch.arange(len(x)) % len(layout.classes)
    names = [f"now/{key}" if key in moving else key for key in taken]
    try:
        with _quiet(), sdpa_kernel(SDPBackend.MATH):
            traced = _traced(gradient, parameters, x, y)
            batch = torch.export.Dim("batch", min=1)
            program = torch.export.export(
                traced, (parameters, x, y), dynamic_shapes=([None] * len(taken), {0: batch}, {0: batch}), strict=False
            )
            exported = torch.onnx.export(
                program, dynamo=True, opset_version=OPSET, optimize=False, verbose=False,
                input_names=[*names, "pass/x", "pass/y"], output_names=[f"gradient/{key}" for key in moving],
                custom_translation_table=TRANSLATED,
            )  # fmt: skip
    except Exception as error:  # torch raises whatever the model's code makes it raise
        raise BundleError(
            f"the gradient steps of the model '{layout.model}' do not become a graph: {_cause(error)}", hint=INSTEAD
        ) from error
    if exported is None:
        raise BundleError(f"the gradient steps of the model '{layout.model}' do not become a graph", hint=INSTEAD)
    fold_constants(exported.model)
    for cleaning in _CLEANING:
        cleaning()(exported.model)
    return to_proto(exported.model).graph, _bytes_per_sample(traced)


def _traced(gradient: Callable[..., Any], parameters: list[Tensor], x: Tensor, y: Tensor) -> torch.fx.GraphModule:
    """``gradient`` as one graph of torch operations, for any number of samples."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def fake(tensor: Tensor, first: DimDynamic) -> Tensor:
        sizes = [first, *[DimDynamic.STATIC] * (tensor.ndim - 1)][: tensor.ndim]
        return mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=sizes))

    leaves = [fake(parameter, DimDynamic.STATIC).requires_grad_() for parameter in parameters]
    with mode, enable_python_dispatcher():
        return make_fx(gradient, decomposition_table=DECOMPOSED)(
            leaves, fake(x, DimDynamic.DYNAMIC), fake(y, DimDynamic.DYNAMIC)
        )


def _bytes_per_sample(traced: torch.fx.GraphModule) -> int:
    """What the operations of a trace put out, over the samples that it was traced with."""
    made = (n.meta.get("val") for n in traced.graph.nodes if not getattr(n.target, "is_view", True))
    of_samples = [v for v in made if isinstance(v, Tensor) and any(type(size) is not int for size in v.shape[:1])]
    return 1 + sum(int(v.numel()) * v.element_size() for v in of_samples) // TRACED_SAMPLES
