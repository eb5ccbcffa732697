"""``audit.ndjson`` in the fleet's folder: who asked for what on the console, and what came of it.

One JSON object a line, mode 0600, only ever appended to. An action has two lines with the same ``id``: one that is on
the disk before anything is done, and one with ``outcome`` after it. A line that a power cut has torn is skipped when
the file is read; what follows begins on a line of its own.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from fleet_core.base import storage
from fleet_core.base.errors import FleetError, StateError

FILE = "audit.ndjson"
MOST_BYTES = 1 << 18
"""How much of the file's end is read."""


@contextlib.contextmanager
def recorded(folder: Path, by: str, action: str, device: str = "") -> Iterator[list[str]]:
    """Records an action before and after it. Put what came of it, as text, into the list. by: the browser's address.

    Raises StateError, before anything is done, if the disk cannot be written.
    """
    entry = {"id": secrets.token_hex(8), "at": time.time(), "by": by, "action": action, "device": device}
    append(folder, entry)
    said: list[str] = []
    try:
        yield said
    except FleetError as error:
        append(folder, {**entry, "outcome": "failed", "text": str(error)[:500]})
        raise
    append(folder, {**entry, "outcome": "done", "text": " ".join(said)[:500]})


def append(folder: Path, entry: dict[str, Any]) -> None:
    """Writes ``entry`` as one line, synced to the disk. Raises StateError."""
    path = folder / FILE
    new = not path.exists()
    try:
        handle = os.open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, 0o600)
        try:
            fcntl.flock(handle, fcntl.LOCK_EX)
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            line = json.dumps(entry, separators=(",", ":"), allow_nan=False).encode() + b"\n"
            rest = b"\n" * torn + line
            while rest:
                rest = rest[os.write(handle, rest):]
            os.fsync(handle)
        finally:
            os.close(handle)
        if new:
            storage.sync(folder)
    except OSError as error:
        raise StateError(f"cannot be written: {error.strerror or error}", where=str(path),
                         hint="nothing is done that is not in the audit log") from error


def read(folder: Path) -> list[dict[str, Any]]:
    """The last actions, oldest first, each with its outcome if it has one."""
    found: dict[str, dict[str, Any]] = {}
    try:
        with open(folder / FILE, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MOST_BYTES))
            lines = file.read(MOST_BYTES).split(b"\n")[1 if size > MOST_BYTES else 0 :]
    except OSError:
        return []
    for line in lines:
        with contextlib.suppress(ValueError, RecursionError):
            entry = json.loads(line)
            if isinstance(entry, dict) and isinstance(entry.get("id"), str) and isinstance(entry.get("at"), float):
                found[entry["id"]] = entry
    return list(found.values())


def sentence(entry: dict[str, Any]) -> str:
    """An action in words."""
    what = " ".join(filter(None, (str(entry.get("action", "")), str(entry.get("device", "")))))
    outcome = {"done": "", "failed": " failed"}.get(str(entry.get("outcome", "")), " was asked for; its end is unknown")
    text = f": {entry['text']}" if entry.get("text") else ""
    return f"{what}{outcome}{text} (console, {entry.get('by', '')})"
