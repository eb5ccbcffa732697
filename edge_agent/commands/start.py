"""``edge-agent`` from its first line: a plain ``predict`` or ``personalize`` does without the command line's libraries,
which take longer to load than the model, and more memory; everything else, what is wrong and ``--help`` too, is
``edge_agent.commands.cli``'s.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Predict(NamedTuple):
    """A plain ``predict``."""

    inputs: Path
    home: Path
    as_json: bool


class Personalize(NamedTuple):
    """A plain ``personalize``."""

    home: Path
    as_json: bool
    by: str | None
    steps: int | None
    rate: float | None


VALUED = {"predict": ("--home",), "personalize": ("--home", "--by", "--steps", "--rate")}


def plain(arguments: Sequence[str]) -> Predict | Personalize | None:
    """``predict INPUT`` or ``personalize``, with options that are understood; None for anything else."""
    parted = _parted(arguments)
    if parted is None:
        return None
    command, named, rest = parted
    home, as_json = Path(named.get("--home") or os.environ.get("METAFLEET_HOME") or "."), "--json" in named
    if command == "predict":
        return Predict(Path(rest[0]), home, as_json) if len(rest) == 1 else None
    try:
        steps, rate = named.get("--steps"), named.get("--rate")
        numbers = None if steps is None else int(steps), None if rate is None else float(rate)
    except ValueError:
        return None
    return None if rest else Personalize(home, as_json, named.get("--by"), *numbers)


def _parted(arguments: Sequence[str]) -> tuple[str, dict[str, str], list[str]] | None:
    """(command, options by name, the other arguments)."""
    named, others, rest = dict[str, str](), list[str](), iter(arguments[1:])
    valued = VALUED.get(arguments[0]) if arguments else None
    if valued is None:
        return None
    for argument in rest:
        name, _, value = argument.partition("=")
        if argument == "--json":
            named[name] = ""
        elif name in valued:
            named[name] = value or next(rest, "")
            if not named[name]:
                return None
        elif argument.startswith("-"):
            return None
        else:
            others.append(argument)
    return arguments[0], named, others


def main() -> None:
    asked = plain(sys.argv[1:])
    if asked is None:
        from edge_agent.commands import cli

        return cli.main()
    from edge_agent.commands import device_commands
    from fleet_core.base import processes

    if isinstance(asked, Predict):
        return processes.guarded(lambda: device_commands.predict(*asked))
    processes.guarded(lambda: device_commands.personalize(*asked))


if __name__ == "__main__":
    main()
