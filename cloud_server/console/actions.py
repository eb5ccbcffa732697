"""The console's actions: they call the functions of the command line and record each in the audit log."""

from __future__ import annotations

import base64
import math
import secrets
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.devices import devices, pause, predict, updates
from cloud_server.devices.flash_in_waves import WaveFlash
from cloud_server.identity import audit_log, fleet_certificates, token_enrolment
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base import schema, terminal
from fleet_core.base.errors import ConfigError, DataError
from fleet_core.base.processes import typed
from fleet_core.data import unlabelled
from fleet_core.protocol import topics

ACTIONS = ("pause", "resume", "revoke", "token", "flash", "stop-flash", "resume-update", "abort-update")
TOKENS = "tokens"
HOURS = (1, 24 * 7)
MOST_FAILURES = 10_000
MOST_SAMPLES = 64
ANSWER_S = 20.0
SUFFIXES = (".npy", ".npz", ".csv", ".ndjson", ".jsonl", *unlabelled.IMAGES)


def do(folder: Path, action: str, given: dict[str, Any], by: str) -> str:
    """Does the action and returns a sentence about what happens next. given: ``device``, and for a token ``hours``. by:
    the browser's address, after the name in an operator's certificate if one was shown. Raises ConfigError and
    StateError."""
    fleet, name = Fleet.load(folder), given.get("device", "")
    if action in ("revoke", "token"):
        if not isinstance(name, str):
            raise ConfigError("is not a name", where="device")
        topics.check_name(name, "device")
    else:
        name = ""
    with audit_log.recorded(folder, by, action, name) as said:
        said.append(_done(fleet, action, name, given))
    return said[0]


def _done(fleet: Fleet, action: str, name: str, given: dict[str, Any]) -> str:
    if action in ("pause", "resume"):
        return pause.sentence(pause.ask(fleet, action == "pause"), fleet)
    if action == "revoke":
        return devices.revoked_text(name, devices.revoke(fleet, name)[1])
    if action == "token":
        return _token(fleet, name, given.get("hours", 24))
    if action in ("resume-update", "abort-update"):
        return updates.ask(fleet, action.removesuffix("-update"))
    raise ConfigError(f"no action '{action[:20]}'", expected=", ".join(ACTIONS))


def flash(folder: Path, waves: WaveFlash, given: dict[str, Any], by: str) -> str:
    """Begins to flash the inventory's devices in ``given["waves"]``, with at most ``given["most_failures"]`` before a
    further wave. Writes the audit log's second line when flashing has ended. Raises FleetError."""
    sizes, most = given.get("waves", ""), given.get("most_failures", 0)
    if not isinstance(sizes, str):
        raise ConfigError("is not a list of waves", where="waves", expected="numbers of devices: 1,5,20")
    if not isinstance(most, int) or isinstance(most, bool) or not 0 <= most <= MOST_FAILURES:
        raise ConfigError("is not a number of failures", where="most_failures", expected=f"0 to {MOST_FAILURES}")
    return waves.begin(sizes, most, lambda: audit_log.recorded(folder, by, "flash"))


def stop_flash(folder: Path, waves: WaveFlash, by: str) -> str:
    """Raises StateError if nothing is being flashed."""
    with audit_log.recorded(folder, by, "stop-flash") as said:
        said.append(waves.stop())
    return said[0]


def _token(fleet: Fleet, name: str, hours: Any) -> str:
    """The token stays on this machine: whoever has it can join the fleet, and the browser may be on another machine."""
    if not isinstance(hours, int) or isinstance(hours, bool) or not HOURS[0] <= hours <= HOURS[1]:
        raise ConfigError("is not a number of hours", where="hours", expected=f"{HOURS[0]} to {HOURS[1]}")
    path = fleet.folder / TOKENS / f"{name}-{secrets.token_hex(3)}.token"
    url = devices.broker_for_token(None, fleet)
    made = token_enrolment.issue_token(fleet, name, path, url, hours * 3600.0)
    return (f"{path} written, on the operator's machine: valid once, until {terminal.date(made.expires)}; next, on the "
            f"device: edge-agent enroll {typed(path.name)} --home HOME")


# A question -----------------------------------------------------------------------------------------------------------


def answer(folder: Path, name: str, x: np.ndarray[Any, Any]) -> dict[str, Any]:
    """The device's answers to samples [S, *shape]. Raises FleetError."""
    fleet = Fleet.load(folder)
    if len(x) > MOST_SAMPLES:
        raise DataError(f"{len(x)} samples", expected=f"at most {MOST_SAMPLES}")
    row = devices.enrolled_device(fleet, name)
    url = devices.broker_url(None, fleet)
    with fleet_certificates.as_operator(fleet, url) as tls:
        found = predict.ask(fleet.config.fleet.name, name, x, url, timeout_s=ANSWER_S, tls=tls,
                            off=predict.why_off(fleet, row))
    return {**schema.plain(found), "classes": list(found.classes or fleet.config.model.classes)}


def samples_of(folder: Path, given: dict[str, Any]) -> np.ndarray[Any, Any]:
    """Samples [S, *shape] from ``values``, a list of numbers, or ``file``, base64, of the kind in ``name``. Raises
    DataError."""
    model = Fleet.load(folder).config.model
    spec, outputs = model.sample, model.outputs
    if "values" in given:
        return _of_values(given["values"], spec)
    suffix = Path(str(given.get("name", ""))[-200:]).suffix.lower()
    if suffix not in SUFFIXES or not isinstance(given.get("file"), str):
        raise DataError("is not a file of samples", where="name", expected=", ".join(SUFFIXES))
    try:
        data = base64.b64decode(given["file"], validate=True)
    except ValueError as error:
        raise DataError("is not base64", where="file") from error
    with tempfile.TemporaryDirectory(prefix="metafleet-ask-") as place:
        path = Path(place) / f"sample{suffix}"
        path.write_bytes(data)
        try:
            return unlabelled.load(path, spec, limit_bytes=1 << 24, outputs=outputs)
        except DataError as error:
            raise DataError(error.what, where=str(given["name"])[-100:], expected=error.expected) from error


def _of_values(values: Any, spec: Any) -> np.ndarray[Any, Any]:
    size = math.prod(spec.shape)
    if not isinstance(values, list) or not values or len(values) % size or len(values) > MOST_SAMPLES * size:
        raise DataError(f"{len(values) if isinstance(values, list) else 'no'} numbers", where="values",
                        expected=f"{size} numbers a sample, of shape {list(spec.shape)}; at most {MOST_SAMPLES}")
    if not all(isinstance(one, (int, float)) and math.isfinite(one) for one in values):
        raise DataError("has a value that is not a finite number", where="values")
    with np.errstate(all="ignore"):
        return np.array(values, np.float64).astype(spec.dtype).reshape(-1, *spec.shape)
