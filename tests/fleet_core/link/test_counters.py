"""The bytes that link and ledger count, compared with the kernel's counters on a wire that carries nothing else."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest

from cloud_server.broker.private_broker import find_mosquitto
from cloud_server.identity.device_folder import write_device_folder
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_sums import Volume
from cloud_server.ledger.ledger_tables import Evaluation, Update
from cloud_server.records.fleet_folder import Fleet
from fleet_core.data.samples import Samples, save
from fleet_core.link.byte_counters import Traffic
from fleet_core.link.mqtt import MqttLink
from tests.support import netns, waiting
from tests.support.brokers import NEEDS_MOSQUITTO, RecordingLink, until
from tests.support.netns import Star, Wire, WireTraffic
from tests.support.pki import UserPki, user_pki
from tests.support.programs import Programs, edge_agent, metafleet, wide_fleet

WITHIN = 0.001  # of what the interface counted
TCP_HEADERS_BYTES = 20 + 20 + 12
CHUNK_BYTES = 61_440
CHUNKS = 40
QUIET_READINGS = 20  # each takes some milliseconds
TLS_SHARE = 0.005
TLS_HANDSHAKE_BYTES = 300  # at least, each way
SLACK_BYTES = 100  # options of a SYN, a FIN and its acknowledgement

pytestmark = NEEDS_MOSQUITTO


@contextmanager
def star_with_broker(programs: Programs, devices: int) -> Iterator[tuple[Star, UserPki]]:
    """Wires to a hub with a mosquitto: plain at 1883, with mutual TLS at 8883."""
    netns.need_namespaces()
    with netns.star(devices) as star:
        files = user_pki(programs.folder, [wire.hub for wire in star.wires])
        config = programs.folder / "broker.conf"
        config.write_text(
            "allow_anonymous true\nmax_queued_messages 4000\nset_tcp_nodelay true\nuser root\n"
            "listener 1883\n"
            f"listener 8883\ncafile {files.ca}\ncertfile {files.server[0]}\nkeyfile {files.server[1]}\n"
            "require_certificate true\n"
        )
        broker = programs.start(*star.command(find_mosquitto() or "mosquitto", "-c", str(config)))
        broker.wait_for("running")
        try:
            yield star, files
        finally:
            programs.stop()  # before its namespaces are removed


def link_over(wire: Wire, files: UserPki, *, tls: bool) -> MqttLink:
    if not tls:
        return MqttLink(f"mqtt://{wire.hub}:1883", client_id="d0")
    certificate, key = files.device
    return MqttLink(f"mqtts://{wire.hub}:8883", client_id="d0", ca=files.ca, cert=certificate, key=key)


def work(link: MqttLink) -> None:
    """An agent's bytes in a round: presence, a model up in chunks, the same down, heartbeats."""
    watched = RecordingLink(link)
    link.open()
    until(lambda: link.connected, watched)
    for k in range(CHUNKS):
        link.publish(f"up/{k // 16}/{k}", bytes([k]) * CHUNK_BYTES, retain=True)
    until(lambda: not link.unacknowledged, watched)
    for segment in range(3):
        link.subscribe(f"up/{segment}/+")
        until(lambda: len(watched.topics()) >= min(CHUNKS, 16 * (segment + 1)), watched)  # noqa: B023
        link.unsubscribe(f"up/{segment}/+")
        link.publish("st", b'{"st":"on","ph":"train"}')
    until(lambda: not link.unacknowledged, watched)


def as_passed(wire: Wire) -> WireTraffic:
    """The wire's traffic once nothing is sent any more."""
    readings = [wire.passed()]
    waiting.until(
        lambda: readings[-QUIET_READINGS:] == [readings[-1]] * QUIET_READINGS,
        lambda: readings.append(wire.passed()), lambda: "the wire does not come to rest",
    )
    return readings[-1]


def assert_close(traffic: Traffic, passed: WireTraffic) -> None:
    assert traffic.wire_sent == pytest.approx(passed.sent, rel=WITHIN)
    assert traffic.wire_received == pytest.approx(passed.received, rel=WITHIN)


@pytest.mark.parametrize("tls", [False, True], ids=["plain", "tls"])
def test_a_links_wire_bytes_are_the_interfaces(programs: Programs, tls: bool) -> None:
    with star_with_broker(programs, 1) as (star, files), netns.entered(star.wires[0].namespace):
        link = link_over(star.wires[0], files, tls=tls)
        work(link)
        link.close()
        assert_close(link.counters.snapshot(), as_passed(star.wires[0]))


def test_wire_bytes_are_summed_over_connections_that_broke(programs: Programs) -> None:
    with star_with_broker(programs, 1) as (star, files), netns.entered(star.wires[0].namespace):
        link = link_over(star.wires[0], files, tls=False)
        work(link)
        link.abort()
        work(link)
        link.close()
        assert_close(link.counters.snapshot(), as_passed(star.wires[0]))


