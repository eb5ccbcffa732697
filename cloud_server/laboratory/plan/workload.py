"""The samples of a run, the devices that they are divided over, and the model's layout."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.laboratory.plan.experiment import SYNTHETIC, Experiment, Run
from fleet_core.algorithms.interface import EPISODIC, Method
from fleet_core.base import schema
from fleet_core.base.errors import ConfigError, DataError, shortened
from fleet_core.board import probe
from fleet_core.data import model_input
from fleet_core.data.partitions import (
    PARTITIONS,
    Newcomers,
    Share,
    hold_out,
    newcomers,
    partition,
    pool,
    support_query,
    synthetic,
    time_split,
    within,
)
from fleet_core.data.samples import Samples, load_in_form
from fleet_core.data.sets.set_cache import load_set
from fleet_core.model import select_arrays
from fleet_core.model.layout import InputSpec, Layout
from fleet_core.tasks import anomaly
from fleet_core.tasks import task as tasks
from fleet_core.tasks.anomaly import Anomaly
from fleet_core.tasks.labels import KIND as LABELS
from fleet_core.tasks.labels import MultiLabel
from fleet_core.tasks.regression import Regression
from fleet_core.tasks.task import Task

TIME = "time"
FEATURES_BYTES = 4 << 30
WITHIN = 0.75  # share of the training samples, if the partition has no such option
Array = np.ndarray[Any, Any]


@dataclass(frozen=True, eq=False)
class Part:
    """Raw samples x [N, *shape] and labels y int64 [N] in the device's numbering, or targets or labels [N, K]."""

    x: Array
    y: Array


@dataclass(frozen=True, eq=False)
class Workload:
    """train: the devices that train. new: devices that never train. novel: devices with classes that no device trains
    on. samples: the pool that the shares index. spec: the model's input. classes: the classes of the model's head.
    support_split: how a new device's samples are divided. task: of a model without classes; numbers have mean and
    deviation of the training samples of the devices that train."""

    samples: Samples
    train: tuple[Share, ...]
    new: tuple[Share, ...]
    novel: tuple[Share, ...]
    spec: InputSpec
    classes: tuple[str, ...]
    support_split: str = "random"
    task: Task | None = None

    @property
    def names(self) -> tuple[str, ...]:
        return tuple(share.name for share in self.train)

    def own(self, share: Share) -> Part:
        """A device's training samples."""
        return self.to_learn(self.part(share, share.train))

    def later(self, share: Share) -> Part:
        """A device's test samples."""
        return self._held_back(share, share.test)

    def divided(self, share: Share, support: float, seed: int) -> tuple[Part, Part]:
        """(support, query) of a new device. support: the share of its samples that it learns from, drawn by class or
        the first in time."""
        if self.support_split == TIME:
            first, second = time_split(share, self.samples, support)
        else:
            first, second = support_query(share, self.samples.strata, support, seed=seed)
        return self.to_learn(self.part(share, first)), self._held_back(share, second)

    def to_learn(self, part: Part) -> Part:
        """What a model learns from these samples."""
        if self.task is None:
            return part
        rows, targets = self.task.to_learn(part.y)
        return Part(part.x[_slice_of(rows)], targets)

    def strata_to_learn(self, share: Share) -> Array:
        """``Samples.strata`` of a device's training samples."""
        strata = self.samples.strata[share.train]
        return strata if self.task is None else strata[self.task.to_learn(self.samples.y[share.train])[0]]

    def _held_back(self, share: Share, rows: Array) -> Part:
        """Of a task in the order of time, of which the threshold of anomalies takes the earlier part."""
        if self.task is not None and self.samples.time is not None:
            rows = rows[np.argsort(self.samples.time[rows], kind="stable")]
        return self.part(share, rows)

    def part(self, share: Share, rows: Array) -> Part:
        taken = _slice_of(rows)
        return Part(self.samples.x[taken], share.relabelled(self.samples.y[taken]))


def _slice_of(rows: Array) -> Array | slice:
    """Consecutive rows as a slice, which copies nothing."""
    first, number = int(rows[0]) if len(rows) else 0, len(rows)
    return slice(first, first + number) if np.array_equal(rows, np.arange(first, first + number)) else rows


