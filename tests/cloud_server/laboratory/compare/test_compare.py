"""Comparing runs: exact figures over seeds, costs and gains, what is refused, and the output."""

from __future__ import annotations

import csv
import io
import itertools
import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from cloud_server.figures.formatting import flops_text
from cloud_server.figures.scores import Compared, Score, TaskScore
from cloud_server.laboratory.compare import comparison_charts, finished_runs, html_page, tables
from cloud_server.laboratory.compare.comparison import Bound, Comparison, Entry, Stat, compare, to_json
from cloud_server.laboratory.compare.finished_runs import DEVICES
from cloud_server.laboratory.plan.experiment import KINDS, RUNNING, SERVER
from cloud_server.ledger.ledger_sums import Bytes
from cloud_server.results import result as results
from fleet_core.base.errors import ConfigError, StateError
from tests.cloud_server.reports.test_report import Page

UP, DOWN, FLOPS = 100, 300, 5e9


def evaluated(mean: float) -> dict[str, Any]:
    """Two devices, one a tenth below ``mean`` and one above."""
    worst, best = max(0.0, mean - 0.1), min(1.0, mean + 0.1)
    return {
        "accuracy": {"mean": mean, "worst": worst, "best": best, "variance": 0.01, "pooled": mean},
        "macro_f1": max(0.0, mean - 0.2), "devices": {"a": worst, "b": best},
    }


def ended(
    folder: Path, label: str, accuracies: Sequence[float | None], *, method: str = "fedavg", seed: int = 0,
    models: tuple[float, float] = (1, 1), others: Sequence[str] = (), paper: float | None = None, new: bool = False,
    joules: float | None = None, targets: Sequence[float] = (), costs: bool = True, seconds: float = 1.0,
    **experiment: Any,
) -> Path:
    """The folder of a simulation with ten devices per round; a round without an accuracy was not evaluated."""
    rows = []
    for number, accuracy in enumerate(accuracies, 1):
        row: dict[str, Any] = {"round": number, "loss": 1.0, "participants": 10, "refused": 0, "seconds": 1.0}
        if costs:
            row |= {
                "models_transmitted": 10 * sum(models), "flops": FLOPS,
                "models_transmitted_paper": 10 * (sum(models) if paper is None else paper),
                "payload_bytes": {"up": int(UP * models[1]), "down": int(DOWN * models[0])},
            }
        if joules is not None:
            row["energy_j"] = {"value": joules, "source": "model of a board"}
        if accuracy is not None:
            row |= evaluated(accuracy)
            row |= {"new_devices": {"0.2": evaluated(max(0.0, accuracy - 0.3))}, "nvar": 0.5} if new else {}
            under = {kind: {**evaluated(accuracy - 0.1 * n), "new_devices": {"0.2": evaluated(0.4 + 0.1 * n)}}
                     for n, kind in enumerate(others)}
            row |= {"models": under} if under else {}
        rows.append(row)
    asked = {"data": {"set": "heartbeat", "path": None}, "partition": {"kind": "natural"}, "model": {"name": "mlp"},
             "evaluation": {"targets": list(targets), "every": 1}, "codec_up": "none", **experiment}
    written = {
        "format": 1, "kind": "simulation", "label": label, "method": method, "seed": seed, "seconds": seconds,
        "config": {"experiment": asked, "hyper": {"client_lr": 0.1}, "version": 1, "seed": seed},
        "environment": {}, "devices": 2, "rounds": rows,
    }
    place = folder / f"{label}-s{seed}"
    place.mkdir(parents=True)
    (place / "result.json").write_text(json.dumps(written))
    return place


def compared(*places: Path, **options: Any) -> Comparison:
    found, remarks = finished_runs.gather(places)
    return compare(found, remarks=remarks, **options)


def of(comparison: Comparison, label: str) -> Entry:
    (entry,) = (entry for entry in comparison.entries if entry.label == label)
    return entry


# Figures over seeds ---------------------------------------------------------------------------------------------------


