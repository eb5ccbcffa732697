"""What mosquitto keeps of retained messages that were cleared.

    python -m benchmarks.soak.retained [--count 3000] --out benchmarks/soak/retained.json

Messages are retained and cleared again, ``count`` of them on one topic, on a topic of its own each, as the chunks of a
round's model are, and not retained at all. Resident memory of the broker before and after, in bytes a message.
"""

from __future__ import annotations

import argparse
import subprocess
import tempfile
from collections.abc import Callable
from pathlib import Path

import paho.mqtt.client as paho
from paho.mqtt.enums import CallbackAPIVersion

from benchmarks.soak import sampling
from cloud_server.broker.private_broker import find_mosquitto
from fleet_core.base import processes, storage
from fleet_core.protocol import topics
from tests.support.faults import mosquitto

FLEET, WARM, BYTES = "t", 500, 100
Topic = Callable[[int], str]
CASES: dict[str, tuple[Topic, bool]] = {
    "not retained": (lambda n: topics.chunk(FLEET, f"{n:032x}", 0), False),
    "retained and cleared, one topic": (lambda n: topics.chunk(FLEET, "0" * 32, 0), True),
    "retained and cleared, a topic each": (lambda n: topics.chunk(FLEET, f"{n:032x}", 0), True),
    "further chunks of the same blobs": (lambda n: topics.chunk(FLEET, f"{n // 15:032x}", 1 + n % 15), True),
}


def measured(count: int, folder: Path) -> dict[str, float]:
    """Case -> bytes a message that the broker holds afterwards."""
    found = {}
    for case, (topic, retained) in CASES.items():
        with mosquitto(folder / case.replace(" ", "-")) as broker:
            client = paho.Client(CallbackAPIVersion.VERSION2, protocol=paho.MQTTv5)
            client.connect("127.0.0.1", broker.port)
            client.loop_start()
            assert broker.process is not None
            pid = broker.process.pid
            send(client, topic, range(WARM), retained)
            before = sampling.memory(pid)
            send(client, topic, range(WARM, WARM + count), retained)
            found[case] = (sampling.memory(pid) - before) / count
            client.disconnect()
            client.loop_stop()
    return found


def send(client: paho.Client, topic: Topic, numbers: range, retained: bool) -> None:
    for number in numbers:
        for payload in (b"x" * BYTES, b"") if retained else (b"x" * BYTES,):
            client.publish(topic(number), payload, qos=1, retain=retained).wait_for_publish()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=3000)
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    asked = subprocess.run([find_mosquitto() or "mosquitto", "-h"], capture_output=True, text=True, check=False)
    with tempfile.TemporaryDirectory(prefix="retained-") as folder:
        found = measured(options.count, Path(folder))
    storage.write_json(options.out, {"broker": asked.stdout.splitlines()[0], "bytes_a_message": found})
    for case, value in found.items():
        processes.say(f"{case}: {value:.0f} bytes a message")


if __name__ == "__main__":
    main()
