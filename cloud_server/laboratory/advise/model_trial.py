"""The model trial of ``metafleet init``: trains each candidate model briefly with the fleet's method on the user's
samples, and chooses the best.

With at least four devices, a quarter of them never train. The model is chosen by macro-F1 on the test samples of the
devices that train, or by the figure of a task without classes; the reported scores are those on the other devices, with
all and, of classes, with few labelled samples each.
With fewer devices, the test samples serve for both. A plain baseline and the most frequent class are reported too.

The time is limited: few devices, few samples of each, and a deadline that is checked after every round.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.figures.formatting import ABSENT, bytes_text, flops_text, share_text
from cloud_server.figures.scores import ACCURACY, FIGURES, Score
from cloud_server.laboratory.advise import simple_baselines, task_baselines
from cloud_server.laboratory.advise.candidates import LEAST_GAP
from cloud_server.laboratory.advise.recordings import MIN_SAMPLES, TRAIN_FRACTION, Model, models_for
from cloud_server.laboratory.advise.simple_baselines import SimpleBaselines
from cloud_server.laboratory.advise.task_baselines import TITLES, TaskBaselines
from cloud_server.laboratory.compare import finished_runs
from cloud_server.laboratory.compare.finished_runs import DEVICES, FinishedRun
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload as workloads
from cloud_server.laboratory.plan.experiment import Experiment, Run
from cloud_server.laboratory.plan.workload import Workload
from cloud_server.laboratory.run import simulate
from cloud_server.laboratory.run.engine import Stopped
from cloud_server.laboratory.run.run_folder import Store
from cloud_server.results.verdict import worse
from fleet_core.base.errors import DataError, FleetError
from fleet_core.board import probe
from fleet_core.data.samples import Samples, save
from fleet_core.model.layout import InputSpec

SECONDS = 50.0
MAX_ROUNDS = 30
MAX_DEVICES, MAX_OF_A_DEVICE, LEAST_ALONE = 16, 200, 40
COHORT = 10
ROUND_FLOPS = 3e10
"""The most operations in a round, some seconds of computing: a larger model gets fewer devices per round."""
MOST_FLOPS = 3e11
"""The most operations of one device in a round: a model that needs more is not tried."""
HELD_OUT, SUPPORT, DEVICES_TO_HOLD_OUT = 0.25, 0.2, 4
FEW_OF_A_CLASS = 5
"""Labelled samples of each class that a device with few labels has."""
LINE_EVERY_S = 10.0
ONE_CLIENT = "all"


@dataclass(frozen=True)
class TriedModel:
    """A model after ``rounds``. validation: by which models are chosen, more is better: macro-F1, or the figure of a
    task without classes, negative if less is better. evaluated: the reported score, or that figure.
    payload: bytes of one device in one round, up and down. few: score on devices that did not train and have few
    labels; None if that was not evaluated."""

    model: Model
    rounds: int
    loss: float
    validation: float
    evaluated: Score | float
    parameters: int
    payload: float
    few: Score | None = None


@dataclass(frozen=True)
class FewLabels:
    """The evaluation of devices that did not train and have few labels. number: how many labels. baselines: the
    baselines on their samples."""

    number: int
    baselines: SimpleBaselines


@dataclass(frozen=True, eq=False)
class Outcome:
    """on: the evaluated devices, in words. chosen: None if no model completed a round."""

    on: str
    tried: tuple[TriedModel, ...]
    chosen: TriedModel | None
    baselines: SimpleBaselines | TaskBaselines
    remarks: tuple[str, ...]
    few: FewLabels | None = None

    @property
    def warnings(self) -> list[str]:
        """Warnings about the chosen model, and what to try; empty if there is no problem."""
        one = self.chosen
        if one is None:
            return []
        if isinstance(self.baselines, TaskBaselines):
            assert isinstance(one.evaluated, float)
            return self.baselines.warnings(one.model.label, one.evaluated, one.rounds, plain=True)
        assert isinstance(one.evaluated, Score)
        return [*self.baselines.warnings(one.model.label, one.evaluated, one.loss, one.rounds),
                *self._few_labels_warning(one)]

    def _few_labels_warning(self, one: TriedModel) -> list[str]:
        plain = self.few and self.few.baselines.plain
        if not (self.few and plain and one.few and worse(one.few, plain, self.few.baselines.truth)):
            return []
        return [f"a device that joins with {self.few.number} labelled samples: {one.model.label} reaches "
                f"{share_text(one.few.accuracy)} there, a plain baseline ({plain.method}) that knows the other devices "
                f"{share_text(plain.accuracy)}; label more on a new device, or let it train before you rely on it"]

    @property
    def columns(self) -> tuple[str, ...]:
        """Of the table."""
        figures = (self.baselines.figure.name,) if isinstance(self.baselines, TaskBaselines) else SCORES
        return "model", *figures, *COSTS

    def rows(self) -> list[tuple[str, ...]]:
        """Rows of the table with ``columns``."""
        models = [
            (f"{one.model.label}{' *' if one is self.chosen else ''}", *_evaluated(one.evaluated),
             f"{one.parameters:,}", bytes_text(one.payload), str(one.rounds), f"{one.loss:.2g}")
            for one in self.tried
        ]
        if isinstance(self.baselines, TaskBaselines):
            known = {self.baselines.constant[0]: self.baselines.constant[1], **self.baselines.plain}
            return models + [(TITLES[key], *_evaluated(value), *[ABSENT] * len(COSTS)) for key, value in known.items()]
        others = [("most frequent class", self.baselines.frequent)]
        others += [(self.baselines.plain.method or "", self.baselines.plain)] if self.baselines.plain else []
        return models + [(name, *_evaluated(score), *[ABSENT] * len(COSTS)) for name, score in others]


SCORES, COSTS = ("accuracy", "macro-F1"), ("parameters", "bytes a round", "rounds", "loss")


def _evaluated(score: Score | float) -> tuple[str, ...]:
    return (f"{score:.3f}",) if isinstance(score, float) else (share_text(score.accuracy), share_text(score.macro_f1))


def reason_to_skip(samples: Samples) -> str:
    """Why no trial is possible on these samples; empty if it is."""
    devices = _devices(samples)
    if not devices:
        return (f"{_largest(samples)} samples of one client are too few to hold some back: it takes {LEAST_ALONE}, or "
                f"several clients with {MIN_SAMPLES} each")
    if max(len(np.unique(samples.y[rows], axis=0)) for rows in devices.values()) > 1:
        return ""
    return "no client has samples that differ in what is to be learned" if samples.outputs else (
        "no client has samples of two classes")


def try_models(
    samples: Samples, spec: InputSpec, method: str, *, seed: int = 0, seconds: float = SECONDS,
    models: Sequence[Model] | None = None, say: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic, task: Mapping[str, Any] | None = None,
) -> Outcome:
    """Tries ``models``, by default those for samples of this shape, for at most ``seconds``. task: of numbers or
    labels, as keys of an experiment's table ``model``. ``reason_to_skip`` must be empty for the samples. Raises
    DataError if no device can be evaluated."""
    ends, remarks = clock() + seconds, list[str]()
    models = models_for(samples) if models is None else models
    part = _subset(samples, seed)
    few = 0.0 if task else _few_labels_share(part)
    say(f"a trial of {', '.join(model.label for model in models)} on {len(part.clients)} of "
        f"{max(1, len(samples.clients))} clients, {len(part)} of {len(samples)} samples: {seconds:.0f} s at most "
        "(--no-trial does without)")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.npz"
        save(path, part)
        work, found = None, list[TriedModel]()
        for number, model in enumerate(models):
            experiment = _experiment(path, part, spec, model, method, seed, few, task or {})
            work = work or workloads.build(experiment)
            until = clock() + (ends - clock()) / (len(models) - number)
            try:
                found.append(_try_model(experiment, model, Path(folder) / model.label, until, say, clock))
            except FleetError as error:
                remarks.append(f"{model.label} was not tried: {error.what}")
        assert work is not None
        held_out = bool(work.new)
        of = task_baselines if task else simple_baselines
        baselines = of.on_new_devices(work, SUPPORT, 0) if held_out else of.on_test_samples(work)
        with_few = (FewLabels(_few_labels(part), simple_baselines.on_new_devices(work, few, 0))
                    if held_out and few else None)
    on = (f"{len(work.new)} client{'s' * (len(work.new) > 1)} that did not train" if held_out
          else f"the last {100 * (1 - TRAIN_FRACTION):.0f} % of each client, by which the model is chosen too")
    return Outcome(on, tuple(found), _best(found), baselines, tuple(remarks), with_few)


def _best(found: Sequence[TriedModel]) -> TriedModel | None:
    """The first model within ``LEAST_GAP`` of the best validation score. The first is the default for such samples."""
    best = max((one.validation for one in found), default=0.0)
    return next((one for one in found if best - one.validation <= LEAST_GAP), None)


# Samples --------------------------------------------------------------------------------------------------------------


def _devices(samples: Samples) -> dict[str, np.ndarray[Any, Any]]:
    """Client -> its rows, for the clients with enough samples."""
    client = np.full(len(samples), ONE_CLIENT) if samples.client is None else samples.client
    names, index, counts = np.unique(client, return_inverse=True, return_counts=True)
    enough = np.flatnonzero(counts >= MIN_SAMPLES)
    if len(enough) < 2:
        enough = np.flatnonzero(counts >= LEAST_ALONE)
    return {str(names[k]): np.flatnonzero(index == k) for k in enough}


def _largest(samples: Samples) -> int:
    return len(samples) if samples.client is None else int(np.unique(samples.client, return_counts=True)[1].max())


def _subset(samples: Samples, seed: int) -> Samples:
    """A few clients drawn at random, and a few samples of each, evenly spread over time or order; samples with neither
    time nor client are drawn at random."""
    devices, rng = _devices(samples), np.random.default_rng(seed)
    names = sorted(devices)
    drawn = sorted(rng.permutation(len(names))[:MAX_DEVICES])
    most = MAX_OF_A_DEVICE * max(1, MAX_DEVICES // 4 // len(drawn))  # fewer clients get more samples each
    rows = []
    for k in drawn:
        own = devices[names[k]]
        if samples.time is not None:
            own = own[np.argsort(samples.time[own], kind="stable")]
        elif samples.client is None:
            own = rng.permutation(own)
        kept = min(len(own), most)
        rows.append(own[np.arange(kept) * len(own) // kept])
    part = samples.take(np.concatenate(rows))
    client = np.repeat(np.array([names[k] for k in drawn], dtype=np.str_), [len(own) for own in rows])
    return replace(part, client=client)


def _few_labels(part: Samples) -> int:
    return FEW_OF_A_CLASS * len(np.unique(part.y))


def _few_labels_share(part: Samples) -> float:
    """The share of a device's samples that makes few labels; 0 if that is at least ``SUPPORT``."""
    share = round(_few_labels(part) * len(part.clients) / len(part), 3)
    return share if share < SUPPORT else 0.0


