"""Size and speed of the quantized encoder, and the accuracy of its answers from few labels.

    METAFLEET_DATA=CACHE python -m benchmarks.on_device.int8 --out benchmarks/on_device/int8.json

Accuracy: the served models, devices and personalizers of ``accuracy.py`` (trained if needed). The encoder is quantized
as in ``metafleet export --int8``, with samples of the training devices; every device then embeds its labels and its
test samples with one encoder and with the other, the same labels for both. Size and speed: the four models of
``cases.py``, one sample per call, one thread, the sessions in turn in one process. What an int8 product costs depends
on the processor; the file says whether it has the VNNI instructions. Sets that ``--sets`` does not name stay in the
file as they are.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.on_device import fleets
from benchmarks.on_device.accuracy import beside, spread
from benchmarks.on_device.answers import macro_f1
from benchmarks.on_device.cases import CASES, Case, drawn, plain
from benchmarks.on_device.fleets import PLANS, Device, Plan
from benchmarks.on_device.ways import drawn as labelled
from benchmarks.on_device.ways import load
from cloud_server.results.result import environment
from edge_agent.compute.onnx_session import Session, open_kind, open_session
from export.int8_encoder import quantized
from fleet_core.base import processes, storage, trees
from fleet_core.base.storage import write_json
from fleet_core.data.samples import Samples
from fleet_core.learning import models
from fleet_core.model.layout import Layout
from fleet_core.personalization.linear_head import Head
from fleet_core.personalization.nearest import Neighbours, Prototypes

Array = np.ndarray[Any, Any]
Say = Callable[[str], None]

ENCODERS = ("fp32", "int8")
OF_A_CLASS = 300
"""Samples of each class, from the training devices, for the quantizer."""
NEAR = 10


def _means(z: Array, y: Array, n_classes: int, asked: Array) -> Array:
    return Prototypes.from_support(lambda found: found, z, y, n_classes).probabilities(asked)


def _head(z: Array, y: Array, n_classes: int, asked: Array) -> Array:
    return Head.fit(z, y, n_classes).probabilities(asked)


def _near(z: Array, y: Array, n_classes: int, asked: Array) -> Array:
    return Neighbours(z, y, n_classes, NEAR, 1.0).votes(asked)


WAYS: Mapping[str, tuple[str, Callable[[Array, Array, int, Array], Array]]] = {
    "Proto": ("pfldyn-proto", _means), "head only": ("fedavg", _head), "kNN without a head": ("fedavg", _near),
}  # fmt: skip
"""personalizer -> (the method that trains its encoder, probabilities [n, N] from embedded labels and embedded
samples)."""


def encoders(plan: Plan, method: str, seed: int, room: Path, say: Say) -> dict[str, Session]:
    """The encoder of a served model as it is and quantized."""
    folder = fleets.trained(plan, seed, [method], room, say)
    layout = Layout.from_json((folder / "layout.json").read_text())
    graph, weights = load(fleets.graphs(layout, ("plain",), room)["plain"], folder / f"{method}.safetensors")
    body = trees.only(weights, ("body",))
    train = fleets.divided(plan, seed)[0].train
    some = train.take(labelled(train.y, OF_A_CLASS, np.random.default_rng(seed)))
    return {"fp32": open_kind(graph, "embed", body), "int8": open_session(quantized(graph, body, some, say)[0], {})}


def evaluated(plan: Plan, seed: int, draws: int, room: Path, say: Say) -> dict[str, Any]:
    """personalizer -> labels -> encoder -> accuracy (mean over devices and draws) and macro-F1 (of all answers
    together)."""
    unseen = fleets.divided(plan, seed)[0].unseen
    embedded = {
        (method, name): {device: (encoder.run(one.pool.x), encoder.run(one.query.x)) for device, one in unseen.items()}
        for method in {method for method, _ in WAYS.values()}
        for name, encoder in encoders(plan, method, seed, room, say).items()
    }
    return {
        way: {
            str(labels): {name: _summary([
                _confusion(answer, unseen[one], *embedded[method, name][one], labels, [seed, labels, draw, number])
                for number, one in enumerate(sorted(unseen)) for draw in range(draws)
            ]) for name in ENCODERS}
            for labels in plan.labels
        }
        for way, (method, answer) in WAYS.items()
    }  # fmt: skip


def _confusion(
    answer: Callable[[Array, Array, int, Array], Array], device: Device, z_pool: Array, z_query: Array, labels: int,
    seed: Sequence[int],
) -> Array:
    """int64 [N, N] of one device with one draw of its labels."""
    rows, n_classes = labelled(device.pool.y, labels, np.random.default_rng(seed)), len(device.pool.classes or ())
    found = answer(z_pool[rows], device.pool.y[rows], n_classes, z_query).argmax(1)
    counts = np.zeros((n_classes, n_classes), np.int64)
    np.add.at(counts, (device.query.y, found), 1)
    return counts


def _summary(confusions: Sequence[Array]) -> dict[str, float]:
    accuracy = float(np.mean([np.trace(counts) / counts.sum() for counts in confusions]))
    return {"accuracy": accuracy, "macro_f1": macro_f1(np.sum(confusions, axis=0))}


def table(plan: Plan, by_seed: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """personalizer -> labels -> figure -> encoder, and ``difference`` (int8 less fp32), each with mean and
    deviation."""
    def cell(way: str, labels: str, figure: str) -> dict[str, Any]:
        each = {name: [one[way][labels][name][figure] for one in by_seed] for name in ENCODERS}
        lost = [b - a for a, b in zip(each["fp32"], each["int8"], strict=True)]
        return {**{name: spread(values) for name, values in each.items()}, "difference": spread(lost)}

    return {way: {str(n): {figure: cell(way, str(n), figure) for figure in ("accuracy", "macro_f1")}
                  for n in plan.labels} for way in WAYS}


def cost(case: Case, calls: int, say: Say) -> dict[str, Any]:
    """Bytes of an encoder with its weights, and the median microseconds of an embedding. Uses first weights: neither
    depends on them."""
    layout = case.layout()
    graph, body = plain(layout), trees.only(models.initial(layout, 0), ("body",))
    x, y = drawn(layout, 120, 1)
    made, _ = quantized(graph, body, Samples(x, y, classes=layout.classes), say)
    weights = sum(array.nbytes for array in storage.flatten(body).values())
    sessions = {"fp32": open_kind(graph, "embed", body), "int8": open_session(made, {})}
    taken: dict[str, list[float]] = {name: [] for name in sessions}
    for call in range(calls + 50):
        for name, session in sessions.items():
            started = time.perf_counter()
            session.run(x[:1])
            if call >= 50:
                taken[name].append(1e6 * (time.perf_counter() - started))
    medians = {f"{name}_us": statistics.median(values) for name, values in taken.items()}
    return {"fp32_bytes": len(graph.graphs["embed"]) + weights, "int8_bytes": len(made), **medians,
            "times_as_fast": medians["fp32_us"] / medians["int8_us"]}


def vnni() -> bool | None:
    """Whether the processor multiplies int8 in one instruction; None if unknown."""
    try:
        return "vnni" in Path("/proc/cpuinfo").read_text()
    except OSError:
        return None


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sets", nargs="*", choices=PLANS, default=list(PLANS))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--draws", type=int, default=2, help="sets of labels per device")
    parser.add_argument("--calls", type=int, default=2000, help="embeddings to time")
    parser.add_argument("--room", type=Path, default=fleets.ROOM)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    alike = {"draws": options.draws, "vnni": vnni(), "environment": environment()}
    beside(options.out, "sets", dict.fromkeys(options.sets), alike)  # fails before anything is computed
    sets = {name: {"seeds": options.seeds, "labels": PLANS[name].labels, "table": table(PLANS[name], [
        evaluated(PLANS[name], seed, options.draws, options.room, processes.say) for seed in options.seeds
    ])} for name in options.sets}  # fmt: skip
    costs = {name: cost(case, options.calls, processes.say) for name, case in CASES.items()}
    write_json(options.out, {"models": costs, **beside(options.out, "sets", sets, alike)})


if __name__ == "__main__":
    main()
