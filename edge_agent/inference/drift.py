"""Watches whether the samples that a device answers have moved away from those that it was personalized on.

Of a fleet with classes their embeddings are compared, of a task the inputs. The sums are in memory and, for a restart
and ``edge-agent status``, in ``drift.json`` of the device's folder. A new personalization starts new sums. No samples
are kept.
"""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from fleet_core.base import schema, storage
from fleet_core.base.errors import FleetError, StateError
from fleet_core.personalization.drift import Reference, Sums
from fleet_core.personalization.input_drift import InputReference

if TYPE_CHECKING:
    from edge_agent.inference.service import Service

Known = Reference | InputReference
FILE = "drift.json"
SAVE_S = 60.0
MAX_BYTES = 1 << 12


@dataclass(frozen=True)
class Watched:
    """drift.json. reference: id of the reference that the sums belong to. since: Unix seconds of the answer after which
    the samples had moved; 0: they have not."""

    reference: str
    sums: Sums
    since: float = 0.0


class DriftWatch:
    """Counts the answers in ``folder``. Several threads may call it."""

    def __init__(self, folder: Path, clock: Callable[[], float] = time.time):
        self._path, self._clock, self._lock = folder / FILE, clock, threading.Lock()
        self._now: Watched | None = None
        self._reference: Known | None = None
        self._saved = 0.0
        self._looked = 0

    @property
    def moved_at(self) -> int:
        """Number of samples that had been answered when the watch noticed drift; 0: it has noticed none."""
        now = self._now
        return 0 if now is None else now.sums.moved_at

    def begin(self, reference: Known | None) -> None:
        """Compares with this reference from now on; None: a model without one, which is not watched."""
        with self._lock:
            self._begin(reference)

    def _begin(self, reference: Known | None) -> None:
        if reference is self._reference:
            return
        self._reference = reference
        if reference is None:
            self._now = None
            return
        made_of, stored = _id(reference), read(self._path.parent)
        if self._now is None or self._now.reference != made_of:
            known = stored is not None and stored.reference == made_of
            self._now = stored if known else Watched(made_of, Sums())

    def follow(self) -> None:
        """Takes over what another process has counted on this folder, a program with ``Device``, if that is more."""
        with suppress(OSError), self._lock:
            now, changed = self._now, self._path.stat().st_mtime_ns
            if now is None or changed == self._looked:
                return
            self._looked, stored = changed, read(self._path.parent)
            if stored is not None and stored.reference == now.reference and stored.sums.answered > now.sums.answered:
                self._now = stored

    def see(self, reference: Known, seen_n: np.ndarray[Any, Any]) -> None:
        """Counts samples that were answered. seen_n: embedded, or for an ``InputReference`` the model's inputs."""
        surprise = reference.surprise(seen_n)
        with self._lock:
            self._begin(reference)
            now = self._now
            assert now is not None
            sums = now.sums.after(surprise)
            noticed = sums.moved and not now.sums.moved
            self._now = Watched(now.reference, sums, self._clock() if noticed else now.since)
            if noticed or abs(self._clock() - self._saved) >= SAVE_S:
                self._saved = self._clock()
                with suppress(StateError):  # a full disk must not keep the device from answering
                    storage.write_json(self._path, schema.plain(self._now))


def read(folder: Path) -> Watched | None:
    """What is stored in a device's folder; None if there is nothing, or it is damaged."""
    try:
        data = storage.read_bytes(folder / FILE, limit=MAX_BYTES)
        return schema.stored(Watched, data, folder / FILE, "it is made again", unknown="ignore")
    except StateError:
        return None


def _id(reference: Known) -> str:
    return f"{zlib.crc32(b''.join(np.ascontiguousarray(array).tobytes() for array in reference.made_of)):08x}"


def personalize_again(service: Service, tried: int, log: Callable[[str], None]) -> int:
    """Personalizes with labelled samples that were added since the last time, if the samples have moved and the
    personalizer embeds: gradient steps are ``ServedModelUpdate.learn_added``. tried: their number at the last attempt;
    returns the new number."""
    from edge_agent.inference import relearn  # takes memory, and is rarely needed

    service.drift.follow()
    now = service.answering
    if not service.drift.moved_at or now is None or now.reference is None:
        return tried
    try:
        added = service.local().added()
        if added == tried:
            return tried
        personal = service.stored.personalization(now.slot)
        if personal is None or not personal.embeds or personal.settings.get("added") == added:
            return tried
        done = relearn.personalize(service)
        log(f"drift: personalized again, with {added} added samples, by {done.how}")
    except FleetError as error:
        log(f"drift, but this device is not personalized again: {error}")
    return added
