"""An experiment: a TOML file with data, partition, model, methods, seeds and budget, and the runs that follow from it.

All mistakes are reported together, before anything is computed: unknown keys with a suggestion, hyper-parameters that
the method does not have, options that the partition does not have.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fleet_core.algorithms.interface import Method, read_hyper
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import config, processes, schema
from fleet_core.base.errors import ConfigError
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.data.partitions import PARTITIONS, Newcomers
from fleet_core.data.samples import FILES
from fleet_core.data.sets.registry import entries
from fleet_core.data.shaping.resize import SIZE
from fleet_core.model import select_arrays
from fleet_core.model.choose_codec import AUTO
from fleet_core.model.layout import FITS
from fleet_core.model.select_arrays import TrainSection
from fleet_core.privacy import settings as privacy
from fleet_core.privacy.settings import CENTRAL, PrivacySection
from fleet_core.robust import settings as robust
from fleet_core.robust.settings import RobustSection
from fleet_core.tasks import anomaly, labels, regression
from fleet_core.tasks.task import VARIANTS

PLAIN = "none"
PRECISIONS = ("float32", "bfloat16")
TEXT: dict[str, Any] = {"max_length": 200}
SHARE: dict[str, Any] = {"min": 0.01, "max": 0.99}
LABEL = r"[A-Za-z0-9_.=,+-]{1,100}"
LONGEST_LABEL = 200  # including the values of a grid; the label is part of a folder's name
MAX_RUNS = 1000
SYNTHETIC = "synthetic"
FILE_KEYS = ("data.file", "data.samples", "data.data")  # often written instead of data.path
SERVER, RUNNING, LATEST = "server", "running-mean", "latest-mean"
KINDS = (SERVER, RUNNING, LATEST)
"""Other models than the served one, under which devices can be evaluated; see ``other_models``."""
LOSSES = regression.LOSSES
TASKS = ("classes", *VARIANTS)
WITHOUT_CLASSES = ("natural", "iid")
"""The partitions that do not look at classes."""
SEVERAL = ("method", "seeds")
"""The keys of an experiment that differ between its runs."""


@dataclass(frozen=True)
class DataSection:
    """set: a named set (``metafleet datasets``). path: the user's file or folder, instead of a set. window, stride: in
    a file of readings, the number of readings per window and from one window to the next. size, fit: of images, as in
    ``resize.size_of``. rate, seconds: of sound, as in ``readers.rate_wanted``; with a window, rate is that of the
    readings. limit: number of samples, drawn with the partition's seed; 0 for all. options: options of the
    set ``synthetic``. scale, mean, std: scaling of the model's input, instead of the set's own. standardize: instead of
    scale, mean and std, scale each feature to mean 0 and deviation 1 over all samples of all devices, which a fleet
    cannot do. backbone: a file of 'metafleet backbone make', whose features are the samples of every device. outputs:
    with ``model.task`` regression or multi-label, the names of the targets or labels in ``path``; none for the file's
    own. normal: with ``model.task`` anomaly, the labels of quiet samples."""

    set: str | None = field(default=None, metadata=TEXT)
    path: str | None = field(default=None, metadata={"max_length": 4096})
    window: int | None = field(default=None, metadata={"min": 1, "max": 1_000_000})
    stride: int | None = field(default=None, metadata={"min": 1, "max": 1_000_000})
    size: str | None = field(default=None, metadata={"pattern": SIZE, "words": "64, or 96x64 for width by height"})
    fit: str | None = field(default=None, metadata={"choices": FITS})
    rate: int | None = field(default=None, metadata={"min": 1, "max": 192_000, "sparse": True})
    seconds: float | None = field(default=None, metadata={"min": 0.05, "max": 60, "sparse": True})
    options: Mapping[str, Any] = field(default_factory=dict)
    limit: int = field(default=0, metadata={"min": 0, "max": 1 << 40})
    scale: float | None = field(default=None, metadata={"above": 0, "max": 1e9})
    mean: tuple[float, ...] | None = None
    std: tuple[float, ...] | None = None
    standardize: bool = False
    backbone: str | None = field(default=None, metadata={"max_length": 4096, "sparse": True})
    outputs: tuple[str, ...] = field(default=(), metadata={**TEXT, "sparse": True})
    normal: tuple[str, ...] = field(default=(), metadata={**TEXT, "sparse": True})


@dataclass(frozen=True)
class PartitionSection:
    """kind: a name of ``fleet_core.data.partitions``. options: of that partition. seed: of the partition; all runs have
    the same, so that methods and seeds are compared on the same devices."""

    kind: str = field(default="natural", metadata={"choices": tuple(PARTITIONS)})
    options: Mapping[str, Any] = field(default_factory=dict)
    seed: int = field(default=0, metadata={"min": 0, "max": 2**53})


@dataclass(frozen=True)
class ModelSection:
    """name: a named model or ``package.module:build``; options: its keyword arguments. task: what it answers; loss: of
    numbers; share: of quiet samples that may raise an alarm, where it detects anomalies."""

    name: str = field(metadata=TEXT)
    options: Mapping[str, Any] = field(default_factory=dict)
    task: str = field(default=TASKS[0], metadata={"choices": TASKS, "sparse": True})
    loss: str = field(default=LOSSES[0], metadata={"choices": LOSSES, "sparse": True})
    share: float = field(default=anomaly.SHARE, metadata={"above": 0.0, "max": 0.5, "sparse": True})

    @property
    def classes(self) -> bool:
        return self.task == TASKS[0]


@dataclass(frozen=True)
class EvaluationSection:
    """every: rounds between evaluations; 0: only the last round. devices: how many of the training devices are
    evaluated, drawn with the seed; 0: all. new_devices: share of the devices that never train and are evaluated as new
    ones. validation: share of the devices that are left out completely. support: shares of a new device's samples that
    it learns from. support_split: these samples are drawn at ``random`` by class, or are the first in ``time``.
    within_training: train and evaluate inside the training samples, to choose hyper-parameters without the samples that
    are otherwise evaluated. novel_classes: classes that no device trains on. novel: the devices that are evaluated on
    novel classes (devices, classes_per_device, shots, queries). test_step: as in Fallah's table, the gradient step at
    test uses the test samples, including their labels! also_test_step: evaluate this way in addition, under
    ``test_step``. models: models under which devices are evaluated in addition to the served one (``other_models``).
    targets: accuracies whose cost is reported, or what a task without classes has in their place."""

    every: int = field(default=10, metadata={"min": 0, "max": 1_000_000})
    devices: int = field(default=0, metadata={"min": 0, "max": 1_000_000})
    new_devices: float = field(default=0.0, metadata={"min": 0, "max": 0.9})
    validation: float = field(default=0.0, metadata={"min": 0, "max": 0.9})
    support: tuple[float, ...] = field(default=(0.2,), metadata=SHARE)
    support_split: str = field(default="random", metadata={"choices": ("random", "time")})
    within_training: bool = False
    novel_classes: tuple[int, ...] = field(default=(), metadata={"min": 0})
    novel: Mapping[str, int] = field(default_factory=dict)
    test_step: bool = False
    also_test_step: bool = False
    models: tuple[str, ...] | None = field(default=None, metadata={"choices": KINDS})
    targets: tuple[float, ...] = field(default=(), metadata={"above": 0, "max": 1})


@dataclass(frozen=True)
class MethodSection:
    """name: the method's name. label: its name in tables; by default the method's name and the grid's values. hyper:
    its hyper-parameters. grid: lists of values of hyper-parameters; every combination is a separate run."""

    name: str = field(metadata={"choices": METHODS})
    label: str | None = field(default=None, metadata={"pattern": LABEL})
    hyper: Mapping[str, Any] = field(default_factory=dict)
    grid: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Budget:
    """A run ends when the first of these limits is reached; 0 means no limit. rounds: required. payload_bytes: up and
    down, of all devices. joules: modelled for the board."""

    rounds: int = field(metadata={"min": 1, "max": 10_000_000})
    payload_bytes: float = field(default=0.0, metadata={"min": 0, "max": 1e300})
    joules: float = field(default=0.0, metadata={"min": 0, "max": 1e300})


@dataclass(frozen=True)
class SimulatedPrivacySection(PrivacySection):
    """amplified: computes epsilon for observers who see the models but not which devices were drawn; needs ``central``
    noise. A fleet has no such setting, because its manifests say who takes part."""

    amplified: bool = False


@dataclass(frozen=True)
class Experiment:
    """cohort: devices per round, 0 for all. averaged: how many of these the server averages, 0 for all; the others
    train only for themselves, as in pFedMe's paper; a fleet has no such setting. codec_up, codec_down: ``none`` counts
    four bytes per value and is lossless. board: a profile or its file, whose constants give joules. precision:
    ``bfloat16`` computes the products of a model's body in that type; weights, sums and the rest stay float32. A fleet
    trains in float32. skip_below, train, robust, max_update_norm, privacy: as in fleet.toml. max_batch: the largest
    batch on every device, as on a board with that limit."""

    data: DataSection
    model: ModelSection
    budget: Budget
    method: tuple[MethodSection, ...] = field(metadata={"max_length": 200})
    partition: PartitionSection = field(default_factory=PartitionSection)
    evaluation: EvaluationSection = field(default_factory=EvaluationSection, metadata={"was": "judge"})
    seeds: tuple[int, ...] = field(default=(0,), metadata={"min": 0, "max": 2**53})
    cohort: int = field(default=0, metadata={"min": 0, "max": 1_000_000})
    averaged: int = field(default=0, metadata={"min": 0, "max": 1_000_000})
    codec_up: str = field(default=PLAIN, metadata={"choices": (PLAIN, *CODECS, AUTO)})
    codec_down: str = field(default=PLAIN, metadata={"choices": (PLAIN, *CODECS, AUTO)})
    skip_below: float = field(default=0.0, metadata={"min": 0, "max": 1})
    board: str | None = field(default=None, metadata={"max_length": 4096})
    precision: str = field(default=PRECISIONS[0], metadata={"choices": PRECISIONS})
    train: TrainSection = field(default_factory=TrainSection)
    robust: RobustSection = field(default_factory=RobustSection)
    privacy: SimulatedPrivacySection = field(default_factory=SimulatedPrivacySection)
    max_update_norm: float | None = field(default=None, metadata={"above": 0})
    max_batch: int | None = field(default=None, metadata={"min": 1})

    def codecs(self, method: Method) -> dict[str, str]:
        """Way -> codec, ``none`` or ``auto``. As in a fleet, methods that send sums over samples use no lossy codec."""
        return {way: wanted if wanted == PLAIN or method.cumulative else "fp32"
                for way, wanted in (("up", self.codec_up), ("down", self.codec_down))}


@dataclass(frozen=True)
class Run:
    """One method with one set of hyper-parameters and one seed."""

    label: str
    method: Method
    hyper: Any
    seed: int

    @property
    def name(self) -> str:
        """The name of the run's folder."""
        return f"{self.label}-s{self.seed}"


