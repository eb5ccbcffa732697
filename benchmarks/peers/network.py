"""The networks that both sides train: a body and a linear head, from the same first weights.

mlp: 784-100-10, the arrays of the product's ``mlp`` and of PFLlib's ``DNN``, which ends in a log-softmax.
cnn: PFLlib's ``FedAvgCNN`` (McMahan et al. 2017), two convolutions of 5x5 and a hidden layer of 512. cifar: the same on
images of CIFAR-10; the others take MNIST.
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

NETWORKS: dict[str, dict[str, Any]] = {
    "mlp": {"name": "mlp", "options": {"hidden": [100]}},
    "cnn": {"name": "benchmarks.peers.network:build"},
    "cifar": {"name": "benchmarks.peers.network:build"},
}
"""name -> ``[model]`` of an experiment."""
SETS = {"mlp": "mnist", "cnn": "mnist", "cifar": "cifar-10"}
"""name -> the set of images, and the folder that has it."""
KERNEL, CHANNELS, HIDDEN = 5, (32, 64), 512


def body(name: str, shape: tuple[int, ...]) -> tuple[nn.Sequential, int]:
    """The layers before the head, and their width."""
    if name == "mlp":
        width = NETWORKS["mlp"]["options"]["hidden"][0]
        return nn.Sequential(nn.Flatten(), nn.Linear(math.prod(shape), width), nn.ReLU()), width
    first, second = CHANNELS
    sides = [((side - KERNEL + 1) // 2 - KERNEL + 1) // 2 for side in shape[1:]]
    return nn.Sequential(
        nn.Conv2d(shape[0], first, KERNEL), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(first, second, KERNEL), nn.ReLU(), nn.MaxPool2d(2),
        nn.Flatten(), nn.Linear(second * math.prod(sides), HIDDEN), nn.ReLU(),
    ), HIDDEN


class Ours(nn.Module):
    """The form that an experiment's ``[model]`` names."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.layers, width = body("cnn", shape)
        self.head = nn.Linear(width, classes)

    def embed(self, x: Tensor) -> Tensor:
        z_ND: Tensor = self.layers(x)
        return z_ND


def build(shape: tuple[int, ...], classes: int) -> nn.Module:
    return Ours(shape, classes)


class Theirs(nn.Module):
    """The form that PFLlib takes: it replaces ``fc``, the last layer, where it divides a network into base and head."""

    def __init__(self, name: str, shape: tuple[int, ...], first: list[Tensor]) -> None:
        """first: the first weights, in the order of the layers."""
        super().__init__()
        self.layers, width = body(name, shape)
        self.fc: nn.Module = nn.Linear(width, len(first[-1]))
        with torch.no_grad():
            for own, given in zip(self.parameters(), first, strict=True):
                if own.shape != given.shape:
                    raise ValueError(f"an array of {tuple(given.shape)}, expected {tuple(own.shape)}")
                own.copy_(given)

    def forward(self, x: Tensor) -> Tensor:
        logits: Tensor = self.fc(self.layers(x))
        return logits
