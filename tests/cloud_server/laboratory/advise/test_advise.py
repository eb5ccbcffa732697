"""Advice: data that cannot be evaluated, what a budget allows, the decision and its text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.figures.scores import Score
from cloud_server.laboratory.advise import short_comparison as advising
from cloud_server.laboratory.advise.candidates import Candidate, candidates
from cloud_server.laboratory.advise.recommendation import baseline_facts, decide, federated, sentences, table, to_json
from cloud_server.laboratory.advise.recordings import Model, models_for, recordings
from cloud_server.laboratory.advise.short_comparison import Options, Outcome, fitting_plan, later_runs
from cloud_server.laboratory.advise.simple_baselines import SimpleBaselines
from cloud_server.laboratory.advise.task_baselines import TaskBaselines
from cloud_server.laboratory.compare import finished_runs
from cloud_server.laboratory.compare.comparison import stat
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan.experiment import Experiment
from cloud_server.laboratory.run import simulate
from cloud_server.records.fleet_settings import FleetConfig
from fleet_core.base import config
from fleet_core.base.errors import ConfigError, DataError
from fleet_core.data.samples import Samples, save
from fleet_core.tasks.regression import COMPARED, Regression
from tests.cloud_server.laboratory.compare.test_compare import DOWN, UP, ended

ROWS = 30


def written(path: Path, clients: int = 6, rows: int = ROWS, kinds: int = 3, **changes: Any) -> str:
    """A file of separable classes in four features; clients differ only by a shift."""
    rng = np.random.default_rng(0)
    y = np.tile(np.arange(rows) % kinds, clients)
    client = np.repeat(np.array([f"d{i}" for i in range(clients)], dtype=np.str_), rows)
    x = np.eye(kinds, 4)[y] * 3 + np.repeat(rng.normal(size=(clients, 4)), rows, axis=0)
    x = x + rng.normal(size=x.shape) / 4
    made = {"x": x.astype(np.float32), "y": y, "client": client, "time": np.tile(np.arange(rows) * 1.0, clients),
            "classes": tuple("abc"[:kinds]), **changes}  # fmt: skip
    save(path, Samples(**made))
    return str(path)


# Data -----------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"client": None}, "names no client"),
        ({"clients": 1}, "holds 1 client, 1 with 20 samples or more; expected 4 such clients"),
        ({"rows": 19}, "holds 6 clients, 0 with 20 samples or more"),
        ({"kinds": 1}, "holds one class alone"),
        ({"y": np.repeat(np.arange(6) % 3, ROWS)}, "holds clients of one class each"),
    ],
)
def test_data_that_cannot_be_evaluated_are_refused_with_the_reason(
    tmp_path: Path, changes: dict[str, Any], why: str
) -> None:
    with pytest.raises(DataError, match=why):
        recordings(written(tmp_path / "mine.npz", **changes))


def test_a_file_without_labels_and_an_invalid_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text("a,client\n1,x\n")
    with pytest.raises(DataError, match="label"):
        recordings(str(tmp_path / "mine.csv"))
    with pytest.raises(DataError, match=r"is neither a data set nor a file \(did you mean 'heartbeat'"):
        recordings("hartbeat")


def test_what_is_left_out_or_assumed_is_reported(tmp_path: Path) -> None:
    assert recordings(written(tmp_path / "a.npz")).remarks == ()
    client = np.repeat(np.array(["a", "b", "c", "d", "e", "f"], dtype=np.str_), ROWS)
    client[:15] = "b"
    said = recordings(written(tmp_path / "b.npz", client=client, time=None, classes=None, y=np.arange(180) % 3))
    assert said.clients == 5
    assert said.remarks == (
        "1 of 6 clients have fewer than 20 samples and are left out",
        "there are no times: the order of the rows is used instead",
        "the classes have no names, which a fleet needs: add an array 'classes'",
    )


@pytest.mark.parametrize(
    ("shape", "dtype", "labels"),
    [
        ((3, 128), np.float32, ["ds-cnn", "cnn1d", "mlp"]),
        ((1, 28, 28), np.uint8, ["ds-cnn", "lenet-lim", "conv4"]), ((1, 9, 9), np.uint8, ["ds-cnn", "lenet-lim"]),
        ((1, 6, 9), np.uint8, ["ds-cnn", "mlp"]), ((12,), np.float32, ["mlp", "mlp-64-64", "logistic"]),
        ((20,), np.int64, ["char-lstm"]),
    ],
)  # fmt: skip
def test_models_fit_the_shape_of_the_samples(shape: tuple[int, ...], dtype: Any, labels: list[str]) -> None:
    assert [m.label for m in models_for(Samples(np.zeros((4, *shape), dtype), np.arange(4)))] == labels


def test_the_input_is_standardized_by_channel_of_what_comes_first_in_time(tmp_path: Path) -> None:
    late = np.zeros((6 * ROWS, 4), np.float32)
    late.reshape(6, ROWS, 4)[:, 18:] = 1000
    found = recordings(written(tmp_path / "mine.npz", x=late))
    assert found.section == {"path": str(tmp_path / "mine.npz"), "mean": (0.0,) * 4, "std": (1.0,) * 4}
    tokens = recordings(written(tmp_path / "text.npz", x=np.ones((6 * ROWS, 4), np.int64)))
    assert tokens.section == {"path": str(tmp_path / "text.npz")}
    assert "x is read as text" in tokens.remarks[0]
    assert recordings("heartbeat").section == {"set": "heartbeat"}


# The budget -----------------------------------------------------------------------------------------------------------


def test_the_budget_gives_the_rounds_of_all_models_or_else_of_the_quickest() -> None:
    same, both = {"cnn1d": 1.0, "mlp": 1.0}, 2 * 6 + later_runs(codecs=4)
    left_s = both * (2.0 + 10 * 1.0) / 0.85 / 2
    assert fitting_plan(same, 2.0, left_s + 1, 2, 4) == (10, ("cnn1d", "mlp"), 2)
    assert fitting_plan(same, 2.0, 100 * left_s, 2, 4) == (advising.MAX_ROUNDS, ("cnn1d", "mlp"), 2)
    rounds, models, whole = fitting_plan({"cnn1d": 100.0, "mlp": 1.0}, 2.0, left_s, 2, 4)
    assert (models, whole, rounds > 10) == (("mlp",), 1, True)
    with pytest.raises(ConfigError, match=r"5 rounds with mlp alone take about 1 minute more"):
        fitting_plan({"cnn1d": 100.0, "mlp": 1.0}, 2.0, 10.0, 2, 4)


def test_each_codec_takes_its_part_of_the_budget_and_a_short_one_has_all_but_one_dropped() -> None:
    assert later_runs(codecs=4) - later_runs(codecs=1) == 3 * (1 + len(advising.MORE_SEEDS))
    paces, left_s = {"mlp": 1.0}, (6 + later_runs(codecs=1)) * 5.01 / 0.85
    assert [fitting_plan(paces, 0.0, left_s, 1, codecs)[0] for codecs in (4, 1, 0)] == [5, 5, 6]


def test_a_short_budget_drops_further_models_first_and_then_all_but_the_best_methods_of_two() -> None:
    paces, later = {"cnn1d": 4.0, "mlp": 1.0, "logistic": 1.0}, later_runs(codecs=4)

    def left_s(quick: int, slow: int) -> float:
        return 5.01 * (quick * 1.0 + (slow + later) * 4.0) / 0.85

    assert fitting_plan(paces, 0.0, left_s(8, 6), 1, 4) == (5, ("cnn1d", "mlp", "logistic"), 2)
    assert fitting_plan(paces, 0.0, left_s(6, 6), 1, 4) == (5, ("cnn1d", "mlp"), 2)
    assert fitting_plan(paces, 0.0, left_s(6, 2), 1, 4) == (5, ("mlp", "cnn1d"), 1)


# The decision ---------------------------------------------------------------------------------------------------------


def test_a_score_is_macro_f1_in_which_every_device_old_or_new_weighs_the_same(tmp_path: Path) -> None:
    place = ended(tmp_path, "fedavg+mlp", [0.5, 0.9], new=True)
    data = json.loads((place / "result.json").read_text())
    data["rounds"][1]["new_devices"]["0.2"]["devices"] = {"c": 0.6}
    (place / "result.json").write_text(json.dumps(data))
    (found,) = candidates([finished_runs.read(place / "result.json")], cohort=10)
    assert found.name == "fedavg with mlp"
    assert found.score.mean == pytest.approx((2 * 0.7 + 0.4) / 3)
    assert [found.mean.mean, found.worst.mean, found.risen] == pytest.approx([0.9, 0.8, 0.4])
    assert found.new is not None
    assert found.new.mean == pytest.approx(0.6)
    assert (found.payload, found.flops, found.joules) == ((UP + DOWN) / 10, 5e8, None)


def one(
    method: str, scores: Sequence[float], *, payload: float = 1000.0, worst: float = 0.5, model: str = "mlp",
    **changes: Any,
) -> Candidate:
    made = Candidate(method, model, stat(scores), stat(scores), stat([worst]), stat([0.8]), payload, 2e6, None, 0.0)
    return replace(made, **changes)


def test_the_best_is_taken_when_it_is_told_apart() -> None:
    found = decide([one("fedavg", [0.80, 0.82], payload=10), one("fedrep", [0.90, 0.92])])
    assert (found.chosen.method, len(found.tied)) == ("fedrep", 1)


def test_of_those_not_told_apart_the_fewest_bytes_are_taken_then_the_better_worst_device() -> None:
    best, light, fair = (
        one("fedavg", [0.88, 0.92]), one("fedrep", [0.87, 0.91], payload=500),
        one("fedper", [0.86, 0.90], payload=500, worst=0.6),
    )  # fmt: skip
    assert decide([best, light]).chosen == light
    assert decide([best, light, fair]).chosen == fair
    assert decide([best, light, fair]).tied == (best, light, fair)


def test_half_a_point_is_never_told_apart_and_one_seed_takes_two() -> None:
    assert decide([one("a", [0.9, 0.9]), one("b", [0.896, 0.896], payload=1)]).chosen.method == "b"
    assert decide([one("a", [0.9, 0.9]), one("b", [0.894, 0.894], payload=1)]).chosen.method == "a"
    assert decide([one("a", [0.9]), one("b", [0.885], payload=1)]).chosen.method == "b"
    assert decide([one("a", [0.9]), one("b", [0.875], payload=1)]).chosen.method == "a"


def test_one_with_fewer_seeds_is_reported_and_not_taken() -> None:
    found = decide([one("lucky", [0.95]), one("known", [0.90, 0.91])])
    assert found.chosen.method == "known"
    assert "lucky with mlp had 0.950, but with fewer seeds." in sentences(found, FACTS)


def test_of_the_codecs_that_lose_no_more_than_the_spread_the_one_with_the_fewest_bytes_is_taken() -> None:
    def coded(codec: str, scores: Sequence[float], payload: float) -> Candidate:
        return one("fedavg", scores, payload=payload, codec=codec)

    known = [one("fedavg", [0.90, 0.91])]  # a spread of 0.0071
    int8, int4 = coded("int8", [0.90, 0.905], 260), coded("int4", [0.898, 0.898], 130)
    assert decide(known).codec == "int8"
    assert decide(known, [int8]).codec == "int8"
    assert decide(known, [int8, int4]).codec == "int4"
    assert decide(known, [int8, int4, coded("ternary", [0.8975, 0.8975], 65)]).codec == "int4"
    assert decide(known, [coded("int8", [0.80, 0.81], 260)]).codec == "fp32"
    assert decide(known, [int8, coded("topk-10", [0.80, 0.98], 30)]).codec == "int8", "its own spread excuses nothing"
    assert decide(known, [int8, coded("topk-10", [0.91], 30)]).codec == "int8", "it lacks a seed"
    assert decide(known, [coded("topk-10/int4", [0.91, 0.91], 30)]).codec == "topk-10/int4"


def test_half_a_point_is_never_told_apart_of_a_codec_either() -> None:
    known = [one("fedavg", [0.9, 0.9])]
    assert decide(known, [one("fedavg", [0.896, 0.896], codec="int4")]).codec == "int4"
    assert decide(known, [one("fedavg", [0.894, 0.894], codec="int4")]).codec == "fp32"


def test_where_training_alone_ties_no_fleet_is_needed_and_the_best_method_is_named() -> None:
    found = decide([one("local", [0.9, 0.91], payload=0), one("fedavg", [0.9, 0.92]), one("fedrep", [0.95])])
    assert (found.chosen.method, federated(found).method) == ("local", "fedavg")
    first, *rest = sentences(found, FACTS)
    assert first.startswith("These devices do as well alone: local with mlp")
    assert first.endswith("If you want a fleet anyway, take fedavg with mlp, int8 on the wire.")
    assert not any(text.startswith("Training alone") for text in rest)


# In words -------------------------------------------------------------------------------------------------------------

FACTS = {"data": "mine.npz", "devices": 6, "new_devices": 2, "support": 0.2, "evaluated": 144, "board": None,
         "budget_minutes": 5.0, "cohort": 6}  # fmt: skip


def test_the_words_have_the_figures() -> None:
    chosen = one("pfldyn-proto", [0.90, 0.92], worst=0.7, risen=0.034)
    others = [one("fedavg", [0.80, 0.80], payload=2000, flops=1e6), one("local", [0.7, 0.7], payload=0),
              one("pfldyn-proto", [0.6], model="cnn1d", payload=400)]  # fmt: skip
    coded = [one("pfldyn-proto", [0.90, 0.915], payload=260, codec="int8"),
             one("pfldyn-proto", [0.80, 0.82], payload=130, codec="int4")]  # fmt: skip
    found = decide([chosen, *others], coded, rounds=19, minutes=3.21, remarks=("one thing",))
    text = "\n".join(sentences(found, FACTS))
    for words in (
        "Take pfldyn-proto with mlp, int8 on the wire.",
        "answers 91.0 % ± 1.4 of its later samples right (mean over 6 devices, ± over 2 seeds), the worst device "
        "70.0 %.",
        "The 2 devices that took no part and learn from the first 20 % of their time reach 80.0 %.",
        "Why: its macro-F1 over all devices, old and new, is 0.910, the best of 4 pairs",
        "Training alone, without any fleet, comes to 0.700.",
        "With fedavg with mlp instead: macro-F1 -0.110, accuracy -11.0 points, the worst device -20.0, "
        "new devices +0.0, 2 times the bytes, 0.5 times the arithmetic.",
        "With pfldyn-proto with cnn1d instead: macro-F1 -0.310, ",
        "int8 on the wire brings a device's bytes of a round from 1.00 kB to 260 B, and changes macro-F1 by -0.003.\n"
        "Of the codecs tried it sends the fewest bytes and loses no more than 0.014 (the spread without a codec); the "
        "others: int4 -0.100.",
        "A round takes a device 2.00 MFLOP of training; joules need --board.",
        "How sure: 19 rounds, 2 seeds for the best and one for the others;",
        "144 samples evaluated on. 3.2 minutes this time, of a budget of 5.",
        "19 rounds are few: methods that learn slowly look worse here than they are.",
        "Its accuracy still rose by 3.4 points in the second half of the rounds",
        "Note: one thing.",
    ):
        assert words in text


def test_where_every_codec_loses_too_much_the_words_say_so() -> None:
    lost = [one("fedavg", [0.8, 0.8], payload=260, codec="int8"), one("fedavg", [0.7, 0.7], codec="int4")]
    said = sentences(decide([one("fedavg", [0.9, 0.9])], lost), FACTS)
    assert said[0] == "Take fedavg with mlp, fp32 on the wire."
    assert ("A device sends and receives 1.00 kB a round without a codec; each that was tried loses more than 0.005 of "
            "macro-F1 (half a point): int8 -0.100 and int4 -0.200.") in said


def test_joules_are_those_with_the_recommended_codec() -> None:
    known = one("fedavg", [0.9, 0.9], joules=8.0)
    found = decide([known], [one("fedavg", [0.9, 0.9], joules=5.0, payload=260, codec="int8")])
    assert "2.00 MFLOP of training and 5.00 J on pi" in "\n".join(sentences(found, {**FACTS, "board": "pi"}))


@pytest.mark.parametrize(
    ("joules", "absent", "words"),
    [(1500.0, {}, "2.00 MFLOP of training and 1.50 kJ on pi, as modelled, above idle."),
     (None, {"radio": "no cited J/byte"}, "joules on pi are not known (radio: no cited J/byte).")],
)  # fmt: skip
def test_joules_are_reported_or_why_they_are_unknown(joules: float | None, absent: dict[str, str], words: str) -> None:
    found = decide([one("fedavg", [0.9], joules=joules)])
    assert words in "\n".join(sentences(found, {**FACTS, "board": "pi", "absent": absent}))


def test_the_table_has_every_candidate_and_the_json_no_empty_figure() -> None:
    coded = one("fedavg", [0.9, 0.8], payload=260, joules=5.0, codec="int8")
    found = decide([one("fedavg", [0.9, 0.8]), one("fedrep", [0.95], new=None)], [coded])
    lines = table(found).splitlines()
    assert [line.split("  ")[0] for line in lines[1:4]] == ["fedrep with mlp", "fedavg with mlp",
                                                            "fedavg with mlp, int8"]
    assert "260 B" in lines[3]
    assert "5.00 J" in lines[3]
    assert [one["codec"] for one in to_json(found)["coded"]] == ["int8"]
    assert "0.850 ± 0.071" in lines[2]
    assert "null" not in json.dumps(to_json(found))
    assert "new" not in to_json(found)["ranked"][0]


def of_numbers(path: Path, clients: int = 6) -> str:
    """Two numbers that follow from two of four features, with an offset for each client."""
    rng = np.random.default_rng(0)
    x = rng.normal(size=(clients * ROWS, 4)).astype(np.float32)
    level = x[:, 0] - x[:, 1] + 0.1 * np.repeat(np.arange(clients), ROWS)
    y = np.stack([50 + 10 * level, -level], 1) + rng.normal(size=(len(x), 2)) * (1, 0.1)
    client = np.repeat(np.array([f"d{i}" for i in range(clients)], dtype=np.str_), ROWS)
    save(path, Samples(x, y, client, np.tile(np.arange(ROWS) * 1.0, clients), outputs=("speed", "load")))
    return str(path)


@pytest.mark.slow
def test_a_real_advice_on_numbers_prefers_the_smaller_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"FINALISTS": 1, "MAX_ROUNDS": 5, "MORE_SEEDS": (1,)}.items():
        monkeypatch.setattr(advising, name, value)
    monkeypatch.setattr("cloud_server.laboratory.advise.recordings.models_for", lambda *_: (Model("mlp", "mlp"),))

    def engine(asked: Experiment, folder: Path, title: str) -> tuple[list[Path], list[str]]:
        return simulate.simulate(asked, folder, simulate.Options(jobs=1, device="cpu")), []

    data = of_numbers(tmp_path / "mine.npz")
    options = Options(data, 60, codecs=("int8",), task="regression", loss="squared")
    assert options.methods == ("local", "fedavg-meta", "per-fedavg-fo")
    found = advising.advise(options, tmp_path / "out", engine, cores=1)
    scores = [one.score.mean for one in found.advice.ranked]
    assert scores == sorted(scores)
    assert all(one.measure == "error" and one.pooled is None and one.pooled_figure for one in found.advice.ranked)
    assert found.facts["ridge"] < found.facts["own_mean"]
    said = "\n".join(sentences(found.advice, found.facts))
    assert "A device then has the MAE in deviations 0." in said
    assert "For comparison: each device's mean has 0." in said
    assert "MAE in deviations" in said
    assert "macro-F1" not in said
    assert "accuracy" not in said
    shown = table(found.advice, found.facts)
    assert "each device's mean" in shown
    assert "accuracy" not in shown
    json.dumps({**to_json(found.advice), "facts": found.facts}, allow_nan=False)
    assert found.command is not None
    assert "--task regression --loss squared" in found.command
    assert found.fleet_toml is not None
    task = config.parse(FleetConfig, found.fleet_toml, "fleet.toml").model.task
    assert isinstance(task, Regression)
    assert (task.outputs, task.loss) == (("speed", "load"), "squared")


def test_an_advice_on_targets_that_never_change_is_refused(tmp_path: Path) -> None:
    data = of_numbers(tmp_path / "mine.npz")
    assert recordings(data, task="regression").remarks == ()
    assert recordings(data, task="regression", names=("load",)).section["outputs"] == ["load"]
    with np.load(data) as held:
        np.savez(tmp_path / "same.npz", **{**held, "y": np.ones((6 * ROWS, 2)) * 3.5})
    with pytest.raises(DataError, match="targets never change"):
        recordings(str(tmp_path / "same.npz"), task="regression")
    with pytest.raises(DataError, match="is a named set, which has classes"):
        recordings("heartbeat", task="regression")


def test_a_model_that_is_no_better_than_the_mean_or_ridge_regression_is_named() -> None:
    (error,) = COMPARED
    beside = TaskBaselines(error, ("own_mean", 0.8), {"ridge": 0.3})
    assert beside.warnings("a", 0.79, 5, plain=True) == [
        "a: MAE in deviations 0.790 after 5 rounds, and each device's mean has 0.800",
        "a: MAE in deviations 0.790 after 5 rounds, and ridge regression on the samples of all devices, without a "
        "fleet, has 0.300",
    ]
    assert beside.warnings("a", 0.5, 5, plain=False) == []
    assert TaskBaselines(error, ("own_mean", 0.8), {}).warnings("a", 0.1, 5, plain=True) == []


def test_what_simple_answers_come_to_is_reported_and_who_memorised() -> None:
    low, fair = Score(accuracy=0.395, macro_f1=0.39), Score(accuracy=0.71, macro_f1=0.70)
    plain = Score(accuracy=0.93, macro_f1=0.93, method="nearest mean on spectrum and statistics")
    beside = SimpleBaselines(Score(accuracy=0.36, macro_f1=0.33), plain, np.array([900, 900, 900]))
    found = decide([one("fedavg", [0.71], pooled=fair, loss=0.2), one("fedrep", [0.39], pooled=low, loss=0.004)],
                   rounds=19)
    facts = baseline_facts(found, beside)
    text = sentences(found, {**FACTS, **facts})
    assert ("For comparison: a plain baseline, nearest mean on spectrum and statistics, that learned from all devices "
            "together has 93.0 %; each device's most frequent class has 36.0 %.") in text
    assert ("Warning: fedavg with mlp: a plain baseline (nearest mean on spectrum and statistics) reaches 0.930, this "
            "model 0.710 after 19 rounds.") in text
    assert ("Warning: fedrep with mlp: memorised: loss 0.004, accuracy near chance: 0.395 after 19 rounds, where the "
            "most frequent class has 0.360.") in text
    assert any(line.startswith("Warning: try another model") for line in text)
    assert [row.split("  ")[0] for row in table(found, facts).splitlines()[3:5]] == ["plain baseline",
                                                                                    "most frequent class"]
    fine = decide([one("fedavg", [0.93], pooled=plain, loss=0.004)])
    assert baseline_facts(fine, beside)["warnings"] == []
    json.dumps({**to_json(found), "facts": facts})


def test_a_further_model_that_is_refused_is_reported_and_the_first_ones_are_not_forgiven(tmp_path: Path) -> None:
    bench = Bench()

    def engine(asked: Experiment, folder: Path, title: str) -> tuple[list[Path], list[str]]:
        if asked.model.name == "logistic":
            raise ConfigError("has no body")
        return bench(asked, folder, title)

    data = written(tmp_path / "mine.npz")
    found = advising.advise(Options(data), tmp_path / "out", engine, cores=1, clock=lambda: bench.now)
    assert "logistic: has no body" in found.advice.remarks
    assert {one.model for one in found.advice.ranked} == {"mlp", "mlp-64-64"}

    def refusing(asked: Experiment, folder: Path, title: str) -> tuple[list[Path], list[str]]:
        raise ConfigError("has no body")

    with pytest.raises(ConfigError, match="has no body"):
        advising.advise(Options(data), tmp_path / "other", refusing, cores=1)


# The whole ------------------------------------------------------------------------------------------------------------

ACCURACY = {
    "local": 0.5, "fedavg": 0.7, "fedavg-meta": 0.7, "p-avg-proto": 0.8, "pfldyn-proto": 0.9, "per-fedavg-fo": 0.6,
    "knn-per": 0.85,
}  # fmt: skip
SHARES = {"none": 1.0, "int8": 0.25, "int4": 0.125, "ternary": 0.05, "topk-10": 0.03, "topk-1": 0.01}
"""Shares of a model's bytes by codec; of these, topk-10 loses accuracy."""


