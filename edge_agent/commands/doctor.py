"""``edge-agent doctor``: the profile's side and the machine's, what the agent will do, and what is wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_agent.device import this_board as boards
from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import PowerError, StateError
from fleet_core.board import limits as fit
from fleet_core.board import probe
from fleet_core.board.device_settings import Settings, settings_of
from fleet_core.board.limits import Complaint, Limits, Wish
from fleet_core.board.probe import Machine
from fleet_core.board.profile import Power, Profile
from fleet_core.power.choose_meter import sensor_of
from fleet_core.power.rapl import Packages

ABSENT = "-"
PROBES = {
    "torch": "import torch; w = torch.ones(64, 64, requires_grad=True); (w @ w).sum().backward()",
    "onnxruntime": "import onnxruntime; onnxruntime.get_available_providers()",
}
PROBE_S = 300


@dataclass(frozen=True)
class Examined:
    """Both sides. sensor: what it says now, or why it says nothing; None where the board has none."""

    board: Profile | None
    machine: Machine
    wish: Wish
    limits: Limits
    sensor: str | None
    complaints: tuple[Complaint, ...]
    notes: tuple[str, ...]


def doctor(home: Path, profile: str | None, run: bool, as_json: bool) -> None:
    """Prints it, and leaves with 1 when something is wrong. run: also try the libraries."""
    seen = examine(home, profile)
    if run:
        seen = replace(seen, complaints=(*seen.complaints, *tried(seen.machine.packages)))
    if as_json:
        terminal.show(plain(seen))
    else:
        terminal.table(rows(seen), ("what", "profile", "found"))
        for note in seen.notes:
            processes.say(f"note: {note}")
        for complaint in seen.complaints:
            print(f"wrong: {complaint.what}: {complaint.problem}\n  hint: {complaint.hint}")
        if not seen.complaints:
            print("nothing is wrong")
    if seen.complaints:
        sys.exit(1)


def examine(home: Path, profile: str | None, root: Path = Path("/")) -> Examined:
    """profile: a board in place of device.toml's. Raises ConfigError for a device.toml or a profile that is wrong."""
    settings = settings_of(home) if (home / "device.toml").exists() else None
    board = _board(home, settings, profile)
    wish = Wish() if settings is None else boards.wish_of(settings)
    machine = probe.machine(root)
    power = None if settings is None else boards.sensor_of(settings)
    said, complaint = _sensor(power or (board.power if board is not None else None), root)
    notes = []
    if settings is None:
        notes.append(f"there is no device.toml in {home}: what a device's own file says is not in this")
    if board is None:
        notes.append("no profile is named ([board] profile, or --profile): nothing to compare with; metafleet profiles")
    wrong = (*fit.complaints(board, machine, wish), *complaint, *certificate_of(home, settings))
    return Examined(board, machine, wish, fit.limits(board, machine, wish), said, wrong, tuple(notes))


def certificate_of(home: Path, settings: Settings | None, now: float | None = None) -> tuple[Complaint, ...]:
    """What is wrong with the certificate that device.toml names. now: Unix seconds, for the clock's."""
    if settings is None or settings.tls.certificate is None:
        return ()
    from fleet_core.protocol import certificates

    token = "a token gives a new one: metafleet devices enroll FLEET NAME"
    try:
        found = certificates.load_certificate(home / settings.tls.certificate)
    except StateError as error:
        return (Complaint("certificate", error.what, token),)
    now, begin, end = time.time() if now is None else now, found.not_valid_before_utc, found.not_valid_after_utc
    if now > end.timestamp():
        return (Complaint("certificate", f"ended on {end:%Y-%m-%d}: the broker turns this device away", token),)
    if now < begin.timestamp():
        return (Complaint("certificate", f"begins on {begin:%Y-%m-%d}, which this clock has not reached",
                          "set the clock: timedatectl"),)
    return ()


