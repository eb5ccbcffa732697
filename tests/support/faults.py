"""What can go wrong between processes, on purpose: brokers that die or have limits, a bad network, and fleets of
real processes to try it on."""

from __future__ import annotations

import asyncio
import json
import os
import random
import shutil
import socket
import subprocess
import threading
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import numpy as np

from cloud_server.broker.private_broker import find_mosquitto
from cloud_server.identity.device_folder import write_device_folder
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.ledger import Ledger
from cloud_server.records.ledger_tables import Evaluation, Round, Update
from cloud_server.rounds.coordinator import Coordinator
from cloud_server.rounds.coordinator import will as server_will
from cloud_server.running import in_one_process
from edge_agent.commands.run import service_of
from edge_agent.compute.trainer import InlineTrainer
from edge_agent.device.state import DeviceState
from edge_agent.rounds.agent import Agent
from edge_agent.rounds.agent import will as agent_will
from edge_agent.rounds.costs import AgentCosts
from fleet_core.algorithms.interface import ClientState
from fleet_core.base import storage, trees
from fleet_core.base.errors import StateError
from fleet_core.board.device_settings import settings_of
from fleet_core.data.samples import save
from fleet_core.link import Message, Will
from fleet_core.link.mqtt import MqttLink, parse_url
from fleet_core.protocol import topics
from tests.support import waiting
from tests.support.brokers import answers
from tests.support.desk import Desk, Program, command_of, descendants, edge_agent, metafleet
from tests.support.inprocess import config_text, toy, world

LONG = os.environ.get("METAFLEET_LONG") == "1"
FLEET = "t"
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
    """A mosquitto on a port of its own that a test configures, kills and starts again; end it with ``stop``."""

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
        return answers(self.port)

    def kill(self, *, forget: bool) -> None:
        """SIGKILL. forget: what it had saved of its retained messages is gone too."""
        assert self.process is not None
        self.process.kill()
        self.process.wait()
        if forget:
            (self.folder / "mosquitto.db").unlink(missing_ok=True)

    def stop(self) -> None:
        if self.process is not None and self.process.poll() is None:
            self.process.terminate()
            try:
                self.process.wait(60)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


@contextmanager
def mosquitto(folder: Path, extra: str = "") -> Iterator[Mosquitto]:
    broker = Mosquitto(folder, extra)
    broker.start()
    try:
        yield broker
    finally:
        broker.stop()


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


# Networks ------------------------------------------------------------------------------------------------------------

PACKET_BYTES = 1448
RETRANSMIT_S = 0.2


@dataclass
class Weather:
    """What the network does. Changed while it runs.

    loss: share of TCP segments that are lost; each costs its stream one retransmission timeout, and twice that when it
    is lost again. resets: share of segments that end their connection instead. bytes_per_s: of each direction of a
    connection, 0 for no limit. half_open: connections stay and nothing passes. closed: no connection stays or comes.
    twice, swapped: shares of PUBLISH packets that come twice, or after the one that follows them.
    """

    loss: float = 0.0
    reset_every: int = 0
    bytes_per_s: int = 0
    half_open: bool = False
    closed: bool = False
    twice: float = 0.0
    swapped: float = 0.0


@dataclass
class Counts:
    """What the network did so far."""

    connections: int = 0
    segments: int = 0
    lost: int = 0
    reset: int = 0
    doubled: int = 0
    swapped: int = 0
    bytes: int = 0


