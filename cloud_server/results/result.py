"""``result.json``: a run's settings, environment, rounds, scores and costs.

The dataclasses are the schema. ``build`` fills them from the ledger, ``to_json`` writes them without missing figures,
``parse`` and ``validate`` read them.
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from cloud_server.figures.scores import (
    AMOUNT,
    SHARE,
    Compared,
    Score,
    TaskScore,
    compared,
    confusion_accuracy,
    counts,
    macro_f1,
)
from cloud_server.ledger import ledger_tables as tables
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_sums import Bytes, Joules
from cloud_server.ledger.ledger_tables import STAGES, Evaluation, TaskEvaluation
from cloud_server.results import device_costs, folded_rounds, round_choices
from cloud_server.results import verdict as verdicts
from cloud_server.results.device_costs import DeviceCosts
from cloud_server.results.folded_rounds import FoldedSums
from cloud_server.results.round_choices import ChosenCodec, Privacy, TrainedArrays
from cloud_server.results.verdict import Verdict
from fleet_core.algorithms import plugins
from fleet_core.base import schema
from fleet_core.base.errors import DataError
from fleet_core.tasks import calibration
from fleet_core.tasks.task import KINDS, Task

FORMAT = 1
PACKAGES = (
    "metafleet", "numpy", "torch", "onnx", "onnxruntime", "paho-mqtt", "amqtt", "safetensors", "cryptography",
    "backports.zstd", "typer",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Spread:
    """Accuracy over devices, each with the same weight."""

    mean: float = field(metadata=SHARE)
    worst: float = field(metadata=SHARE)
    best: float = field(metadata=SHARE)


@dataclass(frozen=True, kw_only=True)
class Pooled(Score):
    """The score after personalization; before and fine_tuned only if they cover exactly the same devices."""

    before: Score | None = None
    fine_tuned: Score | None = None

    def at(self, stage: str) -> Score | None:
        return {"before": self.before, "fine_tuned": self.fine_tuned, "after": self}[stage]


@dataclass(frozen=True, kw_only=True)
class RoundFigures:
    """A closed round. accuracy, macro_f1 and calibration_error (pooled), or task (pooled) and compared (by which models
    of the task are compared, by key): those of the devices that train, in evaluated rounds.

    asked: number of devices in the cohort. participants: number of devices whose update was counted. skipped: number of
    participants whose update was too small to send; None if there are none. refused: number of refused updates.
    payload_bytes, mqtt_bytes, wire_bytes: all traffic of the round. models_transmitted: whole models up and down,
    without served ones. flops: over all devices. codecs: up and down. arrays: None if every round trains all arrays.
    privacy: None if updates are not private.
    """

    round: int = field(metadata={"min": 0})
    participants: int = field(metadata=AMOUNT)
    skipped: int | None = field(default=None, metadata=AMOUNT)
    refused: int = field(metadata=AMOUNT)
    asked: int | None = field(default=None, metadata=AMOUNT)
    accuracy: Spread | None = None
    macro_f1: float | None = field(default=None, metadata=SHARE)
    calibration_error: float | None = field(default=None, metadata=SHARE)
    task: TaskScore | None = None
    compared: Mapping[str, Compared] | None = None
    loss: float | None = None
    models_transmitted: float | None = field(default=None, metadata=AMOUNT)
    payload_bytes: Bytes | None = None
    mqtt_bytes: Bytes | None = None
    wire_bytes: Bytes | None = None
    flops: float | None = field(default=None, metadata=AMOUNT)
    energy_j: Joules | None = None
    seconds: float | None = field(default=None, metadata=AMOUNT)
    codecs: Mapping[str, ChosenCodec] | None = None
    arrays: TrainedArrays | None = None
    privacy: Privacy | None = None


@dataclass(frozen=True, kw_only=True)
class Personalization:
    """One evaluated device. new: it did not train. task: of a fleet without classes: stage -> score."""

    device: str
    new: bool
    before: Score | None = None
    fine_tuned: Score | None = None
    after: Score | None = None
    task: Mapping[str, TaskScore] | None = None

    def at(self, stage: str) -> Score | None:
        return {"before": self.before, "fine_tuned": self.fine_tuned, "after": self.after}[stage]


@dataclass(frozen=True, kw_only=True)
class Sums:
    """Sums over the whole ledger, including what happened after the last round. kinds: payload by kind of traffic.
    absent_energy: {"term: why" energy_j does not include it: number of devices}."""

    payload_bytes: Bytes | None = None
    mqtt_bytes: Bytes | None = None
    wire_bytes: Bytes | None = None
    kinds: Mapping[str, Bytes] | None = None
    flops: float | None = field(default=None, metadata=AMOUNT)
    energy_j: Joules | None = None
    absent_energy: Mapping[str, int] | None = field(default=None, metadata={"min": 1})


@dataclass(frozen=True, kw_only=True)
class Result:
    """rounds: the closed rounds that are kept one by one. folded: the rounds before them, None if there are none.
    devices: how many train, without those that only joined to be evaluated. costs: by device; empty in a result of an
    older version. compared, compared_new_devices: as in ``RoundFigures``, of the last evaluations of the devices that
    train and of the others.
    """

    format: int = field(metadata={"min": FORMAT, "max": FORMAT})
    method: str
    seed: int
    config: Mapping[str, Any]
    environment: Mapping[str, Any]
    devices: int = field(metadata=AMOUNT)
    rounds: tuple[RoundFigures, ...]
    personalization: tuple[Personalization, ...]
    evaluated: Pooled | None = field(default=None, metadata={"was": "judged"})
    new_devices: Pooled | None = None
    task: Mapping[str, TaskScore] | None = None
    task_new_devices: Mapping[str, TaskScore] | None = None
    compared: Mapping[str, Compared] | None = None
    compared_new_devices: Mapping[str, Compared] | None = None
    totals: Sums | None = None
    verdict: Verdict | None = None
    costs: tuple[DeviceCosts, ...] = ()
    folded: FoldedSums | None = None

    @property
    def closed(self) -> int:
        """How many rounds are closed."""
        return len(self.rounds) + (self.folded.closed if self.folded else 0)

    def stages(self) -> dict[str, str | None]:
        """The evaluated stages, in order, with their method (None if devices differ)."""
        scores = {stage: [s for p in self.personalization if (s := p.at(stage))] for stage in STAGES}
        methods = {stage: {s.method for s in found} for stage, found in scores.items() if found}
        return {stage: next(iter(names)) if len(names) == 1 else None for stage, names in methods.items()}


Baseline = Mapping[str, Mapping[str, Sequence[Sequence[int]]]]
"""Device → {"before": confusion, "fine_tuned": confusion}; either may be absent."""


def evaluation(
    round: int, device: str, stage: str, method: str, confusion: Sequence[Sequence[int]], *, new: bool = False
) -> Evaluation | None:
    """A ledger row from one device's counts [N, N]; None without samples."""
    accuracy, f1 = confusion_accuracy(confusion), macro_f1(confusion, classes_present_only=True)
    if accuracy is None or f1 is None:
        return None
    return Evaluation(
        round=round, device=device, stage=stage, method=method, accuracy=accuracy, macro_f1=f1, new=new,
        confusion=tuple(tuple(int(n) for n in row) for row in confusion),
    )  # fmt: skip


