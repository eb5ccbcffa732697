"""The MQTT topics of the protocol: building and parsing them. None has more than six slashes.

    fl1/{fleet}/r/cur                        the current round, signed, retained
    fl1/{fleet}/r/program                    the program that devices are to fetch, signed, retained
    fl1/{fleet}/r/keys                       successions of the fleet's key, retained
    fl1/{fleet}/b/{id}/{segment}/{k}         a chunk of a content-addressed blob, retained
    fl1/{fleet}/a/{device}/st                a device's presence, retained, with last will
    fl1/{fleet}/a/{device}/up/{round}/m      upload manifest; …/up/{round}/{k} a chunk of it
    fl1/{fleet}/a/{device}/rep               a report: metrics and costs outside an upload
    fl1/{fleet}/a/{device}/dn                aggregator to device: need, done, reject, counted
    fl1/{fleet}/a/{device}/q/{id}, an/{id}   a request for predictions, and its answer
    fl1/{fleet}/a/{device}/alarm             an anomaly, if device.toml names this topic
    fl1/{fleet}/alert/{kind}                 what needs a person, retained while it lasts
    fl1/{fleet}/srv                          the aggregator's presence, retained, with last will
    fl1/{fleet}/en/{token}/req, ans          enrolment: a signing request, and the certificate
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from fleet_core.base.errors import ConfigError

ROOT = "fl1"
SEGMENT = 16
NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")


def check_name(name: str, what: str) -> str:
    """``name`` itself. Raises ConfigError when it cannot be part of a topic."""
    if not NAME.fullmatch(name):
        raise ConfigError(
            f"'{name[:80]}' is not a valid name of a {what}", expected="1 to 64 letters, digits, '-' or '_'",
            hint="rename it",
        )
    return name


def current(fleet: str) -> str:
    return f"{ROOT}/{fleet}/r/cur"


def program(fleet: str) -> str:
    return f"{ROOT}/{fleet}/r/program"


def keys(fleet: str) -> str:
    return f"{ROOT}/{fleet}/r/keys"


def chunk(fleet: str, blob_id: str, k: int) -> str:
    return f"{ROOT}/{fleet}/b/{blob_id}/{k // SEGMENT}/{k}"


def segment(fleet: str, blob_id: str, number: int) -> str:
    """Filter for the chunks of one segment."""
    return f"{ROOT}/{fleet}/b/{blob_id}/{number}/+"


def blobs(fleet: str) -> str:
    """Filter for every chunk."""
    return f"{ROOT}/{fleet}/b/#"


def server(fleet: str) -> str:
    return f"{ROOT}/{fleet}/srv"


def alert(fleet: str, kind: str) -> str:
    return f"{ROOT}/{fleet}/alert/{kind}"


def presence(fleet: str, device: str) -> str:
    return f"{ROOT}/{fleet}/a/{device}/st"


def report(fleet: str, device: str) -> str:
    return f"{ROOT}/{fleet}/a/{device}/rep"


def down(fleet: str, device: str) -> str:
    return f"{ROOT}/{fleet}/a/{device}/dn"


def upload(fleet: str, device: str, round_number: int, part: int | str) -> str:
    """``part``: a chunk's number, or ``"m"`` for the manifest."""
    return f"{ROOT}/{fleet}/a/{device}/up/{round_number}/{part}"


def question(fleet: str, device: str, question_id: str) -> str:
    return f"{ROOT}/{fleet}/a/{device}/q/{question_id}"


def answer(fleet: str, device: str, question_id: str) -> str:
    return f"{ROOT}/{fleet}/a/{device}/an/{question_id}"


def alarm(fleet: str, device: str) -> str:
    return f"{ROOT}/{fleet}/a/{device}/alarm"


def enrolment_request(fleet: str, token: str) -> str:
    return f"{ROOT}/{fleet}/en/{token}/req"


def enrolment_answer(fleet: str, token: str) -> str:
    return f"{ROOT}/{fleet}/en/{token}/ans"


def from_devices(fleet: str) -> tuple[str, ...]:
    """Filters for everything that devices send to the aggregator."""
    device = f"{ROOT}/{fleet}/a/+"
    return (f"{device}/st", f"{device}/rep", f"{device}/up/+/+", enrolment_request(fleet, "+"))


def not_retained(fleet: str) -> tuple[str, ...]:
    """Filters for the topics on which devices send messages that must not be retained."""
    device = f"{ROOT}/{fleet}/a/+"
    return (f"{device}/rep", f"{device}/up/+/+", f"{device}/an/+", f"{device}/alarm")


@dataclass(frozen=True)
class Address:
    """A parsed topic. kind: the topic's own word, such as ``st`` or ``up``. Parts that a topic lacks are empty."""

    kind: str
    device: str = ""
    key: str = ""
    part: str = ""


def parse(fleet: str, topic: str) -> Address | None:
    """Parses a topic; None when it is not one of this fleet's."""
    parts = topic.split("/")
    if parts[:2] != [ROOT, fleet] or len(parts) > 7:
        return None
    match parts[2:]:
        case ["r", "cur"]:
            return Address("cur")
        case ["r", "program"]:
            return Address("program")
        case ["r", "keys"]:
            return Address("keys")
        case ["srv"]:
            return Address("srv")
        case ["en", token, ("req" | "ans") as part] if NAME.fullmatch(token):
            return Address("en", key=token, part=part)
        case ["b", blob_id, _, k]:
            return Address("b", key=blob_id, part=k)
        case ["a", device, ("st" | "rep" | "dn") as kind] if NAME.fullmatch(device):
            return Address(kind, device=device)
        case ["a", device, ("q" | "an") as kind, key] if NAME.fullmatch(device):
            return Address(kind, device=device, key=key)
        case ["a", device, "up", round_text, part] if NAME.fullmatch(device) and _number(round_text):
            return Address("up", device=device, key=round_text, part=part)
    return None


def sender(fleet: str, topic: str) -> tuple[str, str]:
    """(the device whose topic this is, the next level such as ``st`` or ``up``), even if the rest is no topic of the
    protocol. Empty texts for other topics."""
    match topic.split("/"):
        case [top, name, "a", device, kind, *_] if top == ROOT and name == fleet and NAME.fullmatch(device):
            return device, kind
    return "", ""


def number(text: str) -> int | None:
    """A chunk or round number written in decimal, or None."""
    return int(text) if _number(text) else None


def _number(text: str) -> bool:
    return text.isascii() and text.isdigit() and len(text) <= 9
