"""Reads the result of a run: the ``result.json`` of a finished run, or the current state of a fleet's ledger; and
compares two."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud_server.figures.formatting import ABSENT, bytes_text, flops_text, phase_text, seconds_text, share_text
from cloud_server.ledger.ledger import Ledger
from cloud_server.records.fleet_folder import Fleet
from cloud_server.results import result
from cloud_server.results.result import Pooled, Result
from fleet_core.base import schema, storage
from fleet_core.base.errors import StateError
from fleet_core.base.processes import typed
from fleet_core.tasks.labels import OVERALL
from fleet_core.tasks.task import NAMES

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
            ledger, method=made.method.name, seed=made.config.fleet.seed, config=schema.plain(made.config),
            task=made.config.model.task,
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


# Two runs -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Figure:
    """One figure of two runs; None for a run that lacks it. share: it is a share of 1, and its change is a difference;
    otherwise the change is relative."""

    what: str
    here: float | None
    there: float | None
    text: Callable[[float], str]
    share: bool = False

    def cells(self) -> tuple[str, str, str, str]:
        """What, here, there, change."""
        here, there = (ABSENT if value is None else self.text(value) for value in (self.here, self.there))
        return self.what, here, there, self._change()

    def _change(self) -> str:
        if self.here is None or self.there is None:
            return ABSENT
        if self.share:
            return f"{self.here - self.there:+.3f}"
        return f"{100 * (self.here / self.there - 1):+.1f} %" if self.there else ABSENT


def differences(here: Result, there: Result) -> list[Figure]:
    """The figures that either run has: scores, loss, bytes, operations, joules, seconds, and each device's accuracy."""
    ours, theirs = dict(_figures(here)), dict(_figures(there))
    found = [Figure(what, ours.get(what, (None,))[0], theirs.get(what, (None,))[0], text, text is share_text)
             for what, (_, text) in {**theirs, **ours}.items()]
    of = {one.device: one.after.accuracy for one in here.personalization if one.after}
    other = {one.device: one.after.accuracy for one in there.personalization if one.after}
    found += [Figure(f"accuracy of {name}", of.get(name), other.get(name), share_text, share=True)
              for name in sorted(of.keys() | other.keys())]
    return [one for one in found if one.here is not None or one.there is not None]


def _figures(run: Result) -> Iterator[tuple[str, tuple[float | None, Callable[[float], str]]]]:
    for who, pooled in (("all devices", run.evaluated), ("new devices", run.new_devices)):
        before = pooled.before if isinstance(pooled, Pooled) else None
        yield f"accuracy before personalization, {who}", (None if before is None else before.accuracy, share_text)
        yield f"accuracy, {who}", (None if pooled is None else pooled.accuracy, share_text)
        yield f"macro-F1, {who}", (None if pooled is None else pooled.macro_f1, share_text)
        yield f"calibration error, {who}", (None if pooled is None else pooled.calibration_error, share_text)
    for measure, by_output in (run.task["after"].measures if run.task and "after" in run.task else {}).items():
        for output, value in by_output.items():
            of = "" if measure in OVERALL else f" of {output}"
            yield f"{NAMES.get(measure, measure)}{of}, all devices", (value, "{:.4g}".format)
    yield "rounds", (run.closed, "{:.0f}".format)
    yield "training loss of the last round", (run.rounds[-1].loss if run.rounds else None, "{:.4g}".format)
    sums = run.totals
    for name, moved in (("payload", sums and sums.payload_bytes), ("MQTT", sums and sums.mqtt_bytes),
                        ("wire", sums and sums.wire_bytes)):
        for way in ("up", "down"):
            yield f"{name} bytes {way}", (getattr(moved, way) if moved else None, bytes_text)
    energy = sums.energy_j if sums else None
    yield "joules of work", (None if energy is None else energy.value, phase_text)
    yield "operations", (sums.flops if sums else None, flops_text)
    took = [one.seconds for one in (*run.rounds, run.folded) if one is not None and one.seconds is not None]
    yield "duration of the rounds", (sum(took) if took else None, seconds_text)


def plain_differences(here: Result, there: Result) -> dict[str, Any]:
    """Both as plain JSON; a figure or setting that a run lacks has no key."""
    figures = [{"what": one.what, **_present(one.here, one.there)} for one in differences(here, there)]
    settings = [{"setting": key, **_present(ours, theirs)} for key, ours, theirs in _settings(here, there)]
    return {"figures": figures, "settings": settings}


def _present(here: Any, there: Any) -> dict[str, Any]:
    return {key: value for key, value in (("this", here), ("other", there)) if value is not None}


def changed_settings(here: Result, there: Result) -> list[tuple[str, str, str]]:
    """(setting, here, there) of settings that differ, method and seed among them."""
    def shown(value: Any) -> str:
        return ABSENT if value is None else str(value)

    return [(key, shown(ours), shown(theirs)) for key, ours, theirs in _settings(here, there)]


def _settings(here: Result, there: Result) -> list[tuple[str, Any, Any]]:
    ours, theirs = ({"method": run.method, "seed": run.seed, **_flat(run.config)} for run in (here, there))
    return [(key, ours.get(key), theirs.get(key)) for key in sorted(ours.keys() | theirs)
            if ours.get(key) != theirs.get(key)]


def _flat(tree: Mapping[str, Any], before: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for key, value in tree.items():
        found |= _flat(value, f"{before}{key}.") if isinstance(value, Mapping) else {f"{before}{key}": value}
    return found
