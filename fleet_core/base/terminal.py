"""What both command lines share: common options, and output as JSON or as a table."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import TYPE_CHECKING, Any, TextIO

from fleet_core import __version__
from fleet_core.base import processes

if TYPE_CHECKING:
    import typer
    from rich.live import Live


def application(description: str) -> typer.Typer:
    """A Typer application with ``--version`` and ``--verbose``."""
    import typer  # not needed for tables

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
        import typer

        print(__version__)
        raise typer.Exit()


def main(app: Callable[..., Any]) -> None:
    """Runs ``app`` by ``processes.guarded``; ``--verbose`` may stand anywhere on the command line."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--verbose"]
    if len(arguments) < len(sys.argv) - 1:
        os.environ[processes.VERBOSE] = "1"
    processes.guarded(lambda: app(args=arguments))


def date(unix_s: float | None) -> str:
    """Unix seconds as local date and time, in ISO 8601 to the second; empty for None."""
    return "" if unix_s is None else datetime.fromtimestamp(unix_s).astimezone().isoformat(" ", "seconds")


def live(stream: TextIO) -> Live | None:
    """A display that the caller redraws in place, on a terminal; None where plain lines are wanted: elsewhere, with
    NO_COLOR, and on a dumb terminal. Needs rich."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    from rich.console import Console
    from rich.live import Live

    return Live(console=Console(file=stream), auto_refresh=False, redirect_stdout=False, redirect_stderr=False)


def show(value: Any) -> None:
    """Prints ``value`` as JSON on stdout."""
    print(json.dumps(value, indent=2, sort_keys=True, allow_nan=False))


def table(rows: Sequence[tuple[str, ...]], heads: tuple[str, ...]) -> None:
    """Prints rows on stdout in columns, one line per row."""
    print(columns(heads, rows))


def columns(heads: tuple[str, ...], rows: Sequence[tuple[str, ...]]) -> str:
    """Rows as text in columns, one line per row, the heads first."""
    lines = [heads, *rows]
    widths = [max(len(row[k]) for row in lines) for k in range(len(heads))]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in lines
    )
