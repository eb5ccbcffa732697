"""Local training in a round, for one client or several stacked clients; agents and simulations both use it.

The caller sets torch's number of threads. Arrays are moved to the model's torch device.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleet_core.algorithms import freezing
from fleet_core.algorithms.interface import ClientState, GradFn, Method, Payload
from fleet_core.base import trees
from fleet_core.base.errors import DataError, RoundError
from fleet_core.base.moving import EVERYTHING, Moving
from fleet_core.base.trees import Params
from fleet_core.data import model_input
from fleet_core.data.episodes import Draw
from fleet_core.learning import models
from fleet_core.learning.architectures import TOKENS
from fleet_core.learning.augment import augmented
from fleet_core.learning.flops import round_flops
from fleet_core.learning.gradient_estimators import EPISODIC, INNER, PADDED, Episode, Estimators, recorded
from fleet_core.learning.models import NumpyParams, outputs, to_numpy, to_torch
from fleet_core.learning.round_plans import Participant, Plan, Samples, of_equal_size, of_similar_size, plan_of
from fleet_core.model.layout import MODEL_GROUPS, Layout

Progress = Callable[[int, int], None]

CHUNK = 256
"""Samples per forward pass over a whole data set, so that memory does not grow with its size."""


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


def train_round(
    method: Method,
    model: nn.Module,
    layout: Layout,
    broadcast: Payload,
    state: ClientState,
    x: Samples,
    y: Samples,
    hyper: Any,
    rng: np.random.Generator,
    progress: Progress | None = None,
    moving: Moving = EVERYTHING,
) -> TrainResult:
    """Takes ``hyper.local_steps`` local steps on raw samples x [N, *shape], y int64 [N]. Deterministic given ``rng``.

    broadcast: numpy arrays of the groups that go down; its scalars include ``round`` and, when the method keeps groups
    on the device, ``seed``. state: the device's, empty for one that never took part. progress: called with
    (steps done, steps) after each step. moving: the arrays that are trained, and that the update has; no gradient of
    the others is computed, except by inner steps, which adapt all arrays as a device does that answers.
    Raises DataError for samples that do not fit the layout, RoundError when the loss is not finite.
    """
    one = Participant(state, x, y, rng)
    this = _Round(method, model, layout, broadcast, hyper, moving)
    return this.train([one], [plan_of(method, one, hyper)], progress)[0]


def train_side_by_side(
    method: Method,
    model: nn.Module,
    layout: Layout,
    broadcast: Payload,
    participants: Sequence[Participant],
    hyper: Any,
    padded: bool = False,
    moving: Moving = EVERYTHING,
) -> list[TrainResult]:
    """``train_round`` for many clients at once: clients with equal batch sizes are stacked along a new first axis of
    every array. Returns results in the order of ``participants``. They equal those of ``train_round`` up to rounding
    and to the draws of random layers. Raises the same errors, without the client's name.

    padded: also stack clients whose numbers of drawn samples differ by at most a factor of two, by padding their
    batches with samples that the loss ignores. Requires a model that treats every sample independently. moving: as in
    ``train_round``; frozen arrays that stay on devices are taken to be the same on all.
    """
    this = _Round(method, model, layout, broadcast, hyper, moving)
    plans = [plan_of(method, one, hyper) for one in participants]
    results: dict[int, TrainResult] = {}
    for numbers in of_similar_size(plans) if padded and method.adaptation in PADDED else of_equal_size(plans):
        found = this.train([participants[i] for i in numbers], [plans[i] for i in numbers])
        results |= dict(zip(numbers, found, strict=True))
    return [results[i] for i in range(len(participants))]


class _Round:
    """A round's method, model and broadcast, which its clients share."""

    def __init__(
        self, method: Method, model: nn.Module, layout: Layout, broadcast: Payload, hyper: Any, moving: Moving
    ):
        self._method, self._model, self._layout, self._hyper = method, model, layout, hyper
        self._moving = moving
        self._device = next(model.parameters()).device
        self._groups = to_torch(broadcast.groups, self._device)
        self._scalars = broadcast.scalars
        self._personal: Params | None = None

    def train(
        self, clients: Sequence[Participant], plans: Sequence[Plan], progress: Progress | None = None
    ) -> list[TrainResult]:
        """Trains the clients, stacked when there are several."""
        started = time.perf_counter()
        classes = max(check(self._method, self._layout, one.x, one.y) for one in clients)
        several = len(clients) > 1
        received = [self._received(one) for one in clients]
        before = [self._state(one.state, whole) for one, whole in zip(clients, received, strict=True)]
        fixed = self._fixed(received[0], before[0])
        groups = [self._moving.of(whole) for whole in received]
        parts = [freezing.part_of(state, self._moving) for state in before]
        anchor = Payload(self._stacked(groups) if several else groups[0], self._scalars)
        roles = {role: self._stacked([state[role] for state in parts]) for role in parts[0]} if several else parts[0]
        values: list[Tensor] = []
        steps = self._steps(clients, plans, classes, values, progress)
        if fixed:
            steps = map(partial(self._beside, self._stacked([fixed] * len(clients)) if several else fixed), steps)
        stacked = trees.side_by_side() if several else contextlib.nullcontext()
        with flushed(), _training(self._model, plans[0].seed), stacked:
            update, pending = self._method.client.run(anchor, roles, steps, self._hyper)
        losses_CK = torch.stack([value.reshape(-1) for value in values], 1).double().cpu().numpy()
        _check_finite(losses_CK, len(plans[0].draws))
        seconds = (time.perf_counter() - started) / len(clients)
        return [
            self._result(one, plan, _of_client(update, i, several), freezing.completed(
                {role: _arrays(tree, i, several) for role, tree in pending.items()},
                {role: to_numpy(self._moving.rest(tree)) for role, tree in before[i].items()}, self._moving,
            ), float(np.mean(losses_CK[i])), seconds)
            for i, (one, plan) in enumerate(zip(clients, plans, strict=True))
        ]

    def _received(self, one: Participant) -> Params:
        return {**self._groups, **to_torch(one.per_device, self._device)} if one.per_device else self._groups

    def _state(self, state: ClientState, received: Params) -> ClientState:
        if state:
            return {role: to_torch(tree, self._device) for role, tree in state.items()}
        if self._personal is None:
            self._personal = to_torch(first_personal(self._method, self._layout, self._scalars), self._device)
        return self._method.client.init(received, self._personal, self._hyper)

    def _fixed(self, received: Params, state: ClientState) -> Params:
        """The frozen arrays for inner steps. For other gradients the network holds them, and requires none of them."""
        own = trees.only(state.get("personal", {}), self._method.personal)
        frozen = self._moving.rest(trees.only({**received, **own}, MODEL_GROUPS))
        if not frozen or self._method.adaptation in INNER:
            return frozen
        models.hold(self._model, frozen)
        return {}

    def _beside(self, fixed: Params, gradient: GradFn) -> GradFn:
        return lambda at: self._moving.of(gradient(trees.merged(at, fixed)))

    def _steps(
        self, clients: Sequence[Participant], plans: Sequence[Plan], classes: int, values: list[Tensor],
        progress: Progress | None,
    ) -> Iterator[GradFn]:
        labels = [one.y.astype(np.int64) for one in clients]
        if self._method.adaptation in EPISODIC:
            labels = [np.unique(y, return_inverse=True)[1].reshape(-1) for y in labels]
            classes = max(int(y.max()) + 1 for y in labels)
        estimators = Estimators(self._model, classes, self._hyper, clients=len(clients) > 1)
        estimate = estimators.of(self._method.adaptation)
        data = [(self._tensor(one.x), self._tensor(y), one.rng) for one, y in zip(clients, labels, strict=True)]
        total = len(plans[0].draws)
        for step in range(total):
            episodes = [self._episode(*parts, plan.draws[step]) for parts, plan in zip(data, plans, strict=True)]
            yield recorded(estimate(episodes[0] if len(episodes) == 1 else Episode.stacked(episodes)), values)
            if progress:
                progress(step + 1, total)
        if self._method.adaptation == "fedproto":
            x, y = (torch.stack(part) if len(part) > 1 else part[0] for part in list(zip(*data, strict=True))[:2])
            yield lambda at: estimators.measure(x, y)(at)[1]

    def _episode(self, x: Tensor, y: Tensor, rng: np.random.Generator, draw: Draw) -> Episode:
        parts: list[Tensor] = []
        for index in draw:
            rows = torch.from_numpy(index).to(self._device)
            parts += [augmented(self._hyper.augment, x[rows], rng), y[rows]]
        return Episode(*parts)

    def _tensor(self, array: Samples) -> Tensor:
        return torch.from_numpy(np.require(array, requirements="W")).to(self._device)

    @staticmethod
    def _stacked(several: Sequence[Params]) -> Params:
        return trees.apply(lambda *arrays: torch.stack(arrays), *several)

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
            flops=round_flops(self._method, self._model, self._layout, self._hyper, plan, self._moving),
            seconds=seconds,
        )


