"""Follows the programs that the fleet announces: fetches one for this device, and asks root to install it.

The progress is on the disk, in ``update_folder``; after a power cut or a restart the update continues from there.
"""

from __future__ import annotations

import platform
import ssl
import sys
from collections.abc import Callable
from pathlib import Path

from edge_agent.connection.blob_download import Fetcher
from edge_agent.updates.https_download import HttpsDownload
from edge_agent.updates.partial_file import PartialFile
from edge_agent.updates.update_folder import RESULT, UpdateFolder
from fleet_core.base.backoff import Backoff
from fleet_core.base.errors import FleetError, MessageError, StateError
from fleet_core.link.interface import Link
from fleet_core.protocol.device_messages import UpdateState
from fleet_core.protocol.program_statement import Announcement, Statement, read_announcement
from fleet_core.protocol.signing import Verifier

LOOK_S = 1.0
ASK_AGAIN_S, AFTER_START_S = 600.0, 10.0
"""Seconds after which root is asked again: after the last request, and after a start. Root does nothing twice for the
same request."""
RETRY_S, MOST_RETRY_S = 10.0, 900.0
FETCHING, INSTALLING, RUNNING, REFUSED = "fetching", "installing", "running", "refused"


def system() -> str:
    """The system that a program must be made for, as ``aarch64 3.13``."""
    return f"{platform.machine()} {sys.version_info[0]}.{sys.version_info[1]}"[:64]


