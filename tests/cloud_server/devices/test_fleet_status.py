"""``metafleet watch``: a line for each round that closes, until the fleet has ended."""

from __future__ import annotations

import io
import shutil
import sqlite3
from contextlib import closing
from pathlib import Path

from cloud_server.devices import fleet_status
from cloud_server.records.fleet_folder import Fleet


def test_a_fleet_is_watched_line_by_line_until_it_has_ended(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    shutil.copytree(finished / "fleet", folder)
    fleet, stream = Fleet.load(folder), io.StringIO()
    with closing(sqlite3.connect(fleet.ledger_path)) as db, db:
        db.execute("UPDATE rounds SET status = 'open' WHERE round = 2")
    looks = iter(range(100))

    def stopped() -> bool:
        if next(looks) == 3:
            with closing(sqlite3.connect(fleet.ledger_path)) as db, db:
                db.execute("UPDATE rounds SET status = 'closed' WHERE round = 2")
        return False

    fleet_status.watch(fleet, stream, stopped=stopped, look_s=0.01)
    lines = stream.getvalue().splitlines()
    assert lines[0] == "the aggregator is not running"
    assert [line.split("  ")[0] for line in lines[1:]] == ["round 2/2"]
    assert next(looks) < 100


def test_watching_ends_when_it_is_stopped(finished: Path, tmp_path: Path) -> None:
    folder = tmp_path / "fleet"
    shutil.copytree(finished / "fleet", folder)
    fleet, stream = Fleet.load(folder), io.StringIO()
    with fleet.lock():
        fleet_status.watch(fleet, stream, stopped=iter([False, False, True]).__next__, look_s=0.01)
    assert stream.getvalue() == ""
