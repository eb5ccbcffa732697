"""``metafleet flash`` over SSH from end to end: device file, fleet, token, package, a real sshd, and an inventory."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from cloud_server.devices import back_online
from cloud_server.devices import flash as flash_cli
from cloud_server.devices.flash_in_waves import WaveFlash
from cloud_server.devices.flash_over_ssh import Choices
from cloud_server.identity import audit_log
from cloud_server.ledger.ledger import Ledger
from firmware_profiles.package import program
from firmware_profiles.ssh import remote_install
from fleet_core import __version__
from fleet_core.base.errors import ConfigError, FlashError
from fleet_core.protocol import enrolment_token
from tests.support.loopback_board import DEAF, Board, make_program
from tests.support.pki import lab_fleet
from tests.support.waiting import until

pytestmark = [pytest.mark.needs("sshd", "ssh", "unshare", "nsenter", "flock", "pkill"), pytest.mark.slow]

DEVICE = """name = "kitchen"
fleet = "lab"
board = "x86-64"
broker = "mqtts://broker.invalid"

[data]
samples = "/srv/samples.npz"
"""


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A fleet with certificates, a device file and a cached program."""
    lab_fleet(tmp_path)
    (tmp_path / "kitchen.toml").write_text(DEVICE)
    monkeypatch.setattr(remote_install, "POLL_S", 0.05)
    monkeypatch.setattr(back_online, "CONNECT_S", 0.1)
    monkeypatch.setattr(back_online, "POLL_S", 0.05)
    made(monkeypatch, tmp_path, "aaa")
    return tmp_path


def made(patch: pytest.MonkeyPatch, folder: Path, build: str, **agent: str) -> None:
    built = make_program(folder, f"{__version__}-{build}", **agent)
    patch.setattr(program, "make", lambda *_, **__: built)


def flash(desk: Path, board: Board, *, dry_run: bool = False, patience_s: int = 300) -> None:
    flash_cli.flash(desk / "kitchen.toml", board.url(), ssh_config=board.config, patience_s=patience_s,
                    dry_run=dry_run, as_json=True)


def invitations(desk: Path) -> list[str]:
    with Ledger(desk / "lab/ledger.sqlite", create=False) as ledger:
        return [key.removeprefix("invite/") for key in ledger.requests() if key.startswith("invite/")]


