"""The seam every method fits: gradient estimator × correction × server rule × personalizer × what is shared.

A client half turns a broadcast and a stream of gradients into an update; a server half turns updates into the next
model. Both are pure: state in, state out. The seam is the gradient, not the loss, because first-order, hessian-free
and Moreau directions are no one's derivative.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet_core.algorithms import trees
from fleet_core.algorithms.trees import Params

GradFn = Callable[[Params], Params]
"""Gradient of one step's loss at the given parameters, on that step's own samples; same groups and names back."""

ClientState = Mapping[str, Params]
"""What a device remembers between rounds, by role (``dual``, ``control``, ``personal``); empty where nothing is."""


@dataclass(frozen=True)
class Payload:
    """What crosses the wire: named arrays by group, and scalars."""

    groups: Params
    scalars: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Update:
    """One device's verified contribution to a round. ``payload.groups`` holds float32 numpy arrays on the
    server; ``closing.total`` sums in float64."""

    device: str
    payload: Payload
    samples: int = 0


@dataclass(frozen=True)
class ServerState:
    """The aggregator's memory between rounds.

    model: what devices train on (the anchor of the next round).
    judged: what is served and judged.
    memory: what the server rule remembers, by role (``dual`` for PFLDyn).
    dual_epoch: rises when the devices' own state must start again from zero.
    """

    model: Params
    judged: Params
    memory: Mapping[str, Params] = field(default_factory=dict)
    dual_epoch: int = 0


@dataclass(frozen=True, kw_only=True)
class LocalSgd:
    """Hyper-parameters of the local SGD that every method here runs.

    local_steps: K (Fallah: τ), steps per device and round.
    client_lr: β, the device's learning rate (Acar: 0.1). lr_decay: its factor per round (Acar's runs: 0.997).
    weight_decay: added to the direction after clipping. clip_norm: limit on the corrected direction's norm, 0 for none
    (both in the order of the program of Acar et al.; their paper has neither).
    """

    local_steps: int = 20
    client_lr: float = 0.1
    lr_decay: float = 1.0
    weight_decay: float = 0.0
    clip_norm: float = 10.0


class ClientRule:
    """The device half. Subclasses override what they need."""

    def init(self, model: Params, hyper: Any) -> ClientState:
        """State of a device that never took part."""
        return {}

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: Any
    ) -> tuple[Payload, ClientState]:
        """Local training. Returns the update and the state that becomes the device's once the update is counted."""
        raise NotImplementedError

    def settle(self, pending: ClientState, error: Params, hyper: Any) -> ClientState:
        """The pending state when a codec *without* error feedback lost ``error`` = own update − decoded update."""
        return pending


class ServerRule:
    """The aggregator half. Subclasses override what they need."""

    def init(self, model: Params, hyper: Any) -> ServerState:
        return ServerState(model=model, judged=model)

    def broadcast(self, state: ServerState, device: str | None = None) -> Payload:
        """What a cohort receives: one payload for all (device None), per device only where a method needs it."""
        return Payload(state.model)

    def apply(self, state: ServerState, updates: Iterable[Update], members: int, hyper: Any) -> ServerState:
        """Close a round. ``updates`` can be iterated again and comes in closing order; ``members`` is m."""
        raise NotImplementedError

    def joined(self, state: ServerState, members: int) -> ServerState:
        """A device enrolled; ``members`` counts it."""
        return state

    def left(self, state: ServerState, members: int) -> ServerState:
        """A device that had taken part left, or lost its state; ``members`` no longer counts it."""
        return state


@dataclass(frozen=True)
class Method:
    """A named method: one row of choices.

    adaptation: gradient estimator in training: ``none``, ``proto``, ``maml-exact`` or ``maml-first-order``.
    personalizer: what a device does at deployment: ``none``, ``proto`` or ``sgd``.
    shared: groups that cross the wire; every other group stays on the device.
    models_down, models_up: models transmitted per device and round.
    """

    name: str
    title: str
    source: str
    hyper: type[Any]
    client: ClientRule
    server: ServerRule
    adaptation: str
    personalizer: str
    shared: tuple[str, ...] = ("body", "head")
    models_down: int = 1
    models_up: int = 1
    version: int = 1

    def params(self, model: Params) -> dict[str, dict[str, Any]]:
        """The part of ``model`` that this method trains and sends."""
        return trees.only(model, self.shared)


def rate(hyper: LocalSgd, round_number: float) -> float:
    """The learning rate that steps *and* divides in round 1, 2, …: β · decay^(round-1)."""
    return float(hyper.client_lr * hyper.lr_decay ** (round_number - 1))


def descend(
    anchor: Params,
    steps: Iterable[GradFn],
    hyper: LocalSgd,
    lr: float,
    correction: Callable[[Params], Params] | None = None,
) -> Params:
    """SGD from ``anchor``: w ← w − lr (clip(grad(w) + correction(w)) + weight_decay · w), once per gradient."""
    w: Params = anchor
    for gradient in steps:
        direction = gradient(w)
        if correction is not None:
            direction = trees.add(direction, correction(w))
        direction = trees.clip(direction, hyper.clip_norm)
        if hyper.weight_decay:
            direction = trees.axpy(hyper.weight_decay, w, direction)
        w = trees.axpy(-lr, direction, w)
    return w


