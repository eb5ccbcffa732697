"""The named models: networks with ``embed(x) -> z`` and a linear ``head`` on z, none with BatchNorm.

| name | network | source |
|---|---|---|
| mlp | fully connected layers (784-80-60 ELU in Fallah, one hidden layer of 100 in pFedMe) | Fallah 2020; pFedMe |
| logistic | the head alone, on the flattened sample | pFedMe: MLR |
| lenet | conv5×5-64, maxpool2, conv5×5-64, maxpool2, fc 384, fc 192 | Acar et al., ICML 2021 |
| lenet-lim | conv2×2-16, maxpool2, conv2×2-32, maxpool2, fc 120, fc 84 | Lim et al. 2024, §4.1 |
| cnn-leaf | conv5×5-32, maxpool2, conv5×5-64, maxpool2, fc 2048, padded | Chen et al. 2018, A.1; LEAF |
| conv4 | four times conv3×3-64, GroupNorm, ReLU, maxpool2 | Snell et al., NeurIPS 2017; Vinyals et al. 2016 |
| cnn1d | strided convolutions with GroupNorm on series, flattened | this project, for aligned windows |
| ds-cnn | a convolution, three depthwise-separable ones, pooled over all positions | after Zhang et al. 2017 |
| char-lstm | characters 8 wide, two LSTM layers of 256, the last state | Chen et al. 2018, A.1; LEAF |

Every model has a ``head``; methods that share only the body, as Proto methods do, neither train nor send it.

Shapes: N samples, C channels, T time steps, D embedding width, K classes, V characters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any, cast

import torch
from torch import Tensor, nn

MAX_SIZE = 65_536


class Mlp(nn.Module):
    """Fully connected layers on the flattened sample. Embedding: the last hidden layer after its activation."""

    def __init__(
        self, shape: tuple[int, ...], classes: int, hidden: Sequence[int] = (100,), activation: str = "relu"
    ) -> None:
        super().__init__()
        known = activation in ("relu", "elu")
        _refuse(_sizes("hidden", hidden), "" if known else f"unknown activation '{activation}', expected relu or elu")
        self.activation = torch.relu if activation == "relu" else nn.functional.elu
        widths = [math.prod(shape), *hidden]
        self.layers = nn.ModuleList(nn.Linear(a, b) for a, b in pairwise(widths))
        self.head = nn.Linear(widths[-1], classes)

    def embed(self, x: Tensor) -> Tensor:
        z_ND = x.flatten(1)
        for layer in self.layers:
            z_ND = self.activation(layer(z_ND))
        return z_ND


class Logistic(nn.Module):
    """Multinomial logistic regression, which is only a head. Embedding: the flattened sample."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.head = nn.Linear(math.prod(shape), classes)

    def embed(self, x: Tensor) -> Tensor:
        return x.flatten(1)


