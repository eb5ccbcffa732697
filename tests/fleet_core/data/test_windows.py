"""Windows in text: .csv with columns of windows, .csv and .ndjson of readings, .ndjson of whole samples."""

from __future__ import annotations

import csv
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from edge_agent.device.local_samples import LocalData
from fleet_core.base.errors import DataError
from fleet_core.data import unlabelled as asked
from fleet_core.data.samples import Samples, load, save
from fleet_core.model.layout import InputSpec

SERIES = InputSpec((2, 3))


@pytest.fixture
def write(tmp_path: Path) -> Any:
    def written(text: str, name: str = "data.csv") -> Path:
        path = tmp_path / name
        path.write_text(text, encoding="utf-8")
        return path

    return written


def lines(*rows: str) -> str:
    return "\n".join(rows) + "\n"


# Wide .csv ------------------------------------------------------------------------------------------------------------

WIDE = lines("ay_0,label,ay_1,ax_1,ax_0,ay_2,ax_2", "1,on,2,5,4,3,6", "7,off,8,11,10,9,12")


def test_numbered_columns_are_windows_with_the_channels_as_they_first_appear(write: Any) -> None:
    found = load(write(WIDE))
    assert found.x.tolist() == [[[1, 2, 3], [4, 5, 6]], [[7, 8, 9], [10, 11, 12]]]
    assert (found.x.dtype.name, found.classes) == ("float32", ("off", "on"))
    assert "a window of 2 channels (ay, ax) and 3 steps" in found.notes[0]
    np.testing.assert_array_equal(asked.load(write(WIDE), SERIES), found.x)


@pytest.mark.parametrize(
    ("header", "message"),
    [
        ("ax_0,ax_1,ay_0,label", "channel ay has no column 'ay_1'; expected ay_0 to ay_1"),
        ("ax_1,ax_2,ay_1,ay_2,label", r"channel ax has no column 'ax_0'.*\n.*steps count from 0"),
        ("ax_0,ax_2,ay_0,ay_1,ay_2,label", "channel ax has no column 'ax_1'"),
        ("ax_0,ax_1,ay_0,ay_1,t,label", r"mixes the columns of windows \(ax_0 … ax_1\) with plain ones: t"),
        ("ax_0,ax_1,ay_0,ay_1,ay_01,label", "plain ones: ay_01"),
    ],
)
def test_columns_that_are_no_windows_are_reported_with_the_channel_and_the_column(
    write: Any, header: str, message: str
) -> None:
    with pytest.raises(DataError, match=message) as told:
        load(write(lines(header, ",".join("1" * len(header.split(","))))))
    assert "data.csv: line 1" in str(told.value)


def test_one_name_with_numbers_is_features_unless_a_window_of_so_many_or_the_fleet_says_otherwise(write: Any) -> None:
    assert load(write(lines("f_0,f_1,f_2,pm_10,label", "1,2,3,4,on"))).x.shape == (1, 4)
    path = write(lines("f_0,f_1,f_2,label", "1,2,3,on", "4,5,6,off"))
    rows = load(path)
    assert rows.x.shape == (2, 3)
    assert "f_0 … f_2 are read as 3 features" in rows.notes[0]
    assert load(path, window=3).x.shape == load(path, shape=(1, 3)).x.shape == (2, 1, 3)
    assert load(path, shape=(3,)).notes == ()


def test_a_fleet_of_features_reads_columns_as_features_whatever_their_names(write: Any) -> None:
    assert load(write(WIDE), shape=(6,), dtype="float32").x.tolist()[0] == [1, 2, 5, 4, 3, 6]


def test_channels_that_are_numbered_are_readings_where_the_fleet_has_as_many_channels(write: Any) -> None:
    path = write(lines("acc_0,acc_1,label", *[f"{n},{-n},on" for n in range(6)]))
    assert load(path, shape=(2, 3)).x.tolist()[1] == [[3, 4, 5], [-3, -4, -5]]


def test_rows_with_a_time_that_are_read_as_features_are_reported(write: Any) -> None:
    path = write(lines("time,ax,ay,label", "0,1,2,on"))
    assert "a row is read as a sample of 2 features" in load(path).notes[0]
    assert load(path, shape=(2,)).notes == load(write(lines("ax,ay,label", "1,2,on"))).notes == ()


# Long form ------------------------------------------------------------------------------------------------------------


def readings(client: str, label: str, times: Any, start: float = 0) -> list[str]:
    return [f"{client},{time},{label},{start + n},{-start - n}" for n, time in enumerate(times)]


HEADER = "client,time,label,ax,ay"


