"""A small fleet on disk, and commands as processes that are all ended after the test."""

from __future__ import annotations

import os
import shutil
import signal
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from cloud_server.choices.first_settings import fleet_toml
from cloud_server.identity.create_fleet import create_fleet
from cloud_server.identity.device_folder import write_device_folder
from cloud_server.records.fleet_folder import Fleet
from cloud_server.running import in_one_process
from export.first_model import first, train_graph_of
from fleet_core.base.trees import Params
from fleet_core.board.device_settings import settings_of
from fleet_core.data.samples import Samples, load, save
from fleet_core.model.layout import Layout
from tests.support import waiting
from tests.support.waiting import PATIENCE_S

CLASSES = ("a", "b", "c")
CLIENTS = ("d0", "d1", "d2", "d3")
ROWS = 48  # per client, ten seconds apart


def write_samples(path: Path) -> Path:
    """Four clients, each with three separable classes in eight dimensions and a small shift of its own."""
    rng = np.random.default_rng(0)
    y = np.concatenate([rng.permutation(np.arange(ROWS) % 3) for _ in CLIENTS])
    shift = np.repeat(np.arange(len(CLIENTS)) * 0.2, ROWS)
    x = np.eye(3, 8)[y] * 3 + shift[:, None] + rng.normal(size=(len(y), 8)) / 2
    client = np.repeat(np.array(CLIENTS, dtype=np.str_), ROWS)
    save(path, Samples(x.astype(np.float32), y, client, np.tile(np.arange(ROWS) * 10.0, len(CLIENTS)), CLASSES))
    return path


def small_fleet(
    folder: Path, *, rounds: int = 2, name: str = "desk", method: str = "pfldyn-proto", train_graph: bool = False
) -> Fleet:
    """The fleet that ``metafleet init`` makes of the samples. train_graph: with the graph for training without torch.
    """
    everything = load(write_samples(folder.with_name("all.npz")))
    text = fleet_toml(everything, name, method, None, rounds=rounds, seed=0, min_devices=1)
    text = text.replace("local_steps = 20", "local_steps = 3")
    return create_fleet(folder, text, lambda settings, head: first(
        settings.model.name, settings.model.input, settings.model.classes, settings.model.options, head=head, seed=0
    ), _train_graph if train_graph else None)


def _train_graph(fleet: Fleet, layout: Layout, weights: Params) -> bytes:
    return train_graph_of(layout, fleet.method, fleet.hyper, weights, seed=0)


def wide_fleet(folder: Path, rounds: int) -> Fleet:
    """A fleet of two devices with about 260,000 parameters, in fp32: its payload outweighs all other traffic."""
    text = f'''
fleet = {{ name = "counted", method = "fedavg", rounds = {rounds}, min_devices = 2, serve_every = {rounds} }}
link = {{ up = "fp32", down = "fp32" }}
hyper = {{ local_steps = 1 }}

[model]
name = "mlp"
classes = ["a", "b", "c"]
input = {{ shape = [1024] }}
options = {{ hidden = [256] }}
'''
    return create_fleet(folder, text, lambda settings, head: first(
        settings.model.name, settings.model.input, settings.model.classes, settings.model.options, head=head, seed=0
    ))


def device(fleet: Fleet, name: str, home: Path, *, train: bool = True, engine: str = "auto") -> Path:
    """A device's home with its own samples."""
    write_device_folder(fleet, name, home, "mqtt://127.0.0.1:1883", train={"enabled": train, "engine": engine})
    save(home / "samples.npz", load(fleet.folder.with_name("all.npz")).of_client(name))
    return home


def finished_fleet(folder: Path) -> Path:
    """``fleet`` and the homes ``d0`` (trains) and ``d1`` (only answers) after two rounds in one process."""
    fleet = small_fleet(folder / "fleet")
    homes = [device(fleet, name, folder / name, train=name == "d0") for name in ("d0", "d1")]
    in_one_process.run(fleet, {home.name: (home, settings_of(home)) for home in homes})
    return folder


# Processes -----------------------------------------------------------------------------------------------------------


