"""The device in Python: samples, answers, late labels."""

from __future__ import annotations

import re
import subprocess
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent import Device
from edge_agent.inference import drift
from edge_agent.inference.device_api import NEWEST
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import processes
from fleet_core.base.errors import ConfigError, DataError, StateError
from tests.support import homes
from tests.support.inprocess import toy
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S

X = np.arange(8, dtype=np.float32)


def made(folder: Path, method: str = "fedavg", **options: Any) -> Device:
    homes.service_with_model(homes.home(folder, **options), method)
    return Device(folder)


def test_a_late_label_makes_an_added_sample(tmp_path: Path) -> None:
    home = homes.home(tmp_path / "d")
    service = homes.service_with_model(home, "fedavg")
    device = Device(home)
    name = device.add(X, time=5.0)
    assert device.predict(X).label == service.answers(X[None]).labels[0]
    assert [(one.id, one.time) for one in Device(home).unlabelled()] == [(name, 5.0)]
    with pytest.raises(ConfigError, match="unknown class 'nothing'"):
        device.label(name, "nothing")
    device.label(name, "b")
    assert device.unlabelled() == []
    assert service.local().is_added(0, X)
    with pytest.raises(DataError, match="no unlabelled sample"):
        device.label(name, "b")


def test_a_sample_may_come_with_its_label(tmp_path: Path) -> None:
    device = made(tmp_path / "d")
    device.add(X, "b")
    assert device.unlabelled() == []
    assert homes.restored(tmp_path / "d").local().added() == 1
    with pytest.raises(ConfigError):
        device.add(X, "nothing")
    assert device.unlabelled() == [], "nothing is stored for an unknown label"


@pytest.mark.parametrize(("x", "said"), [
    (X[:7], r"a sample float32 \[7\]"), (X[None], r"a sample float32 \[1, 8\]"), (["a"] * 8, "a sample"),
    (np.full(8, np.nan, np.float32), "not finite"), ([[1, 2], [3]], "not an array"),
])  # fmt: skip
def test_what_is_no_sample_is_refused(tmp_path: Path, x: Any, said: str) -> None:
    device = made(tmp_path / "d")
    for call in (device.add, device.predict):
        with pytest.raises(DataError, match=said):
            call(x)
    assert device.unlabelled() == []


def test_the_least_certain_come_first(tmp_path: Path) -> None:
    device = made(tmp_path / "d")
    for x in toy(0, 20).x:
        device.add(x)
    found = device.unlabelled(limit=10)
    certain = [one.answer.certainty for one in found if one.answer is not None]
    assert len(certain) == 10 < NEWEST
    assert certain == sorted(certain)
    assert certain[-1] <= min(device.predict(one.x).certainty for one in device.unlabelled(20)[10:])


def test_looking_at_stored_samples_is_no_question(tmp_path: Path) -> None:
    device = made(tmp_path / "d", "pfldyn-proto", samples=toy(1, 90))
    for x in toy(2, 40).x:
        device.add(x)
    for _ in range(3):
        assert len(device.unlabelled(limit=40)) == 40
    assert drift.read(tmp_path / "d") is None
    device.predict(X)
    watched = drift.read(tmp_path / "d")
    assert watched is not None
    assert watched.sums.answered == 1


@pytest.mark.slow
def test_labels_make_a_device_without_samples_answer(tmp_path: Path) -> None:
    service = homes.service_with_model(homes.home(tmp_path / "d"), "pfldyn-proto", load=False)
    with pytest.raises(DataError, match="no samples yet"):
        service.load(METHODS["pfldyn-proto"], {}, homes.weights_of(homes.served_weights("pfldyn-proto")))
    device, samples = Device(tmp_path / "d"), toy(1, 30)
    with pytest.raises(StateError):
        device.predict(samples.x[0])
    for x in samples.x:
        device.add(x)
    unlabelled = device.unlabelled(limit=30)
    assert [one.answer for one in unlabelled] == [None] * 30
    names = {tuple(x): homes.CLASSES[y] for x, y in zip(samples.x.tolist(), samples.y, strict=True)}
    for one in unlabelled:
        device.label(one.id, names[tuple(one.x.tolist())])
    assert device.personalize() == "proto"
    test = toy(2, 60)
    right = [Device(tmp_path / "d").predict(x).label == homes.CLASSES[y] for x, y in zip(test.x, test.y, strict=True)]
    assert np.mean(right) > 0.8


def test_an_own_class_is_labelled_when_it_is_asked_for(tmp_path: Path) -> None:
    device = made(tmp_path / "d", "pfldyn-proto", samples=toy(1, 60))
    device.personalize()
    name = device.add(X)
    with pytest.raises(ConfigError):
        device.label(name, "goose")
    device.label(name, "goose", new_class=True)
    assert "goose" in device.classes


def test_a_device_without_a_model_says_so(tmp_path: Path) -> None:
    with pytest.raises(StateError):
        Device(homes.home(tmp_path / "d"))


@pytest.mark.slow
def test_the_pages_lines_run_as_they_are(tmp_path: Path) -> None:
    made(tmp_path / "pump-1", samples=toy(1, 60))
    page = (ROOT / "docs" / "python-device.md").read_text(encoding="utf-8")
    code = re.findall(r"```python\n(.*?)```", page, re.DOTALL)[0]
    ran = subprocess.run(processes.python("-c", code), cwd=tmp_path, capture_output=True, text=True,
                         timeout=PATIENCE_S, env={"PYTHONPATH": str(ROOT)})
    assert ran.returncode == 0, ran.stderr
    assert re.match(r"[abc] 0\.\d+", ran.stdout), ran.stdout
