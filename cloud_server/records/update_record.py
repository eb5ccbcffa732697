"""``state/update.json``: the progress of an update that devices fetch themselves, wave by wave.

The file is written before anything is published, so that a killed aggregator continues from it.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TypeVar

from fleet_core.base import schema, storage

T = TypeVar("T")

FOLDER = "updates"
"""In the fleet's folder. Each update has a folder in it, named by the serial, with the package and PLAN."""
PLAN = "plan.json"
MAX_BYTES = 1 << 26
DEFAULT_WITHIN_S = 86400.0

WAITING, GOING, DONE, FAILED = "waiting", "going", "done", "failed"
RUNNING, HALTED, ENDED, ABORTED = "running", "halted", "ended", "aborted"
ASKED_IN = {"resume": (HALTED, ABORTED), "abort": (RUNNING, HALTED)}
"""Request of an operator -> the states of an update in which it is allowed."""


@dataclass(frozen=True)
class OneDevice:
    """wave: from 0 on. why: the reason of a failure."""

    wave: int
    st: str = field(default=WAITING, metadata={"choices": (WAITING, GOING, DONE, FAILED)})
    why: str = field(default="", metadata={"max_length": 600})


@dataclass(frozen=True)
class Plan:
    """What the operator asked for. system: the system that the program is for, as ``aarch64 3.13``. devices: in the
    order of the waves. sizes: number of devices in each wave, the last number repeated; empty for one wave.
    most_failures: the largest number of failures with which a further wave begins. within_s: how long a wave may take.
    url: an https address of the program, or empty."""

    serial: int
    version: str
    system: str
    devices: tuple[str, ...]
    sizes: tuple[int, ...] = ()
    most_failures: int = 0
    within_s: float = DEFAULT_WITHIN_S
    url: str = ""


@dataclass(frozen=True)
class Update:
    """An update and its progress. attempt: higher with each "resume". seq: of the last announcement. began_at: of the
    wave, Unix seconds; 0 before the first. why: the reason of a halt."""

    plan: Plan
    devices: Mapping[str, OneDevice]
    st: str = field(default=RUNNING, metadata={"choices": (RUNNING, HALTED, ENDED, ABORTED)})
    why: str = ""
    attempt: int = 1
    wave: int = -1
    began_at: float = 0.0
    seq: int = 0

    def of(self, *states: str) -> list[str]:
        """The devices in these states, in the order of their names."""
        return sorted(name for name, one in self.devices.items() if one.st in states)

    def moved(self, name: str, st: str, why: str = "") -> Update:
        """The update with one device in another state."""
        return replace(self, devices={**self.devices, name: replace(self.devices[name], st=st, why=why[:600])})

    def next_wave(self, now: float) -> Update:
        """The update with the devices of its next wave under way."""
        wave = min(one.wave for one in self.devices.values() if one.st == WAITING)
        going = {name: replace(one, st=GOING) if one.wave == wave and one.st == WAITING else one
                 for name, one in self.devices.items()}
        return replace(self, devices=going, wave=wave, began_at=now)

    def again(self) -> Update:
        """The update restarted for every device that is not done, in waves from the first size on."""
        left = [name for name in self.plan.devices if self.devices[name].st != DONE]
        devices = {**self.devices, **in_waves(left, self.plan.sizes)}
        return replace(self, devices=devices, st=RUNNING, why="", attempt=self.attempt + 1, wave=-1, began_at=0.0)


def begun(plan: Plan) -> Update:
    """The update before its first wave."""
    return Update(plan, in_waves(plan.devices, plan.sizes))


def in_waves(names: Sequence[str], sizes: Sequence[int]) -> dict[str, OneDevice]:
    """Device -> its state before its wave."""
    return {name: OneDevice(wave) for name, wave in zip(names, _waves(len(names), sizes), strict=True)}


def _waves(count: int, sizes: Sequence[int]) -> Iterator[int]:
    left, wave = count, 0
    while left:
        size = min(left, sizes[min(wave, len(sizes) - 1)] if sizes else left)
        yield from [wave] * size
        left, wave = left - size, wave + 1


def path_in(fleet: Path) -> Path:
    return fleet / "state" / "update.json"


def read(fleet: Path) -> Update | None:
    """The fleet's last update; None if it never had one. Raises StateError for a damaged file."""
    path = path_in(fleet)
    return _read(Update, path) if path.exists() else None


def read_plan(folder: Path) -> Plan:
    """Raises StateError."""
    return _read(Plan, folder / PLAN)


def write(fleet: Path, update: Update) -> None:
    """Raises StateError."""
    storage.write_json(path_in(fleet), schema.plain(update))


def _read(kind: type[T], path: Path) -> T:
    return schema.stored(kind, storage.read_bytes(path, limit=MAX_BYTES), path, "start the update again")
