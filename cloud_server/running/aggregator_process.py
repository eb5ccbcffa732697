"""Runs one aggregator as a process: broker, link, coordinator and live view."""

from __future__ import annotations

import contextlib
import gc
import json
import queue
import secrets
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

from cloud_server.broker.mosquitto_config import BrokerSetup
from cloud_server.broker.private_broker import Broker, BrokerSupervisor, start_broker, start_secured
from cloud_server.identity import audit_log, fleet_certificates
from cloud_server.integrations import tracking
from cloud_server.ledger import disk_errors
from cloud_server.ledger.ledger import Ledger
from cloud_server.records import key_files
from cloud_server.records.fleet_folder import Fleet
from cloud_server.reports.terminal_view import REST, LiveView, snapshot
from cloud_server.rounds.coordinator import Coordinator, will
from cloud_server.running.aggregator import Aggregator
from cloud_server.running.child_processes import console_beside, tracking_beside
from fleet_core.base import processes, storage
from fleet_core.base.errors import ConfigError, LinkError, StateError
from fleet_core.base.processes import typed
from fleet_core.board import allocator
from fleet_core.link.await_broker import await_broker
from fleet_core.link.host_names import is_loopback
from fleet_core.link.mqtt import MqttLink, check_plain, parse_url
from fleet_core.protocol import topics

TICK_S = 0.2
MAX_QUEUED = 20_000  # all devices of a large fleet may need a message at the same time
VIEW_S = 1.0
END_S = 5.0
COLLECT_ROUNDS = 20
"""After so many rounds garbage is collected, which also empties Python's free lists, and free memory is returned to the
system, because a fleet may never pause."""
DEFAULT_PORT = 1883
DEFAULT_URL = f"mqtt://127.0.0.1:{DEFAULT_PORT}"
EMBEDDED = "embedded"
URL_FILE = "url"

Log = Callable[[str], None]


@contextlib.contextmanager
def broker_at(url: str | None, folder: Path, *, port: int, log: Callable[[str], None]) -> Iterator[str]:
    """The URL of a broker: the given one, or that of a private broker that runs as long as this context.

    url: mqtt(s)://host[:port]; None for a private broker; ``embedded`` for a private amqtt.
    """
    if url not in (None, EMBEDDED):
        yield url
        return
    broker = start_broker(folder, port=port, embedded=url == EMBEDDED)
    log_broker(broker, log)
    try:
        yield broker.url
    finally:
        broker.stop()


@contextlib.contextmanager
def private_broker(
    fleet: Fleet, host: str, port: int | None, *, plain: bool, embedded: bool, log: Callable[[str], None]
) -> Iterator[BrokerSupervisor]:
    """A private broker that runs as long as this context: plain MQTT on loopback or with ``plain``, else mutual TLS.
    Raises ConfigError, LinkError, and StateError if an aggregator already runs."""
    fleet.check_idle()
    folder = fleet.folder / "broker"
    if plain or is_loopback(host):
        begin = partial(start_broker, folder, host=host, embedded=embedded or None, plain=plain)
        broker = begin(port=DEFAULT_PORT if port is None else port)
        restart = partial(begin, port=parse_url(broker.url).port)
    elif embedded:
        raise ConfigError("the embedded broker takes no certificates", where=host, expected="a loopback address")
    else:
        with Ledger(fleet.ledger_path) as ledger:
            fleet_certificates.create_missing(fleet, ledger)
            setup = _secured_setup(fleet, host, port)
            restart = partial(start_secured, fleet_certificates.configure(fleet, ledger, setup), setup)
        broker = restart()
        log(f"devices find it at {setup.url}: metafleet devices enroll {typed(fleet.folder)} NAME")
    storage.write_atomic(folder / URL_FILE, broker.url.encode())
    log_broker(broker, log)
    supervisor = BrokerSupervisor(broker, restart)
    try:
        yield supervisor
    finally:
        supervisor.broker.stop()


def private_url(fleet: Fleet) -> str:
    """The URL at which the private broker was last started on this machine."""
    path = fleet.folder / "broker" / URL_FILE
    return storage.read_bytes(path, limit=1024).decode() if path.exists() else DEFAULT_URL


def _secured_setup(fleet: Fleet, host: str, port: int | None) -> BrokerSetup:
    """The saved setup of the broker, changed to this address and port if they differ. Raises ConfigError."""
    setup = fleet_certificates.saved_setup(fleet.folder)
    if setup is None:
        setup = BrokerSetup(fleet_certificates.default_hosts(fleet.config.link.broker))
    listen = "" if host in ("0.0.0.0", "::") else host
    if listen and listen not in setup.hosts:
        setup = replace(setup, hosts=(listen, *setup.hosts))
    if port == 0:
        raise ConfigError("devices store the broker's port, so it must stay the same", where="--port 0",
                          expected="1 to 65535")
    if port is not None and port != setup.port:
        setup = replace(setup, port=port, enrolment_port=port + 1)
    return replace(setup, listen=listen, at="")


