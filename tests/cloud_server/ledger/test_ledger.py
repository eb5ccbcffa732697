"""The ledger: what it stores, what it refuses, and what a crash leaves."""

from __future__ import annotations

import contextlib
import hashlib
import re
import signal
import sqlite3
import subprocess
import sys
import threading
import typing
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.ledger import folded_tables
from cloud_server.ledger import ledger_statements as statements
from cloud_server.ledger.disk_errors import is_disk_error
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_sums import Bytes, PhaseJoules
from cloud_server.ledger.ledger_tables import (
    VERSION,
    Alone,
    Device,
    Energy,
    Evaluation,
    Flops,
    Invitation,
    Round,
    RoundArrays,
    Row,
    TaskEvaluation,
    Traffic,
    Update,
)
from fleet_core.base.errors import StateError
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S

NO_FOLDING = "ALTER TABLE evaluations DROP COLUMN gaps; DROP TABLE task_evaluations;" + "".join(
    f"DROP TABLE {name};" for name in re.findall(r"CREATE TABLE (\w+)", folded_tables.SCHEMA))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.db") as books:
        books.put(Device(name="a"), Device(name="b"), Round(round=1, opened_at=10.0), Round(round=2, opened_at=20.0))
        yield books


def sent(round: int, device: str, direction: str, kind: str, payload: int, **counters: int | None) -> Traffic:
    return Traffic(round=round, device=device, direction=direction, kind=kind, payload_bytes=payload, **counters)


def test_every_row_comes_back_as_it_was_written(ledger: Ledger) -> None:
    rows: list[Row] = [
        Device(name="c", status="revoked", enrolled_round=3, first_seen=1.5, last_seen=2.5, state="on", phase="train",
               version="0.1", capabilities={"codecs": ("fp32", "int8"), "ram": 512}, cannot="no torch", took_part=True,
               new=True),
        Round(round=3, opened_at=1.0, closed_at=2.0, cohort=("a", "b"), members=2, model_id="m", served_id="j",
              models_transmitted=4.0, seconds=1.0, loss=0.5, status="closed", note="fine"),
        Update(round=3, device="a", update_id="u", received_at=1.5, samples=9, loss=0.25, payload_bytes=7, chunks=1,
               status="refused", reason="a value that is not finite"),
        Traffic(round=3, device="a", direction="up", kind="update", payload_bytes=7, mqtt_bytes=9, wire_bytes=None),
        Energy(round=3, device="a", phase="train", joules=1.25, source="RAPL", measured=True),
        Flops(round=3, device="a", flops=1e9),
        Evaluation(round=3, device="a", stage="after", method="pfldyn-proto", confusion=((3, 1), (0, 4)),
                       accuracy=0.875,
                  macro_f1=0.87, new=True),
        RoundArrays(round=3, frozen=("body/a", "head/b"), reason="a with 0.1", moves={"body/c": 0.5}),
    ]  # fmt: skip
    ledger.put(*rows)
    for row in rows:
        assert ledger.rows(type(row), **{name: getattr(row, name) for name in row.key}) == [row]


def test_a_second_row_of_the_same_key_takes_the_place_of_the_first(ledger: Ledger) -> None:
    ledger.put(Energy(round=1, device="a", phase="train", joules=1.0, source="x", measured=True))
    ledger.put(Energy(round=1, device="a", phase="train", joules=2.0, source="x", measured=True))
    assert [row.joules for row in ledger.rows(Energy)] == [2.0]


def test_a_device_is_changed_without_losing_what_refers_to_it(ledger: Ledger) -> None:
    ledger.put(Flops(round=1, device="a", flops=5.0))
    ledger.put(Device(name="a", state="on", phase="train"))
    device = ledger.device("a")
    assert device is not None
    assert device.phase == "train"
    assert len(ledger.rows(Flops)) == 1
    assert ledger.device("nobody") is None


