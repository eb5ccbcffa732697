"""The predicted cost of a run: payload and wire bytes, operations, joules, computing time.

The plan assumes that every asked device delivers, and that a fleet's devices have samples for whole batches, so that
their operations are an upper limit. It leaves out connecting and repeats.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace

import numpy as np

from cloud_server.figures.formatting import bytes_text
from cloud_server.laboratory.plan.planned_bytes import Asked, Rehearsed, Sizes
from cloud_server.ledger.ledger_sums import Bytes
from fleet_core.base.errors import FleetError
from fleet_core.board.profile import Profile
from fleet_core.model import choose_codec
from fleet_core.power.energy_model import BoardModel
from fleet_core.power.radio import radio_of

PER_CLASS = 64  # assumed samples of each class on a device


@dataclass(frozen=True, kw_only=True)
class Planned:
    """wire_bytes: payload, MQTT, TLS, TCP and IP, the messages of rounds from a measured mean. chunk_bytes: the part of
    it that is MQTT headers and acknowledgements of chunks. Both are None in a simulation. seconds: computing time on
    the board, with all devices in parallel. joules: of all devices. auto: what is assumed for the codec ``auto`` and
    for a schedule, which make payload_bytes an upper limit; None without them. sizes: what the sizes of updates and
    models are based on. absent: figure -> why it is not planned."""

    label: str
    rounds: int
    devices: int
    cohort: int
    payload_bytes: Bytes
    kinds: Mapping[str, Bytes]
    wire_bytes: Bytes | None = None
    chunk_bytes: Bytes | None = None
    flops: float | None = None
    seconds: float | None = None
    joules: float | None = None
    board: str | None = None
    auto: str | None = None
    sizes: str = ""
    absent: Mapping[str, str] = field(default_factory=dict)


Rehearse = Callable[[Asked, float], Rehearsed]
"""(a run with its codecs, operations of one device and round) -> sizes of updates and models. Raises FleetError."""


def planned(asked: Asked, board: Profile | None, rehearse: Rehearse | None = None) -> Planned:
    """The costs of a run. board: gives seconds and joules. rehearse: None for sizes of noise."""
    each, why = _flops(asked)
    dear = _in_place_of_auto(asked, 0)
    sizes, about = _sizes(dear, each, rehearse)
    auto = _auto(asked, each, rehearse)
    kinds = sizes.kinds()
    payload = _sum(kinds)
    absent = {} if asked.graph_bytes is not None or not asked.serve_every else {
        "graph": "it is not made yet: metafleet init"}
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
        kinds=kinds, wire_bytes=sizes.on_wire(payload) if asked.chunk_bytes else None,
        chunk_bytes=sizes.chunk_overhead() if asked.chunk_bytes else None, flops=flops, seconds=seconds,
        joules=joules, board=board.name if board else None, auto=auto, sizes=about, absent=absent,
    )


def _sizes(asked: Asked, flops: float | None, rehearse: Rehearse | None) -> tuple[Sizes, str]:
    """The sizes, and what they are based on. flops: of one device and round."""
    noise = "of random values, which compress less than real updates: "
    if rehearse is None:
        return Sizes(asked), noise + "without a rehearsal"
    if flops is None:
        return Sizes(asked), noise + "operations of the model are not counted"
    try:
        rehearsed = rehearse(asked, flops)
    except FleetError as error:
        return Sizes(asked), f"{noise}{error}"
    return Sizes(asked, rehearsed), rehearsed.about


def _in_place_of_auto(asked: Asked, place: int) -> Asked:
    """The run with a fixed codec for each ``auto``. place: index of the codec among those that ``auto`` may choose, the
    largest first."""
    keeps = asked.method.client.keeps
    return replace(asked, codec_up=choose_codec.possible("up", asked.codec_up, keeps)[place],
                   codec_down=choose_codec.possible("down", asked.codec_down, keeps)[place])


def _auto(asked: Asked, flops: float | None, rehearse: Rehearse | None) -> str | None:
    """A text: what is assumed for ``auto``, and the lower limit of the payload."""
    resting = "freeze = auto is planned as if no array came to rest, an upper limit" if asked.schedule else None
    if choose_codec.AUTO not in (asked.codec_up, asked.codec_down):
        return resting
    dear, cheap = (_in_place_of_auto(asked, place) for place in (0, -1))
    least = _sum(_sizes(cheap, flops, rehearse)[0].kinds())
    codecs = (f"auto is planned as {dear.codec_up} up and {dear.codec_down} down, an upper limit; with "
              f"{cheap.codec_up} and {cheap.codec_down} in every round the payload is {bytes_text(least.up)} up and "
              f"{bytes_text(least.down)} down")
    return "; ".join(filter(None, (codecs, resting)))


def _sum(kinds: Mapping[str, Bytes]) -> Bytes:
    return Bytes(up=sum(one.up for one in kinds.values()), down=sum(one.down for one in kinds.values()))


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
    labels = asked.labels or [np.tile(np.arange(len(asked.layout.answers)), PER_CLASS)]
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
