"""A fleet is backed up while it runs, and restored: what devices learned since is in their duals, not in the
server's."""

from __future__ import annotations

import errno
import os
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloud_server.ledger.ledger import Ledger
from cloud_server.records import checkpoint
from cloud_server.running.backup import backup
from edge_agent.device.state import DeviceState
from fleet_core.base.errors import StateError
from fleet_core.protocol.round_messages import UploadManifest
from tests.support.inprocess import World, config_text, toy, world
from tests.support.world_checks import check_duals, opened, settled

pytestmark = pytest.mark.usefixtures("no_fsync")

TICK_S = 0.25


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(*, rounds: int, devices: int) -> World:
        text = config_text(rounds=rounds, devices=1, fleet="deadline_s = 5\nquorum = 0.1")
        made.append(world(tmp_path / "world", text))
        made[-1].start_server()
        for n in range(devices):
            made[-1].start_agent(f"d{n}", toy(n))
        return made[-1]

    yield make
    for each in made:
        each.close()


def back_up(w: World) -> None:
    """While the aggregator runs."""
    backup(w.fleet, w.folder / "backup")


def put_back(w: World) -> None:
    w.kill_server()
    shutil.rmtree(w.fleet.folder)
    shutil.copytree(w.folder / "backup", w.fleet.folder)
    w.start_server()


def done(w: World) -> bool:
    return w.server.finished and settled(w)


def duals(w: World, name: str) -> list[str]:
    """The dual epochs for which a device has training state on disk."""
    states = (w.folder / "devices" / name).glob("methods/*/state.safetensors")
    return sorted(path.parent.name.rpartition("-e")[2] for path in states)


def test_a_backup_that_is_one_round_old_is_noticed(fleet):
    w = fleet(rounds=2, devices=2)
    assert w.pump(lambda: opened(w, 2))
    back_up(w)
    assert w.pump(lambda: done(w), tick_s=TICK_S)
    put_back(w)
    assert w.closed() == 1
    assert w.pump(lambda: done(w) and w.closed() == 2, tick_s=TICK_S)
    assert w.logged("d0 has an update of round 2 that this ledger did not count")
    fresh = w.folder / "fleet" / "fleet.toml"
    fresh.write_text(fresh.read_text().replace("rounds = 2", "rounds = 4"))
    w.kill_server()
    w.start_server()
    assert w.pump(lambda: done(w) and w.closed() == 4, tick_s=TICK_S)
    check_duals(w, feedback=True)


@pytest.mark.slow
def test_duals_that_started_again_after_the_backup_do_not_come_back(fleet):
    """The number of the restored fleet's next epoch is one that devices already hold."""
    w = fleet(rounds=9, devices=3)
    assert w.pump(lambda: opened(w, 2))
    back_up(w)
    w.server.ledger.request("revoke/d2", "yes")
    assert w.pump(lambda: opened(w, 6) and settled(w), tick_s=TICK_S)
    assert duals(w, "d0") == ["1"]
    put_back(w)
    assert w.pump(lambda: done(w), tick_s=TICK_S)
    assert w.server.checkpoint.state.dual_epoch == 2
    check_duals(w, feedback=True)


@pytest.mark.slow
def test_a_device_that_comes_long_after_the_backup_was_put_back_is_noticed(fleet):
    """By then the rounds have passed the one that the device knows."""
    w = fleet(rounds=9, devices=3)
    assert w.pump(lambda: opened(w, 2) and settled(w))
    back_up(w)
    w.kill_agent("d1")
    w.kill_agent("d2")
    assert w.pump(lambda: opened(w, 4) and settled(w), tick_s=TICK_S)
    w.kill_agent("d0")
    put_back(w)
    w.start_agent("d1")
    w.start_agent("d2")
    assert w.pump(lambda: opened(w, 7), tick_s=TICK_S)
    assert w.server.checkpoint.state.dual_epoch == 0
    w.start_agent("d0")
    assert w.pump(lambda: done(w), tick_s=TICK_S)
    assert w.server.checkpoint.state.dual_epoch == 1
    check_duals(w, feedback=True)


