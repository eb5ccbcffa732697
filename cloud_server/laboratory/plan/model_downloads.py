"""Counts the bytes that the devices of a run fetch, as in a fleet: they follow from the models that the devices hold
when a round opens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from cloud_server.broadcast.delta_chain import DeltaChain, Holder, chain_of
from cloud_server.broadcast.models_down import Encoded
from cloud_server.broadcast.served_model import fetched_bytes, same_rest
from cloud_server.laboratory.plan.experiment import PLAIN, Experiment, Run
from cloud_server.laboratory.plan.frozen_arrays import RunArrays
from cloud_server.records.checkpoint import Checkpoint, Delta, ServedModel
from cloud_server.records.fleet_settings import LinkSection
from fleet_core.base import trees
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.base.trees import Params
from fleet_core.model import payloads
from fleet_core.protocol import cohort, messages
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import PerDevice

SINCE = "model_since"
"""Fact of a checkpoint: the first of the last rounds that had the same training model."""


@dataclass(frozen=True, eq=False)
class Sent:
    """A round's model. decoded: float32, as devices hold it. lost: what a lossy codec left out, or None. size: bytes of
    the delta to the last round's model, or of the whole model. chain: the deltas that lead to it; None if all devices
    fetch the same. left, moving: as in ``models_down.Encoded``. same: it equals the last round's model."""

    decoded: Params
    lost: Params | None
    scalars: Mapping[str, float]
    size: int
    chain: DeltaChain | None = None
    left: float | None = None
    same: bool = False
    moving: Moving = EVERYTHING


