"""The fleets of this folder's tables: three data sets, which devices train and which are evaluated, and the trained
models.

Devices are divided before training: the file that the laboratory trains on holds only the training devices. Rates are
chosen on validation devices, which train nothing; the unseen ones are evaluated once. The division is drawn anew for
every seed. Training is resumable: finished runs are not repeated.

Omniglot has no devices of its own here: a device is ten consecutive characters with its own numbering, so its classes
are new too. Its time is the number of the drawing, so query drawings are by other people than labelled ones. A class
counts on a device if it has ``LEAST`` samples in both parts of the device's time.
"""

from __future__ import annotations

import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload as workloads
from cloud_server.laboratory.run.run_folder import Store
from cloud_server.laboratory.run.simulate import Options, simulate
from export.adapt_graph import with_adapt
from export.graph import export_graph
from fleet_core.base import storage, trees
from fleet_core.base.trees import Params
from fleet_core.data import samples as stored
from fleet_core.data import time_split
from fleet_core.data.samples import Samples
from fleet_core.data.sets.set_cache import load_set
from fleet_core.learning import models
from fleet_core.model import graph_bundle
from fleet_core.model.layout import InputSpec, Layout

ROOM = Path("build/on-device")
"""Where samples, checkpoints, graphs and answers lie, below the working folder."""
LEAST = 5
CHARACTERS = 10
GRAPHS: Mapping[str, Callable[[graph_bundle.Graph], graph_bundle.Graph]] = {
    "plain": lambda graph: graph,
    "all": lambda graph: with_adapt(graph, rates=False),
    "rates": lambda graph: with_adapt(graph, rates=True),
}
"""The bundles of a layout, by the groups that their graph ``adapt`` moves."""


@dataclass(frozen=True)
class Training:
    """rounds, and hyper-parameters other than the method's own."""

    rounds: int
    hyper: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Plan:
    """How a data set is divided and trained on.

    source: (samples, input) of the set. validation, unseen: numbers of devices. fraction: of a device's time, from
    which its labels come; it is evaluated on the rest. labels: per class. without: a class that no training device
    has a sample of. training: by method.
    """

    name: str
    source: Callable[[], tuple[Samples, InputSpec]]
    model: str
    validation: int
    unseen: int
    training: Mapping[str, Training]
    options: Mapping[str, Any] = field(default_factory=dict)
    fraction: float = 0.6
    labels: tuple[int, ...] = (1, 5, 20)
    cohort: int = 0
    without: int | None = None

    @property
    def folder(self) -> str:
        return self.name if self.without is None else f"{self.name}-without-{self.without}"


@dataclass(frozen=True, eq=False)
class Device:
    """pool: the samples that labels are drawn from. query: those to evaluate on. Only classes that count, see
    ``LEAST``."""

    pool: Samples
    query: Samples


@dataclass(frozen=True, eq=False)
class Division:
    """train: the samples of the training devices, named in the client's column."""

    train: Samples
    validation: Mapping[str, Device]
    unseen: Mapping[str, Device]


def named(name: str) -> tuple[Samples, InputSpec]:
    """A prepared set (``benchmarks/papers/prepare.py``)."""
    found = load_set(name)
    return found.train, found.entry.input_spec


