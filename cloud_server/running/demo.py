"""``metafleet demo``: runs a broker, the aggregator and real agent processes on this machine, and writes a report.

The processes are started with the same commands that an operator uses. The same command continues an interrupted run.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from cloud_server.ledger.ledger import Ledger
from cloud_server.records import training_graph
from cloud_server.records.fleet_folder import Fleet
from cloud_server.reports.html_report import render
from cloud_server.reports.terminal_view import LiveView, closing_table, snapshot
from cloud_server.results import result
from cloud_server.results.evaluations import evaluated
from cloud_server.running import aggregator_process
from cloud_server.running.child_processes import MAX_EXITS, ChildProcesses, console_beside
from cloud_server.running.demo_setup import Options, demo_fleet_toml, run_folder, write_devices
from fleet_core.base import processes, schema, storage
from fleet_core.base.errors import ConfigError, RoundError

EVALUATE_S = 120.0
VIEW_S = 0.5


def run(
    options: Options, out: Path | None, broker: str | None, show: Callable[[str], None] = print, *,
    console: bool = False,
) -> dict[str, Any]:
    """Runs the demo and returns the content of result.json. show: takes the closing table. console: opens the console
    in a browser for as long as the devices run.

    Raises FleetError; the same command can then be run again.
    """
    if broker is not None and broker != aggregator_process.EMBEDDED:
        aggregator_process.check_broker(broker)
    with processes.until_signal() as stopped:
        folder = run_folder(options, out)
        try:
            outcome, table = _run(options, folder, broker, stopped, console)
        except _Stopped:
            processes.say(f"stopped; nothing is lost: the same command with --out {folder} continues")
            raise KeyboardInterrupt from None
    show(table)
    return outcome


class _Stopped(Exception):
    """A signal asked this process to stop."""


def _run(
    options: Options, folder: Path, broker: str | None, stopped: Callable[[], bool], console: bool
) -> tuple[dict[str, Any], str]:
    """(content of result.json, closing table)."""
    fleet = _create_fleet(options, folder, stopped)
    for remark in fleet.remarks():
        processes.say(remark)
    with contextlib.ExitStack() as beside:
        if console:
            beside.enter_context(console_beside(fleet.folder, processes.say, "--port", "0", "--open"))
        _train_and_evaluate(options, folder, fleet, broker, stopped)
    baseline = None
    if options.baseline and fleet.config.model.task is not None:
        processes.say("no FedAvg baseline: it is computed for classes alone")
    elif options.baseline:
        baseline = _baseline(folder, stopped)
    return _write_results(options, folder, fleet, baseline)


def _train_and_evaluate(
    options: Options, folder: Path, fleet: Fleet, broker: str | None, stopped: Callable[[], bool]
) -> None:
    """Runs aggregator and agents until the last round is closed and every device was evaluated on its model."""
    training, joining = write_devices(options, folder, fleet)
    with (
        aggregator_process.broker_at(broker, folder / "broker", port=0, log=processes.say) as url,
        ChildProcesses(folder / "logs", url) as children,
        Ledger(fleet.ledger_path) as ledger,
    ):
        after = max([r.round for r in ledger.rounds("closed")], default=-1)
        processes.say(f"{len(training)} agents and the aggregator are starting, each a process of its own")
        server = children.start("server", "cloud_server.commands.cli", "server", "start", str(fleet.folder), "--quiet")
        for home in training:
            ledger.request_enrolment(home.name)
            children.start(home.name, "edge_agent.commands.cli", "run", "--home", str(home))
        with LiveView(options.rounds, after_round=after) as view:
            _watch(ledger, view, children, server, stopped, lambda: len(ledger.rounds("closed")) >= options.rounds)
            if joining:
                view.say(f"{len(joining)} new devices join: {', '.join(home.name for home in joining)}")
            for home in joining:
                ledger.request_enrolment(home.name)
                children.start(home.name, "edge_agent.commands.cli", "run", "--home", str(home))
            names = {home.name for home in (*training, *joining)}
            until = time.monotonic() + EVALUATE_S
            _watch(ledger, view, children, server, stopped, lambda: evaluated(ledger, options.rounds) >= names, until)
        missing = sorted(names - evaluated(ledger, options.rounds))
        if missing:
            processes.say(f"not evaluated: {', '.join(missing)}; see {folder / 'logs'}")


def _create_fleet(options: Options, folder: Path, stopped: Callable[[], bool]) -> Fleet:
    """Creates the fleet with ``metafleet init`` in a child process, so that torch's memory is freed when it ends."""
    fleet_folder = folder / "fleet"
    if not (fleet_folder / "fleet.toml").exists():
        storage.write_atomic(fleet_folder / "fleet.toml", demo_fleet_toml(options).encode())
    processes.say("making the fleet: keys, graph and first weights (once, about ten seconds)")
    graph = "--train-graph" if options.engine == "onnx" else "--no-train-graph"
    command = processes.command("cloud_server.commands.cli", "init", str(fleet_folder), graph)
    finished = subprocess.run(command, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, check=False)
    if stopped():
        raise _Stopped
    if finished.returncode:
        why = finished.stderr.decode(errors="replace").strip()
        raise RoundError(f"'metafleet init {fleet_folder}' ended with exit code {finished.returncode}: {why}")
    fleet = Fleet.load(fleet_folder)
    if options.engine == "onnx" and not training_graph.path_of(fleet).exists():
        why = finished.stderr.decode(errors="replace").strip().rpartition("\n")[2]
        raise ConfigError(f"no device could train without torch: {why}", where="--engine", hint="leave it out")
    return fleet


