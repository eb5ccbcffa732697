"""Distinguishes a disk that cannot be used now, which may pass, from a damaged file, which does not pass. Also keeps
room on the disk for revoking devices, which must always work."""

from __future__ import annotations

import contextlib
import os
import sqlite3
from collections.abc import Callable
from pathlib import Path
from typing import TypeVar

from fleet_core.base import storage
from fleet_core.base.errors import StateError

RESERVE = "reserve"
RESERVE_BYTES = 4 << 20
Result = TypeVar("Result")


def is_disk_error(error: BaseException) -> bool:
    """Whether the disk could not be used for a file or the ledger; a later attempt may succeed."""
    of_the_ledger = isinstance(error, StateError) and isinstance(error.__cause__, sqlite3.OperationalError)
    return of_the_ledger or storage.is_disk_error(error)


def undisturbed(log: Callable[[str], None]) -> Callable[[str], None]:
    """``log`` that ignores OSError, because it may be a file on the full disk."""

    def say(line: str) -> None:
        with contextlib.suppress(OSError):
            log(line)

    return say


def reserve(folder: Path) -> None:
    """Reserves room for revoking devices, as a file in a fleet's folder. Does nothing if the disk has no room."""
    with contextlib.suppress(StateError):
        if not (folder / RESERVE).exists():
            storage.write_atomic(folder / RESERVE, os.urandom(RESERVE_BYTES))  # zeros may take no room on the disk


def with_reserve(folder: Path, action: Callable[[], Result]) -> Result:
    """Calls ``action``; if the disk is full, frees the room reserved in ``folder`` and calls it again. Raises
    StateError."""
    try:
        return action()
    except (StateError, OSError) as error:
        if not is_disk_error(error) or not (folder / RESERVE).exists():
            raise
        (folder / RESERVE).unlink()
        return action()