def pooled(evaluations: Iterable[Evaluation]) -> Score | None:
    """The score of the summed counts over all classes; None without evaluations."""
    rows = list(evaluations)
    if not rows:
        return None
    total_NN = np.sum([counts(j.confusion) for j in rows], axis=0)
    accuracy, f1 = confusion_accuracy(total_NN), macro_f1(total_NN, classes_present_only=False)
    method = rows[0].method if len({j.method for j in rows}) == 1 else None
    if accuracy is None or f1 is None:
        return None
    return Score(accuracy=accuracy, macro_f1=f1, method=method,
                 calibration_error=calibration.pooled([j.gaps for j in rows], int(total_NN.sum())))


def round_figures(
    ledger: Ledger, within: range | None = None, task: Task | None = None
) -> tuple[RoundFigures, ...]:
    """The closed rounds of a ledger, optionally only those ``within`` a range. task: the fleet's; without it
    ``compared`` is left out."""
    volume, joules, flops = ledger.volume("round", within), ledger.joules("round", within), ledger.flops(within)
    updates = defaultdict[int, Counter[str]](Counter)
    for update in ledger.each(tables.Update, within):
        updates[update.round][update.status] += 1
        updates[update.round]["skipped"] += update.skipped and update.status == "counted"
    evaluated: dict[int, list[Evaluation]] = {}
    for row in ledger.each(Evaluation, within, stage="after", new=False):
        evaluated.setdefault(row.round, []).append(row)
    predicted: dict[tuple[int, str], list[TaskEvaluation]] = {}
    for one in ledger.each(TaskEvaluation, within, new=False):
        predicted.setdefault((one.round, one.stage), []).append(one)
    codecs, arrays = round_choices.codecs(ledger, within), round_choices.arrays(ledger, within)
    private = round_choices.privacy(ledger, within)
    figures = []
    for r in ledger.rounds("closed", within):
        score, moved = pooled(evaluated.get(r.round, ())), volume.get(r.round)
        answered = predicted.get((r.round, "after"), predicted.get((r.round, "before"), []))
        figures.append(RoundFigures(
            round=r.round, asked=len(r.cohort), loss=r.loss, seconds=r.seconds, models_transmitted=r.models_transmitted,
            participants=updates[r.round]["counted"], refused=updates[r.round]["refused"],
            skipped=updates[r.round]["skipped"] or None, macro_f1=score.macro_f1 if score else None,
            accuracy=_spread([j.accuracy for j in evaluated.get(r.round, ())]), codecs=codecs.get(r.round),
            calibration_error=score.calibration_error if score else None,
            payload_bytes=moved.payload if moved else None, mqtt_bytes=moved.mqtt if moved else None,
            wire_bytes=moved.wire if moved else None, flops=flops.get(r.round), energy_j=joules.get(r.round),
            arrays=arrays.get(r.round), privacy=private.get(r.round),
            task=task_score(answered), compared=_compared(task, answered),
        ))  # fmt: skip
    return tuple(figures)


