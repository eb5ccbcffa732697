"""Reads the result of a run: the ``result.json`` of a finished run, or the current state of a fleet's ledger."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.ledger import Ledger
from cloud_server.reports import result
from fleet_core.base import schema, storage
from fleet_core.base.errors import StateError
from fleet_core.base.processes import typed

SIMULATION = "simulation"
MAX_RESULT_BYTES = 1 << 28


def of_run(folder: Path) -> dict[str, Any]:
    """The result of a demo or a fleet, in the form of ``result.to_json``. Raises StateError and ConfigError."""
    if not (folder / "result.json").exists():
        return of_fleet(folder)
    outcome = read(folder / "result.json")
    if outcome.get("kind") == SIMULATION:
        raise StateError("is of a simulation", where=str(folder / "result.json"), expected="that of a fleet or a demo",
                         hint=f"metafleet compare {typed(folder)} --out FOLDER")
    problems = result.validate(outcome)
    if problems:
        raise StateError(f"is not a result: {'; '.join(problems[:5])}", where=str(folder / "result.json"))
    return outcome


def of_fleet(folder: Path) -> dict[str, Any]:
    """The result of a fleet so far, from its ledger. Raises ConfigError and StateError."""
    made = Fleet.load(folder)
    with Ledger(made.ledger_path, create=False) as ledger:
        return result.to_json(result.build(
            ledger, method=made.method.name, seed=made.config.fleet.seed, config=schema.plain(made.config)
        ))


def read(path: Path) -> dict[str, Any]:
    """A result.json of any kind, without checking its keys. Raises StateError."""
    try:
        outcome = json.loads(storage.read_bytes(path, limit=MAX_RESULT_BYTES))
    except (ValueError, RecursionError) as error:
        raise StateError("is not JSON", where=str(path)) from error
    if not isinstance(outcome, dict):
        raise StateError("holds no table", where=str(path))
    return outcome
