"""Regression on real series: how strongly a body accelerates, from the gyroscope alone.

UCI HAR (Anguita et al. 2013), the 21 people of the training part. A model sees the three angular rates of a window and
answers with the standard deviation of each body acceleration, in g, whose channels are hidden from it. 16 people train
cnn1d by FedAvg; the last five are new. Each person's samples are divided by segments, which share no reading: the first
60 % to learn from, the others to measure on. The settings were not tuned.

    METAFLEET_SHARED=FOLDER python benchmarks/tasks/run.py [--rounds 40]

Writes result.json and the table in README.md, beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import markdown
from fleet_core.algorithms import aggregation
from fleet_core.algorithms.interface import Payload, Update
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage, trees
from fleet_core.learning import local_training, models, personal_model
from fleet_core.model.layout import InputSpec, Layout
from fleet_core.personalization.ridge_head import RidgeHead
from fleet_core.tasks.regression import Errors, Regression

HERE = Path(__file__).parent
OUTPUTS = ("body_acc_x", "body_acc_y", "body_acc_z")
SEEN = ("body_gyro_x", "body_gyro_y", "body_gyro_z")
NEW, EARLY, SEED = 5, 0.6, 0
HYPER = {"local_steps": 20, "client_lr": 0.1, "finetune_steps": 50, "finetune_lr": 0.1}
Array = np.ndarray[Any, Any]
Part = tuple[Array, Array]
Answers = Callable[[Part, Array], Array]
"""(a person's own samples, windows to answer) -> numbers [N, K] in g."""


def people(path: Path) -> list[tuple[Part, Part]]:
    """(own, later) of each person: x float32 [N, 3, 128], y float64 [N, 3]. Their segments are shuffled, because their
    order is not that of the recording."""
    with np.load(path) as file:
        x, subject, segment = file["x"].astype(np.float32), file["subject"], file["segment"]
        names = [str(name) for name in file["channels"]]
    seen = x[:, [names.index(name) for name in SEEN]]
    y = x[:, [names.index(name) for name in OUTPUTS]].astype(np.float64).std(2)
    found, rng = [], np.random.default_rng(SEED)
    for person in np.unique(subject):
        rows = np.flatnonzero(subject == person)
        own = rng.permutation(np.unique(segment[rows]))
        counts = np.cumsum([(segment[rows] == one).sum() for one in own])
        early = np.isin(segment[rows], own[counts <= EARLY * len(rows)])
        found.append(((seen[rows[early]], y[rows[early]]), (seen[rows[~early]], y[rows[~early]])))
    return found


def statistics(x_NCT: Array) -> Array:
    """Mean, deviation, least and greatest value and mean step of each channel, [N, 15]."""
    parts = (x_NCT.mean(2), x_NCT.std(2), x_NCT.min(2), x_NCT.max(2), np.abs(np.diff(x_NCT, axis=2)).mean(2))
    return np.concatenate(parts, 1)


def trained(train: Sequence[Part], rounds: int) -> tuple[Any, Any, Any, trees.Params]:
    """As ``fedavg``, for the people's numbers."""
    task = Regression.of(OUTPUTS, np.concatenate([y for _, y in train]))
    every = np.concatenate([x for x, _ in train])
    mean, std = (tuple(map(float, one)) for one in (every.mean((0, 2)), every.std((0, 2))))
    spec = InputSpec(every.shape[1:], mean=mean, std=std)
    return fedavg(models.describe("cnn1d", spec, (), {}, task), train, rounds)


def fedavg(
    layout: Layout, train: Sequence[Part], rounds: int, settings: Mapping[str, Any] = HYPER, seed: int = SEED
) -> tuple[Any, Any, Any, trees.Params]:
    """(layout, model, hyper-parameters, weights) after FedAvg over all of ``train`` in every round."""
    method, model = METHODS["fedavg"], models.build(layout)
    hyper = method.hyper(**settings)
    state = method.server.init(trees.widened(models.initial(layout, seed)), hyper)
    for number in range(1, rounds + 1):
        sent = method.server.broadcast(state)
        down = Payload(trees.apply(lambda a: a.astype(np.float32), sent.groups), {"round": number, "seed": seed})
        updates = {}
        for i, (x, y) in enumerate(train):
            rng = np.random.default_rng([seed, number, i])
            result = local_training.train_round(method, model, layout, down, {}, x, y, hyper, rng)
            updates[str(i)] = Update(str(i), result.update, result.samples)
        state = method.server.apply(state, [updates[i] for i in aggregation.order(updates)], len(train), hyper)
        print(f"round {number} of {rounds}", flush=True)
    return layout, model, hyper, trees.apply(lambda a: a.astype(np.float32), state.served)


def ways(train: Sequence[Part], rounds: int) -> tuple[Regression, dict[str, Answers]]:
    """The task, and name -> how a person is answered."""
    layout, model, hyper, served = trained(train, rounds)
    task: Regression = layout.task

    def tuned(own: Part, x: Array) -> Array:
        params = personal_model.adapt(METHODS["fedavg"], model, layout, served, *own, hyper, scalars={"seed": SEED})
        return task.in_units(local_training.predict_logits(model, params, x))

    def head(own: Part, x: Array) -> Array:
        fitted = RidgeHead.fit(local_training.embed(model, served, own[0]), own[1])
        return fitted.answers(local_training.embed(model, served, x))

    pooled = RidgeHead.fit(statistics(np.concatenate([x for x, _ in train])), np.concatenate([y for _, y in train]))
    return task, {
        "mean of the person's own targets": lambda own, x: np.tile(own[1].mean(0), (len(x), 1)),
        "ridge on statistics, alone": lambda own, x: RidgeHead.fit(statistics(own[0]), own[1]).answers(statistics(x)),
        "ridge on statistics, samples pooled": lambda own, x: pooled.answers(statistics(x)),
        "the fleet's model": lambda own, x: task.in_units(local_training.predict_logits(model, served, x)),
        "the fleet's model, fine-tuned": tuned,
        "the fleet's model, ridge head": head,
    }


def errors(task: Regression, answers: Answers, those: Sequence[tuple[Part, Part]]) -> dict[str, Any]:
    """MAE in g and R², means over the outputs, pooled over people."""
    found = [Errors.of(task, later[1], answers(own, later[0])) for own, later in those]
    whole = sum(found[1:], found[0])
    return {"mae": float(np.mean(whole.mae or ())), "r2": float(np.mean([one for one in whole.r2 if one is not None])),
            "people": len(those), "windows": whole.count}


def tables(rows: Sequence[dict[str, Any]]) -> dict[str, str]:
    head = ("answers", "MAE in mg, those that train", "R²", "MAE in mg, new people", "R²")
    return {"acceleration": markdown.table(head, [
        (one["answers"], *(text for who in ("train", "new")
                           for text in (f"{1000 * one[who]['mae']:.1f}", f"{one[who]['r2']:.3f}")))
        for one in rows
    ])}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=40)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    found = people(Path(os.environ["METAFLEET_SHARED"]) / "data" / "har-train21.npz")
    train, new = found[:-NEW], found[-NEW:]
    task, known = ways([own for own, _ in train], rounds)
    rows = [{"answers": name, "train": errors(task, one, train), "new": errors(task, one, new)}
            for name, one in known.items()]
    result = {"rounds": rounds, "hyper": HYPER, "seed": SEED, "rows": rows}
    storage.write_atomic(HERE / "result.json", (json.dumps(result, indent=1) + "\n").encode())
    page = HERE / "README.md"
    storage.write_atomic(page, markdown.filled(page.read_text(encoding="utf-8"), tables(rows)).encode())


if __name__ == "__main__":
    main()
