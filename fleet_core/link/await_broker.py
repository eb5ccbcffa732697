"""Waiting until a broker answers."""

from __future__ import annotations

import time
from collections.abc import Callable

from fleet_core.base.errors import LinkError
from fleet_core.link.interface import Link


def await_broker(
    link: Link, step: Callable[[], object], url: str, stopped: Callable[[], bool], limit_s: float
) -> None:
    """Calls ``step`` until ``link`` is connected or ``stopped()``. step: polls the link and handles its events. Raises
    LinkError when no broker answered at ``url`` within ``limit_s`` seconds."""
    until = time.monotonic() + limit_s
    while not link.connected and not stopped():
        step()
        if not link.connected and time.monotonic() > until:
            raise LinkError(
                f"no broker answered in {limit_s:g} s", where=url, hint="start the broker, or check --broker"
            )
