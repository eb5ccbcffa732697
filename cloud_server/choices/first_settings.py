"""Makes the first fleet.toml from data: a named set or a file of samples."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.choices import codec_catalogue, method_catalogue
from cloud_server.records.fleet_settings import NOTES, FleetRobustSection, FleetSection, KeepSection, LinkSection
from fleet_core.algorithms.interface import Method
from fleet_core.base import config, schema
from fleet_core.base.errors import ConfigError, DataError
from fleet_core.data import model_input
from fleet_core.data.partitions import pool
from fleet_core.data.samples import Samples, load_in_form
from fleet_core.data.sets.registry import entries
from fleet_core.data.sets.set_cache import load_set
from fleet_core.model.layout import Backbone, InputSpec
from fleet_core.model.select_arrays import TrainSection
from fleet_core.privacy.settings import PrivacySection
from fleet_core.tasks import anomaly
from fleet_core.tasks.anomaly import Anomaly
from fleet_core.tasks.labels import KIND as LABELS
from fleet_core.tasks.labels import MultiLabel
from fleet_core.tasks.regression import KIND, LOSSES, Regression
from fleet_core.tasks.task import Task

TASKS = ("classes", KIND, LABELS, anomaly.KIND)
REPEATING = "mlp"
"""The model that repeats samples, for every form of them: narrow in the middle."""
REPEATING_OPTIONS: Mapping[str, Any] = {"hidden": [64, 8, 64], "activation": "elu"}
REPEATING_RATES: Mapping[str, float] = {"client_lr": 0.5, "clip_norm": 1.0, "finetune_lr": 0.1}
"""The loss is a mean over all numbers of a sample, so that its gradients are small; an outlier's are clipped. Not of
pFedMe, whose rate also bounds its pull to the fleet's model."""
NO_WINDOW = "leave --window and --stride out"
OF_CLASSES, OF_TASKS = "pfldyn-proto", "fedavg-meta"
"""The default methods."""
HEAD = "# The server reads this file when it starts. Every key: docs/fleet.md of Metafleet."


def topic_name(folder: str) -> str:
    """A fleet's name from its folder's name: characters that topics do not allow become dashes."""
    return re.sub(r"[^A-Za-z0-9_-]+", "-", folder).strip("-")[:64] or "fleet"


@dataclass(frozen=True)
class SampleOptions:
    """How samples are read, and what of them is learned, as options of a command say.

    outputs, labels, normal: names with commas between them; None for those of the file. per_day: wanted false alarms a
    day. The others: as in ``load_data``, and ``loss`` as in ``fleet_toml``.
    """

    task: str = field(default=TASKS[0], metadata={"sparse": True})
    outputs: str | None = field(default=None, metadata={"sparse": True})
    loss: str | None = field(default=None, metadata={"sparse": True})
    labels: str | None = field(default=None, metadata={"sparse": True})
    normal: str | None = field(default=None, metadata={"sparse": True})
    per_day: float | None = field(default=None, metadata={"sparse": True})
    window: int | None = None
    stride: int | None = None
    size: str | None = field(default=None, metadata={"sparse": True})
    fit: str | None = field(default=None, metadata={"sparse": True})
    rate: int | None = field(default=None, metadata={"sparse": True})
    seconds: float | None = field(default=None, metadata={"sparse": True})

    @property
    def default_method(self) -> str:
        """Of a fleet that learns this."""
        return OF_CLASSES if self.task == TASKS[0] else OF_TASKS

    @property
    def names(self) -> tuple[str, ...] | None:
        """As ``wanted_outputs``. Raises ConfigError for options that do not fit the task."""
        return wanted_outputs(self.task, self.outputs, self.loss, self.labels, self.normal, self.per_day)

    def load(
        self, data: str, say: Callable[[str], None] = lambda text: None, *, anomalies: bool = False
    ) -> tuple[Samples, InputSpec]:
        """As ``load_data``. Raises ConfigError too."""
        return load_data(
            data, say, window=self.window, stride=self.stride, size=self.size, fit=self.fit, rate=self.rate,
            seconds=self.seconds, outputs=self.names, labels=self.task == LABELS,
            normal=wanted_normal(self.task, self.normal), anomalies=anomalies,
        )

    def of_fleet_toml(self, samples: Samples, spec: InputSpec, normal: Sequence[str] | None = None) -> dict[str, Any]:
        """The options of ``fleet_toml`` that say what is learned. normal: in place of the labels of quiet samples.
        Raises DataError as ``anomaly_task``."""
        quiet = wanted_normal(self.task, self.normal) if normal is None else normal
        task = None if self.task != anomaly.KIND else anomaly_task(samples, spec, quiet or (), self.per_day)
        return {"loss": self.loss, "labels": self.task == LABELS, "quiet": task}


