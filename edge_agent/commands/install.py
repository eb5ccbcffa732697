"""Installs a bundle on a device: the same gate as at export, without torch; then the device answers with no broker.

Everything is read and checked before anything is written. The graph and the weights lie on the disk before the pointer
to what answers is turned (``slots``); where the device's held-back samples are answered much worse than before, it is
turned back.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

from edge_agent.device.slots import RolledBack, Slots, facts_of
from edge_agent.device.state import DeviceState, Weights
from edge_agent.inference import bundle_check, relearn
from edge_agent.inference.bundle_check import Passed
from edge_agent.inference.model_check import LEAST
from edge_agent.inference.relearn import Personalized
from edge_agent.inference.service import Service, service_of
from fleet_core.base import config, schema, storage, terminal
from fleet_core.base.errors import ConfigError, FleetError, StateError
from fleet_core.board.device_settings import NAME, Settings, settings_of
from fleet_core.model import graph_bundle as bundle
from fleet_core.model.codecs import identity
from fleet_core.personalization import device_bundle
from fleet_core.personalization.device_bundle import Bundle
from fleet_core.protocol.chunks import Blob

CHUNK = 1 << 20


@dataclass(frozen=True)
class Installed:
    """What came of it. personalized: None where ``left`` says why it was not made the device's own. before, after:
    accuracy on the held-back samples, None where nothing answered or nothing is held back."""

    bundle: Bundle
    passed: Passed
    personalized: Personalized | None
    left: str
    before: float | None
    after: float | None


def install(path: Path, home: Path, name: str | None = None) -> Installed:
    """The bundle at ``path`` answers from now on for the device in the folder ``home``. name: of a device that is new;
    else the folder's.

    Raises BundleError for one that fails its check, and ConfigError where the folder is not its fleet's: then nothing
    has changed on the disk. Raises StateError where an agent runs there, or where the answers got worse: what answered
    before goes on.
    """
    found = device_bundle.read(path)
    passed = bundle_check.check(found)
    settings = _settings(found, home, name)
    with _alone(home):
        if not (home / "device.toml").exists():
            identity_ = {"name": settings.device.name, "fleet": settings.device.fleet, "key": settings.device.key}
            storage.write_atomic(home / "device.toml", config.toml({"device": identity_}).encode())
        return _turned(found, passed, home, settings)


def _settings(found: Bundle, home: Path, name: str | None) -> Settings:
    """The device's file, or that of a new device."""
    manifest = found.manifest
    if (home / "fleet.toml").exists():
        raise ConfigError("is a fleet's own folder", where=str(home), hint="take an empty one")
    if not (home / "device.toml").exists():
        chosen = name or home.resolve().name
        if not re.fullmatch(NAME, chosen):
            raise ConfigError(f"'{chosen[:80]}' is no name for a device", expected=NAME, hint="--name")
        read, problems = schema.read(Settings, {
            "device": {"name": chosen, "fleet": manifest.fleet, "key": manifest.key}
        })  # fmt: skip
        if read is None:
            raise ConfigError("; ".join(map(str, problems)))
        return read
    there = settings_of(home)
    if (there.device.fleet, there.device.key) != (manifest.fleet, manifest.key):
        raise ConfigError(f"is a device of another fleet, '{there.device.fleet}'", where=str(home / "device.toml"),
                          expected=f"'{manifest.fleet}' with the key {manifest.key[:8]}…", hint="take an empty folder")
    if name not in (None, there.device.name):
        raise ConfigError(f"is the device '{there.device.name}'", where=str(home / "device.toml"), expected=f"'{name}'")
    return there


