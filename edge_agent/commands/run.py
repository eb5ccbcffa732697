"""``edge-agent run``: builds the agent from its settings and runs it until a signal."""

from __future__ import annotations

import contextlib
import secrets
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from edge_agent.commands import online_note
from edge_agent.commands.watchdog import Watchdog
from edge_agent.compute.worker import ByEngine, Jobs, Threaded, Trainer, TrainerProcess
from edge_agent.connection.alarm_senders import hearing_alarms, over_agents_link
from edge_agent.connection.broker_login import tls_files
from edge_agent.connection.certificate_renewal import Renewal
from edge_agent.device.agent_costs import AgentCosts
from edge_agent.device.process_usage import own_usage
from edge_agent.device.state import DeviceState
from edge_agent.device.this_board import (
    board_of,
    limits_of,
    profile_of,
    providers_of,
    radio_of,
    remarks,
    sensor_of,
    watts_of,
)
from edge_agent.device.version import running
from edge_agent.inference.service import Service
from edge_agent.inference.service import service_of as service_of
from edge_agent.inference.stored_models import Answering
from edge_agent.rounds.agent import Agent, will
from edge_agent.updates import update_folder
from edge_agent.updates.program_updates import ProgramUpdates
from fleet_core.base import processes
from fleet_core.base.errors import FleetError
from fleet_core.board import allocator
from fleet_core.board.device_settings import Settings, settings_of
from fleet_core.board.limits import Limits
from fleet_core.link.await_broker import await_broker
from fleet_core.link.broker_password import login_of
from fleet_core.link.mqtt import MqttLink
from fleet_core.power.choose_meter import choose_meter
from fleet_core.power.meter import Meter
from fleet_core.protocol.device_messages import Evaluation
from fleet_core.tasks.measured import Measures

if TYPE_CHECKING:
    from edge_agent.http.metrics import Figures

TICK_S = 0.5
PLAIN = "--plain"


def run(
    home: Path, settings: Settings, *, stopped: Callable[[], bool], log: Callable[[str], None], connect_s: float,
    plain: bool = False,
) -> None:
    """Runs until ``stopped``. Raises LinkError if no broker answers within ``connect_s`` seconds of the start."""
    allocator.keep_freed()
    state = DeviceState(home)
    state.lock()
    state.check_formats()
    boot, device, service = secrets.token_hex(8), settings.device, service_of(home, settings)
    link = _link(home, settings, boot, plain=plain)
    limits = limits_of(home, settings)
    accounts = AgentCosts(_meter(home, settings), radio_of(home, settings), own_usage)
    for remark in remarks(home, settings):
        log(f"{remark} ('edge-agent doctor' says more)")
    alarms = over_agents_link(settings)
    agent = Agent(
        settings, state, link, service, accounts, _trainer(settings, limits, log), limits=limits,
        board=board_of(home, settings), renewal=_renewal(home, settings, link, boot, log),
        updates=_updates(home, settings, link, log), alarms=alarms, boot=boot, providers=providers_of(home, settings),
        log=log,
    )
    _restore(service, log)
    with accounts.metering(), _http_server(home, settings, service, log), _metrics(settings, agent, log), \
            hearing_alarms(home, settings, service, log, alarms), _sources(home, settings, service, log):
        link.open()
        try:
            await_broker(link, lambda: agent.step(TICK_S), device.broker, stopped, connect_s)
            if link.connected:
                online_note.write(home, boot, log)
            log(f"{device.name} is on, fleet {device.fleet} at {device.broker}")
            _loop(agent, stopped)
        finally:
            agent.close()


def _link(home: Path, settings: Settings, boot: str, *, plain: bool) -> MqttLink:
    device = settings.device
    return MqttLink(
        device.broker, client_id=f"{device.fleet}-{device.name}", will=will(settings, boot),
        **tls_files(home, settings, plain=plain), **login_of(home, settings.broker_login),
    )


def _renewal(
    home: Path, settings: Settings, link: MqttLink, boot: str, log: Callable[[str], None]
) -> Renewal | None:
    if settings.tls.renew_after is None:
        return None
    return Renewal(home, settings, link, boot=boot, take_up=link.use_certificate, log=log,
                   trust=lambda: link.trust(**tls_files(home, settings_of(home, settings.device.broker), plain=True)))


def _updates(home: Path, settings: Settings, link: MqttLink, log: Callable[[str], None]) -> ProgramUpdates | None:
    """None if the agent was not flashed: then root has no script that installs updates."""
    if not update_folder.can_install():
        return None
    device = settings.device
    return ProgramUpdates(
        device.fleet, device.name, device.key, home, link, running(), clock=time.monotonic,
        now_ms=lambda: int(time.time() * 1000), log=log,
    )


def _loop(agent: Agent, stopped: Callable[[], bool]) -> None:
    was_busy = True
    while not stopped():
        busy = agent.step(TICK_S)
        if was_busy and not busy:
            allocator.trim()
        was_busy = busy