def load_data(
    data: str, say: Callable[[str], None] = lambda text: None, *, window: int | None = None, stride: int | None = None,
    size: str | None = None, fit: str | None = None, rate: int | None = None, seconds: float | None = None,
    outputs: Sequence[str] | None = None, labels: bool = False, normal: Sequence[str] | None = None,
    anomalies: bool = False,
) -> tuple[Samples, InputSpec]:  # fmt: skip
    """The named set with its recommended input, or the file with its channels standardized. say: takes remarks about
    how the file was read. window, stride, size, fit, rate, seconds: as in ``samples.load_in_form``. outputs, labels: of
    the numbers to predict, or of several labels, as in ``samples.load``; None for classes. normal: the labels of quiet
    samples of a fleet that detects anomalies; only quiet samples are returned, and with ``anomalies`` the others too.
    The input is standardized by quiet samples. Raises DataError, also for samples whose classes have no names."""
    if _is_named(data):
        if normal is not None:
            raise DataError("is a named set, which has classes", where=data, expected="a file of quiet samples",
                            hint=f"leave out --task {anomaly.KIND}")
        if outputs is not None:
            raise DataError("is a named set, which has classes", where=data,
                            expected=f"a file of samples with {'labels' if labels else 'numbers'}",
                            hint=f"leave out --task {LABELS if labels else KIND}")
        if window is not None or stride is not None:
            raise DataError("is a named set, which is not cut into windows", where=data, hint=NO_WINDOW)
        if any(option is not None for option in (size, fit, rate, seconds)):
            raise DataError("is a named set, whose samples are as they are", where=data,
                            hint="leave out --size, --fit, --rate and --seconds")
        found = load_set(data)
        return pool(found.train, found.test), found.entry.input_spec
    samples, plain = load_in_form(Path(data), window=window, stride=stride, size=size, fit=fit, rate=rate,
                                  seconds=seconds, outputs=outputs, labels=labels, normal=normal)
    learned = samples if normal is None else _quiet(samples, data, normal)
    samples = samples if anomalies else learned
    for remark in (*samples.notes, *model_input.remarks(samples.x)):
        say(remark)
    if model_input.channels_last(samples.x.shape[1:]):
        raise DataError(f"x has shape {list(samples.x.shape)}", where=data, hint="np.moveaxis(x, -1, 1) turns it",
                        expected="images [N, channels, height, width]")
    if samples.classes is None and not samples.outputs:
        most = int(samples.y.max())
        raise DataError("names no classes", where=data, expected=f"an array 'classes' with {most + 1} or more names, "
                        f"for the labels 0 to {most}", hint="or store the class names in y")
    spec = model_input.standardized(learned.x, plain.fit, plain.sound_hz)
    return samples, replace(spec, rate_hz=plain.rate_hz, stride=plain.stride)


def _quiet(samples: Samples, data: str, normal: Sequence[str]) -> Samples:
    """The quiet samples. Raises DataError if there are none."""
    quiet = samples.take(samples.y == 0)
    if not len(quiet):
        said = f"no label is {', '.join(normal)}" if normal else "it has labels"
        raise DataError(f"has no quiet samples: {said}", where=data, hint="--normal names the labels of quiet samples")
    return quiet


