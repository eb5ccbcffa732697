"""Whether a device that weighs several ways to personalize answers better than by any of them alone.

    METAFLEET_SHARED=FOLDER METAFLEET_DATA=FOLDER python -m benchmarks.auto.run      writes result.json and the page

Embedded samples and answers of every set and seed are kept below ``build/auto``, so that an interrupted run goes on.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import markdown
from benchmarks.auto import devices, old_choice
from benchmarks.auto.devices import SETS, Device
from cloud_server.figures.scores import confusion_accuracy, macro_f1
from edge_agent.inference.mixed_plans import answers
from edge_agent.inference.personalizers import HEAD_STEPS, Plan
from fleet_core.algorithms.methods.pfedgp import Gaussian
from fleet_core.base import storage
from fleet_core.data.samples import stratified
from fleet_core.personalization.mixture import MAX_SAMPLES, Way, folds, mixture_of
from fleet_core.personalization.nearest import Prototypes
from fleet_core.personalization.plain_baseline import counted
from fleet_core.tasks.calibration import expected_calibration_error, gaps

HERE = Path(__file__).parent
BUILD = Path("build/auto")
SEEDS = range(5)
FEW = 5
MOST_GAUSSIAN = 100
"""The most samples of Gaussian processes here; it bounds time."""
ROLES, LABELS = ("validation", "evaluated"), ("few", "all")
SHRUNK = (1, 3, 10)
CHOICE, MIXTURE, ALIKE = "the best by cross-validation", "**mixture**", "mixture, all ways alike"
NAMES = {
    "none": "the fleet's model", "means": "class means", "proto": "class means, frequent classes likelier",
    "head": "fitted head", "knn": "neighbours", "gp": "Gaussian processes",
    CHOICE: CHOICE, ALIKE: ALIKE, MIXTURE: MIXTURE,
    **{f"shrunk {k}": f"class means, drawn to the mean of all by weight {k}" for k in SHRUNK},
    "head, even": "fitted head, all classes alike",
}
MIXED = ("none", "proto", "head", "knn")
MAIN = ("none", "means", "proto", "head", "knn", "gp", CHOICE, ALIKE, MIXTURE)
OPTIONS = ("means", *(f"shrunk {k}" for k in SHRUNK), "proto", "head", "head, even")
Array = np.ndarray[Any, Any]


# Answers --------------------------------------------------------------------------------------------------------------


def plans(device: Device) -> dict[str, Plan]:
    with_head = device.head is not None
    return {
        **({"none": Plan("none", "none")} if with_head else {}),
        "means": Plan("proto", "proto"),
        "proto": Plan("proto", "proto", frequent=True),
        "head": Plan("head", "head", steps=HEAD_STEPS),
        "knn": Plan("knn", "knn", mixture=None if with_head else 1.0),
        "gp": Plan("gp", "gp", gaussian=Gaussian(length_scale=_median_distance(device.z))),
    }


def _median_distance(z: Array) -> float:
    some = z[stratified(np.zeros(len(z), int), 100)].astype(np.float64)
    apart = np.sqrt(np.square(some[:, None] - some).sum(2))
    return float(np.median(apart[np.triu_indices(len(some), 1)])) or 1.0


def answered(device: Device, few: bool) -> tuple[dict[str, Array], dict[str, float]]:
    """(probabilities [n, N] of the queries by strategy, processor seconds of personalizing by way). few: only the first
    ``FEW`` samples of each class are labelled."""
    rows = np.arange(len(device.y))
    if few:
        rows = np.sort(np.concatenate([np.flatnonzero(device.y == label)[:FEW] for label in np.unique(device.y)]))
    z, y = np.concatenate([device.z[rows], device.query_z]), np.concatenate([device.y[rows], device.query_y])
    own, asked = np.arange(len(rows)), np.arange(len(rows), len(y))
    head = None
    if device.head is not None and device.query_head is not None:
        head = np.concatenate([device.head[rows], device.query_head])
    every, left_out, seconds = plans(device), defaultdict(list), {}
    ways = {name: partial(answers, plan, z, y, device.classes, head) for name, plan in every.items()}
    found = {name: way(own if name != "gp" else stratified(y[own], MOST_GAUSSIAN), asked) for name, way in ways.items()}

    def kept(name: str, train: Array, test: Array) -> Array:
        left_out[name].append(ways[name](train, test))
        return left_out[name][-1]

    started = time.process_time()
    mixture = mixture_of({name: partial(kept, name) for name in MIXED if name in ways}, y[own])
    seconds["mixture"] = time.process_time() - started
    for name in () if few else mixture.ways:
        started = time.process_time()
        ways[name](own, own[:1])
        seconds[name] = time.process_time() - started
        seconds["mixture"] += seconds[name]
    alike = replace(mixture, ways={way: replace(one, weight=1 / len(mixture.ways))
                                   for way, one in mixture.ways.items()})
    found |= {MIXTURE: mixture.answer(found), ALIKE: alike.answer(found)}
    found[CHOICE] = found[_chosen(left_out, ways["means"], y[own], device.classes)]
    return found | _options(found, z[own], y[own], device), seconds


def _chosen(left_out: Mapping[str, list[Array]], means: Way, y: Array, classes: int) -> str:
    judged = stratified(y, MAX_SAMPLES)
    parts = [(judged[train], judged[test]) for train, test in folds(y[judged])]
    tested = np.concatenate([np.zeros(0, np.int64), *(test for _, test in parts)])
    every = {**left_out, "means": [means(*part) for part in parts]}
    empty = np.zeros((0, classes), np.float32)
    ways = (way for way in ("none", "means", "head", "knn") if way in every)
    return old_choice.chosen({way: np.concatenate([empty, *every[way]]) for way in ways}, y[tested])


def _options(found: Mapping[str, Array], z: Array, y: Array, device: Device) -> dict[str, Array]:
    """What was tried with class means and the head."""
    means = Prototypes.empty(device.classes, z.shape[1]).add(z, y)
    count_N = means.counts[:, None]
    centre = means.prototypes[means.counts > 0].mean(0)
    shrunk = {
        f"shrunk {k}": replace(means, prototypes=((count_N * means.prototypes + k * centre) / (count_N + k))
                               .astype(np.float32)).probabilities(device.query_z)
        for k in SHRUNK
    }
    even = np.where(means.counts > 0, found["head"] / np.maximum(means.counts, 1), 0) + 1e-12
    return shrunk | {"head, even": (even / even.sum(1, keepdims=True)).astype(np.float32)}


# Files ----------------------------------------------------------------------------------------------------------------


def embedded(name: str, seed: int) -> dict[tuple[str, str], Device]:
    """(role, device) -> its samples, from the file of the set and seed, which is made if it is not there."""
    path = BUILD / f"{name.replace(' ', '-')}-{seed}.safetensors"
    if not path.exists():
        found = SETS[name]()
        train, validate, evaluate = found.split(np.random.default_rng(seed))
        network = devices.trained(found, train, seed)
        made = {(role, one): devices.device_of(found, one, network)
                for role, names in zip(ROLES, (validate, evaluate), strict=True) for one in names}
        arrays = {f"{role}/{one}/{key}": array for (role, one), device in made.items()
                  for key, array in device.arrays().items()}
        path.parent.mkdir(parents=True, exist_ok=True)
        storage.write_atomic(path, storage.pack(arrays, {}))
    arrays, _ = storage.unpack(storage.read_bytes(path, limit=1 << 30), where=str(path))
    parts: dict[tuple[str, str], dict[str, Array]] = {}
    for key, array in arrays.items():
        role, one, what = key.split("/")
        parts.setdefault((role, one), {})[what] = array
    return {key: Device.of(part) for key, part in parts.items()}


def of_set(name: str, seed: int) -> Any:
    """The figures of a set and seed, from their file, which is made if it is not there."""
    path = BUILD / f"{name.replace(' ', '-')}-{seed}.json"
    if not path.exists():
        storage.write_json(path, figures(embedded(name, seed)))
    return json.loads(storage.read_bytes(path, limit=1 << 24))


# Figures --------------------------------------------------------------------------------------------------------------


def figures(found: Mapping[tuple[str, str], Device]) -> dict[str, Any]:
    """role -> labels -> strategy -> figures over the devices, and the costs."""
    result: dict[str, Any] = {}
    for role in dict.fromkeys(role for role, _ in found):
        for labels in LABELS:
            by_strategy, seconds = defaultdict(list), []
            for device in (one for (of, _), one in found.items() if of == role):
                answers_by, cost = answered(device, labels == "few")
                if labels == "all":
                    dearest, embed_s = max(cost[way] for way in cost if way in MIXED), device.embed_s * len(device.y)
                    seconds.append((cost["mixture"] / dearest, (cost["mixture"] + embed_s) / (dearest + embed_s)))
                for strategy, answer in answers_by.items():
                    by_strategy[strategy].append((answer, device.query_y, device.classes))
            result.setdefault(role, {})[labels] = {name: pooled(rows) for name, rows in by_strategy.items()}
            if labels == "all":
                result[role]["cost"] = [float(value) for value in np.median(seconds, axis=0)]
    return result


def pooled(rows: list[tuple[Array, Array, int]]) -> dict[str, float]:
    """Mean accuracy and macro-F1 of devices, the worst device's accuracy, and the calibration error of all answers."""
    tables = [counted(y, answer.argmax(1), classes).tolist() for answer, y, classes in rows]
    accuracy = [confusion_accuracy(table) or 0.0 for table in tables]
    right = np.concatenate([answer.argmax(1) == y for answer, y, _ in rows])
    sure = np.concatenate([answer.max(1) for answer, _, _ in rows])
    f1 = [macro_f1(table, classes_present_only=True) or 0.0 for table in tables]
    return {"accuracy": float(np.mean(accuracy)), "macro_f1": float(np.mean(f1)), "worst": min(accuracy),
            "calibration_error": expected_calibration_error(gaps(sure, right), len(right)) or 0.0}


