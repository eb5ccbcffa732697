"""What each device has cost over its whole life, from the ledger."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from cloud_server.figures.scores import AMOUNT
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_sums import Bytes, Joules


@dataclass(frozen=True, kw_only=True)
class DeviceCosts:
    """new: it did not train. rounds: number of rounds in which its update was counted. skipped: number of these in
    which the update was too small to send; None if there are none. kinds: payload by kind of traffic. MQTT and wire
    bytes belong to a connection, so they have no kinds. cpu_s, peak_mib: of the agent and its children. connected_s:
    with a connection. retransmitted_bytes: sent again by the device. Figures that were not reported are None."""

    device: str
    new: bool
    rounds: int = field(metadata=AMOUNT)
    skipped: int | None = field(default=None, metadata=AMOUNT)
    payload_bytes: Bytes | None = None
    mqtt_bytes: Bytes | None = None
    wire_bytes: Bytes | None = None
    kinds: Mapping[str, Bytes] | None = None
    flops: float | None = field(default=None, metadata=AMOUNT)
    energy_j: Joules | None = None
    cpu_s: float | None = field(default=None, metadata=AMOUNT)
    peak_mib: float | None = field(default=None, metadata=AMOUNT)
    connected_s: float | None = field(default=None, metadata=AMOUNT)
    retransmitted_bytes: int | None = field(default=None, metadata=AMOUNT)


def of_ledger(ledger: Ledger) -> tuple[DeviceCosts, ...]:
    """The costs of every device, by name; also of revoked ones, whose bytes were paid for."""
    volume, kinds, joules = ledger.volume("device"), ledger.payload(), ledger.joules("device")
    flops, counted, usage = ledger.flops(by="device"), ledger.counted_updates(), ledger.usage()
    costs = []
    for device in ledger.devices():
        moved = volume.get(device.name)
        rounds, skipped, _ = counted.get(device.name, (0, 0, 0))
        costs.append(DeviceCosts(
            device=device.name, new=device.new, rounds=rounds, skipped=skipped or None,
            payload_bytes=moved.payload if moved else None, mqtt_bytes=moved.mqtt if moved else None,
            wire_bytes=moved.wire if moved else None, kinds=kinds.get(device.name), flops=flops.get(device.name),
            energy_j=joules.get(device.name), **usage.get(device.name, {}),
        ))
    return tuple(costs)
