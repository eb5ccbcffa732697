"""What an operator's machine without torch, or without dp-accounting, can do, and what it says it cannot."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from benchmarks.console.made_fleet import MadeFleet
from cloud_server.commands.doctor import EXTRAS
from cloud_server.records.fleet_folder import Fleet
from export.graph import export_graph
from fleet_core.learning import models
from fleet_core.model import graph_bundle

pytestmark = pytest.mark.slow
EXPERIMENT = """
seeds = [0]
[data]
set = "heartbeat"
[model]
name = "cnn1d"
[budget]
rounds = 1
[[method]]
name = "fedavg"
"""


def metafleet(*arguments: object, without: str = "torch=None, onnx=None, onnxscript=None") \
        -> subprocess.CompletedProcess[str]:
    code = f"import sys; sys.modules.update({without}); from cloud_server.commands.start import main; main()"
    command = [sys.executable, "-P", "-c", code, *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, check=False)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = MadeFleet(tmp_path_factory.mktemp("bare") / "fleet", devices=5, closed=3, rounds=6)
    made.ledger.close()
    return made.folder


@pytest.mark.parametrize("arguments", [
    ["server", "status", "FLEET", "--json"], ["server", "rounds", "FLEET", "--explain"], ["server", "pause", "FLEET"],
    ["devices", "show", "FLEET", "attic-01"], ["report", "FLEET", "--out", "TO/report.html"],
    ["compare", "FLEET", "--out", "TO/compared"], ["costs", "FLEET"], ["methods"],
], ids=" ".join)
def test_a_fleet_that_was_made_is_run_without_torch(arguments: list[str], fleet: Path, tmp_path: Path) -> None:
    done = metafleet(*(one.replace("FLEET", str(fleet)).replace("TO", str(tmp_path)) for one in arguments))
    assert done.returncode == 0, done.stderr


def test_a_plan_of_a_fleet_is_made_without_torch_and_says_what_is_missing(fleet: Path, tmp_path: Path) -> None:
    made = shutil.copytree(fleet, tmp_path / "fleet")
    model = Fleet.load(made).config.model
    layout = models.describe(model.name, model.input, model.classes, model.options, model.task)
    (made / "graph.safetensors").write_bytes(graph_bundle.pack(export_graph(layout)))
    done = metafleet("plan", made, "--devices", 5, "--json")
    assert done.returncode == 0, done.stderr
    (planned,) = json.loads(done.stdout)
    assert planned["payload_bytes"]["up"] > 0
    assert "'torch' is not installed" in json.dumps(planned["absent"])


def test_the_console_and_the_aggregator_load_no_torch() -> None:
    code = ("import sys; sys.modules.update(torch=None, onnx=None, onnxscript=None); "
            "import cloud_server.console.serve, cloud_server.running.aggregator_process, "
            "cloud_server.devices.flash_in_waves")
    assert subprocess.run([sys.executable, "-P", "-c", code], check=False).returncode == 0


@pytest.mark.parametrize("arguments", [
    ["init", "TO/made", "--data", "heartbeat"], ["simulate", "TO/experiment.toml", "--out", "TO/runs"],
    ["advise", "heartbeat", "--out", "TO/advice"], ["plan", "TO/experiment.toml"],
], ids=lambda one: one[0])
def test_what_needs_torch_says_so(arguments: list[str], tmp_path: Path) -> None:
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    done = metafleet(*(one.replace("TO", str(tmp_path)) for one in arguments))
    assert done.returncode == 2, done.stderr
    assert "is not installed" in done.stderr
    assert "pip install" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_simulation_with_private_updates_says_that_it_needs_dp_accounting_and_one_without_does_not(
    tmp_path: Path
) -> None:
    (tmp_path / "experiment.toml").write_text(EXPERIMENT)
    wanted = ["simulate", tmp_path / "experiment.toml", "--out", tmp_path / "runs", "--jobs", 1]
    done = metafleet(*wanted, "--set", 'privacy.mode="local"', without="dp_accounting=None")
    assert done.returncode == 2, done.stderr
    assert "privacy.mode: epsilon needs dp-accounting, which is not installed" in done.stderr
    assert 'pip install "metafleet[privacy]"' in done.stderr
    assert not (tmp_path / "runs").exists()
    few = ("cohort=2", "evaluation.devices=2", "method.0.hyper.local_steps=1")
    done = metafleet(*wanted, *(part for one in few for part in ("--set", one)), without="dp_accounting=None")
    assert done.returncode == 0, done.stderr


def test_the_doctor_says_what_is_missing_for_which_command() -> None:
    said = metafleet("doctor", "--json").stdout
    for extra in ("train", "export"):
        assert EXTRAS[extra][1] in said
        assert f"metafleet[{extra}]" in said
