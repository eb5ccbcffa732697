"""Wait for an event. The limit only catches events that never come: on a busy machine one may take minutes."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

PATIENCE_S = 300.0
"""Below pytest's own limit for a test, so that a vain wait ends with its reason."""


def until(
    condition: Callable[[], object],
    meanwhile: Callable[[], object] = lambda: time.sleep(0.02),
    reason: Callable[[], object] = lambda: "",
) -> None:
    """Call ``meanwhile`` until ``condition`` holds. reason: text for a failure."""
    end_s = time.monotonic() + PATIENCE_S
    while not condition():
        assert time.monotonic() < end_s, f"not after {PATIENCE_S:g} s: {reason()}"
        meanwhile()


def exit_or_kill(process: subprocess.Popen[str] | subprocess.Popen[bytes]) -> None:
    """Wait for a process that was asked to end; after a minute, kill it."""
    try:
        process.wait(60)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
