"""``edge-agent doctor``: compares the board's profile with the machine, and says what the agent will do and what is
wrong."""

from __future__ import annotations

import signal
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from edge_agent.compute import measure_speed
from edge_agent.compute.measure_speed import Speed
from edge_agent.device import this_board as boards
from fleet_core.backbone import providers
from fleet_core.backbone.providers import Choice
from fleet_core.base import processes, schema, terminal
from fleet_core.base.errors import PowerError, StateError
from fleet_core.board import limits as fit
from fleet_core.board import probe
from fleet_core.board.device_settings import Settings, settings_of
from fleet_core.board.limits import Complaint, Limits, Wish
from fleet_core.board.probe import Machine
from fleet_core.board.profile import Compute, Power, Profile
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
    """The profile, the machine and their differences. sensor: its reading, or why there is none; None if the board has
    no sensor. speed: the result of ``--measure``, now or earlier. backbone: the provider that computes the fleet's
    backbone here, with its measurements; None before the first start with a backbone."""

    board: Profile | None
    machine: Machine
    wish: Wish
    limits: Limits
    sensor: str | None
    complaints: tuple[Complaint, ...]
    notes: tuple[str, ...]
    speed: Speed | None = None
    backbone: Choice | None = None


def doctor(home: Path, profile: str | None, run: bool, as_json: bool, measure: bool = False) -> None:
    """Prints the comparison; exits with 1 if something is wrong. run: also run the libraries once. measure: FLOP/s,
    kept in the device's home."""
    examined = examine(home, profile)
    if measure:
        speed = measure_speed.measure()
        kept = (home / "device.toml").exists()
        if kept:
            measure_speed.write(home, speed)
        note = f"FLOP/s are in {home / measure_speed.FILE}; a profile takes them as:\n{_toml(speed)}"
        notes = (*examined.notes, note if kept else f"FLOP/s are not kept without a device.toml\n{_toml(speed)}")
        examined = replace(examined, speed=speed, notes=notes)
    if run:
        examined = replace(examined, complaints=(*examined.complaints, *failing(examined.machine.packages)))
    if as_json:
        terminal.show(plain(examined))
    else:
        terminal.table(rows(examined), ("what", "profile", "found"))
        for note in examined.notes:
            processes.say(f"note: {note}")
        for complaint in examined.complaints:
            print(f"wrong: {complaint.what}: {complaint.problem}\n  hint: {complaint.hint}")
        if not examined.complaints:
            print("nothing is wrong")
    if examined.complaints:
        sys.exit(1)


def examine(home: Path, profile: str | None, root: Path = Path("/")) -> Examined:
    """profile: replaces device.toml's. Raises ConfigError for a wrong device.toml or profile."""
    settings = settings_of(home) if (home / "device.toml").exists() else None
    board = _board(home, settings, profile)
    wish = Wish() if settings is None else boards.wish_of(settings)
    machine = probe.machine(root)
    power = None if settings is None else boards.sensor_of(settings)
    reading, complaint = _sensor(power or (board.power if board is not None else None), root)
    notes = []
    if settings is None:
        notes.append(f"there is no device.toml in {home}: settings of a device are not considered")
    if board is None:
        notes.append("no profile is named ([board] profile, or --profile): nothing to compare with; metafleet profiles")
    complaints = (*fit.complaints(board, machine, wish), *complaint, *certificate_of(home, settings),
                  *sources_of(home, settings))
    return Examined(board, machine, wish, fit.limits(board, machine, wish), reading, complaints, tuple(notes),
                    measure_speed.read(home), _backbone(home))


def _backbone(home: Path) -> Choice | None:
    return next((providers.load(path) for path in sorted(home.glob("backbone-*.providers.json"))), None)


def certificate_of(home: Path, settings: Settings | None, now: float | None = None) -> tuple[Complaint, ...]:
    """What is wrong with the certificate that device.toml names. now: Unix seconds, in place of the clock."""
    if settings is None or settings.tls.certificate is None:
        return ()
    from fleet_core.protocol import certificates

    token = "a token gives a new one: metafleet devices enroll FLEET NAME"
    try:
        certificate = certificates.load_certificate(home / settings.tls.certificate)
    except StateError as error:
        return (Complaint("certificate", error.what, token),)
    now = time.time() if now is None else now
    begin, end = certificate.not_valid_before_utc, certificate.not_valid_after_utc
    if now > end.timestamp():
        return (Complaint("certificate", f"ended on {end:%Y-%m-%d}: the broker turns this device away", token),)
    if now < begin.timestamp():
        return (Complaint("certificate", f"begins on {begin:%Y-%m-%d}, which this clock has not reached",
                          "set the clock: timedatectl"),)
    return ()


def sources_of(home: Path, settings: Settings | None) -> tuple[Complaint, ...]:
    """The sources that had failed when the agent last wrote about them."""
    if settings is None or not settings.source:
        return ()
    from edge_agent.sources.run_sources import states

    return tuple(Complaint(f"source {name}", one.last_error, "edge-agent sources --try 5 opens it again")
                 for name, one in states(home).items() if one.state == "failed")