def test_rows_are_filtered_by_any_column_and_by_absence(ledger: Ledger) -> None:
    ledger.put(Round(round=3, opened_at=30.0, loss=0.5, status="closed"))
    assert [r.round for r in ledger.rounds("closed")] == [3]
    assert [r.round for r in ledger.rows(Round, loss=None)] == [1, 2]
    with pytest.raises(TypeError, match="no column colour"):
        ledger.rows(Round, colour="red")


def test_a_round_closes_whole_or_not_at_all(ledger: Ledger) -> None:
    def close() -> None:
        with ledger.transaction():
            ledger.put(Round(round=1, opened_at=10.0, status="closed"))
            ledger.put(Flops(round=1, device="a", flops=1.0))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        close()
    assert ledger.rounds("closed") == []
    assert ledger.rows(Flops) == []
    ledger.put(Flops(round=1, device="a", flops=1.0))
    assert len(ledger.rows(Flops)) == 1


def test_a_process_killed_in_a_transaction_leaves_the_ledger_as_it_was(ledger: Ledger) -> None:
    script = (
        "import os, signal, sys\n"
        "from cloud_server.ledger.ledger import Ledger\n"
        "from cloud_server.ledger.ledger_tables import Round\n"
        "books = Ledger(sys.argv[1])\n"
        "with books.transaction():\n"
        "    books.put(*[Round(round=i, opened_at=1.0, note='x' * 4000) for i in range(10, 800)])\n"
        "    os.kill(os.getpid(), signal.SIGKILL)\n"
    )
    killed = subprocess.run([sys.executable, "-c", script, str(ledger.path)], timeout=PATIENCE_S, cwd=ROOT)
    assert killed.returncode == -signal.SIGKILL
    with Ledger(ledger.path) as again:
        assert [r.round for r in again.rounds()] == [1, 2]
        again.put(Round(round=3, opened_at=1.0))
    assert [r.round for r in ledger.rounds()] == [1, 2, 3]


def test_a_reader_sees_only_what_was_committed(ledger: Ledger) -> None:
    with Ledger(ledger.path, create=False) as reader:
        with ledger.transaction():
            ledger.put(Round(round=3, opened_at=30.0))
            assert [r.round for r in reader.rounds()] == [1, 2]
        assert [r.round for r in reader.rounds()] == [1, 2, 3]


def test_writers_on_two_connections_wait_for_each_other(ledger: Ledger) -> None:
    def requests(name: str) -> None:
        with Ledger(ledger.path) as books:
            for i in range(20):
                books.request(f"{name}/{i}", "yes")

    threads = [threading.Thread(target=requests, args=(name,)) for name in ("left", "right")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=PATIENCE_S)
    assert len(ledger.requests()) == 40


def test_a_request_that_was_replaced_is_not_settled_with_the_old_one(ledger: Ledger) -> None:
    ledger.request("pause", "yes")
    ledger.request("pause", "no")
    ledger.remove_request("pause", "yes")
    assert ledger.requests() == {"pause": "no"}
    ledger.remove_request("pause", "no")
    assert ledger.requests() == {}


def test_facts_about_the_fleet_are_kept_and_overwritten(ledger: Ledger) -> None:
    ledger.set_facts(name="lab", method="fedavg")
    ledger.set_facts(method="pfldyn-proto")
    assert ledger.facts() == {"method": "pfldyn-proto", "name": "lab"}


def test_bytes_are_summed_by_round_device_kind_and_in_all(ledger: Ledger) -> None:
    ledger.put(
        sent(1, "a", "up", "update", 100), sent(1, "a", "down", "model", 200),
        sent(1, "a", "up", "link", 0, mqtt_bytes=110, wire_bytes=150),
        sent(1, "a", "down", "link", 0, mqtt_bytes=210, wire_bytes=250),
        sent(2, "b", "up", "update", 10, mqtt_bytes=12), sent(2, "b", "down", "serve", 30, mqtt_bytes=33),
    )  # fmt: skip
    by_round, by_kind, whole = ledger.volume("round"), ledger.volume("kind"), ledger.volume()[None]
    assert by_round[1].payload == Bytes(up=100, down=200)
    assert by_round[1].wire == Bytes(up=150, down=250)
    assert by_round[2].wire is None
    assert ledger.volume("device")["b"].mqtt == Bytes(up=12, down=33)
    assert by_kind["serve"].payload == Bytes(up=0, down=30)
    assert whole.payload == Bytes(up=110, down=230)
    assert whole.mqtt == Bytes(up=122, down=243)
    assert whole.wire == Bytes(up=150, down=250, missing=1)


