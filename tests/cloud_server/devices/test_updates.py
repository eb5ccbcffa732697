"""``metafleet updates``: which devices get a program, what is signed and left for the aggregator, what is refused."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from cloud_server.commands import cli
from cloud_server.identity import audit_log
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device
from cloud_server.records import update_record
from cloud_server.records.fleet_folder import Fleet
from firmware_profiles.package import program
from firmware_profiles.pulled import update_package
from fleet_core.protocol import program_statement
from fleet_core.protocol.signing import Verifier
from tests.support.cli import Run, runner
from tests.support.loopback_board import random_program
from tests.support.pki import lab_fleet

DEVICE = 'name = "kitchen"\nfleet = "lab"\nboard = "raspberry-pi-4b"\nbroker = "mqtts://broker.example"\n'
PI = "aarch64 3.13"


@pytest.fixture
def desk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    lab_fleet(tmp_path)
    (tmp_path / "kitchen.toml").write_text(DEVICE)
    made = random_program(tmp_path, 1 << 20)
    monkeypatch.setattr(program, "make", lambda *_, **__: made)
    with Ledger(tmp_path / "lab/ledger.sqlite") as ledger:
        for name, system, version in (("a", PI, "0.1.0-old"), ("b", PI, made.version), ("c", "x86_64 3.11", "0.1.0"),
                                      ("d", "", "0.1.0"), ("e", PI, "0.1.0-old")):
            update = {"update": {"system": system}} if system else {}
            ledger.put(Device(name=name, status="enrolled", version=version, capabilities=update))
    return tmp_path


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    return runner(monkeypatch, capsys, "metafleet", cli.main)


def test_a_program_is_signed_for_the_devices_that_need_it_and_asked_for(desk: Path, run: Run) -> None:
    ran = run("updates", "start", desk / "lab", desk / "kitchen.toml", "--waves", "1,5", "--within", "2h", "--json")
    assert ran.code == 0, ran.err
    plan = json.loads(ran.out)
    assert (plan["devices"], plan["sizes"], plan["within_s"], plan["system"]) == (["a", "e"], [1, 5], 7200, PI)
    with Ledger(desk / "lab/ledger.sqlite") as ledger:
        assert ledger.requests()["update"] == f"start {plan['serial']}"
    folder = desk / "lab" / update_record.FOLDER / str(plan["serial"])
    fleet, package = Fleet.load(desk / "lab"), update_package.load(folder)
    said = program_statement.verify(package.statement, Verifier(fleet.public_key()), "lab")
    assert (said.version, said.serial, set(said.files)) == (plan["version"], plan["serial"], set(package.files))
    assert "metafleet-update.path" in package.files
    assert [entry["action"] for entry in audit_log.read(desk / "lab")][-1] == "update"


@pytest.mark.slow
@pytest.mark.parametrize(("options", "words"), [
    (("--device", "c"), "c: is for x86_64 3.11"),
    (("--device", "d"), "d: fetches no programs"),
    (("--device", "x"), "x: is not enrolled"),
    (("--url", "http://x/y"), "is not an https address"),
    (("--within", "soon"), "--within soon: is not a duration"),
    (("--waves", "0"), "is not a list of waves"),
])
def test_what_cannot_be_updated_so_is_refused(desk: Path, run: Run, options: tuple[str, ...], words: str) -> None:
    ran = run("updates", "start", desk / "lab", desk / "kitchen.toml", *options)
    assert ran.code == 2
    assert words in ran.err
    with Ledger(desk / "lab/ledger.sqlite") as ledger:
        assert "update" not in ledger.requests()


@pytest.mark.slow
def test_one_update_is_under_way_at_a_time_and_its_state_is_told(desk: Path, run: Run) -> None:
    fleet = desk / "lab"
    assert run("updates", "status", fleet).code == 0
    assert "there is no update" in run("updates", "abort", fleet).err
    plan = update_record.Plan(7, "0.2.0-x", PI, ("a", "e"), (1,))
    update = update_record.begun(plan).next_wave(1.0)
    update_record.write(fleet, update)
    assert "an update is under way" in run("updates", "start", fleet, desk / "kitchen.toml").err
    assert "expected halted or aborted" in run("updates", "resume", fleet).err
    update_record.write(fleet, replace(
        update.moved("a", "failed", "went back: no"), st="halted", why="1 failed: a"))
    shown = run("updates", "status", fleet).out
    assert "update 0.2.0-x is halted: 1 failed: a; 1 waiting, 1 failed" in shown
    assert "went back: no" in shown
    assert "update 0.2.0-x is halted" in run("server", "status", fleet).out
    assert json.loads(run("updates", "status", fleet, "--json").out)["devices"]["e"]["st"] == "waiting"
    assert run("updates", "resume", fleet).code == 0


def test_a_package_is_written_for_a_file_server_or_mender(desk: Path, run: Run) -> None:
    ran = run("updates", "save", desk / "lab", desk / "kitchen.toml", desk / "out", "--older")
    assert ran.code == 0, ran.err
    assert {path.name for path in (desk / "out").iterdir()} == {
        "PACKAGE", "prepare", "program.tar.gz", "metafleet.service", "metafleet-update.path",
        "metafleet-update.service"}
    assert b"older yes" in (desk / "out/PACKAGE").read_bytes()
    assert "is not empty" in run("updates", "save", desk / "lab", desk / "kitchen.toml", desk / "out").err


def test_the_waves_have_the_sizes_that_were_asked_for() -> None:
    for sizes, waves in (((), [0, 0, 0, 0]), ((1,), [0, 1, 2, 3]), ((1, 2), [0, 1, 1, 2]), ((9,), [0, 0, 0, 0])):
        assert [one.wave for one in update_record.in_waves("abcd", sizes).values()] == waves
