"""A frozen backbone against training the whole network: accuracy, bytes, seconds and memory, on Omniglot.

    METAFLEET_SHARED=FOLDER python -m benchmarks.backbone.run --runs FOLDER [--minutes 20]

Ten devices tell 40 characters apart, eight on each, with six drawings of each to learn from and four to be evaluated
on. ``whole``: the fleet trains Conv-4 from its own first weights. ``tuned``: it trains Conv-4 from the weights of the
backbone. ``backbone``: it trains a layer of 64 and a head on the features of the frozen backbone, which ``train`` made
of characters that no device has. Each has the learning rate that did best in five rounds on a part of the devices'
training samples; then come 12 rounds with two seeds, four devices a round, int8 both ways.

Runs that have ended in FOLDER are kept, so that the same command goes on. It writes result.json and the tables in
README.md, beside this file.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from benchmarks import markdown
from benchmarks.backbone import cost, train
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload
from cloud_server.laboratory.run import simulate as simulation
from cloud_server.laboratory.run.engine import Stopped
from cloud_server.laboratory.run.run_folder import Store
from export.train_graph import export_train
from fleet_core.algorithms.interface import read_hyper
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.backbone import backbone_file
from fleet_core.base import processes, storage, trees
from fleet_core.data.samples import Samples, save
from fleet_core.learning import models
from fleet_core.model import payloads, train_graph

HERE = Path(__file__).parent
NAMES, WAYS = ("pfldyn-proto",), ("whole", "tuned", "backbone")
RATES, TRIAL_ROUNDS, ROUNDS, SEEDS, COHORT = (0.05, 0.2), 5, 12, (0, 1), 4
STEPS = {"pfldyn-proto": {"local_steps": 5, "support_batch": 24, "query_batch": 24}}


def experiment(runs: Path, way: str, method: str, rate: float | None) -> experiments.Experiment:
    """rate: the chosen one; None: a trial of all."""
    hyper = {**STEPS[method], **({} if rate is None else {"client_lr": rate})}
    data: dict[str, Any] = {"path": str(runs / "devices.npz")}
    model: dict[str, Any] = {"name": "conv4", "options": {"channels": train.CHANNELS}}
    if way == "tuned":
        model = {"name": "benchmarks.backbone.pretrained:build",
                 "options": {"weights": str(runs / "body.safetensors"), "channels": train.CHANNELS}}
    if way == "backbone":
        data["backbone"] = str(runs / "backbone.safetensors")
        model = {"name": "mlp", "options": {"hidden": [64]}}
    partition = {"kind": "classes", "options": {"devices": 10, "classes_per_device": 8, "train_fraction": 0.6}}
    return experiments.read({
        "data": data, "model": model, "partition": partition, "codec_up": "int8", "codec_down": "int8",
        "cohort": COHORT,
        "seeds": [0] if rate is None else list(SEEDS), "budget": {"rounds": TRIAL_ROUNDS if rate is None else ROUNDS},
        "evaluation": {"every": 0 if rate is None else 3, "within_training": rate is None},
        "method": [{"name": method, "hyper": hyper, **({"grid": {"client_lr": list(RATES)}} if rate is None else {})}],
    })


def ended(asked: experiments.Experiment, out: Path) -> Iterator[tuple[experiments.Run, dict[str, Any]]]:
    """The runs of an experiment with their results; those that are not in ``out`` are run."""
    runs = experiments.runs(asked)
    if not all(Store(out / run.name).done for run in runs):
        simulation.simulate(asked, out, simulation.Options(jobs=1, device="cpu"))
    for run in runs:
        yield run, Store(out / run.name).result()


def accuracy(runs: Path, way: str, method: str) -> dict[str, Any]:
    """Accuracy on the devices' later drawings, by seed, at the rate that did best in the trial."""
    trial = experiment(runs, way, method, None)
    tried = [(result["evaluated"]["accuracy"], run.hyper.client_lr)
             for run, result in ended(trial, runs / f"{way}-{method}-trial")]
    rate = max(tried)[1]
    results = [result for _, result in ended(experiment(runs, way, method, rate), runs / f"{way}-{method}")]
    return {
        "rate": rate, "trial": sorted(tried), "accuracy": [result["evaluated"]["accuracy"] for result in results],
        "by_round": [[(one["round"], one["accuracy"]["mean"]) for one in result["rounds"] if one.get("accuracy")]
                     for result in results],
        "flops": mean(one["flops"] / one["participants"] for result in results for one in result["rounds"][1:]),
    }


