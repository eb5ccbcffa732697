"""``audit.ndjson`` in the fleet's folder: who asked for what, with what outcome, and which devices the aggregator let
in or refused.

One JSON object a line, mode 0600, only ever appended to. Each line has the sha256 of the line before it (``previous``),
so that a changed, removed or inserted line is found. Somebody who can write the file can also rewrite it whole, or cut
its end off. If you keep the hash of the last line elsewhere, ``check`` finds that too.

An action on the console has two lines with the same ``id``: one that is on the disk before anything is done, and one
with ``outcome`` after it. A command has one line, after it has succeeded. A line that a power cut has torn is skipped
when the file is read; what follows begins on a line of its own, and holds the hash of the torn one.

A full file is put aside (``audit_files``), and the chain goes on in the next one. ``drop_old`` deletes the oldest ones
and says so in the log, with the hash that the first remaining line has.
"""

from __future__ import annotations

import contextlib
import getpass
import hashlib
import json
import os
import secrets
import time
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import IO, Any

from cloud_server.identity import audit_files
from cloud_server.ledger import disk_errors
from fleet_core.base import processes
from fleet_core.base.errors import FleetError, StateError

FILE = audit_files.FILE
MOST_BYTES = 1 << 18
"""Bytes at the end of the file that are read for the console."""
MOST_LINE_BYTES = 1 << 16
LARGEST_BYTES = 1 << 24
"""Largest line that can be read to hash it; only other programs write lines that are longer than ours."""
TEXT = 500  # characters
ALWAYS = ("revoke",)
"""Actions that are done even if their line cannot be written; their lines may use the reserved room."""
DROP = "drop audit file"
CONSOLE, COMMAND, AGGREGATOR = "console", "command line", "aggregator"


# Write ----------------------------------------------------------------------------------------------------------------


@contextlib.contextmanager
def recorded(folder: Path, by: str, action: str, device: str = "") -> Iterator[list[str]]:
    """Records an action on the console before and after it. Append the outcome, as text, to the list. by: the browser's
    address.

    Raises StateError, before anything is done, if the disk cannot be written and the action is none of ALWAYS.
    """
    entry = _entry(CONSOLE, by, action, device)
    write = partial(_anyhow if action in ALWAYS else append, folder)
    write(entry)
    said: list[str] = []
    try:
        yield said
    except FleetError as error:
        write({**entry, "outcome": "failed", "text": str(error)[:TEXT]})
        raise
    write({**entry, "outcome": "done", "text": " ".join(said)[:TEXT]})


def done(folder: Path, action: str, device: str = "", text: str = "") -> None:
    """Records what a command of this machine's user has done. A line that cannot be written is reported on stderr,
    because the command has succeeded already."""
    _anyhow(folder, {**_entry(COMMAND, _user(), action, device), "outcome": "done", "text": text[:TEXT]})


class Recorder:
    """Records what the aggregator does: whom it lets in, revokes and refuses. now(): Unix seconds.

    A device can cause any number of refusals, so each device gets one line an hour, with their number since the line
    before.
    """

    HOUR_S = 3600.0
    MOST_DEVICES = 10_000

    def __init__(self, folder: Path, now: Callable[[], float], log: Callable[[str], None]):
        self._folder, self._now, self._log = folder, now, log
        self._refused: dict[str, tuple[float, int]] = {}  # device -> when it was last written, how many since

    def done(self, action: str, device: str = "", text: str = "", *, durable: bool = True) -> None:
        """durable: synced to the disk. A line that cannot be written is logged."""
        entry = {**_entry(AGGREGATOR, "", action, device), "at": self._now(), "outcome": "done", "text": text[:TEXT]}
        try:
            append(self._folder, entry, durable=durable)
        except StateError as error:
            self._log(f"not in the audit log: {action} {device}: {error}")

    def refused(self, device: str, text: str) -> None:
        """device: its name, or the id of a token. text: what was refused, and why."""
        at, since = self._refused.get(device, (-self.HOUR_S, 0))
        if self._now() - at < self.HOUR_S or (device not in self._refused and len(self._refused) >= self.MOST_DEVICES):
            self._refused[device] = at, since + 1
            return
        self._refused[device] = self._now(), 0
        self.done("refuse", device, f"{text}{f'; {since} more since the line before' if since else ''}", durable=False)


