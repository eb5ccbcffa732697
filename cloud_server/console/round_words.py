"""A round in plain words: which devices were asked, the outcome for each, what was sent and why, and the result."""

from __future__ import annotations

from typing import Any

from cloud_server.console.device_view import update_facts
from cloud_server.figures.formatting import (
    count_text,
    joules_text,
    seconds_text,
    share_text,
    spread_text,
    traffic_text,
)
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Round, RoundArrays, RoundCodec, Update
from cloud_server.reports import array_tables
from cloud_server.results import result
from fleet_core.base import terminal
from fleet_core.base.errors import ConfigError, shortened

SET = "as fleet.toml says"
MOST_ROWS = 2000
NAMES = 12
ORDER = ("refused", "late", "silent", "awaited", "skipped", "counted")


def explained(ledger: Ledger, number: int) -> dict[str, Any]:
    """``sentences`` about the round, and ``devices``: what became of each that was asked. Raises ConfigError if there
    is no such round."""
    found = ledger.rows(Round, round=number)
    if not found:
        raise ConfigError(f"there is no round {number}")
    row, updates = found[0], ledger.rows(Update, round=number)
    sentences = [*_asked(row), *_became(row, updates), *_sent(ledger, number), *_came_out(ledger, row)]
    return {"round": number, "status": row.status, "sentences": sentences, "devices": _rows(row, updates)[:MOST_ROWS]}


def _asked(row: Round) -> list[str]:
    asked = count_text(len(row.cohort), "device")
    of = f" of {row.members} enrolled" if row.members else ""
    began = f"The round opened on {terminal.date(row.opened_at)} and asked {asked}{of}."
    note = f" ({row.note})" if row.note else ""
    if row.status == "open":
        return [began, "It is still open."]
    after = "" if row.seconds is None else f" after {seconds_text(row.seconds)}"
    end = "It was closed" if row.status == "closed" else "It was given up, and nothing in it counts"
    return [began, f"{end}{after}{note}."]


def _became(row: Round, updates: list[Update]) -> list[str]:
    counted = [one for one in updates if one.status == "counted"]
    skipped = [one.device for one in counted if one.skipped]
    told = [f"{count_text(len(counted), 'device')} {'was' if len(counted) == 1 else 'were'} counted: "
            f"{_names([one.device for one in counted])}."] if counted else ["No update was counted."]
    if skipped:
        told.append(f"{_names(skipped)} changed too little to send anything, and counted as no change.")
    for status, word in (("refused", "was refused"), ("late", "came too late")):
        reasons: dict[str, list[str]] = {}
        for one in updates:
            if one.status == status:
                reasons.setdefault(one.reason, []).append(one.device)
        told += [f"The update of {_names(names)} {word}{f': {reason}' if reason else ''}."
                 for reason, names in reasons.items()]
    silent = sorted(set(row.cohort) - {one.device for one in updates})
    if silent:
        told.append(f"{'Nothing has come yet' if row.status == 'open' else 'Nothing came'} from {_names(silent)}.")
    return told


def _sent(ledger: Ledger, number: int) -> list[str]:
    what = {"down": "Models went to the devices", "up": "Updates came back"}
    told = [f"{what[one.way]} as {one.codec}, {one.reason or SET}." for one in ledger.rows(RoundCodec, round=number)]
    for arrays in ledger.rows(RoundArrays, round=number):
        frozen = f"{array_tables.names(arrays.frozen)} stayed as they were" if arrays.frozen else "Every array moved"
        told.append(f"{frozen}, {arrays.reason or SET}.")
    return told


def _came_out(ledger: Ledger, row: Round) -> list[str]:
    figures = next(iter(result.round_figures(ledger, range(row.round, row.round + 1))), None)
    if figures is None:
        return []
    before = next((one.loss for one in ledger.rows(Round, round=row.round - 1)), None)
    told = []
    if figures.loss is not None:
        than = "" if before is None else f", after {before:.4f} in the round before"
        told.append(f"The training loss was {figures.loss:.4f}{than}.")
    if figures.task is not None:
        told.append(f"The devices that train then answered with {figures.task.text}.")
    if figures.accuracy is not None:
        a = figures.accuracy
        told.append(f"The devices that train then answered with accuracy {share_text(a.mean)}, the worst with "
                    f"{share_text(a.worst)}, the best with {share_text(a.best)}.")
    if figures.payload_bytes is not None:
        told.append(f"Payload: {', '.join(traffic_text(figures.payload_bytes).split('  '))}.")
    spread = spread_text(figures.energy_j) if figures.energy_j else ""
    told.append(f"Energy: {joules_text(figures.energy_j)}{f' ({spread})' if spread else ''}.")
    return told


def _rows(row: Round, updates: list[Update]) -> list[dict[str, Any]]:
    status = "awaited" if row.status == "open" else "silent"
    without = [{"device": name, "status": status} for name in set(row.cohort) - {one.device for one in updates}]
    listed = [{"device": one.device, "after_s": one.received_at - row.opened_at, **update_facts(one)}
              for one in updates]
    return sorted([*listed, *without], key=lambda one: (ORDER.index(one["status"]), one["device"]))


def _names(names: list[str]) -> str:
    return ", ".join(shortened(sorted(names), NAMES))