def test_windows_cross_no_client_label_or_gap_and_what_is_left_over_is_counted(write: Any) -> None:
    path = write(lines(
        HEADER,
        *readings("a", "on", np.arange(7) * 0.5),  # two windows, one reading left
        *readings("a", "off", 3.5 + np.arange(2) * 0.5, 100),  # too short
        *readings("b", "off", np.arange(3) * 0.5, 200),
        *readings("b", "off", 10 + np.arange(4) * 0.5, 300),  # after a gap
    ))  # fmt: skip
    found = load(path, window=3)
    assert found.x.tolist() == [
        [[n + k for k in range(3)], [-n - k for k in range(3)]] for n in (0, 3, 200, 300)
    ]  # fmt: skip
    assert (found.clients, found.classes) == (("a", "b"), ("off", "on"))
    assert found.client is not None
    assert found.client.tolist() == ["a", "a", "b", "b"]
    assert found.y.tolist() == [1, 1, 0, 0]
    assert found.time is not None
    assert found.time.tolist() == [1.0, 2.5, 1.0, 11.0]
    (note,) = found.notes
    assert "16 readings give 4 windows of 3, one every 3" in note
    assert "4 readings are left over at the ends of 4 stretches, 1 of them too short for a window" in note
    assert "1 gaps in time" in note


def test_windows_overlap_by_the_stride(write: Any) -> None:
    path = write(lines("label,ax", *[f"on,{n}" for n in range(6)]))
    assert load(path, window=3, stride=1).x[:, 0, 0].tolist() == [0, 1, 2, 3]
    assert load(path, shape=(1, 3), stride=2).x[:, 0].tolist() == [[0, 1, 2], [2, 3, 4]]
    with pytest.raises(DataError, match="a stride without a window"):
        load(path, stride=2)


def test_clients_that_take_turns_and_a_coarse_clock_break_no_window(write: Any) -> None:
    rows = [f"{client},{n // 2},on,{n},{n}" for n in range(6) for client in "ab"]
    found = load(write(lines(HEADER, *rows)), window=6)
    assert found.x[:, 0].tolist() == [[0, 1, 2, 3, 4, 5]] * 2


def test_one_lost_reading_is_a_gap_an_uneven_step_is_none_and_time_that_goes_back_is_one(write: Any) -> None:
    def made(times: list[float]) -> int:
        return len(load(write(lines(HEADER, *readings("a", "on", times))), window=3))

    assert made([0, 1, 2, 3.4, 4, 5]) == 2
    assert made([0, 1, 3, 4, 5, 6]) == 1
    assert made([0, 1, 2, 3, 0, 1]) == 1


def test_readings_without_a_label_are_in_no_window(write: Any) -> None:
    found = load(write(lines("label,ax", "on,0", ",1", ",2", ",3", "on,4", "on,5")), window=2)
    assert found.x.tolist() == [[[4, 5]]]
    assert "3 readings without a label are skipped" in found.notes[0]


def test_a_recording_without_a_whole_window_says_how_long_its_stretches_are(write: Any) -> None:
    path = write(lines("label,ax", "on,0", "on,1", "off,2"))
    with pytest.raises(DataError, match="gives no window of 3 readings: the longest stretch has 2"):
        load(path, window=3)
    with pytest.raises(DataError, match="x, line 2: column ax: holds inf"):
        load(write(lines("label,ax", "on,1e99", "on,1")), window=2)


def test_windows_over_the_limit_are_refused_before_they_are_made(write: Any) -> None:
    path = write(lines("label,ax", *["on,1"] * 1000))
    with pytest.raises(DataError, match="windows: 1002000 bytes are over the limit of 100000"):
        load(path, window=500, stride=1, limit_bytes=100_000)


def test_what_is_asked_about_is_cut_without_labels_and_says_what_is_left_over(write: Any) -> None:
    log_lines: list[str] = []
    path = write(lines("time,ax,ay", *[f"{n},{n},{-n}" for n in range(7)]))
    x = asked.load(path, SERIES, say=log_lines.append)
    assert x.tolist() == [[[0, 1, 2], [0, -1, -2]], [[3, 4, 5], [-3, -4, -5]]]
    assert "1 readings are left over" in log_lines[0]
    assert len(asked.load(path, SERIES, stride=1)) == 5
    mixed = write(lines("label,ax,ay", "on,0,0", "off,1,1", "?,2,2"))
    assert len(asked.load(mixed, SERIES)) == 1, "labels are ignored"


def test_a_device_cuts_its_recording_by_the_fleets_shape_and_its_own_stride(write: Any) -> None:
    path = write(lines(HEADER, *readings("a", "on", range(12)), *readings("a", "off", range(12, 18))))
    data = LocalData(path, ("off", "on"), "float32", shape=(2, 3), stride=1)
    assert len(data.every()) + len(data.held_back() or ()) == 10 + 4
    assert "18 readings give 14 windows of 3, one every 1" in data.own().notes[0]