def _watch(
    ledger: Ledger, view: LiveView, children: ChildProcesses, server: subprocess.Popen[bytes],
    stopped: Callable[[], bool], done: Callable[[], bool], until: float | None = None,
) -> None:
    """Follows the ledger until ``done()`` or the time ``until``. Raises RoundError if the aggregator ends by itself, an
    agent ends repeatedly, or the rounds stall."""
    while not done():
        if stopped():
            raise _Stopped
        if until is not None and time.monotonic() > until:
            return
        for name, code, text in children.ended():
            if server.poll() is not None:
                raise RoundError(f"the aggregator ended with exit code {server.returncode}: {text}")
            if not children.restart(name):
                raise RoundError(f"agent {name} ended {MAX_EXITS} times, the last one with exit code {code}: {text}")
            view.say(f"agent {name} ended with exit code {code} and is started again")
        if stalled := ledger.facts().get("stalled"):
            raise RoundError(stalled, hint="fix that, then run the same command again: it continues")
        view.update(snapshot(ledger, view.told))
        time.sleep(VIEW_S)
    view.update(snapshot(ledger, view.told))


def _baseline(folder: Path, stopped: Callable[[], bool]) -> dict[str, dict[str, Any]] | None:
    """Confusion counts of FedAvg on the same devices, rounds and seed, computed in a child process."""
    path = folder / "baseline.json"
    if not path.exists():
        processes.say("the baseline: FedAvg on the same devices, rounds and seed, in one process")
        with subprocess.Popen(
            processes.command("cloud_server.running.fedavg_baseline", str(folder)), stdout=subprocess.DEVNULL,
            stderr=None, env={**os.environ, processes.WITH_PARENT: str(os.getpid())}, start_new_session=True,
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


def _write_results(
    options: Options, folder: Path, fleet: Fleet, baseline: dict[str, dict[str, Any]] | None
) -> tuple[dict[str, Any], str]:
    """Writes result.json and report.html; returns (content of result.json, closing table)."""
    with Ledger(fleet.ledger_path, create=False) as ledger:
        plain = schema.present(schema.plain(options))
        if options.data != "heartbeat":
            plain["data"] = Path(options.data).name
        outcome = result.build(
            ledger, method=options.method, seed=options.seed, baseline=baseline, task=fleet.config.model.task,
            config={"demo": plain, "fleet": schema.plain(fleet.config)},
        )
    data = result.to_json(outcome)
    storage.write_json(folder / "result.json", data)
    storage.write_atomic(folder / "report.html", render(data, title="Metafleet demo").encode())
    return data, closing_table(outcome, report=str(folder / "report.html"), result_file=str(folder / "result.json"))
