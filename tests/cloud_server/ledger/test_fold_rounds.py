"""Folding old rounds: every total stays the same figure, a kill leaves all or nothing, and the file stops growing."""

from __future__ import annotations

import json
import os
import random
import signal
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloud_server.ledger import fold_rounds
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_sums import FOLDED
from cloud_server.ledger.ledger_tables import (
    Alone,
    Device,
    Energy,
    Evaluation,
    Flops,
    Round,
    RoundArrays,
    RoundCodec,
    RoundPrivacy,
    Row,
    TaskEvaluation,
    Traffic,
    Update,
    Usage,
)
from cloud_server.results import bill, device_costs, result
from fleet_core.base import schema
from fleet_core.base.errors import StateError
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S

DEVICES = ("a", "b", "c", "gone")
METERS = (("RAPL", True), ("a data sheet", False), ("another data sheet", False))


@pytest.fixture
def ledger(tmp_path: Path) -> Iterator[Ledger]:
    with Ledger(tmp_path / "ledger.sqlite") as opened:
        opened._db.execute("PRAGMA synchronous = OFF")
        opened.put(*(Device(name=name, took_part=True) for name in DEVICES))
        yield opened


def fill(ledger: Ledger, first: int, last: int, *, private: bool = False) -> None:
    """Rounds with what a long run has: missing reports, several meters, refused and skipped updates, quiet rounds."""
    with ledger.transaction():
        for number in range(first, last + 1):
            ledger.put(*rows(number, random.Random(number), private=private))


def rows(number: int, draw: random.Random, *, private: bool) -> Iterator[Row]:
    abandoned = number % 17 == 0
    yield Round(round=number, opened_at=100.0 * number, closed_at=100.0 * number + 9, cohort=DEVICES, members=4,
                model_id="m", models_transmitted=None if abandoned else 8.0, seconds=None if abandoned else 9.0,
                loss=None if abandoned else 1 / number, status="abandoned" if abandoned else "closed")
    yield RoundCodec(round=number, way="up", codec="int8", reason="auto", left_out=0.1)
    yield RoundArrays(round=number, frozen=("body/a",), moves={"body/b": 0.5})
    if private:
        yield RoundPrivacy(round=number, mode="local", clip=1.0, noise=2.0 + number % 2, delta=1e-5, epsilon=0.1,
                           spent=number / 10, most=number, asked=("replaced",) if number % 4 == 0 else ())
    for name in DEVICES[: 3 if number > 40 else 4]:
        if draw.random() < 0.9:
            yield from of_device({"round": number, "device": name}, draw)


def of_device(at: dict[str, Any], draw: random.Random) -> Iterator[Row]:
    status = draw.choice(("counted", "counted", "counted", "refused", "late"))
    yield Update(**at, update_id=f"u{at['round']}", received_at=1.0, samples=9, status=status, payload_bytes=10,
                 reason="" if status == "counted" else "why", skipped=draw.random() < 0.2)
    yield Traffic(**at, direction="up", kind="update", payload_bytes=draw.randrange(1000))
    yield Traffic(**at, direction="down", kind=draw.choice(("model", "serve")), payload_bytes=draw.randrange(1000))
    if draw.random() < 0.7:
        wire = draw.choice((None, 900))
        yield Traffic(**at, direction="up", kind="link", mqtt_bytes=draw.randrange(2000), wire_bytes=wire)
        yield Traffic(**at, direction="down", kind="link", mqtt_bytes=draw.randrange(2000), wire_bytes=wire)
    for phase in ("train", "radio", "idle") if draw.random() < 0.8 else ():
        source, measured = METERS[at["round"] % 3]
        low = None if measured or draw.random() < 0.01 else 0.5
        yield Energy(**at, phase=phase, joules=draw.random() + 1, source=source, measured=measured, low=low,
                     high=None if low is None else 3.0)
    if draw.random() < 0.9:
        yield Flops(**at, flops=float(draw.randrange(10**9)))
        yield Usage(**at, cpu_s=draw.choice((None, draw.random())), peak_mib=draw.random() * 100,
                    connected_s=9.0, retransmitted_bytes=draw.choice((None, 7)))
    if at["round"] % 5 == 0:
        for stage, right in (("before", 3), ("after", draw.randrange(2, 9))):
            yield Evaluation(**at, stage=stage, method="m", confusion=((right, 1), (1, right)), macro_f1=0.5,
                             accuracy=right / (right + 1))
        yield Alone(**at, frequent=0, method="plain", confusion=((2, 1), (1, 2)))


