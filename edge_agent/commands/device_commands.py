"""What the commands of ``edge-agent`` do, apart from ``run``."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_agent.device.local_samples import few_labels
from edge_agent.device.slots import Slots
from edge_agent.device.state import DeviceState
from edge_agent.inference.personal_files import PersonalFiles
from edge_agent.inference.personalizers import EMBEDS
from edge_agent.inference.service import Service, service_of
from edge_agent.inference.stored_models import graph_of
from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import CodecError, ConfigError, DataError, StateError
from fleet_core.board.device_settings import Personalize, Settings, settings_of
from fleet_core.data import unlabelled
from fleet_core.protocol.device_messages import Answer


def status(home: Path, as_json: bool) -> None:
    """What this device holds: weights, personalization, training state."""
    settings = settings_of(home)
    place = DeviceState(home)
    facts: dict[str, Any] = {"device": settings.device.name, "fleet": settings.device.fleet,
                             "broker": settings.device.broker, "trained_round": place.last_round()}
    pending = place.pending()
    if pending is not None:
        facts["pending_round"] = pending.round
    slots = Slots(place)
    for name, weights in (("model", place.weights("model")), ("serve", slots.weights())):
        if weights is not None:
            facts[name] = {"round": weights.round, "id": weights.model}
    facts |= _own_facts(slots, settings)
    if as_json:
        return terminal.show(facts)
    terminal.table([(key, _text(value)) for key, value in facts.items()], ("what", "value"))


def _own_facts(slots: Slots, settings: Settings) -> dict[str, Any]:
    """What makes the answers this device's own, and what was tried and given up."""
    slot, back = slots.pointer().slot, slots.pointer().rolled_back
    own = None
    if slot:
        with contextlib.suppress(StateError):
            own = PersonalFiles.load(slots.path(slot, "personal"))
    way = slots.way() or settings.personalize
    facts: dict[str, Any] = {"personalize_by": way.by, "personalized": own is not None}
    if own is not None:
        facts |= {"personalization": own.how, "graph": graph_of(own)}
    if back is not None:
        facts["rolled_back"] = {"round": back.round, "id": back.model, "why": back.why}
    return facts


def personalize(
    home: Path, as_json: bool, by: str | None, steps: int | None, rate: float | None, int8: bool | None = None
) -> None:
    """Personalize the served model on this device's samples; no aggregator and no torch needed."""
    from edge_agent.inference import relearn

    settings = settings_of(home)
    service = service_of(home, settings)
    with _of_one_model(home):
        choice = _choice(service.slots.way() or settings.personalize, by, steps, rate, int8)
        before = _before(service)
        done = relearn.personalize(service, choice)
        if choice is not None:
            with service.slots.writing():
                service.slots.set_way(choice)
    now = service.answering
    after = None if now is None else service.held_back(now.predictor)
    facts: dict[str, Any] = {
        "round": service.round, "model": service.model, "personalization": done.how, "samples": done.samples,
        "samples_there": done.of, "left_out": done.left_out, "per_class": done.per_class,
        "graph": service.graph_that_answers,
    }
    if after is not None:
        was = None if before is None else before[1]
        facts["held_back"] = {"samples": after[0], "accuracy": after[1], "before": was}
    if as_json:
        return terminal.show(facts)
    _say_personalized(facts)


def _say_personalized(facts: dict[str, Any]) -> None:
    number, there = facts["samples"], facts["samples_there"]
    classes = ", ".join(f"{name} {n}" for name, n in facts["per_class"].items())
    of = f" of {there}" if there > number else ""
    on = f" on {number}{of} samples ({classes})" if number else ""
    graph = ", embedded in int8" if facts["graph"] == "embed-int8" else ""
    print(f"personalized by {facts['personalization']}{on}{graph}, meta-model of round {facts['round']}")
    if facts["left_out"]:
        print(f"{facts['left_out']} samples of this device's own classes are left out: this way cannot learn them")
    evaluated = facts.get("held_back")
    if evaluated:
        before = "" if evaluated["before"] is None else f", {evaluated['before']:.3f} before"
        print(f"accuracy on {evaluated['samples']} held-back samples: {evaluated['accuracy']:.3f}{before}")
    few = few_labels(facts["per_class"]) if facts["personalization"] in EMBEDS else ""
    if few:
        processes.say(few)


