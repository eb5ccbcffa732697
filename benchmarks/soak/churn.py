"""Runs a small fleet as real processes on a real mosquitto, and disturbs it on a fixed schedule.

d0 is never ended, and its clock jumps by up to a day, back and forth. d1 is killed (SIGKILL). d2 leaves and comes back.
d3's home is a file system of its own that is filled to the last byte and emptied again, where this user may mount one.
The aggregator and the broker are killed; the broker forgets its retained messages every other time.
"""

from __future__ import annotations

import platform
import random
import subprocess
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.soak import sampling
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Update
from fleet_core.base import processes
from tests.support.faults import Mosquitto, mosquitto
from tests.support.programs import Program, Programs, device, edge_agent, metafleet, programs_in, small_fleet

DEVICES = ("d0", "d1", "d2", "d3")
CLOCK, LEAVES, FULL = "d0", "d2", "d3"
FILLER = "filler"
HOME_MIB = 16
KEPT_ROUNDS = 50
DAY_S = 86_400
STEPS = 900
"""Enough steps for a round to take longer than its measurement."""


@dataclass
class Running:
    """A fleet under test. lives: how often each process was started. series: figure -> [round, life, value]."""

    folder: Path
    broker: Mosquitto
    programs: Programs
    full_disk: bool
    draw: random.Random = field(default_factory=lambda: random.Random(0))
    processes: dict[str, Program] = field(default_factory=dict)
    lives: dict[str, int] = field(default_factory=dict)
    series: dict[str, list[list[float]]] = field(default_factory=dict)
    events: list[list[Any]] = field(default_factory=list)

    def start(self, name: str) -> None:
        if name == "aggregator":
            command = metafleet("server", "start", self.folder / "fleet", "--quiet", "--broker", self.broker.url)
        else:
            command = edge_agent("run", "--home", self.folder / name, "--broker", self.broker.url)
            if name == CLOCK:
                command = processes.command("benchmarks.soak.jumping_clock", *map(str, (
                    self.folder / "ahead", self.folder / name, self.broker.url)))
        self.processes[name] = self.programs.start(*command, cwd=Path.cwd())
        self.lives[name] = self.lives.get(name, 0) + 1

    def end(self, name: str, *, kill: bool) -> None:
        process = self.processes.pop(name).process
        process.kill() if kill else process.terminate()
        process.wait()

    def check(self) -> None:
        """Raises AssertionError if a process ended that was not ended here."""
        for name, program in self.processes.items():
            assert program.process.poll() is None, f"{name} ended: {program.text()[-3000:]}"

    def closed(self) -> int:
        with Ledger(self.folder / "fleet" / "ledger.sqlite", create=False) as ledger:
            return ledger.closed_count()

    def counted(self) -> dict[str, int]:
        """The counted updates of each device in the rounds that the ledger keeps."""
        with Ledger(self.folder / "fleet" / "ledger.sqlite", create=False) as ledger:
            found = Counter(row.device for row in ledger.rows(Update, status="counted"))
        return {name: found[name] for name in DEVICES}

    def sample(self, number: int) -> None:
        for name, program in self.processes.items():
            pid = program.process.pid
            self._add(f"{name}: memory", number, sampling.memory(pid), self.lives[name])
            self._add(f"{name}: descriptors", number, sampling.descriptors(pid), self.lives[name])
        assert self.broker.process is not None
        pid, life = self.broker.process.pid, self.lives["broker"]
        self._add("broker: memory", number, sampling.memory(pid), life)
        self._add("broker: descriptors", number, sampling.descriptors(pid), life)
        for what, value in sampling.retained(self.broker.url).items():
            self._add(f"broker: retained {what}", number, value, life)
        fleet = self.folder / "fleet"
        self._add("fleet's folder", number, sampling.size(fleet))
        self._add("ledger", number, sampling.size(fleet, "ledger.sqlite*"))
        self._add("audit log", number, sampling.size(fleet, "audit*"))
        for name in DEVICES:
            self._add(f"{name}: home", number, sampling.size(self.folder / name, without=FILLER))

    def _add(self, figure: str, number: int, value: float, life: int = 0) -> None:
        self.series.setdefault(figure, []).append([number, life, value])

    # Disturbances -----------------------------------------------------------------------------------------------------

    def disturb(self, number: int) -> None:
        """Does what the schedule has after round ``number``."""
        for every, at, event in (
            (10, 5, self.kill_device), (14, 0, self.leave), (14, 4, self.come_back), (20, 9, self.jump),
            (30, 12, self.fill), (30, 15, self.empty), (60, 59, self.kill_broker), (75, 74, self.kill_aggregator),
        ):
            if number % every == at and number > 3:
                event()
                self.events.append([number, event.__name__.replace("_", " ")])

    def kill_device(self) -> None:
        self.end("d1", kill=True)
        self.start("d1")

    def leave(self) -> None:
        if LEAVES in self.processes:
            self.end(LEAVES, kill=False)

    def come_back(self) -> None:
        if LEAVES not in self.processes:
            self.start(LEAVES)

    def jump(self) -> None:
        (self.folder / "ahead").write_text(str(self.draw.randrange(-DAY_S, DAY_S)))

    def fill(self) -> None:
        if self.full_disk:
            with open(self.folder / FULL / FILLER, "wb", buffering=0) as file:
                try:
                    while True:
                        file.write(bytes(4096))
                except OSError:
                    return

    def empty(self) -> None:
        (self.folder / FULL / FILLER).unlink(missing_ok=True)

    def kill_broker(self) -> None:
        self.broker.kill(forget=self.lives["broker"] % 2 == 0)
        self.broker.start()
        self.lives["broker"] += 1

    def kill_aggregator(self) -> None:
        self.end("aggregator", kill=True)
        self.start("aggregator")


