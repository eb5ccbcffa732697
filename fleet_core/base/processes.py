"""Starting and ending Metafleet's processes: errors on stderr with exit codes, and signals."""

from __future__ import annotations

import contextlib
import io
import json
import os
import shlex
import signal
import subprocess
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any, NoReturn

from fleet_core.base.errors import FleetError

INTERRUPTED = 130
WITH_PARENT = "METAFLEET_WITH_PARENT"  # id of the process that this one must not outlive
VERBOSE = "METAFLEET_VERBOSE"  # if set, errors are printed with their traceback


def guarded(action: Callable[[], Any]) -> None:
    """Runs ``action``. A FleetError ends the process with its message on stderr and its exit code."""
    if sys.platform == "win32":
        print("error: Metafleet runs on Linux and macOS; on Windows, inside WSL2", file=sys.stderr)
        sys.exit(2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # like stderr: a terminal without λ must not cause an error
    try:
        action()
    except FleetError as error:
        if os.environ.get(VERBOSE):
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


def python(*arguments: str) -> list[str]:
    """The command for this Python with ``arguments``. ``-P`` prevents that a file in the working folder, such as a
    user's ``random.py``, is imported instead of a module; Python 3.10 has no such option."""
    return [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), *arguments]


def command(module: str, *arguments: str) -> list[str]:
    """The command ``python -m module arguments``."""
    return python("-m", module, *arguments)


def exec_module(module: str, *arguments: str) -> NoReturn:
    """Replaces this process by ``python -m module arguments``, to free the memory of the command line's libraries."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command(module, *arguments))


def say(line: str) -> None:
    """Prints a line for people on stderr."""
    print(line, file=sys.stderr, flush=True)


def told(command: tuple[str, ...], message: Mapping[str, Any], timeout_s: float, folder: Path | None = None) -> str:
    """Runs a program of the user's, in ``folder``, with the message as JSON on its standard input; returns why that
    failed, or an empty text."""
    try:
        done = subprocess.run(command, input=json.dumps(message).encode(), stdout=subprocess.DEVNULL,
                              stderr=subprocess.PIPE, timeout=timeout_s, check=False, cwd=folder)
    except (OSError, subprocess.SubprocessError) as error:
        return f"{command[0]}: {error}"
    said = done.stderr[-500:].decode(errors="replace").strip()
    return f"{command[0]}: exit code {done.returncode}: {said}" if done.returncode else ""


def typed(path: Any) -> str:
    """A path as a shell needs it: in quotes when it has a space."""
    return shlex.quote(str(path))


@contextlib.contextmanager
def until_signal() -> Iterator[Callable[[], bool]]:
    """Yields a function that is true after SIGINT or SIGTERM; a second signal raises KeyboardInterrupt.

    When METAFLEET_WITH_PARENT is the id of the parent process, the function is also true after that process has ended.
    """
    received: list[int] = []
    parent = os.environ.get(WITH_PARENT)

    def on_signal(number: int, frame: FrameType | None) -> None:
        if received:
            raise KeyboardInterrupt
        received.append(number)

    before = {number: signal.signal(number, on_signal) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(received) or (parent is not None and str(os.getppid()) != parent)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
