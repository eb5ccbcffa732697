"""Operations of a gradient step that torch's exporter lacks or exports inefficiently: backward passes, and GroupNorm.

The gradient of a convolution's weight is one matrix product per kernel offset: the samples with channels last, shifted
by that offset, times the output gradient; with few channels one product covers all offsets. Max pools find their
indices by comparison with the maxima, and MaxUnpool uses them; torch's exporter pools twice to get torch's indices.

Shapes: N samples, G groups, M values per channel of a sample, C channels per group; in a convolution I input and O
output channels; P output positions.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import onnxscript
import torch
from torch import Tensor

import export.second_derivatives  # noqa: F401  declares metafleet.at_maxima

aten = torch.ops.aten
op: Any = onnxscript.opset18

COLUMNS = 64
"""Columns that one matrix product should have: with few channels, several offsets share a product."""

FEW = 16
"""With fewer channels all offsets share one product."""


# Decompositions in torch, applied when a step is traced ---------------------------------------------------------------


def avg_pool2d_backward(
    grad: Tensor, x: Tensor, kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int], ceil_mode: bool,
    count_include_pad: bool, divisor: int | None,
) -> Tensor:  # fmt: skip
    """aten.avg_pool2d_backward: spreads every value evenly over its window."""
    if ceil_mode or (any(padding) and not (count_include_pad or divisor)):
        raise NotImplementedError("the gradient of an average pool whose windows are of different sizes")
    flat, stride = grad.reshape(-1, 1, *grad.shape[-2:]), stride or kernel
    share = torch.full((1, 1, *kernel), 1 / (divisor or math.prod(kernel)), dtype=grad.dtype)
    left = left_over(x.shape[-2:], grad.shape[-2:], kernel, stride, padding, [1, 1])
    spread: Tensor = aten.convolution(flat, share, None, stride, padding, [1, 1], True, left, 1)
    return spread.reshape(x.shape)


def adaptive_avg_pool2d_backward(grad: Tensor, x: Tensor) -> Tensor:
    """aten._adaptive_avg_pool2d_backward, for windows that do not overlap."""
    kernel = [size // out for size, out in zip(x.shape[-2:], grad.shape[-2:], strict=True)]
    if [k * out for k, out in zip(kernel, grad.shape[-2:], strict=True)] != list(x.shape[-2:]):
        raise NotImplementedError("the gradient of an average pool whose windows are of different sizes")
    return avg_pool2d_backward(grad, x, kernel, kernel, [0, 0], False, True, None)


# Translations to ONNX, applied when it is exported --------------------------------------------------------------------


def convolution_backward(
    grad: Any, x: Any, weight: Any, bias_sizes: Sequence[int] | None, stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], transposed: bool, output_padding: Sequence[int], groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """aten.convolution_backward in ONNX: the gradients of x, weight and bias. Those that ``output_mask`` leaves out are
    placeholders."""
    to_x = to_weight = to_bias = op.Identity(weight)
    if output_mask[0] and transposed:
        pads = [*padding, *padding]
        to_x = op.Conv(grad, weight, strides=stride, pads=pads, dilations=dilation, group=groups)
    elif output_mask[0]:
        left = left_over(x.shape[2:], grad.shape[2:], weight.shape[2:], stride, padding, dilation)
        to_x = _transposed(grad, weight, stride, padding, dilation, left, groups)
    if output_mask[1]:
        large, small = (grad, x) if transposed else (x, grad)
        to_weight = _weight_gradient(large, small, list(weight.shape), stride, padding, dilation, groups)
    if output_mask[2]:
        to_bias = op.ReduceSum(grad, _ints(0, *range(2, len(grad.shape))), keepdims=0)
    return to_x, to_weight, to_bias


def _transposed(
    grad: Any, weight: Any, stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int], left: Sequence[int],
    groups: int,
) -> Any:  # fmt: skip
    """A transposed convolution. A 1-D convolution is computed as 2-D with height 1: 3 times as fast in onnxruntime
    1.23."""
    if len(stride) == 1:
        axis = _ints(2)
        with_height = (op.Unsqueeze(grad, axis), op.Unsqueeze(weight, axis))
        flat = _transposed(*with_height, [1, *stride], [0, *padding], [1, *dilation], [0, *left], groups)
        return op.Squeeze(flat, axis)
    return op.ConvTranspose(
        grad, weight, strides=stride, pads=[*padding, *padding], dilations=dilation, output_padding=left, group=groups
    )


def _weight_gradient(
    x: Any, grad: Any, shape: Sequence[int], stride: Sequence[int], padding: Sequence[int], dilation: Sequence[int],
    groups: int,
) -> Any:  # fmt: skip
    """The gradient of a convolution's weight [G·O, I, *kernel] from its input x [N, G·I, ...] and grad [N, G·O, ...]"""
    outputs, inputs, *kernel = shape
    n, out = len(kernel), list(grad.shape[2:])
    lead = [groups] if groups > 1 else []  # without this axis onnxruntime needs no general transposition
    k, each = len(lead), outputs // groups
    grad_NGOP = op.Reshape(grad, _ints(-1, *lead, each, math.prod(out)))
    grad_GOP = op.Reshape(op.Transpose(grad_NGOP, perm=[*range(1, k + 2), 0, k + 2]), _ints(*lead, each, -1))
    padded = op.Pad(x, _ints(0, 0, *padding, 0, 0, *padding)) if any(padding) else x
    sizes = [size + 2 * p for size, p in zip(x.shape[2:], padding, strict=True)]
    grouped = op.Reshape(padded, _ints(-1, *lead, inputs, *sizes)) if lead else padded
    windows = _Windows(out, kernel, stride, dilation)
    if inputs < FEW and not lead:
        by_offset = _product_of_rows(grouped, grad_GOP, inputs, windows)
    else:
        last = op.Transpose(grouped, perm=[*range(1, k + 1), 0, *range(k + 2, k + 2 + n), k + 1])
        by_offset = _product_of_columns(last, grad_GOP, inputs, lead, windows)
    return op.Transpose(op.Reshape(by_offset, _ints(outputs, *kernel, inputs)), perm=[0, n + 1, *range(1, n + 1)])


