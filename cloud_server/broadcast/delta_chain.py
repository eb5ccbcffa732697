"""The chain: the deltas of the last rounds. A device that missed some applies them in order and needs no whole model.

Fleet and simulation share it. The chain depends on the closed rounds alone, so a restarted aggregator names the same
one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass
from functools import cached_property

from cloud_server.records.checkpoint import Checkpoint, Delta
from fleet_core.protocol.chain_message import MAX_LINKS, Chain
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import ModelRef

LINK_BYTES = 270
"""Bytes that a link costs besides its delta: its entry in the list, and the MQTT bytes to fetch one more blob."""
NAMED_BYTES = 190
"""Size of a blob's description in the manifest. Every device that is on receives the manifest."""


@dataclass(frozen=True)
class Holder:
    """What the aggregator knows of a device. base: id of the training model that the device holds, or empty. chains:
    whether it can apply a chain of deltas."""

    base: str
    chains: bool


@dataclass(frozen=True)
class DeltaChain:
    """The ways to get a round's model. newest: the delta for devices that hold its base. earlier: the deltas that lead
    to that base, oldest first; empty if the whole model is cheaper. whole: bytes of the model in fp32. chunk_bytes:
    size of a chunk."""

    newest: Delta
    earlier: tuple[Delta, ...]
    whole: int
    chunk_bytes: int

    @property
    def kept(self) -> tuple[Delta, ...]:
        """The deltas that the next checkpoint keeps: those that will pay if the next delta is as large as this one."""
        return _paying((*self.earlier, self.newest), len(self.newest.data), self.whole)

    @cached_property
    def links(self) -> tuple[ModelRef, ...]:
        return tuple(
            ModelRef(one.model, Blob.of(one.data, self.chunk_bytes), one.codec, one.base, round=one.round)
            for one in self.earlier
        )

    @cached_property
    def listed(self) -> bytes:
        """The blob that lists the links; empty without any."""
        return Chain(self.links).encode() if self.links else b""

    def follows(self, held: Collection[str]) -> bool:
        """Whether a device that holds the models ``held`` can start from one of the ``earlier`` deltas."""
        return self.newest.base not in held and self._start(held) is not None

    def suits(self, holder: Holder) -> bool:
        """Whether a device that lacks the base of the newest delta can use the chain, by what the aggregator knows of
        it."""
        return holder.chains and (self.newest.base is None or self._start((holder.base,)) is not None)

    def pays(self, lacking: Collection[Holder], listening: int) -> bool:
        """Whether the manifest should name the chain. lacking: the asked devices that lack the base. If the chain suits
        all of them, it replaces the whole model; otherwise the manifest names both. listening: number of devices that
        receive the manifest."""
        known = [(one, count) for one, count in Counter(lacking).items() if one.chains]
        saved = sum(count * (self.whole - sum(self.fetched((one.base,)))) for one, count in known)
        return bool(self.earlier) and saved > (0 if all(map(self.suits, lacking)) else NAMED_BYTES * listening)

    def fetched(self, held: Collection[str]) -> list[int]:
        """Bytes of each blob that a device fetches for the model, if it holds the models ``held``."""
        if self.newest.model in held:
            return []
        if self.newest.base is None or self.newest.base in held:
            return [len(self.newest.data)]
        listed = [len(self.listed)] if self.earlier else []
        start = self._start(held)
        if start is None:
            return [*listed, self.whole]
        newest = () if self.newest.model == self.newest.base else (self.newest,)
        return [*listed, *(len(one.data) for one in (*self.earlier[start:], *newest))]

    def _start(self, held: Collection[str]) -> int | None:
        """Index in ``earlier`` of the first delta that a device with the models ``held`` fetches; None if no delta
        starts from one of them."""
        begins = (k for k, one in enumerate(self.earlier) if one.base is None or one.base in held)
        return max(begins, default=None)


def chain_of(before: Checkpoint, newest: Delta, whole: int, chunk_bytes: int) -> DeltaChain:
    """The chain of the round after ``before``; without earlier deltas if those of the checkpoint do not lead to the
    newest delta's base."""
    known = before.deltas if before.deltas and before.deltas[-1].model == newest.base else ()
    return DeltaChain(newest, _paying(known, len(newest.data), whole), whole, chunk_bytes)


def _paying(deltas: tuple[Delta, ...], newest_bytes: int, whole: int) -> tuple[Delta, ...]:
    """The last ``deltas`` that together with the newest one cost less than the whole model."""
    spent, first = newest_bytes, len(deltas)
    for one in reversed(deltas[-MAX_LINKS:]):
        spent += len(one.data) + LINK_BYTES
        if spent >= whole:
            break
        first -= 1
    return deltas[first:]
