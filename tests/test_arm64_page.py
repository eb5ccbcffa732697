"""The page of the proofs on emulated ARM64 says what result.json has, what failed and what was not played."""

from __future__ import annotations

import json

from benchmarks import markdown
from benchmarks.arm64 import prove


def test_the_page_has_the_tables_of_the_result() -> None:
    told = json.loads(prove.RESULT.read_text())
    page = prove.PAGE.read_text()
    assert markdown.filled(page, prove.tables(told)) == page


def test_a_proof_that_was_not_played_is_on_the_page_as_such() -> None:
    told = json.loads(prove.RESULT.read_text())
    rows = prove.tables({**told, "proofs": {}})["proofs"]
    assert rows.count("not played") == len(prove.PROOFS)


def test_what_failed_is_said() -> None:
    told = json.loads(prove.RESULT.read_text())
    assert "emulated" in told["label"]
    assert set(told["proofs"]) <= set(prove.PROOFS)
    for name, each in told["proofs"].items():
        assert each["passed"] != ("failed" in each), name
        assert each["held"] or not each["passed"], name