def _choice(
    now: Personalize, by: str | None, steps: int | None, rate: float | None, int8: bool | None
) -> Personalize | None:
    """What the options say; None where they say nothing. The encoder stays as it was chosen ``now`` for ways that
    embed. Raises ConfigError."""
    if by is None and steps is None and rate is None and int8 is None:
        return None
    kept = now.int8 and by not in ("adapt", "none")
    said = {"by": by or now.by, "steps": steps, "rate": rate, "int8": kept if int8 is None else int8}
    found, problems = schema.read(Personalize, said)
    if found is None:
        raise ConfigError("; ".join(f"--{problem}" for problem in problems))
    return found


def _before(service: Service) -> tuple[int, float] | None:
    """How the device answered its held-back samples until now."""
    try:
        service.restore()
    except (StateError, ConfigError, DataError):
        return None
    now = service.answering
    return None if now is None else service.held_back(now.predictor)


def predict(inputs: Path, home: Path, as_json: bool) -> None:
    """Answers for raw samples, from the served model as this device personalized it."""
    service = _answering(home)
    stride = settings_of(home).data.stride
    answer = service.answers(unlabelled.load(inputs, service.layout.input, stride=stride, say=processes.say))
    classes = answer.classes or service.layout.classes
    if as_json:
        return terminal.show(schema.plain(answer))
    rows = [
        (str(n), label + _mark(answer, n), " ".join(f"{name} {p:.3f}" for name, p in zip(classes, row, strict=True)))
        for n, (label, row) in enumerate(zip(answer.labels, answer.probabilities, strict=True))
    ]
    terminal.table(rows, ("sample", "answer", "probabilities"))
    processes.say(f"meta-model of round {answer.round}, personalization: {answer.personalization}, "
                f"graph: {answer.graph}")


def _mark(answer: Answer, n: int) -> str:
    return " (unknown)" if answer.unknown and answer.unknown[n] else ""


def _answering(home: Path) -> Service:
    """What the device last answered with, from its disk."""
    service = service_of(home, settings_of(home))
    with _of_one_model(home):
        note = service.restore()
    if note:
        processes.say(note)
    return service


@contextlib.contextmanager
def _of_one_model(home: Path) -> Iterator[None]:
    """What is wrong where graph and weights do not fit each other is said."""
    try:
        yield
    except CodecError as error:
        raise StateError(
            f"graph and weights here are of different models: {error}", where=str(home),
            hint="delete graph-*.safetensors and slots: 'edge-agent run' fetches what the fleet has",
        ) from error


def add(file: Path, label: str, home: Path, *, new_class: bool) -> None:
    """Add labelled samples to the device's own; the next personalization counts them."""
    from edge_agent.inference import relearn

    settings = settings_of(home)
    service = service_of(home, settings)
    service.known_classes()
    relearn.check_labels(service, [label], new=new_class)
    x = unlabelled.load(file, service.layout.input, stride=settings.data.stride, say=processes.say)
    with service.slots.writing():
        total = service.local().add(x, [label] * len(x))
    print(f"{len(x)} samples of class {label} added, {total} added by now")


def listed(home: Path, as_json: bool) -> None:
    """How many samples of each class there are: recorded, held back, and added."""
    service = service_of(home, settings_of(home))
    service.known_classes()
    counts = service.local().counts(processes.say)
    if as_json:
        names = ("class", "recorded", "held_back", "added")
        return terminal.show([dict(zip(names, row, strict=True)) for row in counts])
    terminal.table([tuple(map(str, row)) for row in counts], ("class", "recorded", "held back", "added"))


def drop(home: Path, number: int) -> None:
    """Forget the samples that were added last; the next personalization is made without them."""
    service = service_of(home, settings_of(home))
    service.known_classes()
    with service.slots.writing():
        left = service.local().drop_last(number)
        for slot in service.slots.in_order():
            own = service.shelf.kept(slot)
            if own is not None:  # it holds what was dropped: the next sample that is taught does not extend it
                replace(own, settings={**own.settings, "added": -1}).save(service.slots.path(slot, "personal"))
    print(f"{number} samples dropped, {left} of those that were added are left")
    processes.say("answers change with the next personalization: edge-agent personalize")



def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
