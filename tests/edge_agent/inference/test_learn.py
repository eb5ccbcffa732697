"""While it answers, a device learns labelled samples and follows the changes of another process."""

from __future__ import annotations

import threading
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from edge_agent.commands.run import service_of
from edge_agent.inference import relearn
from edge_agent.inference.service import Service
from fleet_core.base.errors import DataError
from fleet_core.board.device_settings import settings_of
from tests.support.programs import finished_fleet


@pytest.fixture
def home(tmp_path: Path) -> Path:
    return finished_fleet(tmp_path) / "d1"


def opened(home: Path) -> Service:
    """The samples taught here are far from the device's; tests/edge_agent/inference/test_worse.py tests when such
    samples are refused."""
    settings = settings_of(home)
    service = service_of(home, replace(settings, serve=replace(settings.serve, worse_by=1.0)))
    service.restore()
    return service


@pytest.mark.slow
def test_labelled_samples_count_at_once_and_another_process_follows(home: Path) -> None:
    one, other = opened(home), opened(home)
    x = np.full((20, 8), -4, np.float32)
    before = one.answers(x[:1])
    assert relearn.learn(one, x, ["c"] * 20)["added"] == 20
    after = one.answers(x[:1])
    assert after.probabilities[0][2] > before.probabilities[0][2]
    assert other.answers(x[:1]) == before
    assert other.follow()
    assert not other.follow()
    assert other.answers(x[:1]) == after


@pytest.mark.slow
def test_samples_of_another_shape_or_dtype_are_refused_and_nothing_is_stored(home: Path) -> None:
    service = opened(home)
    x = np.zeros((2, 8), np.float32)
    for wrong, labels in (
        (x[:, :7], ["a", "b"]), (x, ["a"]), (x.astype(np.float64), ["a", "b"]), (x[:0], []), (x + np.nan, ["a", "b"])
    ):
        with pytest.raises(DataError):
            relearn.learn(service, wrong, labels)
    assert not service.local().added_path.exists()


@pytest.mark.slow
def test_answers_are_consistent_while_other_threads_add_samples(home: Path) -> None:
    service = opened(home)
    x = np.random.default_rng(0).normal(size=(12, 8)).astype(np.float32)
    teachers = [
        threading.Thread(target=lambda k=k: relearn.learn(service, x[k : k + 1], ["abc"[k % 3]])) for k in range(12)
    ]
    for teacher in teachers:
        teacher.start()
    while any(teacher.is_alive() for teacher in teachers):
        rows = np.array(service.answers(x).probabilities)
        np.testing.assert_allclose(rows.sum(1), 1, atol=1e-4)
    for teacher in teachers:
        teacher.join()
    assert opened(home).answers(x) == service.answers(x)
