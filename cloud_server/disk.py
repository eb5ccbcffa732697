"""A disk that cannot be used now, told apart from a file that is damaged: the first passes, the second does not."""

from __future__ import annotations

import contextlib
import itertools
import sqlite3
from collections.abc import Callable
from pathlib import Path

from fleet_core import storage
from fleet_core.errors import StateError

BLOCK_BYTES = 1 << 20


def is_of_the_disk(error: BaseException) -> bool:
    """Whether the disk refused a file or the ledger, so that the same may succeed later."""
    of_the_ledger = isinstance(error, StateError) and isinstance(error.__cause__, sqlite3.OperationalError)
    return of_the_ledger or storage.is_of_the_disk(error)


def try_out(folder: Path, like: str) -> None:
    """Writes a file as large as the largest one ``like`` this in ``folder``, and up to 2 MiB more for the ledger and an
    update, and deletes it again. Raises StateError when that cannot be."""
    blocks = max((path.stat().st_size for path in folder.glob(like)), default=0) // BLOCK_BYTES + 2
    probe = folder / ".probe"
    try:
        storage.write_parts(probe, itertools.repeat(bytes(BLOCK_BYTES), blocks))
    except StateError as error:
        raise StateError(
            error.what, where=str(folder), hint=f"{blocks} MiB must be free, and writable, to begin"
        ) from error.__cause__
    probe.unlink()


def undisturbed(log: Callable[[str], None]) -> Callable[[str], None]:
    """``log`` for those who must go on when it fails: it may well be a file on the disk that is full."""

    def say(line: str) -> None:
        with contextlib.suppress(OSError):
            log(line)

    return say