def anomaly_task(samples: Samples, spec: InputSpec, normal: Sequence[str], per_day: float | None) -> Anomaly:
    """The task of quiet samples. per_day: the wanted number of false alarms a day; None: the default share of samples.
    Raises DataError if samples are too large to be repeated, or if the time from one to the next is needed and not
    known."""
    task, seconds = Anomaly.of(spec.shape, normal), _seconds_between(samples, spec)
    if per_day is not None and not seconds:
        raise DataError("has no times, so false alarms a day cannot be counted", where="--data",
                        expected="a column 'time' in seconds, or --rate", hint="leave out --false-alarms")
    return replace(task, false_alarms_per_day=per_day or 0.0, seconds=seconds)


def _seconds_between(samples: Samples, spec: InputSpec) -> float:
    """From one sample to the next; 0 if that is not known."""
    if spec.rate_hz and len(spec.shape) == 2:
        return (spec.stride or spec.shape[1]) / spec.rate_hz
    if samples.time is None:
        return 0.0
    groups = [samples.time] if samples.client is None else [samples.time[samples.client == c] for c in samples.clients]
    steps = np.concatenate([np.diff(np.sort(one)) for one in groups])
    return float(f"{np.median(steps[steps > 0]):.6g}") if (steps > 0).any() else 0.0


def model_for(data: str, samples: Samples) -> str:
    """The named set's recommended model, else the default for samples of this shape."""
    recommended = entries()[data].model if _is_named(data) else ""
    return recommended or model_input.default_model(samples.x.shape[1:], samples.x.dtype.name)


def train_table(only: list[str] | None, freeze: str | None) -> dict[str, Any]:
    """The table ``train``. Raises ConfigError."""
    given = {"only": only or [], **({} if freeze is None else {"freeze": freeze})}
    _, problems = schema.read(TrainSection, given)
    if problems:
        raise ConfigError("\n".join(f"--{problem}" for problem in problems))
    return given


def wanted_outputs(
    task: str, outputs: str | None, loss: str | None, labels: str | None = None, normal: str | None = None,
    per_day: float | None = None,
) -> tuple[str, ...] | None:
    """The outputs or labels that the options of ``init`` name; empty for those of the file, None for classes. Raises
    ConfigError."""
    if task not in TASKS:
        raise ConfigError(f"'{task[:40]}' is not a task", where="--task", expected=" or ".join(TASKS))
    if (normal is not None or per_day is not None) and task != anomaly.KIND:
        raise ConfigError("--normal and --false-alarms are for anomalies", hint=f"--task {anomaly.KIND}")
    if labels is not None and task != LABELS:
        raise ConfigError("--labels are those of which a sample has any number", hint=f"--task {LABELS}")
    if task != KIND:
        if outputs is not None or loss is not None:
            raise ConfigError("--outputs and --loss are for numbers to predict", hint=f"--task {KIND}")
        return None if task != LABELS else _named(labels)
    if loss is not None and loss not in LOSSES:
        raise ConfigError(f"'{loss[:40]}' is not a loss", where="--loss", expected=" or ".join(LOSSES))
    return _named(outputs)


def tried_task(outputs: Sequence[str] | None, labels: bool, loss: str | None) -> dict[str, Any] | None:
    """Of numbers or labels, as keys of an experiment's table ``model``; None for classes. outputs, labels, loss: as in
    ``load_data`` and ``fleet_toml``."""
    if outputs is None:
        return None
    return {"task": LABELS} if labels else {"task": KIND, "loss": loss or LOSSES[0]}


def wanted_normal(task: str, normal: str | None) -> tuple[str, ...] | None:
    """The labels of quiet samples that ``--normal`` names; None for another task."""
    return _named(normal) if task == anomaly.KIND else None


def _named(names: str | None) -> tuple[str, ...]:
    return tuple(name.strip() for name in names.split(",")) if names else ()