class _Windows(NamedTuple):
    """Sliding windows along the spatial axes of x. out: their number per axis."""

    out: Sequence[int]
    kernel: Sequence[int]
    stride: Sequence[int]
    dilation: Sequence[int]

    def offsets(self) -> list[tuple[int, ...]]:
        """The offset of each value of a window from its first value, row by row."""
        return list(itertools.product(*(range(0, k * d, d) for k, d in zip(self.kernel, self.dilation, strict=True))))

    def at(self, x: Any, offset: Sequence[int], first: int) -> Any:
        """The values at ``offset`` of all windows. first: index of the first spatial axis of x."""
        end = [start + (size - 1) * s + 1 for start, size, s in zip(offset, self.out, self.stride, strict=True)]
        axes = range(first, first + len(end))
        return op.Slice(x, _ints(*offset), _ints(*end), _ints(*axes), _ints(*self.stride))


def _product_of_rows(x: Any, grad_OP: Any, inputs: int, windows: _Windows) -> Any:
    """[O, offsets·I] from x [N, I, ...]: every channel at every offset is a row of one product. With few channels, rows
    of the image are longer pieces to copy than channels."""
    swapped, offsets = op.Transpose(x, perm=[1, 0, *range(2, 2 + len(windows.out))]), windows.offsets()
    rows = op.Concat(*[windows.at(swapped, offset, 2) for offset in offsets], axis=0)
    return op.MatMul(grad_OP, op.Transpose(op.Reshape(rows, _ints(len(offsets) * inputs, -1)), perm=[1, 0]))