def test_a_label_has_the_mean_and_the_sample_deviation_over_its_seeds(tmp_path: Path) -> None:
    for seed, last in enumerate((0.5, 0.6, 0.7)):
        ended(tmp_path, "fedavg", [0.4, last], seed=seed, new=True)
    (entry,) = compared(tmp_path).entries
    assert (entry.seeds, entry.devices) == ((0, 1, 2), 2)
    own = entry.accuracy
    assert [own.mean, own.std, own.min, own.max, own.seeds] == pytest.approx([0.6, 0.1, 0.5, 0.7, 3])
    assert entry.final[DEVICES]["worst"].mean == pytest.approx(0.5)
    assert entry.final[DEVICES]["variance"].mean == 0.01
    assert entry.final["new 0.2"]["mean"].mean == pytest.approx(0.3)
    assert entry.spent["payload_bytes"] == Stat(800.0, 0.0, 800.0, 800.0, 3)


def test_one_seed_has_no_spread(tmp_path: Path) -> None:
    (entry,) = compared(ended(tmp_path, "fedavg", [0.5])).entries
    assert entry.accuracy.std is None
    assert "std" not in json.dumps(to_json(compared(tmp_path)))


def test_curves_are_over_the_rounds_that_every_seed_was_evaluated_in(tmp_path: Path) -> None:
    ended(tmp_path, "fedavg", [0.1, 0.2, None, 0.4])
    ended(tmp_path, "fedavg", [None, 0.4, 0.5, 0.6], seed=1)
    (entry,) = compared(tmp_path).entries
    assert [(step.round, step.accuracy.mean) for step in entry.curve] == [(2, pytest.approx(0.3)), (4, 0.5)]
    assert entry.curve[0].spent["up_bytes"] == 2 * UP


@pytest.fixture
def alike(tmp_path: Path) -> Comparison:
    """Two methods under the same kinds of models; b does not have all of them."""
    return compared(
        *(ended(tmp_path / f"a{seed}", "a", [0.5, 0.7 + 0.1 * seed], seed=seed, others=KINDS) for seed in (0, 1)),
        *(ended(tmp_path / f"b{seed}", "b", [0.4, 0.6], seed=seed, others=(SERVER,)) for seed in (0, 1)))


def test_runs_are_compared_under_each_kind_of_model(alike: Comparison) -> None:
    a, b = of(alike, "a"), of(alike, "b")
    assert a.accuracy.mean == a.final["devices by server"]["mean"].mean == pytest.approx(0.75)
    assert a.final["devices by latest-mean"]["mean"].mean == pytest.approx(0.55)
    assert a.final["devices by latest-mean"]["macro_f1"].mean == pytest.approx(0.35)
    assert a.final["new 0.2 by running-mean"]["mean"].mean == pytest.approx(0.5)
    assert not {"devices by running-mean", "devices by latest-mean"} & set(b.final)
    assert [step.models[RUNNING].mean for step in a.curve] == pytest.approx([0.4, 0.65])
    assert [set(step.models) for step in b.curve] == [{SERVER}] * 2


def test_each_kind_of_model_is_a_column_and_a_chart(alike: Comparison) -> None:
    text = tables.closing(alike)
    head, first, second = text[text.index("accuracy of devices that train, by"):].splitlines()[1:4]
    assert re.split("  +", head.strip()) == ["served", "server's model", "running mean", "mean of the latest"]
    assert re.split("  +", first) == ["a", "0.750 ± 0.071", "0.750 ± 0.071", "0.650 ± 0.071", "0.550 ± 0.071"]
    assert re.split("  +", second)[1:] == ["0.600", "0.600", "—", "—"]
    assert "new" not in text.splitlines()[0], "the first table is of the served model"
    assert "accuracy of new devices, 20 % support, by" not in text, "they were not evaluated under the served model"
    charts = [chart for chart in comparison_charts.charts(alike) if chart.model]
    assert [(chart.axis, [curve.label for curve in chart.curves]) for chart in charts] == [
        ("rounds, under the server's model", ["a", "b"]), ("rounds, under the running mean", ["a"]),
        ("rounds, under the mean of the latest", ["a"])]
    assert charts[1].curves[0].points[-1] == pytest.approx((2, 0.65))
    seen = Page(html_page.render(alike, title="x"))
    assert "Devices that train, by the model that they get" in seen.text
    assert seen.text.count("under the running mean") >= 1
    assert {row["table"] for row in csv.DictReader(io.StringIO(tables.csv_text(alike)))} >= {"devices by running-mean"}


def test_labels_come_best_first(tmp_path: Path) -> None:
    for label, accuracy in (("a", 0.5), ("b", 0.7), ("c", 0.6)):
        ended(tmp_path, label, [accuracy])
    assert [entry.label for entry in compared(tmp_path).entries] == ["b", "c", "a"]