def test_joules_leave_idle_out_of_the_sum_and_tell_what_they_lack(ledger: Ledger) -> None:
    counted = [Update(round=1, device=name, update_id=name, received_at=1.0) for name in ("a", "b")]
    ledger.put(
        *counted,
        Energy(round=1, device="a", phase="train", joules=2.0, source="RAPL", measured=True),
        Energy(round=1, device="a", phase="radio", joules=0.5, source="J/byte of a paper", measured=False),
        Energy(round=1, device="a", phase="other", joules=0.25, source="RAPL", measured=True),
        Energy(round=1, device="a", phase="idle", joules=9.0, source="RAPL", measured=True),
        Energy(round=2, device="b", phase="idle", joules=9.0, source="RAPL", measured=True),
    )
    joules = ledger.joules("round")
    assert joules.keys() == {1}
    assert joules[1].value == 2.75
    assert joules[1].phases == {"train": 2.0, "radio": 0.5, "other": 0.25, "idle": 9.0}
    assert joules[1].missing == 1
    assert set(joules[1].source.split("; ")) == {"measured: RAPL", "modelled: J/byte of a paper"}
    assert ledger.joules("device").keys() == {"a"}


def test_fates_and_accuracies_are_those_of_the_rows(ledger: Ledger) -> None:
    fates = [(1, "a", "counted"), (1, "b", "refused"), (2, "a", "counted"), (2, "b", "late"), (2, "b", "counted")]
    ledger.put(*(Update(round=number, device=device, update_id=status, status=status, received_at=1.0)
                 for number, device, status in fates))
    ledger.put(Evaluation(round=2, device="a", stage="after", method="proto", confusion=((3, 1), (0, 0)), accuracy=0.75,
                          macro_f1=0.4, new=True))
    assert ledger.fates() == {1: {"counted": 1, "refused": 1}, 2: {"counted": 2, "late": 1}}
    assert ledger.fates(range(2, 3), by="device") == {"a": {"counted": 1}, "b": {"counted": 1, "late": 1}}
    assert list(ledger.accuracies()) == [(2, "a", "after", True, 0.75)]
    assert list(ledger.accuracies(range(0, 2))) == []


def test_an_empty_ledger_has_no_figures_rather_than_zeros(ledger: Ledger) -> None:
    totals = ledger.totals()
    assert (totals.rounds, totals.volume, totals.energy, totals.flops) == (0, None, None, None)


@pytest.mark.parametrize(
    "row",
    [
        Flops(round=1, device="unknown", flops=1.0),
        Round(round=3, opened_at=1.0, status="half-open"),
        Energy(round=1, device="a", phase="train", joules=-1.0, source="x", measured=True),
        Energy(round=1, device="a", phase="train", joules=float("nan"), source="x", measured=True),
        Update(round=99, device="a", update_id="u", received_at=1.0),
    ],
)
def test_rows_that_break_a_rule_are_refused_and_leave_nothing(ledger: Ledger, row: Row) -> None:
    with pytest.raises(StateError, match="breaks a rule"):
        ledger.put(Flops(round=2, device="a", flops=1.0), row)
    assert ledger.rows(Flops) == []


def test_numbers_of_numpy_are_kept_as_numbers(ledger: Ledger) -> None:
    number, flops = typing.cast("int", np.int64(1)), typing.cast("float", np.float32(1.5))
    ledger.put(Flops(round=number, device="a", flops=flops))
    assert ledger.flops() == {1: 1.5}


