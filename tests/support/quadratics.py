"""A fleet whose losses are strongly convex quadratics, trained by the real client and server rules.

It models what changes the algebra and nothing else: updates that are not counted, devices that do not hear of it,
devices that enrol or leave, lossy codecs up and down. Gradients are exact and float64. ``fleet_of`` runs any method.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass, field, fields, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fleet_core.algorithms import aggregation, freezing
from fleet_core.algorithms.interface import ClientRule, ClientState, Payload, ServerRule, Update
from fleet_core.algorithms.methods.average import Averaging
from fleet_core.algorithms.methods.dyn import Dyn
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.algorithms.methods.scaf import Scaf
from fleet_core.base import trees
from fleet_core.base.moving_arrays import Moving
from fleet_core.base.trees import Params
from fleet_core.model import payloads, skipped_updates
from fleet_core.model.layout import MODEL_GROUPS as GROUPS
from fleet_core.model.layout import InputSpec, Layout, TensorSpec
from fleet_core.model.payloads import Sent
from fleet_core.model.skipped_updates import Measured
from fleet_core.robust.screening import Screened, Screening

Vector = NDArray[np.float64]
Send = Callable[[Params, Params | None], Sent]

SIZE = 6
MU, SMOOTHNESS = 0.5, 8.0
LAYOUT = Layout(
    model="quadratic",
    input=InputSpec(shape=(1,)),
    classes=("none",),
    embedding=1,
    tensors=(TensorSpec("a", "body", (2,)), TensorSpec("b", "body", (1, 3)), TensorSpec("c", "head", (1,))),
)


def part_of(groups: Params) -> Layout:
    """The layout of these arrays."""
    return replace(LAYOUT, tensors=tuple(t for t in LAYOUT.tensors if t.name in groups.get(t.group, {})))


def tree(vector: Vector) -> dict[str, dict[str, Any]]:
    """[6] as three arrays in two groups, so that the rules are tested on trees."""
    return {"body": {"a": vector[:2], "b": vector[2:5].reshape(1, 3)}, "head": {"c": vector[5:]}}


def vector(params: Params) -> Vector:
    """Arrays of the model in the layout's order."""
    params = trees.merged(LAYOUT.ordered(params), params)
    return np.concatenate([np.ravel(array) for named in params.values() for array in named.values()])


def bits(params: Params) -> bytes:
    return vector(params).tobytes()


@dataclass(frozen=True)
class Quadratic:
    """f(w) = ½ (w − minimum)ᵀ hessian (w − minimum)."""

    hessian: NDArray[np.float64]
    minimum: Vector

    def slope(self, w: Vector) -> Vector:
        return self.hessian @ (w - self.minimum)

    def gradient(self, at: Params) -> Params:
        """The gradient of f in the model's groups; with ``rates``, the gradient of Meta-SGD's f(w − a∘∇f(w)) in both.
        Groups of measured values hold the value instead: a margin, or a class mean of the mean of w."""
        w = vector(trees.merged(tree(np.zeros(SIZE)), trees.only(at, GROUPS)))
        if "rates" in at:
            slope, rates = self.slope(w), vector({"rates": at["rates"]})
            after = self.slope(w - rates * slope)
            return trees.mirrored(tree(after - self.hessian @ (rates * after)), tree(-slope * after), "rates")
        measured: dict[str, Any] = {"margin": {"value": float(np.linalg.norm(w))}}
        measured["prototypes"] = {"count": np.full(1, 4.0), "total": np.full((1, 1), 4 * w.mean())}
        return trees.only({**tree(self.slope(w)), **measured}, at)


def quadratics(count: int, seed: int, mu: float, smoothness: float) -> dict[str, Quadratic]:
    """Losses with eigenvalues in [mu, smoothness] along random axes and with random minima, by device name."""
    rng = np.random.default_rng(seed)
    losses = {}
    for i in range(count):
        axes, _ = np.linalg.qr(rng.normal(size=(SIZE, SIZE)))
        curvature = np.exp(rng.uniform(np.log(mu), np.log(smoothness), SIZE))
        losses[f"device-{i}"] = Quadratic(axes @ np.diag(curvature) @ axes.T, rng.normal(size=SIZE))
    return losses


