"""How devices follow their fleet to another signing key: the old key signs a message that names the new one.

A ``Succession`` is a signed message of ``signing``. The aggregator retains all successions from earlier keys to the
present one, so a device that was off follows them one after the other. They are numbered; a device never goes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

from fleet_core.base.errors import MessageError
from fleet_core.protocol import messages
from fleet_core.protocol.messages import whole
from fleet_core.protocol.signing import Verifier, key_id

MOST = 32
"""The most successions that a device follows from its first key, and that an aggregator retains."""
MAX_LINK_BYTES = 1024
MAX_BYTES = 1 << 16
MAX_OVERLAP_S = 366 * 86400
KEY = {"pattern": r"[0-9a-f]{64}"}
TOKEN = "this device needs a new token: metafleet devices enroll FLEET NAME"


@dataclass(frozen=True)
class Succession:
    """The key ``new`` follows ``old``, in hex. at: Unix seconds. until: when devices stop accepting the old key. cut:
    the old key is invalid at once, and devices do not follow this succession after ``until``."""

    fleet: str = field(metadata={"pattern": r"[A-Za-z0-9_-]{1,64}"})
    number: int = field(metadata=whole(1 << 31, 1))
    old: str = field(metadata=KEY)
    new: str = field(metadata=KEY)
    at: int = field(metadata=whole(1 << 40))
    until: int = field(metadata=whole(1 << 40))
    cut: bool = False


@dataclass(frozen=True)
class Announced:
    """What the aggregator retains for devices. links: signed successions, oldest first. authorities: signed
    ``Authorities``, or empty."""

    links: tuple[str, ...] = field(default=(), metadata={"max_length": MAX_LINK_BYTES})
    authorities: str = field(default="", metadata={"max_length": 20_000})


@dataclass(frozen=True)
class Authorities:
    """The authorities that a fleet trusts, DER in base64; the last one issues certificates. number: rises with each
    change."""

    fleet: str = field(metadata={"pattern": r"[A-Za-z0-9_-]{1,64}"})
    number: int = field(metadata=whole(1 << 53, 1))
    certificates: tuple[str, ...] = field(metadata={"max_length": 8192})


def read(links: Sequence[str], fleet: str | None = None) -> list[Succession]:
    """The successions, each signed by its old key. fleet: whose they are; None for any. Raises MessageError for
    successions that are forged, of another fleet, too long or in another order."""
    if len(links) > MOST:
        raise MessageError(f"{len(links)} successions", expected=f"at most {MOST}")
    found = [_read(link, fleet) for link in links]
    for before, after in pairwise(found):
        if (after.number, after.old, after.fleet) != (before.number + 1, before.new, before.fleet):
            raise MessageError(f"succession {after.number} does not follow succession {before.number}")
    return found


def _read(link: str, fleet: str | None) -> Succession:
    if len(link) > MAX_LINK_BYTES:
        raise MessageError(f"a succession of {len(link)} bytes", expected=f"at most {MAX_LINK_BYTES}")
    message = as_bytes(link)
    found = messages.decode(Succession, message.partition(b"\n")[2])
    Verifier(found.old).verify(message)
    if fleet is not None and found.fleet != fleet:
        raise MessageError(f"a succession of fleet '{found.fleet}'", expected=f"fleet '{fleet}'")
    if not 0 <= found.until - found.at <= MAX_OVERLAP_S:
        raise MessageError("a succession with an overlap of over a year, or of none")
    return found


def as_bytes(signed: str) -> bytes:
    """The bytes of a signed message that was sent as text. Raises MessageError."""
    try:
        return signed.encode("ascii")
    except UnicodeEncodeError as error:
        raise MessageError("a signed message that is not ASCII") from error


class Keyring(Verifier):
    """The valid keys of a device that was given ``anchor`` and has followed ``links``: the newest, and earlier ones
    until their overlaps end. Links before the anchor, or of another anchor, are ignored.

    now(): Unix seconds. ``newest``: the key, in hex. ``number``: of the last succession; 0 for none. Raises
    MessageError for links that ``read`` refuses.
    """

    def __init__(
        self, anchor: str, links: Sequence[str] = (), *, fleet: str | None = None, now: Callable[[], float] = time.time
    ):
        found = read(links, fleet)
        begin = next((n for n, one in enumerate(found) if one.old == anchor), len(found))
        self.links = tuple(links[begin:])
        self._anchor, self._fleet, self._now = anchor, fleet, now
        self.newest, self.number = anchor, 0
        self._before: list[tuple[str, int]] = []
        for one in found[begin:]:
            self._before = [] if one.cut else [*self._before, (one.old, one.until)]
            self.newest, self.number = one.new, one.number
        super().__init__(self.newest)

    def accepted(self) -> list[str]:
        """The keys that are valid now, the newest first."""
        now = self._now()
        return [self.newest, *(key for key, until in self._before if now < until)]

    def knows(self, message: bytes) -> bool:
        """Whether one of the keys may have signed it."""
        named = message[:64].split(b":")
        return len(named) > 1 and named[1].decode("ascii", "replace") in map(key_id, self.accepted())

    def verify(self, message: bytes) -> bytes:
        named = message[:64].split(b":")
        signer = named[1].decode("ascii", "replace") if len(named) > 1 else ""
        key = next((key for key in self.accepted()[1:] if key_id(key) == signer), None)
        return super().verify(message) if key is None else Verifier(key).verify(message)

    def extended(self, links: Sequence[str]) -> Keyring | None:
        """The keys after ``links`` too; None if they lead to the newest key. Raises MessageError for links that
        ``read`` refuses, for a replay, and if they do not continue the newest key."""
        found = read(links, self._fleet)
        if not found or found[-1].new == self.newest:
            return None
        begin = next((n for n, one in enumerate(found) if one.old == self.newest), None)
        if found[-1].number <= self.number:
            raise MessageError(f"succession {found[-1].number} is an old one", expected=f"above {self.number}")
        if begin is None or (self.number and found[begin].number != self.number + 1):
            raise MessageError("the successions do not begin at this device's key", hint=TOKEN)
        if any(one.cut and self._now() > one.until for one in found[begin:]):
            raise MessageError("the fleet has cut the key that this device has", hint=TOKEN)
        if len(self.links) + len(found) - begin > MOST:
            raise MessageError(f"more than {MOST} successions since this device's token was made", hint=TOKEN)
        return Keyring(self._anchor, (*self.links, *links[begin:]), fleet=self._fleet, now=self._now)
