"""Devices of secure aggregation with certificates, and a session in one process."""

from __future__ import annotations

import datetime
import functools
import tempfile
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import TypeVar

import numpy as np

from cloud_server.identity.certificate_authority import Authority
from fleet_core.privacy import masks
from fleet_core.privacy.masks import Array
from fleet_core.privacy.secure_collector import Collector
from fleet_core.privacy.secure_participant import Identity, Participant
from fleet_core.privacy.secure_sum import Session
from fleet_core.protocol import certificates, messages
from fleet_core.protocol.secure_messages import SecureRules, SecureStep

T = TypeVar("T")
NOW = datetime.datetime.now(datetime.UTC)


def authority(fleet: str = "t") -> Authority:
    return _authority(fleet)


@functools.cache
def _authority(name: str) -> Authority:
    with tempfile.TemporaryDirectory() as folder:
        return Authority.create(Path(folder) / "ca.key", Path(folder) / "ca.pem", f"{name} devices")


@functools.cache
def identity(name: str, fleet: str = "t") -> Identity:
    key = certificates.new_key()
    return Identity(name, authority(fleet).client(name, key.public_key()), key)


def session(
    devices: int, *, threshold: float = 0.6, neighbours: int = 0, least: int = 3, number: int = 1,
    id: str = "a" * 32,
) -> Session:
    text = certificates.certificate_text(authority().certificate)
    bits = masks.bits_for(devices)
    return Session("t", number, SecureRules(id, threshold, least, neighbours, -10, bits, text))


def passed(message: T) -> T:
    """The message as it arrives."""
    return messages.decode(type(message), messages.encode(message))


def step_of(server: Collector, device: str) -> SecureStep:
    step = server.step(device)
    assert step is not None
    return passed(step)


def run(
    values: Mapping[str, Array], given: Session, gone: Mapping[str, Collection[str]] | None = None,
    seen: Callable[[str, Array], None] = lambda device, masked: None,
) -> tuple[Collector, dict[str, Participant], Array]:
    """(both sides, the sum). gone: step (``shares``, ``masked`` or ``unmask``) -> devices that vanish before it. Every
    message is encoded and decoded."""
    gone = gone or {}
    devices = {name: Participant(given, identity(name)) for name in values}
    server, sent = Collector(given, authority().certificate), dict[str, Array]()

    def asked(step: str) -> list[Participant]:
        """The devices that are asked for a step; those in ``gone`` vanish first."""
        for name in gone.get(step, ()):
            devices.pop(name, None)
        return [device for device in devices.values() if server.step(device.name) is not None]

    for name, device in devices.items():
        server.add_keys(name, passed(device.keys()), NOW)
    server.start_sharing()
    for device in asked("shares"):
        step = step_of(server, device.name)
        server.add_shares(device.name, passed(device.seal(step.peers, authority().certificate, NOW)))
    server.start_masking()
    for device in asked("masked"):
        step = step_of(server, device.name)
        sent[device.name] = device.mask(step.boxes, values[device.name])
        seen(device.name, sent[device.name])
    server.start_unmasking(sent)
    for device in asked("unmask"):
        server.add_revealed(device.name, passed(device.reveal(step_of(server, device.name))))
    return server, devices, server.total(sent[name] for name in sorted(server.there))


def int8(seed: int, count: int = 50) -> Array:
    return np.random.default_rng(seed).integers(-127, 128, count).astype(np.int8)
