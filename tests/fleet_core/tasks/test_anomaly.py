"""The task of anomaly detection: scores, thresholds, measures and their sums."""

from __future__ import annotations

import numpy as np
import pytest

from fleet_core.base import schema
from fleet_core.base.errors import DataError
from fleet_core.tasks import anomaly
from fleet_core.tasks.anomaly import Alarms, Anomaly


def test_a_score_is_the_mean_square_of_the_differences() -> None:
    assert Anomaly(2).in_units(np.array([[1.0, 3.0], [0.0, 0.0]])).tolist() == [[5.0], [0.0]]
    assert Anomaly(2).targets(3).tolist() == [[0, 0]] * 3


def test_the_threshold_lets_the_wanted_share_of_quiet_scores_through() -> None:
    scores = np.random.default_rng(0).permutation(1000) / 1000.0
    limit = Anomaly(1, share=0.05).threshold(scores)
    assert limit is not None
    assert (scores > limit).sum() <= 50
    assert (scores > limit).sum() >= 48
    assert Anomaly(1).threshold(np.empty(0)) is None


def test_a_share_below_one_sample_is_extrapolated_beyond_all_scores() -> None:
    rng = np.random.default_rng(0)
    limits = [Anomaly(1, false_alarms_per_day=10, seconds=1).threshold(rng.exponential(size=500)) for _ in range(200)]
    assert np.median([float(limit or 0) for limit in limits]) == pytest.approx(np.log(8640), rel=0.1)
    assert Anomaly(1).threshold(np.array([2.0])) == 2.0


def test_false_alarms_a_day_need_the_seconds_between_samples() -> None:
    assert Anomaly(1, false_alarms_per_day=864, seconds=1).allowed == 0.01
    with pytest.raises(DataError, match="without seconds"):
        Anomaly(1, false_alarms_per_day=1)
    with pytest.raises(DataError, match="at most half"):
        Anomaly(1, false_alarms_per_day=86_400, seconds=1)


def drawn(seed: int = 0) -> tuple[np.ndarray, np.ndarray]:
    rng = np.random.default_rng(seed)
    y = (rng.random(400) < 0.2).astype(np.int64)
    return y, rng.exponential(size=400) + y


def test_the_earlier_half_of_the_quiet_samples_gives_the_threshold_and_is_not_counted() -> None:
    task, (y, scores) = Anomaly(1, share=0.05), drawn()
    found = Alarms.of(task, y, scores)
    quiet = scores[y == 0]
    half = (len(quiet) + 1) // 2
    limit = task.threshold(quiet[:half])
    shown = anomaly.measures(found)
    assert found.count == len(quiet) - half + y.sum()
    assert shown["alarms"] == {"quiet": pytest.approx((quiet[half:] > limit).mean()),
                               "anomaly": pytest.approx((scores[y == 1] > limit).mean())}
    later, wrong = quiet[half:], scores[y == 1]
    wanted = (wrong[:, None] > later).mean()
    assert shown["auroc"]["all"] == pytest.approx(wanted)
    assert "AUROC" in anomaly.text_of(shown)


def test_without_labelled_anomalies_there_is_no_auroc() -> None:
    found = Alarms.of(Anomaly(1), np.zeros(20, np.int64), np.arange(20.0))
    assert anomaly.measures(found).keys() == {"alarms", "score"}
    assert anomaly.text_of(anomaly.measures(found)) == "100.00 %"


def test_sums_travel_and_are_added() -> None:
    task = Anomaly(1)
    several = [task.measured(*drawn(seed)) for seed in range(2)]
    assert task.of_sums(several[0].samples, several[0].sums).figures == several[0].figures
    samples, figures = anomaly.pooled(task.outputs, [(one.samples, one.sums) for one in several])
    assert samples == several[0].samples + several[1].samples
    pairs, above = (sum(one.sums["pairs"][k] for one in several) for k in range(2))
    assert figures["auroc"]["all"] == pytest.approx(above / pairs)


@pytest.mark.parametrize(("changed", "count"), [
    ({"quiet": (2.0, 3.0, 1.0, 1.0)}, 3), ({"quiet": (2.0, 1.0, -1.0, 1.0)}, 3), ({"pairs": (2.0,)}, 3), ({}, 4),
    ({"anomaly": (1.0, 2.0, 1.0, 1.0)}, 3), ({"quiet": (2.0, float("inf"), 1.0, 1.0)}, 3), ({"more": (1.0,)}, 3),
    ({"quiet": (1.5, 0.0, 1.0, 1.0), "anomaly": (1.5, 0.0, 1.0, 1.0)}, 3),
])
def test_sums_that_no_samples_have_are_refused(changed: dict[str, tuple[float, ...]], count: int) -> None:
    right = {"quiet": (2.0, 1.0, 1.0, 1.0), "anomaly": (1.0, 1.0, 2.0, 1.5), "pairs": (2.0, 1.5)}
    assert Anomaly(1).of_sums(3, right).samples == 3
    with pytest.raises(DataError, match="sums"):
        Anomaly(1).of_sums(count, {**right, **changed})


def test_a_task_is_read_as_it_was_written() -> None:
    task = Anomaly(4, ("N",), 0.02, 5.0, 0.8)
    assert schema.read(Anomaly, schema.plain(task)) == (task, [])
