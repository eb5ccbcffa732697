"""Low-rank adapters: a product B A of two small matrices is added to a linear layer or convolution W, which then
computes W x + B A x.

Hu, Shen, Wallis, Allen-Zhu, Li, Wang, Wang, Chen, "LoRA: Low-Rank Adaptation of Large Language Models", 2021, eq. 3.
B is zero at the start, so that a model begins as it would without adapters. Deviations: A is drawn as torch draws the
weights of such a layer (paper: Gaussian), so that a seed is enough for the first model; α = r, so that B A is not
scaled. For a convolution, A is a convolution with the same kernel and ``rank`` channels, B one with kernel 1.
"""

from __future__ import annotations

from typing import Any, cast

from torch import Tensor, nn
from torch.nn import utils

KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d)


class Adapter(nn.Module):
    """``up`` is B, ``down`` is A."""

    def __init__(self, down: nn.Module, up: nn.Module) -> None:
        super().__init__()
        self.down, self.up = down, up
        nn.init.zeros_(cast(Tensor, up.weight))

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.up(self.down(x)))


class Adapted(nn.Module):
    """``base``, a linear layer or a convolution without groups, and its ``adapter``. Its arrays are named
    ``base.weight``, ``base.bias``, ``adapter.down.weight`` [rank, inputs, kernel] and ``adapter.up.weight``
    [outputs, rank, 1]."""

    def __init__(self, base: nn.Linear | nn.Conv1d | nn.Conv2d, rank: int) -> None:
        super().__init__()
        self.base, undrawn = base, cast(Any, utils.skip_init)
        if isinstance(base, nn.Linear):
            down: nn.Module = nn.Linear(base.in_features, rank, bias=False)
            up: nn.Module = undrawn(nn.Linear, rank, base.out_features, bias=False)
        else:
            conv: Any = nn.Conv1d if isinstance(base, nn.Conv1d) else nn.Conv2d
            down = conv(base.in_channels, rank, base.kernel_size, base.stride, base.padding, base.dilation, bias=False)
            up = undrawn(conv, rank, base.out_channels, 1, bias=False)
        self.adapter = Adapter(down, up)

    def forward(self, x: Tensor) -> Tensor:
        return cast(Tensor, self.base(x) + self.adapter(x))


def with_adapters(model: nn.Module, rank: int, besides: str = "head") -> int:
    """Adds an adapter to every linear layer and every convolution without groups in ``model``, except in the child
    ``besides``. Returns the number of adapters."""
    found = 0
    for name, child in list(model.named_children()):
        if name == besides:
            continue
        if type(child) in KINDS and getattr(child, "groups", 1) == 1:
            setattr(model, name, Adapted(cast(Any, child), rank))
            found += 1
        else:
            found += with_adapters(child, rank, besides="")
    return found
