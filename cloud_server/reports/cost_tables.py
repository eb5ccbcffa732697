"""The bill as rows of text, for the terminal and the report: devices, kinds of payload, accuracy reached, months."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from cloud_server.figures.formatting import (
    ABSENT,
    bytes_text,
    flops_text,
    joules_text,
    missing_text,
    phase_text,
    seconds_text,
    share_text,
)
from cloud_server.ledger.ledger_sums import Bytes, Joules
from cloud_server.records.tariff import Tariff
from cloud_server.results.bill import DAYS, Month, Reached
from cloud_server.results.device_costs import DeviceCosts
from cloud_server.results.result import Result

COUNTERS = (("payload", "payload_bytes"), ("MQTT", "mqtt_bytes"), ("wire", "wire_bytes"))
KINDS = ("graph", "model", "update", "serve")
NOTE = "up / down in bytes; MQTT and wire bytes are a connection's, so only payload has kinds"
FLEET = "fleet"

Rows = list[tuple[str, ...]]


def device_table(run: Result) -> tuple[tuple[str, ...], Rows]:
    """(heads, rows) of every device, and of the fleet as the last row."""
    some = any(one.skipped for one in run.costs)
    heads = ("device", "rounds", *["skipped"] * some, *(f"{name} up / down" for name, _ in COUNTERS), "FLOP", "joules",
             "CPU", "peak memory", "connected", "sent again", "accuracy")
    scores = {one.device: one for one in run.personalization}
    rows = []
    for one in run.costs:
        scored = scores.get(one.device)
        stages = (scored.before, scored.after) if scored else (None, None)
        accuracy = _change(*(stage.accuracy if stage else None for stage in stages))
        rows.append((one.device + " (new)" * one.new, str(one.rounds), *[str(one.skipped or 0)] * some, *_figures(one),
                     *_usage([one]), accuracy))
    pooled, sums = run.evaluated, run.totals
    reported = [one for one in run.costs if one.payload_bytes is not None]
    before = pooled.before.accuracy if pooled and pooled.before else None
    accuracy = _change(before, pooled.accuracy if pooled else None)
    rounds, skipped = (str(sum(getattr(one, key) or 0 for one in run.costs)) for key in ("rounds", "skipped"))
    return heads, [*rows, (FLEET, rounds, *[skipped] * some, *_figures(sums), *_usage(reported), accuracy)]


def skipped_text(run: Result) -> str:
    """How many updates were too small to send; empty for none."""
    known = [one for one in (run.folded, *run.rounds) if one is not None]
    skipped, counted = (sum(getattr(one, key) or 0 for one in known) for key in ("skipped", "participants"))
    return f"{skipped} of {counted} updates were too small to send (skip_below)" if skipped else ""


def folded_text(run: Result) -> str:
    """Which rounds are in sums only; empty for none."""
    if run.folded is None:
        return ""
    return f"{run.folded.text[:1].upper()}{run.folded.text[1:]}; charts and tables of rounds begin after them."


def _figures(one: Any) -> tuple[str, ...]:
    """one: DeviceCosts or Sums, or None."""
    return (
        *(_moved(getattr(one, key, None)) for _, key in COUNTERS), _flops(getattr(one, "flops", None)),
        _joules(getattr(one, "energy_j", None)),
    )


def _usage(costs: Sequence[DeviceCosts]) -> tuple[str, ...]:
    """Sums over the devices, and the largest peak; a dash where a device lacks the figure."""
    texts: dict[str, Callable[[float], str]] = {
        "cpu_s": seconds_text, "peak_mib": lambda mib: f"{mib:.0f} MiB", "connected_s": seconds_text,
        "retransmitted_bytes": bytes_text,
    }
    cells = []
    for name, text in texts.items():
        found = [getattr(one, name) for one in costs]
        known = None not in found and bool(found)
        cells.append(text(max(found) if name == "peak_mib" else sum(found)) if known else ABSENT)
    return tuple(cells)


def kind_table(costs: Sequence[DeviceCosts]) -> tuple[tuple[str, ...], Rows]:
    """(heads, rows): payload by kind of traffic, and joules by phase with their source."""
    phases = list(dict.fromkeys(phase for one in costs if one.energy_j for phase in one.energy_j.phases))
    heads = ("device", *KINDS, *(f"{phase} J" for phase in phases), *(["joules by"] if phases else []))
    return heads, [
        (one.device, *(_moved((one.kinds or {}).get(kind)) for kind in KINDS),
         *(_phase(one.energy_j, phase) for phase in phases), *([_source(one.energy_j)] if phases else []))
        for one in costs
    ]


def reached_table(lines: Sequence[Reached]) -> tuple[tuple[str, ...], Rows]:
    """(heads, rows) of the evaluated rounds."""
    heads = ("round", "accuracy", "payload so far", "wire so far", "FLOP so far", "joules so far")
    return heads, [
        (str(one.round), share_text(one.accuracy), _bytes(one.payload_bytes), _bytes(one.wire_bytes),
         _flops(one.flops), ABSENT if one.joules is None else phase_text(one.joules))
        for one in lines if one.accuracy is not None
    ]


def month_table(months: Sequence[Month], tariff: Tariff | None) -> tuple[tuple[str, ...], Rows]:
    """(heads, rows) of a month of each device and of the fleet."""
    money = (f"fee {tariff.currency}", "data", "energy", f"sum {tariff.currency}") if tariff else ()
    rows = []
    for one in months:
        row = (one.device or FLEET, one.counter or ABSENT, _bytes(one.up), _bytes(one.down),
               ABSENT if one.joules is None else phase_text(one.joules),
               ABSENT if one.battery_days is None else f"{one.battery_days:,.0f}")
        rows.append((*row, *map(_money, (one.fee, one.data, one.energy, one.money))) if tariff else row)
    return ("device", "counter", "up", "down", "joules", "battery days", *money), rows


def month_note(rounds_per_day: float, tariff: Tariff | None) -> str:
    """What the table of months is based on."""
    text = (f"{DAYS} days at {rounds_per_day:g} rounds a day, each like the average round so far; joules of the work "
            "alone, without the idle draw")
    return text if tariff is None else f"{text}; prices: {tariff.source}"


def planned_table(found: Sequence[Any]) -> tuple[tuple[str, ...], Rows]:
    """(heads, rows) of ``planned_costs.Planned``."""
    heads = ("run", "devices", "asked", "rounds", "payload up / down", "wire up / down", "FLOP", "joules",
             "computing")
    return heads, [
        (one.label, str(one.devices), str(one.cohort), str(one.rounds), _moved(one.payload_bytes),
         _moved(one.wire_bytes), _flops(one.flops), ABSENT if one.joules is None else phase_text(one.joules),
         ABSENT if one.seconds is None else seconds_text(one.seconds))
        for one in found
    ]


def _moved(moved: Bytes | None) -> str:
    if moved is None:
        return ABSENT
    return f"{bytes_text(moved.up)} / {bytes_text(moved.down)}{missing_text(moved.missing)}"


def _bytes(count: float | None) -> str:
    return ABSENT if count is None else bytes_text(count)


def _flops(count: float | None) -> str:
    return ABSENT if count is None else flops_text(count)


def _joules(energy: Joules | None) -> str:
    return ABSENT if energy is None else joules_text(energy) + missing_text(energy.missing)


def _phase(energy: Joules | None, phase: str) -> str:
    return ABSENT if energy is None or phase not in energy.phases else phase_text(energy.phases[phase])


def _source(energy: Joules | None) -> str:
    return ABSENT if energy is None else energy.source


def _change(before: float | None, after: float | None) -> str:
    if after is None:
        return share_text(before)
    return share_text(after) if before is None else f"{share_text(before)} → {share_text(after)}"


def _money(value: float | None) -> str:
    return ABSENT if value is None else f"{value:,.2f}" if value >= 1 or not value else f"{value:.2g}"
