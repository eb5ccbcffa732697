"""The section of the report about costs: the devices' bills, cost against accuracy, and a month's costs."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape

from cloud_server.figures.charts import Line, legend, line_chart, ticks
from cloud_server.figures.formatting import bytes_text, share_text
from cloud_server.figures.html_elements import text_table
from cloud_server.records.tariff import MB, Tariff
from cloud_server.reports import cost_tables
from cloud_server.reports.cost_tables import Rows
from cloud_server.results import bill
from cloud_server.results.result import Result


@dataclass(frozen=True)
class Pricing:
    """What the section is computed with. rounds_per_day: None for no table of months. battery_wh: instead of the
    tariff's."""

    tariff: Tariff | None = None
    rounds_per_day: float | None = None
    battery_wh: float | None = None


def section(run: Result, pricing: Pricing) -> str:
    """Empty for a result without costs by device."""
    if not run.costs:
        return ""
    lines = bill.reached(run)
    parts = ["<h2>Costs by device</h2>", _note(cost_tables.NOTE), _table(cost_tables.device_table(run)),
             _details("Payload by kind, joules by phase", cost_tables.kind_table(run.costs)), _chart(lines)]
    if pricing.rounds_per_day:
        months = bill.months(run, pricing.rounds_per_day, pricing.tariff, pricing.battery_wh)
        parts += ["<h2>Costs per month</h2>", _note(cost_tables.month_note(pricing.rounds_per_day, pricing.tariff)),
                  _table(cost_tables.month_table(months, pricing.tariff))]
    return "".join(parts)


def _chart(lines: Sequence[bill.Reached]) -> str:
    """Accuracy over the payload bytes of all devices up to a round; empty with fewer than two evaluated rounds."""
    points = [(one.payload_bytes / MB, one.accuracy) for one in lines
              if one.payload_bytes is not None and one.accuracy is not None]
    if len(points) < 2:
        return ""
    line = Line("mean accuracy", "one", points)
    low = max(0.0, min(accuracy for _, accuracy in points) - 0.02)
    text = f"{share_text(points[-1][1])} after {bytes_text(points[-1][0] * MB)} of payload."
    chart = line_chart("cost", "Accuracy against payload bytes", text, [line], y_ticks=ticks(low, 1.0),
                       y_text="{:.2f}".format, x_label="payload of all devices, MB", x_text="{:g}".format)
    heads, rows = cost_tables.reached_table(lines)
    return ('<div class="charts"><figure><figcaption>Accuracy against cost</figcaption>'
            f"{legend([line])}{chart}<details><summary>The figures as a table</summary>{text_table(heads, rows)}"
            "</details></figure></div>")


def _note(text: str) -> str:
    return f'<p class="note">{escape(text)}.</p>'


def _table(table: tuple[tuple[str, ...], Rows]) -> str:
    return text_table(*table)


def _details(summary: str, table: tuple[tuple[str, ...], Rows]) -> str:
    return f"<details><summary>{escape(summary)}</summary>{text_table(*table)}</details>"
