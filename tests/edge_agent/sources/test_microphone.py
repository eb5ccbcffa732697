"""Sound of a microphone: a program that stands in for arecord, and a file in its place."""

from __future__ import annotations

import wave
from pathlib import Path

import numpy as np
import pytest

from edge_agent.sources import run_sources
from edge_agent.sources.interface import Feed, Item
from fleet_core.base.errors import SourceError
from fleet_core.board.device_settings import settings_of
from fleet_core.data import unlabelled
from fleet_core.data.live import Readings
from fleet_core.data.shaping import sound
from fleet_core.model.layout import InputSpec
from tests.support import homes, installed, sensors, sounds, waiting

HEARD = InputSpec((sound.BANDS, sound.frames_in(8000, 0.5)), sound_hz=8000)


def place_of(folder: Path, toml: str) -> Path:
    return homes.home(folder, toml=f'[[source]]\nkind = "microphone"\n{toml}')


def opened(place: Path) -> Feed:
    settings = settings_of(place)
    return run_sources.open_feed(settings.source[0], "microphone", place, settings, HEARD)


@pytest.mark.parametrize(("rate", "channels"), [(8000, 1), (16_000, 2)])
def test_the_samples_of_what_is_heard_are_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rate: int, channels: int
) -> None:
    tone = sounds.tone(700, 3.0, 1, rate)  # arecord does not end: only full windows are made
    path = sounds.write(tmp_path / "s.wav", tone, rate=rate, channels=channels)
    with wave.open(str(path)) as file:
        (tmp_path / "raw").write_bytes(file.readframes(file.getnframes()))
    asked = installed.program(monkeypatch, tmp_path / "bin", "arecord", f"cat {tmp_path}/raw; sleep 60")
    place = place_of(tmp_path / "d", f'rate_hz = {rate}\nchannels = {channels}\ndevice = "hw:1"\n')
    feed, items = opened(place), list[Item]()
    size = len(tone)
    waiting.until(lambda: sum(len(one.values) for one in items if isinstance(one, Readings)) == size,
                  lambda: items.extend(feed.read(0.1) or []))
    feed.close()
    wanted = unlabelled.load(path, HEARD)
    made = sensors.made_of(place, items, HEARD)
    assert len(made) == len(wanted) >= 5
    assert sensors.bits(made) == wanted.tobytes()
    assert asked.read_text() == f"-q -t raw -f S16_LE -r {rate} -c {channels} -D hw:1\n"


@pytest.mark.parametrize("width", [1, 2, 3])
def test_a_file_in_its_place_gives_the_samples_of_the_file(tmp_path: Path, width: int) -> None:
    place = place_of(tmp_path / "d", 'rate_hz = 8000\nfile = "s.wav"\nstride = 1500\n')
    path = sounds.write(place / "s.wav", sounds.tone(700, 1.7, 2), width=width)
    feed = opened(place)
    made = sensors.made_of(place, sensors.read_all(feed), HEARD)
    feed.close()
    wanted = unlabelled.load(path, HEARD, stride=1500)
    assert sensors.bits(made) == wanted.tobytes()
    times = np.diff([one.time for one in made])
    np.testing.assert_allclose(times[:-2], 1500 / 8000)


def test_a_file_of_another_rate_is_refused(tmp_path: Path) -> None:
    place = place_of(tmp_path / "d", 'file = "s.wav"\n')
    sounds.write(place / "s.wav", sounds.tone(700, 0.5, 2))
    with pytest.raises(SourceError, match="is sound at 8000 Hz; expected rate_hz, 16000 Hz"):
        opened(place)


def test_without_arecord_it_says_what_to_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(SourceError, match=r"arecord: cannot be started.*\n.*apt install alsa-utils"):
        opened(place_of(tmp_path / "d", ""))


def test_a_microphone_that_is_busy_is_said(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    installed.program(monkeypatch, tmp_path / "bin", "arecord", "echo 'audio open error: busy' >&2; exit 1")
    feed = opened(place_of(tmp_path / "d", ""))
    with pytest.raises(SourceError, match="arecord: ended with exit code 1: audio open error: busy"):
        waiting.until(lambda: False, lambda: feed.read(0.1))
    feed.close()
