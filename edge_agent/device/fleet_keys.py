"""The fleet's keys on this device: the key in device.toml, and the successions that the device has followed since.

    fleet-keys.json   the successions, each signed by the key before it, so that nobody who can write it can forge one

A device.toml with a key that is not among them, from a new token, begins anew.
"""

from __future__ import annotations

import contextlib
import json
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from fleet_core.base import schema, storage
from fleet_core.base.errors import ConfigError, MessageError, StateError
from fleet_core.protocol import messages, succession
from fleet_core.protocol.messages import whole
from fleet_core.protocol.succession import MAX_LINK_BYTES, Authorities, Keyring

FILE = "fleet-keys.json"


@dataclass(frozen=True)
class Kept:
    """links: signed successions. authorities: the number of the authorities that this device trusts. issuer: the
    authority that issued its certificate, where it was changed."""

    links: tuple[str, ...] = field(default=(), metadata={"max_length": MAX_LINK_BYTES})
    authorities: int = field(default=0, metadata=whole(1 << 53))
    issuer: str = field(default="", metadata={"pattern": r"[0-9a-f]{0,64}"})


def kept(folder: Path) -> Kept:
    """What is stored; empty for a damaged file: the aggregator sends the successions again. Raises StateError."""
    path = folder / FILE
    if not path.exists():
        return Kept()
    data = storage.read_bytes(path, limit=succession.MAX_BYTES)
    with contextlib.suppress(StateError):
        return schema.stored(Kept, data, path, "")
    return Kept()


def save(folder: Path, what: Kept) -> None:
    """Raises StateError."""
    storage.write_atomic(folder / FILE, json.dumps(schema.plain(what)).encode() + b"\n", mode=0o600)


def forget_issuer(folder: Path) -> None:
    """Forgets who issued the certificate, before the device gets another one. Raises StateError."""
    before = kept(folder)
    if before.issuer:
        save(folder, replace(before, issuer=""))


def ring_of(folder: Path, key: str, fleet: str | None = None, now: Callable[[], float] = time.time) -> Keyring:
    """The fleet's keys that this device accepts. key: of device.toml. Raises ConfigError, StateError."""
    try:
        return Keyring(key, kept(folder).links, fleet=fleet, now=now)
    except (MessageError, ConfigError):
        return Keyring(key, fleet=fleet, now=now)


def readable_ring(folder: Path, key: str) -> Keyring:
    """As ``ring_of``, without the successions if they cannot be read."""
    try:
        return ring_of(folder, key)
    except StateError:
        return Keyring(key)


class FleetKeys:
    """Follows the fleet's key. now(): Unix seconds. ``ring``: the accepted keys. ``asked``: whether the fleet has
    announced successions and so wants to know which key this device has."""

    def __init__(self, folder: Path, key: str, fleet: str, now: Callable[[], float]):
        self._folder = folder
        self.ring = ring_of(folder, key, fleet, now)
        self.asked = False
        self._fleet, self._unread = fleet, b""
        self._kept = kept(folder)

    @property
    def told(self) -> str:
        """The id of the newest key, for the presence; empty until the fleet asks."""
        return self.ring.id if self.asked else ""

    def keep(self, payload: bytes) -> None:
        """Keeps a manifest that no known key has signed: the succession may arrive after it."""
        self._unread = b"" if self.ring.knows(payload) else payload

    def take(self, links: Sequence[str]) -> bytes:
        """Follows ``links``; returns the manifest that can be read now, or nothing. Raises MessageError for links that
        continue no known key, StateError if they cannot be written; nothing changes then."""
        self.asked = True
        new = self.ring.extended(links)
        if new is None:
            return b""
        self._keep(links=new.links)
        self.ring, unread, self._unread = new, self._unread, b""
        return unread if unread and new.knows(unread) else b""

    # The authorities of the fleet's certificates ----------------------------------------------------------------------

    @property
    def issuer(self) -> str:
        """The authority that issued this device's certificate, for the presence; empty while nobody asks."""
        return self._kept.issuer

    def authorities(self, signed: str) -> Authorities | None:
        """The authorities to trust from now on; None for nothing new. Raises MessageError for authorities that no key
        of the fleet has signed, or that are older than this device's."""
        if not signed:
            return None
        found = messages.decode(Authorities, self.ring.verify(succession.as_bytes(signed)))
        if found.fleet != self._fleet or not 0 < len(found.certificates) <= 2:
            raise MessageError("authorities of another fleet, or more than two")
        if found.number < self._kept.authorities:
            raise MessageError(f"old authorities, number {found.number}", expected=f"above {self._kept.authorities}")
        done = found.number == self._kept.authorities and self._kept.issuer
        return None if done else found

    def trusts(self, what: Authorities) -> None:
        """Stores that the device trusts these authorities."""
        if what.number != self._kept.authorities:
            self._keep(authorities=what.number, issuer="")

    def is_issued_by(self, issuer: str) -> None:
        """Stores who issued this device's certificate."""
        self._keep(issuer=issuer)

    def _keep(self, **changed: Any) -> None:
        new = replace(self._kept, **changed)
        save(self._folder, new)
        self._kept = new
