"""benchmarks/tasks: its page has the figures of its result, and its division leaks nothing."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from benchmarks import markdown
from benchmarks.tasks import run
from fleet_core.tasks.regression import Regression

PEOPLE, SEGMENTS, WINDOWS = 3, 5, 4


def test_the_page_has_the_figures_of_the_result() -> None:
    page = (run.HERE / "README.md").read_text(encoding="utf-8")
    rows = json.loads((run.HERE / "result.json").read_text(encoding="utf-8"))["rows"]
    assert markdown.filled(page, run.tables(rows)) == page


@pytest.fixture
def file(tmp_path: Path) -> Path:
    """Windows whose values name their segment; the hidden channels come first."""
    number = PEOPLE * SEGMENTS * WINDOWS
    segment = np.repeat(np.arange(PEOPLE * SEGMENTS), WINDOWS)
    x = np.random.default_rng(0).normal(size=(number, 6, 128)) * 0.1
    x[:, 3:] = segment[:, None, None]
    path = tmp_path / "har.npz"
    np.savez(path, x=x.astype(np.float16), subject=segment // SEGMENTS, segment=segment,
             channels=np.array([*run.OUTPUTS, *run.SEEN]))
    return path


def test_people_are_divided_between_segments_and_see_the_gyroscope_alone(file: Path) -> None:
    found = run.people(file)
    assert len(found) == PEOPLE
    for own, later in found:
        first, second = (set(x[:, 0, 0].tolist()) for x, _ in (own, later))
        assert (len(first), len(second)) == (3, 2)
        assert not first & second
        assert own[0].shape == (3 * WINDOWS, 3, 128)
        np.testing.assert_allclose(own[1], 0.1, atol=0.03)


def test_errors_are_pooled_over_people(file: Path) -> None:
    found = run.people(file)
    task = Regression.of(run.OUTPUTS, found[0][0][1])
    right = run.errors(task, lambda own, x: next(y for _, (seen, y) in found if seen is x), found)
    assert right == {"mae": 0.0, "r2": 1.0, "people": PEOPLE, "windows": PEOPLE * 2 * WINDOWS}