def _product_of_columns(x: Any, grad_GOP: Any, inputs: int, lead: Sequence[int], windows: _Windows) -> Any:
    """[G, O, offsets·I] from x [G, N, ..., I], one product per few offsets."""
    shifted = [windows.at(x, offset, len(lead) + 1) for offset in windows.offsets()]
    per_product = max(1, COLUMNS // inputs)
    products = []
    for batch in (shifted[i : i + per_product] for i in range(0, len(shifted), per_product)):
        columns = op.Concat(*batch, axis=-1) if len(batch) > 1 else batch[0]
        products.append(op.MatMul(grad_GOP, op.Reshape(columns, _ints(*lead, -1, len(batch) * inputs))))
    return op.Concat(*products, axis=-1) if len(products) > 1 else products[0]


def group_norm(
    x: Any, weight: Any, bias: Any, samples: int, channels: int, size: int, groups: int, eps: float
) -> tuple[Any, Any, Any]:
    """aten.native_group_norm in ONNX: (y, means [N, G], 1 / standard deviations [N, G])."""
    shape, all_of_group = _ints(-1, groups, channels // groups, size), _ints(2, 3)
    x_NGCM = op.Reshape(x, shape)
    mean_NG11 = op.ReduceMean(x_NGCM, all_of_group)
    centred_NGCM = op.Sub(x_NGCM, mean_NG11)
    variance_NG11 = op.ReduceMean(op.Mul(centred_NGCM, centred_NGCM), all_of_group)
    rstd_NG11 = op.Reciprocal(op.Sqrt(op.Add(variance_NG11, op.Constant(value_float=eps))))
    y_NGCM = op.Mul(centred_NGCM, _times(rstd_NG11, weight, groups))
    y_NGCM = y_NGCM if bias is None else op.Add(y_NGCM, _of_groups(bias, groups))
    y = op.Reshape(y_NGCM, _ints(-1, *x.shape[1:]))
    return y, op.Squeeze(mean_NG11, all_of_group), op.Squeeze(rstd_NG11, all_of_group)


def group_norm_backward(
    grad: Any, x: Any, mean_NG: Any, rstd_NG: Any, weight: Any, samples: int, channels: int, size: int, groups: int,
    output_mask: Sequence[bool],
) -> tuple[Any, Any, Any]:  # fmt: skip
    """aten.native_group_norm_backward in ONNX: the gradients of x, weight and bias.

    With g the gradient times the weight, and x̂ = (x − mean) · rstd: rstd · (g − mean(g) − x̂ · mean(g · x̂)).
    """
    shape, last, row = _ints(-1, groups, channels // groups, size), _ints(3), _ints(channels)
    mean_NG11, rstd_NG11 = op.Unsqueeze(mean_NG, _ints(2, 3)), op.Unsqueeze(rstd_NG, _ints(2, 3))
    grad_NGCM, x_NGCM = op.Reshape(grad, shape), op.Reshape(x, shape)
    total_NGC1 = op.ReduceSum(grad_NGCM, last)
    along_NGC1 = op.Sub(op.ReduceSum(op.Mul(grad_NGCM, x_NGCM), last), op.Mul(total_NGC1, mean_NG11))
    normal_NGC1 = op.Mul(along_NGC1, rstd_NG11)
    share = op.Constant(value_float=groups / (channels * size))
    mean_grad, mean_normal = (
        op.Mul(op.ReduceSum(_times(part, weight, groups), _ints(2)), share) for part in (total_NGC1, normal_NGC1)
    )
    slope_NG11 = op.Mul(op.Mul(mean_normal, rstd_NG11), rstd_NG11)
    shift_NG11 = op.Sub(op.Mul(mean_NG11, slope_NG11), op.Mul(mean_grad, rstd_NG11))
    of_grad_NGCM = op.Mul(grad_NGCM, _times(rstd_NG11, weight, groups))
    to_x_NGCM = op.Add(op.Sub(of_grad_NGCM, op.Mul(x_NGCM, slope_NG11)), shift_NG11)
    to_weight, to_bias = (op.Reshape(op.ReduceSum(part, _ints(0)), row) for part in (normal_NGC1, total_NGC1))
    return op.Reshape(to_x_NGCM, _ints(-1, *x.shape[1:])), to_weight, to_bias


def _times(by_group: Any, weight: Any, groups: int) -> Any:
    return by_group if weight is None else op.Mul(by_group, _of_groups(weight, groups))


def _of_groups(weight: Any, groups: int) -> Any:
    """[G, C, 1]."""
    return op.Reshape(weight, _ints(groups, -1, 1))


def max_pool(
    x: Any, kernel_size: Sequence[int], stride: Sequence[int] = (), padding: Sequence[int] = (0,),
    dilation: Sequence[int] = (1,), ceil_mode: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """aten.max_pool_nd_with_indices in ONNX, but with indices into the whole flattened input."""
    n = len(kernel_size)
    stride, padding, dilation = (_each(v, n) for v in (stride or kernel_size, padding, dilation))
    where = {"kernel_shape": kernel_size, "strides": stride, "pads": [*padding, *padding], "dilations": dilation}
    if ceil_mode or any(padding):
        value, indices = op.MaxPool(x, **where, ceil_mode=int(ceil_mode))
        return value, indices
    value, _ = op.MaxPool(x, **where)
    spans = [d * (k - 1) + 1 for k, d in zip(kernel_size, dilation, strict=True)]
    out = [(size - span) // s + 1 for size, span, s in zip(x.shape[2:], spans, stride, strict=True)]
    return value, _first_of_window(x, value, _Windows(out, kernel_size, stride, dilation))


def _first_of_window(x: Any, value: Any, windows: _Windows) -> Any:
    """The index of the first value in each window that equals its maximum ``value``. Takes a third of the time of
    onnxruntime's MaxPool with indices, which counts them one by one."""
    n, channels, sizes = len(windows.out), x.shape[1], x.shape[2:]
    steps, offsets = [math.prod(sizes[i + 1 :]) for i in range(n)], windows.offsets()
    in_window = _int(_flat(offsets[-1], steps))
    for offset in offsets[-2::-1]:
        in_window = op.Where(op.Equal(windows.at(x, offset, 2), value), _int(_flat(offset, steps)), in_window)
    strides = [a * s for a, s in zip(steps, windows.stride, strict=True)]
    corners = _ints(*(_flat(place, strides) for place in itertools.product(*map(range, windows.out))))
    maps = op.Range(_int(0), op.Size(x), _int(math.prod(sizes)))  # where each channel of each sample begins
    in_map = op.Add(in_window, op.Reshape(corners, _ints(*windows.out)))
    return op.Add(in_map, op.Reshape(maps, _ints(-1, channels, *[1] * n)))


def _flat(place: Sequence[int], steps: Sequence[int]) -> int:
    return sum(p * s for p, s in zip(place, steps, strict=True))


def max_pool_backward(
    grad: Any, x: Any, kernel_size: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int], ceil_mode: bool, indices: Any,
) -> Any:  # fmt: skip
    """aten.max_pool_nd_with_indices_backward in ONNX, for the indices of ``max_pool``.

    MaxUnpool handles windows that are disjoint and inside x; the gradients of overlapping windows are added.
    """
    n, stride, shape, every = len(kernel_size), stride or kernel_size, op.Shape(x), _ints(-1)
    apart = all(s >= k for s, k in zip(stride, kernel_size, strict=True)) and set(dilation) == {1}
    if apart and min(left_over(x.shape[-n:], grad.shape[-n:], kernel_size, stride, [0] * n, [1] * n)) >= 0:
        return op.MaxUnpool(grad, indices, shape, kernel_shape=kernel_size, strides=stride)
    zeros = op.Reshape(op.Expand(op.Constant(value_float=0.0), shape), every)
    flat = op.ScatterElements(zeros, op.Reshape(indices, every), op.Reshape(grad, every), axis=0, reduction="add")
    return op.Reshape(flat, shape)


def at_maxima(x: Any, indices: Any) -> Any:
    """metafleet.at_maxima in ONNX: the values of x at the ``indices`` of ``max_pool``."""
    every = _ints(-1)
    flat = op.GatherElements(op.Reshape(x, every), op.Reshape(indices, every), axis=0)
    return op.Reshape(flat, op.Shape(indices))


def left_over(
    sizes: Sequence[int], out: Sequence[int], kernel: Sequence[int], stride: Sequence[int], padding: Sequence[int],
    dilation: Sequence[int],
) -> list[int]:  # fmt: skip
    """The number of values at the end of each spatial axis that no window of the forward pass reached."""
    axes = zip(sizes, out, kernel, stride, padding, dilation, strict=True)
    return [size - ((last - 1) * s - 2 * p + d * (k - 1) + 1) for size, last, k, s, p, d in axes]


def _int(value: int) -> Any:
    return op.Constant(value_int=value)


def _ints(*values: int) -> Any:
    return op.Constant(value_ints=values)


def _each(values: Sequence[int], number: int) -> list[int]:
    return list(values) * (number // len(values))


_DEFAULTS = torch.export.default_decompositions()

DECOMPOSED: dict[Any, Callable[..., Any]] = {
    aten.avg_pool2d_backward.default: avg_pool2d_backward,
    aten._adaptive_avg_pool2d_backward.default: adaptive_avg_pool2d_backward,
    aten.silu_backward.default: _DEFAULTS[aten.silu_backward.default],
    aten.mish_backward.default: _DEFAULTS[aten.mish_backward.default],
}

TRANSLATED: dict[Any, Callable[..., Any]] = {
    aten.convolution_backward.default: convolution_backward,
    aten.native_group_norm.default: group_norm,
    aten.native_group_norm_backward.default: group_norm_backward,
    aten.max_pool2d_with_indices.default: max_pool,
    aten.max_pool2d_with_indices_backward.default: max_pool_backward,
    aten.max_pool3d_with_indices.default: max_pool,
    aten.max_pool3d_with_indices_backward.default: max_pool_backward,
    torch.ops.metafleet.at_maxima.default: at_maxima,
}
