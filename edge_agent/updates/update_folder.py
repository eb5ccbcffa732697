"""The files that the agent leaves for root's ``update.sh``, and the script's answer.

    HOME/update/announcement      the last one that was accepted, signed
    HOME/update/program.part      the archive, as far as it has come; complete: program.tar.gz
    HOME/update/PACKAGE, …        the signed statement and the files that come with it
    HOME/update/asked             serial and attempt that root was asked to install
    HOME/update/ready             the same; metafleet-update.path waits for it, and root removes it
    /opt/metafleet/update-result  what came of it; root's own
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from fleet_core.base import storage
from fleet_core.base.errors import StateError
from fleet_core.protocol.program_statement import ARCHIVE, FILE, MAX_ANNOUNCEMENT_BYTES, Announcement

RESULT = Path("/opt/metafleet/update-result")
HELPER = Path("/etc/systemd/system/metafleet-update.path")
KEY = Path("/etc/metafleet/fleet.pub")
PART, ANNOUNCEMENT, ASKED, READY = "program.part", "announcement", "asked", "ready"
MAX_RESULT_BYTES = 4096
OUTCOMES = ("running", "back", "refused")


def can_install() -> bool:
    """Whether this device has root's script and the fleet's key."""
    return HELPER.exists() and KEY.exists()


class UpdateFolder:
    """result: root's answer."""

    def __init__(self, home: Path, result: Path = RESULT):
        self._folder, self._result = home / "update", result

    @property
    def part(self) -> Path:
        return self._folder / PART

    @property
    def archive(self) -> Path:
        return self._folder / ARCHIVE

    def announced(self) -> bytes | None:
        """The last accepted announcement; None if there is none, or it cannot be read."""
        with contextlib.suppress(StateError):
            return storage.read_bytes(self._folder / ANNOUNCEMENT, limit=MAX_ANNOUNCEMENT_BYTES)
        return None

    def accept(self, payload: bytes) -> None:
        """Raises StateError."""
        storage.write_atomic(self._folder / ANNOUNCEMENT, payload, mode=0o600)

    def asked(self) -> tuple[int, int] | None:
        """(serial, attempt) that root was asked for last."""
        with contextlib.suppress(StateError, ValueError):
            serial, attempt = storage.read_bytes(self._folder / ASKED, limit=64).decode().split()
            return int(serial), int(attempt)
        return None

    def ask(self, announcement: Announcement, serial: int) -> None:
        """Writes everything to the disk, then asks root to install it. Raises StateError."""
        key = f"{serial} {announcement.attempt}".encode()
        for name, text in announcement.files.items():
            storage.write_atomic(self._folder / name, text.encode(), mode=0o600)
        storage.write_atomic(self._folder / FILE, announcement.program.encode(), mode=0o600)
        storage.write_atomic(self._folder / ASKED, key, mode=0o600)
        storage.write_atomic(self._folder / READY, key, mode=0o600)

    def answer(self) -> tuple[int, int, str, str] | None:
        """(serial, attempt, one of OUTCOMES, why) of root's last answer."""
        with contextlib.suppress(StateError, ValueError, KeyError):
            text = storage.read_bytes(self._result, limit=MAX_RESULT_BYTES).decode("utf-8", "replace")
            found = dict(line.partition("=")[::2] for line in text.splitlines())
            if found["outcome"] in OUTCOMES:
                return int(found["serial"]), int(found["attempt"]), found["outcome"], found["why"].strip()[:500]
        return None

    def clear(self) -> None:
        """Removes fetched files that are no longer needed."""
        for path in (self.part, self.archive):
            with contextlib.suppress(OSError):
                path.unlink(missing_ok=True)
