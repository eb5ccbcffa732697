"""The sensor experiments: the grid search never sees evaluation data, gives every method the same work, and its choice
is what runs."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.papers import choose, page
from benchmarks.papers.sensors import table
from cloud_server.laboratory.advise.candidates import score
from cloud_server.laboratory.advise.short_comparison import METHODS_TRIED
from cloud_server.laboratory.compare import finished_runs
from cloud_server.laboratory.compare.comparison import Bound, stat
from cloud_server.laboratory.compare.tables import TIMES
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan.experiment import Experiment
from cloud_server.laboratory.run.simulate import Options, simulate
from fleet_core.algorithms.methods.registry import PRODUCT
from fleet_core.base import schema
from tests.support.lab import settings

SETS = tuple(table.SETS)
HERE = table.CHOSEN.parent


def grid(name: str) -> Experiment:
    return experiments.load(HERE / "grid" / f"{name}.toml")


def run(name: str) -> Experiment:
    return experiments.load(HERE / f"{name}.toml")


@pytest.mark.parametrize("name", SETS)
def test_the_grid_is_evaluated_inside_the_training_part_of_the_same_devices(name: str) -> None:
    tried, evaluated = grid(name), run(name)
    assert tried.evaluation.within_training
    assert not evaluated.evaluation.within_training
    for part in ("data", "partition", "model", "cohort"):
        assert getattr(tried, part) == getattr(evaluated, part)
    assert tried.evaluation.support_split == evaluated.evaluation.support_split == "time"


@pytest.mark.parametrize("name", SETS)
def test_every_method_is_tried_and_run_and_no_other_choice_than_the_grids(name: str) -> None:
    assert {section.name for section in grid(name).method} == set(PRODUCT)
    chosen = {one.method.name: one.hyper for one in experiments.runs(run(name))}
    assert set(chosen) == set(PRODUCT)
    for one in experiments.runs(grid(name)):
        if one.hyper == chosen.get(one.method.name):
            del chosen[one.method.name]
    assert not chosen


@pytest.mark.parametrize("name", SETS)
def test_every_method_makes_as_many_gradient_steps_on_as_many_samples(name: str) -> None:
    for one in (*experiments.runs(grid(name)), *experiments.runs(run(name))):
        hyper = schema.plain(one.hyper)
        assert hyper["local_steps"] * hyper.get("personal_steps", 1) == 8
        assert hyper.get("batch", 0) + hyper.get("support_batch", 0) + hyper.get("query_batch", 0) == 32
        assert hyper.get("inner_steps", 1) == 1
        assert hyper.get("finetune_steps", 0) in (0, 20)


def of_the_grid(name: str, result: float) -> dict[str, list[dict[str, Any]]]:
    """Every candidate of a grid, all with the same result."""
    asked, every = grid(name), dict[str, list[dict[str, Any]]]()
    for one in experiments.runs(replace(asked, seeds=asked.seeds[:1])):
        hyper = choose.differing(one.method.name, schema.plain(one.hyper))
        every.setdefault(one.method.name, []).append({"hyper": hyper, "macro_f1": result})
    return every


@pytest.mark.parametrize("name", SETS)
def test_what_is_run_is_what_was_chosen_and_before_that_the_first_of_the_grid(name: str) -> None:
    every = json.loads((HERE / choose.CHOSEN).read_text()) if (HERE / choose.CHOSEN).exists() else {}
    assert every.get(name, {}).get("seeds", list(grid(name).seeds)) == list(grid(name).seeds)
    tried = of_the_grid(name, 0.0)
    found = every[name]["methods"] if name in every else tried
    assert "".join(choose.settings(found)) == (HERE / f"{name}.toml").read_text().partition(choose.LINE)[2]
    assert {method: [one["hyper"] for one in several] for method, several in found.items()} == {
        method: [one["hyper"] for one in several] for method, several in tried.items()
    }


def test_the_choice_is_the_best_candidate_and_of_equals_the_first(tmp_path: Path) -> None:
    found = {"fedavg": [{"hyper": {"client_lr": lr}, "macro_f1": value}
                        for lr, value in ((0.05, 0.7), (0.2, 0.8), (0.4, 0.8))]}
    path = tmp_path / "x.toml"
    path.write_text(f"seeds = [0]\n{choose.LINE}old\n")
    choose.written(path, found)
    assert path.read_text() == (
        f'seeds = [0]\n{choose.LINE}\n[[method]]\nname = "fedavg"\nhyper = {{ client_lr = 0.2 }}\n'
    )


@pytest.fixture(scope="module")
def both_seeds(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    """The folders of finished runs of two seeds with devices, including new ones."""
    from tests.support.lab import recordings

    folder = tmp_path_factory.mktemp("sensors")
    asked = experiments.read(settings(
        recordings(folder / "all.npz", devices=5), "fedavg", {"local_steps": 2, "batch": 12}, cohort=0, seeds=[0, 1],
        evaluation={"every": 2, "new_devices": 0.4, "support": [0.3], "support_split": "time"},
    ))
    return simulate(asked, folder / "out", Options(jobs=1, device="cpu"))


@pytest.fixture(scope="module")
def ended(both_seeds: list[Path]) -> Path:
    return both_seeds[0]


def test_the_measure_is_that_of_the_advice(ended: Path) -> None:
    rows = [row for row in json.loads((ended / "result.json").read_text())["rounds"] if "accuracy" in row]
    assert table.details("x", "fedavg", rows)["devices"] == 3
    (_, first), (number, last) = table.details("x", "fedavg", rows)["score"]
    assert (number, last) == (4, pytest.approx(score(finished_runs.read(ended / "result.json")), abs=1e-6))
    own, new = rows[0]["macro_f1"], rows[0]["new_devices"]["0.3"]["macro_f1"]
    assert first == pytest.approx((3 * own + 2 * new) / 5, abs=1e-6)


def test_a_candidate_is_what_differs_from_the_defaults_with_its_mean_over_seeds(both_seeds: list[Path]) -> None:
    (found,) = choose.candidates(both_seeds)["fedavg"]
    assert found["hyper"] == {"local_steps": 2, "batch": 12}
    first, second = (score(finished_runs.read(folder / "result.json")) for folder in both_seeds)
    assert first != second
    assert found["macro_f1"] == pytest.approx((first + second) / 2, abs=1e-4)


def method(*curves: list[list[float]], name: str = "fedavg") -> dict[str, Any]:
    """Seeds of four rounds that cost two devices 80 bytes, evaluated as in ``curves``."""
    return {"method": name, "seeds": {
        str(seed): {"ended": True, "round": 4, "spent": {"payload_bytes": 80.0, "rounds": 4.0},
                    "details": {"score": curve, "devices": 2}}
        for seed, curve in enumerate(curves)
    }}


def test_a_cost_is_a_devices_up_to_the_first_evaluated_round_that_reaches_the_target() -> None:
    one = method([[2, 0.5], [4, 0.9]], [[2, 0.8], [4, 0.7]])
    found = table.cost(one, 0.8, "payload_bytes")
    assert found is not None
    assert (found.value, found.sign) == (30.0, "=")
    assert table.cost(one, 0.8, "rounds") == Bound(3.0)
    more = table.cost(one, 0.85, "payload_bytes")
    assert more is not None
    assert (more.value, more.sign) == (40.0, ">")
    assert table.cost(one, 0.8, "flops") is None


def test_methods_are_told_apart_by_more_than_the_spread_and_half_a_point() -> None:
    assert not table.apart(stat([0.8, 0.8]), stat([0.796, 0.796]))
    assert table.apart(stat([0.8, 0.8]), stat([0.79, 0.79]))
    assert not table.apart(stat([0.9, 0.8]), stat([0.8, 0.8]))
    assert not table.apart(stat([0.8]), stat([0.79]))
    assert table.apart(stat([0.8]), stat([0.77]))


def test_the_tables_have_the_best_first_and_mark_what_is_not_told_apart() -> None:
    figures = {"macro_f1": {"mean": 0.7, "std": 0.1}}
    by_label = {
        label: {**method(*([[2, 0.1], [4, value]] for value in values), name=label), "over": {"figures": figures}}
        for label, values in {"fedavg": (0.5, 0.52), "fedavg-meta": (0.9, 0.91), "knn-per": (0.903, 0.905)}.items()
    }
    one = {"settings": {"evaluation": {"support": [0.3]}}, "methods": by_label}
    made = table.tables({"experiments": {"har": one, "heartbeat": one}}, {})
    rows = [[cell.strip() for cell in line.split("|")[1:-1]] for line in made["har"].splitlines()[2:]]
    assert [row[:2] for row in rows] == [["`fedavg-meta`", "0.905 ± 0.007 ="], ["`knn-per`", "0.904 ± 0.001 ="],
                                         ["`fedavg`", "0.510 ± 0.014"]]
    assert rows[0][2] == "0.700 ± 0.100"
    costs = [[cell.strip() for cell in line.split("|")[1:-1]] for line in made["har-costs"].splitlines()[2:]]
    assert [row[1:4] for row in costs] == [
        ["4", "40 B", ""], ["4", "40 B", f"1.0{TIMES}"], [">4", ">40 B", f"<1.0{TIMES}"],
    ]
    assert made["both"].splitlines()[2].split("|")[1].strip() == "`fedavg-meta`"


@pytest.mark.parametrize("name", SETS)
def test_the_advice_tries_a_method_that_ties_with_the_best_or_the_page_says_what_is_missing(
    name: str,
) -> None:
    path = HERE / page.RESULT
    order = table.ranked(json.loads(path.read_text()), name) if path.exists() else []
    if {label for label, _, _ in order} < set(PRODUCT):
        assert "have not been made yet" in (HERE / "README.md").read_text()
        return
    best = order[0][2]
    assert [label for label, _, one in order if label in METHODS_TRIED and not table.apart(best, one)]