def summary(runs: Mapping[str, list[Any]]) -> dict[str, Any]:
    """role -> labels -> strategy -> set -> [mean over seeds, standard deviation] of each figure; and the costs."""
    result: dict[str, Any] = {role: {labels: {} for labels in LABELS} for role in ROLES}
    for name, seeds in runs.items():
        for role in seeds[0]:
            result[role].setdefault("cost", {})[name] = np.median([one[role]["cost"] for one in seeds], axis=0).tolist()
            for labels in LABELS:
                for strategy, of_first in seeds[0][role][labels].items():
                    result[role][labels].setdefault(strategy, {})[name] = {
                        figure: _mean_and_spread([one[role][labels][strategy][figure] for one in seeds])
                        for figure in of_first
                    }
    return result


def _mean_and_spread(values: list[float]) -> list[float]:
    return [float(np.mean(values)), float(np.std(values, ddof=1)) if len(values) > 1 else 0.0]


# Tables ---------------------------------------------------------------------------------------------------------------


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    found = {}
    for role in ROLES:
        for labels in LABELS:
            found[f"{role}-{labels}"] = _table(result[role][labels], MAIN)
    found |= {f"options-{labels}": _table(result["validation"][labels], OPTIONS) for labels in LABELS}
    costs = [(name, *(f"{value:.1f}" for value in result["evaluated"]["cost"][name])) for name in SETS]
    found["cost"] = markdown.table(("set", "÷ dearest way", "with embedding"), costs)
    return found


