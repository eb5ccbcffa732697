"""A whole fleet in one process on the loopback link, for tests: real aggregator, real agents, trainer inline."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.coordinator import Coordinator
from cloud_server.coordinator import will as server_will
from cloud_server.fleet import Fleet
from cloud_server.found import found
from cloud_server.ledger import Ledger
from edge_agent.accounts import Accounts
from edge_agent.agent import Agent, will
from edge_agent.home import Home
from edge_agent.service import Service
from edge_agent.settings import Data, Identity, Settings, Training
from edge_agent.trainer import InlineTrainer
from export.first import first
from fleet_core.data.samples import Samples, save
from fleet_core.link.base import Will
from fleet_core.link.loopback import LoopbackBroker, LoopbackLink

CLASSES = ("a", "b", "c")


def toy(seed: int, count: int = 90, shift: float = 0.0) -> Samples:
    """Three separable classes in eight dimensions; ``shift`` moves a device's own distribution."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, count)
    centres = np.eye(3, 8) * 3 + shift
    x = (centres[y] + rng.normal(size=(count, 8))).astype(np.float32)
    return Samples(x, y.astype(np.int64), None, np.arange(count, dtype=np.float64), CLASSES)


@dataclass
class Clock:
    """Time that only moves when a test says so."""

    seconds: float = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return 1_700_000_000 + self.seconds

    def ms(self) -> int:
        return int(self.wall() * 1000)


@dataclass
class World:
    """A founded fleet with its broker; agents and aggregators come and go."""

    folder: Path
    fleet: Fleet
    broker: LoopbackBroker
    clock: Clock = field(default_factory=Clock)
    agents: dict[str, Agent] = field(default_factory=dict)
    server: Coordinator | None = None
    lines: list[str] = field(default_factory=list)
    lives: int = 0

    def start_server(self) -> Coordinator:
        self.lives += 1
        topic, payload = server_will(self.fleet.config.fleet.name, f"s{self.lives}")
        link = LoopbackLink(self.broker, f"server{self.lives}", Will(topic, payload))
        self.server = Coordinator(
            Fleet.load(self.fleet.folder), link, Ledger(self.fleet.ledger_path), boot=f"s{self.lives}",
            clock=self.clock, now=self.clock.wall, log=self.lines.append,
        )
        link.open()
        return self.server

    def start_agent(self, name: str, samples: Samples | None = None, **data: Any) -> Agent:
        self.lives += 1
        home = Home(self.folder / "devices" / name)
        if samples is not None:
            home.folder.mkdir(parents=True, exist_ok=True)
            save(home.folder / "samples.npz", samples)
        train = data.pop("train", True)
        settings = Settings(
            Identity(name, self.fleet.config.fleet.name, self.fleet.public_key()), Data(**data), Training(train)
        )
        boot = f"{name}{self.lives}"
        topic, payload = will(settings, boot)
        link = LoopbackLink(self.broker, boot, Will(topic, payload))
        split = {"samples": "samples.npz", "train_fraction": settings.data.train_fraction,
                 "support_seconds": settings.data.support_seconds}
        agent = Agent(
            settings, home, link, Service(home, split), Accounts(), InlineTrainer() if train else None, boot=boot,
            clock=self.clock, now_ms=self.clock.ms, log=lambda line: self.lines.append(f"{name}: {line}"),
        )
        self.agents[name] = agent
        link.open()
        return agent

    def kill_agent(self, name: str) -> None:
        agent = self.agents.pop(name)
        self.broker.kill(agent.boot)

    def kill_server(self) -> None:
        assert self.server is not None
        self.broker.kill(f"server{self.lives}" if self.server.boot == f"s{self.lives}" else f"server{self.server.boot[1:]}")
        self.server.ledger.close()
        self.server = None

    def pump(self, until: Callable[[], bool], *, steps: int = 3000, tick_s: float = 0.02) -> bool:
        """Steps everybody until ``until`` holds; False when ``steps`` did not suffice."""
        for _ in range(steps):
            if until():
                return True
            if self.server is not None:
                self.server.step(0)
            for agent in list(self.agents.values()):
                agent.step(0)
            self.clock.seconds += tick_s
        return until()

    def closed(self) -> int:
        return 0 if self.server is None else self.server.checkpoint.round


def config_text(method: str = "pfldyn-proto", *, rounds: int = 3, devices: int = 3, hyper: str = "", link: str = "",
                fleet: str = "") -> str:
    return f"""\
[fleet]
name = "t"
method = "{method}"
rounds = {rounds}
min_devices = {devices}
serve_every = {rounds}
{fleet}
[model]
name = "mlp"
classes = ["a", "b", "c"]
[model.input]
shape = [8]
[model.options]
hidden = [6]
[link]
{link}
[hyper]
local_steps = 3
{hyper}
"""


def world(folder: Path, text: str, broker: LoopbackBroker | None = None) -> World:
    def make(settings: Any, head: bool) -> tuple[bytes, bytes]:
        model = settings.model
        return first(model.name, model.input, model.classes, model.options, head=head, seed=settings.fleet.seed)

    fleet = found(folder / "fleet", text, make)
    return World(folder, fleet, broker or LoopbackBroker())
