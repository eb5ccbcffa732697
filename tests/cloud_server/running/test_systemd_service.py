"""``metafleet server install``: the unit, who it runs as, and what systemd is told."""

from __future__ import annotations

import configparser
import os
import pwd
import shlex
import shutil
from pathlib import Path
from types import SimpleNamespace

import pytest

from cloud_server.commands import cli
from cloud_server.records.fleet_folder import Fleet
from cloud_server.running import systemd_service
from fleet_core.base import processes
from fleet_core.base.errors import ConfigError, StateError
from tests.support.cli import runner


@pytest.fixture
def fleet(finished: Path, tmp_path: Path) -> Fleet:
    shutil.copytree(finished / "fleet", tmp_path / "fleet")
    return Fleet.load(tmp_path / "fleet")


class Unit(configparser.ConfigParser):
    """Keeps the case of keys."""

    def optionxform(self, optionstr: str) -> str:
        return optionstr


def parsed(text: str) -> configparser.ConfigParser:
    unit = Unit(interpolation=None)
    unit.read_string(text)
    return unit


def systemctl(folder: Path, monkeypatch: pytest.MonkeyPatch, refuses: str = "nothing") -> Path:
    """A systemctl in PATH that writes down what it was told, and fails at a word."""
    told, program = folder / "told", folder / "bin" / "systemctl"
    program.parent.mkdir()
    program.write_text(f'#!/bin/sh\necho "$*" >> {told}\ncase "$*" in *{refuses}*) echo no >&2; exit 1;; esac\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{program.parent}{os.pathsep}{os.environ['PATH']}")
    return told


def test_a_service_of_ones_own_starts_the_aggregator_and_may_write_to_its_folder_alone(
    fleet: Fleet, tmp_path: Path
) -> None:
    made = systemd_service.service_of(fleet, ["--port", "8883"], user=True, home=tmp_path)
    assert made.path == tmp_path / ".config/systemd/user/metafleet-desk.service"
    unit = parsed(made.text)
    command = shlex.split(unit["Service"]["ExecStart"])
    assert command == processes.command("cloud_server.commands.cli", "server", "start", str(fleet.folder.resolve()),
                                        "--quiet", "--port", "8883")
    assert Path(command[0]).is_absolute()
    assert (unit["Service"]["ProtectSystem"], unit["Service"]["ReadWritePaths"]) == ("strict", str(fleet.folder))
    assert "User" not in unit["Service"]
    assert unit["Install"]["WantedBy"] == "default.target"


def test_a_service_of_the_system_runs_as_the_owner_of_the_folder_and_never_as_root(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    owner = SimpleNamespace(st_uid=0)
    monkeypatch.setattr(Path, "stat", lambda path, **how: owner)
    monkeypatch.setattr(pwd, "getpwuid", {1: SimpleNamespace(pw_name="fleets")}.__getitem__)
    with pytest.raises(ConfigError, match="belongs to root"):
        systemd_service.service_of(fleet, [], user=False)
    owner.st_uid = 1
    made = systemd_service.service_of(fleet, [], user=False)
    assert parsed(made.text)["Service"]["User"] == "fleets"
    assert made.path == Path("/etc/systemd/system/metafleet-desk.service")
    owner.st_uid = 2
    assert parsed(systemd_service.service_of(fleet, [], user=False).text)["Service"]["User"] == "2"


def test_a_path_that_a_unit_cannot_name_is_refused(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "my fleet"
    shutil.copytree(finished / "fleet", folder)
    with pytest.raises(ConfigError, match="a unit file cannot contain this path"):
        systemd_service.service_of(Fleet.load(folder), [], user=True)


def test_it_is_written_enabled_and_started(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = systemctl(tmp_path, monkeypatch)
    made = systemd_service.service_of(fleet, [], user=True, home=tmp_path)
    systemd_service.install(made)
    assert made.path.read_text() == made.text
    assert told.read_text().splitlines() == [
        "--user daemon-reload", "--user enable metafleet-desk.service", "--user restart metafleet-desk.service"]


def test_what_systemd_refuses_is_told(fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    systemctl(tmp_path, monkeypatch, refuses="enable")
    with pytest.raises(StateError, match=r"systemctl enable metafleet-desk\.service: no"):
        systemd_service.install(systemd_service.service_of(fleet, [], user=True, home=tmp_path))


def test_without_systemd_or_root_nothing_is_written(
    fleet: Fleet, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = systemd_service.service_of(fleet, [], user=True, home=tmp_path)
    monkeypatch.setattr(shutil, "which", lambda name: None)
    with pytest.raises(ConfigError, match="there is no systemctl"):
        systemd_service.install(made)
    monkeypatch.setattr(shutil, "which", lambda name: "/bin/true")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    with pytest.raises(ConfigError, match="needs root"):
        systemd_service.install(systemd_service.Service(tmp_path / "a.service", "", user=False))
    assert not made.path.exists()
    assert not (tmp_path / "a.service").exists()


def test_the_unit_is_printed_with_the_options_of_start(
    fleet: Fleet, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(monkeypatch, capsys, "metafleet", cli.main)
    ended = run("server", "install", fleet.folder, "--user", "--print", "--broker", "mqtts://broker:8883")
    assert ended.code == 0
    assert parsed(ended.out)["Service"]["ExecStart"].endswith("--quiet --broker mqtts://broker:8883")
