"""benchmarks/tasks/labels.py: its page has the figures of its result; its windows hold what their labels say, and what
is measured on was not learned from."""

from __future__ import annotations

import json

import numpy as np

from benchmarks import markdown
from benchmarks.tasks import labels


def test_the_page_has_the_figures_of_the_result() -> None:
    page, result = labels.PAGE.read_text(encoding="utf-8"), json.loads(labels.RESULT.read_text(encoding="utf-8"))
    assert markdown.filled(page, labels.tables(result)) == page


def test_a_window_is_the_sum_of_recordings_of_its_digits() -> None:
    """A recording of digit k is a tone in a part of the window of its own; tones are far louder than silence."""
    digit = np.arange(10)
    cuts = []
    for k in digit:
        cut = np.zeros(8320, np.int16)
        cut[k * 832 : (k + 1) * 832] = (8000 * np.sin(np.arange(832))).astype(np.int16)
        cuts.append(cut)
    x, y = labels.mixed(cuts, digit, 40, np.random.default_rng(0))
    assert x.shape == (40, 32 * labels.PIECES)
    assert set(y.sum(1)) == {1.0, 2.0}
    loud = x.reshape(40, 32, labels.PIECES).max(1) > -5
    for row, of in zip(loud, y, strict=True):
        for k in np.flatnonzero(of):
            assert row[int((k + 0.5) * 0.8)]
        assert row.sum() <= 2 * 2


def test_what_is_learned_from_and_what_is_measured_on_share_no_take() -> None:
    assert not set(labels.TAKES[0]) & set(labels.TAKES[1])
    assert not set(labels.VALIDATION[0]) & set(labels.VALIDATION[1])
    assert not {take for takes in labels.VALIDATION for take in takes} & set(labels.TAKES[1])
    assert min(labels.TAKES[0]) == 5
