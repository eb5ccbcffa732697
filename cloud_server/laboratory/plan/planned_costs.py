"""The predicted cost of a run: payload bytes, overhead of the chunks, operations, joules, computing time.

Sizes are measured by encoding arrays of the layout with normally distributed values, since a codec's output depends on
the values. It is assumed that every device that is asked delivers, and that a fleet's devices have samples for whole
batches, so that operations are an upper limit. Manifests, reports, presence and repeated messages are not planned.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np

from cloud_server.broadcast.delta_chain import NAMED_BYTES, DeltaChain, Holder, chain_of
from cloud_server.broadcast.served_model import asked_next
from cloud_server.figures.formatting import bytes_text
from cloud_server.laboratory.plan.experiment import PLAIN
from cloud_server.laboratory.plan.model_downloads import per_device_bytes
from cloud_server.ledger.ledger_sums import Bytes
from cloud_server.records.checkpoint import Checkpoint, Delta
from cloud_server.records.fleet_settings import LinkSection
from fleet_core.algorithms.interface import Method, ServerState
from fleet_core.base.moving import EVERYTHING, Moving
from fleet_core.base.trees import Params
from fleet_core.board.profile import Profile
from fleet_core.model import choose_codec, payloads
from fleet_core.model.layout import Layout
from fleet_core.power.energy_model import BoardModel
from fleet_core.power.radio import radio_of
from fleet_core.protocol import topics

EXAMPLE_NAME, EXAMPLE_ID = "device-1", "0" * 32
UNLIKE = 32  # random bytes at the start of an example, so that no two are equal
PER_CLASS = 64  # assumed samples of each class on a device
PACKET_BYTES = 1 + 3 + 2 + 2 + 1  # PUBLISH at QoS 1 in MQTT 5: type, length, topic's length, identifier, properties
ACKNOWLEDGED_BYTES = 4  # PUBACK


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A run to plan. layout: the model's layout. devices: number of devices that train. newcomers: number of devices
    that only get served models. cohort: 0 for all. codec_up, codec_down: also ``none``, as in experiments; ``auto`` is
    planned as the dearest codec that it may choose. serve_every: 0 if no model is served. graph_bytes: size of the
    graph bundle, None if it is not made yet. first: the first weights, None for random ones. seed: the fleet's seed.
    labels: labels of each device's training samples; empty for ``PER_CLASS`` of each class. moving: the arrays that
    rounds train. schedule: whether a schedule may freeze more of them; it is planned as if it froze none."""

    label: str
    method: Method
    hyper: Any
    layout: Layout
    rounds: int
    devices: int
    newcomers: int = 0
    cohort: int = 0
    codec_up: str = "fp32"
    codec_down: str = "fp32"
    serve_every: int = 0
    graph_bytes: int | None = None
    first: Params | None = None
    seed: int = 0
    chunk_bytes: int = 0
    fleet: str = ""
    labels: Sequence[Any] = ()
    moving: Moving = EVERYTHING
    schedule: bool = False


@dataclass(frozen=True, kw_only=True)
class Planned:
    """chunk_bytes: MQTT headers and acknowledgements of all chunks; None in a simulation. seconds: computing time on
    the board, with devices in parallel. joules: of all devices together. auto: what is assumed for the codec ``auto``
    and a schedule, or None; if given, payload_bytes is an upper limit. absent: figure -> why it is not planned."""

    label: str
    rounds: int
    devices: int
    cohort: int
    payload_bytes: Bytes
    kinds: Mapping[str, Bytes]
    chunk_bytes: Bytes | None = None
    flops: float | None = None
    seconds: float | None = None
    joules: float | None = None
    board: str | None = None
    auto: str | None = None
    absent: Mapping[str, str] = field(default_factory=dict)


def planned(asked: Asked, board: Profile | None) -> Planned:
    """The costs of a run. board: gives seconds and joules; None leaves them out."""
    auto = _auto(asked)
    asked = _in_place_of_auto(asked, 0)
    sizes = _Sizes(asked)
    kinds = sizes.kinds()
    payload = _sum(kinds)
    absent = {} if asked.graph_bytes is not None or not asked.serve_every else {
        "graph": "it is not made yet: metafleet init"}
    each, why = _flops(asked)
    if why:
        absent["flops"] = why
    flops = None if each is None else each * sizes.cohort * asked.rounds
    joules, seconds = None, None
    if board is None:
        absent |= dict.fromkeys(("joules", "seconds"), "no board is named: --board NAME")
    else:
        joules = _joules(board, flops, payload, absent)
        seconds = _seconds(board, None if each is None else each * asked.rounds, absent)
    return Planned(
        label=asked.label, rounds=asked.rounds, devices=asked.devices, cohort=sizes.cohort, payload_bytes=payload,
        kinds=kinds, chunk_bytes=sizes.chunk_overhead() if asked.chunk_bytes else None, flops=flops, seconds=seconds,
        joules=joules, board=board.name if board else None, auto=auto, absent=absent,
    )


