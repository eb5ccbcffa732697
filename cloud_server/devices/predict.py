"""``metafleet predict``: sends samples to a device over MQTT and waits for its answer."""

from __future__ import annotations

import base64
import secrets
import time
from typing import Any

import numpy as np

from cloud_server.identity.fleet_certificates import LinkFiles
from cloud_server.ledger.ledger_tables import Device
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base import terminal
from fleet_core.base.errors import LinkError, RoundError
from fleet_core.base.processes import typed
from fleet_core.link.interface import Connected, Disconnected, Message
from fleet_core.link.mqtt import MqttLink
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import Answer, Question


def ask(
    fleet: str, device: str, x: np.ndarray[Any, Any], url: str, *, timeout_s: float = 20.0,
    tls: LinkFiles | None = None, off: str = "",
) -> Answer:
    """The device's answer to samples x [S, *shape]. off: a likely reason for no answer, for the error message.

    Raises LinkError if no broker or device answers in time, RoundError with the reason of a device that cannot answer.
    """
    link = MqttLink(url, client_id=f"{fleet}-ask-{secrets.token_hex(4)}", **(tls or {}))
    question_id = secrets.token_hex(8)
    answer_topic = topics.answer(fleet, device, question_id)
    little = np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("<"))
    question = Question(x.shape, str(x.dtype), base64.b64encode(little.tobytes()).decode())
    until, reason, hint = time.monotonic() + timeout_s, "no broker answered", "start the broker, or check --broker"
    link.open()
    try:
        while time.monotonic() < until:
            for event in link.poll(0.2):
                match event:
                    case Connected():
                        link.subscribe(answer_topic)
                        link.publish(topics.question(fleet, device, question_id), messages.encode(question))
                        reason = f"device {device} did not answer"
                        hint = f"is {device} on? see 'metafleet devices list'"
                    case Disconnected(text):
                        reason, hint = f"no broker answered ({text})", "start the broker, or check --broker"
                    case Message(topic, payload) if topic == answer_topic:  # amqtt may deliver others too
                        return _answer(messages.decode(Answer, payload), device)
    finally:
        link.close()
    raise LinkError(f"{reason} in {timeout_s:g} s" + (f"; {off}" if off else ""), where=url, hint=hint)


def why_off(fleet: Fleet, device: Device) -> str:
    """Why the device may not answer, from the fleet's folder; empty if it should."""
    said = [f"it was off when last heard of, at {terminal.date(device.last_seen)}"] if device.state == "off" else []
    if not fleet.running():
        said.append(f"the aggregator is not running: metafleet server start {typed(fleet.folder)}")
    return "; ".join(said)


def _answer(answer: Answer, device: str) -> Answer:
    if answer.error:
        raise RoundError(answer.error, where=device)
    return answer
