"""A private broker as a child process: mosquitto if it is installed, else the embedded amqtt.

On loopback it accepts every client. On other addresses it is mosquitto with certificates (``mosquitto_config``), or,
with ``plain``, a broker that accepts every client.

The child is started through a shell that watches a pipe: when this process dies for any reason, the pipe closes and the
shell terminates the broker. The child has its own session, so that Ctrl-C does not reach it directly.
"""

from __future__ import annotations

import contextlib
import errno
import importlib.util
import ipaddress
import os
import re
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

from cloud_server.broker.mosquitto_config import PERSISTENCE, BrokerSetup, address
from fleet_core.base import processes
from fleet_core.base.errors import ConfigError, FleetError, LinkError
from fleet_core.base.storage import write_atomic

START_S = 20.0
HANDLERS_S = 10.0
STOP_S = 5.0
SECOND_SIGHUP_S = 1.0
RESTART_S = 5.0
MAX_LOG_BYTES = 16 << 20
GROWN_BYTES = 1 << 28
"""By so much may a broker's memory grow before it is started again."""
LOOK_S = 3600.0
SERVER_FOLDERS = ("/usr/sbin", "/usr/local/sbin", "/opt/homebrew/sbin", "/opt/local/sbin")
INSTALLERS = {
    "apt-get": "sudo apt install mosquitto",
    "dnf": "sudo dnf install mosquitto",
    "pacman": "sudo pacman -S mosquitto",
    "brew": "brew install mosquitto",
}

# A background process reads the pipe while the shell becomes the broker. End of file without a line means that the
# parent died.
WATCHED = 'exec 3<&0; { read -r _ <&3 || kill -TERM $$; } & exec 3<&-; exec "$@" </dev/null'

MOSQUITTO_CONFIG = """\
listener {port} {host}
allow_anonymous true
""" + PERSISTENCE


@dataclass(frozen=True)
class Broker:
    """A running broker. hint: the command that installs mosquitto, if the embedded broker runs instead. log: its log
    file, with a line for every connection."""

    url: str
    kind: Literal["mosquitto", "amqtt"]
    hint: str | None
    process: subprocess.Popen[bytes]
    log: Path

    def alive(self) -> bool:
        return self.process.poll() is None

    def memory(self) -> int | None:
        """Resident bytes; None where /proc does not say."""
        try:
            pages = int(Path(f"/proc/{self.process.pid}/statm").read_text().split()[1])
        except (OSError, ValueError, IndexError):
            return None
        return pages * os.sysconf("SC_PAGE_SIZE")

    def reload(self) -> None:
        """Makes mosquitto read its access lists and certificates again; clients stay connected. SIGHUP is sent twice
        because mosquitto loses a signal that arrives during a reload."""
        if self.alive() and self.kind == "mosquitto":
            self.process.send_signal(signal.SIGHUP)
            second = threading.Timer(SECOND_SIGHUP_S, self.process.send_signal, (signal.SIGHUP,))
            second.daemon = True
            second.start()

    def stop(self) -> None:
        """Ends the broker and waits for it; mosquitto saves its retained messages first."""
        if self.alive():
            self.process.terminate()
            try:
                self.process.wait(STOP_S)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()
        _dismiss_watcher(self.process)


class BrokerSupervisor:
    """Restarts a private broker when it ends, or when its memory has grown by ``GROWN_BYTES``: mosquitto keeps an entry
    for every topic that once had a retained message. Rotates its log. The aggregator publishes again what the broker
    had retained but not saved.

    broker: the current or the last broker. restart(): starts the next broker at the same address.
    """

    def __init__(self, broker: Broker, restart: Callable[[], Broker]):
        self.broker, self._restart = broker, restart
        self._next_restart_at = 0.0
        self._look_at, self._looked = time.monotonic() + LOOK_S, (0, 0)  # process id, memory at its first look

    def tick(self, say: Callable[[str], None]) -> None:
        """Call it regularly. say: takes log lines."""
        self._rotate_log()
        self._end_if_grown(say)
        if self.broker.alive() or time.monotonic() < self._next_restart_at:
            return
        self.broker.stop()
        try:
            self.broker = self._restart()
            say(f"the private broker ended, and was started again at {self.broker.url}")
        except (FleetError, OSError) as error:
            say(f"the private broker ended, and cannot be started again: {error}")
        self._next_restart_at = time.monotonic() + RESTART_S

    def reload(self) -> None:
        self.broker.reload()

    def replace(self) -> None:
        """Ends the broker; ``tick`` starts the next one, which trusts only the authorities in its files."""
        self.broker.stop()

    def _end_if_grown(self, say: Callable[[str], None]) -> None:
        """Compares the broker's memory every ``LOOK_S`` with that of the first look at this process, when it holds
        what the aggregator retains."""
        if time.monotonic() < self._look_at or not self.broker.alive():
            return
        self._look_at = time.monotonic() + LOOK_S
        now = self.broker.memory()
        if now is None:
            return
        pid, first = self._looked
        if pid != self.broker.process.pid:
            self._looked = self.broker.process.pid, now
        elif now - first > GROWN_BYTES:
            say(f"the private broker's memory has grown from {first >> 20} to {now >> 20} MiB: it is ended, to be "
                "started again")
            self.replace()

    def _rotate_log(self) -> None:
        """Copies a large log aside and empties it in place, because the broker keeps the file open."""
        log = self.broker.log
        if not log.exists() or log.stat().st_size <= MAX_LOG_BYTES:
            return
        with contextlib.suppress(OSError):  # on a full disk, emptying the log matters more than the copy
            shutil.copyfile(log, log.with_suffix(".old.log"))
        with contextlib.suppress(OSError):
            os.truncate(log, 0)


