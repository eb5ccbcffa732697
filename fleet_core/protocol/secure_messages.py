"""The messages of secure aggregation (``fleet_core.privacy.secure_sum``), in the order in which they are sent.

A device's parts go on the topics of its update: ``k`` (SignedKeys), ``s`` (SealedShares), ``u`` (Revealed). The
aggregator's are ``SecureStep``s in signed messages on ``dn``.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet_core.protocol.messages import whole

SESSION = {"pattern": r"[0-9a-f]{32}"}
X25519 = {"pattern": r"[0-9a-f]{64}"}
SHARE = {"max_length": 400}
"""Base64 of one share, or of two sealed ones."""
NAME = {"pattern": r"[A-Za-z0-9_-]{1,64}"}
LEAST = 3
"""The fewest devices of a sum: a sum of two tells each of them the other's update."""
MOST_NEIGHBOURS = 128
MOST_SAMPLES = 1_000_000
KEYS, SHARES, REVEALED = "k", "s", "u"


@dataclass(frozen=True)
class SecureRules:
    """How the updates of a round are summed. A device does not take part under rules that it does not know.

    session: random, new whenever the round is opened. threshold: t, the share of a device's holders whose shares give
    its secrets; above one half. least: the fewest devices of a sum. neighbours: devices with which each has a mask; 0
    for all others. exponent: values are whole multiples of 2^exponent. bits: of a masked value. authority: certificate
    of the fleet's authority, DER in base64. next_authority: of its successor, while devices change over to it.
    most_samples: an update is scaled by its device's share of this many samples; 0 if devices count alike.
    """

    session: str = field(metadata=SESSION)
    threshold: float = field(metadata={"above": 0.5, "max": 1})
    least: int = field(metadata=whole(1_000_000, LEAST))
    neighbours: int = field(metadata=whole(MOST_NEIGHBOURS))
    exponent: int = field(metadata={"min": -60, "max": 60})
    bits: int = field(metadata={"choices": (16, 32)})
    authority: str = field(metadata={"max_length": 8192})
    next_authority: str = field(default="", metadata={"max_length": 8192})
    most_samples: int = field(default=0, metadata={**whole(MOST_SAMPLES), "sparse": True})

    def weight(self, samples: int) -> float:
        """The share by which a device's update is scaled; 1 for all if devices count alike."""
        return min(1.0, samples / self.most_samples) if self.most_samples else 1.0


@dataclass(frozen=True)
class SignedKeys:
    """A device's public X25519 keys of one session, in hex: mask, from which masks are made; box, with which shares are
    sealed. certificate: the device's, DER in base64. signature: by its key over ``secure_sum.to_sign``."""

    session: str = field(metadata=SESSION)
    device: str = field(metadata=NAME)
    mask: str = field(metadata=X25519)
    box: str = field(metadata=X25519)
    certificate: str = field(metadata={"max_length": 8192})
    signature: str = field(metadata={"max_length": 256})


@dataclass(frozen=True)
class SealedShares:
    """boxes: receiver -> its shares of the sender's two secrets, sealed, in base64."""

    session: str = field(metadata=SESSION)
    boxes: Mapping[str, str] = field(metadata=SHARE)


@dataclass(frozen=True)
class Revealed:
    """The shares that a device reveals, in base64. seeds: device that is there -> share of the seed of its own mask.
    keys: device that is gone -> share of its mask key."""

    session: str = field(metadata=SESSION)
    seeds: Mapping[str, str] = field(metadata=SHARE)
    keys: Mapping[str, str] = field(metadata=SHARE)


@dataclass(frozen=True)
class SecureStep:
    """What the aggregator asks one device for. ``peers``: to seal shares for these, its neighbours. ``boxes``: to mask
    and send its update; sender -> box. ``unmask``: to reveal shares; of its neighbours and itself, those whose masked
    update is there, and those whose is not."""

    session: str = field(metadata=SESSION)
    step: str = field(metadata={"choices": ("peers", "boxes", "unmask")})
    peers: tuple[SignedKeys, ...] = field(default=(), metadata={"max_length": MOST_NEIGHBOURS})
    boxes: Mapping[str, str] = field(default_factory=dict, metadata=SHARE)
    there: tuple[str, ...] = field(default=(), metadata={"max_length": MOST_NEIGHBOURS + 1, **NAME})
    gone: tuple[str, ...] = field(default=(), metadata={"max_length": MOST_NEIGHBOURS + 1, **NAME})