def figures(ledger: Ledger) -> dict[str, Any]:
    """All figures of a fleet as a whole and of its devices."""
    built = result.build(ledger, method="fedavg", seed=0, config={})
    reached = {one.round: one for one in bill.reached(built)}
    return {
        "closed": (ledger.closed_count(), built.closed), "totals": ledger.totals(), "volume": ledger.volume(),
        "by device": ledger.volume("device"), "by kind": ledger.volume("kind"), "joules": ledger.joules(),
        "joules by device": ledger.joules("device"), "kinds": ledger.payload(), "flops": ledger.flops(by="device"),
        "fates": ledger.fates(by="device"), "usage": ledger.usage(), "counted": ledger.counted_updates(),
        "costs": device_costs.of_ledger(ledger), "sums": built.totals, "evaluated": built.evaluated,
        "personalization": built.personalization, "verdict": built.verdict,
        "months": bill.months(built, 24, None, 10), "reached": [reached[number] for number in range(190, 201)
                                                                if number in reached],
        "last update": {name: [ledger.counted(name, newest) for _, _, newest in [found]]
                        for name, found in ledger.counted_updates().items()},
    }


def same(left: Any, right: Any) -> None:
    """Equal, except that sums of floats may be added in another order."""
    if isinstance(left, float) and isinstance(right, float):
        assert left == pytest.approx(right, rel=1e-12)
    elif isinstance(left, dict):
        assert list(left) == list(right)
        for key, value in left.items():
            same(value, right[key])
    elif isinstance(left, (list, tuple)):
        assert len(left) == len(right)
        for one, other in zip(left, right, strict=True):
            same(one, other)
    else:
        assert left == right


def test_every_total_stays_the_same_figure(ledger: Ledger) -> None:
    fill(ledger, 1, 200)
    before = figures(ledger)
    for until in (30, 77, 151):
        assert ledger.fold(until) is not None
        assert ledger.newest(Round) == 200
        assert ledger.rounds()[0].round == until
        for name, figure in figures(ledger).items():
            same(schema.plain(figure), schema.plain(before[name]))


def test_a_running_sum_that_lacks_no_report_goes_on_from_the_folded_rounds(ledger: Ledger) -> None:
    for number in range(1, 61):
        at: dict[str, Any] = {"round": number, "device": "a"}
        ledger.put(Round(round=number, opened_at=1.0, status="closed"), Update(**at, update_id="u", received_at=1.0),
                   Traffic(**at, direction="up", kind="update", payload_bytes=10), Flops(**at, flops=5.0),
                   Traffic(**at, direction="up", kind="link", mqtt_bytes=12, wire_bytes=14),
                   Energy(**at, phase="train", joules=2.0, source="RAPL", measured=True))
    ledger.fold(41)
    lines = bill.reached(result.build(ledger, method="fedavg", seed=0, config={}))
    assert [one.round for one in lines] == list(range(41, 61))
    assert replace(lines[-1], accuracy=None) == bill.Reached(
        round=60, payload_bytes=600, wire_bytes=840, flops=300.0, joules=120.0)