def test_a_cost_that_one_round_lacks_is_absent_from_then_on_and_never_less(tmp_path: Path) -> None:
    place = ended(tmp_path, "fedavg", [0.1, 0.2, 0.3])
    data = json.loads((place / "result.json").read_text())
    del data["rounds"][1]["flops"]
    (place / "result.json").write_text(json.dumps(data))
    (entry,) = compared(place).entries
    assert ["flops" in step.spent for step in entry.curve] == [True, False, False]
    assert "flops" not in entry.spent
    assert entry.spent["payload_bytes"].mean == 3 * (UP + DOWN)


# What an accuracy costs -----------------------------------------------------------------------------------------------


def test_a_target_costs_all_that_was_spent_up_to_the_first_evaluated_round_that_reaches_it(tmp_path: Path) -> None:
    ended(tmp_path, "fedavg", [None, 0.5, None, 0.9, None, 0.6], joules=2.0)
    entry = compared(tmp_path, targets=[0.7]).entries[0]
    (reached,) = entry.reached
    assert reached.seeds == 1
    assert {key: bound.value for key, bound in reached.at.items()} == {
        "rounds": 4, "models": 80, "fallah_rounds": 4, "payload_bytes": 4 * (UP + DOWN), "up_bytes": 4 * UP,
        "down_bytes": 4 * DOWN, "flops": 4 * FLOPS, "joules": 8.0,
    }
    assert {bound.sign for bound in reached.at.values()} == {"="}


def test_control_variates_count_as_sent_and_as_the_paper_counts(tmp_path: Path) -> None:
    ended(tmp_path, "pflscaf-proto", [0.5, 0.9], method="pflscaf-proto", models=(2, 1), paper=4)
    reached = compared(tmp_path, targets=[0.9]).entries[0].reached[0]
    assert (reached.at["models"].value, reached.at["fallah_rounds"].value) == (60, 4)


def test_the_gain_is_what_per_fedavg_spent_divided_by_what_was_spent(tmp_path: Path) -> None:
    ended(tmp_path, "per-fedavg-exact", [0.1, 0.2, 0.3, 0.8], method="per-fedavg-exact")
    ended(tmp_path, "scaf", [0.3, 0.8], method="pflscaf-proto", models=(2, 1), paper=4)
    found = compared(tmp_path, targets=[0.8])
    gain = of(found, "scaf").reached[0].gain
    assert found.baseline == "per-fedavg-exact"
    assert (gain["rounds"], gain["fallah_rounds"]) == (Bound(2.0), Bound(1.0))
    assert gain["payload_bytes"].value == 4 * (UP + DOWN) / (2 * (UP + 2 * DOWN))
    assert of(found, "per-fedavg-exact").reached[0].gain == {}


def test_a_target_that_is_not_reached_says_more_than_was_spent(tmp_path: Path) -> None:
    ended(tmp_path, "per-fedavg-fo", [0.1, 0.2, 0.3, 0.4], method="per-fedavg-fo")
    ended(tmp_path, "quick", [0.9])
    ended(tmp_path, "slow", [0.1, 0.2])
    found = compared(tmp_path, targets=[0.35, 0.5])
    early, late = of(found, "quick").reached
    assert (early.gain["rounds"], late.gain["rounds"]) == (Bound(4.0), Bound(4.0, ">"))
    assert of(found, "per-fedavg-fo").reached[1].at["rounds"] == Bound(4.0, ">")
    early, late = of(found, "slow").reached
    assert early.gain["rounds"] == Bound(2.0, "<")
    assert (late.seeds, late.at["rounds"], late.gain) == (0, Bound(2.0, ">"), {})


def test_a_target_that_some_seeds_reach_is_more_than_the_mean_of_what_all_spent(tmp_path: Path) -> None:
    ended(tmp_path, "fedavg", [0.9, 0.9, 0.9, 0.9])
    ended(tmp_path, "fedavg", [0.1, 0.1, 0.1, 0.1], seed=1)
    (reached,) = compared(tmp_path, targets=[0.5]).entries[0].reached
    assert (reached.seeds, reached.at["rounds"]) == (1, Bound(2.5, ">"))


def test_the_spread_of_a_cost_is_over_seeds(tmp_path: Path) -> None:
    ended(tmp_path, "fedavg", [0.1, 0.9, 0.9, 0.9])
    ended(tmp_path, "fedavg", [0.1, 0.1, 0.1, 0.9], seed=1)
    (reached,) = compared(tmp_path, targets=[0.5]).entries[0].reached
    assert reached.at["rounds"] == Bound(3.0, "=", 2**0.5)