def wants_trial(data: str, model: str | None, trial: bool | None) -> bool:
    """Whether to try models: as the user says; by default for a file without a named model."""
    return (model is None and data not in entries()) if trial is None else trial


def _is_named(data: str) -> bool:
    return data in entries() and not Path(data).exists()


def fleet_toml(
    samples: Samples, name: str, method: str, model: str | None, *, rounds: int, seed: int,
    spec: InputSpec | None = None, model_options: Mapping[str, Any] | None = None, codec: str | None = None,
    train: Mapping[str, Any] | None = None, backbone: Backbone | None = None, loss: str | None = None,
    labels: bool = False, quiet: Anomaly | None = None, **fleet: Any,
) -> str:  # fmt: skip
    """The content of fleet.toml for these samples, which need class names, or outputs. model: default by shape. spec:
    the model's input; by default the samples as they are. backbone: it computes this input from raw samples. codec: as
    in ``codec_catalogue.chosen``. train: keys of its table ``train``. loss: of numbers; default huber. labels: the
    samples' outputs are labels. quiet: the task of quiet samples. fleet: further keys of ``fleet``."""
    task: Task | None = quiet
    if samples.outputs:
        task = MultiLabel(samples.outputs) if labels else Regression.of(samples.outputs, samples.y, loss or LOSSES[0])
    named = method_catalogue.named(method)
    if quiet is not None:
        model_options = model_options or (REPEATING_OPTIONS if model in (None, REPEATING) else None)
        model = model or REPEATING
    chosen = model or model_input.default_model(samples.x.shape[1:], samples.x.dtype.name)
    return toml_with_defaults(
        {
            "fleet": {"name": name, "method": method, "rounds": rounds, "seed": seed, **fleet},
            "model": {
                "name": chosen,
                "classes": [] if quiet else list(samples.classes or ()),
                "input": _input(spec or model_input.plain(samples.x)),
                **({"options": dict(model_options)} if model_options else {}),
                **({"task": schema.plain(task)} if task else {}),
                **({"backbone": {**schema.plain(backbone), "input": _input(backbone.input)}} if backbone else {}),
            },
            "link": codec_catalogue.chosen(codec) if codec else {},
            "train": dict(train or {}),
            "hyper": schema.plain(first_hyper(named, repeating=quiet is not None)),
        }
    )


def first_hyper(method: Method, *, repeating: bool) -> Any:
    """The method's hyper-parameters for a first fleet: its defaults, and the rates of models that repeat samples."""
    hyper = method.hyper()
    if not repeating or method.personalizer == "moreau":
        return hyper
    without = () if getattr(hyper, "finetune_steps", 0) else ("finetune_lr",)
    known = {f.name for f in fields(hyper)}.difference(without)
    return replace(hyper, **{name: rate for name, rate in REPEATING_RATES.items() if name in known})


def _input(spec: InputSpec) -> dict[str, Any]:
    return {key: value for key, value in schema.plain(spec).items() if value}


def toml_with_defaults(tables: Mapping[str, Any]) -> str:
    """fleet.toml of these tables, with the defaults of the other common keys and a comment above each key."""
    link = schema.plain(LinkSection())
    defaults = {
        "fleet": schema.plain(FleetSection(tables["fleet"]["name"])), "train": schema.plain(TrainSection()),
        "link": {key: link[key] for key in ("up", "down", "skip_below")}, "robust": schema.plain(FleetRobustSection()),
        "privacy": {key: value for key, value in schema.plain(PrivacySection()).items() if value is not None},
        "keep": schema.plain(KeepSection()),
    }
    whole = {**tables, **{name: {**known, **tables.get(name, {})} for name, known in defaults.items()}}
    order = "fleet", "model", "train", "link", "robust", "privacy", "keep", "hyper"
    ordered = {name: whole[name] for name in order if name in whole}
    return f"{HEAD}\n{config.toml(ordered, notes=NOTES)}"
