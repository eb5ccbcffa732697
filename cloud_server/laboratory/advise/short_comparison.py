"""``metafleet advise``: a short comparison of methods and models on a user's recordings, within a time budget.

1. two methods with every model for two rounds, to measure how long a round takes;
2. all methods with one seed and two models, for as many rounds as the budget allows;
3. the best methods with the other models;
4. the best of all, and training alone, with two more seeds;
5. the recommended one with a few codecs.

A plain baseline and the most frequent class are measured on the same samples, or those of the task
(``task_baselines``).

The devices are the clients of the data, each split along time. A fifth of them never train: they are the new devices.
Every method runs with its default hyper-parameters.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from cloud_server.choices import codec_catalogue
from cloud_server.choices.first_settings import first_hyper, toml_with_defaults
from cloud_server.laboratory.advise import simple_baselines, task_baselines
from cloud_server.laboratory.advise.candidates import Candidate, candidates, label_of
from cloud_server.laboratory.advise.recommendation import CODEC, Advice, baseline_facts, decide, federated, together
from cloud_server.laboratory.advise.recordings import (
    MAX_CLIENTS,
    MIN_SAMPLES,
    REPEATING_MODELS,
    TRAIN_FRACTION,
    Recordings,
    recordings,
)
from cloud_server.laboratory.advise.simple_baselines import SimpleBaselines
from cloud_server.laboratory.advise.task_baselines import TaskBaselines
from cloud_server.laboratory.compare import finished_runs
from cloud_server.laboratory.compare.finished_runs import FinishedRun
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload as workloads
from cloud_server.laboratory.plan.experiment import LOSSES, PLAIN, TASKS, Experiment
from cloud_server.records.fleet_settings import FleetConfig
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import config, schema, storage
from fleet_core.base.errors import ConfigError
from fleet_core.base.processes import typed
from fleet_core.board import catalogue
from fleet_core.power.energy_model import BoardModel
from fleet_core.tasks import anomaly, regression
from fleet_core.tasks.labels import KIND as LABELS

METHODS_TRIED = ("local", "fedavg-meta", "p-avg-proto", "pfldyn-proto", "per-fedavg-fo", "knn-per")
"""The baselines, class means, and a method each of MAML's kin and with neighbours that sends few bytes. On heart beats
and human activity one of them was within the spread of the best method (benchmarks/papers/sensors)."""
CODECS_TRIED = ("int8", "int4", "ternary", "topk-10")
"""From the most bytes to the fewest; codecs with still fewer lost accuracy on the heart beats (benchmarks/cost)."""
TIMED = ("local", "per-fedavg-fo")  # the methods with the least and the most arithmetic
NEW_DEVICES, SUPPORT, COHORT = 0.2, 0.2, 10
PACE_ROUNDS, MIN_ROUNDS, MAX_ROUNDS, FLEET_ROUNDS = 2, 5, 50, 30
WITH_ALL_METHODS, BEST_METHODS = 2, 2
"""How many models run with all methods; how many of the best methods run with the other models."""
FINALISTS, MORE_SEEDS = 3, (1, 2)
PLANNED = 0.85  # share of the budget that the plan may use

NAMED_BY = {regression.KIND: "outputs", LABELS: "labels", anomaly.KIND: "normal"}
"""The option of ``metafleet init`` that has a task's names."""

T = TypeVar("T")
Simulate = Callable[[Experiment, Path, str], tuple[list[Path], list[str]]]
"""(experiment, folder, title) -> (folders of the runs that ended, why others failed)."""


