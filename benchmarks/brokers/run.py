"""How a broker handles the protocol: probes of the features that it uses, and a small fleet, over MQTT 5 and 3.1.1.

    python -m benchmarks.brokers.run mosquitto=mqtt://127.0.0.1:1883 --out benchmarks/brokers/result.json
    python -m benchmarks.brokers.run mine=mqtts://broker.example:8883 --ca ca.pem --cert me.pem --key me.key

Each NAME=URL is a running broker that lets this write below ``fl1/probe…``. Results of other names in the file of
``--out`` stay. The fleet is the real aggregator and three real agents in this process, two rounds of FedAvg in fp32
with a model of about 1 MB in 18 chunks (two segments). What a broker does not do is a finding, not a failure.
"""

from __future__ import annotations

import argparse
import json
import secrets
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from pathlib import Path
from typing import Any, Literal

import numpy as np

from benchmarks.markdown import table
from cloud_server.identity.create_fleet import create_fleet
from cloud_server.identity.device_folder import write_device_folder
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Evaluation, Update
from cloud_server.records.fleet_folder import Fleet
from cloud_server.rounds.coordinator import Coordinator
from cloud_server.rounds.coordinator import will as server_will
from edge_agent.commands.run import service_of
from edge_agent.compute.trainer import InlineTrainer
from edge_agent.device.agent_costs import AgentCosts
from edge_agent.device.state import DeviceState
from edge_agent.rounds.agent import Agent, will
from export.first_model import first
from fleet_core.base import config, storage
from fleet_core.board.device_settings import settings_of
from fleet_core.data.samples import Samples, save
from fleet_core.link.interface import Connected, Denied, Disconnected, Event, Message, Will
from fleet_core.link.mqtt import MqttLink

Version = Literal[3, 5]
VERSIONS: tuple[Version, ...] = (5, 3)
WORDS: dict[Version, str] = {5: "5", 3: "3.1.1"}
CHUNK = 61_440  # of the protocol, by default
SIZES = (CHUNK, 131_000, 262_000, 1_048_000)  # bytes: a chunk, AWS IoT Core's limit, others', the largest manifest
BURST = 300
PATIENCE_S = 8.0
FLEET_S = 300.0
DEVICES, ROUNDS = 3, 2
COLUMNS = ("connects", "retained", "retained by wildcard", "cleared", "last will", "takeover", "burst", "largest",
           "fleet")


class Client:
    """A link that keeps its events."""

    def __init__(self, url: str, version: Version, login: dict[str, Any], name: str, will: Will | None = None):
        self.link = MqttLink(url, client_id=name, will=will, protocol=version, **login)
        self.events: list[Event] = []
        self.link.open()

    def until(self, condition: Callable[[], object], patience_s: float = PATIENCE_S) -> bool:
        """Polls until the condition holds; False if it does not within ``patience_s``."""
        end = time.monotonic() + patience_s
        while not condition() and time.monotonic() < end:
            self.events += self.link.poll(0.05)
        return bool(condition())

    def connected(self) -> bool:
        return self.until(lambda: self.link.connected)

    def close(self) -> None:
        self.link.close()

    def messages(self, topic: str) -> list[Message]:
        return [event for event in self.events if isinstance(event, Message) and event.topic == topic]

    def why(self) -> str:
        """The last thing that the broker said."""
        said = [event.reason for event in self.events if isinstance(event, Disconnected | Denied)]
        return said[-1] if said else "nothing arrived"


