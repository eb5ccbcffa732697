"""Distinguishes a disk that cannot be used now, which may pass, from a damaged file, which does not."""

from __future__ import annotations

import contextlib
import sqlite3
from collections.abc import Callable

from fleet_core.base import storage
from fleet_core.base.errors import StateError


def is_disk_error(error: BaseException) -> bool:
    """Whether the disk refused a file or the ledger, so that the same may succeed later."""
    of_the_ledger = isinstance(error, StateError) and isinstance(error.__cause__, sqlite3.OperationalError)
    return of_the_ledger or storage.is_disk_error(error)


def undisturbed(log: Callable[[str], None]) -> Callable[[str], None]:
    """``log`` that ignores OSError, because it may be a file on the full disk."""

    def say(line: str) -> None:
        with contextlib.suppress(OSError):
            log(line)

    return say
