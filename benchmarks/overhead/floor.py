"""The bare floor of the overhead benchmark: whole tensors over paho with the same training step, and nothing else.

No codec, no check, no state, no record: what a round costs when only the work itself is done. ``run.py`` starts it.

    python floor.py server BROKER_PORT DEVICES ROUNDS      prints the end of every round in seconds since the epoch
    python floor.py device BROKER_PORT INDEX
"""

from __future__ import annotations

import queue
import sys
import time

import numpy as np
import paho.mqtt.client as mqtt


def connect(port: int, *topics: str) -> tuple[mqtt.Client, queue.Queue[tuple[str, bytes]]]:
    inbox: queue.Queue[tuple[str, bytes]] = queue.Queue()
    client = mqtt.Client(mqtt.CallbackAPIVersion.VERSION2)
    client.on_message = lambda _client, _data, message: inbox.put((message.topic, message.payload))
    client.on_connect = lambda *_: [client.subscribe(topic, 1) for topic in topics]
    client.connect("127.0.0.1", port)
    client.loop_start()
    return client, inbox


def server(port: int, devices: int, rounds: int) -> None:
    client, inbox = connect(port, "up/+", "hello/+")
    for _ in range(devices):
        inbox.get()
    weights = np.zeros(794_762, np.float32)
    for _ in range(rounds):
        client.publish("model", weights.tobytes(), 1)
        updates = [np.frombuffer(inbox.get()[1], np.float32) for _ in range(devices)]
        weights = np.mean(updates, axis=0, dtype=np.float64).astype(np.float32)
        print(time.time(), flush=True)
    client.publish("model", b"", 1).wait_for_publish(10)
    client.disconnect()


def device(port: int, index: int) -> None:
    client, inbox = connect(port, "model")
    import torch

    from fleet_core.layout import InputSpec
    from fleet_core.learning import losses, models

    torch.set_num_threads(1)
    layout = models.describe("lenet", InputSpec((1, 32, 32)), tuple(map(str, range(10))), {})
    network = models.build(layout)
    rng = np.random.default_rng(index)
    x = torch.tensor(rng.normal(size=(32, 1, 32, 32)).astype(np.float32))
    y = torch.tensor(rng.integers(0, 10, 32))
    parameters = [p for _, p in network.core.named_parameters()]
    client.publish(f"hello/{index}", b"", 1)
    while data := inbox.get()[1]:
        flat = torch.tensor(np.frombuffer(data, np.float32))
        with torch.no_grad():
            for parameter, part in zip(parameters, flat.split([p.numel() for p in parameters]), strict=True):
                parameter.copy_(part.view_as(parameter))
        losses.cross_entropy(network(x), y).backward()
        with torch.no_grad():
            for parameter in parameters:
                parameter -= 0.01 * parameter.grad
                parameter.grad = None
        out = torch.cat([p.detach().flatten() for p in parameters]).numpy()
        client.publish(f"up/{index}", out.tobytes(), 1)
    client.disconnect()


if __name__ == "__main__":
    numbers = [int(argument) for argument in sys.argv[2:]]
    server(*numbers) if sys.argv[1] == "server" else device(*numbers)
