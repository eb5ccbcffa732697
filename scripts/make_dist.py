"""Builds wheel and sdist into dist/ and tries the wheel in a clean environment: `make dist`.

The wheel is built from the sdist. It is installed without extras, as a device has it, then with the aggregator's, at
the pinned versions; its commands run outside the checkout, so that nothing comes from the source tree. Needs the
package `build` and an index for pip.
"""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DIST = ROOT / "dist"
CONSTRAINTS = ROOT / "requirements" / "constraints.txt"
COMMANDS = {
    "": (("edge-agent", "--help"), ("edge-agent", "doctor", "--help")),
    "[server]": (("metafleet", "--help"), ("metafleet", "methods"), ("metafleet", "profiles"),
                 ("metafleet", "datasets"), ("metafleet", "server", "--help")),
}
"""What a machine without torch can run, by extra; profiles and datasets read the data files of the wheel."""

LIGHT = """
import importlib.util
import fleet_core, edge_agent, cloud_server, firmware_profiles, metafleet
import fleet_core.algorithms.methods.registry, fleet_core.data.samples, fleet_core.link.mqtt, fleet_core.model.payloads
import edge_agent.rounds.agent, edge_agent.http.serve, edge_agent.compute.onnx_session
import cloud_server.rounds.coordinator, cloud_server.commands.cli, cloud_server.reports.html_report
assert importlib.util.find_spec("torch") is None, "the base has installed torch"
print(fleet_core.__version__)
"""


def main() -> int:
    """Exit code 0 when wheel and sdist are in dist/ and the wheel works. Raises CalledProcessError for a step that
    fails."""
    shutil.rmtree(DIST, ignore_errors=True)
    run([sys.executable, "-m", "build", "--outdir", str(DIST), str(ROOT)])
    (wheel,) = DIST.glob("*.whl")
    with tempfile.TemporaryDirectory(prefix="metafleet-dist-") as folder:
        version = tried(wheel, Path(folder))
    if f"-{version}-" not in wheel.name:
        print(f"{wheel.name} holds version {version}", file=sys.stderr)
        return 1
    for path in sorted(DIST.iterdir()):
        print(f"{path.relative_to(ROOT)}  {path.stat().st_size / 1e6:.1f} MB")
    return 0


def tried(wheel: Path, folder: Path) -> str:
    """The version that the wheel has, once its commands ran in a new environment in ``folder``."""
    run([sys.executable, "-m", "venv", str(folder / "venv")])
    bin_ = folder / "venv" / "bin"
    for extra, commands in COMMANDS.items():
        run([str(bin_ / "python"), "-m", "pip", "--disable-pip-version-check", "install", "--quiet",
             f"--constraint={CONSTRAINTS}", f"{wheel}{extra}"])
        for program, *arguments in commands:
            run([str(bin_ / program), *arguments], folder)
    return run([str(bin_ / "python"), "-c", LIGHT], folder).strip()


def run(command: list[str], folder: Path = ROOT) -> str:
    """What ``command`` prints, run in ``folder`` without the checkout on Python's path."""
    print("+", *(part if "\n" not in part else "…" for part in command), file=sys.stderr, flush=True)
    environ = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    return subprocess.run(command, cwd=folder, env=environ, check=True, stdout=subprocess.PIPE, text=True).stdout


if __name__ == "__main__":
    sys.exit(main())
