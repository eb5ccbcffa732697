"""The base install from the published wheel, without extras and so without torch, runs an agent that personalizes and
answers; with the libraries of the command line it runs the aggregator."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import zipfile
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest

from cloud_server.commands.start import LIBRARIES
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device, Evaluation
from export.graph import MIN_ONNXRUNTIME
from fleet_core.data.samples import save
from fleet_core.personalization import device_bundle
from tests.support.brokers import private_broker
from tests.support.bundles import SIGNER, bundle_of, samples
from tests.support.paths import ROOT
from tests.support.programs import (
    CLASSES,
    Program,
    closed_rounds,
    device,
    edge_agent,
    programs_in,
    small_fleet,
    write_samples,
)
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow  # the first of these tests builds and installs


@dataclass(frozen=True)
class Torchless:
    """A virtual environment with the wheel's base install, outside the checkout."""

    bin: Path
    folder: Path  # an empty working directory: nothing is imported from the checkout
    first: tuple[Path, ...] = ()  # folders that come first on the import path

    def run(self, program: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        """Run ``program`` of this environment to its end."""
        command = [str(self.bin / program), *arguments]
        return subprocess.run(
            command, cwd=self.folder, env=self.environ, capture_output=True, text=True, timeout=PATIENCE_S, check=False
        )

    @property
    def environ(self) -> dict[str, str]:
        """Environment for processes: this environment's programs first, and no PYTHONPATH."""
        others = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
        first = {"PYTHONPATH": os.pathsep.join(map(str, self.first))} if self.first else {}
        return others | first | {"PATH": f"{self.bin}{os.pathsep}{os.environ['PATH']}"}


@pytest.fixture(scope="session")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The wheel, built from this checkout."""
    folder = tmp_path_factory.mktemp("wheel")
    pip("wheel", "--no-deps", "--wheel-dir", str(folder), str(ROOT))
    (built,) = folder.glob("metafleet-*.whl")
    return built


@pytest.fixture(scope="session")
def torchless(wheel: Path, tmp_path_factory: pytest.TempPathFactory) -> Torchless:
    """An environment with the wheel and its pinned base dependencies."""
    environment = tmp_path_factory.mktemp("torchless") / "venv"
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", str(environment)], check=True)
    python = str(environment / "bin" / "python")
    pip("--python", python, "install", "--constraint", str(ROOT / "requirements" / "constraints.txt"), str(wheel))
    return Torchless(environment / "bin", tmp_path_factory.mktemp("elsewhere"))


@pytest.fixture(scope="session")
def operator(torchless: Torchless, tmp_path_factory: pytest.TempPathFactory) -> Torchless:
    """The same with the libraries of the extra ``server``."""
    folder = tmp_path_factory.mktemp("server")
    pip("install", "--constraint", str(ROOT / "requirements" / "constraints.txt"), "--target", str(folder), *LIBRARIES)
    return replace(torchless, first=(folder,))


@pytest.fixture(scope="session")
def oldest(torchless: Torchless, tmp_path_factory: pytest.TempPathFactory) -> Torchless:
    """The same with the oldest onnxruntime that is supported, which boards use."""
    folder = tmp_path_factory.mktemp("oldest")
    pip("install", "--no-deps", "--target", str(folder), f"onnxruntime=={MIN_ONNXRUNTIME}")
    return replace(torchless, first=(*torchless.first, folder))


def pip(*arguments: str) -> None:
    """Run this environment's pip; a failure shows its output."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "--quiet", *arguments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    assert done.returncode == 0, done.stderr


def test_the_wheel_holds_the_packages_and_neither_tests_nor_benchmarks(wheel: Path) -> None:
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.partition("/")[0] for name in names if ".dist-info/" not in name}
    assert tops == {"fleet_core", "edge_agent", "cloud_server", "export", "firmware_profiles", "metafleet"}
    assert any(name.endswith(".dist-info/licenses/LICENSE") for name in names)
    assert {f"{top}/py.typed" for top in tops} <= set(names)


def test_the_wheel_ships_the_boards_that_the_checkout_has(wheel: Path) -> None:
    boards = {
        f"firmware_profiles/boards/{path.name}" for path in (ROOT / "firmware_profiles" / "boards").glob("*.toml")
    }
    assert boards
    assert boards <= set(zipfile.ZipFile(wheel).namelist())


