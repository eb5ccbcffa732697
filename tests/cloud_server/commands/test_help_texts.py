"""Every command has a section and an example with arguments and options that it has; completion for three shells."""

from __future__ import annotations

import os
import shlex
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import pytest
import typer

from cloud_server.commands import cli
from cloud_server.commands.help_texts import EXAMPLES, SECTIONS, part_for
from tests.support.waiting import PATIENCE_S


def commands(command: Any, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Any]]:
    inner = getattr(command, "commands", {})
    for name, one in inner.items():
        yield from commands(one, (*path, name))
    if not inner:
        yield " ".join(path), command


PROGRAM: Any = typer.main.get_command(cli.app)
COMMANDS = dict(commands(PROGRAM))


def test_every_command_is_in_one_section_of_the_programs_help() -> None:
    listed = [name for names in SECTIONS.values() for name in names]
    assert sorted(listed) == sorted(PROGRAM.commands)


def test_every_command_has_an_example_and_no_other_has() -> None:
    assert COMMANDS.keys() == EXAMPLES.keys()
    assert {name for name, command in COMMANDS.items() if command.epilog != f"Example: {EXAMPLES[name]}"} == set()


@pytest.mark.parametrize("name", EXAMPLES)
def test_the_words_of_an_example_are_arguments_and_options_of_its_command(name: str) -> None:
    words = shlex.split(EXAMPLES[name])
    assert words[: 1 + len(name.split())] == ["metafleet", *name.split()]
    context = COMMANDS[name].make_context(name, words[1 + len(name.split()) :], resilient_parsing=False)
    assert not context.args


@pytest.mark.slow
@pytest.mark.parametrize(("shell", "contains"), [
    ("bash", "complete -o default -F"), ("zsh", "#compdef metafleet"), ("fish", "complete --command metafleet"),
])
def test_completion_is_shown_for(shell: str, contains: str) -> None:
    program = "import sys; sys.argv[0] = 'metafleet'; from cloud_server.commands.start import main; main()"
    done = subprocess.run([sys.executable, "-c", program, "--show-completion", shell], capture_output=True, text=True,
                          timeout=PATIENCE_S, env={**os.environ, "_TYPER_COMPLETE_TEST_DISABLE_SHELL_DETECTION": "1"})
    assert done.returncode == 0, done.stderr
    assert contains in done.stdout


def help_of(program: Any, *path: str) -> str:
    context = typer.Context(program, info_name="metafleet")
    for name in path:
        program = program.commands[name]
        context = typer.Context(program, info_name=name, parent=context)
    return str(program.get_help(context))


@pytest.mark.parametrize("path", [(), *(tuple(name.split()) for name in EXAMPLES)], ids=" ".join)
def test_the_part_of_the_program_that_is_asked_for_is_as_in_the_whole(path: tuple[str, ...]) -> None:
    part: Any = typer.main.get_command(part_for(cli.app, [*path, "--help"]))
    assert help_of(part) == help_of(PROGRAM)
    assert help_of(part, *path) == help_of(PROGRAM, *path)
    assert not {name for name, one in part.commands.items() if name not in path and getattr(one, "commands", {})}
    assert len(part.commands["demo"].params) <= 1 or path == ("demo",), "its options were not converted"
