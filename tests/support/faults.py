"""A mosquitto that can be killed and started again, and a proxy that makes the network bad."""

from __future__ import annotations

import asyncio
import os
import random
import subprocess
import threading
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud_server.broker.private_broker import find_mosquitto
from tests.support import waiting
from tests.support.brokers import accepts_connections, free_port

BROKER_CONFIG = """\
listener {port} 127.0.0.1
allow_anonymous true
persistence true
persistence_location {folder}/
autosave_on_changes true
autosave_interval 5
set_tcp_nodelay true
log_dest stderr
log_type error
log_type warning
log_type notice
"""


# Brokers -------------------------------------------------------------------------------------------------------------


class Mosquitto:
    """A mosquitto on its own port that a test configures, kills and restarts. Call ``stop`` at the end."""

    def __init__(self, folder: Path, extra: str = ""):
        self.folder = folder.resolve()
        self.folder.mkdir(parents=True, exist_ok=True)
        self.port = free_port()
        self.url = f"mqtt://127.0.0.1:{self.port}"
        self.log = self.folder / "broker.log"
        user = "user root\n" if os.geteuid() == 0 else ""
        config = BROKER_CONFIG.format(port=self.port, folder=self.folder) + user + extra
        (self.folder / "mosquitto.conf").write_text(config)
        self.process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        command = [find_mosquitto() or "mosquitto", "-c", str(self.folder / "mosquitto.conf")]
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log)
        waiting.until(self._answers)

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"mosquitto did not start: {self.log.read_text()}"
        return accepts_connections(self.port)

    def kill(self, *, forget: bool) -> None:
        """Send SIGKILL. forget: also delete the saved retained messages."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        if forget:
            (self.folder / "mosquitto.db").unlink(missing_ok=True)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            waiting.exit_or_kill(self.process)


@contextmanager
def mosquitto(folder: Path, extra: str = "") -> Iterator[Mosquitto]:
    broker = Mosquitto(folder, extra)
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()


# Networks ------------------------------------------------------------------------------------------------------------

PACKET_BYTES = 1448
RETRANSMIT_S = 0.2


@dataclass
class NetworkFaults:
    """What goes wrong on the network; may be changed at any time.

    loss: share of lost TCP segments; each costs its stream one retransmission timeout, doubled when it is lost again.
    reset_every: every n-th segment resets its connection instead, 0 for never. bytes_per_s: limit per direction of a
    connection, 0 for none. half_open: connections stay open and nothing passes. closed: no connection is accepted.
    duplicated, reordered: shares of PUBLISH packets that arrive twice, or after the next one.
    """

    loss: float = 0.0
    reset_every: int = 0
    bytes_per_s: int = 0
    half_open: bool = False
    closed: bool = False
    duplicated: float = 0.0
    reordered: float = 0.0


@dataclass
class Counts:
    """What the proxy has done so far."""

    connections: int = 0
    segments: int = 0
    lost: int = 0
    reset: int = 0
    duplicated: int = 0
    reordered: int = 0
    bytes: int = 0


class Proxy:
    """A context manager that stands between clients and the broker at ``port``, in its own thread."""

    def __init__(self, port: int, faults: NetworkFaults | None = None, seed: int = 0):
        self.faults, self.counts = faults or NetworkFaults(), Counts()
        self._target, self._random = port, random.Random(seed)
        self._loop = asyncio.new_event_loop()
        self._thread = threading.Thread(target=self._loop.run_forever, daemon=True)
        self._open: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()

    def __enter__(self) -> Proxy:
        self._thread.start()
        serving = asyncio.start_server(self._serve, "127.0.0.1", 0, backlog=256)
        self._server = asyncio.run_coroutine_threadsafe(serving, self._loop).result(10)
        self.url = f"mqtt://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"
        return self

    def __exit__(self, *error: object) -> None:
        asyncio.run_coroutine_threadsafe(self._end(), self._loop).result(10)
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def cut(self) -> None:
        """Reset every connection and accept none until ``faults.closed`` is False again."""
        self.faults.closed = True
        asyncio.run_coroutine_threadsafe(self._reset_all(), self._loop).result(10)

    async def _end(self) -> None:
        self._server.close()
        await self._reset_all()
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _reset_all(self) -> None:
        for writer in list(self._open):
            _reset(writer)

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        self._tasks.add(task)
        self._open.add(writer)
        try:
            if not self.faults.closed:
                self.counts.connections += 1
                await self._join(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            _reset(writer)
            self._open.discard(writer)
            self._tasks.discard(task)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass both directions on until one ends."""
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        ways = [asyncio.ensure_future(self._pass(reader, far_writer)),
                asyncio.ensure_future(self._pass(far_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            while self.faults.half_open:  # the other side does not notice
                await asyncio.sleep(0.05)
            far_writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for piece in self._pieces(reader):
            for start in range(0, len(piece), PACKET_BYTES):
                if not await self._segment(piece[start : start + PACKET_BYTES], writer):
                    return

    async def _segment(self, data: bytes, writer: asyncio.StreamWriter) -> bool:
        """Pass one TCP segment on; return False if it was the connection's last."""
        faults, wait_s = self.faults, RETRANSMIT_S
        self.counts.segments += 1
        while self._random.random() < faults.loss:
            self.counts.lost += 1
            await asyncio.sleep(wait_s)
            wait_s *= 2
        if faults.reset_every and self.counts.segments % faults.reset_every == 0:
            self.counts.reset += 1
            return False
        if faults.bytes_per_s:
            await asyncio.sleep(len(data) / faults.bytes_per_s)
        while faults.half_open:
            await asyncio.sleep(0.02)
        self.counts.bytes += len(data)
        writer.write(data)
        await writer.drain()
        return True

    async def _pieces(self, reader: asyncio.StreamReader) -> Any:
        """Yield data as it arrives; while packets are duplicated or reordered, whole packets."""
        held: bytes | None = None
        while self.faults.duplicated or self.faults.reordered:
            packet = await _packet(reader, 0.05 if held else None)
            if packet is None:  # nothing follows, so it cannot be reordered
                yield held
                held = None
                continue
            publish = packet[0] & 0xF0 == 0x30
            if publish and self._random.random() < self.faults.duplicated:
                self.counts.duplicated += 1
                yield packet
            if publish and held is None and self._random.random() < self.faults.reordered:
                self.counts.reordered += 1
                held = packet
                continue
            yield packet
            if held is not None and publish:
                yield held
                held = None
        if held is not None:
            yield held
        while data := await reader.read(65_536):
            yield data


async def _packet(reader: asyncio.StreamReader, timeout_s: float | None) -> bytes | None:
    """A whole MQTT packet, or None if none begins within ``timeout_s``. Raises OSError at the end of the stream."""
    try:
        head = await asyncio.wait_for(reader.readexactly(1), timeout_s)
        size, shift = 0, 0
        while True:
            digit = await reader.readexactly(1)
            head += digit
            size |= (digit[0] & 127) << shift
            shift += 7
            if not digit[0] & 128:
                return head + await reader.readexactly(size)
    except TimeoutError:
        return None
    except asyncio.IncompleteReadError as error:
        raise ConnectionResetError from error


def _reset(writer: asyncio.StreamWriter) -> None:
    with suppress(OSError, RuntimeError):
        writer.transport.abort()
