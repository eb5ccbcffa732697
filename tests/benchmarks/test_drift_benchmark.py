"""benchmarks/drift: the page about inputs has the figures of its result, and a stream is not its own reference."""

from __future__ import annotations

import json

import numpy as np

from benchmarks import markdown
from benchmarks.drift import inputs
from benchmarks.drift.run import NONE, OTHER, SHIFTS


def test_the_page_has_the_figures_of_the_result() -> None:
    page = inputs.PAGE.read_text(encoding="utf-8")
    result = json.loads(inputs.RESULT.read_text(encoding="utf-8"))
    assert markdown.filled(page, inputs.tables(result)) == page


def test_a_device_without_samples_enough_is_left_out_and_shifts_are_of_the_later_ones() -> None:
    rng = np.random.default_rng(0)
    own, later = (rng.normal(size=(count, 3, 16)).astype(np.float32) for count in (80, 30))
    few = own[:39], later
    (device,) = inputs.devices([(own, later), few])
    assert device.surprise.keys() == {NONE, OTHER, *SHIFTS}
    assert all(len(found) == 30 for found in device.surprise.values())
    assert device.surprise["gain 2"].mean() > 2 > device.surprise[NONE].mean()
    assert inputs.measured([device])["with_false_alarms"] == 0
