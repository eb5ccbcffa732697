"""Personalizes again, or learns new labelled samples, while the device answers.

The result is used only if the disk has not changed since the work began: another thread or process may have stored new
weights or another personalization. In that case the work is repeated with those.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edge_agent.compute import adapter
from edge_agent.inference import personalization
from edge_agent.inference.embedded_support import Embed
from edge_agent.inference.personalization import Personalization
from edge_agent.inference.personalizers import EMBEDS, Plan, possible_choices
from edge_agent.inference.service import Service
from edge_agent.inference.stored_models import Served, StoredModels
from edge_agent.inference.worse_model_check import WORSE_BY, WorseModel
from fleet_core.base import schema
from fleet_core.base.errors import ConfigError, DataError, RoundError, StateError
from fleet_core.board.device_settings import Personalize
from fleet_core.data import model_input
from fleet_core.data.prepare import prepared
from fleet_core.data.samples import Samples
from fleet_core.tasks.anomaly import LABELS, Anomaly
from fleet_core.tasks.labels import MultiLabel
from fleet_core.tasks.regression import Regression

Array = np.ndarray[Any, Any]

TRIES = 5
LABEL = r"[^\x00-\x1f\x7f]{1,64}"

_learning = threading.Lock()


@dataclass(frozen=True)
class Personalized:
    """how: the personalizer. samples: number of samples used. of: number of all samples of these classes. left_out:
    number of samples of the device's own classes, which this personalizer cannot learn. per_class: class -> samples.
    auto: the figures by which ``auto`` chose, as plain values.
    """

    how: str
    samples: int
    of: int
    left_out: int
    per_class: dict[str, int]
    auto: Mapping[str, Any] = field(default_factory=dict)


def personalize(service: Service, choice: Personalize | None = None) -> Personalized:
    """Personalizes the model that answers again, on all samples. choice: replaces the stored choice. Blocks the thread
    while a child process takes gradient steps.

    Raises ConfigError if ``choice`` is impossible, StateError if only the trainer can take the steps, DataError without
    samples, WorseModel if the held-back samples would be answered worse; nothing changes then.
    """
    for _ in range(TRIES):
        base, served = service.slots.stamp(), service.stored.served(service.slots.pointer().slot)
        if choice is not None and choice.int8 and not service.slots.int8(served.slot):
            raise ConfigError(
                f"the weights of round {served.weights.round} came without an int8 encoder",
                hint="metafleet export FLEET --int8 DATA --to BUNDLE, then here: edge-agent install BUNDLE",
            )  # fmt: skip
        plan = service.stored.plan(served.graph, served.method, served.hyper, choice=choice)
        personal, result = _personalized(service.stored, served, plan)
        if service.switch_personalization(personal, served, base):
            return result
    raise StateError("new weights arrive faster than they can be personalized", where=str(service.slots.folder))


def _personalized(stored: StoredModels, served: Served, plan: Plan) -> tuple[Personalization | None, Personalized]:
    data = stored.local(served.graph.layout)
    if plan.kind == "left":
        choices = ", ".join(by for by in possible_choices(served.method, served.graph) if by != "method")
        raise StateError(
            f"{served.method.name} personalizes by gradient steps that only the trainer can take",
            hint="'edge-agent run' takes them" + (f"; here works: --by {choices}" if choices else ""),
        )
    if plan.kind == "none":
        return None, Personalized("none", 0, 0, 0, {})
    every = data.every()
    if plan.kind in EMBEDS:
        personal = stored.personalize_from_samples(plan, served, stored.personalization(served.slot))
        auto = personal.settings.get("auto", {})
        return personal, Personalized(personal.how, len(every), len(every), 0, _per_class(every), auto)
    graph, name, added = stored.home.graph_path(served.graph_id), f"slots/{served.slot}/serve", data.added()
    done = adapter.run(adapter.job(graph, name, served.weights.model, data, plan.steps, plan.rate))
    if done.error:
        raise RoundError(f"the gradient steps failed: {done.error}")
    used, of = int(done.header["samples"]), int(done.header["of"])
    x = None if data.task is None else every.x
    personal = personalization.from_weights(plan.how, served.weights, data.classes, done.arrays, x, added=added)
    return personal, Personalized(plan.how, used, of, len(every) - of, _per_class(every))


def _per_class(every: Samples) -> dict[str, int]:
    """Empty for targets."""
    if every.outputs:
        return {}
    names = every.classes or ()
    return dict(zip(names, map(int, np.bincount(every.y, minlength=len(names))), strict=True))


# Labelled samples -----------------------------------------------------------------------------------------------------


def check_labels(service: Service, labels: Sequence[str], *, new: bool) -> None:
    """Raises ConfigError for a label that is no class. new: labels may name new classes of this device, if its
    personalizer can learn them."""
    task = service.layout.task
    if isinstance(task, MultiLabel):
        raise ConfigError(f"one class '{labels[0][:80]}', and a sample of this fleet has any number of labels",
                          expected=f"a list of some of {', '.join(task.outputs[:20])}, or of none",
                          hint="edge-agent samples add FILE --labels NAME,…")
    if isinstance(task, Anomaly):
        for label in labels:
            if label not in LABELS:
                raise ConfigError(f"a class '{label[:80]}', and this fleet detects anomalies",
                                  expected=" or ".join(LABELS))
        return
    if task is not None:
        raise ConfigError(f"a class '{labels[0][:80]}', and this fleet predicts {', '.join(task.outputs[:20])}",
                          expected=f"a number for each of {len(task.outputs)}",
                          hint="edge-agent samples add FILE --target NUMBER,…")
    known, fleet = service.local().names(), service.layout.classes
    for label in dict.fromkeys(labels):
        if label in fleet:
            continue
        own_classes = _takes_own_classes(service)
        if own_classes and (label in known or (new and re.fullmatch(LABEL, label))):
            continue
        near = schema.suggest(label, known)
        hint = "a class of this device alone needs class means, a fitted head or neighbours: --by proto, head or knn"
        raise ConfigError(
            f"unknown class '{label[:80]}'" + (f" (did you mean '{near}'?)" if near else ""),
            expected="one of " + ", ".join(known if own_classes else fleet),
            hint="--new-class (over HTTP: new_classes), if it is a class of this device alone" if own_classes else hint,
        )


def checked_targets(service: Service, y: Array) -> Array:
    """y [K]: the targets of one sample. Raises ConfigError unless they are a finite number for each output."""
    task = service.layout.task
    if isinstance(task, Anomaly):
        raise ConfigError("a number, and this fleet detects anomalies", expected=" or ".join(LABELS))
    if not isinstance(task, Regression):
        raise ConfigError("a number, and this fleet has " + ("classes" if task is None else "labels"),
                          expected="the name of a class" if task is None else "a list of labels")
    if y.shape != (len(task.outputs),) or not np.isfinite(y).all():
        raise ConfigError(f"the targets are {y.tolist()[:20]}",
                          expected=f"a finite number for each of {', '.join(task.outputs[:20])}")
    return y


def checked_label_set(service: Service, labels: Sequence[str]) -> Array:
    """[K], 1 for each of ``labels``: those of one sample. Raises ConfigError for another fleet or unknown labels."""
    task = service.layout.task
    if isinstance(task, Anomaly):
        raise ConfigError("a list of labels, and this fleet detects anomalies", expected=" or ".join(LABELS))
    if not isinstance(task, MultiLabel):
        raise ConfigError("a list of labels, and this fleet has " + ("classes" if task is None else "numbers"),
                          expected="the name of a class" if task is None else "numbers")
    for name in labels:
        if name not in task.outputs:
            raise ConfigError(f"unknown label '{name[:80]}'{schema.did_you_mean(name, task.outputs)}",
                              expected=f"some of {', '.join(task.outputs[:20])}, or none")
    return np.array([float(name in labels) for name in task.outputs])


def _takes_own_classes(service: Service) -> bool:
    if not service.slots.in_order():
        return False
    served = service.stored.served(service.slots.pointer().slot)
    return service.stored.plan(served.graph, served.method, served.hyper).kind in EMBEDS


def learn(service: Service, x: Array, labels: Sequence[str], *, new: bool = False) -> dict[str, Any]:
    """Stores raw samples [n, *shape] with their class names, as ``edge-agent samples add`` does, and personalizes at
    once. Threads may call it at the same time; the device answers meanwhile. Returns the outcome as plain values. new:
    as in ``check_labels``.

    Raises DataError for samples of another shape or dtype, and for samples that would make the answers to the held-back
    ones worse: those are not stored. Raises ConfigError for a class that cannot be learned.
    """
    service.known_classes()
    x = prepared(x, service.layout.sample)
    _check_samples(service, x, labels)
    with _learning:
        check_labels(service, labels, new=new)
        with service.slots.writing():
            total = service.local().add(x, labels)
        return _learned(service, x, total, lambda: _extend(service, x, labels, total) or personalize(service).how)


def learn_targets(service: Service, x: Array, y: Array) -> dict[str, Any]:
    """As ``learn``, of a fleet without classes: raw samples with targets [n, K] in the user's unit, or with 0 or 1 for
    each label."""
    service.known_classes()
    x = prepared(x, service.layout.sample)
    _check_samples(service, x, y)
    if not np.isfinite(y).all():
        raise DataError("a target is not finite")
    service.layout.truths(y)
    with _learning:
        with service.slots.writing():
            total = service.local().add_targets(x, y)
        return _learned(service, x, total, lambda: personalize(service).how)


def _learned(service: Service, x: Array, total: int, personalized: Callable[[], str]) -> dict[str, Any]:
    """Personalizes with the samples x, the last of ``total`` stored ones; takes them back if the answers got worse."""
    facts = {"added": len(x), "added_in_all": total}
    try:
        how = personalized()
    except (WorseModel, DataError) as error:
        with service.slots.writing():
            service.local().take_back(total - len(x), x)
        why, hint = (error.why, WORSE_BY) if isinstance(error, WorseModel) else (error.what, error.hint)
        raise DataError(f"not kept, because with these samples: {why}", hint=hint) from error
    except (StateError, RoundError) as error:  # the agent takes the steps later
        return {**facts, **_answering(service), "counts_later": error.what}
    return {**facts, **_answering(service), "personalization": how}


def _answering(service: Service) -> dict[str, Any]:
    now = service.answering
    return {} if now is None else {"round": now.round, "model": now.model, "personalization": now.how}


def _extend(service: Service, x: Array, labels: Sequence[str], total: int) -> str:
    """Extends the personalization by these samples, and embeds only them. Returns its personalizer; empty if everything
    must be made again."""
    if service.layout.task is not None:
        return ""
    base, served = service.slots.stamp(), service.stored.served(service.slots.pointer().slot)
    personal = service.stored.personalization(served.slot)
    plan = service.stored.plan(served.graph, served.method, served.hyper)
    if personal is None or personal.how != plan.kind or personal.settings.get("added") != total - len(x):
        return ""
    names = tuple(dict.fromkeys((*personal.classes, *labels)))
    z = service.stored.as_input(served.graph.layout, x)
    new = Samples(z, np.array([names.index(label) for label in labels], np.int64), classes=names)
    extended = personalization.extended(personal, _embed(service, served, personal), new)
    if extended is None:
        return ""
    extended = replace(extended, settings={**extended.settings, "added": total})
    return extended.how if service.switch_personalization(extended, served, base) else ""


def _embed(service: Service, served: Served, personal: Personalization) -> Embed:
    """The encoder of ``personal``: the open session if it has the same encoder."""
    now = service.answering
    if now is not None and (now.model, now.graph) == (served.weights.model, personal.graph):
        return now.predictor.embedder.run
    int8 = service.slots.int8(served.slot) if personal.int8 else b""
    return personalization.open_encoder(served.graph, served.weights, int8).run


def _check_samples(service: Service, x: Array, labels: Sequence[str] | Array) -> None:
    spec = service.layout.sample
    if not len(x) or x.shape != (len(labels), *spec.shape) or str(x.dtype) != spec.dtype:
        raise DataError(
            f"samples {x.dtype} {list(x.shape)} with {len(labels)} labels",
            expected=f"one or more {spec.dtype} {list(spec.shape)}, each with a label", hint=model_input.hint(x, spec),
        )
    if not np.isfinite(x).all():
        raise DataError("a sample holds a value that is not finite")
    if spec.dtype == "int64" and service.answering is not None:
        service.predict(x)  # raises for tokens that the model does not know
