"""``predict`` and ``personalize`` give the same result without the command line's libraries as with them."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.commands.start import Personalize, Predict, parse
from tests.support import homes
from tests.support.inprocess import toy
from tests.support.paths import ROOT
from tests.support.programs import clean_environ, edge_agent, run_to_end
from tests.support.waiting import PATIENCE_S

BARE = """
import sys
sys.modules.update(dict.fromkeys(("typer", "rich", "pydantic", "cryptography", "paho", "torch", "onnx")))
if "predict" in sys.argv:
    sys.modules["hashlib"] = None
from edge_agent.commands.start import main
from tests.support.paths import ROOT
main()
"""


@pytest.mark.parametrize(("arguments", "asked"), [
    (["predict", "x.npy"], Predict(Path("x.npy"), Path("at"), False)),
    (["predict", "--json", "x.npy", "--home", "d"], Predict(Path("x.npy"), Path("d"), True)),
    (["predict", "--home=d", "x.npy"], Predict(Path("x.npy"), Path("d"), False)),
    (["predict"], None),
    (["predict", "x.npy", "y.npy"], None),
    (["predict", "x.npy", "--help"], None),
    (["predict", "x.npy", "--verbose"], None),
    (["predict", "x.npy", "--home"], None),
    (["predict", "x.npy", "--home="], None),
    (["personalize"], Personalize(Path("at"), False, None, None, None)),
    (["personalize", "--by", "adapt", "--steps=5", "--rate", "0.1", "--home", "d", "--json"],
     Personalize(Path("d"), True, "adapt", 5, 0.1)),
    (["personalize", "--steps", "few"], None),
    (["personalize", "--by"], None),
    (["personalize", "x.npy"], None),
    (["personalize", "-h"], None),
    (["status"], None),
    ([], None),
])
def test_only_plain_commands_run_without_the_command_lines_libraries(
    monkeypatch: pytest.MonkeyPatch, arguments: list[str], asked: Predict | Personalize | None
) -> None:
    monkeypatch.setenv("METAFLEET_HOME", "at")
    assert parse(arguments) == asked
    monkeypatch.delenv("METAFLEET_HOME")
    assert parse(["predict", "x.npy"]) == Predict(Path("x.npy"), Path("."), False)


@pytest.mark.slow
def test_it_answers_as_the_command_line_does(tmp_path: Path) -> None:
    place = homes.home(tmp_path / "d0", toy(1))
    homes.service_with_model(place, "pfldyn-proto")
    np.save(tmp_path / "x.npy", toy(5).x[:3])

    def bare(*arguments: object) -> Any:
        command = [sys.executable, "-c", BARE, *map(str, arguments)]
        return subprocess.run(
            command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, env=clean_environ()
        )

    assert bare("personalize", "--home", place, "--by", "head").stdout.startswith("personalized by head on 54 samples")
    for arguments in (
        ("predict", tmp_path / "x.npy", "--home", place, "--json"), ("predict", tmp_path / "x.npy", "--home", place),
        ("predict", tmp_path / "none.npy", "--home", place), ("predict", tmp_path / "x.npy", "--home", tmp_path),
        ("personalize", "--home", place, "--by", "head", "--json"), ("personalize", "--home", place, "--by", "magic"),
        ("personalize", "--home", place),
    ):
        fast, usual = bare(*arguments), run_to_end(edge_agent(*arguments))
        assert (fast.returncode, fast.stdout, fast.stderr) == (usual.returncode, usual.stdout, usual.stderr)
    assert json.loads(bare("predict", tmp_path / "x.npy", "--home", place, "--json").stdout)["round"] == 1
