"""Named arrays in files: streaming, mapping, checking for free space; and waits that differ by device."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from fleet_core.base import storage
from fleet_core.base.backoff import Backoff
from fleet_core.base.errors import StateError

ARRAYS = {
    "b": np.arange(6, dtype=np.float32).reshape(2, 3), "a": np.zeros(0, np.int8), "one": np.float64(3.0),
    "z": np.arange(5, dtype=np.uint8), "turned": np.arange(6).reshape(2, 3).T, "yes": np.array([True, False]),
}


@pytest.mark.parametrize("metadata", [None, {"round": "3", "ä": "ö"}])
def test_streamed_arrays_are_what_the_library_reads_and_writes(tmp_path: Path, metadata: dict[str, str] | None) -> None:
    storage.write_arrays(tmp_path / "x", ARRAYS, metadata)
    arrays, found = storage.unpack((tmp_path / "x").read_bytes())
    assert found == (metadata or {})
    assert {name: (array.dtype, array.tolist()) for name, array in arrays.items()} == {
        name: (np.asarray(array).dtype, np.asarray(array).tolist()) for name, array in ARRAYS.items()
    }
    plain = {name: ARRAYS[name] for name in ("one", "b", "z")}  # among types of one size the library has an order
    storage.write_arrays(tmp_path / "y", plain, {"round": "3"})
    assert (tmp_path / "y").read_bytes() == storage.pack(plain, {"round": "3"})


def test_a_head_says_where_each_array_lies_and_a_cut_file_has_none(tmp_path: Path) -> None:
    path = tmp_path / "x"
    storage.write_arrays(path, ARRAYS, {"round": "3"})
    places, metadata = storage.read_header(path)
    start, size = places["z"]
    assert (path.read_bytes()[start : start + size], metadata) == (bytes(range(5)), {"round": "3"})
    for wrong in (path.read_bytes()[:-1], b"", b"\xff" * 40, bytes(40)):
        path.write_bytes(wrong)
        with pytest.raises(StateError):
            storage.read_header(path)


def test_mapped_arrays_are_the_unpacked_ones_and_stay_when_the_file_is_replaced(tmp_path: Path) -> None:
    arrays = {"a/w": np.arange(6, dtype=np.float32).reshape(2, 3), "a/n": np.array(7), "b/e": np.zeros((0, 4), np.int8)}
    path = tmp_path / "weights.safetensors"
    storage.write_arrays(path, arrays, {"round": "3"})
    found, metadata = storage.map_file(path, limit=1 << 20)
    assert metadata == {"round": "3"} == storage.unpack(path.read_bytes())[1]
    storage.write_arrays(path, {"a/w": np.full((2, 3), 9, np.float32)})
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        np.testing.assert_array_equal(found[name], array, strict=True)
    with pytest.raises(ValueError, match="read-only"):
        found["a/w"][0] = 1


def _file(header: object, body: bytes = bytes(8)) -> bytes:
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + body


@pytest.mark.parametrize(
    "data",
    [
        b"", b"short", (1 << 60).to_bytes(8, "little") + b"{}", _file([1]), _file({}),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(12)),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]}}, bytes(4)),
        _file({"a": {"dtype": "F32", "shape": [3], "data_offsets": [0, 8]}}),
        _file({"a": {"dtype": "F32", "shape": [-1, -2], "data_offsets": [0, 8]}}),
        _file({"a": {"dtype": "F32", "shape": [2.0], "data_offsets": [0, 8]}}),
        _file({"a": {"dtype": "O", "shape": [1], "data_offsets": [0, 8]}}),
        _file({"a": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
               "b": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}),
        _file({"a": {"dtype": "F32", "shape": [2], "data_offsets": [0]}}),
        _file({"a": {"dtype": "F32", "shape": [1 << 70], "data_offsets": [0, 8]}}),
    ],
)  # fmt: skip
def test_a_file_that_is_no_safetensors_is_not_mapped(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "weights.safetensors"
    path.write_bytes(data)
    with pytest.raises(StateError, match="not safetensors"):
        storage.map_file(path, limit=1 << 20)


def test_a_file_that_is_absent_or_too_large_is_not_mapped(tmp_path: Path) -> None:
    path = tmp_path / "weights.safetensors"
    with pytest.raises(StateError, match="cannot be read"):
        storage.map_file(path, limit=1 << 20)
    storage.write_arrays(path, {"a": np.zeros(100)})
    with pytest.raises(StateError, match="over the limit"):
        storage.map_file(path, limit=100)


def test_room_is_tried_with_the_largest_file_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.safetensors").write_bytes(bytes(3 << 20))
    written: list[int] = []
    write = storage.write_parts

    def counted(path: Path, parts: list[bytes], **options: bool) -> None:
        found = list(parts)
        written.append(sum(map(len, found)))
        write(path, found)

    monkeypatch.setattr(storage, "write_parts", counted)
    storage.check_free_space(tmp_path, "*.safetensors")
    assert written == [5 << 20]
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_waits_double_up_to_a_limit_differ_by_device_and_reset_after_an_answer() -> None:
    now = [0.0]
    waits = {}
    for name in ("a", "b"):
        backoff = Backoff(name, lambda: now[0], 2.0, 60.0)
        first = backoff.wait_s
        found = []
        for _ in range(8):
            found.append(backoff.wait_s)
            over = []
            for later_s in (backoff.wait_s, 0.001):
                now[0] += later_s
                over.append(backoff.expired)
            assert over == [False, True]
            backoff.repeat()
        for k, wait_s in enumerate(found):
            least_s = min(2.0 * 2**k, 60.0)
            assert least_s <= wait_s < 2 * least_s
        backoff.reset()
        assert (backoff.wait_s, backoff.expired) == (first, False)
        waits[name] = found
    assert all(a != b for a, b in zip(waits["a"], waits["b"], strict=True))
