"""A private broker starts, listens on loopback only, says why it cannot start, and never outlives its parent."""

from __future__ import annotations

import dataclasses
import errno
import importlib.util
import os
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import cloud_server.broker.private_broker as broker_module
from cloud_server.broker import mosquitto_config
from cloud_server.broker.mosquitto_config import BrokerSetup
from cloud_server.broker.private_broker import Broker, start_broker, start_secured
from cloud_server.broker.requirements import PACKET_OVERHEAD_BYTES
from cloud_server.records.fleet_settings import LinkSection
from cloud_server.running import aggregator_process
from fleet_core.base.errors import ConfigError, LinkError, StateError
from fleet_core.link.interface import Connected, Message, Will
from fleet_core.link.mqtt import MAX_INCOMING_BYTES, MqttLink, parse_url
from tests.support.brokers import NEEDS_MOSQUITTO, RecordingLink, private_broker, refuses_connections, until
from tests.support.paths import ROOT
from tests.support.pki import fleet_without_model
from tests.support.programs import (
    clean_environ,
    closed_rounds,
    command_of,
    descendants,
    device,
    edge_agent,
    metafleet,
    programs_in,
    small_fleet,
)
from tests.support.waiting import PATIENCE_S


@pytest.fixture(params=[pytest.param("mosquitto", marks=NEEDS_MOSQUITTO), "amqtt"])
def kind(request: pytest.FixtureRequest) -> str:
    """Each broker in turn."""
    return str(request.param)


PROGRAM = {"mosquitto": "mosquitto -c", "amqtt": "broker.embedded"}
"""A part of each broker's command line."""


@pytest.fixture
def embedded(kind: str) -> bool:
    return kind == "amqtt"


@pytest.fixture
def broker(tmp_path: Path, kind: str) -> Iterator[Broker]:
    with private_broker(tmp_path / "broker", kind) as broker:
        yield broker


def connected(broker: Broker, client_id: str, *filters: str, will: Will | None = None) -> RecordingLink:
    watched = RecordingLink(MqttLink(broker.url, client_id=client_id, will=will))
    watched.link.subscribe(*filters)
    watched.link.open()
    until(lambda: watched.of(Connected), watched)
    return watched


def test_a_private_broker_listens_on_loopback_alone_and_stops(broker: Broker) -> None:
    port = parse_url(broker.url).port
    assert broker.alive()
    with pytest.raises(OSError, match=r"refused|assign|reach"):
        socket.create_connection(("127.0.0.2", port), timeout=PATIENCE_S)
    broker.stop()
    broker.stop()
    assert not broker.alive()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S)


@NEEDS_MOSQUITTO
def test_what_is_retained_survives_an_orderly_restart_on_the_same_port(tmp_path: Path) -> None:
    first = start_broker(tmp_path / "with space", embedded=False)
    writer = connected(first, "writer")
    writer.link.publish("r/cur", b"kept", retain=True)
    writer.link.close()
    first.stop()
    second = start_broker(tmp_path / "with space", port=parse_url(first.url).port, embedded=False)
    try:
        assert second.url == first.url
        reader = connected(second, "reader", "r/#")
        until(lambda: reader.of(Message), reader)
        assert reader.of(Message) == [Message("r/cur", b"kept", retain=True)]
    finally:
        second.stop()


@NEEDS_MOSQUITTO
def test_mosquitto_can_be_told_to_reload_as_soon_as_its_start_returns(tmp_path: Path) -> None:
    """It listens before it handles SIGHUP; until then the signal would end it."""
    for number in range(5):
        broker = start_broker(tmp_path / str(number), embedded=False)
        try:
            broker.process.send_signal(signal.SIGHUP)
            with pytest.raises(subprocess.TimeoutExpired):
                broker.process.wait(timeout=0.1)
        finally:
            broker.stop()


