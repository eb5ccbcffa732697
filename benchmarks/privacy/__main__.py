"""Computes the cells that result.json lacks, and writes result.json after each, then README.md and curves.png.

    METAFLEET_DATA=CACHE python -m benchmarks.privacy [--minutes 30] [--tables]

CACHE: where ``benchmarks/papers/prepare.py heartbeat-22 har --cache CACHE`` has put the sets. The same command goes on
where it was ended. --tables: only writes the page and the picture again.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import mean, stdev
from typing import Any

from benchmarks import markdown
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload
from cloud_server.laboratory.plan.workload import Workload
from cloud_server.laboratory.run import simulate
from cloud_server.laboratory.run.device_work import Setting
from cloud_server.laboratory.run.engine import Engine, Laboratory
from cloud_server.laboratory.run.executors import Inline
from cloud_server.laboratory.run.round_figures import Costs
from cloud_server.laboratory.run.run_folder import Store
from fleet_core.base import processes, storage
from fleet_core.learning import models
from fleet_core.privacy.accountant import Accountant

HERE = Path(__file__).parent
RESULT, PAGE, PICTURE = HERE / "result.json", HERE / "README.md", HERE / "curves.png"
SEEDS, DELTA = (0, 1, 2), 1e-2
EPSILONS = {"none": (0.0,), "central": (128.0, 16.0), "local": (1024.0, 128.0)}
"""Epsilons by mode; 0 for no noise. With so few devices the noise of smaller ones hides everything."""
EPISODES = {"local_steps": 8, "query_batch": 16, "support_batch": 16}
TUNED = {"batch": 32, "client_lr": 0.2, "finetune_lr": 0.2, "finetune_steps": 20, "local_steps": 8}
SETTINGS = {
    "alone": ("local", "none"), "fedavg-meta": ("fedavg-meta", "none"), "pfldyn-proto": ("pfldyn-proto", "none"),
    "fedavg-meta, central": ("fedavg-meta", "central"), "pfldyn-proto, local": ("pfldyn-proto", "local"),
}
"""Name -> (method, mode). The first three have no noise: devices alone, and the methods as they are."""
DATA: dict[str, dict[str, Any]] = {
    "heartbeat-22": {"rounds": 10, "clip": 0.3, "methods": {
        "local": {**TUNED}, "fedavg-meta": TUNED, "pfldyn-proto": {**EPISODES, "client_lr": 0.05, "penalty": 0.3}}},
    "har": {"rounds": 10, "clip": 0.3, "methods": {
        "local": {**TUNED, "client_lr": 0.05}, "fedavg-meta": TUNED,
        "pfldyn-proto": {**EPISODES, "client_lr": 0.05, "penalty": 0.3}}},
}


@dataclass(frozen=True)
class Cell:
    """One run. epsilon: of all its rounds; 0 without noise."""

    data: str
    setting: str
    epsilon: float
    seed: int


def cells() -> Iterator[Cell]:
    for seed in SEEDS:
        for data in DATA:
            for setting, (_, mode) in SETTINGS.items():
                for epsilon in EPSILONS[mode]:
                    yield Cell(data, setting, epsilon, seed)


def noise_for(epsilon: float, rounds: int) -> float:
    """The least noise multiplier, to three digits, with which that many rounds cost at most ``epsilon``."""
    accountant, low, high = Accountant(DELTA), 1e-3, 1e3
    while high / low > 1.001:
        middle = (low * high) ** 0.5
        low, high = (low, middle) if accountant.epsilon({middle: rounds}) <= epsilon else (middle, high)
    return high


def experiment(cell: Cell) -> experiments.Experiment:
    chosen, (method, mode) = DATA[cell.data], SETTINGS[cell.setting]
    noise = {} if mode == "none" else {"noise_multiplier": noise_for(cell.epsilon, chosen["rounds"])}
    return experiments.read({
        "data": {"set": cell.data}, "model": {"name": "cnn1d"}, "seeds": [cell.seed],
        "partition": {"kind": "natural", "options": {"split": "time", "train_fraction": 0.6, "max_samples": 200}},
        "budget": {"rounds": chosen["rounds"]}, "evaluation": {"every": 0},
        "method": [{"name": method, "hyper": chosen["methods"][method]}],
        "privacy": {"mode": mode, "clip": chosen["clip"], "delta": DELTA, **noise},
    })


def measured(cell: Cell, work: Workload) -> dict[str, Any]:
    asked, started = experiment(cell), time.monotonic()
    run, = experiments.runs(asked)
    with tempfile.TemporaryDirectory(prefix="privacy-") as folder:
        side = simulate.SIDE_BY_SIDE if asked.model.name in simulate.BATCHED else 1
        executor = Inline(Setting(asked, run, Path(folder), side), work)
        layout, store = workload.layout_of(asked, work), Store(Path(folder))
        lab = Laboratory(asked, work, layout, models.initial(layout, run.seed), executor, Costs())
        with store.begun({}):
            Engine(lab, run, store).run()
        last = store.rounds()[-1]
    row = {**asdict(cell), "accuracy": last["accuracy"]["mean"], "macro_f1": last["macro_f1"],
           "devices": len(work.train), "seconds": round(time.monotonic() - started, 1)}
    if asked.privacy.on:
        row |= {"noise_multiplier": asked.privacy.noise_multiplier, "spent": last["privacy"]["epsilon"]}
    return row


def rows() -> list[dict[str, Any]]:
    return list(json.loads(RESULT.read_text(encoding="utf-8"))["rows"]) if RESULT.exists() else []


def compute(minutes: float) -> None:
    until, known = time.monotonic() + 60 * minutes, rows()
    works = {data: workload.build(experiment(Cell(data, "alone", 0.0, 0))) for data in DATA}
    done = {tuple(row[key] for key in ("data", "setting", "epsilon", "seed")) for row in known}
    for cell in cells():
        if tuple(asdict(cell).values()) in done:
            continue
        if time.monotonic() > until:
            return
        known.append(measured(cell, works[cell.data]))
        storage.write_json(RESULT, {"settings": DATA, "delta": DELTA, "rows": known})
        processes.say(str(known[-1]))


def table(found: list[dict[str, Any]], data: str) -> str:
    """Setting by epsilon: accuracy and macro-F1 over the seeds, in percent."""
    lines = []
    for setting, (_, mode) in SETTINGS.items():
        for epsilon in EPSILONS[mode]:
            own = [row for row in found if (row["data"], row["setting"], row["epsilon"]) == (data, setting, epsilon)]
            if own:
                noise = f"{own[0]['noise_multiplier']:.3g}" if epsilon else "none"
                lines.append((setting, f"{epsilon:g}" if epsilon else "no bound", noise, _over(own, "accuracy"),
                              _over(own, "macro_f1"), str(len(own))))
    return markdown.table(("setting", "epsilon", "noise", "accuracy", "macro-F1", "seeds"), lines)


def _over(own: list[dict[str, Any]], key: str) -> str:
    values = [100 * row[key] for row in own]
    return f"{mean(values):.1f}" + (f" ± {stdev(values):.1f}" if len(values) > 1 else "")


def draw(found: list[dict[str, Any]]) -> None:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    figure, places = pyplot.subplots(1, len(DATA), figsize=(10, 4), sharey=True)
    for place, data in zip(places, DATA, strict=True):
        for setting, (_, mode) in SETTINGS.items():
            of = {epsilon: [row["accuracy"] for row in found if (row["data"], row["setting"], row["epsilon"]) ==
                            (data, setting, epsilon)] for epsilon in EPSILONS[mode]}
            points: Mapping[float, float] = {epsilon: mean(values) for epsilon, values in of.items() if values}
            if mode == "none" and points:
                place.axhline(points[0.0], linestyle=":", color="grey")
                place.annotate(setting, (16, points[0.0]), fontsize=8)
            elif points:
                place.plot(list(points), list(points.values()), marker="o", label=setting)
        place.set(title=data, xscale="log", xlabel=f"epsilon at delta {DELTA:g}")
        place.legend(fontsize=8)
    places[0].set_ylabel("mean accuracy of the devices")
    figure.tight_layout()
    figure.savefig(PICTURE, dpi=120, metadata={"Software": None})


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.privacy", description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30.0, help="no new cell is begun after that")
    parser.add_argument("--tables", action="store_true", help="only write the page and the picture")
    options = parser.parse_args()
    if not options.tables:
        compute(options.minutes)
    found = rows()
    PAGE.write_text(markdown.filled(PAGE.read_text(encoding="utf-8"), {data: table(found, data) for data in DATA}),
                    encoding="utf-8")
    draw(found)


if __name__ == "__main__":
    main()
