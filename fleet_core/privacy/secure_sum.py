"""Secure aggregation: the aggregator gets the sum of its devices' values and no single device's. Both sides, no I/O.

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
Shamir's polynomial is the sha256 of its holder's name.
"""

from __future__ import annotations

import base64
import datetime
import hashlib
import math
import secrets
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np
from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fleet_core.base.errors import MessageError
from fleet_core.codecs.kinds.common_scale import LARGEST
from fleet_core.privacy import masks, shamir
from fleet_core.privacy.masks import Array
from fleet_core.privacy.shamir import SHARE_BYTES
from fleet_core.protocol import certificates
from fleet_core.protocol.certificates import PrivateKey
from fleet_core.protocol.secure_messages import Revealed, SealedShares, SecureRules, SecureStep, SignedKeys

NONCE = bytes(12)
"""A key seals one box."""

Authorities = x509.Certificate | tuple[x509.Certificate, ...]


@dataclass(frozen=True)
class Session:
    """What both sides know of one attempt to sum a round: the rules are those of the signed manifest."""

    fleet: str
    round: int
    rules: SecureRules

    def context(self, *words: str) -> bytes:
        return "/".join((self.fleet, str(self.round), self.rules.session, *words)).encode()

    def needed(self, holders: int) -> int:
        """Of so many holders, those whose shares give the secret: more than half."""
        return math.ceil(self.rules.threshold * holders)

    def pair(self, own: X25519PrivateKey | bytes, other: str, *words: str) -> bytes:
        raw = own if isinstance(own, bytes) else own.private_bytes_raw()
        try:
            return masks.pair_key(raw, bytes.fromhex(other), self.context(*words))
        except ValueError as error:
            raise MessageError("a public key of small order") from error


def to_sign(session: Session, keys: SignedKeys) -> bytes:
    """What the key of a device's certificate signs."""
    return session.context("keys", keys.device, keys.mask, keys.box)


def check_keys(session: Session, keys: SignedKeys, authority: Authorities, now: datetime.datetime) -> None:
    """Raises MessageError unless the named device signed them for this session, by a certificate of an authority."""
    if keys.session != session.rules.session:
        raise MessageError("keys of another session", where=keys.device)
    public = certificates.issued_to(keys.certificate, keys.device, authority, now)
    if not certificates.signed_by(certificates.public_text(public), keys.signature, to_sign(session, keys)):
        raise MessageError("keys that the device's certificate did not sign", where=keys.device)


