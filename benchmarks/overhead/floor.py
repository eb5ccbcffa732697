"""The bare floor of the overhead benchmark: whole tensors over paho with the same training step, and nothing else.

No codec, no checks, no state, no records: the cost of a round's bare work. ``run.py`` starts it.

    python -m benchmarks.overhead.floor server HOST PORT DEVICES ROUNDS    prints every round's end, Unix seconds
    python -m benchmarks.overhead.floor device HOST PORT INDEX
"""

from __future__ import annotations

import queue
import sys
import time

import numpy as np
import paho.mqtt.client as mqtt
from paho.mqtt.enums import CallbackAPIVersion


def connect(host: str, port: int, *topics: str) -> tuple[mqtt.Client, queue.Queue[tuple[str, bytes]]]:
    def subscribe(*_: object) -> None:
        for topic in topics:
            client.subscribe(topic, 1)

    inbox: queue.Queue[tuple[str, bytes]] = queue.Queue()
    client = mqtt.Client(CallbackAPIVersion.VERSION2)
    client.on_message = lambda _client, _data, message: inbox.put((message.topic, bytes(message.payload)))
    client.on_connect = subscribe
    client.connect(host, port)
    client.loop_start()
    return client, inbox


def server(host: str, port: int, devices: int, rounds: int) -> None:
    client, inbox = connect(host, port, "up/+", "hello/+")
    for _ in range(devices):
        inbox.get()
    weights = np.zeros(794_762, np.float32)
    for _ in range(rounds):
        client.publish("model", weights.tobytes(), 1)
        updates = [np.frombuffer(inbox.get()[1], np.float32) for _ in range(devices)]
        weights = np.asarray(np.mean(updates, axis=0, dtype=np.float64), np.float32)
        print(time.time(), flush=True)
    client.publish("model", b"", 1).wait_for_publish(10)
    client.disconnect()


def device(host: str, port: int, index: int) -> None:
    client, inbox = connect(host, port, "model")
    from benchmarks.overhead.step import Step

    step = Step(index)
    client.publish(f"hello/{index}", b"", 1)
    while data := inbox.get()[1]:
        client.publish(f"up/{index}", step.take(np.frombuffer(data, np.float32)).tobytes(), 1)
    client.disconnect()


if __name__ == "__main__":
    role, host, *counts = sys.argv[1:]
    server(host, *map(int, counts)) if role == "server" else device(host, *map(int, counts))