def build(
    ledger: Ledger, *, method: str, seed: int, config: Mapping[str, Any], baseline: Baseline | None = None,
    baseline_method: str = "fedavg", task: Task | None = None,
) -> Result:  # fmt: skip
    """The result of a finished or interrupted run.

    task: as in ``round_figures``. config: the run's settings as plain JSON, without paths or machine names. baseline:
    counts of ``baseline_method`` on the same test samples, before and after fine-tuning; they replace the ledger's rows
    of these stages.
    """
    latest = _latest(ledger, baseline, baseline_method)
    devices, predicted = ledger.devices(), latest_of_task(ledger)
    answered = [stages.get("after") or stages.get("before") for stages in predicted.values()]
    return Result(
        format=FORMAT, method=method, seed=seed, config=config, environment=environment(),
        devices=sum(not d.new for d in devices), rounds=round_figures(ledger, task=task),
        personalization=tuple(
            _of_device(name, stages) for name, stages in sorted(latest.items())
        ) + tuple(
            Personalization(device=name, new=any(one.new for one in stages.values()), task=_by_stage([stages]))
            for name, stages in sorted(predicted.items())
        ),
        task=_by_stage(predicted.values()),
        task_new_devices=_by_stage([s for s in predicted.values() if any(one.new for one in s.values())]),
        compared=_compared(task, [one for one in answered if one is not None and not one.new]),
        compared_new_devices=_compared(task, [one for one in answered if one is not None and one.new]),
        evaluated=_pooled(latest), totals=sums(ledger), verdict=verdicts.of_ledger(ledger),
        new_devices=_pooled({name: s for name, s in latest.items() if any(j.new for j in s.values())}),
        costs=device_costs.of_ledger(ledger), folded=folded_rounds.of_ledger(ledger),
    )  # fmt: skip


