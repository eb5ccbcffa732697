"""The aggregator's disk is full, read-only, damaged or written by a newer version: nothing good is lost, and a message
says so."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
import sqlite3
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cloud_server.commands.cli import app
from cloud_server.ledger import disk_errors
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device
from cloud_server.records import checkpoint
from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.spool import Spool
from cloud_server.rounds.coordinator import Coordinator
from cloud_server.rounds.coordinator import will as server_will
from cloud_server.running.aggregator import RETRY_S, Aggregator
from fleet_core.base import storage
from fleet_core.base.errors import StateError
from fleet_core.data.samples import save
from fleet_core.link.loopback import LoopbackBroker, LoopbackLink
from tests.support.inprocess import World, config_text, toy, world
from tests.support.waiting import PATIENCE_S
from tests.support.world_checks import (
    TWO_ROUNDS,
    check_duals,
    check_two_rounds,
    checkpoint_bits,
    finished,
    opened,
    settled,
)

pytestmark = pytest.mark.usefixtures("no_fsync")

NO_SPACE_S = 2 * RETRY_S + 1  # so that the second attempt fails too
TICK_S = 0.1


class Kept:
    """Stands in for a world's coordinator: that of a whole aggregator."""

    def __init__(self, aggregator: Aggregator):
        self.aggregator = aggregator

    def step(self, timeout_s: float) -> bool:
        return self.aggregator.step(timeout_s)

    def close(self) -> None:
        self.aggregator.close()

    def __getattr__(self, name: str) -> Any:
        return getattr(self.aggregator.coordinator, name)


@dataclass
class KeptWorld(World):
    """A world with the whole aggregator."""

    def start_server(self) -> Any:
        fleet = Fleet.load(self.fleet.folder)
        ledger = Ledger(self.fleet.ledger_path)

        def life() -> Coordinator:
            self.lives += 1
            boot = f"server{self.lives}"
            link = LoopbackLink(self.broker, boot, server_will(self.name, boot))
            return Coordinator(fleet, link, ledger, boot=boot, clock=self.clock, now=self.clock.wall,
                               log=self.lines.append)

        try:
            state = fleet.folder / "state"
            self.server = Kept(Aggregator(life, ledger, state, clock=self.clock, log=self.lines.append))
        except BaseException:
            ledger.close()
            raise
        return self.server


@pytest.fixture
def founded(tmp_path: Path) -> Path:
    """The folder of a fleet that has not run yet and of two devices with samples."""
    folder = tmp_path / "founded"
    world(folder, config_text(**TWO_ROUNDS)).broker.stop()
    for n in range(2):
        home = folder / "devices" / f"d{n}"
        home.mkdir(parents=True)
        save(home / "samples.npz", toy(n))
    return folder


@pytest.fixture
def copy(founded: Path, tmp_path: Path) -> Iterator[Callable[..., KeptWorld]]:
    """Make worlds that start alike, bit for bit. place: the fleet's folder, the only one that an aggregator writes."""
    made: list[KeptWorld] = []

    def make(place: Path | None = None) -> KeptWorld:
        folder = tmp_path / f"copy{len(made)}"
        shutil.copytree(founded, folder)
        fleet = folder / "fleet" if place is None else Path(shutil.move(folder / "fleet", place / "fleet"))
        made.append(KeptWorld(folder, Fleet.load(fleet), LoopbackBroker()))
        return made[-1]

    yield make
    for each in made:
        each.close()


def run(w: KeptWorld) -> KeptWorld:
    start(w)
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    return w


def start(w: KeptWorld) -> KeptWorld:
    w.start_server()
    for n in range(2):
        w.start_agent(f"d{n}")
    return w


def end(w: KeptWorld) -> None:
    """Stop everything; the world can be started again."""
    w.close()
    w.server = None
    w.agents.clear()


def held_up(w: KeptWorld) -> str:
    return str(w.server.aggregator.held_up)


# Full ---------------------------------------------------------------------------------------------------------------


