"""A private broker as a child process: mosquitto where it is installed, else the embedded amqtt.

On loopback it admits anyone. Beyond it stands mosquitto with certificates (see ``mosquitto``), or, asked for by name,
one that admits anyone who reaches it.

The child is started through a shell that watches a pipe: when this process dies, by whatever cause, the pipe ends and
the broker is told to end too. It has a session of its own, so that Ctrl-C reaches it last.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import ipaddress
import os
import shutil
import signal
import socket
import subprocess
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Literal

from cloud_server.broker.mosquitto_config import KEEPING, Place, address
from fleet_core.base import processes
from fleet_core.base.errors import ConfigError, FleetError, LinkError
from fleet_core.base.storage import write_atomic

START_S = 20.0
STOP_S = 5.0
TOLD_AGAIN_S = 1.0
AGAIN_S = 5.0
LOG_BYTES = 16 << 20
SERVER_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin", "/opt/local/sbin")
INSTALLERS = {
    "apt-get": "sudo apt install mosquitto",
    "dnf": "sudo dnf install mosquitto",
    "pacman": "sudo pacman -S mosquitto",
    "brew": "brew install mosquitto",
}

# The watcher reads the pipe in the background and the shell becomes the broker: an end of file without a line before
# it means that the parent died.
WATCHED = 'exec 3<&0; { read -r _ <&3 || kill -TERM $$; } & exec 3<&-; exec "$@" </dev/null'

MOSQUITTO_CONFIG = """\
listener {port} {host}
allow_anonymous true
""" + KEEPING


@dataclass(frozen=True)
class Broker:
    """A running broker. ``hint`` is the command that would install mosquitto, where the embedded one stands in. ``log``
    has what it says, with a line for every connection."""

    url: str
    kind: Literal["mosquitto", "amqtt"]
    hint: str | None
    process: subprocess.Popen[bytes]
    log: Path

    def alive(self) -> bool:
        return self.process.poll() is None

    def reload(self) -> None:
        """mosquitto reads its access lists and certificates again; who is connected stays. It is told twice, for it
        forgets what it is told while it reads, when it may have read what was written since."""
        if self.alive() and self.kind == "mosquitto":
            self.process.send_signal(signal.SIGHUP)
            again = threading.Timer(TOLD_AGAIN_S, self.process.send_signal, (signal.SIGHUP,))
            again.daemon = True
            again.start()

    def stop(self) -> None:
        """End the broker and wait for it; mosquitto saves its retained messages first."""
        if self.alive():
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        _dismiss_watcher(self.process)


class Kept:
    """A private broker that is started again when it ends, for what reason ever. What it retained and had not saved the
    aggregator publishes again.

    ``broker``: the present one, or the last one. again(): starts the next one, at the same address.
    """

    def __init__(self, broker: Broker, again: Callable[[], Broker]):
        self.broker, self._again = broker, again
        self._again_at = 0.0

    def look(self, say: Callable[[str], None]) -> None:
        """To be called now and then."""
        self._turn_log()
        if self.broker.alive() or time.monotonic() < self._again_at:
            return
        self.broker.stop()
        try:
            self.broker = self._again()
            say(f"the private broker had ended; it was started again at {self.broker.url}")
        except (FleetError, OSError) as error:
            say(f"the private broker has ended, and cannot be started again: {error}")
        self._again_at = time.monotonic() + AGAIN_S

    def reload(self) -> None:
        self.broker.reload()

    def _turn_log(self) -> None:
        """A log that has grown is begun again, and the one before kept: the broker appends to the file that it has."""
        log = self.broker.log
        if not log.exists() or log.stat().st_size <= LOG_BYTES:
            return
        with contextlib.suppress(OSError):  # a full disk: it has room again
            shutil.copyfile(log, log.with_suffix(".old.log"))
        with contextlib.suppress(OSError):
            os.truncate(log, 0)


def start_broker(
    folder: Path, *, port: int = 0, host: str = "127.0.0.1", embedded: bool | None = None, plain: bool = False
) -> Broker:
    """Start a broker that keeps its files in ``folder`` and return when it accepts connections.

    Args:
        port: 0 takes a free one.
        host: a loopback address, for the broker admits anyone who reaches it; with ``plain`` any address.
        embedded: True takes amqtt in any case; None does so when METAFLEET_BROKER is ``embedded``.

    Raises ConfigError for a host that is not loopback, LinkError when the port is in use or no broker can be started.
    """
    if not plain:
        _check_loopback(host)
    if embedded is None:
        embedded = os.environ.get("METAFLEET_BROKER") == "embedded"
    folder.mkdir(parents=True, exist_ok=True)
    mosquitto = None if embedded else find_mosquitto()
    if mosquitto is None and importlib.util.find_spec("amqtt") is None:
        raise LinkError("neither mosquitto nor the embedded broker is installed", hint=install_command())
    port = _reserve(host, port)
    if mosquitto is None:
        command = processes.command("cloud_server.broker.embedded", host, str(port))
    else:
        command = [mosquitto, "-c", str(_write_config(folder, host, port))]
    kind: Literal["mosquitto", "amqtt"] = "amqtt" if mosquitto is None else "mosquitto"
    return _start(folder / "broker.log", command, kind, reachable(host), port, "mqtt")


def start_secured(config: Path, place: Place) -> Broker:
    """Start mosquitto with the configuration that was written for ``place``; its log is ``broker.log`` beside it.

    Raises LinkError when mosquitto is not installed, when a port is in use or when it does not start.
    """
    program = find_mosquitto()
    if program is None:
        raise LinkError("only mosquitto takes certificates, and it is not installed", hint=install_command())
    host = place.listen or "0.0.0.0"
    for port in (place.port, place.enrolment_port):
        _reserve(host, port)
    return _start(config.with_name("broker.log"), [program, "-c", str(config)], "mosquitto", reachable(host),
                  place.port, "mqtts")


def reachable(host: str) -> str:
    """The address at which this machine itself reaches what listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def find_mosquitto() -> str | None:
    """The path of the mosquitto server, also where PATH does not name its folder."""
    return shutil.which("mosquitto", path=os.pathsep.join((os.environ.get("PATH", ""), *SERVER_FOLDERS)))


