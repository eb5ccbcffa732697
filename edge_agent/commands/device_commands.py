"""The commands ``status``, ``personalize``, ``predict`` and ``samples`` of ``edge-agent``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.device.local_samples import few_labels
from edge_agent.device.slots import Slots
from edge_agent.device.state import DeviceState
from edge_agent.inference import drift
from edge_agent.inference.personalization import Personalization
from edge_agent.inference.personalizers import EMBEDS
from edge_agent.inference.service import Service, service_of
from edge_agent.inference.worse_model_check import HeldBack
from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import CodecError, ConfigError, DataError, FleetError, StateError
from fleet_core.board.device_settings import Personalize, Settings, settings_of
from fleet_core.data import samples, unlabelled
from fleet_core.protocol.device_messages import Answer
from fleet_core.tasks.anomaly import NO_THRESHOLD, QUIET, Anomaly
from fleet_core.tasks.labels import MultiLabel, names_of
from fleet_core.tasks.regression import numbers_of
from fleet_core.tasks.task import Task


def status(home: Path, as_json: bool) -> None:
    """Prints what is stored here: weights, personalization, training state."""
    settings = settings_of(home)
    state = DeviceState(home)
    facts: dict[str, Any] = {"device": settings.device.name, "fleet": settings.device.fleet,
                             "broker": settings.device.broker, "trained_round": state.last_round()}
    pending = state.pending()
    if pending is not None:
        facts["pending_round"] = pending.round
    slots = Slots(state)
    for name, weights in (("model", state.weights("model")), ("serve", slots.weights())):
        if weights is not None:
            facts[name] = {"round": weights.round, "id": weights.model}
    facts |= _personalization_facts(slots, settings)
    watched = drift.read(home)
    if watched is not None:
        facts["drift"] = {"answered": watched.sums.answered, "moved_at": watched.sums.moved_at, "since": watched.since}
    facts |= _source_facts(home, settings)
    if as_json:
        return terminal.show(facts)
    said = facts | ({"drift": _drift_text(facts["drift"])} if "drift" in facts else {})
    said |= {"auto": _auto_text(facts["auto"])} if "auto" in facts else {}
    terminal.table([(key, _text(value)) for key, value in said.items()], ("what", "value"))


def _source_facts(home: Path, settings: Settings) -> dict[str, Any]:
    """What each source has given since the agent's start; empty without sources."""
    if not settings.source:
        return {}
    from edge_agent.sources.run_sources import states

    return {f"source {name}": {"state": one.state, "kept": one.kept, "labelled": one.labelled,
                               **({"last_error": one.last_error} if one.last_error else {})}
            for name, one in states(home).items()}


def _drift_text(found: dict[str, Any]) -> str:
    if not found["moved_at"]:
        return f"none in {found['answered']} answers"
    return (f"noticed after {found['moved_at']} answers, {terminal.date(found['since'])}: label some samples "
            "(edge-agent samples add), then edge-agent personalize")


def _personalization_facts(slots: Slots, settings: Settings) -> dict[str, Any]:
    slot, back = slots.pointer().slot, slots.pointer().rolled_back
    personal = None
    if slot:
        with contextlib.suppress(StateError):
            personal = Personalization.load(slots.path(slot, "personal"))
    choice = slots.choice() or settings.personalize
    facts: dict[str, Any] = {"personalize_by": choice.by, "personalized": personal is not None}
    if personal is not None:
        facts |= {"personalization": personal.how, "graph": personal.graph}
        if personal.how == "auto":
            facts["auto"] = personal.settings["auto"]
    if back is not None:
        facts["rolled_back"] = {"round": back.round, "id": back.model, "why": back.why}
    return facts


def personalize(
    home: Path, as_json: bool, by: str | None, steps: int | None, rate: float | None, int8: bool | None = None
) -> None:
    """Personalizes the served model on this device's samples, stores the choice and prints the result."""
    from edge_agent.inference import relearn

    settings = settings_of(home)
    service = service_of(home, settings)
    with _explained_mismatch(home):
        choice = _choice(service.slots.choice() or settings.personalize, by, steps, rate, int8)
        before = _before(service)
        done = relearn.personalize(service, choice)
        if choice is not None:
            with service.slots.writing():
                service.slots.set_choice(choice)
    facts: dict[str, Any] = {
        "round": service.round, "model": service.model, "personalization": done.how, "samples": done.samples,
        "samples_there": done.of, "left_out": done.left_out, "per_class": done.per_class,
        "graph": service.graph_that_answers,
    }
    if done.auto:
        facts["auto"] = done.auto
    after = service.held_back()
    if after is not None:
        facts["held_back"] = {"samples": after.samples, **after.figures, "before": None if before is None else
                              before.figures.get("accuracy", dict(before.figures))}
    if as_json:
        return terminal.show(facts)
    then = "" if before is None else f", {before.text} before"
    _print_personalized(facts, "" if after is None else
                        f"{after.measure} on {after.samples} held-back samples: {after.text}{then}")