@pytest.mark.slow
def test_a_backup_is_noticed_once_whatever_restarts(fleet):
    w = fleet(rounds=12, devices=2)
    assert w.pump(lambda: opened(w, 2))
    back_up(w)
    assert w.pump(lambda: opened(w, 8) and settled(w), tick_s=TICK_S)
    put_back(w)
    assert w.pump(lambda: opened(w, 4) and settled(w), tick_s=TICK_S)
    first = w.server.checkpoint.state.dual_epoch
    for number in (5, 6):
        w.kill_server()
        w.kill_agent("d0")
        w.start_server()
        w.start_agent("d0")
        assert w.pump(lambda number=number: opened(w, number) and settled(w), tick_s=TICK_S)
    assert w.pump(lambda: done(w), tick_s=TICK_S)
    assert w.server.checkpoint.state.dual_epoch == first
    check_duals(w, feedback=True)


@pytest.mark.slow
def test_a_fleet_of_the_same_name_founded_anew_starts_with_duals_of_its_own(fleet):
    w = fleet(rounds=6, devices=2)
    back_up(w)  # before its first round: all but the key is as in a new one
    assert w.pump(lambda: opened(w, 4) and settled(w), tick_s=TICK_S)
    put_back(w)
    assert w.pump(lambda: done(w), tick_s=TICK_S)
    check_duals(w, feedback=True)


@pytest.mark.slow
def test_a_device_keeps_the_state_of_one_epoch(fleet):
    """Every device that leaves starts an epoch: keeping them all would fill the disk one day."""
    w = fleet(rounds=12, devices=4)
    for gone, number in (("d3", 3), ("d2", 6), ("d1", 9)):
        assert w.pump(lambda number=number: opened(w, number) and settled(w), tick_s=TICK_S)
        w.server.ledger.request(f"revoke/{gone}", "yes")
    assert w.pump(lambda: done(w), tick_s=TICK_S)
    assert w.server.checkpoint.state.dual_epoch == 3
    assert duals(w, "d0") == ["3"]
    check_duals(w, feedback=True)


# The copy itself ----------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_a_backup_of_any_moment_can_be_put_back(fleet):
    w = fleet(rounds=6, devices=2)
    for n in range(200):
        if n % 3 == 0:
            closed = backup(w.fleet, w.folder / f"copy{n}")
            assert closed == w.closed()
        w.step(TICK_S)
    assert done(w)
    copies = {Ledger(path / "ledger.sqlite", create=False).totals().rounds: path for path in w.folder.glob("copy*")}
    assert copies.keys() >= {0, 1, 2, 3, 4, 5, 6}
    for rounds, path in copies.items():
        path.rename(w.folder / "backup")
        put_back(w)
        assert w.closed() == rounds
        assert w.pump(lambda: done(w), tick_s=TICK_S)
        (w.folder / "backup").rename(path)
    check_duals(w, feedback=True)


@pytest.mark.slow
def test_a_backup_waits_for_a_moment_when_ledger_and_checkpoint_belong_together(fleet, monkeypatch):
    """Rounds are closed, or a leave is made up for, between the copies of the two files."""
    w = fleet(rounds=40, devices=3)
    assert w.pump(lambda: opened(w, 2), tick_s=TICK_S)
    meanwhile: list[Callable[[], None]] = []
    copies = Ledger.copy

    def copy(ledger: Ledger, to: Path) -> None:
        copies(ledger, to)
        if meanwhile:
            meanwhile.pop()()

    def four_rounds() -> None:
        number = w.closed() + 4
        assert w.pump(lambda: w.closed() == number, tick_s=TICK_S)

    def a_leave() -> None:
        w.server.ledger.request("revoke/d2", "yes")
        w.server.paused = False
        assert w.pump(lambda: w.server.checkpoint.state.dual_epoch == 1, steps=20, tick_s=TICK_S)

    monkeypatch.setattr(Ledger, "copy", copy)
    for number, act in enumerate((four_rounds, a_leave)):
        w.server.paused = act is a_leave
        assert w.pump(lambda: not w.server.paused or w.server.open is None, tick_s=TICK_S)
        meanwhile.append(act)
        to = w.folder / f"copy{number}"
        closed = backup(w.fleet, to)
        assert closed == w.closed()
        state = checkpoint.facts(to / "state" / checkpoint.file_name(closed))
        with Ledger(to / "ledger.sqlite") as ledger:
            assert state["leaves"] == (ledger.fact("leaves") or "0") == str(number)
    meanwhile.extend([four_rounds] * 9)
    with pytest.raises(StateError, match="faster than it can be copied"):
        backup(w.fleet, w.folder / "never")
    assert not list(w.folder.glob("*never*"))


