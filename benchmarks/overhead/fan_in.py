"""Thousands of devices that upload at once: how many updates reach the aggregator, how fast, and in how much memory.

The aggregator is the real one, in its own process; mosquitto runs with its default configuration. A few processes
simulate the devices, each device with its own connection and with the agents' session and uploader: presence, upload
manifest, chunks on ``need``, heartbeats while waiting, and a report at the end. They do not train: each sends one
random update of about 100 KB, the same in every round, as soon as a round opens; all do so at once. Linux only.

    python benchmarks/overhead/fan_in.py --out benchmarks/overhead/fan_in.json [--devices 1000 5000] [--rounds 2]
    python benchmarks/overhead/fan_in.py --out benchmarks/overhead/at_once.json --at-once

They join at ``--join-per-s`` once the aggregator runs; with ``--at-once`` all join when it is started. If presences
arrive faster than the aggregator takes them, the broker's queue for it (1000 messages) overflows. A device that has
received nothing (neither a message of its own nor a round that asks it) therefore publishes its presence again, after 5
to 30 seconds drawn anew each time.
"""

from __future__ import annotations

import argparse
import functools
import math
import multiprocessing
import os
import random
import resource
import selectors
import socket
import subprocess
import sys
import tempfile
import time
from collections import Counter, deque
from dataclasses import dataclass
from multiprocessing.connection import Connection
from multiprocessing.synchronize import Event as Flag
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.broker.private_broker import find_mosquitto
from cloud_server.identity.create_fleet import create_fleet
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Update
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.fleet_settings import FleetConfig
from edge_agent.connection.update_upload import Uploader
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import config
from fleet_core.base.processes import WITH_PARENT
from fleet_core.base.storage import write_json
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.link.byte_counters import ByteCounters
from fleet_core.link.interface import Connected, Message, Will
from fleet_core.link.mqtt_connection import Address, Session, Settings, Subscription
from fleet_core.model import graph_bundle, payloads
from fleet_core.protocol import cohort, device_messages, messages, topics
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.device_messages import Down, Presence, Report
from fleet_core.protocol.round_messages import Cost, Manifest, UploadManifest

FLEET = "fan-in"
PROCESSES = 2
MEMORY_BAR_MIB = 120
HEARTBEAT_S = 2.0
AT_ONCE = 20  # connections to open before the others are served
TICK_S = 1.0
OPEN_FILES = 12_000
AGAIN_S = (5.0, 30.0)  # until an unanswered presence is published again


@dataclass(frozen=True)
class Offered:
    """A simulated device's update."""

    round: int
    upload: UploadManifest
    data: bytes

    def chunk(self, k: int) -> bytes:
        size = self.upload.blob.chunk
        return self.data[k * size : (k + 1) * size]


