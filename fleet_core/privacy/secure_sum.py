"""Secure aggregation: the aggregator gets the sum of its devices' values, not their values. Shared by both sides.

Bonawitz et al., "Practical Secure Aggregation for Privacy-Preserving Machine Learning", CCS 2017, Figure 4, with the
graph of Bell et al., "Secure Single-Server Aggregation with (Poly)Logarithmic Overhead", CCS 2020, Algorithm 2: a
device has masks with k neighbours, which alone hold shares of its secrets. The four steps, in the papers' words:

    advertise  each device signs two fresh X25519 keys with the key of its certificate, the aggregator forwards them
    share      each device seals shares of its seed b_i and of its mask key for each neighbour
    mask       each device sends y_i = x_i + PRG(b_i) ± PRG(s_ij), for those neighbours that shared
    unmask     those that are there reveal shares: of b_i where y_i is there, of the mask key where it is not

Deviations: both sides refuse a threshold of half of the holders or less, in place of the paper's signed list of
survivors. A device answers ``unmask`` once, for each neighbour with one kind of share, so that two answers about one
device need more than all of its honest holders (docs/privacy.md). Devices are known by name: a share's place in
Shamir's polynomial is the sha256 of its holder's name. A device's side is ``secure_participant``, the aggregator's
``secure_collector``; neither does I/O.
"""

from __future__ import annotations

import datetime
import hashlib
import math
from collections.abc import Collection
from dataclasses import dataclass

from cryptography import x509
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fleet_core.base.errors import MessageError
from fleet_core.privacy import masks
from fleet_core.protocol import certificates
from fleet_core.protocol.secure_messages import SecureRules, SignedKeys

Authorities = x509.Certificate | tuple[x509.Certificate, ...]


@dataclass(frozen=True)
class Session:
    """One attempt to sum a round, as both sides know it. rules: from the signed manifest."""

    fleet: str
    round: int
    rules: SecureRules

    def context(self, *words: str) -> bytes:
        return "/".join((self.fleet, str(self.round), self.rules.session, *words)).encode()

    def needed(self, holders: int) -> int:
        """How many of the holders' shares give the secret: more than half."""
        return math.ceil(self.rules.threshold * holders)

    def least(self, holders: int) -> int:
        """How many of the holders must be there for a sum."""
        return max(self.needed(holders), self.rules.least)

    def pair(self, own: X25519PrivateKey | bytes, other: str, *words: str) -> bytes:
        raw = own if isinstance(own, bytes) else own.private_bytes_raw()
        try:
            return masks.pair_key(raw, bytes.fromhex(other), self.context(*words))
        except ValueError as error:
            raise MessageError("a public key of small order") from error


def to_sign(session: Session, keys: SignedKeys) -> bytes:
    """The bytes that the key of a device's certificate signs."""
    return session.context("keys", keys.device, keys.mask, keys.box)


def check_keys(session: Session, keys: SignedKeys, authority: Authorities, now: datetime.datetime) -> None:
    """Raises MessageError unless the named device signed the keys for this session, with a certificate of an
    authority."""
    if keys.session != session.rules.session:
        raise MessageError("keys of another session", where=keys.device)
    public = certificates.issued_to(keys.certificate, keys.device, authority, now)
    if not certificates.signed_by(certificates.public_text(public), keys.signature, to_sign(session, keys)):
        raise MessageError("keys that the device's certificate did not sign", where=keys.device)


def neighbours(names: Collection[str], session: str, count: int) -> dict[str, tuple[str, ...]]:
    """Device -> the devices with which it has a mask: all others, or the ``count`` (even) nearest on a ring in an order
    that the session's random id decides (Harary graph, Bell et al., Algorithm 1)."""
    if not count or count >= len(names) - 1:
        ring = sorted(names)
        return {name: tuple(other for other in ring if other != name) for name in ring}
    ring = sorted(names, key=lambda name: hashlib.sha256(f"{session}/{name}".encode()).digest())
    size, around = len(ring), [k for k in range(-(count // 2), count // 2 + 1) if k]
    return {name: tuple(sorted(ring[(at + k) % size] for k in around)) for at, name in enumerate(ring)}


def place(name: str) -> int:
    """The place of a holder's share on Shamir's polynomial."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") + 1


def public(key: X25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()
