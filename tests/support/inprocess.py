"""A whole fleet in one process on the loopback link: real aggregator, real agents, inline trainers."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.identity import fleet_certificates
from cloud_server.identity.create_fleet import create_fleet
from cloud_server.ledger.ledger import Ledger
from cloud_server.records.fleet_folder import Fleet
from cloud_server.rounds.coordinator import Coordinator
from cloud_server.rounds.coordinator import will as server_will
from edge_agent.commands.run import service_of
from edge_agent.compute import adapter
from edge_agent.compute.onnx_trainer import GraphJobs
from edge_agent.compute.trainer import InlineTrainer
from edge_agent.compute.worker import Done, Inline, Job, Trainer
from edge_agent.device.agent_costs import AgentCosts
from edge_agent.device.state import DeviceState
from edge_agent.rounds.agent import Agent, will
from export.first_model import first
from fleet_core.base import trees
from fleet_core.base.errors import RevokedError
from fleet_core.base.trees import Params
from fleet_core.board.device_settings import Data, Demands, Identity, Settings, Tls, Training
from fleet_core.board.limits import Limits
from fleet_core.data.samples import Samples, save
from fleet_core.link.loopback import LoopbackBroker, LoopbackLink
from fleet_core.model.layout import Backbone, InputSpec, Layout
from fleet_core.model.train_graph import pack
from fleet_core.protocol import certificates
from fleet_core.tasks.regression import Regression

CLASSES = ("a", "b", "c")


def toy(seed: int, count: int = 90, shift: float = 0.0) -> Samples:
    """Three separable classes in eight dimensions; ``shift`` moves the distribution of a device."""
    rng = np.random.default_rng(seed)
    y = rng.integers(0, 3, count)
    centres = np.eye(3, 8) * 3 + shift
    x = (centres[y] + rng.normal(size=(count, 8))).astype(np.float32)
    return Samples(x, y.astype(np.int64), None, np.arange(count, dtype=np.float64), CLASSES)


@dataclass
class Clock:
    """A clock that only a test moves."""

    seconds: float = 1000.0

    def __call__(self) -> float:
        return self.seconds

    def wall(self) -> float:
        return 1_700_000_000 + self.seconds

    def ms(self) -> int:
        return int(self.wall() * 1000)


class ReplaceableTrainer:
    """A device's trainer; a test may replace ``inner`` at any time."""

    def __init__(self, engine: str = "torch") -> None:
        self.inner: Trainer = InlineTrainer() if engine == "torch" else Inline(GraphJobs().handle)

    @property
    def busy(self) -> bool:
        return self.inner.busy

    def submit(self, job: Job) -> None:
        self.inner.submit(job)

    def poll(self) -> Done | None:
        return self.inner.poll()

    def descriptors(self) -> tuple[int, ...]:
        return self.inner.descriptors()

    def stop(self) -> None:
        self.inner.stop()


def without_fsync(patch: pytest.MonkeyPatch) -> None:
    """Turn fsync off, for tests without power cuts."""
    patch.setattr(os, "fsync", lambda descriptor: None)
    opened_ledger = Ledger._open

    def without_sync(ledger: Ledger) -> None:
        opened_ledger(ledger)
        ledger._db.execute("PRAGMA synchronous = OFF")

    patch.setattr(Ledger, "_open", without_sync)


class Killed(BaseException):
    """The process dies here."""


