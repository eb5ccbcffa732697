"""docs/first-fleet.md: its commands and options exist, and the output it shows is what they printed in the strangers'
benchmark, shortened at "…"."""

from __future__ import annotations

import json
import re
import shlex
from typing import Any

import pytest
import typer.main

from cloud_server.commands import cli as operator_cli
from edge_agent.commands import cli as device_cli
from tests.support.paths import ROOT

PAGE = (ROOT / "docs" / "first-fleet.md").read_text(encoding="utf-8")
PROGRAMS: dict[str, Any] = {"metafleet": typer.main.get_command(operator_cli.app), "edge-agent": device_cli.parser()}
BLOCKS = re.findall(r"^```console\n(.*?)^```$", PAGE, re.MULTILINE | re.DOTALL)
SHOWN = [line.removeprefix("$ ").partition("  #")[0] for block in BLOCKS for line in block.splitlines()
         if line.startswith("$ ")]
NAMED = [*SHOWN, *re.findall(r"`((?:metafleet|edge-agent) [^`]+)`", PAGE)]
SAID = [note for notes in json.loads((ROOT / "benchmarks/own_data/transcript.json").read_text()).values()
        for note in notes]


def parsed(command: str) -> tuple[list[str], list[str], list[str]]:
    """(program and command, options, options that the command has)."""
    words = shlex.split(command)
    found, path = PROGRAMS[words[0]], words[:1]
    for word in words[1:]:
        if word not in getattr(found, "commands", {}):
            break
        found = found.commands[word]
        path.append(word)
    assert not getattr(found, "commands", {}), f"{command}: no such command"
    known = list(found._option_string_actions) if words[0] == "edge-agent" else [
        name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)]
    return path, [word for word in words if word.startswith("--")], known


@pytest.mark.parametrize("command", [each for each in dict.fromkeys(NAMED) if each.split()[0] in PROGRAMS])
def test_a_command_of_the_page_exists_with_its_options(command: str) -> None:
    path, options, known = parsed(command)
    assert len(path) > 1, command
    assert set(options) <= set(known), command


def output_of(command: str) -> list[str]:
    """The recorded output of this command; if it was not recorded, of the command with other options."""
    path = parsed(command)[0] if command.split()[0] in PROGRAMS else ["POST"]  # curl
    notes = [note for note in SAID if note["command"] == command] or [
        note for note in SAID if note["command"].split()[: len(path)] == path]
    return [" ".join(line.split()) for note in notes for line in (note["stdout"] + note["stderr"]).splitlines()]


def shown() -> list[tuple[str, str]]:
    """(command, a line of output that the page shows for it)."""
    found, command = [], ""
    for line in (line for block in BLOCKS for line in block.splitlines()):
        if line.startswith("$ "):
            command = line.removeprefix("$ ").partition("  #")[0]
        elif line.strip(" …"):
            found.append((command, " ".join(line.split())))
    return found


def test_the_output_on_the_page_is_the_recorded_output() -> None:
    assert len(shown()) > 40
    for command, line in shown():
        pattern = re.compile(".*".join(re.escape(part.strip()) for part in line.split("…")))
        assert any(pattern.fullmatch(said) for said in output_of(command)), f"{command}: {line}"