def test_a_window_is_only_for_readings(write: Any, tmp_path: Path) -> None:
    save(tmp_path / "a.npz", Samples(np.zeros((4, 2, 3), np.float32), np.zeros(4, np.int64)))
    with pytest.raises(DataError, match="is not a table of readings"):
        load(tmp_path / "a.npz", window=3)
    with pytest.raises(DataError, match="has whole samples"):
        load(write('{"x": [[1, 2]], "label": "a"}\n', "a.ndjson"), window=2)


# .ndjson --------------------------------------------------------------------------------------------------------------


def test_a_line_of_json_is_a_sample_or_a_reading(write: Any) -> None:
    whole = lines(*(json.dumps({"x": [[n, 1.5], [2, 3]], "label": "on", "client": 7, "time": n}) for n in range(2)), "")
    found = load(write(whole, "whole.jsonl"))
    assert (found.x.shape, found.clients, found.classes) == ((2, 2, 2), ("7",), ("on",))
    rows = lines(*(json.dumps({"time": n, "x": n, "y": -n, "label": "on"}) for n in range(5)))
    found = load(write(rows, "rows.ndjson"), window=2)
    assert found.x.tolist() == [[[0, 1], [0, -1]], [[2, 3], [-2, -3]]]
    assert load(write(rows, "rows.ndjson")).x.shape == (5, 2), "features, where nobody speaks of windows"
    unlabelled = lines('{"x": [[0, 1, 2], [3, 4, 5]]}', '{"x": [[0, 1, 2], [3, 4, 5]], "label": "on"}')
    assert asked.load(write(unlabelled, "asked.ndjson"), SERIES).shape == (2, 2, 3)


def test_whole_numbers_of_a_sample_may_be_tokens(write: Any) -> None:
    text = lines('{"x": [0, 1, 1], "label": 0}', '{"x": [1, 1, 0], "label": 1}')
    assert load(write(text, "a.ndjson"), dtype="int64").x.dtype == np.int64
    assert load(write(text, "a.ndjson"), dtype="float32").x.dtype == np.float32


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("[1]", "is not a JSON object"),
        ("{", "is not JSON"),
        ("[" * 100_000, "is not JSON"),
        ('{"ax": NaN, "label": "on"}', "NaN is not a JSON number"),
        ('{"ax": 1e999, "label": "on"}', "column ax: holds inf"),
        ('{"ax": "1", "label": "on"}', "'ax' is \"1\"; expected a number"),
        ('{"ax": true, "label": "on"}', "'ax' is true; expected a number"),
        ('{"ax": 1' + "0" * 400 + ', "label": "on"}', "too large"),
        ('{"ax": 1}', "has no 'label'"),
        ('{"ax": 1, "label": "on", "axe": 2}', r"has 'axe' \(did you mean 'ax'\?\)"),
        ('{"ax": 1, "label": null}', "'label' is null; expected text"),
        ('{"ax": 1, "label": "' + "o" * 300 + '"}', "a label of 300 characters"),
        ('{"ax": 1, "label": "\udcff"}', "is not JSON"),
    ],
)
def test_an_error_in_a_json_row_names_its_line(tmp_path: Path, bad: str, message: str) -> None:
    path = tmp_path / "bad.ndjson"
    path.write_bytes(('{"ax": 1, "label": "on"}\n\n' + bad + "\n").encode(errors="surrogateescape"))
    with pytest.raises(DataError, match=message) as told:
        load(path)
    assert "bad.ndjson: line 3" in str(told.value)


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        ("[[1, 2], [3]]", "x is ragged|x is empty, ragged"),
        ("[[1, 2, 3]]", r"x has shape \[1, 3\]; expected \[2, 2\], as in the first sample"),
        ('[["1", 2], [3, 4]]', "has values that are not numbers"),
        ("[[1, null], [3, 4]]", "has values that are not numbers"),
        ("[]", "x is empty"),
        ("[[1, 1" + "0" * 400 + "], [1, 2]]", "not numbers"),
        ("[[1.5, 1e999], [1, 2]]", "too large"),
        ("3", "x is 3; expected lists of numbers"),
    ],
)
def test_an_error_in_a_json_sample_names_its_line(write: Any, bad: str, message: str) -> None:
    path = write(lines('{"x": [[1, 2], [3, 4]], "label": "on"}', '{"x": ' + bad + ', "label": "on"}'), "bad.ndjson")
    with pytest.raises(DataError, match=message) as told:
        load(path)
    assert "bad.ndjson: line 2" in str(told.value)


