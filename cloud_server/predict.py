"""Asks a device for a prediction over MQTT and waits for its answer."""

from __future__ import annotations

import base64
import secrets
import time
from typing import Any

import numpy as np

from cloud_server.identity import TlsFiles
from fleet_core import messages, topics
from fleet_core.errors import LinkError, RoundError
from fleet_core.link.base import Connected, Disconnected, Message
from fleet_core.link.mqtt import MqttLink
from fleet_core.messages import Answer, Question


def ask(
    fleet: str, device: str, x: np.ndarray[Any, Any], url: str, *, timeout_s: float = 20.0, tls: TlsFiles | None = None
) -> Answer:
    """Raises LinkError when no broker or device answers in time, RoundError with the device's own reason."""
    link = MqttLink(url, client_id=f"{fleet}-ask-{secrets.token_hex(4)}", **(tls or {}))
    question_id = secrets.token_hex(8)
    awaited = topics.answer(fleet, device, question_id)
    little = np.ascontiguousarray(x, dtype=x.dtype.newbyteorder("<"))
    question = Question(x.shape, str(x.dtype), base64.b64encode(little.tobytes()).decode())
    until, reason, hint = time.monotonic() + timeout_s, "no broker answered", "start the broker, or check --broker"
    link.open()
    try:
        while time.monotonic() < until:
            for event in link.poll(0.2):
                match event:
                    case Connected():
                        link.subscribe(awaited)
                        link.publish(topics.question(fleet, device, question_id), messages.encode(question))
                        reason = f"device {device} did not answer"
                        hint = f"is {device} on? see 'metafleet devices list'"
                    case Disconnected(text):
                        reason, hint = f"no broker answered ({text})", "start the broker, or check --broker"
                    case Message(topic, payload) if topic == awaited:  # amqtt sends other retained messages too
                        return _answer(messages.decode(Answer, payload), device)
    finally:
        link.close()
    raise LinkError(f"{reason} in {timeout_s:g} s", where=url, hint=hint)


def _answer(answer: Answer, device: str) -> Answer:
    if answer.error:
        raise RoundError(answer.error, where=device)
    return answer