def test_the_wheel_ships_the_heartbeats_with_their_licence(wheel: Path) -> None:
    data = {name for name in zipfile.ZipFile(wheel).namelist() if name.startswith("fleet_core/data/")}
    assert "fleet_core/data/heartbeat.npz" in data
    assert any("LICEN" in name.upper() for name in data)


@pytest.mark.parametrize("module", [
    "torch", "onnx", "onnxscript", "amqtt", "PIL", "typer", "rich", "click", "pydantic", "pygments",
])
def test_the_base_install_has_none_of_the_extras(torchless: Torchless, module: str) -> None:
    done = torchless.run("python", "-c", f"import {module}")
    assert done.returncode == 1
    assert f"No module named '{module}'" in done.stderr


@pytest.mark.parametrize("program", ["metafleet", "edge-agent"])
def test_both_commands_start_without_torch(operator: Torchless, program: str) -> None:
    done = operator.run(program, "--version")
    assert (done.returncode, done.stderr) == (0, "")
    assert "0.1.0" in done.stdout


def test_the_operators_command_says_what_a_device_lacks(torchless: Torchless) -> None:
    done = torchless.run("metafleet", "--version")
    assert (done.returncode, done.stdout) == (2, "")
    assert 'hint: pip install "metafleet[server]"' in done.stderr
    assert torchless.run("edge-agent", "--version").stdout == "0.1.0\n"


def test_a_fleet_is_not_made_without_torch_and_the_extra_is_named(operator: Torchless, tmp_path: Path) -> None:
    data = write_samples(tmp_path / "data.npz")
    done = operator.run("metafleet", "init", str(tmp_path / "fleet"), "--data", str(data))
    assert (done.returncode, done.stdout) == (2, "")
    assert 'hint: pip install "metafleet[export]"' in done.stderr
    assert "Traceback" not in done.stderr
    assert list(tmp_path.iterdir()) == [data]
    few = ("--devices", "2", "--new-devices", "1", "--data", str(data), "--out", str(tmp_path / "run"))
    done = operator.run("metafleet", "demo", *few)
    assert (done.returncode, done.stdout) == (1, "")
    assert 'hint: pip install "metafleet[export]"' in done.stderr


def test_the_base_install_takes_part_in_rounds_where_the_fleet_has_the_graph(
    torchless: Torchless, operator: Torchless, tmp_path: Path
) -> None:
    fleet = small_fleet(tmp_path / "fleet", train_graph=True)
    home = device(fleet, "d1", tmp_path / "d1")
    with private_broker(tmp_path / "broker") as broker, programs_in(tmp_path) as programs:
        at = ("--broker", broker.url)
        server = operator, "metafleet", "server", "start", fleet.folder
        for install, program, *arguments in (server, (torchless, "edge-agent", "run", "--home", home)):
            command = [str(torchless.bin / program), *map(str, arguments), *at]
            last = programs.start(*command, environ=install.environ, cwd=torchless.folder)
        last.until(lambda: closed_rounds(fleet.folder) == [1, 2])
    with Ledger(fleet.ledger_path, create=False) as ledger:
        assert [row.cohort for row in ledger.rounds("closed")] == [("d1",), ("d1",)]


