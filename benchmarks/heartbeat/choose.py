"""Chooses the demo's hyper-parameters on a validation split; the evaluated beats are not used.

Each of the eight training patients has the first 60 % of its time to learn from. That part is split again, 60 % to
train and 40 % to validate; the figure is macro-F1 over N, S and V on the pooled validation beats, the mean over the
seeds.

    python benchmarks/heartbeat/choose.py --out benchmarks/heartbeat/choose.json [--seeds 2] [--rounds 30]
    python benchmarks/heartbeat/choose.py --models cnn1d ds-cnn --defaults --seeds 3 \\
        --out benchmarks/heartbeat/models.json

The second command compares models, with the methods' own defaults. Writes every candidate with its figures, best first.
About half a minute per candidate and seed on one core.
"""

from __future__ import annotations

import argparse
import itertools
import sys
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cloud_server.figures.scores import macro_f1
from fleet_core.algorithms import aggregation
from fleet_core.algorithms.interface import Payload, Update
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.storage import write_json
from fleet_core.data import heartbeat, time_split
from fleet_core.data.samples import Samples
from fleet_core.data.sets.registry import entry
from fleet_core.learning import local_training, losses, models, personal_model

Candidate = dict[str, Any]
TUNED = [(lr, steps) for lr in (0.02, 0.05, 0.1) for steps in (10, 50)]
GRID: dict[str, list[Candidate]] = {
    "pfldyn-proto": [
        {"client_lr": lr, "penalty": penalty, "local_steps": steps}
        for lr, penalty, steps in itertools.product((0.05, 0.1), (0.03, 0.1, 0.3), (20,))
    ],
    "p-avg-proto": [{"client_lr": lr} for lr in (0.05, 0.1)],
    "fedavg": [{"client_lr": lr} for lr in (0.05, 0.1)],
}


def parts() -> dict[str, tuple[Samples, Samples]]:
    """Patient -> (train, validate), both inside the patient's own first 60 %."""
    everything = heartbeat.load_heartbeat()
    own = {name: time_split.by_time(everything.of_client(name), 0.6)[0] for name in heartbeat.DEVICES}
    return {name: time_split.by_time(samples, 0.6) for name, samples in own.items()}


def learn(model: str, method_name: str, candidate: Candidate, rounds: int, seed: int) -> dict[str, float]:
    """One run without a network: what a fleet computes, all devices in every round; figure -> macro-F1."""
    torch.set_num_threads(1)
    method, data = METHODS[method_name], parts()
    hyper = method.hyper(**candidate)
    layout = models.describe(model, entry("heartbeat").input_spec, heartbeat.CLASSES, {})
    network = models.build(layout)
    full = models.initial(layout, seed)
    state = method.server.init(trees.widened(method.params(full)), hyper)
    own: dict[str, Any] = {name: {} for name in data}
    for number in range(1, rounds + 1):
        groups = trees.apply(lambda a: np.asarray(a, np.float32), state.model)
        updates = []
        for name in aggregation.order(data):
            rng = np.random.default_rng([seed, number, *name.encode()])
            samples = data[name][0]
            done = local_training.train_round(
                method, network, layout, Payload(groups, {"round": float(number)}), own[name], samples.x, samples.y,
                hyper, rng,
            )
            own[name] = done.pending
            updates.append(Update(name, Payload(trees.widened(done.update.groups), done.update.scalars)))
        state = method.server.apply(state, updates, len(data), hyper)
    served = trees.apply(lambda a: np.asarray(a, np.float32), state.served)
    return {name: _pooled(answers, data) for name, answers in _answers(method_name, network, served, data, layout)}


def _answers(method_name: str, network: Any, params: Any, data: Any, layout: Any) -> list[tuple[str, Any]]:
    """(what, patient -> answered labels) for each way in which this method is evaluated."""
    if METHODS[method_name].personalizer == "proto":
        return [("proto", {name: _proto(network, params, own, later) for name, (own, later) in data.items()})]
    plain = {
        name: local_training.predict_logits(network, params, later.x).argmax(1) for name, (_, later) in data.items()
    }
    found = [("as it is", plain)]
    for lr, steps in TUNED:
        hyper = METHODS["fedavg-meta"].hyper(finetune_lr=lr, finetune_steps=steps)
        answers = {}
        for name, (own, later) in data.items():
            tuned = personal_model.adapt(METHODS["fedavg-meta"], network, layout, params, own.x, own.y, hyper)
            answers[name] = local_training.predict_logits(network, tuned, later.x).argmax(1)
        found.append((f"fine-tuned lr={lr} steps={steps}", answers))
    return found


def _proto(network: Any, params: Any, own: Samples, later: Samples) -> Any:
    support, query = (torch.tensor(local_training.embed(network, params, part.x)) for part in (own, later))
    mean, count = losses.prototypes(support, torch.tensor(own.y), len(heartbeat.CLASSES))
    return losses.proto_logits(query, mean, count).argmax(1).numpy()


def _pooled(answers: dict[str, Any], data: Any) -> float:
    confusion = np.zeros((3, 3), np.int64)
    for name, labels in answers.items():
        np.add.at(confusion, (data[name][1].y, labels), 1)
    return float(macro_f1(confusion.tolist(), classes_present_only=False) or 0.0)


def _job(job: tuple[str, str, Candidate, int, int]) -> dict[str, float]:
    return learn(*job)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=30)
    parser.add_argument("--workers", type=int, default=2)
    parser.add_argument("--models", nargs="+", default=[entry("heartbeat").model])
    parser.add_argument("--defaults", action="store_true", help="the methods' own hyper-parameters alone")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    jobs = [
        (model, method, candidate, options.rounds, seed)
        for model in options.models for method, candidates in GRID.items()
        for candidate in ([{}] if options.defaults else candidates) for seed in range(options.seeds)
    ]
    figures: dict[tuple[str, str, str, str], list[float]] = {}
    with ProcessPoolExecutor(options.workers) as pool:
        for number, (job, found) in enumerate(zip(jobs, pool.map(_job, jobs), strict=True), start=1):
            for what, figure in found.items():
                figures.setdefault((*job[:2], repr(job[2]), what), []).append(figure)
            told = f"{number}/{len(jobs)} {' '.join(map(str, job[:3]))} seed {job[4]}: {found}"
            print(told, file=sys.stderr, flush=True)
    rows: list[dict[str, Any]] = [
        {"model": key[0], "method": key[1], "hyper": key[2], "judged": key[3], "macro_f1": values,
         "mean": float(np.mean(values))}
        for key, values in figures.items()
    ]
    rows.sort(key=lambda row: (row["method"], -row["mean"]))
    write_json(options.out, {"rounds": options.rounds, "seeds": options.seeds, "candidates": rows})
    for row in rows:
        print(f"{row['model']:8} {row['method']:14} {row['mean']:.3f}  {row['judged']:28} {row['hyper']}")


if __name__ == "__main__":
    main()