def _print_personalized(facts: dict[str, Any], evaluated: str) -> None:
    """evaluated: a line about the held-back samples, or empty."""
    number, available = facts["samples"], facts["samples_there"]
    classes = ", ".join(f"{name} {n}" for name, n in facts["per_class"].items())
    of = f" of {available}" if available > number else ""
    on = f" on {number}{of} samples" + f" ({classes})" * bool(classes) if number else ""
    graph = ", embedded in int8" if facts["graph"] == "embed-int8" else ""
    print(f"personalized by {facts['personalization']}{on}{graph}, meta-model of round {facts['round']}")
    if "auto" in facts:
        print(_auto_text(facts["auto"]))
    if facts["left_out"]:
        print(f"{facts['left_out']} samples of this device's own classes are left out: this personalizer cannot learn "
              "them")
    if evaluated:
        print(evaluated)
    few = few_labels(facts["per_class"]) if facts["personalization"] in EMBEDS else ""
    if few:
        processes.say(few)


def _choice(
    now: Personalize, by: str | None, steps: int | None, rate: float | None, int8: bool | None
) -> Personalize | None:
    """The choice that the options make; None without options. Without --int8 or --fp32 the encoder of the choice
    ``now`` stays, if the personalizer embeds. Raises ConfigError."""
    if by is None and steps is None and rate is None and int8 is None:
        return None
    kept_int8 = now.int8 and by not in ("adapt", "none")
    options = {"by": by or now.by, "steps": steps, "rate": rate, "int8": kept_int8 if int8 is None else int8,
               "frequent": now.frequent and by in (None, now.by, "proto")}
    choice, problems = schema.read(Personalize, options)
    if choice is None:
        raise ConfigError("; ".join(f"--{problem}" for problem in problems))
    return choice


def _before(service: Service) -> HeldBack | None:
    """How the previous model answers the held-back samples; None if no model answers."""
    try:
        service.restore()
    except (StateError, ConfigError, DataError):
        return None
    return service.held_back()


def predict(inputs: Path, home: Path, as_json: bool) -> None:
    """Prints the answers to raw samples."""
    service = _restored_service(home)
    stride = settings_of(home).data.stride
    layout = service.layout
    answer = service.answers(unlabelled.load(inputs, layout.sample, stride=stride, say=processes.say,
                                             outputs=layout.outputs))
    classes = answer.classes or service.layout.classes
    if as_json:
        return terminal.show(schema.plain(answer))
    if isinstance(layout.task, Anomaly) and not answer.alarms:
        processes.say(NO_THRESHOLD)
    if answer.of_task is not None:
        terminal.table(*answer.of_task)
        if answer.thresholds:
            processes.say("thresholds: " + ", ".join(f"{name} {limit:g}" for name, limit in
                                                     zip(answer.outputs, answer.thresholds, strict=True)))
        return _say_model(answer)
    rows = [
        (str(n), label + _mark(answer, n), " ".join(f"{name} {p:.3f}" for name, p in zip(classes, row, strict=True)))
        for n, (label, row) in enumerate(zip(answer.labels, answer.probabilities, strict=True))
    ]
    terminal.table(rows, ("sample", "answer", "probabilities"))
    _say_model(answer)
    _say_calibration(service)


def _say_model(answer: Answer) -> None:
    processes.say(f"meta-model of round {answer.round}, personalization: {answer.personalization}, "
                f"graph: {answer.graph}")


def _say_calibration(service: Service) -> None:
    """How far the probabilities can be trusted, if the device has held-back samples."""
    with contextlib.suppress(FleetError):
        found = service.held_back()
        if found is not None and (error := found.figures.get("calibration_error")) is not None:
            processes.say(f"on {found.samples} held-back samples: accuracy {found.text}, calibration error {error:.3f}")


def _mark(answer: Answer, n: int) -> str:
    return " (unknown)" if answer.unknown and answer.unknown[n] else ""


def _restored_service(home: Path) -> Service:
    """A service with the model that answered last."""
    service = service_of(home, settings_of(home))
    with _explained_mismatch(home):
        note = service.restore()
    if note:
        processes.say(note)
    return service


@contextlib.contextmanager
def _explained_mismatch(home: Path) -> Iterator[None]:
    """Turns a CodecError for weights that do not fit the graph into a StateError that says what to do."""
    try:
        yield
    except CodecError as error:
        raise StateError(
            f"graph and weights here are of different models: {error}", where=str(home),
            hint="delete graph-*.safetensors and slots: 'edge-agent run' fetches what the fleet has",
        ) from error


