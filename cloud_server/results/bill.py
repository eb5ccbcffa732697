"""The bill of a run: what a month of such rounds costs each device, and what an accuracy has cost.

A month has 30 days, and costs the run's average round times the number of rounds in a month. The average includes what
is sent once, such as the graph. Only joules of work count, because a device draws idle power without the fleet too. A
sum that lacks reports is too low, so nothing is computed from it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from cloud_server.ledger.ledger_sums import Bytes, Joules
from cloud_server.records.tariff import J_PER_WH, Tariff
from cloud_server.results.device_costs import DeviceCosts
from cloud_server.results.result import Result

DAYS = 30


@dataclass(frozen=True, kw_only=True)
class Month:
    """A month of a device, or of the fleet (``device`` None). up, down: bytes of ``counter``. battery_days: until the
    work alone has used up the battery; of the fleet: until the first device's is used up. Money is in the tariff's
    currency: fee, data and energy, and their sum if each of them that has a price is known."""

    device: str | None
    counter: str | None = None
    up: float | None = None
    down: float | None = None
    joules: float | None = None
    battery_days: float | None = None
    fee: float | None = None
    data: float | None = None
    energy: float | None = None
    money: float | None = None


@dataclass(frozen=True, kw_only=True)
class Reached:
    """A round's accuracy (mean over the devices that train; None if not evaluated), and what all devices had cost up to
    it. A running sum ends at the first round that lacks a figure."""

    round: int
    accuracy: float | None = None
    payload_bytes: int | None = None
    wire_bytes: int | None = None
    flops: float | None = None
    joules: float | None = None


def billed(payload: Bytes | None, mqtt: Bytes | None, wire: Bytes | None) -> tuple[Bytes, str] | None:
    """The counter that is nearest to what a network operator counts and lacks no report, with its name; None if
    nothing was counted."""
    counters = ((wire, "wire"), (mqtt, "MQTT"), (payload, "payload"))
    return next(((moved, name) for moved, name in counters if moved is not None and not moved.missing), None)


def complete_joules(energy: Joules | None) -> float | None:
    """The joules of the working phases; None if they lack reports."""
    return None if energy is None or energy.missing else energy.value


def months(run: Result, rounds_per_day: float, tariff: Tariff | None, battery_wh: float | None = None) -> list[Month]:
    """A month of every device that has reported, and of the fleet as the last one; empty before the first round is
    closed. battery_wh: instead of the tariff's."""
    if not run.closed or not run.costs:
        return []
    factor = rounds_per_day * DAYS / run.closed
    capacity = battery_wh or (tariff.battery_wh if tariff else None)
    found = [_month(one, factor, tariff, capacity) for one in run.costs if one.payload_bytes is not None]
    return [*found, _fleet(found)]


def _month(one: DeviceCosts, factor: float, tariff: Tariff | None, battery_wh: float | None) -> Month:
    moved = billed(one.payload_bytes, one.mqtt_bytes, one.wire_bytes)
    up, down = (factor * moved[0].up, factor * moved[0].down) if moved else (None, None)
    spent = complete_joules(one.energy_j)
    joules = None if spent is None else factor * spent
    days = DAYS * battery_wh * J_PER_WH / joules if battery_wh and joules else None
    month = Month(device=one.device, counter=moved[1] if moved else None, up=up, down=down, joules=joules,
                  battery_days=days)
    return month if tariff is None else _priced(month, tariff)


def _priced(month: Month, tariff: Tariff) -> Month:
    data = None if month.up is None or month.down is None else tariff.month_of_data(month.up, month.down)
    energy = None if month.joules is None else tariff.energy(month.joules)
    known = [tariff.monthly_fee]
    known += [part for part in (data, energy) if part is not None]
    priced = 1 + (tariff.data(0, 0) is not None) + (tariff.energy(0) is not None)
    return Month(**{**vars(month), "fee": tariff.monthly_fee, "data": data, "energy": energy,
                    "money": sum(known) if len(known) == priced else None})


def _fleet(found: Sequence[Month]) -> Month:
    """Sums over the devices; a sum that lacks a device is None."""
    counters, days = {one.counter for one in found}, [one.battery_days for one in found]
    same = len(counters) == 1
    return Month(
        device=None, counter=counters.pop() if same else None, up=_sum(one.up for one in found) if same else None,
        down=_sum(one.down for one in found) if same else None, joules=_sum(one.joules for one in found),
        battery_days=min((each for each in days if each is not None), default=None),
        fee=_sum(one.fee for one in found), data=_sum(one.data for one in found),
        energy=_sum(one.energy for one in found), money=_sum(one.money for one in found),
    )


def _sum(values: Iterable[float | None]) -> float | None:
    listed = list(values)
    known = [value for value in listed if value is not None]
    return sum(known) if len(known) == len(listed) else None


def reached(run: Result) -> list[Reached]:
    """Cost against accuracy: one line per closed round that is kept. The sums include the folded rounds."""
    lines, payload, wire = list[Reached](), Running(), Running()
    flops, joules = Running(), Running()
    if (before := run.folded) is not None:
        payload.add(_both(before.payload_bytes))
        wire.add(_both(before.wire_bytes))
        flops.add(before.flops)
        joules.add(complete_joules(before.energy_j))
    for one in run.rounds:
        lines.append(Reached(
            round=one.round, accuracy=one.accuracy.mean if one.accuracy else None,
            payload_bytes=_whole(payload.add(_both(one.payload_bytes))),
            wire_bytes=_whole(wire.add(_both(one.wire_bytes))), flops=flops.add(one.flops),
            joules=joules.add(complete_joules(one.energy_j)),
        ))
    return lines


class Running:
    """A running sum; None from the first missing value on."""

    def __init__(self) -> None:
        self._sum: float | None = 0.0

    def add(self, value: float | None) -> float | None:
        self._sum = None if self._sum is None or value is None else self._sum + value
        return self._sum


def _both(moved: Bytes | None) -> int | None:
    return None if moved is None or moved.missing else moved.up + moved.down


def _whole(value: float | None) -> int | None:
    return None if value is None else int(value)
