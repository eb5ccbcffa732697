"""What both command lines do alike: errors to stderr with their exit code, data to stdout, stopping in order."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from types import FrameType
from typing import Any

import typer

from fleet_core import __version__
from fleet_core.errors import FleetError

INTERRUPTED = 130
WITH_PARENT = "METAFLEET_WITH_PARENT"  # the process that this one must not outlive


def application(description: str) -> typer.Typer:
    """A Typer application with ``--version`` and ``--verbose``."""
    app = typer.Typer(
        help=description, no_args_is_help=True, add_completion=False, pretty_exceptions_enable=False,
        context_settings={"help_option_names": ["-h", "--help"]},
    )

    @app.callback()
    def _options(
        version: bool = typer.Option(False, "--version", help="Print the version and leave.", callback=_version,
                                     is_eager=True),
        verbose: bool = typer.Option(False, "--verbose", help="Print the traceback of an error."),
    ) -> None:
        del version, verbose

    return app


def _version(wanted: bool) -> None:
    if wanted:
        print(__version__)
        raise typer.Exit()


def main(app: Callable[..., Any]) -> None:
    """Runs ``app``; a FleetError becomes its message on stderr and its exit code, everything else a traceback."""
    if sys.platform == "win32":
        print("error: Metafleet runs on Linux and macOS; on Windows, inside WSL2", file=sys.stderr)
        sys.exit(2)
    verbose = "--verbose" in sys.argv[1:]
    arguments = [a for a in sys.argv[1:] if a != "--verbose"]
    try:
        app(args=arguments)
    except FleetError as error:
        if verbose:
            traceback.print_exc()
        print(f"error: {error}", file=sys.stderr)
        sys.exit(error.exit_code)
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        sys.exit(INTERRUPTED)
    except BrokenPipeError:
        sys.stderr.close()
        sys.exit(1)


def say(line: str) -> None:
    """A line for people, on stderr."""
    print(line, file=sys.stderr, flush=True)


def show(value: Any) -> None:
    """``value`` as JSON on stdout."""
    print(json.dumps(value, indent=2, sort_keys=True, allow_nan=False))


def table(rows: Sequence[tuple[str, ...]], heads: tuple[str, ...]) -> None:
    """Rows on stdout in columns; readable without colour, one line a row."""
    widths = [max(len(row[k]) for row in [heads, *rows]) for k in range(len(heads))]
    for row in [heads, *rows]:
        print("  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip())


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
