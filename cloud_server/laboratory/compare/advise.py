"""``metafleet advise``: a short, budgeted comparison on a person's own recordings.

1. two methods with every model for two rounds, to see how long a round takes here;
2. all methods with one seed and two models, for as many rounds as the budget allows;
3. the best of them with the other models;
4. the best of all, and training alone, with two seeds more;
5. the one to take, with int8 on the wire.

Beside them stand a plain baseline and the most frequent class, on the same samples.

Devices are the data's own clients, each split along time, and a fifth of them never train: they are the new devices.
Every method runs with its own defaults; nothing is tuned.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from cloud_server.laboratory.compare import finished_runs, plain_yardsticks
from cloud_server.laboratory.compare.advice import CODEC, Advice, candidates, decide, federated, together
from cloud_server.laboratory.compare.finished_runs import Trial
from cloud_server.laboratory.compare.plain_yardsticks import Yardsticks
from cloud_server.laboratory.run import experiment as experiments
from cloud_server.laboratory.run import workload as workloads
from cloud_server.laboratory.run.experiment import PLAIN, Experiment
from cloud_server.laboratory.run.recordings import MAX_CLIENTS, MIN_SAMPLES, TRAIN_FRACTION, Recordings, recordings
from cloud_server.records.fleet_folder import FleetConfig
from cloud_server.running.first_settings import toml_with_defaults
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import config, schema, storage
from fleet_core.base.errors import ConfigError
from fleet_core.base.processes import typed
from fleet_core.board import catalogue
from fleet_core.power.energy_model import BoardModel

TRIED = ("local", "fedavg-meta", "p-avg-proto", "pfldyn-proto", "per-fedavg-fo", "knn-per")
"""The yardsticks, and those that did best of all methods on heart beats and human activity (benchmarks/papers/sensors),
of each kind the one that sends least."""
PACED = ("local", "per-fedavg-fo")  # those with the least and the most arithmetic
NEW_DEVICES, SUPPORT, COHORT = 0.2, 0.2, 10
PACE_ROUNDS, MIN_ROUNDS, MAX_ROUNDS, FLEET_ROUNDS = 2, 5, 50, 30
WITH_ALL_METHODS, BEST_METHODS = 2, 2
"""How many models run with all methods; how many methods, the best, run with the others."""
FINALISTS, MORE_SEEDS = 3, (1, 2)
LATER_RUNS = (FINALISTS + 1) * len(MORE_SEEDS) + 1 + len(MORE_SEEDS)
PLANNED = 0.85  # share of the budget

T = TypeVar("T")
Simulate = Callable[[Experiment, Path, str], tuple[list[Path], list[str]]]
"""(experiment, folder, title) to (folders of the runs that ended, why others failed)."""


@dataclass(frozen=True)
class Options:
    """data: a named set or a file. board: whose joules are told. window, stride: of a file of readings."""

    data: str = field(metadata={"max_length": 4096})
    budget_minutes: float = field(default=5.0, metadata={"above": 0, "max": 100_000})
    board: str | None = field(default=None, metadata={"max_length": 4096})
    window: int | None = field(default=None, metadata={"min": 1, "max": 1_000_000})
    stride: int | None = field(default=None, metadata={"min": 1, "max": 1_000_000})


@dataclass(frozen=True)
class Plan:
    """What the budget allows; written to plan.json, so that what was stopped goes on with the same. models: labels.
    whole: how many of them, the first, run with all methods; the others run with the best."""

    rounds: int = field(metadata={"min": 1, "max": MAX_ROUNDS})
    models: tuple[str, ...]
    whole: int = field(default=WITH_ALL_METHODS, metadata={"min": 1})


@dataclass(frozen=True, eq=False)
class Outcome:
    """facts: what was compared on. fleet_toml: of a fleet with the chosen settings; None where classes have no names.
    command: the shorter way to such a fleet, without what fleet_toml says of input, codecs and cohort; None where the
    model has options."""

    advice: Advice
    facts: Mapping[str, Any]
    fleet_toml: str | None
    command: str | None


def advise(
    options: Options, out: Path, simulate: Simulate, *, cores: int, say: Callable[[str], None] = lambda line: None,
    clock: Callable[[], float] = time.monotonic,
) -> Outcome:
    """The advice; what was run for it lies in ``out``, and goes on there.

    Raises DataError for data that cannot be evaluated, and ConfigError for a budget that is too short for them.
    """
    work = _Work(options, recordings(options.data, options.window, options.stride), out, simulate, cores, clock)
    for remark in work.remarks:
        say(f"note: {remark}")
    plan = work.plan()
    others = plan.models[plan.whole :]
    say(f"{plan.rounds} rounds of {len(TRIED)} methods with {together(plan.models[: plan.whole])}"
        + (f", and of the best {BEST_METHODS} with {together(others)}" if others else ""))
    return work.outcome(work.advice(plan))


class _Work:
    """The runs of one advice."""

    def __init__(
        self, options: Options, found: Recordings, out: Path, simulate: Simulate, cores: int, clock: Callable[[], float]
    ):
        self._options, self._found, self._out = options, found, out
        self._simulate, self._cores, self._clock, self._started = simulate, cores, clock, clock()
        self._models = {model.label: model for model in found.models}
        self.remarks = list(found.remarks)
        self._workload = workloads.build(self._asked("first", found.models[0].label, TRIED, (0,), 1, PLAIN, cohort=0))

    # Plan -------------------------------------------------------------------------------------------------------------

    def plan(self) -> Plan:
        """That of an advice that lies there, or one that fits the budget. Raises ConfigError."""
        known = _noted(self._out / "options.json", Options)
        if known is None:
            if self._out.exists() and any(self._out.iterdir()):
                raise ConfigError("is not empty and holds no advice", where=str(self._out), hint="give another --out")
            storage.write_json(self._out / "options.json", schema.plain(self._options))
        elif known != self._options:
            raise ConfigError("holds an advice with other options", where=str(self._out), hint="give another --out")
        plan = _noted(self._out / "plan.json", Plan)
        if plan is None:
            plan = Plan(*planned(*self._paces(), self._left_s, self._cores))
            storage.write_json(self._out / "plan.json", schema.plain(plan))
        left = [label for label in self._models if label not in plan.models]
        self.remarks += [f"the budget left no time for {together(left)}"] if left else []
        return plan

    @property
    def _left_s(self) -> float:
        return 60 * self._options.budget_minutes - (self._clock() - self._started)

    def _paces(self) -> tuple[dict[str, float], float]:
        """(seconds of a run's round, by model; what a run takes beside its rounds)."""
        began, paces, runs = self._clock(), dict[str, float](), 0
        for label in self._models:
            found = self._run("pace", label, PACED, (0,), PACE_ROUNDS, f"the pace of {label}")
            if not found and label in list(self._models)[WITH_ALL_METHODS:]:
                continue
            if not found:
                raise ConfigError(f"no method gets through {PACE_ROUNDS} rounds with {label}",
                                  hint="; ".join(self.remarks))
            paces[label] = sum(trial.seconds for trial in found) / len(found) / PACE_ROUNDS
            runs += len(found)
        busy_s = sum(paces.values()) * PACE_ROUNDS * runs / len(paces)
        return paces, max(0.0, (self._clock() - began) * self._cores - busy_s) / runs

    # Runs -------------------------------------------------------------------------------------------------------------

    def advice(self, plan: Plan) -> Advice:
        """Raises ConfigError where no run comes to an end."""
        known = [
            trial for label in plan.models[: plan.whole]
            for trial in self._run("first", label, TRIED, (0,), plan.rounds, f"all methods with {label}")
        ]
        if not known:
            raise ConfigError("no method comes to an end with these data", hint="; ".join(self.remarks))
        others = plan.models[plan.whole :]
        if others and self._time_for(together(others)):
            known += self._other_models(others, plan.rounds, known)
        if self._time_for("other seeds"):
            known += self._more_seeds(plan, known)
        found = candidates(known, self._cohort)
        one = federated(decide(found))
        coded: list[Trial] = []
        if one.payload and self._time_for(CODEC):
            seeds = range(one.score.seeds)
            coded = self._run(CODEC, one.model, (one.method,), tuple(seeds), plan.rounds, f"{one.name}, {CODEC}", CODEC)
        minutes = (self._clock() - self._started) / 60
        return decide(found, candidates(coded, self._cohort), rounds=plan.rounds, minutes=minutes,
                      remarks=tuple(self.remarks))

    def _other_models(self, labels: Sequence[str], rounds: int, first: Sequence[Trial]) -> list[Trial]:
        """The best methods with further models; one that is a head alone goes with methods that share it."""
        ranked = decide(candidates(first, self._cohort)).ranked
        methods = list(dict.fromkeys(one.method for one in ranked if one.payload))
        found = list[Trial]()
        for label in labels:
            whole = self._models[label].name != "logistic"
            best = [name for name in methods if whole or "head" in METHODS[name].shared][:BEST_METHODS]
            found += self._run("first", label, best, (0,), rounds, f"{together(best)} with {label}") if best else []
        return found

    def _more_seeds(self, plan: Plan, first: Sequence[Trial]) -> list[Trial]:
        best = decide(candidates(first, self._cohort)).ranked[:FINALISTS]
        wanted = dict.fromkeys([*((one.method, one.model) for one in best), ("local", best[0].model)])
        return [
            trial for label in plan.models
            if (names := [method for method, model in wanted if model == label])
            for trial in self._run("seeds", label, names, MORE_SEEDS, plan.rounds,
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
    ) -> list[Trial]:
        """The runs that ended; why others did not becomes a remark, also that a further model is refused."""
        asked = self._asked(stage, label, methods, seeds, rounds, codec, cohort=self._cohort)
        try:
            folders, failed = self._simulate(asked, self._out / f"{stage}-{label}", title)
        except ConfigError as error:
            if label in list(self._models)[:WITH_ALL_METHODS]:
                raise
            folders, failed = list[Path](), [f"{label}: {error.what}"]
        self.remarks += failed
        return [finished_runs.read(folder / "result.json") for folder in folders]

    def _asked(
        self, stage: str, label: str, methods: Sequence[str], seeds: Sequence[int], rounds: int, codec: str, cohort: int
    ) -> Experiment:
        model, many = self._models[label], self._found.clients > MAX_CLIENTS
        ending = f"+{label}" + ("" if codec == PLAIN else f"+{codec}")
        return experiments.read({
            "data": dict(self._found.section), "model": {"name": model.name, "options": dict(model.options)},
            "partition": {"kind": "natural", "options": {
                "split": "time", "train_fraction": TRAIN_FRACTION, "min_samples": MIN_SAMPLES,
                "max_clients": MAX_CLIENTS if many else 0}},
            "method": [{"name": name, "label": name + ending} for name in methods], "seeds": list(seeds),
            "evaluation": {"every": 0 if stage == "pace" else math.ceil(rounds / 2), "new_devices": NEW_DEVICES,
                      "support": [SUPPORT], "support_split": "time"},
            "budget": {"rounds": rounds}, "cohort": cohort, "codec_up": codec, "codec_down": codec,
            "board": self._options.board,
        })

    # What comes of it -------------------------------------------------------------------------------------------------

    def outcome(self, advice: Advice) -> Outcome:
        options, work = self._options, self._workload
        facts: dict[str, Any] = {
            "data": options.data, "devices": len(work.train), "new_devices": len(work.new), "support": SUPPORT,
            "evaluated": sum(len(share.test) for share in work.train), "board": options.board,
            "budget_minutes": options.budget_minutes, "cohort": self._cohort,
        }
        if options.board is not None:
            facts["absent"] = dict(BoardModel(catalogue.load(options.board)).absent_terms)
        facts |= _beside(advice, plain_yardsticks.of_later(work))
        one, named = federated(advice), self._found.samples.classes is not None
        model, rounds = self._models[one.model], max(advice.rounds, FLEET_ROUNDS)
        cut = "".join(f" --{name} {value}" for name, value in (("window", options.window), ("stride", options.stride))
                      if value is not None)
        command = (f"metafleet init FLEET --data {typed(options.data)}{cut} --method {one.method} --model {model.name} "
                   f"--rounds {rounds}")
        return Outcome(advice, facts, self._fleet_toml(advice, rounds) if named else None,
                       command if named and not model.options else None)

    def _fleet_toml(self, advice: Advice, rounds: int) -> str:
        one = federated(advice)
        model, devices = self._models[one.model], len(self._workload.train)
        text = toml_with_defaults({
            "fleet": {"name": "advised", "method": one.method, "rounds": rounds,
                      "cohort": self._cohort if self._cohort < devices else 0},
            "model": {"name": model.name, "classes": list(self._workload.classes),
                      "input": schema.plain(self._workload.spec), "options": dict(model.options)},
            "link": {"up": advice.codec, "down": advice.codec}, "hyper": schema.plain(METHODS[one.method].hyper()),
        })
        config.parse(FleetConfig, text, "fleet.toml")
        return text


def _beside(advice: Advice, beside: Yardsticks) -> dict[str, Any]:
    """For the facts: what simple answers come to, and what is wrong with the one to take and with others."""
    one = federated(advice)
    warnings = [] if one.pooled is None else beside.warnings(one.name, one.pooled, one.loss, advice.rounds)
    for other in advice.ranked:
        if other is not one and other.pooled is not None:
            warnings += beside.by_chance(other.name, other.pooled, other.loss, advice.rounds)
    facts = {"plain": beside.plain, "frequent": beside.frequent}
    return {**{name: schema.plain(score) for name, score in facts.items() if score is not None}, "warnings": warnings}


def planned(
    paces: Mapping[str, float], overhead_s: float, left_s: float, cores: int
) -> tuple[int, tuple[str, ...], int]:
    """(rounds, models, how many of these run with all methods) that fit into ``left_s``: all models; the first two;
    these with all methods for the quicker one alone; that one. Raises ConfigError where not even that one does. paces:
    seconds of a run's round, by model. overhead_s: of a run, beside its rounds."""
    first = tuple(paces)[:WITH_ALL_METHODS]
    quickest = min(first, key=lambda label: paces[label])
    needed_s = math.inf
    ordered = (quickest, *(label for label in first if label != quickest))
    for labels, whole in ((tuple(paces), WITH_ALL_METHODS), (first, WITH_ALL_METHODS), (ordered, 1), ((quickest,), 1)):
        methods = [len(TRIED) if number < whole else BEST_METHODS for number in range(len(labels))]
        runs = sum(methods) + LATER_RUNS
        round_s = sum(number * paces[label] for number, label in zip(methods, labels, strict=True))
        round_s += LATER_RUNS * max(paces[label] for label in labels)
        rounds = int((PLANNED * left_s * cores - runs * overhead_s) / round_s)
        if rounds >= MIN_ROUNDS:
            return min(rounds, MAX_ROUNDS), labels, whole
        needed_s = (runs * overhead_s + MIN_ROUNDS * round_s) / (PLANNED * cores)
    missing = math.ceil((needed_s - left_s) / 60)
    raise ConfigError(f"the budget is too short: {MIN_ROUNDS} rounds with {quickest} alone take about {missing} minute"
                      f"{'s' * (missing > 1)} more", where="--budget-minutes")


def _noted(path: Path, cls: type[T]) -> T | None:
    """What an earlier call wrote there, or None. Raises ConfigError."""
    if not path.exists():
        return None
    try:
        found, problems = schema.read(cls, json.loads(storage.read_bytes(path, limit=1 << 20)))
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"is no JSON: {error}", where=str(path), hint="give another --out") from error
    if found is None:
        raise ConfigError("; ".join(map(str, problems)), where=str(path), hint="give another --out")
    return found
