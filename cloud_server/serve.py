"""Runs one aggregator as a process: broker, link, coordinator and what a person sees of them."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

from cloud_server import disk
from cloud_server.aggregator import Aggregator
from cloud_server.broker import Broker, start_broker
from cloud_server.coordinator import Coordinator, will
from cloud_server.fleet import Fleet
from cloud_server.ledger import Ledger
from cloud_server.live import LiveView, snapshot
from fleet_core import memory, runtime
from fleet_core.errors import LinkError, StateError
from fleet_core.link.base import Will
from fleet_core.link.mqtt import MqttLink
from fleet_core.link.reach import await_broker

TICK_S = 0.2
MAX_QUEUED = 20_000  # words to devices that all want one at once
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
    """Drives the fleet until ``stopped``, or until all rounds are closed. Raises LinkError when no broker answers, and
    StateError for a disk that cannot be written at the start and for a file that is damaged."""
    with fleet.lock(), Ledger(fleet.ledger_path) as ledger:
        ledger.check()
        view = LiveView(
            fleet.config.fleet.rounds, fleet.config.fleet.min_devices,
            after_round=max([r.round for r in ledger.rounds("closed")], default=-1),
        )
        with contextlib.nullcontext() if quiet else view:
            say = disk.undisturbed(log if quiet else view.say)
            aggregator = Aggregator(partial(_life, fleet, ledger, url, say), ledger, fleet.folder / "state", log=say)
            try:
                _await_broker(aggregator, url, stopped, connect_s)
                _drive(aggregator, None if quiet else view, stopped, until_done, say)
            finally:
                aggregator.close()


def _life(fleet: Fleet, ledger: Ledger, url: str, log: Callable[[str], None]) -> Coordinator:
    boot = secrets.token_hex(8)
    topic, payload = will(fleet.config.fleet.name, boot)
    link = MqttLink(
        url, client_id=f"{fleet.config.fleet.name}-aggregator", will=Will(topic, payload), max_queued=MAX_QUEUED
    )
    return Coordinator(fleet, link, ledger, boot=boot, log=log)


def _await_broker(aggregator: Aggregator, url: str, stopped: Callable[[], bool], connect_s: float) -> None:
    """Raises LinkError with the broker's own words, if there were any."""
    coordinator = aggregator.coordinator
    try:
        await_broker(
            coordinator.link, lambda: aggregator.step(TICK_S), url, lambda: stopped() or bool(aggregator.held_up),
            connect_s,
        )
    except LinkError as error:
        said = f": {coordinator.broker_said}" if coordinator.broker_said else ""
        raise LinkError(error.what + said, where=error.where, expected=error.expected, hint=error.hint) from error


def _drive(
    aggregator: Aggregator, view: LiveView | None, stopped: Callable[[], bool], until_done: bool,
    log: Callable[[str], None],
) -> None:
    shown, told, worked = 0.0, False, True
    while not stopped():
        happened = aggregator.step(TICK_S)
        if worked and not happened:
            memory.trim()
        worked = happened
        coordinator = aggregator.coordinator
        if view is not None and time.monotonic() - shown > VIEW_S:
            with contextlib.suppress(StateError, OSError):  # a view that cannot be drawn now is drawn later
                view.update(snapshot(coordinator.ledger, view.told))
            shown = time.monotonic()
        if coordinator.finished and not told:
            log(f"all {coordinator.checkpoint.round} rounds are closed; the judged model stays published")
            told = True
        if coordinator.finished and until_done and not aggregator.held_up and coordinator.settled:
            return


def start(
    folder: Path, *, broker: str | None, port: int, connect_s: float, until_done: bool, quiet: bool
) -> None:
    """``metafleet server start``: a broker, if none is named, and the aggregator, until a signal ends them."""
    memory.keep_freed()
    made = Fleet.load(folder)
    with (
        runtime.until_signal() as stopped,
        broker_at(broker or made.config.link.broker, folder / "broker", port=port, log=runtime.say) as url,
    ):
        serve(made, url, stopped=stopped, log=runtime.say, until_done=until_done, quiet=quiet, connect_s=connect_s)


if __name__ == "__main__":
    runtime.guarded(lambda: start(Path(sys.argv[1]), **json.loads(sys.argv[2])))
