"""One client's round: the loop that agent and simulation both call, and personalization by SGD.

The caller sets torch's number of threads.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from fleet_core.algorithms import trees
from fleet_core.algorithms.methods import FineTune, Maml
from fleet_core.algorithms.seam import ClientState, GradFn, Method, Payload
from fleet_core.algorithms.trees import Params
from fleet_core.data.episodes import Episodes, batches
from fleet_core.errors import DataError, RoundError
from fleet_core.layout import Layout
from fleet_core.learning.gradients import Episode, entropy, estimator, leaves, recorded, value_and_gradient
from fleet_core.learning.models import NumpyParams, flops_per_sample, outputs, to_numpy, to_torch

Samples = np.ndarray[Any, Any]
Progress = Callable[[int, int], None]

CHUNK = 256
"""Samples per pass where a whole data set is gone through, so that memory does not grow with it."""


@dataclass(frozen=True)
class TrainResult:
    """What a device's round produced.

    update: the method's payload, float32. pending: the state that becomes the device's once the update is counted.
    loss: mean over the steps. samples: the device's training samples. left_out: class -> samples that no episode could
    use. flops: floating-point operations, from the shapes, or None where the model has layers that are not counted.
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
) -> TrainResult:
    """``hyper.local_steps`` local steps on the raw samples x [N, *shape], y int64 [N]; the same bits for equal ``rng``.

    broadcast: numpy arrays of the method's shared groups, and ``scalars["round"]``. state: the device's, empty for one
    that never took part. progress: called with (steps done, steps) after each.
    Raises DataError for samples that do not fit the layout, RoundError when the loss is no longer finite.
    """
    started, classes = time.perf_counter(), _check(method, layout, x, y)
    anchor = Payload(to_torch(broadcast.groups), broadcast.scalars)
    before = {role: to_torch(tree) for role, tree in state.items()} or method.client.init(anchor.groups, hyper)
    draws, left_out = _draws(method, x, y, hyper, rng)
    estimate = estimator(method.adaptation, model, classes, hyper)
    values: list[float] = []
    used = [0, 0]  # support and query samples

    def steps() -> Iterator[GradFn]:
        for step, episode in zip(range(hyper.local_steps), draws, strict=False):
            yield recorded(estimate(episode), values)
            used[:] = used[0] + len(episode.support_y), used[1] + len(episode.query_y)
            if not np.isfinite(values[-1]):
                raise RoundError(f"the loss is {values[-1]} at step {step + 1}", hint="lower client_lr or inner_lr")
            if progress:
                progress(step + 1, hyper.local_steps)

    with _training(model, int(rng.integers(2**31))):
        update, pending = method.client.run(anchor, before, steps(), hyper)
    forward, inner_steps = flops_per_sample(model, layout), getattr(hyper, "inner_steps", 0)
    return TrainResult(
        update=Payload(to_numpy(update.groups), update.scalars),
        pending={role: to_numpy(tree) for role, tree in pending.items()},
        loss=float(np.mean(values)),
        samples=len(y),
        steps=len(values),
        left_out=left_out(),
        flops=None if forward is None else flops_of(method.adaptation, forward, used[0], used[1], inner_steps),
        seconds=time.perf_counter() - started,
    )


def adapt(
    method: Method, model: nn.Module, layout: Layout, params: Params, x: Samples, y: Samples, hyper: Any
) -> NumpyParams:
    """Weights personalized by full-batch SGD on the support x, y: MAML's inner steps, or fine-tuning.

    Deterministic. The weights come back as they were for a personalizer that trains none. Raises DataError.
    """
    w: Params = to_torch(params)
    lr, steps = _adaptation(method, hyper)
    model.eval()
    if steps:
        _check(method, layout, x, y)
    for _ in range(steps):
        w = trees.axpy(-lr, _full_gradient(model, leaves(w), x, y), w)
    return to_numpy(w)


def predict_logits(model: nn.Module, params: Params, x: Samples) -> Samples:
    """Logits float32 [N, K] of raw samples under the numpy weights ``params``."""
    return _forward(model, params, x, "predict")


