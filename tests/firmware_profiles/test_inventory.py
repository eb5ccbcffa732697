"""Flashing many devices from one file: mistakes in the file, and the result of each device."""

from __future__ import annotations

import io
import threading
from pathlib import Path

import pytest
from rich.console import Console
from typer.testing import CliRunner

from cloud_server.commands.cli import app
from firmware_profiles.ssh import inventory
from firmware_profiles.ssh.inventory import Entry
from firmware_profiles.ssh.remote_install import Outcome, Tell
from firmware_profiles.ssh.side_by_side import Lines, LiveTable, Waves, flash_all
from fleet_core.base.errors import ConfigError, FlashError
from tests.support.waiting import PATIENCE_S

ENTRIES = tuple(Entry(f"{name}.toml", f"ssh://pi@{name}") for name in ("attic", "cellar", "kitchen"))


def written(folder: Path, text: str, *files: str) -> Path:
    for name in files:
        (folder / name).write_text("")
    path = folder / "inventory.toml"
    path.write_text(text)
    return path


def test_devices_lie_beside_the_inventory(tmp_path: Path) -> None:
    key = "SHA256:" + "x" * 43
    text = f'[[devices]]\nfile = "a.toml"\nto = "ssh://pi@a"\naccept_host_key = "{key}"\n' \
           '[[devices]]\nfile = "b.toml"\nto = "ssh://b:2222"\n'
    entries = inventory.load(written(tmp_path, text, "a.toml", "b.toml"))
    assert entries == (Entry(str(tmp_path / "a.toml"), "ssh://pi@a", key), Entry(str(tmp_path / "b.toml"), "ssh://b:2222"))
    assert [entry.name for entry in entries] == ["a", "b"]


def test_a_home_of_an_unknown_user_is_a_path_like_another(tmp_path: Path) -> None:
    path = tmp_path / "inventory.toml"
    path.write_text('[[devices]]\nfile = "~nobody-here/d.toml"\nto = "ssh://pi@host"\n')
    with pytest.raises(ConfigError, match="there is no file"):
        inventory.load(path)


def test_all_mistakes_are_reported_at_once_with_their_lines(tmp_path: Path) -> None:
    text = '[[devices]]\nfile = "a.toml"\nto = "ssh://pi@a"\n\n[[devices]]\nfile = "none.toml"\nto = "ssh://pi@a"\n\n' \
           '[[devices]]\nfile = "a.toml"\nto = "image:b.img"\n'
    with pytest.raises(ConfigError) as error:
        inventory.load(written(tmp_path, text, "a.toml"))
    message = str(error.value)
    for part in (":6: devices[1].file: there is no file", ":7: devices[1].to: 'ssh://pi@a' is there twice",
                 ":10: devices[2].file: '", ":11: devices[2].to: 'image:b.img' is not an address"):
        assert part in message, message


def test_an_unknown_key_is_reported_with_the_nearest_known_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="did you mean 'file'"):
        inventory.load(written(tmp_path, '[[devices]]\nfiles = "a.toml"\nto = "ssh://a"\n'))


def work(entry: Entry, tell: Tell) -> Outcome:
    """The device in the cellar fails."""
    tell("uploading", "1 of 2 MB")
    tell("uploading", "2 of 2 MB")
    if entry.name == "cellar":
        raise FlashError("no connection", where=entry.to, hint="is it on?")
    return Outcome(entry.name, "1.1", "1.0", True, 2_000_000)


def test_a_device_that_fails_stops_no_other_and_each_stage_is_one_line() -> None:
    out = io.StringIO()
    results = flash_all(ENTRIES, work, Lines(ENTRIES, out), jobs=2)
    assert [result.plain["ok"] for result in results] == [True, False, True]
    assert results[1].plain["error"] == "ssh://pi@cellar: no connection\nhint: is it on?"
    assert {k: v for k, v in results[0].plain.items() if k != "seconds"} == {
        "device": "attic", "to": "ssh://pi@attic", "ok": True, "version": "1.1", "previous": "1.0", "changed": True,
        "sent_bytes": 2_000_000}
    lines = out.getvalue().splitlines()
    assert [line for line in lines if line.startswith("attic")] == [
        "attic    connecting", "attic    uploading", "attic    1.1 runs, 1.0 before; 2.0 MB sent"]
    assert "cellar   failed: ssh://pi@cellar: no connection" in lines