class Device:
    """The part of an agent that uses the link; it is its own uploader's link."""

    def __init__(self, name: str, settings: Settings, fleet: Fleet, layout_hash: str, data: bytes):
        self.name, self._settings, self._fleet, self._layout = name, settings, fleet, layout_hash
        self._data, self._blob = data, Blob.of(data, fleet.config.link.chunk_bytes)
        self._events: deque[Any] = deque()
        link: Any = self  # an uploader uses only ``connected`` and ``publish`` of a Link
        self._uploader = Uploader(FLEET, name, link, time.monotonic, lambda sent: None)
        self._round, self._beaten_at = 0, 0.0
        self._heard, self._again_at = False, 0.0
        self._random = random.Random(name)
        self.counters = ByteCounters()
        self.seen: Counter[str] = Counter()
        self.session: Session | None = None

    @property
    def connected(self) -> bool:
        return self.session is not None and self.session.accepted and not self.session.ended

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1) -> None:
        if self.session is not None:
            self.session.publish(topic, payload, retain, qos)

    def connect(self) -> None:
        self.session = Session(self._settings, 5, self.counters, self._events)

    def turn(self) -> None:
        """Reads, writes and handles events."""
        assert self.session is not None
        self.session.work()
        while self._events:
            match self._events.popleft():
                case Connected():
                    self._on_connected()
                case Message(topic, payload) if topic.endswith("/dn"):
                    self._on_down(messages.decode(Down, payload))
                case Message(_, payload):
                    self._on_manifest(read_manifest(payload))

    def at_the_end(self) -> Counter[str]:
        """What the device counted, and what it still waits for."""
        return self.seen + Counter({"waits for a round": self._round == 0, "waits to upload": self._uploader.active})

    def tick(self) -> None:
        """Once a second: heartbeats, and publishing again what got no answer."""
        self._uploader.tick()
        if self.connected and not self._heard and time.monotonic() >= self._again_at:
            self.seen["presence repeated"] += 1
            self._announce()
        if self._uploader.active and time.monotonic() - self._beaten_at >= HEARTBEAT_S:
            self._say(Presence("on", "boot", "upload", beat=True))
            self._beaten_at = time.monotonic()

    def _say(self, presence: Presence, *, retain: bool = False) -> None:
        self.publish(topics.presence(FLEET, self.name), messages.encode(presence), retain=retain)

    def _on_connected(self) -> None:
        self.seen["connected"] += 1
        assert self.session is not None
        wanted = (topics.current(FLEET), topics.down(FLEET, self.name))
        self.session.subscribe(dict.fromkeys(wanted, Subscription(1, as_published=False)))
        self._heard = False
        self._announce()

    def _announce(self) -> None:
        self._again_at = time.monotonic() + self._random.uniform(*AGAIN_S)
        known = {name: method.version for name, method in METHODS.items()}
        self._say(Presence("on", "boot", methods=known, codecs=tuple(CODECS)), retain=True)

    def _on_manifest(self, manifest: Manifest) -> None:
        if not manifest.open or not cohort.includes(manifest.cohort, manifest.round, self.name):
            return
        self._heard = True
        if manifest.round <= self._round:
            return
        self._round = manifest.round
        upload = UploadManifest(
            self._blob, manifest.up.codecs[0], manifest.model.model, manifest.method.name, self._layout,
            dual_epoch=manifest.dual_epoch, samples=32, metrics={"loss": 1.0}, cost=Cost(len(self._data)),
        )
        self._say(Presence("on", "boot", "upload", beat=True))
        self._beaten_at = time.monotonic()
        self._uploader.offer(Offered(manifest.round, upload, self._data))

    def _on_down(self, down: Down) -> None:
        self._heard = True
        if down.t == "need":
            return self._uploader.on_need(down)
        if self._uploader.active and (down.r, down.id) == (self._round, self._blob.id):
            self.seen[down.t] += 1
            self._uploader.stop()
            self._say(Presence("on", "boot", beat=True))
            sums = self.counters.snapshot()
            traffic = device_messages.Traffic(sums.mqtt_sent, sums.mqtt_received, sums.wire_sent, sums.wire_received)
            report = messages.encode(Report(self._round, "boot", traffic=traffic))
            self.publish(topics.report(FLEET, self.name), report)


@functools.lru_cache(maxsize=4)
def read_manifest(signed: bytes) -> Manifest:
    """The round, decoded once for all devices of a process."""
    return messages.decode(Manifest, signed.partition(b"\n")[2], limit=1 << 24)


def devices(folder: Path, port: int, first: int, count: int) -> list[Device]:
    fleet = Fleet.load(folder)
    layout = graph_bundle.unpack(fleet.graph_bytes()).layout
    groups = fleet.method.shared
    rng = np.random.default_rng(first)
    made = []
    for k in range(first, first + count):
        values = {
            group: {t.name: rng.normal(0, 0.01, t.shape).astype(np.float32) for t in layout.tensors if t.group == group}
            for group in groups
        }
        name = f"d{k:05d}"
        topic = topics.presence(FLEET, name)
        will = Will(topic, messages.encode(Presence("off", "boot")))
        settings = Settings(Address("127.0.0.1", port, False), name, will, 60, None, None, None, 8 << 20, 30.0)
        data = payloads.encode(fleet.config.link.up, layout.ordered(values))
        made.append(Device(name, settings, fleet, layout.hash, data))
    return made


