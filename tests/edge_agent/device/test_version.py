"""A flashed agent reports the version of its program's folder; any other the package's."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_agent.device import version
from fleet_core import __version__
from tests.support.paths import ROOT


def test_a_checkout_or_an_installed_package_has_the_packages_version() -> None:
    assert version.running() == __version__


@pytest.mark.parametrize(
    ("manifest", "expected"),
    [
        (json.dumps({"version": f"{__version__}-3fa9c1d2e0"}), f"{__version__}-3fa9c1d2e0"),
        (json.dumps({"version": "9.9.9-3fa9c1d2e0"}), __version__),
        (json.dumps({"version": f"{__version__}-" + "a" * 40}), __version__),
        (json.dumps({"version": 3}), __version__),
        (json.dumps([]), __version__),
        ("no json", __version__),
    ],
)
def test_a_programs_folder_gives_the_version_if_it_is_of_this_release(
    manifest: str, expected: str, tmp_path: Path
) -> None:
    (tmp_path / "manifest.json").write_text(manifest)
    assert version.version_in(tmp_path) == expected


def test_an_unpacked_program_finds_its_own_manifest(tmp_path: Path) -> None:
    lib = tmp_path / "lib"
    lib.mkdir()
    for package in ("edge_agent", "fleet_core"):
        (lib / package).symlink_to(ROOT / package)
    (tmp_path / "manifest.json").write_text(json.dumps({"version": f"{__version__}-3fa9c1d2e0"}))
    command = [sys.executable, "-c", "from edge_agent.device.version import running; print(running())"]
    done = subprocess.run(
        command, text=True, capture_output=True, check=True,
        env={**os.environ, "PYTHONPATH": str(lib), "PYTHONSAFEPATH": "1"}, cwd=tmp_path,
    )
    assert done.stdout == f"{__version__}-3fa9c1d2e0\n"
