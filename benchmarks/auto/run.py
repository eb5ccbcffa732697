"""Whether a device that weighs several ways to personalize answers better than by any of them alone.

    METAFLEET_SHARED=FOLDER METAFLEET_DATA=FOLDER python -m benchmarks.auto.run [--fleet]

Writes result.json and the page. With ``--fleet`` the encoder is trained by a simulated fleet (``fedavg-joint``) instead
of centrally, without gradient steps among the ways; it writes fleet.json in place of result.json. Embedded samples and
answers of every set and seed are kept below ``build/auto``, so that an interrupted run goes on.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import markdown
from benchmarks.auto import command, devices, old_choice
from benchmarks.auto.devices import LABELS, SETS, Device
from cloud_server.figures.scores import confusion_accuracy, macro_f1
from edge_agent.inference.mixed_plans import answers
from edge_agent.inference.personalizers import HEAD_STEPS, Plan
from fleet_core.algorithms.methods.pfedgp import Gaussian
from fleet_core.base import storage
from fleet_core.data.samples import stratified
from fleet_core.personalization.mixture import Mixture, Way, mixture_of, stacked
from fleet_core.personalization.nearest import Prototypes
from fleet_core.personalization.plain_baseline import counted
from fleet_core.tasks.calibration import best_temperature, expected_calibration_error, gaps, likelihoods

HERE = Path(__file__).parent
RESULT, OF_FLEET = "result.json", "fleet.json"
BUILD = Path("build/auto")
SEEDS = range(5)
MOST_GAUSSIAN = 100
"""The most samples of Gaussian processes here; it bounds time."""
ROLES = ("validation", "evaluated")
SHRUNK = (1, 3, 10)
PRIORS = (20, 60, 200)
"""As how many samples what other devices weigh counts on a device."""
CHOICE, MIXTURE, ALIKE = "the best by cross-validation", "**mixture**", "mixture, all ways alike"


def stepped(rate: float) -> str:
    return f"gradient steps of {rate:g}"


def with_steps(rate: float) -> str:
    return f"mixture, with gradient steps of {rate:g}"


def with_prior(weight: float) -> str:
    return f"mixture, the fleet's prior counts as {weight}"


NAMES = {
    "none": "the fleet's model", "means": "class means", "proto": "class means, frequent classes likelier",
    "head": "fitted head", "knn": "neighbours", "gp": "Gaussian processes",
    CHOICE: CHOICE, ALIKE: ALIKE, MIXTURE: MIXTURE,
    **{f"shrunk {k}": f"class means, drawn to the mean of all by weight {k}" for k in SHRUNK},
    "head, even": "fitted head, all classes alike",
    **{name(rate): name(rate) for name in (stepped, with_steps) for rate in devices.STEP_RATES},
    **{with_prior(weight): with_prior(weight) for weight in PRIORS},
}
MIXED = ("none", "proto", "head", "knn")
MAIN = ("none", "means", "proto", "head", "knn", "gp", CHOICE, ALIKE, MIXTURE)
STEPPED = (*map(stepped, devices.STEP_RATES), MIXTURE, *map(with_steps, devices.STEP_RATES))
PRIOR_ROWS = (MIXTURE, *map(with_prior, PRIORS))
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


@dataclass(frozen=True, eq=False)
class Trial:
    """A device's ways: probabilities of the left-out samples of each fold, and [n, N] of the queries. y: the labels of
    its labelled samples. seconds: processor time of personalizing, by way."""

    left_out: Mapping[str, list[Array]]
    found: Mapping[str, Array]
    y: Array
    seconds: Mapping[str, float]

    @cached_property
    def plain(self) -> Mixture:
        return self.mixture()

    @property
    def left_out_y(self) -> Array:
        """The labels of the left-out samples, in the order of their answers."""
        return self.y[np.concatenate([np.zeros(0, np.int64), *(test for _, test in devices.parts(self.y))])]

    def mixture(self, extra: Sequence[str] = ()) -> Mixture:
        """Of the ways ``MIXED`` and ``extra`` that the device has."""
        names = [name for name in (*MIXED, *extra) if name in self.left_out]
        return mixture_of({name: _replayed(self.left_out[name]) for name in names}, self.y)

    def with_prior(self, fleet: Sequence[Mixture], weight: int) -> Mixture:
        """The mixture of a device that knows the mean weights of ``fleet``, other devices: beside its own samples count
        ``weight`` more in these shares, each as if one way alone had answered it."""
        y = self.left_out_y
        if not fleet or not len(y):
            return self.plain
        own = [np.concatenate(self.left_out[name]) for name in self.plain.ways]
        shares = np.array([np.mean([one.ways[name].weight for one in fleet]) for name in self.plain.ways])
        alone = np.repeat(np.where(np.eye(len(own)), 0, -np.inf), np.round(weight * shares).astype(int), axis=1)
        weights = stacked(np.concatenate([np.stack([likelihoods(one, y) for one in own]), alone], axis=1))
        ways = {name: replace(one, weight=float(new))
                for (name, one), new in zip(self.plain.ways.items(), weights, strict=True)}
        mean = np.tensordot(weights, own, 1).astype(np.float32)
        return replace(self.plain, temperature=best_temperature(mean, y), ways=ways)


def _replayed(parts: list[Array]) -> Way:
    answers_of = iter(parts)
    return lambda train, test: next(answers_of)


def tried(device: Device, labels: str) -> Trial:
    """labels: ``few`` or ``all``."""
    rows = devices.labelled(device.y, labels)
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
    for name in mixture.ways if labels == "all" else ():
        started = time.process_time()
        ways[name](own, own[:1])
        seconds[name] = time.process_time() - started
        seconds["mixture"] += seconds[name]
    parts = devices.parts(y[own])
    left_out["means"] = [ways["means"](*part) for part in parts]
    for rate, answer in device.stepped.get(labels, {}).items():
        *left_out[stepped(rate)], found[stepped(rate)] = np.split(answer, np.cumsum([len(test) for _, test in parts]))
    found |= _options(found, z[own], y[own], device)
    return Trial(left_out, found, y[own], seconds)


def answered(trial: Trial, fleet: Sequence[Trial]) -> dict[str, Array]:
    """The probabilities [n, N] of the queries by strategy. fleet: other devices, from which priors are learned."""
    found = dict(trial.found)

    def mixed(name: str, mixture: Mixture) -> None:
        found[name] = mixture.answer(found)

    mixed(MIXTURE, trial.plain)
    mixed(ALIKE, replace(trial.plain, ways={way: replace(one, weight=1 / len(trial.plain.ways))
                                            for way, one in trial.plain.ways.items()}))
    for rate in devices.STEP_RATES:
        mixed(with_steps(rate), trial.mixture([stepped(rate)]))
    for weight in PRIORS:
        mixed(with_prior(weight), trial.with_prior([one.plain for one in fleet], weight))
    found[CHOICE] = found[_chosen(trial)]
    return found


def _chosen(trial: Trial) -> str:
    ways = [way for way in ("none", "means", "head", "knn") if way in trial.left_out]
    empty = np.zeros((0, trial.found["means"].shape[1]), np.float32)
    return old_choice.chosen({way: np.concatenate([empty, *trial.left_out[way]]) for way in ways}, trial.left_out_y)


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


def embedded(name: str, seed: int, *, fleet: bool = False) -> dict[tuple[str, str], Device]:
    """(role, device) -> its samples, from the file of the set and seed, which is made if it is not there."""
    path = _file(name, seed, fleet, "safetensors")
    if not path.exists():
        found = SETS[name]()
        train, validate, evaluate = found.split(np.random.default_rng(seed))
        network = (devices.trained_by_fleet if fleet else devices.trained)(found, train, seed)
        made = {(role, one): devices.device_of(found, one, network, with_steps=not fleet)
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


def _file(name: str, seed: int, fleet: bool, kind: str) -> Path:
    return BUILD / f"{name.replace(' ', '-')}{'-fleet' if fleet else ''}-{seed}.{kind}"


def of_set(name: str, seed: int, *, fleet: bool = False) -> Any:
    """The figures of a set and seed, from their file, which is made if it is not there."""
    path = _file(name, seed, fleet, "json")
    if not path.exists():
        storage.write_json(path, figures(embedded(name, seed, fleet=fleet)))
    return json.loads(storage.read_bytes(path, limit=1 << 24))


# Figures --------------------------------------------------------------------------------------------------------------


def figures(found: Mapping[tuple[str, str], Device]) -> dict[str, Any]:
    """role -> labels -> strategy -> figures over the devices, and the costs."""
    result: dict[str, Any] = {}
    for labels in LABELS:
        trials = {key: tried(device, labels) for key, device in found.items()}
        validating = {key: trial for key, trial in trials.items() if key[0] == "validation"}
        answers_by: dict[str, dict[str, list[tuple[Array, Array, int]]]] = defaultdict(lambda: defaultdict(list))
        for key, trial in trials.items():
            fleet = [other for of, other in validating.items() if of != key]
            for strategy, answer in answered(trial, fleet).items():
                answers_by[key[0]][strategy].append((answer, found[key].query_y, found[key].classes))
        for role, by_strategy in answers_by.items():
            of_role = result.setdefault(role, {})
            of_role[labels] = {name: pooled(rows) for name, rows in by_strategy.items()}
            if labels == "all":
                costs = [_costs(found[key], trial) for key, trial in trials.items() if key[0] == role]
                of_role["cost"] = [float(value) for value in np.median(costs, axis=0)]
    return result


def _costs(device: Device, trial: Trial) -> tuple[float, float]:
    """The mixture's processor time over that of the dearest way in it, without and with embedding the samples."""
    spent, embed_s = trial.seconds, device.embed_s * len(device.y)
    dearest = max(spent[way] for way in spent if way in MIXED)
    return spent["mixture"] / dearest, (spent["mixture"] + embed_s) / (dearest + embed_s)


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


