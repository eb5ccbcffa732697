"""Does the work of a run's devices: one round of training, or an evaluation. Needs torch.

A result depends only on the run, the round and the device, not on the process or the order.
"""

from __future__ import annotations

import contextlib
import os
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch

from cloud_server.laboratory.plan import workload as workloads
from cloud_server.laboratory.plan.experiment import PLAIN, Experiment, Run
from cloud_server.laboratory.plan.workload import Part, Workload
from cloud_server.laboratory.run.run_folder import Clients
from fleet_core.algorithms.interface import ClientState, Payload
from fleet_core.base import trees
from fleet_core.base.errors import CodecError, ConfigError, DataError, FleetError, RoundError
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.base.trees import Params
from fleet_core.board import allocator
from fleet_core.codecs.interface import Seed
from fleet_core.codecs.kinds import common_scale
from fleet_core.data.partitions import Share
from fleet_core.learning import local_training, models, personal_model
from fleet_core.learning.architectures import MODELS
from fleet_core.model.encoded_update import EncodedUpdate, encode_update, method_state
from fleet_core.personalization.gaussian_process import Processes
from fleet_core.personalization.nearest import Neighbours, Prototypes, softmax
from fleet_core.privacy import gaussian, masks
from fleet_core.privacy.gaussian import Private
from fleet_core.privacy.settings import LOCAL
from fleet_core.tasks import calibration
from fleet_core.tasks.measured import Measured
from fleet_core.training.local_round import TrainResult
from fleet_core.training.round_plans import Participant, capped

TEST_STEP = "test_step"
FAILURES = (RoundError, DataError, CodecError)
"""Errors that concern one device; the others continue."""
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class TrainingTask:
    """One round of training on some devices. broadcast: float32 as decoded. after: the last round that counts.
    codec: the codec of updates. per_device: name -> the model for that device alone; empty for most methods.
    least_norm: an update with a smaller norm is skipped. moving: the arrays that are trained."""

    round: int
    clients: tuple[str, ...]
    broadcast: Payload
    after: int
    codec: str
    per_device: Mapping[str, Params] = field(default_factory=dict)
    least_norm: float = 0.0
    moving: Moving = EVERYTHING


@dataclass(frozen=True, eq=False)
class TrainedDevice:
    """The result of a device's training; only ``error`` if it failed. update: as the server decodes it. payload_bytes:
    size of the update as sent. left: as in ``payloads.Sent``. skipped: the update was too small to be sent. averaged:
    whether the server averages the update."""

    client: str
    update: Payload | None = None
    samples: int = 0
    loss: float = 0.0
    flops: int | None = None
    payload_bytes: int = 0
    left: float | None = None
    stateful: bool = False
    error: str = ""
    averaged: bool = True
    skipped: bool = False


@dataclass(frozen=True, eq=False)
class EvaluationTask:
    """Devices to evaluate with the served model of ``round``. kind: ``train``, ``new`` or ``novel``; or ``test_step``:
    those that train, with the gradient step taken on their test samples. support: the share of its samples that a new
    device learns from."""

    round: int
    clients: tuple[str, ...]
    served: Params
    kind: str = "train"
    support: float = 0.0


@dataclass(frozen=True, eq=False)
class ClassMoments:
    """The representations of a device's test samples by the evaluated body, for each class of the whole set. total:
    their sum [K, D]. squares: the sum of their squared lengths [K]. count: their number [K]."""

    total: Array
    squares: Array
    count: Array


@dataclass(frozen=True, eq=False)
class DeviceEvaluation:
    """The evaluation of a device's own model; without figures and with ``error`` if it failed.

    confusion: int64 [K, K + 1], rows are true classes and columns answers, in the numbering of the whole set; the last
    column counts answers that name no class of the device. before: the same for the served model, or None if it cannot
    answer unpersonalized. moments: None if no body is shared. gaps: as ``calibration.gaps``, of the answers in
    confusion. measured, measured_before: in place of confusion and before, of a model without classes.
    """

    client: str
    kind: str
    support: float
    confusion: Array = field(default_factory=lambda: np.zeros((0, 1), np.int64))
    before: Array | None = None
    moments: ClassMoments | None = None
    error: str = ""
    gaps: Sequence[float] = ()
    measured: Measured | None = None
    measured_before: Measured | None = None


@dataclass(frozen=True, eq=False)
class Setting:
    """A worker's settings: plain values, which can be sent to another process."""

    experiment: Experiment
    run: Run
    folder: Path
    side_by_side: int = 1
    device: str = "cpu"


