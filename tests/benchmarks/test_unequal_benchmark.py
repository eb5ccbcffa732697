"""benchmarks/unequal: its page has the figures of its results, and its runs are evaluated on validation devices."""

from __future__ import annotations

import json

from benchmarks import markdown
from benchmarks.unequal import run
from cloud_server.laboratory.plan import experiment as experiments


def test_the_page_has_the_figures_of_the_results() -> None:
    page = (run.HERE / "README.md").read_text(encoding="utf-8")
    result = json.loads((run.HERE / "result.json").read_text(encoding="utf-8"))
    assert markdown.filled(page, run.tables(result)) == page


def test_its_runs_differ_in_the_draws_alone() -> None:
    asked = experiments.load(run.HERE / "draws.toml")
    assert asked.evaluation.within_training
    random, balanced = ({**section.hyper} for section in asked.method)
    assert balanced.pop("draws") == "balanced"
    assert random == balanced
