"""Local training in a round, for one client or several stacked clients, with the gradients of an engine.

There are two engines: torch (``fleet_core.learning.local_training``) and the graph ``train`` of a fleet
(``graph_engine``). Draws, client rules and results are the same; an engine has the arrays and the gradients.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Protocol

import numpy as np

from fleet_core.algorithms import freezing
from fleet_core.algorithms.interface import INNER, OWN_LABELS, ClientState, GradFn, Method, Payload
from fleet_core.base import trees
from fleet_core.base.errors import ConfigError, DataError, RoundError
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.base.trees import Params
from fleet_core.data import model_input
from fleet_core.data.episodes import Draw
from fleet_core.model.layout import MODEL_GROUPS, Layout
from fleet_core.training.inner_steps import Gradient
from fleet_core.training.round_plans import Participant, Plan, Samples, plan_of

NumpyParams = dict[str, dict[str, np.ndarray[Any, Any]]]
Progress = Callable[[int, int], None]


@dataclass(frozen=True)
class TrainResult:
    """The result of local training.

    update: the method's payload, float32. pending: the device's state after the update is counted. loss: mean over the
    steps. samples: number of training samples. left_out: class -> number of samples that no episode could use. flops:
    floating-point operations, computed from shapes; None when the model has layers that are not counted.
    """

    update: Payload
    pending: ClientState
    loss: float
    samples: int
    steps: int
    left_out: Mapping[int, int]
    flops: int | None
    seconds: float


class Steps(Protocol):
    """The gradients of one round of one client, or of several that are stacked."""

    def gradient(self, draws: Sequence[Draw]) -> Gradient:
        """The gradient of a step on these samples, a draw for each client."""

    def measure(self) -> Gradient:
        """Totals and counts per class over all samples, in the group ``prototypes``, and no gradient."""


class Engine(Protocol):
    """Arrays and gradients. ``arrays`` and ``numpy`` copy between numpy and the engine's arrays; ``numpy`` gives
    float32. Trees that it is not given as numpy are trees of its own arrays."""

    def arrays(self, params: Params) -> Params: ...

    def numpy(self, params: Params) -> NumpyParams: ...

    def stacked(self, several: Sequence[Params]) -> Params:
        """Several clients' trees as one whose arrays have a new first axis."""

    def holds(self, frozen: Params) -> bool:
        """Keeps ``frozen`` arrays for all later gradients if it can; False if each gradient must be given them."""

    def first_personal(self, method: Method, layout: Layout, scalars: Mapping[str, float]) -> Params:
        """Initial values, in numpy, of the groups that ``method`` keeps on a device; the same on all devices."""

    def running(self, seed: int) -> contextlib.AbstractContextManager[None]:
        """The context in which steps are taken. seed: of the model's random layers."""

    def adapting(self) -> contextlib.AbstractContextManager[None]:
        """The context in which a model is personalized: its random layers draw nothing."""

    def entropy(self, x: Samples, y: Samples) -> Gradient:
        """The gradient of the head's mean cross-entropy on all of x, y, in the whole model."""

    def steps(
        self, adaptation: str, classes: int, hyper: Any, data: Sequence[tuple[Samples, Samples, np.random.Generator]]
    ) -> Steps:
        """data: of each client samples, labels below ``classes``, and the source of what is random in a step."""

    def losses(self, values: Sequence[Any]) -> Samples:
        """The values of ``Gradient``s as float64 [clients, gradients]."""

    def flops(self, method: Method, layout: Layout, hyper: Any, plan: Plan, moving: Moving) -> int | None: ...


