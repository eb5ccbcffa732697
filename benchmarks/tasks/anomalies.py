"""Anomaly detection on real series: heart beats, learned from each patient's normal ones alone.

MIT-BIH, 22 patients (``benchmarks/heartbeat``). A device is a patient. Its first 60 % of beats are learned from, the
normal ones (N) only; of the rest the earlier half of the normal beats gives the threshold, and the later half and all
other beats are judged, as a device of a fleet does. 11 patients chose the way (``validation``), with a fleet of their
own; the other 11 are reported (``judged``).

    METAFLEET_SHARED=FOLDER python -m benchmarks.tasks.anomalies validation|judged [--rounds 40] [--seeds 3]

Writes anomalies.json after each seed, and the tables in ANOMALIES.md, beside this file.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import markdown
from benchmarks.heartbeat.build import read_source
from benchmarks.tasks.run import fedavg
from cloud_server.choices.first_settings import REPEATING, REPEATING_OPTIONS, REPEATING_RATES
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage, trees
from fleet_core.data.heartbeat import expand
from fleet_core.data.model_input import standardized
from fleet_core.data.samples import Samples
from fleet_core.data.time_split import by_time
from fleet_core.learning import local_training, models, personal_model
from fleet_core.personalization.ridge_head import RidgeHead
from fleet_core.tasks.anomaly import QUIET, Alarms, Anomaly, measures

HERE = Path(__file__).parent
RESULT, PAGE = HERE / "anomalies.json", HERE / "ANOMALIES.md"
PARTS = ("validation", "judged")
NORMAL, EARLY, FEW, DAY_S = "N", 0.6, 5, 86_400
HYPER = {"local_steps": 20, **REPEATING_RATES, "finetune_steps": 50}
COMPONENTS, NEAREST = 8, 5
Array = np.ndarray[Any, Any]
Scores = Callable[[Array], Array]
"""Samples -> their scores [N]."""
Way = Callable[["Patient"], Scores]
"""What a patient's device computes."""


@dataclass(frozen=True, eq=False)
class Patient:
    """own: normal beats to learn from, float32 [N, 3, 128]. x, y: the later beats in order of time; y is 0 if normal,
    else 1."""

    name: str
    own: Array
    x: Array
    y: Array


def patients(samples: Samples) -> list[Patient]:
    normal = (samples.classes or ()).index(NORMAL)
    found = []
    for name in samples.clients:
        first, later = by_time(samples.of_client(name), EARLY)
        own = first.x[first.y == normal].astype(np.float32)
        found.append(Patient(name, own, later.x.astype(np.float32), (later.y != normal).astype(np.int64)))
    return found


def trained(those: Sequence[Patient], rounds: int, seed: int) -> tuple[Any, Any, Any, trees.Params]:
    """(layout, model, hyper-parameters, weights) after FedAvg over all patients in every round."""
    spec = standardized(np.concatenate([one.own for one in those]))
    task = Anomaly(int(np.prod(spec.shape)))
    layout = models.describe(REPEATING, spec, (), REPEATING_OPTIONS, task)
    return fedavg(layout, [(one.own, task.targets(len(one.own))) for one in those], rounds, HYPER, seed)


def of_fleet(those: Sequence[Patient], rounds: int, seed: int) -> dict[str, Way]:
    """The ways that need a model of the fleet."""
    layout, model, hyper, served = trained(those, rounds, seed)

    def score(params: trees.Params) -> Scores:
        return lambda x: layout.task.in_units(local_training.predict_logits(model, params, x))[:, 0]

    def tuned(one: Patient) -> Scores:
        y = layout.task.targets(len(one.own))
        return score(personal_model.adapt(METHODS["fedavg"], model, layout, served, one.own, y, hyper,
                                          scalars={"seed": seed}))

    def head(one: Patient) -> Scores:
        fitted = RidgeHead.fit(local_training.embed(model, served, one.own), prepared(layout, one.own))
        return score({**served, "head": {"head.weight": fitted.weight, "head.bias": fitted.bias}})

    return {
        "the fleet's model": lambda one: score(served),
        "the fleet's model, fine-tuned": tuned,
        "the fleet's model, ridge head": head,
        "the fleet's embedding, Mahalanobis": lambda one: mahalanobis(
            one.own, lambda x: local_training.embed(model, served, x)),
        "the fleet's embedding, nearest": lambda one: nearest(
            one.own, lambda x: local_training.embed(model, served, x)),
    }


def alone(rounds: int, seed: int) -> Way:
    """The same model, trained on the patient's own beats alone with as many steps."""

    def way(one: Patient) -> Scores:
        layout, model, _, weights = trained([one], rounds, seed)
        return lambda x: layout.task.in_units(local_training.predict_logits(model, weights, x))[:, 0]

    return way


def prepared(layout: Any, x: Array) -> Array:
    spec = layout.input
    found: Array = (x - np.reshape(spec.mean, (-1, 1))) / np.reshape(spec.std, (-1, 1))
    return found.reshape(len(x), -1).astype(np.float32)


def flat(x: Array) -> Array:
    return x.reshape(len(x), -1).astype(np.float64)


def spectrum(x: Array) -> Array:
    """The logarithm of each channel's amplitudes."""
    return np.log(np.abs(np.fft.rfft(x, axis=2)) + 1e-3).reshape(len(x), -1)


def mahalanobis(own: Array, features: Callable[[Array], Array]) -> Scores:
    z = features(own).astype(np.float64)
    mean, covariance = z.mean(0), np.cov(z.T)
    inverse = np.linalg.pinv(covariance + 1e-3 * np.trace(covariance) / len(covariance) * np.eye(len(covariance)))

    def score(x: Array) -> Array:
        d = features(x) - mean
        return np.asarray(np.einsum("nd,de,ne->n", d, inverse, d))

    return score


