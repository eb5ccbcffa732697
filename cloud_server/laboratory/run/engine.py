"""Does one run: select → broadcast → train → close → evaluate, with the fleet's algorithms, codecs and rules.

A stopped run continues after the last round whose checkpoint is on the disk. With a fleet's settings (seed, cohort,
codecs) it computes what the fleet computes, bit for bit.
"""

from __future__ import annotations

import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.broadcast.models_down import encode_model, moved, per_device_models
from cloud_server.broadcast.served_model import Audience, asked_next, encode_served, is_new
from cloud_server.laboratory.plan.experiment import PLAIN, Experiment, Run
from cloud_server.laboratory.plan.frozen_arrays import RunArrays
from cloud_server.laboratory.plan.model_downloads import SINCE, ModelDownloads, Sent, model_since, per_device_bytes
from cloud_server.laboratory.plan.workload import Workload
from cloud_server.laboratory.run import round_figures
from cloud_server.laboratory.run.device_work import (
    TEST_STEP,
    DeviceEvaluation,
    EvaluationTask,
    TrainedDevice,
    TrainingTask,
)
from cloud_server.laboratory.run.executors import Executor
from cloud_server.laboratory.run.other_models import OtherModels
from cloud_server.laboratory.run.round_figures import Costs
from cloud_server.laboratory.run.run_folder import Store
from cloud_server.records.checkpoint import Checkpoint
from cloud_server.records.fleet_settings import SERVE_MIN_CHANGE
from fleet_core.algorithms import aggregation, freezing
from fleet_core.algorithms.interface import Payload, Update
from fleet_core.base import schema, storage, trees
from fleet_core.base.errors import RoundError
from fleet_core.base.moving_arrays import EVERYTHING
from fleet_core.base.trees import Params
from fleet_core.model import choose_codec, payloads, skipped_updates
from fleet_core.model.choose_codec import Choice, Past
from fleet_core.model.layout import MODEL_GROUPS, Layout
from fleet_core.model.skipped_updates import Measured
from fleet_core.privacy import gaussian
from fleet_core.privacy.accountant import Accountant, Spent
from fleet_core.privacy.gaussian import NoisedSum
from fleet_core.privacy.settings import CENTRAL
from fleet_core.protocol import cohort
from fleet_core.robust.screening import Screening

IN_MEMORY_BYTES = 256 << 20
CHECKPOINT_S = 2.0
MAX_UPDATE_BYTES = 1 << 34
MODELS = "models"
"""Key in a round's figures: kind of model -> figures under that model instead of the served one."""


class Stopped(Exception):
    """The user stopped the run; the same command continues it."""


@dataclass(frozen=True, eq=False)
class Laboratory:
    """The environment of a run. stopped(): whether to stop now. told: called with each round's figures."""

    experiment: Experiment
    workload: Workload
    layout: Layout
    first: Params
    executor: Executor
    costs: Costs
    stopped: Callable[[], bool] = lambda: False
    told: Callable[[Mapping[str, Any]], None] = lambda row: None
    clock: Callable[[], float] = time.monotonic