def test_a_port_in_use_is_an_error_with_a_hint(broker: Broker, tmp_path: Path) -> None:
    port = parse_url(broker.url).port
    with pytest.raises(LinkError, match=rf"127\.0\.0\.1:{port}: the port is in use\nhint: choose another port"):
        start_broker(tmp_path / "other", port=port)


def test_an_address_that_others_can_reach_is_refused(tmp_path: Path) -> None:
    for host in ("0.0.0.0", "192.168.1.2", "broker.example"):
        with pytest.raises(ConfigError, match="loopback"):
            start_broker(tmp_path, host=host)


def test_an_address_that_others_can_reach_is_taken_when_plain_mqtt_is_requested_by_name(
    tmp_path: Path, embedded: bool
) -> None:
    broker = start_broker(tmp_path, host="0.0.0.0", embedded=embedded, plain=True)
    try:
        assert parse_url(broker.url).host == "127.0.0.1", "as this machine itself reaches it"
        socket.create_connection(("127.0.0.2", parse_url(broker.url).port), timeout=PATIENCE_S).close()
    finally:
        broker.stop()


def test_the_embedded_broker_takes_no_certificates_and_stays_on_this_machine(tmp_path: Path) -> None:
    fleet = fleet_without_model(tmp_path)
    with pytest.raises(ConfigError, match="the embedded broker takes no certificates"):
        aggregator_process.private_broker(fleet, "0.0.0.0", None, plain=False, embedded=True, log=print).__enter__()


def test_commands_find_the_private_broker_at_the_port_that_it_was_started_with(tmp_path: Path, embedded: bool) -> None:
    fleet = fleet_without_model(tmp_path)
    assert aggregator_process.private_url(fleet) == "mqtt://127.0.0.1:1883"
    for _ in range(2):
        with aggregator_process.private_broker(
            fleet, "127.0.0.1", 0, plain=False, embedded=embedded, log=lambda line: None
        ) as kept:
            assert aggregator_process.private_url(fleet) == kept.broker.url != "mqtt://127.0.0.1:1883"


def refuse(*anything: object, **more: object) -> None:
    raise OSError(errno.ENOSPC, "No space left")


def test_a_second_aggregator_changes_nothing_of_the_first_ones_broker(tmp_path: Path, embedded: bool) -> None:
    fleet = fleet_without_model(tmp_path)
    with (
        aggregator_process.private_broker(fleet, "127.0.0.1", 0, plain=False, embedded=embedded, log=print) as kept,
        fleet.lock(),
    ):
        for port in (parse_url(kept.broker.url).port, 0):
            with pytest.raises(StateError, match="another aggregator is running here"):
                aggregator_process.private_broker(
                    fleet, "127.0.0.1", port, plain=False, embedded=embedded, log=print
                ).__enter__()
        assert aggregator_process.private_url(fleet) == kept.broker.url


