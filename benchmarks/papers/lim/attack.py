"""Gradient inversion: what a dishonest aggregator can reconstruct from one device's gradient of one image.

    METAFLEET_DATA=CACHE python -m benchmarks.papers.lim.attack [--data SET …] [--networks NAME …] [--cases CASE …]
        [--images N] [--restarts N] [--iterations 300] [--out FOLDER]

Zhu, Liu, Han, "Deep Leakage from Gradients", NeurIPS 2019, as Lim et al. use it (Section 4.1, Figure 3): L-BFGS, at
rate 1, changes a dummy image until its gradient is the one that was sent. The attacker knows the network, its weights
and the image's class. Of several starts the one whose gradient comes nearest counts. It writes attack.json (distance of
the gradients; mean square error of pixels in 0 to 1, that of a picture in each image's mean grey, and PSNR in dB;
correlation of the image's pixels with its reconstruction's, which remains high for an outline with noise on top),
attack.safetensors (what the attacker found) and attack.png. Existing cases with the same numbers of images, starts and
iterations are not repeated.

What the device sends is, by case:

* fedavg: the gradient of the cross-entropy of its head's logits.
* proto, metavers: of the loss to class means, which stay on the device: the attacker changes dummy means too.
* …-leak: the same, with the means known to the attacker (the paper's "prototype leakage").
* …-episode: what a device really sends, the gradient of a whole episode of five samples of each class beside the image,
  which also flows through the means. The attacker changes as many images, and each of the device's images is compared
  with the nearest one found for its class.

Networks: ``dlg`` is the LeNet of DLG's program (sigmoids, strides, weights from U(−1/2, 1/2)), ``lenet-lim`` the
network of the table with its first weights, whose ReLUs and pools make the attack harder.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from benchmarks.papers.lim.table import ATTACK, CASES
from fleet_core.base.storage import pack, unpack, write_atomic, write_json
from fleet_core.data.sets.set_cache import load_set
from fleet_core.learning import losses
from fleet_core.learning.architectures import MODELS

HERE = Path(__file__).parent
CLASSES, SHOTS, WIDTH = 2, 5, 84
NETWORKS = ("dlg", "lenet-lim")
SETS = ("cifar-10", "omniglot")
SUPPORT = torch.arange(CLASSES).repeat_interleave(SHOTS)  # labels, class by class
SHARE = 0.5  # γ
EPISODE = "-episode"
PICTURES = "attack.safetensors"
DRAWN = 2  # images of each set and network
Array = np.ndarray[Any, Any]
Loss = Callable[[Tensor, Tensor], Tensor]


class Dlg(nn.Module):
    """The LeNet of DLG's program, with a hidden layer as wide as lenet-lim's for class means."""

    def __init__(self, shape: tuple[int, ...], classes: int) -> None:
        super().__init__()
        self.convs = nn.ModuleList(
            nn.Conv2d(a, 12, 5, padding=2, stride=s) for a, s in ((shape[0], 2), (12, 2), (12, 1), (12, 1))
        )
        side = math.ceil(math.ceil(shape[1] / 2) / 2)
        self.hidden = nn.Linear(12 * side * side, WIDTH)
        self.head = nn.Linear(WIDTH, classes)
        for parameter in self.parameters():
            nn.init.uniform_(parameter, -0.5, 0.5)

    def embed(self, x: Tensor) -> Tensor:
        for conv in self.convs:
            x = torch.sigmoid(conv(x))
        return torch.sigmoid(self.hidden(x.flatten(1)))


def network_of(name: str, shape: tuple[int, ...], seed: int) -> nn.Module:
    torch.manual_seed(seed)
    return (Dlg(shape, CLASSES) if name == "dlg" else MODELS[name](shape, CLASSES)).double()


def loss_of(case: str, network: Any, label: Tensor, margin: Tensor) -> Loss:
    """(images [n, C, H, W], class means [K, D]) -> the loss. n is 1, or a whole episode: the image, then the support
    set class by class; the means are then not used."""

    def fedavg(x: Tensor, means: Tensor) -> Tensor:
        return losses.cross_entropy(network.head(network.embed(x)), label)

    def to_means(x: Tensor, means: Tensor) -> Tensor:
        return episode_loss(case, means, torch.arange(CLASSES), network.embed(x), label, margin)

    def episode(x: Tensor, means: Tensor) -> Tensor:
        z = network.embed(x)
        return episode_loss(case, z[1:], SUPPORT, z[:1], label, margin)

    if case.endswith(EPISODE):
        return episode
    return fedavg if case == "fedavg" else to_means


def episode_loss(case: str, support: Tensor, of: Tensor, query: Tensor, label: Tensor, margin: Tensor) -> Tensor:
    """The product's losses on embedded samples: Proto's, or MetaVers' with its triplets."""
    if case.startswith("proto"):
        return losses.proto_loss(support, of, query, label, CLASSES)
    entropy = losses.proto_loss(support, of, query, label, CLASSES, "norm")
    z, y = torch.cat([support, query]), torch.cat([of, label])
    triplets = losses.centroid_triplets(z, y, CLASSES, margin, "norm", total=True, to_centroid=False)
    return SHARE * entropy + (1 - SHARE) * triplets


