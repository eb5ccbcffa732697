"""Fleets of two devices that learn a task without classes, for the tests of every task."""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from cloud_server.identity.create_fleet import create_fleet
from cloud_server.identity.device_folder import write_device_folder
from cloud_server.laboratory.compare import finished_runs
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import TaskEvaluation, Update
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.fleet_settings import FleetConfig
from cloud_server.results.evaluations import evaluated
from export.first_model import first
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import schema, trees
from fleet_core.link.loopback import LoopbackBroker
from fleet_core.link.mqtt import parse_url
from fleet_core.model.layout import InputSpec
from fleet_core.tasks.task import Task
from tests.support.brokers import accepts_connections, free_port
from tests.support.fleet_processes import processes
from tests.support.inprocess import World
from tests.support.train_graphs import packed

NAMES = ("a", "b")
FP32 = '[link]\nup = "fp32"\ndown = "fp32"\n'
"""No codec makes a rounding larger."""


@dataclass(frozen=True)
class TaskFleet:
    """Samples have 16 readings. task: lines of ``[model.task]``. write(path, seed, gain): a device's samples; gain: of
    its sensor. options: of ``[model]``. hyper: lines of ``[hyper]``. method, rounds: of ``[fleet]``."""

    task: str
    write: Callable[[Path, int, float], None]
    hyper: str
    options: str = "hidden = [16]"
    method: str = "fedavg-meta"
    rounds: int = 2

    def text(self, rounds: int = 0, method: str = "", hyper: str = "", link: str = "") -> str:
        """fleet.toml. hyper: more lines, or in place of those of the fleet."""
        lines = {line.partition("=")[0]: line for line in f"{self.hyper}\n{hyper}".splitlines()}
        return f"""\
[fleet]
name = "t"
method = "{method or self.method}"
rounds = {rounds or self.rounds}
min_devices = 2
serve_every = {rounds or self.rounds}
[model]
name = "mlp"
classes = []
input = {{ shape = [1, 16] }}
options = {{ {self.options} }}
[model.task]
{self.task}
[hyper]
{chr(10).join(lines.values())}
{link}
"""

    def created(self, folder: Path, *, without_torch: bool = True, **settings: Any) -> Fleet:
        """without_torch: with the graph for devices that train without torch. settings: of ``text``."""
        return create_fleet(folder, self.text(**settings), _exported, packed if without_torch else None)

    def made(self, folder: Path, **settings: Any) -> World:
        return World(folder, self.created(folder / "fleet", **settings), LoopbackBroker())

    def trained(self, folder: Path, *, engines: tuple[str, str] = ("torch", "torch"), **settings: Any) -> World:
        """The fleet after its last round, every model served and evaluated. Agents have a device.toml too. engines: of
        both devices."""
        made = self.made(folder, without_torch="onnx" in engines, **settings)
        made.start_server()
        for number, (name, engine) in enumerate(zip(NAMES, engines, strict=True)):
            device = home(made, name)
            device.mkdir(parents=True)
            self.write(device / "samples.npz", number, 1 + number / 5)
            made.start_agent(name, engine=engine)
            (device / "device.toml").write_text(
                f'[device]\nname = "{name}"\nfleet = "t"\nkey = "{made.fleet.public_key()}"\n')
        rounds = made.fleet.config.fleet.rounds
        assert made.pump(lambda: evaluated(made.server.ledger, rounds) == set(NAMES))
        return made

    def half_without_torch(self, folder: Path, **settings: Any) -> tuple[World, World]:
        """The fleet trained by torch, and with one device that has none; it asserts that both serve the same."""
        torch, mixed = (self.trained(folder / engine, link=FP32, engines=("torch", engine), **settings)
                        for engine in ("torch", "onnx"))
        assert {row.device for row in mixed.server.ledger.rows(Update, status="counted")} == set(NAMES)
        served = [one.server.checkpoint.state.served for one in (torch, mixed)]
        assert trees.norm(trees.subtract(*served)) <= 1e-5 * trees.norm(served[0])
        return torch, mixed

    @contextmanager
    def live(self, folder: Path, rounds: int) -> Iterator[Fleet]:
        """The fleet after two agents, processes of their own, have trained over the embedded broker."""
        made = self.created(folder / "fleet", rounds=rounds)
        for number in range(2):
            device = folder / f"d{number}"
            write_device_folder(made, device.name, device, "mqtt://127.0.0.1:1883")
            self.write(device / "samples.npz", number, 1 + number / 5)
        with processes(folder, f"mqtt://127.0.0.1:{free_port()}", hosts_broker=True) as running:
            running.start("server")
            running.until(lambda: accepts_connections(parse_url(running.url).port), "the embedded broker")
            running.start(*running.devices())

            def all_evaluated() -> bool:
                with Ledger(made.ledger_path, create=False) as ledger:
                    return evaluated(ledger, rounds) == {"d0", "d1"}

            running.until(all_evaluated, "the evaluations of the last model")
        yield made


def check_comparison(fleet: World, figure: str, stage: str, measure: str) -> None:
    """The fleet as ``metafleet compare`` reads it has the mean, best and worst of what its two devices reported."""
    run = finished_runs.read(fleet.fleet.folder)
    task, rounds = fleet.fleet.config.model.task, fleet.fleet.config.fleet.rounds
    assert task is not None
    by_hand = [task.of_sums(row.samples, row.sums).compared[figure]
               for row in fleet.server.ledger.rows(TaskEvaluation, stage=stage) if row.round == rounds]
    assert run.figure == figure
    assert [point.round for point in run.points] == [rounds]
    for scores in (run.points[-1].scores["devices"], run.last["devices"]):
        assert scores["mean"] == pytest.approx(sum(by_hand) / 2)
        assert {scores["worst"], scores["best"]} == set(by_hand)
        assert measure in scores
    assert run.last["devices"]["devices"] == 2


def home(fleet: World, name: str = "a") -> Path:
    return fleet.folder / "devices" / name


def _exported(settings: FleetConfig, head: bool) -> tuple[bytes, bytes]:
    options = json.dumps(dict(settings.model.options))
    return _first(settings.fleet.method, json.dumps(dict(settings.hyper)), options, settings.model.task)


@functools.cache
def _first(method: str, hyper: str, options: str, task: Task | None) -> tuple[bytes, bytes]:
    parameters = schema.read(METHODS[method].hyper, json.loads(hyper))[0]
    return first("mlp", InputSpec((1, 16)), (), json.loads(options), head=True, seed=0, method=METHODS[method],
                 hyper=parameters, task=task)
