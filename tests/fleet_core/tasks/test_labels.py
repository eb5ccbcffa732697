"""fleet_core.tasks.labels: labels as 0 and 1, and measures of counts that are added over devices."""

from __future__ import annotations

import json

import numpy as np
import pytest

from fleet_core.base import schema
from fleet_core.base.errors import BundleError, DataError
from fleet_core.model.layout import Layout
from fleet_core.tasks import labels
from fleet_core.tasks.labels import LabelCounts, MultiLabel, sigmoid

RNG = np.random.default_rng(4)
TASK = MultiLabel(("speech", "music", "rain"))
Y = RNG.random((50, 3)) < (0.6, 0.3, 0.1)
P = np.clip(Y + RNG.normal(0, 0.45, Y.shape), 0, 1)


def test_measures_are_those_of_their_definitions() -> None:
    found = LabelCounts.of(TASK, Y, P, least=51)
    answered = P >= 0.5
    for k, f1 in enumerate(found.f1):
        right = int((Y[:, k] & answered[:, k]).sum())
        precision, recall = right / answered[:, k].sum(), right / Y[:, k].sum()
        assert f1 == pytest.approx(2 * precision * recall / (precision + recall))
    wrong = int((answered != Y).sum())
    right = int((Y & answered).sum())
    assert found.micro_f1 == pytest.approx(2 * right / (2 * right + wrong))
    assert found.macro_f1 == pytest.approx(np.mean([f1 for f1 in found.f1 if f1 is not None]))
    all_right = [(true == answer).all() for true, answer in zip(Y, answered, strict=True)]
    assert found.exact[0] / found.count == pytest.approx(np.mean(all_right))


def test_counts_of_devices_are_added_to_those_of_all_samples() -> None:
    whole, parts = (LabelCounts.of(TASK, Y, P, 51), [LabelCounts.of(TASK, Y[part], P[part], 51)
                                                     for part in (slice(20), slice(20, None))])
    samples, figures = labels.pooled(TASK.outputs, [
        (one.count, {name: getattr(one, name) for name in labels.SUMS}) for one in parts])
    assert samples == 50
    assert figures == labels.measures(TASK.outputs, whole)


def test_a_labels_threshold_has_the_highest_f1_and_is_the_nearest_to_a_half() -> None:
    y = np.array([[1, 0, 1], [1, 0, 0], [0, 0, 1], [0, 0, 0]]) > 0
    p = np.array([[0.3, 0.2, 0.9], [0.4, 0.1, 0.1], [0.22, 0.3, 0.8], [0.1, 0.2, 0.2]])
    assert labels.thresholds(y, p).tolist() == [0.3, 0.5, 0.5]


def test_each_half_is_answered_by_the_thresholds_of_the_other() -> None:
    """The first label wants 0.2 in the earlier half and 0.7 in the later one; the second is carried too seldom for a
    threshold of its own."""
    y = np.array([[1, 1, 0], [0, 0, 1]] * 4 + [[1, 0, 1], [0, 0, 0]] * 4)
    p = np.full((16, 3), 0.3)
    p[:, 0] = [0.2, 0.18] * 4 + [0.7, 0.66] * 4
    p[:, 2] = np.where(y[:, 2], 0.9, 0.1)
    found = LabelCounts.of(TASK, y, p, least=3)
    assert found.answered.tolist() == [0 + 8, 0, 8]  # by 0.7 nothing, by 0.2 everything
    assert found.both.tolist() == [4, 0, 8]
    assert found.thresholds is not None
    assert found.thresholds.tolist() == [*labels.thresholds(y > 0, p).tolist()[:1], 0.5, 0.5]
    assert TASK.measured(y, p).thresholds == tuple(found.thresholds)
    few = LabelCounts.of(TASK, y, p, least=5)
    assert few.thresholds is not None
    assert few.thresholds.tolist() == [0.5, 0.5, 0.5]
    assert few.answered.tolist() == [8, 0, 8]


def test_counts_travel_as_json_and_come_back() -> None:
    whole = TASK.measured(Y, P)
    sent = json.loads(json.dumps(whole.sums))
    assert TASK.of_sums(whole.samples, sent).figures == whole.figures


def test_a_label_that_nobody_met_has_no_f1_and_silence_where_there_is_none_is_right() -> None:
    none = np.zeros((4, 3))
    found = TASK.measured(none, none)
    assert found.figures == {"micro_f1": {"all": 1.0}, "exact_match": {"all": 1.0}}
    assert found.distance == 0.0
    one = np.array([[1, 0, 0.0]])
    assert TASK.measured(one, one).figures["f1"] == {"speech": 1.0}
    assert TASK.measured(one, none[:1]).figures["f1"] == {"speech": 0.0}


def test_figures_are_said_in_words() -> None:
    figures = TASK.measured(Y, Y).figures
    assert labels.text_of(figures) == "1.000"
    assert labels.whole_text(figures) == ("micro-F1 1.000, macro-F1 1.000, exact match 1.000; F1 speech 1.000, "
                                              "music 1.000, rain 1.000")


@pytest.mark.parametrize(("y", "message"), [
    (np.zeros(3), r"the labels are float64 \[3\]"), (np.zeros((3, 2)), r"\[3, 2\]; expected \[N, 3\], 0 or 1 for each"),
    (np.array([[0, 1, 0], [0, 2, 0]]), r"row 2 of the labels holds \[0, 2, 0\]"),
    (np.array([[np.nan, 1, 0]]), "row 1 of the labels"), (np.array([["speech", "", ""]]), "the labels are <U6"),
])
def test_other_labels_than_0_and_1_are_refused(y: np.ndarray, message: str) -> None:
    with pytest.raises(DataError, match=message):
        TASK.standardized(y)


@pytest.mark.parametrize("names", [(), ("a", "a"), ("a", "")])
def test_labels_have_names_each_once(names: tuple[str, ...]) -> None:
    with pytest.raises(DataError, match="the labels are"):
        MultiLabel(names)


def test_logits_of_any_size_become_probabilities() -> None:
    np.testing.assert_allclose(sigmoid(np.array([-1e5, -2.0, 0.0, 2.0, 1e5])),
                               [0, 1 / (1 + np.exp(2)), 0.5, 1 / (1 + np.exp(-2)), 1])
    assert TASK.chosen([0.5, 0.49, 0.9]) == ("speech", "rain")
    assert TASK.chosen([0.5, 0.49, 0.9], (0.6, 0.4, 0.9)) == ("music", "rain")


def test_a_layout_with_labels_is_read_again_and_an_unknown_task_is_refused() -> None:
    text = json.dumps({"model": "mlp", "input": {"shape": [4]}, "classes": [], "embedding": 2, "tensors": [],
                       "task": schema.plain(TASK)})
    layout = Layout.from_json(text)
    assert layout.task == TASK
    assert layout.answers == TASK.outputs
    np.testing.assert_array_equal(layout.truths(Y), Y.astype(np.float32))
    with pytest.raises(BundleError, match=r"task.kind: unknown value 'rank', expected one of anomaly, multi"):
        Layout.from_json(text.replace('"multi-label"', '"rank"'))