class Bench:
    """Replaces the engine: results come from a table, and each run advances the clock."""

    def __init__(self, run_s: float = 1.0) -> None:
        self.asked: list[tuple[str, Experiment]] = []
        self.now, self._run_s = 0.0, run_s

    def __call__(self, asked: Experiment, folder: Path, title: str) -> tuple[list[Path], list[str]]:
        self.asked.append((folder.name, asked))
        places = []
        for run in experiments.runs(asked):
            place = folder / run.name
            if not place.exists():
                self.now += self._run_s
                worse = 0.2 if asked.model.name == "logistic" else 0.1 if asked.model.options else 0
                accuracy = ACCURACY[run.method.name] - worse + 0.01 * run.seed
                share = SHARES[asked.codec_up]
                models = (0.0, 0.0) if run.method.name == "local" else (share, share)
                accuracy -= 0.05 if asked.codec_up == "topk-10" else 0
                ended(folder, run.label, [accuracy] * 2, method=run.method.name, seed=run.seed, new=True,
                      models=models, seconds=self._run_s)  # fmt: skip
            places.append(place)
        return places, ["knn-per: it broke"] if folder.name.startswith("seeds") else []

    def advise(self, data: str, out: Path, minutes: float = 5.0, **options: Any) -> Outcome:
        return advising.advise(Options(data, minutes, **options), out, self, cores=1, clock=lambda: self.now)