def gradient(loss: Tensor, network: nn.Module, *, create_graph: bool = False) -> list[Tensor]:
    """The gradient of every array that affects the loss; zeros for the others."""
    return list(torch.autograd.grad(
        loss, list(network.parameters()), create_graph=create_graph, allow_unused=True, materialize_grads=True
    ))


def distance(found: Sequence[Tensor], sent: Sequence[Tensor]) -> Tensor:
    return torch.stack([(a - b).square().sum() for a, b in zip(found, sent, strict=True)]).sum()


def sent_by_device(
    case: str, network: Any, images: Tensor, label: Tensor
) -> tuple[list[Tensor], Tensor, Tensor]:
    """(the gradient, the device's class means, its margin). images: [1 + K · shots, C, H, W], as in loss_of."""
    z = network.embed(images)
    means = losses.prototypes(z[1:], SUPPORT, CLASSES)[0].detach()
    margin = losses.spread(z, torch.cat([label, SUPPORT]), CLASSES, "norm", True).detach()
    moving = images if case.endswith(EPISODE) else images[:1]
    return gradient(loss_of(case, network, label, margin)(moving, means), network), means, margin


def attacked(
    case: str, network: nn.Module, images: Tensor, label: Tensor, iterations: int, seed: int
) -> tuple[Tensor, float]:
    """(the attacker's images [n, C, H, W], the squared distance of their gradient ÷ the sent gradient's square)."""
    sent, means, margin = sent_by_device(case, network, images, label)
    shape = images.shape if case.endswith(EPISODE) else images[:1].shape
    generator = torch.Generator().manual_seed(seed)
    dummy = torch.rand(shape, generator=generator, dtype=images.dtype).requires_grad_()
    known = case == "fedavg" or case.endswith(("-leak", EPISODE))
    guess = means if known else torch.rand(means.shape, generator=generator, dtype=means.dtype).requires_grad_()
    loss = loss_of(case, network, label, margin)
    scale = float(distance(sent, [torch.zeros_like(g) for g in sent]))
    moving = [dummy] if known else [dummy, guess]
    optimizer: Any = torch.optim.LBFGS(moving, lr=1, max_iter=iterations, max_eval=4 * iterations, history_size=100,
                                  tolerance_grad=0, tolerance_change=0, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        value = distance(gradient(loss(dummy, guess), network, create_graph=True), sent) / scale
        for array, slope in zip(moving, torch.autograd.grad(value, moving), strict=True):
            array.grad = slope
        return value.detach()

    optimizer.step(closure)
    return dummy.detach(), float(closure())


def best(
    case: str, network: nn.Module, images: Tensor, label: Tensor, options: argparse.Namespace
) -> tuple[Tensor, dict[str, float]]:
    """(what was found of the first image [C, H, W], its figures): of several starts the one whose gradient comes
    nearest, which the attacker can tell without the image."""
    starts = range(options.restarts)
    tries = [attacked(case, network, images, label, options.iterations, seed) for seed in starts]
    found, match = min(tries, key=lambda one: one[1] if math.isfinite(one[1]) else math.inf)
    asked = images[: len(found)]
    nearest, errors = matched(found.clamp(0, 1), asked, torch.cat([label, SUPPORT])[: len(found)])
    error, flat = float(errors.mean()), float((asked - asked.mean((1, 2, 3), keepdim=True)).square().mean())
    figure = {"gradient": match, "mse": error, "flat": flat, "psnr": -10 * math.log10(max(error, 1e-12))}
    return found[nearest[0]], figure


def matched(found: Tensor, asked: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    """(for each image the index of the nearest found one of its class, its mean square error)."""
    errors = (asked.unsqueeze(1) - found.unsqueeze(0)).square().mean((2, 3, 4))
    least = errors.masked_fill(labels.unsqueeze(1) != labels.unsqueeze(0), math.inf).min(1)
    return least.indices, least.values


def images_of(name: str, number: int, seed: int) -> Tensor:
    """Images [n, 1 + K · shots, C, H, W] in 0 to 1, of two classes drawn for each n: the attacked image, of the first
    class, then the support set, class by class."""
    samples = load_set(name).train
    rng = np.random.default_rng(seed)
    chosen = []
    for _ in range(number):
        pair = rng.choice(np.unique(samples.y), CLASSES, replace=False)
        rows = [rng.choice(np.flatnonzero(samples.y == label), SHOTS + 1, replace=False) for label in pair]
        chosen.append(samples.x[np.concatenate([rows[0][:1], *(own[1:] for own in rows)])])
    return torch.tensor(np.stack(chosen)).double() / 255


def drawable(images: Tensor) -> Array:
    """uint8 of images in 0 to 1; values outside are clipped."""
    return (images.clamp(0, 1) * 255).round().to(torch.uint8).numpy()


def correlation(found: Array, image: Array) -> float:
    """Pearson's, of the pixels."""
    return float(np.corrcoef(found.ravel(), image.ravel())[0, 1])


def made(data: str, name: str, case: str, options: argparse.Namespace) -> tuple[Array, dict[str, Any]]:
    """(pictures uint8 [n, C, H, W], medians over the images and the figures of each) of one case."""
    images = images_of(data, options.images, 0)
    label = torch.zeros(1, dtype=torch.int64)
    seen, each = [], []
    for place in range(options.images):
        network = network_of(name, tuple(images.shape[2:]), place)
        found, figure = best(case, network, images[place], label, options)
        seen.append(drawable(found))
        each.append({**figure, "correlation": correlation(seen[-1], drawable(images[place, 0]))})
        print(f"{data} {name} {case} {place}: {each[-1]}", flush=True)
    middle = {key: float(np.median([one[key] for one in each])) for key in each[0]}
    return np.stack(seen), {**middle, "images": each}


def kept(folder: Path, how: Mapping[str, int]) -> tuple[dict[str, dict[str, Any]], dict[str, Array]]:
    """(figures by title and case, pictures uint8 [n, C, H, W] by title/case) of the existing cases with the same
    numbers."""
    if not (folder / ATTACK).exists() or not (folder / PICTURES).exists():
        return {}, {}
    found = json.loads((folder / ATTACK).read_text())
    if any(found.get(key) != value for key, value in how.items()):
        return {}, {}
    pictures = unpack((folder / PICTURES).read_bytes(), where=PICTURES)[0]
    attacks = {
        title: {case: one for case, one in cases.items() if f"{title}/{case}" in pictures}
        for title, cases in found["attacks"].items()
    }
    return attacks, pictures


def write(
    folder: Path, how: Mapping[str, int], attacks: Mapping[str, Mapping[str, Any]], pictures: Mapping[str, Array]
) -> None:
    """Writes the pictures first: figures without pictures are made again."""
    write_atomic(folder / PICTURES, pack(dict(sorted(pictures.items()))))
    write_json(folder / ATTACK, {**how, "attacks": attacks})


def draw(path: Path, originals: Mapping[str, Tensor], pictures: Mapping[str, Array]) -> None:
    """A row for each of the first images, a column for each case."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = [(title, place) for title, images in originals.items() for place in range(len(images))]
    columns = ("image", *CASES)
    picture, axes = pyplot.subplots(len(rows), len(columns), figsize=(1.5 * len(columns), 1.6 * len(rows)),
                                    layout="constrained", squeeze=False)
    for (title, place), line in zip(rows, axes, strict=True):
        for case, axis in zip(columns, line, strict=True):
            found = drawable(originals[title]) if case == "image" else pictures.get(f"{title}/{case}")
            if found is None:
                axis.set_axis_off()
                continue
            shown = np.moveaxis(found[place], 0, -1)
            axis.imshow(shown[..., 0] if shown.shape[-1] == 1 else shown, cmap="gray", vmin=0, vmax=255)
            axis.set_xticks([])
            axis.set_yticks([])
            if (title, place) == rows[0]:
                axis.set_title(case, fontsize="small")
        if place == 0:
            line[0].set_ylabel(title, fontsize="small")
    picture.savefig(path, dpi=100)
    pyplot.close(picture)


def main(asked: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--data", nargs="+", choices=SETS, default=list(SETS))
    parser.add_argument("--networks", nargs="+", choices=NETWORKS, default=list(NETWORKS))
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--images", type=int, default=6)
    parser.add_argument("--restarts", type=int, default=3)
    parser.add_argument("--iterations", type=int, default=300)
    parser.add_argument("--out", type=Path, default=HERE)
    options = parser.parse_args(asked)
    torch.set_num_threads(1)
    how = {"each": options.images, "restarts": options.restarts, "iterations": options.iterations}
    attacks, pictures = kept(options.out, how)
    for data, name, case in itertools.product(options.data, options.networks, options.cases):
        title = f"{data}, {name}"
        if case not in attacks.get(title, {}):
            pictures[f"{title}/{case}"], attacks.setdefault(title, {})[case] = made(data, name, case, options)
            write(options.out, how, attacks, pictures)
    originals = {f"{data}, {name}": images_of(data, options.images, 0)[:DRAWN, 0]
                 for data, name in itertools.product(SETS, NETWORKS) if f"{data}, {name}" in attacks}
    draw(options.out / "attack.png", originals, pictures)


if __name__ == "__main__":
    main()
