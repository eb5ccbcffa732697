"""Every link keeps the same promises: over a real broker with both versions of MQTT, and inside one process."""

from __future__ import annotations

import base64
import contextlib
import hashlib
import logging
import os
import socket
import ssl
import struct
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import datetime, timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Any, Literal, Protocol

import paho.mqtt.client as paho
import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes, serialization
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.x509.oid import NameOID
from paho.mqtt.enums import MQTTErrorCode

from cloud_server.broker import requirements
from cloud_server.broker.private_broker import Broker, start_broker
from fleet_core.base.errors import ConfigError, LinkError
from fleet_core.link.byte_counters import wire_bytes
from fleet_core.link.interface import Connected, Denied, Disconnected, Link, Message, Will, matches
from fleet_core.link.loopback import LoopbackBroker, LoopbackLink
from fleet_core.link.mqtt import BACKOFF_FIRST_S, BACKOFF_LAST_S, MqttLink, parse_url
from fleet_core.link.mqtt_connection import NO_RETAINED, SKIPPED_S, Session
from fleet_core.link.paho_client import tcp_socket_of
from tests.support.brokers import (
    ACCEPTED_V3,
    ACCEPTED_V5,
    CONNACK,
    CONNECT,
    NEEDS_MOSQUITTO,
    PUBACK,
    PUBLISH,
    SUBACK,
    SUBSCRIBE,
    Peer,
    RecordingLink,
    ScriptedBroker,
    free_port,
    publish_packet,
    until,
)
from tests.support.faults import Mosquitto, mosquitto
from tests.support.pki import user_pki
from tests.support.waiting import PATIENCE_S

ENDLESS_S = 36_000.0  # pytest ends a wait that does not end
WILL = Will("fleet/a/st", b"gone")


class Stage(Protocol):
    """One kind of broker and its links, with ways to break them."""

    def link(self, client_id: str, will: Will | None = None, max_queued: int = 2000) -> Link: ...
    def kill(self, link: Link) -> None: ...
    def cut(self, link: Link) -> None: ...
    def crash_and_restart(self) -> None: ...
    def end(self) -> None: ...


class MqttStage:
    def __init__(self, folder: Path, protocol: Literal[3, 5], *, embedded: bool = False):
        self.folder, self.protocol, self.embedded = folder, protocol, embedded
        self.broker: Broker = start_broker(folder, embedded=embedded)

    def link(self, client_id: str, will: Will | None = None, max_queued: int = 2000) -> Link:
        return MqttLink(self.broker.url, client_id=client_id, will=will, max_queued=max_queued, protocol=self.protocol)

    def kill(self, link: Link) -> None:
        assert isinstance(link, MqttLink)
        link.abort()

    def cut(self, link: Link) -> None:
        socket_of(link).shutdown(socket.SHUT_RDWR)

    def crash_and_restart(self) -> None:
        self.broker.process.kill()
        self.broker.process.wait()
        self.broker.stop()
        self.broker = start_broker(
            self.folder, port=parse_url(self.broker.url).port, embedded=self.embedded
        )

    def end(self) -> None:
        self.broker.stop()


class WebSocketStage(MqttStage):
    """A mosquitto that speaks MQTT over WebSockets."""

    def __init__(self, folder: Path, protocol: Literal[3, 5]):
        self.protocol, port = protocol, free_port()
        self.mosquitto = Mosquitto(folder, f"listener {port} 127.0.0.1\nprotocol websockets\n")
        self.mosquitto.start()
        self.url = f"ws://127.0.0.1:{port}/mqtt"

    def link(self, client_id: str, will: Will | None = None, max_queued: int = 2000) -> Link:
        return MqttLink(self.url, client_id=client_id, will=will, max_queued=max_queued, protocol=self.protocol)

    def crash_and_restart(self) -> None:
        self.mosquitto.kill(forget=True)
        self.mosquitto.start()

    def end(self) -> None:
        self.mosquitto.stop()


class LoopbackStage:
    def __init__(self) -> None:
        self.broker = LoopbackBroker()

    def link(self, client_id: str, will: Will | None = None, max_queued: int = 2000) -> Link:
        return LoopbackLink(self.broker, client_id, will, max_queued=max_queued)

    def kill(self, link: Link) -> None:
        assert isinstance(link, LoopbackLink)
        self.broker.kill(link.client_id)

    def cut(self, link: Link) -> None:
        assert isinstance(link, LoopbackLink)
        self.broker.drop(link.client_id)

    def crash_and_restart(self) -> None:
        self.broker.stop(forget_retained=True)
        self.broker.start()

    def end(self) -> None:
        pass


def socket_of(link: Link) -> socket.socket:
    assert isinstance(link, MqttLink)
    assert link._session is not None
    found = link._session.socket()
    assert found is not None
    return found


TCP = {"loopback": "loopback", "amqtt": "amqtt", "mqtt3.1.1": 3, "mqtt5": 5}
WEB_SOCKETS = {"websockets3.1.1": "ws3", "websockets5": "ws5"}


def kinds(named: dict[str, Any]) -> list[Any]:
    return [pytest.param(kind, id=name, marks=() if name in ("loopback", "amqtt") else NEEDS_MOSQUITTO)
            for name, kind in named.items()]


def stage_of(kind: Any, folder: Path) -> Stage:
    made: dict[Any, Callable[[], Stage]] = {
        "loopback": LoopbackStage, "amqtt": lambda: MqttStage(folder, 3, embedded=True),
        3: lambda: MqttStage(folder, 3), 5: lambda: MqttStage(folder, 5),
        "ws3": lambda: WebSocketStage(folder, 3), "ws5": lambda: WebSocketStage(folder, 5),
    }
    return made[kind]()


