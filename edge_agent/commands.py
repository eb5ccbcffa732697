"""What the commands of ``edge-agent`` do, apart from ``run``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np

from edge_agent.home import Home
from edge_agent.run import service_of
from edge_agent.service import Service
from edge_agent.settings import settings_of
from fleet_core import runtime, schema, terminal
from fleet_core.data import samples as files
from fleet_core.errors import CodecError, DataError, StateError
from fleet_core.layout import InputSpec


def status(home: Path, as_json: bool) -> None:
    """What this device holds: weights, personalization, training state."""
    settings = settings_of(home)
    place = Home(home)
    facts: dict[str, Any] = {"device": settings.device.name, "fleet": settings.device.fleet,
                             "broker": settings.device.broker, "trained_round": place.trained()}
    pending = place.pending()
    if pending is not None:
        facts["pending_round"] = pending.round
    for name in ("model", "serve"):
        weights = place.weights(name)
        if weights is not None:
            facts[name] = {"round": weights.round, "id": weights.model}
    facts["personalized"] = (home / "personal.safetensors").exists()
    if as_json:
        return terminal.show(facts)
    terminal.table([(key, _text(value)) for key, value in facts.items()], ("what", "value"))


def personalize(home: Path, as_json: bool) -> None:
    """Personalize the served model on this device's samples; no aggregator and no torch needed."""
    service = _answering(home)
    support, how = service.personalize()
    counts = np.bincount(support.y, minlength=len(service.layout.classes))
    facts = {"round": service.round, "model": service.model, "personalization": how, "samples": len(support),
             "per_class": dict(zip(service.layout.classes, map(int, counts), strict=True))}
    if as_json:
        return terminal.show(facts)
    classes = ", ".join(f"{name} {n}" for name, n in zip(service.layout.classes, counts, strict=True))
    print(f"personalized by {how} on {len(support)} samples ({classes}), meta-model of round {service.round}")


def predict(inputs: Path, home: Path, as_json: bool) -> None:
    """Answers for raw samples, from the served model as this device personalized it."""
    service = _answering(home)
    answer = service.answers(read_inputs(inputs, service.layout.input))
    if as_json:
        return terminal.show(schema.plain(answer))
    rows = [
        (str(n), label, " ".join(f"{name} {p:.3f}" for name, p in zip(service.layout.classes, row, strict=True)))
        for n, (label, row) in enumerate(zip(answer.labels, answer.probabilities, strict=True))
    ]
    terminal.table(rows, ("sample", "answer", "probabilities"))
    runtime.say(f"meta-model of round {answer.round}, personalization: {answer.personalization}")


def _answering(home: Path) -> Service:
    """What the device last answered with, from its disk."""
    service = service_of(home, settings_of(home))
    try:
        service.restore()
    except CodecError as error:
        raise StateError(
            f"graph and weights here are of different models: {error}", where=str(home),
            hint="delete graph-*.safetensors and served.json: 'edge-agent run' fetches what the fleet has",
        ) from error
    return service


def add(file: Path, label: str, home: Path) -> None:
    """Add labelled samples to the device's own; the next personalization counts them."""
    settings = settings_of(home)
    service = service_of(home, settings)
    service.known_classes()
    service.check_labels([label])
    x = read_inputs(file, service.layout.input)
    total = service.local().add(x, [label] * len(x))
    print(f"{len(x)} samples of class {label} added, {total} added by now")


def read_inputs(path: Path, spec: InputSpec) -> np.ndarray[Any, Any]:
    """Raw samples [n, *spec.shape] of spec.dtype, from a .npy array (one sample or several) or a file of samples.

    Raises DataError for anything that is not that.
    """
    x = _array(path) if path.suffix.lower() == ".npy" else files.load(path).x
    if x.shape == tuple(spec.shape):
        x = x[None]
    if x.shape[1:] != tuple(spec.shape) or not len(x):
        expected = f"[n, {', '.join(map(str, spec.shape))}]"
        raise DataError(f"has shape {list(x.shape)}", where=str(path), expected=expected)
    if x.dtype.kind not in "biuf" or not np.isfinite(x).all():
        raise DataError("holds what is no finite number", where=str(path), expected=f"{spec.dtype} values")
    with np.errstate(all="ignore"):
        wanted = x.astype(spec.dtype)
    if not np.isfinite(wanted).all() or (wanted.dtype.kind in "iu" and not np.array_equal(wanted, x)):
        raise DataError(f"holds {x.dtype} values that are no {spec.dtype}", where=str(path))
    return wanted


def _array(path: Path) -> np.ndarray[Any, Any]:
    try:
        return np.array(np.load(path, allow_pickle=False, mmap_mode="r"))
    except (OSError, ValueError, EOFError) as error:
        reason = getattr(error, "strerror", None) or error
        raise DataError(f"cannot be read: {reason}", where=str(path), expected="a .npy array of numbers") from error


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)
