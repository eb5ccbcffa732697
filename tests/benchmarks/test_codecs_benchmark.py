"""The benchmark of codecs: its rows, and the page and result that it writes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from benchmarks.cost import codec_time, codecs, to_target_page
from benchmarks.overhead.workload import PARAMETERS


def ended(folder: Path, f1: float, up: int) -> Path:
    """A run of two rounds, the first of which does not count."""
    folder.mkdir(parents=True)
    rounds = [
        {"participants": 2, "payload_bytes": {"up": 9999, "down": 1}, "codecs": choices("int8", None)},
        {"participants": 2, "payload_bytes": {"up": up, "down": 40}, "codecs": choices("int4", 0.5)},
    ]
    (folder / "result.json").write_text(json.dumps({"rounds": rounds, "evaluated": {"macro_f1": f1}}))
    return folder


def choices(codec: str, left: float | None) -> dict[str, dict[str, Any]]:
    return {way: {"codec": codec, "left": left} for way in ("up", "down")}


def test_a_row_has_the_means_of_a_device_and_what_was_left_out(tmp_path: Path) -> None:
    folders = [ended(tmp_path / "s0", 0.9, 200), ended(tmp_path / "s1", 0.8, 100), tmp_path / "diverged"]
    found = codecs.row("har", "fedavg", "auto", folders)
    assert found["macro_f1"] == [0.9, 0.8]
    assert found["bytes"] == {"up": 75.0, "down": 20.0}
    assert found["left"] == {"up": 0.5, "down": 0.5}
    assert (found["failed"], found["rounds"]["up"]) == (1, {"int4": 2})


def test_rows_of_other_sets_and_methods_stay_and_each_set_has_its_table(tmp_path: Path) -> None:
    (tmp_path / "README.md").write_text("<!-- table codecs -->\n<!-- end -->\n\n<!-- table chosen -->\n<!-- end -->\n")
    run = [ended(tmp_path / "s0", 0.9, 200)]
    codecs.write([codecs.row("heartbeat", "fedavg", "int8", run), codecs.row("mnist", "fedavg", "int8", run)], tmp_path)
    codecs.write([codecs.row("heartbeat", "fedavg", "int8", [])], tmp_path)
    codecs.write([codecs.row("har", "fedavg", "topk-10/int4", run)], tmp_path)
    rows = json.loads((tmp_path / "result.json").read_text())["rows"]
    assert [(one["data"], one["codec"]) for one in rows] == [
        ("heartbeat", "int8"), ("har", "topk-10/int4"), ("mnist", "int8")]  # fmt: skip
    first, second = (tmp_path / "README.md").read_text().split("<!-- table chosen -->")
    assert "| `fedavg` | `int8` | - | - | - | - | diverged | - | 0 |" in first
    assert "| `har` | `topk-10/int4` | 100 | 20 | 0.50 | 0.50 | 0.900 | - | 1 |" in second


@pytest.mark.parametrize("data", codecs.SETTINGS)
def test_every_set_is_an_experiment_on_validation_samples(data: str) -> None:
    asked = codecs.experiment("topk-10/int4", data=data)
    assert (asked.codec_up, asked.codec_down, asked.evaluation.within_training) == ("topk-10", "int4", True)
    assert asked.data.set == data


def test_the_time_of_codecs_is_taken_in_turn_and_bytes_are_of_the_whole_model() -> None:
    found = codec_time.measured(("int8", "topk-1"), times=2)
    assert 0 < found["topk-1"]["bytes"] < found["int8"]["bytes"] <= PARAMETERS * 1.01
    assert all(one["encode_ms"] > 0 and one["decode_ms"] > 0 for one in found.values())


def test_the_front_leaves_out_what_another_beats_in_cost_and_figure() -> None:
    points = {("a", "x"): (3.0, 0.9), ("a", "y"): (1.0, 0.7), ("b", "x"): (2.0, 0.6), ("b", "y"): (4.0, 0.9)}
    assert to_target_page.front(points) == [(1.0, 0.7), (3.0, 0.9)]
