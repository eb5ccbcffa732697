"""``metafleet home-assistant``: the devices of a fleet in Home Assistant, by its MQTT discovery.

A bridge reads the ledger and publishes to Home Assistant's broker, all retained:

    PREFIX/device/metafleet-KEY-DEVICE/config     the device and its sensors; empty once it is revoked
    metafleet/FLEET-KEY/DEVICE/state              their values, one small JSON table
    metafleet/FLEET-KEY/bridge                    online, or offline by the bridge's last will

KEY: eight digits of the fleet's public key. The form is that of
https://www.home-assistant.io/integrations/mqtt/#device-discovery-payload (Home Assistant 2024.11 or later). A figure
that was not measured has no sensor.
"""

from __future__ import annotations

import json
import secrets
import time
from collections import deque
from collections.abc import Callable, Mapping
from datetime import datetime, timezone
from typing import Any

from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device, Evaluation
from cloud_server.records.fleet_folder import Fleet
from cloud_server.results import device_costs
from cloud_server.results.device_costs import DeviceCosts
from fleet_core import __version__
from fleet_core.base import schema
from fleet_core.base.errors import LinkError
from fleet_core.link.await_broker import await_broker
from fleet_core.link.interface import Connected, Denied, Disconnected, Link, Will
from fleet_core.link.mqtt import MqttLink

TICK_S = 0.2
MOST_UNACKNOWLEDGED = 200
ONLINE, OFFLINE = b"online", b"offline"
COUNTS = {"state_class": "total_increasing"}
SENSORS: dict[str, dict[str, Any]] = {
    "connected": {"platform": "binary_sensor", "name": "Connected", "device_class": "connectivity"},
    "phase": {"platform": "sensor", "name": "Phase", "icon": "mdi:progress-wrench"},
    "accuracy": {"platform": "sensor", "name": "Accuracy", "unit_of_measurement": "%", "state_class": "measurement",
                 "suggested_display_precision": 1, "icon": "mdi:bullseye-arrow"},
    "round": {"platform": "sensor", "name": "Last counted round", "icon": "mdi:counter"},
    "bytes_up": {"platform": "sensor", "name": "Bytes sent", "device_class": "data_size", "unit_of_measurement": "B",
                 **COUNTS},
    "bytes_down": {"platform": "sensor", "name": "Bytes received", "device_class": "data_size",
                   "unit_of_measurement": "B", **COUNTS},
    "joules": {"platform": "sensor", "name": "Energy", "device_class": "energy", "unit_of_measurement": "J", **COUNTS},
    "last_heard": {"platform": "sensor", "name": "Last heard", "device_class": "timestamp"},
}
"""By key of the state: Home Assistant's settings of the sensor."""


class Names:
    """Topics of one fleet. prefix: Home Assistant's discovery prefix."""

    def __init__(self, fleet: Fleet, prefix: str):
        self.fleet, self._key = fleet.config.fleet.name, fleet.lasting_id()
        self._prefix, self._root = prefix, f"metafleet/{self.fleet}-{self._key}"
        self.bridge = f"{self._root}/bridge"

    def id(self, device: str) -> str:
        return f"metafleet-{self._key}-{device}"

    def config(self, device: str) -> str:
        return f"{self._prefix}/device/{self.id(device)}/config"

    def state(self, device: str) -> str:
        return f"{self._root}/{device}/state"


def messages(names: Names, ledger: Ledger) -> dict[str, bytes]:
    """{topic: payload} of every device that the ledger knows; empty payloads remove a revoked device."""
    costs = {one.device: one for one in device_costs.of_ledger(ledger)}
    accuracy = {one.device: one.accuracy for one in ledger.latest(Evaluation, stage="after")}
    counted = {device: newest for device, (_, _, newest) in ledger.counted_updates().items()}
    found: dict[str, bytes] = {}
    for device in ledger.devices():
        name = device.name
        if device.status != "enrolled":
            found |= {names.config(name): b"", names.state(name): b""}
            continue
        state = state_of(device, accuracy.get(name), counted.get(name), costs.get(name))
        found[names.config(name)] = _json(config_of(names, device, state))
        found[names.state(name)] = _json(state)
    return found


def state_of(
    device: Device, accuracy: float | None, counted: int | None, costs: DeviceCosts | None
) -> dict[str, Any]:
    """A device's values; those that are not known are left out. accuracy: share of right answers; the sensor has
    percent. Bytes are of the MQTT socket."""
    moved = None if costs is None else costs.mqtt_bytes
    energy = None if costs is None else costs.energy_j
    heard = device.last_seen
    values = {
        "connected": "ON" if device.state == "on" else "OFF",
        "phase": (device.phase or "idle") if device.state == "on" else "off",
        "accuracy": None if accuracy is None else round(100 * accuracy, 2),
        "round": counted,
        "bytes_up": None if moved is None else moved.up,
        "bytes_down": None if moved is None else moved.down,
        "joules": None if energy is None else round(energy.value, 3),
        "last_heard": None if heard is None else datetime.fromtimestamp(int(heard), timezone.utc).isoformat(),
    }
    return schema.present(values)