class Probes:
    """The features one by one, each on topics of its own."""

    def __init__(self, url: str, version: Version, login: dict[str, Any]):
        self._open = lambda name, will=None: closing(
            Client(url, version, login, f"probe-{name}-{secrets.token_hex(3)}", will))
        self._version, self._url, self._login = version, url, login
        self._root = f"fl1/probe-{secrets.token_hex(4)}"

    def connects(self) -> str:
        with self._open("c") as client:
            if not client.connected():
                return client.why()
            began = next(event for event in client.events if isinstance(event, Connected))
            if began.mqtt_version != self._version:
                return f"as {began.mqtt_version}"
            limits = [f"packets up to {began.max_packet_bytes}"] if began.max_packet_bytes else []
            return "; ".join(["yes", *limits])

    def retained(self) -> str:
        return self._read_back(f"{self._root}/r/cur", f"{self._root}/r/cur")

    def by_wildcard(self) -> str:
        return self._read_back(f"{self._root}/b/{'0' * 32}/0/0", f"{self._root}/b/{'0' * 32}/0/+")

    def _read_back(self, topic: str, pattern: str, size: int = CHUNK, *, settle_s: float = 0.5) -> str:
        payload = secrets.token_bytes(size)
        with self._open("w") as writer:
            if not writer.connected():
                return writer.why()
            writer.link.publish(topic, payload, retain=True)
            if not writer.until(lambda: not writer.link.unacknowledged or not writer.link.connected) \
                    or not writer.link.connected or any(isinstance(event, Denied) for event in writer.events):
                return writer.why()
            writer.until(lambda: False, settle_s)
        with self._open("r") as reader:
            reader.link.subscribe(pattern)
            if not reader.until(lambda: reader.messages(topic)):
                return "no: " + reader.why()
            found = reader.messages(topic)[0]
            reader.link.publish(topic, b"", retain=True)
            reader.until(lambda: not reader.link.unacknowledged)
        return "yes" if found.payload == payload and found.retain else "other bytes, or not as retained"

    def cleared(self) -> str:
        topic = f"{self._root}/r/old"
        with self._open("w") as writer:
            writer.connected()
            for payload in (b"old", b""):
                writer.link.publish(topic, payload, retain=True)
            writer.until(lambda: not writer.link.unacknowledged)
            writer.until(lambda: False, 0.5)
        with self._open("r") as reader:
            reader.link.subscribe(topic)
            return "no" if reader.until(lambda: reader.messages(topic), 1.0) else "yes"

    def last_will(self) -> str:
        topic = f"{self._root}/a/d0/st"
        with self._open("r") as reader:
            reader.link.subscribe(topic)
            reader.connected()
            with self._open("w", Will(topic, b"off")) as dying:
                if not dying.connected():
                    return dying.why()
                reader.until(lambda: False, 0.5)
                dying.link.abort()
                if not reader.until(lambda: reader.messages(topic)):
                    return "no: " + reader.why()
        with self._open("late") as late:
            late.link.subscribe(topic)
            return "yes" if late.until(lambda: late.messages(topic), 3.0) else "yes, but not retained"

    def takeover(self) -> str:
        name = f"probe-same-{secrets.token_hex(3)}"
        with closing(Client(self._url, self._version, self._login, name)) as before:
            before.connected()
            with closing(Client(self._url, self._version, self._login, name)) as after:
                if not after.connected():
                    return after.why()
                ended = before.until(lambda: any(isinstance(event, Disconnected) for event in before.events))
                return "yes" if ended else "no: both stay"

    def burst(self) -> str:
        topic = f"{self._root}/a/d0/up/1/0"
        with self._open("r") as reader, self._open("w") as writer:
            reader.link.subscribe(topic)
            reader.connected()
            reader.until(lambda: False, 0.5)
            if not writer.connected():
                return writer.why()
            for _ in range(BURST):
                writer.link.publish(topic, b"x" * 1024)
            writer.until(lambda: not writer.link.unacknowledged)
            reader.until(lambda: len(reader.messages(topic)) >= BURST)
            return f"{len(reader.messages(topic))} of {BURST}"

    def largest(self) -> str:
        held = 0
        for size in SIZES:
            topic = f"{self._root}/r/large"
            try:
                if self._read_back(topic, topic, size) != "yes":
                    break
            except Exception as error:  # the link names a limit of the broker
                return f"{held} B ({str(error).splitlines()[0]})"
            held = size
        return f"{held} B"


# The fleet ------------------------------------------------------------------------------------------------------------


def made(folder: Path, name: str) -> tuple[Fleet, list[Path]]:
    """A fleet and the homes of its devices."""
    text = config.toml({
        "fleet": {"name": name, "method": "fedavg", "rounds": ROUNDS, "min_devices": DEVICES, "serve_every": 1},
        "model": {"name": "mlp", "classes": ["a", "b", "c"], "input": {"shape": [512]}, "options": {"hidden": [512]}},
        "link": {"up": "fp32", "down": "fp32"}, "hyper": {"local_steps": 2},
    })
    fleet = create_fleet(folder / "fleet", text, lambda settings, head: first(
        settings.model.name, settings.model.input, settings.model.classes, settings.model.options, head=head, seed=0))
    homes = []
    for n in range(DEVICES):
        home = folder / f"d{n}"
        write_device_folder(fleet, home.name, home, "mqtt://127.0.0.1:1883")
        rng = np.random.default_rng(n)
        y = rng.integers(0, 3, 60)
        x = (np.eye(3, 512)[y] * 3 + rng.normal(size=(60, 512))).astype(np.float32)
        save(home / "samples.npz", Samples(x, y.astype(np.int64), None, np.arange(60.0), ("a", "b", "c")))
        homes.append(home)
    return fleet, homes