def test_what_costs_nothing_has_no_gain_and_no_bound(tmp_path: Path) -> None:
    ended(tmp_path, "per-fedavg-fo", [0.1, 0.9], method="per-fedavg-fo")
    ended(tmp_path, "local", [0.1, 0.8], method="local", models=(0, 0))
    near, far = of(compared(tmp_path, targets=[0.8, 0.9]), "local").reached
    assert near.at["payload_bytes"] == Bound(0.0, std=None)
    assert "payload_bytes" not in near.gain
    assert "payload_bytes" not in far.at
    assert far.at["rounds"] == Bound(2.0, ">")


def test_targets_come_from_the_experiment_or_are_the_highest_that_were_reached_with_every_seed(tmp_path: Path) -> None:
    ended(tmp_path / "told", "fedavg", [0.5], targets=[0.4, 0.3])
    assert compared(tmp_path / "told").targets == (0.3, 0.4)
    assert compared(tmp_path / "told", targets=[0.2]).targets == (0.2,)
    for seed, top in enumerate((0.87654, 0.9)):
        ended(tmp_path / "not", "best", [0.1, top, 0.2], seed=seed)
        ended(tmp_path / "not", "base", [0.3339], method="per-fedavg-exact", seed=seed)
    found = compared(tmp_path / "not")
    assert found.targets == (0.333, 0.876)
    assert [one.seeds for one in of(found, "best").reached] == [2, 2]


def test_a_target_can_be_of_macro_f1(tmp_path: Path) -> None:
    ended(tmp_path, "fedavg", [0.5, 0.7, 0.9], targets=[0.5])  # macro-F1 is 0.2 below
    found = compared(tmp_path, target_of="macro-f1")
    assert found.targets == (0.7,)
    assert found.entries[0].reached[0].at["rounds"].value == 3
    found = compared(tmp_path, targets=[0.45], target_of="macro-f1")
    assert found.entries[0].reached[0].at["rounds"].value == 2
    assert tables.targets_text(found).startswith("to macro-f1 0.45 ")
    assert "What a macro-f1 of 0.45 costs" in html_page.render(found, title="x")
    assert compared(tmp_path).entries[0].reached[0].at["rounds"].value == 1


def test_gains_are_over_exact_per_fedavg_then_any_form_then_the_label_requested(tmp_path: Path) -> None:
    ended(tmp_path, "first-order", [0.9], method="per-fedavg-fo")
    assert compared(tmp_path).baseline == "first-order"
    ended(tmp_path, "worse", [0.3], method="per-fedavg-exact")
    ended(tmp_path, "better", [0.4], method="per-fedavg-exact")
    assert compared(tmp_path).baseline == "better"
    assert compared(tmp_path, baseline="worse").baseline == "worse"
    with pytest.raises(ConfigError, match=r"no run is labelled 'wurse' \(did you mean 'worse'"):
        compared(tmp_path, baseline="wurse")


def test_without_per_fedavg_there_are_no_gains(tmp_path: Path) -> None:
    ended(tmp_path, "fedavg", [0.5])
    found = compared(tmp_path, targets=[0.5])
    assert (found.baseline, found.entries[0].reached[0].gain) == (None, {})


# Which runs belong together -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("part", "other"),
    [("data", {"data": {"set": "mnist"}}), ("partition", {"partition": {"kind": "iid"}}),
     ("model", {"model": {"name": "cnn1d"}}), ("evaluated", {"evaluation": {"new_devices": 0.2}})],
)  # fmt: skip
def test_runs_of_different_settings_are_refused(tmp_path: Path, part: str, other: dict[str, Any]) -> None:
    ended(tmp_path, "a", [0.5])
    ended(tmp_path, "b", [0.6], **other)
    said = rf"these runs have different {part}, so .*\n.*a-s0.*\n.*b-s0.*\nhint:.*--mixed"
    with pytest.raises(ConfigError, match=said):
        compared(tmp_path)