def load(path: Path, settings: Sequence[str] = ()) -> Experiment:
    """The experiment in a TOML file; ``key=value`` settings override it. Raises ConfigError with all mistakes."""
    text = config.text_of(path)
    data = config.tables(text, str(path))
    for former, present in schema.renamed(Experiment, data):
        processes.say(config.rename_warning(former, present, text, str(path)))
        data[present] = data.pop(former)
    for setting in settings:
        _set(data, setting)
    return read(data, text, str(path), settings)


def read(
    data: Mapping[str, Any], text: str = "", where: str = "experiment", settings: Sequence[str] = ()
) -> Experiment:
    """An experiment from plain values. text, where, settings: used to locate mistakes in error messages."""
    found, problems = schema.read(Experiment, data)
    problems = [replace(one, hint="path") if one.key in FILE_KEYS else one for one in problems]
    if found is not None:
        problems = list(_checks(found))
    if found is None or problems:
        raise ConfigError("\n".join(_located(problem, text, where, settings) for problem in problems))
    return found


def _located(problem: schema.Problem, text: str, where: str, settings: Sequence[str]) -> str:
    key = problem.key.replace("[", ".").replace("]", "") + "."
    for setting in reversed(settings):
        given = setting.partition("=")[0].strip() + "."
        if key.startswith(given) or given.startswith(key):
            return f"--set {setting}: {problem}"
    return config.located(problem, text, where)


