"""An aggregator and agents in this process over real MQTT connections, stepped by the test."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal

from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Evaluation
from cloud_server.records.fleet_folder import Fleet
from cloud_server.rounds.coordinator import Coordinator
from cloud_server.rounds.coordinator import will as server_will
from edge_agent.commands.run import service_of
from edge_agent.compute.trainer import InlineTrainer
from edge_agent.device.agent_costs import AgentCosts
from edge_agent.device.state import DeviceState
from edge_agent.rounds.agent import Agent
from edge_agent.rounds.agent import will as agent_will
from fleet_core.board.device_settings import settings_of
from fleet_core.link.interface import Will
from fleet_core.link.mqtt import MqttLink
from tests.support import waiting
from tests.support.fleet_processes import FLEET


class SteppedFleet:
    """Steps the aggregator and the agents of the fleet in ``folder`` in turn, each with its own link.

    ``lines`` is their log. A ``url`` may be a proxy's. protocol: MQTT 5 or 3 (3.1.1), for all.
    """

    def __init__(self, folder: Path, url: str, *, protocol: Literal[3, 5] | None = None, keepalive_s: int = 60):
        self.folder, self.url, self._protocol, self._keepalive_s = folder, url, protocol, keepalive_s
        self.fleet = Fleet.load(folder / "fleet")
        self.ledger = Ledger(self.fleet.ledger_path)
        self.lines: list[str] = []
        self.agents: dict[str, Agent] = {}
        self.server: Coordinator | None = None
        self.server_sleeps = False
        self.links: list[MqttLink] = []

    def start_server(self, url: str = "") -> None:
        self.server = Coordinator(self.fleet, self._link("aggregator", server_will(FLEET, "server"), url), self.ledger,
                                  boot="server", log=self.lines.append)
        self.server.link.open()

    def start_agent(self, name: str, url: str = "") -> Agent:
        home, settings = DeviceState(self.folder / name), settings_of(self.folder / name)
        agent = Agent(
            settings,
            home,
            self._link(name, agent_will(settings, f"boot-{name}"), url),
            service_of(home.folder, settings),
            AgentCosts(),
            InlineTrainer(),
            boot=f"boot-{name}",
            log=lambda line: self.lines.append(f"{name}: {line}"),
        )
        self.agents[name] = agent
        agent.link.open()
        return agent

    def start(self) -> None:
        self.start_server()
        for home in sorted(self.folder.glob("d*")):
            self.start_agent(home.name)

    def _link(self, name: str, will: Will, url: str) -> MqttLink:
        self.links.append(MqttLink(url or self.url, client_id=f"{FLEET}-{name}", will=will,
                                   keepalive_s=self._keepalive_s, protocol=self._protocol))
        return self.links[-1]

    def step(self) -> None:
        actors: list[Coordinator | Agent] = list(self.agents.values())
        if self.server is not None and not self.server_sleeps:
            actors.insert(0, self.server)
        if not any([actor.step(0) for actor in actors]):
            actors[0].step(0.005)

    def until(self, condition: Callable[[], object], what: str = "") -> None:
        """Step everybody until ``condition`` holds."""
        waiting.until(condition, self.step, lambda: f"{what}\n{self.report()}")

    def closed(self) -> int:
        return 0 if self.server is None else self.server.checkpoint.round

    def logged(self, text: str) -> bool:
        return any(text in line for line in self.lines)

    def settled(self) -> bool:
        rounds = self.fleet.config.fleet.rounds
        if self.closed() < rounds or list(self.folder.glob("d*/methods/*/pending.safetensors")):
            return False
        return {row.device for row in self.ledger.rows(Evaluation, round=rounds)} >= set(self.agents)

    def finish(self) -> None:
        self.until(self.settled, "the end")

    def report(self) -> str:
        phases = {name: (agent.phase, agent.link.connected) for name, agent in self.agents.items()}
        return "\n".join([f"closed {self.closed()}, {phases}", *self.lines[-40:]])

    def close(self) -> None:
        for link in self.links:
            link.abort()
        self.ledger.close()


@contextmanager
def stepped(folder: Path, url: str, **options: Any) -> Iterator[SteppedFleet]:
    made = SteppedFleet(folder, url, **options)
    try:
        yield made
    finally:
        made.close()
