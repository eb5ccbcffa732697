"""Samples of a fleet that detects anomalies: without labels all are quiet; with labels, those that ``normal`` names."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from fleet_core.base.errors import DataError
from fleet_core.data.samples import load
from fleet_core.tasks.anomaly import LABELS
from tests.support import sounds

X = np.arange(12, dtype=np.float32).reshape(4, 3)


def npz(path: Path, **arrays: Any) -> Path:
    np.savez(path, **arrays)
    return path


def test_samples_without_labels_are_quiet(tmp_path: Path) -> None:
    found = load(npz(tmp_path / "s.npz", x=X), normal=())
    assert found.classes == LABELS
    assert found.y.tolist() == [0] * 4
    with pytest.raises(DataError, match="has no array 'y'"):
        load(tmp_path / "s.npz")


def test_labels_say_which_samples_are_quiet(tmp_path: Path) -> None:
    path = npz(tmp_path / "s.npz", x=X, y=np.array(["walk", "fall", "N", "quiet"]))
    assert load(path, normal=("N", "walk")).y.tolist() == [0, 1, 0, 0]
    assert load(path, normal=()).y.tolist() == [1, 1, 1, 0]
    numbers = npz(tmp_path / "n.npz", x=X, y=np.array([0, 2, 0, 1]))
    assert load(numbers, normal=("0",)).y.tolist() == [0, 1, 0, 1]


def test_whole_numbers_are_readings_and_bytes_stay_bytes(tmp_path: Path) -> None:
    assert load(npz(tmp_path / "s.npz", x=np.zeros((4, 3), np.int32)), normal=()).x.dtype == np.float32
    assert load(npz(tmp_path / "b.npz", x=np.zeros((4, 3), np.uint8)), normal=()).x.dtype == np.uint8


def test_tables_may_have_a_column_of_labels_or_none(tmp_path: Path) -> None:
    rows = [(0.1 * k, k, "N" if k < 8 else "V") for k in range(16)]
    (tmp_path / "plain.csv").write_text("time,a\n" + "".join(f"{t},{a}\n" for t, a, _ in rows))
    (tmp_path / "labelled.csv").write_text("time,a,label\n" + "".join(f"{t},{a},{c}\n" for t, a, c in rows))
    (tmp_path / "s.ndjson").write_text("".join(json.dumps({"time": t, "a": a}) + "\n" for t, a, _ in rows))
    for name in ("plain.csv", "s.ndjson"):
        found = load(tmp_path / name, window=4, normal=())
        assert found.x.shape == (4, 1, 4)
        assert found.y.tolist() == [0] * 4
    assert load(tmp_path / "labelled.csv", window=4, normal=("N",)).y.tolist() == [0, 0, 1, 1]


def test_a_folder_of_sound_needs_no_subfolders(tmp_path: Path) -> None:
    for number in range(2):
        sounds.write(tmp_path / f"{number}.wav", sounds.tone(300, 1, number))
    assert load(tmp_path, normal=(), sound_hz=8000).y.tolist() == [0, 0]


def test_what_cannot_be_read_is_refused_by_its_reader(tmp_path: Path) -> None:
    for name in ("s.npz", "s.csv", "s.ndjson"):
        (tmp_path / name).write_bytes(b"\xff\x00")
        with pytest.raises(DataError, match=name):
            load(tmp_path / name, normal=())