def runs(experiment: Experiment) -> tuple[Run, ...]:
    """Every combination of method, grid and seed, seeds last."""
    made = []
    for section in experiment.method:
        for label, hyper in _combinations(section):
            chosen, _ = schema.read(METHODS[section.name].hyper, hyper)
            made += [Run(label, METHODS[section.name], chosen, seed) for seed in experiment.seeds]
    return tuple(made)


def _combinations(section: MethodSection) -> Iterator[tuple[str, dict[str, Any]]]:
    names = sorted(section.grid)
    for values in itertools.product(*(section.grid[name] for name in names)):
        chosen = dict(zip(names, values, strict=True))
        parts = [section.label or section.name, *(f"{name}={_short(value)}" for name, value in chosen.items())]
        yield ",".join(parts), {**section.hyper, **chosen}


def _short(value: Any) -> str:
    return "".join(c for c in json.dumps(value) if c.isalnum() or c in "._-+")


# Checks beyond the types ----------------------------------------------------------------------------------------------


def _checks(found: Experiment) -> Iterator[schema.Problem]:
    if (found.data.set is None) == (found.data.path is None):
        yield schema.Problem("data.set", "give either data.set or data.path")
    elif found.data.set is not None and _is_file(found.data.set):
        yield schema.Problem("data.set", f"no data set is named '{found.data.set}' (did you mean data.path = "
                                         f"{json.dumps(found.data.set)}?)")
    if found.data.path is None and (found.data.window or found.data.stride):
        yield schema.Problem("data.window", "is only for a file of readings: give data.path")
    if found.data.path is None and (found.data.size or found.data.fit):
        yield schema.Problem("data.size", "is only for images in files: give data.path")
    if found.data.path is None and (found.data.rate or found.data.seconds):
        yield schema.Problem("data.rate", "is only for sound or readings in files: give data.path")
    yield from _below(
        "partition.options", schema.read(PARTITIONS[found.partition.kind].options, found.partition.options)[1])
    yield from _evaluation_checks(found.evaluation)
    yield from _task_checks(found)
    if found.budget.joules and found.board is None:
        yield schema.Problem("budget.joules", "are modelled for a board: name it with board")
    if found.averaged > (found.cohort or found.averaged):
        yield schema.Problem("averaged", f"are more than the cohort of {found.cohort}")
    if not found.seeds or len(set(found.seeds)) != len(found.seeds):
        yield schema.Problem("seeds", "expected one or more, all different")
    if not found.method:
        yield schema.Problem("method", "no method is named")
    for name in dict.fromkeys(section.name for section in found.method):
        yield from select_arrays.check(found.train, METHODS[name])
        yield from robust.check(found.robust, METHODS[name])
    if found.privacy.amplified and not (found.privacy.mode == CENTRAL and found.cohort):
        yield schema.Problem("privacy.amplified", f"needs mode = '{CENTRAL}' and a cohort that is drawn")
    grids = [problem for i, section in enumerate(found.method) for problem in _grid_checks(f"method[{i}]", section)]
    yield from grids or _run_checks(found)