def _table(by_strategy: Mapping[str, Any], names: tuple[str, ...]) -> str:
    sets = [name for name in SETS if name in by_strategy["head"]]
    rows = []
    for name in names:
        one = by_strategy[name]
        cells = [_cell(one[of]) if of in one else "—" for of in sets]
        figures = ("accuracy", "macro_f1", "worst", "calibration_error")
        means = [f"{100 * np.mean([one[of][key][0] for of in sets]):.1f}" if set(sets) <= set(one) else "—"
                 for key in figures]
        rows.append((NAMES[name], *cells, *means))
    return markdown.table(("", *sets, "mean", "macro-F1", "worst device", "calibration error"), rows)


def _cell(figures: Mapping[str, list[float]]) -> str:
    mean, spread = figures["accuracy"]
    return f"{100 * mean:.1f} ± {100 * spread:.1f}"


def main() -> None:
    torch.set_num_threads(1)
    runs: dict[str, list[Any]] = {name: [] for name in SETS}
    for seed in SEEDS:
        for name in SETS:
            started = time.time()
            runs[name].append(of_set(name, seed))
            print(f"{name}, seed {seed}: {time.time() - started:.0f} s", file=sys.stderr, flush=True)
    result = summary(runs)
    storage.write_json(HERE / "result.json", result)
    page = HERE / "README.md"
    page.write_text(markdown.filled(page.read_text(encoding="utf-8"), tables(result)), encoding="utf-8")


if __name__ == "__main__":
    main()
