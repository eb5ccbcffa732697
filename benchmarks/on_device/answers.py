"""Personalizes and evaluates all devices, without torch.

    python -m benchmarks.on_device.answers FOLDER        writes FOLDER/answers.json; resumes

FOLDER is a seed's, as ``accuracy.py`` fills it, with ``job.json``: seed, labels, draws, and the bundle of each kind.
For each number of labels a personalizer's setting is chosen on the validation devices by macro-F1, then evaluated on
the unseen ones. All personalizers get the same support sets.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.on_device.ways import WAYS, Setting, Stepping, Way, drawn, load, predictor
from edge_agent.inference.predictor import Predictor
from fleet_core.base.storage import write_json
from fleet_core.base.trees import Params
from fleet_core.data import samples as stored
from fleet_core.data.samples import Samples
from fleet_core.model.graph_bundle import Graph

Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Task:
    """A device with one draw of its labels."""

    device: str
    x: Array
    y: Array
    query: Samples


class Evaluation:
    """The devices of a seed's folder."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.job = folder, json.loads((folder / "job.json").read_text())
        self._parts = {part: stored.load(folder / f"{part}.npz") for part in ("pool", "query")}
        self._names = json.loads((folder / "division.json").read_text())

    def model(self, way: Way) -> tuple[Graph, Params]:
        return load(Path(self.job["graphs"][way.graph]), self.folder / f"{way.method}.safetensors")

    def tasks(self, kind: str, labels: int) -> Iterator[Task]:
        """kind: ``validation``, with one draw of labels per device, or ``unseen``."""
        for number, name in enumerate(self._names[kind]):
            pool, query = (self._parts[part].of_client(name) for part in ("pool", "query"))
            for draw in range(self.job["draws"] if kind == "unseen" else 1):
                rng = np.random.default_rng([self.job["seed"], labels, draw, number, kind == "unseen"])
                rows = drawn(pool.y, labels, rng)
                yield Task(name, pool.x[rows], pool.y[rows], query)

    def evaluated(self, way: Way, labels: int) -> dict[str, Any]:
        """The chosen setting and its figures on the unseen devices."""
        graph, weights = self.model(way)
        setting, tried = way.settings[0], dict[str, float]()
        if len(way.settings) > 1:
            found = _confusions(way, way.settings, graph, weights, self.tasks("validation", labels))
            scores = [macro_f1(np.sum([c for _, c in each], axis=0)) for each in found]
            tried = {json.dumps(s): round(score, 4) for s, score in zip(way.settings, scores, strict=True)}
            setting = way.settings[int(np.argmax(scores))]
        (found_unseen,) = _confusions(way, (setting,), graph, weights, self.tasks("unseen", labels))
        return {"setting": dict(setting), "tried": tried, **_summary(found_unseen)}


def _confusions(
    way: Way, settings: Sequence[Setting], graph: Graph, weights: Params, tasks: Iterator[Task]
) -> list[list[tuple[str, Array]]]:
    """(device, confusion [N, N]) of each task, by setting."""
    stepping = Stepping(graph, weights) if graph.info.adapt is not None else None
    found: list[list[tuple[str, Array]]] = [[] for _ in settings]
    for task in tasks:
        for setting, into in zip(settings, found, strict=True):
            if stepping is None:
                ready = predictor(way, graph, weights, task.x, task.y, setting)
            else:
                ready = Predictor.head(graph, stepping.after(task.x, task.y, setting))
            counts = np.zeros((len(graph.layout.classes),) * 2, np.int64)
            np.add.at(counts, (task.query.y, ready.labels(task.query.x)), 1)
            into.append((task.device, counts))
    return found


def _summary(found: list[tuple[str, Array]]) -> dict[str, Any]:
    """accuracy: mean over devices and draws. recall: the mean over the device's classes, then over devices. macro_f1:
    of all answers together."""
    by_device: dict[str, list[float]] = {}
    recalls = []
    for name, counts in found:
        asked = counts.sum(1)
        by_device.setdefault(name, []).append(float(np.trace(counts) / asked.sum()))
        recalls.append(float((np.diag(counts)[asked > 0] / asked[asked > 0]).mean()))
    devices = {name: float(np.mean(values)) for name, values in by_device.items()}
    return {"accuracy": float(np.mean(list(devices.values()))), "recall": float(np.mean(recalls)),
            "macro_f1": macro_f1(np.sum([counts for _, counts in found], axis=0)), "devices": devices}


def macro_f1(counts_NN: Array) -> float:
    """Mean F1 over the classes that occur."""
    asked, answered = counts_NN.sum(1), counts_NN.sum(0)
    f1 = 2 * np.diag(counts_NN) / np.maximum(asked + answered, 1)
    return float(f1[asked > 0].mean())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("folder", type=Path)
    devices = Evaluation(parser.parse_args().folder)
    path = devices.folder / "answers.json"
    found: dict[str, dict[str, Any]] = json.loads(path.read_text()) if path.exists() else {}
    for way in WAYS:
        cells = found.setdefault(way.name, {})
        for labels in devices.job["labels"]:
            if str(labels) not in cells:
                cells[str(labels)] = devices.evaluated(way, labels)
                write_json(path, found)
                accuracy = cells[str(labels)]["accuracy"]
                print(f"{devices.folder}: {way.name}, {labels} labels: {accuracy:.3f}", flush=True)
    assert "torch" not in sys.modules


if __name__ == "__main__":
    main()
