"""``edge-agent`` from its first line: a plain ``predict`` answers without the command line's libraries, which take
longer to load than the model; everything else, what is wrong and ``--help`` too, is ``edge_agent.cli``'s.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple


class Asked(NamedTuple):
    """A plain ``predict``."""

    inputs: Path
    home: Path
    as_json: bool


def plain(arguments: Sequence[str]) -> Asked | None:
    """``predict INPUT [--home HOME] [--json]``, or None for anything else."""
    if list(arguments[:1]) != ["predict"]:
        return None
    home, as_json, inputs, rest = os.environ.get("METAFLEET_HOME") or ".", False, [], iter(arguments[1:])
    for argument in rest:
        if argument == "--json":
            as_json = True
        elif argument == "--home" or argument.startswith("--home="):
            home = argument.partition("=")[2] or next(rest, "")
        elif argument.startswith("-"):
            return None
        else:
            inputs.append(argument)
    return Asked(Path(inputs[0]), Path(home), as_json) if len(inputs) == 1 and home else None


def main() -> None:
    asked = plain(sys.argv[1:])
    if asked is None:
        from edge_agent import cli

        return cli.main()
    from edge_agent import commands
    from fleet_core import runtime

    runtime.guarded(lambda: commands.predict(*asked))


if __name__ == "__main__":
    main()
