"""``metafleet doctor``: whether this machine can run a fleet: packages, broker, ports, clock, firewall, disk."""

from __future__ import annotations

import importlib.util
import platform
import resource
import shutil
import socket
import subprocess
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from cloud_server.broker import private_broker
from cloud_server.broker.mosquitto_config import ENROLMENT_PORT, PORT
from cloud_server.identity import fleet_certificates
from cloud_server.records import key_files
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base.errors import LinkError
from fleet_core.base.processes import typed

EXTRAS = {
    "train": (("torch",), "demo, simulate, advise, plan of an experiment"),
    "export": (("torch", "onnx", "onnxscript"), "init, export, demo, backbone"),
    "broker": (("amqtt",), "a broker without mosquitto"), "images": (("PIL",), "samples from images"),
    "lab": (("matplotlib",), "the charts of compare"), "flash": (("uv", "yaml"), "flash"),
    "monitor": (("prometheus_client",), "metrics"), "console": (("starlette", "uvicorn"), "console"),
    "privacy": (("dp_accounting",), "private updates"),
}
"""Extra -> (its modules, what needs them)."""
LEAST_FREE = 1 << 30
FILES_PER_DEVICE, OWN_FILES = 1, 64
"""Open files: a broker has a connection for each device."""
FEW_FILES = 1000
COMMAND_S = 5.0

State = Literal["ok", "note", "wrong"]


@dataclass(frozen=True)
class Finding:
    """hint: what to do; empty for nothing. wrong: a fleet cannot work with this."""

    what: str
    state: State
    found: str
    hint: str = ""


def examine(folder: Path | None, root: Path = Path("/")) -> list[Finding]:
    """folder: of a fleet, whose broker and disk are checked; None for a new fleet. root: of the system's files. Raises
    ConfigError for a folder that is no fleet's."""
    fleet = None if folder is None else Fleet.load(folder)
    return [
        Finding("Python", "ok", platform.python_version()), *packages(), broker(), *ports(fleet), address(), clock(),
        firewall(_ports(fleet), root), open_files(), room(folder or Path.cwd()),
        *([] if folder is None else [private_keys(folder)]),
    ]


def packages() -> Iterator[Finding]:
    for extra, (modules, needed) in EXTRAS.items():
        lacking = [name for name in modules if importlib.util.find_spec(name) is None]
        if lacking:
            yield Finding("packages", "note", f"{', '.join(lacking)} not installed, needed for {needed}",
                          f'pip install "metafleet[{extra}]"')


def broker() -> Finding:
    program = private_broker.find_mosquitto()
    if program is not None:
        return Finding("broker", "ok", program)
    embedded = importlib.util.find_spec("amqtt") is not None
    found = "mosquitto is not installed: " + (
        "the embedded broker serves this machine alone, without certificates" if embedded else "no broker can start")
    return Finding("broker", "note" if embedded else "wrong", found, private_broker.install_command())


def ports(fleet: Fleet | None) -> Iterator[Finding]:
    for port in _ports(fleet):
        try:
            private_broker.reserve("0.0.0.0", port)
        except LinkError as error:
            if fleet is not None and fleet.running():
                yield Finding("port", "ok", f"{port} is in use, and the fleet runs")
            else:
                yield Finding("port", "note", f"{port}: {error.what}", error.hint or "")
        else:
            yield Finding("port", "ok", f"{port} is free")


def _ports(fleet: Fleet | None) -> tuple[int, ...]:
    setup = None if fleet is None else fleet_certificates.saved_setup(fleet.folder)
    return (PORT, ENROLMENT_PORT) if setup is None else (setup.port, setup.enrolment_port)


def address() -> Finding:
    """The address by which devices reach this machine. Nothing is sent: connecting a UDP socket only chooses a
    route."""
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect(("192.0.2.1", 9))  # RFC 5737: an address for documentation
        except OSError as error:
            return Finding("address", "note", f"no route to other machines: {error.strerror}",
                           "fine for a fleet on this machine; else connect it to the devices' network")
        return Finding("address", "ok", f"{socket.gethostname()}, {probe.getsockname()[0]}")


def clock() -> Finding:
    """Whether the clock is right: devices refuse certificates and signed rounds that are not yet or no longer valid."""
    said = _output(("timedatectl", "show", "--property=NTPSynchronized", "--value"))
    if said == "yes":
        return Finding("clock", "ok", "synchronized")
    if said == "no":
        return Finding("clock", "wrong", "not synchronized: a device with another time refuses rounds",
                       "timedatectl set-ntp true")
    return Finding("clock", "note", "not known to be synchronized", "compare it with a device's: date")


def firewall(needed: Sequence[int], root: Path = Path("/")) -> Finding:
    """needed: the ports that devices connect to."""
    ports = [f"{port}/tcp" for port in needed]
    settings = root / "etc/ufw/ufw.conf"
    try:
        ufw = "ENABLED=yes" in settings.read_text(encoding="utf-8", errors="replace").split()
    except OSError:
        ufw = False
    if ufw:
        return Finding("firewall", "note", "ufw is on", "; ".join(f"sudo ufw allow {port}" for port in ports))
    if _output(("firewall-cmd", "--state")) == "running":
        opened = " ".join(f"--add-port={port}" for port in ports)
        return Finding("firewall", "note", "firewalld is on",
                       f"sudo firewall-cmd --permanent {opened}; sudo firewall-cmd --reload")
    return Finding("firewall", "ok", "neither ufw nor firewalld is on; other firewalls are not checked")


def open_files() -> Finding:
    limit = resource.getrlimit(resource.RLIMIT_NOFILE)[0]
    if limit == resource.RLIM_INFINITY:
        return Finding("open files", "ok", "no limit")
    devices = max(0, (limit - OWN_FILES) // FILES_PER_DEVICE)
    text = f"at most {limit}, enough for about {devices} devices at a broker that is started from here"
    few = devices < FEW_FILES
    return Finding("open files", "note" if few else "ok", text, "ulimit -n 65536" if few else "")


def room(folder: Path) -> Finding:
    free = shutil.disk_usage(folder).free
    enough = free >= LEAST_FREE
    return Finding("disk", "ok" if enough else "wrong", f"{free / 1e9:.1f} GB free in {folder}",
                   "" if enough else "make room: an aggregator that cannot write opens no further round")


def private_keys(folder: Path) -> Finding:
    """Whether the fleet's private keys have a passphrase."""
    if key_files.state(folder) == "encrypted":
        return Finding("keys", "ok", "encrypted")
    half = key_files.state(folder) == "partly"
    found = "some are encrypted, some not" if half else "plain: whoever reads the folder can act as the fleet"
    return Finding("keys", "wrong" if half else "note", found, f"metafleet server encrypt-keys {typed(folder)}")


def _output(command: tuple[str, ...]) -> str:
    """What the program prints; empty if it is missing or fails."""
    try:
        done = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=COMMAND_S,
                              check=True)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout.strip()


def lines(found: Sequence[Finding]) -> Iterator[str]:
    widths = max(len(one.what) for one in found)
    for one in found:
        yield f"{one.state:<5}  {one.what:<{widths}}  {one.found}"
        if one.hint:
            yield f"{'':<5}  {'':<{widths}}  hint: {one.hint}"
