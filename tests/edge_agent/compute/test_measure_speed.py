"""FLOP/s measured on this machine, and what is kept of it."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import onnx
import pytest

from edge_agent.compute import measure_speed
from edge_agent.compute.measure_speed import W_SHAPE, X_SHAPE, Y_SHAPE, Speed, _rate
from edge_agent.compute.onnx_session import open_function
from fleet_core.base.errors import StateError

SPEED = Speed("2026-01-02", 4, {"64": 1e9, "128": 3e9}, 2e9)


def test_this_machine_is_measured_and_dated() -> None:
    speed = measure_speed.measure(seconds=0.01, now=lambda: 1_767_312_000.0)
    assert speed.measured_on == "2026-01-02"
    assert list(map(int, speed.matmul)) == list(measure_speed.SIZES)
    assert speed.convolution is not None
    assert 0 < speed.flop_per_s <= speed.convolution


def test_the_rate_is_that_of_whole_runs_and_the_first_is_not_counted() -> None:
    now, took = [0.0], iter([100.0, 2.0, 2.0, 2.0])

    def work() -> None:
        now[0] += next(took)

    assert _rate(work, 8e9, 5.0, lambda: now[0]) == pytest.approx(4e9)


def test_the_convolution_is_sound_onnx_and_computes_one() -> None:
    graph = measure_speed.convolution_graph()
    onnx.checker.check_model(onnx.load_from_string(graph), full_check=True)
    rng = np.random.default_rng(0)
    x, w = rng.random(X_SHAPE, dtype=np.float32), rng.random(W_SHAPE, dtype=np.float32)
    y = open_function(graph)({"x": x, "w": w})["y"]
    assert y.shape == Y_SHAPE
    assert y[3, 5, 7, 9] == pytest.approx((x[3, :, 7:10, 9:12] * w[5]).sum(), rel=1e-4)
    assert 2 * y.size * w[0].size == measure_speed.CONVOLUTION_FLOP


def test_what_is_kept_reads_back_and_is_a_profiles_compute_with_its_date(tmp_path: Path) -> None:
    assert measure_speed.read(tmp_path) is None
    measure_speed.write(tmp_path, SPEED)
    assert measure_speed.read(tmp_path) == SPEED
    kept = json.loads((tmp_path / measure_speed.FILE).read_text())
    assert kept["flop_per_s"] == 2e9, "the convolution is slower than the fastest product"
    assert kept["source"].startswith("measured here, on 2026-01-02")
    assert SPEED.compute().effective_flop_per_s == 2e9


@pytest.mark.parametrize("text", ["", "{", "[]", '{"measured_on": "today"}',
                                  '{"measured_on": "2026-01-02", "cores": 1, "matmul": {}}'])
def test_a_damaged_file_says_how_to_make_it_again(tmp_path: Path, text: str) -> None:
    (tmp_path / measure_speed.FILE).write_text(text)
    with pytest.raises(StateError, match="hint: edge-agent doctor --measure"):
        measure_speed.read(tmp_path)
