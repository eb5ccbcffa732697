"""Remembers what this device failed to do for a manifest. A failure is logged and reported, and the task is tried again
with a newer manifest."""

from __future__ import annotations

from collections.abc import Callable

from fleet_core.base.errors import FleetError, LinkError
from fleet_core.protocol.round_messages import Manifest


class Attempts:
    """failed(what, manifest, error): called once for what failed. A broken connection is no failure: it is tried
    again."""

    def __init__(self, failed: Callable[[str, Manifest, FleetError], None], log: Callable[[str], None]):
        self._failed, self._log = failed, log
        self._gave_up: dict[str, int] = {}  # what failed -> sequence number of the manifest that asked for it

    def attempt(self, what: str, manifest: Manifest | None, action: Callable[[], object]) -> None:
        """Runs ``action``, unless it failed under this manifest or there is none."""
        if manifest is None or self.gave_up(what, manifest):
            return
        try:
            action()
        except LinkError as error:
            self._log(f"{what}: {error}")
        except FleetError as error:
            self.give_up(what, manifest, error)

    def gave_up(self, what: str, manifest: Manifest) -> bool:
        """Whether it failed under this manifest."""
        return self._gave_up.get(what) == manifest.seq

    def give_up(self, what: str, manifest: Manifest, error: FleetError) -> None:
        self._gave_up[what] = manifest.seq
        self._log(f"{what}: {error}")
        self._failed(what, manifest, error)

    def try_again(self) -> None:
        """Forgets the failures, because what failed may succeed now."""
        self._gave_up.clear()