class Cnn1d(nn.Module):
    """Strided convolutions with GroupNorm on [C, T] series, flattened; the embedding is one hidden layer of ``width``.

    Flattening preserves positions in the series, which a mean over time would lose.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, channels: Sequence[int] = (16, 32, 24), width: int = 64
    ) -> None:
        super().__init__()
        _refuse(_axes(shape, 2, "series [C, T]"), _sizes("channels", channels, least=1), _size("width", width))
        (inputs, length), kernels = shape, (7, *[5] * (len(channels) - 1))
        pairs = list(pairwise([inputs, *channels]))
        self.convs = nn.ModuleList(
            nn.Conv1d(a, b, k, stride=2, padding=k // 2) for (a, b), k in zip(pairs, kernels, strict=True)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(math.gcd(b, max(1, b // 4)), b) for b in channels)
        self.hidden = nn.Linear(channels[-1] * math.ceil(length / 2 ** len(channels)), width)
        self.head = nn.Linear(width, classes)

    def embed(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(norm(conv(x)))
        return torch.relu(self.hidden(x.flatten(1)))


class DsCnn(nn.Module):
    """Depthwise-separable convolutions on series [C, T] or images [C, H, W] of any size. Embedding: the mean and the
    maximum over all positions of the last two layers, so that positions in a window do not matter.

    Zhang, Suda, Lai, Chandra, "Hello Edge: Keyword Spotting on Microcontrollers", 2017: a convolution, then blocks of a
    depthwise and a pointwise one, then the mean over all positions of the last. Here: GroupNorm instead of BatchNorm
    and one activation per block; the pooled layers were chosen by ``benchmarks/own_data``.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, channels: Sequence[int] = (32, 32, 32, 32)) -> None:
        super().__init__()
        _refuse(
            "" if len(shape) == 3 else _axes(shape, 2, "series [C, T] or images [C, H, W]"),
            _sizes("channels", channels, least=1),
        )
        conv: type[nn.Conv1d] | type[nn.Conv2d] = nn.Conv1d if len(shape) == 2 else nn.Conv2d
        kernel, pairs = 7 if len(shape) == 2 else 3, list(pairwise(channels))
        around = kernel // 2
        self.stem = conv(shape[0], channels[0], kernel, stride=2, padding=around)
        self.depthwise = nn.ModuleList(
            conv(a, a, kernel, stride=1 if i else 2, padding=around, groups=a, bias=False)
            for i, (a, _) in enumerate(pairs)
        )
        self.pointwise = nn.ModuleList(conv(a, b, 1) for a, b in pairs)
        self.norms = nn.ModuleList(nn.GroupNorm(math.gcd(b, max(1, b // 16)), b) for b in channels)
        self.head = nn.Linear(2 * sum(channels[-2:]), classes)

    def layers(self, x: Tensor) -> list[Tensor]:
        """The output of each layer, [N, its channels, positions]."""
        outputs = [torch.relu(self.norms[0](self.stem(x)))]
        for depthwise, pointwise, norm in zip(self.depthwise, self.pointwise, self.norms[1:], strict=True):
            outputs.append(torch.relu(norm(pointwise(depthwise(outputs[-1])))))
        return [z.flatten(2) for z in outputs]

    def embed(self, x: Tensor) -> Tensor:
        return torch.cat([pooled for z in self.layers(x)[-2:] for pooled in (z.mean(2), z.amax(2))], 1)


class TwoConvolutions(nn.Module):
    """LeNet's form on images [C, H, W]: twice conv, ReLU, maxpool2; then one or two hidden layers with ReLU.

    padded: convolutions with an odd kernel keep the image's size. ReLU is computed after the pool, on a quarter of the
    values; outputs and gradients are the same bits, because ReLU and max commute. Embedding: the
    last hidden layer, after its ReLU if ``rectified``.
    """

    def __init__(
        self, shape: tuple[int, ...], classes: int, kernel: int, channels: Sequence[int], hidden: Sequence[int],
        padded: bool = False, rectified: bool = True,
    ) -> None:  # fmt: skip
        super().__init__()
        _refuse(
            _axes(shape, 3, "images [C, H, W]"), _size("kernel", kernel), _sizes("channels", channels, least=2, most=2),
            _sizes("hidden", hidden, least=1, most=2),
        )  # fmt: skip
        _refuse(_pixels(shape, least=4 if padded else 3 * kernel + 1))
        around = kernel // 2 if padded else 0
        lost = kernel - 1 - 2 * around
        height, width = (((side - lost) // 2 - lost) // 2 for side in shape[1:])
        self.conv1 = nn.Conv2d(shape[0], channels[0], kernel, padding=around)
        self.conv2 = nn.Conv2d(channels[0], channels[1], kernel, padding=around)
        self.fc1 = nn.Linear(channels[1] * height * width, hidden[0])
        self.fc2 = nn.Linear(hidden[0], hidden[1]) if len(hidden) > 1 else None
        self.head = nn.Linear(hidden[-1], classes)
        self.rectified = rectified

    def embed(self, x: Tensor) -> Tensor:
        for conv in (self.conv1, self.conv2):
            x = torch.relu(nn.functional.max_pool2d(conv(x), 2))
        z_ND = self.fc1(x.flatten(1))
        if self.fc2 is not None:
            z_ND = self.fc2(torch.relu(z_ND))
        return torch.relu(z_ND) if self.rectified else z_ND


class LeNet(TwoConvolutions):
    """The network of Acar et al.: embedding 192 wide; 794,762 parameters for 1×32×32 and ten classes."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__(shape, classes, kernel=5, channels=(64, 64), hidden=(384, 192))


class LimLeNet(TwoConvolutions):
    """The network of Lim et al.: embedding 84 wide.

    Printed: two 2×2 convolutions, each with a 2×2 max-pool after it, two fully connected layers, and a classifier that
    MetaVers leaves away, "as done in" pFedGP and pFedHN. Not printed: channels, widths, activation, padding; they are
    those of pFedHN's program (16 and 32, 120 and 84, ReLU after every layer, none), whose kernels however are 5×5:
    ``kernel = 5`` is that network. With ``rectified = False`` too it is that of MetaVers' program, whose embedding has
    no ReLU after it.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        kernel: int = 2,
        channels: Sequence[int] = (16, 32),
        hidden: Sequence[int] = (120, 84),
        rectified: bool = True,
    ) -> None:
        super().__init__(shape, classes, kernel, channels, hidden, rectified=rectified)


class LeafCnn(TwoConvolutions):
    """The network of LEAF and of Chen et al. on handwriting: embedding 2048 wide; 6,497,162 parameters for 1×28×28 and
    ten classes. ``channels`` and ``hidden``, a single layer, are options for devices that it is too wide for."""

    def __init__(
        self, shape: tuple[int, ...], classes: int, channels: Sequence[int] = (32, 64), hidden: Sequence[int] = (2048,)
    ) -> None:
        super().__init__(shape, classes, 5, channels, hidden, padded=True)


class Conv4(nn.Module):
    """The few-shot network of Vinyals et al. and Snell et al. on images [C, H, W], with GroupNorm instead of BatchNorm.

    groups: number of groups of GroupNorm, by default one of all channels. Convolutions are padded by 1; pools ignore
    incomplete windows. Embedding: the last block flattened, ``channels`` wide at 28×28 and four times that at 32×32.
    """

    def __init__(self, shape: tuple[int, ...], classes: int, channels: int = 64, groups: int = 1) -> None:
        super().__init__()
        _refuse(_axes(shape, 3, "images [C, H, W]"), _size("channels", channels), _size("groups", groups))
        whole = f"channels is {channels} and groups {groups}, expected groups that divide the channels"
        _refuse(_pixels(shape, least=16), whole if channels % groups else "")
        self.convs = nn.ModuleList(
            nn.Conv2d(a, channels, 3, padding=1) for a in (shape[0], channels, channels, channels)
        )
        self.norms = nn.ModuleList(nn.GroupNorm(groups, channels) for _ in self.convs)
        self.head = nn.Linear(channels * (shape[1] // 16) * (shape[2] // 16), classes)

    def embed(self, x: Tensor) -> Tensor:
        for conv, norm in zip(self.convs, self.norms, strict=True):
            x = torch.relu(nn.functional.max_pool2d(norm(conv(x)), 2))
        return x.flatten(1)


class CharLstm(nn.Module):
    """Predicts the next character of a text: tokens int64 [T], each below ``vocabulary`` (default: the classes).

    Embedding: the upper layer's state after the last character. forget_bias: added to the initial biases of the forget
    gates; 1 in LEAF's program, 0 in torch's LSTM. Deviation from LEAF: two bias vectors per layer, as in torch.
    """

    def __init__(
        self,
        shape: tuple[int, ...],
        classes: int,
        vocabulary: int | None = None,
        character_width: int = 8,
        width: int = 256,
        layers: int = 2,
        forget_bias: float = 0.0,
    ) -> None:
        super().__init__()
        vocabulary = classes if vocabulary is None else vocabulary
        _refuse(
            _axes(shape, 1, "tokens [T]"), _size("vocabulary", vocabulary, least=2),
            _size("character_width", character_width), _size("width", width), _size("layers", layers),
            _number("forget_bias", forget_bias),
        )  # fmt: skip
        self.characters = nn.Embedding(vocabulary, character_width)
        self.lstm = nn.LSTM(character_width, width, layers, batch_first=True)
        with torch.no_grad():
            for name, bias in self.lstm.named_parameters():
                if name.startswith("bias_ih"):
                    bias[width : 2 * width] += forget_bias  # torch's order: input, forget, cell, output
        self.head = nn.Linear(width, classes)

    def embed(self, x_NT: Tensor) -> Tensor:
        states_NTD, _ = self.lstm(self.characters(x_NT))
        return cast(Tensor, states_NTD[:, -1])


MODELS: dict[str, Callable[..., nn.Module]] = {
    "char-lstm": CharLstm,
    "cnn-leaf": LeafCnn,
    "cnn1d": Cnn1d,
    "conv4": Conv4,
    "ds-cnn": DsCnn,
    "lenet": LeNet,
    "lenet-lim": LimLeNet,
    "logistic": Logistic,
    "mlp": Mlp,
}

ADAPTABLE = frozenset(MODELS) - {"char-lstm", "logistic"}
"""Models with linear layers or convolutions in their body; they take the option ``adapter``, the rank of
``adapters``."""

BATCHABLE = frozenset(MODELS) - {"char-lstm"}
"""Models that ``torch.func.vmap`` can run for stacked clients; torch has no vmap rule for its LSTM."""


def _refuse(*problems: str) -> None:
    """Raises ValueError with all non-empty ``problems``."""
    if any(problems):
        raise ValueError("; ".join(filter(None, problems)))


def _axes(shape: tuple[int, ...], number: int, wanted: str) -> str:
    return "" if len(shape) == number else f"it takes {wanted}, not samples of shape {list(shape)}"


def _pixels(shape: tuple[int, ...], least: int) -> str:
    side = min(shape[1:])
    return "" if side >= least else f"it needs images of {least} pixels or more on each side, not {side}"


def _size(name: str, value: Any, least: int = 1) -> str:
    right = type(value) is int and least <= value <= MAX_SIZE
    return "" if right else f"{name} is {value!r}, expected a whole number from {least} to {MAX_SIZE}"


def _number(name: str, value: Any) -> str:
    right = type(value) in (int, float) and -100 <= value <= 100
    return "" if right else f"{name} is {value!r}, expected a number from -100 to 100"


def _sizes(name: str, values: Any, least: int = 0, most: int = 100) -> str:
    """``least``, ``most``: the number of values."""
    if isinstance(values, (list, tuple)) and least <= len(values) <= most and not any(_size(name, v) for v in values):
        return ""
    number = f"{least}" if least == most else f"{least} to {most}"
    return f"{name} is {values!r}, expected {number} whole numbers from 1 to {MAX_SIZE}"