class Engine:
    """Runs ``run``, whose files are in ``store``."""

    def __init__(self, lab: Laboratory, run: Run, store: Store):
        self._lab, self._run, self._store = lab, run, store
        self._method, self._hyper = run.method, run.hyper
        self._wire = lab.layout.extended(self._method.down, self._method.shared)
        self._spent = round_figures.Spent()
        self._sent: tuple[int, Sent] | None = None
        self._saved, self._unsaved = lab.clock(), set[str]()
        self._codecs = lab.experiment.codecs(self._method)
        self._arrays = RunArrays(lab.experiment.train, lab.layout, self._method)
        self._privacy = private = lab.experiment.privacy
        bound = private.max_update_norm(lab.experiment.max_update_norm)
        self._screening = Screening(self._method, lab.experiment.robust, bound)
        self._told = Spent(Accountant(private.delta, self._drawn())) if private.on else None
        self._skip_below = lab.experiment.skip_below if self._method.cumulative else 0.0  # as in a fleet
        self._past: list[Mapping[str, Any]] = []
        self._downloads = ModelDownloads(lab.experiment, run, lab.workload.names, self._arrays, self._past)

    def run(self) -> None:
        """Runs until the budget is spent. Raises Stopped, and RoundError when a round counts no update."""
        checkpoint = self._resume()
        while not self._over(checkpoint.round):
            if self._lab.stopped():
                self._save(checkpoint)
                raise Stopped
            checkpoint = self._round(checkpoint)
        self._save(checkpoint)

    def _over(self, number: int) -> bool:
        budget = self._lab.experiment.budget
        return (number >= budget.rounds or self._spent.reaches(budget.payload_bytes, budget.joules)
                or self._private_over())

    def _private_over(self) -> bool:
        """Whether epsilon would exceed its limit after another round."""
        limit, noise = self._privacy.epsilon, self._privacy.noise_multiplier
        return self._told is not None and limit is not None and self._told.after_another(noise) > limit

    def _drawn(self) -> tuple[int, int] | None:
        """(devices drawn per round, all devices) if epsilon is for observers who do not see which were drawn, else
        None."""
        return (self._lab.experiment.cohort, len(self._lab.workload.names)) if self._privacy.amplified else None

    def _tell(self, number: int) -> dict[str, Any]:
        """Adds the round to the privacy spent, and returns its figures; empty if updates are not private. For observers
        who do not see which devices were drawn, every device spends the same in each round."""
        if self._told is None:
            return {}
        asked = ["each"] if self._privacy.amplified else self._downloads.asked(number)
        self._told.add(asked, self._privacy.noise_multiplier)
        return {"privacy": {"epsilon": self._told.epsilon, "rounds": self._told.most}}

    def _resume(self) -> Checkpoint:
        besides = tuple(group for group in self._method.down if group not in MODEL_GROUPS)
        first = self._wire.ordered({**self._lab.first, **self._wire.zeros(besides)})
        kept = self._store.resume(first)
        for row in self._store.rounds():
            self._spent.add(row)
            self._past.append(row)
            self._arrays.add(row)
            self._tell(row["round"])
        start = self._method.server.init(trees.widened(trees.only(first, self._method.received)), self._hyper)
        self._others = OtherModels(
            self._lab.experiment.evaluation.models or (), self._method, self._hyper, self._store.folder,
            self._lab.workload.names, start.model,
        )
        self._others.resume(0 if kept is None else kept.round)
        return Checkpoint(0, start) if kept is None else kept

    def _save(self, checkpoint: Checkpoint) -> None:
        if checkpoint.round:
            self._store.save(checkpoint, self._unsaved)
            self._others.saved(checkpoint.round)
        self._unsaved, self._saved = set(), self._lab.clock()

    # A round ----------------------------------------------------------------------------------------------------------

    def _round(self, before: Checkpoint) -> Checkpoint:
        started, number = self._lab.clock(), before.round + 1
        chosen, arrays = {way: self._chosen(way) for way in choose_codec.WAYS}, self._arrays.chosen()
        sent = self._published(before, chosen["down"].codec)
        asked = aggregation.order(self._downloads.asked(number))
        broadcast = Payload(sent.decoded, {**sent.scalars, "round": float(number), "seed": float(self._run.seed)})
        taken = _Taken(self._store.folder / "spool")
        per_device = per_device_models(self._method, before.state, asked)
        least_norm = skipped_updates.least_norm(self._skip_below, before.facts)
        task = TrainingTask(
            number, tuple(asked), broadcast, before.round, chosen["up"].codec, per_device, least_norm, arrays.moving
        )
        sending = self._averaged(number, asked)
        results = self._lab.executor.learn(task)
        learned = [self._take(one, taken, number, averaged=one.client in sending) for one in results]
        counted = [one for one in learned if not one.error]
        if not any(one.averaged for one in counted):
            raise RoundError(f"round {number}: no update counts: {next(one.error for one in learned if one.averaged)}")
        rule, members = self._method.server, len(self._lab.workload.names)
        as_received = replace(rule.as_received(before.state, trees.widened(sent.decoded)), round=number)
        screened = self._screening.screen(taken, before.facts, before.robust, model=as_received.model)
        passing = Measured(self._hidden(screened.used, number), self._skip_below)
        state = freezing.apply(rule, as_received, passing, members, self._hyper, arrays.moving)
        self._others.close(number, sent.decoded, taken, screened.refused)
        taken.clear()
        learned = [self._discarded(one, number, screened.refused[one.client]) if one.client in screened.refused else one
                   for one in learned]
        counted = [one for one in learned if not one.error]
        plain = self._lab.experiment.codec_down == PLAIN
        down_bytes = self._downloads.of_round(sent, before) + per_device_bytes(per_device, plain=plain)
        row = round_figures.of_round(number, self._method, learned, down_bytes, self._lab.costs)
        move = moved(self._method, state, sent.decoded)
        left = {"up": choose_codec.backlog((one.left for one in counted if one.averaged), move), "down": sent.left}
        if set(self._codecs.values()) != {PLAIN}:
            row["codecs"] = {way: {**schema.plain(one), "left": left[way]} for way, one in chosen.items()}
        row |= {**self._arrays.figures(arrays, state, sent.decoded), **self._tell(number)}
        self._spent.add(row)
        deltas = () if sent.chain is None else sent.chain.kept
        facts = {**passing.facts(screened.facts), SINCE: str(model_since(before) if sent.same else number)}
        after = Checkpoint(
            number, state, sent.decoded, sent.lost, facts, before.answers, deltas, arrays.moving, screened.arrays
        )
        self._past.append(row)
        self._arrays.add(row)
        if self._due(number):
            after, served, figures = self._serve(after)
            row |= {**figures, **self._evaluated(number, served)}
            others = self._others.weights(number, after.state)
            row |= {MODELS: {kind: self._evaluated(number, one) for kind, one in others.items()}} if others else {}
        row["seconds"] = self._lab.clock() - started
        self._store.add(row)
        self._unsaved |= {one.client for one in counted if one.stateful}
        if self._lab.clock() - self._saved > CHECKPOINT_S:
            self._save(after)
        self._lab.told(row)
        return after

    def _hidden(self, updates: Iterable[Update], number: int) -> Iterable[Update]:
        """The updates, with noise in their sum if the aggregator adds it."""
        section = self._privacy
        if section.mode != CENTRAL:
            return updates
        return NoisedSum(updates, section.clip, section.noise_multiplier, gaussian.key_of(self._run.seed, number))

    def _averaged(self, number: int, asked: Sequence[str]) -> set[str]:
        """The devices whose updates the server averages: all, or as many as ``averaged`` says, drawn like a cohort."""
        return set(cohort.select(self._run.seed, number, asked, self._lab.experiment.averaged))

    def _chosen(self, way: str) -> Choice:
        past = [Past(row["codecs"][way]["codec"], row["loss"], row["codecs"][way]["left"])
                for row in self._past[-choose_codec.LOOK_BACK:] if "codecs" in row]
        return choose_codec.next_choice(way, self._codecs[way], self._method.client.keeps, past)

    def _published(self, before: Checkpoint, codec: str) -> Sent:
        """The model for the round after ``before``; it is made once."""
        if self._sent is None or self._sent[0] != before.round + 1:
            self._sent = before.round + 1, self._publish(before, codec)
        return self._sent[1]

    def _publish(self, before: Checkpoint, codec: str) -> Sent:
        sent = self._method.server.broadcast(before.state)
        if codec == PLAIN:
            plain = trees.apply(lambda a: np.asarray(a, np.float32), sent.groups)
            moving = EVERYTHING if before.published is None else before.moving
            size = 4 * self._wire.part(moving).parameters(self._method.down)
            return Sent(plain, None, sent.scalars, size, moving=moving)
        made = encode_model(sent.groups, before, codec, self._wire, self._method.down, self._run.seed)
        same = made.delta and _equal(made.decoded, before.published or {})
        return Sent(
            made.decoded, made.lost, sent.scalars, len(made.data), self._downloads.chain(before, made), made.left,
            same, made.moving,
        )

    def _take(self, one: TrainedDevice, taken: _Taken, number: int, *, averaged: bool) -> TrainedDevice:
        """Keeps the update until the round closes, and returns the rest of the result for the figures."""
        if one.update is not None and averaged:
            update = Update(one.client, one.update, one.samples)
            wrong = self._screening.too_much(one.samples, one.loss, one.update.scalars)
            if not (length := self._screening.measure(update).whole) <= self._screening.ceiling:
                wrong.append(f"an update of norm {length:.3g}, expected at most {self._screening.ceiling:g}")
            if wrong:
                return self._discarded(replace(one, update=None), number, "; ".join(wrong))
            taken.add(update)
        return replace(one, update=None, averaged=averaged)

    def _discarded(self, one: TrainedDevice, number: int, why: str) -> TrainedDevice:
        """Marks a device whose update of round ``number`` is refused; it keeps its earlier state."""
        self._store.clients.forget(one.client, number)
        return replace(one, error=why)

    # Evaluate ---------------------------------------------------------------------------------------------------------

    def _due(self, number: int) -> bool:
        every = self._lab.experiment.evaluation.every
        return self._over(number) or bool(every and number % every == 0)

    def _serve(self, closed: Checkpoint) -> tuple[Checkpoint, Params, dict[str, Any]]:
        """(the checkpoint with the served model in it, its weights on devices, its figures). With codec ``none`` the
        weights are exact, and nothing is counted."""
        if self._codecs["down"] == PLAIN:
            exact = trees.only(closed.state.served, self._method.shared)
            return closed, trees.apply(lambda a: np.asarray(a, np.float32), exact), {}
        names, last = self._lab.workload.names, self._over(closed.round)
        share = asked_next(self._lab.experiment.cohort, len(names), last)
        made = encode_served(
            self._method, closed, closed.answers, self._chosen("down").codec, self._wire, self._run.seed,
            Audience(len(names), len(names), len(self._downloads.asked(closed.round)), share),
        )
        before = closed.answers
        if before is not None and not is_new(made, before, SERVE_MIN_CHANGE, last=last):
            return closed, before.weights, {"serve_bytes": 0}
        following = None if last else self._published(closed, self._chosen("down").codec)
        size = self._downloads.of_served(made, closed, following)
        figures = {"serve_bytes": size, "served_id": payloads.identity(made.weights)}
        return replace(closed, answers=made), made.weights, figures

    def _evaluated(self, number: int, served: Params) -> dict[str, Any]:
        work, evaluation, seed = (
            self._lab.workload,
            self._lab.experiment.evaluation,
            self._lab.experiment.partition.seed,
        )
        chosen = cohort.select(seed, 0, work.names, evaluation.devices)
        asked = [EvaluationTask(number, tuple(chosen), served)]
        asked += [EvaluationTask(number, tuple(chosen), served, TEST_STEP)] if evaluation.also_test_step else []
        new, novel = (tuple(share.name for share in shares) for shares in (work.new, work.novel))
        asked += [EvaluationTask(number, new, served, "new", support) for support in evaluation.support if new]
        asked += [EvaluationTask(number, novel, served, "novel")] if novel else []
        evaluations: list[DeviceEvaluation] = [
            evaluated for task in asked for evaluated in self._lab.executor.evaluate(task)
        ]
        return round_figures.evaluated(evaluations, self._lab.workload.task)


