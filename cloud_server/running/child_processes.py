"""Child processes with log files: the processes of the demo, which are restarted and ended together; the console; the
trackers.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from cloud_server.integrations import tracking
from fleet_core.base import processes

STOP_S = 10.0
LAST_LOOK_S = 60.0  # in this time the trackers write the last rounds
MAX_EXITS = 3  # a process that has ended this often is not started again


class ChildProcesses:
    """A context in which processes are started; all are ended on leaving it.

    logs: the folder for their log files. url: the broker's URL, which they get as METAFLEET_BROKER.
    """

    def __init__(self, logs: Path, url: str):
        self._logs, self._url = logs, url
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, tuple[str, ...]] = {}
        self._exits: dict[str, int] = {}

    def __enter__(self) -> ChildProcesses:
        return self

    def __exit__(self, *_: object) -> None:
        """Ends the process that was started first, the aggregator, before the others, so that it does not close a round
        without the devices that leave."""
        running = list(self._running.values())
        _end(running[:1])
        _end(running[1:])

    def start(self, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        """Starts ``python -m module …`` with its own log file; it ends with this process."""
        self._logs.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, processes.WITH_PARENT: str(os.getpid()), "METAFLEET_BROKER": self._url}
        with open(self._logs / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                processes.command(module, *arguments), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, start_new_session=True,
            )
        self._running[name], self._commands[name] = process, (module, *arguments)
        return process

    def restart(self, name: str) -> bool:
        """Starts an ended process again; False once it has ended ``MAX_EXITS`` times."""
        self._exits[name] = self._exits.get(name, 0) + 1
        if self._exits[name] < MAX_EXITS:
            module, *arguments = self._commands[name]
            self.start(name, module, *arguments)
        return self._exits[name] < MAX_EXITS

    def ended(self) -> Iterator[tuple[str, int, str]]:
        """(name, exit code, last lines of its log) of every process that ended by itself."""
        for name, process in list(self._running.items()):
            if process.poll() is not None:
                lines = (self._logs / f"{name}.log").read_text(errors="replace").strip().splitlines()
                yield name, process.returncode, "\n".join(lines[-5:])


@contextlib.contextmanager
def console_beside(fleet: Path, say: Callable[[str], None], *options: str) -> Iterator[None]:
    """Runs ``metafleet console`` on the fleet's folder as long as this context. Says its address; its messages go to
    ``console.log`` in the folder."""
    command = processes.command("cloud_server.commands.cli", "console", str(fleet), *options)
    with _beside("console", command, fleet / "console.log", say):
        yield


@contextlib.contextmanager
def tracking_beside(
    options: tracking.Options, folder: Path, say: Callable[[str], None], *, fleet: Path | None = None,
    runs: Sequence[Path] = (),
) -> Iterator[None]:
    """Writes the rounds of a fleet or of runs to the trackers as long as this context. Messages go to ``tracking.log``
    in ``folder``. Raises ConfigError for a tracker that is not installed."""
    if not options.wanted:
        yield
        return
    tracking.check(options)
    asked = {"fleet": None if fleet is None else str(fleet), "runs": [str(one) for one in runs],
             "tensorboard": options.tensorboard, "mlflow": options.mlflow}
    folder.mkdir(parents=True, exist_ok=True)
    command = processes.command("cloud_server.integrations.tracking", json.dumps(asked))
    with _beside("tracking", command, folder / "tracking.log", say, stop_s=LAST_LOOK_S):
        yield


@contextlib.contextmanager
def _beside(
    name: str, command: Sequence[str], path: Path, say: Callable[[str], None], stop_s: float = STOP_S
) -> Iterator[None]:
    """Runs a process as long as this context, with its messages in ``path``. Says its first line on stdout, or why it
    did not start; in that case the caller goes on without it."""
    with open(path, "wb") as log:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=log, start_new_session=True,
            env={**os.environ, processes.WITH_PARENT: str(os.getpid())},
        )
    assert process.stdout is not None
    try:
        said = process.stdout.readline().decode(errors="replace").strip()
        why = "; ".join(path.read_text(errors="replace").split("\n")).strip("; ")
        say(f"{name}: {said}" if said else f"no {name}: {why}")
        yield
    finally:
        _end([process], stop_s)
        process.stdout.close()


def _end(running: Sequence[subprocess.Popen[bytes]], stop_s: float = STOP_S) -> None:
    """Terminates all, and kills those that have not ended after ``stop_s``."""
    for process in running:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    until = time.monotonic() + stop_s
    for process in running:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, until - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()
