"""The device's computations, in a process that must not import torch, for ``parity.py`` to compare.

    python -m benchmarks.on_device.apart FOLDER        reads job.json, its files and data.npz; writes found.npz

job.json: name -> {way, graph, weights, setting}. data.npz: ``x``, ``y`` to personalize on, ``query``. found.npz: for
every name ``NAME/probabilities``, of class means, or ``NAME/logits`` and ``NAME/adapted/group/name``.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.on_device.ways import WAYS, Stepping, Way, load, predictor
from edge_agent.compute.onnx_session import open_kind
from fleet_core.base import storage, trees
from fleet_core.model.layout import MODEL_GROUPS


def found(way: Way, job: dict[str, Any], x: Any, y: Any, query: Any) -> dict[str, Any]:
    """The arrays of one personalizer, by name."""
    graph, weights = load(Path(job["graph"]), Path(job["weights"]))
    if graph.info.adapt is None:
        return {"probabilities": predictor(way, graph, weights, x, y, job["setting"]).probabilities(query)}
    adapted = Stepping(graph, weights).after(x, y, job["setting"])
    logits = open_kind(graph, "predict", trees.only(adapted, MODEL_GROUPS)).run(query)
    return {"logits": logits, **{f"adapted/{key}": array for key, array in storage.flatten(adapted).items()}}


def main(folder: Path) -> None:
    jobs = json.loads((folder / "job.json").read_text())
    with np.load(folder / "data.npz", allow_pickle=False) as file:
        x, y, query = file["x"], file["y"], file["query"]
    each: dict[str, Any] = {}
    for name, job in jobs.items():
        way = next(way for way in WAYS if way.name == job["way"])
        each |= {f"{name}/{key}": array for key, array in found(way, job, x, y, query).items()}
    assert "torch" not in sys.modules
    np.savez(folder / "found.npz", **each)


if __name__ == "__main__":
    main(Path(sys.argv[1]))