class Round:
    """A round's method and broadcast, which its clients share. broadcast: numpy arrays of the groups that go down. Its
    scalars include ``round`` and, when the method keeps groups on the device, ``seed``. moving: the arrays that are
    trained, and that the update has; no rule sees the others, but inner steps adapt all arrays, as a device does that
    answers. Raises ConfigError as ``check_task`` does."""

    def __init__(self, engine: Engine, method: Method, layout: Layout, broadcast: Payload, hyper: Any, moving: Moving):
        check_task(method, layout)
        self._engine, self._method, self._layout, self._hyper = engine, method, layout, hyper
        self._moving = moving
        self._groups = engine.arrays(broadcast.groups)
        self._scalars = broadcast.scalars
        self._personal: Params | None = None

    def train(
        self, clients: Sequence[Participant], plans: Sequence[Plan], progress: Progress | None = None
    ) -> list[TrainResult]:
        """Trains the clients, stacked when there are several. Raises DataError for samples that do not fit the layout,
        RoundError when a loss is not finite."""
        started, engine = time.perf_counter(), self._engine
        classes = max(check(self._method, self._layout, one.x, one.y) for one in clients)
        several = len(clients) > 1
        received = [self._received(one) for one in clients]
        before = [self._state(one.state, whole) for one, whole in zip(clients, received, strict=True)]
        fixed = self._fixed(received[0], before[0])
        groups = [self._moving.of(whole) for whole in received]
        parts = [freezing.part_of(state, self._moving) for state in before]
        anchor = Payload(engine.stacked(groups) if several else groups[0], self._scalars)
        roles = {role: engine.stacked([state[role] for state in parts]) for role in parts[0]} if several else parts[0]
        values: list[Any] = []
        steps = self._steps(clients, plans, classes, values, progress)
        if fixed:
            steps = map(partial(self._beside, engine.stacked([fixed] * len(clients)) if several else fixed), steps)
        stacked = trees.side_by_side() if several else contextlib.nullcontext()
        with engine.running(plans[0].seed), stacked:
            update, pending = self._method.client.run(anchor, roles, steps, self._hyper)
        losses_CK = engine.losses(values)
        _check_finite(losses_CK, len(plans[0].draws))
        seconds = (time.perf_counter() - started) / len(clients)
        return [
            self._result(one, plan, self._of_client(update, i, several), freezing.completed(
                {role: self._arrays(tree, i, several) for role, tree in pending.items()},
                {role: engine.numpy(self._moving.rest(tree)) for role, tree in before[i].items()}, self._moving,
            ), float(np.mean(losses_CK[i])), seconds)
            for i, (one, plan) in enumerate(zip(clients, plans, strict=True))
        ]

    def _received(self, one: Participant) -> Params:
        return {**self._groups, **self._engine.arrays(one.per_device)} if one.per_device else self._groups

    def _state(self, state: ClientState, received: Params) -> ClientState:
        if state:
            return {role: self._engine.arrays(tree) for role, tree in state.items()}
        if self._personal is None:
            first = self._engine.first_personal(self._method, self._layout, self._scalars)
            self._personal = self._engine.arrays(first)
        return self._method.client.init(received, self._personal, self._hyper)

    def _fixed(self, received: Params, state: ClientState) -> Params:
        """The frozen arrays that a gradient must be given. Inner steps take and change them."""
        own = trees.only(state.get("personal", {}), self._method.personal)
        frozen = self._moving.rest(trees.only({**received, **own}, MODEL_GROUPS))
        if not frozen or self._method.adaptation in INNER:
            return frozen
        return {} if self._engine.holds(frozen) else frozen

    def _beside(self, fixed: Params, gradient: GradFn) -> GradFn:
        return lambda at: self._moving.of(gradient(trees.merged(at, fixed)))

    def _steps(
        self, clients: Sequence[Participant], plans: Sequence[Plan], classes: int, values: list[Any],
        progress: Progress | None,
    ) -> Iterator[GradFn]:
        labels = [targets(self._layout, one.y) for one in clients]
        if self._method.adaptation in OWN_LABELS:
            labels = [np.unique(y, return_inverse=True)[1].reshape(-1) for y in labels]
            classes = max(int(y.max()) + 1 for y in labels)
        data = [(one.x, y, one.rng) for one, y in zip(clients, labels, strict=True)]
        steps, total = self._engine.steps(self._method.adaptation, classes, self._hyper, data), len(plans[0].draws)
        for step in range(total):
            yield _recorded(steps.gradient([plan.draws[step] for plan in plans]), values)
            if progress:
                progress(step + 1, total)
        if self._method.adaptation == "fedproto":
            yield lambda at: steps.measure()(at)[1]

    def _result(
        self, one: Participant, plan: Plan, update: Payload, pending: ClientState, loss: float, seconds: float
    ) -> TrainResult:
        return TrainResult(
            update=update,
            pending=pending,
            loss=loss,
            samples=len(one.y),
            steps=len(plan.draws),
            left_out=plan.left_out,
            flops=self._engine.flops(self._method, self._layout, self._hyper, plan, self._moving),
            seconds=seconds,
        )

    def _arrays(self, tree: Params, client: int, several: bool) -> NumpyParams:
        return self._engine.numpy(trees.apply(lambda a: a[client], tree) if several else tree)

    def _of_client(self, update: Payload, client: int, several: bool) -> Payload:
        found: Mapping[str, Any] = update.scalars
        scalars = {name: float(value[client] if several else value) for name, value in found.items()}
        return Payload(self._arrays(update.groups, client, several), scalars)


