"""The aggregator's side of secure aggregation (``secure_sum``): it asks devices for each step and computes their
sum."""

from __future__ import annotations

import datetime
from collections.abc import Collection, Iterable
from dataclasses import dataclass, field

import numpy as np
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey

from fleet_core.base.errors import MessageError
from fleet_core.codecs.kinds.common_scale import LARGEST
from fleet_core.privacy import masks, shamir
from fleet_core.privacy.masks import Array
from fleet_core.privacy.secure_sum import Authorities, Session, check_keys, neighbours, place, public
from fleet_core.protocol import certificates
from fleet_core.protocol.secure_messages import Revealed, SealedShares, SecureStep, SignedKeys


@dataclass
class Collector:
    """The aggregator in one session. ``keys``: device -> its advertised keys. ``senders``: the devices that shared, set
    by ``start_masking``. ``there``: the senders whose masked update is summed, set by ``start_unmasking``.
    ``restarted``: devices that showed other keys later; they have lost the secrets of the first ones."""

    session: Session
    authority: Authorities
    keys: dict[str, SignedKeys] = field(default_factory=dict)
    graph: dict[str, tuple[str, ...]] = field(default_factory=dict)
    shares: dict[str, SealedShares] = field(default_factory=dict)
    senders: frozenset[str] = frozenset()
    there: frozenset[str] = frozenset()
    revealed: dict[str, Revealed] = field(default_factory=dict)
    restarted: set[str] = field(default_factory=set)

    @property
    def phase(self) -> str:
        """keys, shares, masked or unmask: what the aggregator waits for."""
        if self.there:
            return "unmask"
        return "masked" if self.senders else "shares" if self.graph else "keys"

    # What devices send ------------------------------------------------------------------------------------------------

    def add_keys(self, device: str, keys: SignedKeys, now: datetime.datetime) -> None:
        """Takes a device's keys, and ignores them if they come too late. Raises MessageError for keys that are not the
        device's."""
        if keys.device != device:
            raise MessageError(f"keys of {keys.device}", where=device)
        if not self.graph:
            check_keys(self.session, keys, self.authority, now)
            self.keys[device] = keys
        elif (known := self.keys.get(device)) and (keys.mask, keys.box) != (known.mask, known.box):
            check_keys(self.session, keys, self.authority, now)
            self.restarted.add(device)

    def add_shares(self, device: str, shares: SealedShares) -> None:
        if self.phase != "shares" or device not in self.graph or shares.session != self.session.rules.session:
            return
        if device in self.restarted:
            return  # nobody could open them
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
        """Ends the step in which devices join. Raises MessageError if too few have joined."""
        least = self.session.rules.least
        if len(self.keys) < least:
            raise MessageError(f"{len(self.keys)} devices sent keys", expected=f"{least} or more")
        self.graph = neighbours(self.keys, self.session.rules.session, self.session.rules.neighbours)

    def start_masking(self) -> None:
        """Continues with the devices that have shared. Raises MessageError if they are too few."""
        self._check(self.shares, len(self.keys), "shared")
        senders, before = set(self.shares), 0
        while len(senders) != before:  # a device without enough neighbours drops out, and its neighbours lose one
            before = len(senders)
            senders = {name for name in senders if 1 + len(senders & {*self.graph[name]}) >= self._least(name)}
        self._check(senders, len(self.keys), "shared and have enough neighbours that did")
        self.senders = frozenset(senders)

    def start_unmasking(self, received: Iterable[str]) -> None:
        """received: devices whose masked update is here. Raises MessageError if their sum cannot be unmasked."""
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
        """The present request to ``device``, or None."""
        session, around = self.session.rules.session, self.graph.get(device, ())
        if device in self.restarted:
            return None
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
        """Whether enough shares were revealed for the sum."""
        return self.phase == "unmask" and all(len(self._held(name)) >= self._threshold(name) for name in self._owners)

    def total(self, masked: Iterable[Array]) -> Array:
        """int64 [count]: the sum of the values of all that are ``there``. masked: their masked updates, in any order.
        Raises MessageError for shares or updates that do not follow the protocol."""
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
        """The devices of which a secret is needed."""
        return sorted(name for name in self.senders if name in self.there or self.there & {*self.graph[name]})

    def _threshold(self, name: str) -> int:
        return self.session.needed(len(self.graph[name]) + 1)

    def _least(self, name: str) -> int:
        """How many of a device and its neighbours must be there."""
        return self.session.least(len(self.graph[name]) + 1)

    def _check(self, names: Collection[str], of: int, what: str) -> None:
        needed = self.session.least(of)
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
        if owner not in self.there and public(X25519PrivateKey.from_private_bytes(secret)) != self.keys[owner].mask:
            raise MessageError("shares of another key than it has shown", where=owner)
        return secret
