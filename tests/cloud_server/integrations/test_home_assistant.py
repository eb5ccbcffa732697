"""Devices in Home Assistant: what is published, that Home Assistant's own schemas take it, and when it goes away."""

from __future__ import annotations

import importlib
import json
import shutil
import signal
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloud_server.commands import cli
from cloud_server.integrations import home_assistant
from cloud_server.integrations.home_assistant import SENSORS, Bridge, Names
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Energy
from cloud_server.records.fleet_folder import Fleet
from fleet_core.link.interface import Message, Will
from fleet_core.link.loopback import LoopbackBroker, LoopbackLink
from fleet_core.link.mqtt import MqttLink
from tests.support.brokers import RecordingLink, private_broker, until
from tests.support.cli import runner
from tests.support.programs import Programs, metafleet

ABBREVIATED = {"device", "origin", "components", "state_topic", "availability_topic"}


@pytest.fixture
def fleet(finished: Path, tmp_path: Path) -> Fleet:
    shutil.copytree(finished / "fleet", tmp_path / "fleet")
    found = Fleet.load(tmp_path / "fleet")
    with Ledger(found.ledger_path) as ledger:
        ledger.put(Energy(round=1, device="d0", phase="train", joules=2.5, source="meter", measured=True))
    return found


def read(fleet: Fleet) -> dict[str, bytes]:
    with Ledger(fleet.ledger_path, create=False) as ledger:
        return home_assistant.messages(Names(fleet, "homeassistant"), ledger)


def tables(fleet: Fleet, device: str) -> tuple[dict[str, Any], dict[str, Any]]:
    """(discovery payload, state) of a device."""
    names, found = Names(fleet, "homeassistant"), read(fleet)
    return json.loads(found[names.config(device)]), json.loads(found[names.state(device)])


def revoke(fleet: Fleet, name: str) -> None:
    with Ledger(fleet.ledger_path) as ledger:
        device = ledger.device(name)
        assert device is not None
        ledger.put(replace(device, status="revoked"))


@pytest.mark.slow
def test_a_device_has_a_sensor_for_each_value_and_none_for_what_was_not_measured(fleet: Fleet) -> None:
    config, state = tables(fleet, "d0")
    assert config.keys() == ABBREVIATED
    assert config["components"].keys() == state.keys() == SENSORS.keys()
    assert state["joules"] == 2.5
    assert state["bytes_up"] > 0
    assert state["round"] == 2
    assert 0 <= state["accuracy"] <= 100
    other, values = tables(fleet, "d1")
    assert "joules" not in values
    assert "joules" not in other["components"]


def test_ids_are_unique_and_templates_read_the_state(fleet: Fleet) -> None:
    ids = []
    for device in ("d0", "d1"):
        config, state = tables(fleet, device)
        for key, component in config["components"].items():
            assert component["value_template"] == f"{{{{ value_json.{key} }}}}"
            assert key in state
            ids.append(component["unique_id"])
    assert len(ids) == len(set(ids))


@pytest.mark.allowed_skip("homeassistant")
def test_home_assistants_schemas_take_the_payload(fleet: Fleet) -> None:
    """Home Assistant is a program of hundreds of packages: not in the environment of the tests."""
    schemas = pytest.importorskip("homeassistant.components.mqtt.schemas", reason="needs the package homeassistant")
    of = {kind: importlib.import_module(f"homeassistant.components.mqtt.{kind}").DISCOVERY_SCHEMA
          for kind in ("sensor", "binary_sensor")}
    known = importlib.import_module("homeassistant.components.sensor.const")
    for device in ("d0", "d1"):
        config, _ = tables(fleet, device)
        schemas.DEVICE_DISCOVERY_SCHEMA(dict(config))
        shared = {key: config[key] for key in ("device", "origin", "state_topic", "availability_topic")}
        for component in config["components"].values():
            checked = of[component["platform"]]({**shared, **component})
            assert checked["unique_id"] == component["unique_id"]
            kind, unit = component.get("device_class"), component.get("unit_of_measurement")
            if component["platform"] == "sensor" and kind is not None:
                assert unit in known.DEVICE_CLASS_UNITS.get(kind, {None})
                assert component.get("state_class") in {None, *known.DEVICE_CLASS_STATE_CLASSES.get(kind, ())}