def test_mixed_runs_stand_side_by_side_marked_and_without_gains_across_settings(tmp_path: Path) -> None:
    ended(tmp_path, "per-fedavg-fo", [0.5], method="per-fedavg-fo")
    ended(tmp_path, "per-fedavg-fo", [0.9], method="per-fedavg-fo", seed=1, model={"name": "cnn1d"})
    ended(tmp_path, "fedavg", [0.5])
    ended(tmp_path, "prox", [0.5], model={"name": "cnn1d"})
    found = compared(tmp_path, mixed=True, baseline="per-fedavg-fo (setting=A)", targets=[0.5])
    assert found.mixed == ("model",)
    assert {entry.label: entry.setting for entry in found.entries} == {
        "per-fedavg-fo (setting=A)": "A", "per-fedavg-fo (setting=B)": "B", "fedavg": "A", "prox": "B",
    }
    assert of(found, "fedavg").reached[0].gain["rounds"] == Bound(1.0)
    assert of(found, "prox").reached[0].gain == {}
    assert "different model: this does not compare methods" in tables.closing(found)
    seen = Page(html_page.render(found, title="x"))
    assert "do not compare methods" in seen.text
    assert ("td", {"class": "top"}) not in seen.tags


def test_one_label_of_two_choices_is_two_rows_that_name_the_difference(tmp_path: Path) -> None:
    ended(tmp_path / "a", "fedavg", [0.5])
    ended(tmp_path / "b", "fedavg", [0.6], codec_up="int8")
    ended(tmp_path / "b", "prox", [0.4])
    found = compared(tmp_path / "a", tmp_path / "b")
    assert [entry.label for entry in found.entries] == ["fedavg (codec_up=int8)", "fedavg (codec_up=none)", "prox"]


def test_a_seed_that_is_there_twice_is_refused_and_a_folder_given_twice_is_one(tmp_path: Path) -> None:
    first = ended(tmp_path / "a", "fedavg", [0.5])
    assert len(compared(first, tmp_path / "a", first / "result.json").entries) == 1
    ended(tmp_path / "b", "fedavg", [0.6])
    with pytest.raises(ConfigError, match="seed 0 of 'fedavg' is there twice"):
        compared(tmp_path / "a", tmp_path / "b")


def test_a_run_that_has_not_ended_is_left_out_and_named(tmp_path: Path) -> None:
    ended(tmp_path, "fedavg", [0.5])
    (tmp_path / "prox-s0").mkdir()
    (tmp_path / "prox-s0" / "run.json").write_text("{}")
    found = compared(tmp_path)
    assert len(found.entries) == 1
    assert found.remarks == (f"{tmp_path / 'prox-s0'} has not ended and is left out",)
    assert "has not ended" in Page(html_page.render(found, title="x")).text


def test_a_folder_without_runs_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="holds no run that has ended"):
        compared(tmp_path)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rounds": [{"round": 1, "participants": 1, "flops": float("nan")}]}, "expected a finite number"),
        ({"rounds": [{"round": 1, "participants": 1, "accuracy": {"mean": 2, "worst": 0, "best": 1}}]}, "2 is over"),
        ({"rounds": []}, "no round of it was evaluated"),
        ({"rounds": [{"round": 1, "participants": 1}]}, "no round of it was evaluated"),
        ({"config": {"experiment": 3}, "label": 4}, "expected text"),
    ],
)
def test_a_result_that_cannot_be_right_is_refused(tmp_path: Path, change: dict[str, Any], why: str) -> None:
    place = ended(tmp_path, "fedavg", [0.5])
    data = json.loads((place / "result.json").read_text())
    (place / "result.json").write_text(json.dumps({**data, **change}))
    with pytest.raises(StateError, match=why):
        compared(place)


@pytest.mark.parametrize("text", ["", "[]", "[" * 100_000])
def test_a_file_that_is_no_result_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "result.json").write_text(text)
    with pytest.raises(StateError, match=r"result.json: (is not JSON|holds no table)"):
        compared(tmp_path)


# Fleets and demos -----------------------------------------------------------------------------------------------------


