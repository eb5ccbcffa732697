"""Agents whose processes cannot import torch take part in rounds, personalize and answer, beside one that has it."""

from __future__ import annotations

import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device, Evaluation, Update
from tests.support.brokers import private_broker
from tests.support.programs import closed_rounds, device, edge_agent, metafleet, programs_in, small_fleet
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

NO_TORCH = '''
import sys


class NoTorch:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in ("torch", "onnx", "onnxscript"):
            with open({tried!r}, "a") as file:
                file.write(name + "\\n")
            raise ImportError(f"{{name}} is not to be imported here")
        return None


sys.meta_path.insert(0, NoTorch())
'''


@pytest.mark.parametrize("method", ["pfldyn-proto", "fedper"])
def test_agents_without_torch_take_part_in_rounds(tmp_path: Path, method: str) -> None:
    """Class means of a shared encoder; and heads of their own, which training makes."""
    tried = tmp_path / "tried"
    (tmp_path / "blocked").mkdir()
    (tmp_path / "blocked" / "sitecustomize.py").write_text(NO_TORCH.format(tried=str(tried)))
    environ = {**os.environ, "PYTHONPATH": str(tmp_path / "blocked")}
    proof = subprocess.run(
        [*edge_agent("--version")[:1], "-c", "import torch"], env=environ, capture_output=True, text=True, check=False,
        timeout=PATIENCE_S,
    )
    assert "torch is not to be imported here" in proof.stderr
    tried.unlink()
    fleet = small_fleet(tmp_path / "fleet", rounds=3, method=method, train_graph=True)
    homes = {name: device(fleet, name, tmp_path / name, engine="torch" if name == "d0" else "onnx")
             for name in ("d0", "d1", "d2")}
    np.save(tmp_path / "raw.npy", np.eye(3, 8, dtype=np.float32) * 3)
    with private_broker(tmp_path / "broker") as broker, programs_in(tmp_path) as programs:
        at = ("--broker", broker.url)
        server = programs.start(*metafleet("server", "start", fleet.folder, *at))
        agents = [programs.start(*edge_agent("run", "--home", home, *at), environ=None if name == "d0" else environ)
                  for name, home in homes.items()]
        server.until(lambda: closed_rounds(fleet.folder) == [1, 2, 3])
        with Ledger(fleet.ledger_path, create=False) as ledger:
            server.until(lambda: {row.device for row in ledger.rows(Evaluation, round=3)} == set(homes))
            took_part = {row.device for row in ledger.rows(Update, status="counted")}
            engines = {row.name: tuple(row.capabilities["engines"]) for row in ledger.rows(Device)}
        assert took_part == set(homes)
        assert engines == {"d0": ("torch",), "d1": ("onnx",), "d2": ("onnx",)}
        shown = subprocess.run(
            metafleet("devices", "show", fleet.folder, "d1"), capture_output=True, text=True, check=False,
            timeout=PATIENCE_S,
        )
        assert ["engine", "onnx"] in [line.split() for line in shown.stdout.splitlines()], shown.stderr
        done = subprocess.run(
            edge_agent("predict", tmp_path / "raw.npy", "--home", homes["d1"], "--json"), env=environ,
            capture_output=True, text=True, check=False, timeout=PATIENCE_S,
        )
        assert json.loads(done.stdout)["round"] == 3, done.stderr
        assert not tried.exists(), tried.read_text()
        assert all("Traceback" not in program.text() for program in (server, *agents))
