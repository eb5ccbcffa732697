"""The audit log: its chain of hashes against those who change it, what is written, and a full disk."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cloud_server.commands.cli import app
from cloud_server.identity import audit_log
from cloud_server.ledger import disk_errors
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device
from fleet_core.base.errors import MessageError, StateError
from fleet_core.protocol import certificates
from tests.support.inprocess import without_fsync
from tests.support.pki import Enroller, fleet_without_model, signed_request

PAUSES = 6


def lines(folder: Path) -> list[bytes]:
    return (folder / audit_log.FILE).read_bytes().splitlines()


def actions(folder: Path) -> list[tuple[str, str, str]]:
    return [(one["via"], one["action"], one["device"]) for one in audit_log.check(folder).entries]


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    without_fsync(monkeypatch)
    for number in range(PAUSES):
        audit_log.done(tmp_path, "pause", text=f"number {number}")
    return tmp_path


def metafleet(*arguments: object) -> Result:
    return CliRunner().invoke(app, [str(one) for one in arguments])


# The chain ------------------------------------------------------------------------------------------------------------


def test_each_line_has_the_hash_of_the_line_before(folder: Path) -> None:
    found = audit_log.check(folder)
    written = lines(folder)
    assert [json.loads(line)["previous"] for line in written] == ["", *map(audit_log.hash_of, written[:-1])]
    assert (found.lines, found.head, found.broken, found.torn) == (PAUSES, audit_log.hash_of(written[-1]), [], [])
    assert (folder / audit_log.FILE).stat().st_mode & 0o777 == 0o600


def test_many_that_write_at_the_same_time_make_one_chain(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    without_fsync(monkeypatch)
    with ThreadPoolExecutor(8) as pool:  # each append opens and locks the file anew, as a process would
        list(pool.map(lambda n: audit_log.done(tmp_path, "pause", text=str(n)), range(200)))
    found = audit_log.check(tmp_path)
    assert (found.lines, found.broken, found.torn) == (200, [], [])
    assert {one["text"] for one in found.entries} == {str(n) for n in range(200)}


Change = Callable[[list[bytes]], list[bytes]]
CHANGES: dict[str, tuple[Change, int]] = {
    "changed": (lambda old: [*old[:2], old[2].replace(b"number 2", b"number 9"), *old[3:]], 4),
    "removed": (lambda old: [*old[:2], *old[3:]], 3),
    "the first removed": (lambda old: old[1:], 1),
    "put in": (lambda old: [*old[:2], old[0], *old[2:]], 3),
    "swapped": (lambda old: [*old[:2], old[3], old[2], *old[4:]], 3),
    "without its hash": (lambda old: [*old[:3], b'{"id":"x","at":1.0,"action":"pause"}', *old[3:]], 4),
    "torn in the middle": (lambda old: [*old[:2], old[2][:20], *old[3:]], 4),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_line_that_was_changed_removed_or_put_in_is_named(folder: Path, change: str) -> None:
    made, line = CHANGES[change]
    (folder / audit_log.FILE).write_bytes(b"\n".join(made(lines(folder))) + b"\n")
    assert audit_log.check(folder).broken[0][0] == line


def test_an_end_that_was_cut_off_shows_to_who_kept_its_hash(folder: Path) -> None:
    kept = audit_log.check(folder).head
    audit_log.done(folder, "resume")
    found = audit_log.check(folder, since=kept[:12])
    assert ([one["action"] for one in found.entries], found.broken) == (["resume"], [])
    (folder / audit_log.FILE).write_bytes(b"\n".join(lines(folder)[:3]) + b"\n")
    assert audit_log.check(folder).broken == [], "the rest is a chain of its own"
    assert "no line has the hash" in audit_log.check(folder, since=kept).broken[0][1]


def test_a_file_that_was_written_anew_shows_to_who_kept_its_hash(folder: Path) -> None:
    kept = audit_log.check(folder).head
    (folder / audit_log.FILE).unlink()
    for _ in range(PAUSES):
        audit_log.done(folder, "pause")
    assert audit_log.check(folder).broken == []
    assert audit_log.check(folder, since=kept).broken != []


def test_a_line_that_a_power_cut_tore_is_skipped_and_bound_by_the_next_one(folder: Path) -> None:
    path = folder / audit_log.FILE
    path.write_bytes(path.read_bytes() + b'{"id": "half')
    audit_log.done(folder, "resume")
    found = audit_log.check(folder)
    assert (found.torn, found.broken, found.entries[-1]["action"]) == ([PAUSES + 1], [], "resume")
    path.write_bytes(path.read_bytes().replace(b'{"id": "half', b'{"id": "other'))
    assert audit_log.check(folder).broken[0][0] == PAUSES + 2


def test_lines_of_a_version_without_hashes_stay_before_the_chain(tmp_path: Path) -> None:
    old = b'{"id":"1","at":1.5,"by":"me","action":"pause","device":""}\n'
    (tmp_path / audit_log.FILE).write_bytes(old * 2)
    audit_log.done(tmp_path, "resume")
    found = audit_log.check(tmp_path)
    assert (found.lines, found.unchained, found.broken) == (3, 2, [])
    (tmp_path / audit_log.FILE).write_bytes((tmp_path / audit_log.FILE).read_bytes() + old)
    assert audit_log.check(tmp_path).broken[0][0] == 4, "none can follow"


@pytest.mark.parametrize("rubbish", [b"\xff" * 1000, b"[" * 100_000, b"\n\n\n", b'{"id":1,"at":1.0}', b"7" * 200_000])
def test_what_others_put_in_is_read_within_bounds_and_harms_no_later_line(folder: Path, rubbish: bytes) -> None:
    path = folder / audit_log.FILE
    path.write_bytes(path.read_bytes() + rubbish + b"\n")
    audit_log.done(folder, "resume")
    found = audit_log.check(folder, most=3)
    assert found.entries[-1]["action"] == "resume"
    assert found.torn
    assert found.broken == []
    assert len(found.entries) == 3


def test_a_line_without_end_is_refused_and_not_read_again_and_again(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(audit_log, "LARGEST_BYTES", 1 << 18)
    path = folder / audit_log.FILE
    path.write_bytes(path.read_bytes() + b"x" * (1 << 20))
    with pytest.raises(StateError, match="that Metafleet did not write"):
        audit_log.append(folder, {"id": "1", "at": 1.0})
    assert len(audit_log.check(folder).torn) > 1


# What is written ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_every_command_that_changes_a_fleet_is_in_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_fsync(monkeypatch)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SUDO_USER", "ada")
    fleet = fleet_without_model(tmp_path / "fleet")
    with Ledger(fleet.ledger_path) as ledger:
        ledger.put(Device(name="d0", enrolled_round=1, first_seen=0.0, last_seen=0.0))
    for arguments in (("devices", "enroll", fleet.folder, "d1"), ("devices", "quarantine", fleet.folder, "d0"),
                      ("devices", "release", fleet.folder, "d0"), ("devices", "revoke", fleet.folder, "d0"),
                      ("server", "pause", fleet.folder), ("server", "resume", fleet.folder),
                      ("server", "config", fleet.folder, "--host", "hub.local"),
                      ("server", "backup", fleet.folder, "--to", tmp_path / "copy")):
        done = metafleet(*arguments)
        assert done.exit_code == 0, done.output
    assert actions(fleet.folder) == [("command line", *what) for what in (
        ("token", "d1"), ("quarantine", "d0"), ("release", "d0"), ("revoke", "d0"), ("pause", ""), ("resume", ""),
        ("configure broker", ""), ("backup", ""))]
    entries = audit_log.check(fleet.folder).entries
    assert {one["by"] for one in entries} == {"ada"}
    assert metafleet("devices", "revoke", fleet.folder, "d7").exit_code != 0
    assert len(lines(fleet.folder)) == len(entries), "what was not done is not in it"
    text = (fleet.folder / audit_log.FILE).read_text()
    secret = [word for word in (tmp_path / "d1.token").read_text().split('"') if len(word) > 100]
    assert secret
    assert not any(word in text for word in secret)


def test_who_comes_with_a_token_and_who_is_refused_is_in_it(tmp_path: Path) -> None:
    fleet, now = fleet_without_model(tmp_path / "fleet"), [1.0e9]
    with Ledger(fleet.ledger_path) as ledger:
        enroller = Enroller(fleet, ledger, lambda: now[0])
        made = enroller.token("d0", valid_s=1e9)
        enroller.enrolments().on_request(made.id, signed_request(made, certificates.new_key()))
        side, another = enroller.enrolments(), signed_request(made, certificates.new_key())
        for _ in range(100):
            with pytest.raises(MessageError, match="used before"):
                side.on_request(made.id, another)
        now[0] += 3600.0
        with pytest.raises(MessageError):
            side.on_request(made.id, another)
    assert actions(fleet.folder) == [("aggregator", "certificate", "d0"), ("aggregator", "refuse", made.id),
                                     ("aggregator", "refuse", made.id)]
    texts = [one["text"] for one in audit_log.check(fleet.folder).entries]
    assert texts[1:] == ["enrolment: the token was used before",
                         "enrolment: the token was used before; 99 more since the line before"]


# Read -----------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_the_command_lists_the_lines_and_fails_for_a_broken_chain(tmp_path: Path) -> None:
    fleet = fleet_without_model(tmp_path / "fleet")
    assert metafleet("audit", fleet.folder).exit_code == 0
    metafleet("server", "pause", fleet.folder)
    audit_log.Recorder(fleet.folder, lambda: 1.0, print).refused("d0", "\x1b[2J\r\nforged")
    done = metafleet("audit", fleet.folder)
    assert done.exit_code == 0
    assert "pause" in done.stdout
    assert "?[2J??forged" in done.stdout, "no text of a device steers the terminal"
    facts: dict[str, Any] = json.loads(metafleet("audit", fleet.folder, "--json").stdout)
    assert (facts["lines"], facts["broken"], len(facts["entries"])) == (2, [], 2)
    assert len(json.loads(metafleet("audit", fleet.folder, "--json", "--last", "1").stdout)["entries"]) == 1
    assert metafleet("audit", fleet.folder, "--since", facts["head"]).exit_code == 0
    assert metafleet("audit", fleet.folder, "--since", "0" * 64).exit_code == 1
    assert metafleet("audit", fleet.folder, "--since", "no hash").exit_code != 0
    path = fleet.folder / audit_log.FILE
    path.write_bytes(path.read_bytes().replace(b'"pause"', b'"purge"'))
    done = metafleet("audit", fleet.folder)
    assert done.exit_code == 1
    assert "line 2 does not follow" in done.stderr


# A full disk ----------------------------------------------------------------------------------------------------------


@pytest.fixture
def full(monkeypatch: pytest.MonkeyPatch) -> Callable[[Path], None]:
    """Fills the disk of a fleet's folder, except for the space that is reserved for revoking."""

    def fill(folder: Path) -> None:
        write = os.write

        def full_but_for_the_reserve(handle: int, data: bytes) -> int:
            if (folder / disk_errors.RESERVE).exists():
                raise OSError(errno.ENOSPC, "No space left on device")
            return write(handle, data)

        disk_errors.reserve(folder)
        monkeypatch.setattr(os, "write", full_but_for_the_reserve)

    return fill


def test_on_a_full_disk_revoking_takes_the_reserve_and_no_other_action_does(
    tmp_path: Path, full: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    full(tmp_path)
    with pytest.raises(StateError), audit_log.recorded(tmp_path, "me", "pause"):
        pytest.fail("it is not done")
    audit_log.done(tmp_path, "pause")
    assert "not in the audit log" in capsys.readouterr().err
    assert audit_log.check(tmp_path).lines == 0
    with audit_log.recorded(tmp_path, "me", "revoke", "d0"):
        pass
    assert actions(tmp_path) == [("console", "revoke", "d0"), ("console", "revoke", "d0")]


def test_revoking_works_where_the_audit_log_cannot_be_written(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / audit_log.FILE).mkdir()
    revoked = []
    with audit_log.recorded(tmp_path, "me", "revoke", "d0"):
        revoked.append("d0")
    assert revoked == ["d0"]
    assert "not in the audit log" in capsys.readouterr().err
