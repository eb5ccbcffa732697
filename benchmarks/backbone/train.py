"""Trains the backbone of the benchmark: Conv-4 on Omniglot characters that no device has.

Characters 1 to 300 of the background set, all their drawings, by Adam on the loss of class means (Snell et al. 2017) in
episodes of 20 characters with five drawings to make a mean of and five to answer. No alphabet has more than 55
characters, so theirs have none from 401 on.
"""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from safetensors.torch import save_file

from export.backbones.of_encoder import of_encoder
from export.graph import export_graph
from fleet_core.backbone import backbone_file
from fleet_core.base import processes, storage
from fleet_core.learning import models
from fleet_core.model.layout import InputSpec
from fleet_core.personalization.nearest import Prototypes

Array = np.ndarray[Any, Any]

CHANNELS, LEARNED, CHECKED, ON_DEVICES = 32, range(300), range(400, 480), range(924, 964)
STEPS, WAYS, SHOTS, RATE = 200, 20, 5, 2e-3
SPEC = InputSpec((1, 28, 28), "uint8", 1 / 255)


def drawings(characters: range) -> tuple[Array, Array]:
    """(x uint8 [N, 1, 28, 28], y int64 [N], counted from 0) of METAFLEET_SHARED's Omniglot."""
    with np.load(Path(os.environ["METAFLEET_SHARED"]) / "data" / "omniglot-background.npz") as stored:
        x = stored["x28"][list(characters)]
    return x.reshape(-1, 1, 28, 28), np.repeat(np.arange(len(characters)), x.shape[1])


def train(folder: Path) -> dict[str, float]:
    """Writes backbone.safetensors and body.safetensors; returns the accuracy of class means of its features."""
    torch.manual_seed(0)
    x, y = drawings(LEARNED)
    layout = models.describe("conv4", SPEC, [str(k) for k in LEARNED], {"channels": CHANNELS})
    network = models.build(layout)
    optimizer = torch.optim.Adam(network.parameters(), RATE)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, STEPS)
    rng = np.random.default_rng(0)
    labels = torch.arange(WAYS).repeat_interleave(SHOTS)
    for step in range(STEPS):
        support, query = episode(y, rng, len(LEARNED))
        means = network.embed(torch.tensor(x[support])).reshape(WAYS, SHOTS, -1).mean(1)
        distances = torch.cdist(network.embed(torch.tensor(x[query])), means) ** 2
        loss = torch.nn.functional.cross_entropy(-distances, labels)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        schedule.step()
        if step % (STEPS // 10) == 0:
            processes.say(f"backbone: step {step} of {STEPS}, loss {loss.item():.3f}")
    named = {t.name: p for t in layout.tensors for n, p in network.core.named_parameters() if n == t.name}
    body = {t.name: named[t.name].detach() for t in layout.tensors if t.group == "body"}
    save_file(body, folder / "body.safetensors")
    params = {"body": {name: array.numpy() for name, array in body.items()}}
    made = of_encoder(export_graph(layout), params, f"conv4 of {len(LEARNED)} characters")
    storage.write_atomic(folder / "backbone.safetensors", backbone_file.pack(made))
    return {"accuracy_5_shot_20_way": few_shot(network)}


def few_shot(network: models.Network, tasks: int = 50) -> float:
    """Accuracy of class means of five drawings of 20 characters that nobody has learned."""
    x, y = drawings(CHECKED)
    with torch.no_grad():
        z = np.concatenate([network.embed(torch.tensor(x[k : k + 200])).numpy() for k in range(0, len(x), 200)])
    rng, right, labels = np.random.default_rng(0), [], np.repeat(np.arange(WAYS), SHOTS)
    for _ in range(tasks):
        support, query = episode(y, rng, len(CHECKED))
        means = Prototypes.from_support(lambda z_nD: z_nD, z[support], labels, WAYS)
        right.append(float((means.probabilities(z[query]).argmax(1) == labels).mean()))
    return float(np.mean(right))


def episode(y: Array, rng: np.random.Generator, characters: int) -> tuple[Array, Array]:
    """(rows of support, rows of query), ``SHOTS`` of each of ``WAYS`` characters, in their order."""
    chosen = rng.permutation(characters)[:WAYS]
    rows = np.stack([rng.permutation(np.flatnonzero(y == c))[: 2 * SHOTS] for c in chosen])
    return rows[:, :SHOTS].ravel(), rows[:, SHOTS:].ravel()