def build(experiment: Experiment) -> Workload:
    """The workload of an experiment; equal experiments have equal workloads. Raises DataError and ConfigError."""
    train, test, spec = _data(experiment)
    section, evaluation = experiment.partition, experiment.evaluation
    options, _ = schema.read(PARTITIONS[section.kind].options, section.options)
    unseen = set(evaluation.novel_classes)
    samples = pool(train, test)
    everybody = partition(section.kind, options, train, test, seed=section.seed, without=unseen)
    shares, new = _held_out(everybody, experiment)
    if evaluation.within_training:
        split, fraction = getattr(options, "split", "random"), getattr(options, "train_fraction", WITHIN)
        shares, new = _held_out(within(shares, samples, split, fraction, seed=section.seed), experiment)
    novel: tuple[Share, ...] = ()
    if unseen:
        asked = Newcomers(**{**{"classes_per_device": len(unseen)}, **evaluation.novel})
        novel = newcomers(asked, train, test, unseen, seed=section.seed)
    if experiment.cohort > len(shares):
        raise ConfigError(f"a cohort of {experiment.cohort} out of {len(shares)} devices", hint="lower cohort")
    task = _task(experiment, samples, shares, spec)
    classes = () if task else _classes(samples, shares)
    return Workload(samples, shares, new, novel, spec, classes, evaluation.support_split, task)


def _task(experiment: Experiment, samples: Samples, shares: tuple[Share, ...], spec: InputSpec) -> Task | None:
    model = experiment.model
    if model.classes:
        return None
    if model.task == anomaly.KIND:
        return Anomaly.of(spec.shape, experiment.data.normal, share=model.share)
    if model.task == LABELS:
        return MultiLabel(samples.outputs)
    return Regression.of(samples.outputs, samples.y[np.concatenate([share.train for share in shares])], model.loss)


def _held_out(shares: tuple[Share, ...], experiment: Experiment) -> tuple[tuple[Share, ...], tuple[Share, ...]]:
    """(devices that train, new devices), without the devices that are reserved for validation."""
    evaluation = experiment.evaluation
    if not evaluation.new_devices and not evaluation.validation:
        return shares, ()
    fractions = (1 - evaluation.new_devices - evaluation.validation, evaluation.validation, evaluation.new_devices)
    train, _, new = hold_out(shares, fractions, seed=experiment.partition.seed)
    return train, new


def layout_of(experiment: Experiment, workload: Workload) -> Layout:
    """The model's layout. Raises ConfigError if the model does not accept this input. Needs torch."""
    from fleet_core.learning import models

    model = experiment.model
    return models.describe(model.name, workload.spec, workload.classes, model.options, workload.task)


def check(experiment: Experiment, runs: Sequence[Run], layout: Layout, workload: Workload) -> list[str]:
    """Checks that the methods, the model and the devices fit together, and returns warnings. Raises ConfigError or
    DataError. Needs torch."""
    from fleet_core.learning import models

    methods = list({run.method.name: run.method for run in runs}.values())
    for method in methods:
        models.check_groups(method, layout)
        select_arrays.moving_of(experiment.train, layout, method)
    _check_devices(workload, runs, () if workload.support_split == TIME else experiment.evaluation.support)
    ways = max((len(share.labels or ()) for share in workload.novel), default=0)
    if ways > len(layout.classes):
        raise ConfigError(f"novel devices with {ways} classes, and the model has {len(layout.classes)}",
                          hint="lower evaluation.novel.classes_per_device")
    return [
        *workload.samples.notes,
        *model_input.unscaled(workload.samples.x, workload.spec),
        *_warnings(methods, workload),
    ]


def _check_devices(workload: Workload, runs: Sequence[Run], supports: Sequence[float]) -> None:
    """Raises DataError if a device has too few training samples, or the support set of a new one lacks a class."""
    y, bad = workload.samples.strata, list[str]()
    divided = [run.method for run in runs if not hasattr(run.hyper, "batch")]
    compared = sorted(method.name for method in divided if method.adaptation in EPISODIC)
    stepped = sorted(method.name for method in divided if method.adaptation not in EPISODIC)
    if compared:
        poor = [share.name for share in workload.train if np.bincount(workload.strata_to_learn(share)).max() < 2]
        bad += [f"{name}: no class has two training samples, which {compared[0]} needs" for name in poor]
    elif stepped:
        poor = [share.name for share in workload.train if len(workload.strata_to_learn(share)) < 2]
        bad += [f"{name}: fewer than two training samples, and {stepped[0]} needs them" for name in poor]
    bad += [f"{share.name}: no sample to train on" for share in workload.train
            if not len(workload.strata_to_learn(share))]
    for share in workload.new:
        try:
            for support in supports:
                support_query(share, y, support, seed=0)
        except DataError as error:
            bad.append(f"{share.name}, a new device: {error.what}")
    if bad:
        hint = "leave such devices out with the partition's min_samples, or use another partition"
        raise DataError("\n".join(shortened(bad)), hint=hint)