def tried(packages: Mapping[str, str], probes: Mapping[str, str] = PROBES) -> tuple[Complaint, ...]:
    """Each of ``packages`` that there is a probe for, run once in a child process: a wheel that was built for another
    processor dies there of a signal, and cannot be caught in this one."""
    wrong = []
    for name, program in probes.items():
        if name in packages:
            why = _died(program)
            if why:
                wrong.append(Complaint(name, f"{packages[name]} {why}",
                                       "install the version that the profile pins: metafleet profiles show NAME"))
    return tuple(wrong)


def _died(program: str) -> str:
    """Why it did not run to its end, or empty."""
    try:
        done = subprocess.run(processes.python("-c", program), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"did not end within {PROBE_S} s"
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"dies of {name}" + (": this processor lacks instructions that it uses" if name == "SIGILL" else "")
    said = done.stderr.strip().splitlines()
    return f"does not run: {said[-1][:200] if said else done.returncode}" if done.returncode else ""


def rows(seen: Examined) -> list[tuple[str, str, str]]:
    """(what, the profile's side, the machine's)."""
    board, machine, limits = seen.board, seen.machine, seen.limits
    pins = {} if board is None else board.wheels.pins
    return [
        ("board", _text(board and board.title), _text(machine.model)),
        ("architecture", _text(board and board.arch), f"{machine.arch}, {machine.bits}-bit"),
        ("cores", _text(board and board.cores), str(machine.cores)),
        ("memory MiB", ", ".join(map(str, board.memory_mib if board else ())) or ABSENT, _text(machine.memory_mib)),
        ("glibc", f"{board.glibc} or later" if board and board.glibc else ABSENT, _text(machine.glibc)),
        ("Python", _text(board and board.wheels.python), machine.python),
        *((name, pins.get(name, ABSENT), machine.packages.get(name, "not installed"))
          for name in ("torch", "onnxruntime")),
        ("sensor", board.power.sensor if board else ABSENT, _text(seen.sensor)),
        ("watts idle, busy", _watts(board), ABSENT),
        ("training", ("yes" if board.can.train else "no") if board else ABSENT,
         "on" if limits.train else f"off: {limits.why}"),
        ("model parameters at most", _text(board and board.can.train_parameters), _text(limits.max_parameters)),
        ("batch at most", _text(board and board.can.train_batch), _text(limits.max_batch)),
    ]


def plain(seen: Examined) -> dict[str, Any]:
    """As ``--json`` has it."""
    return {
        "profile": schema.plain(seen.board), "found": schema.plain(seen.machine), "asked": schema.plain(seen.wish),
        "training": schema.plain(seen.limits), "sensor": seen.sensor, "notes": list(seen.notes),
        "wrong": [schema.plain(complaint) for complaint in seen.complaints],
    }


def _board(home: Path, settings: Settings | None, profile: str | None) -> Profile | None:
    if profile is not None:
        return boards.named(profile)
    return None if settings is None else boards.profile_of(home, settings)


def _sensor(power: Power | None, root: Path) -> tuple[str | None, tuple[Complaint, ...]]:
    """(what it says, what is wrong with it)."""
    if power is None or power.sensor == "none":
        return None, ()
    try:
        if power.sensor == "rapl":
            return f"RAPL {', '.join(package.name for package in Packages.found(root).all)}", ()
        sensor = sensor_of(power, root)
        return f"{sensor.source}: {sensor.read().watts:.2f} W", ()
    except PowerError as error:
        hint = error.hint or "energy is then modelled, or not measured: edge-agent energy calibrate"
        return f"{power.sensor} does not read", (Complaint("sensor", str(error).partition("\nhint:")[0], hint),)


def _watts(board: Profile | None) -> str:
    if board is None or board.power.source is None:
        return ABSENT
    return f"{_text(board.power.idle_w)}, {_text(board.power.busy_w)} ({board.power.source})"


def _text(value: Any) -> str:
    return ABSENT if value is None else str(value)
