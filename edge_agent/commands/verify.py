"""``edge-agent verify``: checks flashed files against this device's copy of the fleet's key."""

from __future__ import annotations

import sys
from pathlib import Path

from edge_agent.device.signed_program import check_installed, signed_text, verifier_of
from fleet_core.base import schema, terminal


def command(path: Path, key: Path, as_json: bool) -> None:
    """path: the folder of a program, or a signed file, whose text is printed. Raises FleetError unless the key has
    signed it and every file is as it was signed."""
    verifier = verifier_of(key)
    if path.is_dir():
        statement = check_installed(path, verifier)
        if as_json:
            return terminal.show(schema.plain(statement))
        return print(f"{statement.version} for Python {statement.python} on {statement.arch}: every file is as the "
                     f"fleet {statement.fleet} signed it, key {verifier.id}")
    text = signed_text(path, verifier).decode("ascii", "replace")
    if as_json:
        return terminal.show({"key": verifier.id, "text": text})
    sys.stdout.write(text)