def test_methods_run_with_one_seed_the_best_with_three_and_the_chosen_one_with_codecs(tmp_path: Path) -> None:
    bench, data = Bench(), written(tmp_path / "mine.npz")
    found = bench.advise(data, tmp_path / "out")
    runs = {place: asked for place, asked in bench.asked}
    assert list(runs) == ["pace-mlp", "pace-mlp-64-64", "pace-logistic", "first-mlp", "first-mlp-64-64",
                          "first-logistic", "seeds-mlp", "int8-mlp", "int4-mlp", "ternary-mlp",
                          "topk-10-mlp"]  # fmt: skip
    assert [m.name for m in runs["first-mlp"].method] == list(advising.METHODS_TRIED)
    assert [m.name for m in runs["first-logistic"].method] == ["knn-per", "fedavg-meta"]
    assert [m.name for m in runs["seeds-mlp"].method] == ["pfldyn-proto", "knn-per", "p-avg-proto", "local"]
    assert (runs["seeds-mlp"].seeds, runs["int8-mlp"].seeds) == ((1, 2), (0, 1, 2))
    assert (runs["int4-mlp"].codec_up, runs["int4-mlp"].codec_down) == ("int4", "int4")
    assert runs["first-mlp"].partition.options["split"] == "time"
    assert runs["first-mlp"].cohort == 5
    assert found.advice.chosen.name == "pfldyn-proto with mlp"
    assert found.advice.chosen.payload == (UP + DOWN) / 5
    assert [one.codec for one in found.advice.coded] == ["int8", "int4", "ternary", "topk-10"]
    assert [one.score.seeds for one in found.advice.coded] == [3, 3, 3, 3]
    assert found.advice.coded[0].payload == (UP + DOWN) / 20
    assert found.advice.codec == "ternary"
    assert found.advice.remarks == ("knn-per: it broke",)
    assert (found.facts["devices"], found.facts["new_devices"], found.facts["evaluated"]) == (5, 1, 60)
    assert found.command == (f"metafleet init FLEET --data {data} --method pfldyn-proto --model mlp --rounds 30 "
                             "--codec ternary")


