"""A fleet of any method in one process: the real client loop on toy samples and the real server rule, without a wire.

As in the product, what is sent down is float32, a device's state stays pending until a round counted its update, and a
device answers with what its personalizer makes of the served model.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch

from fleet_core.algorithms import aggregation
from fleet_core.algorithms.interface import ClientState, Method, Payload, Update
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.learning import local_training, models, personal_model
from fleet_core.model.layout import InputSpec, Layout
from fleet_core.personalization.gaussian_process import Processes
from fleet_core.personalization.nearest import Neighbours, Prototypes, softmax
from fleet_core.training.local_round import TrainResult
from fleet_core.training.round_plans import Participant

Array = np.ndarray[Any, Any]
Samples = tuple[Array, Array]
SEED = 7
TOY = InputSpec((6,))


def toy_layout(classes: int = 3, **options: Any) -> Layout:
    names = [f"c{i}" for i in range(classes)]
    return models.describe("mlp", TOY, names, {"hidden": [8], "activation": "elu", **options})


def toy_samples(number: int = 60, classes: int = 3, seed: int = 0, labels: Sequence[int] = ()) -> Samples:
    """One centre per class in the first three values; strong noise in the others, which training must learn to ignore.

    classes: how many centres there are. labels: the classes that have samples, all by default.
    """
    centres = np.random.default_rng(0).standard_normal((classes, 6)) * (2, 2, 2, 0, 0, 0)
    rng = np.random.default_rng([seed, 1])
    y = np.resize(np.asarray(labels or range(classes)), number)
    x = centres[y] + rng.standard_normal((number, 6)) * (0.3, 0.3, 0.3, 3, 3, 3)
    return x.astype(np.float32), y.astype(np.int64)


def hyper_of(name: str, **changes: Any) -> Any:
    """The method's hyper-parameters; ``changes`` that it does not have are ignored."""
    known = METHODS[name].hyper.__dataclass_fields__
    return METHODS[name].hyper(**{key: value for key, value in changes.items() if key in known})


@dataclass
class Fleet:
    """data: each device's samples. together: clients train side by side. padded: also those with different batches."""

    name: str
    hyper: Any
    data: Sequence[Samples]
    layout: Layout = field(default_factory=toy_layout)
    together: bool = False
    padded: bool = False

    def __post_init__(self) -> None:
        torch.set_num_threads(1)  # too small for two threads
        self.method: Method = METHODS[self.name]
        self.model = models.build(self.layout)
        self.wire = self.layout.extended(self.method.down, self.method.shared)
        first = self.wire.ordered({**self.wire.zeros(self.method.down), **models.initial(self.layout, SEED)})
        self.state = self.method.server.init(trees.widened(trees.only(first, self.method.received)), self.hyper)
        self.states: list[ClientState] = [{} for _ in self.data]
        self.number = 0

    def broadcast(self) -> Payload:
        """What the server sends to all in the next round."""
        sent = self.method.server.broadcast(self.state)
        scalars = {**sent.scalars, "round": float(self.number + 1), "seed": float(SEED)}
        return Payload(trees.apply(lambda a: a.astype(np.float32), sent.groups), scalars)

    def per_device(self, i: int) -> Params:
        """What one device alone receives in the next round."""
        return trees.apply(lambda a: a.astype(np.float32), self.method.server.per_device(self.state, f"device-{i}"))

    def participants(self, active: Sequence[int] = ()) -> list[Participant]:
        """The clients as they would start the next round."""
        return [
            Participant(
                self.states[i], *self.data[i], np.random.default_rng([SEED, self.number + 1, i]), self.per_device(i)
            )
            for i in active or range(len(self.data))
        ]

    def trained(self, active: Sequence[int] = ()) -> dict[int, TrainResult]:
        """Device -> the result of its next round; changes nothing."""
        chosen, sent = list(active) or list(range(len(self.data))), self.broadcast()
        several = self.participants(chosen)
        if self.together:
            found = local_training.train_side_by_side(self.method, self.model, self.layout, sent, several, self.hyper,
                                             padded=self.padded)
            return dict(zip(chosen, found, strict=True))
        return {
            i: local_training.train_round(
                self.method, self.model, self.layout, sent.beside(one.per_device), one.state, one.x, one.y, self.hyper,
                one.rng,
            )
            for i, one in zip(chosen, several, strict=True)
        }

    def round(self, active: Sequence[int] = ()) -> dict[int, TrainResult]:
        results, sent = self.trained(active), self.broadcast()
        self.number += 1
        updates = {f"device-{i}": Update(f"device-{i}", r.update, r.samples) for i, r in results.items()}
        as_received = replace(self.method.server.as_received(self.state, trees.widened(sent.groups)), round=self.number)
        ordered = [updates[name] for name in aggregation.order(updates)]
        self.state = self.method.server.apply(as_received, ordered, len(self.data), self.hyper)
        for i, result in results.items():
            self.states[i] = result.pending
        return results

    @property
    def evaluated(self) -> Params:
        return trees.apply(lambda a: a.astype(np.float32), self.state.served)

    def own(self, support: Samples, state: ClientState | None = None) -> Params:
        """The weights that a device personalizes from the served model and its samples."""
        scalars = {"seed": float(SEED), "round": float(max(1, self.number))}
        return personal_model.adapt(
            self.method, self.model, self.layout, self.evaluated, *support, self.hyper, state, scalars
        )

    def answers(self, support: Samples, x: Array, state: ClientState | None = None) -> Array:
        """The classes that a device with these samples predicts for ``x``."""
        params, personalizer = self.own(support, state), self.method.personalizer
        if personalizer in ("proto", "fleet-proto"):
            z = local_training.embed(self.model, params, support[0])
            classes = max(len(self.layout.classes), int(support[1].max()) + 1)
            own = Prototypes.empty(classes, z.shape[1]).add(z, support[1])
            means = own if personalizer == "proto" else Prototypes.of_fleet(self.evaluated)
            return np.asarray(means.probabilities(local_training.embed(self.model, params, x)).argmax(1))
        if personalizer == "gp":
            z = local_training.embed(self.model, params, support[0])
            classes = max(len(self.layout.classes), int(support[1].max()) + 1)
            processes = Processes.of(z, support[1], classes, self.hyper)
            return np.asarray(processes.probabilities(local_training.embed(self.model, params, x)).argmax(1))
        head = local_training.predict_logits(self.model, params, x)
        if personalizer == "knn":
            z, known = (
                run(self.model, params, support[0]) for run in (local_training.embed, local_training.predict_logits)
            )
            near = Neighbours.of(z, support[1], softmax(known), self.hyper.neighbours, self.hyper.mixture)
            head = near.probabilities(local_training.embed(self.model, params, x), softmax(head))
        return np.asarray(head.argmax(1))

    def accuracy(self, test: Sequence[Samples]) -> float:
        """The mean accuracy over devices, each with its own samples and state."""
        right = [
            float((self.answers(own, x, state) == y).mean())
            for own, state, (x, y) in zip(self.data, self.states, test, strict=True)
        ]
        return float(np.mean(right))


def flat(tree: Params) -> list[Any]:
    return [array for named in tree.values() for array in named.values()]


def equal_bits(left: Params, right: Params) -> bool:
    return {g: list(named) for g, named in left.items()} == {g: list(named) for g, named in right.items()} and all(
        np.array_equal(a, b) for a, b in zip(flat(left), flat(right), strict=True)
    )


def max_difference(left: Params, right: Params) -> float:
    return max((float(np.abs(a - b).max()) for a, b in zip(flat(left), flat(right), strict=True)), default=0.0)