def demo(folder: Path, method: str, seed: int = 0, devices: int = 2) -> Path:
    """The folder of a demo that was evaluated after its second round."""
    def score(accuracy: float) -> Score:
        return Score(accuracy=accuracy, macro_f1=0.5)

    rounds = tuple(
        results.RoundFigures(
            round=number, participants=2, refused=0, models_transmitted=4.0, payload_bytes=Bytes(up=10, down=20),
            accuracy=results.Spread(mean=0.7, worst=0.6, best=0.8) if number == 2 else None,
        )
        for number in (1, 2, 3)
    )
    people = tuple(
        results.Personalization(device=name, new=new, after=score(accuracy))
        for name, new, accuracy in (("a", False, 0.6), ("b", False, 0.9), ("c", True, 0.4))
    )
    run = results.Result(
        format=1, method=method, seed=seed, environment={}, devices=devices, rounds=rounds, personalization=people,
        config={"demo": {"data": "heartbeat", "devices": devices, "seed": seed},
                "fleet": {"fleet": {"method": method, "seed": seed}, "model": {"name": "cnn1d"}}},
        new_devices=results.Pooled(accuracy=0.4, macro_f1=0.3),
    )  # fmt: skip
    (folder / f"{method}-{seed}").mkdir(parents=True)
    (folder / f"{method}-{seed}" / "result.json").write_text(json.dumps(results.to_json(run)))
    return folder / f"{method}-{seed}"


def test_demos_are_compared_as_far_as_their_figures_go(tmp_path: Path) -> None:
    for method, seed in (("pflscaf-proto", 0), ("pflscaf-proto", 1), ("per-fedavg-exact", 0)):
        demo(tmp_path, method, seed)
    found = compared(tmp_path, targets=[0.7])
    entry = of(found, "pflscaf-proto")
    assert entry.seeds == (0, 1)
    assert entry.accuracy.mean == 0.75
    assert entry.final[DEVICES]["variance"].mean == pytest.approx(0.0225)
    assert entry.final["new"]["mean"].mean == 0.4
    assert entry.spent["fallah_rounds"].mean == 6
    reached = entry.reached[0]
    assert (reached.at["rounds"], reached.at["payload_bytes"].value) == (Bound(2.0, std=0.0), 60)
    assert reached.gain["fallah_rounds"] == Bound(0.5)
    assert "flops" not in entry.spent


def test_a_demo_beside_a_simulation_is_mixed(tmp_path: Path) -> None:
    places = demo(tmp_path, "fedavg"), ended(tmp_path, "prox", [0.5])
    with pytest.raises(ConfigError, match="these runs have different data, partition, model, evaluated"):
        compared(*places)
    assert len(compared(*places, mixed=True).entries) == 2


def test_demos_of_different_data_are_refused(tmp_path: Path) -> None:
    places = demo(tmp_path, "fedavg"), demo(tmp_path, "fedprox", devices=3)
    with pytest.raises(ConfigError, match="these runs have different data"):
        compared(*places)


def task_fleet(folder: Path, method: str, figure: str, task: str, means: tuple[float, float], **spread: float) -> Path:
    """The result.json of a fleet without classes, evaluated after both of its rounds, and of a new device."""
    measures = {"m": {"speed": means[1]}}
    score = TaskScore(task=task, samples=9, measures=measures)
    rounds = tuple(
        results.RoundFigures(round=number, participants=2, refused=0, models_transmitted=4.0, task=score,
                             compared={figure: Compared(mean, **{"worst": 0.9, "best": 0.1, "pooled": mean, **spread})})
        for number, mean in enumerate(means, 1)
    )
    run = results.Result(
        format=1, method=method, seed=0, environment={}, devices=2, rounds=rounds,
        config={"fleet": {"method": method}, "model": {"name": "mlp"}}, task={"after": score},
        task_new_devices={"after": score}, compared={figure: Compared(means[1], 0.8, 0.2, 0.01, means[1])},
        compared_new_devices={figure: Compared(0.7, 0.7, 0.7)},
        personalization=tuple(results.Personalization(device=name, new=name == "c", task={"after": score})
                              for name in "abc"),
    )
    (folder / method).mkdir(parents=True)
    (folder / method / "result.json").write_text(json.dumps(results.to_json(run)))
    return folder / method


def test_fleets_of_a_task_are_compared_by_its_own_figure(tmp_path: Path) -> None:
    task_fleet(tmp_path, "fedavg", "error", "regression", (0.5, 0.4))
    task_fleet(tmp_path, "per-fedavg-exact", "error", "regression", (0.9, 0.5))
    found = compared(tmp_path, targets=[0.5])
    assert found.measured == "error"
    assert [entry.label for entry in found.entries] == ["fedavg", "per-fedavg-exact"], "less is better"
    best = found.entries[0]
    assert {key: one.mean for key, one in best.final[DEVICES].items()} == {
        "mean": 0.4, "worst": 0.8, "best": 0.2, "variance": 0.01, "pooled": 0.4, "m speed": 0.4, "devices": 2}
    assert best.final["new"]["mean"].mean == 0.7
    assert best.final["new"]["devices"].mean == 1
    assert [step.accuracy.mean for step in best.curve] == [0.5, 0.4]
    assert best.reached[0].gain["models"] == Bound(2.0)
    assert "MAE in deviations" in tables.closing(found)