def failing(packages: Mapping[str, str], probes: Mapping[str, str] = PROBES) -> tuple[Complaint, ...]:
    """Complaints about the packages whose probe fails. Each probe runs in a child process: a wheel for another
    processor dies of a signal, which this process could not catch."""
    complaints = []
    for name, program in probes.items():
        if name in packages:
            why = _failure(program)
            if why:
                complaints.append(Complaint(name, f"{packages[name]} {why}",
                                            "install the version that the profile pins: metafleet profiles show NAME"))
    return tuple(complaints)


def _failure(program: str) -> str:
    """Why the program fails; empty if it does not."""
    try:
        done = subprocess.run(processes.python("-c", program), stdin=subprocess.DEVNULL, capture_output=True, text=True,
                              timeout=PROBE_S, check=False)
    except subprocess.TimeoutExpired:
        return f"did not end within {PROBE_S} s"
    if done.returncode < 0:
        name = signal.Signals(-done.returncode).name
        return f"is ended by {name}" + (": this processor lacks instructions that it uses" if name == "SIGILL" else "")
    lines = done.stderr.strip().splitlines()
    return f"does not run: {lines[-1][:200] if lines else done.returncode}" if done.returncode else ""


def rows(examined: Examined) -> list[tuple[str, str, str]]:
    """(what, the profile's value, the machine's)."""
    board, machine, limits = examined.board, examined.machine, examined.limits
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
        ("sensor", board.power.sensor if board else ABSENT, _text(examined.sensor)),
        ("watts idle, busy", _watts(board), ABSENT),
        ("FLOP/s", _flop_per_s(None if board is None else board.compute),
         _flop_per_s(None if examined.speed is None else examined.speed.compute())),
        *_computes(examined.backbone, () if board is None else board.compute.providers),
        ("training", ("yes" if board.can.train else "no") if board else ABSENT,
         f"on, engine {limits.engines[0]}" if limits.train else f"off: {limits.why}"),
        ("model parameters at most", _text(board and board.can.train_parameters), _text(limits.max_parameters)),
        ("batch at most", _text(board and board.can.train_batch), _text(limits.max_batch)),
    ]


def _computes(choice: Choice | None, named: tuple[str, ...]) -> list[tuple[str, str, str]]:
    """Rows about the backbone: none without one."""
    if choice is None:
        return []
    speeds = ", ".join(f"{name} {seconds * 1000:.3g} ms" for name, seconds in choice.seconds.items())
    return [("backbone by", ", ".join(named) or ABSENT, f"{choice.provider} (a sample: {speeds})"),
            *(("backbone not by", name, why) for name, why in choice.refused.items())]


def plain(examined: Examined) -> dict[str, Any]:
    """The output of ``--json``."""
    return {
        "profile": schema.plain(examined.board), "found": schema.plain(examined.machine),
        "asked": schema.plain(examined.wish), "training": schema.plain(examined.limits), "sensor": examined.sensor,
        "speed": None if examined.speed is None else {
            **schema.plain(examined.speed), "flop_per_s": examined.speed.flop_per_s,
            "source": examined.speed.compute().source,
        },
        **({} if examined.backbone is None else {"backbone": schema.plain(examined.backbone)}),
        "notes": list(examined.notes), "wrong": [schema.plain(complaint) for complaint in examined.complaints],
    }


def _board(home: Path, settings: Settings | None, profile: str | None) -> Profile | None:
    if profile is not None:
        return boards.named(profile)
    return None if settings is None else boards.profile_of(home, settings)


def _sensor(power: Power | None, root: Path) -> tuple[str | None, tuple[Complaint, ...]]:
    """(reading, complaints)."""
    if power is None or power.sensor == "none":
        return None, ()
    try:
        if power.sensor == "rapl":
            return Packages.detect(root).source, ()
        sensor = sensor_of(power, root)
        return f"{sensor.source}: {sensor.read().watts:.2f} W", ()
    except PowerError as error:
        hint = error.hint or "energy is then modelled, or not measured: edge-agent energy calibrate"
        return f"{power.sensor} does not read", (Complaint("sensor", str(error).partition("\nhint:")[0], hint),)


def _watts(board: Profile | None) -> str:
    if board is None or board.power.source is None:
        return ABSENT
    each = " per processor" if board.power.per_processor else ""
    return f"{_text(board.power.idle_w)}, {_text(board.power.busy_w)}{each} ({board.power.source})"


def _flop_per_s(compute: Compute | None) -> str:
    if compute is None or compute.effective_flop_per_s is None:
        return ABSENT
    return f"{compute.effective_flop_per_s:.3g} ({compute.source})"


def _toml(speed: Speed) -> str:
    compute = speed.compute()
    return f'[compute]\neffective_flop_per_s = {compute.effective_flop_per_s:.3g}\nsource = "{compute.source}"'


def _text(value: Any) -> str:
    return ABSENT if value is None else str(value)