def embed(model: nn.Module, params: Params, x: Samples) -> Samples:
    """z float32 [N, D] of raw samples under the numpy weights ``params``."""
    return _forward(model, params, x, "embed")


def flops_of(adaptation: str, forward: int, support: int, query: int, inner_steps: int = 0) -> int:
    """Floating-point operations of a gradient, a backward pass counted as twice its forward pass.

    forward: of one sample. A sample in a differentiated inner step counts nine forward passes: three for the step, and
    twice that to differentiate it.
    """
    if adaptation == "proto":
        return 3 * forward * (support + query)
    passes = 9 if adaptation == "maml-exact" else 3
    return forward * (passes * inner_steps * support + 3 * query)


@contextlib.contextmanager
def _training(model: nn.Module, seed: int) -> Iterator[None]:
    """Training mode with the randomness of the model's own layers (dropout) from ``seed``; evaluation mode after."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model.train()
        try:
            yield
        finally:
            model.eval()


def _check(method: Method, layout: Layout, x: Samples, y: Samples) -> int:
    """The number of classes to train for. Raises DataError."""
    if x.shape[1:] != layout.input.shape or str(x.dtype) != layout.input.dtype:
        raise DataError(
            f"samples are {x.dtype} {list(x.shape[1:])}", expected=f"{layout.input.dtype} {list(layout.input.shape)}"
        )
    if len(x) != len(y) or not len(y):
        raise DataError(f"{len(x)} samples and {len(y)} labels", expected="as many labels as samples, at least one")
    if y.min() < 0:
        raise DataError(f"the label {y.min()} is negative")
    if y.max() >= len(layout.classes) and "head" in method.shared:
        raise DataError(
            f"the label {y.max()} is no class of the fleet, which has {len(layout.classes)}",
            hint="a method with prototypes takes labels of one's own",
        )
    return max(len(layout.classes), int(y.max()) + 1)


def _draws(
    method: Method, x: Samples, y: Samples, hyper: Any, rng: np.random.Generator
) -> tuple[Iterator[Episode], Callable[[], Mapping[int, int]]]:
    """An endless stream of episodes, and what they left out so far."""
    if method.adaptation == "none":
        drawn = ((index[:0], index) for index in batches(len(y), hyper.batch, rng))
        return (_episode(x, y, *pair) for pair in drawn), dict
    episodes = Episodes(y, hyper.support_batch, hyper.query_batch, rng)
    return (_episode(x, y, *pair) for pair in episodes), lambda: dict(episodes.left_out)


def _episode(x: Samples, y: Samples, support: Samples, query: Samples) -> Episode:
    return Episode(*_tensors(x, y, support), *_tensors(x, y, query))


def _tensors(x: Samples, y: Samples, index: Samples | slice) -> tuple[Tensor, Tensor]:
    return torch.tensor(x[index]), torch.tensor(y[index].astype(np.int64))


def _adaptation(method: Method, hyper: Any) -> tuple[float, int]:
    """(learning rate, steps) of the personalization."""
    if method.personalizer == "sgd" and isinstance(hyper, Maml):
        return hyper.inner_lr, hyper.inner_steps
    if method.personalizer == "sgd" and isinstance(hyper, FineTune):
        return hyper.finetune_lr, hyper.finetune_steps
    return 0.0, 0


def _full_gradient(model: nn.Module, w: Params, x: Samples, y: Samples) -> Params:
    """Gradient of the mean cross-entropy over all samples, chunk by chunk."""
    total = trees.apply(lambda a: torch.zeros_like(a), w)
    for start in range(0, len(y), CHUNK):
        x_chunk, y_chunk = _tensors(x, y, slice(start, start + CHUNK))
        _, gradient = value_and_gradient(entropy(model, x_chunk, y_chunk), w)
        total = trees.axpy(len(y_chunk) / len(y), gradient, total)
    return total


def _forward(model: nn.Module, params: Params, x: Samples, output: str) -> Samples:
    w = to_torch(params)
    model.eval()
    with torch.no_grad():
        parts = [outputs(model, w, torch.tensor(x[i : i + CHUNK]), output) for i in range(0, max(1, len(x)), CHUNK)]
    return torch.cat(parts).numpy()