class Full:
    """For eleven seconds, all writes of the aggregator from its ``at``-th one on fail; ``writes`` counts them."""

    def __init__(self, w: KeptWorld, at: int | None, patch: pytest.MonkeyPatch):
        self.w, self.at, self.writes, self.where, self.until = w, at, 0, "", 0.0
        write, whole = storage.write_parts, Ledger._begin_commit

        def write_parts(path: Path, parts: Any, **options: Any) -> None:
            if self.is_full(path.name):
                error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                raise StateError(f"cannot be written: {error.strerror}", where=str(path)) from error
            write(path, parts, **options)

        @contextlib.contextmanager
        def transaction(ledger: Ledger) -> Iterator[None]:
            with whole(ledger):
                yield
                with ledger._errors():
                    if self.is_full("ledger"):
                        raise sqlite3.OperationalError("database or disk is full")

        patch.setattr(storage, "write_parts", write_parts)
        patch.setattr(Ledger, "_begin_commit", transaction)

    def is_full(self, what: str) -> bool:
        if self.w.acting != "server":
            return False
        self.writes += 1
        if self.writes == self.at:
            self.where, self.until = f"{what}, write {self.at}", self.w.clock.seconds + NO_SPACE_S
        return self.w.clock.seconds < self.until


@pytest.mark.slow
def test_a_disk_that_is_full_at_any_write_changes_nothing_once_there_is_space(copy, monkeypatch):
    whole = copy()
    with monkeypatch.context() as patch:
        none = Full(whole, None, patch)
        wanted = checkpoint_bits(run(whole))
    assert none.writes > 20
    for at in range(1, none.writes + 1):
        w = copy()
        with monkeypatch.context() as patch:
            full = Full(w, at, patch)
            run(w)
        check_two_rounds(w, wanted, full.where)
        assert len([line for line in w.lines if "waiting for the disk" in line]) == 1, f"{full.where}: said once"
        assert not w.server.ledger.fact("stalled")
        end(w)
        shutil.rmtree(w.folder)


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A folder on its own disk of 8 MiB."""
    folder = tmp_path / "small"
    folder.mkdir()
    mount("-t", "tmpfs", "-o", "size=8m", "none", str(folder))
    yield folder
    command("umount", "-l", str(folder))


def mount(*arguments: str) -> None:
    """Skip the test, with a reason, where nothing can be mounted."""
    if shutil.which("mount") is None:
        pytest.skip("needs mount, which is not on this machine")
    if not sys.platform.startswith("linux") or os.geteuid() != 0:
        pytest.skip("mounting a small disk needs Linux and root")
    try:
        command("mount", *arguments)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"mounting is not allowed here: {error.stderr.strip()}")


def command(*words: str) -> None:
    subprocess.run(words, check=True, capture_output=True, text=True, timeout=PATIENCE_S)


def fill(folder: Path) -> Path:
    """Use up all free space."""
    ballast = folder / "ballast"
    with contextlib.suppress(OSError), open(ballast, "wb", buffering=0) as file:
        while True:
            file.write(bytes(4096))
    return ballast


@pytest.mark.slow
def test_a_real_disk_that_runs_full_holds_the_round_open_until_there_is_space(copy, small_disk):
    wanted = checkpoint_bits(run(copy()))
    w = start(copy(small_disk))
    assert w.pump(lambda: opened(w, 1))
    ballast = fill(small_disk)
    assert w.pump(lambda: held_up(w) != "")
    assert "No space left on device" in held_up(w) or "disk is full" in held_up(w)
    assert w.logged(f"waiting for the disk: {small_disk}")
    for _ in range(150):
        w.step(TICK_S)
    assert b'"st":"off"' in w.broker.retained["fl1/t/srv"], "the devices know that it is away"
    assert [r.status for r in w.server.ledger.rounds()] == ["open"]
    ballast.unlink()
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    assert w.logged("the disk takes writes again")
    assert checkpoint_bits(w) == wanted
    check_duals(w, feedback=True)


@pytest.fixture
def read_only(tmp_path: Path) -> Iterator[Callable[[Path], Callable[[], None]]]:
    """Make a folder read-only, as a file system with errors becomes; returns a function that undoes it."""
    mounted: list[str] = []

    def make(folder: Path) -> Callable[[], None]:
        mount("--bind", str(folder), str(folder))
        mounted.append(str(folder))
        command("mount", "-o", "remount,bind,ro", str(folder))
        return lambda: command("mount", "-o", "remount,bind,rw", str(folder))

    yield make
    for folder in mounted:
        command("umount", "-l", folder)


@pytest.mark.slow
def test_a_folder_that_becomes_read_only_is_named_in_the_status_until_it_can_be_written(copy, read_only):
    wanted = checkpoint_bits(run(copy()))
    w = start(copy())
    assert w.pump(lambda: opened(w, 2))
    writable = read_only(w.fleet.folder / "state")
    assert w.pump(lambda: held_up(w) != "")
    said = CliRunner().invoke(app, ["server", "status", str(w.fleet.folder)]).stdout
    assert "stalled: waiting for the disk" in said
    assert f"{w.fleet.folder}/state" in said
    assert "Read-only file system" in said
    writable()
    assert w.pump(lambda: not held_up(w), tick_s=TICK_S)
    assert "stalled" not in CliRunner().invoke(app, ["server", "status", str(w.fleet.folder)]).stdout
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    assert checkpoint_bits(w) == wanted


def test_a_disk_that_cannot_be_written_at_the_start_is_reported_at_once(copy, read_only):
    w = copy()
    w.fleet.folder.joinpath("state").mkdir()
    read_only(w.fleet.folder / "state")
    with pytest.raises(StateError, match="Read-only file system") as caught:
        w.start_server()
    assert str(w.fleet.folder / "state") in str(caught.value)
    assert "hint: " in str(caught.value)


def test_a_log_on_the_full_disk_stops_nobody():
    def full(line: str) -> None:
        raise OSError(errno.ENOSPC, line)

    disk_errors.undisturbed(full)("what nobody will read")


# Damaged or newer ---------------------------------------------------------------------------------------------------


def flipped(path: Path) -> None:
    """Flip one bit of the last array."""
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


def newer(path: Path) -> None:
    arrays, metadata = storage.unpack(path.read_bytes())
    newest = checkpoint.SERVED_PART_FORMAT if path.stem == "served" else checkpoint.PART_FORMAT
    path.write_bytes(storage.pack(arrays, {**metadata, "format": str(newest + 1)}))


def another_epoch(path: Path) -> None:
    arrays, metadata = storage.unpack(path.read_bytes())
    path.write_bytes(storage.pack(arrays, {**metadata, "dual_epoch": "7"}))


def shortened(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-100])


def emptied(path: Path) -> None:
    path.write_bytes(b"")


def deleted(path: Path) -> None:
    path.unlink()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("damage", "said"),
    [(flipped, "is damaged"), (another_epoch, "is damaged"), (shortened, "is damaged"), (emptied, "is damaged"),
     (deleted, "is missing"), (newer, "was made by a newer metafleet: version 3")],
)  # fmt: skip
def test_a_checkpoint_that_is_not_as_it_was_written_is_refused_and_not_guessed(copy, damage, said):
    w = start(copy())
    assert w.pump(lambda: opened(w, 2))
    end(w)
    path = w.fleet.folder / "state" / "round-000000001.safetensors"
    damage(path)
    with pytest.raises(StateError) as caught:
        w.start_server()
    assert said in caught.value.what
    assert caught.value.where == str(path)
    assert ("update metafleet" if damage is newer else "backup") in str(caught.value.hint)


@pytest.mark.slow
def test_a_checkpoint_that_the_ledger_does_not_know_yet_may_be_damaged(copy):
    """The aggregator died between the two; the round is still open."""
    wanted = checkpoint_bits(run(copy()))
    w = start(copy())
    assert w.pump(lambda: opened(w, 2))
    end(w)
    (w.fleet.folder / "state" / "round-000000002.safetensors").write_bytes(b"torn")
    assert checkpoint_bits(run(w)) == wanted


def test_writes_that_a_power_cut_ended_are_cleared(copy):
    w = copy()
    torn = w.fleet.folder / "state" / ".round-000000001.safetensors.abcd"
    torn.parent.mkdir()
    torn.write_bytes(b"half")
    w.start_server()
    assert not torn.exists()


@pytest.mark.slow
@pytest.mark.parametrize("damage", [flipped, shortened, emptied])
def test_a_served_model_that_is_damaged_is_set_aside_and_made_again(copy, damage):
    w = run(copy())
    served = w.server._parts.served.reference
    end(w)
    path = w.fleet.folder / "state" / "served.safetensors"
    damage(path)
    w.start_server()
    assert w.logged(f"{path} is damaged: set aside as served.damaged")
    assert path.with_suffix(".damaged").exists()
    assert w.server._parts.served.reference == served


def test_a_served_model_of_a_newer_version_is_refused(copy):
    w = run(copy())
    end(w)
    newer(w.fleet.folder / "state" / "served.safetensors")
    with pytest.raises(StateError, match="made by a newer metafleet"):
        w.start_server()


@pytest.mark.slow
@pytest.mark.parametrize("text", ["", "[]", '{"x": "y"}', "{"])
def test_a_damaged_shelf_costs_only_the_brokers_memory(copy, text):
    w = start(copy())
    assert w.pump(lambda: opened(w, 2))
    end(w)
    (w.fleet.folder / "state" / "published.json").write_text(text)
    run(w)
    assert w.logged("published.json is damaged") or text == '{"x": "y"}'


def test_a_damaged_key_is_named(copy):
    w = copy()
    (w.fleet.folder / "fleet.key").write_text("no key")
    with pytest.raises(StateError, match="holds no Ed25519 key") as caught:
        w.start_server()
    assert str(w.fleet.folder / "fleet.key") in str(caught.value)


def test_an_update_that_the_disk_does_not_give_is_kept_until_it_does(copy, monkeypatch):
    wanted = checkpoint_bits(run(copy()))
    w = copy()
    w.broker.faults = lambda client, m: [m] if "/a/d1/up/" not in m.topic else []
    start(w)
    assert w.pump(lambda: opened(w, 1) and "d0" in w.server.open.received)
    w.kill_server()

    def refused(self, *_):
        try:
            raise OSError(errno.EIO, "Input/output error")
        except OSError as error:
            raise StateError("cannot be read", where="d0.update") from error

    with monkeypatch.context() as patch:
        patch.setattr(Spool, "check", refused)
        w.start_server()
        assert w.pump(lambda: w.logged("waiting for the disk: d0.update: cannot be read"), tick_s=TICK_S)
    w.broker.faults = lambda client, m: [m]
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    assert checkpoint_bits(w) == wanted
    assert not w.logged("the kept update of d0 is dropped")


@pytest.mark.slow
@pytest.mark.parametrize("name", ["d0.update", "d0.json"])
@pytest.mark.parametrize("restarted", [True, False])
def test_a_damaged_update_in_the_spool_is_requested_again(copy, name, restarted):
    wanted = checkpoint_bits(run(copy()))
    w = copy()
    lift = [False]
    w.broker.faults = lambda client, m: [m] if lift[0] or "/a/d1/up/" not in m.topic else []
    start(w)
    assert w.pump(lambda: opened(w, 1) and "d0" in w.server.open.received)
    path = w.fleet.folder / "spool" / "1" / name
    shortened(path)
    if restarted:
        w.kill_server()
        w.start_server()
    lift[0] = True
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    assert checkpoint_bits(w) == wanted
    if name == "d0.update":
        assert w.logged("the kept update of d0 is dropped")


def test_revoking_works_on_a_full_disk(founded: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fleet = Fleet.load(founded / "fleet")
    with Ledger(fleet.ledger_path) as ledger:
        ledger.put(Device(name="d0", enrolled_round=1, first_seen=0.0, last_seen=0.0))
    put = Ledger.request

    def full_but_for_the_reserve(ledger: Ledger, key: str, value: str) -> None:
        if (fleet.folder / disk_errors.RESERVE).exists():
            raise StateError("cannot be written: the disk is full") from sqlite3.OperationalError("full")
        put(ledger, key, value)

    monkeypatch.setattr(Ledger, "request", full_but_for_the_reserve)
    disk_errors.reserve(fleet.folder)
    assert (fleet.folder / disk_errors.RESERVE).stat().st_size == disk_errors.RESERVE_BYTES
    done = CliRunner().invoke(app, ["devices", "revoke", str(fleet.folder), "d0"])
    assert done.exit_code == 0, done.output
    with Ledger(fleet.ledger_path) as ledger:
        assert "revoke/d0" in ledger.requests()


def test_the_reserve_is_used_for_a_full_disk_alone_and_made_again(tmp_path: Path) -> None:
    def damaged() -> None:
        raise StateError("is damaged")

    disk_errors.reserve(tmp_path)
    with pytest.raises(StateError, match="is damaged"):
        disk_errors.with_reserve(tmp_path, damaged)
    assert (tmp_path / disk_errors.RESERVE).exists()
    (tmp_path / disk_errors.RESERVE).unlink()
    disk_errors.reserve(tmp_path)
    assert (tmp_path / disk_errors.RESERVE).exists()
