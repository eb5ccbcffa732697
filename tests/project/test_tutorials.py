"""docs/tutorials: every command of a page runs, in order, on recorded input."""

from __future__ import annotations

import json
import re
import shlex
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from benchmarks.own_data import tutorial
from benchmarks.own_data.commands import Commands
from edge_agent.sources.run_sources import states
from tests.project.test_first_fleet import PROGRAMS, parsed
from tests.support import sounds

PAGES = sorted(tutorial.PAGES.glob("*.md"))
SHORT: dict[tuple[str, ...], tuple[str, ...]] = {
    ("metafleet", "init"): ("--no-trial", "--rounds", "2"), ("edge-agent", "personalize"): ("--json",),
}
STATES = {"idle": 0.0, "runs": 4.0, "rattle": 11.0}
PEOPLE = ("george", "jackson", "nicolas", "yweweler")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_every_command_of_a_page_exists_with_its_options(page: Path) -> None:
    commands = [line for line in tutorial.commands_of(page) if shlex.split(line)[0] in PROGRAMS]
    assert len(commands) > 5
    for command in commands:
        path, options, known = parsed(command)
        assert len(path) > 1, command
        assert set(options) <= set(known), command


@pytest.mark.slow
def test_the_microphones_page_runs_on_generated_tones(tmp_path: Path) -> None:
    for number, who in enumerate(PEOPLE):
        for digit in range(3):
            for take in range(8):
                tone = sounds.tone(300 * (digit + 1) + 20 * number, 0.5, 100 * number + 10 * digit + take)
                sounds.write(tmp_path / "sounds" / who / str(digit) / f"{take:02}.wav", tone)
    for take in (45, 46, 47):
        sounds.write(tmp_path / "new" / "jackson" / f"7-{take}.wav", sounds.tone(600, 0.5, take))
    page = tmp_path / "microphone.md"
    text = (tutorial.PAGES / page.name).read_text(encoding="utf-8")
    page.write_text(text.replace("--label 7", "--label 1"), encoding="utf-8")
    commands = Commands(tmp_path)
    try:
        tutorial.Follower(commands, SHORT).follow(page)
    finally:
        commands.end()
    said = {note["command"]: note.get("stdout", "") for note in commands.noted}
    assert "2 of 2 rounds closed" in said["metafleet server status digits"]
    rows = said["edge-agent predict new/jackson --home jackson"].splitlines()
    assert [row.split()[1] for row in rows[1:]] == ["1"] * 3
    assert "1 samples of class 1 added" in said["edge-agent samples add new/jackson/7-47.wav --label 1 --home jackson"]
    assert json.loads(said["edge-agent personalize --home jackson --json"])["personalization"] == "proto"


def followed(folder: Path, page: str, until: Callable[[], object] = lambda: True) -> dict[str, str]:
    """{command: what it printed} of a page whose first table is that of the sensor. until: waited for at the end."""
    shown = re.search(r"`(\w+\.toml)`[^`]*\n```toml\n(.*?)^```$",
                      (tutorial.PAGES / page).read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    assert shown is not None
    (folder / shown[1]).write_text(shown[2], encoding="utf-8")
    commands = Commands(folder)
    try:
        tutorial.Follower(commands, SHORT).follow(tutorial.PAGES / page)
        commands.until(until, "what the sensor gives")
    finally:
        commands.end()
    return {note["command"]: note.get("stdout", "") for note in commands.noted}


def movements(path: Path, machines: dict[str, int], seconds: float, *, labelled: bool = True) -> None:
    """A recording of these machines, by seed, in each state; without labels: of the first state alone."""
    lines = ["client,time,label,ax,ay,az" if labelled else "time,ax,ay,az"]
    for machine, seed in machines.items():
        rng, time = np.random.default_rng(seed), np.arange(round(50 * seconds)) / 50
        for number, (state, hz) in enumerate(list(STATES.items())[: len(STATES) if labelled else 1]):
            xyz = 0.05 * rng.normal(size=(len(time), 3)) + np.array([0.0, 0.0, 9.81])
            xyz += np.sin(2 * np.pi * hz * time)[:, None] * np.array([0.8, 0.3, 0.1])
            for when, row in zip(time + number * seconds, np.round(xyz, 4).tolist(), strict=True):
                about = f"{machine},{when:.2f},{state}" if labelled else f"{when:.2f}"
                lines.append(about + "," + ",".join(map(repr, row)))
    path.write_text("\n".join(lines) + "\n", encoding="utf-8")


@pytest.mark.slow
def test_the_accelerometers_page_runs_on_made_up_recordings(tmp_path: Path) -> None:
    movements(tmp_path / "readings.csv", {"press": 0, "saw": 1}, 30)
    movements(tmp_path / "press.csv", {"press": 2}, 40)
    movements(tmp_path / "saw.csv", {"saw": 3}, 40)
    for seed, machine in enumerate(("press", "saw"), 4):
        movements(tmp_path / f"{machine}-live.csv", {machine: seed}, 10, labelled=False)
    said = followed(tmp_path, "accelerometer.md")
    windows = (500 - 64) // 32 + 1
    tried = said["edge-agent sources --try 2 --home press"]
    assert "[3, 64], [3, 64]" in tried
    assert f"  {windows} " in tried
    listed = said["edge-agent sources --home press"].splitlines()[1].split()
    assert listed[:6] == ["command", "command", "ended", "500", str(windows), "0"]
    reviewed = said["edge-agent review --home press"].splitlines()
    assert len(reviewed) == 1 + windows
    assert json.loads(said["edge-agent personalize --home press --json"])["samples"] > 0


@pytest.mark.slow
def test_the_cameras_page_runs_on_made_up_images(tmp_path: Path) -> None:
    rng = np.random.default_rng(0)

    def image(path: Path, filled: float) -> None:
        pixels = rng.integers(0, 40, (40, 56), dtype=np.uint8)
        pixels[round(40 * (1 - filled)) :] += 180
        path.parent.mkdir(parents=True, exist_ok=True)
        Image.fromarray(pixels).save(path)

    for folder in ("photos", "photos-left", "photos-right"):
        for label, filled in {"empty": 0.05, "half": 0.5, "full": 0.95}.items():
            for take in range(12):
                image(tmp_path / folder / label / f"{take:03}.png", filled)
    for number in range(10):
        image(tmp_path / "new" / f"{number}.png", 0.5)
    said = followed(tmp_path, "camera.md", lambda: states(tmp_path / "left")["shelf"].kept == 10)
    assert said["edge-agent sources --try 3 --home left"].splitlines()[1].split()[:2] == ["shelf", "folder"]
    assert "[1, 24, 24], [1, 24, 24]" in said["edge-agent sources --try 3 --home left"]
    assert said["edge-agent sources --home left"].splitlines()[1].split()[:3] == ["shelf", "folder", "runs"]
    assert len(said["edge-agent review --home left"].splitlines()) == 11
    assert said["edge-agent predict new/9.png --home left"].splitlines()[1].split()[1] in ("empty", "half", "full")
