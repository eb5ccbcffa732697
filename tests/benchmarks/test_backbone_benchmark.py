"""benchmarks/backbone: its page has the figures of its results, and rates are chosen on training samples alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest

from benchmarks.backbone import run, speech
from cloud_server.laboratory.plan import workload
from fleet_core.data.samples import Samples, save


def test_the_page_has_the_figures_of_the_results(tmp_path: Path) -> None:
    for name in ("README.md", "result.json", "speech.json"):
        shutil.copy(run.HERE / name, tmp_path / name)
    run.write_page(tmp_path)
    assert (tmp_path / "README.md").read_text() == (run.HERE / "README.md").read_text()
    rows = json.loads((run.HERE / "speech.json").read_text())["rows"]
    assert [(row["takes"], row["way"]) for row in rows] == [(n, way) for n in speech.TAKES for way in speech.WAYS]


@pytest.mark.parametrize("takes", speech.TAKES)
def test_a_speaker_learns_its_first_takes_and_rates_are_chosen_inside_them(tmp_path: Path, takes: int) -> None:
    most = max(speech.TAKES)
    for kept in {takes, most}:
        times = np.repeat([*range(kept), *range(most, most + speech.EVALUATED)], 10)
        x = np.zeros((len(times), 1, 32, 64), np.float32)
        save(tmp_path / f"network-{kept}.npz", Samples(
            x, np.tile(np.arange(10), len(times) // 10), np.repeat("anna", len(times)), times.astype(float),
            tuple("0123456789")))
    made = workload.build(speech.experiment(tmp_path, "network", takes, 0.05))
    (share,) = made.train
    assert len(made.own(share).y) == 10 * takes
    assert len(made.later(share).y) == 10 * speech.EVALUATED
    trial = workload.build(speech.experiment(tmp_path, "network", most, None))
    (inside,) = trial.train
    assert len(trial.own(inside).y) + len(trial.later(inside).y) <= 10 * most
