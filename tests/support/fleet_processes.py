"""A fleet of real processes that a test can kill, and what must hold when all rounds are closed."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.identity.device_folder import write_device_folder
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Evaluation, Round, Update
from cloud_server.records.fleet_folder import Fleet
from cloud_server.running import in_one_process
from fleet_core.algorithms.interface import ClientState
from fleet_core.base import storage, trees
from fleet_core.base.errors import CodecError, StateError
from fleet_core.board.device_settings import settings_of
from fleet_core.data.samples import save
from fleet_core.link.interface import Message
from fleet_core.link.mqtt import MqttLink, parse_url
from fleet_core.protocol import messages, topics
from tests.support import waiting
from tests.support.inprocess import config_text, toy, world
from tests.support.programs import Program, Programs, command_of, descendants, edge_agent, metafleet

LONG = os.environ.get("METAFLEET_LONG") == "1"
FLEET = "t"


def tiny_fleet(folder: Path, *, rounds: int, devices: int = 2, quorum: float = 1.0, deadline_s: float = 3.0,
               hidden: int = 256, chunk_bytes: int = 1024, codec: str = "int8", onnx: tuple[str, ...] = ()) -> Path:
    """A fleet (``fleet``) and homes (``d0`` …) for one-second rounds and uploads of several chunks. onnx: devices that
    train without torch."""
    text = config_text(
        rounds=rounds, devices=devices, hyper="support_batch = 8\nquery_batch = 8",
        link=f'chunk_bytes = {chunk_bytes}\nup = "{codec}"',
        fleet=f"quorum = {quorum}\ndeadline_s = {deadline_s}",
    ).replace("hidden = [6]", f"hidden = [{hidden}]")
    fleet = world(folder, text, train_graph=bool(onnx)).fleet
    for n in range(devices):
        home = folder / f"d{n}"
        engine = {"train": {"engine": "onnx"}} if home.name in onnx else {}
        write_device_folder(fleet, home.name, home, "mqtt://127.0.0.1:1883", **engine)
        save(home / "samples.npz", toy(n, shift=0.3 * n))
    return folder


def reference_run(founded: Path, folder: Path) -> Path:
    """A copy of the fleet, run to its end in one process without faults."""
    shutil.copytree(founded, folder)
    homes = {home.name: (home, settings_of(home)) for home in sorted(folder.glob("d*"))}
    in_one_process.run(Fleet.load(folder / "fleet"), homes)
    return folder


class BrokerMonitor:
    """A client that records what passes through the broker."""

    def __init__(self, url: str):
        self._url = url
        self.seen: list[Message] = []
        self.renew()

    def renew(self) -> None:
        """Connect at once: after the broker's restart the monitor must be back before the clients that it monitors."""
        self.link = MqttLink(self._url, client_id="watcher")
        self.link.subscribe(topics.current(FLEET), topics.server(FLEET), f"fl1/{FLEET}/a/+/st",
                            f"fl1/{FLEET}/a/+/dn", f"fl1/{FLEET}/a/+/up/+/+")
        self.link.open()

    def look(self, timeout_s: float = 0.02) -> list[Message]:
        """Return the messages since the last call."""
        new = [event for event in self.link.poll(timeout_s) if isinstance(event, Message)]
        self.seen += new
        return new


def json_of(message: Message) -> dict[str, Any]:
    """The JSON of a message, without its signature."""
    body = message.payload.split(b"\n", 1)[-1] if message.payload.startswith(b"ed25519:") else message.payload
    try:
        decoded = json.loads(messages.plain(body))
    except (ValueError, CodecError):
        return {}
    return decoded if isinstance(decoded, dict) else {}