def _in_place_of_auto(asked: Asked, place: int) -> Asked:
    """The run with a fixed codec for each ``auto``. place: index of the codec among those that ``auto`` may choose, the
    dearest first."""
    keeps = asked.method.client.keeps
    return replace(asked, codec_up=choose_codec.possible("up", asked.codec_up, keeps)[place],
                   codec_down=choose_codec.possible("down", asked.codec_down, keeps)[place])


def _auto(asked: Asked) -> str | None:
    """A sentence on what is assumed for ``auto``, with the lower limit; None if nothing is assumed."""
    resting = "freeze = auto is planned as if no array came to rest, an upper limit" if asked.schedule else None
    if choose_codec.AUTO not in (asked.codec_up, asked.codec_down):
        return resting
    dear, cheap = (_in_place_of_auto(asked, place) for place in (0, -1))
    least = _sum(_Sizes(cheap).kinds())
    codecs = (f"auto is planned as {dear.codec_up} up and {dear.codec_down} down, an upper limit; with "
              f"{cheap.codec_up} and {cheap.codec_down} in every round the payload is {bytes_text(least.up)} up and "
              f"{bytes_text(least.down)} down")
    return "; ".join(filter(None, (codecs, resting)))


def _sum(kinds: Mapping[str, Bytes]) -> Bytes:
    return Bytes(up=sum(one.up for one in kinds.values()), down=sum(one.down for one in kinds.values()))


Transfers = list[tuple[float, int]]
"""(number of transfers, bytes of each)."""


