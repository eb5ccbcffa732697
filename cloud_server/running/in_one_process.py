"""Runs a fleet in one process on the loopback link, with the real aggregator and agents.

Time is virtual and advances only while aggregator and agents are idle, so that no device seems silent while another one
trains.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from pathlib import Path

from cloud_server.ledger.ledger import Ledger
from cloud_server.records.fleet_folder import Fleet
from cloud_server.results.evaluations import evaluated
from cloud_server.rounds.coordinator import Coordinator
from cloud_server.rounds.coordinator import will as server_will
from edge_agent.commands.run import service_of
from edge_agent.compute.onnx_trainer import GraphJobs
from edge_agent.compute.trainer import InlineTrainer
from edge_agent.compute.worker import Inline
from edge_agent.device.agent_costs import AgentCosts
from edge_agent.device.state import DeviceState
from edge_agent.rounds.agent import Agent, will
from fleet_core.base.errors import RoundError
from fleet_core.board.device_settings import Settings
from fleet_core.board.limits import Limits
from fleet_core.link.loopback import LoopbackBroker, LoopbackLink

IDLE_STEP_S = 0.05
GIVE_UP_S = 600.0


class Clock:
    """Virtual seconds."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def run(
    fleet: Fleet, devices: Mapping[str, tuple[Path, Settings]], *, progress: Callable[[int], None] | None = None,
    stopped: Callable[[], bool] = lambda: False, log: Callable[[str], None] = lambda line: None,
) -> None:
    """Runs ``fleet`` until its last round is closed and every device was evaluated on it; continues a stopped run.

    devices: name -> (home, settings). progress: called with the number of each closed round. Raises RoundError if the
    fleet stalls or a round does not end within 600 virtual seconds.
    """
    broker, clock = LoopbackBroker(max_queued_messages=100_000), Clock()
    with fleet.lock(), Ledger(fleet.ledger_path) as ledger:
        boot = secrets.token_hex(8)
        link = LoopbackLink(broker, "aggregator", server_will(fleet.config.fleet.name, boot), max_queued=100_000)
        server = Coordinator(fleet, link, ledger, boot=boot, clock=clock, log=log)
        agents = [_agent(broker, home, settings, clock, log) for home, settings in devices.values()]
        link.open()
        reported, idle_since = server.checkpoint.round, clock.seconds
        while not stopped() and not (server.finished and evaluated(ledger, server.served_round) >= devices.keys()):
            busy = server.step(0) | any([agent.step(0) for agent in agents])
            if busy:
                idle_since = clock.seconds
            else:
                clock.seconds += IDLE_STEP_S
            if server.stalled:
                raise RoundError(server.stalled)
            if clock.seconds - idle_since > GIVE_UP_S:
                missing = sorted(devices.keys() - evaluated(ledger, server.checkpoint.round))
                raise RoundError(f"round {server.checkpoint.round + 1} does not end", where=", ".join(missing))
            if progress is not None and server.checkpoint.round != reported:
                reported = server.checkpoint.round
                progress(reported)
        for agent in agents:
            agent.close()
        server.close()


def _agent(
    broker: LoopbackBroker, home: Path, settings: Settings, clock: Clock, log: Callable[[str], None]
) -> Agent:
    boot, onnx = secrets.token_hex(8), settings.train.engine == "onnx"
    link = LoopbackLink(broker, settings.device.name, will(settings, boot), max_queued=100_000)
    agent = Agent(
        settings,
        DeviceState(home),
        link,
        service_of(home, settings),
        AgentCosts(),
        Inline(GraphJobs().handle) if onnx else InlineTrainer(),
        limits=Limits(settings.train.enabled, engines=("onnx",)) if onnx else None,
        boot=boot,
        clock=clock,
        log=lambda line: log(f"{settings.device.name}: {line}"),
    )
    link.open()
    return agent