def install_command() -> str:
    """The command that installs mosquitto on this system."""
    for program, command in INSTALLERS.items():
        if shutil.which(program):
            return command
    return "install mosquitto (https://mosquitto.org/download)"


def _start(
    log: Path, command: list[str], kind: Literal["mosquitto", "amqtt"], host: str, port: int, scheme: str
) -> Broker:
    with log.open("ab") as output:
        log_from = output.tell()
        process = _launch(command, output)
    hint = install_command() if find_mosquitto() is None else None
    broker = Broker(address(host, port, scheme), kind, hint, process, log)
    try:
        if not _accepts(broker, host, port):
            raise _failure(log, log_from)
    except BaseException:
        broker.stop()
        raise
    return broker


def _write_config(folder: Path, host: str, port: int) -> Path:
    text = MOSQUITTO_CONFIG.format(port=port, host=host, data=folder.resolve())
    if os.geteuid() == 0:
        text += "user root\n"
    path = folder.resolve() / "mosquitto.conf"
    write_atomic(path, text.encode())
    return path


def _launch(command: list[str], output: IO[bytes]) -> subprocess.Popen[bytes]:
    home = str(Path(__file__).resolve().parents[2])
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, (home, os.environ.get("PYTHONPATH"))))}
    return subprocess.Popen(
        ["/bin/sh", "-c", WATCHED, "sh", *command],
        stdin=subprocess.PIPE,
        stdout=output,
        stderr=output,
        env=environment,
        start_new_session=True,
    )


def _dismiss_watcher(process: subprocess.Popen[bytes]) -> None:
    """Tell the watcher that the end was meant, so that it signals nobody."""
    if process.stdin is not None and not process.stdin.closed:
        try:
            process.stdin.write(b"\n")
            process.stdin.close()
        except BrokenPipeError:
            pass


def _accepts(broker: Broker, host: str, port: int) -> bool:
    """Wait until the broker takes connections; False when it ended instead."""
    until_s = time.monotonic() + START_S
    while time.monotonic() < until_s:
        try:
            broker.process.wait(timeout=0.02)
            return False
        except subprocess.TimeoutExpired:
            pass
        try:
            socket.create_connection((host, port), timeout=1.0).close()
            return True
        except OSError:
            continue
    raise LinkError(f"the broker did not accept connections within {START_S:g} s", where=broker.url)


def _failure(log: Path, log_from: int) -> LinkError:
    """Why a broker ended at its start, in its own last words."""
    said = log.read_bytes()[log_from:].decode(errors="replace").strip().splitlines() or ["it said nothing"]
    return LinkError(f"the broker ended at its start: {said[-1]}", where=str(log))


def _check_loopback(host: str) -> None:
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            "the private broker admits anyone and therefore stays on this machine",
            where=host,
            expected="a loopback address such as 127.0.0.1",
            hint="'metafleet server start --host' checks its clients, and so does one named with --broker mqtts://HOST",
        )


def _reserve(host: str, port: int) -> int:
    """``port``, or a free one for 0. Raises LinkError when it cannot be listened on."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise LinkError(f"cannot be listened on: {error.strerror}", where=f"{host}:{port}") from error
        raise LinkError(
            "the port is in use",
            where=f"{host}:{port}",
            hint="choose another port, end the program that holds it, or name its broker with --broker",
        ) from error
