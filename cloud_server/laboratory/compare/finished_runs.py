"""Reads finished runs for a comparison: simulations, fleets and demos."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.figures.scores import ACCURACY, AMOUNT, FIGURES, SHARE, Compared, TaskScore
from cloud_server.results import outcome
from cloud_server.results import result as results
from cloud_server.results.folded_rounds import FoldedSums
from cloud_server.results.result import Personalization, Result, RoundFigures
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import schema
from fleet_core.base.errors import ConfigError, DataError, StateError
from fleet_core.base.processes import typed

DEVICES, NOVEL = "devices", "novel"
BY = " by "
"""Between devices and the kind of model that they were evaluated under if not the served one: ``devices by server``."""
EVALUATION_SETTING = ("new_devices", "validation", "support", "support_split", "within_training", "novel_classes",
                      "novel", "devices", "test_step")
SETTING_SECTIONS = ("evaluation", "data", "partition", "model")
RUN_SPECIFIC = ("demo.seed", "demo.baseline", "fleet.fleet.seed", "fleet.fleet.name", "fleet.link.broker")
MAX_RUNS = 10_000

Scores = Mapping[str, float]


@dataclass(frozen=True)
class Point:
    """An evaluated round.

    scores: for ``devices`` (those that train), ``new SHARE`` and ``novel``: mean, worst, best and variance over the
    devices, their number, pooled, macro_f1, calibration_error, nvar; of a task without classes also ``MEASURE OUTPUT``.
    Also under other kinds of models than the served one, as ``devices by KIND``. spent: measure -> cost from the first
    round to the end of this one. Missing figures are left out.
    """

    round: int
    scores: Mapping[str, Scores]
    spent: Mapping[str, float]


@dataclass(frozen=True)
class FinishedRun:
    """One run. where: its result.json. setting: part -> text; it must be equal in runs whose methods are compared.
    choices: its other options. points: in order of rounds. last: the final evaluation. spent: costs of the whole run.
    seconds: duration of its rounds on the machine that ran it, not on devices. loss: training loss of the last round.
    figure: what mean, worst and best are of, a key of ``FIGURES``."""

    where: Path
    kind: str
    label: str
    method: str
    seed: int
    devices: int
    setting: Mapping[str, str]
    choices: Mapping[str, str]
    targets: tuple[float, ...]
    points: tuple[Point, ...]
    last: Mapping[str, Scores]
    spent: Mapping[str, float]
    seconds: float
    loss: float | None = None
    figure: str = ACCURACY.key


def gather(places: Sequence[Path]) -> tuple[list[FinishedRun], list[str]]:
    """(finished runs in ``places``, remarks about unfinished ones). A place is a folder of runs, the folder of a run or
    a fleet, or a result.json. Raises ConfigError and StateError."""
    runs, remarks = dict[Path, FinishedRun](), list[str]()
    for place in places:
        found = list(_results(place))
        remarks += [f"{folder} has not ended and is left out" for folder in _unfinished(place)]
        if not found and not (place / "fleet.toml").exists():
            raise ConfigError("holds no run that has ended", where=str(place),
                              hint=f"metafleet simulate EXPERIMENT.toml --out {typed(place)}")
        runs |= {path.resolve(): read(path) for path in found or [place]}
        if len(runs) > MAX_RUNS:
            raise ConfigError(f"more than {MAX_RUNS} runs", where=str(place))
    return list(runs.values()), remarks


def read(path: Path) -> FinishedRun:
    """The run in a result.json or a fleet's folder. Raises StateError if no round of it was evaluated."""
    data = outcome.read(path) if path.is_file() else outcome.of_fleet(path)
    made = of_simulation(data, path) if data.get("kind") == outcome.SIMULATION else _of_fleet(data, path)
    if not made.last.get(DEVICES):
        hint = "give the fleet's folder in place of its result.json" if data.get("task") else None
        raise StateError("no round of it was evaluated", where=str(path), hint=hint)
    return made


def _results(place: Path) -> Iterator[Path]:
    if place.is_file():
        yield place
    elif (place / "result.json").exists():
        yield place / "result.json"
    else:
        yield from sorted(place.glob("*/result.json"))