def check_broker(url: str, *, timeout_s: float = 5.0) -> None:
    """Raises LinkError if no broker answers at ``url``."""
    link = MqttLink(url, client_id=f"metafleet-check-{secrets.token_hex(4)}")
    link.open()
    try:
        await_broker(link, lambda: link.poll(TICK_S), url, lambda: False, timeout_s)
    finally:
        link.close()


def log_broker(broker: Broker, log: Callable[[str], None]) -> None:
    """Logs which broker runs, and how to install mosquitto if the embedded broker runs instead."""
    log(f"broker: {broker.kind} at {broker.url}")
    if broker.hint:
        log(f"hint: the embedded broker is for a first try; for a real fleet use mosquitto: {broker.hint}")


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
    broker_anew: Callable[[], None] = lambda: None,
    on_step: Callable[[Log], None] = lambda log: None,
) -> None:
    """Runs the aggregator until ``stopped``, or with ``until_done`` until all rounds are closed.

    connect_s: how long to wait for the broker at the start. access_changed(): called when the broker must read its
    access list again. broker_anew(): called when it must trust other authorities, for which a reload is not enough.
    on_step(log): called after every step. Raises LinkError if no broker answers, and StateError if the disk cannot be
    written at the start or a file is damaged.
    """
    with fleet.lock(), Ledger(fleet.ledger_path) as ledger:
        ledger.check()
        with contextlib.suppress(StateError):  # the disk is too full for a copy, or another process reads
            if ledger.shrink():
                log("the ledger freed the disk space of folded rounds")
        last_closed = max([r.round for r in ledger.rounds("closed")], default=-1)
        view = LiveView(fleet.config.fleet.rounds, after_round=last_closed)
        with contextlib.nullcontext() if quiet else view:
            say = disk_errors.undisturbed(log if quiet else view.say)
            new_coordinator = partial(_coordinator, fleet, ledger, url, say, access_changed, broker_anew)
            aggregator = Aggregator(new_coordinator, ledger, fleet.folder / "state", log=say)
            try:
                _await_broker(aggregator, url, stopped, connect_s)
                aggregator.keep_room()
                with _alerting(fleet, aggregator, say) as tell, _audited(fleet, url):
                    _step_until_stopped(aggregator, None if quiet else view, stopped, on_step, until_done, say, tell)
            finally:
                aggregator.close()


@contextlib.contextmanager
def _audited(fleet: Fleet, url: str) -> Iterator[None]:
    """Records that the aggregator begins and ends."""
    audit_log.done(fleet.folder, "start server", text=url)
    try:
        yield
    finally:
        audit_log.done(fleet.folder, "stop server")


def _coordinator(
    fleet: Fleet, ledger: Ledger, url: str, log: Callable[[str], None], access_changed: Callable[[], None],
    broker_anew: Callable[[], None],
) -> Coordinator:
    boot = secrets.token_hex(8)
    link = MqttLink(
        url, client_id=f"{fleet.config.fleet.name}-aggregator", will=will(fleet.config.fleet.name, boot),
        max_queued=MAX_QUEUED, **fleet_certificates.as_aggregator(fleet, url), **fleet_certificates.login(fleet),
    )

    def authority_changed() -> None:
        if parse_url(url).tls:
            link.trust(**fleet_certificates.as_aggregator(fleet, url))
            broker_anew()

    return Coordinator(fleet, link, ledger, boot=boot, log=log, access_changed=access_changed,
                       authority_changed=authority_changed)


def _await_broker(aggregator: Aggregator, url: str, stopped: Callable[[], bool], connect_s: float) -> None:
    """Waits for the broker. Raises LinkError with its last message, if there was one."""
    coordinator = aggregator.coordinator
    try:
        await_broker(
            coordinator.link, lambda: aggregator.step(TICK_S), url, lambda: stopped() or bool(aggregator.held_up),
            connect_s,
        )
    except LinkError as error:
        said = f": {coordinator.broker_said}" if coordinator.broker_said else ""
        raise LinkError(error.what + said, where=error.where, expected=error.expected, hint=error.hint) from error