def neighbours(names: Collection[str], session: str, count: int) -> dict[str, tuple[str, ...]]:
    """Device -> those with which it has a mask: all others, or the ``count`` (even) nearest on a ring in an order that
    the session's random id decides (Harary graph, Bell et al., Algorithm 1)."""
    if not count or count >= len(names) - 1:
        ring = sorted(names)
        return {name: tuple(other for other in ring if other != name) for name in ring}
    ring = sorted(names, key=lambda name: hashlib.sha256(f"{session}/{name}".encode()).digest())
    size, around = len(ring), [k for k in range(-(count // 2), count // 2 + 1) if k]
    return {name: tuple(sorted(ring[(at + k) % size] for k in around)) for at, name in enumerate(ring)}


def place(name: str) -> int:
    """Where a holder's share is on Shamir's polynomial."""
    return int.from_bytes(hashlib.sha256(name.encode()).digest(), "big") + 1


# A device -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Identity:
    """A device's name, its certificate, and the certificate's key."""

    name: str
    certificate: x509.Certificate
    key: PrivateKey


class Participant:
    """A device in one session. Its secrets are in memory alone, and end with it. A step that comes twice gets the same
    answer; one that differs from the first of its kind is refused, as one that comes too early."""

    def __init__(self, session: Session, identity: Identity):
        self.session, self._identity = session, identity
        self._mask_key, self._box_key = X25519PrivateKey.generate(), X25519PrivateKey.generate()
        self._seed = secrets.token_bytes(masks.KEY_BYTES)
        self._peers: dict[str, SignedKeys] = {}
        self._sealed: SealedShares | None = None
        self._own = b""
        self._boxes: Mapping[str, str] | None = None
        self._revealed: tuple[SecureStep, Revealed] | None = None

    @property
    def name(self) -> str:
        return self._identity.name

    def keys(self) -> SignedKeys:
        """Advertise."""
        unsigned = SignedKeys(
            self.session.rules.session, self.name, _public(self._mask_key), _public(self._box_key),
            certificates.certificate_text(self._identity.certificate), "",
        )
        return replace(unsigned, signature=certificates.sign(self._identity.key, to_sign(self.session, unsigned)))

    def seal(
        self, peers: Collection[SignedKeys], authority: Authorities, now: datetime.datetime
    ) -> SealedShares:
        """Share. Raises MessageError for too few peers and for keys that are not their device's."""
        given = {keys.device: keys for keys in peers}
        if self._sealed is not None:
            if given != self._peers:
                raise MessageError("other neighbours than before", where=self.name)
            return self._sealed
        if self.name in given or len(given) != len(peers):
            raise MessageError("neighbours that come twice", where=self.name)
        if len(given) + 1 < self.session.rules.least:
            raise MessageError(f"{len(given) + 1} devices of a sum", expected=f"{self.session.rules.least} or more")
        for keys in peers:
            check_keys(self.session, keys, authority, now)
        holders = {place(name): name for name in (self.name, *given)}
        needed = self.session.needed(len(holders))
        seeds = shamir.split(self._seed, list(holders), needed)
        parts = shamir.split(self._mask_key.private_bytes_raw(), list(holders), needed)
        both = {name: seeds[at] + parts[at] for at, name in holders.items()}
        boxes = {name: self._seal(given[name], text) for name, text in both.items() if name != self.name}
        self._own, self._peers = both[self.name], given
        self._sealed = SealedShares(self.session.rules.session, boxes)
        return self._sealed

    def mask(self, boxes: Mapping[str, str], values: Array) -> Array:
        """y_i, unsigned, of whole numbers int8 [count]. Raises MessageError."""
        if self._sealed is None or not boxes.keys() <= self._peers.keys():
            raise MessageError("shares of devices that are no neighbours", where=self.name)
        if self._boxes is not None:
            raise MessageError("an update that is masked already", where=self.name)
        needed = max(self.session.needed(len(self._peers) + 1), self.session.rules.least)
        if len(boxes) + 1 < needed:
            raise MessageError(f"{len(boxes) + 1} devices that shared", expected=f"{needed} or more")
        pairs = {name: self.session.pair(self._mask_key, self._peers[name].mask, "mask") for name in boxes}
        bits = self.session.rules.bits
        masked: Array = values.astype(np.int64).astype(masks.dtype(bits))
        masked += masks.mask(self.name, self._seed, pairs, values.size, bits)
        self._boxes = dict(boxes)
        return masked

    def reveal(self, asked: SecureStep) -> Revealed:
        """Unmask. Raises MessageError where what is asked could tell more than a sum of enough devices."""
        if self._revealed is not None:
            if asked != self._revealed[0]:
                raise MessageError("another sum of updates that were revealed in one already", where=self.name)
            return self._revealed[1]
        there, gone = set(asked.there), set(asked.gone)
        if self._boxes is None or there & gone or there | gone != {*self._boxes, self.name} or self.name not in there:
            raise MessageError("a sum of other devices than those that shared", where=self.name)
        needed = max(self.session.needed(len(self._peers) + 1), self.session.rules.least)
        if len(there) < needed:
            raise MessageError(f"a sum of {len(there)} neighbours", expected=f"{needed} or more")
        shares = {name: text for name, box in self._boxes.items() if (text := self._opened(name, box))}
        shares[self.name] = self._own
        answer = Revealed(
            self.session.rules.session,
            {name: encoded(text[:SHARE_BYTES]) for name, text in shares.items() if name in there},
            {name: encoded(text[SHARE_BYTES:]) for name, text in shares.items() if name in gone},
        )
        self._revealed = asked, answer
        return answer

    def _seal(self, to: SignedKeys, text: bytes) -> str:
        key = self.session.pair(self._box_key, to.box, "box", self.name, to.device)
        return encoded(ChaCha20Poly1305(key).encrypt(NONCE, text, None))

    def _opened(self, sender: str, box: str) -> bytes:
        """Empty for a box that its sender did not seal: the others' shares must do."""
        key = self.session.pair(self._box_key, self._peers[sender].box, "box", sender, self.name)
        try:
            text = ChaCha20Poly1305(key).decrypt(NONCE, certificates.decoded(box), None)
        except (InvalidTag, MessageError, ValueError):
            return b""
        return text if len(text) == 2 * SHARE_BYTES else b""


# The aggregator -------------------------------------------------------------------------------------------------------


@dataclass
class Collector:
    """The aggregator in one session. ``keys``: device -> those that it advertised. ``senders``: those that shared, once
    ``start_masking`` was called. ``there``: of these, those whose masked update is summed, once ``start_unmasking``
    was."""

    session: Session
    authority: Authorities
    keys: dict[str, SignedKeys] = field(default_factory=dict)
    graph: dict[str, tuple[str, ...]] = field(default_factory=dict)
    shares: dict[str, SealedShares] = field(default_factory=dict)
    senders: frozenset[str] = frozenset()
    there: frozenset[str] = frozenset()
    revealed: dict[str, Revealed] = field(default_factory=dict)

    @property
    def phase(self) -> str:
        """keys, shares, masked or unmask: what devices are waited for."""
        if self.there:
            return "unmask"
        return "masked" if self.senders else "shares" if self.graph else "keys"

    # What devices send ------------------------------------------------------------------------------------------------

    def add_keys(self, device: str, keys: SignedKeys, now: datetime.datetime) -> None:
        """Raises MessageError for keys that are not the device's. Those that come too late are left."""
        if keys.device != device:
            raise MessageError(f"keys of {keys.device}", where=device)
        if not self.graph:
            check_keys(self.session, keys, self.authority, now)
            self.keys[device] = keys

    def add_shares(self, device: str, shares: SealedShares) -> None:
        if self.phase != "shares" or device not in self.graph or shares.session != self.session.rules.session:
            return
        if set(shares.boxes) != set(self.graph[device]):
            raise MessageError("shares for other devices than its neighbours", where=device)
        self.shares.setdefault(device, shares)

    def add_revealed(self, device: str, revealed: Revealed) -> None:
        if self.phase == "unmask" and device in self.there and revealed.session == self.session.rules.session:
            around = {device, *self.graph[device]}
            if not (set(revealed.seeds) <= around & self.there and set(revealed.keys) <= around & self._gone):
                raise MessageError("shares that were not asked for", where=device)
            self.revealed.setdefault(device, revealed)

    # Steps ------------------------------------------------------------------------------------------------------------

    def start_sharing(self) -> None:
        """No more devices join. Raises MessageError for too few."""
        least = self.session.rules.least
        if len(self.keys) < least:
            raise MessageError(f"{len(self.keys)} devices sent keys", expected=f"{least} or more")
        self.graph = neighbours(self.keys, self.session.rules.session, self.session.rules.neighbours)

    def start_masking(self) -> None:
        """Those that have shared go on. Raises MessageError for too few."""
        self._check(self.shares, len(self.keys), "shared")
        senders, before = set(self.shares), 0
        while len(senders) != before:  # a device without enough neighbours goes no further, and its neighbours lose one
            before = len(senders)
            senders = {name for name in senders if 1 + len(senders & {*self.graph[name]}) >= self._least(name)}
        self._check(senders, len(self.keys), "shared and have enough neighbours that did")
        self.senders = frozenset(senders)

    def start_unmasking(self, received: Iterable[str]) -> None:
        """received: devices whose masked update is here. Raises MessageError where their sum cannot be had."""
        there = self.senders & {*received}
        self._check(there, len(self.senders), "sent a masked update")
        for owner in self.senders:
            holders = there & {owner, *self.graph[owner]}
            needed = self._least(owner) if owner in there else min(len(holders), 1) * self._threshold(owner)
            if len(holders) < needed:
                raise MessageError(f"{len(holders)} of the devices with shares of {owner} are there",
                                   expected=f"{needed} or more")
        self.there = there

    def step(self, device: str) -> SecureStep | None:
        """What ``device`` is asked for now, or None."""
        session, around = self.session.rules.session, self.graph.get(device, ())
        if self.phase == "shares" and device in self.graph:
            return SecureStep(session, "peers", peers=tuple(self.keys[name] for name in around))
        if self.phase == "masked" and device in self.senders:
            boxes = {name: self.shares[name].boxes[device] for name in around if name in self.senders}
            return SecureStep(session, "boxes", boxes=boxes)
        if self.phase == "unmask" and device in self.there:
            known = sorted(self.senders & {device, *around})
            return SecureStep(session, "unmask", there=tuple(n for n in known if n in self.there),
                              gone=tuple(n for n in known if n not in self.there))
        return None

    # The sum ----------------------------------------------------------------------------------------------------------

    @property
    def complete(self) -> bool:
        """Whether what was revealed gives the sum."""
        return self.phase == "unmask" and all(len(self._held(name)) >= self._threshold(name) for name in self._owners)

    def total(self, masked: Iterable[Array]) -> Array:
        """int64 [count]: the sum of the values of all that are ``there``. masked: their masked updates, in any order.
        Raises MessageError where shares or updates are not what they should be."""
        bits, total, devices = self.session.rules.bits, np.zeros(0, masks.dtype(self.session.rules.bits)), 0
        for one in masked:
            total, devices = (one.copy() if not devices else total + one), devices + 1
        if devices != len(self.there):
            raise MessageError(f"{devices} masked updates", expected=str(len(self.there)))
        for owner in self._owners:
            secret = self._secret(owner)
            if owner in self.there:
                total -= masks.stream(secret, total.size, bits)
                continue
            for other in self.there & {*self.graph[owner]}:
                key = self.session.pair(secret, self.keys[other].mask, "mask")
                total -= masks.pair_mask(other, owner, key, total.size, bits)
        found, most = masks.whole(total), LARGEST * devices
        if int(np.abs(found).max(initial=0)) > most:
            raise MessageError(f"a sum of values up to {int(np.abs(found).max())}", expected=f"at most {most}, which "
                               f"is what {devices} devices can send: one of them did not follow the protocol")
        return found

    @property
    def _gone(self) -> frozenset[str]:
        return self.senders - self.there

    @property
    def _owners(self) -> list[str]:
        """Those of whom a secret is needed."""
        return sorted(name for name in self.senders if name in self.there or self.there & {*self.graph[name]})

    def _threshold(self, name: str) -> int:
        return self.session.needed(len(self.graph[name]) + 1)

    def _least(self, name: str) -> int:
        """Of a device and its neighbours, those that must be there."""
        return max(self._threshold(name), self.session.rules.least)

    def _check(self, names: Collection[str], of: int, what: str) -> None:
        needed = max(self.session.needed(of), self.session.rules.least)
        if len(names) < needed:
            raise MessageError(f"{len(names)} of {of} devices {what}", expected=f"{needed} or more (the threshold)")

    def _held(self, owner: str) -> dict[int, str]:
        """Place -> revealed share of the owner's secret."""
        kind = "seeds" if owner in self.there else "keys"
        found = {name: getattr(one, kind).get(owner) for name, one in self.revealed.items()}
        return {place(name): text for name, text in found.items() if text is not None}

    def _secret(self, owner: str) -> bytes:
        held = sorted(self._held(owner).items())[: self._threshold(owner)]
        try:
            secret = shamir.join({at: certificates.decoded(text) for at, text in held})
        except (ValueError, MessageError) as error:
            raise MessageError("shares that do not fit each other", where=owner) from error
        if owner not in self.there and _public(X25519PrivateKey.from_private_bytes(secret)) != self.keys[owner].mask:
            raise MessageError("shares of another key than it has shown", where=owner)
        return secret


def _public(key: X25519PrivateKey) -> str:
    return key.public_key().public_bytes_raw().hex()


def encoded(data: bytes) -> str:
    return base64.b64encode(data).decode()