def test_what_is_no_plain_value_is_the_callers_mistake_not_a_damaged_file(ledger: Ledger) -> None:
    with pytest.raises(TypeError, match="ndarray has no place"):
        ledger.put(Flops(round=1, device="a", flops=typing.cast("float", np.zeros(3))))
    assert ledger.rows(Flops) == []


@pytest.mark.parametrize("kind", [Evaluation, TaskEvaluation, Alone])
def test_the_latest_rows_of_devices_are_found_without_reading_the_table(ledger: Ledger, kind: type[Row]) -> None:
    ledger.put(*(Device(name=name) for name in ("a", "b", "nothing yet")))
    staged = "stage" in kind.key
    some: dict[type[Row], dict[str, Any]] = {
        Evaluation: {"method": "m", "confusion": ((1,),), "accuracy": 0.5, "macro_f1": 0.5}, Alone: {"frequent": 0},
        TaskEvaluation: {"method": "m", "task": "regression", "outputs": ("y",), "samples": 1, "sums": {}},
    }
    for device, numbers in {"b": (1, 2, 9), "a": (3, 7)}.items():
        for number in numbers:
            for stage in ("before", "after")[: 1 if number == 9 else 2] if staged else ("",):
                at = {"round": number, "device": device, **({"stage": stage} if staged else {})}
                ledger.put(kind(**at, **some[kind]))
    rows: list[Any] = ledger.rows(kind)
    newest = {(row.device, getattr(row, "stage", "")): row for row in rows}
    assert list(ledger.latest(kind)) == [newest[key] for key in sorted(newest)]
    if staged:
        after: list[Any] = list(ledger.latest(kind, stage="after"))
        assert [(row.device, row.round) for row in after] == [("a", 7), ("b", 2)]
    plan = [str(row) for row in ledger._query(f"EXPLAIN QUERY PLAN {statements.latest(kind, {})}")]
    assert not any("SCAN found" in step or "SCAN other" in step for step in plan), plan


