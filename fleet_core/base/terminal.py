"""Shared by both command lines: how they end, and output as JSON or as a table."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Sequence
from datetime import datetime
from typing import Any

from fleet_core.base import processes


def main(app: Callable[..., Any]) -> None:
    """Runs ``app`` by ``processes.guarded``; ``--verbose`` may stand anywhere on the command line."""
    arguments = [argument for argument in sys.argv[1:] if argument != "--verbose"]
    if len(arguments) < len(sys.argv) - 1:
        os.environ[processes.VERBOSE] = "1"
    processes.guarded(lambda: app(args=arguments))


def date(unix_s: float | None) -> str:
    """Unix seconds as local date and time, in ISO 8601 to the second; empty for None."""
    return "" if unix_s is None else datetime.fromtimestamp(unix_s).astimezone().isoformat(" ", "seconds")


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