@contextlib.contextmanager
def _http_server(home: Path, settings: Settings, service: Service, log: Callable[[str], None]) -> Iterator[None]:
    """Serves over HTTP while the context lasts, if ``[serve] port`` is set. Raises LinkError, ConfigError."""
    if not settings.serve.port:
        yield
        return
    from edge_agent.http import serve

    server = serve.start(home, settings, service, log)
    try:
        yield
    finally:
        server.stop()


@contextlib.contextmanager
def _metrics(settings: Settings, agent: Agent, log: Callable[[str], None]) -> Iterator[None]:
    """Answers Prometheus while the context lasts, if ``[metrics] port`` is set. Raises LinkError."""
    if not settings.metrics.port:
        yield
        return
    from edge_agent.http import metrics

    server = metrics.start(settings.metrics, lambda: figures_of(agent), log, agent.home.folder)
    try:
        yield
    finally:
        server.stop()


@contextlib.contextmanager
def _sources(home: Path, settings: Settings, service: Service, log: Callable[[str], None]) -> Iterator[None]:
    """While the context lasts, stores what the device's sources give and watches its buttons."""
    if not settings.source:
        yield
        return
    from edge_agent.sources.buttons import Buttons
    from edge_agent.sources.run_sources import Sources

    sources = Sources(home, settings, service, log)
    with sources.on(), Buttons(home, settings, sources.label, log).on():
        yield


def figures_of(agent: Agent) -> Figures:
    """The agent's figures; may be called in any thread."""
    from edge_agent.http.metrics import Figures

    manifest, service, answering = agent.manifest, agent.service, agent.service.answering
    return Figures(
        fleet=agent.fleet, device=agent.name, version=running(), connected=agent.link.connected, phase=agent.phase,
        traffic=agent.accounts.traffic(agent.link.counters.snapshot()), usage=agent.accounts.usage(),
        energy=agent.accounts.energy(), flops=agent.accounts.flops, round=None if manifest is None else manifest.round,
        served_round=None if answering is None else answering.round,
        accuracy={one.stage: share for one in agent.evaluations if (share := _accuracy(one.confusion)) is not None},
        measures={one.stage: _measures(one, answering) for one in agent.evaluations if one.sums is not None},
        answered=service.answered, last_answer_s=service.last_answer_s,
    )


def _measures(one: Evaluation, answering: Answering | None) -> Measures:
    """The task's measures by output."""
    task = None if answering is None else answering.layout.task
    return {} if task is None else task.of_sums(one.samples, one.sums or {}).figures


def _accuracy(confusion: Sequence[Sequence[int]]) -> float | None:
    """Share of right answers; None without samples."""
    total = sum(map(sum, confusion))
    return sum(row[n] for n, row in enumerate(confusion)) / total if total else None


def _restore(service: Service, log: Callable[[str], None]) -> None:
    """Answers with the stored model until the aggregator sends one."""
    if not service.slots.in_order():
        return
    try:
        note = service.restore()
    except FleetError as error:
        return log(f"there are no answers until a round is served: {error}")
    if note:
        log(note)


def _trainer(settings: Settings, limits: Limits, log: Callable[[str], None]) -> Trainer | None:
    if settings.train.enabled and not limits.train:
        log(f"{limits.why}: this device serves and does not train ('edge-agent doctor' says more)")
        return None
    train = settings.train
    if not train.enabled and "torch" not in limits.engines:
        return None  # a device that only answers personalizes by the graph ``adapt``
    if "onnx" in limits.engines:
        allocator.share()  # the trainer's thread uses what this one has freed
    made: dict[str, Callable[[], Trainer]] = {
        "torch": lambda: TrainerProcess(train.threads), "onnx": lambda: Threaded(partial(_graph_jobs, train.threads)),
    }
    return ByEngine({engine: made[engine]() for engine in limits.engines}) if limits.engines else None


def _graph_jobs(threads: int) -> Jobs:
    from edge_agent.compute.onnx_trainer import GraphJobs  # an agent without it saves the memory

    return GraphJobs(threads)


def _meter(home: Path, settings: Settings) -> Meter | None:
    return choose_meter(profile_of(home, settings), watts_of(home, settings), power=sensor_of(settings))


def main(arguments: list[str]) -> None:
    """arguments: ``--home HOME CONNECT_S [--plain] [BROKER]``, from ``edge-agent run``."""
    _, home, connect_s, *rest = arguments
    plain, broker = PLAIN in rest, [argument for argument in rest if argument != PLAIN]
    with processes.until_signal() as stopped:
        settings = settings_of(Path(home), *broker)
        watchdog = Watchdog()
        watchdog.ready()
        run(Path(home), settings, stopped=watchdog.watching(stopped), log=processes.say, connect_s=float(connect_s),
            plain=plain)


if __name__ == "__main__":
    processes.guarded(lambda: main(sys.argv[1:]))