def clients(
    folder: Path, port: int, first: int, count: int, join_per_s: float, ended: Flag, out: Connection
) -> None:
    """One process of ``count`` devices: reports when all are made, starts them on a message, and serves them until
    ``ended``."""
    raise_limit()
    crowd = devices(folder, port, first, count)
    out.send("ready")
    out.recv()
    selector = selectors.DefaultSelector()
    watched: dict[Device, tuple[int, int]] = {}
    joining = deque(crowd)
    began = ticked = time.monotonic()
    joined = broken = 0
    while not ended.is_set():
        due = len(joining) if join_per_s == math.inf else int((time.monotonic() - began) * join_per_s) - joined
        for _ in range(min(due, AT_ONCE, len(joining))):
            device = joining.popleft()
            device.connect()
            watch(selector, watched, device)
            joined += 1
        for key, _ in selector.select(0.01 if joining else 0.2):
            key.data.turn()
            watch(selector, watched, key.data)
        if time.monotonic() - ticked > TICK_S:
            ticked = time.monotonic()
            for device in list(watched):
                device.tick()
                device.turn()
                watch(selector, watched, device)
            lost = [device for device in crowd if device.session is not None and device.session.ended]
            broken += len(lost)
            for device in lost:
                device.session = None
            joining.extend(lost)
    out.send(sum((device.at_the_end() for device in crowd), Counter({"broken": broken})))


def watch(selector: selectors.BaseSelector, watched: dict[Device, tuple[int, int]], device: Device) -> None:
    """Registers the device's socket for the events that its session waits for."""
    session = device.session
    sock = None if session is None or session.ended else session.socket()
    wanted = selectors.EVENT_READ | (selectors.EVENT_WRITE if session is not None and session.wants_write else 0)
    before = watched.get(device)
    if sock is None:
        if before is not None:
            selector.unregister(watched.pop(device)[0])
    elif before is None:
        watched[device] = (sock.fileno(), wanted)
        selector.register(sock.fileno(), wanted, device)
    elif before[1] != wanted:
        watched[device] = (before[0], wanted)
        selector.modify(before[0], wanted, device)


def raise_limit() -> None:
    """Raises the limit of open files, for this process and its children."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(OPEN_FILES, hard)
    resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def make(folder: Path, count: int, rounds: int) -> Fleet:
    """A fleet that waits for every device and for every update; about 27,400 parameters, 100 KB once encoded."""
    from export.first_model import first

    text = config.toml({
        "fleet": {"name": FLEET, "method": "fedavg", "rounds": rounds, "min_devices": count, "quorum": 1.0,
                  "deadline_s": 600.0, "serve_every": 1_000_000},
        "model": {"name": "mlp", "classes": ["a", "b", "c"], "input": {"shape": [136]}, "options": {"hidden": [196]}},
        "link": {"up": "fp32", "down": "fp32"},
    })

    def export(settings: FleetConfig, head: bool) -> tuple[bytes, bytes]:
        model = settings.model
        return first(model.name, model.input, model.classes, model.options, head=head, seed=0)

    return create_fleet(folder / "fleet", text, export)


def used(pid: int) -> dict[str, float]:
    """Peak memory and CPU time of a process."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    times = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    peak = next(int(line.split()[1]) for line in status if line.startswith("VmHWM"))
    return {"peak_mib": peak / 1024, "cpu_s": (int(times[11]) + int(times[12])) / os.sysconf("SC_CLK_TCK")}


