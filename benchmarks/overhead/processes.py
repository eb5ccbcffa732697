"""Starts the processes of one benchmark run in its network, reads their output and CPU time, and ends them all."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import suppress
from pathlib import Path

from benchmarks.overhead.networks import Network, Node
from cloud_server.broker.private_broker import MOSQUITTO_CONFIG, find_mosquitto
from fleet_core.base.processes import WITH_PARENT

START_S, STOP_S = 20.0, 15.0
PLAIN = "METAFLEET_PLAIN"
ROOT = Path(__file__).resolve().parents[2]

Process = subprocess.Popen[bytes]


class Processes:
    """Starts processes, each with its output in a file of ``folder``. A context that ends all of them."""

    def __init__(self, folder: Path):
        self.folder = folder
        self._logs: dict[Process, Path] = {}
        self._dismissed: set[Process] = set()

    def __enter__(self) -> Processes:
        return self

    def __exit__(self, *_: object) -> None:
        self.end(*self._logs)

    def start(
        self, node: Node, *command: str, cwd: Path | None = None, environ: Mapping[str, str] | None = None
    ) -> Process:
        """Starts ``command`` on ``node``. environ: added to this process's own without METAFLEET_ variables, which
        would change defaults. Plain MQTT between this machine's namespaces is allowed."""
        log = self.folder / f"process-{len(self._logs)}.log"
        clean = {name: value for name, value in os.environ.items() if not name.startswith("METAFLEET_")}
        with log.open("wb") as output:
            process = subprocess.Popen(
                node.command(*command), stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=cwd,
                env={**clean, WITH_PARENT: str(os.getpid()), PLAIN: "1", **(environ or {})},
                start_new_session=True,  # Ctrl-C reaches only the benchmark, which ends them in order
            )
        self._logs[process] = log
        return process

    def module(
        self, node: Node, name: str, *arguments: str, environ: Mapping[str, str] | None = None
    ) -> Process:
        """Starts a module of this repository with this Python."""
        return self.start(node, sys.executable, "-m", name, *arguments, cwd=ROOT, environ=environ)

    def log(self, process: Process) -> str:
        return self._logs[process].read_text(errors="replace")

    def says(self, process: Process, words: str, timeout_s: float = START_S) -> None:
        """Waits until the process has printed ``words``."""
        self.until(lambda: words in self.log(process), timeout_s)

    def until(self, condition: Callable[[], object], timeout_s: float, every_s: float = 0.05) -> None:
        """Waits until ``condition()`` holds. Ends the benchmark if a process failed, or after ``timeout_s``."""
        until_s = time.monotonic() + timeout_s
        while not condition():
            failed = [p for p in self._logs if p not in self._dismissed and p.poll() not in (None, 0)]
            if failed or time.monotonic() > until_s:
                why = f"{failed[0].args!r} ended with {failed[0].returncode}" if failed else f"over {timeout_s:g} s"
                said = "\n".join(self.log(p)[-1000:] for p in failed or self._logs)
                raise SystemExit(f"{why}\n{said}")
            time.sleep(every_s)

    def end(self, *processes: Process) -> None:
        """Asks them to end, waits, and kills those that do not."""
        self._dismissed.update(processes)
        for process in processes:
            if process.poll() is None:
                process.terminate()
        until_s = time.monotonic() + STOP_S
        for process in processes:
            with suppress(subprocess.TimeoutExpired):
                process.wait(max(0.1, until_s - time.monotonic()))
            if process.poll() is None:
                os.killpg(process.pid, signal.SIGKILL)
                process.wait()


def start_broker(processes: Processes, network: Network) -> str:
    """Starts mosquitto in the hub with the private broker's configuration; returns its URL, the same for every node."""
    program = find_mosquitto()
    if program is None:
        raise SystemExit("mosquitto is not installed")
    folder = processes.folder / "broker"
    folder.mkdir()
    port = 1883 if network.hub.namespace else _free_port()
    config = folder / "mosquitto.conf"
    text = MOSQUITTO_CONFIG.format(port=port, host=network.address, data=folder)
    config.write_text(text + "log_type information\n" + ("user root\n" if os.geteuid() == 0 else ""))
    processes.says(processes.start(network.hub, program, "-c", str(config)), "running")
    return f"mqtt://{network.address}:{port}"


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def cpu_s(pids: Iterable[int]) -> float:
    """CPU seconds of processes so far, with those of their ended children; 0 for processes that are gone."""
    ticks = 0
    for pid in pids:
        with suppress(OSError):
            ticks += sum(map(int, Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[11:15]))
    return ticks / os.sysconf("SC_CLK_TCK")


def end_in_order() -> None:
    """SIGTERM ends this process as Ctrl-C does: contexts are left, processes ended, namespaces removed."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))
