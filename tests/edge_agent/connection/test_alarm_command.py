"""The command on an alarm: what it gets, how often it runs, and what happens when it fails or hangs."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from edge_agent.connection.alarm_command import AlarmCommand
from fleet_core.board.device_settings import Alarm, Identity, Settings
from fleet_core.protocol.device_messages import Answer

WRITES = ("sh", "-c", "cat >> heard")
QUIET = Answer(outputs=("score",), values=((0.1,), (0.2,)), threshold=0.5, alarms=(False, False), round=3)
LOUD = replace(QUIET, values=((0.1,), (0.7,)), alarms=(False, True))


def command(home: Path, log: list[str], words: tuple[str, ...] = WRITES, **more: Any) -> AlarmCommand:
    settings = Settings(Identity("d0", "t", "0" * 64), alarm=Alarm(words, every_s=10.0))
    return AlarmCommand(home, settings, log.append, **more)


def heard(home: Path) -> list[dict[str, Any]]:
    text = (home / "heard").read_text() if (home / "heard").exists() else ""
    return [json.loads(one + "}") for one in text.split("}")[:-1]]


def test_it_gets_the_sample_with_the_highest_score_and_runs_at_most_once_in_every_s(tmp_path: Path) -> None:
    now, log = [100.0], list[str]()
    hears = command(tmp_path, log, clock=lambda: now[0])

    def hear(answer: Answer, sample: str = "") -> None:
        hears(answer, sample)
        hears.join(30.0)

    hear(QUIET)
    assert heard(tmp_path) == []
    hear(LOUD, "18a3")
    assert heard(tmp_path) == [{"fleet": "t", "device": "d0", "time": 100.0, "sample": "18a3", "score": 0.7,
                                "threshold": 0.5, "alarms": 1, "round": 3}]
    now[0] = 109.9
    hear(LOUD)
    assert len(heard(tmp_path)) == 1
    now[0] = 110.0
    hear(LOUD)
    second = heard(tmp_path)[1]
    assert (second["alarms"], second["sample"]) == (2, None), "the alarm that was not told is counted"
    now[0] = 5.0  # the clock was set back
    hear(LOUD)
    assert len(heard(tmp_path)) == 3
    assert log == []


def test_nothing_waits_for_it_and_one_runs_at_a_time(tmp_path: Path) -> None:
    now, log = [100.0], list[str]()
    hears = command(tmp_path, log, ("sh", "-c", "until [ -e go ]; do sleep 0.02; done; cat >> heard"),
                    clock=lambda: now[0])
    began = time.monotonic()
    for _ in range(50):
        hears(LOUD)
        now[0] += 100.0
    assert time.monotonic() - began < 5
    assert heard(tmp_path) == []
    (tmp_path / "go").touch()
    hears.join(30.0)
    assert [one["alarms"] for one in heard(tmp_path)] == [1]
    hears(LOUD)
    hears.join(30.0)
    assert [one["alarms"] for one in heard(tmp_path)] == [1, 50]


def test_a_command_that_fails_hangs_or_is_missing_is_told_in_the_log(tmp_path: Path) -> None:
    log: list[str] = []
    for words, timeout_s in ((("sh", "-c", "echo no siren >&2; exit 3"), 30.0), (("sleep", "60"), 0.1),
                             (("no-such-program",), 30.0)):
        hears = command(tmp_path, log, words, timeout_s=timeout_s)
        hears(LOUD)
        hears.join(30.0)
    assert log[0] == "the command for alarms failed: sh: exit code 3: no siren"
    assert "timed out" in log[1]
    assert "no-such-program" in log[2]