def append(folder: Path, entry: dict[str, Any], *, durable: bool = True) -> None:
    """Writes ``entry`` as one line with the hash of the line before. durable: synced to the disk. Raises StateError."""
    try:
        with audit_files.to_write(folder, durable=durable) as handle:
            size = os.fstat(handle).st_size
            torn = size > 0 and os.pread(handle, 1, size - 1) != b"\n"
            previous = hash_of(_last_line(handle, size)) if size else _end_of_full(folder)
            chained = {**entry, "previous": previous}
            line = json.dumps(chained, separators=(",", ":"), allow_nan=False).encode() + b"\n"
            rest = b"\n" * torn + line
            while rest:
                rest = rest[os.write(handle, rest):]
            if durable:
                os.fsync(handle)
    except OSError as error:
        raise StateError(f"cannot be written: {error.strerror or error}", where=str(folder / FILE),
                         hint="the console does nothing that it cannot write to the audit log") from error


def _end_of_full(folder: Path) -> str:
    """The hash of the last line before ``audit.ndjson``; empty if that is the first file."""
    full = audit_files.full_ones(folder)
    return _end_of(full[-1]) if full else ""


def _end_of(path: Path) -> str:
    with open(path, "rb") as file:
        return hash_of(_last_line(file.fileno(), os.fstat(file.fileno()).st_size))


def drop_old(folder: Path, keep: int, log: Callable[[str], None]) -> None:
    """Deletes the oldest of more than ``keep`` (at least 1) full files, each after a line that says so. Raises
    StateError."""
    for path in audit_files.full_ones(folder)[:-keep]:
        try:
            end = _end_of(path)
            append(folder, {**_entry(AGGREGATOR, "", DROP, ""), "outcome": "done", "text": f"{path.name} {end}"})
            path.unlink()
        except OSError as error:
            raise StateError(f"cannot be deleted: {error.strerror or error}", where=str(path)) from error
        log(f"{path.name} is deleted: [keep] audit_files in fleet.toml keeps {keep}")


def _last_line(handle: int, size: int) -> bytes:
    """The last line without its end of line; it may be empty. Raises StateError for a line that is longer than
    LARGEST_BYTES."""
    block = MOST_LINE_BYTES
    while True:
        tail = os.pread(handle, min(block, size), max(0, size - block))
        body = tail[:-1] if tail.endswith(b"\n") else tail
        if b"\n" in body or block >= size:
            return body.rpartition(b"\n")[2]
        if block > LARGEST_BYTES:
            raise StateError("has a line that Metafleet did not write", where=FILE,
                             expected=f"at most {LARGEST_BYTES} bytes",
                             hint="move the file away; a new one is begun")
        block *= 2


def hash_of(line: bytes) -> str:
    """sha256, in hex, of a line without its end of line."""
    return hashlib.sha256(line).hexdigest()


def _entry(via: str, by: str, action: str, device: str) -> dict[str, Any]:
    return {"id": secrets.token_hex(8), "at": time.time(), "via": via, "by": by[:200], "action": action,
            "device": device}


def _anyhow(folder: Path, entry: dict[str, Any]) -> None:
    """Writes ``entry``; if that fails, warns on stderr."""
    write = partial(append, folder, entry)
    try:
        disk_errors.with_reserve(folder, write) if entry["action"] in ALWAYS else write()
    except StateError as error:
        processes.say(f"warning: not in the audit log: {error}")


def _user() -> str:
    """The user who typed the command, also under sudo."""
    try:
        return os.environ.get("SUDO_USER") or getpass.getuser()
    except (OSError, KeyError):
        return f"user {os.getuid()}"


# Read -----------------------------------------------------------------------------------------------------------------


def read(folder: Path) -> list[dict[str, Any]]:
    """The last actions, oldest first, each with its outcome if it has one."""
    found: dict[str, dict[str, Any]] = {}
    for path in (*audit_files.full_ones(folder)[-1:], folder / FILE):
        for line in _end_lines(path):
            if (entry := _parsed(line)) is not None:
                found[entry["id"]] = entry
    return list(found.values())