@contextmanager
def small_disk(folder: Path) -> Iterator[bool]:
    """A file system of its own at ``folder``; False, and none, where this user may not mount one."""
    folder.mkdir(parents=True, exist_ok=True)
    command = ["mount", "-t", "tmpfs", "-o", f"size={HOME_MIB}m", "soak", str(folder)]
    mounted = subprocess.run(command, capture_output=True, check=False).returncode == 0
    try:
        yield mounted
    finally:
        if mounted:
            subprocess.run(["umount", "-l", str(folder)], check=False)


def soak(
    folder: Path, rounds: int, minutes: float, warm_up: int, say: Callable[[str], None], write: Callable[[Any], None]
) -> dict[str, Any]:
    """The result of ``rounds`` rounds, or of fewer where they take longer than ``minutes``. write(result): called every
    ten rounds. Raises AssertionError if a process ended by itself."""
    fleet = small_fleet(folder / "fleet", rounds=rounds, name="soak", train_graph=True)
    path = fleet.folder / "fleet.toml"
    text = path.read_text().replace("deadline_s = 120.0", "deadline_s = 10.0").replace("quorum = 0.5", "quorum = 0.25")
    text = text.replace("local_steps = 3", f"local_steps = {STEPS}")
    path.write_text(text.replace("\nrounds = 1000\n", f"\nrounds = {KEPT_ROUNDS}\n"))
    begun_s = time.monotonic()
    with small_disk(folder / FULL) as full, mosquitto(folder / "broker") as broker, programs_in(folder) as programs:
        for name in DEVICES:
            device(fleet, name, folder / name, engine="onnx")
        running = Running(folder, broker, programs, full, lives={"broker": 1})
        for name in ("aggregator", *DEVICES):
            running.start(name)
        done = 0
        while done < rounds and time.monotonic() - begun_s < 60 * minutes:
            time.sleep(0.1)
            running.check()
            if (now := running.closed()) == done:
                continue
            for number in range(done + 1, now + 1):
                running.disturb(number)
            done = now
            running.sample(done)
            result = _result(running, done, rounds, warm_up, time.monotonic() - begun_s)
            if done % 10 == 0:
                write(result)
                say(f"round {done} of {rounds}, {result['seconds']:.0f} s")
    write(result)
    return result


def _result(running: Running, done: int, rounds: int, warm_up: int, seconds: float) -> dict[str, Any]:
    return {
        "rounds": done, "planned": rounds, "warm_up": min(warm_up, done // 2), "seconds": round(seconds, 1),
        "devices": len(DEVICES), "kept_rounds": KEPT_ROUNDS, "full_disk": running.full_disk,
        "python": platform.python_version(), "machine": platform.machine(), "starts": running.lives,
        "counted": running.counted(), "events": running.events, "series": running.series,
    }
