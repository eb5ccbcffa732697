"""``metafleet demo``: a broker, the aggregator and real agent processes on this machine, from nothing to a report.

Every process is started by the commands that a person would give. A run that was interrupted goes on when the same
command is given again.
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cloud_server.identity.device_folder import write_device_folder
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.ledger import Ledger
from cloud_server.records.ledger_tables import Evaluation
from cloud_server.reports import result
from cloud_server.reports.html_report import render
from cloud_server.reports.terminal_view import LiveView, closing_table, snapshot
from cloud_server.running import aggregator_process
from cloud_server.running.first_settings import fleet_toml, load_data, model_for
from fleet_core.base import processes as runtime
from fleet_core.base import schema, storage
from fleet_core.base.errors import ConfigError, DataError, RoundError
from fleet_core.data import heartbeat, samples, time_split
from fleet_core.data.samples import Samples
from fleet_core.protocol import topics

DEFAULT_OUT = "demo-run"
HEARTBEAT_SUPPORT_S = 300.0
EVALUATE_S = 120.0
STOP_S = 10.0
LIVES = 3  # how often an agent is started again, as systemd would
VIEW_S = 0.5


@dataclass(frozen=True)
class Options:
    """What a person may choose; written to demo.json, so that an unfinished run goes on with the same.

    support_s: what a new device learns from; None for 300 s of heart beats, and of a file for a share of its time, as
    the devices that train. window, stride: of a file of readings.
    """

    devices: int = 8
    new_devices: int = 2
    rounds: int = 30
    method: str = "pfldyn-proto"
    data: str = "heartbeat"
    seed: int = 0
    baseline: bool = True
    support_s: float | None = None
    meter_watts: tuple[float, ...] | None = None
    window: int | None = None
    stride: int | None = None


def run(
    options: Options, out: Path | None, broker: str | None, show: Callable[[str], None] = print
) -> dict[str, Any]:
    """The whole demo; returns what result.json holds. show: takes the closing table.

    Raises FleetError, with everything in order for another try.
    """
    if broker is not None and broker != aggregator_process.EMBEDDED:
        aggregator_process.check_broker(broker)
    with runtime.until_signal() as stopped:
        folder = _folder(options, out)
        try:
            outcome, table = _run(options, folder, broker, stopped)
        except _Stopped:
            runtime.say(f"stopped; nothing is lost: the same command with --out {folder} goes on")
            raise KeyboardInterrupt from None
    show(table)
    return outcome


class _Stopped(Exception):
    """The person asked for an end."""


def _run(
    options: Options, folder: Path, broker: str | None, stopped: Callable[[], bool]
) -> tuple[dict[str, Any], str]:
    found = _found(options, folder, stopped)
    for remark in found.remarks():
        runtime.say(remark)
    training, joining = _write_devices(options, folder, found)
    with (
        aggregator_process.broker_at(broker, folder / "broker", port=0, log=runtime.say) as url,
        _Children(folder / "logs", url) as children,
        Ledger(found.ledger_path) as ledger,
    ):
        after = max([r.round for r in ledger.rounds("closed")], default=-1)
        runtime.say(f"{len(training)} agents and the aggregator are starting, each a process of its own")
        server = children.start("server", "cloud_server.commands.cli", "server", "start", str(found.folder), "--quiet")
        for home in training:
            children.start(home.name, "edge_agent.commands.cli", "run", "--home", str(home))
        with LiveView(options.rounds, after_round=after) as view:
            _watch(ledger, view, children, server, stopped, lambda: len(ledger.rounds("closed")) >= options.rounds)
            if joining:
                view.say(f"{len(joining)} new devices join: {', '.join(home.name for home in joining)}")
            for home in joining:
                children.start(home.name, "edge_agent.commands.cli", "run", "--home", str(home))
            names = {home.name for home in (*training, *joining)}
            until = time.monotonic() + EVALUATE_S
            _watch(ledger, view, children, server, stopped, lambda: _evaluated(ledger, options.rounds) >= names, until)
        missing = sorted(names - _evaluated(ledger, options.rounds))
        if missing:
            runtime.say(f"not evaluated: {', '.join(missing)}; see {folder / 'logs'}")
    before = _baseline(folder, stopped) if options.baseline else None
    return _close(options, folder, found, before)


def _folder(options: Options, out: Path | None) -> Path:
    """The run's folder: a new one, or that of an unfinished run with the same options. Raises ConfigError."""
    folder = out or _free_folder(options)
    note = folder / "demo.json"
    if note.exists():
        if _noted(note) != options:
            raise ConfigError("holds a run with other options", where=str(folder), hint="give another --out")
        runtime.say(f"the run in {folder} goes on")
        return folder
    if folder.exists() and any(folder.iterdir()):
        raise ConfigError("is not empty and holds no run", where=str(folder), hint="give another --out")
    _fleet_toml(options, runtime.say)  # every mistake in the options is told before anything is written
    storage.write_json(note, schema.plain(options))
    return folder