class Worker:
    """Trains and evaluates devices of one run."""

    def __init__(self, setting: Setting, workload: Workload | None = None):
        torch.set_num_threads(1)
        allocator.keep_freed()
        if setting.device == "cuda":
            repeatable()
        self._experiment, self._run = setting.experiment, setting.run
        self._method = setting.run.method
        self._hyper = capped(setting.run.hyper, setting.experiment.max_batch)
        self.workload = workload or workloads.build(setting.experiment)
        self.layout = workloads.layout_of(setting.experiment, self.workload)
        self._wire = self.layout.extended(self._method.down, self._method.shared)
        reduced = setting.experiment.precision == "bfloat16"
        alone = setting.side_by_side == 1  # vmap does not support channels_last
        self._model = models.build(self.layout, channels_last=alone, reduced=reduced).to(setting.device)
        self._clients = Clients(setting.folder)
        self._side_by_side = setting.side_by_side
        self._whole = 0 if self.workload.task else int(self.workload.samples.y.max()) + 1
        groups = ("train", self.workload.train), ("new", self.workload.new), ("novel", self.workload.novel)
        self._shares = {(kind, share.name): share for kind, shares in groups for share in shares}

    # Train ------------------------------------------------------------------------------------------------------------

    def learn(self, task: TrainingTask) -> list[TrainedDevice]:
        """Trains each client for one round, several at once if the setting says so. A failure affects only its
        client."""
        states = [self._clients.load(client, task.after) for client in task.clients]
        results: Sequence[TrainResult | FleetError] | None = None
        if self._side_by_side > 1 and len(states) > 1:
            results = self._together(task, states)
        if results is None:
            results = [self._alone(task, *found) for found in zip(task.clients, states, strict=True)]
        return [self._sent(task, *found) for found in zip(task.clients, results, states, strict=True)]

    def _alone(self, task: TrainingTask, client: str, state: ClientState) -> TrainResult | FleetError:
        one = self._participant(task, client, state)
        try:
            return local_training.train_round(
                self._method, self._model, self.layout, task.broadcast.beside(one.per_device), one.state, one.x, one.y,
                self._hyper, one.rng, moving=task.moving,
            )
        except FAILURES as error:
            return error

    def _together(self, task: TrainingTask, states: Sequence[ClientState]) -> list[TrainResult] | None:
        """Trains all clients of the task at once; None if one fails; the caller then trains each alone."""
        several = [self._participant(task, *found) for found in zip(task.clients, states, strict=True)]
        with contextlib.suppress(*FAILURES):
            return local_training.train_side_by_side(
                self._method, self._model, self.layout, task.broadcast, several, self._hyper,
                padded=self._experiment.model.name in MODELS, moving=task.moving,
            )
        return None

    def _participant(self, task: TrainingTask, client: str, state: ClientState) -> Participant:
        own = self.workload.own(self._shares["train", client])
        rng = np.random.default_rng(self._seed(task, client))
        return Participant(method_state(state), own.x, own.y, rng, task.per_device.get(client, {}))

    def _seed(self, task: TrainingTask, client: str) -> Seed:
        """The seed of all randomness in a device's round, the same as on a fleet's device."""
        return self._run.seed, task.round, zlib.crc32(client.encode())

    def _sent(
        self, task: TrainingTask, client: str, result: TrainResult | FleetError, before: ClientState
    ) -> TrainedDevice:
        """Writes the state after the round, and returns the update as the server decodes it."""
        try:
            if isinstance(result, FleetError):
                raise result
            made = self._encoded(task, client, result, before)
            _check_finite(made.update)
        except FAILURES as error:
            return TrainedDevice(client, error=str(error))
        stateful = bool(made.state or before)  # an empty state must replace an earlier one
        if stateful:
            self._clients.save(client, task.round, made.state)
        plain, size = task.codec == PLAIN, len(made.data)
        if plain and not made.skipped:
            size = 4 * self._wire.part(task.moving).parameters(self._method.shared)
        if self._experiment.privacy.secure_aggregation:
            values = self._wire.part(task.moving).parameters(self._method.shared)
            values += common_scale.DIGITS * (len(self._method.up_scalars) + (self._most_samples > 0))
            size = masks.bits_for(len(task.clients)) // 8 * values
        samples = min(result.samples, self._most_samples) if self._most_samples else result.samples
        return TrainedDevice(
            client, made.update, samples, result.loss, result.flops, size, None if plain else made.left,
            stateful, skipped=made.skipped,
        )

    def _encoded(
        self, task: TrainingTask, client: str, result: TrainResult, before: ClientState
    ) -> EncodedUpdate:
        section, codec = self._experiment.privacy, "fp32" if task.codec == PLAIN else task.codec
        if section.secure_aggregation:
            codec = common_scale.name_of(section.exponent)
        if task.codec == PLAIN and not self._experiment.skip_below and not section.on:
            update = Payload(self._wire.ordered(result.update.groups), result.update.scalars)
            return EncodedUpdate(b"", update, result.pending, None, PLAIN)
        weight = min(1.0, result.samples / self._most_samples) if self._most_samples else 1.0
        return encode_update(
            codec, result.update, result.pending, before, method=self._method,
            hyper=self._hyper, layout=self._wire, round_number=task.round, seed=self._seed(task, client),
            least_norm=task.least_norm, moving=task.moving, private=self._private(task, client) if section.on else None,
            weight=weight,
        )

    @property
    def _most_samples(self) -> int:
        """The samples with which a device counts fully in a masked sum; 0 if its update is not scaled."""
        section = self._experiment.privacy
        weighted = section.secure_aggregation and self._method.server.weighted(self._hyper)
        return section.most_samples if weighted else 0

    def _private(self, task: TrainingTask, client: str) -> Private:
        section = self._experiment.privacy
        noise = section.noise_multiplier if section.mode == LOCAL else 0.0
        return Private(section.clip, noise, gaussian.key_of(self._run.seed, task.round, client))

    # Evaluate ---------------------------------------------------------------------------------------------------------

    def evaluate(self, task: EvaluationTask) -> list[DeviceEvaluation]:
        return [self._evaluated(task, client) for client in task.clients]

    def _evaluated(self, task: EvaluationTask, client: str) -> DeviceEvaluation:
        kind, support = task.kind, task.support
        share = self._shares["train" if kind == TEST_STEP else kind, client]
        try:
            own, query = self._parts(task, share)
            state = self._clients.load(client, task.round) if kind == "train" else {}
            if self.workload.task is not None:
                return self._of_task(task, client, own, query, state)
            answers, sure = self._answers(task, own, query, state)
            found, gaps = self._confusion(share, query.y, answers), calibration.gaps(sure, answers == query.y).tolist()
            moments = self._moments(task, share, query) if kind == "train" else None
            return DeviceEvaluation(client, kind, support, found, self._before(task, share, query), moments, gaps=gaps)
        except FAILURES as error:
            return DeviceEvaluation(client, kind, support, error=str(error))

    def _parts(self, task: EvaluationTask, share: Share) -> tuple[Part, Part]:
        if task.kind == "new":
            return self.workload.divided(share, task.support, self._experiment.partition.seed)
        own, later = self.workload.own(share), self.workload.later(share)
        at_test = self._experiment.evaluation.test_step or task.kind == TEST_STEP
        return (self.workload.to_learn(later) if at_test else own), later

    def _answers(
        self, task: EvaluationTask, support: Part, query: Part, state: ClientState
    ) -> tuple[Array, Array]:
        """The device's answers to the query by its own model: classes int64 [N], and their probabilities [N]."""
        method, model = self._method, self._model
        params = self._adapted(task, support, state)
        if method.personalizer == "proto":
            z = local_training.embed(model, params, support.x)
            own = Prototypes.empty(len(self.layout.classes), z.shape[1]).add(z, support.y)
            return _chosen(own.probabilities(local_training.embed(model, params, query.x)))
        if method.personalizer == "gp":
            z = local_training.embed(model, params, support.x)
            processes = Processes.of(z, support.y, len(self.layout.classes), self._hyper)
            return _chosen(processes.probabilities(local_training.embed(model, params, query.x)))
        if method.personalizer == "fleet-proto":
            means = Prototypes.of_fleet(task.served)
            return _chosen(means.probabilities(local_training.embed(model, params, query.x)))
        head = local_training.predict_logits(model, params, query.x)
        if method.personalizer == "knn":
            known = softmax(local_training.predict_logits(model, params, support.x))
            z = local_training.embed(model, params, support.x)
            near = Neighbours.of(z, support.y, known, self._hyper.neighbours, self._hyper.mixture)
            return _chosen(near.probabilities(local_training.embed(model, params, query.x), softmax(head)))
        return _chosen(head)[0], _chosen(softmax(head))[1]

    def _adapted(self, task: EvaluationTask, support: Part, state: ClientState) -> Params:
        scalars = {"round": float(task.round), "seed": float(self._run.seed)}
        return personal_model.adapt(
            self._method, self._model, self.layout, task.served, support.x, support.y, self._hyper, state, scalars
        )

    def _of_task(
        self, task: EvaluationTask, client: str, support: Part, query: Part, state: ClientState
    ) -> DeviceEvaluation:
        own, whole = self._measured(self._adapted(task, support, state), query), self._whole_model(task)
        before = None if whole is None else self._measured(whole, query)
        return DeviceEvaluation(client, task.kind, task.support, measured=own, measured_before=before)

    def _measured(self, params: Params, query: Part) -> Measured:
        target = self.workload.task
        assert target is not None
        answers = local_training.predict_logits(self._model, params, query.x)
        found = target.measured(query.y, target.in_units(answers))
        if not found.samples or not found.compared:
            raise DataError("no sample is left to evaluate on, beside those that the threshold comes from")
        return found

    def _whole_model(self, task: EvaluationTask) -> Params | None:
        """The served model; None if it has no head, or not all groups."""
        groups = {t.group for t in self.layout.tensors}
        return trees.only(task.served, groups) if "head" in groups and groups <= set(task.served) else None

    def _before(self, task: EvaluationTask, share: Share, query: Part) -> Array | None:
        params = self._whole_model(task)
        if params is None:
            return None
        return self._confusion(share, query.y, _chosen(local_training.predict_logits(self._model, params, query.x))[0])

    def _confusion(self, share: Share, y: Array, answers: Array) -> Array:
        classes = len(self.layout.classes) if share.labels is None else self._whole
        names = np.full(len(self.layout.classes), classes)
        own = np.arange(classes) if share.labels is None else np.array(share.labels)
        names[: len(own)] = own
        counts = np.zeros((classes, classes + 1), np.int64)
        np.add.at(counts, (names[y], names[answers]), 1)
        return counts

    def _moments(self, task: EvaluationTask, share: Share, query: Part) -> ClassMoments | None:
        if "body" not in task.served:
            return None
        z = local_training.embed(self._model, {"body": task.served["body"]}, query.x).astype(np.float64)
        y = self.workload.samples.y[share.test]
        total, squares = np.zeros((self._whole, z.shape[1])), np.zeros(self._whole)
        np.add.at(total, y, z)
        np.add.at(squares, y, np.square(z).sum(1))
        return ClassMoments(total, squares, np.bincount(y, minlength=self._whole))