@pytest.fixture(params=kinds(TCP | WEB_SOCKETS))
def stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    made = stage_of(request.param, tmp_path / "broker")
    yield made
    made.end()


@pytest.fixture(params=kinds(TCP))
def fast_stage(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Stage]:
    """Every stage but mosquitto's WebSockets, which get 40 kB a second."""
    made = stage_of(request.param, tmp_path / "broker")
    yield made
    made.end()


def opened(stage: Stage, client_id: str, *filters: str, will: Will | None = None, **options: int) -> RecordingLink:
    watched = RecordingLink(stage.link(client_id, will, **options))
    watched.link.subscribe(*filters)
    watched.link.open()
    until(lambda: watched.of(Connected), watched)
    return watched


def fence(writer: RecordingLink, reader: RecordingLink, topic: str) -> None:
    """Everything published before has arrived once this message has."""
    writer.link.publish(topic, b"fence")
    until(lambda: topic in reader.topics(), writer, reader)


def test_a_message_reaches_the_filters_that_match_it_and_no_other(stage: Stage) -> None:
    writer, reader = opened(stage, "writer"), opened(stage, "reader", "a/+/c", "b/#")
    for topic in ("a/1/c", "a/1/d", "a/1/2/c", "b", "b/1/2", "c"):
        writer.link.publish(topic, topic.encode())
    fence(writer, reader, "b/end")
    assert [(m.topic, m.payload) for m in reader.of(Message)][:-1] == [
        ("a/1/c", b"a/1/c"),
        ("b", b"b"),
        ("b/1/2", b"b/1/2"),
    ]


def test_what_is_retained_comes_with_the_subscription_until_it_is_cleared(stage: Stage) -> None:
    writer = opened(stage, "writer")
    writer.link.publish("r/old", b"1", retain=True)
    writer.link.publish("r/cur", b"1", retain=True)
    writer.link.publish("r/cur", b"2", retain=True)
    writer.link.publish("r/old", b"", retain=True)
    until(lambda: not writer.link.unacknowledged, writer)
    reader = opened(stage, "reader", "r/#")
    fence(writer, reader, "r/end")
    writer.link.publish("r/cur", b"3", retain=True)
    fence(writer, reader, "r/end2")
    seen = [(m.topic, m.payload, m.retain) for m in reader.of(Message)]
    assert seen[0] == ("r/cur", b"2", True)
    assert seen[2] == ("r/cur", b"3", False)
    assert len(seen) == 4


def test_a_subscription_may_ask_which_messages_are_retained_as_they_come(stage: Stage) -> None:
    writer, reader = opened(stage, "writer"), RecordingLink(stage.link("reader"))
    reader.link.subscribe("plain/#")
    reader.link.subscribe("marked/#", as_published=True)
    reader.link.open()
    until(lambda: reader.of(Connected), reader)
    fence(writer, reader, "marked/0")
    for topic in ("marked/1", "plain/1"):
        writer.link.publish(topic, b"1", retain=True)
    fence(writer, reader, "marked/end")
    until(lambda: "plain/1" in reader.topics(), reader, writer)
    seen = {m.topic: m.retain for m in reader.of(Message)}
    assert not seen["marked/end"]
    assert not seen["plain/1"]
    assert seen["marked/1"] == any(event.mqtt_version == 5 for event in reader.of(Connected)), "3.1.1 cannot"


def test_after_unsubscribing_nothing_comes(stage: Stage) -> None:
    writer, reader = opened(stage, "writer"), opened(stage, "reader", "x/#", "end/#")
    fence(writer, reader, "x/1")
    reader.link.unsubscribe("x/#", "never/subscribed")
    reader.link.publish("end/unsubscribed", b"")
    until(lambda: "end/unsubscribed" in reader.topics(), reader)
    writer.link.publish("x/2", b"")
    fence(writer, reader, "end")
    assert "x/2" not in reader.topics()


def test_a_death_publishes_the_will(stage: Stage) -> None:
    reader, dying = opened(stage, "reader", "fleet/#"), opened(stage, "a", will=WILL)
    stage.kill(dying.link)
    until(lambda: reader.of(Message), reader)
    assert reader.of(Message) == [Message("fleet/a/st", b"gone", retain=False)]
    assert not dying.link.connected
    late = opened(stage, "late", "fleet/#")
    until(lambda: late.of(Message), late)
    assert set(late.of(Message)) == {Message("fleet/a/st", b"gone", retain=True)}, "at least once: amqtt may send twice"


def test_an_orderly_close_sends_what_waits_and_publishes_no_will(fast_stage: Stage) -> None:
    reader, leaving = opened(fast_stage, "reader", "fleet/#"), opened(fast_stage, "a", "fleet/#", will=WILL)
    for index in range(100):
        leaving.link.publish(f"fleet/{index}", bytes(10_000))
    leaving.link.close()
    until(lambda: len(reader.of(Message)) >= 100, reader)
    fence(reader, reader, "fleet/end")
    assert reader.topics() == [f"fleet/{index}" for index in range(100)] + ["fleet/end"]
    assert leaving.link.poll(0) == []


