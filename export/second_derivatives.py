"""Convolutions and max pools that are differentiated twice for graphs with any number of samples.

Torch's second derivative of a convolution counts samples as channels, and that of a max pool looks values up by torch's
indices, which ``lowering`` replaces. Here a second derivative consists of operations of the first: a convolution is
linear in its samples and in its weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten

CONVOLUTIONS = {torch.conv1d: 1, torch.conv2d: 2, torch.conv3d: 3}
POOLS = {
    torch.nn.functional.max_pool1d: 1, torch.nn.functional.max_pool2d: 2, torch.max_pool1d: 1, torch.max_pool2d: 2,
}  # fmt: skip


class Twice(TorchFunctionMode):
    """Within it convolutions and max pools are those of this file."""

    def __torch_function__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        if func in CONVOLUTIONS and not isinstance(_argument(args, named, 4, "padding", 0), str):
            return _convolution(CONVOLUTIONS[func], *args, **named)
        if func in POOLS:
            return _max_pool(POOLS[func], *args, **named)
        return func(*args, **named)


def _argument(args: Sequence[Any], named: Mapping[str, Any], place: int, name: str, default: Any) -> Any:
    return args[place] if len(args) > place else named.get(name, default)


def _each(value: int | Sequence[int], number: int) -> list[int]:
    return [value] * number if isinstance(value, int) else list(value) * (number // len(value))


def _applied(function: Any, *given: Any) -> Any:
    """``function.apply``, which torch gives no types."""
    return function.apply(*given)


def _convolution(
    n: int, input: Tensor, weight: Tensor, bias: Tensor | None = None, stride: Any = 1, padding: Any = 0,
    dilation: Any = 1, groups: int = 1,
) -> Tensor:  # fmt: skip
    how = (_each(stride, n), _each(padding, n), _each(dilation, n), False, [0] * n, groups)
    out: Tensor = _applied(_Convolution, input, weight, bias, how)
    return out


class _Convolution(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, how: Any) -> Any:
        ctx.save_for_backward(x, weight)
        ctx.how, ctx.bias = how, None if bias is None else list(bias.shape)
        return aten.convolution(x, weight, bias, *how)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, weight = ctx.saved_tensors
        to_x, to_weight, to_bias = _applied(_ConvolutionBackward, grad, x, weight, ctx.bias, ctx.how)
        return to_x, to_weight, to_bias if ctx.bias else None, None


class _ConvolutionBackward(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, weight: Tensor, bias: Any, how: Any) -> Any:
        ctx.save_for_backward(grad, x, weight)
        ctx.how, ctx.bias = how, bias
        return aten.convolution_backward(grad, x, weight, bias or [weight.shape[0]], *how, [True, True, True])

    @staticmethod
    def backward(ctx: Any, of_x: Any, of_weight: Any, of_bias: Any) -> Any:
        grad, x, weight = ctx.saved_tensors
        to_grad = aten.convolution(of_x, weight, of_bias if ctx.bias else None, *ctx.how)
        to_grad = to_grad + aten.convolution(x, of_weight, None, *ctx.how)
        to_x = aten.convolution_backward(grad, x, of_weight, None, *ctx.how, [True, False, False])[0]
        to_weight = aten.convolution_backward(grad, of_x, weight, None, *ctx.how, [False, True, False])[1]
        return to_grad, to_x, to_weight, None, None


def _max_pool(
    n: int, input: Tensor, kernel_size: Any, stride: Any = None, padding: Any = 0, dilation: Any = 1,
    ceil_mode: bool = False, return_indices: bool = False,
) -> Tensor:  # fmt: skip
    if return_indices:
        raise NotImplementedError("the second derivative of a max pool that returns its indices")
    kernel = _each(kernel_size, n)
    stride = kernel if stride in (None, []) else _each(stride, n)
    how = (kernel, stride, _each(padding, n), _each(dilation, n), ceil_mode)
    if n == 2:
        out: Tensor = _applied(_MaxPool, input, how)
        return out
    flat = ([1, *how[0]], [1, *how[1]], [0, *how[2]], [1, *how[3]], ceil_mode)
    pooled: Tensor = _applied(_MaxPool, input.unsqueeze(2), flat)
    return pooled.squeeze(2)


class _MaxPool(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, how: Any) -> Any:
        value, indices = aten.max_pool2d_with_indices(x, *how)
        ctx.save_for_backward(x, indices)
        ctx.how = how
        return value

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        x, indices = ctx.saved_tensors
        return _applied(_MaxPoolBackward, grad, x, indices, ctx.how), None


class _MaxPoolBackward(torch.autograd.Function):
    """The gradient is linear in the output's gradient, and does not depend on x between two changes of the maxima."""

    @staticmethod
    def forward(ctx: Any, grad: Tensor, x: Tensor, indices: Tensor, how: Any) -> Any:
        ctx.save_for_backward(indices)
        return aten.max_pool2d_with_indices_backward(grad, x, *how, indices)

    @staticmethod
    def backward(ctx: Any, of_x: Any) -> Any:
        (indices,) = ctx.saved_tensors
        return torch.ops.metafleet.at_maxima(of_x, indices), None, None, None


@torch.library.custom_op("metafleet::at_maxima", mutates_args=())
def at_maxima(x: Tensor, indices: Tensor) -> Tensor:
    """The values of x [N, C, H, W] at a max pool's indices [N, C, *out], which count within a channel."""
    return x.flatten(2).gather(2, indices.flatten(2)).reshape(indices.shape)


@at_maxima.register_fake
def _(x: Tensor, indices: Tensor) -> Tensor:
    return x.new_empty(indices.shape)
