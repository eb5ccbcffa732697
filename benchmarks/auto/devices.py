"""The devices of five data sets, divided into those that train, validate and are evaluated, as embedded samples.

The evaluated devices of heart beats, activity, Omniglot and MNIST are the same for every seed, and validate in none.
Spoken digits have four speakers, so there no device validates. The encoder and a head for the fleet's classes are
trained centrally on the training devices by a joint loss, cross-entropy of the head plus that of class means within
one device, so that no way answers from an encoder that was trained for another. It stands in for a fleet's model;
``trained_by_fleet`` is one.
"""

from __future__ import annotations

import copy
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.drift.run import spoken_digits
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload as workloads
from cloud_server.laboratory.run.simulate import Options, simulate
from cloud_server.records import checkpoint
from fleet_core.data import model_input
from fleet_core.data import samples as sample_files
from fleet_core.data.samples import Samples, stratified
from fleet_core.data.sets import spoken
from fleet_core.data.sets.set_cache import load_set
from fleet_core.data.shaping import sound
from fleet_core.learning import models
from fleet_core.personalization.mixture import MAX_SAMPLES, folds
from fleet_core.personalization.nearest import softmax

STEPS, BATCH, RATE = 250, 64, 2e-3
ROUNDS, COHORT, HYPER = 60, 10, {"local_steps": 8, "support_batch": 32, "query_batch": 32}
"""Of a simulated fleet; the rate is the method's own."""
SUPPORT_S, SUPPORT = 300.0, 0.6
"""A patient's labelled beats are those of the first five minutes; others label the first 60 % of each class."""
MOST_QUERIES = 400
FEW = 5
LABELS = ("few", "all")
STEP_RATES, STEPS_TAKEN, MOST_STEPPED = (0.003, 0.01, 0.03), 20, 200
"""Gradient steps on all groups: their rates, number, and the most samples of a full batch."""
Array = np.ndarray[Any, Any]
Split = Callable[[np.random.Generator], tuple[list[str], list[str], list[str]]]


@dataclass(frozen=True, eq=False)
class Set:
    """x [N, *raw shape] in the order of time, y, device [N] str. model, options: of the network. split: draws the
    names of devices that train, validate and are evaluated. fleet: int64 [N], the classes that the head is trained on
    if they are not the devices'. time: in seconds, if a device labels the first minutes. gap: number of windows of each
    class between labelled samples and queries."""

    x: Array
    y: Array
    device: Array
    model: str
    split: Split
    fleet: Array | None = None
    options: Mapping[str, Any] = field(default_factory=dict)
    time: Array | None = None
    gap: int = 0

    @property
    def has_head(self) -> bool:
        return self.fleet is None


@dataclass(frozen=True, eq=False)
class Device:
    """Embedded samples in the order of time: z, y and the head's probabilities (None without a head), of the support
    and of the queries. embed_s: processor time of embedding a sample."""

    z: Array
    y: Array
    head: Array | None
    query_z: Array
    query_y: Array
    query_head: Array | None
    classes: int
    embed_s: float
    stepped: Mapping[str, Mapping[float, Array]] = field(default_factory=dict)

    def arrays(self) -> dict[str, Array]:
        own = {field.name: np.asarray(getattr(self, field.name)) for field in fields(self)
               if field.name != "stepped" and getattr(self, field.name) is not None}
        return own | {f"stepped {labels} {rate}": array for labels, by_rate in self.stepped.items()
                      for rate, array in by_rate.items()}

    @classmethod
    def of(cls, arrays: Mapping[str, Array]) -> Device:
        stepped: dict[str, dict[float, Array]] = {}
        for key, array in arrays.items():
            if key.startswith("stepped "):
                _, labels, rate = key.split()
                stepped.setdefault(labels, {})[float(rate)] = array
        return cls(arrays["z"], arrays["y"], arrays.get("head"), arrays["query_z"], arrays["query_y"],
                   arrays.get("query_head"), int(arrays["classes"]), float(arrays["embed_s"]), stepped)


def labelled(y: Array, labels: str) -> Array:
    """The rows of labelled samples: all, or the first ``FEW`` of each class."""
    if labels == "all":
        return np.arange(len(y))
    return np.sort(np.concatenate([np.flatnonzero(y == label)[:FEW] for label in np.unique(y)]))


def parts(y: Array) -> list[tuple[Array, Array]]:
    """(rows to learn from, rows to answer) of the folds of a mixture."""
    judged = stratified(y, MAX_SAMPLES)
    return [(judged[train], judged[test]) for train, test in folds(y[judged])]


def _split(names: Sequence[str], evaluated: Sequence[str], counts: tuple[int, int, int]) -> Split:
    """Draws training and validation devices from those that are never evaluated."""
    left = sorted(set(names) - set(evaluated))

    def split(rng: np.random.Generator) -> tuple[list[str], list[str], list[str]]:
        drawn = [str(name) for name in rng.permutation(left)]
        judged = [str(name) for name in rng.permutation(sorted(evaluated))][: counts[2]]
        return drawn[: counts[0]], drawn[counts[0] : counts[0] + counts[1]], judged

    return split


