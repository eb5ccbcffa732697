"""Runs one aggregator as a process: broker, link, coordinator and what a person sees of them."""

from __future__ import annotations

import contextlib
import json
import secrets
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from cloud_server.broker.mosquitto_config import Place
from cloud_server.broker.private_broker import Broker, Kept, start_broker, start_secured
from cloud_server.identity import fleet_certificates
from cloud_server.records import disk_errors
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.ledger import Ledger
from cloud_server.reports.terminal_view import LiveView, snapshot
from cloud_server.rounds.coordinator import Coordinator, will
from cloud_server.running.aggregator import Aggregator
from fleet_core.base import processes, storage
from fleet_core.base.errors import ConfigError, LinkError, StateError
from fleet_core.base.processes import typed
from fleet_core.board import allocator
from fleet_core.link.await_broker import await_broker
from fleet_core.link.interface import Will
from fleet_core.link.mqtt import MqttLink, check_plain, is_loopback, parse_url

TICK_S = 0.2
MAX_QUEUED = 20_000  # words to devices that all want one at once
VIEW_S = 1.0
DEFAULT_PORT = 1883
DEFAULT_URL = f"mqtt://127.0.0.1:{DEFAULT_PORT}"
EMBEDDED = "embedded"
STARTED = "url"


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


@contextlib.contextmanager
def private_broker(
    fleet: Fleet, host: str, port: int | None, *, plain: bool, embedded: bool, log: Callable[[str], None]
) -> Iterator[Kept]:
    """A private broker that lives as long as this context: plain MQTT on loopback, mutual TLS at any other address
    unless ``plain`` says otherwise. Raises ConfigError, LinkError, and StateError where an aggregator runs already."""
    fleet.check_idle()
    folder = fleet.folder / "broker"
    if plain or is_loopback(host):
        begin = partial(start_broker, folder, host=host, embedded=embedded or None, plain=plain)
        broker = begin(port=DEFAULT_PORT if port is None else port)
        again = partial(begin, port=parse_url(broker.url).port)
    elif embedded:
        raise ConfigError("the embedded broker takes no certificates", where=host, expected="a loopback address")
    else:
        with Ledger(fleet.ledger_path) as ledger:
            fleet_certificates.complete(fleet, ledger)
            place = _place(fleet, host, port)
            again = partial(start_secured, fleet_certificates.configure(fleet, ledger, place), place)
        broker = again()
        log(f"devices find it at {place.url}: metafleet devices enroll {typed(fleet.folder)} NAME")
    storage.write_atomic(folder / STARTED, broker.url.encode())
    tell_broker(broker, log)
    kept = Kept(broker, again)
    try:
        yield kept
    finally:
        kept.broker.stop()


def private_url(fleet: Fleet) -> str:
    """Where the private broker is on this machine, as it was started last."""
    path = fleet.folder / "broker" / STARTED
    return storage.read_bytes(path, limit=1024).decode() if path.exists() else DEFAULT_URL


def _place(fleet: Fleet, host: str, port: int | None) -> Place:
    """What the broker's folder was written for, or for this address and port where they are others."""
    place = fleet_certificates.placed(fleet.folder) or Place(fleet_certificates.default_hosts(fleet.config.link.broker))
    listen = "" if host in ("0.0.0.0", "::") else host
    if listen and listen not in place.hosts:
        place = replace(place, hosts=(listen, *place.hosts))
    if port == 0:
        raise ConfigError("devices keep the broker's port", where="--port 0", expected="one that stays the same")
    if port is not None and port != place.port:
        place = replace(place, port=port, enrolment_port=port + 1)
    return replace(place, listen=listen, at="")


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
    access_changed: Callable[[], None] = lambda: None,
    look: Callable[[Callable[[str], None]], None] = lambda say: None,
) -> None:
    """Drives the fleet until ``stopped``, or until all rounds are closed. look(say): called after every step. Raises
    LinkError when no broker answers, and StateError for a disk that cannot be written at the start and for a file that
    is damaged."""
    with fleet.lock(), Ledger(fleet.ledger_path) as ledger:
        ledger.check()
        told = max([r.round for r in ledger.rounds("closed")], default=-1)
        view = LiveView(fleet.config.fleet.rounds, after_round=told)
        with contextlib.nullcontext() if quiet else view:
            say = disk_errors.undisturbed(log if quiet else view.say)
            life = partial(_life, fleet, ledger, url, say, access_changed)
            aggregator = Aggregator(life, ledger, fleet.folder / "state", log=say)
            try:
                _await_broker(aggregator, url, stopped, connect_s)
                _drive(aggregator, None if quiet else view, stopped, look, until_done, say)
            finally:
                aggregator.close()


def _life(
    fleet: Fleet, ledger: Ledger, url: str, log: Callable[[str], None], access_changed: Callable[[], None]
) -> Coordinator:
    boot = secrets.token_hex(8)
    topic, payload = will(fleet.config.fleet.name, boot)
    link = MqttLink(
        url, client_id=f"{fleet.config.fleet.name}-aggregator", will=Will(topic, payload), max_queued=MAX_QUEUED,
        **fleet_certificates.as_aggregator(fleet, url),
    )
    return Coordinator(fleet, link, ledger, boot=boot, log=log, access_changed=access_changed)


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
    aggregator: Aggregator, view: LiveView | None, stopped: Callable[[], bool],
    look: Callable[[Callable[[str], None]], None], until_done: bool, log: Callable[[str], None],
) -> None:
    shown, told, worked = 0.0, False, True
    while not stopped():
        happened = aggregator.step(TICK_S)
        if not stopped():  # who stops this may have stopped the broker too
            look(log)
        if worked and not happened:
            allocator.trim()
        worked = happened
        coordinator = aggregator.coordinator
        if view is not None and time.monotonic() - shown > VIEW_S:
            with contextlib.suppress(StateError, OSError):  # a view that cannot be drawn now is drawn later
                view.update(snapshot(coordinator.ledger, view.told))
            shown = time.monotonic()
        if coordinator.finished and not told:
            log(f"all {coordinator.checkpoint.round} rounds are closed; the served model stays published; to train on, "
                "raise rounds in fleet.toml and start the server again")
            told = True
        if coordinator.finished and until_done and not aggregator.held_up and coordinator.settled:
            return


def start(
    folder: Path, *, broker: str | None, host: str, port: int | None, plain: bool, connect_s: float, until_done: bool,
    quiet: bool,
) -> None:
    """``metafleet server start``: a broker, if none is named, and the aggregator, until a signal ends them."""
    allocator.keep_freed()
    made = Fleet.load(folder)
    named = broker or made.config.link.broker
    drive = partial(serve, made, log=processes.say, until_done=until_done, quiet=quiet, connect_s=connect_s)
    with processes.until_signal() as stopped:
        if named is not None and named != EMBEDDED:
            check_plain(named, plain or made.config.link.plain)
            return drive(url=named, stopped=stopped, access_changed=lambda: _tell_access(made))
        with private_broker(
            made, host, port, plain=plain, embedded=named == EMBEDDED, log=processes.say
        ) as own:
            drive(url=own.broker.url, stopped=stopped, access_changed=own.reload, look=own.look)


def _tell_access(fleet: Fleet) -> None:
    if fleet_certificates.placed(fleet.folder) is not None:
        processes.say(f"hint: {fleet.folder / 'mosquitto'} says who may do what at the broker, and has changed: copy "
                      "acl and crl.pem to it, and let it read them again (mosquitto: SIGHUP)")


if __name__ == "__main__":
    processes.guarded(lambda: start(Path(sys.argv[1]), **json.loads(sys.argv[2])))
