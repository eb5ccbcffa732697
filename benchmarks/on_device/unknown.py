"""How well a device recognizes samples of classes that it has no label for, with
``fleet_core.personalization.unknown_class`` on real data.

    METAFLEET_DATA=CACHE python -m benchmarks.on_device.unknown --out benchmarks/on_device/unknown.json

CACHE: as ``benchmarks/papers/prepare.py`` fills it. Devices that took no part in training label some of their classes,
then answer samples of those classes and of the withheld ones. Omniglot: every character is new to the fleet's model,
three of a device's ten are withheld. Heartbeat: ``S``, which no training device had either, and ``S`` or ``V``, which
the fleet knows and the device has no label of. The models are PFLDyn-Proto's, trained in the laboratory (``fleets.py``,
resumable, under build/on-device). Cases that ``--cases`` does not name stay in the file as they are.

auroc: the probability that a withheld sample is farther from its nearest class mean than a known one, mean over
devices. known, unseen: the share of either that is called unknown, over all samples of a device, mean over devices.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.on_device import fleets
from benchmarks.on_device.accuracy import beside, spread
from benchmarks.on_device.fleets import PLANS, Device, Plan
from benchmarks.on_device.ways import drawn, load
from cloud_server.results.result import environment
from edge_agent.compute.onnx_session import Session, open_kind
from fleet_core.base import processes, trees
from fleet_core.base.storage import write_json
from fleet_core.model.layout import Layout
from fleet_core.personalization.nearest import Prototypes
from fleet_core.personalization.unknown_class import Thresholds, nearest

Array = np.ndarray[Any, Any]

METHOD = "pfldyn-proto"
QUANTILES = (0.8, 0.9, 0.95)
"""The last is the default of ``[serve] unknown_quantile``."""
S, V = 1, 2
OF_TEN = 3


@dataclass(frozen=True)
class Case:
    """withheld: from a device's classes int64 [N] to those without labels; None for a device that is not used."""

    plan: Plan
    withheld: Callable[[Array, np.random.Generator], Array | None]


def _some(classes: Array, rng: np.random.Generator) -> Array:
    return rng.permutation(classes)[:OF_TEN]


def _one(label: int) -> Callable[[Array, np.random.Generator], Array | None]:
    def withheld(classes: Array, rng: np.random.Generator) -> Array | None:
        return np.array([label]) if label in classes and len(classes) > 1 else None

    return withheld


CASES = {
    "Omniglot, new characters": Case(replace(PLANS["omniglot"], labels=(1, 5, 15)), _some),
    "heartbeat, S new to the fleet": Case(fleets.withheld(PLANS["heartbeat"], S), _one(S)),
    "heartbeat, S new to the device": Case(PLANS["heartbeat"], _one(S)),
    "heartbeat, V new to the device": Case(PLANS["heartbeat"], _one(V)),
}


def evaluated(case: Case, seed: int, draws: int, room: Path, say: Callable[[str], None]) -> dict[str, dict[str, float]]:
    """labels -> figures of one seed, means over the devices that took no part in training."""
    folder = fleets.trained(case.plan, seed, [METHOD], room, say)
    division, _ = fleets.divided(case.plan, seed)
    layout = Layout.from_json((folder / "layout.json").read_text())
    graph, weights = load(fleets.graphs(layout, ("plain",), room)["plain"], folder / f"{METHOD}.safetensors")
    session = open_kind(graph, "embed", trees.only(weights, ("body",)))
    devices = {**division.validation, **division.unseen}
    return {str(labels): _mean([
        found for name in sorted(devices) for draw in range(draws)
        if (found := _of_device(case, devices[name], session, len(layout.classes), labels, [seed, labels, draw]))
    ]) for labels in case.plan.labels}  # fmt: skip


def _of_device(
    case: Case, device: Device, session: Session, n_classes: int, labels: int, seed: Sequence[int]
) -> dict[str, float] | None:
    rng = np.random.default_rng(seed)
    withheld = case.withheld(np.unique(device.pool.y), rng)
    if withheld is None:
        return None
    own = device.pool.take(~np.isin(device.pool.y, withheld))
    support = own.take(drawn(own.y, labels, rng))
    z = session.run(support.x)
    means = Prototypes.empty(n_classes, z.shape[1]).add(z, support.y)
    asked = session.run(device.query.x)
    return figures(z, support.y, means, asked, np.isin(device.query.y, withheld))


def figures(z: Array, y: Array, means: Prototypes, asked: Array, unseen: Array) -> dict[str, float]:
    """The figures of samples embedded as ``asked``, of which ``unseen`` bool [n] are of withheld classes."""
    found = {"auroc": auroc(nearest(asked, means)[0], unseen)}
    for quantile in QUANTILES:
        called = Thresholds.calibrate(z, y, means, quantile).unknown(asked, means)
        found[f"known_{quantile}"] = float(called[~unseen].mean())
        found[f"unseen_{quantile}"] = float(called[unseen].mean())
    return found


def auroc(score_n: Array, positive_n: Array) -> float:
    """The probability that a positive sample has the higher score; ties count half."""
    _, place_n, counts = np.unique(score_n, return_inverse=True, return_counts=True)
    rank = (np.cumsum(counts) - (counts - 1) / 2)[place_n]
    positives = int(positive_n.sum())
    above = float(rank[positive_n].sum()) - positives * (positives + 1) / 2
    return above / (positives * (len(score_n) - positives))


def _mean(each: Sequence[Mapping[str, float]]) -> dict[str, float]:
    return {**{key: float(np.mean([one[key] for one in each])) for key in each[0]}, "tasks": float(len(each))}


def outcome(case: Case, seeds: Sequence[int], draws: int, room: Path, say: Callable[[str], None]) -> dict[str, Any]:
    """labels -> figure -> mean, deviation and value of each seed."""
    each = [evaluated(case, seed, draws, room, say) for seed in seeds]
    return {labels: {key: spread([one[labels][key] for one in each]) for key in each[0][labels]}
            for labels in each[0]}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--draws", type=int, default=3, help="sets of labels per device")
    parser.add_argument("--room", type=Path, default=fleets.ROOM)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()

    started = time.monotonic()
    alike = {"method": METHOD, "seeds": options.seeds, "draws": options.draws, "quantiles": QUANTILES,
             "environment": environment()}
    beside(options.out, "cases", dict.fromkeys(options.cases), alike)  # fails before anything is computed
    found = {}
    for name in options.cases:
        found[name] = outcome(CASES[name], options.seeds, options.draws, options.room, processes.say)
        for labels, one in found[name].items():
            said = " ".join(f"{key} {figure['mean']:.3f}" for key, figure in one.items())
            print(f"{name}, {labels} labels: {said}", flush=True)
    training = {case.plan.folder: {"rounds": case.plan.training[METHOD].rounds,
                                   "hyper": dict(case.plan.training[METHOD].hyper)} for case in CASES.values()}
    write_json(options.out, {"training": training, **beside(options.out, "cases", found, alike)})
    processes.say(f"{options.out}: {time.monotonic() - started:.0f} s")


if __name__ == "__main__":
    main()