def test_fleets_of_two_tasks_are_refused(tmp_path: Path) -> None:
    places = (task_fleet(tmp_path, "fedavg", "error", "regression", (0.5, 0.4)),
              task_fleet(tmp_path, "fedprox", "auroc", "anomaly", (0.5, 0.4)))
    with pytest.raises(ConfigError, match=r"has MAE in deviations, and .* AUROC\n.*compare them apart"):
        compared(*places, mixed=True)
    with pytest.raises(ConfigError, match=r"has MAE in deviations, and .* accuracy"):
        compared(places[0], demo(tmp_path, "pflscaf-proto"), mixed=True)


def test_a_result_from_before_tasks_were_compared_is_refused_with_what_to_give_instead(tmp_path: Path) -> None:
    place = task_fleet(tmp_path, "fedavg", "error", "regression", (0.5, 0.4)) / "result.json"
    old = {key: value for key, value in json.loads(place.read_text()).items() if not key.startswith("compared")}
    old["rounds"] = [{key: value for key, value in row.items() if key != "compared"} for row in old["rounds"]]
    place.write_text(json.dumps(old))
    with pytest.raises(StateError, match="no round of it was evaluated\nhint: give the fleet's folder"):
        compared(place)


# What people see ------------------------------------------------------------------------------------------------------


@pytest.fixture
def found(tmp_path: Path) -> Comparison:
    for seed, more in enumerate((0.0, 0.02)):
        ended(tmp_path, "proto", [0.3, 0.6 + more, 0.9 + more], seed=seed, method="pfldyn-proto", new=True)
        ended(tmp_path, "exact", [0.2, 0.4, 0.6 + more], seed=seed, method="per-fedavg-exact", new=True)
        ended(tmp_path, "alone", [0.5, 0.5, 0.5], seed=seed, method="local", models=(0, 0), new=True)
    return compared(tmp_path, targets=[0.6])


def test_the_closing_table_has_a_line_for_each_label(found: Comparison) -> None:
    head, rule, *lines = tables.closing(found).splitlines()
    assert head.split() == ["seeds", "accuracy", "worst", "device", "macro-F1", "new", "20", "%", "rounds", "models",
                            "payload", "energy"]  # fmt: skip
    assert set(rule) == {"-"}
    assert re.split(r"  +", lines[0]) == [
        "proto", "2", "0.910 ± 0.014", "0.810 ± 0.014", "0.710 ± 0.014", "0.610 ± 0.014", "3", "60", "1.20 kB", "—",
    ]  # fmt: skip
    assert lines[2].startswith("alone")
    assert "0 B" in lines[2]
    assert "±: sample standard deviation over seeds" in lines


def test_the_targets_table_has_amounts_and_gains(found: Comparison) -> None:
    head, proto, exact, alone = tables.targets_text(found).splitlines()
    assert re.split(r"  +", head) == ["to 0.6", "rounds", "Per-FedAvg rounds", "models", "payload", "arithmetic"]
    assert re.split(r"  +", proto) == ["proto", *["2 (1.5×)"] * 2, "40 (1.5×)", "800 B (1.5×)", "10.0 GFLOP (1.5×)"]  # noqa: RUF001
    assert re.split(r"  +", exact) == ["exact", "3", "3", "60", "1.20 kB", "15.0 GFLOP"]
    assert re.split(r"  +", alone) == ["alone", ">3 (<1.0×)", "—", "—", "—", ">15.0 GFLOP (<1.0×)"]  # noqa: RUF001


@pytest.mark.parametrize(
    ("stat", "text"),
    [
        (Stat(1.49e12, 1.8e11, 0, 0, 3), "1.49 ± 0.18 TFLOP"),
        (Stat(1.49e12, 0.0, 0, 0, 3), "1.49 TFLOP"),
        (Stat(0.0, 0.1, 0, 0, 3), "0.00 FLOP"),
        (None, "—"),
    ],
)
def test_a_spread_is_in_the_unit_of_its_mean(stat: Stat | None, text: str) -> None:
    assert tables.stat_text(stat, flops_text) == text


