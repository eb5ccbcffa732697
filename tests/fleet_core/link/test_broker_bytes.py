"""Bytes counted twice: the ledger's against the broker's own, and the kernel's figures of a connection."""

from __future__ import annotations

import secrets
import socket
import struct
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.broker.private_broker import find_mosquitto
from cloud_server.identity.device_folder import write_device_folder
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Evaluation, Usage
from cloud_server.records.fleet_folder import Fleet
from cloud_server.rounds.coordinator import Coordinator
from fleet_core.data.samples import Samples, save
from fleet_core.link.byte_counters import ByteCounters, Traffic, wire_bytes
from fleet_core.link.interface import Message
from fleet_core.link.mqtt import MqttLink
from tests.support import waiting
from tests.support.brokers import NEEDS_MOSQUITTO, accepts_connections, free_port
from tests.support.programs import Programs, edge_agent, wide_fleet

WITHIN = 0.001
ROUNDS = 4
COUNTERS = {"up": "$SYS/broker/bytes/received", "down": "$SYS/broker/bytes/sent"}

def broker_url(programs: Programs) -> str:
    """A mosquitto that publishes its counters every second."""
    port = free_port()
    config = programs.folder / "broker.conf"
    config.write_text(f"listener {port} 127.0.0.1\nallow_anonymous true\nsys_interval 1\nmax_queued_messages 4000\n")
    broker = programs.start(find_mosquitto() or "mosquitto", "-c", str(config))
    broker.until(lambda: accepts_connections(port))
    return f"mqtt://127.0.0.1:{port}"


def fleet_with_homes(folder: Path, url: str) -> Fleet:
    fleet = wide_fleet(folder / "fleet", ROUNDS)
    for k in range(2):
        home = folder / f"d{k}"
        write_device_folder(fleet, home.name, home, url)
        x = np.random.default_rng(k).normal(size=(60, 1024)).astype(np.float32)
        save(home / "samples.npz", Samples(x, np.arange(60) % 3, classes=("a", "b", "c")))
    return fleet


@NEEDS_MOSQUITTO
@pytest.mark.slow
def test_the_brokers_own_byte_counts_are_the_ledgers_and_the_aggregators(programs: Programs) -> None:
    """Not in the ledger: the devices' last reports; in the broker's counts only: the connection that asked whether it
    was up. Both are below a tenth of the tolerance."""
    url = broker_url(programs)
    fleet = fleet_with_homes(programs.folder, url)
    seen: dict[str, int] = {}
    link, monitor = MqttLink(url, client_id="aggregator"), MqttLink(url, client_id=f"monitor-{secrets.token_hex(4)}")
    with Ledger(fleet.ledger_path) as ledger:
        server = Coordinator(fleet, link, ledger)
        monitor.subscribe(*COUNTERS.values())
        link.open()
        monitor.open()
        for k in range(2):
            programs.start(*edge_agent("run", "--home", programs.folder / f"d{k}"))

        def step() -> None:
            server.step(0.05)
            for event in monitor.poll(0):
                if isinstance(event, Message):
                    seen[event.topic] = int(event.payload)

        def told() -> Any:
            return [program.text() for program in programs.started]

        waiting.until(lambda: {row.device for row in ledger.rows(Evaluation, round=ROUNDS)} == {"d0", "d1"}, step, told)
        mqtt = ledger.volume()[None].mqtt
        assert mqtt is not None
        assert mqtt.missing is None

        def counted(way: str) -> int:
            ends = [each.counters.snapshot() for each in (link, monitor)]
            return sum(end.mqtt_sent if way == "up" else end.mqtt_received for end in ends) + int(getattr(mqtt, way))

        waiting.until(lambda: all(seen.get(COUNTERS[way], 0) >= (1 - WITHIN) * counted(way) for way in COUNTERS), step,
                      lambda: (seen, {way: counted(way) for way in COUNTERS}))
        assert mqtt.up > 2 * ROUNDS * 700_000
        for way, topic in COUNTERS.items():
            assert seen[topic] == pytest.approx(counted(way), rel=WITHIN), way
        used = ledger.usage()
        assert used.keys() == {"d0", "d1"}
        for figures in used.values():
            assert figures["connected_s"] > 0
            if sys.platform == "linux":
                assert figures["cpu_s"] > 0
                assert figures["peak_mib"] > 20
                assert figures["retransmitted_bytes"] is not None
        assert {row.round for row in ledger.rows(Usage)} == set(range(1, ROUNDS + 1))
        server.close()
        monitor.close()


# The kernel's figures -------------------------------------------------------------------------------------------------


class Socket:
    """A connection whose kernel tells these figures."""

    family = socket.AF_INET

    def __init__(self, sent: int, received: int, again: int, *, size: int = 216):
        self._info = bytearray(size)
        struct.pack_into("=QII", self._info, 128, received, 2, 1)
        struct.pack_into("=Q", self._info, 200, sent)
        if size >= 216:
            struct.pack_into("=Q", self._info, 208, again)

    def getsockopt(self, level: int, option: int, size: int) -> bytes:
        return bytes(self._info)


linux = pytest.mark.skipif(sys.platform != "linux", reason="TCP_INFO is Linux's")


@linux
@pytest.mark.allowed_skip("TCP_INFO is Linux's")
def test_bytes_sent_again_are_the_kernels_and_add_up_over_connections() -> None:
    counters = ByteCounters(clock=lambda: 0.0)
    for again in (7, 5):
        sock: Any = Socket(1000, 300, again)
        counters.opened(sock)
        counters.closed(sock)
    assert counters.snapshot().retransmitted == 12
    assert wire_bytes(sock) == (1000 + 2 * 40 + 8, 300 + 40 + 8, 5)
    older: Any = Socket(1000, 300, 0, size=208)
    assert wire_bytes(older) is None, "a kernel before 4.19"


@linux
@pytest.mark.allowed_skip("TCP_INFO is Linux's")
def test_a_real_connection_that_loses_nothing_sends_nothing_again() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server, socket.create_connection(server.getsockname()) as ours:
        theirs, _ = server.accept()
        with theirs:
            ours.sendall(b"x" * 5000)
            assert theirs.recv(5000, socket.MSG_WAITALL)
            found = wire_bytes(ours)
    assert found is not None
    assert found[0] > 5000
    assert found[2] == 0


def test_on_other_systems_they_are_absent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    counters = ByteCounters()
    assert counters.snapshot() == Traffic(0, 0, None, None, None, None)


def test_connected_seconds_are_those_with_a_connection_and_absent_before_the_first() -> None:
    now = [0.0]
    counters = ByteCounters(wire=False, clock=lambda: now[0])
    assert counters.snapshot().connected_s is None
    sock: Any = Socket(0, 0, 0)
    for begin, end in ((10.0, 14.0), (20.0, 21.0)):
        now[0] = begin
        counters.opened(sock)
        now[0] = end
        first_seen = counters.snapshot()
        counters.closed(sock)
        now[0] += 5
    assert counters.snapshot().connected_s == 5.0
    assert (counters.snapshot() - first_seen).connected_s == 0.0
