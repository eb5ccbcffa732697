"""The cache of programs that flashing keeps: the newest of each kind, never one in use, safe beside other runs, and its
command."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from cloud_server.commands.cli import app
from firmware_profiles.package import program_cache
from firmware_profiles.package.program_cache import NEWEST, Cache, sha256_of


@pytest.fixture(autouse=True)
def release_locks() -> Iterator[None]:
    """Release what the test holds, as the end of a process would."""
    yield
    _release_locks()


def _release_locks() -> None:
    while program_cache._LOCKED:
        os.close(program_cache._LOCKED.pop())


def add(kept: Cache, number: int, *, arch: str = "aarch64", python: str = "3.13", hold: bool = False) -> Path:
    """A program that was last used ``number`` seconds after 1970."""
    packed = kept.folder / "packed"
    packed.write_bytes(f"{arch} {python} {number}".encode() * 10)
    file = f"0.1.0-{number}-{arch}-cp{python.replace('.', '')}.tar.gz"
    told = {"version": f"0.1.0-{number}", "arch": arch, "python": python, "file": file, "sha256": sha256_of(packed),
            "installed_bytes": 7}
    path = kept.add(f"{arch}{python}{number}", packed, told)
    os.utime(kept.folder / f"{arch}{python}{number}.json", (number, number))
    if not hold:
        _release_locks()
    return path


def versions(kept: Cache) -> list[str]:
    return [one.version for one in kept.entries()]


def test_the_newest_of_each_python_and_architecture_are_kept(tmp_path: Path) -> None:
    kept = Cache(tmp_path)
    for number in range(1, NEWEST + 3):
        for arch, python in (("aarch64", "3.13"), ("aarch64", "3.11"), ("x86_64", "3.13")):
            add(kept, number, arch=arch, python=python)
    assert sorted(set(versions(kept))) == [f"0.1.0-{n}" for n in range(3, NEWEST + 3)]
    assert len(list(tmp_path.glob("*.tar.gz"))) == len(list(tmp_path.glob("*.json"))) == 3 * NEWEST


def test_a_program_that_was_used_again_is_kept_before_one_that_was_not(tmp_path: Path) -> None:
    kept = Cache(tmp_path)
    for number in range(1, NEWEST + 1):
        add(kept, number)
    assert kept.take("aarch643.131") is not None
    _release_locks()
    add(kept, 50)
    assert "0.1.0-1" in versions(kept)
    assert "0.1.0-2" not in versions(kept)


def test_a_program_in_use_by_another_process_is_kept_until_that_ends(tmp_path: Path) -> None:
    kept = Cache(tmp_path)
    add(kept, 1)
    text = (f"import sys; from pathlib import Path; from firmware_profiles.package.program_cache import Cache; "
            f"assert Cache(Path({str(tmp_path)!r})).take('aarch643.131'); print('held', flush=True); sys.stdin.read()")
    user = subprocess.Popen([sys.executable, "-c", text], stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    try:
        assert user.stdout is not None
        assert user.stdout.readline() == b"held\n"
        os.utime(tmp_path / "aarch643.131.json", (1, 1))
        for number in range(2, NEWEST + 3):
            add(kept, number)
        assert [one.version for one in kept.entries() if one.in_use] == ["0.1.0-1"]
        assert len(kept.clear()) == NEWEST
        assert versions(kept) == ["0.1.0-1"]
    finally:
        user.send_signal(signal.SIGKILL)
        user.communicate()
    assert [one.version for one in kept.clear()] == ["0.1.0-1"]
    assert {path.name for path in tmp_path.iterdir()} == {".lock"}


def test_damaged_programs_are_not_used_and_remains_of_killed_runs_are_removed(tmp_path: Path) -> None:
    kept = Cache(tmp_path)
    path = add(kept, 1)
    path.write_bytes(b"cut short")
    assert kept.take("aarch643.131") is None
    assert kept.take("never made") is None
    (tmp_path / "other.json").write_text('{"file": "../../etc/passwd"}')
    (tmp_path / "nobody.tar.gz").write_bytes(b"")
    for name, age in ((".making-old", 0), (".making-now", None)):
        (tmp_path / name).mkdir()
        if age is not None:
            os.utime(tmp_path / name, (age, age))
    assert kept.take("other") is None
    add(kept, 2)
    assert {path.name for path in tmp_path.iterdir() if "aarch64" not in path.name} == {".lock", ".making-now"}


def test_two_keys_of_one_archive_are_removed_together(tmp_path: Path) -> None:
    kept = Cache(tmp_path)
    path = add(kept, 1)
    (tmp_path / "second.json").write_bytes((tmp_path / "aarch643.131.json").read_bytes())
    assert kept.take("second") is not None
    _release_locks()
    assert len(kept.clear()) == 1
    assert not path.exists()
    assert list(tmp_path.glob("*.json")) == []


def test_the_command_lists_the_cache_and_clears_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    add(Cache(tmp_path / "metafleet" / "programs"), 1)
    result = json.loads(CliRunner().invoke(app, ["programs", "--json"]).stdout)
    assert [(one["version"], one["python"], one["in_use"]) for one in result] == [("0.1.0-1", "3.13", False)]
    assert "0.1.0-1" in CliRunner().invoke(app, ["programs"]).stdout
    assert "1 deleted" in CliRunner().invoke(app, ["programs", "clear"]).stdout
    assert json.loads(CliRunner().invoke(app, ["programs", "--json"]).stdout) == []
