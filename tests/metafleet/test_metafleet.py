"""``import metafleet``: simulations, runs and fleets as rows; the page and the notebook run as they are."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import metafleet
from fleet_core.base.errors import ConfigError
from tests.support import lab
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S

DOCS = ROOT / "docs"


@pytest.fixture(scope="module")
def runs(tmp_path_factory: pytest.TempPathFactory) -> list[metafleet.Run]:
    folder = tmp_path_factory.mktemp("runs")
    asked = lab.settings(lab.recordings(folder / "all.npz"), seeds=[0, 1])
    return metafleet.simulate(asked, folder / "out", jobs=1)


def test_it_loads_neither_torch_nor_numpy() -> None:
    program = "import metafleet, sys; assert not {'torch', 'numpy', 'onnxruntime', 'typer'} & set(sys.modules)"
    subprocess.run([sys.executable, "-c", program], check=True, timeout=PATIENCE_S, cwd=ROOT)


def test_a_simulation_gives_a_row_for_each_evaluated_round(runs: list[metafleet.Run]) -> None:
    assert [(run.method, run.seed) for run in runs] == [("pfldyn-proto", 0), ("pfldyn-proto", 1)]
    for run in runs:
        rows = run.curve()
        assert [(row["round"], row["of"]) for row in rows] == [(2, "devices"), (4, "devices")]
        assert all(0 <= row["worst"] <= row["mean"] <= row["best"] <= 1 for row in rows)
        assert 0 < rows[0]["payload_bytes"] < rows[1]["payload_bytes"]
        assert all(isinstance(value, (str, int, float)) for row in rows for value in row.values())


@pytest.mark.slow
def test_runs_are_read_again_and_compared(runs: list[metafleet.Run], tmp_path: Path) -> None:
    again = metafleet.read_runs(runs[0].finished.where.parent.parent)
    assert {run.seed: run.curve() for run in again} == {run.seed: run.curve() for run in runs}
    compared = metafleet.compare(again, tmp_path / "page", targets=[0.1])
    assert [entry["label"] for entry in compared["entries"]] == ["pfldyn-proto"]
    assert json.loads((tmp_path / "page" / "compare.json").read_text()) == json.loads(json.dumps(compared))
    known = "accuracy, error, micro-f1, auroc, difference, macro-f1"
    with pytest.raises(ValueError, match=f"target_of is one of {known}, not 'f1'"):
        metafleet.compare(again, target_of="f1")


def test_an_experiment_with_mistakes_names_them(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="rouns"):
        metafleet.simulate({"budget": {"rouns": 2}}, tmp_path)


def test_a_fleet_is_rows_of_what_its_ledger_has(finished: Path) -> None:
    fleet = metafleet.Fleet(finished / "fleet")
    assert (fleet.running, fleet.method) == (False, "pfldyn-proto")
    rounds, devices = fleet.rounds(), {row["name"] for row in fleet.devices()}
    assert [row["round"] for row in rounds] == [1, 2]
    assert all(row["payload_bytes.up"] > 0 and "loss" in row for row in rounds)
    assert {row["device"] for row in fleet.updates()} <= devices
    assert {row["device"] for row in fleet.costs()} == devices
    evaluated = fleet.evaluations()
    assert {row["device"] for row in evaluated} <= devices
    assert {row["stage"] for row in evaluated} >= {"after"}
    assert not any(value is None for row in (*rounds, *fleet.costs(), *fleet.devices()) for value in row.values())


def test_a_folder_that_is_no_fleets_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no fleet here"):
        metafleet.Fleet(tmp_path)


@pytest.mark.slow
def test_the_code_of_the_page_runs(finished: Path, tmp_path: Path) -> None:
    shutil.copytree(finished / "fleet", tmp_path / "greenhouse")
    blocks = re.findall(r"^```python\n(.*?)^```", (DOCS / "python.md").read_text(encoding="utf-8"), re.M | re.S)
    assert len(blocks) == 3
    run(tmp_path, blocks)


@pytest.mark.slow
def test_the_notebook_runs(tmp_path: Path) -> None:
    notebook: dict[str, Any] = json.loads((DOCS / "tour.ipynb").read_text(encoding="utf-8"))
    cells = ["".join(cell["source"]) for cell in notebook["cells"] if cell["cell_type"] == "code"]
    assert not any(cell.get("outputs") for cell in notebook["cells"])
    run(tmp_path, ["import matplotlib\nmatplotlib.use('Agg')", *cells, "assert (folder / 'bytes.png').exists()"])


SHORT = {
    r'"rounds": \d+': '"rounds": 2', r'"model": {"name": "cnn1d"}': '"model": {"name": "cnn1d"}, "cohort": 2',
    r'"evaluation": {"every": 2}': '"evaluation": {"every": 2, "devices": 2}',
}
"""What the pages have -> what takes less time."""


def run(folder: Path, blocks: list[str]) -> None:
    """Runs the blocks one after the other, as a program in ``folder``, in ``SHORT``, with one seed."""
    body = "\n".join(blocks)
    for wanted, short in SHORT.items():
        body, found = re.subn(wanted, short, body)
        assert found == 1, wanted
    body = body.replace('"seeds": [0, 1]', '"seeds": [0]').replace("\n", "\n    ")
    (folder / "program.py").write_text(f"if __name__ == '__main__':\n    {body}\n")
    done = subprocess.run([sys.executable, "program.py"], cwd=folder, capture_output=True, text=True,
                          timeout=PATIENCE_S)
    assert done.returncode == 0, done.stderr
