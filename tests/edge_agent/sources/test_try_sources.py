"""``edge-agent sources``, and what status and doctor say of sources."""

from __future__ import annotations

import json
import os
from pathlib import Path

import numpy as np
import pytest

from edge_agent import Device
from edge_agent.commands import cli
from edge_agent.sources.run_sources import Sources
from fleet_core.board.device_settings import settings_of
from tests.support import homes, sensors, waiting
from tests.support.cli import Run, runner

TOML = '[[source]]\nkind = "command"\ncommand = ["cat", "r.csv"]\nname = "shaker"\nevery_s = 0\n'
FOLDER = '[[source]]\nkind = "folder"\npath = "in"\n'
BROKEN = '[[source]]\nkind = "command"\ncommand = ["sh", "-c", "echo no sensor >&2; exit 3"]\nname = "broken"\n'


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    monkeypatch.delenv("METAFLEET_HOME", raising=False)
    return runner(monkeypatch, capsys, "edge-agent", cli.main)


def place_of(folder: Path, toml: str) -> Path:
    place, _ = sensors.home(folder, toml)
    (place / "r.csv").write_text("ax,ay,label\n" + "".join(f"{k},{k / 4},a\n" for k in range(40)))
    (place / "in").mkdir()
    np.save(place / "in" / "a.npy", np.zeros((3, 2, 8), np.float32))
    os.utime(place / "in" / "a.npy", (1e9, 1e9))
    return place


def test_trying_shows_what_comes_beside_the_fleets_shape_and_stores_nothing(tmp_path: Path, run: Run) -> None:
    place = place_of(tmp_path / "d", TOML + FOLDER)
    shown = json.loads(run("sources", "--home", place, "--try", "1", "--json").out)
    first, second = shown
    assert (first["name"], first["readings"], first["channels"], first["samples"]) == ("shaker", 40, 2, 5)
    assert first["first"] == [[0, 0], [1, 0.25], [2, 0.5]]
    assert first["shape"] == first["fleet_shape"] == [2, 8]
    assert (first["label"], first["lost"], first["error"]) == ("a", 0, "")
    assert (second["name"], second["whole"], second["samples"]) == ("folder", 3, 3)
    assert Device(place).unlabelled() == []
    assert not list(place.glob("sources*"))
    text = run("sources", "--home", place, "--try", "0.5")
    assert text.code == 0
    assert "0 0; 1 0.25; 2 0.5" in text.out
    assert "shaker: listening for 0.5 s" in text.err


@pytest.mark.parametrize(("toml", "said"), [
    (BROKEN, "wrong: broken: sh: ended with exit code 3: no sensor"),
    ('[[source]]\nkind = "command"\ncommand = ["sleep", "9"]\n', "wrong: command: nothing came"),
    ('[[source]]\nkind = "command"\ncommand = ["echo", "1,2,3"]\n', "a reading has 3 channels; expected 2"),
    ('[[source]]\nkind = "iio"\ndevice = "x"\nchannels = ["a"]\nrate_hz = 5\nfolder = "/nothing"\n', "no sensor 'x'"),
])  # fmt: skip
def test_what_is_of_no_use_is_said(tmp_path: Path, run: Run, toml: str, said: str) -> None:
    found = run("sources", "--home", place_of(tmp_path / "d", toml), "--try", "0.5")
    assert said in found.out
    assert found.code == 1


def test_a_rate_that_is_not_the_sensors_is_noted(tmp_path: Path, run: Run) -> None:
    toml = ('[[source]]\nkind = "command"\nrate_hz = 50\ncommand = ["sh", "-c", '
            '"for k in 1 2 3 4; do echo $k,2; sleep 0.1; done"]\n')
    found = run("sources", "--home", place_of(tmp_path / "d", toml), "--try", "60")
    assert "readings a second came; its rate_hz is 50" in found.out


def test_what_the_agent_wrote_is_listed_and_a_failed_source_is_wrong(tmp_path: Path, run: Run) -> None:
    place = place_of(tmp_path / "d", TOML + BROKEN)
    assert [one["name"] for one in json.loads(run("sources", "--home", place, "--json").out)] == ["shaker", "broken"]
    settings = settings_of(place)
    sources = Sources(place, settings, homes.reopened(place), lambda line: None)
    with sources.on():
        waiting.until(lambda: [one.state.state for one in sources.running] == ["ended", "failed"])
    listed = run("sources", "--home", place).out.splitlines()
    assert [line.split()[:6] for line in listed[1:3]] == [
        ["shaker", "command", "ended", "40", "0", "5"], ["broken", "command", "failed", "0", "0", "0"],
    ]
    facts = json.loads(run("status", "--home", place, "--json").out)
    assert facts["source shaker"] == {"state": "ended", "kept": 0, "labelled": 5}
    assert facts["source broken"]["last_error"] == "sh: ended with exit code 3: no sensor"
    wrong = json.loads(run("doctor", "--home", place, "--json").out)["wrong"]
    assert [one["what"] for one in wrong if one["what"].startswith("source")] == ["source broken"]


def test_a_device_without_sources_says_where_they_are_named(tmp_path: Path, run: Run) -> None:
    place = place_of(tmp_path / "d", "")
    for more in ((), ("--try", "1")):
        assert "there are no sources: [[source]] tables in device.toml" in run("sources", "--home", place, *more).out
