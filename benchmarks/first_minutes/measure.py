"""The first ten minutes of a new user, timed, with nothing installed; and what each way of installing downloads.

    python -m benchmarks.first_minutes.measure              # writes benchmarks/first_minutes/result.json

A fresh clone in an empty folder, a home of its own, pip's cache empty, and PATH with Python, coreutils and git
alone. What is downloaded is what ``pip download`` gets at the pinned versions, in bytes; how long that
takes depends on the network, so the seconds of installing are those of this machine and its index.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from fleet_core.base import storage
from tests.support.bare import bare_path
from tests.support.paths import ROOT

RESULT = Path(__file__).with_name("result.json")
WAYS = {
    "a device, without torch": "", "an aggregator alone": "server,console,monitor",
    "an operator without torch": "aggregator", "an operator": "operator",
    "an operator with private updates": "operator,privacy", "a developer": "operator,dev",
}
DEMO = ("demo", "--devices", "4", "--rounds", "10", "--no-baseline", "--out", "demo-run")


def environment(folder: Path) -> dict[str, str]:
    """The environment of a user who has nothing; this machine's pip settings stay, its cache does not."""
    programs = folder / "programs"
    programs.mkdir()
    path = bare_path(programs)
    for name in ("git", "sh"):
        if found := shutil.which(name):
            (programs / name).symlink_to(found)
    home = folder / "home"
    home.mkdir()
    kept = {name: value for name, value in os.environ.items() if name.startswith(("PIP_", "SSL_", "LANG"))}
    return {**kept, "PATH": path, "HOME": str(home), "PIP_CACHE_DIR": str(folder / "cache"), "TMPDIR": str(folder)}


def timed(command: list[str], where: Path, environ: Mapping[str, str]) -> float:
    """Seconds that the command takes."""
    began = time.monotonic()
    subprocess.run(command, cwd=where, env=dict(environ), check=True, stdout=sys.stderr)
    return round(time.monotonic() - began, 1)


def minutes(folder: Path) -> dict[str, Any]:
    """The seconds from a clone to a table of results."""
    environ, here = environment(folder), folder / "metafleet"
    steps = {"clone": timed(["git", "clone", "--quiet", "--no-hardlinks", str(ROOT), str(here)], folder, environ)}
    python = str(Path(environ["PATH"]) / "python3")
    steps["install for the demo"] = timed([python, "scripts/prepare_venv.py", "demo"], here, environ)
    steps[f"metafleet {' '.join(DEMO)}"] = timed([str(here / ".venv/bin/metafleet"), *DEMO], here, environ)
    installed = sum(file.stat().st_size for file in (here / ".venv").rglob("*") if file.is_file())
    return {"seconds": steps, "installed_bytes": installed, "load": [round(one, 1) for one in os.getloadavg()]}


def downloads(extras: str, folder: Path) -> dict[str, Any]:
    """What ``pip download`` gets for the project with these extras."""
    target = f"{ROOT}[{extras}]" if extras else str(ROOT)
    subprocess.run([sys.executable, "-m", "pip", "download", "--quiet", "--no-cache-dir", "--constraint",
                    str(ROOT / "requirements/constraints.txt"), "--dest", str(folder), target], check=True,
                   stdout=sys.stderr)
    files = {file.name: file.stat().st_size for file in folder.iterdir() if not file.name.startswith("metafleet-")}
    largest = sorted(files.items(), key=lambda one: -one[1])[:6]
    return {"extras": extras, "files": len(files), "bytes": sum(files.values()), "largest": dict(largest)}


def note(part: str, found: Mapping[str, Any]) -> None:
    """Puts what was found into the result; the other parts stay."""
    result = json.loads(RESULT.read_text()) if RESULT.exists() else {}
    kept = {**result.get(part, {}), **found}
    machine = {"python": platform.python_version(), "system": platform.system(), "processor": platform.machine(),
               "cores": os.cpu_count()}
    storage.write_json(RESULT, {**result, part: kept, "machine": machine})


def main() -> None:
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--only", choices=("minutes", "downloads"), help="one of the two; the other stays")
    only = arguments.parse_args().only
    with tempfile.TemporaryDirectory(prefix="first-") as name:
        if only != "minutes":
            for way, extras in WAYS.items():
                folder = Path(name) / way.replace(" ", "-")
                note("downloads", {way: downloads(extras, folder)})
                shutil.rmtree(folder)
        if only != "downloads":
            note("minutes", minutes(Path(name)))


if __name__ == "__main__":
    main()
