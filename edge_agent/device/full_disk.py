"""A disk that cannot be used now (full, read-only, taken away): what failed on it is tried again later."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

from fleet_core.base import storage
from fleet_core.base.errors import StateError

RETRY_S = 5.0


class Disk:
    """The device's folder as far as it can be written. ``refuses``: it could not when it was tried last."""

    def __init__(self, folder: Path, clock: Callable[[], float]):
        self._folder, self._clock = folder, clock
        self._tried_at = 0.0
        self.refuses = False

    def note(self, error: BaseException) -> bool:
        """Whether ``error`` is the disk's; another one is of no concern here."""
        if not storage.is_disk_error(error):
            return False
        self.refuse()
        return True

    def refuse(self) -> None:
        """It could not be written just now."""
        self.refuses, self._tried_at = True, self._clock()

    def is_back(self) -> bool:
        """True once when a disk that refused has room for the device's largest file and a little more."""
        if not self.refuses or self._clock() - self._tried_at < RETRY_S:
            return False
        self._tried_at = self._clock()
        self.refuses = not self._takes_writes()
        return not self.refuses

    def _takes_writes(self) -> bool:
        try:
            storage.check_free_space(self._folder, "*.safetensors")
        except StateError:
            return False
        return True