def test_a_lost_connection_is_reported_and_renewed_with_its_subscriptions(stage: Stage) -> None:
    writer, reader = opened(stage, "writer"), opened(stage, "reader", "x/#", will=WILL)
    fence(writer, reader, "x/1")
    stage.cut(reader.link)
    until(lambda: len(reader.of(Connected)) == 2, reader)
    assert [type(event) for event in reader.events if not isinstance(event, Message)] == [
        Connected,
        Disconnected,
        Connected,
    ]
    fence(reader, reader, "x/renewed")
    fence(writer, reader, "x/2")


@pytest.mark.slow
def test_a_broker_that_crashes_and_returns_finds_its_links_again(stage: Stage) -> None:
    writer, reader = opened(stage, "writer"), opened(stage, "reader", "r/#")
    writer.link.publish("r/cur", b"1", retain=True)
    until(lambda: reader.topics() == ["r/cur"], writer, reader)
    stage.crash_and_restart()
    until(lambda: len(writer.of(Connected)) == 2 and len(reader.of(Connected)) == 2, writer, reader)
    writer.link.publish("r/cur", b"2", retain=True)
    until(lambda: b"2" in [m.payload for m in reader.of(Message)], writer, reader)


def test_publishing_offline_is_an_error(stage: Stage) -> None:
    link = stage.link("a")
    with pytest.raises(LinkError, match="is not connected"):
        link.publish("x", b"")
    online = opened(stage, "b").link
    online.close()
    with pytest.raises(LinkError, match="is not connected"):
        online.publish("x", b"")


def test_more_publishes_than_may_wait_are_an_error(stage: Stage) -> None:
    writer = opened(stage, "writer", max_queued=3)
    for _ in range(3):
        writer.link.publish("x", b"")
    assert writer.link.unacknowledged == 3
    with pytest.raises(LinkError, match="3 publishes are unacknowledged"):
        writer.link.publish("x", b"")
    until(lambda: not writer.link.unacknowledged, writer)
    writer.link.publish("x", b"")


def test_topics_and_filters_that_mqtt_does_not_know_are_errors(stage: Stage) -> None:
    link = opened(stage, "a").link
    for topic in ("", "a/+", "a/#", "a\0b", "x" * 70_000):
        with pytest.raises(LinkError, match="is not a topic"):
            link.publish(topic, b"")
    for pattern in ("", "a+", "a/#/b", "a/b#"):
        with pytest.raises(LinkError, match="is not a topic filter"):
            link.subscribe(pattern)


def test_a_megabyte_is_counted_within_one_percent_on_both_sides(fast_stage: Stage) -> None:
    writer, reader = opened(fast_stage, "writer"), opened(fast_stage, "reader", "x")
    writer.link.publish("x", bytes(1_000_000))
    until(lambda: reader.of(Message) and not writer.link.unacknowledged, writer, reader)
    sent, received = writer.link.counters.snapshot(), reader.link.counters.snapshot()
    assert 1_000_000 < sent.mqtt_sent < 1_010_000
    assert 1_000_000 < received.mqtt_received < 1_010_000
    if isinstance(fast_stage, LoopbackStage) or sys.platform != "linux":
        assert sent.wire_sent is received.wire_received is None
    else:
        assert sent.wire_sent is not None
        assert received.wire_received is not None
        assert sent.retransmitted is not None  # a busy machine sends segments again; they are in wire_sent
        assert sent.mqtt_sent < sent.wire_sent - sent.retransmitted < 1_100_000
        assert received.mqtt_received < received.wire_received < 1_100_000


def test_bytes_are_summed_over_reconnects_and_stay_after_the_close(stage: Stage) -> None:
    writer = opened(stage, "writer", "x")
    fence(writer, writer, "x")
    before = writer.link.counters.snapshot()
    stage.cut(writer.link)
    until(lambda: len(writer.of(Connected)) == 2, writer)
    writer.link.publish("x", bytes(1000))
    writer.link.close()
    after = writer.link.counters.snapshot()
    passed = after - before
    assert 1000 < passed.mqtt_sent < 1500
    if passed.wire_sent is not None:
        assert passed.mqtt_sent < passed.wire_sent < 5000
        assert after.wire_sent is not None
        assert after.wire_sent > after.mqtt_sent
        assert after == writer.link.counters.snapshot()


# The loopback broker's own faults.


def test_a_fault_can_drop_duplicate_and_delay_deliveries() -> None:
    kept: list[Message] = []

    def faults(client_id: str, message: Message) -> list[Message]:
        assert client_id == "reader"
        if message.payload == b"late":
            kept.append(message)
            return []
        return {b"drop": [], b"twice": [message, message]}.get(message.payload, [message, *kept])

    broker = LoopbackBroker(faults=faults)
    writer, reader = LoopbackLink(broker, "writer"), LoopbackLink(broker, "reader")
    reader.subscribe("#")
    for link in (writer, reader):
        link.open()
        link.poll(0)
    for payload in (b"late", b"drop", b"twice", b"last"):
        writer.publish("x", payload)
    assert [e.payload for e in reader.poll(0) if isinstance(e, Message)] == [b"twice", b"twice", b"last", b"late"]


def test_a_full_queue_drops_what_was_acknowledged() -> None:
    broker = LoopbackBroker(max_queued_messages=2)
    writer, reader = LoopbackLink(broker, "writer"), LoopbackLink(broker, "reader")
    reader.subscribe("#")
    for link in (writer, reader):
        link.open()
        link.poll(0)
    for index in range(5):
        writer.publish(str(index), b"")
    assert [e.topic for e in reader.poll(0) if isinstance(e, Message)] == ["0", "1"]
    assert broker.dropped == 3


