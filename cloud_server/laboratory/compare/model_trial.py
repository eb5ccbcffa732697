"""A trial before a fleet is made: each candidate model trains for a moment by the fleet's method, on one's samples.

Where there are devices enough, a quarter of them never train: a model is chosen by macro-F1 on the later samples of the
devices that train, and told by its accuracy on those that do not, with as many labels as they have and with few. With
fewer devices there are the later samples alone, on which it is both chosen and told. Beside it stand a plain baseline
and the most frequent class.

The time is bounded: few devices, few samples of each, and a deadline that is looked at after every round.
"""

from __future__ import annotations

import contextlib
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.laboratory.compare import finished_runs, plain_yardsticks
from cloud_server.laboratory.compare.advice import LEAST_GAP
from cloud_server.laboratory.compare.finished_runs import DEVICES, Trial
from cloud_server.laboratory.compare.plain_yardsticks import Yardsticks
from cloud_server.laboratory.run import experiment as experiments
from cloud_server.laboratory.run import simulate
from cloud_server.laboratory.run import workload as workloads
from cloud_server.laboratory.run.engine import Stopped
from cloud_server.laboratory.run.experiment import Experiment, Run
from cloud_server.laboratory.run.recordings import MIN_SAMPLES, TRAIN_FRACTION, Model, models_for
from cloud_server.laboratory.run.run_folder import Store
from cloud_server.laboratory.run.workload import Workload
from cloud_server.reports.formatting import ABSENT, bytes_text, flops_text, share_text
from cloud_server.reports.scores import Score
from cloud_server.reports.verdict import worse
from fleet_core.base.errors import DataError, FleetError
from fleet_core.data.samples import Samples, save
from fleet_core.model.layout import InputSpec

SECONDS = 50.0
MAX_ROUNDS = 30
MAX_DEVICES, MAX_OF_A_DEVICE, LEAST_ALONE = 16, 200, 40
COHORT = 10
ROUND_FLOPS, MOST_FLOPS = 3e10, 3e11
"""Of a round's training, some seconds: a larger model has fewer devices a round. Of one device's: a model with more is
not tried."""
HELD_OUT, SUPPORT, DEVICES_TO_HOLD_OUT = 0.25, 0.2, 4
FEW_OF_A_CLASS = 5
"""Labelled samples of each class that a device may have when it joins."""
LINE_EVERY_S = 10.0
ONE_CLIENT = "all"


@dataclass(frozen=True)
class Tried:
    """A model after ``rounds``. validation: macro-F1 by which it is chosen. evaluated: what it is told by. payload:
    bytes of one device in one round, up and down. few: on devices that did not train and have few labels; None where
    that was not tried."""

    model: Model
    rounds: int
    loss: float
    validation: float
    evaluated: Score
    parameters: int
    payload: float
    few: Score | None = None


@dataclass(frozen=True)
class FewLabels:
    """How devices are evaluated that did not train and have few labels. number: of labels. beside: what is known
    without a model."""

    number: int
    beside: Yardsticks


@dataclass(frozen=True, eq=False)
class Outcome:
    """on: what the models are evaluated on, in words. chosen: None where none came to a round's end."""

    on: str
    tried: tuple[Tried, ...]
    chosen: Tried | None
    beside: Yardsticks
    remarks: tuple[str, ...]
    few: FewLabels | None = None

    @property
    def warnings(self) -> list[str]:
        """What is wrong with the chosen model, and what to try; empty where nothing is."""
        one = self.chosen
        if one is None:
            return []
        return [*self.beside.warnings(one.model.label, one.evaluated, one.loss, one.rounds), *self._of_few_labels(one)]

    def _of_few_labels(self, one: Tried) -> list[str]:
        plain = self.few and self.few.beside.plain
        if not (self.few and plain and one.few and worse(one.few, plain, self.few.beside.truth)):
            return []
        return [f"a device that joins with {self.few.number} labelled samples: {one.model.label} reaches "
                f"{share_text(one.few.accuracy)} there, a plain baseline ({plain.method}) that knows the other devices "
                f"{share_text(plain.accuracy)}; label more on a new device, or let it train before you rely on it"]

    def rows(self) -> list[tuple[str, ...]]:
        """Of the table with ``HEADS``."""
        models = [
            (f"{one.model.label}{' *' if one is self.chosen else ''}", share_text(one.evaluated.accuracy),
             share_text(one.evaluated.macro_f1), f"{one.parameters:,}", bytes_text(one.payload), str(one.rounds),
             f"{one.loss:.2g}")
            for one in self.tried
        ]
        others = [("most frequent class", self.beside.frequent)]
        others += [(self.beside.plain.method or "", self.beside.plain)] if self.beside.plain else []
        return models + [(name, share_text(score.accuracy), share_text(score.macro_f1), *[ABSENT] * 4)
                         for name, score in others]