class ModelDownloads:
    """The downloads of one run. names: names of its devices. arrays, past: the trained arrays and the figures of the
    closed rounds; the caller adds to them after each round."""

    def __init__(
        self, experiment: Experiment, run: Run, names: Sequence[str], arrays: RunArrays,
        past: Sequence[Mapping[str, Any]],
    ):
        self._cohort, self._seed, self._names, self._method = experiment.cohort, run.seed, names, run.method
        self._plain = experiment.codecs(run.method)["down"] == PLAIN
        self._arrays, self._past = arrays, past
        self._last_asked, self._asked_until = dict[str, int](), 0

    def asked(self, number: int) -> list[str]:
        """The devices that round ``number`` asks."""
        return cohort.select(self._seed, number, self._names, self._cohort)

    def chain(self, before: Checkpoint, made: Encoded) -> DeltaChain | None:
        """The chain to the model ``made`` for the round after ``before``; None if every device holds the last round's
        model because it was asked in that round."""
        some = 0 < self._cohort < len(self._names)
        if not some or not self._method.down or not made.moving.everything:
            return None
        base = payloads.identity(before.published) if made.delta and before.published is not None else None
        newest = Delta(before.round + 1, payloads.identity(made.decoded), made.codec, base, made.data)
        whole = len(payloads.encode("fp32", made.decoded))
        return chain_of(before, newest, whole, LinkSection().chunk_bytes)

    def of_round(self, sent: Sent, before: Checkpoint) -> int:
        """Bytes to all devices that the round after ``before`` asks. Devices that hold the base fetch the delta,
        devices that hold an earlier model of the chain several deltas, and the others the whole model. A model without
        arrays is fetched once."""
        number = before.round + 1
        asked = self.asked(number)
        if not self._method.down:
            return sum(name not in self._last_before(number) for name in asked) * sent.size
        if not sent.moving.everything:
            return self._of_a_part(sent, before)
        if sent.chain is None:
            return 0 if sent.same else len(asked) * sent.size
        return sum(sum(chain.fetched(held)) for chain, held in self._ways(number, sent.chain).values())

    def of_served(self, made: ServedModel, closed: Checkpoint, following: Sent | None) -> int:
        """Bytes to all devices for a model that is served after ``closed``. following: the next round's training model,
        which the devices of that round fetch first; None after the last round."""
        number = closed.round + 1
        asked = [] if following is None else self.asked(number)
        ways = {} if following is None or following.chain is None else self._ways(number, following.chain)
        passing = (name for name, (announced, held) in ways.items() if announced.follows(held))
        with_rest = self._with_rest(closed, made)
        if following is not None and same_rest(made.moving, self._shared(following.decoded), made.weights):
            with_rest |= set(asked)
        return fetched_bytes(made, closed.answers, self._names, {*self._holding(closed), *passing}, asked, with_rest)

    def _of_a_part(self, sent: Sent, before: Checkpoint) -> int:
        """Bytes if some arrays are frozen: a device that lacks the delta's base fetches the values of the other arrays
        if it holds the frozen ones, else the whole model."""
        asked = self.asked(before.round + 1)
        held = set(asked) if _answers_with_published(before) else self._holding(before)
        lacking = set(asked) - held
        resting = sum(self._has_rest(name, sent, before) for name in lacking)
        parts = (resting, sent.moving.of(sent.decoded)), (len(lacking) - resting, sent.decoded)
        values = sum(count * self._values(weights) for count, weights in parts if count)
        return (0 if sent.same else (len(asked) - len(lacking)) * sent.size) + values

    def _values(self, weights: Params) -> int:
        if self._plain:
            return 4 * sum(int(array.size) for named in weights.values() for array in named.values())
        return len(payloads.encode("fp32", weights))

    def _has_rest(self, name: str, sent: Sent, before: Checkpoint) -> bool:
        """Whether a device holds the frozen arrays when a round opens: in the training model of an earlier round, or in
        its served model. A served model counts if it was published before the last round closed, because the device has
        fetched it by then."""
        since, answers = self._arrays.since(), before.answers
        if self._last_before(before.round + 1).get(name, 0) >= since:
            return True
        if answers is not None and answers.round < before.round:
            return same_rest(sent.moving, answers.weights, sent.decoded)
        return since == 1 and any("serve_bytes" in row for row in self._past[:-1])

    def _with_rest(self, closed: Checkpoint, made: ServedModel) -> set[str]:
        """The devices whose training model has the same frozen arrays as the served model ``made``."""
        if not same_rest(made.moving, self._shared(closed.published or {}), made.weights):
            return set()
        since = self._arrays.since()
        return {name for name, number in self._last_before(closed.round + 1).items() if number >= since}

    def _shared(self, groups: Params) -> Params:
        return trees.only(groups, self._method.shared)

    def _holding(self, closed: Checkpoint) -> set[str]:
        """The devices asked in the last round, or in an earlier round with the same training model."""
        return {name for number in range(model_since(closed), closed.round + 1) for name in self.asked(number)}

    def _ways(self, number: int, chain: DeltaChain) -> dict[str, tuple[DeltaChain, set[str]]]:
        """Asked device -> (the chain as it is announced, ids of the models that the device holds when the round opens):
        the training model of the last round that asked it, which an aggregator knows, and its last two served
        models."""
        models = {one.round - 1: one.base or "" for one in (*chain.earlier, chain.newest)}
        before = self._last_before(number)
        trained = {name: models.get(before.get(name, 0), "") for name in self.asked(number)}
        lacking = [Holder(base, chains=True) for base in trained.values() if base != chain.newest.base]
        if not chain.pays(lacking, len(self._names)):
            chain = replace(chain, earlier=())
        served = [str(row["served_id"]) for row in self._past[: number - 2] if "served_id" in row][-2:]
        return {name: (chain, {base, *served}) for name, base in trained.items()}

    def _last_before(self, number: int) -> Mapping[str, int]:
        """Device -> the last round before ``number`` in which it was asked."""
        while self._asked_until < number - 1:
            self._asked_until += 1
            self._last_asked |= dict.fromkeys(self.asked(self._asked_until), self._asked_until)
        return self._last_asked


def model_since(closed: Checkpoint) -> int:
    """The first of the last rounds that had the same training model."""
    return int(closed.facts.get(SINCE, closed.round))


def per_device_bytes(per_device: Mapping[str, Params], *, plain: bool) -> int:
    """Bytes of the models that are made for single devices in a round, and of the list of them that each device
    fetches. plain: count only the values, four bytes each."""
    if plain or not per_device:
        return sum(
            4 * array.size for groups in per_device.values() for named in groups.values() for array in named.values()
        )
    blobs = tuple(Blob.of(payloads.encode("fp32", groups), LinkSection().chunk_bytes) for groups in per_device.values())
    return sum(blob.size for blob in blobs) + len(per_device) * len(
        messages.encode(PerDevice(tuple(per_device), blobs))
    )


def _answers_with_published(before: Checkpoint) -> bool:
    """Whether the training model of the last round was also the served model when that round opened."""
    served = before.answers
    return served is not None and served.round == before.round - 1 and (
        payloads.identity(served.weights) == payloads.identity(before.published or {}))