def test_a_private_broker_that_ends_is_started_again_where_it_was(
    tmp_path: Path, embedded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    fleet = fleet_without_model(tmp_path)
    with aggregator_process.private_broker(
        fleet, "127.0.0.1", 0, plain=False, embedded=embedded, log=lines.append
    ) as kept:
        first, url = kept.broker, parse_url(kept.broker.url)
        kept.tick(lines.append)
        assert kept.broker is first
        first.process.kill()
        first.process.wait()
        with socket.create_server((url.host, url.port)):
            kept.tick(lines.append)
            assert "cannot be started again" in lines[-1]
            assert "the port is in use" in lines[-1]
            told = len(lines)
            kept.tick(lines.append)
            assert len(lines) == told, "not tried again at once"
        monkeypatch.setattr(broker_module, "RESTART_S", 0.0)
        kept._next_restart_at = 0.0
        kept.tick(lines.append)
        assert kept.broker.alive()
        assert parse_url(kept.broker.url) == url
    assert not kept.broker.alive()


@NEEDS_MOSQUITTO
def test_a_broker_whose_configuration_cannot_be_written_is_tried_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    fleet = fleet_without_model(tmp_path)
    monkeypatch.setattr(broker_module, "RESTART_S", 0.0)
    with aggregator_process.private_broker(
        fleet, "127.0.0.1", 0, plain=False, embedded=False, log=lines.append
    ) as kept:
        kept.broker.process.kill()
        kept.broker.process.wait()
        with monkeypatch.context() as full:
            full.setattr(broker_module, "write_atomic", refuse)
            kept.tick(lines.append)
            assert "No space left" in lines[-1]
        kept.tick(lines.append)
        assert kept.broker.alive()


def test_a_private_broker_whose_memory_has_grown_is_started_again(
    tmp_path: Path, embedded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    lines: list[str] = []
    monkeypatch.setattr(broker_module, "RESTART_S", 0.0)
    with aggregator_process.private_broker(
        fleet_without_model(tmp_path), "127.0.0.1", 0, plain=False, embedded=embedded, log=lines.append
    ) as kept:
        first = kept.broker

        def look(held: int | None) -> None:
            kept._look_at = 0.0
            monkeypatch.setattr(broker_module.Broker, "memory", lambda self: held)
            kept.tick(lines.append)

        told = len(lines)
        for held in (1 << 30, None, (1 << 30) + broker_module.GROWN_BYTES):
            look(held)
            assert kept.broker is first
        assert len(lines) == told
        look((1 << 30) + broker_module.GROWN_BYTES + 1)
        assert "memory has grown from 1024 to 1280 MiB" in lines[-2]
        assert kept.broker is not first
        assert kept.broker.alive()
        look(1 << 32)
        assert kept.broker.alive(), "the first look at the new process"


def test_the_memory_of_a_broker_is_known_where_proc_is(broker: Broker) -> None:
    held = broker.memory()
    assert (held is not None and held > 1 << 20) == Path("/proc/self/statm").exists()
    broker.stop()
    assert broker.memory() is None


@NEEDS_MOSQUITTO
def test_a_private_brokers_log_does_not_grow_for_ever(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = fleet_without_model(tmp_path)
    with aggregator_process.private_broker(
        fleet, "127.0.0.1", 0, plain=False, embedded=False, log=lambda line: None
    ) as kept:
        path = kept.broker.log
        until(lambda: path.read_bytes())
        kept.tick(print)
        said = path.read_bytes()
        assert said
        monkeypatch.setattr(broker_module, "MAX_LOG_BYTES", 1)
        kept.tick(print)
        assert path.read_bytes() == b""
        assert path.with_name("broker.old.log").read_bytes() == said
        connected(kept.broker, "later").link.close()
        until(lambda: b"later" in path.read_bytes())
        assert not path.read_bytes().startswith(b"\0"), "it appends"


@pytest.mark.slow
def test_a_fleet_continues_when_its_private_broker_was_killed(tmp_path: Path, kind: str, embedded: bool) -> None:
    fleet = small_fleet(tmp_path / "fleet", rounds=100)
    chosen = {"METAFLEET_BROKER": "embedded"} if embedded else {}
    with programs_in(tmp_path) as programs:
        command = metafleet("server", "start", fleet.folder, "--port", 0, "--quiet")
        server = programs.start(*command, environ=clean_environ(**chosen))
        server.wait_for(f"broker: {kind} at ")
        device(fleet, "d0", tmp_path / "d0")
        programs.start(*edge_agent("run", "--home", tmp_path / "d0", "--broker", aggregator_process.private_url(fleet)))
        server.until(lambda: len(closed_rounds(fleet.folder)) > 2)
        children = {pid: command_of(pid) for pid in descendants(server.process.pid)}
        (broker,) = (pid for pid, said in children.items() if PROGRAM[kind] in said and " -c exec" not in said)
        os.kill(broker, signal.SIGKILL)
        server.wait_for("the private broker ended, and was started again")
        before = len(closed_rounds(fleet.folder))
        server.until(lambda: len(closed_rounds(fleet.folder)) > before + 2)


def test_without_mosquitto_a_broker_with_certificates_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "find_mosquitto", lambda: None)
    with pytest.raises(LinkError, match=r"certificates need mosquitto(.|\n)*hint: .*mosquitto"):
        start_secured(tmp_path / "mosquitto.conf", BrokerSetup(("h",)))


@NEEDS_MOSQUITTO
def test_a_broker_that_ends_at_its_start_is_quoted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "MOSQUITTO_CONFIG", "listener {port} {host}\nnonsense true\n# {data}\n")
    with pytest.raises(LinkError, match=r"broker\.log: the broker ended at its start: .*mosquitto\.conf"):
        start_broker(tmp_path, embedded=False)


def test_the_embedded_broker_carries_a_small_exchange(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAFLEET_BROKER", "embedded")
    broker = start_broker(tmp_path)
    try:
        assert broker.kind == "amqtt"
        writer = connected(broker, "writer", will=Will("x/st", b"gone"))
        assert writer.of(Connected) == [Connected(mqtt_version=3, max_packet_bytes=None, receive_max=None)]
        writer.link.publish("x/cur", bytes(60_000), retain=True)
        until(lambda: not writer.link.unacknowledged, writer)
        reader = connected(broker, "reader", "x/#")
        until(lambda: len(reader.of(Message)) == 1, reader)
        assert reader.of(Message) == [Message("x/cur", bytes(60_000), retain=True)]
        assert isinstance(writer.link, MqttLink)
        writer.link.abort()
        until(lambda: reader.topics() == ["x/cur", "x/st"], reader)
        reader.link.close()
    finally:
        broker.stop()
    assert not broker.alive()


def test_without_mosquitto_the_embedded_broker_says_how_to_install_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(broker_module, "find_mosquitto", lambda: None)
    monkeypatch.setattr(shutil, "which", lambda name: "/usr/bin/brew" if name == "brew" else None)
    broker = start_broker(tmp_path)
    broker.stop()
    assert (broker.kind, broker.hint) == ("amqtt", "brew install mosquitto")


def test_without_any_broker_the_install_command_is_the_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(broker_module, "find_mosquitto", lambda: None)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(LinkError, match=r"neither mosquitto nor (.|\n)*hint: .*mosquitto"):
        start_broker(tmp_path)


PARENT = """
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from cloud_server.broker.private_broker import start_broker
broker = start_broker(Path(sys.argv[1]), embedded=sys.argv[2] == "amqtt")
print(broker.url, flush=True)
sys.stdin.read()
"""


def ended(sock: socket.socket) -> bool:
    """Wait until the peer closes or resets."""
    try:
        return sock.recv(1) == b""
    except ConnectionResetError:
        return True


def test_the_broker_dies_with_its_parent(tmp_path: Path, kind: str) -> None:
    root = ROOT
    parent = subprocess.Popen(
        [sys.executable, "-c", PARENT, str(tmp_path), kind],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": str(root)},
        text=True,
    )
    assert parent.stdout is not None
    port = parse_url(parent.stdout.readline().strip()).port
    with socket.create_connection(("127.0.0.1", port), timeout=PATIENCE_S) as sock:
        parent.send_signal(signal.SIGKILL)
        parent.communicate()
        assert ended(sock)
    until(lambda: refuses_connections(port))


def test_the_largest_chunk_fits_into_the_largest_packet_that_everyone_reads() -> None:
    (chunk,) = (field for field in dataclasses.fields(LinkSection) if field.name == "chunk_bytes")
    assert f"max_packet_size {MAX_INCOMING_BYTES}\n" in mosquitto_config.PERSISTENCE
    assert chunk.metadata["max"] + PACKET_OVERHEAD_BYTES <= MAX_INCOMING_BYTES