def _is_file(name: str) -> bool:
    """Whether what is given as the name of a data set is a file or folder."""
    if name in (SYNTHETIC, *entries()):
        return False
    return Path(name).suffix.lower() in FILES or "/" in name or Path(name).exists()


def _evaluation_checks(evaluation: EvaluationSection) -> Iterator[schema.Problem]:
    if evaluation.new_devices + evaluation.validation >= 1:
        yield schema.Problem("evaluation.new_devices", "leaves no device to train")
    for name in ("support", "novel_classes", "targets", "models"):
        if len(set(given := getattr(evaluation, name) or ())) != len(given):
            yield schema.Problem(f"evaluation.{name}", "has a duplicate value")
    known = {f.name for f in dataclasses.fields(Newcomers)}
    for name in evaluation.novel:
        if name not in known:
            yield schema.Problem(f"evaluation.novel.{name}", "unknown key", schema.suggest(name, known))
    if evaluation.within_training and evaluation.novel_classes:
        yield schema.Problem("evaluation.within_training", "the training samples have no novel classes")
    if evaluation.novel and not evaluation.novel_classes:
        yield schema.Problem("evaluation.novel", "no class is novel: name some in novel_classes")


def _task_checks(found: Experiment) -> Iterator[schema.Problem]:
    task = found.model.task
    for key, given, kinds in (
        ("data.outputs", bool(found.data.outputs), (regression.KIND, labels.KIND)),
        ("model.loss", found.model.loss != LOSSES[0], (regression.KIND,)),
        ("data.normal", bool(found.data.normal), (anomaly.KIND,)),
        ("model.share", found.model.share != anomaly.SHARE, (anomaly.KIND,)),
    ):
        if given and task not in kinds:
            yield schema.Problem(key, f"is for another task: give model.task = '{' or '.join(kinds)}'")
    if found.model.classes:
        return
    if found.data.path is None:
        yield schema.Problem("data.set", f"has classes, and the task is {task}: give data.path")
    if found.partition.kind not in WITHOUT_CLASSES:
        yield schema.Problem("partition.kind", f"'{found.partition.kind}' divides classes: give "
                                               f"{' or '.join(WITHOUT_CLASSES)}")
    if found.evaluation.novel_classes:
        yield schema.Problem("evaluation.novel_classes", f"a model with the task {task} has no classes")


