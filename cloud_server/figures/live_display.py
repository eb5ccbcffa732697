"""Output on a terminal that is redrawn in place, and plain lines elsewhere."""

from __future__ import annotations

import os
import sys
from typing import Self, TextIO

from rich.console import Console
from rich.live import Live
from rich.text import Text

from cloud_server.figures.formatting import plain_text


class Display:
    """A context manager that writes to ``stream`` (None: stderr). ``live`` is drawn by the subclass."""

    def __init__(self, stream: TextIO | None):
        self._stream = stream or sys.stderr
        self._live = _live(self._stream)

    def __enter__(self) -> Self:
        if self._live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._finish()
        if self._live:
            self._live.stop()

    def _finish(self) -> None:
        """Shows what is left to show, before the display ends."""

    def say(self, line: str) -> None:
        """Prints a line of text, above what is redrawn."""
        if self._live:
            self._live.console.print(Text(plain_text(line)))
        else:
            print(plain_text(line), file=self._stream, flush=True)


def _live(stream: TextIO) -> Live | None:
    """None if plain lines are wanted: with NO_COLOR, or if ``stream`` is no terminal or a dumb one."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    return Live(console=Console(file=stream), auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