def environment() -> dict[str, Any]:
    """Python, platform, number of cores, and versions of the installed packages, including those that add methods.
    Nothing identifies a machine or its user."""
    packages = {}
    for name in (*PACKAGES, *plugins.packages()):
        try:
            packages[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            continue
    return {
        "python": platform.python_version(),
        "platform": f"{platform.system()} {platform.machine()}",
        "packages": packages,
        "cpu_count": os.cpu_count() or 1,
    }


def sums_of(data: Mapping[str, Any]) -> Sums:
    """The ``Sums`` from which ``plain`` made ``data``. Raises DataError."""
    found, problems = schema.read(Sums, data, unknown="ignore")
    if found is None:
        raise DataError("are no sums: " + "; ".join(map(str, problems[:5])))
    return found


def plain(figures: Any) -> dict[str, Any]:
    """A dataclass of figures ready for ``json.dumps``; missing figures are left out."""
    return dict(_without_nulls(schema.plain(figures)))


def to_json(result: Result) -> dict[str, Any]:
    """Ready for ``json.dumps``; missing figures are left out."""
    data = _without_nulls(schema.plain(result))
    return {**data, "config": schema.plain(result.config), "environment": schema.plain(result.environment)}


def parse(data: Any) -> Result:
    """The content of a result.json; keys of newer versions are ignored. Raises DataError."""
    result, problems = schema.read(Result, data, unknown="ignore")
    if result is None:
        raise DataError("is not a valid result.json: " + "; ".join(map(str, problems[:5])), where="result.json",
                        hint="every run writes one; give that file or its folder")
    return result


def validate(data: Any) -> list[str]:
    """The problems of a result.json: unknown or missing keys, wrong types and ranges, null figures."""
    _, problems = schema.read(Result, data, unknown="error")
    figures = {k: v for k, v in data.items() if k not in ("config", "environment")} if isinstance(data, Mapping) else {}
    nulls = [f"{key}: leave out the key of a missing figure instead of null" for key in _nulls(figures, "")]
    return [*map(str, problems), *nulls]


def _latest(ledger: Ledger, baseline: Baseline | None, method: str) -> dict[str, dict[str, Evaluation]]:
    """Device → stage → its last evaluation; the baseline replaces the ledger's earlier stages."""
    latest: dict[str, dict[str, Evaluation]] = {}
    for row in ledger.latest(Evaluation):
        if baseline is None or row.stage == "after":
            latest.setdefault(row.device, {})[row.stage] = row
    new = {device.name for device in ledger.devices() if device.new}
    for device, stages in (baseline or {}).items():
        for stage, confusion in stages.items():
            evaluated = evaluation(0, device, stage, method, confusion, new=device in new)
            if evaluated:
                latest.setdefault(device, {})[stage] = evaluated
    return latest


def _pooled(latest: Mapping[str, Mapping[str, Evaluation]]) -> Pooled | None:
    """Pooled over the devices that were evaluated after personalization; an earlier stage only if all of them have
    it."""
    evaluated = [stages for stages in latest.values() if "after" in stages]
    after = pooled(stages["after"] for stages in evaluated)
    if after is None:
        return None
    before, fine_tuned = (
        pooled(stages[stage] for stages in evaluated) if all(stage in stages for stages in evaluated) else None
        for stage in ("before", "fine_tuned")
    )
    return Pooled(
        accuracy=after.accuracy, macro_f1=after.macro_f1, method=after.method, before=before, fine_tuned=fine_tuned,
        calibration_error=after.calibration_error,
    )


def latest_of_task(ledger: Ledger) -> dict[str, dict[str, TaskEvaluation]]:
    """Device -> stage -> its last evaluation, of a fleet without classes."""
    latest: dict[str, dict[str, TaskEvaluation]] = {}
    for row in ledger.latest(TaskEvaluation):
        latest.setdefault(row.device, {})[row.stage] = row
    return latest


def task_scores(ledger: Ledger) -> dict[str, TaskScore]:
    """Stage -> pooled score of the devices' last evaluations; empty for a fleet with classes."""
    return _by_stage(latest_of_task(ledger).values()) or {}


def task_score(rows: Sequence[TaskEvaluation]) -> TaskScore | None:
    """The pooled score of these rows; None without any."""
    if not rows:
        return None
    outputs = rows[0].outputs
    samples, measures = KINDS[rows[0].task].pooled(outputs, [(row.samples, row.sums) for row in rows])
    methods = {row.method for row in rows}
    return TaskScore(task=rows[0].task, samples=samples, measures=measures,
                     method=methods.pop() if len(methods) == 1 else None)


def _compared(task: Task | None, rows: Sequence[TaskEvaluation]) -> dict[str, Compared] | None:
    """None without rows, or a task."""
    return None if task is None else compared(task, [task.of_sums(row.samples, row.sums) for row in rows]) or None


def _by_stage(devices: Iterable[Mapping[str, TaskEvaluation]]) -> dict[str, TaskScore] | None:
    """Stage -> score pooled over the devices that were evaluated after personalization, or over all if none was, of
    the stages that all of these have; None without any."""
    every = list(devices)
    held = [one for one in every if "after" in one] or every
    found = {stage: task_score([one[stage] for one in held]) for stage in STAGES
             if held and all(stage in one for one in held)}
    return {stage: score for stage, score in found.items() if score is not None} or None


def _of_device(name: str, stages: Mapping[str, Evaluation]) -> Personalization:
    scores = {stage: score_of(row) for stage, row in stages.items()}
    return Personalization(device=name, new=any(row.new for row in stages.values()), before=scores.get("before"),
                           fine_tuned=scores.get("fine_tuned"), after=scores.get("after"))


def score_of(row: Evaluation) -> Score:
    """A device's score."""
    return Score(accuracy=row.accuracy, macro_f1=row.macro_f1, method=row.method,
                 calibration_error=calibration.pooled([row.gaps], sum(map(sum, row.confusion))))


def _spread(accuracies: Sequence[float]) -> Spread | None:
    if not accuracies:
        return None
    return Spread(mean=sum(accuracies) / len(accuracies), worst=min(accuracies), best=max(accuracies))


def sums(ledger: Ledger) -> Sums:
    """Everything that the fleet has cost so far."""
    totals = ledger.totals()
    volume = totals.volume
    return Sums(
        payload_bytes=volume.payload if volume else None, mqtt_bytes=volume.mqtt if volume else None,
        wire_bytes=volume.wire if volume else None, kinds=totals.payload_by_kind or None, flops=totals.flops,
        energy_j=totals.energy, absent_energy=totals.absent_energy or None,
    )  # fmt: skip


def _without_nulls(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _without_nulls(v) for k, v in value.items() if v is not None}
    return [_without_nulls(v) for v in value] if isinstance(value, list) else value


def _nulls(value: Any, at: str) -> list[str]:
    if isinstance(value, (list, tuple)):
        value = dict(enumerate(value))
    if isinstance(value, Mapping):
        return [null for key, item in value.items() for null in _nulls(item, f"{at}.{key}".lstrip("."))]
    return [at] if value is None else []