@dataclass(frozen=True)
class Options:
    """data: a named set or a file. board: the profile that gives joules. window, stride: how a file of readings is cut
    into windows. codecs: the codecs to try with the best method, each NAME for both ways or UP/DOWN. task: as in an
    experiment. names: of its numbers or labels, empty for the file's own, or of the labels of quiet samples. loss: of
    numbers. size, fit, rate, seconds: as in ``samples.load_in_form``."""

    data: str = field(metadata={"max_length": 4096})
    budget_minutes: float = field(default=5.0, metadata={"above": 0, "max": 100_000})
    board: str | None = field(default=None, metadata={"max_length": 4096})
    window: int | None = field(default=None, metadata={"min": 1, "max": 1_000_000})
    stride: int | None = field(default=None, metadata={"min": 1, "max": 1_000_000})
    codecs: tuple[str, ...] = field(default=CODECS_TRIED, metadata={"max_length": 100})
    task: str = field(default=TASKS[0], metadata={"choices": TASKS, "sparse": True})
    names: tuple[str, ...] = field(default=(), metadata={"sparse": True})
    loss: str = field(default=LOSSES[0], metadata={"choices": LOSSES, "sparse": True})
    size: str | None = field(default=None, metadata={"sparse": True})
    fit: str | None = field(default=None, metadata={"sparse": True})
    rate: int | None = field(default=None, metadata={"sparse": True})
    seconds: float | None = field(default=None, metadata={"sparse": True})

    @property
    def methods(self) -> tuple[str, ...]:
        """The methods that are tried."""
        return tuple(name for name in METHODS_TRIED if self.task == TASKS[0] or not METHODS[name].needs_classes)

    @property
    def init(self) -> str:
        """Options of ``metafleet init`` for the task; empty for classes."""
        if self.task == TASKS[0]:
            return ""
        loss = f" --loss {self.loss}" if self.task == regression.KIND else ""
        named = f" --{NAMED_BY[self.task]} {typed(','.join(self.names))}" if self.names else ""
        return f" --task {self.task}{loss}{named}"


@dataclass(frozen=True)
class Plan:
    """What fits into the budget. It is written to plan.json, so that a stopped run continues with the same plan.
    models: labels of the models. whole: the first so many models run with all methods, the others only with the best
    methods."""

    rounds: int = field(metadata={"min": 1, "max": MAX_ROUNDS})
    models: tuple[str, ...]
    whole: int = field(default=WITH_ALL_METHODS, metadata={"min": 1})


@dataclass(frozen=True, eq=False)
class Outcome:
    """facts: data, devices, board and baselines of the comparison. fleet_toml: settings of a fleet as recommended; None
    if the classes have no names. command: the command that makes such a fleet, with the default input and cohort; None
    if the model has options."""

    advice: Advice
    facts: Mapping[str, Any]
    fleet_toml: str | None
    command: str | None