def first_personal(method: Method, layout: Layout, scalars: Mapping[str, float]) -> Params:
    """Initial values of the groups that ``method`` keeps on a device. They follow from the fleet's seed, so all devices
    have the same."""
    if not method.personal:
        return {}
    return trees.only(models.initial(layout, int(scalars.get("seed", 0))), method.personal)


def _check_finite(losses_CK: Samples, steps: int) -> None:
    """losses_CK: of each client and gradient; a step may compute several gradients."""
    bad = np.argwhere(~np.isfinite(losses_CK))
    if len(bad):
        client, number = bad[bad[:, 1].argmin()]
        step = number * steps // losses_CK.shape[1] + 1
        raise RoundError(f"the loss is {losses_CK[client, number]} at step {step}", hint="lower client_lr or inner_lr")


def _arrays(tree: Params, client: int, several: bool) -> NumpyParams:
    return to_numpy(trees.apply(lambda a: a[client], tree) if several else tree)


def _of_client(update: Payload, client: int, several: bool) -> Payload:
    found: Mapping[str, Any] = update.scalars
    scalars = {name: float(value[client] if several else value) for name, value in found.items()}
    return Payload(_arrays(update.groups, client, several), scalars)


def predict_logits(model: nn.Module, params: Params, x: Samples) -> Samples:
    """Logits float32 [N, K] of raw samples under the numpy weights ``params``."""
    return _forward(model, params, x, "predict")


