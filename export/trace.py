"""Functions of torch tensors as ONNX graphs: traced by ``make_fx`` with symbolic sizes, exported with ``lowering``.

A traced function may differentiate once, or twice within ``second_derivatives.Twice``.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence

import onnx
import torch
from onnx_ir import to_proto
from onnx_ir.passes import common
from onnxscript.optimizer import fold_constants
from torch import Tensor
from torch._dispatch.python import enable_python_dispatcher
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.fx.experimental.proxy_tensor import make_fx
from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext
from torch.nn.attention import SDPBackend, sdpa_kernel

from export.graph import OPSET, TRACED_SAMPLES, quiet, root_cause
from export.lowering import DECOMPOSED, TRANSLATED
from fleet_core.base.errors import BundleError

_CLEANUP_PASSES = (
    common.IdentityEliminationPass, common.CommonSubexpressionEliminationPass, common.RemoveUnusedNodesPass,
    common.ClearMetadataAndDocStringPass,
)  # fmt: skip

RANDOM = ("bernoulli", "dropout", "rand", "normal_", "multinomial")
"""Parts of the names of operations that draw random numbers."""


def exported(
    function: Callable[..., Sequence[Tensor]], inputs: dict[str, Tensor], outputs: Collection[str],
    batches: Sequence[Collection[str]], what: str, hint: str,
) -> tuple[onnx.GraphProto, torch.fx.GraphModule]:
    """(the graph, its trace) of ``function`` of the tensors ``inputs``, which gives the tensors ``outputs``.

    batches: sets of inputs whose first axes have one size, of any number; all other sizes are fixed. Raises
    BundleError, which says that ``what`` cannot be exported, and why.
    """
    sizes = {name: number for number, batch in enumerate(batches) for name in batch}
    dims = [torch.export.Dim(f"size{number}", min=1) for number in range(len(batches))]
    shapes = tuple({0: dims[sizes[name]]} if name in sizes else None for name in inputs)
    try:
        with quiet(), sdpa_kernel(SDPBackend.MATH):
            traced = _traced(function, inputs, sizes)
            drawing = {str(n.target) for n in traced.graph.nodes if any(part in str(n.target) for part in RANDOM)}
            if drawing:
                raise NotImplementedError(f"it draws at random in training ({', '.join(sorted(drawing))})")
            program = torch.export.export(traced, tuple(inputs.values()), dynamic_shapes=shapes, strict=False)
            onnx_program = torch.onnx.export(
                program, dynamo=True, opset_version=OPSET, optimize=False, verbose=False, input_names=list(inputs),
                output_names=list(outputs), custom_translation_table=TRANSLATED,
            )
    except Exception as error:  # torch raises whatever the model's code makes it raise
        raise BundleError(f"{what} cannot be exported: {root_cause(error)}", hint=hint) from error
    if onnx_program is None:
        raise BundleError(f"{what} cannot be exported", hint=hint)
    fold_constants(onnx_program.model)
    for cleanup in _CLEANUP_PASSES:
        cleanup()(onnx_program.model)
    return to_proto(onnx_program.model).graph, traced


def _traced(
    function: Callable[..., Sequence[Tensor]], inputs: dict[str, Tensor], sizes: Collection[str]
) -> torch.fx.GraphModule:
    """``function`` as a graph of torch operations. sizes: the inputs whose first axis has any size."""
    mode = FakeTensorMode(shape_env=ShapeEnv(), allow_non_fake_inputs=True)

    def fake(name: str, tensor: Tensor) -> Tensor:
        first = DimDynamic.DYNAMIC if name in sizes else DimDynamic.STATIC
        axes = [first, *[DimDynamic.STATIC] * (tensor.ndim - 1)][: tensor.ndim]
        made = mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext(dynamic_sizes=axes))
        return made.requires_grad_() if tensor.requires_grad else made

    fakes = [fake(name, tensor) for name, tensor in inputs.items()]
    with mode, enable_python_dispatcher():
        return make_fx(function, decomposition_table=DECOMPOSED)(*fakes)


def bytes_per_sample(traced: torch.fx.GraphModule) -> int:
    """Bytes that the operations of a trace of ``TRACED_SAMPLES`` output per sample, without views; at least 1."""
    outputs = (n.meta.get("val") for n in traced.graph.nodes if not getattr(n.target, "is_view", True))
    of_samples = [v for v in outputs if isinstance(v, Tensor) and any(type(size) is not int for size in v.shape[:1])]
    return 1 + sum(int(v.numel()) * v.element_size() for v in of_samples) // TRACED_SAMPLES
