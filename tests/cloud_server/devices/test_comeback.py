"""The operator sees over MQTT that a flashed device is back; without a broker the device itself is asked."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_server.devices import back_online
from cloud_server.devices.back_online import MqttWatch
from cloud_server.identity import fleet_certificates
from fleet_core.link.loopback import LoopbackBroker, LoopbackLink
from fleet_core.link.mqtt import MqttLink
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import Presence
from tests.support.pki import credentials_for, fleet_without_model, secured_broker
from tests.support.waiting import until

TOPIC = topics.presence("lab", "kitchen")


class Asked:
    """A watch that records its calls."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def before(self) -> None:
        self.calls.append("before")

    def missing(self, version: str) -> str:
        self.calls.append(f"missing {version}")
        return "its unit is failed"

    def well(self) -> bool:
        self.calls.append("well")
        return True


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CONNECT_S", "RETAINED_S", "POLL_S"):
        monkeypatch.setattr(back_online, name, 0.05)


def say(broker: LoopbackBroker, *, st: str = "on", boot: str, ver: str = "1.0") -> None:
    broker.publish(TOPIC, messages.encode(Presence(st=st, boot=boot, ver=ver)), retain=True)


def watching(broker: LoopbackBroker, otherwise: Asked | None = None) -> MqttWatch:
    return MqttWatch("lab", "kitchen", LoopbackLink(broker, "operator"), otherwise or Asked())


def test_a_device_is_back_when_it_was_started_anew_with_the_version() -> None:
    broker, other = LoopbackBroker(), Asked()
    say(broker, boot="first")
    watch = watching(broker, other)
    assert watch.well()
    watch.before()
    assert "heard nothing" in watch.missing("1.1")
    say(broker, st="off", boot="first")
    assert "heard nothing" in watch.missing("1.1")
    say(broker, boot="second", ver="1.0")
    assert "says that it is version 1.0" in watch.missing("1.1")
    say(broker, st="off", boot="second", ver="1.1")
    assert "left the broker again" in watch.missing("1.1")
    say(broker, boot="third", ver="1.1")
    assert watch.missing("1.1") == ""
    assert other.calls == []
    watch.close()


def test_a_device_that_was_never_there_is_back_when_it_comes() -> None:
    broker = LoopbackBroker()
    watch = watching(broker)
    assert not watch.well()
    watch.before()
    assert watch.missing("1.0")
    say(broker, boot="first")
    assert watch.missing("1.0") == ""


def test_an_invalid_presence_is_no_sign_of_life() -> None:
    broker = LoopbackBroker()
    watch = watching(broker)
    watch.before()
    broker.publish(TOPIC, b"[]", retain=True)
    assert "heard nothing" in watch.missing("1.0")


def test_without_a_broker_the_device_itself_is_asked() -> None:
    broker, other = LoopbackBroker(), Asked()
    broker.stop()
    watch = watching(broker, other)
    assert watch.well()
    watch.before()
    assert watch.missing("1.0").startswith("its unit is failed (no broker answers here")
    assert other.calls == ["well", "before", "missing 1.0"]


def test_a_broker_that_goes_away_while_waiting_is_reported() -> None:
    broker = LoopbackBroker()
    watch = watching(broker)
    watch.before()
    broker.stop()
    assert "the broker does not answer here" in watch.missing("1.0")


@pytest.mark.needs("mosquitto")
def test_the_operators_certificate_sees_a_device_come_back_over_tls(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(back_online, "CONNECT_S", 30.0)
    fleet, other = fleet_without_model(tmp_path / "fleet"), Asked()
    name = fleet.config.fleet.name
    with secured_broker(fleet) as (broker, _), fleet_certificates.as_operator(fleet, broker.url) as tls:
        device = credentials_for(fleet, "kitchen", tmp_path / "kitchen").link(broker.url, "kitchen")
        device.open()
        watch = MqttWatch(name, "kitchen", MqttLink(broker.url, client_id="flash", **tls), other)
        watch.before()
        assert "heard nothing" in watch.missing("1.1")
        until(lambda: device.connected, lambda: device.poll(0.05))
        presence = Presence(st="on", boot="first", ver="1.1")
        device.publish(topics.presence(name, "kitchen"), messages.encode(presence), retain=True)
        until(lambda: watch.missing("1.1") == "", lambda: device.poll(0.05))
        watch.close()
        device.close()
    assert other.calls == []