def advise(
    options: Options, out: Path, simulate: Simulate, *, cores: int, say: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """Runs the comparison and returns the advice. Runs are stored in ``out``, and continued there.

    Raises DataError for data that cannot be evaluated, and ConfigError for a budget that is too short.
    """
    found = recordings(options.data, options.window, options.stride, options.task, options.names, size=options.size,
                       fit=options.fit, rate=options.rate, seconds=options.seconds)
    work = _Work(options, found, out, simulate, cores, clock)
    for remark in work.remarks:
        say(f"note: {remark}")
    plan = work.plan()
    others = plan.models[plan.whole :]
    say(f"{plan.rounds} rounds of {len(options.methods)} methods with {together(plan.models[: plan.whole])}"
        + (f", and of the best {BEST_METHODS} with {together(others)}" if others else ""))
    return work.outcome(work.advice(plan))


class _Work:
    """The plan and the runs of one advice."""

    def __init__(
        self, options: Options, found: Recordings, out: Path, simulate: Simulate, cores: int, clock: Callable[[], float]
    ):
        self._options, self._found, self._out = options, found, out
        self._simulate, self._cores, self._clock, self._started = simulate, cores, clock, clock()
        self._models = {model.label: model for model in found.models}
        self.remarks = list(found.remarks)
        first = self._experiment("first", found.models[0].label, options.methods, (0,), 1, PLAIN, cohort=0)
        self._workload = workloads.build(first)

    # Plan -------------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """The stored plan of an earlier start, or a new one that fits the budget. Raises ConfigError."""
        known = _stored(self._out / "options.json", Options)
        if known is None:
            if self._out.exists() and any(self._out.iterdir()):
                raise ConfigError("is not empty and holds no advice", where=str(self._out), hint="give another --out")
            storage.write_json(self._out / "options.json", schema.plain(self._options))
        elif known != self._options:
            raise ConfigError("holds an advice with other options", where=str(self._out), hint="give another --out")
        plan = _stored(self._out / "plan.json", Plan)
        if plan is None:
            plan = Plan(*fitting_plan(*self._measure_rounds(), self._left_s, self._cores, len(self._options.codecs),
                                      len(self._options.methods)))
            storage.write_json(self._out / "plan.json", schema.plain(plan))
        left = [label for label in self._models if label not in plan.models]
        self.remarks += [f"the budget left no time for {together(left)}"] if left else []
        return plan

    @property
    def _left_s(self) -> float:
        return 60 * self._options.budget_minutes - (self._clock() - self._started)

    def _measure_rounds(self) -> tuple[dict[str, float], float]:
        """(model label -> seconds of a round, seconds that a run takes besides its rounds). Raises ConfigError."""
        began, round_s, runs = self._clock(), dict[str, float](), 0
        for label in self._models:
            found = self._run("pace", label, TIMED, (0,), PACE_ROUNDS, f"the pace of {label}")
            if not found and label in list(self._models)[WITH_ALL_METHODS:]:
                continue
            if not found:
                raise ConfigError(f"no method completes {PACE_ROUNDS} rounds with {label}",
                                  hint="; ".join(self.remarks))
            round_s[label] = sum(run.seconds for run in found) / len(found) / PACE_ROUNDS
            runs += len(found)
        busy_s = sum(round_s.values()) * PACE_ROUNDS * runs / len(round_s)
        return round_s, max(0.0, (self._clock() - began) * self._cores - busy_s) / runs

    # Runs -------------------------------------------------------------------------------------------------------------

    def advice(self, plan: Plan) -> Advice:
        """Runs the plan. Raises ConfigError if no run ends."""
        known = [
            run for label in plan.models[: plan.whole]
            for run in self._run("first", label, self._options.methods, (0,), plan.rounds, f"all methods with {label}")
        ]
        if not known:
            raise ConfigError("every method failed on these data", hint="; ".join(self.remarks))
        others = plan.models[plan.whole :]
        if others and self._time_for(together(others)):
            known += self._other_models(others, plan.rounds, known)
        if self._time_for("other seeds"):
            known += self._more_seeds(plan, known)
        found = candidates(known, self._cohort)
        coded = self._with_codecs(federated(decide(found)), plan.rounds)
        minutes = (self._clock() - self._started) / 60
        return decide(found, coded, rounds=plan.rounds, minutes=minutes, remarks=tuple(self.remarks))

    def _with_codecs(self, one: Candidate, rounds: int) -> list[Candidate]:
        """Runs the best method with each codec, as far as the budget allows. Runs none if the method is near chance,
        because no codec could make it worse."""
        left = list(self._options.codecs) if one.payload else []
        if left and self._near_chance(one, rounds):
            self.remarks.append(f"no codec was tried, because {one.name} is near chance")
            return []
        coded = list[FinishedRun]()
        while left and self._time_for(together(left)):
            codec, stage, seeds = left[0], left.pop(0).replace("/", "-"), range(one.score.seeds)
            coded += self._run(stage, one.model, (one.method,), seeds, rounds, f"{one.name}, {codec}", codec)
        return candidates(coded, self._cohort)

    def _near_chance(self, one: Candidate, rounds: int) -> bool:
        if isinstance(self.simple, TaskBaselines):
            return one.pooled_figure is not None and self.simple.near_constant(one.pooled_figure)
        return one.pooled is not None and bool(self.simple.near_chance(one.name, one.pooled, one.loss, rounds))

    @cached_property
    def simple(self) -> SimpleBaselines | TaskBaselines:
        if self._workload.task is None:
            return simple_baselines.on_test_samples(self._workload)
        return task_baselines.on_test_samples(self._workload)

    def _other_models(self, labels: Sequence[str], rounds: int, first: Sequence[FinishedRun]) -> list[FinishedRun]:
        """Runs the best methods with further models. ``logistic``, which is only a head, needs methods that share
        it."""
        ranked = decide(candidates(first, self._cohort)).ranked
        methods = list(dict.fromkeys(one.method for one in ranked if one.payload))
        found = list[FinishedRun]()
        for label in labels:
            whole = self._models[label].name != "logistic"
            best = [name for name in methods if whole or "head" in METHODS[name].shared][:BEST_METHODS]
            found += self._run("first", label, best, (0,), rounds, f"{together(best)} with {label}") if best else []
        return found

    def _more_seeds(self, plan: Plan, first: Sequence[FinishedRun]) -> list[FinishedRun]:
        best = decide(candidates(first, self._cohort)).ranked[:FINALISTS]
        wanted = dict.fromkeys([*((one.method, one.model) for one in best), ("local", best[0].model)])
        return [
            run for label in plan.models
            if (names := [method for method, model in wanted if model == label])
            for run in self._run("seeds", label, names, MORE_SEEDS, plan.rounds,
                                   f"{together(names)} with {label}, more seeds")
        ]

    def _time_for(self, what: str) -> bool:
        if self._left_s <= 0:
            self.remarks.append(f"the budget was used up before {what}")
        return self._left_s > 0

    @property
    def _cohort(self) -> int:
        return min(COHORT, len(self._workload.train))

    def _run(
        self, stage: str, label: str, methods: Sequence[str], seeds: Sequence[int], rounds: int, title: str,
        codec: str = PLAIN,
    ) -> list[FinishedRun]:
        """The runs that ended. The reasons of failed runs, and of a further model that is refused, become remarks."""
        experiment = self._experiment(stage, label, methods, seeds, rounds, codec, cohort=self._cohort)
        try:
            folders, failed = self._simulate(experiment, self._out / f"{stage}-{label}", title)
        except ConfigError as error:
            if label in list(self._models)[:WITH_ALL_METHODS]:
                raise
            folders, failed = list[Path](), [f"{label}: {error.what}"]
        self.remarks += failed
        return [finished_runs.read(folder / "result.json") for folder in folders]

    def _experiment(
        self, stage: str, label: str, methods: Sequence[str], seeds: Sequence[int], rounds: int, codec: str, cohort: int
    ) -> Experiment:
        model, many = self._models[label], self._found.clients > MAX_CLIENTS
        up, down = codec_catalogue.by_way(codec).values()
        return experiments.read({
            "data": dict(self._found.section),
            "model": {"name": model.name, "options": dict(model.options), **self._task},
            "partition": {"kind": "natural", "options": {
                "split": "time", "train_fraction": TRAIN_FRACTION, "min_samples": MIN_SAMPLES,
                "max_clients": MAX_CLIENTS if many else 0}},
            "method": [{"name": name, "label": label_of(name, label, codec), "hyper": self._hyper(name)}
                       for name in methods],
            "seeds": list(seeds),
            "evaluation": {"every": 0 if stage == "pace" else math.ceil(rounds / 2), "new_devices": NEW_DEVICES,
                           "support": [SUPPORT], "support_split": "time"},
            "budget": {"rounds": rounds}, "cohort": cohort, "codec_up": up, "codec_down": down,
            "board": self._options.board,
        })

    def _hyper(self, method: str) -> dict[str, Any]:
        """The table ``hyper`` of a method, as in a first fleet."""
        found: dict[str, Any] = schema.plain(
            first_hyper(METHODS[method], repeating=self._options.task == anomaly.KIND))
        return found

    @property
    def _task(self) -> dict[str, Any]:
        """Keys of an experiment's table ``model``."""
        loss = {"loss": self._options.loss} if self._options.task == regression.KIND else {}
        return {"task": self._options.task, **loss}

    # Outcome ----------------------------------------------------------------------------------------------------------

    def outcome(self, advice: Advice) -> Outcome:
        options, work = self._options, self._workload
        facts: dict[str, Any] = {
            "data": options.data, "devices": len(work.train), "new_devices": len(work.new), "support": SUPPORT,
            "evaluated": sum(len(share.test) for share in work.train), "board": options.board,
            "budget_minutes": options.budget_minutes, "cohort": self._cohort,
        }
        if options.board is not None:
            facts["absent"] = dict(BoardModel(catalogue.load(options.board)).absent_terms)
        facts |= baseline_facts(advice, self.simple)
        samples, task = self._found.samples, self._workload.task
        one, named = federated(advice), samples.classes is not None or task is not None
        model, rounds = self._models[one.model], max(advice.rounds, FLEET_ROUNDS)
        cut = "".join(f" --{name} {value}" for name in ("window", "stride", "size", "fit", "rate", "seconds")
                      if (value := getattr(options, name)) is not None)
        cut += options.init
        command = (f"metafleet init FLEET --data {typed(options.data)}{cut} --method {one.method} --model {model.name} "
                   f"--rounds {rounds}")
        command += f" --codec {codec_catalogue.option(advice.codec)}" if advice.codec != CODEC else ""
        return Outcome(advice, facts, self._fleet_toml(advice, rounds) if named else None,
                       command if named and (not model.options or model == REPEATING_MODELS[0]) else None)

    def _fleet_toml(self, advice: Advice, rounds: int) -> str:
        one = federated(advice)
        model, devices = self._models[one.model], len(self._workload.train)
        text = toml_with_defaults({
            "fleet": {"name": "advised", "method": one.method, "rounds": rounds,
                      "cohort": self._cohort if self._cohort < devices else 0},
            "model": {"name": model.name, "classes": list(self._workload.classes),
                      "input": schema.plain(self._workload.spec), "options": dict(model.options),
                      **({} if self._workload.task is None else {"task": schema.plain(self._workload.task)})},
            "link": codec_catalogue.by_way(advice.codec), "hyper": self._hyper(one.method),
        })
        config.parse(FleetConfig, text, "fleet.toml")
        return text


def later_runs(codecs: int) -> int:
    """The number of runs after those with one seed: of the best candidates with more seeds, and with each codec."""
    return (FINALISTS + 1) * len(MORE_SEEDS) + codecs * (1 + len(MORE_SEEDS))


def fitting_plan(
    round_s: Mapping[str, float], overhead_s: float, left_s: float, cores: int, codecs: int,
    methods_tried: int = len(METHODS_TRIED),
) -> tuple[int, tuple[str, ...], int]:
    """The first of these plans that fits into ``left_s`` seconds, as (rounds, models, how many run with all methods):
    all models; the first two; the first two, but only the faster one with all methods; the faster one alone; the faster
    one with one codec.

    round_s: model label -> seconds of a round. overhead_s: seconds of a run besides its rounds. codecs: how many are to
    be tried. Raises ConfigError if none fits.
    """
    first = tuple(round_s)[:WITH_ALL_METHODS]
    fastest = min(first, key=lambda label: round_s[label])
    needed_s = math.inf
    ordered = (fastest, *(label for label in first if label != fastest))
    both = WITH_ALL_METHODS
    for labels, whole, tried in ((tuple(round_s), both, codecs), (first, both, codecs), (ordered, 1, codecs),
                                 ((fastest,), 1, codecs), ((fastest,), 1, min(1, codecs))):
        methods = [methods_tried if number < whole else BEST_METHODS for number in range(len(labels))]
        runs = sum(methods) + later_runs(tried)
        all_runs_s = sum(number * round_s[label] for number, label in zip(methods, labels, strict=True))
        all_runs_s += later_runs(tried) * max(round_s[label] for label in labels)
        rounds = int((PLANNED * left_s * cores - runs * overhead_s) / all_runs_s)
        if rounds >= MIN_ROUNDS:
            return min(rounds, MAX_ROUNDS), labels, whole
        needed_s = (runs * overhead_s + MIN_ROUNDS * all_runs_s) / (PLANNED * cores)
    missing = math.ceil((needed_s - left_s) / 60)
    raise ConfigError(f"the budget is too short: {MIN_ROUNDS} rounds with {fastest} alone take about {missing} minute"
                      f"{'s' * (missing > 1)} more", where="--budget-minutes")


def _stored(path: Path, cls: type[T]) -> T | None:
    """The object that an earlier call wrote, or None. Raises ConfigError for a damaged file."""
    if not path.exists():
        return None
    try:
        found, problems = schema.read(cls, json.loads(storage.read_bytes(path, limit=1 << 20)))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is not JSON: {error}", where=str(path), hint="give another --out") from error
    if found is None:
        raise ConfigError("; ".join(map(str, problems)), where=str(path), hint="give another --out")
    return found