def embed(model: nn.Module, params: Params, x: Samples) -> Samples:
    """z float32 [N, D] of raw samples under the numpy weights ``params``."""
    return _forward(model, params, x, "embed")


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """Within it this thread treats subnormal numbers (below 1.2e-38) as zero, if the processor supports it. On x86 they
    slow down gradients that vanish along a sequence (``benchmarks/simulation/subnormals.py``)."""
    before = float(torch.tensor(1e-40) * 1.0) == 0
    torch.set_flush_denormal(True)
    try:
        yield
    finally:
        torch.set_flush_denormal(before)


@contextlib.contextmanager
def _training(model: nn.Module, seed: int) -> Iterator[None]:
    """Training mode, with the model's random layers (dropout) seeded by ``seed``; evaluation mode afterwards."""
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)  # torch.manual_seed would format the stack even without a GPU
        if next(model.parameters()).is_cuda:
            torch.cuda.manual_seed(seed)
        model.train()
        try:
            yield
        finally:
            model.eval()


def check(method: Method, layout: Layout, x: Samples, y: Samples) -> int:
    """The number of classes to train on raw samples x, y. Raises DataError when they do not fit layout and method."""
    if x.shape[1:] != layout.input.shape or str(x.dtype) != layout.input.dtype:
        raise DataError(
            f"samples are {x.dtype} {list(x.shape[1:])}", expected=f"{layout.input.dtype} {list(layout.input.shape)}",
            hint=model_input.hint(x, layout.input),
        )  # fmt: skip
    if len(x) != len(y) or not len(y):
        raise DataError(f"{len(x)} samples and {len(y)} labels", expected="as many labels as samples, at least one")
    if layout.model in TOKENS:
        vocabulary = layout.options.get("vocabulary", len(layout.classes))
        if x.min() < 0 or x.max() >= vocabulary:
            raise DataError(f"a token is {x.max() if x.min() >= 0 else x.min()}", expected=f"0 to {vocabulary - 1}")
    if y.min() < 0:
        raise DataError(f"the label {y.min()} is negative")
    if y.max() >= len(layout.classes) and method.personalizer not in ("proto", "gp"):
        raise DataError(
            f"the label {y.max()} is not a class of the fleet, which has {len(layout.classes)}",
            hint="for classes of the device's own use a method whose class means stay on the device",
        )
    return max(len(layout.classes), int(y.max()) + 1)


def _forward(model: nn.Module, params: Params, x: Samples, output: str) -> Samples:
    device = next(model.parameters()).device
    w = to_torch(params, device)
    model.eval()
    with torch.no_grad():
        starts = range(0, max(1, len(x)), CHUNK)
        parts = [outputs(model, w, torch.tensor(x[i : i + CHUNK]).to(device), output) for i in starts]
    return torch.cat(parts).cpu().numpy()