def _noted(note: Path) -> Options:
    """The options of the run that lies there. Raises ConfigError."""
    try:
        known, problems = schema.read(Options, json.loads(storage.read_bytes(note, limit=1 << 16)))
    except ValueError as error:
        raise ConfigError(f"is no JSON: {error}", where=str(note), hint="give another --out") from error
    if known is None:
        raise ConfigError("; ".join(map(str, problems)), where=str(note), hint="give another --out")
    return known


def _free_folder(options: Options) -> Path:
    """``demo-run``; the next number where a finished run or one with other options lies there."""
    number, folder = 1, Path(DEFAULT_OUT)
    while (folder / "result.json").exists() or (
        (folder / "demo.json").exists() and _noted(folder / "demo.json") != options
    ):
        number += 1
        folder = Path(f"{DEFAULT_OUT}-{number}")
    return folder


def _fleet_toml(options: Options, say: Callable[[str], None] = lambda text: None) -> str:
    """The run's fleet.toml. say: as in ``load_data``. Raises DataError or ConfigError for options that cannot be
    run."""
    everything, spec = load_data(options.data, say, window=options.window, stride=options.stride)
    training, joining = _names(options, everything)
    for name in (*training, *joining):
        topics.check_name(name, "device")
        _check_parts(options, name, everything.of_client(name), late=name in joining)
    return fleet_toml(
        everything, "demo", options.method, model_for(options.data, everything), rounds=options.rounds,
        seed=options.seed, spec=spec, min_devices=options.devices, serve_every=max(1, min(10, options.rounds)),
    )


def _found(options: Options, folder: Path, stopped: Callable[[], bool]) -> Fleet:
    """The fleet's folder, made as ``metafleet init`` makes it: torch ends with that process."""
    place = folder / "fleet"
    if not (place / "fleet.toml").exists():
        storage.write_atomic(place / "fleet.toml", _fleet_toml(options).encode())
    runtime.say("making the fleet: keys, graph and first weights (once, about ten seconds)")
    command = runtime.command("cloud_server.commands.cli", "init", str(place))
    finished = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if stopped():
        raise _Stopped
    if finished.returncode:
        why = finished.stderr.decode(errors="replace").strip()
        raise RoundError(f"'metafleet init {place}' ended with exit code {finished.returncode}: {why}")
    return Fleet.load(place)


def _names(options: Options, everything: Samples) -> tuple[list[str], list[str]]:
    """(devices that train, devices that join at the end). Raises DataError when there are too few clients."""
    if options.data == "heartbeat" and options.devices <= len(heartbeat.DEVICES):
        pool, late = list(heartbeat.DEVICES), list(heartbeat.NEW_DEVICES)
    else:
        pool = list(everything.clients)
        late = pool[options.devices:]
    if len(pool) < options.devices or len(late) < options.new_devices:
        raise DataError(
            f"holds {len(set(pool + late))} clients", where=options.data,
            expected=f"{options.devices} that train and {options.new_devices} that join",
            hint="give --devices and --new-devices that fit; a file needs an array 'client'",
        )
    return pool[: options.devices], late[: options.new_devices]


def _check_parts(options: Options, name: str, own: Samples, *, late: bool) -> None:
    """Raises DataError where a device has nothing to learn from, or nothing to be evaluated on."""
    seconds = _support_s(options) if late else None
    try:
        later = time_split.learned(own, seconds=seconds)[1]
    except DataError as error:
        raise DataError(f"of {name}, {error.what}", where=options.data, expected=error.expected,
                        hint="leave --support-seconds out") from error
    if not len(later):
        hint = "" if seconds is None else "lower --support-seconds, or leave it out"
        raise DataError(f"all {len(own)} samples of {name} are to learn from", where=options.data,
                        expected="some that are later, to be evaluated on", hint=hint)


def _support_s(options: Options) -> float | None:
    """What a new device learns from; None for a share of its time."""
    return options.support_s or (HEARTBEAT_SUPPORT_S if options.data == "heartbeat" else None)


def _write_devices(options: Options, folder: Path, fleet: Fleet) -> tuple[list[Path], list[Path]]:
    """A home for every device with its own recording and nothing else: (training, joining)."""
    everything, _ = load_data(options.data, window=options.window, stride=options.stride)
    training, joining = _names(options, everything)
    watts = options.meter_watts
    power = {} if watts is None else {"power": {"idle_w": watts[0], "busy_w": watts[1]}}
    seconds = _support_s(options)
    homes: dict[str, Path] = {}
    for name in (*training, *joining):
        home = homes[name] = folder / "devices" / name
        late = name in joining
        data = {"support_seconds": seconds} if late and seconds is not None else {}
        write_device_folder(fleet, name, home, "mqtt://127.0.0.1:1883", data=data, train={"enabled": not late}, **power)
        if not (home / "samples.npz").exists():
            samples.save(home / "samples.npz", everything.of_client(name))
    return [homes[name] for name in training], [homes[name] for name in joining]


