"""Files of the audit log: the chain continues from file to file, and dropped lines are reported."""

from __future__ import annotations

import errno
import json
import os
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cloud_server.commands.cli import app
from cloud_server.identity import audit_files, audit_log
from fleet_core.base.errors import StateError
from tests.support.inprocess import without_fsync
from tests.support.pki import fleet_without_model

LINES = 40


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Forty lines, in files of a few each."""
    without_fsync(monkeypatch)
    monkeypatch.setattr(audit_files, "FULL_BYTES", 1000)
    for number in range(LINES):
        audit_log.done(tmp_path, "pause", text=f"number {number}")
    return tmp_path


def texts(folder: Path) -> list[str]:
    return [str(one["text"]) for one in audit_log.check(folder).entries]


def dropped(folder: Path, keep: int) -> list[str]:
    said: list[str] = []
    audit_log.drop_old(folder, keep, said.append)
    return said


def test_the_chain_goes_on_over_the_files(folder: Path) -> None:
    found = audit_log.check(folder)
    assert len(found.files) > 5
    assert found.files[-1] == audit_log.FILE
    assert (found.lines, found.broken, found.torn, found.dropped) == (LINES, [], [], 0)
    assert texts(folder) == [f"number {number}" for number in range(LINES)]
    assert {path.stat().st_mode & 0o777 for path in folder.glob("audit*")} == {0o600}


def test_many_that_write_at_the_same_time_make_one_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_fsync(monkeypatch)
    monkeypatch.setattr(audit_files, "FULL_BYTES", 2000)
    with ThreadPoolExecutor(8) as pool:
        list(pool.map(lambda n: audit_log.done(tmp_path, "pause", text=str(n)), range(200)))
    found = audit_log.check(tmp_path)
    assert (found.lines, found.broken, found.torn) == (200, [], [])
    assert len(found.files) > 10


def test_a_process_that_dies_after_it_put_a_file_aside_breaks_nothing(folder: Path) -> None:
    (folder / audit_log.FILE).rename(folder / "audit-000099.ndjson")
    assert audit_log.check(folder).broken == []
    assert audit_log.read(folder)[-1]["text"] == f"number {LINES - 1}"
    audit_log.done(folder, "resume")
    assert audit_log.check(folder).broken == []
    assert audit_log.check(folder).lines == LINES + 1


@pytest.mark.parametrize("number", [2, 3])
def test_a_changed_line_of_an_old_file_is_found(folder: Path, number: int) -> None:
    path = folder / f"audit-{number:06}.ndjson"
    path.write_bytes(path.read_bytes().replace(b"number", b"Number", 1))
    assert "does not follow" in audit_log.check(folder).broken[0][1]


def test_an_old_file_that_somebody_took_away_is_missed(folder: Path) -> None:
    (folder / "audit-000002.ndjson").unlink()
    assert "does not follow" in audit_log.check(folder).broken[0][1]
    (folder / "audit-000001.ndjson").unlink()
    number, wrong = audit_log.check(folder).broken[0]
    assert (number, wrong[:20]) == (1, "2 files before it ar")


def test_what_is_dropped_is_in_the_log_and_the_rest_is_checked(folder: Path) -> None:
    kept = audit_log.check(folder)
    full = len(kept.files) - 1
    assert len(dropped(folder, 2)) == full - 2
    found = audit_log.check(folder)
    assert (found.broken, found.dropped) == ([], full - 2)
    assert found.files[0] == f"audit-{full - 1:06}.ndjson"
    assert sum(one["action"] == audit_log.DROP for one in found.entries) == full - 2
    assert audit_log.check(folder, since=kept.head).broken == []
    first = json.loads((folder / found.files[0]).read_bytes().splitlines()[0])
    assert "or its file was dropped" in audit_log.check(folder, since=first["previous"]).broken[0][1]
    path = folder / found.files[0]
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[1:]))
    assert "no line says that they were dropped" in audit_log.check(folder).broken[0][1]


def test_nothing_is_dropped_before_the_log_says_so(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    before = audit_files.full_ones(folder)

    def full(*_: object) -> int:
        raise OSError(errno.ENOSPC, "No space left on device")

    with monkeypatch.context() as patch:
        patch.setattr(os, "write", full)
        with pytest.raises(StateError, match="No space left"):
            dropped(folder, 2)
    assert audit_files.full_ones(folder)[: len(before)] == before


def test_the_log_stays_small(folder: Path) -> None:
    for number in range(LINES, 3 * LINES):
        audit_log.done(folder, "pause", text=f"number {number}")
        dropped(folder, 3)
    assert sum(path.stat().st_size for path in folder.glob("audit*")) < 6 * audit_files.FULL_BYTES
    assert audit_log.check(folder).broken == []
    assert texts(folder)[-1] == f"number {3 * LINES - 1}"


def test_the_command_says_what_was_dropped(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_fsync(monkeypatch)
    fleet = fleet_without_model(tmp_path / "fleet")
    monkeypatch.setattr(audit_files, "FULL_BYTES", 1000)
    for number in range(LINES):
        audit_log.done(fleet.folder, "pause", text=f"number {number}")
    dropped(fleet.folder, 2)
    said = CliRunner().invoke(app, ["audit", str(fleet.folder)])
    assert said.exit_code == 0, said.output
    assert "older files were dropped" in said.output
