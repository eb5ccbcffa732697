"""The size of a device's package by board, with and without torch, and of what a device had before.

    python -m benchmarks.arm64.sizes        needs an index of packages; writes sizes.json and the page's table

Nothing is emulated: uv picks the wheels of the board's Python and processor and unpacks them here. *Before* is a device
without torch with the libraries of the operator's command line, and all that onnxruntime and cffi ask for.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from dataclasses import replace
from pathlib import Path
from typing import Any

from benchmarks import markdown
from firmware_profiles.package import agent_wheel, board_needs, program
from firmware_profiles.package.board_needs import Machine
from fleet_core.base import storage
from fleet_core.board import catalogue

OUT = Path(__file__).with_name("sizes.json")
BOARDS = ("raspberry-pi-zero-2-w", "raspberry-pi-4b", "raspberry-pi-5")
BEFORE = ("typer>=0.15", "rich>=13")
MIB = 2**20


def measured(board: str) -> dict[str, Any]:
    """{package: its MiB and parts} of one board."""
    machine = board_needs.of(catalogue.load(board), engine="torch")
    found = {"before, without torch": before(machine)}
    for name, torch in (("without torch", ""), ("with torch", machine.torch)):
        made = program.make(replace(machine, torch=torch), say=lambda line: None)
        found[name] = {"packed_mib": made.size_bytes / MIB, "installed_mib": made.installed_bytes / MIB,
                       "parts": {part.name: [part.version, part.size_bytes / MIB] for part in made.parts}}
    return {"python": machine.python, "packages": found}


def before(machine: Machine) -> dict[str, Any]:
    """As ``measured``, for the packages that a device without torch had before; nothing is packed."""
    with tempfile.TemporaryDirectory() as folder:
        lib, wheel = Path(folder) / "lib", agent_wheel.make(Path(folder))
        pin = f"onnxruntime=={machine.pins['onnxruntime']}"
        subprocess.run(
            [program.uv(), "pip", "install", "--quiet", "--target", str(lib), "--link-mode", "copy", "--python",
             sys.executable, "--python-platform", machine.platform, "--python-version", machine.python,
             "--only-binary", ":all:", f"metafleet @ {wheel.path.as_uri()}", pin, *BEFORE],
            check=True, cwd=folder,
        )  # fmt: skip
        parts = {part.name: [part.version, part.size_bytes / MIB] for part in program._parts(lib)}
    return {"packed_mib": None, "installed_mib": sum(size for _, size in parts.values()), "parts": parts}


def table() -> str:
    """One row for each package of each board."""
    told: dict[str, Any] = json.loads(OUT.read_text())
    rows = [
        (board, each["python"], name, "" if sizes["packed_mib"] is None else f"{sizes['packed_mib']:.0f}",
         f"{sizes['installed_mib']:.0f}", ", ".join(
             f"{part} {mib:.0f}" for part, (_, mib) in sorted(sizes["parts"].items(), key=lambda one: -one[1][1])[:4]))
        for board, each in told.items() for name, sizes in each["packages"].items()
    ]  # fmt: skip
    return markdown.table(("board", "Python", "package", "packed, MiB", "installed, MiB", "its largest, MiB"), rows)


def main() -> None:
    from benchmarks.arm64 import prove

    storage.write_json(OUT, {board: measured(board) for board in BOARDS})
    prove.fill_page()


if __name__ == "__main__":
    main()
