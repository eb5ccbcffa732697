"""Sources beside the agent: what is stored, what is said, and what happens when one fails."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent import Device
from edge_agent.sources import run_sources
from edge_agent.sources.interface import Item, Lost
from edge_agent.sources.run_sources import Maker, Running, Sources
from fleet_core.base.errors import ConfigError, SourceError
from fleet_core.board.device_settings import settings_of
from fleet_core.data.live import Readings, Taken
from tests.support import homes, sensors, waiting

TOML = '[[source]]\nkind = "command"\ncommand = ["cat", "r.csv"]\nevery_s = 0\n'


class Script:
    """A feed that gives these items, then ends; an exception is raised."""

    def __init__(self, *steps: Any):
        self.steps, self.closed = list(steps), False

    def read(self, timeout_s: float) -> list[Item] | None:
        if not self.steps:
            return None
        step = self.steps.pop(0)
        if isinstance(step, Exception):
            raise step
        found: list[Item] = step
        return found

    def close(self) -> None:
        self.closed = True


class Waits(threading.Event):
    """Records the waits, and does not wait."""

    def __init__(self, noted: list[float]):
        super().__init__()
        self._noted = noted

    def wait(self, timeout: float | None = None) -> bool:
        self._noted.append(timeout or 0.0)
        return False


def rows(count: int, labels: list[str] | None = None, begin: float = 2e9) -> Readings:
    values = np.random.default_rng(count).normal(size=(count, 2))
    return Readings(values, begin + 0.02 * np.arange(count, dtype=np.float64), labels, timed=True)


def running_of(place: Path, service: Any, log: list[str], *feeds: Script, toml_index: int = 0) -> Running:
    settings, left = settings_of(place), list(feeds)
    return Running(settings.source[toml_index], "s", service, place, settings, log.append, lambda now: None,
                   lambda *_: left.pop(0))


def test_samples_are_stored_beside_the_agent_and_listed(tmp_path: Path) -> None:
    place, service = sensors.home(tmp_path / "d", TOML)
    (place / "r.csv").write_text("ax,ay\n" + "".join(f"{k},{k / 3}\n" for k in range(40)))
    said: list[str] = []
    sources = Sources(place, settings_of(place), service, said.append)
    with sources.on():
        waiting.until(lambda: sources.running[0].state.state == "ended")
    assert sensors.stored(place).shape == (5, 2, 8)
    state = run_sources.states(place)["command"]
    assert (state.state, state.readings, state.samples, state.kept, state.lost) == ("ended", 40, 5, 5, 0)
    assert said == ["source command has ended, 5 samples are stored"]


def test_what_came_is_written_though_nothing_more_comes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_sources, "TOLD_S", 0.2)
    place, service = sensors.home(tmp_path / "d", TOML.replace('"cat", "r.csv"', '"sh", "-c", "cat r.csv; sleep 60"'))
    (place / "r.csv").write_text("ax,ay\n" + "1,2\n" * 40)
    with Sources(place, settings_of(place), service, lambda line: None).on():
        states = run_sources.states
        waiting.until(lambda: (one := states(place).get("command")) and (one.state, one.kept) == ("runs", 5))


def test_a_labelled_reading_makes_a_labelled_sample(tmp_path: Path) -> None:
    place, service = sensors.home(tmp_path / "d", TOML)
    source = running_of(place, service, [])
    maker = Maker(settings_of(place).source[0], settings_of(place), sensors.WINDOWS)
    source.take(maker, [rows(32, ["a"] * 16 + ["b"] * 8 + [""] * 8)])
    assert (source.state.labelled, source.state.kept) == (3, 1)
    assert service.local().added() == 3
    source.take(maker, [rows(8, ["goose"] * 8, 2.1e9)])
    assert "unknown class 'goose'" in source.state.last_lost
    assert source.state.kept == 2, "it is kept without its label"


def test_every_s_keeps_fewer(tmp_path: Path) -> None:
    place, service = sensors.home(tmp_path / "d", TOML.replace("every_s = 0", "every_s = 0.3"))
    source = running_of(place, service, [])
    source.take(Maker(settings_of(place).source[0], settings_of(place), sensors.WINDOWS), [rows(80)])
    assert (source.state.samples, source.state.kept) == (10, 5)


def test_a_source_that_gives_more_than_a_disk_should_write_has_to_wait(tmp_path: Path) -> None:
    place, service = sensors.home(tmp_path / "d", TOML)
    source, waits = running_of(place, service, []), list[float]()
    source._second, source._stopped = time.monotonic(), Waits(waits)
    source.take(Maker(settings_of(place).source[0], settings_of(place), sensors.WINDOWS), [rows(8 * 25)])
    assert source.state.kept == 25
    assert source.state.lost == 0
    assert len(waits) >= 1
    assert 0 <= waits[0] <= 1


def test_a_source_that_fails_is_opened_again_and_says_so_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_sources, "FIRST_S", 0.01)
    place, service = sensors.home(tmp_path / "d", TOML)
    broken = [Script([rows(5)], SourceError("no sensor", where="x")) for _ in range(3)]
    strange, last, said = Script(ValueError("a bug")), Script([rows(3)], [rows(8)]), list[str]()
    source = running_of(place, service, said, *broken, strange, last)
    source.start()
    waiting.until(lambda: source.state.state == "ended")
    assert all(one.closed for one in (*broken, strange, last))
    assert said[:2] == ["source s: x: no sensor; the agent tries again",
                        "source s: ValueError: a bug; the agent tries again"]
    assert source.state.last_error == "ValueError: a bug"
    assert source.state.kept == 1, "windows do not go over a failure"


def test_a_source_waits_for_a_model(tmp_path: Path) -> None:
    place = homes.home(tmp_path / "d", toml=TOML)
    service = homes.reopened(place)
    source = running_of(place, service, [], Script())
    source.stop()
    assert not source._has_model()
    assert source.state.state == "waits"


def test_a_lost_item_ends_a_window(tmp_path: Path) -> None:
    place, service = sensors.home(tmp_path / "d", TOML)
    source = running_of(place, service, [])
    maker = Maker(settings_of(place).source[0], settings_of(place), sensors.WINDOWS)
    first, second = rows(5), rows(9, begin=2e9 + 0.1)
    source.take(maker, [first, Lost("a line"), second])
    assert (source.state.samples, source.state.lost, source.state.last_lost) == (1, 1, "a line")


def test_the_last_sample_takes_a_late_label(tmp_path: Path) -> None:
    place, service = sensors.home(tmp_path / "d", TOML.replace("every_s = 0", "every_s = 60"))
    said: list[str] = []
    sources = Sources(place, settings_of(place), service, said.append)
    source = sources.running[0]
    maker = Maker(settings_of(place).source[0], settings_of(place), sensors.WINDOWS)
    sources.label("a")
    source.take(maker, [rows(8)])
    sources.label("a", "command")
    assert Device(place).unlabelled() == []
    source.take(maker, [rows(16, begin=2e9 + 1)])
    sources.label("goose")
    sources.label("b")
    sources.label("b")
    assert service.local().added() == 2
    assert service.local().is_added(0, rows(8).values[:8].T.astype(np.float32))
    assert [re.sub(";.*", "", line) for line in said] == [
        "button a: no sample waits for a label", "button: the last sample of command is a",
        "button goose: unknown class 'goose'", "button: the last sample of command is b",
        "button b: no sample waits for a label",
    ]


def test_whole_samples_of_another_shape_are_lost(tmp_path: Path) -> None:
    place, service = sensors.home(tmp_path / "d", TOML)
    source = running_of(place, service, [])
    maker = Maker(settings_of(place).source[0], settings_of(place), sensors.WINDOWS)
    source.take(maker, [Taken(np.zeros((2, 7), np.float32), 2e9), Taken(np.zeros((2, 8)), 2e9)])
    assert (source.state.kept, source.state.lost) == (1, 1)
    assert "a sample float32 [2, 7]; expected float32 [2, 8]" in source.state.last_lost


def test_all_mistakes_in_the_tables_are_said_at_once(tmp_path: Path) -> None:
    place = homes.home(tmp_path / "d", toml=(
        '[[source]]\nkind = "comand"\n[[source]]\nkind = "command"\ncommand = ["a"]\ngane = [2.0]\n'
        '[[source]]\nkind = "folder"\n[[button]]\nkind = "gpio"\nline = -1\nlabel = "a"\n'
    ))
    with pytest.raises(ConfigError) as told:
        settings_of(place)
    for wanted in ("(did you mean 'command'?)", "source[1].gane: unknown key (did you mean 'gain'?)",
                   "source[2].path: missing, expected text", "button[0].line: -1 is below the least allowed, 0"):
        assert wanted in str(told.value)


@pytest.mark.parametrize(("toml", "said"), [
    (TOML + 'name = "x"\n' + TOML + 'name = "x"\n', "two sources have the name 'x'"),
    (TOML + '[[button]]\nkind = "gpio"\nline = 1\nlabel = "a"\nsource = "y"\n', "button 1: there is no source 'y'"),
    ('[[source]]\nkind = "command"\ncommand = []\n', "source command: its command is empty"),
])  # fmt: skip
def test_names_that_do_not_fit_are_said(tmp_path: Path, toml: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said):
        settings_of(homes.home(tmp_path / "d", toml=toml))


def test_an_agent_without_sources_starts_no_thread(tmp_path: Path) -> None:
    place, service = sensors.home(tmp_path / "d", "")
    before = threading.active_count()
    with Sources(place, settings_of(place), service, lambda line: None).on():
        assert threading.active_count() == before