class _Children:
    """The processes that the demo started, and nobody else's; all are ended when it leaves."""

    def __init__(self, logs: Path, url: str):
        self._logs, self._url = logs, url
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._commands: dict[str, tuple[str, ...]] = {}
        self._lives: dict[str, int] = {}

    def __enter__(self) -> _Children:
        return self

    def __exit__(self, *_: object) -> None:
        """The aggregator, which was started first, ends first: it closes no round without devices that leave."""
        processes = list(self._running.values())
        _end(processes[:1])
        _end(processes[1:])

    def start(self, name: str, module: str, *arguments: str) -> subprocess.Popen[bytes]:
        """``python -m module …`` with its own log file; it ends with this process."""
        self._logs.mkdir(parents=True, exist_ok=True)
        environment = {**os.environ, runtime.WITH_PARENT: str(os.getpid()), "METAFLEET_BROKER": self._url}
        with open(self._logs / f"{name}.log", "ab") as log:
            process = subprocess.Popen(
                runtime.command(module, *arguments), stdin=subprocess.DEVNULL, stdout=log, stderr=log,
                env=environment, start_new_session=True,
            )
        self._running[name], self._commands[name] = process, (module, *arguments)
        return process

    def again(self, name: str) -> bool:
        """Starts a process that ended once more; False when it has had its lives."""
        self._lives[name] = self._lives.get(name, 0) + 1
        if self._lives[name] < LIVES:
            module, *arguments = self._commands[name]
            self.start(name, module, *arguments)
        return self._lives[name] < LIVES

    def ended(self) -> Iterator[tuple[str, int, str]]:
        """(name, exit code, end of its log) of every process that left by itself."""
        for name, process in list(self._running.items()):
            if process.poll() is not None:
                lines = (self._logs / f"{name}.log").read_text(errors="replace").strip().splitlines()
                yield name, process.returncode, "\n".join(lines[-5:])


def _end(processes: Sequence[subprocess.Popen[bytes]]) -> None:
    """All at once, in order where they do so in time."""
    for process in processes:
        if process.poll() is None:
            process.send_signal(signal.SIGTERM)
    until = time.monotonic() + STOP_S
    for process in processes:
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(max(0.1, until - time.monotonic()))
        if process.poll() is None:
            process.kill()
            process.wait()


def _watch(
    ledger: Ledger, view: LiveView, children: _Children, server: subprocess.Popen[bytes],
    stopped: Callable[[], bool], done: Callable[[], bool], until: float | None = None,
) -> None:
    """Follows the ledger until ``done``. Raises RoundError when the aggregator ends by itself, or an agent again and
    again."""
    while not done():
        if stopped():
            raise _Stopped
        if until is not None and time.monotonic() > until:
            return
        for name, code, text in children.ended():
            if server.poll() is not None:
                raise RoundError(f"the aggregator ended with exit code {server.returncode}: {text}")
            if not children.again(name):
                raise RoundError(f"agent {name} ended {LIVES} times, the last one with exit code {code}: {text}")
            view.say(f"agent {name} ended with exit code {code} and is started again")
        if stalled := ledger.facts().get("stalled"):
            raise RoundError(stalled, hint="once that is mended the same command goes on")
        view.update(snapshot(ledger, view.told))
        time.sleep(VIEW_S)
    view.update(snapshot(ledger, view.told))


def _evaluated(ledger: Ledger, round_number: int) -> set[str]:
    return {row.device for row in ledger.rows(Evaluation, round=round_number)}


def _baseline(folder: Path, stopped: Callable[[], bool]) -> dict[str, dict[str, Any]] | None:
    """FedAvg on the same devices, rounds and seed, in a process of its own."""
    path = folder / "baseline.json"
    if not path.exists():
        runtime.say("the baseline: FedAvg on the same devices, rounds and seed, in one process")
        with subprocess.Popen(
            runtime.command("cloud_server.running.fedavg_baseline", str(folder)), stdout=subprocess.DEVNULL,
            stderr=None, env={**os.environ, runtime.WITH_PARENT: str(os.getpid())}, start_new_session=True,
        ) as process:
            while process.poll() is None:
                if stopped():
                    process.terminate()
                with contextlib.suppress(subprocess.TimeoutExpired):
                    process.wait(VIEW_S)
        if stopped():
            raise _Stopped
        if process.returncode:
            hint = "or leave it out: --no-baseline"
            raise RoundError(f"the baseline ended with exit code {process.returncode}", hint=hint)
    confusions: dict[str, dict[str, Any]] = json.loads(storage.read_bytes(path, limit=1 << 26))
    return confusions


def _close(
    options: Options, folder: Path, found: Fleet, before: dict[str, dict[str, Any]] | None
) -> tuple[dict[str, Any], str]:
    """Writes result.json and report.html; what result.json holds, and the closing table."""
    with Ledger(found.ledger_path, create=False) as ledger:
        plain = {key: value for key, value in schema.plain(options).items() if value is not None}
        if options.data != "heartbeat":
            plain["data"] = Path(options.data).name
        outcome = result.build(
            ledger, method=options.method, seed=options.seed, baseline=before,
            config={"demo": plain, "fleet": schema.plain(found.config)},
        )
    data = result.to_json(outcome)
    storage.write_json(folder / "result.json", data)
    storage.write_atomic(folder / "report.html", render(data, title="Metafleet demo").encode())
    return data, closing_table(outcome, report=str(folder / "report.html"), result_file=str(folder / "result.json"))