def _experiment(
    path: Path, part: Samples, spec: InputSpec, model: Model, method: str, seed: int, few: float,
    task: Mapping[str, Any],
) -> Experiment:
    clients = len(part.clients)
    share = HELD_OUT if clients >= DEVICES_TO_HOLD_OUT else 0.0
    data: dict[str, Any] = {"path": str(path), "scale": spec.scale}
    if spec.mean:
        data |= {"mean": list(spec.mean), "std": list(spec.std)}
    return experiments.read({
        "data": data, "model": {"name": model.name, "options": dict(model.options), **task},
        "partition": {"kind": "natural", "options": {"split": "time", "train_fraction": TRAIN_FRACTION}},
        "method": [{"name": method}], "seeds": [seed], "budget": {"rounds": MAX_ROUNDS},
        "evaluation": {"every": 1, "new_devices": share, "support": [SUPPORT, few] if few else [SUPPORT],
                       "support_split": "time"},
        "cohort": min(COHORT, max(1, int(clients * (1 - share)))), "codec_up": "int8", "codec_down": "int8",
    })


# Runs -----------------------------------------------------------------------------------------------------------------


def _try_model(
    experiment: Experiment, model: Model, folder: Path, until: float, say: Callable[[str], None],
    clock: Callable[[], float],
) -> TriedModel:
    """Trains for as many rounds as end before ``until``, at least one. Raises FleetError."""
    (run,) = experiments.runs(experiment)
    simulate.checked(experiment, [run])
    work = workloads.build(experiment)
    experiment = replace(experiment, cohort=_cohort(experiment, run, work))
    task = simulate.RunTask(experiment, run, folder, "local", "cpu", probe.cores())
    rounds, last_line_at = 0, clock()

    def on_round(row: Any) -> None:
        nonlocal rounds, last_line_at
        rounds = int(row["round"])
        if clock() - last_line_at >= LINE_EVERY_S or rounds == MAX_ROUNDS or clock() > until:
            last_line_at = clock()
            say(f"{model.label}: round {rounds}, loss {row['loss']:.2g}, {max(0.0, until - clock()):.0f} s left for it")

    with contextlib.suppress(Stopped):  # the time is up
        simulate.run_one(task, on_round, lambda: rounds > 0 and clock() > until)
    result = simulate.result_of(task, Store(folder), work)
    return _figures(model, finished_runs.of_simulation(result, folder), experiment, work)