def test_the_csv_has_every_figure_in_plain_units(found: Comparison) -> None:
    rows = list(csv.DictReader(io.StringIO(tables.csv_text(found))))
    by_key = {(row["label"], row["table"], row["figure"]): row for row in rows}
    assert len(by_key) == len(rows)
    row = by_key["proto", "devices", "mean"]
    assert [float(row["mean"]), float(row["std"])] == pytest.approx([0.91, 0.02 / 2**0.5])
    assert row["seeds"] == "0 1"
    assert by_key["proto", "whole run", "payload_bytes"]["mean"] == "1200.0"
    cost = by_key["alone", "cost of 0.6", "rounds"]
    assert (cost["mean"], cost["sign"], cost["reached"]) == ("3.0", ">", "0")
    assert by_key["proto", "gain at 0.6", "rounds"]["mean"] == "1.5"


def test_charts_have_a_curve_for_each_label_in_units_that_fit(found: Comparison) -> None:
    charts = {chart.measure.key: chart for chart in comparison_charts.charts(found)}
    assert list(charts) == ["rounds", "models", "payload_bytes", "flops"]
    assert charts["payload_bytes"].axis == "payload, kB"
    proto, exact, alone = charts["payload_bytes"].curves
    assert [x for x, _ in proto.points] == [0.4, 0.8, 1.2]
    assert [y for _, y in exact.points] == [0.2, 0.4, pytest.approx(0.61)]
    assert proto.low[2][1] == pytest.approx(0.91 - 0.02 / 2**0.5)
    assert proto.high[2][1] == pytest.approx(0.91 + 0.02 / 2**0.5)
    assert (alone.free, alone.points) == (True, [(0.0, 0.5), (1.2, 0.5)])
    assert not charts["flops"].curves[2].free
    assert [x for x, _ in charts["flops"].curves[2].points] == [5.0, 10.0, 15.0]


def test_the_first_labels_differ_in_colour_neighbours_in_dashes_too_and_no_two_look_alike() -> None:
    styles = [comparison_charts.style(number) for number in range(32)]
    assert len(set(styles)) == 32
    assert len({colour for colour, _ in styles[:8]}) == 8
    assert all(one[1] != other[1] for one, other in itertools.pairwise(styles))


@pytest.mark.slow
def test_the_picture_is_a_png_of_all_charts(found: Comparison) -> None:
    data = comparison_charts.png(found, "title")
    assert data.startswith(b"\x89PNG\r\n\x1a\n")
    width, height = (int.from_bytes(data[at : at + 4], "big") for at in (16, 20))
    assert (width, height) == (1380, 1185)


def test_the_page_needs_nothing_from_outside_itself_and_says_what_the_tables_say(found: Comparison) -> None:
    html = html_page.render(found, title="Hearts")
    seen = Page(html)
    assert not re.search(r"https?:|url\(|@import|<script|\bsrc=|\bhref=", html)
    assert ("meta", "default-src 'none'; style-src 'unsafe-inline'") in [(t, a.get("content")) for t, a in seen.tags]
    assert sum(tag == "polyline" for tag, _ in seen.tags) == 3 * 4
    assert ("td", {"class": "top"}) in seen.tags
    for words in ("Hearts heartbeat · natural · mlp · 2 devices · 3 labels · 2 seeds", "0.910 ± 0.014",
                  "New devices, 20 % support, at the end", "What an accuracy of 0.6 costs; below, the gain over exact",
                  "set = heartbeat", "2 of 2", "0 of 2", ">3", "Least payload to 0.6", "proto; exact takes 1.5×"):  # noqa: RUF001
        assert words in seen.text


def test_what_is_written_by_others_is_escaped_in_the_page(tmp_path: Path) -> None:
    ended(tmp_path, "a<script>", [0.5], data={"path": "/x/<i>.npz"})
    html = html_page.render(compared(tmp_path), title="</title><b>")
    assert not re.search(r"<script|<i>|<b>", html)


def test_the_json_has_no_empty_figure_and_can_be_read_again(found: Comparison) -> None:
    data = json.loads(json.dumps(to_json(found), allow_nan=False))
    assert (data["format"], data["baseline"], data["targets"]) == (1, "exact", [0.6])
    assert [entry["label"] for entry in data["entries"]] == ["proto", "exact", "alone"]
    assert "null" not in json.dumps(data["entries"])