def device(runs: Path, way: str, method: str) -> dict[str, Any]:
    """What a round costs one device: memory and seconds, measured, and the bytes of the model and of an update."""
    asked = experiment(runs, way, method, RATES[0])
    made = workload.build(asked)
    folder = runs / f"{way}-{method}-device"
    folder.mkdir(exist_ok=True)
    layout = workload.layout_of(asked, made)
    hyper, _ = read_hyper(METHODS[method], asked.method[0].hyper)
    first = models.initial(layout, 0)
    graph = export_train(layout, METHODS[method], hyper, first)
    (folder / "layout.json").write_text(layout.to_json())
    (folder / "train.safetensors").write_bytes(train_graph.pack(graph))
    (folder / "hyper.json").write_text(json.dumps(dict(asked.method[0].hyper)))
    x, _ = train.drawings(train.ON_DEVICES)
    rows, share = made.train[0].train, made.train[0]
    np.savez(folder / "samples.npz", x=x[rows], y=made.own(share).y)
    copy = ""
    if way == "backbone":  # without features of an earlier run
        copy = str(folder / "backbone.safetensors")
        storage.write_atomic(Path(copy), (runs / "backbone.safetensors").read_bytes())
        for left in ("features", "providers.json"):
            (folder / f"backbone.{left}").unlink(missing_ok=True)
    sent = len(payloads.encode("int8", trees.only(first, METHODS[method].shared)))
    return {"way": way, "method": method, "bytes": sent,
            "device": {**cost.launched(folder, method, copy), "samples": len(rows)}}


def compute(runs: Path, minutes: float) -> None:
    until = time.monotonic() + 60 * minutes
    runs.mkdir(parents=True, exist_ok=True)
    facts = runs / "backbone.json"
    if not facts.exists():
        storage.write_json(facts, train.train(runs))
        x, y = train.drawings(train.ON_DEVICES)
        save(runs / "devices.npz", Samples(x, y, classes=tuple(f"c{k}" for k in range(len(train.ON_DEVICES)))))
    data = (runs / "backbone.safetensors").read_bytes()
    about = {**json.loads(facts.read_text()), "bytes": len(data), "width": backbone_file.described(data).width}
    rows = [device(runs, way, method) for method in NAMES for way in WAYS]
    write(about, rows)
    for place, one in enumerate(rows if minutes > 0 else ()):
        if time.monotonic() > until:
            return processes.say("the time is over; the same command goes on")
        rows[place] = one | accuracy(runs, one["way"], one["method"])
        processes.say(json.dumps(rows[place]))
        write(about, rows)
    return None


def write(about: dict[str, Any], rows: Sequence[dict[str, Any]], folder: Path = HERE) -> None:
    found = {"backbone": about, "rounds": ROUNDS, "seeds": list(SEEDS), "rates": list(RATES), "rows": list(rows)}
    storage.write_json(folder / "result.json", found)
    write_page(folder)


def write_page(folder: Path = HERE) -> None:
    """The tables of README.md, from result.json and from speech.json (``speech``)."""
    kept = {name: json.loads((folder / f"{name}.json").read_text()) for name in ("result", "speech")}
    tables = {"backbone": table(kept["result"]["rows"]), "speech": of_speech(kept["speech"]["rows"])}
    page = folder / "README.md"
    page.write_text(markdown.filled(page.read_text(encoding="utf-8"), tables), encoding="utf-8")


def table(rows: Sequence[dict[str, Any]]) -> str:
    heads = ("what is trained", "parameters", "bytes each way", "ms a round", "peak MiB", "accuracy, by seed")
    return markdown.table(heads, map(line, rows))


def line(one: dict[str, Any]) -> tuple[str, ...]:
    measured = one["device"]
    return (one["way"], f"{measured['parameters']:,}", f"{one['bytes']:,}", f"{measured['round_s'] * 1000:,.0f}",
            f"{measured['peak_mib']:,.0f}", ", ".join(f"{share:.3f}" for share in one.get("accuracy", ())) or "not run")


def of_speech(rows: Sequence[dict[str, Any]]) -> str:
    heads = ("takes of a digit", "what is trained", "parameters", "bytes each way", "accuracy, by seed")
    return markdown.table(heads, (
        (str(one["takes"]), one["way"], f"{one['parameters']:,}", f"{one['bytes']:,}",
         ", ".join(f"{share:.3f}" for share in one["accuracy"])) for one in rows
    ))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--minutes", type=float, default=20.0, help="no new accuracy is begun after this time; 0: none")
    options = parser.parse_args()
    try:
        compute(options.runs, options.minutes)
    except Stopped:
        processes.say("stopped; the same command goes on")


if __name__ == "__main__":
    main()