def _warnings(methods: Sequence[Method], workload: Workload) -> Iterator[str]:
    y, permuted = workload.samples.strata, any(share.labels is not None for share in workload.train)
    for method in methods:
        if permuted and ("prototypes" in method.shared or "head" in method.shared):
            what = "class means" if "prototypes" in method.shared else "a head"
            yield f"{method.name} shares {what} between devices that number their classes differently"
    if workload.task is not None:
        return
    strange = sum(not np.isin(y[share.test], y[share.train]).all() for share in workload.train)
    if strange:
        yield f"{strange} of {len(workload.train)} devices are evaluated on classes that they do not train on"


def _data(experiment: Experiment) -> tuple[Samples, Samples | None, InputSpec]:
    section = experiment.data
    test: Samples | None = None
    if section.path is not None:
        train, spec = load_in_form(
            Path(section.path), window=section.window, stride=section.stride, size=section.size, fit=section.fit,
            rate=section.rate, seconds=section.seconds,
            **tasks.reading(experiment.model.task, section.outputs or section.normal),
        )
    elif section.set == SYNTHETIC:
        train = _synthetic(section.options, experiment.partition.seed)
        spec = InputSpec(train.x.shape[1:], "float32")
    else:
        named = load_set(section.set or "")
        train, test, spec = named.train, named.test, named.entry.input_spec
    if section.options and section.set != SYNTHETIC:
        raise ConfigError("data.options are for the synthetic set")
    if section.backbone is not None:
        train, test, spec = _features(Path(section.backbone), _limited(train, experiment), test)
    if section.standardize:
        train, test, spec = standardized(train, test)
    spec = replace(
        spec,
        scale=spec.scale if section.scale is None else section.scale,
        mean=spec.mean if section.mean is None else section.mean,
        std=spec.std if section.std is None else section.std,
    )
    return _limited(train, experiment), test, spec


def _limited(train: Samples, experiment: Experiment) -> Samples:
    limit = experiment.data.limit
    if not 0 < limit < len(train):
        return train
    rng = np.random.default_rng(experiment.partition.seed)
    return train.take(np.sort(rng.permutation(len(train))[:limit]))


def _features(path: Path, train: Samples, test: Samples | None) -> tuple[Samples, Samples | None, InputSpec]:
    """Features of all samples, as devices compute them; kept beside the backbone's file for the next run."""
    from fleet_core.backbone import features

    found = features.of_file(path, threads=probe.cores(), quota=FEATURES_BYTES)
    made = found.samples(train)
    return made, None if test is None else found.samples(test), features.input_of(made.x)


def standardized(train: Samples, test: Samples | None) -> tuple[Samples, Samples | None, InputSpec]:
    """Every feature as (x − mean) / (deviation + 0.001) over all samples, float32, as in the code of Dinh et al.
    (pFedMe)."""
    parts = [train] if test is None else [train, test]
    whole = np.concatenate([part.x for part in parts]).astype(np.float32)
    mean, deviation = whole.mean(0), whole.std(0)
    made = [replace(part, x=((part.x - mean) / (deviation + np.float32(1e-3))).astype(np.float32)) for part in parts]
    return made[0], made[1] if test is not None else None, InputSpec(train.x.shape[1:], "float32")


def _synthetic(options: Mapping[str, Any], seed: int) -> Samples:
    try:
        return synthetic.synthetic(**{"seed": seed, **options})
    except TypeError as error:
        raise ConfigError(f"data.options: {error}", expected="alpha, beta, devices, seed, least, most") from error


def _classes(samples: Samples, shares: tuple[Share, ...]) -> tuple[str, ...]:
    """Class names of the model's head: those of the data, or numbers if every device numbers its classes itself."""
    own = [share.labels for share in shares if share.labels is not None]
    if own:
        return tuple(str(k) for k in range(max(map(len, own))))
    if samples.classes is not None:
        return samples.classes
    if not len(samples.y):
        raise DataError("there are no samples")
    return tuple(str(k) for k in range(int(samples.y.max()) + 1))
