"""What ``edge-agent`` costs before it does anything: its start, its memory while it answers and waits, of two versions.

    git archive COMMIT | tar -x -C build/before
    python -m benchmarks.on_device.starting --tree before=build/before --out benchmarks/on_device/starting.json   Linux

Of this tree and the others, in turn and ``--repeats`` times, with the same 1-D CNN: ``--help`` and ``predict`` (peak of
the process and CPU seconds, by ``memory.launched``), ``serve`` after one request, and ``run`` as soon as it is
connected to a private mosquitto. Memory of these two is that of the device alone (``benchmarks/overhead/memory.py``),
their CPU seconds are those since the start of the command. No round is played. MB are 10^6 bytes.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import urllib.request
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.on_device import homes
from benchmarks.on_device.cases import CASES
from benchmarks.on_device.memory import launched
from benchmarks.overhead.memory import parse
from benchmarks.overhead.processes import cpu_s
from cloud_server.broker.private_broker import MOSQUITTO_CONFIG, find_mosquitto
from cloud_server.results.result import environment
from fleet_core.base.storage import write_json

ROOT = Path(__file__).parent.parent.parent
LIMIT_S = 120.0


class Tree:
    """A version of the packages, in ``folder``."""

    def __init__(self, folder: Path):
        self.folder = folder.resolve()
        entry = "start" if (folder / "edge_agent/commands/start.py").exists() else "cli"
        self.agent = [sys.executable, "-c", f"from edge_agent.commands.{entry} import main; main()"]
        self.environ = {**os.environ, "PYTHONPATH": str(self.folder), "PYTHONSAFEPATH": "1"}

    def once(self, *arguments: object) -> dict[str, float]:
        """seconds, cpu_s and peak of a command that ends."""
        return launched([*self.agent, *map(str, arguments)], self.environ)

    @contextlib.contextmanager
    def living(self, words: str, *arguments: object) -> Iterator[tuple[int, str]]:
        """(process id, output) of a command as soon as it has printed ``words``."""
        with tempfile.NamedTemporaryFile("rb") as log, subprocess.Popen(
            [*self.agent, *map(str, arguments)], stdout=subprocess.DEVNULL, stderr=Path(log.name).open("wb"),
            env=self.environ,
        ) as process:
            try:
                yield process.pid, said(Path(log.name), words, process)
            finally:
                process.send_signal(signal.SIGTERM)


def said(log: Path, words: str, process: subprocess.Popen[bytes]) -> str:
    """The log as soon as it has ``words``. Raises RuntimeError."""
    until_s = time.monotonic() + LIMIT_S
    while words not in (text := log.read_text()):
        if process.poll() is not None or time.monotonic() > until_s:
            raise RuntimeError(f"'{words}' was not said: {text}")
        time.sleep(0.05)
    return text


def resident(pid: int) -> int:
    return parse(Path(f"/proc/{pid}/smaps").read_bytes()).resident


def measured(tree: Tree, place: homes.Place, broker: str) -> dict[str, float]:
    """One run of everything: bytes and seconds."""
    home = place.homes["proto"]
    found: dict[str, float] = {}
    for name, arguments in (("help", ["--help"]), ("predict", ["predict", place.x, "--home", home])):
        cost = tree.once(*arguments)
        found |= {f"{name}_mb": cost["peak"] / 1e6, f"{name}_cpu_s": cost["cpu_s"], f"{name}_s": cost["seconds"]}
    with tree.living("answers at", "serve", "--home", home, "--port", 0) as (pid, text):
        address = text.partition("answers at ")[2].split()[0].partition("/v2")[0]
        with urllib.request.urlopen(f"{address}/v2/health/ready") as answer:
            assert answer.status == 200
        found |= {"serve_mb": resident(pid) / 1e6, "serve_cpu_s": cpu_s([pid])}
    with tree.living("is on, fleet", "run", "--home", home, "--broker", broker) as (pid, _):
        found |= {"run_mb": resident(pid) / 1e6, "run_cpu_s": cpu_s([pid])}
    return found


@contextlib.contextmanager
def private_broker(folder: Path) -> Iterator[str]:
    """The URL of a mosquitto on this machine."""
    folder.mkdir()
    config, port = folder / "mosquitto.conf", 18831
    config.write_text(MOSQUITTO_CONFIG.format(port=port, host="127.0.0.1", data=folder)
                      + ("user root\n" if os.geteuid() == 0 else ""))
    with subprocess.Popen([find_mosquitto() or "mosquitto", "-c", str(config)], stderr=subprocess.DEVNULL) as process:
        try:
            yield f"mqtt://127.0.0.1:{port}"
        finally:
            process.terminate()


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tree", action="append", default=[], metavar="NAME=FOLDER")
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--out", type=Path, required=True)
    given = parser.parse_args(arguments)
    trees = {name: Tree(Path(folder)) for name, _, folder in (each.partition("=") for each in given.tree)}
    trees["now"] = Tree(ROOT)
    runs: dict[str, list[dict[str, float]]] = {name: [] for name in trees}
    with tempfile.TemporaryDirectory() as room, private_broker(Path(room) / "broker") as broker:
        place = homes.made(CASES["1-D CNN"], Path(room) / "made")
        for repeat in range(given.repeats + 1):
            for name, tree in trees.items():
                found = measured(tree, place, broker)
                if repeat:  # the first run fills the disk cache
                    runs[name].append(found)
    told: dict[str, Any] = {name: {key: {"median": statistics.median(each), "each": each} for key in found
                                   for each in [[run[key] for run in runs[name]]]} for name in trees}
    write_json(given.out, {"repeats": given.repeats, "environment": environment(), "trees": told})
    for name, figures in told.items():
        print(name, {key: round(one["median"], 2) for key, one in figures.items()})


if __name__ == "__main__":
    main()
