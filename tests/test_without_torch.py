"""The base install, without any extra, from the wheel that is published: no torch, and both commands start."""

from __future__ import annotations

import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
pytestmark = pytest.mark.timeout(300)  # the first of these tests builds and installs


@dataclass(frozen=True)
class Torchless:
    """A virtual environment with the wheel's base install, away from the checkout."""

    bin: Path
    folder: Path  # an empty working directory: nothing is imported from the checkout

    def run(self, program: str, *arguments: str, timeout_s: float = 60) -> subprocess.CompletedProcess[str]:
        """``program`` of this environment, run to its end."""
        command = [str(self.bin / program), *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=timeout_s, check=False
        )

    @property
    def environ(self) -> dict[str, str]:
        """For processes started here: this environment's programs first, and no path of another Python."""
        others = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        return others | {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("metafleet-*.whl")
    return built


@pytest.fixture(scope="session")
def torchless(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Torchless:
    """The wheel and its base dependencies, pinned, in an environment of their own."""
    environment = tmp_path_factory.mktemp("torchless") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    pip("--python", python, "install", "--constraint", str(ROOT / "requirements" / "constraints.txt"), str(wheel))
    return Torchless(environment / "bin", tmp_path_factory.mktemp("elsewhere"))


def pip(*arguments: str) -> None:
    """This environment's pip; what it says is shown when it fails."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_the_packages_and_neither_tests_nor_benchmarks(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"fleet_core", "edge_agent", "cloud_server", "export", "firmware_profiles"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {f"{top}/py.typed" for top in tops} <= set(names)


def test_the_wheel_ships_the_boards_that_the_checkout_has(wheel: Path) -> None:
    boards = {f"firmware_profiles/{path.name}" for path in (ROOT / "firmware_profiles").glob("*.toml")}
    assert boards
    assert boards <= set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_ships_the_heartbeats_with_their_licence(wheel: Path) -> None:
    data = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fleet_core/data/")}
    assert "fleet_core/data/heartbeat.npz" in data
    assert any("LICEN" in name.upper() for name in data)


@pytest.mark.parametrize("module", ["torch", "onnx", "onnxscript", "amqtt", "PIL"])
def test_the_base_install_has_none_of_the_extras(torchless: Torchless, module: str) -> None:
    done = torchless.run("python", "-c", f"import {module}")
    assert done.returncode == 1
    assert f"No module named '{module}'" in done.stderr


@pytest.mark.parametrize("program", ["metafleet", "edge-agent"])
def test_both_commands_start_without_torch(torchless: Torchless, program: str) -> None:
    done = torchless.run(program, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert "0.1.0" in done.stdout