def test_mqtt_bytes_are_what_the_segments_carried(programs: Programs) -> None:
    """Without TLS the segments carry only MQTT, so this is exact but for the options of the SYN."""
    with star_with_broker(programs, 1) as (star, files), netns.entered(star.wires[0].namespace):
        link = link_over(star.wires[0], files, tls=False)
        work(link)
        link.close()
        traffic, passed = link.counters.snapshot(), as_passed(star.wires[0])
        assert carried(passed.sent, passed.sent_packets) == pytest.approx(traffic.mqtt_sent, abs=SLACK_BYTES)
        assert carried(passed.received, passed.received_packets) == pytest.approx(
            traffic.mqtt_received, abs=SLACK_BYTES
        )


def carried(passed_bytes: int, packets: int) -> int:
    """TCP payload in ``packets`` segments of ``passed_bytes``."""
    return passed_bytes - packets * TCP_HEADERS_BYTES


# A fleet --------------------------------------------------------------------------------------------------------------


ROUNDS = 4

def two_devices(folder: Path, star: Star, files: UserPki) -> Fleet:
    """A fleet of about 260,000 parameters and the homes ``d0`` and ``d1``, each with its own end of the hub; d1 uses
    TLS."""
    tls = {"ca": str(files.ca), "certificate": str(files.device[0]), "key": str(files.device[1])}
    fleet = wide_fleet(folder / "fleet", ROUNDS)
    for k, wire in enumerate(star.wires):
        rng = np.random.default_rng(k)
        home = folder / f"d{k}"
        if k:
            write_device_folder(fleet, home.name, home, f"mqtts://{wire.hub}:8883", tls=tls)
        else:
            write_device_folder(fleet, home.name, home, f"mqtt://{wire.hub}:1883")
        x, y = rng.normal(size=(60, 1024)).astype(np.float32), np.arange(60) % 3
        save(home / "samples.npz", Samples(x, y, classes=("a", "b", "c")))
    return fleet


@pytest.mark.slow
def test_the_ledger_says_what_passed_each_devices_wire_under_tls_as_well(programs: Programs) -> None:
    """A report holds what was counted before it: of the last one its own message (about 590 bytes up) and the broker's
    acknowledgement (56 down) are in no ledger, nor is a farewell (460 up, 110 down)."""
    with star_with_broker(programs, 2) as (star, files):
        fleet = two_devices(programs.folder, star, files)
        server = programs.start(*star.command(
            *metafleet("server", "start", fleet.folder, "--quiet", "--plain", "--broker",
                       f"mqtt://{star.wires[0].hub}:1883")
        ))
        for k, wire in enumerate(star.wires):
            programs.start(*wire.command(*edge_agent("run", "--home", programs.folder / f"d{k}")))
        with Ledger(fleet.ledger_path) as ledger:
            server.until(lambda: {row.device for row in ledger.rows(Evaluation, round=ROUNDS)} == {"d0", "d1"})
            passed = {f"d{k}": as_passed(wire) for k, wire in enumerate(star.wires)}
            volumes, kinds = ledger.volume("device"), ledger.volume("kind")
            sent = sum(row.payload_bytes for row in ledger.rows(Update, status="counted"))
            assert kinds["update"].payload.up == sent > 2 * ROUNDS * 700_000
        for name, here in passed.items():
            assert_booked(volumes[name], here, tls=name == "d1")


def assert_booked(volume: Volume, passed: WireTraffic, *, tls: bool) -> None:
    """The wire's figures, and MQTT's as the segments' payload, minus TLS; only the last report is missing."""
    assert volume.wire is not None
    assert volume.mqtt is not None
    assert volume.wire.missing is volume.mqtt.missing is None
    carried_up, carried_down = (
        carried(passed.sent, passed.sent_packets), carried(passed.received, passed.received_packets)
    )
    for booked, there, within in (
        (volume.wire.up, passed.sent, WITHIN),
        (volume.wire.down, passed.received, WITHIN),
        (volume.mqtt.up, carried_up, TLS_SHARE if tls else WITHIN),
        (volume.mqtt.down, carried_down, TLS_SHARE if tls else WITHIN),
    ):
        assert booked <= there + SLACK_BYTES
        assert booked == pytest.approx(there, rel=within)
    if tls:
        assert volume.mqtt.up < carried_up - TLS_HANDSHAKE_BYTES
        assert volume.mqtt.down < carried_down - TLS_HANDSHAKE_BYTES
    assert volume.payload.up < volume.mqtt.up < volume.wire.up
    assert volume.payload.down < volume.mqtt.down < volume.wire.down
