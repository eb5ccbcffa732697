"""Exports a model's gradient steps as an ONNX graph ``adapt``, so that a device can personalize without torch.

w ← w − a∘∇f(w) over the whole support set, f the mean cross-entropy or the loss of the layout's task, as in
``fleet_core.learning.personal_model``: MAML's inner steps and fine-tuning with one rate (``lr``), Meta-SGD with a
learned rate for every value (``rates``).

Inputs: ``support_x`` raw samples [S, *shape], ``support_y`` labels int64 [S] or standardized targets float32 [S, K],
``steps`` int64, and ``lr`` float32 unless the
rates are learned. Parameters are external initializers ``group/name``, rates ``rates/group.name``. Outputs:
``adapted/group/name`` for every parameter of the adapted groups.

One gradient is traced by ``export.trace``, with a symbolic number of samples. ``export.loops`` builds the loops around
it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any, cast

import numpy as np
import onnx
import torch
from onnx import helper
from torch import Tensor, nn
from torch.func import functional_call

from export import gate
from export.graph import IR_VERSION, OPSET, TRACED_SAMPLES, export_graph, samples
from export.loops import Loops
from export.trace import bytes_per_sample, exported
from fleet_core.base import storage, trees
from fleet_core.base.errors import BundleError
from fleet_core.base.trees import Params
from fleet_core.learning import losses
from fleet_core.learning.gradient_estimators import entropy
from fleet_core.learning.gradients import leaves, value_and_gradient
from fleet_core.learning.models import Network, build, outputs, to_torch
from fleet_core.model.graph_bundle import GOLDEN_STEPS, AdaptInfo, Graph, golden_truths
from fleet_core.model.layout import MODEL_GROUPS, Layout
from fleet_core.training.round_plans import CHUNK

PASS_BYTES = 12 << 20
"""Bytes that the operations of one pass may output; it determines the samples per pass."""

HEAD_PASS = 64
"""Samples per pass of the steps if only the head is adapted. Their embeddings are small."""

EMBEDDED_AT_ONCE = 4
"""Samples that the body then embeds at a time. More need more memory, and for a large model more time
(benchmarks/on_device/batches.json)."""

MIXING = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d)
"""Layers that mix the samples of a pass. With them a pass takes ``CHUNK`` samples, as torch does."""

HEAD = ("head",)

GOLDEN_SHARE = 1e-3
"""How far the first golden step moves the weights, relative to their norm."""

INSTEAD = "take a method of class means (proto), or one that adapts only the head"


def with_adapt(graph: Graph, *, rates: bool, groups: tuple[str, ...] = MODEL_GROUPS) -> Graph:
    """The bundle ``graph``, which must have ``predict``, with the checked graph ``adapt``. Arguments as in
    ``export_adapt``. Raises BundleError."""
    layout, seed, x = graph.layout, graph.info.seed, graph.golden["x"]
    if "predict" not in graph.graphs:
        raise BundleError("the bundle has no graph 'predict', which answers with adapted weights")
    data = export_adapt(layout, rates=rates, groups=groups, seed=seed, embed=graph.graphs.get("embed", b""))
    network, y = build(layout).eval(), golden_truths(layout, len(x))
    info = AdaptInfo(groups, rates, _golden_lr(network, trees.only(layout.seeded(seed), MODEL_GROUPS), groups, x, y))
    extended = replace(graph, adapt=data, info=replace(graph.info, adapt=info))
    weights = extended.adapt_weights(seed)
    adapted = gate.steps_in_torch(extended, network, weights, x, y)
    golden = np.stack([_golden(network, weights, adapted[steps], x) for steps in GOLDEN_STEPS])
    extended = replace(extended, golden={**graph.golden, "y": y, "adapt": golden})
    gate.check_adapt(extended, network)
    return extended


def _golden_lr(network: Network, weights: Params, groups: tuple[str, ...], x: Any, y: Any) -> float:
    """The rate at which the first step is ``GOLDEN_SHARE`` of the norm of the adapted weights."""
    w = to_torch(weights)
    _, gradient = value_and_gradient(entropy(network, torch.tensor(x), torch.tensor(y)), leaves(w))
    length = trees.norm(trees.only(gradient, groups)) or 1.0
    return float(np.float32(GOLDEN_SHARE * trees.norm(trees.only(w, groups)) / length))


def _golden(network: Network, weights: Params, adapted: dict[str, Any], x: Any) -> Any:
    """Logits of x with ``weights``, of which ``adapted`` replaces some."""
    w = storage.unflatten({**storage.flatten(trees.only(weights, MODEL_GROUPS)), **adapted})
    with torch.no_grad():
        return outputs(network, to_torch(w), torch.tensor(x), "predict").numpy()


def export_adapt(
    layout: Layout, *, rates: bool, groups: tuple[str, ...] = MODEL_GROUPS, seed: int = 0, embed: bytes = b""
) -> bytes:
    """The ONNX file ``adapt`` of ``layout``'s model, unchecked.

    rates: learned rates in place of ``lr``. groups: the adapted ones of ``body`` and ``head``. seed: of the traced
    samples. embed: the layout's graph ``embed``, if it exists already. Raises BundleError if the steps cannot be
    exported.
    """
    network = build(layout).eval()
    _check_groups(network, layout, groups)
    adapted = _keys(layout, groups)
    body = None
    if groups == HEAD:
        body = onnx.load_model_from_string(embed or export_graph(layout, seed=seed).graphs["embed"]).graph
        z = torch.randn((TRACED_SAMPLES, layout.embedding), generator=torch.Generator().manual_seed(seed))
        gradient, sample_bytes = _gradient(layout, _head_logits(network), adapted, adapted, z)
    else:
        x = torch.tensor(samples(layout.input, TRACED_SAMPLES, seed))
        gradient, sample_bytes = _gradient(layout, _logits(network), _keys(layout, MODEL_GROUPS), adapted, x)
    at_once = _samples_at_once(network, groups, sample_bytes)
    graph = Loops(layout, adapted, rates=rates, at_once=at_once).graph(gradient, body)
    model = helper.make_model(graph, ir_version=IR_VERSION, opset_imports=[helper.make_opsetid("", OPSET)])
    return bytes(model.SerializeToString(deterministic=True))


def _check_groups(network: Network, layout: Layout, groups: tuple[str, ...]) -> None:
    if not layout.parameters(HEAD):
        raise BundleError(
            f"the model '{layout.model}' has no head to adapt", hint="take a method of class means (proto)"
        )
    if not layout.parameters(groups):
        raise BundleError(f"the model '{layout.model}' has no parameters in {' and '.join(groups)} to adapt")
    recurrent = next((m for m in network.modules() if isinstance(m, nn.RNNBase)), None)
    if "body" in groups and recurrent is not None:
        layers = f"recurrent layers ({type(recurrent).__name__})"
        raise BundleError(f"the model '{layout.model}' has {layers}, whose steps cannot be exported", hint=INSTEAD)


def _samples_at_once(network: Network, groups: tuple[str, ...], sample_bytes: int) -> dict[str, int]:
    """As ``Loops`` takes it."""
    mixes = any(isinstance(module, MIXING) for module in network.modules())
    if groups == HEAD:
        return {"pass": CHUNK if mixes else HEAD_PASS, "embedding": CHUNK if mixes else EMBEDDED_AT_ONCE}
    return {"pass": CHUNK if mixes else max(1, min(CHUNK, PASS_BYTES // sample_bytes))}


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
    layout: Layout, logits: Logits, inputs: list[str], adapted: list[str], x: Tensor
) -> tuple[onnx.GraphProto, int]:
    """(graph from the parameters ``inputs``, samples and labels to the gradients of ``adapted``, summed over samples;
    the bytes that its operations output per sample)."""

    def gradient(*tensors: Tensor) -> Sequence[Tensor]:
        *parameters, x, y = tensors
        w = dict(zip(inputs, parameters, strict=True))
        loss = _summed_loss(layout, logits(w, x), y)
        return torch.autograd.grad(loss, [w[key] for key in adapted], allow_unused=True, materialize_grads=True)

    shapes = {f"{t.group}/{t.name}": t.shape for t in layout.tensors}
    names = [f"now/{key}" if key in adapted else key for key in inputs]
    parameters = [torch.ones(shapes[key], requires_grad=True) for key in inputs]
    batch = {"pass/x": x, "pass/y": torch.tensor(golden_truths(layout, len(x)))}
    graph, traced = exported(
        gradient, {**dict(zip(names, parameters, strict=True)), **batch}, [f"gradient/{key}" for key in adapted],
        [tuple(batch)], f"the gradient steps of the model '{layout.model}'", INSTEAD,
    )
    return graph, bytes_per_sample(traced)


def _summed_loss(layout: Layout, out: Tensor, y: Tensor) -> Tensor:
    """The loss of each sample, summed."""
    if layout.task is not None:
        return losses.of_outputs(layout.task, out, y).sum() / len(layout.answers)
    log_probabilities = torch.log_softmax(out, 1)
    return -(log_probabilities * losses.one_hot(y, len(layout.classes), log_probabilities.dtype)).sum()
