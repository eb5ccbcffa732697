"""``make prove-arm64``: runs the product on an emulated ARM64 board, proof by proof, and writes result.json.

    python -m benchmarks.arm64.prove [--only NAME ...] [--keep FOLDER]

Emulated: no time, watt or joule here is a board's; seconds are those of the emulating machine, including its other
work. Needs Linux, root (a root file system is made), and the programs in ``scene``.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks import markdown
from benchmarks.arm64 import cloud_init, featherweight, over_ssh, power_cut, pulled, runtimes, sizes, training
from benchmarks.arm64.proof import Notes, Proof
from benchmarks.arm64.scene import PROGRAMS, scene, which
from fleet_core.base import storage

HERE = Path(__file__).parent
RESULT, PAGE = HERE / "result.json", HERE / "README.md"
BASE = HERE.parent.parent / "build" / "arm64"
PROOFS = {each.name: each for each in (
    cloud_init.PROOF, power_cut.PROOF, training.PROOF, over_ssh.PROOF, pulled.PULLED, pulled.WITH_MENDER,
    runtimes.PROOF, featherweight.PROOF,
)}
LABEL = "emulated ARM64: no board, and no time of a board"


def main(arguments: Sequence[str]) -> int:
    """Returns 1 if a proof failed."""
    parser = argparse.ArgumentParser(description="What the product does on an emulated ARM64 board.")
    parser.add_argument("--only", action="append", choices=tuple(PROOFS), help="run only this proof; repeat for more")
    parser.add_argument("--keep", type=Path, help="keep cards, logs and the fleet in this folder")
    chosen = parser.parse_args(arguments)
    if sys.platform != "linux" or os.geteuid() != 0:
        parser.error("needs Linux and root, to make a root file system for the board")
    names = chosen.only or list(PROOFS)
    for program in (*PROGRAMS, *(each for name in names for each in PROOFS[name].programs)):
        which(program)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # so that contexts clean up
    failed = [name for name in names if not prove(PROOFS[name], chosen.keep)]
    _say(f"failed: {', '.join(failed)}" if failed else "all held")
    return int(bool(failed))


def prove(proof: Proof, keep: Path | None) -> bool:
    """Plays the proof and writes the outcome. Returns whether all of it held."""
    _say(f"{proof.name}: {proof.title}")
    notes = Notes(_say)
    folder = Path(tempfile.mkdtemp(prefix="metafleet-arm64-")) if keep is None else keep.resolve() / proof.name
    shutil.rmtree(folder, ignore_errors=True)
    seconds, trouble = 0.0, ""
    try:
        with scene(folder, BASE, _say, proof.debian) as world:
            world.cores = 1
            try:
                proof.play(world, notes)
            finally:
                seconds = world.passed("the end")
    except (AssertionError, subprocess.SubprocessError) as error:
        trouble = str(error)
        _say(f"{proof.name} failed: {trouble}")
    finally:
        if keep is None:
            shutil.rmtree(folder, ignore_errors=True)
    write(proof, notes, seconds, trouble.splitlines()[0] if trouble else "")
    return not trouble


def write(proof: Proof, notes: Notes, seconds: float, trouble: str) -> None:
    """Writes the proof's part of result.json, and the page's tables."""
    told: dict[str, Any] = json.loads(RESULT.read_text()) if RESULT.exists() else {"label": LABEL, "proofs": {}}
    told["proofs"][proof.name] = {
        "title": proof.title, "passed": not trouble, **({"failed": trouble} if trouble else {}), "held": notes.held,
        "facts": notes.facts, "debian": proof.debian.release, "emulator": emulator(),
        "emulator_seconds": round(seconds), "commit": commit(), "date": time.strftime("%Y-%m-%d", time.gmtime()),
    }
    told["proofs"] = {name: told["proofs"][name] for name in PROOFS if name in told["proofs"]}
    storage.write_atomic(RESULT, (json.dumps(told, indent=1) + "\n").encode())
    fill_page()


def fill_page() -> None:
    """Writes the page's tables anew."""
    storage.write_atomic(PAGE, markdown.filled(PAGE.read_text(), tables(json.loads(RESULT.read_text()))).encode())


def tables(told: dict[str, Any]) -> dict[str, str]:
    """The page's tables: one row per proof, per statement that held, per fact, and per package."""
    proofs = told["proofs"].items()
    rows = [(name, each["title"], "held" if each["passed"] else f"failed: {each['failed']}", str(len(each["held"])),
             str(each["emulator_seconds"])) for name, each in proofs]
    rows += [(name, each.title, "not played", "", "") for name, each in PROOFS.items() if name not in told["proofs"]]
    facts = [(name, fact, str(value)) for name, each in proofs for fact, value in each["facts"].items()]
    held = [(name, sentence) for name, each in proofs for sentence in each["held"]]
    return {"proofs": markdown.table(("proof", "what is shown", "outcome", "checks", "emulator's seconds"), rows),
            "held": markdown.table(("proof", "what held"), held),
            "facts": markdown.table(("proof", "fact", "found"), facts), "sizes": sizes.table()}


def emulator() -> str:
    return subprocess.run(["qemu-system-aarch64", "--version"], capture_output=True, text=True,
                          check=True).stdout.splitlines()[0]  # fmt: skip


def commit() -> str:
    """The commit of this checkout, marked if the packages that a board runs have changes."""
    def git(*words: str) -> str:
        done = subprocess.run(["git", *words], capture_output=True, text=True, cwd=HERE)
        return done.stdout.strip()

    changed = git("status", "--porcelain", "--", *(f":/{name}" for name in ("edge_agent", "fleet_core", "cloud_server",
                                                                            "firmware_profiles")))
    return git("rev-parse", "--short", "HEAD") + (" with changes" if changed else "")


def _say(line: str) -> None:
    print(line, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
