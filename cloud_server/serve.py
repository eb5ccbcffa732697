"""Runs one aggregator as a process: broker, link, coordinator and what a person sees of them."""

from __future__ import annotations

import contextlib
import secrets
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from cloud_server.broker import Broker, start_broker
from cloud_server.coordinator import Coordinator, will
from cloud_server.fleet import Fleet
from cloud_server.ledger import Ledger
from cloud_server.live import LiveView, snapshot
from fleet_core.link.base import Will
from fleet_core.link.mqtt import MqttLink
from fleet_core.link.reach import await_broker

TICK_S = 0.2
VIEW_S = 1.0
DEFAULT_PORT = 1883
DEFAULT_URL = f"mqtt://127.0.0.1:{DEFAULT_PORT}"
EMBEDDED = "embedded"


@contextlib.contextmanager
def broker_at(url: str | None, folder: Path, *, port: int, log: Callable[[str], None]) -> Iterator[str]:
    """The URL of a broker: the one named, or a private one that lives as long as this context.

    url: mqtt(s)://host[:port]; None for a private one; ``embedded`` for a private one that is amqtt in any case.
    """
    if url not in (None, EMBEDDED):
        yield url
        return
    broker = start_broker(folder, port=port, embedded=url == EMBEDDED)
    tell_broker(broker, log)
    try:
        yield broker.url
    finally:
        broker.stop()


def check_broker(url: str, *, timeout_s: float = 5.0) -> None:
    """Raises LinkError when no broker answers at ``url``."""
    link = MqttLink(url, client_id=f"metafleet-check-{secrets.token_hex(4)}")
    link.open()
    try:
        await_broker(link, lambda: link.poll(TICK_S), url, lambda: False, timeout_s)
    finally:
        link.close()


def tell_broker(broker: Broker, log: Callable[[str], None]) -> None:
    """Which broker runs; and how to get mosquitto where it is not there."""
    log(f"broker: {broker.kind} at {broker.url}")
    if broker.hint:
        log(f"hint: this is the embedded broker, for a first try; mosquitto is the one to run: {broker.hint}")


def serve(
    fleet: Fleet,
    url: str,
    *,
    stopped: Callable[[], bool],
    log: Callable[[str], None],
    until_done: bool = False,
    quiet: bool = False,
    connect_s: float,
) -> None:
    """Drives the fleet until ``stopped``, or until all rounds are closed. Raises LinkError when no broker answers."""
    with fleet.lock(), Ledger(fleet.ledger_path) as ledger:
        boot = secrets.token_hex(8)
        topic, payload = will(fleet.config.fleet.name, boot)
        link = MqttLink(url, client_id=f"{fleet.config.fleet.name}-aggregator", will=Will(topic, payload))
        view = LiveView(
            fleet.config.fleet.rounds, fleet.config.fleet.min_devices,
            after_round=max([r.round for r in ledger.rounds("closed")], default=-1),
        )
        with contextlib.nullcontext() if quiet else view:
            say = log if quiet else view.say
            coordinator = Coordinator(fleet, link, ledger, boot=boot, log=say)
            link.open()
            try:
                await_broker(link, lambda: coordinator.step(TICK_S), url, stopped, connect_s)
                _drive(coordinator, None if quiet else view, stopped, until_done, say)
            finally:
                coordinator.close()


def _drive(
    coordinator: Coordinator, view: LiveView | None, stopped: Callable[[], bool], until_done: bool,
    log: Callable[[str], None],
) -> None:
    shown, told = 0.0, False
    while not stopped():
        coordinator.step(TICK_S)
        if view is not None and time.monotonic() - shown > VIEW_S:
            view.update(snapshot(coordinator.ledger))
            shown = time.monotonic()
        if coordinator.finished and not told:
            log(f"all {coordinator.checkpoint.round} rounds are closed; the judged model stays published")
            told = True
        if coordinator.finished and until_done and coordinator.settled:
            return