def test_what_is_damaged_is_not_called_a_backup(fleet):
    w = fleet(rounds=2, devices=2)
    assert w.pump(lambda: done(w), tick_s=TICK_S)
    path = w.fleet.folder / "state" / checkpoint.file_name(2)
    whole = path.read_bytes()
    path.write_bytes(whole[:-1] + bytes([whole[-1] ^ 1]))
    with pytest.raises(StateError, match="is damaged"):
        backup(w.fleet, w.folder / "copy")
    assert not list(w.folder.glob("*copy*"))


def test_a_backup_that_cannot_be_written_leaves_nothing(fleet, monkeypatch):
    w = fleet(rounds=2, devices=2)
    monkeypatch.setattr("shutil.copy2", lambda *paths: (_ for _ in ()).throw(OSError(errno.ENOSPC, "No space left")))
    with pytest.raises(StateError, match="No space left"):
        backup(w.fleet, w.folder / "copy")
    assert not list(w.folder.glob("*copy*"))


def test_what_the_broker_writes_meanwhile_is_no_part_of_a_backup(fleet, monkeypatch):
    w = fleet(rounds=2, devices=2)
    place, copies = w.fleet.folder / "mosquitto", shutil.copy2
    made = {path.name for path in place.iterdir()}
    assert "acl" in made
    for name in ("gone", "mosquitto.db", "mosquitto.db.new", "broker.log"):
        (place / name).write_text(name)

    def copy(path: Path, to: Path) -> None:
        if path.name == "gone":
            to.write_text("half of it")
            path.unlink()
        copies(path, to)

    monkeypatch.setattr("shutil.copy2", copy)
    backup(w.fleet, w.folder / "copy")
    assert {path.name for path in (w.folder / "copy" / "mosquitto").iterdir()} == made


def test_a_backup_belongs_to_whom_the_fleet_belongs(fleet):
    w = fleet(rounds=2, devices=2)
    if os.geteuid() == 0:
        os.chown(w.fleet.folder, 65534, 65534)
    backup(w.fleet, w.folder / "copy")
    owner = w.fleet.folder.stat().st_uid
    assert {path.stat().st_uid for path in (w.folder / "copy", *(w.folder / "copy").rglob("*"))} == {owner}


# What a device says of its training state ---------------------------------------------------------------------------


def test_a_device_that_does_not_say_what_its_update_follows_is_not_suspected(fleet, monkeypatch):
    """A missing key has its default: the agent may be of another version."""
    w = fleet(rounds=6, devices=2)
    keep = DeviceState.leave_made

    def silent(home: DeviceState, key: str, life: str, number: int, upload: UploadManifest, *more: Any) -> None:
        keep(home, key, life, number, replace(upload, after=None), *more)

    monkeypatch.setattr(DeviceState, "leave_made", silent)
    assert w.pump(lambda: done(w), tick_s=TICK_S)
    assert w.server.checkpoint.state.dual_epoch == 0
    check_duals(w, feedback=True)


def test_a_state_that_the_disk_does_not_give_now_is_not_set_aside(fleet, monkeypatch):
    w = fleet(rounds=2, devices=2)
    assert w.pump(lambda: done(w), tick_s=TICK_S)
    home = w.agents["d0"].home
    (path,) = home.folder.glob("methods/*/state.safetensors")
    whole = path.read_bytes()
    opens = Path.open

    def broken(at: Path, *more: Any, **options: Any) -> Any:
        if at == path:
            raise OSError(errno.EIO, "Input/output error")
        return opens(at, *more, **options)

    with monkeypatch.context() as disk:
        disk.setattr(Path, "open", broken)
        with pytest.raises(StateError, match="Input/output error"):
            home.state(path.parent.name)
    assert path.read_bytes() == whole
    assert home.state(path.parent.name) is not None