class _Sizes:
    def __init__(self, asked: Asked):
        self._asked, self._method = asked, asked.method
        self._wire = asked.layout.extended(self._method.down, self._method.shared)
        self._part = self._wire.part(asked.moving)
        self._rng = np.random.default_rng(0)
        self.cohort = min(asked.cohort or asked.devices, asked.devices)

    def kinds(self) -> dict[str, Bytes]:
        """Kind of traffic -> payload."""
        return {
            kind: Bytes(up=round(sum(n * size for n, size in up)), down=round(sum(n * size for n, size in down)))
            for kind, (up, down) in self.transfers().items()
        }

    def transfers(self) -> dict[str, tuple[Transfers, Transfers]]:
        """Kind of traffic -> (up, down)."""
        asked, everyone = self._asked, self._asked.devices + self._asked.newcomers
        found: dict[str, tuple[Transfers, Transfers]] = {
            "model": ([], self._models()),
            "update": ([(asked.rounds * self.cohort, self._size(asked.codec_up, self._method.shared, self._part))], []),
        }
        if asked.serve_every:
            found["serve"] = ([], self._served(math.ceil(asked.rounds / asked.serve_every)))
            found["graph"] = ([], [(everyone, asked.graph_bytes)] if asked.graph_bytes is not None else [])
        return found

    def _models(self) -> Transfers:
        """The training models, and the models for single devices. A model without arrays is fetched once."""
        asked, groups, cohort = self._asked, self._method.down, self.cohort
        own: Transfers = []
        if self._method.per_device:
            devices = {f"{EXAMPLE_NAME}{k}": self._params(self._method.per_device) for k in range(cohort)}
            own = [(asked.rounds, per_device_bytes(devices, plain=asked.codec_down == PLAIN))]
        if not groups:
            return [(min(asked.devices, asked.rounds * cohort), self._size(asked.codec_down, groups)), *own]
        if not asked.moving.everything:
            return [*self._part_models(), *own]
        if asked.codec_down == PLAIN:
            return [(asked.rounds * cohort, self._size(PLAIN, groups)), *own]
        sent: dict[int, float] = {}
        for times, chain, holders in self._chains:
            for share, held in holders:
                for size in chain.fetched({held}):
                    sent[size] = sent.get(size, 0.0) + times * share * cohort
        return [*((count, size) for size, count in sent.items()), *own]

    def _part_models(self) -> Transfers:
        """The training models if some arrays are frozen: round 1 sends the whole model, later rounds a delta. A device
        that was not asked in the round before gets the values of the moving arrays, on average a share
        1 - cohort/devices of the asked devices. A device that never had a model gets the whole."""
        asked, groups, cohort = self._asked, self._method.down, self.cohort
        later, absent = asked.rounds - 1, 1 - cohort / asked.devices
        lacking = 0.0 if asked.codec_down == PLAIN else later * cohort * absent
        values = asked.codec_down if asked.codec_down == PLAIN else "fp32"
        until = asked.serve_every or asked.rounds  # from then on every device has had a served model
        fresh = sum(cohort * absent**k for k in range(1, min(asked.rounds, until)))
        return [
            (cohort, self._first()),
            (later * cohort - max(lacking, fresh), self._size(asked.codec_down, groups, self._part)),
            (max(0.0, lacking - fresh), self._size(values, groups, self._part)),
            (fresh, self._size(values, groups)),
        ]

    @cached_property
    def _chains(self) -> list[tuple[int, DeltaChain, list[tuple[float, str]]]]:
        """(number of rounds like this one, the chain that it announces, [(share of the asked devices, model that they
        hold)]). A share p = cohort/devices was asked in the previous round, (1 - p) p in the one before that, etc."""
        asked, p, chunk = self._asked, self.cohort / self._asked.devices, LinkSection().chunk_bytes
        size, whole = (self._size(codec, self._method.down) for codec in (asked.codec_down, "fp32"))
        newest, links, models = self._delta(1, None, self._first()), tuple[Delta, ...](), list[str]()
        sizes: list[int] | None = None
        found: list[tuple[int, DeltaChain, list[tuple[float, str]]]] = []
        for number in range(1, asked.rounds + 1):
            closed = Checkpoint(number - 1, ServerState({}, {}), deltas=links)
            chain = chain_of(closed, newest, whole, asked.chunk_bytes or chunk)
            settled = sizes == (sizes := [len(one.data) for one in chain.earlier])  # then later chains are equal too
            holders = [((1 - p) ** missed * p, model) for missed, model in enumerate(reversed(models))]
            holders.append(((1 - p) ** len(models), ""))
            found.append((asked.rounds - number + 1 if settled else 1, self._named(chain, holders), holders))
            if settled:
                break
            models.append(newest.model)
            newest, links = self._delta(number + 1, newest.model, size), chain.kept
        return found

    def _named(self, chain: DeltaChain, holders: list[tuple[float, str]]) -> DeltaChain:
        """The chain as it is announced. Earlier links are left out if they save fewer bytes than naming them in all
        manifests costs, in case some device needs the whole model too."""
        lacking = [(share, Holder(held, chains=True)) for share, held in holders if held != chain.newest.base]
        saved = self.cohort * sum(share * (chain.whole - sum(chain.fetched({one.base}))) for share, one in lacking)
        both = 1 - (1 - sum(share for share, one in lacking if not chain.suits(one))) ** self.cohort
        named = saved > both * NAMED_BYTES * (self._asked.devices + self._asked.newcomers)
        return chain if named else replace(chain, earlier=())

    def _passing(self, number: int) -> float:
        """How many devices fetch the training model of this round on their way to that of the next round."""
        if number >= self._asked.rounds:
            return 0.0
        _, chain, holders = self._chains[min(number, len(self._chains) - 1)]
        return self.cohort * sum(share for share, held in holders if chain.follows({held}))

    def _delta(self, number: int, base: str | None, size: int) -> Delta:
        """An example of ``size`` bytes that differs from all others."""
        data = self._rng.bytes(min(size, UNLIKE)).ljust(size, b"\0")
        return Delta(number, self._rng.bytes(16).hex(), self._asked.codec_down, base, data)

    def _served(self, times: int) -> Transfers:
        """Every served model, published as ``broadcast.served_model`` does: in the possible way that takes the fewest
        bytes. It is assumed that each model differs from the last one and that the codec is fine enough."""
        asked, method, cohort = self._asked, self._method, self.cohort
        everyone = asked.devices + asked.newcomers
        delta, part = (self._size(codec, method.shared, self._part) for codec in (asked.codec_down, "fp32"))
        first = self._size("fp32", method.shared)
        same = method.server.serves == "model" or (method.server.serves == "mean" and cohort == asked.devices)
        sent: Transfers = []
        for number in range(times):
            share = asked_next(asked.cohort, asked.devices, number == times - 1)
            whole = part if number else first
            ways: list[Transfers] = [[(everyone, whole)]]
            if same:  # it is the next training model; others fetch a delta only if that has no other groups
                free = share * asked.devices
                fetch = (1 - share) * cohort if method.down == method.shared else 0.0
                ways.append([(fetch, delta), (everyone - free - fetch, whole)])
            trained: Transfers = [(cohort, delta), (everyone - cohort, whole)]
            ways += [trained] if set(method.shared) <= set(method.down) else []
            ways += [[(everyone, delta)]] if number else []
            cheapest = min(ways, key=lambda way: sum(n * size for n, size in way))
            if cheapest is trained and method.down:
                hold = cohort + self._passing((number + 1) * asked.serve_every)
                cheapest = [(hold, delta), (everyone - hold, whole)]
            sent += cheapest
        return sent

    def _first(self) -> int:
        first = self._asked.first
        if first is None or self._asked.codec_down == PLAIN:
            return self._size("fp32" if self._asked.codec_down != PLAIN else PLAIN, self._method.down)
        groups = {group: first[group] for group in self._method.down if group in first}
        return len(payloads.encode_whole(groups, self._asked.seed, self._wire.others(self._method.down))[1])

    def _size(self, codec: str, groups: tuple[str, ...], layout: Layout | None = None) -> int:
        """Bytes of these groups, encoded. layout: None for all arrays."""
        if codec == PLAIN:
            return 4 * (layout or self._wire).parameters(groups)
        return len(payloads.encode(codec, self._params(groups, layout)))

    def _params(self, groups: tuple[str, ...], layout: Layout | None = None) -> Params:
        return {
            group: {name: self._rng.normal(size=array.shape) for name, array in named.items()}
            for group, named in (layout or self._wire).zeros(groups).items()
        }

    def chunk_overhead(self) -> Bytes:
        """MQTT bytes of all chunks besides their payload. An acknowledgement counts in the opposite direction."""
        topic_up = topics.upload(self._asked.fleet, EXAMPLE_NAME, self._asked.rounds, 0)
        topic_down = topics.chunk(self._asked.fleet, EXAMPLE_ID, 0)
        up, down = (sum(n * math.ceil(size / self._asked.chunk_bytes) for ways in self.transfers().values()
                        for n, size in ways[way]) for way in (0, 1))
        return Bytes(up=round(up * (PACKET_BYTES + len(topic_up)) + down * ACKNOWLEDGED_BYTES),
                     down=round(down * (PACKET_BYTES + len(topic_down)) + up * ACKNOWLEDGED_BYTES))