HEADS = ("model", "accuracy", "macro-F1", "parameters", "bytes a round", "rounds", "loss")


def why_not(samples: Samples) -> str:
    """Why nothing can be tried on these; empty where it can."""
    devices = _devices(samples)
    if not devices:
        return (f"{_largest(samples)} samples of one client are too few to hold some back: it takes {LEAST_ALONE}, or "
                f"several clients with {MIN_SAMPLES} each")
    classes = max(len(np.unique(samples.y[rows])) for rows in devices.values())
    return "no client has samples of two classes" if classes < 2 else ""


def tryout(
    samples: Samples, spec: InputSpec, method: str, *, seed: int = 0, seconds: float = SECONDS,
    models: Sequence[Model] | None = None, say: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """The candidates ``models`` (by default those for such samples) on samples that ``why_not`` has no objection to.
    Raises DataError for samples that no device can be evaluated on."""
    ends, remarks = clock() + seconds, list[str]()
    models = models_for(samples) if models is None else models
    part = _part(samples, seed)
    few = _few(part)
    say(f"a trial of {', '.join(model.label for model in models)} on {len(part.clients)} of "
        f"{max(1, len(samples.clients))} clients, {len(part)} of {len(samples)} samples: {seconds:.0f} s at most "
        "(--no-trial does without)")
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "samples.npz"
        save(path, part)
        work, found = None, list[Tried]()
        for number, model in enumerate(models):
            asked = _asked(path, part, spec, model, method, seed, few)
            work = work or workloads.build(asked)
            until = clock() + (ends - clock()) / (len(models) - number)
            try:
                found.append(_tried(asked, model, Path(folder) / model.label, until, say, clock))
            except FleetError as error:
                remarks.append(f"{model.label} was not tried: {error.what}")
        assert work is not None
        held_out = bool(work.new)
        beside = plain_yardsticks.of_new(work, SUPPORT, 0) if held_out else plain_yardsticks.of_later(work)
        told = FewLabels(_few_labels(part), plain_yardsticks.of_new(work, few, 0)) if held_out and few else None
    on = (f"{len(work.new)} client{'s' * (len(work.new) > 1)} that did not train" if held_out
          else f"the last {100 * (1 - TRAIN_FRACTION):.0f} % of each client, by which the model is chosen too")
    return Outcome(on, tuple(found), _chosen(found), beside, tuple(remarks), told)


def _chosen(found: Sequence[Tried]) -> Tried | None:
    """The best by validation, and of those that are as good the first, which is the usual one for such samples."""
    best = max((one.validation for one in found), default=0.0)
    return next((one for one in found if best - one.validation <= LEAST_GAP), None)


# Samples --------------------------------------------------------------------------------------------------------------


def _devices(samples: Samples) -> dict[str, np.ndarray[Any, Any]]:
    """Rows of each client that has enough samples, by its name."""
    client = np.full(len(samples), ONE_CLIENT) if samples.client is None else samples.client
    names, index, counts = np.unique(client, return_inverse=True, return_counts=True)
    enough = np.flatnonzero(counts >= MIN_SAMPLES)
    if len(enough) < 2:
        enough = np.flatnonzero(counts >= LEAST_ALONE)
    return {str(names[k]): np.flatnonzero(index == k) for k in enough}


def _largest(samples: Samples) -> int:
    return len(samples) if samples.client is None else int(np.unique(samples.client, return_counts=True)[1].max())


def _part(samples: Samples, seed: int) -> Samples:
    """Few clients drawn at random, few samples of each, spread evenly over their order (at random where neither a time
    nor a client says what an order means)."""
    devices, rng = _devices(samples), np.random.default_rng(seed)
    names = sorted(devices)
    drawn = sorted(rng.permutation(len(names))[:MAX_DEVICES])
    most = MAX_OF_A_DEVICE * max(1, MAX_DEVICES // 4 // len(drawn))  # a single client stands for several
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


def _few(part: Samples) -> float:
    """The share of a device's samples that few labels are; 0 where ``SUPPORT`` is no more than that."""
    share = round(_few_labels(part) * len(part.clients) / len(part), 3)
    return share if share < SUPPORT else 0.0


def _asked(
    path: Path, part: Samples, spec: InputSpec, model: Model, method: str, seed: int, few: float
) -> Experiment:
    clients = len(part.clients)
    share = HELD_OUT if clients >= DEVICES_TO_HOLD_OUT else 0.0
    data: dict[str, Any] = {"path": str(path), "scale": spec.scale}
    if spec.mean:
        data |= {"mean": list(spec.mean), "std": list(spec.std)}
    return experiments.read({
        "data": data, "model": {"name": model.name, "options": dict(model.options)},
        "partition": {"kind": "natural", "options": {"split": "time", "train_fraction": TRAIN_FRACTION}},
        "method": [{"name": method}], "seeds": [seed], "budget": {"rounds": MAX_ROUNDS},
        "evaluation": {"every": 1, "new_devices": share, "support": [SUPPORT, few] if few else [SUPPORT],
                  "support_split": "time"},
        "cohort": min(COHORT, max(1, int(clients * (1 - share)))), "codec_up": "int8", "codec_down": "int8",
    })


# Runs -----------------------------------------------------------------------------------------------------------------


def _tried(
    asked: Experiment, model: Model, folder: Path, until: float, say: Callable[[str], None], clock: Callable[[], float]
) -> Tried:
    """As many rounds as end before ``until``, one at least. Raises FleetError."""
    (run,) = experiments.runs(asked)
    simulate.checked(asked, [run])
    work = workloads.build(asked)
    asked = replace(asked, cohort=_cohort(asked, run, work))
    order = simulate.Order(asked, run, folder, "local", "cpu", simulate.cores_here())
    rounds, told = 0, clock()

    def heard(row: Any) -> None:
        nonlocal rounds, told
        rounds = int(row["round"])
        if clock() - told >= LINE_EVERY_S or rounds == MAX_ROUNDS or clock() > until:
            told = clock()
            say(f"{model.label}: round {rounds}, loss {row['loss']:.2g}, {max(0.0, until - clock()):.0f} s left for it")

    with contextlib.suppress(Stopped):  # the time is up
        simulate.one(order, heard, lambda: rounds > 0 and clock() > until)
    store = Store(folder)
    return _figures(model, finished_runs.of_simulation(simulate.result_of(order, store, work), folder), asked, work)


def _cohort(asked: Experiment, run: Run, work: Workload) -> int:
    """Devices of a round, so that it takes some seconds. Raises DataError where one device alone takes too long."""
    from fleet_core.learning import models

    layout = workloads.layout_of(asked, work)
    forward = models.flops_per_sample(models.build(layout), layout)
    if forward is None:
        return asked.cohort
    batch = sum(getattr(run.hyper, name, 0) for name in ("batch", "support_batch", "query_batch"))
    flops = 3 * forward * getattr(run.hyper, "local_steps", 1) * max(1, batch)  # backwards costs twice as much
    if flops > MOST_FLOPS:
        raise DataError(f"a device's round is {flops_text(flops)}, too much for a trial")
    return max(1, min(asked.cohort, int(ROUND_FLOPS / flops)))


def _figures(model: Model, trial: Trial, asked: Experiment, work: Workload) -> Tried:
    rounds = int(trial.spent["rounds"])
    own, layout = trial.last[DEVICES], workloads.layout_of(asked, work)
    new = [Score(accuracy=scores["pooled"], macro_f1=scores["macro_f1"])
           for share in asked.evaluation.support if (scores := trial.last.get(f"new {share}"))]
    return Tried(
        model, rounds, trial.loss or 0.0, own["macro_f1"],
        new[0] if new else Score(accuracy=own["pooled"], macro_f1=own["macro_f1"]),
        sum(tensor.size for tensor in layout.tensors), trial.spent["payload_bytes"] / rounds / asked.cohort,
        new[1] if len(new) > 1 else None,
    )