def test_what_is_folded_is_told(ledger: Ledger) -> None:
    fill(ledger, 1, 60)
    assert result.build(ledger, method="fedavg", seed=0, config={}).folded is None
    whole = result.build(ledger, method="fedavg", seed=0, config={}).rounds
    ledger.fold(41)
    built = result.build(ledger, method="fedavg", seed=0, config={})
    assert built.folded is not None
    assert (built.folded.first, built.folded.last, built.folded.closed) == (1, 40, 38)
    assert built.folded.participants == sum(one.participants for one in whole if one.round <= 40)
    assert built.folded.refused > 0
    assert built.folded.seconds == 38 * 9.0
    assert [one.round for one in built.rounds] == [n for n in range(41, 61) if n != 51]
    assert result.parse(json.loads(json.dumps(result.to_json(built)))) == built


def test_a_device_that_comes_back_is_still_known_by_its_last_update(ledger: Ledger) -> None:
    fill(ledger, 1, 250)
    newest = max(row.round for row in ledger.each(Update, device="gone", status="counted"))
    ledger.fold(60)
    ledger.fold(200)
    assert ledger.counted("gone", newest) == f"u{newest}"
    assert ledger.counted("gone", newest - 1) is None
    assert {row.stage for row in ledger.each(Evaluation, device="gone")} == {"before", "after"}
    assert len(ledger.rows(Alone, device="gone")) == 1


def test_evaluations_of_the_last_evaluated_rounds_stay(ledger: Ledger) -> None:
    fill(ledger, 1, 400)
    for _ in range(3):
        ledger.fold(390)
    evaluated = sorted({row.round for row in ledger.each(Evaluation, device="a")})
    assert evaluated[0] >= 400 - 5 * fold_rounds.EVALUATED
    assert len(evaluated) > fold_rounds.EVALUATED // 2


def test_the_last_errors_of_a_fleet_of_numbers_stay_and_each_devices_last(ledger: Ledger) -> None:
    fill(ledger, 1, 400)
    sums = dict.fromkeys(("absolute", "squared", "total", "squares"), (1.0,))
    said = TaskEvaluation(round=3, device="b", stage="after", method="fedavg", task="regression", outputs=("speed",),
                          samples=7, sums=sums)
    ledger.put(said, *(replace(said, round=number, device="a") for number in range(5, 401, 5)))
    for _ in range(3):
        ledger.fold(390)
    assert ledger.rows(TaskEvaluation, device="b") == [said]
    kept = [row.round for row in ledger.each(TaskEvaluation, device="a")]
    assert kept == list(range(405 - 5 * fold_rounds.EVALUATED, 401, 5))


def test_few_rounds_and_an_open_round_are_not_folded(ledger: Ledger) -> None:
    assert ledger.fold(100) is None
    fill(ledger, 1, 60)
    assert ledger.fold(fold_rounds.STEP) is None
    ledger.put(replace(ledger.rounds()[4], status="open"))
    assert ledger.fold(50) is None
    assert len(ledger.rounds()) == 60


def test_a_long_past_is_folded_in_several_steps(ledger: Ledger) -> None:
    fill(ledger, 1, 450)
    seen = []
    while (folded := ledger.fold(451 - 50)) is not None:
        seen.append(folded.last)
    assert seen == [fold_rounds.MOST, 2 * fold_rounds.MOST]
    assert ledger.volume(within=FOLDED)[None].payload.up < ledger.volume()[None].payload.up


def test_a_late_report_for_a_folded_round_is_added(ledger: Ledger) -> None:
    fill(ledger, 1, 120)
    ledger.fold(60)
    before = ledger.volume()[None].payload.up
    ledger.put(Traffic(round=3, device="a", direction="up", kind="update", payload_bytes=500))
    assert ledger.volume()[None].payload.up == before + 500
    ledger.fold(100)
    assert ledger.volume()[None].payload.up == before + 500
    assert ledger.rows(Traffic, range(100)) == []


