"""Runs commands as processes of this Python, as a user would, and records each with its exit code and output."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet_core.base.processes import WITH_PARENT

PROGRAMS = {"metafleet": "cloud_server.commands.cli", "edge-agent": "edge_agent.commands.cli"}
COMMAND_S, STOP_S, LOOK_S = 300.0, 20.0, 0.2


class Failed(RuntimeError):
    """A failure, with the command's output."""


@dataclass(eq=False)
class Commands:
    """Runs commands in ``folder`` and records them."""

    folder: Path
    noted: list[dict[str, Any]] = field(default_factory=list)
    running: list[tuple[subprocess.Popen[bytes], Path, dict[str, Any]]] = field(default_factory=list)

    def done(self, *command: object, refusal: str = "") -> subprocess.CompletedProcess[str]:
        """Runs a command to its end. Raises Failed for any exit code but 0, unless its output has ``refusal``."""
        words, begun = [str(word) for word in command], time.monotonic()
        found = subprocess.run(_python(words), cwd=self.folder, env=_environ(), stdin=subprocess.DEVNULL,
                               capture_output=True, text=True, timeout=COMMAND_S, check=False)
        self.noted.append({"command": " ".join(words), "exit_code": found.returncode, "stdout": found.stdout,
                           "stderr": found.stderr, "seconds": round(time.monotonic() - begun, 1)})
        if found.returncode and not (refusal and refusal in found.stderr):
            raise Failed(f"{' '.join(words)}: exit code {found.returncode}\n{found.stdout}{found.stderr}")
        return found

    def start(self, *command: object) -> tuple[subprocess.Popen[bytes], Path]:
        """(process, log) of a command that runs until ``stop``."""
        words = [str(word) for word in command]
        log = self.folder / f"program-{len(self.running)}.log"
        with log.open("wb") as output:
            process = subprocess.Popen(_python(words), cwd=self.folder, env=_environ(), stdin=subprocess.DEVNULL,
                                       stdout=output, stderr=output, start_new_session=True)
        note: dict[str, Any] = {"command": " ".join(words)}
        self.noted.append(note)
        self.running.append((process, log, note))
        return process, log

    def until(self, condition: Callable[[], object], what: str, timeout_s: float = COMMAND_S) -> None:
        """Raises Failed if a program ends before, or after ``timeout_s`` seconds."""
        until_s = time.monotonic() + timeout_s
        while not condition():
            for process, log, note in self.running:
                if process.poll() is not None and "exit_code" not in note:
                    raise Failed(f"{note['command']}: ended with {process.returncode}\n{text(log)[-3000:]}")
            if time.monotonic() > until_s:
                said = "\n".join(f"{note['command']}:\n{text(log)[-1500:]}" for _, log, note in self.running)
                raise Failed(f"{what}: not after {timeout_s:g} s\n{said}")
            time.sleep(LOOK_S)

    def says(self, log: Path, words: str) -> None:
        self.until(lambda: words in text(log), f"'{words}'")

    def stop(self, *processes: subprocess.Popen[bytes]) -> None:
        """Ends programs with SIGTERM, as a user does. Raises Failed for any exit code but 0."""
        self._ask(processes)
        failed = []
        for process, log, note in self.running:
            if process in processes:
                process.wait(STOP_S)
                note |= {"exit_code": process.returncode, "stdout": "", "stderr": text(log)}
                failed += [f"{note['command']}: ended with {process.returncode}\n{text(log)[-3000:]}"
                           ] * (process.returncode != 0)
        if failed:
            raise Failed("\n".join(failed))

    def end(self) -> None:
        """Ends all remaining processes, whatever their exit codes."""
        left = [process for process, _, _ in self.running if process.poll() is None]
        self._ask(left)
        for process in left:
            with suppress(subprocess.TimeoutExpired):
                process.wait(STOP_S)
            if process.poll() is None:
                process.kill()
                process.wait()

    def _ask(self, processes: Iterable[subprocess.Popen[bytes]]) -> None:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)


def _python(words: list[str]) -> list[str]:
    return [sys.executable, "-m", PROGRAMS[words[0]], *words[1:]]


def _environ() -> dict[str, str]:
    """This environment without variables that change the commands' defaults; programs end with this process."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("METAFLEET_")}
    return kept | {WITH_PARENT: str(os.getpid())}


def text(log: Path) -> str:
    return log.read_text(errors="replace")
