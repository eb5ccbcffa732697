"""The strangers' benchmark: every file form reads back as the samples that were written, the requirement finds fleets
that are behind without a warning, and the way from a file to a bundle works as processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from benchmarks import markdown
from benchmarks.own_data import commands, files, strangers, walk
from benchmarks.own_data.strangers import BASELINES, FLEET, FREQUENT, GROUPS
from cloud_server.choices.first_settings import load_data


def result(
    fleet: float, baseline: float, *, late: float | None = None, warnings: tuple[str, ...] = ()
) -> dict[str, Any]:
    """A set whose fleet and best baseline have these accuracies and macro-F1."""
    def group(share: float) -> dict[str, Any]:
        scores = {name: [0.4, 0.4] for name in BASELINES} | {BASELINES[-1]: [baseline, baseline]}
        return {"samples": 240, "scores": {FLEET: [share, share], FREQUENT: [0.3, 0.2], **scores}}

    return {
        "form": ".npz", "shape": [6, 64], "model": "ds-cnn", "seconds": {"init": 60.0, "rounds": 90.0, "all": 200.0},
        "payload_bytes": {"up": 4_000_000, "down": 9_000_000}, "taught": {"before": [0.5, 0.5], "after": [0.6, 0.6]},
        "warnings": {"init": list(warnings), "status": [], "report": [], "log": []},
        "groups": dict(zip(GROUPS, (group(fleet), group(fleet if late is None else late)), strict=True)),
    }


def test_a_fleet_more_than_three_points_behind_the_best_baseline_without_a_warning_is_reported() -> None:
    assert strangers.silent({"a": result(0.9, 0.92), "b": result(0.8, 0.84, warnings=("worse",))}) == []
    assert strangers.silent({"c": result(0.8, 0.84)}) == [
        f"c, {who}: 4.0 points behind the best baseline ({BASELINES[-1]})"
        for who in ("the fleet", "late joiners")
    ]


def test_late_joiners_alone_may_be_behind_and_macro_f1_counts_as_accuracy_does() -> None:
    (only,) = strangers.silent({"a": result(0.9, 0.92, late=0.7)})
    assert only.startswith("a, late joiners: 22.0 points")
    rare = result(0.9, 0.9)
    rare["groups"]["fleet"]["scores"][FLEET] = [0.9, 0.8]
    assert strangers.behind(rare["groups"]["fleet"]) == pytest.approx(0.1)


def test_the_tables_name_every_set_with_its_warning_and_say_what_the_requirement_found() -> None:
    sets = {"quiet": result(0.8, 0.84), "told": result(0.8, 0.84, warnings=("worse",)), "good": result(0.95, 0.9)}
    made = strangers.tables({"sets": sets})
    assert "Of 3 sets with two groups each, 4 groups end more than 3 points behind" in made["requirement"]
    assert "2 of them without a warning" in made["requirement"]
    assert f"* quiet, the fleet: 4.0 points behind the best baseline ({BASELINES[-1]}); warning of nobody" in made[
        "requirement"]
    assert f"* told, late joiners: 4.0 points behind the best baseline ({BASELINES[-1]}); warning of init" in made[
        "requirement"]
    assert "| told | 80.0 / 80.0 |" in made["fleet"]
    assert made["fleet"].count("| init |") == 1
    assert "| good | .npz | 6 by 64 | ds-cnn | 60 | 90 | 200 | 4,000 | 9,000 | 50.0 → 60.0 |" in made["cost"]


def test_the_page_shows_the_committed_result_and_all_sets_that_are_behind_without_a_warning() -> None:
    kept = json.loads(strangers.RESULT.read_text())
    text = strangers.PAGE.read_text()
    assert markdown.filled(text, strangers.tables(kept)) == text
    assert set(kept["sets"]) == set(files.names())
    assert [sentence.partition(":")[0] for sentence in strangers.silent(kept["sets"])] == ["event-free, late joiners"]
    assert "**It does not hold in one place:** the late joiners of `event-free`" in text


@pytest.mark.parametrize("name", ["event-free", "level-free", "chirp-free", "vibration-rows", "marks-image"])
def test_a_file_of_each_form_holds_the_samples_that_were_written(tmp_path: Path, name: str) -> None:
    made = files.made(name, devices=2, per_class=3)
    form = files.form_of(name)
    path = files.write(made, tmp_path / "samples", form)
    found, spec = load_data(str(path), window=made.x.shape[-1] if form == files.LONG else None)
    assert spec.shape == made.x.shape[1:]
    assert found.classes is not None
    np.testing.assert_array_equal(found.x, made.x)
    np.testing.assert_array_equal(np.array(found.classes)[found.y], made.y)
    np.testing.assert_array_equal(found.client, made.client)


def test_late_joiners_have_few_samples_and_nobody_learns_from_what_is_asked() -> None:
    devices = walk.devices_of(files.made("vibration-free", walk.TRAINING + walk.LATE, 40))
    assert [len(device.recorded.y) for device in devices] == [120] * walk.TRAINING + [walk.LATE_WINDOWS] * walk.LATE
    assert {len(device.later.y) for device in devices} == {48}
    for device in devices:
        known = [device.learned, *([] if device.more is None else [device.more])]
        assert max(part.time[-1] for part in known) < device.later.time[0]


@pytest.mark.slow
def test_a_command_that_fails_is_reported_with_what_it_said(tmp_path: Path) -> None:
    here = commands.Commands(tmp_path)
    with pytest.raises(commands.Failed, match=r"metafleet server status nowhere: exit code \d+\n.*nowhere"):
        here.done("metafleet", "server", "status", "nowhere")
    assert here.noted[0]["exit_code"] != 0


@pytest.mark.slow
@pytest.mark.timeout(3600)  # a guard; each command has a limit of its own
def test_the_whole_way_from_a_file_of_readings_to_a_bundle_works(tmp_path: Path) -> None:
    found = strangers.run("level-free", tmp_path, strangers.QUICK)
    assert (found["form"], found["model"], found["rounds"]) == (files.LONG, "ds-cnn", 3)
    for group in found["groups"].values():
        assert set(group["scores"]) == {FLEET, FREQUENT, *BASELINES}
        assert group["samples"] >= 64
    assert found["taught"]["more"] > 0
    noted = json.loads((tmp_path / "level-free" / "commands.json").read_text())
    assert {note["exit_code"] for note in noted} == {0}
    said = "".join(note["stdout"] + note["stderr"] for note in noted)
    assert "Traceback" not in said