def test_a_revoked_device_is_removed(fleet: Fleet) -> None:
    revoke(fleet, "d1")
    names, found = Names(fleet, "homeassistant"), read(fleet)
    assert found[names.config("d1")] == found[names.state("d1")] == b""
    assert found[names.config("d0")] != b""


def test_only_what_changed_is_published_again_and_everything_after_a_reconnect(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    broker, names = LoopbackBroker(), Names(fleet, "homeassistant")
    link = LoopbackLink(broker, "bridge", Will(names.bridge, b"offline"))
    published: list[str] = []
    send = link.publish

    def publish(topic: str, payload: bytes, *, retain: bool = False, qos: int = 1) -> None:
        published.append(topic)
        send(topic, payload, retain=retain, qos=qos)

    monkeypatch.setattr(link, "publish", publish)
    bridge = Bridge(names, link, lambda: read(fleet), print)
    link.open()
    bridge.step()
    assert len(published) == 5
    assert broker.retained[names.bridge] == b"online"
    bridge.look()
    bridge.step()
    assert len(published) == 5
    revoke(fleet, "d1")
    bridge.look()
    bridge.step()
    assert sorted(published[5:]) == sorted([names.config("d1"), names.state("d1")])
    assert names.config("d1") not in broker.retained
    broker.drop("bridge")
    assert broker.retained[names.bridge] == b"offline"
    published.clear()
    bridge.step()  # the connection is lost
    bridge.step()
    assert broker.retained[names.bridge] == b"online"
    assert len(published) == 5
    bridge.remove()
    bridge.step()
    assert broker.retained == {}


@pytest.mark.slow
def test_the_command_bridges_leaves_and_removes(
    fleet: Fleet, tmp_path: Path, programs: Programs, monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    names = Names(fleet, "homeassistant")
    with private_broker(tmp_path / "broker") as broker:
        program = programs.start(*metafleet("home-assistant", fleet.folder, "--broker", broker.url, "--every", "1"))
        program.wait_for("the devices are announced to Home Assistant")
        reader = RecordingLink(MqttLink(broker.url, client_id="reader"))
        reader.link.open()
        reader.link.subscribe("homeassistant/#", "metafleet/#")
        until(lambda: {names.config("d0"), names.config("d1"), names.bridge} <= set(reader.topics()), reader)
        program.process.send_signal(signal.SIGTERM)
        assert program.exit_code() == 0
        until(lambda: (names.bridge, b"offline") in payloads(reader), reader)
        command = runner(monkeypatch, capsys, "metafleet", cli.main)
        assert command("home-assistant", fleet.folder, "--broker", broker.url, "--remove").code == 0
        gone = {(topic, b"") for topic in (names.config("d0"), names.state("d1"), names.bridge)}
        until(lambda: gone <= set(payloads(reader)), reader)
        reader.link.close()


def payloads(reader: RecordingLink) -> list[tuple[str, bytes]]:
    return [(message.topic, message.payload) for message in reader.of(Message)]


@pytest.mark.parametrize(("options", "words"), [
    (("--prefix", "a/#"), "'a/#' is not a discovery prefix"), (("--password-file", "p"), "a password needs a user"),
    (("--broker", "mqtt://home.example"), "is plain MQTT that leaves this machine"),
])
def test_wrong_options_are_named(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], options: tuple[str, ...],
    words: str,
) -> None:
    command = runner(monkeypatch, capsys, "metafleet", cli.main)
    ended = command("home-assistant", fleet.folder, "--broker", "mqtt://127.0.0.1:1", *options)
    assert ended.code == 2
    assert words in ended.err
