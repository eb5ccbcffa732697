"""A method from another installed package: found by its entry point, known to all commands, and reported where it is
wrong."""

from __future__ import annotations

import importlib.metadata
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
from torch import nn

from fleet_core.algorithms import interface, plugins
from fleet_core.algorithms.interface import LocalSgd
from fleet_core.algorithms.methods.registry import PRODUCT
from fleet_core.algorithms.plugins import Methods
from fleet_core.data import samples as stored
from fleet_core.data.samples import Samples
from fleet_core.learning.gradient_estimators import Estimators
from tests.project.test_docs import PAGES
from tests.support.paths import ROOT

pytestmark = pytest.mark.slow

EXPERIMENT = """
[data]
path = "{data}"
[partition]
kind = "natural"
[model]
name = "mlp"
[budget]
rounds = 2
[[method]]
name = "ditto"
hyper = {{ local_steps = 2, pull = 0.5 }}
"""


@pytest.fixture(scope="module")
def packages(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder of installed packages, one of which brings the method of seam.md."""
    folder = tmp_path_factory.mktemp("packages")
    (folder / "my_lab").mkdir()
    (folder / "my_lab" / "__init__.py").touch()
    (folder / "my_lab" / "ditto.py").write_text(PAGES["seam"], encoding="utf-8")
    facts = folder / "my_lab-1.0.dist-info"
    facts.mkdir()
    (facts / "METADATA").write_text("Metadata-Version: 2.1\nName: my-lab\nVersion: 1.0\n")
    (facts / "entry_points.txt").write_text(
        f"[{plugins.GROUP}]\nditto = my_lab.ditto:DITTO\nlost = my_lab.lost:LOST\n")
    return folder


def metafleet(packages: Path, *arguments: object) -> subprocess.CompletedProcess[str]:
    path = os.pathsep.join([str(packages), str(ROOT)])
    command = [sys.executable, "-m", "cloud_server.commands.cli", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=600, check=False,
                          env={**os.environ, "PYTHONPATH": path})


def test_it_is_listed_beside_the_products_and_one_that_is_broken_is_told(packages: Path) -> None:
    done = metafleet(packages, "methods", "--json")
    listed = [row["name"] for row in json.loads(done.stdout)]
    assert listed[: len(PRODUCT)] == list(PRODUCT)
    assert "ditto" in listed[len(PRODUCT) :]
    assert (
        "the method 'lost' of the installed package my-lab is left out: my_lab.lost:LOST cannot be imported: "
        "ModuleNotFoundError: No module named 'my_lab.lost'\n") in done.stderr
    told = metafleet(packages, "methods", "ditto").stdout
    assert "stays     body, head" in told
    assert "answers   own; without torch: the fleet's model" in told


def test_it_is_simulated_with_its_own_hyper_parameters_and_its_package_is_on_record(
    packages: Path, tmp_path: Path
) -> None:
    rng = np.random.default_rng(0)
    y = np.arange(80, dtype=np.int64) % 2
    x = rng.normal(size=(80, 4)).astype(np.float32) + 3 * y[:, None]
    stored.save(tmp_path / "mine.npz", Samples(x, y, np.repeat(["a", "b"], 40), classes=("off", "on")))
    (tmp_path / "e.toml").write_text(EXPERIMENT.format(data=tmp_path / "mine.npz"))
    done = metafleet(packages, "simulate", tmp_path / "e.toml", "--out", tmp_path / "runs", "--jobs", 1)
    assert done.returncode == 0, done.stderr
    asked = json.loads((tmp_path / "runs" / "ditto-s0" / "run.json").read_text())
    assert (asked["method"], asked["hyper"]["pull"]) == ("ditto", 0.5)
    result = json.loads((tmp_path / "runs" / "ditto-s0" / "result.json").read_text())
    assert result["environment"]["packages"]["my-lab"] == "1.0"
    wrong = ("--out", tmp_path / "wrong", "--set", "method.0.hyper.pul=1")
    done = metafleet(packages, "simulate", tmp_path / "e.toml", *wrong)
    assert done.returncode == 2
    assert "method[0].hyper.pul" in done.stderr
    assert "did you mean 'pull'?" in done.stderr


def test_it_runs_on_a_fleet_of_processes(packages: Path, tmp_path: Path) -> None:
    done = metafleet(packages, "demo", "--method", "ditto", "--rounds", 1, "--devices", 2, "--new-devices", 0,
                     "--no-baseline", "--broker", "embedded", "--out", tmp_path / "run")
    assert done.returncode == 0, done.stderr
    assert "2 of 2 devices" in done.stdout + done.stderr
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert (result["method"], result["environment"]["packages"]["my-lab"]) == ("ditto", "1.0")


# What is left out -----------------------------------------------------------------------------------------------------

ROW: Any = replace(PRODUCT["fedper"], name="mine")


def found(monkeypatch: pytest.MonkeyPatch, **rows: Any) -> tuple[dict[str, Any], list[str]]:
    """What the entry points ``name=row`` of the module ``rows`` bring, and what is logged."""
    module = ModuleType("rows")
    module.__dict__.update({f"row{n}": row for n, row in enumerate(rows.values())})
    monkeypatch.setitem(sys.modules, "rows", module)
    points = [importlib.metadata.EntryPoint(name.rstrip("_"), f"rows:row{n}", plugins.GROUP)
              for n, name in enumerate(rows)]
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [p for p in points if p.group == group])
    lines: list[str] = []
    methods = Methods(PRODUCT, lines.append)
    assert len(methods) == len(list(methods))
    return {name: row for name, row in methods.items() if name not in PRODUCT}, lines


def test_a_name_of_the_products_is_never_looked_for_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    def looked(*, group: str) -> list[Any]:
        raise AssertionError("looked for")

    monkeypatch.setattr(importlib.metadata, "entry_points", looked)
    methods = Methods(PRODUCT)
    assert methods["fedavg"] is methods.get("fedavg") is PRODUCT["fedavg"]
    assert "fedavg" in methods
    with pytest.raises(AssertionError, match="looked for"):
        methods.get("ditto")


class OldClient(interface.ClientRule):
    """Written for the version before, whose ``after_loss`` was ``settle``."""

    def settle(self, pending: Any, error: Any, hyper: Any, round_number: float) -> Any:
        return pending


class OneByOne(interface.ServerRule):
    """Written for the version before, which told of each device that joined."""

    joined: Any = staticmethod(lambda state, members: state)


class OldServer(interface.ServerRule):
    """Written for the version before, whose ``per_device`` was ``given`` and ``as_received`` was ``heard``."""

    def given(self, state: Any, device: str) -> Any:
        return {}

    def heard(self, state: Any, groups: Any) -> Any:
        return state


class BothServer(OldServer):
    """Works with both versions."""

    def per_device(self, state: Any, device: str) -> Any:
        return self.given(state, device)

    def as_received(self, state: Any, groups: Any) -> Any:
        return self.heard(state, groups)


@pytest.mark.parametrize(
    ("rules", "renamed"),
    [
        ({"client": OldClient()}, ["ClientRule.settle, which is now called after_loss: rename it"]),
        ({"server": OldServer()}, ["ServerRule.given, which is now called per_device: rename it",
                                   "ServerRule.heard, which is now called as_received: rename it"]),
    ],
)
def test_a_method_with_a_former_name_is_left_out_and_told_the_present_one(
    monkeypatch: pytest.MonkeyPatch, rules: dict[str, Any], renamed: list[str]
) -> None:
    rows, said = found(monkeypatch, mine=replace(ROW, **rules))
    assert rows == {}
    assert said == ["the method 'mine' of the installed package rows is left out: rows:row0 "
                    + "; ".join(f"defines {text}" for text in renamed)]


def test_a_method_that_defines_former_and_present_names_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    row = replace(ROW, server=BothServer())
    assert found(monkeypatch, mine=row) == ({"mine": row}, [])


@pytest.mark.parametrize(
    ("name", "row", "why"),
    [
        ("mine", 7, "is of type int, expected Method"),
        ("mine", replace(ROW, server=OneByOne()), "joined takes other arguments than (state, members, new)"),
        ("yours", ROW, "is named 'mine': give the entry point that name"),
        ("fedper", PRODUCT["fedper"], "has the name of one of the product's methods: use another"),
        ("Mine", replace(ROW, name="Mine"), "lower case"),
        ("a/b", replace(ROW, name="a/b"), "lower case"),
        ("mine", replace(ROW, adaptation="reptile"), "has the adaptation 'reptile', expected one of none, proto,"),
        ("mine", replace(ROW, version="2"), "has the version '2', expected a whole number from 1"),
        ("mine", replace(ROW, server=ROW.client), "needs a ClientRule as client and a ServerRule as server"),
        ("mine", replace(ROW, hyper=LocalSgd), "has unsuitable hyper-parameters: AttributeError"),
        ("mine", replace(ROW, personalizer="lora"), "has the personalizer 'lora', expected one of none, proto, sgd,"),
    ],
)
def test_what_is_no_method_is_left_out_with_its_reason(
    monkeypatch: pytest.MonkeyPatch, name: str, row: Any, why: str
) -> None:
    rows, said = found(monkeypatch, **{name: row}, other=replace(ROW, name="other"))
    assert list(rows) == ["other"]
    assert len(said) == 1
    assert f"the method '{name}' of the installed package rows is left out: rows:row0 " in said[0]
    assert why in said[0]


def test_a_package_that_ends_the_process_at_its_import_is_left_out(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    (tmp_path / "leaving.py").write_text("raise SystemExit(3)")
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint("mine", "leaving:ROW", plugins.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [point])
    lines: list[str] = []
    assert "mine" not in Methods(PRODUCT, lines.append)
    assert lines == ["the method 'mine' of the installed package leaving is left out: leaving:ROW cannot be imported: "
                    "SystemExit: 3"]


def test_threads_that_ask_at_once_all_find_it(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "slow_rows.py").write_text(
        "import time\nfrom dataclasses import replace\nfrom fleet_core.algorithms.methods.registry import PRODUCT\n"
        "time.sleep(0.3)\nROW = replace(PRODUCT['fedper'], name='mine')\n")
    monkeypatch.syspath_prepend(tmp_path)
    point = importlib.metadata.EntryPoint("mine", "slow_rows:ROW", plugins.GROUP)
    monkeypatch.setattr(importlib.metadata, "entry_points", lambda *, group: [point])
    rows = Methods(PRODUCT)
    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(lambda _: "mine" in rows, range(4))) == [True] * 4


def test_the_second_of_two_packages_with_one_name_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, said = found(monkeypatch, mine=ROW, mine_=replace(ROW, title="another"))
    assert rows == {"mine": ROW}
    assert len(said) == 1
    assert "rows:row1 has the name of another package's method" in said[0]


def test_what_a_row_may_name_is_what_there_is() -> None:
    estimators = Estimators(nn.Linear(2, 2), 2, PRODUCT["metavers"].hyper())
    for adaptation in interface.ADAPTATIONS:
        assert callable(estimators.of(adaptation))
    assert {row.adaptation for row in PRODUCT.values()} == set(interface.ADAPTATIONS)
    assert {row.personalizer for row in PRODUCT.values()} | {"none"} == set(interface.PERSONALIZERS)
