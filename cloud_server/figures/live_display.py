"""A display on a terminal that is redrawn in place."""

from __future__ import annotations

import os
from typing import TextIO

from rich.console import Console
from rich.live import Live


def live(stream: TextIO) -> Live | None:
    """A display that the caller redraws; None where plain lines are wanted: where ``stream`` is no terminal or a dumb
    one, and with NO_COLOR."""
    if not stream.isatty() or os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb":
        return None
    return Live(console=Console(file=stream), auto_refresh=False, redirect_stdout=False, redirect_stderr=False)