class ProgramUpdates:
    """One device's updates. key: the fleet's, as the token gave it. version: of the program that runs. now_ms: Unix ms.
    ``state`` is for the presence; ``changed`` is called when it has changed, ``missing`` when chunks do not come.
    ``verifier``: of the accepted keys; the agent, which follows the fleet's key, sets it. context(): for https.
    """

    def __init__(
        self, fleet: str, name: str, key: str, home: Path, link: Link, version: str, *,
        clock: Callable[[], float], now_ms: Callable[[], int], log: Callable[[str], None],
        result: Path = RESULT,
        context: Callable[[], ssl.SSLContext] = ssl.create_default_context,
    ):
        self._fleet, self._name, self._version = fleet, name, version
        self.verifier: Callable[[], Verifier] = lambda: Verifier(key)
        self._clock, self._now_ms, self._log, self._context = clock, now_ms, log, context
        self._folder = UpdateFolder(home, result)
        self._fetcher = Fetcher(fleet, link, clock, lambda kind, size: None, device=name,
                                missing=lambda kind, times: self.missing(kind, times))
        self._backoff = Backoff(name, clock, RETRY_S, MOST_RETRY_S)
        self._waits = False
        self._file: PartialFile | None = None
        self._download: HttpsDownload | None = None
        self._current: tuple[Announcement, Statement] | None = None
        self._looked = self._asked_at = clock()
        self.changed: Callable[[], None] = lambda: None
        self.missing: Callable[[str, int], None] = lambda kind, times: None
        self.state = UpdateState(system())
        self._resume()

    # What is announced ------------------------------------------------------------------------------------------------

    def on_announcement(self, payload: bytes) -> None:
        """Starts the announced update; an empty payload withdraws it. The presence tells of a refusal, unless an update
        is in progress."""
        if not payload:
            return self._withdraw()
        try:
            self._accept(payload)
        except MessageError as error:
            if self.state.st not in (FETCHING, INSTALLING):
                self._tell(REFUSED, f"an announcement: {error}", 0, 0)
            raise

    def _accept(self, payload: bytes) -> None:
        found, statement = read_announcement(payload, self.verifier(), self._fleet)
        last = self._last()
        if last is not None and found.seq < last.seq:
            raise MessageError(f"an announcement with the old sequence number {found.seq}", expected=f"{last.seq}")
        if found.exp < self._now_ms():
            raise MessageError("an announcement that has expired")
        if last is None or found.seq > last.seq:
            self._folder.accept(payload)
        if self._name in found.devices:
            self._begin(found, statement)
        elif self.state.st == FETCHING:
            self._withdraw()

    def _last(self) -> Announcement | None:
        payload = self._folder.announced()
        try:
            return None if payload is None else read_announcement(payload, self.verifier(), self._fleet)[0]
        except MessageError:  # of another key or fleet: this device was enrolled again
            return None

    def _resume(self) -> None:
        """Reads what root was asked for, and has answered, before this start."""
        answer, asked = self._folder.answer(), self._folder.asked()
        if answer is not None:
            serial, attempt, outcome, why = answer
            self.state = UpdateState(system(), serial, attempt, outcome, why)
        if asked is not None and (answer is None or asked != answer[:2]):
            self.state = UpdateState(system(), *asked, INSTALLING)

    def _begin(self, found: Announcement, statement: Statement) -> None:
        key = statement.serial, found.attempt
        if self._current is not None and (self._current[1].serial, self._current[0].attempt) == key:
            return
        self._stop()
        self._current = found, statement
        answer = self._folder.answer()
        wanted = f"{statement.arch} {statement.python}"
        if answer is not None and answer[:2] == key:
            self._tell(answer[2], answer[3], *key)
        elif self._folder.asked() == key:
            self._asked_at = self._clock() - ASK_AGAIN_S + AFTER_START_S  # after a power cut root may not know of it
            self._tell(INSTALLING, "", *key)
        elif self._version == statement.version:
            self._tell(RUNNING, "", *key)
        elif wanted != system():
            self._tell(REFUSED, f"the program is for {wanted}, this device is {system()}", *key)
        else:
            self._waits = False
            self._tell(FETCHING, "", *key)

    def _withdraw(self) -> None:
        """Stops the update; the chunks that have arrived stay for another attempt."""
        self._stop()
        self._current = None
        if self.state.st == FETCHING:
            self._tell("", "", 0, 0)

    def _stop(self) -> None:
        self._fetcher.cancel()
        if self._download is not None and self._download.busy:
            self._download.stop()
        elif self._file is not None:
            self._file.close()
        self._file = self._download = None

    # Fetch and install ------------------------------------------------------------------------------------------------

    def on_chunk(self, blob_id: str, k: int | None, payload: bytes) -> bool:
        """Takes a chunk; returns whether it was the program's. Raises MessageError, StateError."""
        if k is None or self._fetcher.target != blob_id:
            return False
        try:
            self._fetcher.put(blob_id, k, payload)
        except StateError as error:
            self._failed(error)
        return True

    def tick(self) -> None:
        """Does what is due; never for long."""
        if self.state.st == INSTALLING and self._clock() - self._looked > LOOK_S:
            self._looked = self._clock()
            self._look_for_answer()
        elif self.state.st == FETCHING and self._current is not None:
            try:
                self._fetch(*self._current)
            except FleetError as error:
                self._failed(error)

    def close(self) -> None:
        self._stop()

    def _fetch(self, found: Announcement, statement: Statement) -> None:
        if self._waits and not self._backoff.expired:
            return
        self._waits = False
        if self._folder.archive.exists() and self._file is None:
            self._folder.archive.replace(self._folder.part)  # checked again, as if it had just arrived
        if self._file is None:
            self._file = PartialFile(self._folder.part, found.blob)
        if not self._file.look():
            return
        if self._file.complete:
            return self._install(found, statement)
        if not found.url:
            if self._fetcher.target is None:
                self._fetcher.into(self._file, "program")
            return self._fetcher.tick()
        if self._download is None:
            self._download = HttpsDownload(found.url, self._file, self._context)
        elif not self._download.busy:
            error, self._download = self._download.error, None
            if error:
                raise MessageError(error)

    def _install(self, found: Announcement, statement: Statement) -> None:
        assert self._file is not None
        file, self._file = self._file, None
        self._fetcher.cancel()
        file.finish(self._folder.archive)
        self._folder.ask(found, statement.serial)
        self._asked_at = self._clock()
        self._log(f"the program {statement.version} has arrived and waits to be installed")
        self._tell(INSTALLING, "", statement.serial, found.attempt)

    def _failed(self, error: FleetError) -> None:
        """Tries again after a growing pause, with the chunks that have arrived."""
        self._stop()
        self._waits = True
        self._backoff.repeat()
        self._log(f"the program has not arrived yet: {error}")
        self._tell(FETCHING, str(error).splitlines()[0], self.state.serial, self.state.attempt)

    def _look_for_answer(self) -> None:
        answer, key = self._folder.answer(), (self.state.serial, self.state.attempt)
        if answer is not None and answer[:2] == key:
            self._log(f"update: {answer[2]} {answer[3]}".rstrip())
            self._folder.clear()
            return self._tell(answer[2], answer[3], *key)
        if self._current is not None and self._clock() - self._asked_at > ASK_AGAIN_S:
            self._asked_at = self._clock()
            if self._folder.archive.exists():
                self._folder.ask(self._current[0], self._current[1].serial)
            elif self._version != self._current[1].version:
                self._tell(FETCHING, "", *key)

    def _tell(self, st: str, why: str, serial: int, attempt: int) -> None:
        state = UpdateState(system(), serial, attempt, st, why[:500])
        if state != self.state:
            self.state = state
            self.changed()