def _flops(asked: Asked) -> tuple[float | None, str]:
    """(operations of one device in one round, why they are unknown)."""
    try:
        from fleet_core.learning import models
        from fleet_core.learning.layer_flops import round_flops
        from fleet_core.training.round_plans import Participant, plan_of
    except ModuleNotFoundError as error:
        return None, f"'{error.name}' is not installed"
    if asked.method.adaptation == "fedproto" and not asked.labels:
        return None, "a round goes over all samples of a device, whose number is unknown"
    model = models.build(asked.layout)
    labels = asked.labels or [np.tile(np.arange(len(asked.layout.classes)), PER_CLASS)]
    counts = []
    for y in labels:
        plan = plan_of(asked.method, Participant({}, y, np.asarray(y), np.random.default_rng(0)), asked.hyper)
        counts.append(round_flops(asked.method, model, asked.layout, asked.hyper, plan, asked.moving))
    known = [count for count in counts if count is not None]
    if not known:
        return None, f"the operations of the model {asked.layout.model} are not counted"
    return sum(known) / len(known), ""


def _joules(board: Profile, flops: float | None, payload: Bytes, absent: dict[str, str]) -> float | None:
    """Joules of computing and sending, without idle time. A board without a radio constant is assumed to use Wi-Fi."""
    model, sender = BoardModel(board), radio_of("wifi", board)
    compute = None if flops is None else model.compute_j(flops)
    radio = sender.joules(payload.up, payload.down)
    if compute is None or radio is None:
        lacking = [f"{term}: {why}" for term, why in model.absent_terms.items() if term != "idle"]
        absent["joules"] = "; ".join(lacking) or absent["flops"]
        return None
    return compute + radio


def _seconds(board: Profile, flops: float | None, absent: dict[str, str]) -> float | None:
    """Computing time. flops: operations of one device in all rounds."""
    speed = board.compute.effective_flop_per_s if board.compute.source else None
    if flops is None or not speed:
        absent["seconds"] = absent["flops"] if flops is None else "no cited effective FLOP/s"
        return None
    return flops / speed
