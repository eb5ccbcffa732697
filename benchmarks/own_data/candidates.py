"""Other ways to pool, compared with those of ``ds-cnn``, as ``benchmarks.own_data.candidates:NAME``.

Shapes: N samples, C channels, P positions, D embedding width.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise

import torch
from torch import Tensor, nn

from fleet_core.learning.architectures import DsCnn

EPS = 1e-5
SEGMENTS = 4


class Mean(DsCnn):
    """The mean of the last layer alone, as in the paper. parts: values pooled per channel."""

    parts = 1

    def __init__(self, shape: tuple[int, ...], classes: int, channels: Sequence[int]) -> None:
        super().__init__(shape, classes, channels)
        self.head = nn.Linear(self.parts * channels[-1], classes)

    def embed(self, x: Tensor) -> Tensor:
        return self.pooled(self.layers(x)[-1])

    def pooled(self, z_NCP: Tensor) -> Tensor:
        return z_NCP.mean(2)


class MeanMax(Mean):
    """Mean and maximum of the last layer."""

    parts = 2

    def pooled(self, z_NCP: Tensor) -> Tensor:
        return torch.cat([z_NCP.mean(2), z_NCP.amax(2)], 1)


class MeanStd(Mean):
    """Mean and standard deviation of the last layer: statistics pooling, Snyder et al. 2018, "X-Vectors"."""

    parts = 2

    def pooled(self, z_NCP: Tensor) -> Tensor:
        mean_NC1 = z_NCP.mean(2, keepdim=True)
        deviation_NC = ((z_NCP - mean_NC1).square().mean(2) + EPS).sqrt()
        return torch.cat([mean_NC1.squeeze(2), deviation_NC], 1)


class Pyramid(Mean):
    """The mean of the last layer, and of four segments of it."""

    parts = 1 + SEGMENTS

    def pooled(self, z_NCP: Tensor) -> Tensor:
        cuts = [i * z_NCP.shape[2] // SEGMENTS for i in range(SEGMENTS + 1)]
        segments = [z_NCP[:, :, a : max(b, a + 1)].mean(2) for a, b in pairwise(cuts)]
        return torch.cat([z_NCP.mean(2), *segments], 1)


class Place(MeanMax):
    """Mean and maximum; the position in the window, from -1 to 1, is one more channel of the input."""

    def __init__(self, shape: tuple[int, ...], classes: int, channels: Sequence[int]) -> None:
        super().__init__((shape[0] + 1, *shape[1:]), classes, channels)

    def embed(self, x: Tensor) -> Tensor:
        place = torch.linspace(-1, 1, x.shape[-1]).to(x).expand_as(x[:, :1])
        return super().embed(torch.cat([x, place], 1))


class Depths(DsCnn):
    """Mean and maximum of every layer, including the first."""

    def __init__(self, shape: tuple[int, ...], classes: int, channels: Sequence[int]) -> None:
        super().__init__(shape, classes, channels)
        self.head = nn.Linear(2 * sum(channels), classes)

    def embed(self, x: Tensor) -> Tensor:
        return torch.cat([pooled for z in self.layers(x) for pooled in (z.mean(2), z.amax(2))], 1)
