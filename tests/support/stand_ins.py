"""Stand-ins for parts of a fleet: a scripted device, broker faults, a slow trainer."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np

from edge_agent.compute.trainer import InlineTrainer
from edge_agent.compute.worker import Done, Job
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.link.interface import Message
from fleet_core.link.loopback import LoopbackLink
from fleet_core.protocol import messages, topics
from fleet_core.protocol.chunks import Blob, cut
from fleet_core.protocol.device_messages import Down, Presence
from fleet_core.protocol.round_messages import Manifest, UploadManifest
from tests.support.inprocess import World


class BrokerFaults:
    """What a broker does to deliveries: each rule takes (client, message) and returns what arrives, or None to pass.
    ``seen`` holds every delivery as it was sent."""

    def __init__(self) -> None:
        self.rules: list[Callable[[str, Message], list[Message] | None]] = []
        self.seen: list[tuple[str, Message]] = []

    def __call__(self, client: str, message: Message) -> list[Message]:
        self.seen.append((client, message))
        for rule in self.rules:
            changed = rule(client, message)
            if changed is not None:
                return changed
        return [message]

    def drop(self, *parts: str) -> Callable[[], None]:
        """Drop messages whose topic has all ``parts``; returns a function that stops it."""

        def rule(client: str, message: Message) -> list[Message] | None:
            return [] if all(part in message.topic for part in parts) else None

        self.rules.append(rule)
        return lambda: self.rules.remove(rule)


@dataclass
class FakeDevice:
    """Speaks the protocol by hand, and lies."""

    w: World
    name: str
    link: LoopbackLink = field(init=False)
    inbox: list[Message] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.link = LoopbackLink(self.w.broker, f"fake-{self.name}")
        self.link.open()
        self.poll()
        self.link.subscribe(topics.current(self.w.name), topics.down(self.w.name, self.name))

    def poll(self) -> None:
        self.inbox += [event for event in self.link.poll(0) if isinstance(event, Message)]

    def announce(self, **changes: Any) -> None:
        versions = {name: method.version for name, method in METHODS.items()}
        presence = Presence(st="on", boot="b", methods=versions, codecs=tuple(CODECS))
        said = messages.encode(replace(presence, **changes))
        self.link.publish(topics.presence(self.w.name, self.name), said, retain=True)

    def manifest(self) -> Manifest:
        self.poll()
        signed = [m.payload for m in self.inbox if m.topic == topics.current(self.w.name)][-1]
        return messages.decode(Manifest, signed.partition(b"\n")[2])

    def downs(self) -> list[Down]:
        self.poll()
        said = [m.payload for m in self.inbox if m.topic.endswith("/dn") and m.payload[:1] == b"{"]
        return [messages.decode(Down, payload) for payload in said]

    def update(self, data: bytes, **changes: Any) -> UploadManifest:
        now = self.manifest()
        made = UploadManifest(Blob.of(data, 1024), "fp32", now.model.model, now.method.name, now.layout,
                              dual_epoch=now.dual_epoch, samples=5, metrics={"loss": 1.0})
        return replace(made, **changes)

    def offer(self, upload: UploadManifest, number: int) -> None:
        self.link.publish(topics.upload(self.w.name, self.name, number, "m"), messages.encode(upload))

    def send(self, upload: UploadManifest, number: int, data: bytes) -> None:
        for k, part in enumerate(cut(data, upload.blob)):
            self.link.publish(topics.upload(self.w.name, self.name, number, k), part)


def constant_update(w: World, value: float = 0.01) -> trees.Params:
    layout = w.server.layout
    return trees.apply(lambda a: np.full_like(a, value), trees.only(layout.seeded(0), ("body",)))


class SlowTrainer(InlineTrainer):
    """Works for some steps of the loop, as the child process does."""

    left = 0

    def submit(self, job: Job) -> None:
        assert not self.busy
        super().submit(job)
        self.left = 5

    def poll(self) -> Done | None:
        self.left -= 1
        return None if self.left > 0 else super().poll()
