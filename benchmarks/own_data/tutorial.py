"""Follows a tutorial: runs the commands that a page of docs/tutorials shows after ``$``, as a reader would.

    METAFLEET_SHARED=FOLDER python -m benchmarks.own_data.tutorial

follows docs/tutorials/microphone.md with recordings of four speakers (spoken digits, takes 5 to 44; asked about the
takes 45 to 49; the test takes are not touched) and writes tutorial.json: commands, seconds, accuracy.
"""

from __future__ import annotations

import json
import os
import re
import shlex
import shutil
import sys
import tempfile
import time
import wave
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.own_data.commands import Commands, text
from fleet_core.base import storage

PAGES = Path(__file__).resolve().parents[2] / "docs" / "tutorials"
RESULT = Path(__file__).with_name("tutorial.json")
FILE = "spoken-digits-4speakers.npz"
BEGIN = {("metafleet", "server", "start"): ("--broker", "embedded", "--port", "0"), ("edge-agent", "run"): ()}
"""Commands that run until they are stopped, and what is added so that every machine runs the same broker."""
SAYS = {("metafleet", "server", "start"): "broker: ", ("edge-agent", "run"): " is on, "}
CLOSED = "rounds are closed"
ROUNDS_S = 900.0


def commands_of(page: Path) -> list[str]:
    """What the page's console blocks show after ``$``, in order."""
    blocks = re.findall(r"^```console\n(.*?)^```$", page.read_text(encoding="utf-8"), re.MULTILINE | re.DOTALL)
    return [line[2:].partition("  #")[0] for block in blocks for line in block.splitlines() if line.startswith("$ ")]


@dataclass(eq=False)
class Follower:
    """Runs a page's commands in a folder that has its recordings. more: command -> options that are added to it, to
    shorten it."""

    commands: Commands
    more: Mapping[tuple[str, ...], Sequence[str]] = field(default_factory=dict)
    logs: list[Path] = field(default_factory=list)
    seconds: dict[str, float] = field(default_factory=dict)

    def follow(self, page: Path) -> None:
        """Raises Failed at the first command that fails. Before the status is asked for, all rounds are closed."""
        begun = time.monotonic()
        for line in commands_of(page):
            words = shlex.split(line)
            if words[0] in ("cp", "cat"):
                self._files(*words)
                continue
            if words[:3] == ["metafleet", "server", "status"]:
                self._rounds_closed()
            start = next((name for name in BEGIN if tuple(words[: len(name)]) == name), None)
            extra = [option for name, options in self.more.items() if tuple(words[: len(name)]) == name
                     for option in options]
            if start is None:
                self.commands.done(*words, *extra)
            else:
                self.logs.append(self.commands.start(*words, *BEGIN[start], *extra)[1])
                self.commands.says(self.logs[-1], SAYS[start])
            self.seconds[line] = round(time.monotonic() - begun, 1)

    def _files(self, program: str, *words: str) -> None:
        """``cp FILE FILE``, ``cp -r FOLDER FOLDER`` and ``cat FILE >> FILE``."""
        source, to = self.commands.folder / words[-2 if program == "cp" else 0], self.commands.folder / words[-1]
        if words[0] == "-r":
            shutil.copytree(source, to)
        elif program == "cp":
            shutil.copy(source, to)
        else:
            with open(to, "a", encoding="utf-8") as file:
                file.write("\n" + source.read_text(encoding="utf-8"))

    def _rounds_closed(self) -> None:
        self.commands.until(lambda: CLOSED in text(self.logs[0]), "the last round", ROUNDS_S)
        homes = [note["command"].split()[-1] for _, _, note in self.commands.running[1:]]
        served = [self.commands.folder / home / "slots" / "serving.json" for home in homes]
        self.commands.until(lambda: all(path.exists() for path in served), "a model on each device", ROUNDS_S)


def write_digits(folder: Path) -> None:
    """``sounds/SPEAKER/DIGIT/TAKE.wav`` and ``new/SPEAKER/DIGIT-TAKE.wav``."""
    with np.load(Path(os.environ["METAFLEET_SHARED"]) / "data" / FILE, allow_pickle=False) as archive:
        held = {name: archive[name] for name in archive}
    cuts = np.split(held["audio"], held["offset"][1:-1])
    for take, who, digit, cut in zip(held["take"], held["speaker"], held["digit"], cuts, strict=True):
        if take < 5:
            continue
        path = folder / (f"sounds/{who}/{digit}/{take:02}.wav" if take < 45 else f"new/{who}/{digit}-{take:02}.wav")
        path.parent.mkdir(parents=True, exist_ok=True)
        with wave.open(str(path), "wb") as file:
            file.setnchannels(1)
            file.setsampwidth(2)
            file.setframerate(8000)
            file.writeframes(cut.astype("<i2").tobytes())


def right(commands: Commands, who: str) -> float:
    """The share of the new recordings that this speaker's device classifies correctly."""
    answer = json.loads(commands.done("edge-agent", "predict", f"new/{who}", "--home", who, "--json").stdout)
    digits = [path.name[0] for path in sorted((commands.folder / "new" / who).iterdir())]
    return float(np.mean([label == digit for label, digit in zip(answer["labels"], digits, strict=True)]))


def main() -> None:
    with tempfile.TemporaryDirectory() as place:
        commands = Commands(Path(place))
        follower = Follower(commands)
        write_digits(Path(place))
        try:
            follower.follow(PAGES / "microphone.md")
            found: dict[str, Any] = {
                "commands": commands_of(PAGES / "microphone.md"), "seconds_at_the_end_of": follower.seconds,
                "right_of_50": {who: right(commands, who) for who in ("george", "jackson", "nicolas", "yweweler")},
                "output": {note["command"]: note["stdout"] for note in commands.noted if note.get("stdout")},
            }
        finally:
            commands.end()
    storage.write_json(RESULT, found)
    print(json.dumps(found, indent=1), file=sys.stderr)


if __name__ == "__main__":
    main()
