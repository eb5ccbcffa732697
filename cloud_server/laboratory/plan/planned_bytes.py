"""The payload bytes of a run, by kind and transfer, before it starts.

A codec's output depends on the values, so sizes come from encoding arrays of the layout: with normally distributed
values, or scaled to the sizes of updates and models in a rehearsal.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from cloud_server.broadcast.delta_chain import NAMED_BYTES, DeltaChain, Holder, chain_of
from cloud_server.broadcast.served_model import asked_next
from cloud_server.laboratory.plan.experiment import PLAIN
from cloud_server.laboratory.plan.model_downloads import per_device_bytes
from cloud_server.ledger.ledger_sums import Bytes
from cloud_server.records.checkpoint import Checkpoint, Delta
from cloud_server.records.fleet_settings import LinkSection
from fleet_core.algorithms.interface import Method, ServerState
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.base.trees import Params
from fleet_core.model import payloads
from fleet_core.model.layout import Layout
from fleet_core.protocol import topics

EXAMPLE_NAME, EXAMPLE_ID = "device-1", "0" * 32
UNLIKE = 32  # bytes by which two examples differ
PACKET_BYTES = 1 + 3 + 2 + 2 + 1  # PUBLISH at QoS 1 in MQTT 5: type, length, topic's length, identifier, properties
ACKNOWLEDGED_BYTES = 4  # PUBACK
SEGMENT_BYTES, HEADER_BYTES = 1448, 52  # of TCP in an Ethernet frame: payload, and its headers with IP's and timestamps
MESSAGES = Bytes(up=1120, down=1430)
"""Wire bytes of an asked device in a round beside models, updates and their chunks' headers: manifest, offer, reports,
presence, answers. Measured on eight devices with short updates (heart beats in benchmarks/cost/live.json)."""
MANIFEST = Bytes(up=78, down=613)
"""The part of ``MESSAGES`` that also reaches a device that is not asked: the manifest (benchmarks/cost/beside.py) and
its acknowledgement, each with 22 bytes of TLS and TCP's headers."""


@dataclass(frozen=True, kw_only=True)
class Asked:
    """A run to plan. layout: of the model. devices: number that train. newcomers: number that are only served. cohort:
    0 for all. serve_every: 0 if no model is served. graph_bytes: of the graph bundle, None if it is not made yet.
    first: the first weights, None for any. seed: of the fleet. Codecs may be ``none``, as in experiments. labels: of
    the devices' training samples; empty if they are unknown. moving: the arrays that rounds train. schedule: whether
    rounds may freeze more of them. ``auto`` is planned as the largest codec that it may choose, a schedule as if it
    froze none."""

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


@dataclass(frozen=True)
class Rehearsed:
    """Mean bytes of an update, and of a model after the first, in a rehearsal. about: its rounds, devices and
    samples."""

    up: int
    down: int
    about: str


Transfers = list[tuple[float, int]]
"""(how many, bytes of each)."""


