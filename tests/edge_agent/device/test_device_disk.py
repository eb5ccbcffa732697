"""A device's disk is full, read-only, damaged or written by a newer version: nothing good is lost, and a message says
so."""

from __future__ import annotations

import errno
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.records.fleet_folder import Fleet
from edge_agent.compute.worker import Job
from edge_agent.device.full_disk import RETRY_S, Disk
from edge_agent.device.state import DeviceState, Weights
from fleet_core.base import storage
from fleet_core.base.errors import StateError
from fleet_core.data.samples import save
from fleet_core.link.loopback import LoopbackBroker
from tests.support.inprocess import World, config_text, toy, world
from tests.support.world_checks import (
    TWO_ROUNDS,
    check_duals,
    check_two_rounds,
    checkpoint_bits,
    finished,
    settled,
)

pytestmark = pytest.mark.usefixtures("no_fsync")

DEVICE = "d1"
FULL_S = 2 * RETRY_S + 1  # so that the second attempt fails too
TICK_S = 0.1


@pytest.fixture
def copy(tmp_path: Path) -> Iterator[Callable[[], World]]:
    """Make worlds that start alike, bit for bit: a fleet that has not run yet, and two devices with samples."""
    founded = tmp_path / "founded"
    made: list[World] = []
    world(founded, config_text(**TWO_ROUNDS)).broker.stop()
    for n in range(2):
        home = founded / "devices" / f"d{n}"
        home.mkdir(parents=True)
        save(home / "samples.npz", toy(n))

    def make() -> World:
        folder = tmp_path / f"copy{len(made)}"
        shutil.copytree(founded, folder)
        made.append(World(folder, Fleet.load(folder / "fleet"), LoopbackBroker()))
        return made[-1]

    yield make
    for each in made:
        each.close()


def run(w: World) -> World:
    w.start_server()
    for n in range(2):
        w.start_agent(f"d{n}")
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    return w


class Full:
    """For eleven seconds, all writes of the device from its ``at``-th one on fail; ``writes`` counts them."""

    def __init__(self, w: World, at: int | None, patch: pytest.MonkeyPatch):
        self.w, self.at, self.writes, self.where, self.until = w, at, 0, "", 0.0
        write, move = storage.write_parts, storage.move

        def write_parts(path: Path, parts: Any, **options: Any) -> None:
            self.touch(path)
            write(path, parts, **options)

        def moved(path: Path, to: Path) -> None:
            self.touch(to)
            move(path, to)

        patch.setattr(storage, "write_parts", write_parts)
        patch.setattr(storage, "move", moved)

    def touch(self, path: Path) -> None:
        if self.w.acting != DEVICE:
            return
        self.writes += 1
        if self.writes == self.at:
            self.where, self.until = f"{path.name}, write {self.at}", self.w.clock.seconds + FULL_S
        if self.w.clock.seconds < self.until:
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise StateError(f"cannot be written: {error.strerror}", where=str(path)) from error


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_write_changes_nothing_once_there_is_space(copy, monkeypatch):
    whole = copy()
    with monkeypatch.context() as patch:
        none = Full(whole, None, patch)
        wanted = checkpoint_bits(run(whole))
    assert none.writes > 10
    for at in range(1, none.writes + 1):
        w = copy()
        with monkeypatch.context() as patch:
            full = Full(w, at, patch)
            run(w)
        check_two_rounds(w, wanted, full.where)
        assert w.logged("No space left on device"), full.where
        assert w.logged(f"{DEVICE}: the disk can be written again"), full.where


