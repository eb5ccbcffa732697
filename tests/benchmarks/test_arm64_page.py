"""The page of the emulated ARM64 runs shows what result.json holds, what failed and what was not run; and how a wait
for the emulated board is counted."""

from __future__ import annotations

import json
from typing import Any

from benchmarks import markdown
from benchmarks.arm64 import prove
from benchmarks.arm64.machine import Patience


def test_the_page_has_the_tables_of_the_result() -> None:
    result = json.loads(prove.RESULT.read_text())
    page = prove.PAGE.read_text()
    assert markdown.filled(page, prove.tables(result)) == page


def test_a_proof_that_was_not_played_is_on_the_page_as_such() -> None:
    result = json.loads(prove.RESULT.read_text())
    rows = prove.tables({**result, "proofs": {}})["proofs"]
    assert rows.count("not played") == len(prove.PROOFS)


def test_what_failed_is_reported() -> None:
    result = json.loads(prove.RESULT.read_text())
    assert "emulated" in result["label"]
    assert set(result["proofs"]) <= set(prove.PROOFS)
    for name, each in result["proofs"].items():
        assert each["passed"] != ("failed" in each), name
        assert each["held"] or not each["passed"], name


class Busy:
    """A board on a machine that is also doing other work."""

    def __init__(self) -> None:
        self.now, self.console = 0.0, ""
        self.threads = {"1": 0.0, "2": 0.0}

    def said(self) -> str:
        return self.console

    def waits(self) -> dict[str, float]:
        return dict(self.threads)

    def passes(self, seconds: float, **waited: float) -> None:
        self.now += seconds
        for thread, s in waited.items():
            self.threads[thread.removeprefix("t")] += s


def test_a_wait_for_the_board_ignores_other_processes_time_and_restarts_with_its_output() -> None:
    board: Any = Busy()
    patience = Patience(board, lambda: board.now)
    board.passes(10, t1=7, t2=6)
    assert patience.spent_s() == 3
    board.passes(10, t2=9.5)
    assert patience.spent_s() == 3.5
    board.passes(5)
    assert patience.spent_s() == 8.5
    board.console = "booting"
    board.passes(5)
    assert patience.spent_s() == 0
    board.passes(4)
    assert patience.spent_s() == 4
    assert Patience(None, lambda: board.now).spent_s() == 0