def test_what_devices_spent_of_their_privacy_stays(ledger: Ledger) -> None:
    fill(ledger, 1, 60, private=True)
    ledger.fold(21)
    ledger.fold(41)
    spent = {(device, noise): count for device, noise, count in ledger.folded_privacy()}
    assert spent == {(name, noise): 20 for name in DEVICES for noise in (2.0, 3.0)} | {("replaced", 2.0): 10}
    assert ledger.folded_modes() == [(40, "local")]


class Died(Exception):
    """The process dies here."""


def test_an_error_at_any_statement_leaves_the_ledger_as_it_was(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(ledger, 1, 60)
    before, asked = figures(ledger), ledger._query
    for dies_at in range(1, 100):
        left = iter(range(dies_at))

        def dying(*arguments: Any, left: Iterator[int] = left) -> Any:
            if next(left, None) is None:
                raise Died
            return asked(*arguments)

        monkeypatch.setattr(ledger, "_query", dying)
        try:
            folded = ledger.fold(41)
        except Died:
            monkeypatch.undo()
            assert len(ledger.rounds()) in (60, 20)  # the last statements only read what was folded
            continue
        monkeypatch.undo()
        assert folded is None or folded.last == 40
        break
    assert dies_at > 20
    same(schema.plain(figures(ledger)["totals"]), schema.plain(before["totals"]))


KILLED = """
import os, signal, sys
from cloud_server.ledger.ledger import Ledger
with Ledger(sys.argv[1]) as ledger:
    asked, left = ledger._query, iter(range(int(sys.argv[2])))
    def dying(*arguments):
        if next(left, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        return asked(*arguments)
    ledger._query = dying
    ledger.fold(41)
"""


@pytest.mark.slow
@pytest.mark.parametrize("statement", [5, 12, 25])
def test_a_kill_leaves_all_rounds_or_none(ledger: Ledger, statement: int) -> None:
    fill(ledger, 1, 60)
    before = ledger.totals()
    ended = subprocess.run([sys.executable, "-c", KILLED, str(ledger.path), str(statement)], cwd=ROOT, check=False,
                           env={**os.environ, "PYTHONPATH": str(ROOT)}, timeout=PATIENCE_S)
    assert ended.returncode == -signal.SIGKILL
    assert len(ledger.rounds()) == 60
    assert ledger.totals() == before
    assert ledger.fold(41) is not None
    same(schema.plain(ledger.totals()), schema.plain(before))


@pytest.mark.slow
def test_the_file_stops_growing(ledger: Ledger) -> None:
    sizes = []
    for last in range(40, 1001, 40):
        fill(ledger, last - 39, last)
        ledger.fold(last - 100 + 1)
        ledger._query("PRAGMA wal_checkpoint(TRUNCATE)")
        sizes.append(ledger.path.stat().st_size)
    assert max(sizes[-10:]) <= 1.1 * max(sizes[3:8])


def test_the_room_of_many_folded_rounds_goes_back_to_the_disk(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(ledger, 1, 300)
    ledger._query("PRAGMA wal_checkpoint(TRUNCATE)")
    large = ledger.path.stat().st_size
    assert not ledger.shrink()
    while ledger.fold(280):
        pass
    assert not ledger.shrink()  # it is a small file
    monkeypatch.setattr(fold_rounds, "FREE_BYTES", 1 << 10)
    before = ledger.totals()
    assert ledger.shrink()
    assert ledger.path.stat().st_size < large / 2
    assert ledger.totals() == before


def test_a_ledger_that_is_busy_stays_as_it_is(ledger: Ledger, monkeypatch: pytest.MonkeyPatch) -> None:
    fill(ledger, 1, 300)
    while ledger.fold(280):
        pass
    monkeypatch.setattr(fold_rounds, "FREE_BYTES", 1 << 10)
    ledger._db.execute("PRAGMA busy_timeout = 1")
    with Ledger(ledger.path) as other, other.transaction(), pytest.raises(StateError, match="locked"):
        ledger.shrink()