def train_one(
    engine: Engine, method: Method, layout: Layout, broadcast: Payload, one: Participant, hyper: Any,
    progress: Progress | None = None, moving: Moving = EVERYTHING,
) -> TrainResult:
    """Takes ``hyper.local_steps`` local steps. Arguments and errors as in ``Round``."""
    this = Round(engine, method, layout, broadcast, hyper, moving)
    return this.train([one], [plan_of(method, one, hyper)], progress)[0]


def _recorded(gradient: Gradient, values: list[Any]) -> GradFn:
    """``gradient`` as a ``GradFn`` that appends the loss to ``values``."""

    def step(at: Params) -> Params:
        value, direction = gradient(at)
        values.append(value)
        return direction

    return step


def _check_finite(losses_CK: Samples, steps: int) -> None:
    """losses_CK: of each client and gradient; a step may compute several gradients."""
    bad = np.argwhere(~np.isfinite(losses_CK))
    if len(bad):
        client, number = bad[bad[:, 1].argmin()]
        step = number * steps // losses_CK.shape[1] + 1
        raise RoundError(f"the loss is {losses_CK[client, number]} at step {step}", hint="lower client_lr or inner_lr")


def check_task(method: Method, layout: Layout) -> None:
    """Raises ConfigError for a method that cannot learn the layout's task."""
    if layout.task is not None and method.needs_classes:
        raise ConfigError(f"{method.name} cannot learn {layout.task.kind}: it {method.needs_classes}",
                          hint="use a method that trains a head, such as fedavg or per-fedavg-fo")


def targets(layout: Layout, y: Samples) -> Samples:
    """The targets of the loss: labels int64 [N], or standardized targets float32 [N, K]."""
    return layout.truths(y)


def check(method: Method, layout: Layout, x: Samples, y: Samples) -> int:
    """The number of classes, or of a task's outputs, to train on raw samples x, y. Raises DataError when they do not
    fit layout and method."""
    if x.shape[1:] != layout.input.shape or str(x.dtype) != layout.input.dtype:
        raise DataError(
            f"samples are {x.dtype} {list(x.shape[1:])}", expected=f"{layout.input.dtype} {list(layout.input.shape)}",
            hint=model_input.hint(x, layout.input),
        )  # fmt: skip
    if len(x) != len(y) or not len(y):
        raise DataError(f"{len(x)} samples and {len(y)} labels", expected="as many labels as samples, at least one")
    if layout.model in model_input.TOKENS:
        vocabulary = layout.options.get("vocabulary", len(layout.answers))
        if x.min() < 0 or x.max() >= vocabulary:
            raise DataError(f"a token is {x.max() if x.min() >= 0 else x.min()}", expected=f"0 to {vocabulary - 1}")
    if layout.task is not None:
        layout.task.standardized(y)
        return len(layout.answers)
    if y.min() < 0:
        raise DataError(f"the label {y.min()} is negative")
    if y.max() >= len(layout.classes) and method.adaptation not in OWN_LABELS:
        raise DataError(
            f"the label {y.max()} is not a class of the fleet, which has {len(layout.classes)}",
            hint="for classes of the device's own use a method whose class means stay on the device",
        )
    return max(len(layout.classes), int(y.max()) + 1)
