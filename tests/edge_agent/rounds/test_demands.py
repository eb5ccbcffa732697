"""A device that demands secure aggregation or noise trains in no round without it, whatever the aggregator asks for."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_server.ledger.ledger_tables import Update
from cloud_server.membership import inability
from fleet_core.board.device_settings import Demands
from tests.support.inprocess import World, config_text, toy, world
from tests.support.stand_ins import BrokerFaults
from tests.support.world_checks import settled

pytestmark = pytest.mark.usefixtures("no_fsync", "torch_threads")

SECURE = "secure_aggregation = true\nrange = 0.5"
NOISE = 'mode = "local"\nclip = 1.0\nnoise_multiplier = 0.5'


def fleet(folder: Path, privacy: str, **demands: Demands) -> World:
    """Four devices, of which those in ``demands`` demand something; one round."""
    text = config_text("fedavg", rounds=1, devices=3, fleet="quorum = 0.5\ndeadline_s = 50")
    w = world(folder, f"{text}\n[privacy]\n{privacy}\n")
    w.start_server()
    for n in range(4):
        w.start_agent(f"d{n}", toy(n), demands=demands.get(f"d{n}", Demands()))
    assert w.pump(lambda: w.closed() == 1 and settled(w)), w.lines[-20:]
    return w


def counted(w: World) -> set[str]:
    return {row.device for row in w.server.ledger.rows(Update, status="counted")}


def why_not(w: World, name: str) -> str:
    return next(device.cannot or "" for device in w.server.ledger.devices() if device.name == name)


@pytest.mark.parametrize(("demand", "reason"), [
    (Demands(secure_aggregation=True), "it demands secure aggregation"),
    (Demands(noise_multiplier=2.0), "it demands local noise of 2 times the clip, and adds 0.5 here"),
])
def test_a_device_whose_demand_is_not_met_is_not_asked_and_the_reason_is_shown(
    tmp_path: Path, demand: Demands, reason: str
) -> None:
    w = fleet(tmp_path, NOISE, d0=demand)
    assert counted(w) == {"d1", "d2", "d3"}
    assert why_not(w, "d0") == f"its [privacy] keeps it out: {reason}"
    w.close()


@pytest.mark.parametrize(("privacy", "demand"), [
    (SECURE, Demands(secure_aggregation=True)),
    (NOISE, Demands(noise_multiplier=0.5)),
])
def test_a_device_whose_demand_is_met_takes_part(tmp_path: Path, privacy: str, demand: Demands) -> None:
    w = fleet(tmp_path, privacy, d0=demand)
    assert counted(w) == {"d0", "d1", "d2", "d3"}
    assert why_not(w, "d0") == ""
    w.close()


def test_an_aggregator_that_asks_anyway_gets_no_update_and_no_trained_weights(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(inability, "Demands", lambda *demanded: Demands())
    w = fleet(tmp_path, NOISE, d0=Demands(secure_aggregation=True))
    assert counted(w) == {"d1", "d2", "d3"}
    assert any("d0: train: this device's [privacy] keeps it out: it demands secure aggregation" in line
               for line in w.lines)
    assert w.agents["d0"].home.pending() is None
    w.close()


def test_what_was_made_to_be_masked_is_not_sent_when_the_round_goes_on_in_the_open(tmp_path: Path) -> None:
    text = config_text("fedavg", rounds=1, devices=4, fleet="quorum = 0.5\ndeadline_s = 50")
    w = world(tmp_path, f"{text}\n[privacy]\n{SECURE}\n")
    w.start_server()
    for n in range(4):
        w.start_agent(f"d{n}", toy(n))
    assert w.pump(lambda: all(agent.home.pending() is not None for agent in w.agents.values())), w.lines[-10:]
    assert w.server.open.secure.phase == "keys"
    w.kill_server()
    (w.fleet.folder / "fleet.toml").write_text(text, encoding="utf-8")
    w.start_server()
    w.broker.faults = faults = BrokerFaults()
    assert w.pump(lambda: all(agent.home.pending() is None for agent in w.agents.values())), w.lines[-20:]
    assert faults.seen
    assert not [message.topic for _, message in faults.seen if "/up/" in message.topic]
    w.close()
