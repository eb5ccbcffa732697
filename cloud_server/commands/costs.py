"""``metafleet costs``: what a fleet has cost by device, what its accuracy has cost, and what a month of it costs.

Heavy modules are imported inside the commands.
"""

from __future__ import annotations

import csv
import io
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cloud_server.devices.devices import JSON
from fleet_core.base import processes, terminal
from fleet_core.base.errors import ConfigError, StateError

if TYPE_CHECKING:
    from cloud_server.reports.html_costs import Pricing
    from cloud_server.results.bill import Month
    from cloud_server.results.result import Result

RUN = Annotated[Path, typer.Argument(metavar="FLEET|DIR", help="A fleet, or the folder of a run.")]
TARIFF = Annotated[Path | None, typer.Option("--tariff", metavar="FILE", help="Prices and battery; default: "
                                                                             "tariff.toml in the folder.")]
PER_MONTH = Annotated[float | None, typer.Option("--per-month", metavar="ROUNDS_PER_DAY", min=1e-6, max=1e6,
                                                 help="Also show a month with this many rounds a day.")]
BATTERY = Annotated[float | None, typer.Option("--battery-wh", metavar="WH", min=1e-6, max=1e9,
                                               help="Capacity of a device's battery, instead of the tariff's.")]


def costs(
    folder: RUN,
    as_csv: Annotated[bool, typer.Option("--csv", help="Print CSV: one line for each device, absent figures "
                                                       "empty.")] = False,
    as_json: JSON = False,
    tariff: TARIFF = None,
    per_month: PER_MONTH = None,
    battery_wh: BATTERY = None,
) -> None:
    """Show what a run cost: bytes, operations and joules by device, cost against accuracy, and the price of a month."""
    from cloud_server.results import outcome, result

    if as_csv and as_json:
        raise ConfigError("--csv and --json", expected="one of them")
    chosen = pricing(folder, tariff, per_month, battery_wh)
    run = result.parse(outcome.of_run(folder))
    if not run.costs:
        raise StateError("has no costs by device: no device is enrolled, or an older version wrote it",
                         where=str(folder), expected="a fleet with devices")
    if as_json:
        return terminal.show(_facts(run, chosen))
    print(_csv(run, chosen) if as_csv else "\n\n".join(_blocks(run, chosen)), end="" if as_csv else "\n")
    if not as_csv and per_month is None:
        processes.say("the price of a month: --per-month ROUNDS_PER_DAY, with prices from tariff.toml (docs/costs.md)")


def pricing(folder: Path, named: Path | None, per_month: float | None, battery_wh: float | None) -> Pricing:
    """Raises ConfigError."""
    from cloud_server.records import tariff
    from cloud_server.reports.html_costs import Pricing

    return Pricing(tariff.of_folder(folder, named), per_month, battery_wh)


def _months(run: Result, chosen: Pricing) -> list[Month]:
    from cloud_server.results import bill

    if chosen.rounds_per_day is None:
        return []
    return bill.months(run, chosen.rounds_per_day, chosen.tariff, chosen.battery_wh)


def _facts(run: Result, chosen: Pricing) -> dict[str, Any]:
    """Plain JSON; absent figures are left out."""
    from cloud_server.results import bill, result

    scores = {one.device: one for one in run.personalization}
    devices = []
    for one in run.costs:
        scored = scores.get(one.device)
        accuracy = {stage: score.accuracy for stage in ("before", "after") if scored and (score := scored.at(stage))}
        devices.append({**result.plain(one), "accuracy": accuracy})
    facts: dict[str, Any] = {
        "devices": devices, "rounds": run.closed,
        "reached": [result.plain(one) for one in bill.reached(run)],
        "fleet": result.plain(run.totals) if run.totals else {},
    }
    if chosen.rounds_per_day is not None:
        facts["months"] = [result.plain(one) for one in _months(run, chosen)]
        facts["rounds_per_day"] = chosen.rounds_per_day
    return facts if chosen.tariff is None else {**facts, "tariff": result.plain(chosen.tariff)}


def _blocks(run: Result, chosen: Pricing) -> Iterator[str]:
    """The tables of the terminal."""
    from cloud_server.reports import cost_tables
    from cloud_server.results import bill

    yield f"{terminal.columns(*cost_tables.device_table(run))}\n{cost_tables.NOTE}"
    yield terminal.columns(*cost_tables.kind_table(run.costs))
    heads, rows = cost_tables.reached_table(bill.reached(run))
    if rows:
        yield terminal.columns(heads, rows)
    months = _months(run, chosen)
    if months and chosen.rounds_per_day:
        note = cost_tables.month_note(chosen.rounds_per_day, chosen.tariff)
        yield f"{terminal.columns(*cost_tables.month_table(months, chosen.tariff))}\n{note}"


def _csv(run: Result, chosen: Pricing) -> str:
    """One line per device."""
    months = {one.device: one for one in _months(run, chosen) if one.device is not None}
    scores = {one.device: one for one in run.personalization}
    lines = []
    for one in run.costs:
        line: dict[str, Any] = {"device": one.device, "new": int(one.new), "rounds": one.rounds,
                                "skipped": one.skipped or 0}
        for counter in ("payload", "mqtt", "wire"):
            line |= _two(counter, getattr(one, f"{counter}_bytes"))
        for kind in ("graph", "model", "update", "serve"):
            line |= _two(kind, (one.kinds or {}).get(kind))
        energy, scored = one.energy_j, scores.get(one.device)
        line |= {"flops": one.flops, "joules": energy.value if energy else None,
                 "joules_missing": energy.missing if energy else None, "joules_by": energy.source if energy else None}
        line |= {key: getattr(one, key) for key in ("cpu_s", "peak_mib", "connected_s", "retransmitted_bytes")}
        for stage in ("before", "after"):
            score = scored.at(stage) if scored else None
            line[f"accuracy_{stage}"] = score.accuracy if score else None
        month = months.get(one.device)
        if chosen.rounds_per_day is not None:
            keys = ("counter", "up", "down", "joules", "battery_days", "fee", "data", "energy", "money")
            line |= {f"month_{key}": getattr(month, key) if month else None for key in keys}
        lines.append(line)
    return _lines(lines)


def _two(name: str, moved: Any) -> dict[str, Any]:
    return {f"{name}_{way}": getattr(moved, way) if moved else None for way in ("up", "down")}


def _lines(lines: Sequence[dict[str, Any]]) -> str:
    out = io.StringIO()
    writer = csv.DictWriter(out, list(lines[0]), lineterminator="\n")
    writer.writeheader()
    writer.writerows(lines)
    return out.getvalue()