@contextmanager
def agents_of(homes: list[Path], url: str, version: Version, login: dict[str, Any]) -> Iterator[list[Agent]]:
    agents = []
    for home in homes:
        settings, boot = settings_of(home), secrets.token_hex(8)
        link = MqttLink(url, client_id=f"{settings.device.fleet}-{home.name}", will=will(settings, boot),
                        protocol=version, **login)
        agents.append(Agent(settings, DeviceState(home), link, service_of(home, settings), AgentCosts(),
                            InlineTrainer(), boot=boot))
        link.open()
    try:
        yield agents
    finally:
        for agent in agents:
            agent.close()


def fleet_run(url: str, version: Version, login: dict[str, Any]) -> dict[str, Any]:
    """Rounds, counted updates, seconds, and the aggregator's MQTT bytes."""
    with tempfile.TemporaryDirectory(prefix="mf-brokers-") as folder:
        fleet, homes = made(Path(folder), f"probe-{secrets.token_hex(4)}")
        name, lines = fleet.config.fleet.name, list[str]()
        link = MqttLink(url, client_id=f"{name}-aggregator", will=server_will(name, "boot"), protocol=version,
                        **login)
        with fleet.lock(), Ledger(fleet.ledger_path) as ledger, agents_of(homes, url, version, login) as agents:
            server = Coordinator(fleet, link, ledger, boot="boot", log=lines.append)
            link.open()
            began = time.monotonic()
            while time.monotonic() - began < FLEET_S and not (server.finished and _all_evaluated(ledger)):
                server.step(0.005)
                for agent in agents:
                    agent.step(0.005)
            took = time.monotonic() - began
            moved, counted = link.counters.snapshot(), len(ledger.rows(Update, status="counted"))
            found = {"rounds": server.checkpoint.round, "counted": counted, "evaluated": _all_evaluated(ledger),
                     "seconds": round(took, 1), "bytes_sent": moved.mqtt_sent, "bytes_received": moved.mqtt_received,
                     "log": lines[-8:]}
            server.close()
    return found


def _all_evaluated(ledger: Ledger) -> bool:
    return len(ledger.rows(Evaluation, round=ROUNDS, stage="after")) + len(
        ledger.rows(Evaluation, round=ROUNDS, stage="before")) >= DEVICES


# Command --------------------------------------------------------------------------------------------------------------


def measure(url: str, version: Version, login: dict[str, Any]) -> dict[str, Any]:
    probes = Probes(url, version, login)
    row: dict[str, Any] = {"connects": probes.connects()}
    if not row["connects"].startswith("yes"):
        return row
    steps = (probes.retained, probes.by_wildcard, probes.cleared, probes.last_will, probes.takeover, probes.burst,
             probes.largest)
    for column, step in zip(COLUMNS[1:-1], steps, strict=True):
        row[column] = step()
        print(f"  {column}: {row[column]}", file=sys.stderr, flush=True)
    return {**row, "fleet": fleet_run(url, version, login)}


def cells(name: str, version: str, row: dict[str, Any]) -> list[str]:
    """A row of the table."""
    ran = row.get("fleet")
    whole = ran is not None and ran["rounds"] == ROUNDS and ran["counted"] == ROUNDS * DEVICES and ran["evaluated"]
    fleet = "" if ran is None else f"{'whole' if whole else 'not whole'}: {ran['rounds']} rounds, {ran['counted']} " \
        f"updates, {ran['seconds']:.1f} s"
    return [name, version, *(row.get(column, "") for column in COLUMNS[:-1]), fleet]


def page_table(results: dict[str, Any]) -> str:
    """The table of docs/brokers.md."""
    return table(("broker", "MQTT", *COLUMNS), (
        cells(found["name"], version, found["versions"][version]) for _, found in sorted(results.items())
        for version in WORDS.values()))


def main() -> int:
    """Exit code 0 once every broker was measured."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("brokers", nargs="+", metavar="NAME=URL")
    parser.add_argument("--label", help="the broker's name and version, for the table; default: NAME")
    parser.add_argument("--out", type=Path)
    for option in ("--username", "--password"):
        parser.add_argument(option)
    for option in ("--ca", "--cert", "--key"):
        parser.add_argument(option, type=Path, help="PEM")
    given = parser.parse_args()
    login = {key: getattr(given, key) for key in ("username", "password", "ca", "cert", "key")}
    kept = json.loads(given.out.read_text()) if given.out is not None and given.out.exists() else {}
    results: dict[str, Any] = dict(kept)
    for broker in given.brokers:
        name, _, url = broker.partition("=")
        found: dict[str, Any] = {"name": given.label or name, "versions": {}}
        for version in VERSIONS:
            print(f"{name}, MQTT {WORDS[version]}", file=sys.stderr, flush=True)
            found["versions"][WORDS[version]] = measure(url, version, login)
        results[name] = found
        if given.out is not None:
            storage.write_json(given.out, results)
    print(page_table(results), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