def config_of(names: Names, device: Device, state: Mapping[str, Any]) -> dict[str, Any]:
    """The discovery payload, with those sensors for which ``state`` has a value."""
    board = device.capabilities.get("board")
    about = {"identifiers": [names.id(device.name)], "name": device.name, "manufacturer": f"Metafleet, {names.fleet}",
             "model": board or None, "sw_version": device.version or None}
    return {
        "device": schema.present(about),
        "origin": {"name": "metafleet", "sw_version": __version__},
        "state_topic": names.state(device.name),
        "availability_topic": names.bridge,
        "components": {
            key: {**SENSORS[key], "unique_id": f"{names.id(device.name)}-{key}",
                  "value_template": f"{{{{ value_json.{key} }}}}"}
            for key in SENSORS if key in state
        },
    }


def _json(value: Any) -> bytes:
    return json.dumps(value, sort_keys=True).encode()


class Bridge:
    """Publishes over ``link`` what has changed since its last publish; everything after a reconnect."""

    def __init__(self, names: Names, link: Link, read: Callable[[], dict[str, bytes]], say: Callable[[str], None]):
        self._names, self._link, self._read, self._say = names, link, read, say
        self._there: dict[str, bytes] = {}
        self._queue: deque[tuple[str, bytes]] = deque()

    @property
    def settled(self) -> bool:
        """Whether everything is at the broker."""
        return not self._queue and not self._link.unacknowledged

    def step(self) -> None:
        for event in self._link.poll(TICK_S):
            match event:
                case Connected():
                    self._there.clear()
                    self._queue.clear()
                    self._put({self._names.bridge: ONLINE})
                    self._put(self._read())
                case Disconnected(reason):
                    self._say(f"broker: {reason}")
                case Denied(topic, reason):
                    self._say(f"broker: {topic} denied: {reason}")
        while self._queue and self._link.connected and self._link.unacknowledged < MOST_UNACKNOWLEDGED:
            topic, payload = self._queue.popleft()
            try:
                self._link.publish(topic, payload, retain=True)
            except LinkError as error:
                self._say(str(error))

    def look(self) -> None:
        """Reads the fleet, and queues what has changed."""
        if self._link.connected and not self._queue:
            self._put(self._read())

    def remove(self) -> None:
        """Queues the removal of every device and of the bridge itself."""
        self._queue.clear()
        self._put({topic: b"" for topic in self._read()} | {self._names.bridge: b""})

    def leave(self) -> None:
        """Queues the message that the bridge is off."""
        self._queue.clear()
        self._put({self._names.bridge: OFFLINE})

    def _put(self, wanted: Mapping[str, bytes]) -> None:
        changed = {topic: payload for topic, payload in wanted.items() if self._there.get(topic) != payload}
        self._there |= changed
        self._queue.extend(changed.items())


def run(
    fleet: Fleet, url: str, *, prefix: str, every_s: float, remove: bool, stopped: Callable[[], bool],
    say: Callable[[str], None], ready: Callable[[], None] = lambda: None, connect_s: float = 30.0, **login: Any,
) -> None:
    """Bridges until ``stopped``, or removes everything and returns. login: username, password, ca, cert and key of
    ``MqttLink``. ready: called once everything is at the broker. Raises LinkError if no broker answers."""
    names = Names(fleet, prefix)

    def read() -> dict[str, bytes]:
        with Ledger(fleet.ledger_path, create=False) as ledger:
            return messages(names, ledger)

    name = f"metafleet-bridge-{secrets.token_hex(4)}"
    link = MqttLink(url, client_id=name, will=Will(names.bridge, OFFLINE), **login)
    bridge = Bridge(names, link, read, say)
    link.open()
    try:
        await_broker(link, bridge.step, url, stopped, connect_s)
        if remove:
            bridge.remove()
            _settle(bridge, stopped, connect_s)
            return
        _settle(bridge, stopped, connect_s)
        ready()
        looked_at = time.monotonic()
        while not stopped():
            bridge.step()
            if time.monotonic() - looked_at >= every_s:
                bridge.look()
                looked_at = time.monotonic()
        bridge.leave()
        _settle(bridge, lambda: False, TICK_S * 10)
    finally:
        link.close()


def _settle(bridge: Bridge, stopped: Callable[[], bool], limit_s: float) -> None:
    """Works until everything is at the broker, at most ``limit_s`` seconds."""
    until = time.monotonic() + limit_s
    while not bridge.settled and not stopped() and time.monotonic() < until:
        bridge.step()
