"""Samples without a label on the disk: ids, limits, damage, and a kill while one is labelled."""

from __future__ import annotations

import subprocess
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from edge_agent.device import sample_buffer
from edge_agent.device.sample_buffer import BLOCK, SampleBuffer
from fleet_core.base import processes
from fleet_core.base.errors import DataError
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S

X = np.arange(8, dtype=np.float32)


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def buffer(folder: Path, blocks: int = 100, age_s: float = 60.0, clock: Clock | None = None) -> SampleBuffer:
    return SampleBuffer(folder / "unlabelled", blocks * BLOCK, age_s, clock or Clock())


def test_a_sample_keeps_its_id_its_time_and_its_bits(tmp_path: Path) -> None:
    held = buffer(tmp_path)
    first, second = held.add(X), held.add(X + 1, taken_at=5.5)
    again = buffer(tmp_path)
    assert again.ids() == [first, second]
    found = again.read(second)
    assert found is not None
    assert (found.id, found.time, found.x.dtype) == (second, 5.5, np.dtype("float32"))
    np.testing.assert_array_equal(found.x, X + 1)
    assert again.read("0" * 24) is None
    assert again.read("../../device") is None


def test_the_oldest_go_where_the_quota_the_number_or_the_age_is_passed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock()
    held = buffer(tmp_path, blocks=4, clock=clock)
    names = [held.add(X + k) for k in range(6)]
    kept = held.ids()
    assert 0 < len(kept) < 6
    assert kept == names[-len(kept) :]
    assert sum(path.stat().st_size for path in held.folder.glob("*.safetensors")) <= 4 * BLOCK
    clock.now += 59
    young = held.add(X)
    clock.now += 2
    assert held.ids() == [young], "after a minute the others are not there any more"
    last = held.add(X)
    assert [path.stem for path in sorted(held.folder.glob("*.safetensors"))] == [young, last]
    monkeypatch.setattr(sample_buffer, "MAX_SAMPLES", 2)
    third = held.add(X)
    assert held.ids() == [last, third]


def test_a_sample_that_cannot_fit_is_refused_and_nothing_goes(tmp_path: Path) -> None:
    held = buffer(tmp_path, blocks=2)
    name = held.add(X)
    with pytest.raises(DataError, match="does not fit"):
        held.add(np.zeros(4 * BLOCK, np.float32))
    assert held.ids() == [name]


def test_ids_grow_though_the_clock_goes_back(tmp_path: Path) -> None:
    clock = Clock()
    held = buffer(tmp_path, clock=clock)
    names = [held.add(X)]
    clock.now -= 30
    names.append(held.add(X))
    assert held.ids() == sorted(names) == names


@pytest.mark.parametrize("damage", [b"", b"\xff" * 40, None])
def test_a_damaged_file_is_removed_and_the_others_stay(tmp_path: Path, damage: bytes | None) -> None:
    held = buffer(tmp_path)
    bad, good = held.add(X), held.add(X)
    path = held.folder / f"{bad}.safetensors"
    path.write_bytes(path.read_bytes()[:-3] if damage is None else damage)
    assert held.read(bad) is None
    assert held.ids() == [good]


@pytest.mark.parametrize("stored", [True, False])
def test_a_kill_while_a_sample_is_labelled_neither_loses_nor_doubles_it(tmp_path: Path, stored: bool) -> None:
    held, added = buffer(tmp_path), [X] if stored else []
    name = held.add(X)
    code = ("import os, pathlib, sys; from edge_agent.device.sample_buffer import SampleBuffer\n"
            "with SampleBuffer(pathlib.Path(sys.argv[1]), 1 << 20, 1e9).labelling(sys.argv[2], 0): os._exit(9)")
    killed = subprocess.run(processes.python("-c", code, str(held.folder), name), cwd=ROOT, timeout=PATIENCE_S)
    assert killed.returncode == 9
    again = buffer(tmp_path)
    assert again.interrupted()
    assert again.ids() == []
    again.recover(lambda at, x: at < len(added) and np.array_equal(added[at], x))
    assert not again.interrupted()
    assert again.ids() == ([] if stored else [name])


def test_a_sample_that_is_damaged_while_it_is_labelled_is_removed(tmp_path: Path) -> None:
    held = buffer(tmp_path)
    name = held.add(X)
    (held.folder / f"{name}.safetensors").unlink()
    (held.folder / f"{name}.labelling-0").write_bytes(b"torn")
    held.recover(lambda at, x: False)
    assert not held.interrupted()
    assert held.ids() == []


def test_a_label_that_cannot_be_stored_leaves_the_sample(tmp_path: Path) -> None:
    held = buffer(tmp_path)
    name = held.add(X)
    with pytest.raises(DataError), held.labelling(name, 0):
        raise DataError("no")
    assert held.ids() == [name]
    with held.labelling(name, 0) as found:
        assert found is not None
    assert held.ids() == []
    with held.labelling(name, 0) as found:
        assert found is None


def test_several_threads_and_buffers_lose_nothing(tmp_path: Path) -> None:
    with ThreadPoolExecutor(4) as pool:
        names = list(pool.map(lambda k: buffer(tmp_path).add(X + k), range(40)))
    held = buffer(tmp_path)
    assert held.ids() == sorted(names)
    assert len(set(names)) == 40


def test_files_of_another_process_count_and_each_is_measured_once(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there, measured = buffer(tmp_path, blocks=8), buffer(tmp_path, blocks=8), list[str]()
    size = SampleBuffer._size

    def noted(self: SampleBuffer, name: str) -> int:
        measured.append(name)
        return size(self, name)

    monkeypatch.setattr(SampleBuffer, "_size", noted)
    names = [(here, there)[k % 2].add(X) for k in range(3)]
    measured.clear()
    for k in range(3):
        names.append(here.add(X + k))
    assert len(measured) == len(set(measured)) <= 4
    assert here.ids() == names[-len(here.ids()) :]
    assert sum(path.stat().st_size for path in here.folder.glob("*.safetensors")) <= 8 * BLOCK


def test_a_full_buffer_is_listed_again_only_after_a_change_by_another(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    held, there, listed = buffer(tmp_path, blocks=10), buffer(tmp_path, blocks=10), list[str]()
    names, real = [held.add(X) for _ in range(20)], SampleBuffer._files

    def noted(self: SampleBuffer) -> list[str]:
        listed.append("now")
        return real(self)

    with monkeypatch.context() as patch:
        patch.setattr(SampleBuffer, "_files", noted)
        names += [held.add(X) for _ in range(20)]
        assert listed == []
        names.append(there.add(X))
        listed.clear()
        names += [held.add(X) for _ in range(3)]
        assert listed == ["now"]
        (held.folder / sample_buffer.LAST).unlink()
        names.append(held.add(X))
        assert listed == ["now"] * 2
    assert held.ids() == names[-len(held.ids()) :]
    assert sum(path.stat().st_size for path in held.folder.glob("*.safetensors")) <= 10 * BLOCK
