"""Samples that a device was given later: how many, with which classes, and what is read to know it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_agent.device.local_samples import LocalData
from fleet_core.base.errors import DataError
from fleet_core.data import samples
from fleet_core.data.samples import Samples


@pytest.fixture
def data(tmp_path: Path) -> LocalData:
    return LocalData(tmp_path / "samples.npz", ("off", "on"), "float32")


def test_added_samples_follow_one_another_with_the_classes_of_this_device_after_the_fleets(data: LocalData) -> None:
    x = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert (data.added(), data.names()) == (0, ("off", "on"))
    assert data.add(x[:1], ["on"]) == 1
    assert data.add(x[1:3], ["goose", "off"]) == 3
    assert data.add(x[3:], ["goose"]) == 4
    assert (data.added(), data.names()) == (4, ("off", "on", "goose"))
    every = data.every()
    np.testing.assert_array_equal(every.x, x)
    assert (every.y.tolist(), every.classes) == ([1, 2, 0, 2], ("off", "on", "goose"))
    with pytest.raises(DataError, match="a new sample is"):
        data.add(np.zeros((1, 4), np.float32), ["on"])
    assert data.added() == 4


def test_the_number_and_the_classes_are_known_without_reading_the_samples(
    data: LocalData, monkeypatch: pytest.MonkeyPatch
) -> None:
    data.add(np.zeros((5, 3), np.float32), ["goose"] * 5)
    monkeypatch.setattr(samples, "load", lambda *given, **named: pytest.fail("the samples were read"))
    assert (data.added(), data.names()) == (5, ("off", "on", "goose"))


def test_a_file_that_is_no_archive_or_has_no_labels_is_refused(data: LocalData) -> None:
    data.added_path.write_bytes(b"no archive")
    with pytest.raises(DataError, match="cannot be read"):
        data.added()
    np.savez(data.added_path, x=np.zeros((2, 3)))
    with pytest.raises(DataError, match="has no array 'y'"):
        data.names()
    np.savez(data.added_path, x=np.zeros((1, 3)), y=np.array(["a"], dtype=object))
    with pytest.raises(DataError, match="Python objects"):
        data.added()


def test_samples_with_targets_are_counted_too(tmp_path: Path) -> None:
    samples.save(tmp_path / "two.npz", Samples(np.zeros((2, 3), np.float32), np.zeros((2, 1)), outputs=("watts",)))
    assert samples.count_and_classes(tmp_path / "two.npz") == (2, None)
