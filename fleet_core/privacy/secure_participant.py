"""A device's side of secure aggregation (``secure_sum``): its keys and shares, its masked update, what it reveals."""

from __future__ import annotations

import datetime
import secrets
from collections.abc import Collection, Mapping
from dataclasses import dataclass, replace

import numpy as np
from cryptography import x509
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.asymmetric.x25519 import X25519PrivateKey
from cryptography.hazmat.primitives.ciphers.aead import ChaCha20Poly1305

from fleet_core.base.errors import MessageError
from fleet_core.privacy import masks, shamir
from fleet_core.privacy.masks import Array
from fleet_core.privacy.secure_sum import Authorities, Session, check_keys, place, public, to_sign
from fleet_core.privacy.shamir import SHARE_BYTES
from fleet_core.protocol import certificates
from fleet_core.protocol.certificates import PrivateKey
from fleet_core.protocol.secure_messages import Revealed, SealedShares, SecureStep, SignedKeys

NONCE = bytes(12)
"""A key seals one box."""


@dataclass(frozen=True)
class Identity:
    """A device's name, its certificate, and the certificate's key."""

    name: str
    certificate: x509.Certificate
    key: PrivateKey


class Participant:
    """A device in one session. Its secrets are only in memory, and end with it. A repeated step gets the same answer; a
    step that differs from the first of its kind, or comes too early, is refused."""

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
        """Advertise: the signed public keys."""
        unsigned = SignedKeys(
            self.session.rules.session, self.name, public(self._mask_key), public(self._box_key),
            certificates.certificate_text(self._identity.certificate), "",
        )
        return replace(unsigned, signature=certificates.sign(self._identity.key, to_sign(self.session, unsigned)))

    def seal(
        self, peers: Collection[SignedKeys], authority: Authorities, now: datetime.datetime
    ) -> SealedShares:
        """Share: the sealed shares for ``peers``. Raises MessageError for too few peers and for keys that are not their
        device's."""
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
        """Mask: y_i, unsigned [count], from whole numbers int8 [count]. Raises MessageError."""
        if self._sealed is None or not boxes.keys() <= self._peers.keys():
            raise MessageError("shares of devices that are not neighbours", where=self.name)
        if self._boxes is not None:
            raise MessageError("an update that is masked already", where=self.name)
        needed = self.session.least(len(self._peers) + 1)
        if len(boxes) + 1 < needed:
            raise MessageError(f"{len(boxes) + 1} devices that shared", expected=f"{needed} or more")
        pairs = {name: self.session.pair(self._mask_key, self._peers[name].mask, "mask") for name in boxes}
        bits = self.session.rules.bits
        masked: Array = values.astype(np.int64).astype(masks.dtype(bits))
        masked += masks.mask(self.name, self._seed, pairs, values.size, bits)
        self._boxes = dict(boxes)
        return masked

    def reveal(self, asked: SecureStep) -> Revealed:
        """Unmask: the shares that are asked for. Raises MessageError if they could reveal more than a sum of enough
        devices."""
        if self._revealed is not None:
            if asked != self._revealed[0]:
                raise MessageError("another sum of updates that were revealed in one already", where=self.name)
            return self._revealed[1]
        there, gone = set(asked.there), set(asked.gone)
        if self._boxes is None or there & gone or there | gone != {*self._boxes, self.name} or self.name not in there:
            raise MessageError("a sum of other devices than those that shared", where=self.name)
        needed = self.session.least(len(self._peers) + 1)
        if len(there) < needed:
            raise MessageError(f"a sum of {len(there)} neighbours", expected=f"{needed} or more")
        shares = {name: text for name, box in self._boxes.items() if (text := self._opened(name, box))}
        shares[self.name] = self._own
        answer = Revealed(
            self.session.rules.session,
            {name: certificates.encoded(text[:SHARE_BYTES]) for name, text in shares.items() if name in there},
            {name: certificates.encoded(text[SHARE_BYTES:]) for name, text in shares.items() if name in gone},
        )
        self._revealed = asked, answer
        return answer

    def _seal(self, to: SignedKeys, text: bytes) -> str:
        key = self.session.pair(self._box_key, to.box, "box", self.name, to.device)
        return certificates.encoded(ChaCha20Poly1305(key).encrypt(NONCE, text, None))

    def _opened(self, sender: str, box: str) -> bytes:
        """The shares in a box; empty if its sender did not seal it: the other holders' shares must suffice."""
        key = self.session.pair(self._box_key, self._peers[sender].box, "box", sender, self.name)
        try:
            text = ChaCha20Poly1305(key).decrypt(NONCE, certificates.decoded(box), None)
        except (InvalidTag, MessageError, ValueError):
            return b""
        return text if len(text) == 2 * SHARE_BYTES else b""
