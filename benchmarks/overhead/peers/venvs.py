"""Virtual environments for the peers, separate from our own: pinned, made once, kept in build/."""

from __future__ import annotations

import subprocess
import sys
import sysconfig
import venv
from pathlib import Path

from benchmarks.overhead.processes import ROOT

HERE = Path(__file__).parent


def python_of(peer: str, pins: Path = HERE) -> Path:
    """The Python with ``peer`` installed, as its .txt in ``pins`` says. Everything else (torch, the step) comes from
    this Python's packages and from this repository."""
    folder = ROOT / "build" / "peers" / peer
    python, ready = folder / "bin" / "python", folder / "ready.txt"
    wanted = pins / f"{peer}.txt"
    if not ready.exists() or ready.read_text() != wanted.read_text():
        venv.create(folder, with_pip=True, clear=True)
        subprocess.run([python, "-m", "pip", "install", "-q", "-r", wanted], check=True, stdout=sys.stderr)
        packages = next((folder / "lib").glob("python3*")) / "site-packages"
        (packages / "behind.pth").write_text(f"{ROOT}\n{sysconfig.get_path('purelib')}\n")
        ready.write_text(wanted.read_text())
    return python
