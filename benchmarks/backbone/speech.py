"""A speech model that a package ships, as a frozen backbone for spoken digits, against a network on spectrograms.

    METAFLEET_DATA=CACHE python -m benchmarks.backbone.speech --wheel FILE.whl --runs FOLDER

FILE.whl is that of openwakeword 0.4.0 (``pip download --no-deps openwakeword==0.4.0``). It has ONNX files of a mel
spectrogram and of Google's speech embedding (Lin et al. 2020, 96 features of 0.79 s of sound), whose licence excludes
commercial use. CACHE has the set ``spoken-digits-raw`` (``benchmarks/papers/prepare.py``).

Each of the four speakers is a device, which has the first 5, 10 or 27 takes of each digit and is evaluated on the last
18. ``network``: the fleet trains the network that ``metafleet init`` takes for spectrograms. ``backbone``: it trains a
layer of 64 and a head on the features. Each has the learning rate, of four, that did best in ten rounds inside the 27
takes; then come 30 rounds with three seeds, all four devices in each, int8 both ways.

Runs that have ended in FOLDER are kept. It writes speech.json and the table in README.md, beside this file.
"""

from __future__ import annotations

import argparse
import zipfile
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import onnxruntime

from benchmarks.backbone import run
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload
from cloud_server.laboratory.run.engine import Stopped
from export.backbones.from_onnx import from_onnx
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.backbone import backbone_file
from fleet_core.base import processes, storage, trees
from fleet_core.data.samples import Samples, save
from fleet_core.data.sets import spoken
from fleet_core.data.sets.set_cache import load_set
from fleet_core.data.shaping import sound
from fleet_core.learning import models
from fleet_core.model import payloads

MODELS = "openwakeword/resources/models/"
RATE_HZ, HEARD = 16_000, 12_640
"""Of the mel spectrogram: sound that gives the 76 frames of the embedding."""
METHOD, WAYS, TAKES, EVALUATED = "pfldyn-proto", ("network", "backbone"), (5, 10, 27), 18
RATES, TRIAL_ROUNDS, ROUNDS, SEEDS = (0.0125, 0.05, 0.2, 0.8), 10, 30, (0, 1, 2)
STEPS = {"local_steps": 5, "support_batch": 20, "query_batch": 20}


def prepare(wheel: Path, runs: Path) -> None:
    """Writes the backbone, and the samples of both ways."""
    held = load_set("spoken-digits-raw").train
    with zipfile.ZipFile(wheel) as package:
        storage.write_atomic(runs / "speech.onnx", package.read(f"{MODELS}embedding_model.onnx"))
        mel = onnxruntime.InferenceSession(package.read(f"{MODELS}melspectrogram.onnx"))
    storage.write_atomic(runs / "speech.safetensors", backbone_file.pack(from_onnx(runs / "speech.onnx")))
    whole = [sound.at_rate(one, spoken.RATE_HZ, RATE_HZ)[:HEARD] * (1 << 15) for one in held.x[:, 0]]
    bands = np.stack([mel.run(None, {"input": one[None].astype(np.float32)})[0][0, 0] for one in whole])
    x = (bands / 10 + 2)[..., None].astype(np.float32)
    assert held.time is not None
    order = np.searchsorted(np.unique(held.time), held.time)
    for name, values in (("backbone", x), ("network", spoken.spectrograms(held).x)):
        whole_set = Samples(values, held.y, held.client, held.time, held.classes)
        for takes in TAKES:
            rows = np.flatnonzero((order < takes) | (order >= order.max() + 1 - EVALUATED))
            save(runs / f"{name}-{takes}.npz", whole_set.take(rows))


def experiment(runs: Path, way: str, takes: int, rate: float | None) -> experiments.Experiment:
    """rate: the chosen one; None: a trial of all."""
    data: dict[str, Any] = {"path": str(runs / f"{way}-{takes}.npz")}
    model: dict[str, Any] = {"name": "ds-cnn"}
    if way == "backbone":
        data["backbone"] = str(runs / "speech.safetensors")
        model = {"name": "mlp", "options": {"hidden": [64]}}
    trial = rate is None
    return experiments.read({
        "data": data, "model": model, "codec_up": "int8", "codec_down": "int8", "seeds": [0] if trial else list(SEEDS),
        "partition": {"kind": "natural", "options": {"split": "time", "train_fraction": takes / (takes + EVALUATED)}},
        "budget": {"rounds": TRIAL_ROUNDS if trial else ROUNDS},
        "evaluation": {"every": 0 if trial else 10, "within_training": trial},
        "method": [{"name": METHOD, "hyper": {**STEPS, **({} if rate is None else {"client_lr": rate})},
                    **({"grid": {"client_lr": list(RATES)}} if trial else {})}],
    })


def measured(runs: Path, way: str, takes: int) -> dict[str, Any]:
    tried = [(result["evaluated"]["accuracy"], found.hyper.client_lr)
             for found, result in run.ended(experiment(runs, way, max(TAKES), None), runs / f"{way}-trial")]
    asked = experiment(runs, way, takes, rate := max(tried)[1])
    results = [result for _, result in run.ended(asked, runs / f"{way}-{takes}")]
    first = models.initial(workload.layout_of(asked, workload.build(asked)), 0)
    sent = trees.only(first, METHODS[METHOD].shared)
    return {
        "way": way, "takes": takes, "rate": rate, "trial": sorted(tried), "bytes": len(payloads.encode("int8", sent)),
        "parameters": sum(array.size for named in sent.values() for array in named.values()),
        "accuracy": [result["evaluated"]["accuracy"] for result in results],
        "flops": mean(one["flops"] / one["participants"] for result in results for one in result["rounds"][1:]),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--wheel", type=Path, required=True, help="that of openwakeword 0.4.0")
    parser.add_argument("--runs", type=Path, required=True, help="folder of the runs")
    options = parser.parse_args()
    options.runs.mkdir(parents=True, exist_ok=True)
    if not (options.runs / f"network-{max(TAKES)}.npz").exists():
        prepare(options.wheel, options.runs)
    try:
        rows = [measured(options.runs, way, takes) for takes in TAKES for way in WAYS]
    except Stopped:
        return processes.say("stopped; the same command goes on")
    storage.write_json(run.HERE / "speech.json", {"rounds": ROUNDS, "seeds": list(SEEDS), "rows": rows})
    return run.write_page()


if __name__ == "__main__":
    main()
