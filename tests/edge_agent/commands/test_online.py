"""An agent that has reached its broker records that in its home."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from edge_agent.commands import online_note, run
from fleet_core import __version__
from fleet_core.base.errors import LinkError
from fleet_core.board.device_settings import settings_of
from fleet_core.link.loopback import LoopbackBroker, LoopbackLink

DEVICE = '[device]\nname = "d0"\nfleet = "lab"\nkey = "' + "0" * 64 + '"\n[train]\nenabled = false\n'


def start(home: Path, broker: LoopbackBroker, patch: pytest.MonkeyPatch) -> None:
    """One turn of an agent's process, with a link that needs no network."""
    (home / "device.toml").write_text(DEVICE)
    patch.setattr(run, "MqttLink", lambda url, *, client_id, will: LoopbackLink(broker, client_id, will))
    lines: list[str] = []
    run.run(home, settings_of(home), stopped=lambda: any("is on" in line for line in lines), log=lines.append,
            connect_s=0.1)


def test_an_agent_that_reached_its_broker_writes_a_note_of_this_start(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / online_note.NAME).write_text('{"boot": "an earlier start"}')
    start(tmp_path, LoopbackBroker(), monkeypatch)
    note = json.loads((tmp_path / online_note.NAME).read_text())
    assert note["version"] == __version__
    assert note["boot"] != "an earlier start"
    assert len(note["boot"]) == 16


def test_an_agent_without_a_broker_writes_no_note(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    broker = LoopbackBroker()
    broker.stop()
    with pytest.raises(LinkError):
        start(tmp_path, broker, monkeypatch)
    assert not (tmp_path / online_note.NAME).exists()


def test_a_note_that_cannot_be_written_is_only_logged(tmp_path: Path) -> None:
    (tmp_path / "home").write_text("no folder")
    lines: list[str] = []
    online_note.write(tmp_path / "home", "boot", lines.append)
    assert "will not see" in lines[0]
