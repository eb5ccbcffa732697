"""A fleet in one process whose devices fetch programs; in place of root a test answers, or ``update.sh`` does."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from cloud_server.records import update_record
from cloud_server.records.update_record import Plan, Update
from edge_agent.updates.program_updates import ProgramUpdates
from firmware_profiles.package.device_package import Signing
from firmware_profiles.pulled import update_package
from firmware_profiles.pulled.update_package import UpdatePackage
from fleet_core.base import schema, storage
from fleet_core.protocol import program_statement
from tests.support.inprocess import World

OLD, NEW = "1.0-aaa", "1.1-bbb"


class UpdatingFleet:
    """``versions``: device -> the program that runs there. answers: device -> (outcome, why) of root."""

    def __init__(self, world: World, names: Sequence[str], answers: dict[str, tuple[str, str]] | None = None):
        self.world, self.answers = world, answers or {}
        self.versions = dict.fromkeys(names, OLD)
        for name in names:
            self.start(name)

    def running(self) -> str:
        """In place of ``edge_agent.device.version.running``."""
        return self.versions.get(self.world.acting, OLD)

    def start(self, name: str) -> None:
        world = self.world

        def updates(link: Any, home: Path) -> ProgramUpdates:
            return ProgramUpdates(
                world.name, name, world.fleet.public_key(), home, link, self.versions[name], clock=world.clock,
                now_ms=world.clock.ms, log=lambda line: world.lines.append(f"{name}: {line}"),
                result=home / "update-result")

        world.acting = name
        world.start_agent(name, train=False, updates=updates)

    def home(self, name: str) -> Path:
        return self.world.folder / "devices" / name

    def step(self) -> None:
        self.world.step(0.1)
        for name in list(self.versions):
            ready = self.home(name) / "update" / "ready"
            if name in self.world.agents and ready.exists():
                self.as_root(name, ready)

    def as_root(self, name: str, ready: Path) -> None:
        """What update.sh does, as far as the agent sees it."""
        serial, attempt = ready.read_text().split()
        ready.unlink()
        outcome, why = self.answers.get(name, ("running", ""))
        if outcome == "silent":
            return
        if outcome == "running":
            self.versions[name] = NEW
        (self.home(name) / "update-result").write_text(
            f"serial={serial}\nattempt={attempt}\noutcome={outcome}\nwhy={why}\n")
        if outcome == "running":  # a new process of the new version
            self.world.kill_agent(name)
            self.start(name)

    def until(self, true: Callable[[], object], steps: int = 4000) -> None:
        for _ in range(steps):
            if true():
                return
            self.step()
        raise AssertionError("\n".join(self.world.lines[-30:]))

    def begin(self, package: UpdatePackage, names: Sequence[str], **plan: Any) -> None:
        """As ``metafleet updates start``."""
        begin(self.world.fleet.folder, self.world.server.ledger, package, names, **plan)

    @property
    def update(self) -> Update:
        found = update_record.read(self.world.fleet.folder)
        assert found is not None
        return found

    @property
    def st(self) -> str:
        found = update_record.read(self.world.fleet.folder)
        return "" if found is None else found.st


def begin(fleet: Path, ledger: Any, package: UpdatePackage, names: Sequence[str], **plan: Any) -> None:
    serial = program_statement.parse(package.statement.partition(b"\n")[2]).serial
    folder = fleet / update_record.FOLDER / str(serial)
    update_package.save(package, folder)
    made = Plan(serial, package.version, package.system, tuple(names), **plan)
    storage.write_json(folder / update_record.PLAN, schema.plain(made))
    ledger.request("update", f"start {serial}")


def signing(world: World) -> Signing:
    return Signing(world.name, world.fleet.signer())
