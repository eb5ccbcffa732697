"""Updates that devices fetch themselves: announces a program to one wave of devices after the other.

A wave has ended when each of its devices has said that the new program runs and stays, or has failed: it refused the
program, went back to the previous program, or did not report in time. With too many failures no further wave begins.
When no wave is under way any more, the announcement and the chunks are cleared at the broker.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from cloud_server.broker.publisher import Publisher
from cloud_server.identity.audit_log import Recorder
from cloud_server.ledger.ledger import Ledger
from cloud_server.records import update_record
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.update_record import (
    ABORTED,
    DONE,
    ENDED,
    FAILED,
    GOING,
    HALTED,
    RUNNING,
    WAITING,
    Update,
)
from fleet_core.base import storage
from fleet_core.base.errors import FleetError, StateError
from fleet_core.link.interface import Link
from fleet_core.protocol import messages, program_statement, topics
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.program_statement import Announcement

REQUEST = "update"
"""A request in the ledger: ``start SERIAL``, ``resume …`` or ``abort …``."""
LOOK_S = 1.0
GRACE_S = 30.0
"""How long after the aggregator has connected no device counts as late, so that devices can announce themselves."""
EXPIRY_S = 30 * 86400


class ProgramWaves:
    """The fleet's update, if there is one. Call ``tick`` often. sign(body): with the fleet's key."""

    def __init__(
        self, fleet: Fleet, link: Link, ledger: Ledger, audit: Recorder, *, sign: Callable[[bytes], bytes],
        clock: Callable[[], float], now: Callable[[], float], log: Callable[[str], None],
    ):
        self._sign = sign
        self._fleet, self._ledger, self._audit = fleet, ledger, audit
        self._clock, self._now, self._log = clock, now, log
        name, kept = fleet.config.fleet.name, fleet.folder / "state" / "published-program.json"
        self.publisher = Publisher(name, link, kept, clock=clock, log=log, topic=topics.program(name))
        self._update = update_record.read(fleet.folder)
        self._announced: tuple[int, ...] | None = None
        self._looked_at = self._connected_at = clock()
        self._archive: tuple[Path, Blob, mmap.mmap] | None = None

    # Requests ---------------------------------------------------------------------------------------------------------

    def request(self, value: str) -> None:
        """Carries out what the operator asked for. Raises StateError if the disk cannot be written."""
        what, _, rest = value.partition(" ")
        update = self._update
        if what == "start" and (update is None or update.st != RUNNING):
            self._start(rest)
        elif what == "resume" and update is not None and update.st in (HALTED, ABORTED):
            self._save(update.again(), "resumed")
        elif what == "abort" and update is not None and update.st in (RUNNING, HALTED):
            self._save(replace(update, st=ABORTED, why="an operator asked for it"), "aborted")

    def _start(self, serial: str) -> None:
        try:
            plan = update_record.read_plan(self._fleet.folder / update_record.FOLDER / serial)
        except StateError as error:
            if storage.is_disk_error(error) and not isinstance(error.__cause__, FileNotFoundError):
                raise
            return self._log(f"the update {serial[:32]} did not begin: {error}")
        self._save(update_record.begun(plan), f"begun for {len(plan.devices)} devices")

    # Waves ------------------------------------------------------------------------------------------------------------

    def reconnected(self) -> None:
        self._connected_at = self._clock()
        if self._update is not None:
            self.publisher.reconnected()

    def again(self) -> None:
        """Signs and publishes the announcement again, because another key signs now."""
        self._announced = None

    def tick(self) -> None:
        """Raises StateError if the disk cannot be written."""
        if self._update is None:
            return
        self.publisher.tick()
        if self._clock() - self._looked_at < LOOK_S:
            return
        self._looked_at = self._clock()
        if self._update.st == RUNNING:
            self._look(self._update)
        self._publish(self._update)

    def _look(self, update: Update) -> None:
        before = update
        for name in update.of(GOING):
            st, why = self._fate(update, name)
            if st != GOING:
                self._log(f"update {update.plan.version}: {name} {st}{f': {why}' if why else ''}")
                update = update.moved(name, st, why)
        if not update.of(GOING):
            return self._next(update)
        if update is not before:
            self._save(update)

    def _next(self, update: Update) -> None:
        """Begins the next wave, or halts or ends the update."""
        failed = update.of(FAILED)
        if len(failed) > update.plan.most_failures:
            why = f"{len(failed)} failed: {', '.join(failed[:5])}{' …' if len(failed) > 5 else ''}"
            return self._save(replace(update, st=HALTED, why=why), f"halted, {why}")
        if not update.of(WAITING):
            return self._save(replace(update, st=ENDED), f"ended, {len(update.of(DONE))} run it, {len(failed)} failed")
        update = update.next_wave(self._now())
        self._save(update, f"wave {update.wave + 1}: {', '.join(update.of(GOING)[:20])}")

    def _fate(self, update: Update, name: str) -> tuple[str, str]:
        """(state, why) of a device that is under way."""
        device = self._ledger.device(name)
        if device is None or device.status != "enrolled":
            return FAILED, "is no longer enrolled"
        said: Mapping[str, Any] = device.capabilities.get("update") or {}
        if (said.get("serial"), said.get("attempt")) == (update.plan.serial, update.attempt):
            if said.get("st") == "running" and device.version == update.plan.version:
                return DONE, ""
            if said.get("st") in ("back", "refused"):
                return FAILED, f"{'went back' if said['st'] == 'back' else 'refused it'}: {said.get('why', '')}"
        late = self._now() - update.began_at > update.plan.within_s and self._clock() - self._connected_at > GRACE_S
        if late:
            what = f"is {said.get('st') or 'waiting'}" if device.state == "on" else "is off"
            return FAILED, f"not done within {update.plan.within_s:.0f} s: it {what} {said.get('why', '')}".rstrip()
        return GOING, ""

    def _save(self, update: Update, said: str = "") -> None:
        update_record.write(self._fleet.folder, update)
        self._update = update
        if said:
            self._log(f"update {update.plan.version}: {said}")
            self._audit.done("update", text=f"{update.plan.version}: {said}")

    # Publish ----------------------------------------------------------------------------------------------------------

    def _publish(self, update: Update) -> None:
        """Publishes the announcement of the present wave, once per wave and start; clears it if no wave is under
        way."""
        wanted = (update.plan.serial, update.attempt, update.wave) if update.of(GOING) and update.st == RUNNING else ()
        if wanted == self._announced:
            return
        if not wanted:
            self.publisher.withdraw()
            self._archive = None
        else:
            try:
                self._announce(update)
            except (FleetError, OSError, ValueError) as error:
                if not isinstance(error, StateError) or storage.is_disk_error(error):
                    raise
                self._save(replace(update, st=HALTED, why=str(error)), f"halted, {error}")
                return
        self._announced = wanted

    def _announce(self, update: Update) -> None:
        folder = self._fleet.folder / update_record.FOLDER / str(update.plan.serial)
        limit = program_statement.MAX_BYTES
        signed = storage.read_bytes(folder / program_statement.FILE, limit=limit)
        said = program_statement.parse(signed.partition(b"\n")[2])
        blob, data = self._chunks(folder / program_statement.ARCHIVE)
        seq = max(int(self._now() * 1000), update.seq + 1)
        self._save(replace(update, seq=seq))
        files = {name: storage.read_bytes(folder / name, limit=limit).decode() for name in said.files}
        announcement = Announcement(
            messages.PROTOCOL, self._fleet.config.fleet.name, seq, seq + EXPIRY_S * 1000, update.attempt,
            signed.decode(), blob, files, tuple(update.of(GOING)), update.plan.url,
        )
        if not update.plan.url:
            self.publisher.blob(blob, data)
        self.publisher.manifest(
            self._sign(messages.encode(announcement)), set() if update.plan.url else {blob.id}
        )

    def _chunks(self, path: Path) -> tuple[Blob, mmap.mmap]:
        """The archive's chunks, and its bytes, mapped into memory. Raises StateError."""
        if self._archive is None or self._archive[0] != path:
            try:
                with path.open("rb") as file:
                    data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            except (OSError, ValueError) as error:
                raise StateError(f"cannot be read: {error}", where=str(path)) from None
            self._archive = path, Blob.of(data, self._fleet.config.link.chunk_bytes), data
        return self._archive[1], self._archive[2]