def _unfinished(place: Path) -> list[Path]:
    return [path.parent for path in sorted(place.glob("*/run.json")) if not (path.parent / "result.json").exists()]


# Simulations ----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Shares:
    """Over devices; pooled: over all samples."""

    mean: float = field(metadata=SHARE)
    worst: float = field(metadata=SHARE)
    best: float = field(metadata=SHARE)
    variance: float | None = field(default=None, metadata=AMOUNT)
    pooled: float | None = field(default=None, metadata=SHARE)


@dataclass(frozen=True)
class Evaluated:
    """Figures of one kind of devices after one round: those of ``FIGURES``. measures: of a task without classes, which
    has no macro_f1."""

    accuracy: Shares | None = None
    error: Compared | None = None
    micro_f1: Shares | None = None
    auroc: Shares | None = None
    difference: Compared | None = None
    measures: Mapping[str, Mapping[str, float]] | None = None
    macro_f1: float | None = field(default=None, metadata=SHARE)
    devices: Mapping[str, float] | None = None
    calibration_error: float | None = field(default=None, metadata=SHARE)

    @property
    def known(self) -> list[str]:
        """Keys of the figures that there are."""
        return [key for key in FIGURES if getattr(self, key) is not None]


@dataclass(frozen=True)
class UpDown:
    up: float = field(metadata=AMOUNT)
    down: float = field(metadata=AMOUNT)


@dataclass(frozen=True)
class Energy:
    value: float = field(metadata=AMOUNT)
    source: str = ""


@dataclass(frozen=True, kw_only=True)
class EvaluatedModel(Evaluated):
    """Figures of all kinds of devices under one model."""

    nvar: float | None = field(default=None, metadata=AMOUNT)
    new_devices: Mapping[str, Evaluated] | None = None
    novel_classes: Evaluated | None = None


@dataclass(frozen=True, kw_only=True)
class Round(EvaluatedModel):
    """The figures of a simulation's round that are compared. models: under other kinds of models than the served one
    (``evaluation.models``)."""

    round: int = field(metadata={"min": 1})
    participants: int = field(metadata=AMOUNT)
    loss: float | None = None
    models_transmitted: float | None = field(default=None, metadata=AMOUNT)
    models_transmitted_paper: float | None = field(default=None, metadata=AMOUNT)
    payload_bytes: UpDown | None = None
    flops: float | None = field(default=None, metadata=AMOUNT)
    energy_j: Energy | None = None
    models: Mapping[str, EvaluatedModel] | None = None


@dataclass(frozen=True)
class Simulated:
    """A simulation's result.json."""

    label: str = field(metadata={"max_length": 1000})
    method: str = field(metadata={"max_length": 100})
    seed: int = field(metadata=AMOUNT)
    config: Mapping[str, Any]
    devices: int = field(metadata=AMOUNT)
    rounds: tuple[Round, ...] = field(metadata={"max_length": 10_000_000})
    seconds: float = field(default=0.0, metadata=AMOUNT)


def of_simulation(data: Mapping[str, Any], path: Path) -> FinishedRun:
    """The run of a simulation's result, which may have fewer rounds than planned. Raises StateError."""
    run, problems = schema.read(Simulated, data, unknown="ignore")
    if run is None:
        raise StateError(f"is not a simulation result: {'; '.join(map(str, problems[:5]))}", where=str(path))
    setting, choices, targets = _asked(run.config)
    points, spent = [], _Spending()
    figure = _figure(row.known for row in run.rounds)
    for row in run.rounds:
        spent.add(_amounts(row, _fallah_rounds(row)))
        if figure in row.known:
            points.append(Point(row.round, _scores(row, figure), spent.sums()))
    last = points[-1].scores if points else {}
    return FinishedRun(
        path, outcome.SIMULATION, run.label, run.method, run.seed, run.devices, setting, choices, targets,
        tuple(points), last, spent.sums(), run.seconds, run.rounds[-1].loss if run.rounds else None, figure,
    )


def _figure(rows: Iterable[Iterable[str]]) -> str:
    """The key of the first figure that is known in every evaluated round. rows: the figures that are known, by
    round."""
    known = [set(row) for row in rows if row]
    return next((key for key in FIGURES if known and key in set.intersection(*known)), ACCURACY.key)