def _end_lines(path: Path) -> list[bytes]:
    """The lines of the file's last MOST_BYTES; none of a file that cannot be read."""
    try:
        with open(path, "rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - MOST_BYTES))
            return file.read(MOST_BYTES).split(b"\n")[1 if size > MOST_BYTES else 0 :]
    except OSError:
        return []


def sentence(entry: dict[str, Any]) -> str:
    """An action in words."""
    what = " ".join(filter(None, (str(entry.get("action", "")), str(entry.get("device", "")))))
    outcome = {"done": "", "failed": " failed"}.get(str(entry.get("outcome", "")), " was requested; outcome unknown")
    text = f": {entry['text']}" if entry.get("text") else ""
    via = ", ".join(filter(None, (str(entry.get("via", CONSOLE)), str(entry.get("by", "")))))
    return f"{what}{outcome}{text} ({via})"


@dataclass
class Checked:
    """lines: in all files. head: the hash of the last one. unchained: lines of a version that wrote no hashes, before
    the chain begins. torn: numbers of lines that a power cut tore. broken: (number, what is wrong). entries: the last
    ones, or those after ``since``, each with its ``line`` and ``hash``. files: by name, the oldest first; a line's
    number counts from the first one's begin. dropped: how many files before them were deleted, as the log says."""

    lines: int = 0
    head: str = ""
    unchained: int = 0
    torn: list[int] = field(default_factory=list)
    broken: list[tuple[int, str]] = field(default_factory=list)
    entries: list[dict[str, Any]] = field(default_factory=list)
    files: list[str] = field(default_factory=list)
    dropped: int = 0


def check(folder: Path, *, since: str = "", most: int = 1000) -> Checked:
    """Reads all files, line by line, and checks that each line follows the previous one.

    since: the hash of a line, or its first digits. The entries after that line are returned; without such a line the
    log counts as broken. most: entries that are returned, the newest; of what is torn and broken, the oldest. Raises
    StateError if a file cannot be read.
    """
    found, reached, chained = Checked(), not since, False
    newest, dropped, begin = deque[dict[str, Any]](maxlen=most), set[str](), ""
    for raw in _lines(folder, found):
        found.lines += 1
        digest = hash_of(raw)
        entry = _parsed(raw)
        chained = chained or (entry is not None and "previous" in entry)
        if entry is None:
            found.torn[most:] = [found.lines]
        elif not chained:
            found.unchained += 1
        elif found.lines == 1 and found.dropped:
            begin = str(entry.get("previous"))
        elif wrong := _wrong(entry, found.head):
            found.broken[most:] = [(found.lines, wrong)]
        if entry is not None and reached:
            newest.append({**entry, "line": found.lines, "hash": digest})
        if entry is not None and entry.get("action") == DROP:
            dropped.add(str(entry.get("text")).rpartition(" ")[2])
        found.head, reached = digest, reached or digest.startswith(since)
    if found.dropped and begin not in dropped:
        found.broken.insert(0, (1, f"{found.dropped} files before it are missing, and no line says that they were "
                                   "dropped"))
    if not reached:
        whose = ", or its file was dropped" if found.dropped else ""
        found.broken.append((found.lines, f"no line has the hash {since[:64]}: it was changed, or lines were removed"
                                          f"{whose}"))
    found.entries = list(newest)
    return found


def _wrong(entry: dict[str, Any], head: str) -> str:
    """What is wrong with a line after the one with the hash ``head``; empty if it follows."""
    if "previous" not in entry:
        return "has no hash of the line before: it was changed or inserted"
    if entry["previous"] == head:
        return ""
    return "does not follow the line before: one of them was changed, or lines between them were removed or inserted"


def _lines(folder: Path, found: Checked) -> Iterator[bytes]:
    """The lines of all files; notes the files' names. A line over LARGEST_BYTES comes in pieces, which fail the
    check."""
    try:
        full, last, size = audit_files.to_read(folder)
        found.files = [path.name for path in (*full, *([folder / FILE] if last else []))]
        found.dropped = audit_files.number_of(full[0]) - 1 if full else 0
        for path in full:
            with open(path, "rb") as file:
                yield from _lines_of(file, path.stat().st_size)
        if last is not None:
            with last:
                yield from _lines_of(last, size)
    except OSError as error:
        raise StateError(f"cannot be read: {error.strerror or error}", where=str(error.filename or folder / FILE),
                         hint="try again: an old file may have been dropped meanwhile") from error


def _lines_of(file: IO[bytes], left: int) -> Iterator[bytes]:
    while left > 0:
        line, taken = _one(file, left)
        left -= taken
        yield line


def _one(file: IO[bytes], left: int) -> tuple[bytes, int]:
    """(the next line without its end, bytes taken of ``left``)."""
    line = file.readline(min(left, LARGEST_BYTES))
    return line[:-1] if line.endswith(b"\n") else line, max(len(line), 1)


def _parsed(line: bytes) -> dict[str, Any] | None:
    """The entry in a line; None for a line that this module did not write."""
    if len(line) > MOST_LINE_BYTES:
        return None
    with contextlib.suppress(ValueError, RecursionError):
        entry = json.loads(line)
        if isinstance(entry, dict) and isinstance(entry.get("id"), str) and isinstance(entry.get("at"), float):
            return entry
    return None
