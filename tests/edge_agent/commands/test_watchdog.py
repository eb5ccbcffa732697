"""What the agent reports to systemd, received at a socket of the same kind."""

from __future__ import annotations

import os
import socket

import pytest

from edge_agent.commands.watchdog import Watchdog


@pytest.fixture
def ear(tmp_path):
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as channel:
        channel.bind(str(tmp_path / "notify"))
        channel.setblocking(False)
        yield channel


def heard(ear) -> list[str]:
    found = []
    while True:
        try:
            found.append(ear.recv(100).decode())
        except BlockingIOError:
            return found


def test_systemd_is_notified_that_the_agent_is_ready_and_alive_four_times_per_timeout(ear):
    environ = {"NOTIFY_SOCKET": ear.getsockname(), "WATCHDOG_USEC": "8000000", "WATCHDOG_PID": str(os.getpid())}
    now = [100.0]
    watchdog = Watchdog(environ, lambda: now[0])
    watchdog.ready()
    stopped = watchdog.watching(lambda: now[0] > 107)
    turns = []
    for now[0] in (100.0, 101.9, 102.0, 103.9, 104.1, 107.5):
        turns.append(stopped())
    assert heard(ear) == ["READY=1", "WATCHDOG=1", "WATCHDOG=1", "WATCHDOG=1", "WATCHDOG=1"]
    assert turns == [False] * 5 + [True]


def test_child_processes_do_not_notify_systemd(ear):
    environ = {"NOTIFY_SOCKET": ear.getsockname(), "WATCHDOG_USEC": "8000000", "OTHER": "stays"}
    Watchdog(environ)
    assert environ == {"OTHER": "stays"}


def test_a_watchdog_for_another_process_is_ignored(ear):
    environ = {"NOTIFY_SOCKET": ear.getsockname(), "WATCHDOG_USEC": "8000000", "WATCHDOG_PID": "1"}
    Watchdog(environ).alive()
    assert heard(ear) == []


def test_without_systemd_and_after_it_has_gone_nothing_happens(tmp_path):
    Watchdog({}).ready()
    Watchdog({"NOTIFY_SOCKET": str(tmp_path / "gone")}).ready()
