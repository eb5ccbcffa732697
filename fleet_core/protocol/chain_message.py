"""The chain of a round's model: the deltas of earlier rounds, for a device that missed some of them."""

from __future__ import annotations

from dataclasses import dataclass, field

from fleet_core.base.errors import MessageError
from fleet_core.protocol import messages
from fleet_core.protocol.chunks import MAX_BLOB_BYTES
from fleet_core.protocol.round_messages import ModelRef

MAX_LINKS = 64
MAX_CHAIN_BYTES = 1 << 24


@dataclass(frozen=True)
class Chain:
    """The models of the last rounds, oldest first, each as a delta to the previous model. A device begins after the
    last model that it holds. The first link may be first weights, for a device without a model.

    The chain is a separate blob, as ``PerDevice`` is: only devices that need it fetch it.
    """

    links: tuple[ModelRef, ...] = field(metadata={"max_length": MAX_LINKS})

    def encode(self) -> bytes:
        """JSON under zstd: 75 bytes for a link whose delta is one chunk."""
        return messages.encode(self, packed=True)

    @staticmethod
    def decode(data: bytes, base: str | None) -> Chain:
        """Raises MessageError for a chain that is malformed, inconsistent or does not lead to ``base``."""
        chain = messages.decode(Chain, data, limit=MAX_CHAIN_BYTES)
        models, bases = [link.model for link in chain.links], [link.base for link in chain.links]
        if models != [*bases[1:], base]:
            raise MessageError("a chain with a missing link", expected=f"one that leads to {base}")
        for link in chain.links:
            link.blob.check(MAX_BLOB_BYTES)
        return chain