def minimiser(losses: Iterable[Quadratic]) -> Vector:
    """The minimiser of the mean loss: (Σ H)⁻¹ Σ H c."""
    listed = list(losses)
    pull = np.sum([loss.hessian @ loss.minimum for loss in listed], axis=0)
    return np.linalg.solve(np.sum([loss.hessian for loss in listed], axis=0), pull)


def exact(own: Params, residual: Params | None) -> Sent:
    """An update that is not changed by encoding."""
    return Sent(b"", own if residual is None else trees.add(own, residual), None, None)


def unchanged(groups: Params) -> Params:
    """Devices receive exactly what the server sends."""
    return groups


@dataclass(frozen=True)
class Pending:
    """The state of a device if its update of ``round`` was counted."""

    round: int
    epoch: int
    state: ClientState
    residual: Params | None


@dataclass
class Device:
    loss: Quadratic
    samples: int = 1
    state: ClientState = field(default_factory=dict)
    residual: Params | None = None
    latest: Params | None = None
    epoch: int = 0
    pending: Pending | None = None


@dataclass
class QuadraticFleet:
    """``send`` encodes updates; ``publish`` returns what devices decode of what the server sends.

    down, given, personal: groups sent to all, sent to one device alone, and kept on a device; all start at zero.
    measures: gradients that a device's round takes beyond its steps. commits_anyway: a device commits even when its
    update was not counted (wrong). role: the state of device and server whose mean the identities are about. dual:
    which delta the dual follows; ``agent`` is the product's rule: the decoded one where there is no feedback.
    skip_below, screening: as in a fleet; ``skipped`` and ``trained`` count updates. lie(device, update): what a device
    sends in place of its update, before it is screened.
    """

    client: ClientRule
    server: ServerRule
    hyper: Any
    losses: Mapping[str, Quadratic]
    send: Send = exact
    publish: Callable[[Params], Params] = unchanged
    down: tuple[str, ...] = GROUPS
    given: tuple[str, ...] = ()
    personal: tuple[str, ...] = ()
    measures: int = 0
    commits_anyway: bool = False
    dual: str = "agent"
    role: str = "dual"
    skip_below: float = 0.0
    screening: Screening | None = None
    lie: Callable[[str, Params], Params] | None = None

    def __post_init__(self) -> None:
        self.facts: dict[str, str] = {}
        self.robust: Params = {}
        self.used: list[Update] = []
        self.skipped = self.trained = 0
        self.devices = {name: Device(loss, i) for i, (name, loss) in enumerate(self.losses.items(), start=1)}
        first = trees.widened(LAYOUT.extended(self.down, GROUPS).zeros((*self.down, *self.given, *self.personal)))
        self.first = trees.only(first, self.personal)
        self.state = self.server.init(trees.only(first, (*self.down, *self.given)), self.hyper)
        self.number = 0
        self.counted: dict[int, set[str]] = {}

    # A round ----------------------------------------------------------------------------------------------------------

    def round(
        self, active: Collection[str] = (), lost: Collection[str] = (), unheard: Collection[str] = (),
        frozen: Collection[str] = (),
    ) -> None:
        """One round of the ``active`` devices (all by default); updates of ``lost`` are not counted.

        ``unheard`` devices do not hear this round's record: they stay pending, and train again once they have heard.
        frozen: arrays that do not move.
        """
        moving = Moving(frozenset(frozen))
        self.number += 1
        sent = self.server.broadcast(self.state)
        broadcast = Payload(self.publish(sent.groups), {**sent.scalars, "round": float(self.number)})
        before = replace(self.server.as_received(self.state, broadcast.groups), round=self.number)
        names = aggregation.order(n for n in active or self.devices if self.devices[n].pending is None)
        given = {name: self.server.per_device(self.state, name) for name in names}
        updates = {name: self._train(self.devices[name], name, broadcast.beside(given[name]), moving) for name in names}
        counted = [self._claimed(update) for name, update in updates.items() if name not in lost]
        screened = Screened(counted, facts=self.facts)
        if counted and self.screening is not None:
            screened = self.screening.screen(counted, self.facts, self.robust)
        self.facts, self.robust, self.used = dict(screened.facts), screened.arrays, list(screened.used)
        self.counted[self.number] = {update.device for update in self.used}
        if counted:
            passing = Measured(self.used, self.skip_below)
            self.state = freezing.apply(self.server, before, passing, len(self.devices), self.hyper, moving)
            self.facts = passing.facts(self.facts)
        for name, device in self.devices.items():
            if name not in unheard:
                self._settle(name, device)

    def _claimed(self, update: Update) -> Update:
        if self.lie is None:
            return update
        return replace(update, payload=replace(update.payload, groups=self.lie(update.device, update.payload.groups)))

    def _train(self, device: Device, name: str, broadcast: Payload, moving: Moving) -> Update:
        if device.epoch != self.state.dual_epoch:  # state of another epoch is set aside
            device.state, device.residual, device.epoch = {}, None, self.state.dual_epoch
        before = device.state or self.client.init(broadcast.groups, self.first, self.hyper)
        fixed = moving.rest(trees.only(broadcast.groups, GROUPS))

        def gradient(at: Params) -> Params:
            return moving.of(device.loss.gradient(trees.merged(at, fixed)))

        received = Payload(moving.of(broadcast.groups), broadcast.scalars)
        steps = [gradient] * (self.hyper.local_steps + self.measures)
        payload, state = self.client.run(received, freezing.part_of(before, moving), steps, self.hyper)
        owed = device.residual
        due = None if owed is None else trees.merged(trees.zeros_like(payload.groups), moving.of(owed))
        sent = self._sent(payload.groups, due)
        error = trees.subtract(payload.groups, sent.decoded) if self.dual == "decoded" else sent.error
        if error is not None and self.dual != "own":
            state = self.client.after_loss(state, error, self.hyper, float(self.number))
        residual = trees.merged(moving.rest(owed or {}), sent.residual or {}) or None
        state = freezing.completed(state, before, moving)
        device.pending = Pending(self.number, self.state.dual_epoch, state, residual)
        moved = trees.add(payload.groups, trees.only(moving.of(broadcast.groups), payload.groups))
        device.latest = trees.merged(trees.only(broadcast.groups, payload.groups), moved)
        return Update(name, Payload(sent.decoded, payload.scalars), device.samples)

    def _sent(self, own: Params, residual: Params | None) -> Sent:
        intended = own if residual is None else trees.add(own, residual)
        skips = payloads.norm(intended) < skipped_updates.least_norm(self.skip_below, self.facts)
        self.trained, self.skipped = self.trained + 1, self.skipped + skips
        return payloads.withheld(intended) if skips else self.send(own, residual)

    def _settle(self, name: str, device: Device) -> None:
        pending, device.pending = device.pending, None
        if pending is not None and (self._was_counted(name, pending) or self.commits_anyway):
            device.state, device.residual, device.epoch = pending.state, pending.residual, pending.epoch

    def _was_counted(self, name: str, pending: Pending) -> bool:
        return name in self.counted[pending.round]

    # The fleet changes ------------------------------------------------------------------------------------------------

    def enrol(self, name: str, loss: Quadratic, *, told: bool = True) -> None:
        self.devices[name] = Device(loss, epoch=self.state.dual_epoch)
        if told:
            self.state = self.server.joined(self.state, len(self.devices))

    def leave(self, name: str, *, told: bool = True) -> None:
        del self.devices[name]
        if told:
            self.state = self.server.left(self.state, len(self.devices))

    # What the identities speak of -------------------------------------------------------------------------------------

    @property
    def model(self) -> Vector:
        return vector(self.state.model)

    @property
    def server_dual(self) -> Vector:
        return vector(self.state.memory[self.role])

    @property
    def optimum(self) -> Vector:
        return minimiser(device.loss for device in self.devices.values())

    @property
    def error(self) -> float:
        """Distance of the model from the minimiser of the mean of the enrolled devices' losses."""
        return float(np.linalg.norm(self.model - self.optimum))

    def mean_dual(self) -> Vector:
        """Mean of every device's g_i, including counted updates that the device has not heard of."""
        return self._mean(lambda state, residual: state.get(self.role))

    def mean_residual(self) -> Vector:
        """Mean of every device's e_i, likewise."""
        return self._mean(lambda state, residual: residual)

    def mean_latest(self) -> Vector:
        """1/m Σ w_i over the latest model of every device; w⁰ = 0 for a device that never took part."""
        latest = [np.zeros(SIZE) if d.latest is None else vector(d.latest) for d in self.devices.values()]
        return np.mean(latest, axis=0)

    def _mean(self, part: Callable[[ClientState, Params | None], Params | None]) -> Vector:
        parts = [part(*self._counted_state(name, device)) for name, device in self.devices.items()]
        return np.mean([np.zeros(SIZE) if found is None else vector(found) for found in parts], axis=0)

    def _counted_state(self, name: str, device: Device) -> tuple[ClientState, Params | None]:
        held: Device | Pending = device
        if device.pending is not None and self._was_counted(name, device.pending):
            held = device.pending
        return (held.state, held.residual) if held.epoch == self.state.dual_epoch else ({}, None)