def _cohort(experiment: Experiment, run: Run, work: Workload) -> int:
    """Devices per round, so that a round takes some seconds. Raises DataError if a single device takes too long."""
    from fleet_core.learning import models
    from fleet_core.learning.layer_flops import flops_per_sample

    layout = workloads.layout_of(experiment, work)
    forward = flops_per_sample(models.build(layout), layout)
    if forward is None:
        return experiment.cohort
    batch = sum(getattr(run.hyper, name, 0) for name in ("batch", "support_batch", "query_batch"))
    flops = 3 * forward * getattr(run.hyper, "local_steps", 1) * max(1, batch)  # the backward pass costs twice as much
    if flops > MOST_FLOPS:
        raise DataError(f"a device's round is {flops_text(flops)}, too much for a trial")
    return max(1, min(experiment.cohort, int(ROUND_FLOPS / flops)))


def _figures(model: Model, run: FinishedRun, experiment: Experiment, work: Workload) -> TriedModel:
    rounds = int(run.spent["rounds"])
    own, layout = run.last[DEVICES], workloads.layout_of(experiment, work)
    parameters, payload = sum(tensor.size for tensor in layout.tensors), run.spent["payload_bytes"] / rounds
    known = [scores for share in experiment.evaluation.support if (scores := run.last.get(f"new {share}"))]
    figure, payload = FIGURES[run.figure], payload / experiment.cohort
    if figure != ACCURACY:
        validation = -own["pooled"] if figure.lower else own["pooled"]
        evaluated = known[0]["pooled"] if known else own["pooled"]
        return TriedModel(model, rounds, run.loss or 0.0, validation, evaluated, parameters, payload)
    new = [Score(accuracy=scores["pooled"], macro_f1=scores["macro_f1"]) for scores in known]
    return TriedModel(
        model, rounds, run.loss or 0.0, own["macro_f1"],
        new[0] if new else Score(accuracy=own["pooled"], macro_f1=own["macro_f1"]), parameters, payload,
        new[1] if len(new) > 1 else None,
    )
