"""Accepts manifests that the fleet has signed, of this protocol, not older than the last, not expired."""

from __future__ import annotations

from collections.abc import Callable

from edge_agent.device.fleet_keys import FleetKeys
from edge_agent.device.state import DeviceState
from fleet_core.base.errors import MessageError
from fleet_core.protocol import messages
from fleet_core.protocol.round_messages import Manifest


class ManifestCheck:
    """Remembers the highest sequence number and the latest signed time on the disk, so that an old manifest is refused
    after a restart too, and a device without a clock knows the time at least that far.

    now_ms: Unix ms. ``manifest``: the last one that was accepted since the start, or None.
    """

    def __init__(self, fleet: str, key: str, state: DeviceState, now_ms: Callable[[], int]):
        self._fleet, self._state, self._now_ms = fleet, state, now_ms
        self.keys = FleetKeys(state.folder, key, fleet, lambda: self.time_ms / 1000)
        self.seq, self._signed_ms = state.clock()
        self.manifest: Manifest | None = None

    @property
    def time_ms(self) -> int:
        """The later of this device's clock and the latest signed time."""
        return max(self._now_ms(), self._signed_ms)

    def accept(self, payload: bytes) -> Manifest | None:
        """Takes and returns the manifest; None for the manifest that is held already, which a broker sends again after
        a reconnect. Raises MessageError for a refused manifest."""
        self.keys.keep(payload)
        manifest = messages.decode(Manifest, self.keys.ring.verify(payload), limit=1 << 24)
        if manifest.fleet != self._fleet:
            raise MessageError(f"a round of fleet '{manifest.fleet[:64]}'", expected=f"fleet '{self._fleet}'")
        if manifest.v != messages.PROTOCOL:
            raise MessageError(f"protocol {manifest.v}", expected=str(messages.PROTOCOL), hint="update this agent")
        if self.manifest is not None and manifest.seq == self.manifest.seq:
            return None
        if manifest.seq < self.seq:
            raise MessageError(f"a round with the old sequence number {manifest.seq}", expected=f"above {self.seq}")
        if manifest.exp < self.time_ms:
            raise MessageError("a round that has expired")
        self._signed_ms = max(self._signed_ms, manifest.seq)
        self._state.set_clock(manifest.seq, self._signed_ms)
        self.seq, self.manifest = manifest.seq, manifest
        return manifest