def test_aggregator_and_agent_work_without_torch_beside_one_that_trains(
    torchless: Torchless, operator: Torchless, tmp_path: Path
) -> None:
    """The fleet has no graph for training: it was made by the version before."""
    fleet = small_fleet(tmp_path / "fleet")
    trains, serves = (device(fleet, name, tmp_path / name) for name in ("d0", "d1"))
    np.save(tmp_path / "raw.npy", np.eye(3, 8, dtype=np.float32) * 3)
    with private_broker(tmp_path / "broker") as broker, programs_in(tmp_path) as programs:
        at = ("--broker", broker.url)

        def start(program: str, *arguments: object) -> Program:
            command = [str(torchless.bin / program), *map(str, arguments), *at]
            environ = operator.environ if program == "metafleet" else torchless.environ
            return programs.start(*command, environ=environ, cwd=torchless.folder)

        server = start("metafleet", "server", "start", fleet.folder)
        agent = start("edge-agent", "run", "--home", serves)
        agent.wait_for("d1 is on")
        trainer = programs.start(*edge_agent("run", "--home", trains, *at))
        trainer.until(lambda: closed_rounds(fleet.folder) == [1, 2])

        with Ledger(fleet.ledger_path, create=False) as ledger:
            server.until(lambda: {row.device for row in ledger.rows(Evaluation, round=2)} == {"d0", "d1"})
            assert ledger.rows(Device, name="d1")[0].cannot == (
                "does not train: it has no torch, and the fleet no graph for training with pfldyn-proto")
            assert [row.cohort for row in ledger.rounds("closed")] == [("d0",), ("d0",)]
        done = operator.run(
            "metafleet", "predict", str(fleet.folder), "d1", str(tmp_path / "raw.npy"), "--json", *at
        )
        assert done.returncode == 0, done.stderr
        answer = json.loads(done.stdout)
        assert (tuple(answer["labels"]), answer["round"], answer["personalization"]) == (CLASSES, 2, "proto")

    done = torchless.run("edge-agent", "personalize", "--home", str(serves), "--json")
    assert json.loads(done.stdout)["personalization"] == "proto", done.stderr
    done = torchless.run("edge-agent", "predict", str(tmp_path / "raw.npy"), "--home", str(serves), "--json")
    assert json.loads(done.stdout) == answer
    assert "Traceback" not in server.text() + agent.text()


# Bundles on a device --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("runtime", ["torchless", "oldest"])
def test_a_device_without_torch_installs_and_answers_with_the_oldest_and_newest_onnxruntime(
    request: pytest.FixtureRequest, runtime: str, tmp_path: Path
) -> None:
    device_: Torchless = request.getfixturevalue(runtime)
    np.save(tmp_path / "raw.npy", np.eye(3, 8, dtype=np.float32) * 3)
    stepping = {"1", "10"}
    cases = {"pfldyn-proto": ("proto", set[str]()), "pfldyn-maml": ("sgd", stepping),
             "fedmeta-metasgd": ("meta-sgd", stepping)}  # fmt: skip
    for method, (how, steps) in cases.items():
        path, home = tmp_path / f"{method}.bundle", tmp_path / method
        device_bundle.write(path, bundle_of(method, stored="fp16", int8=method == "pfldyn-proto"), signer=SIGNER)
        home.mkdir()
        save(home / "samples.npz", samples())
        done = device_.run("edge-agent", "install", str(path), "--home", str(home), "--json")
        assert done.returncode == 0, done.stderr
        result = json.loads(done.stdout)
        assert (result["passed"]["onnxruntime"] == MIN_ONNXRUNTIME) == (runtime == "oldest")
        assert result["passed"]["steps"].keys() == steps
        assert (result["passed"]["int8"] is not None) == (method == "pfldyn-proto")
        assert result["personalized"]["how"] == how
        done = device_.run("edge-agent", "predict", str(tmp_path / "raw.npy"), "--home", str(home), "--json")
        answer = json.loads(done.stdout)
        assert (answer["round"], answer["personalization"]) == (7, how), done.stderr


def test_an_operator_without_torch_verifies_a_bundle_and_a_device_refuses_a_broken_one(
    oldest: Torchless, operator: Torchless, tmp_path: Path
) -> None:
    device_bundle.write(tmp_path / "b", bundle_of("fedmeta-metasgd"))
    both = replace(oldest, first=(*oldest.first, *operator.first))
    done = both.run("metafleet", "bundle", "verify", str(tmp_path / "b"), "--json")
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert (result["torch"], result["onnxruntime"]) == (False, MIN_ONNXRUNTIME)
    broken = bundle_of("fedmeta-metasgd")
    golden = {**broken.graph.golden, "adapt": broken.graph.golden["adapt"] + np.float32(0.01)}
    device_bundle.write(tmp_path / "broken", replace(broken, graph=replace(broken.graph, golden=golden)), signer=SIGNER)
    done = oldest.run("edge-agent", "install", str(tmp_path / "broken"), "--home", str(tmp_path / "home"))
    assert (done.returncode, done.stdout) == (1, "")
    assert "'adapt' does not give its golden outputs after 1 steps" in done.stderr
    assert not (tmp_path / "home").exists()
