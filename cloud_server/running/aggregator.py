"""An aggregator that survives a disk that it cannot write to.

A failed write closes the coordinator and drops what it held in memory, so that nothing half-written is used. When the
disk can be written again, the next coordinator starts from the files, including the open round: a full disk costs time,
as a kill does, but no data.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable
from pathlib import Path

from cloud_server.ledger import disk_errors
from cloud_server.ledger.ledger import Ledger
from cloud_server.rounds.coordinator import Coordinator
from fleet_core.base import storage
from fleet_core.base.errors import StateError

RETRY_S = 5.0


class Aggregator:
    """Runs one coordinator after the other. The constructor starts the first coordinator, and raises its errors.

    new_coordinator(): makes the next coordinator, its link not yet open. state: the folder of the checkpoints.
    ``coordinator``: the present coordinator; while none runs, the last one. ``held_up``: why none runs now, or empty.
    """

    def __init__(
        self, new_coordinator: Callable[[], Coordinator], ledger: Ledger, state: Path, *,
        clock: Callable[[], float] = time.monotonic, log: Callable[[str], None],
    ):
        self._new_coordinator, self._ledger, self._state = new_coordinator, ledger, state
        self._clock, self._log = clock, disk_errors.undisturbed(log)
        self._again_at = 0.0
        self.held_up = ""
        self.coordinator = self._begin()

    def step(self, timeout_s: float) -> bool:
        """Does a step of the coordinator. If none runs, waits, and every ``RETRY_S`` tries to begin one. Raises
        StateError for a damaged file, because waiting does not help there."""
        try:
            if not self.held_up:
                return self.coordinator.step(timeout_s)
            time.sleep(timeout_s)
            if self._clock() >= self._again_at:
                self._go_on()
        except (StateError, OSError) as error:
            if not disk_errors.is_disk_error(error):
                raise
            self._hold_up(error)
        return False

    def close(self) -> None:
        if not self.held_up:
            self.coordinator.close()

    def keep_room(self) -> None:
        """Reserves disk space for revoking devices, unless the disk is full now."""
        disk_errors.reserve(self._state.parent)

    def _begin(self) -> Coordinator:
        storage.check_free_space(self._state, "round-*")
        with self._ledger.transaction():  # fails if nothing can be written
            if self._ledger.fact("stalled"):
                self._ledger.set_facts(stalled="")
        begun = self._new_coordinator()
        begun.link.open()
        return begun

    def _go_on(self) -> None:
        self.coordinator = self._begin()
        self.held_up = ""
        self.keep_room()
        self._log("the disk takes writes again: the aggregator continues from its files")

    def _hold_up(self, error: Exception) -> None:
        """Ends the coordinator. Says why once, in the log and, if it can be written, in the ledger for ``server
        status``."""
        self._again_at = self._clock() + RETRY_S
        if self.held_up:
            return
        self.coordinator.close()
        reason = "; ".join(str(error).splitlines())
        self.held_up = f"waiting for the disk: {reason}; tried again every {RETRY_S:g} s"
        self._log(f"{self.held_up}; nothing that was received is lost")
        with contextlib.suppress(StateError):
            self._ledger.set_facts(stalled=self.held_up)
