"""Local training in a round by torch, for one client or several stacked clients; agents and simulations both use it.

The caller sets torch's number of threads. Arrays are moved to the model's torch device.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleet_core.algorithms.interface import ClientState, Method, Payload
from fleet_core.base import trees
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.base.trees import Params
from fleet_core.data.episodes import Draw
from fleet_core.learning import models
from fleet_core.learning.gradient_estimators import PADDED, Episode, Estimators, entropy
from fleet_core.learning.gradients import Gradient, direct
from fleet_core.learning.layer_flops import round_flops
from fleet_core.learning.models import outputs, to_numpy, to_torch
from fleet_core.learning.torch_augment import augmented
from fleet_core.model.layout import Layout
from fleet_core.training.local_round import NumpyParams, Progress, Round, TrainResult, train_one
from fleet_core.training.round_plans import CHUNK, Participant, Plan, Samples, of_equal_size, of_similar_size, plan_of


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
    on the device, ``seed``. state: the device's state, empty if it never took part. progress: called with
    (steps done, steps) after each step. moving: the arrays that are trained and sent in the update. Gradients of the
    others are computed only in inner steps, which adapt all arrays, as an answering device does.
    Raises DataError for samples that do not fit the layout, RoundError when the loss is not finite.
    """
    one = Participant(state, x, y, rng)
    return train_one(TorchEngine(model), method, layout, broadcast, one, hyper, progress, moving)


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
    this = Round(TorchEngine(model), method, layout, broadcast, hyper, moving)
    plans = [plan_of(method, one, hyper) for one in participants]
    results: dict[int, TrainResult] = {}
    for numbers in of_similar_size(plans) if padded and method.adaptation in PADDED else of_equal_size(plans):
        found = this.train([participants[i] for i in numbers], [plans[i] for i in numbers])
        results |= dict(zip(numbers, found, strict=True))
    return [results[i] for i in range(len(participants))]


class TorchEngine:
    """Gradients by torch's autograd, for any number of stacked clients."""

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._device = next(model.parameters()).device

    def arrays(self, params: Params) -> Params:
        return to_torch(params, self._device)

    def numpy(self, params: Params) -> NumpyParams:
        return to_numpy(params)

    def stacked(self, several: Sequence[Params]) -> Params:
        return trees.apply(lambda *arrays: torch.stack(arrays), *several)

    def holds(self, frozen: Params) -> bool:
        models.hold(self._model, frozen)
        return True

    def first_personal(self, method: Method, layout: Layout, scalars: Mapping[str, float]) -> Params:
        return first_personal(method, layout, scalars)

    @contextlib.contextmanager
    def running(self, seed: int) -> Iterator[None]:
        with flushed(), _training(self._model, seed):
            yield

    @contextlib.contextmanager
    def adapting(self) -> Iterator[None]:
        self._model.eval()
        with flushed():
            yield

    def entropy(self, x: Samples, y: Samples) -> Gradient:
        return direct(entropy(self._model, self._tensor(x), self._tensor(y)))

    def steps(
        self, adaptation: str, classes: int, hyper: Any, data: Sequence[tuple[Samples, Samples, np.random.Generator]]
    ) -> TorchSteps:
        held = [(self._tensor(x), self._tensor(y), rng) for x, y, rng in data]
        return TorchSteps(Estimators(self._model, classes, hyper, clients=len(data) > 1), adaptation, hyper, held)

    def _tensor(self, array: Samples) -> Tensor:
        return torch.from_numpy(np.require(array, requirements="W")).to(self._device)

    def losses(self, values: Sequence[Tensor]) -> Samples:
        found: Samples = torch.stack([value.reshape(-1) for value in values], 1).double().cpu().numpy()
        return found

    def flops(self, method: Method, layout: Layout, hyper: Any, plan: Plan, moving: Moving) -> int | None:
        return round_flops(method, self._model, layout, hyper, plan, moving)


class TorchSteps:
    """The gradients of a round. data: samples, labels and random generator of each client."""

    def __init__(
        self, estimators: Estimators, adaptation: str, hyper: Any,
        data: Sequence[tuple[Tensor, Tensor, np.random.Generator]],
    ) -> None:
        self._estimators, self._estimate = estimators, estimators.of(adaptation)
        self._hyper, self._data = hyper, data

    def gradient(self, draws: Sequence[Draw]) -> Gradient:
        episodes = [self._episode(*parts, draw) for parts, draw in zip(self._data, draws, strict=True)]
        estimate = self._estimate(episodes[0] if len(episodes) == 1 else Episode.stacked(episodes))

        def gradient(at: Params) -> tuple[Tensor, Params]:
            value, direction = estimate(at)
            return value.detach(), direction

        return gradient

    def _episode(self, x: Tensor, y: Tensor, rng: np.random.Generator, draw: Draw) -> Episode:
        parts: list[Tensor] = []
        for index in draw:
            rows = torch.from_numpy(index).to(x.device)
            parts += [augmented(self._hyper.augment, x[rows], rng), y[rows]]
        return Episode(*parts)

    def measure(self) -> Gradient:
        several = len(self._data) > 1
        x, y = (torch.stack(part) if several else part[0] for part in list(zip(*self._data, strict=True))[:2])
        return self._estimators.measure(x, y)


def first_personal(method: Method, layout: Layout, scalars: Mapping[str, float]) -> Params:
    """Initial values of the groups that ``method`` keeps on a device. They follow from the fleet's seed, so all devices
    have the same."""
    if not method.personal:
        return {}
    return trees.only(models.initial(layout, int(scalars.get("seed", 0))), method.personal)


def predict_logits(model: nn.Module, params: Params, x: Samples) -> Samples:
    """Logits float32 [N, K] of raw samples under the numpy weights ``params``."""
    return _forward(model, params, x, "predict")


def embed(model: nn.Module, params: Params, x: Samples) -> Samples:
    """z float32 [N, D] of raw samples under the numpy weights ``params``."""
    return _forward(model, params, x, "embed")


@contextlib.contextmanager
def flushed() -> Iterator[None]:
    """While the context lasts, this thread treats subnormal numbers (below 1.2e-38) as zero, if the processor supports
    it. On x86 they slow down gradients that vanish along a sequence (``benchmarks/simulation/subnormals.py``)."""
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


def _forward(model: nn.Module, params: Params, x: Samples, output: str) -> Samples:
    device = next(model.parameters()).device
    w = to_torch(params, device)
    model.eval()
    with torch.no_grad():
        starts = range(0, max(1, len(x)), CHUNK)
        parts = [outputs(model, w, torch.tensor(x[i : i + CHUNK]).to(device), output) for i in starts]
    return torch.cat(parts).cpu().numpy()
