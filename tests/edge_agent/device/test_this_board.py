"""How a device describes itself."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_server.ledger.ledger_tables import Device
from edge_agent.device import this_board
from fleet_core.board import probe
from fleet_core.board.device_settings import Board, Identity, Settings
from fleet_core.board.probe import Machine
from fleet_core.protocol.device_messages import MAX_BOARD
from tests.support.inprocess import config_text, toy, world

PI = "raspberry-pi-4b"


@pytest.mark.parametrize(("model", "profile", "said"), [
    ("Raspberry Pi 4 Model B Rev 1.4", PI, "Raspberry Pi 4 Model B Rev 1.4"),
    (None, PI, "Raspberry Pi 4 Model B"),
    (None, None, "aarch64"),
])
def test_a_device_is_named_by_its_device_tree_its_profile_or_its_architecture(
    model: str | None, profile: str | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(probe, "machine", lambda: Machine("aarch64", 64, 4, model=model))
    assert this_board.board_of(tmp_path, Settings(Identity("d0", "lab", "key"), board=Board(profile))) == said


def test_the_aggregator_knows_the_boards_of_its_devices_as_far_as_they_say_them(tmp_path: Path) -> None:
    w = world(tmp_path, config_text("fedavg", rounds=1, devices=2))
    w.start_server()
    w.start_agent("d0", toy(0), board="Raspberry Pi 5 " + "!" * MAX_BOARD)
    w.start_agent("d1", toy(1))
    assert w.pump(lambda: w.closed() == 1)
    boards = {row.name: row.capabilities["board"] for row in w.server.ledger.rows(Device)}
    assert boards == {"d0": ("Raspberry Pi 5 " + "!" * MAX_BOARD)[:MAX_BOARD], "d1": ""}
    w.close()