@pytest.mark.parametrize(
    ("pattern", "topic", "expected"),
    [
        ("a/#", "a", True),
        ("a/+", "a", False),
        ("+", "a", True),
        ("+/+", "/a", True),
        ("#", "$SYS/x", False),
        ("a/b", "a/b/c", False),
        ("a/b/c", "a/b", False),
    ],
)
def test_filters_match_as_the_standard_says(pattern: str, topic: str, expected: bool) -> None:
    assert matches(pattern, topic) is expected
    assert paho.topic_matches_sub(pattern, topic) is expected


# Only for a connection over a socket.


@pytest.fixture
def scripted() -> Iterator[ScriptedBroker]:
    broker = ScriptedBroker()
    yield broker
    broker.listener.close()


def met(scripted: ScriptedBroker, answer: bytes = ACCEPTED_V5, **options: Any) -> tuple[RecordingLink, Peer]:
    """A link that the scripted broker has accepted."""
    watched = RecordingLink(MqttLink(scripted.url, client_id="a", **options))
    watched.link.open()
    peer = scripted.accept(watched)
    assert peer.read()[0] == CONNECT
    peer.write(answer)
    until(lambda: watched.of(Connected), watched)
    return watched, peer


def test_pahos_private_hooks_exist_and_see_every_byte(scripted: ScriptedBroker) -> None:
    for hook in ("_sock_recv", "_sock_send", "_sock_close"):
        assert callable(getattr(paho.Client, hook))
    watched, peer = met(scripted)
    watched.link.publish("x", bytes(1000), qos=0)
    assert peer.read()[0] == PUBLISH
    peer.write(publish_packet("y", bytes(500)))
    until(lambda: watched.of(Message), watched)
    assert watched.link.counters.mqtt_sent == peer.received_bytes
    assert watched.link.counters.mqtt_received == peer.sent_bytes


def identifier(body: bytes) -> bytes:
    """The packet identifier of a QoS 1 PUBLISH."""
    end = 2 + int.from_bytes(body[:2], "big")
    return body[end : end + 2]


