"""The fleet's signing key and its successor.

    fleet.key, fleet.pub  what signs now
    fleet-next.key        the successor, from its announcement until it signs
    successions.json      the successions so far, signed: see ``fleet_core.protocol.succession``

Writing ``successions.json`` announces a succession. The old key signs for half of the overlap, for devices that have
not received the announcement; then, or once every device has followed, the successor replaces it. If a step is
interrupted, the next step finishes it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from cloud_server.records import key_files
from fleet_core.base import schema, storage
from fleet_core.base.errors import ConfigError
from fleet_core.base.processes import typed
from fleet_core.protocol import messages, succession
from fleet_core.protocol.signing import Signer, load_public
from fleet_core.protocol.succession import MAX_LINK_BYTES, MOST, Succession

FILE, NEXT = "successions.json", "fleet-next.key"
OVERLAP_S, CUT_S = 30 * 86400, 600
"""Default overlap of a roll-over; overlap of a cut, in which the devices that are on follow."""


@dataclass(frozen=True)
class Chain:
    """number: of the last succession. links: the last ones, signed. first: the fleet's first key."""

    number: int = field(default=0, metadata=messages.whole(1 << 31))
    links: tuple[str, ...] = field(default=(), metadata={"max_length": MAX_LINK_BYTES})
    first: str = field(default="", metadata={"pattern": r"[0-9a-f]{64}|"})


def chain(folder: Path) -> Chain:
    """Raises StateError."""
    path = folder / FILE
    if not path.exists():
        return Chain()
    data = storage.read_bytes(path, limit=succession.MAX_BYTES)
    return schema.stored(Chain, data, path, "put it back from a backup")


def last(folder: Path) -> Succession | None:
    """The last succession that was announced. Raises StateError, MessageError."""
    links = chain(folder).links
    return succession.read(links[-1:])[0] if links else None


def pending(folder: Path) -> Succession | None:
    """The succession whose new key does not sign yet."""
    found = last(folder)
    waits = found is not None and (folder / NEXT).exists() and load_public(folder / "fleet.pub") == found.old
    return found if waits else None


def announced(folder: Path, now: float) -> tuple[str, ...]:
    """The links that are sent to devices: those after the last cut that is over."""
    links = chain(folder).links
    over = [n for n, one in enumerate(succession.read(links)) if one.cut and now > one.until]
    return links[over[-1] + 1:] if over else links


def first(folder: Path) -> str:
    """The fleet's first key, which no roll-over changes, in hex."""
    return chain(folder).first or load_public(folder / "fleet.pub")


def known(folder: Path) -> set[str]:
    """Every key that signs or has signed, as far as the chain goes back."""
    return {load_public(folder / "fleet.pub"), *(one.old for one in succession.read(chain(folder).links))}


def signer(folder: Path, now: float) -> Signer:
    """The key that signs at ``now``, Unix seconds. Raises StateError."""
    found = pending(folder)
    if found is not None and (found.cut or now >= (found.at + found.until) / 2):
        promote(folder)
    return Signer.load(folder / "fleet.key", key_files.read)


def roll(folder: Path, fleet: str, now: float, *, overlap_s: float = OVERLAP_S, cut: bool = False) -> Succession:
    """Announces a new key. cut: the old key becomes invalid, and the new one signs at once. Raises StateError, and
    ConfigError during another roll-over unless this one is a cut."""
    if pending(folder) is not None:
        if not cut:
            raise ConfigError("a roll-over of the fleet's key is under way", where=str(folder),
                              hint=f"metafleet server status {typed(folder)}; if the key is in other hands: --cut")
        promote(folder)
    before, old = chain(folder), signer(folder, now)
    new = Signer.create(folder / NEXT, key_files.write)
    made = Succession(fleet, before.number + 1, old.public, new.public, int(now),
                      int(now + (CUT_S if cut else overlap_s)), cut)
    link = old.sign(messages.encode(made)).decode()
    _write(folder, Chain(made.number, (*before.links, link)[-MOST:], before.first or old.public))
    if cut:
        promote(folder)
    return made


def promote(folder: Path) -> None:
    """Makes the successor the signing key, and deletes the old private key."""
    if pending(folder) is None:
        return
    public = Signer.load(folder / NEXT, key_files.read).public
    key_files.write(folder / "fleet.key", key_files.read(folder / NEXT))
    storage.write_atomic(folder / "fleet.pub", public.encode() + b"\n")
    (folder / NEXT).unlink(missing_ok=True)


def _write(folder: Path, new: Chain) -> None:
    storage.write_atomic(folder / FILE, json.dumps(schema.plain(new)).encode() + b"\n")