def fleet_of(name: str, hyper: Any, losses: Mapping[str, Quadratic], **how: Any) -> QuadraticFleet:
    method = METHODS[name]
    return QuadraticFleet(
        method.client, method.server, hyper, losses, down=method.down, given=method.per_device,
        personal=method.personal,
        measures=int("prototypes" in method.shared), **how,
    )  # fmt: skip


DEVICES = quadratics(8, seed=0, mu=MU, smoothness=SMOOTHNESS)


def dyn(penalty: float = 2.0, *, losses: Mapping[str, Quadratic] = DEVICES, **how: Any) -> QuadraticFleet:
    """Eight devices that run PFLDyn at a rate below 2/(L + α)."""
    return _built(Dyn, {"penalty": penalty, "client_lr": 1 / (SMOOTHNESS + penalty)}, "feddyn", losses, how)


def scaf(local_steps: int = 5, *, losses: Mapping[str, Quadratic] = DEVICES, **how: Any) -> QuadraticFleet:
    """Eight devices that run PFLScaf with Kβ = K/L."""
    return _built(Scaf, {"local_steps": local_steps}, "scaffold", losses, {"role": "control", **how})


def average(local_steps: int, *, losses: Mapping[str, Quadratic] = DEVICES, **how: Any) -> QuadraticFleet:
    """Eight devices that run FedAvg."""
    return _built(Averaging, {"local_steps": local_steps}, "fedavg", losses, how)