def test_a_publish_that_a_broker_passes_over_is_given_up_and_said(
    scripted: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Acknowledgements come in order; a message that waits on a slow link is not given up."""
    watched, peer = met(scripted)
    watched.link.publish("passed/over", b"1")
    first = identifier(peer.read()[1])
    watched.link.publish("just/before", b"2")
    peer.read()
    watched.link.publish("later", b"3")
    third = identifier(peer.read()[1])
    link: Any = watched.link
    session = link._session
    late = session._in_flight[int.from_bytes(first, "big")]
    session._in_flight[int.from_bytes(first, "big")] = replace(late, sent_at_s=late.sent_at_s - 2 * SKIPPED_S)
    watched.pump()
    assert watched.link.unacknowledged == 3
    peer.write(bytes([0x40, 2]) + third)
    until(lambda: watched.of(Denied), watched)
    assert watched.of(Denied) == [Denied("passed/over", "never acknowledged")]
    assert watched.link.unacknowledged == 1


def test_a_broker_that_does_not_answer_is_told_once_per_attempt(monkeypatch: pytest.MonkeyPatch) -> None:
    with socket.create_server(("127.0.0.1", 0)) as closed:
        url = f"mqtt://127.0.0.1:{closed.getsockname()[1]}"
    link = MqttLink(url, client_id="a")
    assert link.poll(0) == []
    link.open()
    assert link.poll(PATIENCE_S) == [Disconnected("Connection refused")]
    assert link.poll(PATIENCE_S) == [Disconnected("Connection refused")]


def test_the_back_off_doubles_up_to_its_limit_with_full_jitter(monkeypatch: pytest.MonkeyPatch) -> None:
    link = MqttLink("mqtt://127.0.0.1", client_id="a")
    ceilings: list[float] = []

    class Recorder:
        def uniform(self, low: float, high: float) -> float:
            assert low == 0
            ceilings.append(high)
            return high

    monkeypatch.setattr(link, "_random", Recorder())
    for _ in range(40):
        link._schedule("no")
    assert ceilings[:3] == [BACKOFF_FIRST_S, 2 * BACKOFF_FIRST_S, 4 * BACKOFF_FIRST_S]
    assert ceilings[-1] == BACKOFF_LAST_S


def test_a_broker_that_accepts_and_then_says_nothing_is_left(scripted: ScriptedBroker) -> None:
    link = MqttLink(scripted.url, client_id="a", connect_timeout_s=0.1)
    link.open()
    assert link.poll(PATIENCE_S) == [Disconnected("no answer to CONNECT within 0.1 s")]


@pytest.mark.parametrize("refusal", [bytes([CONNACK, 2, 0, 1]), bytes([CONNACK, 3, 0, 0x84, 0]), b""])
def test_a_broker_without_mqtt_5_is_asked_again_in_3_1_1(scripted: ScriptedBroker, refusal: bytes) -> None:
    watched = RecordingLink(MqttLink(scripted.url, client_id="a"))
    watched.link.open()
    first = scripted.accept(watched)
    _, connect = first.read()
    assert connect[6] == 5
    first.write(refusal)
    first.close()
    second = scripted.accept(watched)
    _, connect = second.read()
    assert connect[6] == 4
    second.write(ACCEPTED_V3)
    until(lambda: watched.events, watched)
    assert watched.events == [Connected(mqtt_version=3, max_packet_bytes=None, receive_max=None)]


def test_a_refused_login_is_reported_and_is_no_reason_to_fall_back(scripted: ScriptedBroker) -> None:
    watched = RecordingLink(MqttLink(scripted.url, client_id="a", username="u", password="p"))
    watched.link.open()
    peer = scripted.accept(watched)
    _, connect = peer.read()
    assert connect.endswith(b"\0\1u\0\1p")
    peer.write(bytes([CONNACK, 3, 0, 0x87, 0]))
    until(lambda: watched.events, watched)
    assert watched.events == [Disconnected("the broker refused the connection: Not authorized")]
    assert scripted.accept(watched).read()[1][6] == 5


def test_the_brokers_limits_are_reported_and_kept(scripted: ScriptedBroker) -> None:
    limits = b"\x21" + struct.pack("!H", 2) + b"\x27" + struct.pack("!I", 1000)
    watched, peer = met(scripted, bytes([CONNACK, 3 + len(limits), 0, 0, len(limits)]) + limits)
    assert watched.events == [Connected(mqtt_version=5, max_packet_bytes=1000, receive_max=2)]
    with pytest.raises(LinkError, match="over the broker's limit") as caught:
        watched.link.publish("x", bytes(1000))
    for helps in ("max_packet_size", "link.chunk_bytes", "manifests by fewer devices in a round"):
        assert helps in (caught.value.hint or "")
    for payload in (b"1", b"2", b"3"):
        watched.link.publish("x", payload)
    watched.pump()
    (_, first), (_, second) = peer.read(), peer.read()
    assert (first[-1:], second[-1:]) == (b"1", b"2")
    peer.sock.setblocking(False)
    with pytest.raises(BlockingIOError):
        peer.sock.recv(1)
    peer.sock.settimeout(PATIENCE_S)
    peer.write(bytes([PUBACK, 2]) + first[3:5])
    until(lambda: watched.link.unacknowledged == 2, watched)
    assert peer.read()[1][-1:] == b"3"


def hang_up(scripted: ScriptedBroker, watched: RecordingLink, *, accept: bool, take: int = 0) -> str:
    """Why the link's next connection ended: at its CONNECT, or after ``take`` publishes were acknowledged and one more
    arrived."""
    peer = scripted.accept(watched)
    peer.read()
    if accept:
        connected = len(watched.of(Connected))
        peer.write(ACCEPTED_V3)
        until(lambda: len(watched.of(Connected)) > connected, watched)
        for k in range(take + 1):
            watched.link.publish(f"r/{k}", bytes(500), retain=True)
            _, body = peer.read()
            if k < take:
                peer.write(bytes([PUBACK, 2]) + identifier(body))
                until(lambda: not watched.link.unacknowledged, watched)
    peer.close()
    ended = len(watched.of(Disconnected))
    until(lambda: len(watched.of(Disconnected)) > ended, watched)
    return watched.of(Disconnected)[-1].reason


def test_a_broker_of_3_1_1_that_hangs_up_on_retained_messages_again_is_suspected(scripted: ScriptedBroker) -> None:
    watched = RecordingLink(MqttLink(scripted.url, client_id="a", protocol=3))
    watched.link.open()
    assert "MQTT 3.1.1" not in hang_up(scripted, watched, accept=True)
    said = hang_up(scripted, watched, accept=True)
    assert "; MQTT 3.1.1 gives no reason: perhaps it takes none under r/0, none of 500 bytes, or no retained" in said
    assert requirements.explained(said) == f"{said}: a fleet needs a broker with retained messages " \
                                     "(mosquitto: retain_available true)"
    assert "MQTT 3.1.1" not in hang_up(scripted, watched, accept=True, take=1), "it took one"
    assert "MQTT 3.1.1" not in hang_up(scripted, watched, accept=True), "not again"


@pytest.mark.parametrize(("will", "suspected"), [(WILL, True), (replace(WILL, retain=False), False), (None, False)])
def test_a_broker_of_3_1_1_that_hangs_up_at_once_is_suspected_of_not_taking_a_retained_will(
    scripted: ScriptedBroker, will: Will | None, suspected: bool
) -> None:
    watched = RecordingLink(MqttLink(scripted.url, client_id="a", protocol=3, will=will))
    watched.link.open()
    first, second = (hang_up(scripted, watched, accept=False) for _ in range(2))
    assert "retained" not in first
    assert ("takes no more clients, or no retained messages (the will is one)" in second) == suspected


def test_a_broker_of_mqtt_5_that_hangs_up_is_not_suspected_for_it_could_say_why(scripted: ScriptedBroker) -> None:
    watched = RecordingLink(MqttLink(scripted.url, client_id="a", protocol=5, will=WILL))
    watched.link.open()
    reasons = {hang_up(scripted, watched, accept=False) for _ in range(3)}
    assert reasons == {"the broker closed the connection"}


def test_a_hang_up_that_is_noticed_in_writing_is_one(scripted: ScriptedBroker) -> None:
    watched = RecordingLink(MqttLink(scripted.url, client_id="a", protocol=3))
    watched.link.open()
    for _ in range(2):
        peer = scripted.accept(watched)
        peer.read()
        peer.write(ACCEPTED_V3)
        until(lambda: watched.link.connected, watched)
        peer.close()
        while watched.link.connected:
            watched.link.publish("r/x", b"x", retain=True)
        until(lambda: len(watched.of(Disconnected)) == len(watched.of(Connected)), watched)
    assert f"or {NO_RETAINED}" in watched.of(Disconnected)[1].reason


@NEEDS_MOSQUITTO
@pytest.mark.parametrize("retain", [True, False])
def test_a_mosquitto_without_retained_messages_is_suspected_over_3_1_1(tmp_path: Path, retain: bool) -> None:
    """It hangs up on a retained will, and on a retained publish."""
    with mosquitto(tmp_path / "broker", "retain_available false\n") as broker:
        watched = RecordingLink(MqttLink(broker.url, client_id="a", protocol=3, will=replace(WILL, retain=retain)))
        watched.link.open()

        def suspected() -> bool:
            if watched.link.connected and not watched.link.unacknowledged:
                watched.link.publish("r/x", b"x", retain=True)
            return any("or no retained messages" in event.reason for event in watched.of(Disconnected))

        until(suspected, watched)
        watched.link.close()


def test_what_the_broker_denies_is_an_event(scripted: ScriptedBroker) -> None:
    watched, peer = met(scripted)
    watched.link.subscribe("mine/#", "yours/#")
    first, body = peer.read()
    assert first & 0xF0 == SUBSCRIBE
    peer.write(bytes([SUBACK, 5]) + body[:2] + bytes([0, 1, 0x87]))
    until(lambda: watched.of(Denied), watched)
    watched.link.publish("yours/x", b"")
    _, body = peer.read()
    peer.write(bytes([PUBACK, 4]) + body[9:11] + bytes([0x87, 0]))
    until(lambda: len(watched.of(Denied)) == 2, watched)
    assert watched.of(Denied) == [Denied("yours/#", "Not authorized"), Denied("yours/x", "Not authorized")]
    assert watched.link.unacknowledged == 0


def test_a_subscribe_packet_carries_at_most_eight_filters(scripted: ScriptedBroker) -> None:
    watched, peer = met(scripted)
    watched.link.subscribe(*(f"{index:02}" for index in range(20)))
    assert [(len(body) - 3) // 5 for _, body in (peer.read(), peer.read(), peer.read())] == [8, 8, 4]


def test_a_packet_over_the_limit_ends_the_connection_before_it_is_read(scripted: ScriptedBroker) -> None:
    watched, peer = met(scripted, max_incoming_bytes=10_000)
    peer.write(publish_packet("x", bytes(9_000)))
    peer.write(bytes([PUBLISH, 0xFF, 0xFF, 0xFF, 0x7F]))
    until(lambda: watched.of(Disconnected), watched)
    assert len(watched.of(Message)) == 1
    assert watched.of(Disconnected) == [Disconnected("a packet of 268435455 bytes is over the limit of 10000")]


@pytest.mark.parametrize(
    "garbage", [b"\xf0\x00", bytes([PUBLISH, 2, 0, 9]), bytes([PUBLISH, 4, 0, 1, 0xFF, 0]), bytes([SUBACK, 0])]
)
def test_garbage_ends_the_connection_and_never_the_link(scripted: ScriptedBroker, garbage: bytes) -> None:
    watched, peer = met(scripted)
    peer.write(garbage)
    until(lambda: watched.of(Disconnected), watched)
    assert scripted.accept(watched).read()[0] == CONNECT


def test_an_exception_in_a_callback_is_reported_logged_and_survived(
    scripted: ScriptedBroker, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def broken(*_: Any) -> None:
        raise RuntimeError("boom")

    monkeypatch.setattr(Session, "_on_message", broken)
    watched, peer = met(scripted)
    peer.write(publish_packet("x", b""))
    with caplog.at_level(logging.ERROR):
        until(lambda: watched.of(Disconnected), watched)
    assert watched.of(Disconnected) == [Disconnected("RuntimeError: boom")]
    assert "boom" in caplog.text
    assert scripted.accept(watched).read()[0] == CONNECT


def test_a_broker_that_takes_the_session_over_is_quoted(scripted: ScriptedBroker) -> None:
    watched, peer = met(scripted)
    peer.write(bytes([0xE0, 1, 0x8E]))
    until(lambda: watched.of(Disconnected), watched)
    assert watched.of(Disconnected) == [Disconnected("the broker closed the connection: Session taken over")]


def test_a_silent_broker_is_noticed_by_the_keepalive(scripted: ScriptedBroker) -> None:
    watched, peer = met(scripted, keepalive_s=1)
    until(lambda: watched.of(Disconnected), watched)
    assert peer.read()[0] == 0xC0
    assert watched.of(Disconnected) == [Disconnected("the broker is silent (keepalive timeout)")]


def test_a_silent_broker_is_reported_although_paho_closes_at_its_first_look(
    scripted: ScriptedBroker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """paho looks twice at the time; where only the first look finds it over, loop_misc closes and returns success."""

    def first_look(client: Any) -> MQTTErrorCode:
        client._check_keepalive()
        return MQTTErrorCode.MQTT_ERR_SUCCESS

    monkeypatch.setattr(paho.Client, "loop_misc", first_look)
    watched, _ = met(scripted, keepalive_s=1)
    until(lambda: watched.of(Disconnected), watched)
    assert watched.of(Disconnected) == [Disconnected("the broker is silent (keepalive timeout)")]


def test_a_readable_descriptor_ends_the_wait(scripted: ScriptedBroker) -> None:
    watched, _ = met(scripted)
    watched.pump()
    reading, writing = os.pipe()
    os.set_blocking(reading, False)
    waker = threading.Timer(0.05, os.write, (writing, b"!!"))
    waker.start()
    assert watched.link.poll(ENDLESS_S, also=[reading]) == []
    assert os.read(reading, 1) == b"!", "not before"
    waker.join()
    offline = MqttLink("mqtt://127.0.0.1", client_id="b")
    assert offline.poll(ENDLESS_S, also=[reading]) == []
    os.close(reading)
    os.close(writing)


def test_a_socket_that_takes_no_more_keeps_the_rest_waiting(scripted: ScriptedBroker) -> None:
    watched, peer = met(scripted)
    for _ in range(20):
        watched.link.publish("x", bytes(1_000_000), qos=0)
    assert watched.link.unacknowledged > 10
    receiver = threading.Thread(target=lambda: [peer.read() for _ in range(20)])
    receiver.start()
    until(lambda: not receiver.is_alive(), watched)
    assert watched.link.unacknowledged == 0
    assert peer.received_bytes == watched.link.counters.mqtt_sent


def test_closing_with_messages_unread_does_not_reset_the_connection(scripted: ScriptedBroker) -> None:
    watched, peer = met(scripted)
    seen: list[bytes | int] = []

    def receive() -> None:
        seen.append(peer.read()[0])
        seen.append(peer.sock.recv(1))
        peer.close()

    peer.write(publish_packet("x", bytes(1000)))
    receiver = threading.Thread(target=receive)
    receiver.start()
    watched.link.close()
    receiver.join()
    assert seen == [0xE0, b""]


@pytest.mark.parametrize(
    "url", ["", "127.0.0.1:1883", "http://h", "mqtt://", "mqtt://h:0", "mqtt://h:x", "mqtt://u:p@h", "mqtt://h/x",
            "ws://", "ws://u:p@h/mqtt", "ws://h/mqtt?x=1", "wss://h/a\x7fb"]
)
def test_a_url_that_is_no_broker_is_refused_with_a_hint(url: str) -> None:
    with pytest.raises(ConfigError, match=r"mqtt://host\[:port\](.|\n)*hint: "):
        MqttLink(url, client_id="a")


def test_the_port_and_tls_follow_from_the_url() -> None:
    assert parse_url("mqtt://h") == ("h", 1883, False, "")
    assert parse_url("mqtts://h/") == ("h", 8883, True, "")
    assert parse_url("mqtt://[::1]:7") == ("::1", 7, False, "")
    assert parse_url("ws://h") == ("h", 80, False, "/mqtt")
    assert parse_url("wss://h:9/a/b") == ("h", 9, True, "/a/b")


class WebServer(threading.Thread):
    """Plays one WebSocket over plain TCP: shakes hands, and sends what it is given."""

    def __init__(self, answer: bytes | None, sent: bytes = b""):
        super().__init__(daemon=True)
        self.answer, self.sent = answer, sent
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(PATIENCE_S)
        self.url = f"ws://127.0.0.1:{self.listener.getsockname()[1]}/here"
        self.asked = b""

    def run(self) -> None:
        with contextlib.suppress(OSError), self.listener, self.listener.accept()[0] as sock:
            while b"\r\n\r\n" not in self.asked:
                self.asked += sock.recv(1000)
            key = self.asked.partition(b"Sec-WebSocket-Key: ")[2].partition(b"\r\n")[0]
            accept = base64.b64encode(hashlib.sha1(key + b"258EAFA5-E914-47DA-95CA-C5AB0DC85B11").digest())
            sock.sendall(self.answer or b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade"
                         b"\r\nSec-WebSocket-Accept: " + accept + b"\r\n\r\n")
            sock.recv(1000)
            sock.sendall(self.sent)
            while sock.recv(1 << 16):
                pass


def frame(payload: bytes, opcode: int = 2) -> bytes:
    """A WebSocket frame of a server."""
    return bytes([0x80 | opcode, 127]) + struct.pack("!Q", len(payload)) + payload


def over(server: WebServer, **options: Any) -> RecordingLink:
    server.start()
    watched = RecordingLink(MqttLink(server.url, client_id="a", protocol=5, **options))
    watched.link.open()
    return watched


def test_pahos_private_web_socket_has_what_is_read_of_it() -> None:
    server = WebServer(None, frame(ACCEPTED_V5))
    watched = over(server)
    until(lambda: watched.of(Connected), watched)
    assert isinstance(watched.link, MqttLink)
    assert watched.link._session is not None
    carrier = watched.link._session._client.socket()
    assert isinstance(getattr(carrier, "_readbuffer", None), bytearray)
    assert tcp_socket_of(carrier) is watched.link._session.socket()
    assert server.asked.startswith(b"GET /here HTTP/1.1")
    watched.link.close()


def test_pings_and_packets_in_pieces_are_read() -> None:
    packet = publish_packet("x", bytes(200_000))
    pieces = [frame(b"are you there", 9), *(frame(packet[at : at + 70_000]) for at in range(0, len(packet), 70_000))]
    watched = over(WebServer(None, frame(ACCEPTED_V5) + b"".join(pieces)))
    until(lambda: watched.of(Message), watched)
    assert watched.of(Message)[0].payload == bytes(200_000)
    watched.link.close()


@pytest.mark.slow
def test_a_frame_over_the_limit_ends_the_connection() -> None:
    endless = bytes([0x82, 127]) + struct.pack("!Q", 1 << 40) + publish_packet("x", bytes(10)) * 40_000
    watched = over(WebServer(None, frame(ACCEPTED_V5) + endless), max_incoming_bytes=100_000)
    until(lambda: watched.of(Disconnected), watched)
    assert "over the limit of 100000" in watched.of(Disconnected)[0].reason
    watched.link.close()


@NEEDS_MOSQUITTO
def test_a_web_socket_over_tls_carries_a_chunk(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    cert.chmod(0o644)
    port = free_port()
    with mosquitto(tmp_path / "b", f"listener {port} 127.0.0.1\nprotocol websockets\ncertfile {cert}\nkeyfile {key}\n"):
        watched = RecordingLink(MqttLink(f"wss://127.0.0.1:{port}", client_id="a", ca=cert))
        watched.link.subscribe("x")
        watched.link.open()
        until(lambda: watched.of(Connected), watched)
        payload = os.urandom(61_440)
        watched.link.publish("x", payload)
        until(lambda: watched.of(Message), watched)
        assert watched.of(Message)[0].payload == payload
        watched.link.close()


def test_what_is_no_web_socket_is_reported() -> None:
    watched = over(WebServer(b"HTTP/1.1 404 Not Found\r\nConnection: close\r\n\r\n"))
    until(lambda: watched.of(Disconnected), watched)
    assert "WebSocket handshake error" in watched.of(Disconnected)[0].reason
    watched.link.close()


def test_tls_files_that_cannot_be_used_are_named(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="plain connection"):
        MqttLink("mqtt://h", client_id="a", ca=tmp_path / "ca.pem")
    with pytest.raises(ConfigError, match=r"ca\.pem: cannot be read as PEM"):
        MqttLink("mqtts://h", client_id="a", ca=tmp_path / "ca.pem")
    with pytest.raises(ConfigError, match="needs its key"):
        MqttLink("mqtts://h", client_id="a", cert=tmp_path / "cert.pem")


def self_signed(folder: Path) -> tuple[Path, Path]:
    """(certificate, key) for 127.0.0.1 as PEM files."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "test")])
    now = datetime.now().astimezone()
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    cert_path, key_path = folder / "cert.pem", folder / "key.pem"
    cert_path.write_bytes(certificate.public_bytes(serialization.Encoding.PEM))
    key_path.write_bytes(
        key.private_bytes(serialization.Encoding.PEM, serialization.PrivateFormat.PKCS8, serialization.NoEncryption())
    )
    return cert_path, key_path


class TlsServer(threading.Thread):
    """Plays one TLS connection: accepts, sends two large messages at once, and reads to the end."""

    def __init__(self, cert: Path, key: Path):
        super().__init__(daemon=True)
        self.context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        self.context.load_cert_chain(cert, key)
        self.listener = socket.create_server(("127.0.0.1", 0))
        self.listener.settimeout(PATIENCE_S)
        self.url = f"mqtts://127.0.0.1:{self.listener.getsockname()[1]}"
        self.received = b""

    def run(self) -> None:
        try:
            with self.context.wrap_socket(self.listener.accept()[0], server_side=True) as sock:
                self.received += sock.recv(1000)
                sock.sendall(ACCEPTED_V5 + publish_packet("x", bytes(300_000)) + publish_packet("y", b"last"))
                while data := sock.recv(1000):
                    self.received += data
        except OSError:
            pass
        finally:
            self.listener.close()


def test_tls_delivers_what_the_kernel_has_already_decrypted(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    server = TlsServer(cert, key)
    server.start()
    watched = RecordingLink(MqttLink(server.url, client_id="a", ca=cert))
    watched.link.open()
    until(lambda: len(watched.of(Message)) == 2, watched)
    assert watched.of(Message)[1] == Message("y", b"last", retain=False)
    watched.link.close()
    server.join(PATIENCE_S)
    traffic = watched.link.counters.snapshot()
    assert traffic.mqtt_sent == len(server.received)
    if traffic.wire_received is not None:
        assert traffic.wire_received > traffic.mqtt_received > 300_000


def test_a_broker_whose_certificate_is_not_trusted_is_left(tmp_path: Path) -> None:
    cert, key = self_signed(tmp_path)
    server = TlsServer(cert, key)
    server.start()
    link = MqttLink(server.url, client_id="a")
    link.open()
    events = link.poll(PATIENCE_S)
    assert len(events) == 1
    assert isinstance(events[0], Disconnected)
    assert "certificate is not trusted" in events[0].reason
    server.join(PATIENCE_S)


def test_a_users_own_broker_needs_no_strict_certificates(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    create = ssl.create_default_context

    def as_python_3_13_does(**options: Any) -> ssl.SSLContext:
        context = create(**options)
        context.verify_flags |= ssl.VerifyFlags.VERIFY_X509_STRICT
        return context

    monkeypatch.setattr(ssl, "create_default_context", as_python_3_13_does)
    files = user_pki(tmp_path, ["127.0.0.1"])
    server = TlsServer(*files.server)
    server.start()
    link = MqttLink(server.url, client_id="a", ca=files.ca)
    link.open()
    assert isinstance(link.poll(PATIENCE_S)[0], Connected)
    link.close()
    server.join(PATIENCE_S)


def test_without_tcp_info_there_are_only_mqtt_bytes(monkeypatch: pytest.MonkeyPatch, scripted: ScriptedBroker) -> None:
    watched, _ = met(scripted)
    if sys.platform == "linux":
        assert wire_bytes(socket_of(watched.link)) is not None
    monkeypatch.setattr(sys, "platform", "darwin")
    assert watched.link.counters.snapshot().wire_sent is None
    assert watched.link.counters.snapshot().mqtt_sent > 0