def drawings() -> tuple[Samples, InputSpec]:
    """Omniglot as devices of ``CHARACTERS`` characters each; an incomplete last one is left out."""
    found, spec = named("omniglot")
    number = np.empty(len(found), np.int64)
    for label in np.unique(found.y):
        rows = found.y == label
        number[rows] = np.arange(rows.sum())
    kept = found.y < (int(found.y.max()) + 1) // CHARACTERS * CHARACTERS
    client = np.char.add("characters-", np.char.zfill((found.y // CHARACTERS).astype(np.str_), 2))
    classes = tuple(str(k + 1) for k in range(CHARACTERS))
    everything = Samples(found.x, found.y % CHARACTERS, client, number.astype(np.float64), classes)
    return everything.take(kept), spec


EPISODE = {"support_batch": 50, "query_batch": 50}
PLANS = {
    plan.name: plan
    for plan in (
        Plan(
            "omniglot", drawings, "conv4", validation=4, unseen=12, options={"channels": 16}, cohort=8,
            fraction=0.75, labels=(1, 5),
            training={
                "pfldyn-proto": Training(50, {"local_steps": 5, **EPISODE}),
                "per-fedavg-fo": Training(50, {"local_steps": 5, "client_lr": 0.1, "inner_lr": 0.1, **EPISODE}),
                "fedmeta-metasgd": Training(150, {"first_rate": 0.1, **EPISODE}),
                "fedavg": Training(50, {"local_steps": 10, "batch": 50}),
                "metavers": Training(150, EPISODE),
            },
        ),
        Plan(
            "har", lambda: named("har"), "cnn1d", validation=3, unseen=9,
            training={
                "pfldyn-proto": Training(30, {"local_steps": 10}),
                "per-fedavg-fo": Training(30, {"local_steps": 10, "inner_lr": 0.05}),
                "fedmeta-metasgd": Training(150, {"first_rate": 0.05}),
                "fedavg": Training(30, {"local_steps": 10}),
            },
        ),
        Plan(
            "heartbeat", lambda: named("heartbeat-22"), "cnn1d", validation=3, unseen=7,
            training={
                "pfldyn-proto": Training(60, {"local_steps": 10}),
                "per-fedavg-fo": Training(60, {"local_steps": 10, "inner_lr": 0.05}),
                "fedmeta-metasgd": Training(60, {"form": "appendix", "local_steps": 10, "first_rate": 0.05}),
                "fedavg": Training(60, {"local_steps": 10}),
            },
        ),
    )
}


def divided(plan: Plan, seed: int) -> tuple[Division, InputSpec]:
    """The devices of ``plan``. Devices with two classes that count are evaluated; all others train."""
    everything, spec = plan.source()
    devices = {name: _device(everything.of_client(name), plan.fraction) for name in everything.clients}
    fit = [name for name, device in devices.items() if len(np.unique(device.query.y)) > 1]
    order = np.random.default_rng([seed, zlib.crc32(plan.name.encode())]).permutation(fit)
    unseen, validation = (sorted(map(str, part)) for part in np.split(order[: plan.unseen + plan.validation],
                                                                      [plan.unseen]))
    kept = ~np.isin(_clients(everything), [*unseen, *validation])
    if plan.without is not None:
        kept &= everything.y != plan.without
    train = everything.take(kept)
    several = [name for name in train.clients if _several(train.of_client(name).y)]
    train = train if plan.without is None else train.take(np.isin(_clients(train), several))
    return Division(train, {n: devices[n] for n in validation}, {n: devices[n] for n in unseen}), spec


def _clients(samples: Samples) -> Any:
    assert samples.client is not None
    return samples.client


def _several(y: Any) -> bool:
    """Whether there are at least two classes."""
    return int((np.bincount(y) >= LEAST).sum()) > 1


def _device(own: Samples, fraction: float) -> Device:
    pool, query = time_split.by_time(own, fraction)
    classes = [k for k in np.unique(own.y) if min((pool.y == k).sum(), (query.y == k).sum()) >= LEAST]
    return Device(*(part.take(np.isin(part.y, classes)) for part in (pool, query)))


# Train ----------------------------------------------------------------------------------------------------------------


def experiment(plan: Plan, method: str, seed: int, train: Path, spec: InputSpec) -> experiments.Experiment:
    """One run of ``method`` on the samples in the file ``train``."""
    training = plan.training[method]
    data = {"path": str(train), "scale": spec.scale, "mean": list(spec.mean), "std": list(spec.std)}
    return experiments.read({
        "seeds": [seed],
        "cohort": plan.cohort,
        "data": data,
        "partition": {"kind": "natural", "seed": seed, "options": {"split": "time", "train_fraction": 0.9}},
        "model": {"name": plan.model, "options": dict(plan.options)},
        "budget": {"rounds": training.rounds},
        "evaluation": {"every": 0, "devices": 1},
        "method": [{"name": method, "hyper": dict(training.hyper)}],
    })


def trained(plan: Plan, seed: int, methods: Sequence[str], room: Path, say: Callable[[str], None]) -> Path:
    """The folder of a seed, with ``layout.json`` and, for each of ``methods``, the served model's weights
    ``METHOD.safetensors``."""
    folder = room / plan.folder / f"seed-{seed}"
    division, spec = divided(plan, seed)
    if not (folder / "train.npz").exists():
        stored.save(folder / "train.npz", division.train)
    for method in methods:
        if not (folder / f"{method}.safetensors").exists():
            asked = experiment(plan, method, seed, folder / "train.npz", spec)
            layout, weights, seconds = _run(asked, folder / method)
            (folder / "layout.json").write_text(layout.to_json())
            storage.write_arrays(folder / f"{method}.safetensors", storage.flatten(weights))
            say(f"{plan.folder} seed {seed}: {method} trained, {seconds:.0f} s")
    return folder


def _run(asked: experiments.Experiment, folder: Path) -> tuple[Layout, Params, float]:
    """Trains or resumes, and takes the served model's weights from the last checkpoint."""
    torch.set_num_threads(1)
    run = experiments.runs(asked)[0]
    (out,) = simulate(asked, folder, Options(jobs=1, device="cpu"))
    store = Store(out)
    layout = workloads.layout_of(asked, workloads.build(asked))
    wire = layout.extended(run.method.down, run.method.shared)
    besides = tuple(group for group in run.method.down if group not in ("body", "head"))
    first = wire.ordered({**models.initial(layout, run.seed), **wire.zeros(besides)})
    checkpoint = store.resume(first)
    assert checkpoint is not None
    served = trees.only(checkpoint.state.served, run.method.shared)
    return layout, trees.apply(lambda a: np.asarray(a, np.float32), served), store.result()["seconds"]


def graphs(layout: Layout, kinds: Sequence[str], room: Path) -> dict[str, Path]:
    """Files of the bundles of ``layout``, made if they are missing."""
    made = {kind: room / f"{layout.hash}-{kind}.bundle" for kind in kinds}
    for kind, path in made.items():
        if not path.exists():
            plain = export_graph(layout, kinds=("embed", "predict"))
            storage.write_atomic(path, graph_bundle.pack(GRAPHS[kind](plain)))
    return made


def put_devices(division: Division, folder: Path) -> None:
    """``pool.npz`` and ``query.npz`` of all evaluated devices, ``division.json`` with the kind of each device."""
    found = {**division.validation, **division.unseen}
    for part in ("pool", "query"):
        each = [getattr(device, part) for device in found.values()]
        client = np.repeat(list(found), [len(one) for one in each])
        whole = Samples(np.concatenate([one.x for one in each]), np.concatenate([one.y for one in each]), client,
                        classes=division.train.classes)
        stored.save(folder / f"{part}.npz", whole)
    storage.write_json(folder / "division.json",
                       {"validation": sorted(division.validation), "unseen": sorted(division.unseen)})


def withheld(plan: Plan, label: int) -> Plan:
    """The same plan without the class ``label`` in training."""
    return replace(plan, without=label)
