"""Readings that a program prints."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from edge_agent.sources import run_sources
from edge_agent.sources.command import CommandFeed
from edge_agent.sources.interface import Item, Lost
from fleet_core.base.errors import SourceError
from fleet_core.board.device_settings import settings_of
from fleet_core.board.source_settings import CommandSource
from fleet_core.data import unlabelled
from fleet_core.data.live import Readings
from tests.support import sensors, waiting

RECORDED = np.round(np.random.default_rng(0).normal(size=(50, 2)), 5)


def command(*words: str) -> CommandSource:
    return CommandSource(kind="command", command=words)


def recording(path: Path) -> Path:
    rows = [f"{0.02 * k:.2f},{a!r},{b!r}" for k, (a, b) in enumerate(RECORDED.tolist())]
    path.write_text("\n".join(["time,ax,ay", *rows]) + "\n")
    return path


@pytest.mark.parametrize("stride", ["", "stride = 3\n"])
def test_the_samples_of_what_it_prints_are_those_of_the_file(tmp_path: Path, stride: str) -> None:
    place, _ = sensors.home(tmp_path / "d", f'[[source]]\nkind = "command"\ncommand = ["cat", "r.csv"]\n{stride}')
    recording(place / "r.csv")
    settings = settings_of(place)
    feed = run_sources.open_feed(settings.source[0], "command", place, settings, sensors.WINDOWS)
    made = sensors.made_of(place, sensors.read_all(feed))
    feed.close()
    wanted = unlabelled.load(place / "r.csv", sensors.WINDOWS, stride=3 if stride else None)
    assert len(made) == len(wanted) > 5
    assert sensors.bits(made) == wanted.tobytes()


def test_a_program_that_fails_says_why(tmp_path: Path) -> None:
    feed = CommandFeed(command(sys.executable, "-c", "print('1,2'); raise SystemExit('no sensor')"), tmp_path)
    found: list[Item] = []
    with pytest.raises(SourceError, match="ended with exit code 1: no sensor"):
        waiting.until(lambda: False, lambda: found.extend(feed.read(0.2) or []))
    feed.close()
    assert len(found) == 1


def test_a_program_that_is_not_there_is_named(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no-such-program: cannot be started: No such file"):
        CommandFeed(command("no-such-program"), tmp_path)


def test_a_program_is_ended_with_those_that_it_started(tmp_path: Path) -> None:
    feed = CommandFeed(command("sh", "-c", "sleep 600 & echo $!; wait"), tmp_path)
    items: list[Item] = []
    waiting.until(lambda: items, lambda: items.extend(feed.read(0.2) or []))
    assert isinstance(items[0], Readings)
    number = int(items[0].values[0, 0])
    feed.close()
    waiting.until(lambda: not Path(f"/proc/{number}").exists() or "Z" in Path(f"/proc/{number}/stat").read_text())


def test_what_is_no_reading_is_lost_and_the_rest_counts(tmp_path: Path) -> None:
    feed = CommandFeed(command("printf", r"1,2\nhello\n3,4\n"), tmp_path)
    items = sensors.read_all(feed)
    assert [type(one).__name__ for one in items] == ["Readings", "Lost", "Readings"]
    assert isinstance(items[1], Lost)
    feed.close()
