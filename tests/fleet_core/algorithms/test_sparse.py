"""Codecs that send a small part of 1000 values, on quadratics: where PFLDyn and PFLScaf get to, up and down.

Devices and aggregator are the product's: ``encode_update``, ``encode_model``, client and server rules. Distances to the
minimiser are relative to its own length, and the start is at 1. What ``Codec.misses`` says was measured here.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from cloud_server.broadcast import models_down
from cloud_server.records.checkpoint import Checkpoint
from fleet_core.algorithms.interface import ClientState, Payload, Update
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.errors import CodecError
from fleet_core.base.trees import Params
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.model.encoded_update import encode_update, method_state
from fleet_core.model.layout import MODEL_GROUPS as GROUPS
from fleet_core.model.layout import InputSpec, Layout, TensorSpec

pytestmark = pytest.mark.slow

DEVICES, SIZE, SMOOTHNESS = 8, 1000, 8.0
LAYOUT = Layout(
    model="q", input=InputSpec(shape=(1,)), classes=("none",), embedding=1,
    tensors=(TensorSpec("a", "body", (20, 40)), TensorSpec("b", "body", (150,)), TensorSpec("c", "head", (50,))),
)
RNG = np.random.default_rng(0)
CURVATURE = np.exp(RNG.uniform(np.log(0.5), np.log(SMOOTHNESS), (DEVICES, SIZE)))
MINIMA = RNG.normal(size=(DEVICES, SIZE))
MINIMISER = (CURVATURE * MINIMA).sum(0) / CURVATURE.sum(0)
DIVERGED = 1e6


def tree(vector: Any) -> dict[str, dict[str, Any]]:
    return {"body": {"a": vector[:800].reshape(20, 40), "b": vector[800:950]}, "head": {"c": vector[950:]}}


def joined(params: Params) -> Any:
    return np.concatenate([np.ravel(array) for named in params.values() for array in named.values()])


def dyn(penalty: float) -> tuple[str, dict[str, float]]:
    return "feddyn", {"penalty": penalty, "client_lr": 1 / (SMOOTHNESS + penalty)}


SCAF: tuple[str, dict[str, float]] = ("scaffold", {"client_lr": 1 / SMOOTHNESS})


class Fleet:
    """up, down: codecs, or several that the rounds take in turn; down None: models come as they are."""

    def __init__(
        self, method: tuple[str, dict[str, float]], up: str | tuple[str, ...], down: str | tuple[str, ...] | None = None
    ):
        self.method = METHODS[method[0]]
        self.hyper = self.method.hyper(**{"local_steps": 4, "clip_norm": 0.0, **method[1]})
        self.wire = LAYOUT.extended(self.method.down, self.method.shared)
        self.up, self.down = up, down
        state = self.method.server.init(trees.widened(self.wire.zeros(self.method.down)), self.hyper)
        self.kept: list[ClientState] = [{} for _ in range(DEVICES)]
        self.closed = Checkpoint(0, state)

    def round(self, active: list[int]) -> None:
        number, before = self.closed.round + 1, self.closed
        sent = self.method.server.broadcast(before.state)
        made = self._encoded(sent.groups)
        model = sent.groups if made is None else trees.widened(made.decoded)
        broadcast = Payload(model, {**sent.scalars, "round": float(number)})
        heard = replace(self.method.server.as_received(before.state, model), round=number)
        updates = [Update(str(i), self._train(i, broadcast, number)) for i in active]
        state = self.method.server.apply(heard, updates, DEVICES, self.hyper)
        held, lost = (None, None) if made is None else (made.decoded, made.lost)
        self.closed = Checkpoint(number, state, held, lost)

    def _encoded(self, groups: Params) -> models_down.Encoded | None:
        if self.down is None:
            return None
        codec = self._turn(self.down)
        return models_down.encode_model(groups, self.closed, codec, self.wire, self.method.down, 0)

    def _turn(self, codecs: str | tuple[str, ...]) -> str:
        return codecs if isinstance(codecs, str) else codecs[self.closed.round % len(codecs)]

    def _train(self, i: int, broadcast: Payload, number: int) -> Payload:
        def slope(w: Params) -> Params:
            return tree(CURVATURE[i] * (joined(trees.only(w, GROUPS)) - MINIMA[i]))

        own = method_state(self.kept[i]) or self.method.client.init(broadcast.groups, {}, self.hyper)
        update, pending = self.method.client.run(broadcast, own, [slope] * self.hyper.local_steps, self.hyper)
        made = encode_update(
            self._turn(self.up), update, pending, self.kept[i], method=self.method, hyper=self.hyper, layout=self.wire,
            round_number=number, seed=(0, number, i),
        )
        self.kept[i] = made.state
        return made.update

    @property
    def distance(self) -> float:
        return float(np.linalg.norm(joined(self.closed.state.model) - MINIMISER) / np.linalg.norm(MINIMISER))


def distance(fleet: Fleet, rounds: int, active: int = DEVICES) -> float:
    """The distance after ``rounds`` with ``active`` devices drawn in each; ``DIVERGED`` if it grows beyond that."""
    rng = np.random.default_rng(1)
    with np.errstate(all="ignore"):
        for _ in range(rounds):
            try:
                fleet.round(sorted(rng.permutation(DEVICES)[:active].tolist()))
            except CodecError:
                return DIVERGED
            if not fleet.distance < DIVERGED:
                return DIVERGED
    return fleet.distance


@pytest.mark.parametrize(
    ("codec", "method", "rounds", "bound"),
    [("topk-10", dyn(2), 150, 1e-3), ("topk-1", dyn(16), 400, 1e-2), ("lowrank", dyn(16), 150, 1e-3),
     ("ternary", dyn(2), 400, 1e-2), ("topk-10", SCAF, 150, 1e-3), ("topk-1", SCAF, 400, 1e-2),
     ("lowrank", SCAF, 150, 1e-3), ("ternary", SCAF, 400, 1e-2), ("topk-10-4bit", dyn(2), 150, 1e-3),
     ("topk-1-4bit", dyn(16), 400, 1e-2), ("topk-10-4bit", SCAF, 150, 1e-3), ("topk-1-4bit", SCAF, 400, 1e-2)],
)
def test_sparse_updates_get_there(codec: str, method: tuple[str, dict[str, float]], rounds: int, bound: float) -> None:
    assert distance(Fleet(method, codec), rounds) < bound


@pytest.mark.parametrize("method", [dyn(2), SCAF], ids=["dyn", "scaf"])
def test_codecs_that_change_from_round_to_round_get_there(method: tuple[str, dict[str, float]]) -> None:
    fleet = Fleet(method, ("int8", "topk-10", "int4", "topk-10", "fp32"), ("int8", "int4", "topk-10"))
    assert distance(fleet, 150, active=4) < 1e-3


@pytest.mark.parametrize(
    ("codec", "method", "floor", "active"),
    [("topk-1", dyn(2), 1.0, 8), ("topk-01", dyn(2), 1.0, 8), ("lowrank", dyn(2), 1.0, 4),
     ("mask", dyn(2), DIVERGED, 8), ("mask", SCAF, DIVERGED, 8), ("topk-01", SCAF, 0.1, 8),
     ("topk-1-4bit", dyn(2), 1.0, 8), ("topk-01-4bit", dyn(2), 1.0, 8), ("topk-01-4bit", SCAF, 0.1, 8)],
)
def test_where_a_codec_says_that_a_method_misses_it_does(
    codec: str, method: tuple[str, dict[str, float]], floor: float, active: int
) -> None:
    assert CODECS[codec].remarks("up", METHODS[method[0]].client.keeps)
    assert distance(Fleet(method, codec), 200, active) >= floor


@pytest.mark.parametrize("method", [dyn(2), SCAF], ids=["dyn", "scaf"])
@pytest.mark.parametrize(
    ("codec", "rounds", "bound"),
    [("topk-10", 100, 1e-3), ("topk-10-4bit", 100, 1e-3), ("lowrank", 100, 1e-2), ("ternary", 100, 1e-2)],
)
def test_sparse_models_get_there(
    method: tuple[str, dict[str, float]], codec: str, rounds: int, bound: float
) -> None:
    assert distance(Fleet(method, "fp32", codec), rounds, active=4) < bound


@pytest.mark.parametrize("method", [dyn(2), SCAF], ids=["dyn", "scaf"])
@pytest.mark.parametrize(("codec", "floor"), [("topk-01", 0.3), ("topk-01-4bit", 0.3), ("mask", DIVERGED)])
def test_models_that_miss_are_said_to(method: tuple[str, dict[str, float]], codec: str, floor: float) -> None:
    assert CODECS[codec].remarks("down", ())
    assert distance(Fleet(method, "fp32", codec), 200, active=4) >= floor


@pytest.mark.parametrize("codec", ["topk-10", "lowrank", "ternary"])
@pytest.mark.parametrize("method", [dyn(2), SCAF], ids=["dyn", "scaf"])
def test_adding_what_a_sparse_model_lost_diverges(
    monkeypatch: pytest.MonkeyPatch, codec: str, method: tuple[str, dict[str, float]]
) -> None:
    """Devices train most of what was left out again, so that it would come twice: hence no feedback on the way down."""
    monkeypatch.setattr(type(CODECS[codec]), "feedback_down", True)
    assert distance(Fleet(method, "fp32", codec), 200, active=4) > 1