def test_a_device_without_space_stays_on_reports_it_and_does_not_train_for_nothing(copy, monkeypatch):
    w = copy()
    w.start_server()
    for n in range(2):
        w.start_agent(f"d{n}")
    trainings: list[str] = []
    inner = w.trainers[DEVICE].inner
    submit = inner.submit

    def counted(job: Job) -> None:
        trainings.append(job.kind)
        submit(job)

    monkeypatch.setattr(inner, "submit", counted)
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_parts", refused(w, storage.write_parts))
        assert w.pump(lambda: DEVICE in getattr(w.server.open, "failed", {}) or w.server.stalled != "", tick_s=TICK_S)
        for _ in range(600):
            w.step(TICK_S)
        assert trainings == []
        assert w.agents[DEVICE].link.connected
        assert w.logged("No space left on device")
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    check_duals(w, feedback=True)


def refused(w: World, write: Callable[..., None]) -> Callable[..., None]:
    """Writes as on a disk with room for only the small clock file."""

    def write_parts(path: Path, parts: Any, **options: Any) -> None:
        if w.acting == DEVICE and path.name != "clock.json":
            error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            raise StateError(f"cannot be written: {error.strerror}", where=str(path)) from error
        write(path, parts, **options)

    return write_parts


# Damaged and newer ----------------------------------------------------------------------------------------------------


def damage(path: Path, how: str) -> None:
    data = path.read_bytes()
    path.write_bytes({"empty": b"", "short": data[:-1], "zeros": bytes(len(data)), "text": b"not arrays" * 9}[how])


@pytest.mark.slow
@pytest.mark.parametrize("how", ["empty", "short", "zeros", "text"])
@pytest.mark.parametrize("name", ["model.safetensors", "serve.safetensors", "state.safetensors"])
def test_a_damaged_file_is_set_aside_and_the_run_continues(copy, name, how):
    w = copy()
    path = w.fleet.folder / "fleet.toml"
    text = re.sub("(?m)^serve_every = .*", "serve_every = 1", path.read_text())
    path.write_text(text.replace("rounds = 2", "rounds = 4"))  # what a leave changes begins with a round
    w.start_server()
    for n in range(2):
        w.start_agent(f"d{n}")
    home = w.folder / "devices" / DEVICE
    assert w.pump(lambda: w.agents[DEVICE].service.round == 1 and bool(list(home.rglob("state.safetensors"))))
    w.kill_agent(DEVICE)
    assert list(home.rglob(name))
    for path in (*home.rglob(name), *(home.rglob("pending.*") if name == "state.safetensors" else ())):
        damage(path, how)
    w.start_agent(DEVICE)
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    check_duals(w, feedback=True)
    assert w.logged(f"{DEVICE} lost its training state") == (name == "state.safetensors")
    assert bool(list(home.rglob("*.damaged"))) == (name != "serve.safetensors"), "which is only replaced"


def test_files_of_a_newer_version_are_refused_and_left_as_they_are(tmp_path):
    home = DeviceState(tmp_path)
    home.save_weights("model", Weights("0" * 32, 1, {"body": {"w": np.ones(3, np.float32)}}))
    home.check_formats()
    path = tmp_path / "methods" / "key" / "state.safetensors"
    storage.write_arrays(path, {"dual/body/w": np.ones(3)}, {"format": "2", "round": "4"})
    before = path.read_bytes()
    with pytest.raises(StateError, match="made by a newer metafleet: version 2, this one reads up to 1"):
        home.check_formats()
    assert path.read_bytes() == before


def test_a_disk_that_refused_is_tried_again_after_a_while_and_not_before(tmp_path, monkeypatch):
    now = [100.0]
    disk = Disk(tmp_path, lambda: now[0])
    assert not disk.note(StateError("is damaged"))
    assert not disk.is_back()
    full = StateError("cannot be written")
    full.__cause__ = OSError(errno.ENOSPC, "full")
    assert disk.note(full)
    assert not disk.is_back()
    now[0] += RETRY_S
    with monkeypatch.context() as patch:
        patch.setattr(storage, "write_parts", lambda *_, **__: (_ for _ in ()).throw(StateError("still full")))
        assert not disk.is_back()
    assert disk.refuses
    now[0] += RETRY_S
    assert [disk.is_back(), disk.is_back()] == [True, False]
    assert list(tmp_path.iterdir()) == []