def digest(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_a_ledger_of_a_newer_version_is_refused_and_untouched(ledger: Ledger) -> None:
    ledger._db.execute(f"PRAGMA user_version = {VERSION + 1}")
    ledger.close()
    before = digest(ledger.path)
    with pytest.raises(StateError, match=f"version {VERSION + 1}") as caught:
        Ledger(ledger.path)
    assert str(ledger.path) in str(caught.value)
    assert digest(ledger.path) == before


def without_skipped(ledger: Ledger) -> None:
    """Undoes versions 7 to 13."""
    ledger._db.executescript(NO_FOLDING)
    ledger._db.execute("DROP TABLE privacy")
    ledger._db.execute("DROP TABLE arrays")
    ledger._db.execute("ALTER TABLE updates DROP COLUMN skipped")


def without_spread(ledger: Ledger) -> None:
    """Undoes versions 6 to 13."""
    without_skipped(ledger)
    ledger._db.execute("DROP TABLE absent_energy")
    ledger._db.execute("DROP TABLE usage")
    ledger._db.execute("DROP TABLE codecs")
    for column in ("low", "high"):
        ledger._db.execute(f"ALTER TABLE energy DROP COLUMN {column}")


def with_former_names(ledger: Ledger) -> None:
    """Undoes what version 5 renamed, and versions 6 to 13."""
    without_spread(ledger)
    ledger._db.execute("ALTER TABLE evaluations RENAME TO judgements")
    ledger._db.execute("ALTER TABLE rounds RENAME COLUMN served_id TO judged_id")


def test_a_ledger_of_the_first_version_is_completed_and_keeps_its_rows(ledger: Ledger) -> None:
    before = ledger.rows(Round)
    for table in ("invitations", "certificates", "alone"):
        ledger._db.execute(f"DROP TABLE {table}")
    ledger._db.execute("ALTER TABLE devices DROP COLUMN revoked_at")
    with_former_names(ledger)
    ledger._db.execute("PRAGMA user_version = 1")
    ledger.close()
    with Ledger(ledger.path) as again:
        assert again.rows(Round) == before
        again.put(Invitation(id="a", device="d0", public="", made_at=1.0, expires_at=2.0))
        assert [row.device for row in again.rows(Invitation)] == ["d0"]
        assert again._pragma("user_version") == VERSION


def test_a_ledger_of_the_third_version_takes_what_devices_do_alone(ledger: Ledger) -> None:
    before = ledger.rows(Evaluation)
    ledger._db.execute("DROP TABLE alone")
    with_former_names(ledger)
    ledger._db.execute("PRAGMA user_version = 3")
    ledger.close()
    with Ledger(ledger.path) as again:
        assert (again.rows(Evaluation), again.rows(Alone)) == (before, [])
        row = Alone(round=1, device="a", frequent=1, method="nearest mean", confusion=((3, 1), (0, 2)))
        again.put(row, replace(row, frequent=0))
        assert again.rows(Alone) == [replace(row, frequent=0)]


def test_evaluations_of_a_ledger_of_the_twelfth_version_have_no_gaps_and_later_ones_have(ledger: Ledger) -> None:
    ledger.put(Evaluation(round=1, device="a", stage="after", method="fedavg", confusion=((1,),), accuracy=1.0,
                          macro_f1=1.0))
    before = ledger.rows(Evaluation)
    ledger._db.execute("ALTER TABLE evaluations DROP COLUMN gaps")
    ledger._db.execute("PRAGMA user_version = 12")
    ledger.close()
    with Ledger(ledger.path) as again:
        assert again.rows(Evaluation) == before
        assert {row.gaps for row in before} == {()}
        again.put(replace(before[0], gaps=(0.5, -1.25)))
        assert replace(before[0], gaps=(0.5, -1.25)) in again.rows(Evaluation)


def test_no_update_of_a_ledger_of_the_sixth_version_was_skipped(ledger: Ledger) -> None:
    ledger.put(Update(round=1, device="a", update_id="u", received_at=1.5))
    before = ledger.rows(Update)
    without_skipped(ledger)
    ledger._db.execute("PRAGMA user_version = 6")
    ledger.close()
    with Ledger(ledger.path) as again:
        assert again.rows(Update) == before
        assert not any(row.skipped for row in before)
        again.put(replace(before[0], skipped=True))
        assert again.rows(Update, skipped=True) == [replace(before[0], skipped=True)]


def test_joules_of_a_ledger_of_the_fifth_version_have_no_spread_and_later_ones_have(ledger: Ledger) -> None:
    old = Energy(round=1, device="a", phase="train", joules=4.0, source="model", measured=False)
    ledger.put(old)
    without_spread(ledger)
    ledger._db.execute("PRAGMA user_version = 5")
    ledger.close()
    with Ledger(ledger.path) as again:
        assert again.rows(Energy) == [old]
        assert again.absent_energy() == {}
        again.put(replace(old, round=2, low=3.0, high=5.0))
        joules = again.joules("round")
        assert (joules[1].low, joules[1].high) == (None, None)
        assert (joules[2].value, joules[2].low, joules[2].high) == (4.0, 3.0, 5.0)
        assert again.joules()[None].low is None, "one part has none, so neither has the sum"


def test_a_sum_of_measured_and_modelled_joules_has_the_spread_of_the_modelled_part(ledger: Ledger) -> None:
    ledger.put(
        Energy(round=1, device="a", phase="train", joules=2.0, source="RAPL", measured=True),
        Energy(round=1, device="b", phase="train", joules=4.0, source="model", measured=False, low=3.0, high=5.0),
        Energy(round=1, device="b", phase="radio", joules=1.0, source="Wi-Fi", measured=False, low=0.5, high=2.0),
        Energy(round=1, device="b", phase="serve", joules=0.0, source="model", measured=False, low=0.0, high=0.0),
    )
    joules = ledger.joules()[None]
    assert (joules.value, joules.low, joules.high) == (7.0, 5.5, 9.0)
    assert joules.by_phase == {
        "train": PhaseJoules(value=6.0, source="measured: RAPL; modelled: model", low=5.0, high=7.0),
        "radio": PhaseJoules(value=1.0, source="modelled: Wi-Fi", low=0.5, high=2.0),
    }, "a phase without joules is left out, not 0"


def test_what_joules_do_not_include_is_what_each_device_said_last(ledger: Ledger) -> None:
    ledger.set_absent_energy("a", ["radio: none", "compute: no watts"])
    ledger.set_absent_energy("b", ["radio: none"])
    ledger.set_absent_energy("a", ["radio: none"])
    assert ledger.absent_energy() == {None: {"radio: none": 2}}
    assert ledger.absent_energy("device") == {"a": {"radio: none": 1}, "b": {"radio: none": 1}}
    assert ledger.totals().absent_energy == {"radio: none": 2}


def test_a_page_that_is_damaged_is_found_before_anything_is_built_on_it(ledger: Ledger) -> None:
    ledger.put(*[Round(round=n, opened_at=1.0, note="x" * 500) for n in range(10, 200)])
    ledger.check()
    ledger.close()
    data = bytearray(ledger.path.read_bytes())
    data[-3 * 4096 : -2 * 4096] = b"\xa5" * 4096
    ledger.path.write_bytes(data)
    with Ledger(ledger.path) as again, pytest.raises(StateError, match="is damaged") as caught:
        again.check()
    assert str(ledger.path) in str(caught.value)
    assert "hint: move the file aside" in str(caught.value)


def test_a_ledger_that_finds_no_space_says_so_keeps_what_it_has_and_continues_later(ledger: Ledger) -> None:
    pages = ledger._pragma("page_count")
    ledger._db.execute(f"PRAGMA max_page_count = {pages}")
    many = [Round(round=n, opened_at=1.0, note="x" * 4000) for n in range(3, 20)]
    with pytest.raises(StateError, match="disk is full") as caught:
        ledger.put(Flops(round=1, device="a", flops=1.0), *many)
    assert is_disk_error(caught.value)
    assert "free space" in str(caught.value)
    assert [r.round for r in ledger.rounds()] == [1, 2]
    assert ledger.rows(Flops) == []
    ledger._db.execute("PRAGMA max_page_count = 100000")
    ledger.put(Round(round=3, opened_at=1.0, note="x" * 4000))
    with Ledger(ledger.path, create=False) as reader:
        assert [r.round for r in reader.rounds()] == [1, 2, 3]


def test_a_damaged_file_is_not_taken_for_a_disk_that_will_come_back(ledger: Ledger) -> None:
    with pytest.raises(StateError) as caught:
        ledger.put(Round(round=3, opened_at=1.0, status="half-open"))
    assert not is_disk_error(caught.value)


@pytest.mark.parametrize("damage", ["text", "truncated", "another program's"])
def test_a_file_that_is_no_ledger_is_named_and_untouched(ledger: Ledger, damage: str) -> None:
    ledger.close()
    path = ledger.path
    if damage == "text":
        path.write_bytes(b"these are not the books you are looking for\n" * 40)
    elif damage == "truncated":
        path.write_bytes(path.read_bytes()[: path.stat().st_size // 2])
    else:
        path.unlink()
        with contextlib.closing(sqlite3.connect(path)) as other:
            other.execute("CREATE TABLE songs (name TEXT)")
    before = digest(path)
    with pytest.raises(StateError) as caught:
        Ledger(path)
    assert str(path) in str(caught.value)
    assert "hint: move the file aside" in str(caught.value)
    assert digest(path) == before


def test_a_missing_ledger_is_reported_and_not_made(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="there is no ledger"):
        Ledger(tmp_path / "nothing.db", create=False)
    assert list(tmp_path.iterdir()) == []


def test_a_folder_in_place_of_a_ledger_is_reported(tmp_path: Path) -> None:
    with pytest.raises(StateError, match="cannot be used"):
        Ledger(tmp_path)
