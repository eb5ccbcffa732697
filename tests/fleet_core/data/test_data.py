"""Readers, splits, episodes and the heartbeat data set."""

from __future__ import annotations

import hashlib
import importlib.util
import io
import itertools
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from fleet_core.base.errors import ConfigError, DataError
from fleet_core.data import heartbeat
from fleet_core.data.episodes import MAX_DRAWS, Episodes, Splits, batches
from fleet_core.data.samples import Samples, append, load, save
from fleet_core.data.time_split import by_time, first_seconds
from tests.support.paths import ROOT

BUILD = ROOT / "benchmarks/heartbeat/build.py"


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


X = np.arange(12, dtype=np.float32).reshape(4, 3)
Y = np.array([0, 1, 1, 0])


# .npz ---------------------------------------------------------------------------------------------------------------


def test_an_npz_with_every_array_is_read_and_saved_alike(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", x=X, y=Y, client=["b", "a", "b", "a"], time=[3, 2, 1, 0], classes=["no", "yes"])
    first = load(path)
    assert first.clients == ("a", "b")
    assert first.classes == ("no", "yes")
    assert first.time is not None
    assert [str(array.dtype) for array in (first.x, first.y, first.time)] == ["float32", "int64", "float64"]
    save(tmp_path / "b.npz", first)
    again = load(tmp_path / "b.npz")
    for name in ("x", "y", "client", "time"):
        np.testing.assert_array_equal(getattr(again, name), getattr(first, name))
    assert again.classes == first.classes
    assert len(first.of_client("a")) == 2
    np.testing.assert_array_equal(first.of_client("a").x, X[[1, 3]])


@pytest.mark.parametrize(
    ("given_dtype", "read_dtype"),
    [(np.float64, np.float32), (np.float16, np.float32), (np.uint8, np.uint8), (np.int16, np.float32),
     (np.uint64, np.float32), (bool, np.float32)],
)  # fmt: skip
def test_x_becomes_one_of_the_types_that_a_model_takes(tmp_path: Path, given_dtype: Any, read_dtype: Any) -> None:
    found = load(npz(tmp_path / "a.npz", x=X.astype(given_dtype), y=Y)).x
    assert found.dtype == read_dtype
    np.testing.assert_array_equal(found, X.astype(given_dtype))


@pytest.mark.parametrize(
    ("x", "classes", "dtype"),
    [
        ([[0, 1], [1, 0]], None, "int64"),
        ([[0, 2], [1, 0]], None, "float32"),
        ([[0, 2], [1, 0]], ["a", "b", "c"], "int64"),
        ([[0, -1], [1, 0]], None, "float32"),
        ([[[0, 1]], [[1, 0]]], None, "float32"),
    ],
)
def test_whole_numbers_are_tokens_where_each_is_a_classs_and_else_readings(
    tmp_path: Path, x: Any, classes: Any, dtype: str
) -> None:
    arrays = {"x": np.array(x, np.int16), "y": [0, 1]} | ({} if classes is None else {"classes": classes})
    assert load(npz(tmp_path / "a.npz", **arrays)).x.dtype == dtype


@pytest.mark.parametrize(
    ("given", "wanted", "read"),
    [
        (np.int16, "float32", "float32"), (bool, "float32", "float32"), (np.int64, "uint8", "uint8"),
        (np.uint8, "int64", "int64"), (np.int32, "int64", "int64"), (np.uint8, "float32", "uint8"),
        (np.float64, "uint8", "float32"),
    ],
)  # fmt: skip
def test_whole_numbers_become_the_models_type_and_what_may_differ_in_scale_does_not(
    tmp_path: Path, given: Any, wanted: str, read: str
) -> None:
    x = (X % 2 if given is bool else X).astype(given)
    found = load(npz(tmp_path / "a.npz", x=x, y=Y), dtype=wanted).x
    assert found.dtype == read
    np.testing.assert_array_equal(found, x)


def test_whole_numbers_that_bytes_do_not_hold_are_left_for_the_model_to_refuse(tmp_path: Path) -> None:
    found = load(npz(tmp_path / "a.npz", x=X.astype(np.int16) + 250, y=Y), dtype="uint8").x
    assert found.dtype == np.int64
    assert found.max() == 261


BAD: dict[str, tuple[dict[str, Any], str]] = {
    "nan": ({"x": np.where(X == 7, np.nan, X), "y": Y}, "x, row 2: holds nan"),
    "infinite": ({"x": np.where(X == 3, -np.inf, X), "y": Y}, "x, row 1: holds -inf"),
    "too large for float32": ({"x": np.where(X == 3, 1e300, X.astype(float)), "y": Y}, "x, row 1: holds inf"),
    "no samples": ({"x": X[:0], "y": Y[:0]}, "holds no samples"),
    "no x": ({"X": X, "y": Y}, "no array 'x'"),
    "no y": ({"x": X, "label": Y}, "no array 'y'"),
    "flat x": ({"x": X.ravel(), "y": np.zeros(12, int)}, "x: has shape"),
    "x of text": ({"x": X.astype(str), "y": Y}, "x: has values of type"),
    "complex x": ({"x": X + 1j, "y": Y}, "x: has values of type"),
    "fewer labels": ({"x": X, "y": Y[:3]}, r"y: has shape \(3,\)"),
    "labels in a column": ({"x": X, "y": Y[:, None]}, r"y: has shape \(4, 1\)"),
    "labels with a fraction": ({"x": X, "y": Y + 0.5}, "y: has values of type float64"),
    "negative label": ({"x": X, "y": Y - 1}, "y, row 0: label -1 is out of range"),
    "enormous label": ({"x": X, "y": Y.astype(np.uint64) * np.uint64(2**63)}, "y, row 1: label 9223372036854775808"),
    "label over its classes": ({"x": X, "y": Y + 1, "classes": ["a", "b"]}, "y, row 1: label 2 is out of range"),
    "fewer clients": ({"x": X, "y": Y, "client": ["a"]}, r"client: has shape \(1,\)"),
    "nameless client": ({"x": X, "y": Y, "client": ["a", "", "a", "a"]}, "client, row 1: is empty"),
    "client of floats": ({"x": X, "y": Y, "client": [1.5, 1, 1, 1]}, "client: has values of type"),
    "time that is nan": ({"x": X, "y": Y, "time": [0, 1, np.nan, 3]}, "time, row 2: holds nan"),
    "time of text": ({"x": X, "y": Y, "time": ["a", "b", "c", "d"]}, "time: has values of type"),
    "class named twice": ({"x": X, "y": Y, "classes": ["a", "a"]}, "classes: has an empty or repeated class name"),
    "classes of numbers": ({"x": X, "y": Y, "classes": [1, 2]}, "classes: is int64"),
    "Python objects": ({"x": np.array([[{}], [{}]], dtype=object), "y": Y[:2]}, "x: holds Python objects"),
}


@pytest.mark.parametrize("name", BAD)
def test_an_npz_error_names_file_array_and_row(tmp_path: Path, name: str) -> None:
    arrays, message = BAD[name]
    path = npz(tmp_path / "bad.npz", **arrays)
    with pytest.raises(DataError, match=message) as told:
        load(path)
    assert str(path) in str(told.value)


def member(shape: tuple[int, ...], dtype: str, body: bytes) -> bytes:
    """A .npy file with any header."""
    buffer = io.BytesIO()
    np.lib.format.write_array_header_1_0(buffer, {"shape": shape, "fortran_order": False, "descr": dtype})
    return buffer.getvalue() + body


def test_arrays_over_the_limit_are_refused_before_they_are_unpacked(tmp_path: Path) -> None:
    path = tmp_path / "bomb.npz"
    np.savez_compressed(path, x=np.zeros((1000, 1000)), y=np.zeros(1000, int))
    assert path.stat().st_size < 100_000
    with pytest.raises(DataError, match="over the limit of 1000000"):
        load(path, limit_bytes=1_000_000)


@pytest.mark.parametrize(
    ("x", "message"),
    [
        (member((1 << 50, 4), "<f4", b"1234"), "claims shape"),
        (member((1 << 50, 4), "<U0", b""), "has only empty text"),
        (member((2, -2), "<f4", b"1234" * 4), "is not an array"),
        (b"\x93NUMPY\x09\x00garbage", "is not an array"),
        (b"not numpy", "is not an array"),
    ],
)
def test_a_header_that_lies_is_refused_before_memory_is_taken(tmp_path: Path, x: bytes, message: str) -> None:
    path = tmp_path / "lie.npz"
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("x.npy", x)
        archive.writestr("y.npy", member((1,), "<i8", bytes(8)))
    with pytest.raises(DataError, match=message):
        load(path)


def attempt(path: Path) -> Samples | DataError:
    try:
        return load(path)
    except DataError as error:
        return error


@pytest.mark.slow
@settings(max_examples=150, deadline=None)
@given(
    changes=st.lists(st.tuples(st.integers(0, 10**6), st.integers(0, 255)), min_size=1, max_size=6),
    cut=st.integers(0, 40),
    packed=st.booleans(),
)
def test_a_damaged_npz_is_samples_or_a_data_error_and_nothing_else(
    changes: list[tuple[int, int]], cut: int, packed: bool
) -> None:
    buffer = io.BytesIO()
    (np.savez_compressed if packed else np.savez)(buffer, x=X, y=Y, classes=["a", "b"])
    data = bytearray(buffer.getvalue())
    for where, value in changes:
        data[where % len(data)] = value
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "damaged.npz"
        path.write_bytes(data[: len(data) - cut])
        outcome = attempt(path)
        assert np.isfinite(outcome.x).all() if isinstance(outcome, Samples) else str(path) in str(outcome)


def test_a_file_that_is_absent_or_of_no_known_form_says_what_is_taken(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="does not exist"):
        load(tmp_path / "none.npz")
    (tmp_path / "a.mat").write_bytes(b"x")
    with pytest.raises(DataError, match=r"unknown format '\.mat'"):
        load(tmp_path / "a.mat")
    (tmp_path / "empty.npz").write_bytes(b"")
    with pytest.raises(DataError, match="cannot be read"):
        load(tmp_path / "empty.npz")


# labels and classes -------------------------------------------------------------------------------------------------


def test_class_names_map_through_the_fleets_classes_or_their_sorted_names(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", x=X, y=["walk", "sit", "walk", "run"])
    assert load(path).classes == ("run", "sit", "walk")
    assert load(path).y.tolist() == [2, 1, 2, 0]
    fleet = load(path, classes=["sit", "walk", "run", "stand"])
    assert fleet.y.tolist() == [1, 0, 1, 2]
    assert fleet.classes == ("sit", "walk", "run", "stand")
    with pytest.raises(DataError, match=r"y, row 1: label 'sit' is not among the classes \(did you mean 'sits'"):
        load(path, classes=["run", "sits", "walk"])


def test_numbered_labels_of_a_file_with_other_classes_are_mapped_by_name(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", x=X, y=Y, classes=["walk", "sit"])
    assert load(path, classes=["sit", "stand", "walk"]).y.tolist() == [2, 0, 0, 2]
    with pytest.raises(DataError, match="label 'sit' is not among the classes"):
        load(path, classes=["walk", "run"])


def test_numbered_labels_must_be_within_the_fleets_classes(tmp_path: Path) -> None:
    path = npz(tmp_path / "a.npz", x=X, y=Y)
    assert load(path).classes is None
    assert load(path, classes=["a", "b"]).classes == ("a", "b")
    with pytest.raises(DataError, match="y, row 1: label 1 is out of range; expected 0 to 0"):
        load(path, classes=["a"])


def test_digits_that_are_class_names_are_names_and_otherwise_numbers(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("a,label\n1,7\n2,3\n")
    assert load(path, classes=["3", "5", "7"]).y.tolist() == [2, 0]
    assert load(path).y.tolist() == [7, 3]


# .csv ---------------------------------------------------------------------------------------------------------------


def test_a_csv_is_read_whatever_the_order_of_its_columns(tmp_path: Path) -> None:
    path = tmp_path / "a.csv"
    path.write_text("\ufefftime, a,label,client,b\r\n0.5,1,up,p1,2e1\r\n\r\n1,-3,down,p2,4\r\n", encoding="utf-8")
    read = load(path)
    assert read.x.tolist() == [[1, 20], [-3, 4]]
    assert read.x.dtype == np.float32
    assert read.y.tolist() == [1, 0]
    assert read.clients == ("p1", "p2")
    assert read.time is not None
    assert read.time.tolist() == [0.5, 1]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "line 1: has no column 'label'"),
        ("a,b\n1,2\n", "line 1: has no column 'label'"),
        ("a,labels\n1,2\n", "rename the column 'labels'"),
        ("label,client\n1,a\n", "line 1: has no feature column"),
        ("a,a,label\n1,2,3\n", "line 1: has 2 columns named 'a'"),
        ("a,label\n", "holds no samples"),
        ("a,label\n1,0\n2\n", "line 3: has 1 cells; expected 2"),
        ("a,label\n1,0\n2,1,5\n", "line 3: has 3 cells; expected 2"),
        ("a,label\n1,0\n\ntwo,1\n", "line 4: column a: 'two' is not a number"),
        ("a,label\n1,0\nnan,1\n", "line 3: column a: holds nan"),
        ("a,label\n1,0\n1e99,1\n", "x, line 3: holds inf"),
        ("a,label,time\n1,0,noon\n", "line 2: column time: 'noon' is not a number"),
        ("a,label,client\n1,0,\n", "client, line 2: is empty"),
        ("a,label\n1,-2\n", "y, line 2: label -2 is out of range"),
        ('a,label\n1,"0\n', "is not valid .csv"),
    ],
)
def test_a_csv_error_names_file_line_and_column(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "bad.csv"
    path.write_text(text)
    with pytest.raises(DataError, match=message) as told:
        load(path)
    assert "bad.csv" in str(told.value)


def test_a_csv_that_is_no_text_or_too_long_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "bad.csv"
    path.write_bytes(b"\xff\xfe\x00label")
    with pytest.raises(DataError, match="UTF-8"):
        load(path)
    path.write_text("a,label\n" + "1,0\n" * 1000)
    with pytest.raises(DataError, match="over the limit of 100"):
        load(path, limit_bytes=100)


# a folder of images -------------------------------------------------------------------------------------------------


def image(path: Path, mode: str = "RGB", size: tuple[int, int] = (5, 4), colour: Any = (1, 2, 3)) -> None:
    from PIL import Image

    path.parent.mkdir(parents=True, exist_ok=True)
    Image.new(mode, size, colour).save(path)


def test_a_folder_of_images_is_one_class_a_subfolder_channels_first(tmp_path: Path) -> None:
    image(tmp_path / "dog/1.png")
    image(tmp_path / "cat/9.png", "L", colour=200)
    (tmp_path / "cat/.DS_Store").write_bytes(b"x")
    (tmp_path / "README").write_text("notes")
    read = load(tmp_path)
    assert read.classes == ("cat", "dog")
    assert read.x.shape == (2, 3, 4, 5)
    assert read.x.dtype == np.uint8
    assert read.x[:, :, 0, 0].tolist() == [[200, 200, 200], [1, 2, 3]]
    assert load(tmp_path, classes=["dog", "cat"]).y.tolist() == [1, 0]


def test_grey_images_have_one_channel(tmp_path: Path) -> None:
    image(tmp_path / "a/1.png", "L", colour=7)
    image(tmp_path / "b/1.png", "1", colour=1)
    read = load(tmp_path)
    assert read.x.shape == (2, 1, 4, 5)
    assert read.x[:, 0, 0, 0].tolist() == [7, 255]


def test_an_image_error_names_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="has no subfolder"):
        load(tmp_path)
    (tmp_path / "a").mkdir()
    with pytest.raises(DataError, match="holds no samples"):
        load(tmp_path)
    image(tmp_path / "a/1.png")
    image(tmp_path / "a/2.png", size=(6, 4))
    with pytest.raises(DataError, match=r"2\.png: is 6 by 4 pixels; expected 5 by 4"):
        load(tmp_path)
    (tmp_path / "a/2.png").write_bytes(b"no image")
    with pytest.raises(DataError, match=r"2\.png: cannot be read as an image"):
        load(tmp_path)
    image(tmp_path / "a/2.png", "I;16", colour=3)
    with pytest.raises(DataError, match=r"2\.png: has pixels of mode I;16"):
        load(tmp_path)
    (tmp_path / "a/2.png").write_bytes((tmp_path / "a/1.png").read_bytes()[:50])
    with pytest.raises(DataError, match=r"2\.png: cannot be read as an image"):
        load(tmp_path)
    with pytest.raises(DataError, match="over the limit of 100"):
        load(tmp_path, limit_bytes=100)


def test_without_pillow_the_hint_names_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    image(tmp_path / "a/1.png")
    monkeypatch.setitem(sys.modules, "PIL", None)
    with pytest.raises(DataError, match=r'pip install "metafleet\[images\]"'):
        load(tmp_path)


# append -------------------------------------------------------------------------------------------------------------


def test_samples_are_added_to_a_file_that_is_made_when_absent(tmp_path: Path) -> None:
    path = tmp_path / "new.npz"
    append(path, Samples(X, Y, classes=("a", "b")))
    whole = append(path, Samples(X[:1], Y[1:2], classes=("a", "b")))
    assert len(whole) == 5
    np.testing.assert_array_equal(load(path).x, np.concatenate([X, X[:1]]))
    assert load(path).y.tolist() == [0, 1, 1, 0, 1]
    assert [file.name for file in tmp_path.iterdir()] == ["new.npz"]


@pytest.mark.parametrize(
    ("new", "message"),
    [
        (Samples(X[:, :2], Y), r"a new sample is float32 \(2,\); expected float32 \(3,\)"),
        (Samples(X.astype(np.uint8), Y), "a new sample is uint8"),
        (Samples(X, Y, classes=("a", "b")), "new samples have the classes"),
        (Samples(X, Y, time=np.arange(4.0)), "have no 'time'"),
        (Samples(X, Y, client=np.array(["a"] * 4)), "have no 'client'"),
    ],
)
def test_samples_that_do_not_fit_leave_the_file_as_it_was(tmp_path: Path, new: Samples, message: str) -> None:
    path = tmp_path / "a.npz"
    save(path, Samples(X, Y))
    before = path.read_bytes()
    with pytest.raises(DataError, match=message):
        append(path, new)
    assert path.read_bytes() == before
    with pytest.raises(DataError, match=r"expected a \.npz"):
        append(tmp_path / "a.csv", new)


# splits -------------------------------------------------------------------------------------------------------------


def timed(time: list[float], client: list[str] | None = None) -> Samples:
    n = len(time)
    x = np.arange(n, dtype=np.float32)[:, None]
    return Samples(x, np.zeros(n, np.int64), None if client is None else np.array(client), np.array(time, np.float64))


def rows(samples: Samples) -> list[int]:
    return [int(value) for value in samples.x[:, 0]]


def test_the_first_part_of_the_time_is_not_the_first_part_of_the_samples() -> None:
    train, evaluation = by_time(timed([0, 9, 1, 2, 3, 4, 5, 10, 5.9, 6]), 0.6)
    assert rows(train) == [0, 2, 3, 4, 5, 6, 8]
    assert rows(evaluation) == [9, 1, 7]


def test_without_time_or_where_all_is_at_once_rows_are_split_in_order() -> None:
    plain = Samples(np.arange(5, dtype=np.float32)[:, None], np.zeros(5, np.int64))
    assert (rows(by_time(plain)[0]), rows(by_time(plain)[1])) == ([0, 1, 2], [3, 4])
    assert rows(by_time(timed([7, 7, 7, 7]), 0.5)[0]) == [0, 1]


def test_each_client_is_split_on_its_own_time() -> None:
    both = timed([0, 10, 1000, 1006, 6, 1010], ["a", "a", "b", "b", "a", "b"])
    train, evaluation = by_time(both, 0.6)
    assert rows(train) == [0, 2]
    assert rows(evaluation) == [4, 1, 3, 5]
    support, rest = first_seconds(both, 7)
    assert rows(support) == [0, 4, 2, 3]
    assert rows(rest) == [1, 5]


@settings(deadline=None)
@given(
    time=st.lists(st.floats(-1e308, 1e308), min_size=1, max_size=40), fraction=st.floats(0.01, 0.99), tie=st.booleans()
)
def test_a_split_keeps_every_sample_once_and_never_trains_on_what_comes_later(
    time: list[float], fraction: float, tie: bool
) -> None:
    whole = timed([float(round(t / 1e307)) for t in time] if tie else time)
    train, evaluation = by_time(whole, fraction)
    assert sorted(rows(train) + rows(evaluation)) == list(range(len(time)))
    assert len(train) >= 1
    assert (len(evaluation) >= 1) == (len(time) > 1)
    assert train.time is not None
    assert evaluation.time is not None
    if len(evaluation):
        assert train.time.max() <= evaluation.time.min()


def test_a_split_that_cannot_be_made_is_refused() -> None:
    with pytest.raises(DataError, match="leaves one part empty"):
        by_time(timed([1, 2]), 1.0)
    with pytest.raises(DataError, match="'time' array"):
        first_seconds(Samples(X, Y), 300)


def test_clients_are_told_apart() -> None:
    everything = timed([0, 1, 2], ["b", "a", "b"])
    assert {name: rows(everything.of_client(name)) for name in everything.clients} == {"a": [1], "b": [0, 2]}
    assert Samples(X, Y).clients == ()
    with pytest.raises(DataError, match="has no client 'a'"):
        Samples(X, Y).of_client("a")
    with pytest.raises(DataError, match=r"no client 'anm' \(did you mean 'ann'"):
        timed([0], ["ann"]).of_client("anm")


# episodes -----------------------------------------------------------------------------------------------------------

labels = st.lists(st.integers(0, 4), min_size=2, max_size=60).filter(lambda y: max(map(y.count, y)) >= 2)
sizes = st.integers(1, 40)


def draws(
    y: Any, support: int, query: int, seed: int, count: int = 8, passes: bool = False
) -> list[tuple[list[int], list[int]]]:
    episodes = Episodes(y, support, query, np.random.default_rng(seed), passes=passes)
    return [(s.tolist(), q.tolist()) for s, q in (next(episodes) for _ in range(count))]


@settings(deadline=None)
@given(y=labels, support=sizes, query=sizes, seed=st.integers(0, 1000), passes=st.booleans())
def test_an_episode_is_disjoint_and_asks_only_for_classes_that_it_showed(
    y: list[int], support: int, query: int, seed: int, passes: bool
) -> None:
    usable = {i for i, label in enumerate(y) if y.count(label) >= 2}
    for shown, asked in draws(y, support, query, seed, passes=passes):
        assert 1 <= len(shown) <= max(support, len(set(y)))
        assert 1 <= len(asked) <= max(query, len(usable))
        assert len(set(shown) | set(asked)) == len(shown) + len(asked)
        assert set(shown) | set(asked) <= usable
        assert {y[i] for i in asked} <= {y[i] for i in shown}
        if support + query > len(usable):
            assert set(shown) | set(asked) == usable
            assert {y[i] for i in shown} == {y[i] for i in usable}


def test_a_pass_gives_every_sample_once_before_any_comes_again() -> None:
    y = [0] * 40
    one_pass = draws(y, 6, 4, seed=3, count=4, passes=True)
    assert sorted(i for pair in one_pass for part in pair for i in part) == list(range(40))
    first, second = draws(y, 6, 4, seed=3, count=8, passes=True)[:4], draws(y, 6, 4, seed=3, count=8, passes=True)[4:]
    assert first == one_pass
    assert second != first
    at_random = draws(y, 6, 4, seed=3, count=4)
    assert len({i for pair in at_random for part in pair for i in part}) < 40


@pytest.mark.slow
@settings(deadline=None)
@given(y=labels, support=sizes, query=sizes, seed=st.integers(0, 1000), order=st.permutations([0, 1, 2, 3, 4]))
def test_no_draw_depends_on_the_number_of_a_label(
    y: list[int], support: int, query: int, seed: int, order: list[int]
) -> None:
    assert draws(y, support, query, seed) == draws([order[label] for label in y], support, query, seed)


def test_a_class_of_one_sample_is_left_out_and_counted() -> None:
    episodes = Episodes([3, 3, 3, 9, 5, 5], 2, 2, np.random.default_rng(0))
    assert episodes.left_out == {9: 1}
    assert all(3 not in np.concatenate(next(episodes)) for _ in range(50))
    with pytest.raises(DataError, match="no class has two samples"):
        Episodes([1, 2, 3], 1, 1, np.random.default_rng(0))


def test_a_rare_class_ends_in_a_stratified_draw_after_twenty_redraws() -> None:
    y = np.repeat(np.arange(8), 2)
    episodes = Episodes(y, 8, 8, np.random.default_rng(0))
    shown, asked = next(episodes)
    assert episodes.stratified == 1
    assert episodes.redraws == MAX_DRAWS - 1 == 20
    assert sorted(y[shown]) == sorted(y[asked]) == list(range(8))


def test_more_classes_than_support_samples_ask_for_those_shown() -> None:
    y = np.repeat(np.arange(30), 4)
    episodes = Episodes(y, 3, 10, np.random.default_rng(1))
    seen = set()
    for _ in range(40):
        shown, asked = next(episodes)
        assert len(set(y[shown])) == 3
        assert len(asked) == 9  # all that is left of three classes of four
        seen |= set(y[shown])
    assert len(seen) > 20  # a random choice of classes, not the first


def test_a_small_device_draws_in_the_same_proportion() -> None:
    shown, asked = next(Episodes([0] * 12, 50, 10, np.random.default_rng(0)))
    assert (len(shown), len(asked)) == (10, 2)
    shown, asked = next(Episodes([0, 0, 1, 1, 2, 2], 5, 50, np.random.default_rng(0)))
    assert (len(shown), len(asked)) == (3, 3)


def test_the_draws_of_class_means_keep_their_bits() -> None:
    y, digest = np.arange(60) % 7, hashlib.sha256()
    y[:3] = 8
    for passes in (False, True):
        episodes = Episodes(y, 10, 14, np.random.default_rng(5), passes=passes)
        for pair in itertools.islice(episodes, 20):
            for part in pair:
                digest.update(part.astype("<i8").tobytes())
        assert episodes.redraws
        assert episodes.stratified
    assert digest.hexdigest()[:16] == "c6db1c47d27ab966"


@settings(deadline=None)
@given(samples=st.integers(2, 200), support=sizes, query=sizes, seed=st.integers(0, 1000), passes=st.booleans())
def test_a_split_is_disjoint_and_in_the_proportion_that_was_asked_for(
    samples: int, support: int, query: int, seed: int, passes: bool
) -> None:
    splits = Splits(samples, support, query, np.random.default_rng(seed), passes=passes)
    for shown, asked in itertools.islice(splits, 5):
        assert len(set(shown) | set(asked)) == len(shown) + len(asked) == min(samples, support + query)
        assert min(len(shown), len(asked)) >= 1
        assert abs(len(shown) - (len(shown) + len(asked)) * support / (support + query)) <= 1


def test_in_splits_a_class_of_one_sample_comes_to_either_side() -> None:
    """The device has 26 classes and at most two samples of each, as a short role of Shakespeare; 20 % are support."""
    y = np.array([*range(26), *range(14)])
    pairs = list(itertools.islice(Splits(y.size, 200, 800, np.random.default_rng(0)), 60))
    assert {(len(shown), len(asked)) for shown, asked in pairs} == {(8, 32)}
    assert {len(set(y[shown]) | set(y[asked])) for shown, asked in pairs} == {26}
    assert any(not set(y[asked]) <= set(y[shown]) for shown, asked in pairs)
    assert {25} <= set(np.concatenate([y[shown] for shown, _ in pairs])) & set(np.concatenate([y[a] for _, a in pairs]))


def test_a_device_whose_draws_fit_draws_in_splits_what_it_drew_in_episodes() -> None:
    """Where no draw is refused and no class is single, the two differ in nothing."""
    y = np.arange(300) % 3
    for passes in (False, True):
        plain = Splits(y.size, 40, 20, np.random.default_rng(4), passes=passes)
        by_class = Episodes(y, 40, 20, np.random.default_rng(4), passes=passes)
        for one, other in itertools.islice(zip(plain, by_class, strict=True), 8):
            np.testing.assert_array_equal(np.concatenate(one), np.concatenate(other))


def test_episodes_are_random_and_repeat_with_their_seed() -> None:
    y = [0, 1] * 50
    assert draws(y, 5, 5, 1) == draws(y, 5, 5, 1)
    assert draws(y, 5, 5, 1) != draws(y, 5, 5, 2)
    assert len({tuple(s) for s, _ in draws(y, 5, 5, 1)}) == 8


@settings(deadline=None)
@given(n=st.integers(1, 50), batch=st.integers(1, 60), seed=st.integers(0, 99))
def test_batches_pass_over_every_sample_once_before_the_next_pass(n: int, batch: int, seed: int) -> None:
    stream = batches(n, batch, np.random.default_rng(seed))
    for _ in range(2):
        seen: list[int] = []
        while len(seen) < n:
            part = next(stream).tolist()
            assert 1 <= len(part) <= batch
            seen += part
        assert sorted(seen) == list(range(n))


def test_batches_and_episodes_of_nothing_are_refused() -> None:
    rng = np.random.default_rng(0)
    refused: list[Callable[[], object]] = [
        lambda: next(batches(0, 5, rng)),
        lambda: next(batches(5, 0, rng)),
        lambda: Episodes([0, 0], 0, 1, rng),
        lambda: Episodes([], 1, 1, rng),
        lambda: Splits(5, 1, 0, rng),
        lambda: Splits(1, 1, 1, rng),
    ]
    for call in refused:
        with pytest.raises(DataError):
            call()


# heartbeat ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def beats() -> Samples:
    return heartbeat.load_heartbeat()


def test_the_heartbeat_set_is_what_it_says(beats: Samples) -> None:
    assert heartbeat.FILE.stat().st_size <= 5_000_000
    assert beats.clients == tuple(sorted(heartbeat.DEVICES + heartbeat.NEW_DEVICES))
    assert beats.x.shape == (22878, 3, 128)
    assert beats.x.dtype == np.float32
    assert np.bincount(beats.y).tolist() == [18711, 822, 3345]
    assert beats.classes == ("N", "S", "V")
    assert beats.time is not None
    assert 0 <= beats.time.min() < beats.time.max() < 1810
    assert (beats.x[:, 1:] == beats.x[:, 1:, :1]).all()
    assert 0 < beats.x[:, 1:].min() < 1 < beats.x[:, 1:].max() <= heartbeat.MAX_RATIO
    assert np.abs(beats.x[:, 0]).max() < 8  # mV
    normal = beats.x[beats.y == 0, 0].mean(axis=0)
    assert normal.argmax() == 50  # the R peak


def test_premature_beats_come_early(beats: Samples) -> None:
    early = {k: float(np.median(beats.x[beats.y == k, 1, 0])) for k in (0, 1, 2)}
    assert early[1] < 0.8 < early[0]
    assert early[2] < 0.8


def test_new_patients_show_all_classes_in_their_first_five_minutes_and_later(beats: Samples) -> None:
    for name in heartbeat.NEW_DEVICES:
        support, rest = first_seconds(beats.of_client(name), 300)
        assert set(support.y) == set(rest.y) == {0, 1, 2}
        assert support.time is not None
        assert support.time.max() < 301


def test_every_device_has_two_classes_to_train_on_and_normal_beats_to_be_evaluated_by(beats: Samples) -> None:
    for name in heartbeat.DEVICES:
        train, evaluation = by_time(beats.of_client(name), 0.6)
        assert (np.bincount(train.y) >= 2).sum() >= 2
        assert (evaluation.y == 0).sum() >= 100


def test_the_median_interval_looks_no_further_than_five_minutes() -> None:
    minute = 60 * heartbeat.CLOCK_HZ
    rr = np.array([[0, 300], [300, 400], [400, 900], [900, 0]], np.int16)
    beats = np.zeros((4, 128), np.int16)
    beats[1] = 400
    read = heartbeat.expand(
        beats,
        np.array([0, 4, 2, 1], np.uint8),
        np.full(4, 7, np.int16),
        rr,
        np.array([10, minute, 4 * minute, 6 * minute], np.int32),
    )
    assert read.y.tolist() == [0, 2, 1]  # the Q beat is left out
    median = 350  # of 300 and 400; the absent 0 and what comes after five minutes do not count
    expected = [[1, 300 / median], [400 / median, 900 / median], [900 / median, 1]]
    np.testing.assert_allclose(read.x[:, 1:, 0], expected, rtol=1e-6)
    late = heartbeat.expand(beats, np.zeros(4, np.uint8), np.full(4, 7, np.int16), rr, np.arange(4, dtype=np.int32))
    assert late.x[1, 0].tolist() == [1.0] * 128  # 400 steps are one mV


def test_a_gap_in_the_annotation_is_cut_and_no_interval_at_all_is_refused() -> None:
    columns = (np.zeros((2, 128), np.int16), np.zeros(2, np.uint8), np.full(2, 7, np.int16))
    rr = np.array([[100, 32767], [100, 0]], np.int16)
    assert heartbeat.expand(*columns, rr, np.array([5, 6], np.int32)).x[0, 2, 0] == heartbeat.MAX_RATIO
    with pytest.raises(DataError, match="patient 7 has no interval"):
        heartbeat.expand(*columns, np.zeros((2, 2), np.int16), np.array([5, 6], np.int32))


@pytest.fixture(scope="module")
def build() -> ModuleType:
    """benchmarks/heartbeat/build.py, which is in no package."""
    spec = importlib.util.spec_from_file_location("heartbeat_build", BUILD)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_build_is_the_same_bytes_every_time_and_reads_back(
    build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng = np.random.default_rng(0)
    source: dict[str, NDArray[Any]] = {
        "x": rng.integers(-2048, 2048, (60, 128)).astype(np.int16),
        "y": np.zeros(60, np.uint8),
        "patient": np.repeat([106, 118, 101], 20).astype(np.int16),
        "rr": np.full((60, 2), 300, np.int16),
        "pos": np.tile(np.arange(20, dtype=np.int32) * 300, 3),
    }
    build.build(source, tmp_path / "one.npz")
    build.build(source, tmp_path / "two.npz")
    assert (tmp_path / "one.npz").read_bytes() == (tmp_path / "two.npz").read_bytes()
    monkeypatch.setattr(heartbeat, "FILE", tmp_path / "one.npz")
    read = heartbeat.load_heartbeat()
    assert read.clients == ("106", "118")  # 101 is none of the package's
    np.testing.assert_allclose(read.x[:, 0], source["x"][:40] / 400, rtol=1e-6)


def test_the_build_says_what_it_lacks(build: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("METAFLEET_SHARED", raising=False)
    with pytest.raises(ConfigError, match="METAFLEET_SHARED is not set"):
        build.read_source()
    monkeypatch.setenv("METAFLEET_SHARED", str(tmp_path))
    with pytest.raises(DataError, match="cannot be read"):
        build.read_source()
    (tmp_path / "data").mkdir()
    (tmp_path / "data/ecg-mitbih-ds1.npz").write_bytes(b"other")
    with pytest.raises(DataError, match="another file"):
        build.read_source()


@pytest.mark.parametrize("content", [None, b"", b"no zip"])
def test_a_broken_install_is_reported(content: bytes | None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if content is not None:
        (tmp_path / "heartbeat.npz").write_bytes(content)
    monkeypatch.setattr(heartbeat, "FILE", tmp_path / "heartbeat.npz")
    with pytest.raises(DataError, match="install the package again"):
        heartbeat.load_heartbeat()


@settings(deadline=None)
@given(st.integers(0, 2**32 - 1))
def test_packed_beats_unpack_to_the_same(seed: int) -> None:
    whole = np.random.default_rng(seed).integers(-2048, 2048, (5, 128)).astype(np.int16)
    np.testing.assert_array_equal(heartbeat.unpack_beats(heartbeat.pack_beats(whole)), whole)
