"""The parser of the command line: argparse, with errors that say what was meant.

argparse loads in a few milliseconds and is in the standard library: a device has no other library for it.
"""

from __future__ import annotations

import argparse
import os
from argparse import Namespace
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any, NoReturn, TypeVar

from fleet_core.base.errors import ConfigError

Number = TypeVar("Number", int, float)
Action = Callable[[Namespace], object]

EXAMPLES = {
    "run": "edge-agent run --home pi-07",
    "enroll": "edge-agent enroll pi-07.token --home pi-07",
    "serve": "edge-agent serve --home pi-07 --port 8080",
    "status": "edge-agent status --home pi-07",
    "install": "edge-agent install greenhouse.bundle --home pi-07",
    "personalize": "edge-agent personalize --home pi-07 --by auto",
    "predict": "edge-agent predict sample.npy --home pi-07",
    "review": "edge-agent review --home pi-07 --limit 5",
    "verify": "edge-agent verify",
    "samples add": "edge-agent samples add idle.csv --label idle --home pi-07",
    "samples list": "edge-agent samples list --home pi-07",
    "samples drop": "edge-agent samples drop --last 1 --home pi-07",
    "sources": "edge-agent sources --try 5 --home pi-07",
    "energy": "edge-agent energy --home pi-07",
    "energy calibrate": "edge-agent energy calibrate --meter-watts 3.1 6.1 --home pi-07",
    "doctor": "edge-agent doctor --home pi-07",
}
"""The example printed below the options of each command."""


class Parser(argparse.ArgumentParser):
    """A program or one of its commands; ``action`` is what the chosen command does. commands: the parsers of its own
    commands, by name."""

    def __init__(self, prog: str, description: str, **how: Any):
        super().__init__(prog, description=description, allow_abbrev=False, **how)
        self.commands: dict[str, Parser] = {}
        self._group: argparse._SubParsersAction[Parser] | None = None
        self.set_defaults(action=self._show_help)

    def command(self, name: str, description: str, action: Action | None = None) -> Parser:
        """Adds a command. action: None for a command that only groups other commands; it shows its help (exit code
        2)."""
        if self._group is None:
            self._group = self.add_subparsers(title="commands", metavar="COMMAND", prog=self.prog)
        prog = f"{self.prog} {name}"
        example = EXAMPLES.get(prog.partition(" ")[2])
        made = self._group.add_parser(name, prog=prog, help=description, description=description,
                                      epilog=example and f"Example: {example}")
        if action is not None:
            made.set_defaults(action=action)
        self.commands[name] = made
        return made

    def run(self, arguments: Sequence[str]) -> None:
        """Does what the arguments ask for. Raises ConfigError for arguments that are wrong."""
        self._check_names(arguments)
        given = self.parse_args(arguments)
        given.action(given)

    def error(self, message: str) -> NoReturn:
        """Raises ConfigError in place of ending the process."""
        raise ConfigError(message, where=self.prog, hint=f"{self.prog} --help")

    def _check_names(self, arguments: Sequence[str]) -> None:
        """Raises ConfigError for an unknown command or option; the message names the nearest known one."""
        parser, options = self, set(self._option_string_actions)
        for word in arguments:
            name = word.partition("=")[0]
            if word == "--":
                return
            if word in parser.commands:
                parser = parser.commands[word]
                options |= set(parser._option_string_actions)
            elif name.startswith("--") and " " not in name and name not in options:
                parser._unknown("option", name, options)
            elif not word.startswith("-") and parser.commands and parser.get_default("action") == parser._show_help:
                parser._unknown("command", word, parser.commands)

    def _unknown(self, kind: str, name: str, known: Collection[str]) -> NoReturn:
        from fleet_core.base.schema import did_you_mean

        self.error(f"there is no {kind} '{name}'{did_you_mean(name, known)}")

    def _show_help(self, given: Namespace) -> None:
        del given
        self.exit(2, self.format_help())


def within(kind: Callable[[str], Number], least: float, most: float | None = None) -> Callable[[str], Number]:
    """The type of an option that is a number between ``least`` and ``most``."""
    between = f"from {least:g}" + ("" if most is None else f" to {most:g}")

    def number(text: str) -> Number:
        try:
            value = kind(text)
        except ValueError:
            value = None
        if value is None or not least <= value <= (value if most is None else most):
            whole = "whole " if kind is int else ""
            raise argparse.ArgumentTypeError(f"'{text}' is not a {whole}number {between}")
        return value

    return number


# Options that most commands have --------------------------------------------------------------------------------------


def home(parser: Parser) -> None:
    parser.add_argument("--home", metavar="DIR", type=Path, default=os.environ.get("METAFLEET_HOME") or ".",
                        help="folder with device.toml, samples and state; default: METAFLEET_HOME, or here")


def json(parser: Parser) -> None:
    parser.add_argument("--json", dest="as_json", action="store_true", help="machine-readable output")