def heartbeat() -> Set:
    """The seven patients with the highest numbers, who join late in ``benchmarks/heartbeat``, are evaluated."""
    samples = load_set("heartbeat-22").train
    assert samples.client is not None
    assert samples.time is not None
    order = np.argsort(samples.time, kind="stable")
    names = list(samples.clients)
    return Set(samples.x[order], samples.y[order], samples.client[order], "cnn1d",
               _split(names, names[15:], (10, 5, 7)), time=samples.time[order])


def har() -> Set:
    samples = load_set("har").train
    assert samples.client is not None
    assert samples.time is not None
    order = np.argsort(samples.time, kind="stable")
    names = list(samples.clients)
    return Set(samples.x[order], samples.y[order], samples.client[order], "ds-cnn",
               _split(names, names[14:], (9, 5, 7)), gap=1)


def mnist() -> Set:
    """The writers of the official test part are evaluated."""
    both = load_set("mnist")
    assert both.test is not None
    x, y = (np.concatenate([getattr(part, name) for part in (both.train, both.test)]) for name in ("x", "y"))
    assert both.train.client is not None
    assert both.test.client is not None
    train, test = np.char.add("a", both.train.client), np.char.add("b", both.test.client)
    long = [str(name) for name, count in zip(*np.unique(test, return_counts=True), strict=True) if count >= 60]
    return Set(x, y, np.concatenate([train, test]), "ds-cnn",
               _split([str(name) for name in np.unique(train)], long, (200, 20, 20)))


