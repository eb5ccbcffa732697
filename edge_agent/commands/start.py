"""The entry point of ``edge-agent``.

A plain ``predict`` or ``personalize`` is parsed here, without the libraries of the command line, which take longer to
load than the model, and more memory. Everything else, errors and ``--help`` included, is left to
``edge_agent.commands.cli``.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Predict(NamedTuple):
    inputs: Path
    home: Path
    as_json: bool


class Personalize(NamedTuple):
    home: Path
    as_json: bool
    by: str | None
    steps: int | None
    rate: float | None


OPTIONS = {"predict": ("--home",), "personalize": ("--home", "--by", "--steps", "--rate")}
"""The options with a value of each command."""


def parse(arguments: Sequence[str]) -> Predict | Personalize | None:
    """``predict INPUT`` or ``personalize`` with known options; None for anything else."""
    split = _split(arguments)
    if split is None:
        return None
    command, options, positional = split
    home, as_json = Path(options.get("--home") or os.environ.get("METAFLEET_HOME") or "."), "--json" in options
    if command == "predict":
        return Predict(Path(positional[0]), home, as_json) if len(positional) == 1 else None
    try:
        steps, rate = options.get("--steps"), options.get("--rate")
        numbers = None if steps is None else int(steps), None if rate is None else float(rate)
    except ValueError:
        return None
    return None if positional else Personalize(home, as_json, options.get("--by"), *numbers)


def _split(arguments: Sequence[str]) -> tuple[str, dict[str, str], list[str]] | None:
    """(command, options by name, positional arguments)."""
    options, positional, rest = dict[str, str](), list[str](), iter(arguments[1:])
    known = OPTIONS.get(arguments[0]) if arguments else None
    if known is None:
        return None
    for argument in rest:
        name, _, value = argument.partition("=")
        if argument == "--json":
            options[name] = ""
        elif name in known:
            options[name] = value or next(rest, "")
            if not options[name]:
                return None
        elif argument.startswith("-"):
            return None
        else:
            positional.append(argument)
    return arguments[0], options, positional


def main() -> None:
    command = parse(sys.argv[1:])
    if command is None:
        from edge_agent.commands import cli

        return cli.main()
    from edge_agent.commands import device_commands
    from fleet_core.base import processes

    if isinstance(command, Predict):
        return processes.guarded(lambda: device_commands.predict(*command))
    processes.guarded(lambda: device_commands.personalize(*command))


if __name__ == "__main__":
    main()