@contextlib.contextmanager
def _alerting(fleet: Fleet, aggregator: Aggregator, log: Log) -> Iterator[Callable[[], None]]:
    """Looks for alerts in a thread, so that no round waits for it. Yields a function that logs and publishes them,
    which the thread may not do; an alert that cannot be published now is published at a later call."""
    section = fleet.config.alerts
    if section is None:
        yield lambda: None
        return
    from cloud_server.integrations import alert_senders  # urllib.request takes memory that most fleets do not need

    found: queue.SimpleQueue[str | alert_senders.Message] = queue.SimpleQueue()
    ended, unsent = threading.Event(), dict[str, bytes]()
    thread = threading.Thread(target=alert_senders.watch, args=(fleet, section, ended.is_set, found.put), daemon=True,
                              kwargs={"beside": True, "told": found.put})
    thread.start()

    def tell() -> None:
        while not found.empty():
            one = found.get()
            if isinstance(one, str):
                log(one)
            elif section.mqtt:
                topic = topics.alert(fleet.config.fleet.name, one["kind"])
                unsent[topic] = json.dumps(one).encode() if one["state"] == "alert" else b""
        with contextlib.suppress(LinkError):
            for topic in list(unsent):
                aggregator.coordinator.link.publish(topic, unsent[topic], retain=True)
                del unsent[topic]

    try:
        yield tell
    finally:
        ended.set()
        thread.join(END_S)


def _step_until_stopped(
    aggregator: Aggregator, view: LiveView | None, stopped: Callable[[], bool], on_step: Callable[[Log], None],
    until_done: bool, log: Log, tell: Callable[[], None],
) -> None:
    draw_at, announced, was_busy, collected = 0.0, False, True, aggregator.coordinator.checkpoint.round
    while not stopped():
        busy = aggregator.step(TICK_S)
        if not stopped():  # a signal that stops this process may have stopped the broker too
            on_step(log)
            tell()
        if was_busy and not busy:
            allocator.trim()
        was_busy = busy
        coordinator = aggregator.coordinator
        if coordinator.checkpoint.round >= collected + COLLECT_ROUNDS:
            gc.collect()
            allocator.trim()
            collected = coordinator.checkpoint.round
        if view is not None and time.monotonic() > draw_at:
            began = time.monotonic()
            with contextlib.suppress(StateError, OSError):  # drawn at the next try
                view.update(snapshot(coordinator.ledger, view.told))
            draw_at = time.monotonic() + max(VIEW_S, REST * (time.monotonic() - began))
        if coordinator.finished and not announced:
            if not coordinator.ended:  # the coordinator has logged why it ended
                log(f"all {coordinator.checkpoint.round} rounds are closed; the served model stays published; to train "
                    "on, raise rounds in fleet.toml and start the server again")
            announced = True
        if coordinator.finished and until_done and not aggregator.held_up and coordinator.settled:
            return


def start(
    folder: Path, *, broker: str | None, host: str, port: int | None, plain: bool, connect_s: float, until_done: bool,
    quiet: bool, console: int | None = None, tensorboard: str | None = None, mlflow: str | None = None,
) -> None:
    """``metafleet server start``: runs the aggregator, and a private broker if none is named, until a signal.
    console: port of the console, which runs in another process; None for no console. tensorboard, mlflow: as in
    ``tracking.Options``, also run in another process."""
    allocator.keep_freed()
    made = Fleet.load(folder)
    key_files.unlock(folder)
    named = broker or made.config.link.broker
    run = partial(serve, made, log=processes.say, until_done=until_done, quiet=quiet, connect_s=connect_s)
    trackers = tracking.Options(tensorboard, mlflow)
    with contextlib.ExitStack() as beside, processes.until_signal() as stopped:
        beside.enter_context(tracking_beside(trackers, folder, processes.say, fleet=folder))
        if console is not None:
            beside.enter_context(console_beside(folder, processes.say, "--port", str(console)))
        if named is not None and named != EMBEDDED:
            check_plain(named, plain or made.config.link.plain)
            return run(url=named, stopped=stopped, access_changed=lambda: _say_access_changed(made),
                       broker_anew=lambda: _say_authorities_changed(made))
        with private_broker(
            made, host, port, plain=plain, embedded=named == EMBEDDED, log=processes.say
        ) as supervisor:
            run(url=supervisor.broker.url, stopped=stopped, access_changed=supervisor.reload,
                broker_anew=supervisor.replace, on_step=supervisor.tick)


def _say_access_changed(fleet: Fleet) -> None:
    if fleet_certificates.saved_setup(fleet.folder) is not None:
        processes.say(f"hint: the access list and the revocation list in {fleet.folder / 'mosquitto'} have changed: "
                      "copy acl and crl.pem to the broker and let it read them again (mosquitto: SIGHUP)")


def _say_authorities_changed(fleet: Fleet) -> None:
    processes.say(f"hint: the broker's certificate and authorities in {fleet.folder / 'mosquitto'} have changed: copy "
                  "that folder to the broker and restart it: a reload is not enough")


if __name__ == "__main__":
    processes.guarded(lambda: start(Path(sys.argv[1]), **json.loads(sys.argv[2])))