def test_a_device_gets_its_token_last_and_it_is_printed_nowhere(
    desk: Path, board: Board, tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    flash(desk, board, dry_run=True)
    shown = json.loads(capfd.readouterr().out)
    assert (shown["written"], shown["runs"], shown["enrolled"]) == (False, "", False)
    assert shown["settings"]["/var/lib/metafleet/enrol.token"] == "********\n"
    assert 'samples = "/srv/samples.npz"' in shown["settings"]["/etc/metafleet/device.toml"]
    assert "NoNewPrivileges=yes" in shown["settings"]["/etc/systemd/system/metafleet.service"]
    flash_cli.flash(desk / "kitchen.toml", board.url(), ssh_config=board.config, dry_run=True)
    plan = capfd.readouterr().out
    assert "kitchen at ssh://root@127.0.0.1" in plan
    assert "\n--- /etc/metafleet/device.toml\n" in plan
    assert invitations(desk) == []
    assert not board.path("/opt/metafleet").exists()
    flash(desk, board)
    printed = capfd.readouterr()
    assert json.loads(printed.out)["version"] == f"{__version__}-aaa"
    issued = enrolment_token.load(board.path("/var/lib/metafleet/enrol.token"))
    assert invitations(desk) == [issued.id]
    assert issued.device == "kitchen"
    for secret in (issued.private_key, issued.certificate):
        assert secret not in printed.out + printed.err
    assert board.sh("readlink /var/lib/metafleet/device.toml") == "/etc/metafleet/device.toml\n"
    assert '[data]\nsamples = "/srv/samples.npz"\n' in board.path("/etc/metafleet/device.toml").read_text()
    flash(desk, board)
    assert not json.loads(capfd.readouterr().out)["changed"]
    assert invitations(desk) == [issued.id]


def test_a_device_that_is_refused_costs_no_token(desk: Path, board: Board) -> None:
    board.answer_with("getconf LONG_BIT", "32")
    with pytest.raises(FlashError, match="32-bit"):
        flash(desk, board)
    assert invitations(desk) == []


def test_an_inventory_continues_where_one_fails_and_again_does_the_rest(
    desk: Path, board: Board, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    (desk / "nowhere.toml").write_text(DEVICE.replace("kitchen", "nowhere"))
    path = desk / "inventory.toml"
    path.write_text(f'[[devices]]\nfile = "nowhere.toml"\nto = "ssh://root@127.0.0.1:1"\n\n'
                    f'[[devices]]\nfile = "kitchen.toml"\nto = "{board.url()}"\n')
    for changed in (True, False):
        with pytest.raises(FlashError, match=r"1 of 2 devices failed:\nnowhere: .*no connection"):
            flash_cli.flash(inventory=path, jobs=2, ssh_config=board.config, as_json=True)
        result = json.loads(capfd.readouterr().out)
        assert [(each["device"], each["ok"]) for each in result] == [("nowhere", False), ("kitchen", True)]
        assert result[1]["changed"] is changed


def test_the_consoles_waves_flash_a_device_and_halt_at_one_that_fails_or_is_not_the_fleets(
    desk: Path, board: Board
) -> None:
    (desk / "nowhere.toml").write_text(DEVICE.replace("kitchen", "nowhere"))
    (desk / "last.toml").write_text(DEVICE.replace("kitchen", "last"))
    path = desk / "inventory.toml"
    entries = (("kitchen", board.url()), ("nowhere", "ssh://root@127.0.0.1:1"), ("last", "ssh://root@127.0.0.1:2"))
    path.write_text("".join(f'[[devices]]\nfile = "{name}.toml"\nto = "{to}"\n' for name, to in entries))
    waves = WaveFlash(desk / "lab", path, Choices(board.config, fleet=desk / "lab"))
    waves.begin("1", 0, lambda: audit_log.recorded(desk / "lab", "me", "flash"))
    until(lambda: not waves.going)
    found = waves.values()
    assert found["w/0"]["state"] == "done"
    assert f"{__version__}-aaa runs" in found["w/0"]["stage"]
    assert "1 of 3 devices run it; 1 failed: nowhere: " in found["flash"]["text"]
    assert "halted, because more than 0 had failed: 1 were not begun" in found["flash"]["text"]
    (desk / "other").mkdir()
    lab_fleet(desk / "other")
    waves = WaveFlash(desk / "other/lab", path, Choices(board.config, fleet=desk / "other/lab"))
    waves.begin("1", 0, lambda: audit_log.recorded(desk / "other/lab", "me", "flash"))
    until(lambda: not waves.going)
    assert "is a device of another fleet" in waves.values()["flash"]["text"]


def test_a_broken_update_is_taken_back_and_the_command_fails(
    desk: Path, board: Board, monkeypatch: pytest.MonkeyPatch
) -> None:
    flash(desk, board)
    made(monkeypatch, desk, "bbb", agent=DEAF)
    with pytest.raises(FlashError, match=f"did not come back(.|\n)*back on {__version__}-aaa") as error:
        flash(desk, board, patience_s=0)
    assert error.value.exit_code == 1
    assert "no broker answers here" in str(error.value)


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({"device": None, "to": "ssh://pi@host"}, "no device is named"),
        ({"device": Path("a.toml")}, "--to is missing"),
        ({"device": Path("a.toml"), "inventory": Path("all.toml")}, "already names the devices"),
        ({"device": Path("a.toml"), "to": "ssh://pi:secret@host"}, "a password in an address"),
    ],
)
def test_a_command_that_is_not_whole_is_told_what_is_missing(options: dict[str, Any], expected: str) -> None:
    with pytest.raises(ConfigError, match=expected):
        flash_cli.flash(**options)