def test_an_empty_file_and_one_over_the_limit_are_refused(write: Any) -> None:
    with pytest.raises(DataError, match="holds no samples"):
        load(write("\n", "a.ndjson"))
    with pytest.raises(DataError, match="over the limit of 10"):
        load(write('{"ax": 1, "label": "on"}\n', "a.ndjson"), limit_bytes=10)


# All forms alike ------------------------------------------------------------------------------------------------------

NUMBERS = st.floats(-1e6, 1e6, width=32)


@st.composite
def stretches(draw: st.DrawFn) -> Samples:
    """Windows that are each a stretch of their own, because their time starts again."""
    windows, channels, steps = draw(st.integers(1, 4)), draw(st.integers(2, 3)), draw(st.integers(2, 4))
    size = windows * channels * steps
    x = np.array(draw(st.lists(NUMBERS, min_size=size, max_size=size)), np.float32)
    names = draw(st.lists(st.sampled_from(["on", "off", "a,b", 'q"'])  , min_size=windows, max_size=windows))
    classes, y = np.unique(names, return_inverse=True)
    client = np.array([f"d{k // 2}" for k in range(windows)])
    time = np.arange(windows, dtype=np.float64) + steps - 1
    return Samples(x.reshape(windows, channels, steps), y.astype(np.int64), client, time, tuple(map(str, classes)))


def written(path: Path, samples: Samples, form: str) -> Path:
    assert samples.client is not None
    assert samples.time is not None
    assert samples.classes is not None
    _, channels, steps = samples.x.shape
    names = [samples.classes[k] for k in samples.y]
    about = list(zip(names, samples.client.tolist(), samples.time.tolist(), strict=True))
    rows: list[dict[str, Any]] = []
    for (label, client, time), x in zip(about, samples.x.tolist(), strict=True):
        own = {"label": label, "client": client}
        if form == "whole":
            rows.append({**own, "time": time, "x": x})
        elif form == "wide":
            rows.append({**own, "time": time, **{f"c{c}_{t}": x[c][t] for c in range(channels) for t in range(steps)}})
        else:
            rows += [{**own, "time": time - steps + 1 + t, **{f"c{c}": x[c][t] for c in range(channels)}}
                     for t in range(steps)]
    with open(path, "w", encoding="utf-8", newline="") as file:
        if path.suffix == ".csv":
            table = csv.DictWriter(file, list(rows[0]))
            table.writeheader()
            table.writerows(rows)
        else:
            file.writelines(json.dumps(row) + "\n" for row in rows)
    return path


@settings(max_examples=25, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(samples=stretches())
@pytest.mark.parametrize(("name", "form"), [
    ("a.csv", "wide"), ("a.csv", "long"), ("a.ndjson", "whole"), ("a.jsonl", "long"),
])
def test_every_form_reads_as_the_npz_of_the_same_windows(
    tmp_path: Path, name: str, form: str, samples: Samples
) -> None:
    save(tmp_path / "a.npz", samples)
    _, channels, steps = samples.x.shape
    shape = (channels, steps)
    expected = load(tmp_path / "a.npz", shape=shape)
    found = load(written(tmp_path / name, samples, form), shape=shape, dtype="float32")
    for key in ("x", "y", "client", "time"):
        np.testing.assert_array_equal(getattr(found, key), getattr(expected, key))
    assert found.classes == expected.classes


PIECES = st.sampled_from([
    "label", "client", "time", "ax", "ax_0", "ax_1", "ay_0", "x", ",", ",", ",", "\n", "\n", "1", "2.5", "-3", "nan",
    "1e999", '"', "on", "{", "}", "[", "]", ":", '"x":', '"label":', '"on"', "[[1,2],[3,4]]", "\x00", "é", "null",
    '{"x":[1,2],"label":"on"}\n', '{"ax":1,"label":"on"}\n', "label,ax,ay\non,1,2\n", "label,a_0,a_1\non,1,2\n",
])  # fmt: skip


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])
@given(
    text=st.lists(PIECES, max_size=30).map("".join) | st.text(max_size=60),
    form=st.sampled_from([{}, {"window": 2}, {"shape": (2, 2)}, {"shape": (1, 2)}, {"shape": (2,)}]),
    name=st.sampled_from(["a.csv", "a.ndjson"]),
)
def test_any_text_is_samples_or_a_data_error(tmp_path: Path, text: str, form: dict[str, Any], name: str) -> None:
    path = tmp_path / name
    path.write_bytes(text.encode(errors="replace"))
    try:
        found = load(path, **form)
    except DataError:
        return
    assert len(found) == len(found.y) > 0
    assert np.isfinite(found.x).all()
    assert found.x.shape[1:] == form.get("shape", found.x.shape[1:])