class Sizes:
    """The sizes of a run's payloads. rehearsed: None for sizes of noise."""

    def __init__(self, asked: Asked, rehearsed: Rehearsed | None = None):
        self._asked, self._method, self._rehearsed = asked, asked.method, rehearsed
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
            "update": ([(asked.rounds * self.cohort, self._update)], []),
        }
        if asked.serve_every:
            found["serve"] = ([], self._served(math.ceil(asked.rounds / asked.serve_every)))
            found["graph"] = ([], [(everyone, asked.graph_bytes)] if asked.graph_bytes is not None else [])
        return found

    def _models(self) -> Transfers:
        """The training models, and what devices alone receive. A model without arrays is fetched once."""
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
        """The training models if some arrays are frozen. Round 1 sends the model whole. Later rounds send a delta, or
        the values of the moving arrays to a device that was not asked in the previous round: on average a share 1 -
        cohort/devices of those that are asked. A device that never had a model gets it whole."""
        asked, groups, cohort = self._asked, self._method.down, self.cohort
        later, absent = asked.rounds - 1, 1 - cohort / asked.devices
        lacking = 0.0 if asked.codec_down == PLAIN else later * cohort * absent
        values = asked.codec_down if asked.codec_down == PLAIN else "fp32"
        until = asked.serve_every or asked.rounds  # from then on every device has had a served model
        fresh = sum(cohort * absent**k for k in range(1, min(asked.rounds, until)))
        return [
            (cohort, self._first()),
            (later * cohort - max(lacking, fresh), self._change(groups, self._part)),
            (max(0.0, lacking - fresh), self._size(values, groups, self._part)),
            (fresh, self._size(values, groups)),
        ]

    @cached_property
    def _chains(self) -> list[tuple[int, DeltaChain, list[tuple[float, str]]]]:
        """(number of equal rounds, their chain as announced, [(share of the asked devices, the model that they hold)]).
        A share p = cohort/devices was asked in the previous round, (1 - p) p in the round before that, and so on."""
        asked, p, chunk = self._asked, self.cohort / self._asked.devices, LinkSection().chunk_bytes
        size, whole = self._change(self._method.down), self._size("fp32", self._method.down)
        newest, links, models = self._delta(1, None, self._first()), tuple[Delta, ...](), list[str]()
        sizes: list[int] | None = None
        found: list[tuple[int, DeltaChain, list[tuple[float, str]]]] = []
        for number in range(1, asked.rounds + 1):
            closed = Checkpoint(number - 1, ServerState({}, {}), deltas=links)
            chain = chain_of(closed, newest, whole, asked.chunk_bytes or chunk)
            settled = sizes == (sizes := [len(one.data) for one in chain.earlier])  # later chains have the same sizes
            holders = [((1 - p) ** missed * p, model) for missed, model in enumerate(reversed(models))]
            holders.append(((1 - p) ** len(models), ""))
            found.append((asked.rounds - number + 1 if settled else 1, self._named(chain, holders), holders))
            if settled:
                break
            models.append(newest.model)
            newest, links = self._delta(number + 1, newest.model, size), chain.kept
        return found

    def _named(self, chain: DeltaChain, holders: list[tuple[float, str]]) -> DeltaChain:
        """The chain as it is announced: without links if some device also needs the whole model, and the links save
        less than naming them in all manifests costs."""
        lacking = [(share, Holder(held, chains=True)) for share, held in holders if held != chain.newest.base]
        saved = self.cohort * sum(share * (chain.whole - sum(chain.fetched({one.base}))) for share, one in lacking)
        both = 1 - (1 - sum(share for share, one in lacking if not chain.suits(one))) ** self.cohort
        named = saved > both * NAMED_BYTES * (self._asked.devices + self._asked.newcomers)
        return chain if named else replace(chain, earlier=())

    def _passing(self, number: int) -> float:
        """Number of devices that get the training model of round ``number`` as a part of the chain to the next one."""
        if number >= self._asked.rounds:
            return 0.0
        _, chain, holders = self._chains[min(number, len(self._chains) - 1)]
        return self.cohort * sum(share for share, held in holders if chain.follows({held}))

    def _delta(self, number: int, base: str | None, size: int) -> Delta:
        """A delta of ``size`` bytes that differ from those of any other."""
        data = self._rng.bytes(min(size, UNLIKE)).ljust(size, b"\0")
        return Delta(number, self._rng.bytes(16).hex(), self._asked.codec_down, base, data)

    def _served(self, times: int) -> Transfers:
        """Every served model in the form with the fewest bytes, as ``broadcast.served_model`` publishes it. Assumes
        that each differs from the previous one, and that the codec is fine enough."""
        asked, method, cohort = self._asked, self._method, self.cohort
        everyone = asked.devices + asked.newcomers
        delta, part = self._change(method.shared, self._part), self._size("fp32", method.shared, self._part)
        first = self._size("fp32", method.shared)
        same = method.server.serves == "model" or (method.server.serves == "mean" and cohort == asked.devices)
        sent: Transfers = []
        for number in range(times):
            share = asked_next(asked.cohort, asked.devices, number == times - 1)
            whole = part if number else first
            ways: list[Transfers] = [[(everyone, whole)]]
            if same:  # the next training model; others get a delta only if all its groups are served
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

    @property
    def _update(self) -> int:
        if self._rehearsed is not None:
            return self._rehearsed.up
        return self._size(self._asked.codec_up, self._method.shared, self._part)

    def _change(self, groups: tuple[str, ...], layout: Layout | None = None) -> int:
        """Bytes of a model as a delta."""
        size = self._size(self._asked.codec_down, groups, layout)
        return size if self._rehearsed is None else round(size * self._rehearsed.down / self._noise)

    @cached_property
    def _noise(self) -> int:
        """Bytes of a model of noise as a delta."""
        return self._size(self._asked.codec_down, self._method.down)

    def _first(self) -> int:
        first = self._asked.first
        if first is None or self._asked.codec_down == PLAIN:
            return self._size("fp32" if self._asked.codec_down != PLAIN else PLAIN, self._method.down)
        groups = {group: first[group] for group in self._method.down if group in first}
        return len(payloads.encode_whole(groups, self._asked.seed, self._wire.others(self._method.down))[1])

    def _size(self, codec: str, groups: tuple[str, ...], layout: Layout | None = None) -> int:
        """Bytes of these groups, encoded. layout: by default that of the whole model."""
        if codec == PLAIN:
            return 4 * (layout or self._wire).parameters(groups)
        return len(payloads.encode(codec, self._params(groups, layout)))

    def _params(self, groups: tuple[str, ...], layout: Layout | None = None) -> Params:
        return {
            group: {name: self._rng.normal(size=array.shape) for name, array in named.items()}
            for group, named in (layout or self._wire).zeros(groups).items()
        }

    def chunk_overhead(self) -> Bytes:
        """MQTT bytes of all chunks besides their payload; an acknowledgement counts in the other direction."""
        topic_up = topics.upload(self._asked.fleet, EXAMPLE_NAME, self._asked.rounds, 0)
        topic_down = topics.chunk(self._asked.fleet, EXAMPLE_ID, 0)
        up, down = (sum(n * math.ceil(size / self._asked.chunk_bytes) for ways in self.transfers().values()
                        for n, size in ways[way]) for way in (0, 1))
        return Bytes(up=round(up * (PACKET_BYTES + len(topic_up)) + down * ACKNOWLEDGED_BYTES),
                     down=round(down * (PACKET_BYTES + len(topic_down)) + up * ACKNOWLEDGED_BYTES))

    def on_wire(self, payload: Bytes) -> Bytes:
        """All bytes of the link: ``payload`` with the chunks' headers, TCP and IP of full segments and of one
        acknowledgement for two of them, and the messages of every round."""
        asked, chunks = self._asked, self.chunk_overhead()
        idle = asked.devices + asked.newcomers - self.cohort
        up, down = payload.up + chunks.up, payload.down + chunks.down
        header = HEADER_BYTES / SEGMENT_BYTES

        return Bytes(
            up=round(up + header * (up + down / 2)) + asked.rounds * (self.cohort * MESSAGES.up + idle * MANIFEST.up),
            down=round(down + header * (down + up / 2))
            + asked.rounds * (self.cohort * MESSAGES.down + idle * MANIFEST.down),
        )