class Proxy:
    """Stands between clients and the broker at ``port``; use it as a context manager. Works in a thread of its own."""

    def __init__(self, port: int, weather: Weather | None = None, seed: int = 0):
        self.weather, self.counts = weather or Weather(), Counts()
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
        """Every connection is reset, and none is let in until ``weather.closed`` is false again."""
        self.weather.closed = True
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
            if not self.weather.closed:
                self.counts.connections += 1
                await self._join(reader, writer)
        except (OSError, asyncio.CancelledError):
            pass
        finally:
            _reset(writer)
            self._open.discard(writer)
            self._tasks.discard(task)

    async def _join(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Both directions until one of them ends."""
        far_reader, far_writer = await asyncio.open_connection("127.0.0.1", self._target)
        ways = [asyncio.ensure_future(self._pass(reader, far_writer)),
                asyncio.ensure_future(self._pass(far_reader, writer))]
        try:
            await asyncio.wait(ways, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for way in ways:
                way.cancel()
            await asyncio.gather(*ways, return_exceptions=True)
            while self.weather.half_open:  # the other side does not learn of it
                await asyncio.sleep(0.05)
            far_writer.close()

    async def _pass(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async for piece in self._pieces(reader):
            for start in range(0, len(piece), PACKET_BYTES):
                if not await self._segment(piece[start : start + PACKET_BYTES], writer):
                    return

    async def _segment(self, data: bytes, writer: asyncio.StreamWriter) -> bool:
        """One TCP segment through this weather; False when it was the connection's last."""
        weather, wait_s = self.weather, RETRANSMIT_S
        self.counts.segments += 1
        while self._random.random() < weather.loss:
            self.counts.lost += 1
            await asyncio.sleep(wait_s)
            wait_s *= 2
        if weather.reset_every and self.counts.segments % weather.reset_every == 0:
            self.counts.reset += 1
            return False
        if weather.bytes_per_s:
            await asyncio.sleep(len(data) / weather.bytes_per_s)
        while weather.half_open:
            await asyncio.sleep(0.02)
        self.counts.bytes += len(data)
        writer.write(data)
        await writer.drain()
        return True

    async def _pieces(self, reader: asyncio.StreamReader) -> Any:
        """What comes, as it comes; in whole packets, some twice or swapped, where the weather says so."""
        held: bytes | None = None
        while self.weather.twice or self.weather.swapped:
            packet = await _packet(reader, 0.05 if held else None)
            if packet is None:  # nothing follows: it cannot be swapped
                yield held
                held = None
                continue
            publish = packet[0] & 0xF0 == 0x30
            if publish and self._random.random() < self.weather.twice:
                self.counts.doubled += 1
                yield packet
            if publish and held is None and self._random.random() < self.weather.swapped:
                self.counts.swapped += 1
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
    """A whole MQTT packet, or None when none begins within ``timeout_s``. Raises OSError at the end."""
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


# Fleets of processes -------------------------------------------------------------------------------------------------


def found_tiny(folder: Path, *, rounds: int, devices: int = 2, quorum: float = 1.0, deadline_s: float = 3.0,
               hidden: int = 256, chunk_bytes: int = 1024, codec: str = "int8") -> Path:
    """A fleet (``fleet``) with homes (``d0`` …), for one-second rounds with uploads of several chunks."""
    text = config_text(
        rounds=rounds, devices=devices, hyper="support_batch = 8\nquery_batch = 8",
        link=f'chunk_bytes = {chunk_bytes}\nup = "{codec}"',
        fleet=f"quorum = {quorum}\ndeadline_s = {deadline_s}",
    ).replace("hidden = [6]", f"hidden = [{hidden}]")
    fleet = world(folder, text).fleet
    for n in range(devices):
        home = folder / f"d{n}"
        write_device_folder(fleet, home.name, home, "mqtt://127.0.0.1:1883")
        save(home / "samples.npz", toy(n, shift=0.3 * n))
    return folder


def undisturbed(founded: Path, folder: Path) -> Path:
    """The same fleet, run to its end in one process where nothing goes wrong."""
    shutil.copytree(founded, folder)
    homes = {home.name: (home, settings_of(home)) for home in sorted(folder.glob("d*"))}
    in_one_process.run(Fleet.load(folder / "fleet"), homes)
    return folder


class Watcher:
    """A client of the test's own that sees what passes at the broker, and remembers it."""

    def __init__(self, url: str):
        self._url = url
        self.seen: list[Message] = []
        self.renew()

    def renew(self) -> None:
        """A new connection at once: after the broker's death it is back before those that it watches."""
        self.link = MqttLink(self._url, client_id="watcher")
        self.link.subscribe(topics.current(FLEET), topics.server(FLEET), f"fl1/{FLEET}/a/+/st",
                            f"fl1/{FLEET}/a/+/dn", f"fl1/{FLEET}/a/+/up/+/+")
        self.link.open()

    def look(self, timeout_s: float = 0.02) -> list[Message]:
        """What came since the last look."""
        new = [event for event in self.link.poll(timeout_s) if isinstance(event, Message)]
        self.seen += new
        return new


def said(message: Message) -> dict[str, Any]:
    """The JSON of a message; of a signed one, what was signed."""
    body = message.payload.split(b"\n", 1)[-1] if message.payload.startswith(b"ed25519:") else message.payload
    try:
        decoded = json.loads(body)
    except ValueError:
        return {}
    return decoded if isinstance(decoded, dict) else {}


@dataclass
class Processes:
    """One fleet as real processes at ``url``; each can be killed, and is started again.

    own_url: of a device whose way to the broker is another. hosts_broker: the aggregator runs the embedded broker.
    """

    folder: Path
    url: str
    desk: Desk
    watcher: Watcher
    hosts_broker: bool = False
    own_url: dict[str, str] = field(default_factory=dict)
    running: dict[str, Program] = field(default_factory=dict)

    def start(self, *names: str) -> None:
        for name in names:
            if name == "server":
                at = ("embedded", "--port", parse_url(self.url).port) if self.hosts_broker else (self.url,)
                command = metafleet("server", "start", self.folder / "fleet", "--quiet", "--broker", *at)
            else:
                url = self.own_url.get(name, self.url)
                command = edge_agent("run", "--home", self.folder / name, "--broker", url)
            self.running[name] = self.desk.start(*command)

    def devices(self) -> list[str]:
        return sorted(home.name for home in self.folder.glob("d*"))

    def kill(self, name: str) -> None:
        """SIGKILL; a trainer (``d1's trainer``) is not started again, that is its agent's business."""
        if name.endswith("'s trainer"):
            for pid in self.trainers(name.removesuffix("'s trainer")):
                with suppress(ProcessLookupError):
                    os.kill(pid, 9)
            return
        program = self.running.pop(name)
        program.process.kill()
        program.process.wait()

    def trainers(self, device: str) -> list[int]:
        children = descendants(self.running[device].process.pid)
        return [pid for pid in sorted(children) if "edge_agent.compute.trainer" in command_of(pid)]

    def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Looks on until ``condition`` holds; fails when a process ended that nobody killed."""

        def look() -> None:
            for name, program in self.running.items():
                assert program.process.poll() is None, f"{name} ended: {program.text()}"
            self.watcher.look(0.05)

        waiting.until(condition, look, lambda: f"{what}\n{self.story()}")

    def message(self, wanted: Callable[[Message], bool], what: str = "") -> Message:
        """The next message that is ``wanted``, from now on."""
        found: list[Message] = []
        waiting.until(
            lambda: found, lambda: found.extend(filter(wanted, self.watcher.look())), lambda: f"{what}\n{self.story()}"
        )
        return found[0]

    def closed(self) -> int:
        return closed_rounds(self.folder)

    def settled(self) -> bool:
        """All rounds are closed, every device was evaluated on the last one and holds nothing that is pending."""
        rounds = Fleet.load(self.folder / "fleet").config.fleet.rounds
        if self.closed() < rounds or list(self.folder.glob("d*/methods/*/pending.safetensors")):
            return False
        with Ledger(self.folder / "fleet" / "ledger.sqlite", create=False) as ledger:
            return {row.device for row in ledger.rows(Evaluation, round=rounds)} >= set(self.devices())

    def finish(self) -> None:
        self.until(self.settled, "the end")
        self.desk.stop()
        for program in self.desk.started:
            assert "Traceback" not in program.text(), program.text()

    def said_by(self, name: str) -> str:
        """What the process that runs under ``name`` logged in its present life."""
        return self.running[name].text()

    def story(self) -> str:
        told = [f"--- {program.log.name}\n{program.text()[-3000:]}" for program in self.desk.started]
        seen = [f"{m.topic} {str(said(m))[:60]}" for m in self.watcher.seen[-25:]]
        return "\n".join([f"closed: {self.closed()}", *told, *seen])


@contextmanager
def processes(folder: Path, url: str, *, hosts_broker: bool = False) -> Iterator[Processes]:
    """Of the fleet in ``folder``; none is left at the end."""
    desk, watcher = Desk(folder), Watcher(url)
    try:
        yield Processes(folder, url, desk, watcher, hosts_broker)
    finally:
        desk.stop()
        watcher.link.close()


# What must hold at the end -------------------------------------------------------------------------------------------


def closed_rounds(folder: Path) -> int:
    path = folder / "fleet" / "ledger.sqlite"
    if not path.exists():
        return 0
    with Ledger(path, create=False) as ledger:
        return max((row.round for row in ledger.rounds("closed")), default=0)


def checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """(arrays, facts) of the last checkpoint of the fleet in ``folder``."""
    path = max((folder / "fleet" / "state").glob("round-*.safetensors"))
    return storage.unpack(path.read_bytes(), where=str(path))


def check_same_end(folder: Path, wanted: Path) -> None:
    """Bit for bit: model, served model, duals, what was published, what was lost, and who belongs."""
    arrays, facts = checkpoint(folder)
    expected, expected_facts = checkpoint(wanted)
    assert facts == expected_facts
    assert arrays.keys() == expected.keys()
    assert [key for key in arrays if arrays[key].tobytes() != expected[key].tobytes()] == []


def check_counted_once(folder: Path) -> None:
    """Every round closed with one counted update of every device."""
    names = sorted(home.name for home in folder.glob("d*"))
    rounds = Fleet.load(folder / "fleet").config.fleet.rounds
    with closing(Ledger(folder / "fleet" / "ledger.sqlite", create=False)) as ledger:
        closed = [(row.round, row.status, row.cohort) for row in ledger.rows(Round)]
        counted = sorted((row.round, row.device) for row in ledger.rows(Update, status="counted"))
    assert closed == [(n, "closed", tuple(names)) for n in range(1, rounds + 1)]
    assert counted == [(n, name) for n in range(1, rounds + 1) for name in names]


def check_duals(folder: Path) -> None:
    """Identity 4: m · h is the sum of the devices' duals and the residuals of what they sent. It holds after every
    round, with what was counted and its device has not heard of; at any moment at which no round can close."""
    fleet = Fleet.load(folder / "fleet")
    arrays, facts = checkpoint(folder)
    server = trees.scale(storage.unflatten_roles(arrays)["memory.dual"], int(facts["members"]))
    total = trees.zeros_like(server)
    for home in sorted(folder.glob("d*")):
        state = counted_state(folder, home)
        total = trees.add(total, trees.apply(lambda a: a.astype(np.float64), state["dual"]))
        if "residual" in state:
            total = trees.axpy(fleet.hyper.penalty, state["residual"], total)
    assert trees.norm(total) > 1e-6, "there is something to compare"
    assert trees.norm(trees.subtract(server, total)) <= 3e-6 * max(1.0, trees.norm(total))


def counted_state(folder: Path, home: Path) -> ClientState:
    """The device's training state with what the last closed round counted of it, from its files. Its agent may be at
    work meanwhile: what is pending becomes the state, so it is looked for first."""
    with Ledger(folder / "fleet" / "ledger.sqlite", create=False) as ledger:
        counted = {row.update_id for row in ledger.rows(Update, status="counted")}
    for kind in ("pending", "state"):
        for path in home.glob(f"methods/*/{kind}.safetensors"):
            with suppress(StateError):  # renamed at this moment
                arrays, facts = storage.unpack(storage.read_bytes(path, limit=1 << 30), where=str(path))
                arrays.pop("upload", None)
                if kind == "state" or json.loads(facts["upload"])["blob"]["id"] in counted:
                    return storage.unflatten_roles(arrays)
    raise AssertionError(f"{home.name} never took part")


def check_end(folder: Path, wanted: Path | None = None) -> None:
    check_counted_once(folder)
    check_duals(folder)
    if wanted is not None:
        check_same_end(folder, wanted)


# Fleets in this process, over real connections -----------------------------------------------------------------------


class Crew:
    """The aggregator and the agents of the fleet in ``folder``, stepped in turn by the test, on links of their own.

    ``url`` of an actor may be a proxy's. ``lines`` is what they logged. protocol: 5 or 3 (3.1.1), for all.
    """

    def __init__(self, folder: Path, url: str, *, protocol: Literal[3, 5] | None = None, keepalive_s: int = 60):
        self.folder, self.url, self._protocol, self._keepalive_s = folder, url, protocol, keepalive_s
        self.fleet = Fleet.load(folder / "fleet")
        self.ledger = Ledger(self.fleet.ledger_path)
        self.lines: list[str] = []
        self.agents: dict[str, Agent] = {}
        self.server: Coordinator | None = None
        self.server_sleeps = False
        self.links: list[MqttLink] = []

    def start_server(self, url: str = "") -> None:
        topic, payload = server_will(FLEET, "server")
        self.server = Coordinator(self.fleet, self._link("aggregator", Will(topic, payload), url), self.ledger,
                                  boot="server", log=self.lines.append)
        self.server.link.open()

    def start_agent(self, name: str, url: str = "") -> Agent:
        home, settings = DeviceState(self.folder / name), settings_of(self.folder / name)
        topic, payload = agent_will(settings, f"boot-{name}")
        agent = Agent(
            settings,
            home,
            self._link(name, Will(topic, payload), url),
            service_of(home.folder, settings),
            AgentCosts(),
            InlineTrainer(),
            boot=f"boot-{name}",
            log=lambda line: self.lines.append(f"{name}: {line}"),
        )
        self.agents[name] = agent
        agent.link.open()
        return agent

    def start(self) -> None:
        self.start_server()
        for home in sorted(self.folder.glob("d*")):
            self.start_agent(home.name)

    def _link(self, name: str, will: Will, url: str) -> MqttLink:
        self.links.append(MqttLink(url or self.url, client_id=f"{FLEET}-{name}", will=will,
                                   keepalive_s=self._keepalive_s, protocol=self._protocol))
        return self.links[-1]

    def step(self) -> None:
        actors: list[Coordinator | Agent] = list(self.agents.values())
        if self.server is not None and not self.server_sleeps:
            actors.insert(0, self.server)
        if not any([actor.step(0) for actor in actors]):
            actors[0].step(0.005)

    def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Steps everybody until ``condition`` holds."""
        waiting.until(condition, self.step, lambda: f"{what}\n{self.story()}")

    def closed(self) -> int:
        return 0 if self.server is None else self.server.checkpoint.round

    def told(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def settled(self) -> bool:
        rounds = self.fleet.config.fleet.rounds
        if self.closed() < rounds or list(self.folder.glob("d*/methods/*/pending.safetensors")):
            return False
        return {row.device for row in self.ledger.rows(Evaluation, round=rounds)} >= set(self.agents)

    def finish(self) -> None:
        self.until(self.settled, "the end")

    def story(self) -> str:
        phases = {name: (agent.phase, agent.link.connected) for name, agent in self.agents.items()}
        return "\n".join([f"closed {self.closed()}, {phases}", *self.lines[-40:]])

    def close(self) -> None:
        for link in self.links:
            link.abort()
        self.ledger.close()


@contextmanager
def crew(folder: Path, url: str, **options: Any) -> Iterator[Crew]:
    made = Crew(folder, url, **options)
    try:
        yield made
    finally:
        made.close()
