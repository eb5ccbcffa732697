"""What goes beside the payload: MQTT bytes of one device in one round, by message, of a fleet in one process.

    python -m benchmarks.cost.beside --out FOLDER [--rounds 6] [--codec up:topk-1,down:topk-10]

The demo's eight patients, rounds 3 to the last but one. Bytes are topic, payload and ``HEADER`` of each publish,
without the payload of chunks and whole updates. Acknowledgements, TLS, TCP and IP are not in it (``live`` counts them).
FOLDER must not hold a fleet.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest.mock import patch

from benchmarks.cost import served
from cloud_server.running import demo_setup
from fleet_core.link.loopback import LoopbackBroker
from fleet_core.protocol import topics
from fleet_core.protocol.round_messages import WHOLE, whole_update

HEADER = 9
"""Bytes before the topic and payload of a short QoS 1 PUBLISH in MQTT 5: type, lengths, identifier, no properties."""
MESSAGES = {"cur": "manifest", "rep": "reports", "st": "presence and heartbeats", "dn": "grants and answers"}
FIRST_ROUND = 3
DEVICES = 8


class Counts:
    """Bytes by round and message."""

    def __init__(self) -> None:
        self.round = 0
        self.found: dict[int, Counter[str]] = {}

    def add(self, topic: str, payload: bytes) -> None:
        address = topics.parse(topic.split("/")[1], topic)
        if address is None or address.kind in ("srv", "alert"):
            return
        self.round += address.kind == "cur"
        beside = HEADER + len(topic)
        name = MESSAGES.get(address.kind, "chunks' topics")
        if address.kind == "up" and address.part in ("m", WHOLE):
            name = "offer"
            beside -= len(whole_update(payload)[1]) if address.part == WHOLE else 0
        if name != "chunks' topics":
            beside += len(payload)
        everyone = DEVICES if address.kind in ("cur", "b") else 1  # one publish, which every device receives
        self.found.setdefault(self.round, Counter())[name] += beside * everyone


def counted(folder: Path, options: demo_setup.Options) -> dict[str, float]:
    """Message -> bytes of one device in one round."""
    counts = Counts()
    publish: Callable[..., None] = LoopbackBroker.publish

    def counting(self: Any, topic: str, payload: bytes, *, retain: bool = False) -> None:
        counts.add(topic, payload)
        publish(self, topic, payload, retain=retain)

    with patch.object(LoopbackBroker, "publish", counting):
        served.bytes_by_kind(folder, options)
    rounds = range(FIRST_ROUND, options.rounds)
    total = sum((counts.found[number] for number in rounds), Counter[str]())
    return {name: round(size / DEVICES / len(rounds)) for name, size in total.most_common()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=Path, required=True, help="folder of the fleet and its devices")
    parser.add_argument("--rounds", type=int, default=6)
    parser.add_argument("--codec", default="up:topk-1,down:topk-10")
    given = parser.parse_args()
    given.out.mkdir(parents=True, exist_ok=True)
    options = demo_setup.Options(rounds=given.rounds, codec=given.codec, method="pfldyn-proto", new_devices=0,
                                 devices=DEVICES)
    print(json.dumps(counted(given.out, options)))


if __name__ == "__main__":
    main()
