"""Runs a few rounds on a few devices before a run starts, to measure how many bytes its updates and models take.

The size of an encoded update depends on its values: real updates have zeros, few large values and float32's rounding,
so they compress better than noise. Needs torch.
"""

from __future__ import annotations

import contextlib
import tempfile
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np

from cloud_server.laboratory.plan.experiment import (
    Budget,
    DataSection,
    EvaluationSection,
    Experiment,
    MethodSection,
    ModelSection,
    Run,
)
from cloud_server.laboratory.plan.planned_bytes import Asked, Rehearsed
from cloud_server.laboratory.plan.workload import Workload
from cloud_server.laboratory.run.device_work import Setting
from cloud_server.laboratory.run.engine import Engine, Laboratory, Stopped
from cloud_server.laboratory.run.executors import Inline
from cloud_server.laboratory.run.round_figures import Costs
from cloud_server.laboratory.run.run_folder import Store
from fleet_core.base.errors import ConfigError
from fleet_core.data.partitions import Share
from fleet_core.data.samples import Samples
from fleet_core.learning import models
from fleet_core.model.layout import InputSpec, Layout

DEVICES, ROUNDS = 4, 6
PER_CLASS = 40
NOISE = 0.5
"""Deviation of the noise that is added to a class's pattern, chosen on the simulated runs of benchmarks/cost (HAR)."""
MOST_FLOPS = 2e11
"""Largest number of operations of all rounds together: about ten seconds of one core."""
Array = np.ndarray[Any, Any]


def rehearsed(asked: Asked, flops: float, own: Workload | None = None) -> Rehearsed:
    """Sizes from rounds 2 to ``ROUNDS`` of ``DEVICES`` devices. flops: of one device and round. own: the samples and
    devices of an experiment, or of a file; without them samples are generated. Raises ConfigError if it would take
    long, and FleetError."""
    if not asked.moving.everything:
        raise ConfigError("some arrays are frozen")
    devices = min(DEVICES, asked.devices, DEVICES if own is None else len(own.train))
    if flops * devices * ROUNDS > MOST_FLOPS:
        raise ConfigError("a rehearsal would take long")
    work = generated(asked.layout, devices) if own is None else own
    rows = _rounds(asked, work, devices)
    up, down = (round(mean(row["payload_bytes"][way] for row in rows[1:]) / devices) for way in ("up", "down"))
    samples = "generated samples" if own is None else "its own samples"
    return Rehearsed(up, down, f"of {ROUNDS} rounds with {devices} devices on {samples}")


def _rounds(asked: Asked, work: Workload, devices: int) -> list[dict[str, Any]]:
    """The figures of the rounds."""
    few = Workload(work.samples, work.train[:devices], (), (), work.spec, work.classes, task=work.task)
    layout, rows = asked.layout, list[dict[str, Any]]()
    experiment = Experiment(
        DataSection(set="generated"), ModelSection(layout.model, layout.options), Budget(ROUNDS + 1),
        (MethodSection(asked.method.name),), evaluation=EvaluationSection(every=0), codec_up=asked.codec_up,
        codec_down=asked.codec_down,
    )
    run = Run("rehearsal", asked.method, asked.hyper, asked.seed)
    with tempfile.TemporaryDirectory() as folder:
        executor = Inline(Setting(experiment, run, Path(folder)), few)
        lab = Laboratory(
            experiment, few, layout, asked.first or models.initial(layout, asked.seed), executor, Costs(),
            stopped=lambda: len(rows) == ROUNDS, told=lambda row: rows.append(dict(row)),
        )
        with contextlib.suppress(Stopped):
            Engine(lab, run, Store(Path(folder))).run()
    return rows


def divided(samples: Samples, layout: Layout) -> Workload:
    """These samples among at most ``DEVICES`` devices: by client if they name some, else at random."""
    rows = [np.flatnonzero(samples.client == name) for name in samples.clients[:DEVICES]] if samples.clients else (
        np.array_split(np.random.default_rng(0).permutation(len(samples.y)), DEVICES))
    shares = tuple(Share(f"d{k}", np.sort(own), own[:0]) for k, own in enumerate(rows))
    return Workload(samples, shares, (), (), layout.input, layout.classes, task=layout.task)


def generated(layout: Layout, devices: int) -> Workload:
    """Samples of ``layout``'s input: a smooth pattern for each class, plus one for each device, plus noise. For a task
    without classes a few patterns, as strong as the task says. Raises ConfigError for an input of whole numbers."""
    rng, spec, task, classes = np.random.default_rng(0), layout.input, layout.task, len(layout.classes)
    if spec.dtype == "int64":
        raise ConfigError("no samples can be generated for an input of whole numbers")
    device = np.repeat(np.arange(devices), PER_CLASS * (len(task.outputs) if task else classes))
    if task is None:
        y = np.tile(np.repeat(np.arange(classes), PER_CLASS), devices)
        signal = _smooth(rng, classes, spec)[y]
    else:
        strength, y = task.generated(rng, len(device))
        signal = np.tensordot(strength, _smooth(rng, strength.shape[1], spec), 1)
    x = signal + _smooth(rng, devices, spec)[device] / 2 + NOISE * rng.normal(size=(len(y), *spec.shape))
    rows = np.arange(len(y)).reshape(devices, -1)
    shares = tuple(Share(f"d{k}", rows[k], rows[k][:0]) for k in range(devices))
    samples = Samples(_raw(x, spec), y, classes=layout.classes, outputs=task.columns if task else ())
    return Workload(samples, shares, (), (), spec, layout.classes, task=task)


def _smooth(rng: np.random.Generator, count: int, spec: InputSpec) -> Array:
    """[count, *shape], mean 0 and deviation 1 each: random walks along the last axis."""
    walks = rng.normal(size=(count, *spec.shape)).cumsum(-1)
    walks -= walks.mean(-1, keepdims=True)
    smooth: Array = walks / np.maximum(walks.std(-1, keepdims=True), 1e-9)
    return smooth


def _raw(x: Array, spec: InputSpec) -> Array:
    """Turns standardized values into raw samples, to which the input applies its scale, mean and deviation."""
    channels = (-1, *[1] * (len(spec.shape) - 1))
    std = np.reshape(spec.std, channels) if spec.std else 1.0
    centre = np.reshape(spec.mean, channels) if spec.mean else 0.0
    raw = (x * std + centre) / spec.scale
    return np.clip(raw, 0, 255).astype(np.uint8) if spec.dtype == "uint8" else raw.astype(np.float32)
