"""Readings that come in MQTT messages."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_agent.sources import run_sources, topic
from edge_agent.sources.interface import Item, Lost
from fleet_core.base.errors import ConfigError
from fleet_core.board.device_settings import Tls, settings_of
from fleet_core.data import unlabelled
from fleet_core.data.live import Readings
from fleet_core.link.mqtt import MqttLink
from tests.support import sensors, waiting
from tests.support.brokers import private_broker

RECORDED = np.round(np.random.default_rng(2).normal(size=(40, 2)), 4)
TOML = '[[source]]\nkind = "mqtt"\ntopic = "plant/+/vibration"\nbroker = "{}"\n'


def rows(items: list[Item]) -> list[list[float]]:
    return [row for one in items if isinstance(one, Readings) for row in one.values.tolist()]


def test_the_samples_of_messages_are_those_of_the_file(tmp_path: Path) -> None:
    with private_broker(tmp_path / "broker") as broker:
        place, _ = sensors.home(tmp_path / "d", TOML.format(broker.url))
        settings = settings_of(place)
        feed = run_sources.open_feed(settings.source[0], "mqtt", place, settings, sensors.WINDOWS)
        sender = MqttLink(broker.url, client_id="sender")
        sender.open()
        items: list[Item] = []

        def pump() -> None:
            items.extend(feed.read(0.02) or [])
            sender.poll(0.02)

        waiting.until(lambda: sender.connected, pump)
        sent = 0
        while not items:  # the subscription is made some time after the connection
            sender.publish("plant/1/vibration", b"[%d, 0.0]" % sent)
            sent += 1
            pump()
        waiting.until(lambda: rows(items)[-1][0] == sent - 1, pump)
        items.clear()
        forms = (lambda a, b: json.dumps([a, b]), lambda a, b: f"{a!r},{b!r}")
        for n, (a, b) in enumerate(RECORDED.tolist()):
            sender.publish("plant/1/vibration", forms[n % 2](a, b).encode())
            pump()
        sender.publish("plant/other", b"[9.0, 9.0]")
        waiting.until(lambda: len(rows(items)) == 40, pump)
        feed.close()
        sender.close()
    (tmp_path / "r.csv").write_text("ax,ay\n" + "".join(f"{a!r},{b!r}\n" for a, b in RECORDED.tolist()))
    made = sensors.made_of(place, items)
    assert sensors.bits(made) == unlabelled.load(tmp_path / "r.csv", sensors.WINDOWS).tobytes()


def test_a_broker_that_does_not_answer_is_said_and_tried_again(tmp_path: Path) -> None:
    place, _ = sensors.home(tmp_path / "d", TOML.format("mqtt://127.0.0.1:1"))
    settings, items = settings_of(place), list[Item]()
    feed = run_sources.open_feed(settings.source[0], "mqtt", place, settings, sensors.WINDOWS)
    waiting.until(lambda: len(items) > 1, lambda: items.extend(feed.read(0.1) or []))
    feed.close()
    assert isinstance(items[0], Lost)
    assert items[0].why == "mqtt://127.0.0.1:1: Connection refused"


@pytest.mark.parametrize(("toml", "said"), [
    (TOML.format("mqtt://192.0.2.1"), "is plain MQTT that leaves this machine"),
    (TOML.format("mqtt://127.0.0.1") + 'username = "me"\npassword_file = "no.txt"\n',
     r"no\.txt: there is no such file"),
    (TOML.format("http://127.0.0.1"), "is not the address of a broker"),
])  # fmt: skip
def test_settings_that_cannot_be_used_are_said(tmp_path: Path, toml: str, said: str) -> None:
    place, _ = sensors.home(tmp_path / "d", toml)
    settings = settings_of(place)
    with pytest.raises(ConfigError, match=said):
        run_sources.open_feed(settings.source[0], "mqtt", place, settings, sensors.WINDOWS)


def test_a_device_with_a_certificate_must_name_a_broker_or_it_would_end_its_agents_connection(tmp_path: Path) -> None:
    place, _ = sensors.home(tmp_path / "d", TOML.format(""))
    settings = settings_of(place)
    settings = replace(settings, device=replace(settings.device, broker="mqtts://127.0.0.1"),
                       tls=Tls("ca.pem", "device.pem", "device.key"))
    with pytest.raises(ConfigError, match="is to be read at the fleet's broker, where this device has one connection"):
        run_sources.open_feed(settings.source[0], "mqtt", place, settings, sensors.WINDOWS)


def test_a_message_over_the_limit_ends_the_connection_before_it_is_held() -> None:
    assert topic.PACKET_BYTES < 2 << 20
