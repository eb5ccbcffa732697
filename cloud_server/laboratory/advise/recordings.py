"""A user's recordings, checked for a comparison of methods, and the models that fit them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.choices.first_settings import NO_WINDOW, REPEATING, REPEATING_OPTIONS
from fleet_core.base import schema
from fleet_core.base.errors import DataError
from fleet_core.data import model_input
from fleet_core.data.partitions import pool
from fleet_core.data.samples import Samples, load_in_form
from fleet_core.data.sets.registry import entries
from fleet_core.data.sets.set_cache import load_set
from fleet_core.data.time_split import by_time
from fleet_core.tasks import anomaly
from fleet_core.tasks.task import reading

MIN_CLIENTS, MIN_SAMPLES, MAX_CLIENTS = 4, 20, 50
TRAIN_FRACTION = 0.6
CONV4_PIXELS = 16  # the smallest side of an image that conv4 accepts


@dataclass(frozen=True)
class Model:
    """label: its name in tables. name: a named model. options: its keyword arguments."""

    label: str
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)


REPEATING_MODELS = (
    Model("mlp-64-8-64", REPEATING, REPEATING_OPTIONS),
    Model("mlp-128-16-128", REPEATING, {**REPEATING_OPTIONS, "hidden": [128, 16, 128]}),
)
"""For anomalies: that of ``metafleet init``, and a wider one."""


@dataclass(frozen=True, eq=False)
class Recordings:
    """section: the table ``data`` of an experiment. clients: number of clients with enough samples."""

    samples: Samples
    section: Mapping[str, Any]
    clients: int
    models: tuple[Model, ...]
    remarks: tuple[str, ...]


def recordings(
    data: str, window: int | None = None, stride: int | None = None, task: str = "classes", names: Sequence[str] = (),
    *, size: str | None = None, fit: str | None = None, rate: int | None = None, seconds: float | None = None,
) -> Recordings:  # fmt: skip
    """Loads a named set or a file. window, stride, size, fit, rate, seconds: as in ``samples.load_in_form``. task: what
    the samples are for; names: of its numbers or labels, empty for the file's own, or of the labels of quiet samples.
    Raises DataError if methods cannot be compared on it."""
    named = data in entries()
    if not named and not Path(data).exists():
        near = schema.suggest(data, entries())
        raise DataError("is neither a data set nor a file" + (f" (did you mean '{near}'?)" if near else ""),
                        where=data, expected=f"a path, or one of {', '.join(entries())}")
    if named and (window is not None or stride is not None):
        raise DataError("is a named set, which is not cut into windows", where=data, hint=NO_WINDOW)
    form: dict[str, Any] = schema.present({"size": size, "fit": fit, "rate": rate, "seconds": seconds})
    if named and form:
        raise DataError("is a named set, whose samples are as they are", where=data,
                        hint="leave out --size, --fit, --rate and --seconds")
    options = reading(task, names)
    if named and options:
        raise DataError("is a named set, which has classes", where=data, hint=f"leave out --task {task}")
    found = load_set(data) if named else None
    if found is None:
        samples, _ = load_in_form(Path(data), window=window, stride=stride, **form, **options)
    else:
        samples = pool(found.train, found.test)
    if samples.client is None:
        raise DataError("names no client, so it is unknown which samples belong to one device", where=data,
                        hint="add an array or a column 'client'")
    clients, index, counts = np.unique(samples.client, return_inverse=True, return_counts=True)
    enough = np.flatnonzero(counts >= MIN_SAMPLES)
    if len(enough) < MIN_CLIENTS:
        raise DataError(
            f"holds {len(clients)} client{'s' * (len(clients) > 1)}, {len(enough)} with {MIN_SAMPLES} samples or more",
            where=data,
            expected=f"{MIN_CLIENTS} such clients: some to train, others to evaluate",
        )
    held = np.array([len(np.unique(samples.y[index == k], axis=0)) for k in enough])
    if samples.outputs and held.max() < 2:
        what = "labels" if options.get("labels") else "targets"
        raise DataError(f"holds clients whose {what} never change: their mean would be right", where=data,
                        expected=f"{what} that differ")
    if held.max() < 2 and task != anomaly.KIND:
        whole = "one class alone" if len(np.unique(samples.y)) < 2 else "clients of one class each"
        raise DataError(f"holds {whole}: a constant answer would be right", where=data,
                        expected="clients with samples of several classes")
    section: dict[str, Any] = {"set": data}
    remarks = _remarks(samples, len(clients), held, task)
    if not named:
        remarks = [*samples.notes, *model_input.remarks(samples.x), *remarks]
        learned = by_time(samples, TRAIN_FRACTION)[0]
        spec = model_input.standardized(learned.x[learned.y == 0] if task == anomaly.KIND else learned.x)
        key = "normal" if task == anomaly.KIND else "outputs"
        cut = {**schema.present({"window": window, "stride": stride, key: list(names) or None}), **form}
        section = {"path": data, **cut, **({"mean": spec.mean, "std": spec.std} if spec.mean else {})}
    models = REPEATING_MODELS if task == anomaly.KIND else models_for(samples, found.entry.model if found else "")
    return Recordings(samples, section, len(enough), models, tuple(remarks))


def _remarks(samples: Samples, clients: int, held: np.ndarray[Any, Any], task: str) -> list[str]:
    few, one, quiet = clients - len(held), int((held < 2).sum()), task == anomaly.KIND
    said = {
        f"{few} of {clients} clients have fewer than {MIN_SAMPLES} samples and are left out": few > 0,
        f"{MAX_CLIENTS} of {len(held)} clients are used, drawn at random": len(held) > MAX_CLIENTS,
        f"{one} of {len(held)} clients hold one class alone, which makes adapting easy":
            one > 0 and not samples.outputs and not quiet,
        "no sample is labelled as an anomaly: models are compared by how well they repeat quiet samples, which does "
        "not say which anomalies they find": quiet and not samples.y.any(),
        "there are no times: the order of the rows is used instead": samples.time is None,
        "the classes have no names, which a fleet needs: add an array 'classes'":
            samples.classes is None and not samples.outputs,
    }
    return [text for text, applies in said.items() if applies]


def models_for(samples: Samples, recommended: str = "") -> tuple[Model, ...]:
    """Models for samples of this shape that small devices can train: the recommended one first, then the default.
    ``advise`` runs the first two with every method, the others only with the best methods; ``init`` tries all."""
    shape = samples.x.shape[1:]
    names = model_input.models_for(shape, samples.x.dtype.name)
    models = [Model(name, name) for name in dict.fromkeys([recommended, *names] if recommended else names)]
    if len(shape) == 1 and names[0] == "mlp":
        models.insert(1, Model("mlp-64-64", "mlp", {"hidden": [64, 64]}))
    if len(shape) == 3 and min(shape[1:]) >= CONV4_PIXELS:
        models.append(Model("conv4", "conv4", {"channels": 32}))
    return tuple(models)
