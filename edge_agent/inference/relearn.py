"""A device is personalized anew, or learns labelled samples, while it answers.

What is made is taken up only if the disk is still as it was when it was begun: another thread or process may have put
new weights or another personalization there meanwhile, and then it is made again with those.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from edge_agent.compute import adapter
from edge_agent.inference import personal_files as owns
from edge_agent.inference.embedded_support import Embed
from edge_agent.inference.model_check import WORSE_BY, WorseModel
from edge_agent.inference.personal_files import PersonalFiles
from edge_agent.inference.personalizers import EMBEDS, Plan, working
from edge_agent.inference.service import Service
from edge_agent.inference.stored_models import Served, StoredModels, graph_of
from fleet_core.base import schema
from fleet_core.base.errors import ConfigError, DataError, RoundError, StateError
from fleet_core.board.device_settings import Personalize
from fleet_core.data import model_input
from fleet_core.data.samples import Samples

Array = np.ndarray[Any, Any]

TRIES = 5
LABEL = r"[^\x00-\x1f\x7f]{1,64}"
LEAVES = "'edge-agent run' makes them"

_learning = threading.Lock()


@dataclass(frozen=True)
class Personalized:
    """how: as answers say it. samples: that it was made from, of those that there are of these classes. left_out:
    samples of classes that the fleet does not have, which this way cannot learn. per_class: samples by class."""

    how: str
    samples: int
    of: int
    left_out: int
    per_class: dict[str, int]


def personalize(service: Service, choice: Personalize | None = None) -> Personalized:
    """Makes the model that answers the device's own once more, on all its samples. choice: how, in place of what was
    chosen here before. Blocks its thread while gradient steps are taken, in a process of their own.

    Raises ConfigError for a choice that cannot be, StateError where only the trainer takes the steps, DataError
    without samples, Worse where the held-back samples would be answered worse: then nothing has changed.
    """
    for _ in range(TRIES):
        base, served = service.slots.stamp(), service.shelf.served(service.slots.pointer().slot)
        if choice is not None and choice.int8 and not service.slots.int8(served.slot):
            raise ConfigError(
                f"the weights of round {served.weights.round} came without an int8 encoder",
                hint="metafleet export FLEET --int8 DATA --to BUNDLE, then here: edge-agent install BUNDLE",
            )  # fmt: skip
        plan = service.shelf.plan(served.graph, served.method, served.hyper, choice=choice)
        made, said = _made(service.shelf, served, plan)
        if service.take_up(made, served, base):
            return said
    raise StateError("new weights come faster than they are personalized", where=str(service.slots.folder))


def _made(shelf: StoredModels, served: Served, plan: Plan) -> tuple[PersonalFiles | None, Personalized]:
    data = shelf.local(served.graph.layout)
    if plan.kind == "left":
        ways = ", ".join(way for way in working(served.method, served.graph) if way != "method")
        raise StateError(
            f"{served.method.name} personalizes by gradient steps",
            hint=LEAVES + (f"; here works: --by {ways}" if ways else ""),
        )
    if plan.kind == "none":
        return None, Personalized("none", 0, 0, 0, {})
    every = data.every()
    per_class = _per_class(every)
    if plan.kind in EMBEDS:
        made = shelf.of_samples(plan, served, shelf.kept(served.slot))
        return made, Personalized(plan.how, len(every), len(every), 0, per_class)
    graph, name = shelf.home.graph_path(served.graph_id), f"slots/{served.slot}/serve"
    done = adapter.waited(adapter.job(graph, name, served.weights.model, data, plan.steps, plan.rate))
    if done.error:
        raise RoundError(f"the gradient steps failed: {done.error}")
    used, there = int(done.header["samples"]), int(done.header["of"])
    own = owns.of_weights(plan.how, served.weights, data.classes, done.arrays)
    return own, Personalized(plan.how, used, there, len(every) - there, per_class)


def _per_class(every: Samples) -> dict[str, int]:
    names = every.classes or ()
    return dict(zip(names, map(int, np.bincount(every.y, minlength=len(names))), strict=True))


# Labelled samples ----------------------------------------------------------------------------------------------------


def check_labels(service: Service, labels: Sequence[str], *, new: bool) -> None:
    """Raises ConfigError for a name that is no class here. new: names that the fleet does not have may be this device's
    own, where its way of personalizing can learn them."""
    known, fleet = service.local().names(), service.layout.classes
    for label in dict.fromkeys(labels):
        if label in fleet:
            continue
        wider = _takes_own_classes(service)
        if wider and (label in known or (new and re.fullmatch(LABEL, label))):
            continue
        near = schema.suggest(label, known)
        hint = "a class of this device alone takes class means, a fitted head or neighbours: --by proto, head or knn"
        raise ConfigError(
            f"unknown class '{label[:80]}'" + (f" (did you mean '{near}'?)" if near else ""),
            expected="one of " + ", ".join(known if wider else fleet),
            hint="--new-class (over HTTP: new_classes), if it is one of this device alone" if wider else hint,
        )


def _takes_own_classes(service: Service) -> bool:
    if not service.slots.in_order():
        return False
    served = service.shelf.served(service.slots.pointer().slot)
    return service.shelf.plan(served.graph, served.method, served.hyper).kind in EMBEDS


def learn(service: Service, x: Array, labels: Sequence[str], *, new: bool = False) -> dict[str, Any]:
    """Stores raw samples [n, *shape] with the names of their classes as ``edge-agent samples add`` does, and
    personalizes at once. Called by several threads; answers go on meanwhile. What came of it, as plain values. new: as
    in ``check_labels``.

    Raises DataError for samples of another form, and for those with which the held-back samples would be answered
    worse: they are not kept. Raises ConfigError for a class that cannot be learned.
    """
    service.known_classes()
    _check(service, x, labels)
    with _learning:
        check_labels(service, labels, new=new)
        with service.slots.writing():
            total = service.local().add(x, labels)
        facts = {"added": len(x), "added_in_all": total}
        try:
            how = _extended(service, x, labels, total) or personalize(service).how
        except (WorseModel, DataError) as error:
            with service.slots.writing():
                service.local().take_back(total - len(x), x)
            why, hint = (error.why, WORSE_BY) if isinstance(error, WorseModel) else (error.what, error.hint)
            raise DataError(f"not kept, for with these samples: {why}", hint=hint) from error
        except (StateError, RoundError) as error:  # the trainer's steps count them, with the next round
            return {**facts, **_now(service), "counts_later": error.what}
        return {**facts, **_now(service), "personalization": how}


def _now(service: Service) -> dict[str, Any]:
    now = service.answering
    return {} if now is None else {"round": now.round, "model": now.model, "personalization": now.how}


def _extended(service: Service, x: Array, labels: Sequence[str], total: int) -> str:
    """How the answers are the device's own with these samples, each of which was embedded once and none besides; empty
    where everything must be made anew."""
    base, served = service.slots.stamp(), service.shelf.served(service.slots.pointer().slot)
    own, plan = service.shelf.kept(served.slot), service.shelf.plan(served.graph, served.method, served.hyper)
    if own is None or own.how != plan.kind or own.settings.get("added") != total - len(x):
        return ""
    names = tuple(dict.fromkeys((*own.classes, *labels)))
    more = Samples(x, np.array([names.index(label) for label in labels], np.int64), classes=names)
    wider = owns.extended(own, _encoder(service, served, own), more)
    if wider is None:
        return ""
    wider = replace(wider, settings={**wider.settings, "added": total})
    return wider.how if service.take_up(wider, served, base) else ""


def _encoder(service: Service, served: Served, own: PersonalFiles) -> Embed:
    """The session that answers, where that is the one by which ``own`` was embedded."""
    now = service.answering
    if now is not None and (now.model, now.graph) == (served.weights.model, graph_of(own)):
        return now.predictor.embedder.run
    int8 = service.slots.int8(served.slot) if own.int8 else b""
    return owns.encoder_of(served.graph, served.weights, int8).run


def _check(service: Service, x: Array, labels: Sequence[str]) -> None:
    spec = service.layout.input
    if not len(x) or x.shape != (len(labels), *spec.shape) or str(x.dtype) != spec.dtype:
        raise DataError(
            f"samples {x.dtype} {list(x.shape)} with {len(labels)} labels",
            expected=f"one or more {spec.dtype} {list(spec.shape)}, each with a label", hint=model_input.hint(x, spec),
        )
    if not np.isfinite(x).all():
        raise DataError("a sample holds a value that is not finite")
    if spec.dtype == "int64" and service.answering is not None:
        service.predict(x)  # tokens that the model does not know would fail whatever is made of them later
