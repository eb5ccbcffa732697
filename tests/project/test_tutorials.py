"""docs/tutorials: every command of a page runs, in order, on recorded input."""

from __future__ import annotations

import json
import shlex
from pathlib import Path

import pytest

from benchmarks.own_data import tutorial
from benchmarks.own_data.commands import Commands
from tests.project.test_first_fleet import PROGRAMS, parsed
from tests.support import sounds

PAGES = sorted(tutorial.PAGES.glob("*.md"))
SHORT: dict[tuple[str, ...], tuple[str, ...]] = {
    ("metafleet", "init"): ("--no-trial", "--rounds", "2"), ("edge-agent", "personalize"): ("--json",),
}
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
