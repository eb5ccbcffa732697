"""Several labels on real sound: which digits a window holds, of one or two spoken at once.

The Free Spoken Digit Dataset (Jackson et al.), four speakers, takes 5 to 49; the test takes are not used. The windows
are made: a third holds one recording of a speaker, the others hold two recordings of two digits of that speaker, added.
The labels are the digits. No recording is in windows to learn from and in windows to measure on: takes 5 to 31 are for
the one, takes 32 to 49 for the other. A sample is a log-mel spectrogram of 32 bands, averaged over 8 pieces of the
window. Three speakers train an mlp with 64 hidden units by FedAvg; the last is new. The settings are those of run.py
and were not tuned.

    METAFLEET_SHARED=FOLDER python -m benchmarks.tasks.labels [--rounds 60]
    METAFLEET_SHARED=FOLDER python -m benchmarks.tasks.labels --thresholds [--rounds 60] [--seeds 3]
    METAFLEET_SHARED=FOLDER python -m benchmarks.tasks.labels --least [--rounds 60] [--seeds 3]

Writes labels.json and the tables in LABELS.md, beside this file. With ``--thresholds`` it asks instead whether a
threshold for each label is better than 0.5. With ``--least`` it asks how many windows a threshold takes: takes 5 to 22
are to learn from, and 23 to 31 to choose thresholds and to measure on, so that nothing is chosen on what the other
tables measure on.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks import markdown
from benchmarks.tasks.run import HERE, HYPER, SEED, Answers, Array, Part, fedavg
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage
from fleet_core.data.sets.spoken import LENGTH, RATE_HZ
from fleet_core.data.shaping import sound
from fleet_core.learning import local_training, models, personal_model
from fleet_core.model.layout import InputSpec
from fleet_core.personalization.linear_head import LabelHead
from fleet_core.tasks.labels import LEAST, SUMS, LabelCounts, MultiLabel, pooled

RESULT, PAGE = HERE / "labels.json", HERE / "LABELS.md"
FILE = "spoken-digits-4speakers.npz"
DIGITS = tuple("0123456789")
TAKES = (range(5, 32), range(32, 50))
"""To learn from, and to measure on."""
VALIDATION = (range(5, 23), range(23, 32))
WINDOWS = (600, 300)
"""Of each speaker, to learn from and to measure on."""
NEW, PIECES, STEPS = 1, 8, 1000
TRIED = (1, 3, 5, 10, 20)
"""In place of ``LEAST``."""
COUNTS = (20, 40, 80, 150, 300)
"""Windows that thresholds are chosen and measured on."""
ASKED = ("logistic regression, alone", "the fleet's model, fine-tuned", "the fleet's model, head")
NEVER = 10**6


def speakers(
    path: Path, seed: int = SEED, takes: tuple[range, range] = TAKES
) -> list[tuple[Part, Part]]:
    """(own, later) of each speaker: x float32 [N, 256], y float64 [N, 10]."""
    with np.load(path, allow_pickle=False) as archive:
        held = {name: archive[name] for name in archive}
    cuts = np.split(held["audio"], held["offset"][1:-1])
    found = []
    for number, who in enumerate(np.unique(held["speaker"])):
        parts = []
        for part, (those, count) in enumerate(zip(takes, WINDOWS, strict=True)):
            rows = np.flatnonzero((held["speaker"] == who) & np.isin(held["take"], those))
            rng = np.random.default_rng([seed, number, part])
            parts.append(mixed([cuts[row] for row in rows], held["digit"][rows], count, rng))
        found.append((parts[0], parts[1]))
    return found


def mixed(cuts: Sequence[Array], digit_R: Array, count: int, rng: np.random.Generator) -> Part:
    """``count`` windows of one or two recordings of different digits, and the digits in each as 0 and 1. cuts: int16
    recordings, each with its digit."""
    windows, y = np.zeros((count, LENGTH), np.float32), np.zeros((count, len(DIGITS)))
    for n in range(count):
        chosen = rng.choice(len(DIGITS), 1 if rng.random() < 1 / 3 else 2, replace=False)
        y[n, chosen] = 1
        for digit in chosen:
            cut = sound.full_scale(cuts[rng.choice(np.flatnonzero(digit_R == digit))])[:LENGTH]
            windows[n, :len(cut)] += cut
    return spectra(sound.spectrograms(windows, RATE_HZ)), y


def spectra(x_NBF: Array) -> Array:
    """The mean of each band over each of ``PIECES`` pieces of the window, [N, 32 · PIECES]."""
    return x_NBF.reshape(*x_NBF.shape[:2], PIECES, -1).mean(3).reshape(len(x_NBF), -1)


def ways(train: Sequence[Part], rounds: int, seed: int = SEED) -> tuple[MultiLabel, dict[str, Answers]]:
    """The task, and name -> how a speaker is answered."""
    task = MultiLabel(DIGITS)
    every = np.concatenate([x for x, _ in train])
    mean, std = (tuple(map(float, one)) for one in (every.mean(0), every.std(0)))
    spec = InputSpec(every.shape[1:], mean=mean, std=std)
    layout, model, hyper, served = fedavg(models.describe("mlp", spec, (), {"hidden": [64]}, task), train, rounds,
                                          seed=seed)

    def tuned(own: Part, x: Array) -> Array:
        params = personal_model.adapt(METHODS["fedavg"], model, layout, served, *own, hyper, scalars={"seed": SEED})
        return task.in_units(local_training.predict_logits(model, params, x))

    def head(own: Part, x: Array) -> Array:
        fitted = LabelHead.fit(local_training.embed(model, served, own[0]), own[1])
        return task.in_units(fitted.answers(local_training.embed(model, served, x)))

    def alone(own: Part, x: Array) -> Array:
        _, lonely, _, params = fedavg(layout, [own], rounds)
        return task.in_units(local_training.predict_logits(lonely, params, x))

    pooled = LabelHead.fit(every, np.concatenate([y for _, y in train]), steps=STEPS)
    return task, {
        "logistic regression, alone": lambda own, x: task.in_units(LabelHead.fit(*own, steps=STEPS).answers(x)),
        "logistic regression, samples pooled": lambda own, x: task.in_units(pooled.answers(x)),
        "the model, trained alone": alone,
        "the fleet's model": lambda own, x: task.in_units(local_training.predict_logits(model, served, x)),
        "the fleet's model, fine-tuned": tuned,
        "the fleet's model, head": head,
    }


def scored(task: MultiLabel, answers: Answers, those: Sequence[tuple[Part, Part]]) -> dict[str, Any]:
    """Measures pooled over speakers."""
    found = [task.measured(later[1], answers(own, later[0])) for own, later in those]
    samples, figures = pooled(task.outputs, [(one.samples, one.sums) for one in found])
    return {"micro_f1": figures["micro_f1"]["all"], "macro_f1": figures["macro_f1"]["all"],
            "exact_match": figures["exact_match"]["all"], "speakers": len(those), "windows": samples}


def by_thresholds(rounds: int, seeds: int, path: Path) -> list[dict[str, Any]]:
    """Of each way a device answers by: F1 with 0.5 and with thresholds of its own, for each seed."""
    found: dict[str, dict[str, Any]] = {}
    for name, task, later in answered(rounds, seeds, path, TAKES):
        row = found.setdefault(name, {"answers": name, "0.5": [], "own": []})
        for way, least in (("0.5", NEVER), ("own", LEAST)):
            row[way].append(figures(task, later, least))
    return list(found.values())


def by_least(rounds: int, seeds: int, path: Path) -> list[dict[str, Any]]:
    """On the windows to learn from: micro-F1, the mean over seeds and ways, by the number of windows that thresholds
    are chosen and measured on, with each ``LEAST`` that is tried."""
    found: dict[int, dict[int, list[float]]] = {count: {least: [] for least in (NEVER, *TRIED)} for count in COUNTS}
    for _, task, later in answered(rounds, seeds, path, VALIDATION):
        for count, row in found.items():
            parts = [(p[first:first + count], y[first:first + count]) for p, y in later
                     for first in range(0, len(y), count)]
            for least, values in row.items():
                values.append(figures(task, parts, least)["micro_f1"])
    return [{"windows": count, "0.5": float(np.mean(row.pop(NEVER))),
             **{str(least): float(np.mean(values)) for least, values in row.items()}} for count, row in found.items()]


def answered(
    rounds: int, seeds: int, path: Path, takes: tuple[range, range]
) -> Iterator[tuple[str, MultiLabel, list[tuple[Array, Array]]]]:
    """(way, task, (probabilities, labels) of each speaker's windows to measure on)."""
    for seed in range(seeds):
        every = speakers(path, seed, takes)
        task, known = ways([own for own, _ in every[:-NEW]], rounds, seed)
        for name in ASKED:
            yield name, task, [(known[name](own, x), y) for own, (x, y) in every]
        print(f"seed {seed + 1} of {seeds}", flush=True)


def figures(task: MultiLabel, later: Sequence[tuple[Array, Array]], least: int) -> dict[str, float]:
    """Measures pooled over speakers. later: probabilities and labels of each. least: as ``LEAST``."""
    parts = [LabelCounts.of(task, y, p, least) for p, y in later]
    _, found = pooled(task.outputs, [(one.count, {name: getattr(one, name) for name in SUMS}) for one in parts])
    return {key: found[key]["all"] for key in ("micro_f1", "macro_f1", "exact_match")}


def tables(result: Mapping[str, Any]) -> dict[str, str]:
    rows = result["rows"]
    head = ("answers", "micro-F1, those that train", "macro-F1", "exact match", "micro-F1, new speaker", "exact match")
    return {"digits": markdown.table(head, [
        (one["answers"], *(f"{one['train'][key]:.3f}" for key in ("micro_f1", "macro_f1", "exact_match")),
         *(f"{one['new'][key]:.3f}" for key in ("micro_f1", "exact_match")))
        for one in rows
    ]), "thresholds": markdown.table(
        ("answers", "micro-F1 with 0.5", "with own thresholds", "macro-F1 with 0.5", "own", "exact match with 0.5",
         "own"),
        [(one["answers"], *(_mean(one[way], key) for key in ("micro_f1", "macro_f1", "exact_match")
                            for way in ("0.5", "own"))) for one in result["thresholds"]],
    ), "least": markdown.table(
        ("windows", "0.5", *map(str, TRIED)),
        [(str(one["windows"]), *(f"{one[str(key)]:.3f}" for key in (0.5, *TRIED))) for one in result["least"]],
    )}


def _mean(seeds: Sequence[Mapping[str, float]], key: str) -> str:
    values = [one[key] for one in seeds]
    return f"{np.mean(values):.3f} ± {(max(values) - min(values)) / 2:.3f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=60)
    parser.add_argument("--thresholds", action="store_true")
    parser.add_argument("--least", action="store_true")
    parser.add_argument("--seeds", type=int, default=3)
    options = parser.parse_args()
    rounds = options.rounds
    torch.set_num_threads(1)
    path = Path(os.environ["METAFLEET_SHARED"]) / "data" / FILE
    kept = json.loads(RESULT.read_text(encoding="utf-8"))
    if options.thresholds:
        return write({**kept, "thresholds": by_thresholds(rounds, options.seeds, path)})
    if options.least:
        return write({**kept, "least": by_least(rounds, options.seeds, path)})
    found = speakers(path)
    train, new = found[:-NEW], found[-NEW:]
    task, known = ways([own for own, _ in train], rounds)
    rows = [{"answers": name, "train": scored(task, one, train), "new": scored(task, one, new)}
            for name, one in known.items()]
    write({**kept, "rounds": rounds, "hyper": HYPER, "seed": SEED, "rows": rows})


def write(result: Mapping[str, Any]) -> None:
    storage.write_atomic(RESULT, (json.dumps(result, indent=1) + "\n").encode())
    storage.write_atomic(PAGE, markdown.filled(PAGE.read_text(encoding="utf-8"), tables(result)).encode())


if __name__ == "__main__":
    main()
