"""An update from the aggregator to the devices' disks, over a real broker: real agents, real update.sh in fake roots.

The installed program is a stand-in that only reports that it has reached its broker, or does not.
"""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from cloud_server.records import update_record
from cloud_server.records.update_record import Update
from edge_agent.commands.run import service_of
from edge_agent.compute.trainer import InlineTrainer
from edge_agent.device.agent_costs import AgentCosts
from edge_agent.device.state import DeviceState
from edge_agent.rounds import reports
from edge_agent.rounds.agent import Agent
from edge_agent.rounds.agent import will as agent_will
from edge_agent.updates.program_updates import ProgramUpdates
from firmware_profiles.package.device_package import Signing
from fleet_core.board.device_settings import settings_of
from tests.support.brokers import private_broker
from tests.support.fake_root import AGENT, GOOD, FakeRoot, an_update, fake_root
from tests.support.fleet_processes import FLEET, tiny_fleet
from tests.support.stepped_fleet import SteppedFleet
from tests.support.updating import begin

pytestmark = [pytest.mark.slow, pytest.mark.needs("flock")]

NAMES = ("d0", "d1", "d2")
ONLY_ON_D0 = GOOD.replace(AGENT, AGENT + 'case $METAFLEET_ROOT in */root-d0) ;; *) exit ;; esac\n')


class LiveFleet(SteppedFleet):
    """Each device has a root folder of its own, and a home in it."""

    def __init__(self, folder: Path, url: str):
        super().__init__(folder, url)
        self.signing = Signing(FLEET, self.fleet.signer())
        self.roots: dict[str, FakeRoot] = {}
        self.starts = 0
        for name in NAMES:
            (folder / f"root-{name}").mkdir()
            self.roots[name] = fake_root(folder / f"root-{name}", signing=self.signing)

    def start_agent(self, name: str, url: str = "") -> Agent:
        self.starts += 1
        home, settings, boot = self.folder / name, settings_of(self.folder / name), f"boot-{name}-{self.starts}"
        inbox = self.roots[name].inbox
        if not (home / "update").is_symlink():
            (home / "update").symlink_to(inbox)
        link = self._link(f"{name}-{self.starts}", agent_will(settings, boot), url)
        updates = ProgramUpdates(
            FLEET, name, self.fleet.public_key(), home, link, self.roots[name].runs,
            clock=time.monotonic, now_ms=lambda: int(time.time() * 1000),
            log=lambda line: self.lines.append(f"{name}: {line}"), result=self.roots[name].programs / "update-result",
        )
        agent = Agent(
            settings, DeviceState(home), link, service_of(home, settings), AgentCosts(), InlineTrainer(),
            updates=updates, boot=boot, log=lambda line: self.lines.append(f"{name}: {line}"),
        )
        self.agents[name] = agent
        link.open()
        return agent

    def step(self) -> None:
        super().step()
        for name, root in self.roots.items():
            if (root.inbox / "ready").exists():  # metafleet-update.path
                before = root.runs
                root.update("pull")
                if root.runs != before:  # its process is one of the new version
                    self.agents.pop(name).close()
                    self.start_agent(name)

    @property
    def update(self) -> Update | None:
        return update_record.read(self.fleet.folder)

    def ended(self, version: str) -> bool:
        found = self.update
        return found is not None and found.plan.version == version and found.st in ("ended", "halted")


@pytest.mark.parametrize("kind", [pytest.param("mosquitto", marks=pytest.mark.needs("mosquitto")), "amqtt"])
def test_a_good_program_reaches_all_and_a_broken_one_halts_where_it_breaks(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    folder = tiny_fleet(tmp_path, rounds=1, devices=3)
    with private_broker(tmp_path / "broker", kind) as broker:
        live = LiveFleet(folder, broker.url)
        ver: dict[Any, str] = {}
        monkeypatch.setattr(reports, "running", lambda: ver.get("now", "1.0-aaa"))
        announce = Agent._announce

        def announce_as(agent: Agent, *, again: bool = False) -> None:
            ver["now"] = live.roots[agent.name].runs
            announce(agent, again=again)

        monkeypatch.setattr(Agent, "_announce", announce_as)
        try:
            live.start()
            live.until(lambda: len([d for d in live.ledger.devices() if d.capabilities.get("update")]) == 3, "on")
            begin(live.fleet.folder, live.ledger, an_update(tmp_path, "1.1-bbb", signing=live.signing), NAMES,
                  sizes=(1, 2))
            live.until(lambda: live.ended("1.1-bbb"), "the good one")
            assert {name: root.runs for name, root in live.roots.items()} == dict.fromkeys(NAMES, "1.1-bbb")
            broken = an_update(tmp_path, "1.2-ccc", ONLY_ON_D0, signing=live.signing)
            begin(live.fleet.folder, live.ledger, broken, NAMES, sizes=(1,))
            live.until(lambda: live.ended("1.2-ccc"), "the broken one")
        finally:
            live.close()
        found = live.update
        assert found is not None
        assert (found.st, found.of("done"), found.of("failed"), found.of("waiting")) == (
            "halted", ["d0"], ["d1"], ["d2"])
        assert "went back: its agent did not reach its broker" in found.devices["d1"].why
        assert [live.roots[name].runs for name in NAMES] == ["1.2-ccc", "1.1-bbb", "1.1-bbb"]