def nearest(own: Array, features: Callable[[Array], Array]) -> Scores:
    """The mean squared distance to the nearest of the patient's own."""
    z = features(own).astype(np.float64)

    def score(x: Array) -> Array:
        q = features(x).astype(np.float64)
        squared = np.square(q).sum(1)[:, None] + np.square(z).sum(1) - 2 * q @ z.T
        return np.asarray(np.maximum(np.sort(squared, 1)[:, :NEAREST].mean(1), 0))

    return score


def components(one: Patient) -> Scores:
    """The error of a repetition by principal components."""
    x = flat(one.own)
    mean = x.mean(0)
    base = np.linalg.eigh(np.cov(x.T))[1][:, -COMPONENTS:]

    def score(x: Array) -> Array:
        d = flat(x) - mean
        return np.asarray(np.square(d - d @ base @ base.T).mean(1))

    return score


PLAIN: Mapping[str, Way] = {
    f"{COMPONENTS} principal components, alone": components,
    "nearest beats, alone": lambda one: nearest(one.own, flat),
    "Mahalanobis on the spectrum, alone": lambda one: mahalanobis(one.own, spectrum),
}


def judged(those: Sequence[Patient], way: Way, task: Anomaly, common: bool = False) -> dict[str, float]:
    """AUROC: mean and worst of the patients with ``FEW`` other beats or more. false: share of normal beats with an
    alarm, of all patients and of the worst. found: share of other beats. common: one threshold for all patients."""
    scores = [way(one)(one.x) for one in those]
    limit = None
    if common:
        limit = task.threshold(np.concatenate(
            [s[task.quiet_for_threshold(one.y)] for one, s in zip(those, scores, strict=True)]))
    each = [_alarms(task, one.y, s, limit) for one, s in zip(those, scores, strict=True)]
    auroc = [measures(one)["auroc"]["all"] for one in each if one.anomaly[0] >= FEW]
    quiet, wrong = np.sum([one.quiet for one in each], 0), np.sum([one.anomaly for one in each], 0)
    return {"auroc": float(np.mean(auroc)), "worst_auroc": min(auroc), "false": float(quiet[1] / quiet[0]),
            "worst_false": max(measures(one)["alarms"][QUIET] for one in each), "found": float(wrong[1] / wrong[0])}


def _alarms(task: Anomaly, y: Array, scores: Array, limit: float | None) -> Alarms:
    found = Alarms.of(task, y, scores)
    if limit is None:
        return found
    used = np.zeros(len(y), bool)
    used[task.quiet_for_threshold(y)] = True
    sums = {name: np.array([now[0], (scores[rows] > limit).sum(), *now[2:]])
            for name, now, rows in (("quiet", found.quiet, (y == 0) & ~used), ("anomaly", found.anomaly, y == 1))}
    return Alarms(found.count, sums["quiet"], sums["anomaly"], found.pairs)


def measured(those: Sequence[Patient], rounds: int, seed: int) -> dict[str, dict[str, float]]:
    """Way -> its figures, of the ways that depend on the seed."""
    task, rare = Anomaly(1), Anomaly(1, false_alarms_per_day=10, seconds=0.8)
    ways = of_fleet(those, rounds, seed)
    fleet, tuned = ways["the fleet's model"], ways["the fleet's model, fine-tuned"]
    found = {name: judged(those, way, task) for name, way in ways.items()}
    return found | {
        "the fleet's model, one threshold for all": judged(those, fleet, task, common=True),
        "fine-tuned, 10 false alarms a day wanted": judged(those, tuned, rare),
        "the same model, alone": judged(those, alone(rounds, seed), task),
    }


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    head = ("score and threshold", "AUROC, mean of patients", "worst patient", "false alarms", "worst patient",
            "other beats found")

    def cells(row: Mapping[str, Any]) -> tuple[str, ...]:
        every = {key: [one[key] for one in row["seeds"]] for key in row["seeds"][0]}
        mean = {key: float(np.mean(values)) for key, values in every.items()}
        spread = f" ± {(max(every['auroc']) - min(every['auroc'])) / 2:.3f}" if len(row["seeds"]) > 1 else ""
        return (row["way"], f"{mean['auroc']:.3f}{spread}", f"{mean['worst_auroc']:.3f}",
                f"{100 * mean['false']:.2f} %",
                f"{100 * mean['worst_false']:.1f} %", f"{100 * mean['found']:.0f} %")

    return {name: markdown.table(head, map(cells, result[name]["rows"])) for name in PARTS if name in result}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("part", choices=PARTS)
    parser.add_argument("--rounds", type=int, default=40)
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    torch.set_num_threads(1)
    source = read_source()
    every = patients(expand(source.pop("x"), **source))
    those = {"validation": every[0::2], "judged": every[1::2]}[options.part]
    rows: dict[str, list[dict[str, float]]] = {name: [judged(those, way, Anomaly(1))] for name, way in PLAIN.items()}
    for seed in range(options.seeds):
        for name, found in measured(those, options.rounds, seed).items():
            rows.setdefault(name, []).append(found)
        print(f"seed {seed} of {options.seeds}", flush=True)
        part = {"rounds": options.rounds, "hyper": HYPER, "patients": [one.name for one in those],
                "rows": [{"way": name, "seeds": found} for name, found in rows.items()]}
        kept = json.loads(RESULT.read_text(encoding="utf-8")) if RESULT.exists() else {}
        result = {**kept, options.part: part}
        storage.write_atomic(RESULT, (json.dumps(result, indent=1) + "\n").encode())
    storage.write_atomic(PAGE, markdown.filled(PAGE.read_text(encoding="utf-8"), tables(result)).encode())


if __name__ == "__main__":
    main()