def _amounts(row: Round | RoundFigures | FoldedSums, fallah_rounds: float | None) -> dict[str, float | None]:
    """The cost of a round by measure. fallah_rounds: models sent, in rounds of Per-FedAvg, as the papers count."""
    moved, energy = row.payload_bytes, row.energy_j
    return {
        "rounds": 1.0, "fallah_rounds": fallah_rounds, "models": row.models_transmitted,
        "payload_bytes": None if moved is None else float(moved.up + moved.down),
        "up_bytes": None if moved is None else float(moved.up),
        "down_bytes": None if moved is None else float(moved.down),
        "flops": row.flops, "joules": None if energy is None else energy.value,
    }


def _fallah_rounds(row: Round) -> float | None:
    if row.models_transmitted_paper is None or not row.participants:
        return row.models_transmitted_paper
    return row.models_transmitted_paper / (2 * row.participants)


class _Spending:
    """Running sums by measure. A measure that a round lacks is dropped for good."""

    def __init__(self) -> None:
        self._sums: dict[str, float] | None = None

    def add(self, amounts: Mapping[str, float | None]) -> None:
        before = dict.fromkeys(amounts, 0.0) if self._sums is None else self._sums
        self._sums = {k: before[k] + v for k, v in amounts.items() if v is not None and k in before}

    def sums(self) -> dict[str, float]:
        return dict(self._sums or {})


def _scores(row: Round, figure: str) -> dict[str, Scores]:
    others = ((model, _of_model(one, figure)) for model, one in (row.models or {}).items())
    return _of_model(row, figure) | {
        f"{kind}{BY}{model}": scores for model, of in others for kind, scores in of.items()
    }


def _of_model(row: EvaluatedModel, figure: str) -> dict[str, Scores]:
    found = {DEVICES: {**_figures(row, figure), **({} if row.nvar is None else {"nvar": row.nvar})}}
    found |= {f"new {support}": _figures(one, figure) for support, one in (row.new_devices or {}).items()}
    found |= {NOVEL: _figures(row.novel_classes, figure)} if row.novel_classes else {}
    return {name: scores for name, scores in found.items() if scores}


def _figures(evaluated: Evaluated, figure: str) -> dict[str, float]:
    """figure: a key of ``FIGURES``; without it, nothing is known."""
    spread = getattr(evaluated, figure)
    if spread is None:
        return {}
    every = {**schema.plain(spread), "macro_f1": evaluated.macro_f1,
             "calibration_error": evaluated.calibration_error}
    every |= _measures(evaluated.measures)
    every["devices"] = None if evaluated.devices is None else float(len(evaluated.devices))
    return schema.present(every)


def _measures(measures: Mapping[str, Mapping[str, float]] | None) -> dict[str, float]:
    return {f"{measure} {output}": value for measure, of in (measures or {}).items() for output, value in of.items()}


def _asked(config: Mapping[str, Any]) -> tuple[dict[str, str], dict[str, str], tuple[float, ...]]:
    """(setting, choices, targets) of a simulation."""
    experiment = config.get("experiment")
    experiment = experiment if isinstance(experiment, Mapping) else {}
    evaluation = experiment.get("evaluation", experiment.get("judge"))
    evaluation = evaluation if isinstance(evaluation, Mapping) else {}
    setting = {part: _text(experiment.get(part)) for part in ("data", "partition", "model")}
    setting["evaluated"] = _text({key: evaluation[key] for key in EVALUATION_SETTING if key in evaluation})
    rest = {key: value for key, value in experiment.items() if key not in SETTING_SECTIONS}
    others = {key: config[key] for key in ("hyper", "version") if key in config}
    targets = evaluation.get("targets")
    wanted = [t for t in targets if isinstance(t, (int, float)) and 0 < t <= 1] if isinstance(targets, list) else []
    return setting, flat({**rest, **others}), tuple(map(float, wanted))


# Fleets and demos -----------------------------------------------------------------------------------------------------