def add(
    file: Path, label: str | None, home: Path, *, new_class: bool, target: str | None = None, labels: str | None = None
) -> None:
    """Adds samples with their class, with targets or with any number of labels; the next personalization uses them.
    target, labels: of all of them; None: the file has them for each. Raises ConfigError, DataError, StateError."""
    from edge_agent.inference import relearn

    settings = settings_of(home)
    service = service_of(home, settings)
    service.known_classes()
    task = service.layout.task
    if isinstance(task, Anomaly):
        if target is not None or labels is not None:
            raise ConfigError("this fleet detects anomalies, it has neither numbers to predict nor several labels",
                              expected="--label quiet or --label anomaly")
        return _add_quiet(file, label or QUIET, service, settings.data.stride)
    if task is not None and label is None:
        return _add_targets(file, _truths(target, labels, service, task), service, task, settings.data.stride)
    if label is None or target is not None or labels is not None:
        has = "classes, not numbers to predict" if target else "one class for each sample, not several labels"
        raise ConfigError(f"this fleet has {has}" if target or labels else "the samples have no class",
                          expected="--label CLASS")
    relearn.check_labels(service, [label], new=new_class)
    x = unlabelled.load(file, service.layout.sample, stride=settings.data.stride, say=processes.say)
    with service.slots.writing():
        total = service.local().add(x, [label] * len(x))
    print(f"{len(x)} samples of class {label} added, {total} added by now")


def _add_quiet(file: Path, label: str, service: Service, stride: int | None) -> None:
    """Adds samples of a fleet that detects anomalies. label: of all of them."""
    from edge_agent.inference import relearn

    relearn.check_labels(service, [label], new=False)
    x = unlabelled.load(file, service.layout.sample, stride=stride, say=processes.say)
    with service.slots.writing():
        total = service.local().add(x, [label] * len(x))
    print(f"{len(x)} samples of {label} added, {total} added by now")


def _truths(target: str | None, labels: str | None, service: Service, task: Task) -> np.ndarray[Any, Any] | None:
    """The targets or labels [K] of all samples; None: the file has them for each. Raises ConfigError."""
    from edge_agent.inference import relearn

    if isinstance(task, MultiLabel):
        if target is not None:
            raise ConfigError("this fleet has labels, not numbers to predict", expected="--labels NAME,…")
        return None if labels is None else relearn.checked_label_set(service, names_of(labels))
    if labels is not None:
        raise ConfigError("this fleet predicts numbers, not labels", expected="--target NUMBER,…")
    return None if target is None else relearn.checked_targets(service, np.array(numbers_of(target, "--target")))


def _add_targets(
    file: Path, truths: np.ndarray[Any, Any] | None, service: Service, task: Task, stride: int | None
) -> None:
    raw = service.layout.sample
    if truths is None:
        given = samples.load(file, dtype=raw.dtype, shape=raw.shape, stride=stride, fit=raw.fit, sound_hz=raw.sound_hz,
                             **task.reading)
        x, y = given.x, given.y
        for note in given.notes:
            processes.say(note)
    else:
        x = unlabelled.load(file, raw, stride=stride, say=processes.say, outputs=task.outputs)
        y = np.tile(truths, (len(x), 1))
    with service.slots.writing():
        total = service.local().add_targets(x, y)
    named = _named(truths, task) if isinstance(task, MultiLabel) else ", ".join(task.outputs)
    print(f"{len(x)} samples with {named} added, {total} added by now")


def _named(truths: np.ndarray[Any, Any] | None, task: MultiLabel) -> str:
    """The labels of added samples, for people."""
    if truths is None:
        return "their labels"
    return ", ".join(task.chosen(truths.tolist())) or "none of the labels"


def list_samples(home: Path, as_json: bool) -> None:
    """Prints the number of samples, of each class or label if there are any: recorded, held back, added."""
    service = service_of(home, settings_of(home))
    service.known_classes()
    counts = service.local().counts(processes.say)
    task = service.layout.task
    of = "label" if isinstance(task, MultiLabel) else "class" if service.local().labels else ""
    begin = 0 if of else 1  # samples with targets have neither
    names, rows = (of, "recorded", "held_back", "added")[begin:], [row[begin:] for row in counts]
    if as_json:
        return terminal.show([dict(zip(names, row, strict=True)) for row in rows])
    terminal.table([tuple(map(str, row)) for row in rows], tuple(name.replace("_", " ") for name in names))


def drop(home: Path, number: int) -> None:
    """Removes the samples that were added last; the next personalization does not use them."""
    service = service_of(home, settings_of(home))
    service.known_classes()
    with service.slots.writing():
        left = service.local().drop_last(number)
        for slot in service.slots.in_order():
            personal = service.stored.personalization(slot)
            if personal is not None:  # it contains the dropped samples and must not be extended
                marked = replace(personal, settings={**personal.settings, "added": -1})
                marked.save(service.slots.path(slot, "personal"))
    print(f"{number} samples dropped, {left} added samples are left")
    processes.say("answers change with the next personalization: edge-agent personalize")


def _auto_text(auto: Mapping[str, Any]) -> str:
    """How ``auto`` weighs the ways, as a sentence. auto: a ``Mixture`` as plain values."""
    if not auto["samples"]:
        return f"weighs {', '.join(auto['ways'])} alike: no class has two labelled samples"
    ways = sorted(auto["ways"].items(), key=lambda item: -item[1]["weight"])
    figures = ", ".join(f"{way} {one['weight']:.2f} (accuracy {one['accuracy']:.3f})" for way, one in ways)
    return f"weighs by cross-validation on {auto['samples']} of its own samples: {figures}"


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
