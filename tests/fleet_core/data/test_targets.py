"""Targets, the numbers to predict: read from every format, and told apart from labels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_core.base.errors import DataError
from fleet_core.data import samples, unlabelled
from fleet_core.data.samples import Samples, load
from fleet_core.data.time_split import by_time
from fleet_core.model.layout import InputSpec

X = np.arange(12, dtype=np.float32).reshape(4, 3)


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_an_npz_gives_one_number_or_several_for_each_sample(tmp_path):
    one = load(npz(tmp_path / "one.npz", x=X, y=np.array([1.5, 2, 3, 4])), outputs=())
    assert one.outputs == ("target",)
    assert one.classes is None
    np.testing.assert_array_equal(one.y, [[1.5], [2], [3], [4]])
    y = np.arange(8.0).reshape(4, 2)
    several = load(npz(tmp_path / "two.npz", x=X, y=y, outputs=np.array(["speed", "load"])), outputs=())
    assert several.outputs == ("speed", "load")
    assert several.take([1]).y.tolist() == [[2.0, 3.0]]
    chosen = load(tmp_path / "two.npz", outputs=("load",))
    assert chosen.outputs == ("load",)
    assert chosen.y.tolist() == [[1.0], [3.0], [5.0], [7.0]]


def test_the_columns_of_a_table_that_are_named_are_targets(tmp_path):
    csv = tmp_path / "s.csv"
    csv.write_text("a,speed,b,client\n1,0.5,2,p\n3,1.5,4,q\n")
    found = load(csv, outputs=("speed",))
    assert found.x.tolist() == [[1, 2], [3, 4]]
    assert found.y.tolist() == [[0.5], [1.5]]
    lines = tmp_path / "s.ndjson"
    lines.write_text('{"x": [1, 2.5], "speed": 3}\n{"x": [3, 4], "speed": 1.5}\n')
    assert load(lines, outputs=("speed",)).y.tolist() == [[3.0], [1.5]]
    with pytest.raises(DataError, match=r"line 1: has no column 'sped'\s+hint: rename the column 'speed'"):
        load(csv, outputs=("sped",))


def test_a_window_of_readings_has_the_mean_of_their_targets(tmp_path):
    csv = tmp_path / "r.csv"
    csv.write_text("time,ax,target\n" + "".join(f"{t},{t},{10 * t}\n" for t in range(5)))
    found = load(csv, outputs=(), window=2)
    assert found.x.shape == (2, 1, 2)
    assert found.y.tolist() == [[5.0], [25.0]]
    np.testing.assert_array_equal(found.time, [1, 3])


def test_targets_are_ignored_where_samples_are_to_be_answered(tmp_path):
    csv = tmp_path / "q.csv"
    csv.write_text("a,speed,b\n1,9,2\n")
    assert unlabelled.load(csv, InputSpec((2,)), outputs=("speed",)).tolist() == [[1, 2]]
    csv.write_text("a,b\n1,2\n")
    assert unlabelled.load(csv, InputSpec((2,)), outputs=("speed",)).tolist() == [[1, 2]]


def test_targets_are_stored_appended_and_split_by_time(tmp_path):
    path = tmp_path / "added.npz"
    new = Samples(X, np.arange(4.0)[:, None], outputs=("speed",))
    samples.append(path, new)
    assert len(samples.append(path, new)) == 8
    stored = load(path, outputs=("speed",))
    learned, held_back = by_time(stored, 0.5)
    assert learned.y.tolist() == [[0], [1], [2], [3]]
    assert held_back.outputs == ("speed",)
    with pytest.raises(DataError, match="has no output 'load'"):
        load(path, outputs=("load",))


@pytest.mark.parametrize("y", [np.array([0.5, 1, 2, 3]), np.zeros((4, 2))])
def test_numbers_where_labels_are_expected_say_what_predicts_numbers(tmp_path, y):
    with pytest.raises(DataError, match=r"expected [^\n]*\nhint: a fleet that predicts numbers") as told:
        load(npz(tmp_path / "n.npz", x=X, y=y))
    assert "n.npz: y: has" in str(told.value)


def test_labels_where_numbers_are_expected_are_refused(tmp_path):
    with pytest.raises(DataError, match="y: holds class labels; expected numbers to predict"):
        load(npz(tmp_path / "text.npz", x=X, y=np.array(["a", "b", "a", "b"])), outputs=())
    with pytest.raises(DataError, match="y: holds class labels"):
        load(npz(tmp_path / "named.npz", x=X, y=np.array([0, 1, 0, 1]), classes=np.array(["a", "b"])), outputs=())
    (tmp_path / "folder" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="folder: has classes, not numbers to predict"):
        load(tmp_path / "folder", outputs=())


@pytest.mark.parametrize(("y", "message"), [
    (np.array([1.0, np.nan, 2, 3]), r"y, row 1: holds \[nan\]; expected finite numbers"),
    (np.zeros((3, 1)), r"y: has shape \[3, 1\]; expected \[4, 1\]"),
    (np.zeros((4, 1, 1)), r"y: has shape \[4, 1, 1\]"),
])  # fmt: skip
def test_targets_that_are_not_finite_or_of_another_shape_are_refused(tmp_path, y, message):
    with pytest.raises(DataError, match=message):
        load(npz(tmp_path / "bad.npz", x=X, y=y), outputs=())


# Any number of labels -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("kind", [bool, np.uint8, np.float64])
def test_an_npz_gives_any_number_of_labels_for_each_sample(tmp_path, kind):
    y = np.array([[1, 0], [1, 1], [0, 0], [0, 1]]).astype(kind)
    found = load(npz(tmp_path / "s.npz", x=X, y=y, labels=np.array(["speech", "music"])), outputs=(), labels=True)
    assert found.outputs == ("speech", "music")
    assert found.y.tolist() == [[1.0, 0.0], [1.0, 1.0], [0.0, 0.0], [0.0, 1.0]]
    assert load(tmp_path / "s.npz", outputs=("music",), labels=True).y.tolist() == [[0.0], [1.0], [0.0], [1.0]]
    unnamed = load(npz(tmp_path / "u.npz", x=X, y=y), outputs=(), labels=True)
    assert unnamed.outputs == ("label1", "label2")


def test_columns_of_0_and_1_are_labels(tmp_path):
    csv = tmp_path / "s.csv"
    csv.write_text("a,speech,b,music\n1,0,2,1\n3,1,4,1\n")
    found = load(csv, outputs=("speech", "music"), labels=True)
    assert found.x.tolist() == [[1, 2], [3, 4]]
    assert found.y.tolist() == [[0.0, 1.0], [1.0, 1.0]]
    with pytest.raises(DataError, match=r"names no labels; .*\nhint: --labels NAME,NAME"):
        load(csv, outputs=(), labels=True)
    csv.write_text("a,speech\n1,0\n3,0.5\n")
    with pytest.raises(DataError, match=r"y, line 3: holds \[0.5\]; expected 0 or 1 for each label"):
        load(csv, outputs=("speech",), labels=True)


def test_a_window_has_the_labels_of_half_of_its_readings_or_more(tmp_path):
    csv = tmp_path / "r.csv"
    csv.write_text("time,ax,on,off\n" + "".join(f"{t},{t},{int(t > 2)},{int(t == 0)}\n" for t in range(8)))
    found = load(csv, outputs=("on", "off"), labels=True, window=4)
    assert found.y.tolist() == [[0.0, 0.0], [1.0, 0.0]]
    assert load(csv, outputs=("on", "off"), labels=True, window=2).y.tolist()[0] == [0.0, 1.0]
    csv.write_text("time,ax,on\n" + "".join(f"{t},{t},{t / 4}\n" for t in range(4)))
    with pytest.raises(DataError, match=r"line 3: holds \[0.25\]; expected 0 or 1"):
        load(csv, outputs=("on",), labels=True, window=4)


def test_one_class_where_labels_are_expected_is_refused_and_the_reverse(tmp_path):
    for name, y in (("text", np.array(["a", "b", "a", "b"])), ("number", np.arange(4))):
        with pytest.raises(DataError, match=r"y: has one class for each sample; expected \[N, K\], 0 or 1 .*\nhint: "
                                            "leave out --task multi-label"):
            load(npz(tmp_path / f"{name}.npz", x=X, y=y), outputs=(), labels=True)
    csv = tmp_path / "s.csv"
    csv.write_text("a,b,label\n1,2,cat\n")
    with pytest.raises(DataError, match="has no column 'cat'\nhint: its column 'label' holds one class for each"):
        load(csv, outputs=("cat", "dog"), labels=True)
    lines = tmp_path / "s.ndjson"
    lines.write_text('{"x": [1, 2.5], "label": "cat"}\n')
    with pytest.raises(DataError, match="line 1: has no 'cat'"):
        load(lines, outputs=("cat", "dog"), labels=True)
    (tmp_path / "folder" / "a").mkdir(parents=True)
    with pytest.raises(DataError, match="folder: has one class for each sample, not several labels"):
        load(tmp_path / "folder", outputs=(), labels=True)
    with pytest.raises(DataError, match=r"y: has shape \(4, 2\).*\nhint: a fleet whose samples have any number of "
                                        r"labels: metafleet init --task multi-label"):
        load(npz(tmp_path / "several.npz", x=X, y=np.zeros((4, 2), np.uint8)))