def omniglot() -> Set:
    """A device is ten characters with 20 drawings each, which it calls 0 to 9: the fleet has no head for them. The
    last 264 characters, in a fixed random order, are those of evaluated devices."""
    samples = load_set("omniglot").train
    characters = np.random.default_rng(0).permutation(np.unique(samples.y))
    tens = characters[: len(characters) // 10 * 10].reshape(-1, 10)
    rows = np.array([[np.flatnonzero(samples.y == one) for one in ten] for ten in tens])  # [device, class, drawing]
    mixed = rows.transpose(0, 2, 1).reshape(len(tens), -1)
    names = [f"{k:02d}" for k in range(len(tens))]
    taught, fleet = np.unique(samples.y[mixed], return_inverse=True)
    assert len(taught) == tens.size
    return Set(samples.x[mixed.ravel()], np.tile(np.arange(10), mixed.size // 10), np.repeat(names, mixed.shape[1]),
               "conv4", _split(names, names[70:], (50, 20, 20)), fleet.ravel(), {"channels": 32})


def digits() -> Set:
    train = spoken_digits()
    assert train.client is not None
    x = sound.spectrograms(np.ascontiguousarray(train.x[:, 0]), spoken.RATE_HZ)[:, None]
    names = list(train.clients)

    def split(rng: np.random.Generator) -> tuple[list[str], list[str], list[str]]:
        drawn = [str(name) for name in rng.permutation(names)]
        return drawn[:2], [], drawn[2:]

    return Set(x, train.y, train.client, "ds-cnn", split)


SETS: Mapping[str, Callable[[], Set]] = {
    "heart beats": heartbeat, "activity": har, "Omniglot": omniglot, "MNIST by writer": mnist, "spoken digits": digits,
}


# The fleet's model ----------------------------------------------------------------------------------------------------


def trained(found: Set, names: Sequence[str], seed: int, steps: int = STEPS) -> models.Network:
    """The network after ``steps`` steps of Adam, each on one device's samples, half of them for its class means."""
    rows = {name: np.flatnonzero(found.device == name) for name in names}
    labels = _taught(found, np.concatenate(list(rows.values())))
    spec = model_input.standardized(found.x[np.concatenate(list(rows.values()))])
    known = range(int(labels[np.concatenate(list(rows.values()))].max()) + 1)
    layout = models.describe(found.model, spec, [str(k) for k in known], found.options)
    network = models.build(layout)
    params = models.initial(layout, seed)
    models.hold(network, {g: {n: torch.tensor(a) for n, a in named.items()} for g, named in params.items()})
    network.requires_grad_(True)
    optimizer, rng = torch.optim.Adam(network.parameters(), RATE), np.random.default_rng(seed)
    for _ in range(steps):
        own = rows[str(rng.choice(list(names)))]
        loss = _joint_loss(network, found, labels, rng.permutation(own)[:BATCH])
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    network.requires_grad_(False)
    return network


def _taught(found: Set, rows: Array) -> Array:
    """int64 [N]: labels in the numbering of the head, which knows the classes of ``rows``."""
    return found.y if found.fleet is None else np.searchsorted(np.unique(found.fleet[rows]), found.fleet)


def trained_by_fleet(found: Set, names: Sequence[str], seed: int, rounds: int = ROUNDS) -> models.Network:
    """The network that ``fedavg-joint`` trains in a simulated fleet of the devices ``names``."""
    rows = np.flatnonzero(np.isin(found.device, list(names)))
    labels, spec = _taught(found, rows)[rows], model_input.standardized(found.x[rows])
    with tempfile.TemporaryDirectory() as scratch:
        path, out = Path(scratch) / "samples.npz", Path(scratch) / "runs"
        sample_files.save(path, Samples(found.x[rows], labels, found.device[rows],
                                        classes=tuple(map(str, range(int(labels.max()) + 1)))))
        asked = experiments.read({
            "seeds": [seed], "cohort": min(COHORT, len(names)),
            "data": {"path": str(path), "scale": spec.scale, "mean": list(spec.mean), "std": list(spec.std)},
            "partition": {"kind": "natural", "options": {"min_samples": 4, "train_fraction": 0.95}},
            "model": {"name": found.model, "options": dict(found.options)},
            "budget": {"rounds": rounds}, "evaluation": {"every": 0},
            "method": [{"name": "fedavg-joint", "hyper": HYPER}],
        })
        folder, = simulate(asked, out, Options(jobs=1, device="cpu"))
        _, served = checkpoint.served(folder / "state" / checkpoint.file_name(rounds))
        network = models.build(workloads.layout_of(asked, workloads.build(asked)))
    models.hold(network, models.to_torch(served))
    return network


def _joint_loss(network: models.Network, found: Set, labels: Array, drawn: Array) -> torch.Tensor:
    z = network.embed(torch.tensor(found.x[drawn]))
    loss = torch.nn.functional.cross_entropy(network.core.get_submodule("head")(z), torch.tensor(labels[drawn]))
    half, y = len(drawn) // 2, found.y[drawn]
    seen = np.unique(y[:half])
    asked = half + np.flatnonzero(np.isin(y[half:], seen))
    if len(seen) < 2 or not len(asked):
        return loss
    means = torch.stack([z[:half][torch.tensor(y[:half] == label)].mean(0) for label in seen])
    distance = (z[asked][:, None] - means).square().sum(2)
    return loss + torch.nn.functional.cross_entropy(-distance, torch.tensor(np.searchsorted(seen, y[asked])))


def device_of(found: Set, name: str, network: models.Network, *, with_steps: bool = True) -> Device:
    """with_steps: answers after gradient steps too, which take the longest."""
    rows = np.flatnonzero(found.device == name)
    if found.time is not None:
        support = rows[found.time[rows] < SUPPORT_S]
        query = np.setdiff1d(rows, support)[-MOST_QUERIES:]
    else:
        parts = [rows[found.y[rows] == label] for label in np.unique(found.y[rows])]
        cuts = [round(SUPPORT * len(part)) for part in parts]
        support = np.sort(np.concatenate([part[:cut] for part, cut in zip(parts, cuts, strict=True)]))
        query = np.sort(np.concatenate([part[cut + found.gap :] for part, cut in zip(parts, cuts, strict=True)]))
    started = time.process_time()
    (z, head), (query_z, query_head) = _outputs(network, found.x[support]), _outputs(network, found.x[query])
    embed_s = (time.process_time() - started) / (len(support) + len(query))
    classes = int(found.y.max()) + 1
    if not found.has_head:
        return Device(z, found.y[support], None, query_z, found.y[query], None, classes, embed_s)
    stepped = {labels: {rate: _stepped(network, found, support[labelled(found.y[support], labels)], query, rate)
                        for rate in STEP_RATES} for labels in LABELS} if with_steps else {}
    return Device(z, found.y[support], head, query_z, found.y[query], query_head, classes, embed_s, stepped)


def _stepped(network: models.Network, found: Set, support: Array, query: Array, rate: float) -> Array:
    y = found.y[support]
    cases = [*((support[train], support[test]) for train, test in parts(y)), (support, query)]
    return np.concatenate([_after_steps(network, found, *case, rate) for case in cases])


def _after_steps(network: models.Network, found: Set, train: Array, test: Array, rate: float) -> Array:
    own = copy.deepcopy(network).requires_grad_(True)
    some = train[stratified(found.y[train], MOST_STEPPED)]
    x, y = torch.tensor(found.x[some]), torch.tensor(found.y[some])
    optimizer = torch.optim.SGD(own.parameters(), rate)
    for _ in range(STEPS_TAKEN):
        loss = torch.nn.functional.cross_entropy(own.core.get_submodule("head")(own.embed(x)), y)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
    return _outputs(own.requires_grad_(False), found.x[test])[1]


def _outputs(network: models.Network, x: Array) -> tuple[Array, Array]:
    """(embeddings, the head's probabilities)."""
    parts = [network.embed(torch.tensor(x[k : k + 256])) for k in range(0, len(x), 256)]
    z = torch.cat(parts)
    return z.numpy(), softmax(network.core.get_submodule("head")(z).numpy())