@dataclass
class Program:
    """A process that a test started; its output goes to a file."""

    process: subprocess.Popen[bytes]
    log: Path

    def text(self) -> str:
        return self.log.read_text(errors="replace")

    def until(self, condition: Callable[[], object]) -> None:
        """Wait until ``condition`` holds. Fails when the program ends before."""

        def wait() -> None:
            with suppress(subprocess.TimeoutExpired):
                self.process.wait(0.05)
                assert condition(), f"exit code {self.process.returncode}: {self.text()}"

        waiting.until(condition, wait, self.text)

    def wait_for(self, words: str) -> None:
        self.until(lambda: words in self.text())

    def exit_code(self) -> int:
        return self.process.wait(PATIENCE_S)


class Programs:
    """Starts programs and ends those that still run."""

    def __init__(self, folder: Path):
        self.folder = folder
        self.started: list[Program] = []

    def start(self, *command: str, environ: dict[str, str] | None = None, cwd: Path | None = None) -> Program:
        """Start the command in its own session, stdout and stderr in one log."""
        log = self.folder / f"program-{len(self.started)}.log"
        with open(log, "wb") as output:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=output, stderr=output, cwd=cwd or self.folder,
                env=environ or clean_environ(), start_new_session=True,
            )
        self.started.append(Program(process, log))
        return self.started[-1]

    def stop(self) -> None:
        for program in self.started:
            if program.process.poll() is None:
                program.process.send_signal(signal.SIGTERM)
        for program in self.started:
            waiting.exit_or_kill(program.process)


@contextmanager
def programs_in(folder: Path) -> Iterator[Programs]:
    programs = Programs(folder)
    try:
        yield programs
    finally:
        programs.stop()


def clean_environ(**more: str) -> dict[str, str]:
    """This environment without variables that change the commands' defaults."""
    return {name: value for name, value in os.environ.items() if not name.startswith("METAFLEET_")} | more


def metafleet(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "cloud_server.commands.cli", *map(str, arguments)]


def edge_agent(*arguments: object) -> list[str]:
    return [sys.executable, "-m", "edge_agent.commands.cli", *map(str, arguments)]


def run_to_end(command: list[str], *, environ: Mapping[str, str] | None = None) -> subprocess.CompletedProcess[str]:
    """Run the command to its end with ``environ`` added to this environment."""
    return subprocess.run(
        command, capture_output=True, text=True, timeout=PATIENCE_S, env=clean_environ(**(environ or {})), check=False
    )


def closed_rounds(fleet: Path) -> list[int]:
    """Numbers of the closed rounds in the ledger; none if there is no ledger yet."""
    try:
        with closing(sqlite3.connect(f"file:{fleet / 'ledger.sqlite'}?mode=ro", uri=True)) as ledger:
            rows = ledger.execute("SELECT round FROM rounds WHERE status = 'closed' ORDER BY round").fetchall()
    except sqlite3.OperationalError:
        return []
    return [number for (number,) in rows]


def descendants(root: int) -> set[int]:
    """The ids of all processes that ``root`` and its children started."""
    parents = {pid: parent for pid, parent in _processes()}
    found: set[int] = set()
    todo = {root}
    while todo:
        todo = {pid for pid, parent in parents.items() if parent in todo} - found
        found |= todo
    return found


def alive(pids: set[int]) -> set[int]:
    return pids & {pid for pid, _ in _processes()}


def command_of(pid: int) -> str:
    """The command line of a process; empty if it does not run."""
    if shutil.which("ps"):
        command = ["ps", "-ww", "-o", "command=", "-p", str(pid)]
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout
    with suppress(OSError):
        return Path(f"/proc/{pid}/cmdline").read_bytes().replace(b"\0", b" ").decode()
    return ""


def _processes() -> list[tuple[int, int]]:
    """(id, parent's id) of every running process, without zombies."""
    if shutil.which("ps"):
        listed = subprocess.run(["ps", "-axo", "pid=,ppid=,state="], capture_output=True, text=True, check=True).stdout
        rows = [line.split() for line in listed.splitlines()]
    else:
        rows = list(_read_proc())
    return [(int(pid), int(parent)) for pid, parent, state in rows if not state.startswith("Z")]


def _read_proc() -> Iterator[list[str]]:
    for path in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it ended meanwhile
            text = path.read_text()
            state, parent = text.rpartition(")")[2].split()[:2]
            yield [text.split()[0], parent, state]
