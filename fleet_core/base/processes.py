"""A process of ours from its start to its end: errors to stderr with their exit code, stopping in order."""

from __future__ import annotations

import contextlib
import io
import os
import shlex
import signal
import sys
import traceback
from collections.abc import Callable, Iterator
from types import FrameType
from typing import Any, NoReturn

from fleet_core.base.errors import FleetError

INTERRUPTED = 130
WITH_PARENT = "METAFLEET_WITH_PARENT"  # the process that this one must not outlive
VERBOSE = "METAFLEET_VERBOSE"  # set: the traceback of an error


def guarded(action: Callable[[], Any]) -> None:
    """Does it; a FleetError becomes its message on stderr and its exit code, everything else a traceback."""
    if sys.platform == "win32":
        print("error: Metafleet runs on Linux and macOS; on Windows, inside WSL2", file=sys.stderr)
        sys.exit(2)
    if isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: a terminal without λ is no reason to fail
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
    """This Python with ``arguments``, where no file of the working folder stands in for a module that is meant, as a
    user's own ``random.py`` would. Python 3.10 has no switch for that."""
    return [sys.executable, *(["-P"] if sys.version_info >= (3, 11) else []), *arguments]


def command(module: str, *arguments: str) -> list[str]:
    """``python -m module arguments`` so."""
    return python("-m", module, *arguments)


def become(module: str, *arguments: str) -> NoReturn:
    """Goes on as ``python -m module arguments``, in the same process but without what was imported so far: the command
    line's libraries would stay in memory as long as an agent or an aggregator runs."""
    sys.stdout.flush()
    sys.stderr.flush()
    os.execv(sys.executable, command(module, *arguments))


def say(line: str) -> None:
    """A line for people, on stderr."""
    print(line, file=sys.stderr, flush=True)


def typed(path: Any) -> str:
    """A path as it is typed into a shell: in quotes where it has a space."""
    return shlex.quote(str(path))


@contextlib.contextmanager
def until_signal() -> Iterator[Callable[[], bool]]:
    """Gives a function that is true once SIGINT or SIGTERM came; the second one ends the process at once.

    With METAFLEET_WITH_PARENT set to the id of the process that started this one it is true as well once that is gone.
    """
    came: list[int] = []
    parent = os.environ.get(WITH_PARENT)

    def note(number: int, frame: FrameType | None) -> None:
        if came:
            raise KeyboardInterrupt
        came.append(number)

    before = {number: signal.signal(number, note) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield lambda: bool(came) or (parent is not None and str(os.getppid()) != parent)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