@contextlib.contextmanager
def _alone(home: Path) -> Iterator[None]:
    """No agent runs there meanwhile. Raises StateError."""
    try:
        home.mkdir(parents=True, exist_ok=True)
        descriptor = os.open(home / ".lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    except OSError as error:
        raise StateError(f"cannot be written: {error.strerror or error}", where=str(home)) from error
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError as error:
        raise StateError("an agent is running here", where=str(home), hint="stop it, or let the fleet serve") from error
    finally:
        os.close(descriptor)


def _turned(found: Bundle, passed: Passed, home: Path, settings: Settings) -> Installed:
    """With the bundle's weights in the slot that did not answer, and the pointer turned to it."""
    place = DeviceState(home)
    place.check_formats()
    slots, before = Slots(place), _held_back(service_of(home, settings))
    with slots.writing():
        pointer = slots.pointer()
        _put(found, place, slots)
        slots.point(replace(pointer, slot=slots.other(), rolled_back=None))
    personalized, left = _personalized(service_of(home, settings))
    after = _held_back(service_of(home, settings))
    why = _worse(before, after, settings.serve.worse_by)
    if why:
        model = found.manifest.model
        with slots.writing():
            slots.point(replace(pointer, rolled_back=RolledBack(model.id, model.round, why)))
        raise StateError(f"{why}: what answered before goes on", where=str(home),
                         hint="[serve] worse_by in device.toml says how much worse may be")
    return Installed(found, passed, personalized, left, *(None if h is None else h[1] for h in (before, after)))


def _put(found: Bundle, place: DeviceState, slots: Slots) -> None:
    """Graph and weights on the disk, as the fleet's own would lie there."""
    data = bundle.pack(found.graph)
    graph = Blob.of(data, CHUNK).id
    place.save_graph(graph, data, keep=slots.graphs())
    method = found.manifest.method
    weights = Weights(
        identity(found.params), found.manifest.model.round,
        {group: dict(named) for group, named in found.params.items()}, facts_of(method.name, method.hyper, graph),
    )  # fmt: skip
    slots.stage(slots.other(), weights, found.int8)


def _personalized(service: Service) -> tuple[Personalized | None, str]:
    """(what came of making it the device's own, why it was not)."""
    try:
        return relearn.personalize(service), ""
    except FleetError as error:
        return None, str(error).replace("\n", "; ")


def _held_back(service: Service) -> tuple[int, float] | None:
    """(samples, accuracy) of what answers now; None where nothing does, or nothing is held back."""
    try:
        service.restore()
    except FleetError:
        return None
    return None if service.answering is None else service.held_back(service.answering.predictor)


def _worse(before: tuple[int, float] | None, after: tuple[int, float] | None, worse_by: float) -> str:
    """Why what answered before goes on; empty where it does not."""
    if before is None or after is None or after[0] < LEAST or before[1] - after[1] <= worse_by:
        return ""
    return f"accuracy {after[1]:.3f} on {after[0]} held-back samples, {before[1]:.3f} before"


# The command ----------------------------------------------------------------------------------------------------------


def command(path: Path, home: Path, name: str | None, as_json: bool) -> None:
    """``edge-agent install``."""
    done = install(path, home, name)
    manifest, personalized = done.bundle.manifest, done.personalized
    facts = {
        "fleet": manifest.fleet, "method": manifest.method.name, "round": manifest.model.round,
        "model": manifest.model.id, "passed": schema.plain(done.passed),
        "personalized": None if personalized is None else schema.plain(personalized), "left": done.left,
        "held_back": {"before": done.before, "after": done.after},
    }  # fmt: skip
    if as_json:
        return terminal.show(facts)
    print(f"{manifest.layout.model} of round {manifest.model.round}, {manifest.method.name}: golden outputs as they "
          f"should be under onnxruntime {done.passed.onnxruntime}")
    if personalized is None:
        print(f"not personalized: {done.left}")
    else:
        print(f"personalized by {personalized.how} on {personalized.samples} samples")
    if done.after is not None:
        before = "" if done.before is None else f", {done.before:.3f} before"
        print(f"accuracy on the held-back samples: {done.after:.3f}{before}")
