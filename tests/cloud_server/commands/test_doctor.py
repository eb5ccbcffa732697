"""``metafleet doctor``: what is wrong with the operator's machine, and what to do."""

from __future__ import annotations

import importlib.util
import json
import re
import resource
import shutil
import socket
from pathlib import Path
from typing import Any

import pytest

from cloud_server.broker import private_broker
from cloud_server.commands import cli, doctor
from cloud_server.records.fleet_folder import Fleet
from tests.support.cli import runner
from tests.support.paths import ROOT


@pytest.fixture
def programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The only folder in PATH."""
    folder = tmp_path / "bin"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder))
    monkeypatch.setattr(private_broker, "SERVER_FOLDERS", ())
    return folder


def program(folder: Path, name: str, says: str) -> None:
    made = folder / name
    made.write_text(f"#!/bin/sh\necho {says}\n")
    made.chmod(0o755)


@pytest.mark.parametrize(("says", "state"), [("yes", "ok"), ("no", "wrong"), ("", "note")])
def test_a_clock_that_is_not_synchronized_is_wrong_and_an_unknown_one_is_a_note(
    programs: Path, says: str, state: str
) -> None:
    if says:
        program(programs, "timedatectl", says)
    assert doctor.clock().state == state


def test_the_ports_that_a_firewall_must_let_through_are_named(programs: Path, tmp_path: Path) -> None:
    assert doctor.firewall((8883,), tmp_path).state == "ok"
    program(programs, "firewall-cmd", "running")
    assert "--add-port=1/tcp --add-port=2/tcp" in doctor.firewall((1, 2), tmp_path).hint
    (tmp_path / "etc/ufw").mkdir(parents=True)
    (tmp_path / "etc/ufw/ufw.conf").write_text("# a comment\nENABLED=yes\nLOGLEVEL=low\n")
    assert doctor.firewall((8883, 8884), tmp_path).hint == "sudo ufw allow 8883/tcp; sudo ufw allow 8884/tcp"


def test_a_missing_broker_is_wrong_where_nothing_takes_its_place(
    programs: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    specs = {"amqtt": object()}
    monkeypatch.setattr(importlib.util, "find_spec", specs.get)
    program(programs, "apt-get", "")
    assert (doctor.broker().state, doctor.broker().hint) == ("note", private_broker.install_command())
    specs.clear()
    assert doctor.broker().state == "wrong"
    program(programs, "mosquitto", "")
    assert doctor.broker() == doctor.Finding("broker", "ok", str(programs / "mosquitto"))


def test_packages_that_are_not_installed_are_named_with_what_needs_them(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == "yaml" else object())
    (one,) = doctor.packages()
    assert (one.state, one.found, one.hint) == (
        "note", "yaml not installed, needed for flash", 'pip install "metafleet[flash]"')


def test_a_port_in_use_is_said_and_that_of_the_running_fleet_is_right(
    finished: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fleet = Fleet.load(finished / "fleet")
    with socket.socket() as taken:
        taken.bind(("0.0.0.0", 0))
        taken.listen()
        port = taken.getsockname()[1]
        monkeypatch.setattr(doctor, "_ports", lambda fleet: (port,))
        assert {one.state for one in doctor.ports(None)} == {"note"}
        assert "in use" in next(doctor.ports(fleet)).found
        with fleet.lock():
            assert {one.state for one in doctor.ports(fleet)} == {"ok"}
    assert {one.state for one in doctor.ports(None)} == {"ok"}


def test_few_open_files_and_a_full_disk_are_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resource, "getrlimit", lambda what: (256, 256))
    assert (doctor.open_files().state, doctor.open_files().hint) == ("note", "ulimit -n 65536")
    monkeypatch.setattr(resource, "getrlimit", lambda what: (resource.RLIM_INFINITY,) * 2)
    assert doctor.open_files().state == "ok"
    assert doctor.room(tmp_path).state == "ok"
    monkeypatch.setattr(shutil, "disk_usage", lambda folder: shutil._ntuple_diskusage(1 << 30, 1 << 30, 1 << 20))
    assert doctor.room(tmp_path).state == "wrong"


def test_the_command_ends_with_1_if_something_is_wrong(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    run = runner(monkeypatch, capsys, "metafleet", cli.main)
    found: list[Any] = [doctor.Finding("clock", "ok", "synchronized")]
    monkeypatch.setattr(doctor, "examine", lambda folder: found)
    assert run("doctor").code == 0
    found.append(doctor.Finding("disk", "wrong", "full", "make room"))
    ended = run("doctor")
    assert (ended.code, ended.out.splitlines()) == (
        1, ["ok     clock  synchronized", "wrong  disk   full", "              hint: make room"])
    assert [one["state"] for one in json.loads(run("doctor", "--json").out)] == ["ok", "wrong"]


def test_a_folder_that_is_no_fleets_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ended = runner(monkeypatch, capsys, "metafleet", cli.main)("doctor", tmp_path)
    assert ended.code == 2
    assert "there is no fleet here" in ended.err


def test_every_extra_of_an_operator_and_that_of_private_updates_is_looked_for() -> None:
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    extras = dict(re.findall(r'^(aggregator|operator) = \["metafleet\[([\w,]+)\]"\]$', project, re.MULTILINE))
    assert extras.keys() == {"aggregator", "operator"}
    named = {name for extra in extras.values() for name in extra.split(",")}
    assert doctor.EXTRAS.keys() == named - {"server", "aggregator"} | {"privacy"}
