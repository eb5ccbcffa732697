"""Figures as text, for the terminal and the pages: units, digits, and what stands for a missing figure."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from cloud_server.ledger.ledger_sums import Bytes, Joules, PhaseJoules

ABSENT = "—"
NOT_COUNTED = "not counted"
NOT_MEASURED = "not measured"
STAGES = {"before": "not personalized", "fine_tuned": "fine-tuned", "after": "personalized"}
SPELLED = {
    "fedavg": "FedAvg", "pfldyn": "PFLDyn", "avg": "Avg", "p": "P", "per": "Per", "proto": "Proto",
    "maml": "MAML", "fo": "FO", "meta": "Meta",
}  # fmt: skip


def bytes_text(count: float) -> str:
    """Three digits and a decimal unit: 42 B, 4.20 kB, 42.0 MB."""
    return _scaled(count, ("B", "kB", "MB", "GB", "TB"))


def flops_text(count: float) -> str:
    """Three digits and a decimal unit: 4.20 GFLOP."""
    return _scaled(count, ("FLOP", "kFLOP", "MFLOP", "GFLOP", "TFLOP", "PFLOP"))


def joules_text(joules: Joules | None) -> str:
    """For example 42.0 J, or *not measured*."""
    return NOT_MEASURED if joules is None else phase_text(joules.value)


def phase_text(joules: float) -> str:
    """The joules of one phase; in mJ below 0.1 J."""
    return f"{1000 * joules:.2g} mJ" if 0 < joules < 0.0995 else _scaled(joules, ("J", "kJ", "MJ"))


def spread_text(joules: Joules | PhaseJoules) -> str:
    """For example ``31.1 J to 52.9 J``; empty without a spread."""
    if joules.low is None or joules.high is None:
        return ""
    return f"{phase_text(joules.low)} to {phase_text(joules.high)}"


def absent_text(absent: Mapping[str, int] | None, devices: int) -> Iterator[str]:
    """A line for each thing that the joules do not include. devices: number of all devices; a line that concerns fewer
    says how many.
    """
    for reason, count in (absent or {}).items():
        yield f"{reason} ({count} of {devices} devices)" if count < devices else reason


def share_text(share: float | None) -> str:
    """An accuracy or an F1 with three decimals; a dash for None."""
    return ABSENT if share is None else f"{share:.3f}"


def traffic_text(moved: Bytes | None) -> str:
    """For example ``up 4.20 MB  down 4.30 MB``, with the number of missing reports; or *not counted*."""
    if moved is None:
        return NOT_COUNTED
    return f"up {bytes_text(moved.up)}  down {bytes_text(moved.down)}{missing_text(moved.missing)}"


def missing_text(missing: int | None) -> str:
    """How many reports a sum lacks, in brackets; empty if none."""
    return f"  ({missing} report{'s' * (missing > 1)} missing)" if missing else ""


def seconds_text(seconds: float) -> str:
    """For example 2.1 s, 1 min 05 s or 2 h 03 min."""
    if seconds < 59.95:
        return f"{seconds:.1f} s"
    minutes, rest = divmod(round(seconds), 60)
    return f"{minutes} min {rest:02d} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60:02d} min"


def method_text(name: str) -> str:
    """pfldyn-proto → PFLDyn-Proto; names with unknown parts stay as they are."""
    words = name.split("-")
    return "-".join(SPELLED[w] for w in words) if all(w in SPELLED for w in words) else name


def stage_text(stage: str, method: str | None) -> str:
    """A column's heading: "FedAvg, not personalized", "FedAvg fine-tuned", "PFLDyn-Proto personalized"."""
    if method is None:
        return STAGES[stage]
    return f"{method_text(method)}{',' if stage == 'before' else ''} {STAGES[stage]}"


def plain_text(text: str) -> str:
    """Foreign ``text`` on one line, without the characters that control a terminal."""
    return "".join(c if c.isprintable() else "?" for c in text.replace("\n", "; "))


def _scaled(value: float, units: tuple[str, ...]) -> str:
    for unit in units:
        if value < 999.5 or unit == units[-1]:
            whole = value >= 99.95 or (unit == "B" and value == int(value))
            return f"{value:.0f} {unit}" if whole else f"{value:.{2 if value < 9.995 else 1}f} {unit}"
        value /= 1000
    raise AssertionError("units are never empty")


def count_text(number: int, noun: str) -> str:
    """For example ``1 device`` or ``2 devices``."""
    return f"{number} {noun}{'' if number == 1 else 's'}"