def _equal(one: Params, other: Params) -> bool:
    return all(np.array_equal(array, other[g][n]) for g, named in one.items() for n, array in named.items())


class _Taken(Iterable[Update]):
    """Updates in the order of arrival, which is the closing order: the first 256 MiB in memory, the others on disk. Can
    be iterated any number of times."""

    def __init__(self, folder: Path):
        self._folder, self._bytes = folder, 0
        self._kept: list[Update | tuple[Path, Update]] = []

    def add(self, update: Update) -> None:
        size = sum(array.nbytes for named in update.payload.groups.values() for array in named.values())
        if self._bytes + size <= IN_MEMORY_BYTES:
            self._bytes += size
            self._kept.append(update)
            return
        path = self._folder / f"{len(self._kept)}.safetensors"
        storage.write_arrays(path, storage.flatten(update.payload.groups), durable=False)
        self._kept.append((path, replace(update, payload=replace(update.payload, groups={}))))

    def __iter__(self) -> Iterator[Update]:
        for kept in self._kept:
            if isinstance(kept, Update):
                yield kept
            else:
                path, update = kept
                arrays, _ = storage.unpack(storage.read_bytes(path, limit=MAX_UPDATE_BYTES), where=str(path))
                yield replace(update, payload=replace(update.payload, groups=storage.unflatten(arrays)))

    def clear(self) -> None:
        self._kept.clear()
        shutil.rmtree(self._folder, ignore_errors=True)