def start_broker(
    folder: Path, *, port: int = 0, host: str = "127.0.0.1", embedded: bool | None = None, plain: bool = False
) -> Broker:
    """Starts a broker with its files in ``folder`` and returns once it accepts connections.

    Args:
        port: 0 for any free port.
        host: a loopback address, because the broker accepts every client; with ``plain`` any address.
        embedded: True for amqtt; None for amqtt only if METAFLEET_BROKER is ``embedded``.

    Raises ConfigError for a host that is not loopback, LinkError if the port is in use or no broker can be started.
    """
    if not plain:
        _check_loopback(host)
    if embedded is None:
        embedded = os.environ.get("METAFLEET_BROKER") == "embedded"
    folder.mkdir(parents=True, exist_ok=True)
    mosquitto = None if embedded else find_mosquitto()
    if mosquitto is None and importlib.util.find_spec("amqtt") is None:
        raise LinkError("neither mosquitto nor the embedded broker is installed", hint=install_command())
    port = reserve(host, port)
    if mosquitto is None:
        command = processes.command("cloud_server.broker.embedded", host, str(port))
    else:
        command = [mosquitto, "-c", str(_write_config(folder, host, port))]
    kind: Literal["mosquitto", "amqtt"] = "amqtt" if mosquitto is None else "mosquitto"
    return _start(folder / "broker.log", command, kind, reachable(host), port, "mqtt")


def start_secured(config: Path, setup: BrokerSetup) -> Broker:
    """Starts mosquitto with the configuration file written for ``setup``; its log is ``broker.log`` beside the file.

    Raises LinkError if mosquitto is not installed, a port is in use, or it does not start.
    """
    program = find_mosquitto()
    if program is None:
        raise LinkError("certificates need mosquitto, and it is not installed", hint=install_command())
    host = setup.listen or "0.0.0.0"
    for port in (setup.port, setup.enrolment_port):
        reserve(host, port)
    return _start(config.with_name("broker.log"), [program, "-c", str(config)], "mosquitto", reachable(host),
                  setup.port, "mqtts")


def reachable(host: str) -> str:
    """The address by which this machine reaches a server that listens on ``host``."""
    return {"0.0.0.0": "127.0.0.1", "::": "::1", "": "127.0.0.1"}.get(host, host)


def find_mosquitto() -> str | None:
    """The path of the mosquitto server; also looks in the usual folders that PATH may lack."""
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
        if kind == "mosquitto":
            _await_signal_handlers(broker)
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
    """Sends the watching shell a line, so that it does not send a signal when the pipe closes."""
    if process.stdin is not None and not process.stdin.closed:
        try:
            process.stdin.write(b"\n")
            process.stdin.close()
        except BrokenPipeError:
            pass


def _accepts(broker: Broker, host: str, port: int) -> bool:
    """Waits until the broker accepts connections; False if it ended instead. Raises LinkError after ``START_S``."""
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


def _await_signal_handlers(broker: Broker) -> None:
    """Waits until mosquitto handles SIGHUP: it listens earlier, and until then SIGHUP would end it. Waits at most
    ``HANDLERS_S``, and only on Linux, where /proc shows the handlers."""
    status, until_s = Path(f"/proc/{broker.process.pid}/status"), time.monotonic() + HANDLERS_S
    while broker.alive() and time.monotonic() < until_s:
        try:
            caught = re.search(r"^SigCgt:\s*([0-9a-f]+)$", status.read_text(), re.MULTILINE)
        except OSError:
            return
        if caught is None or int(caught[1], 16) >> (signal.SIGHUP - 1) & 1:
            return
        time.sleep(0.01)


def _failure(log: Path, log_from: int) -> LinkError:
    """The error for a broker that ended at its start, with the last line of its log."""
    lines = log.read_bytes()[log_from:].decode(errors="replace").strip().splitlines() or ["its log is empty"]
    return LinkError(f"the broker ended at its start: {lines[-1]}", where=str(log))


def _check_loopback(host: str) -> None:
    try:
        loopback = ipaddress.ip_address(host).is_loopback
    except ValueError:
        loopback = False
    if not loopback:
        raise ConfigError(
            "the private broker accepts every client and is therefore limited to this machine",
            where=host,
            expected="a loopback address such as 127.0.0.1",
            hint="for other machines: 'metafleet server start --host', or a broker of your own, --broker mqtts://HOST",
        )


def reserve(host: str, port: int) -> int:
    """``port``, or a free port for 0. Raises LinkError if it is not possible to listen on it."""
    try:
        with socket.socket(socket.AF_INET6 if ":" in host else socket.AF_INET) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind((host, port))
            return int(probe.getsockname()[1])
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise LinkError(f"cannot listen at this address: {error.strerror}", where=f"{host}:{port}") from error
        raise LinkError(
            "the port is in use",
            where=f"{host}:{port}",
            hint="choose another port, end the program that uses it, or if it is a broker, name it with --broker",
        ) from error