def start_broker(folder: Path) -> tuple[subprocess.Popen[bytes], int, Path]:
    """mosquitto with one listener and otherwise its defaults."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = int(probe.getsockname()[1])
    settings = folder / "mosquitto.conf"
    settings.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\n")
    log = folder / "broker.log"
    with log.open("wb") as output:
        process = subprocess.Popen([find_mosquitto() or "mosquitto", "-c", str(settings)], stdout=output, stderr=output)
    wait_for("running", log, process)
    return process, port, log


def wait_for(words: str, log: Path, process: subprocess.Popen[bytes]) -> None:
    """Waits until ``log`` contains ``words``, while ``process`` runs."""
    until_s = time.monotonic() + 20
    while words not in log.read_text(errors="replace"):
        if process.poll() is not None or time.monotonic() > until_s:
            raise SystemExit(log.read_text(errors="replace"))
        time.sleep(0.05)


def measure(
    count: int, rounds: int, join_per_s: float, limit_s: float, profile: Path | None = None, *, at_once: bool = False
) -> dict[str, Any]:
    """at_once: the devices do not wait for the aggregator, and ``join_per_s`` is ignored."""
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        fleet = make(folder, count, rounds)
        broker, port, broker_log = start_broker(folder)
        context = multiprocessing.get_context("spawn")
        ended, crowd, pipes = context.Event(), [], []
        share = -(-count // PROCESSES)
        for k in range(PROCESSES):
            ours, theirs = context.Pipe()
            joining = math.inf if at_once else join_per_s / PROCESSES
            mine = (fleet.folder, port, k * share, min(share, count - k * share), joining, ended, theirs)
            crowd.append(context.Process(target=clients, args=mine, daemon=True))
            pipes.append(ours)
        for process in crowd:
            process.start()
        for pipe in pipes:
            pipe.recv()
        log = folder / "server.log"
        with log.open("wb") as output:
            server = subprocess.Popen(
                [sys.executable, "-m", "cloud_server.commands.cli", "server", "start", str(fleet.folder), "--quiet",
                 "--broker", f"mqtt://127.0.0.1:{port}"],
                stdout=output, stderr=output, env={**os.environ, WITH_PARENT: str(os.getpid())},
            )
        watcher = start_profile(profile, server.pid, count)
        try:
            if not at_once:
                wait_for(f"{FLEET}-aggregator", broker_log, server)
            for pipe in pipes:
                pipe.send("join")
            found_figures = follow(fleet, server, broker, rounds, limit_s)
        finally:
            ended.set()
            seen: Counter[str] = sum((pipe.recv() for pipe in pipes), Counter())
            for process in crowd:
                process.join(30)
            for running in (server, broker, *([watcher] if watcher else [])):
                running.terminate()
                running.wait(30)
        said = log.read_text(errors="replace").splitlines()
        refused = [line for line in said if "refused" in line]
        dropped = sum("being dropped" in line for line in broker_log.read_text(errors="replace").splitlines())
        return {
            "devices": count, "at_once": at_once, **found_figures, "seen_by_devices": dict(seen),
            "refusals_logged": len(refused), "broker_drop_notices": dropped,
            "server_said": said[-5:] if found_figures["lost"] else [],
        }


def start_profile(folder: Path | None, pid: int, count: int) -> subprocess.Popen[bytes] | None:
    if folder is None:
        return None
    out = str(folder / f"fan_in_{count}.txt")
    command = ["py-spy", "record", "--format", "raw", "--rate", "50", "-d", "3600", "-o", out, "--pid", str(pid)]
    return subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)


def follow(
    fleet: Fleet, server: subprocess.Popen[bytes], broker: subprocess.Popen[bytes], rounds: int, limit_s: float
) -> dict[str, Any]:
    """Waits until all rounds are closed or the time is up; the figures."""
    started = time.time()
    steps: list[dict[str, float]] = []
    with Ledger(fleet.ledger_path) as ledger:
        while time.time() - started < limit_s and server.poll() is None:
            closed = ledger.rounds("closed")
            if len(closed) > len(steps):
                steps.append(used(server.pid))
            if len(closed) == rounds:
                break
            time.sleep(0.5)
        updates = ledger.rows(Update)
        per_round: list[dict[str, Any]] = [
            {"seconds": row.seconds, "counted": sum(u.round == row.round and u.status == "counted" for u in updates),
             "bytes": sum(u.payload_bytes for u in updates if u.round == row.round and u.status == "counted"),
             "server_peak_mib": step["peak_mib"], "server_cpu_s": step["cpu_s"]}
            for row, step in zip(ledger.rounds("closed"), steps, strict=False)
        ]
        wanted = rounds * fleet.config.fleet.min_devices
        opened = [row.opened_at for row in ledger.rounds()]
        return {
            "wall_s": time.time() - started,
            "until_all_are_there_s": opened[0] - started if opened else None,
            "rounds": per_round,
            "lost": wanted - sum(u.status == "counted" for u in updates),
            "refused": sum(u.status != "counted" for u in updates),
            "devices_on": sum(d.state == "on" for d in ledger.devices()),
            "updates_per_s": [row["counted"] / (row["seconds"] or 1.0) for row in per_round],
            "server": used(server.pid) if server.poll() is None else None,
            "broker": used(broker.pid) if broker.poll() is None else None,
        }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, nargs="+", default=[1000, 5000])
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--join-per-s", type=float, default=250.0)
    parser.add_argument("--at-once", action="store_true", help="all devices connect when the aggregator starts")
    parser.add_argument("--limit-s", type=float, default=420.0, help="of each run")
    parser.add_argument("--profile", type=Path, help="folder for py-spy's stacks of the aggregator")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    raise_limit()
    runs = []
    for count in options.devices:
        runs.append(measure(
            count, options.rounds, options.join_per_s, options.limit_s, options.profile, at_once=options.at_once
        ))
        print(runs[-1], flush=True)
        write_json(options.out, {"memory_bar_mib": MEMORY_BAR_MIB, "runs": runs})


if __name__ == "__main__":
    main()