def test_other_codecs_are_tried_or_none(tmp_path: Path) -> None:
    data, bench = written(tmp_path / "mine.npz"), Bench()
    found = bench.advise(data, tmp_path / "out", codecs=("topk-1/int4",))
    place, asked = bench.asked[-1]
    assert (place, asked.codec_up, asked.codec_down) == ("topk-1-int4-mlp", "topk-1", "int4")
    assert (found.advice.codec, [one.codec for one in found.advice.coded]) == ("topk-1/int4", ["topk-1/int4"])
    assert (found.command or "").endswith(" --codec up:topk-1,down:int4")
    link = config.parse(FleetConfig, found.fleet_toml or "", "fleet.toml").link
    assert (link.up, link.down) == ("topk-1", "int4")
    without = bench.advise(data, tmp_path / "none", codecs=())
    assert (without.advice.codec, without.advice.coded, bench.asked[-1][0]) == ("int8", (), "seeds-mlp")


def test_codecs_are_not_tried_with_a_method_near_chance(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bench, chance = Bench(), {name: 0.34 + k / 1000 for k, name in enumerate(ACCURACY)}
    monkeypatch.setitem(globals(), "ACCURACY", chance)
    found = bench.advise(written(tmp_path / "mine.npz"), tmp_path / "out")
    assert (found.advice.coded, found.advice.codec) == ((), "int8")
    assert any("no codec was tried, because" in text for text in found.advice.remarks)
    assert any("accuracy near chance" in text for text in found.facts["warnings"])


def test_a_codec_with_which_the_model_answers_near_chance_is_warned_of() -> None:
    fair, low = Score(accuracy=0.9, macro_f1=0.9), Score(accuracy=0.36, macro_f1=0.2)
    beside = SimpleBaselines(Score(accuracy=0.36, macro_f1=0.33), None, np.array([900, 900, 900]))
    coded = one("fedavg", [0.2, 0.2], pooled=low, loss=0.004, codec="topk-01")
    warnings = baseline_facts(decide([one("fedavg", [0.9, 0.9], pooled=fair)], [coded]), beside)["warnings"]
    assert [text.partition(": ")[0] for text in warnings] == ["fedavg with mlp, topk-01"]


def test_the_fleet_toml_is_a_fleets(tmp_path: Path) -> None:
    found = Bench().advise(written(tmp_path / "mine.npz"), tmp_path / "out")
    assert found.fleet_toml is not None
    fleet = config.parse(FleetConfig, found.fleet_toml, "fleet.toml")
    assert (fleet.fleet.method, fleet.fleet.rounds, fleet.link.up) == ("pfldyn-proto", 30, "ternary")
    assert (fleet.model.name, fleet.model.classes, fleet.model.input.shape) == ("mlp", ("a", "b", "c"), (4,))
    assert len(fleet.model.input.mean) == 4
    nameless = Bench().advise(written(tmp_path / "other.npz", classes=None, y=np.arange(180) % 3), tmp_path / "two")
    assert (nameless.fleet_toml, nameless.command) == (None, None)


def test_an_advice_that_was_stopped_continues_with_its_plan(tmp_path: Path) -> None:
    data, stopped = written(tmp_path / "mine.npz"), Bench()

    def until_seeds(asked: Experiment, folder: Path, title: str) -> tuple[list[Path], list[str]]:
        if folder.name.startswith("seeds"):
            raise KeyboardInterrupt
        return stopped(asked, folder, title)

    with pytest.raises(KeyboardInterrupt):
        advising.advise(Options(data), tmp_path / "out", until_seeds, cores=1, clock=lambda: stopped.now)
    again = Bench(run_s=3.0)
    found = again.advise(data, tmp_path / "out")
    assert [place for place, _ in again.asked] == [
        "first-mlp", "first-mlp-64-64", "first-logistic", "seeds-mlp", "int8-mlp", "int4-mlp", "ternary-mlp",
        "topk-10-mlp",
    ]  # fmt: skip
    assert found.advice == replace(Bench().advise(data, tmp_path / "whole").advice, minutes=found.advice.minutes)


def test_an_advice_of_other_options_and_a_strangers_folder_are_refused(tmp_path: Path) -> None:
    data = written(tmp_path / "mine.npz")
    Bench().advise(data, tmp_path / "out")
    with pytest.raises(ConfigError, match="holds an advice with other options"):
        Bench().advise(data, tmp_path / "out", minutes=6)
    with pytest.raises(ConfigError, match="is not empty and holds no advice"):
        Bench().advise(data, tmp_path)


def test_what_the_budget_has_no_time_for_is_reported_not_run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(advising, "fitting_plan", lambda *_: (5, ("mlp",), 1))
    bench = Bench(run_s=11.0)
    found = bench.advise(written(tmp_path / "mine.npz"), tmp_path / "out", minutes=1)
    assert [place for place, _ in bench.asked] == ["pace-mlp", "pace-mlp-64-64", "pace-logistic", "first-mlp"]
    assert found.advice.remarks == (
        "the budget left no time for mlp-64-64 and logistic", "the budget was used up before other seeds",
        "the budget was used up before int8, int4, ternary and topk-10",
    )  # fmt: skip
    assert (found.advice.chosen.score.seeds, found.advice.coded) == (1, ())
    assert "int8, a fleet's default, was not tried" in "\n".join(sentences(found.advice, found.facts))


@pytest.mark.slow
def test_a_real_advice_comes_to_its_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fewer = {"METHODS_TRIED": ("local", "fedavg"), "TIMED": ("local",), "FINALISTS": 1, "MAX_ROUNDS": 5,
             "MORE_SEEDS": (1,)}
    for name, value in fewer.items():
        monkeypatch.setattr(advising, name, value)
    monkeypatch.setattr("cloud_server.laboratory.advise.recordings.models_for", lambda *_: (Model("mlp", "mlp"),))
    lines: list[str] = []

    def engine(asked: Experiment, folder: Path, title: str) -> tuple[list[Path], list[str]]:
        lines.append(title)
        return simulate.simulate(asked, folder, simulate.Options(jobs=1, device="cpu")), []

    options = Options(written(tmp_path / "mine.npz"), 60, codecs=("int8", "topk-10/int4"))
    found = advising.advise(options, tmp_path / "out", engine, cores=1)
    assert {one.name for one in found.advice.ranked} == {"local with mlp", "fedavg with mlp"}
    assert found.advice.chosen.score.seeds == 2
    assert found.advice.chosen.score.mean > 0.9
    assert found.facts["plain"]["accuracy"] > 0.9 > found.facts["frequent"]["accuracy"]
    assert found.facts["warnings"] == []
    assert found.advice.ranked[0].loss is not None
    assert lines[-2:] == [f"{federated(found.advice).name}, {codec}" for codec in options.codecs]
    by_codec = {one.codec: one.payload for one in found.advice.coded}
    assert by_codec["topk-10/int4"] < by_codec["int8"] < federated(found.advice).payload
