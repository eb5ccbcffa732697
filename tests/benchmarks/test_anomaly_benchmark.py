"""benchmarks/tasks/anomalies.py: its page has the figures of its result; one threshold for all counts what it says."""

from __future__ import annotations

import json

import numpy as np
import pytest

from benchmarks import markdown
from benchmarks.tasks import anomalies
from benchmarks.tasks.anomalies import Patient
from fleet_core.data.samples import Samples
from fleet_core.tasks.anomaly import Anomaly


def test_the_page_has_the_figures_of_the_result() -> None:
    page = anomalies.PAGE.read_text(encoding="utf-8")
    assert markdown.filled(page, anomalies.tables(json.loads(anomalies.RESULT.read_text(encoding="utf-8")))) == page


def test_a_patient_learns_from_its_earlier_normal_beats_alone() -> None:
    x = np.arange(20, dtype=np.float32)[:, None, None] * np.ones((20, 3, 4), np.float32)
    y = np.array([0, 1] * 10)
    (one,) = anomalies.patients(Samples(x, y, np.array(["p"] * 20), np.arange(20.0), ("N", "V")))
    assert one.own[:, 0, 0].tolist() == [0, 2, 4, 6, 8, 10]
    assert one.x[:, 0, 0].tolist() == list(range(12, 20))
    assert one.y.tolist() == [0, 1] * 4


def test_one_threshold_for_all_gives_the_louder_patient_all_the_alarms() -> None:
    rng = np.random.default_rng(0)
    y = np.array([0] * 200 + [1] * 10)
    those = [Patient(name, np.empty(0), scale * rng.random((210, 1)), y) for name, scale in (("a", 1.0), ("b", 9.0))]
    own, common = (anomalies.judged(those, lambda one: lambda x: x[:, 0], Anomaly(1, share=0.1), shared)
                   for shared in (False, True))
    assert own["worst_false"] == pytest.approx(0.1, abs=0.08)
    assert common["worst_false"] == pytest.approx(0.2, abs=0.08)
    assert common["auroc"] == own["auroc"]
