"""Reads the fleet in one thread, keeps what was read, and tells each open page what changed: server-sent events.

Every value has the version at which it last changed. A page that is behind gets all values newer than the version that
it has, whatever happened in between, so that nothing queues up for a slow page.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import secrets
import threading
import time
from collections.abc import AsyncGenerator, AsyncIterator, Callable
from pathlib import Path
from typing import Any

from cloud_server.console.fleet_view import FleetView
from fleet_core.base.errors import FleetError

LOOK_S = 0.5
UNCHANGED_S = 5.0  # the ledger does not show whether the aggregator runs, and which devices rest
SHARE = 4  # a read of the ledger that took a second of the processor is followed by four without one
BEAT_S = 15.0  # a line that tells the page that the connection is alive
MOST_PAGES = 32
MOST_GONE = 10_000
TROUBLE = "trouble"


class Live:
    """The values of the fleet in ``folder``, as long as ``run`` runs. Everything but the reading runs in the event
    loop."""

    def __init__(self, folder: Path):
        self.also: Callable[[], dict[str, dict[str, Any]]] = dict
        """Further values, read at every look."""
        self._folder = folder
        self._boot = secrets.token_hex(4)
        self._version, self._complete_from = 0, 0
        self._values: dict[str, tuple[int, str]] = {}
        self._gone: dict[str, int] = {}
        self._pages: set[asyncio.Event] = set()
        self._closing = False
        self._look = threading.Event()

    @contextlib.asynccontextmanager
    async def run(self) -> AsyncIterator[None]:
        """Reads while at least one page is open."""
        loop, stop = asyncio.get_running_loop(), threading.Event()
        thread = threading.Thread(target=self._read, args=(loop, stop), name="console-reader", daemon=True)
        thread.start()
        try:
            yield
        finally:
            self.close()
            stop.set()
            self._look.set()
            await asyncio.to_thread(thread.join)

    def close(self) -> None:
        """Ends the pages' streams; they ask again."""
        self._closing = True
        self._wake()

    def look(self) -> None:
        """Reads as soon as possible, because an action was requested."""
        self._look.set()

    @property
    def full(self) -> bool:
        return len(self._pages) >= MOST_PAGES

    async def stream(self, last_id: str = "") -> AsyncGenerator[str, None]:
        """Server-sent events for one page. last_id: of the last event that it got before the connection broke."""
        boot, _, text = last_id.partition(":")
        version = int(text) if boot == self._boot and text.isdecimal() and len(text) < 16 else 0
        woken = asyncio.Event()
        self._pages.add(woken)
        self._look.set()
        try:
            while not self._closing:
                woken.clear()
                if self._version > version:
                    data, version = self._since(version), self._version
                    yield f"id: {self._boot}:{version}\ndata: {data}\n\n"
                try:
                    await asyncio.wait_for(woken.wait(), BEAT_S)
                except asyncio.TimeoutError:
                    yield ": beat\n\n"
        finally:
            self._pages.discard(woken)

    # In the event loop ------------------------------------------------------------------------------------------------

    def _since(self, version: int) -> str:
        """JSON: ``all`` (forget what you had), ``set`` (key -> value), ``gone`` (keys)."""
        whole = version < self._complete_from or version == 0
        changed = (f"{json.dumps(key)}:{text}" for key, (at, text) in self._values.items() if whole or at > version)
        gone = [] if whole else [key for key, at in self._gone.items() if at > version]
        return f'{{"all":{json.dumps(whole)},"set":{{{",".join(changed)}}},"gone":{json.dumps(gone)}}}'

    def put(self, texts: dict[str, str]) -> None:
        """Replaces all values. texts: key -> JSON."""
        changed = {key: text for key, text in texts.items() if self._values.get(key, (0, ""))[1] != text}
        gone = self._values.keys() - texts.keys()
        if not changed and not gone:
            return
        self._version += 1
        for key in gone:
            del self._values[key]
            self._gone[key] = self._version
        for key, text in changed.items():
            self._values[key] = (self._version, text)
            self._gone.pop(key, None)
        if len(self._gone) > MOST_GONE:
            self._gone, self._complete_from = {}, self._version
        self._wake()

    def _wake(self) -> None:
        for page in self._pages:
            page.set()

    # In the thread ----------------------------------------------------------------------------------------------------

    def _read(self, loop: asyncio.AbstractEventLoop, stop: threading.Event) -> None:
        view: FleetView | None = None
        seen, read_at, next_read, kept = 0, float("-inf"), float("-inf"), dict[str, str]()
        while not stop.is_set():
            asked = self._look.wait(LOOK_S)
            if not self._pages:
                asked = self._look.wait()
            self._look.clear()
            started, cpu_s = time.monotonic(), time.thread_time()
            try:
                view = view or FleetView(self._folder)
                if asked or started >= next_read:
                    version = view.ledger.data_version()
                    if version != seen or started - read_at >= UNCHANGED_S:
                        kept, seen, read_at = _texts(view.read()), version, started
                        next_read = time.monotonic() + SHARE * (time.thread_time() - cpu_s)
                texts = kept | _texts(self.also())
            except (FleetError, OSError) as error:
                texts = {**kept, TROUBLE: json.dumps(str(error)[:500])}
                if view is not None:
                    view.close()
                    view, seen = None, 0
            with contextlib.suppress(RuntimeError):  # the loop is closed: the program ends
                loop.call_soon_threadsafe(self.put, texts)
        if view is not None:
            view.close()


def _texts(values: dict[str, dict[str, Any]]) -> dict[str, str]:
    """key -> JSON."""
    return {key: json.dumps(value, separators=(",", ":")) for key, value in values.items()}