@pytest.mark.parametrize(("sizes", "most_failures", "begun"), [
    ((), 0, ["attic", "cellar", "kitchen"]),  # no waves: a device that fails stops no other
    ((1,), 0, ["attic", "cellar"]),
    ((2,), 0, ["attic", "cellar"]),
    ((1,), 1, ["attic", "cellar", "kitchen"]),
    ((2, 1), 1, ["attic", "cellar", "kitchen"]),
    ((1, 5), 0, ["attic", "cellar", "kitchen"]),  # the last wave has begun before the failure is known
])
def test_no_further_wave_begins_when_too_many_have_failed(
    sizes: tuple[int, ...], most_failures: int, begun: list[str]
) -> None:
    seen: list[str] = []

    def noted(entry: Entry, tell: Tell) -> Outcome:
        seen.append(entry.name)
        return work(entry, tell)

    results = flash_all(ENTRIES, noted, Lines(ENTRIES, io.StringIO()), 1, Waves(sizes, most_failures))
    assert seen == begun
    assert [result.entry for result in results] == list(ENTRIES)
    for result in results[len(begun):]:
        assert "not begun: 1 failed in the waves before" in str(result.error)


def test_a_wave_begins_when_the_one_before_is_back() -> None:
    going: list[str] = []

    def alone(entry: Entry, tell: Tell) -> Outcome:
        going.append(entry.name)
        assert going == [entry.name], "no device of another wave is under way"
        going.remove(entry.name)
        return Outcome(entry.name, "1.0", "", False)

    assert all(result.outcome for result in flash_all(ENTRIES, alone, Lines(ENTRIES, io.StringIO()), 3, Waves((1,))))


@pytest.mark.parametrize("text", ["0", "1,,2", "-1", "many", "1;2"])
def test_waves_that_are_none_are_refused(text: str, tmp_path: Path) -> None:
    ran = CliRunner().invoke(app, ["flash", "--all", str(tmp_path / "inventory.toml"), "--waves", text])
    assert isinstance(ran.exception, ConfigError)
    assert "--waves" in str(ran.exception)


def test_the_requested_number_of_devices_is_flashed_at_the_same_time() -> None:
    meet = threading.Barrier(3, timeout=PATIENCE_S)

    def together(entry: Entry, tell: Tell) -> Outcome:
        meet.wait()
        return Outcome(entry.name, "1.0", "", False)

    assert all(result.outcome for result in flash_all(ENTRIES, together, Lines(ENTRIES, io.StringIO()), jobs=3))


def test_an_error_of_the_program_itself_ends_the_others_at_their_next_step() -> None:
    ended, meet = [], threading.Barrier(2, timeout=PATIENCE_S)

    def broken(entry: Entry, tell: Tell) -> Outcome:
        meet.wait()
        if entry.name == "attic":
            raise ZeroDivisionError
        try:
            while True:
                tell("waiting", "")
        except FlashError as error:
            ended.append(error.what)
            raise

    with pytest.raises(ZeroDivisionError):
        flash_all(ENTRIES[:2], broken, Lines(ENTRIES, io.StringIO()), jobs=2)
    assert ended == ["interrupted"]


def test_a_terminal_shows_one_line_for_each_device() -> None:
    out = io.StringIO()
    show = LiveTable(ENTRIES, Console(file=out, force_terminal=True, width=60, no_color=True))
    flash_all(ENTRIES, work, show, jobs=1)
    last = out.getvalue()
    for part in ("attic", "1.1 runs, 1.0 before; 2.0 MB sent", "cellar", "no connection", "kitchen"):
        assert part in last