@dataclass
class World:
    """A fleet and its broker. A test starts and kills agents and aggregators. server: a Coordinator, or None."""

    folder: Path
    fleet: Fleet
    broker: LoopbackBroker
    clock: Clock = field(default_factory=Clock)
    agents: dict[str, Any] = field(default_factory=dict)
    trainers: dict[str, ReplaceableTrainer] = field(default_factory=dict)
    server: Any = None
    lines: list[str] = field(default_factory=list)
    lives: int = 0
    acting: str = ""

    @property
    def name(self) -> str:
        return self.fleet.config.fleet.name

    def start_server(self) -> Coordinator:
        """Start or restart the aggregator on the same folder."""
        self.lives += 1
        boot = f"server{self.lives}"
        link = LoopbackLink(self.broker, boot, server_will(self.name, boot))
        self.server = Coordinator(
            Fleet.load(self.fleet.folder), link, Ledger(self.fleet.ledger_path), boot=boot,
            clock=self.clock, now=self.clock.wall, log=self.lines.append,
        )
        link.open()
        return self.server

    def start_agent(self, name: str, samples: Samples | None = None, **data: Any) -> Agent:
        """train=False: the device only personalizes and answers. trainer=False: it has no torch and no engine.
        engine="onnx": it trains without torch. limits: of its board, called ``board``. updates(link,
        home): what fetches programs. demands: its ``[privacy]``. Other keywords belong to ``[data]``."""
        self.lives += 1
        home = DeviceState(self.folder / "devices" / name)
        if samples is not None:
            home.folder.mkdir(parents=True, exist_ok=True)
            save(home.folder / "samples.npz", samples)
        train, torch_is_there, limits = data.pop("train", True), data.pop("trainer", True), data.pop("limits", None)
        engine, board = data.pop("engine", "torch"), data.pop("board", "")
        updates, demands = data.pop("updates", None), data.pop("demands", Demands())
        tls = certified(self.fleet, home.folder, name) if self.fleet.config.privacy.secure_aggregation else Tls()
        settings = Settings(Identity(name, self.name, self.fleet.public_key()), Data(**data), Training(train), tls=tls,
                            privacy=demands)
        boot = f"{name}{self.lives}"
        link = LoopbackLink(self.broker, boot, will(settings, boot))
        trainer = ReplaceableTrainer(engine) if torch_is_there else None
        limits = Limits(True, engines=(engine,)) if limits is None and engine != "torch" else limits
        agent = Agent(
            settings, home, link, service_of(home.folder, settings), AgentCosts(), trainer, boot=boot,
            limits=limits, board=board, updates=updates and updates(link, home.folder),
            adapter=Inline(adapter.handle), clock=self.clock, now_ms=self.clock.ms,
            log=lambda line: self.lines.append(f"{name}: {line}"),
        )
        self.agents[name] = agent
        if trainer is not None:
            self.trainers[name] = trainer
        link.open()
        return agent

    def kill_agent(self, name: str) -> None:
        self._kill(self.agents.pop(name).link)

    def kill_server(self) -> None:
        server, self.server = self.server, None
        self._kill(server.link)
        server.ledger.close()

    def _kill(self, link: Any) -> None:
        if link.connected:
            self.broker.kill(link.client_id)
        link.opened = False

    def lose_disk(self, name: str) -> None:
        """Delete the device's training state; its samples stay."""
        shutil.rmtree(self.folder / "devices" / name / "methods", ignore_errors=True)

    def step(self, tick_s: float = 0.02) -> None:
        """Step everybody once. ``acting`` names the current one: a device, or ``server``."""
        self.acting = "server"
        if self.server is not None:
            self.server.step(0)
        for name, agent in list(self.agents.items()):
            self.acting = name
            try:
                agent.step(0)
            except RevokedError as error:  # a process would exit with this reason
                self.lines.append(f"{name}: {error}")
                self.agents.pop(name).close()
        self.acting = ""
        self.clock.seconds += tick_s

    def pump(self, until: Callable[[], bool], *, steps: int = 2000, tick_s: float = 0.02) -> bool:
        """Step everybody until ``until`` holds; return False after ``steps`` steps."""
        for _ in range(steps):
            if until():
                return True
            self.step(tick_s)
        return until()

    def close(self) -> None:
        for agent in self.agents.values():
            agent.close()
        if self.server is not None:
            self.server.close()
            self.server.ledger.close()

    def closed(self) -> int:
        """The number of the last closed round."""
        return 0 if self.server is None else self.server.checkpoint.round

    def logged(self, text: str) -> bool:
        """Whether any log line contains ``text``."""
        return any(text in line for line in self.lines)


def certified(fleet: Fleet, home: Path, name: str) -> Tls:
    """Gives a device a certificate of its fleet, unless it has one."""
    tls = Tls(certificate="device.pem", key="device.key")
    if not (home / "device.key").exists():
        key = certificates.new_key()
        certificates.save_key(home / "device.key", key)
        made = fleet_certificates.authority(fleet.folder).client(name, key.public_key())
        (home / "device.pem").write_bytes(certificates.certificate_pem(made))
    return tls


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


@functools.lru_cache
def _first(
    model: str, spec: InputSpec, classes: tuple[str, ...], options: str, head: bool, backbone: Backbone | None = None,
    task: Regression | None = None,
) -> tuple[bytes, bytes]:
    return first(model, spec, classes, json.loads(options), head=head, seed=0, backbone=backbone, task=task)


def _train_graph(fleet: Fleet, layout: Layout, first: Params) -> bytes:
    from tests.support.train_graphs import train_graph  # takes a second to import, and most worlds have none

    made = train_graph(fleet.method.name, layout, narrow=True)
    return pack(replace(made, first=trees.only(first, fleet.method.personal)))


def world(folder: Path, text: str, broker: LoopbackBroker | None = None, *, train_graph: bool = False) -> World:
    """A fleet from ``text`` (fleet.toml); graphs and first weights are made once per test run. train_graph: with the
    graph for devices that train without torch."""

    def make(settings: Any, head: bool) -> tuple[bytes, bytes]:
        model = settings.model
        return _first(model.name, model.input, model.classes, json.dumps(dict(model.options)), head, model.backbone,
                      model.task)

    fleet = create_fleet(folder / "fleet", text, make, _train_graph if train_graph else None)
    return World(folder, fleet, broker or LoopbackBroker())
