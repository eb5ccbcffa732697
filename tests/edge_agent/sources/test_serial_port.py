"""Readings that come over a serial port, here a pair of pseudo-terminals."""

from __future__ import annotations

import os
import termios
from pathlib import Path

import numpy as np
import pytest

from edge_agent.sources import run_sources
from edge_agent.sources.interface import Item
from edge_agent.sources.serial_port import SerialFeed
from fleet_core.base.errors import ConfigError, SourceError
from fleet_core.board.device_settings import settings_of
from fleet_core.board.source_settings import SerialSource
from fleet_core.data import unlabelled
from fleet_core.data.live import Readings
from tests.support import sensors, waiting

RECORDED = np.round(np.random.default_rng(1).normal(size=(40, 2)), 4)


def rows_in(items: list[Item]) -> int:
    return sum(len(one.time) for one in items if isinstance(one, Readings))


def test_the_samples_of_what_comes_in_pieces_are_those_of_the_file(tmp_path: Path) -> None:
    board, port = os.openpty()
    place, _ = sensors.home(tmp_path / "d", f'[[source]]\nkind = "serial"\nport = "{os.ttyname(port)}"\n')
    settings = settings_of(place)
    feed = run_sources.open_feed(settings.source[0], "serial", place, settings, sensors.WINDOWS)
    text = "".join(f"{a!r}\t{b!r}\r\n" for a, b in RECORDED.tolist())
    items: list[Item] = []
    sent = ("7.5\r\n" + text).encode()  # the first line is cut
    for begin in range(0, len(sent), 37):
        os.write(board, sent[begin : begin + 37])
        items += feed.read(0.05) or []
    waiting.until(lambda: rows_in(items) == 40, lambda: items.extend(feed.read(0.1) or []))
    feed.close()
    (tmp_path / "r.csv").write_text("ax,ay\n" + text.replace("\t", ","))
    made = sensors.made_of(place, items)
    assert sensors.bits(made) == unlabelled.load(tmp_path / "r.csv", sensors.WINDOWS).tobytes()
    os.close(board)
    os.close(port)


def test_a_port_is_raw_and_has_its_speed(tmp_path: Path) -> None:
    board, port = os.openpty()
    feed = SerialFeed(SerialSource(kind="serial", port=os.ttyname(port), baud=9600), tmp_path)
    mode = termios.tcgetattr(port)
    assert mode[4:6] == [termios.B9600] * 2
    assert not mode[3] & (termios.ECHO | termios.ICANON)
    os.write(board, b"\x03\x04\x11\n")
    assert feed.read(0.2) == [], "control characters are bytes like others, and the first line is not read"
    feed.close()
    os.close(board)
    os.close(port)


def test_a_board_that_is_pulled_out_is_said(tmp_path: Path) -> None:
    board, port = os.openpty()
    feed = SerialFeed(SerialSource(kind="serial", port=os.ttyname(port)), tmp_path)
    os.close(port)
    os.close(board)
    with pytest.raises(SourceError, match=r"cannot be read: Input/output error|is gone"):
        feed.read(1.0)
    feed.close()


@pytest.mark.parametrize(("port", "baud", "kind", "said"), [
    ("no-port", 9600, SourceError, "no-port: cannot be read: No such file.*\n.*dialout"),
    ("/dev/null", 9600, SourceError, "/dev/null: cannot be read: Inappropriate ioctl"),
    ("/dev/null", 9601, ConfigError, "no speed of 9601 baud; expected one of 50, 75.*9600, 19200"),
])  # fmt: skip
def test_what_is_no_port_is_named(tmp_path: Path, port: str, baud: int, kind: type[Exception], said: str) -> None:
    with pytest.raises(kind, match=said):
        SerialFeed(SerialSource(kind="serial", port=port, baud=baud), tmp_path)
