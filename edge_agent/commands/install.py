"""``edge-agent install``: checks a bundle's signature, then all of it as at export, without torch; then the device
answers without a broker.

Everything is read and checked before anything is written. The graph and the weights are on the disk before the pointer
to the slot that answers is switched (``slots``). It is switched back if the device's held-back samples are answered
much worse than before.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_agent.device.fleet_keys import ring_of
from edge_agent.device.local_samples import features_of
from edge_agent.device.slots import RolledBack, Slots, facts_of
from edge_agent.device.state import DeviceState, Weights
from edge_agent.inference import bundle_check, relearn
from edge_agent.inference.bundle_check import Passed
from edge_agent.inference.relearn import Personalized
from edge_agent.inference.service import Service, service_of
from edge_agent.inference.worse_model_check import WORSE_BY, HeldBack, why_worse
from fleet_core.base import config, schema, storage, terminal
from fleet_core.base.errors import ConfigError, FleetError, StateError
from fleet_core.board.device_settings import NAME, Settings, settings_of
from fleet_core.model import graph_bundle
from fleet_core.model.payloads import identity
from fleet_core.personalization import device_bundle
from fleet_core.personalization.bundle_format import Bundle, Manifest
from fleet_core.protocol.chunks import Blob

CHUNK = 1 << 20


@dataclass(frozen=True)
class Installed:
    """personalized: None if it was not personalized; ``left`` says why. before, after: on the held-back samples, None
    if nothing answered or nothing is held back."""

    bundle: Bundle
    passed: Passed
    personalized: Personalized | None
    left: str
    before: HeldBack | None
    after: HeldBack | None


def install(path: Path, home: Path, name: str | None = None, *, unsigned: bool = False) -> Installed:
    """Makes the device in the folder ``home`` answer with the bundle at ``path``. name: of a new device; default: the
    folder's. unsigned: accept a bundle without a signature. A device of a fleet accepts what that fleet's key has
    signed; a new device trusts the key that the bundle names.

    Raises BundleError if the check fails, ConfigError if the folder belongs to another fleet; nothing is written then.
    Raises StateError if an agent runs there, or if the answers got worse: the previous model then answers again.
    """
    bundle = device_bundle.read(path, signed=not unsigned, accept=lambda manifest: _settings(manifest, home, name))
    passed = bundle_check.check(bundle)
    settings = _settings(bundle.manifest, home, name)
    with _agent_lock(home):
        if not (home / "device.toml").exists():
            device = {"name": settings.device.name, "fleet": settings.device.fleet, "key": settings.device.key}
            storage.write_atomic(home / "device.toml", config.toml({"device": device}).encode())
        return _switched(bundle, passed, home, settings)


def _settings(manifest: Manifest, home: Path, name: str | None) -> Settings:
    """The settings of the device in ``home``, or of a new device. Raises ConfigError."""
    if (home / "fleet.toml").exists():
        raise ConfigError("is a fleet's own folder", where=str(home), hint="take an empty one")
    if not (home / "device.toml").exists():
        return _new_device(manifest, name or home.resolve().name)
    settings = settings_of(home)
    device = settings.device
    if device.fleet != manifest.fleet or manifest.key not in ring_of(home, device.key, device.fleet).accepted():
        raise ConfigError(f"is a device of another fleet, '{device.fleet}'", where=str(home / "device.toml"),
                          expected=f"'{manifest.fleet}' with the key {manifest.key[:8]}…", hint="take an empty folder")
    if name not in (None, device.name):
        raise ConfigError(f"is the device '{device.name}'", where=str(home / "device.toml"), expected=f"'{name}'")
    return settings


def _new_device(manifest: Manifest, name: str) -> Settings:
    if not re.fullmatch(NAME, name):
        raise ConfigError(f"'{name[:80]}' is not a valid device name", expected=NAME, hint="--name")
    table = {"name": name, "fleet": manifest.fleet, "key": manifest.key}
    settings, problems = schema.read(Settings, {"device": table})
    if settings is None:
        raise ConfigError("; ".join(map(str, problems)))
    return settings


@contextlib.contextmanager
def _agent_lock(home: Path) -> Iterator[None]:
    """Holds the lock of the agent in ``home``. Raises StateError if an agent runs there."""
    try:
        with storage.locked(home, wait=False):
            yield
    except BlockingIOError as error:
        raise StateError("an agent is running here", where=str(home), hint="stop it, or let the fleet serve") from error


def _switched(bundle: Bundle, passed: Passed, home: Path, settings: Settings) -> Installed:
    """Stores the bundle in the slot that does not answer, switches to it and personalizes. Raises StateError after
    switching back if the answers got worse."""
    state = DeviceState(home)
    state.check_formats()
    slots, before = Slots(state), _held_back(service_of(home, settings))
    with slots.writing():
        pointer = slots.pointer()
        _stage(bundle, state, slots)
        slots.point(replace(pointer, slot=slots.other(), rolled_back=None))
    personalized, left = _personalized(service_of(home, settings))
    after = _held_back(service_of(home, settings))
    why = why_worse(after, before, settings.serve.worse_by)
    if why:
        model = bundle.manifest.model
        with slots.writing():
            slots.point(replace(pointer, rolled_back=RolledBack(model.id, model.round, why)))
        raise StateError(f"{why}: the device keeps its former model", where=str(home), hint=WORSE_BY)
    return Installed(bundle, passed, personalized, left, before, after)


def _stage(bundle: Bundle, state: DeviceState, slots: Slots) -> None:
    """Stores graph and weights as if the fleet had sent them."""
    features = features_of(state.folder, bundle.manifest.layout)
    if features is not None:
        storage.write_atomic(features.path, bundle.backbone)
    data = graph_bundle.pack(bundle.graph)
    graph = Blob.of(data, CHUNK).id
    state.save_graph(graph, data, keep=slots.graphs())
    method = bundle.manifest.method
    weights = Weights(
        identity(bundle.params), bundle.manifest.model.round,
        {group: dict(named) for group, named in bundle.params.items()}, facts_of(method.name, method.hyper, graph),
    )  # fmt: skip
    slots.stage(slots.other(), weights, bundle.int8)


def _personalized(service: Service) -> tuple[Personalized | None, str]:
    """(result, why there is none)."""
    try:
        return relearn.personalize(service), ""
    except FleetError as error:
        return None, str(error).replace("\n", "; ")


def _held_back(service: Service) -> HeldBack | None:
    """As ``Service.held_back``, of the model that is stored."""
    try:
        service.restore()
    except FleetError:
        return None
    return service.held_back()


def _plain(found: HeldBack | None) -> Any:
    """An accuracy alone, or all figures of a task."""
    return None if found is None else found.figures.get("accuracy", dict(found.figures))


# The command ----------------------------------------------------------------------------------------------------------


def command(path: Path, home: Path, name: str | None, as_json: bool, *, unsigned: bool = False) -> None:
    """Installs the bundle and prints the result."""
    done = install(path, home, name, unsigned=unsigned)
    manifest, personalized = done.bundle.manifest, done.personalized
    facts = {
        "fleet": manifest.fleet, "method": manifest.method.name, "round": manifest.model.round,
        "model": manifest.model.id, "signed": done.bundle.signed, "passed": schema.plain(done.passed),
        "personalized": None if personalized is None else schema.plain(personalized), "left": done.left,
        "held_back": {"before": _plain(done.before), "after": _plain(done.after)},
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
        before = "" if done.before is None else f", {done.before.text} before"
        print(f"{done.after.measure} on the held-back samples: {done.after.text}{before}")
