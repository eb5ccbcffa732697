"""The aggregator's signing key, its retained messages to devices about keys (successions of the fleet's key, and the
authorities to trust), and what the broker trusts.

The aggregator reads the files that the command line writes, so it also follows a roll-over that began while it did not
run.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Callable

from cloud_server.identity import authorities, fleet_certificates, token_authority, token_enrolment
from cloud_server.identity.audit_log import Recorder
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device
from cloud_server.records import signing_keys
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base import storage
from fleet_core.base.errors import ConfigError, LinkError
from fleet_core.link.interface import Link
from fleet_core.protocol import certificates, messages, topics
from fleet_core.protocol.signing import key_id
from fleet_core.protocol.succession import Announced, Authorities

LOOK_S = 1.0
COUNT_S = 5.0
"""Time between two checks of whether every device has followed a roll-over."""
FILES = (signing_keys.FILE, signing_keys.NEXT, "fleet.pub", "ca.pem", "ca-next.pem")
FACT = "authorities"
"""Fact of the ledger: number and ids of the authorities last announced to devices."""


def followed(devices: list[Device], key: str) -> tuple[list[str], list[str]]:
    """(the enrolled devices that report this key, the enrolled devices that have been on and do not report it)."""
    there = [one for one in devices if one.status == "enrolled" and one.capabilities]
    have = [one.name for one in there if one.capabilities.get("key") == key_id(key)]
    return have, [one.name for one in there if one.name not in set(have)]


def needed(fleet: Fleet, ledger: Ledger) -> list[str]:
    """The devices that need the old authority: it issued their certificate, or their unused token names it."""
    holders = set(fleet_certificates.certificate_facts(ledger))
    return sorted({*authorities.behind(fleet.folder, ledger, holders), *token_enrolment.open_tokens(ledger)})


class AnnouncedKeys:
    """``sign`` signs with the key that is due. authority_changed(): called when the broker must trust other
    authorities. now(): Unix seconds."""

    def __init__(
        self, fleet: Fleet, ledger: Ledger, link: Link, *, audit: Recorder, clock: Callable[[], float],
        now: Callable[[], float], log: Callable[[str], None],
        authority_changed: Callable[[], None] = lambda: None,
    ):
        self._authority_changed = authority_changed
        self._fleet, self._ledger, self._link = fleet, ledger, link
        self._audit, self._clock, self._now, self._log = audit, clock, now, log
        self._signer = signing_keys.signer(fleet.folder, now())
        self._look_at = self._count_at = clock()
        self._stamps = self._stamped()
        self._trusted = self._authority_ids()
        self._told = json.loads(ledger.fact(FACT) or "{}")
        self._published: bytes | None = None
        self._signed = ("", "", "")

    def sign(self, body: bytes) -> bytes:
        return self._signer.sign(body)

    def reconnected(self) -> None:
        """Publishes again at the next ``tick``, because the broker may have lost retained messages."""
        self._published = None
        self._look_at = self._clock()

    def tick(self) -> bool:
        """Applies what has changed; True if another key signs from now on."""
        if self._clock() < self._look_at:
            return False
        self._look_at = self._clock() + LOOK_S
        if self._clock() >= self._count_at:
            self._count_at = self._clock() + COUNT_S
            self._end_what_all_followed()
            self._look_at_enrolment_port()
        stamps, before = self._stamped(), self._signer.public
        if stamps != self._stamps:
            self._look_at_authorities()
        if stamps != self._stamps or self._due():
            self._signer = signing_keys.signer(self._fleet.folder, self._now())
            self._stamps = self._stamped()
        self._publish()
        if self._signer.public == before:
            return False
        self._log(f"the fleet's key {key_id(self._signer.public)} signs from now on")
        self._audit.done("use key", text=f"{key_id(self._signer.public)} in place of {key_id(before)}")
        return True

    def _due(self) -> bool:
        found = signing_keys.pending(self._fleet.folder)
        return found is not None and self._now() >= (found.at + found.until) / 2

    def _end_what_all_followed(self) -> None:
        """Ends a roll-over if no device needs the old key or the old authority any more."""
        if len(self._trusted) > 1 and not needed(self._fleet, self._ledger):
            with contextlib.suppress(ConfigError):  # a command has just done it
                authorities.finish(self._fleet.folder)
        found = signing_keys.pending(self._fleet.folder)
        if found is not None:
            have, behind = followed(self._ledger.devices(), found.new)
            if have and not behind:
                signing_keys.promote(self._fleet.folder)

    # The authority ----------------------------------------------------------------------------------------------------

    def _authority_ids(self) -> list[str]:
        if not (self._fleet.folder / "ca.pem").exists():
            return []
        return [certificates.authority_id(one) for one in authorities.trusted(self._fleet.folder)]

    def _look_at_authorities(self) -> None:
        """Makes the broker trust the present authorities, if the command line or this process has changed them."""
        found, before = self._authority_ids(), self._trusted
        if found == before:
            return
        self._trusted = found
        dropped = before[0] not in found
        self._log("the fleet's old authority is dropped" if dropped else
                  "the fleet has a new authority: devices renew their certificates")
        self._audit.done("drop authority" if dropped else "trust authority", text=(before[0] if dropped else found[-1]))
        setup = fleet_certificates.saved_setup(self._fleet.folder)
        if setup is not None:
            fleet_certificates.configure(self._fleet, self._ledger, setup)
        self._authority_changed()

    def _look_at_enrolment_port(self) -> None:
        """Makes the broker's enrolment port trust the present authority of tokens, and those before it whose tokens are
        unused."""
        folder = self._fleet.folder
        setup, path = fleet_certificates.saved_setup(folder), folder / "mosquitto" / "tokens-ca.pem"
        if setup is None:
            return
        wanted = token_authority.port_file(folder, self._ledger)
        before = storage.read_bytes(path, limit=certificates.MAX_FILE_BYTES) if path.exists() else b""
        if wanted == before:
            return
        fleet_certificates.configure(self._fleet, self._ledger, setup)
        more = wanted.count(certificates.BEGIN) > before.count(certificates.BEGIN)
        self._log("the enrolment port has a new authority" if more else "the enrolment port's old authority is dropped")
        self._audit.done("trust tokens" if more else "drop tokens", text=certificates.authority_id(
            certificates.certificate_of(wanted, str(path))))
        self._authority_changed()

    def _authorities(self) -> str:
        """The signed announcement of the authorities; empty in a fleet that never had another one. The number rises
        even after a backup was restored.
        """
        known = self._told
        if not known and len(self._trusted) < 2:
            return ""
        if known.get("ids") != self._trusted:
            known = {"number": max(int(known.get("number", 0)) + 1, int(self._now() * 1000)), "ids": self._trusted}
            self._ledger.set_facts(**{FACT: json.dumps(known)})
            self._told = known
        wanted = (str(known), self._signer.public)
        if self._signed[:2] != wanted:
            texts = tuple(map(certificates.certificate_text, authorities.trusted(self._fleet.folder)))
            body = messages.encode(Authorities(self._fleet.config.fleet.name, known["number"], texts))
            self._signed = (*wanted, self.sign(body).decode())
        return self._signed[2]

    def _publish(self) -> None:
        links, signed = signing_keys.announced(self._fleet.folder, self._now()), self._authorities()
        payload = messages.encode(Announced(links, signed)) if links or signed else b""
        known = self._published is not None or payload or signing_keys.chain(self._fleet.folder).number
        if payload == self._published or not known or not self._link.connected:
            return
        try:
            self._link.publish(topics.keys(self._fleet.config.fleet.name), payload, retain=True)
            self._published = payload
        except LinkError as error:
            self._log(f"not sent: {error}")

    def _stamped(self) -> tuple[int, ...]:
        paths = (self._fleet.folder / name for name in FILES)
        return tuple(path.stat().st_mtime_ns if path.exists() else 0 for path in paths)