def _chosen(scores_nK: Array) -> tuple[Array, Array]:
    """The index of the highest score of each row, and that score."""
    return scores_nK.argmax(1), scores_nK.max(1)


def _check_finite(update: Payload) -> None:
    arrays = [array for named in update.groups.values() for array in named.values()]
    if not all(np.isfinite(array).all() for array in (*arrays, *update.scalars.values())):
        raise RoundError("the update holds a value that is not finite", hint="lower client_lr")


def device_of(wanted: str, *, gpu: bool) -> str:
    """torch's device for ``auto``, ``cpu`` or ``cuda``. gpu: whether one may be used. Raises ConfigError."""
    there = torch.cuda.is_available()
    if wanted == "cuda" and not (gpu and there):
        raise ConfigError("there is no GPU that torch can use here" if gpu else "Ray's actors compute on processors",
                          where="--device cuda", hint="--device cpu")
    return "cuda" if gpu and there and wanted != "cpu" else "cpu"


def repeatable() -> None:
    """Makes a GPU give the same bits for the same work, in full float32: selects torch's deterministic kernels, also in
    cuBLAS and cuDNN, and disables TF32. torch warns where it has no deterministic kernel."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # cuBLAS reads it at its first use
    torch.backends.cudnn.benchmark = False
    torch.backends.cudnn.allow_tf32 = torch.backends.cuda.matmul.allow_tf32 = False
    torch.use_deterministic_algorithms(True, warn_only=True)


def chunks(clients: Sequence[str], most: int) -> list[tuple[str, ...]]:
    """The clients, in their order, divided into tasks of nearly equal size, at most ``most``. The division depends on
    nothing else."""
    number = -(-len(clients) // most)
    return [tuple(part) for part in np.array_split(np.array(clients, object), number)] if number else []