def _grid_checks(key: str, section: MethodSection) -> Iterator[schema.Problem]:
    """Also checks the number of combinations, before anything iterates over them."""
    for name, values in section.grid.items():
        if not isinstance(values, (list, tuple)) or not values:
            yield schema.Problem(f"{key}.grid.{name}", "expected a list of values")
            return
        if name in section.hyper:
            yield schema.Problem(f"{key}.grid.{name}", "is also in hyper")
    if math.prod(map(len, section.grid.values())) > MAX_RUNS:
        yield schema.Problem(f"{key}.grid", f"gives more than {MAX_RUNS} runs")


def _run_checks(found: Experiment) -> Iterator[schema.Problem]:
    """Checks the hyper-parameters and labels of all runs."""
    times = Counter[str]()
    for i, section in enumerate(found.method):
        wrong: dict[schema.Problem, None] = {}
        for label, hyper in _combinations(section):
            times[label] += 1
            _, problems = read_hyper(METHODS[section.name], hyper)
            wrong |= dict.fromkeys(problems)
        given, _ = schema.read(METHODS[section.name].hyper, section.hyper)
        yield from privacy.check(
            found.privacy, METHODS[section.name], given, auto=AUTO in (found.codec_up, found.codec_down),
            skip_below=found.skip_below, rule=found.robust.rule,
        )
        yield from privacy.check_secure(
            found.privacy, METHODS[section.name], given, up=found.codec_up, skip_below=found.skip_below,
            rule=found.robust.rule, max_update_norm=found.max_update_norm,
        )
        if found.averaged and set(METHODS[section.name].client.keeps) - {"personal"}:
            kept = ", ".join(METHODS[section.name].client.keeps)
            yield schema.Problem("averaged", f"{section.name} keeps a {kept}, which needs every update to be averaged")
        for problem in wrong:
            table = "grid" if problem.key in section.grid else "hyper"
            yield from _below(f"method[{i}].{table}", [problem])
    for label, number in times.items():
        if number > 1:
            yield schema.Problem("method", f"'{label}' names {number} runs: give them labels")
        if len(label) > LONGEST_LABEL:
            yield schema.Problem("method", f"'{label[:40]}…' has {len(label)} characters: give it a shorter label")
    if times.total() * len(found.seeds) > MAX_RUNS:
        yield schema.Problem("method", f"{times.total() * len(found.seeds)} runs are over the limit of {MAX_RUNS}")


def _below(key: str, problems: Iterable[schema.Problem]) -> Iterator[schema.Problem]:
    return (schema.Problem(f"{key}.{problem.key}", problem.what, problem.hint) for problem in problems)


def _set(data: dict[str, Any], setting: str) -> None:
    """Sets ``a.b.c=value`` in plain tables. The value is parsed as TOML, or else used as text."""
    key, equals, text = setting.partition("=")
    if not equals or not key.strip():
        raise ConfigError(f"--set {setting}", expected="--set key=value", hint="for example --set budget.rounds=10")
    try:
        value = config.tables(f"x = {text}", setting)["x"]
    except ConfigError:
        value = text
    first, *rest = key.strip().split(".")
    *tables, last = dict(schema.renamed(Experiment, {first: {}})).get(first, first), *rest
    at: Any = data
    for name in tables:
        if isinstance(at, list):
            at = at[int(name)] if name.isdecimal() and int(name) < len(at) else None
        elif isinstance(at, dict):
            at = at.setdefault(name, {})
    if not isinstance(at, dict):
        raise ConfigError(f"--set {setting}", expected="a key of the experiment", hint="method.0.hyper.client_lr=…")
    at[last] = value
