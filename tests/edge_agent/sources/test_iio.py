"""Sensors of the kernel, here a folder that looks like /sys/bus/iio/devices."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from edge_agent.sources import run_sources
from edge_agent.sources.iio import IioFeed
from edge_agent.sources.interface import Item, Lost
from fleet_core.base.errors import SourceError
from fleet_core.board.device_settings import settings_of
from fleet_core.board.source_settings import IioSource
from fleet_core.data import unlabelled
from fleet_core.data.live import Readings
from tests.support import sensors

RAW = np.random.default_rng(3).integers(-20_000, 20_000, (40, 2))
SCALE = 0.000598205


def sensor(root: Path) -> Path:
    folder = root / "iio:device0"
    folder.mkdir(parents=True)
    for name, text in {"name": "mpu6050", "in_accel_scale": SCALE, "in_accel_x_raw": 0, "in_accel_y_raw": 0,
                       "in_accel_y_offset": 5, "in_temp_input": 21_500}.items():
        (folder / name).write_text(f"{text}\n")
    return folder


def source(root: Path, *channels: str, device: str = "mpu6050", rate_hz: float = 50.0) -> IioSource:
    return IioSource(kind="iio", device=device, channels=channels, rate_hz=rate_hz, folder=str(root))


class Clock:
    """A clock that only sleeping moves. play: called before each reading with its number. late: the sleeps that are
    too long by a second."""

    def __init__(self, folder: Path, late: tuple[int, ...] = ()):
        self.now, self.sleeps, self.folder, self.late = 100.0, 0, folder, late

    def sleep(self, seconds: float) -> None:
        self.now += seconds + (1.0 if self.sleeps in self.late else 0.0)
        for axis, value in zip("xy", RAW[self.sleeps % len(RAW)], strict=True):
            (self.folder / f"in_accel_{axis}_raw").write_text(f"{value}\n")
        self.sleeps += 1


def feed_of(made: IioSource, clock: Clock) -> IioFeed:
    return IioFeed(made, lambda: clock.now, lambda: clock.now, clock.sleep)


def test_the_samples_are_those_of_a_file_of_the_same_readings(tmp_path: Path) -> None:
    folder = sensor(tmp_path / "iio")
    clock = Clock(folder)
    feed = feed_of(source(tmp_path / "iio", "accel_x", "accel_y"), clock)
    items: list[Item] = []
    while clock.sleeps < len(RAW):
        items += feed.read(0.05) or []
    feed.close()
    table = [f"{float(x) * SCALE!r},{(float(y) + 5) * SCALE!r}\n" for x, y in RAW[:clock.sleeps].tolist()]
    (tmp_path / "r.csv").write_text("x,y\n" + "".join(table))
    place, _ = sensors.home(tmp_path / "d", (
        f'[[source]]\nkind = "iio"\ndevice = "iio:device0"\nchannels = ["accel_x", "accel_y"]\nrate_hz = 50\n'
        f'folder = "{tmp_path / "iio"}"\n'
    ))
    made = sensors.made_of(place, items)
    wanted = unlabelled.load(tmp_path / "r.csv", sensors.WINDOWS)
    assert len(made) >= len(wanted) == 5
    assert sensors.bits(made[:5]) == wanted.tobytes()
    settings = settings_of(place)
    run_sources.open_feed(settings.source[0], "iio", place, settings, sensors.WINDOWS).close()


def test_readings_are_a_period_apart_and_those_that_were_missed_are_said(tmp_path: Path) -> None:
    clock = Clock(sensor(tmp_path), late=(7,))
    items = feed_of(source(tmp_path, "accel_x"), clock).read(2.0) or []
    assert [type(one).__name__ for one in items] == ["Readings", "Lost", "Readings"]
    first, lost, last = items
    assert isinstance(first, Readings)
    np.testing.assert_allclose(np.diff(first.time), 0.02)
    assert isinstance(lost, Lost)
    assert "the board was busy" in lost.why
    assert isinstance(last, Readings)
    assert last.time[0] - first.time[-1] > 1


def test_a_slow_sensor_does_not_keep_the_processor_busy(tmp_path: Path) -> None:
    clock = Clock(sensor(tmp_path))
    feed = feed_of(source(tmp_path, "accel_x", rate_hz=0.1), clock)
    found = [feed.read(0.5) for _ in range(40)]
    assert sum(len(one or ()) for one in found) == 2
    assert clock.sleeps < 50


def test_a_value_that_the_kernel_computed_is_read_as_it_is(tmp_path: Path) -> None:
    sensor(tmp_path)
    (item,) = feed_of(source(tmp_path, "temp"), Clock(tmp_path / "iio:device0")).read(0.01) or []
    assert isinstance(item, Readings)
    assert item.values.tolist() == [[21_500.0]]


def test_a_channel_or_a_sensor_that_is_not_there_is_named(tmp_path: Path) -> None:
    sensor(tmp_path)
    with pytest.raises(SourceError, match="has no channel 'accel_z'; expected one of accel_x, accel_y, temp"):
        IioFeed(source(tmp_path, "accel_z"))
    with pytest.raises(SourceError, match=r"no sensor 'bme280'; expected iio:device0 \(mpu6050\)"):
        IioFeed(source(tmp_path, "accel_x", device="bme280"))


def test_a_board_without_sensors_says_what_to_do(tmp_path: Path) -> None:
    with pytest.raises(SourceError, match="no sensor 'mpu6050'; expected one of the kernel's\nhint: an overlay loads"):
        IioFeed(source(tmp_path / "none", "accel_x"))


def test_a_channel_that_fails_is_named(tmp_path: Path) -> None:
    folder = sensor(tmp_path)
    feed = IioFeed(source(tmp_path, "accel_x"))
    (folder / "in_accel_x_raw").write_text("busy")
    with pytest.raises(SourceError, match="channel accel_x cannot be read: it is not a number"):
        feed.read(0.1)
    feed.close()