def tables(result: Mapping[str, Any], of_fleet: Mapping[str, Any], of_command: Mapping[str, Any]) -> dict[str, str]:
    found = {f"fleet-{labels}": _table(of_fleet["evaluated"][labels], MAIN) for labels in LABELS}
    for role in ROLES:
        for labels in LABELS:
            found[f"{role}-{labels}"] = _table(result[role][labels], MAIN)
        found |= {f"{role}-{what}-{labels}": _table(result[role][labels], rows) for labels in LABELS
                  for what, rows in (("steps", STEPPED), ("prior", PRIOR_ROWS))}
    found |= {f"options-{labels}": _table(result["validation"][labels], OPTIONS) for labels in LABELS}
    costs = [(name, *(f"{value:.1f}" for value in result["evaluated"]["cost"][name])) for name in SETS]
    found["cost"] = markdown.table(("set", "÷ dearest way", "with embedding"), costs)
    found["command"] = command.table(of_command["models"])
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
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--fleet", action="store_true", help="a simulated fleet trains the encoder")
    options = parser.parse_args()
    torch.set_num_threads(1)
    runs: dict[str, list[Any]] = {name: [] for name in SETS}
    for seed in SEEDS:
        for name in SETS:
            started = time.time()
            runs[name].append(of_set(name, seed, fleet=options.fleet))
            print(f"{name}, seed {seed}: {time.time() - started:.0f} s", file=sys.stderr, flush=True)
    storage.write_json(HERE / (OF_FLEET if options.fleet else RESULT), summary(runs))
    storage.write_atomic(HERE / "README.md", page().encode())


def page() -> str:
    """README.md with the tables of the results that are beside it."""
    text = (HERE / "README.md").read_text(encoding="utf-8")
    found = (json.loads((HERE / name).read_text()) for name in (RESULT, OF_FLEET, command.RESULT))
    return markdown.filled(text, tables(*found))


if __name__ == "__main__":
    main()