@dataclass
class Processes:
    """One fleet as real processes that can be killed and restarted.

    urls: broker URL of devices that use another than ``url``. hosts_broker: the aggregator runs the embedded broker.
    """

    folder: Path
    url: str
    programs: Programs
    watcher: BrokerMonitor
    hosts_broker: bool = False
    urls: dict[str, str] = field(default_factory=dict)
    running: dict[str, Program] = field(default_factory=dict)

    def start(self, *names: str) -> None:
        for name in names:
            if name == "server":
                at = ("embedded", "--port", parse_url(self.url).port) if self.hosts_broker else (self.url,)
                command = metafleet("server", "start", self.folder / "fleet", "--quiet", "--broker", *at)
            else:
                url = self.urls.get(name, self.url)
                command = edge_agent("run", "--home", self.folder / name, "--broker", url)
            self.running[name] = self.programs.start(*command)

    def devices(self) -> list[str]:
        return sorted(home.name for home in self.folder.glob("d*"))

    def kill(self, name: str) -> None:
        """Send SIGKILL. name: a process, or a trainer (``d1's trainer``), which its agent restarts."""
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
        """Wait until ``condition`` holds; fail if a process ended that the test did not kill."""

        def look() -> None:
            for name, program in self.running.items():
                assert program.process.poll() is None, f"{name} ended: {program.text()}"
            self.watcher.look(0.05)

        waiting.until(condition, look, lambda: f"{what}\n{self.report()}")

    def message(self, wanted: Callable[[Message], bool], what: str = "") -> Message:
        """Wait for the next message that ``wanted`` accepts."""
        found: list[Message] = []
        waiting.until(
            lambda: found, lambda: found.extend(filter(wanted, self.watcher.look())), lambda: f"{what}\n{self.report()}"
        )
        return found[0]

    def closed(self) -> int:
        return last_closed_round(self.folder)

    def settled(self) -> bool:
        """All rounds are closed, every device was evaluated on the last one, and no update is pending."""
        rounds = Fleet.load(self.folder / "fleet").config.fleet.rounds
        if self.closed() < rounds or list(self.folder.glob("d*/methods/*/pending.safetensors")):
            return False
        with Ledger(self.folder / "fleet" / "ledger.sqlite", create=False) as ledger:
            return {row.device for row in ledger.rows(Evaluation, round=rounds)} >= set(self.devices())

    def finish(self) -> None:
        self.until(self.settled, "the end")
        self.programs.stop()
        for program in self.programs.started:
            assert "Traceback" not in program.text(), program.text()

    def log_of(self, name: str) -> str:
        """The log of the current process called ``name``."""
        return self.running[name].text()

    def report(self) -> str:
        told = [f"--- {program.log.name}\n{program.text()[-3000:]}" for program in self.programs.started]
        seen = [f"{m.topic} {str(json_of(m))[:60]}" for m in self.watcher.seen[-25:]]
        return "\n".join([f"closed: {self.closed()}", *told, *seen])


@contextmanager
def processes(folder: Path, url: str, *, hosts_broker: bool = False) -> Iterator[Processes]:
    """The processes of the fleet in ``folder``; all are ended at the end."""
    programs, watcher = Programs(folder), BrokerMonitor(url)
    try:
        yield Processes(folder, url, programs, watcher, hosts_broker)
    finally:
        programs.stop()
        watcher.link.close()


# What must hold at the end -------------------------------------------------------------------------------------------


def last_closed_round(folder: Path) -> int:
    path = folder / "fleet" / "ledger.sqlite"
    if not path.exists():
        return 0
    with Ledger(path, create=False) as ledger:
        return max((row.round for row in ledger.rounds("closed")), default=0)


def checkpoint(folder: Path) -> tuple[dict[str, Any], dict[str, str]]:
    """Arrays and metadata of the fleet's last checkpoint."""
    path = max((folder / "fleet" / "state").glob("round-*.safetensors"))
    return storage.unpack(path.read_bytes(), where=str(path))


def check_same_end(folder: Path, wanted: Path) -> None:
    """Both fleets have the same last checkpoint, bit for bit."""
    arrays, facts = checkpoint(folder)
    expected, expected_facts = checkpoint(wanted)
    assert facts == expected_facts
    assert arrays.keys() == expected.keys()
    assert [key for key in arrays if arrays[key].tobytes() != expected[key].tobytes()] == []


def check_counted_once(folder: Path) -> None:
    """Every round closed with exactly one counted update per device."""
    names = sorted(home.name for home in folder.glob("d*"))
    rounds = Fleet.load(folder / "fleet").config.fleet.rounds
    with closing(Ledger(folder / "fleet" / "ledger.sqlite", create=False)) as ledger:
        closed = [(row.round, row.status, row.cohort) for row in ledger.rows(Round)]
        counted = sorted((row.round, row.device) for row in ledger.rows(Update, status="counted"))
    assert closed == [(n, "closed", tuple(names)) for n in range(1, rounds + 1)]
    assert counted == [(n, name) for n in range(1, rounds + 1) for name in names]


def check_duals(folder: Path) -> None:
    """Identity 4: m · h is the sum of the devices' duals and the residuals of what they sent. It holds after every
    round, and whenever no round can close; counted updates that their device has not heard of are included."""
    fleet = Fleet.load(folder / "fleet")
    arrays, facts = checkpoint(folder)
    server = trees.scale(storage.unflatten_roles(arrays)["memory.dual"], int(facts["members"]))
    total = trees.zeros_like(server)
    for home in sorted(folder.glob("d*")):
        state = state_after_round(folder, home)
        total = trees.add(total, trees.apply(lambda a: a.astype(np.float64), state["dual"]))
        if "residual" in state:
            total = trees.axpy(fleet.hyper.penalty, state["residual"], total)
    assert trees.norm(total) > 1e-6, "there is something to compare"
    assert trees.norm(trees.subtract(server, total)) <= 3e-6 * max(1.0, trees.norm(total))


def state_after_round(folder: Path, home: Path) -> ClientState:
    """The device's training state including what the last closed round counted, from its files. The agent may be
    running: the pending file is read first, because it becomes the state file."""
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
