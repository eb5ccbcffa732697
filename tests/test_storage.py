"""Files of named arrays as they are streamed, looked into and tried for room; and waits that differ by device."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from fleet_core import storage
from fleet_core.errors import StateError
from fleet_core.patience import Patience

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
    places, metadata = storage.head(path)
    start, size = places["z"]
    assert (path.read_bytes()[start : start + size], metadata) == (bytes(range(5)), {"round": "3"})
    for wrong in (path.read_bytes()[:-1], b"", b"\xff" * 40, bytes(40)):
        path.write_bytes(wrong)
        with pytest.raises(StateError):
            storage.head(path)


def test_room_is_tried_with_the_largest_file_and_nothing_stays(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "state.safetensors").write_bytes(bytes(3 << 20))
    written: list[int] = []
    write = storage.write_parts

    def counted(path: Path, parts: list[bytes], **options: bool) -> None:
        found = list(parts)
        written.append(sum(map(len, found)))
        write(path, found)

    monkeypatch.setattr(storage, "write_parts", counted)
    storage.try_room(tmp_path, "*.safetensors")
    assert written == [5 << 20]
    assert [path.name for path in tmp_path.iterdir()] == ["state.safetensors"]


def test_waits_double_up_to_their_limit_differ_by_device_and_begin_again_after_an_answer() -> None:
    now = [0.0]
    waits = {}
    for name in ("a", "b"):
        patience = Patience(name, lambda: now[0], 2.0, 60.0)
        first = patience.wait_s
        found = []
        for _ in range(8):
            found.append(patience.wait_s)
            over = []
            for later_s in (patience.wait_s, 0.001):
                now[0] += later_s
                over.append(patience.over)
            assert over == [False, True]
            patience.again()
        for k, wait_s in enumerate(found):
            least_s = min(2.0 * 2**k, 60.0)
            assert least_s <= wait_s < 2 * least_s
        patience.answered()
        assert (patience.wait_s, patience.over) == (first, False)
        waits[name] = found
    assert all(a != b for a, b in zip(waits["a"], waits["b"], strict=True))
