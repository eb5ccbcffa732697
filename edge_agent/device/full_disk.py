"""Tracks whether the device's disk can be written (it may be full, read-only or removed), and when to try again."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fleet_core.base import storage
from fleet_core.base.errors import StateError

RETRY_S = 5.0


class Disk:
    """``refuses``: the last write to ``folder`` failed."""

    def __init__(self, folder: Path, clock: Callable[[], float]):
        self._folder, self._clock = folder, clock
        self._tried_at = 0.0
        self.refuses = False

    def note(self, error: BaseException) -> bool:
        """Whether ``error`` is an error of the disk; if so, ``refuses`` becomes True."""
        if not storage.is_disk_error(error):
            return False
        self.refuse()
        return True

    def refuse(self) -> None:
        self.refuses, self._tried_at = True, self._clock()

    def is_back(self) -> bool:
        """True once, when a disk that refused has room again for the device's largest file and a little more."""
        if not self.refuses or self._clock() - self._tried_at < RETRY_S:
            return False
        self._tried_at = self._clock()
        self.refuses = not self._has_room()
        return not self.refuses

    def _has_room(self) -> bool:
        try:
            storage.check_free_space(self._folder, "*.safetensors")
        except StateError:
            return False
        return True