def _built(
    hyper: type[Any], known: Mapping[str, Any], name: str, losses: Mapping[str, Quadratic], how: dict[str, Any]
) -> QuadraticFleet:
    """how: hyper-parameters and arguments of ``QuadraticFleet``."""
    ours = {field.name for field in fields(hyper)}
    settings = {"local_steps": 10, "client_lr": 1 / SMOOTHNESS, "clip_norm": 0.0, **known}
    changed = hyper(**{**settings, **{key: how.pop(key) for key in ours & how.keys()}})
    return fleet_of(name, changed, losses, **how)


def random_cohorts(names: Iterable[str], count: int, rounds: int, seed: int) -> list[list[str]]:
    """For each of ``rounds`` rounds, ``count`` different devices."""
    rng, listed = np.random.default_rng(seed), sorted(names)
    return [[listed[i] for i in rng.choice(len(listed), count, replace=False)] for _ in range(rounds)]


def int8(name: str = "int8") -> Send:
    """The product's codec of that name, with another seed for every update."""
    seeds = itertools.count()
    return lambda own, residual: payloads.send(name, own, residual, part_of(own), GROUPS, (next(seeds),))


def top_k(kept: int, *, feedback: bool) -> Send:
    """Sends the ``kept`` largest values."""

    def send(own: Params, residual: Params | None) -> Sent:
        intended = own if residual is None else trees.add(own, residual)
        values = vector(intended)
        values = np.where(np.isin(np.arange(SIZE), np.argsort(-np.abs(values))[:kept]), values, 0.0)
        decoded = tree(values)
        missing = trees.subtract(intended, decoded)
        return Sent(b"", decoded, missing if feedback else None, None if feedback else missing)

    return send