def _of_fleet(data: Mapping[str, Any], path: Path) -> FinishedRun:
    try:
        run = results.parse(data)
    except DataError as error:
        raise StateError(error.what, where=str(path)) from error
    method = METHODS.get(run.method)
    paper = None if method is None else sum(method.paper_models or (method.models_down, method.models_up)) / 2
    points, spent = [], _Spending()
    if run.folded is not None:
        spent.add({**_amounts(run.folded, paper and paper * run.folded.closed), "rounds": float(run.folded.closed)})
    figure = _figure(known or () for known in (*(row.compared for row in run.rounds), run.compared))
    for row in run.rounds:
        spent.add(_amounts(row, paper))
        if row.accuracy is not None:
            more = schema.present({"macro_f1": row.macro_f1, "calibration_error": row.calibration_error})
            points.append(Point(row.round, {DEVICES: {**schema.plain(row.accuracy), **more}}, spent.sums()))
        elif row.compared:
            points.append(Point(row.round, {DEVICES: _of_task(row.compared[figure], row.task)}, spent.sums()))
    return FinishedRun(path, "fleet", run.method, run.method, run.seed, run.devices, _setting(run.config),
                 _choices(run.config), (), tuple(points), _last(run, points, figure), spent.sums(),
                 sum(row.seconds or 0.0 for row in (*run.rounds, run.folded) if row is not None), figure=figure)


def _last(run: Result, points: Sequence[Point], figure: str) -> dict[str, Scores]:
    """The last evaluation of every device of a fleet."""
    if run.compared or run.compared_new_devices:
        return _last_of_task(run, points, figure)
    own = {**(points[-1].scores[DEVICES] if points else {}), **_spread(p for p in run.personalization if not p.new)}
    new = _spread(p for p in run.personalization if p.new)
    if new and run.new_devices:
        more = run.new_devices.calibration_error
        new |= {"pooled": run.new_devices.accuracy, "macro_f1": run.new_devices.macro_f1,
                **({} if more is None else {"calibration_error": more})}
    return {name: scores for name, scores in ((DEVICES, own), ("new", new)) if scores}


def _last_of_task(run: Result, points: Sequence[Point], figure: str) -> dict[str, Scores]:
    before: Scores = points[-1].scores[DEVICES] if points else {}
    found, new = run.compared or {}, run.compared_new_devices or {}
    count = {one: float(sum(p.task is not None and p.new is one for p in run.personalization)) for one in (False, True)}
    scores = run.task_new_devices or {}
    every = {DEVICES: {**before, **_of_task(found[figure]), "devices": count[False]} if figure in found else before,
             "new": {**_of_task(new[figure], scores.get("after", scores.get("before"))), "devices": count[True]}
             if figure in new else {}}
    return {name: one for name, one in every.items() if one}


def _of_task(spread: Compared, score: TaskScore | None = None) -> dict[str, float]:
    return {**schema.present(schema.plain(spread)), **_measures(score.measures if score else None)}


def _spread(devices: Iterable[Personalization]) -> dict[str, float]:
    values = np.array([p.after.accuracy for p in devices if p.after])
    if not values.size:
        return {}
    return {"mean": float(values.mean()), "worst": float(values.min()), "best": float(values.max()),
            "variance": float(values.var()), "devices": float(values.size)}


def _setting(config: Mapping[str, Any]) -> dict[str, str]:
    """The setting of a fleet. Only a demo records which data its devices have."""
    demo, fleet = (part if isinstance(part, Mapping) else {} for part in (config.get("demo"), config.get("fleet")))
    fleet = fleet or config
    known = {key: demo[key] for key in ("data", "devices", "new_devices", "support_s") if key in demo}
    return {"data": _text(known or "of the devices"), "partition": "each device its own recording",
            "model": _text(fleet.get("model")), "evaluated": "the devices' own split by time"}


def _choices(config: Mapping[str, Any]) -> dict[str, str]:
    return {key: text for key, text in flat(config).items()
            if key not in RUN_SPECIFIC and not key.startswith(("fleet.model", "demo."))}


def flat(tree: Mapping[str, Any], at: str = "") -> dict[str, str]:
    """Nested tables as one table: {"a.b.c": text}."""
    found: dict[str, str] = {}
    for key, value in tree.items():
        name = f"{at}.{key}" if at else str(key)
        found |= flat(value, name) if isinstance(value, Mapping) else {name: _text(value)}
    return found


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value, sort_keys=True)
