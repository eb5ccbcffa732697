"""The whole network from the backbone's weights, as a user's own model: what a fleet trains without a frozen part."""

from __future__ import annotations

import torch
from safetensors.torch import load_file
from torch import nn

from fleet_core.learning.architectures import Conv4


def build(shape: tuple[int, ...], classes: int, weights: str, channels: int = 32) -> nn.Module:
    """weights: a safetensors file of the encoder's arrays; the head is drawn anew."""
    made = Conv4(shape, classes, channels)
    arrays: dict[str, torch.Tensor] = load_file(weights)
    made.load_state_dict(arrays, strict=False)
    return made
