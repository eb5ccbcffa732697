"""Small versions of the papers' experiments, on made-up samples of the same shapes, and their pages."""

from __future__ import annotations

import contextlib
import dataclasses
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks import markdown
from benchmarks.papers import collect, page, run
from benchmarks.papers.acar.table import METHODS as ACARS
from benchmarks.papers.lim import attack
from benchmarks.papers.lim.table import CASES
from benchmarks.papers.ratio import table as ratio
from cloud_server.figures.formatting import ABSENT
from cloud_server.laboratory.compare import comparison
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.run.engine import Stopped
from cloud_server.laboratory.run.simulate import Options, simulate
from fleet_core.algorithms.interface import read_hyper
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import schema
from fleet_core.base.errors import ConfigError, DataError
from fleet_core.data.samples import Samples, save
from fleet_core.data.sets import set_cache
from fleet_core.data.sets.registry import Entry, entry
from tests.support.lab import recordings

TOMLS = [path for paper in run.papers() for path in run.files(paper)]
PAGES = [folder for folder in sorted(run.HERE.iterdir()) if (folder / page.RESULT).exists()]
CLIENTS = {"mnist": 12, "shakespeare": 12, "heartbeat-22": 12, "har": 12, "omniglot": 0, "cifar-10": 0}
"""Clients of the made-up sets."""
OWN = "own.npz"
"""Replaces what an experiment names by its path."""
DEVICES: dict[str, dict[str, int]] = {
    "acid": {"devices": 10, "train_per_device": 20, "test_per_device": 10},
    "alid": {"devices": 10, "train_per_device": 20, "test_per_device": 10},
    "half-and-half": {"devices": 4, "a": 2, "a_test": 2},
    "power-law": {"devices": 10, "least": 10, "most": 20},
    "classes": {"devices": 10},
    "dirichlet": {"devices": 4},
    "iid": {"devices": 4},
}
"""Options of the partitions."""
HYPER = {"local_steps": 1, "personal_steps": 1, "inner_steps": 1, "finetune_steps": 1, "head_steps": 1,
         "support_batch": 4, "query_batch": 4, "batch": 4, "shots": 1, "query_shots": 1, "hyper_width": 2}


@pytest.fixture(scope="module")
def sets(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A cache with a small made-up set of every name."""
    folder = tmp_path_factory.mktemp("sets")
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(set_cache.FOLDER_VARIABLE, str(folder))
        for name, clients in CLIENTS.items():
            wanted = entry(name)
            set_cache.store(wanted, (made(wanted, clients, 1), made(wanted, clients, 2)), (), checked=False)
    save(folder / OWN, made(entry("mnist"), CLIENTS["mnist"], 1))
    return folder


def made(wanted: Entry, clients: int, seed: int) -> Samples:
    """Thirty samples of each of the first ten classes, dealt to the clients in turn, in time order for every client."""
    rng = np.random.default_rng(seed)
    y = np.tile(np.arange(min(10, wanted.classes)), 30)
    x = rng.integers(0, min(20, wanted.classes + 10), (len(y), *wanted.shape)).astype(wanted.dtype)
    client = np.array([f"{n:04}" for n in np.arange(len(y)) // y.max() % clients]) if clients else None
    order = np.argsort(client, kind="stable") if client is not None else np.arange(len(y))
    time = np.arange(len(y), dtype=np.float64) if clients else None
    names = tuple(str(k) for k in range(wanted.classes))
    return Samples(x[order], y[order], None if client is None else client[order], time, names)


def small(path: Path) -> tuple[str, ...]:
    """Settings that make the experiment small."""
    asked = experiments.load(path)
    settings = [
        "budget.rounds=1",
        "seeds=[0]",
        "evaluation.every=0",
        "evaluation.devices=2",
        f"cohort={min(2, asked.cohort)}",
    ]
    for number, method in enumerate(asked.method):
        known = {field.name for field in dataclasses.fields(METHODS[method.name].hyper)}
        drawn = {"shots", "query_shots"} if "support_batch" in method.hyper else set()  # one or the other
        values = {key: value for key, value in HYPER.items() if key in known.difference(method.grid) - drawn}
        unread = {problem.key for problem in read_hyper(METHODS[method.name], {**method.hyper, **values})[1]}
        settings += [f"method.{number}.hyper.{key}={value}" for key, value in values.items() if key not in unread]
    if asked.model.name == "cnn-leaf":
        settings += ["model.options.channels=[2, 2]", "model.options.hidden=[4]"]
    if asked.model.name == "char-lstm":
        settings += ["model.options.width=4"]
    if asked.data.path:
        settings += [f"data.path={set_cache.home() / OWN}", "data.mean=[0.5]", "data.std=[0.5]"]  # one channel
    if asked.data.set == "synthetic":
        settings += ["data.options.devices=4", "data.options.least=20", "data.options.most=40"]
    if asked.evaluation.novel_classes:
        settings += [
            "evaluation.novel_classes=[0, 1]",
            "evaluation.novel={devices=2,classes_per_device=2,shots=2,queries=2}",
        ]
    devices = DEVICES.get(asked.partition.kind, {})
    settings += [f"partition.options.{key}={value}" for key, value in devices.items()]
    return tuple(settings)


def ran(path: Path, out: Path) -> Path:
    """The small experiment, run below ``out``."""
    asked = experiments.load(path, small(path))
    simulate(asked, out / path.parent.name / path.stem, Options(jobs=1, device="cpu"))
    return out / path.parent.name


@pytest.mark.slow
@pytest.mark.parametrize("path", TOMLS, ids=lambda path: f"{path.parent.name}-{path.stem}")
def test_every_experiment_runs_in_small(
    path: Path, sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(set_cache.FOLDER_VARIABLE, str(sets))
    found = collect.collected([path], ran(path, tmp_path))["experiments"][path.stem]
    asked = experiments.load(path)
    assert set(found["methods"]) == {run.label for run in experiments.runs(asked)}
    for method in found["methods"].values():
        assert method["over"]["seeds"] == [0]
        assert 0 <= method["over"]["figures"]["accuracy.mean"]["mean"] <= 1


DEFAULTS = schema.plain({
    field.name: field.default_factory() if callable(field.default_factory) else field.default
    for field in dataclasses.fields(experiments.Experiment)
    if field.name in ("skip_below", "train", "robust", "privacy")
})


@pytest.mark.parametrize("folder", PAGES, ids=lambda folder: folder.name)
def test_a_pages_tables_are_those_that_its_result_gives(folder: Path) -> None:
    assert page.page(folder, json.loads((folder / page.RESULT).read_text())) == (folder / page.PAGE).read_text()


@pytest.mark.parametrize("folder", PAGES, ids=lambda folder: folder.name)
def test_a_result_is_of_the_experiments_that_are_there(folder: Path) -> None:
    result = json.loads((folder / page.RESULT).read_text())
    for path in run.files(folder.name):
        asked, found = experiments.load(path), result["experiments"].get(path.stem)
        if found is None:  # none of its runs has begun
            continue
        settings = comparison.present(schema.plain(asked))
        later = {key: value for key, value in DEFAULTS.items() if key not in found["settings"]}  # came afterwards
        kept = {key: settings[key] for key in settings if key not in ("method", "seeds")}
        assert {**found["settings"], **comparison.present(later)} == kept
        hyper = {one.label: schema.plain(one.hyper) for one in experiments.runs(asked)}
        for label, method in found["methods"].items():
            assert method["hyper"] == hyper[label]
    assert set(result["experiments"]) <= {path.stem for path in run.files(folder.name)}


def test_a_panel_has_the_curves_of_its_experiments_and_tells_equal_names_apart() -> None:
    def of(**curves: list[list[float]]) -> dict[str, Any]:
        return {"methods": {label: {"curve": curve} for label, curve in curves.items()}}

    result = {"experiments": {"one": of(a=[[1, 0.5, 0.0]], b=[]), "two": of(a=[[1, 0.7, 0.0]]), "four": of(b=[])}}
    made = page.panels(result, {"First": ("one", "two"), "Second": ("three", "four")}, {"a": "A"})
    assert made == {"First": {"A": [[1, 0.5, 0.0]], "A (two)": [[1, 0.7, 0.0]]}}


# What is collected ----------------------------------------------------------------------------------------------------


@pytest.fixture
def toml(tmp_path: Path) -> Path:
    """An experiment of four rounds with two seeds on three devices."""
    path = tmp_path / "toy.toml"
    path.write_text(f"""
        seeds = [0, 1]
        data.path = "{recordings(tmp_path / "toy.npz")}"
        partition = {{ kind = "natural", options = {{ split = "time", train_fraction = 0.6 }} }}
        model = {{ name = "mlp", options = {{ hidden = [6] }} }}
        budget.rounds = 4
        evaluation = {{ every = 2, targets = [0.4, 0.999] }}
        method = [{{ name = "fedavg", hyper = {{ local_steps = 2, batch = 8 }} }}]
    """)
    return path


def gone(path: Path, out: Path, *, ends_after: int = 99, seeds: tuple[int, ...] = (0, 1)) -> dict[str, Any]:
    """The experiment, stopped after some rounds, and what was collected of it."""
    rounds: list[int] = []
    asked = run.taken(experiments.load(path), seeds)
    with contextlib.suppress(Stopped):
        simulate(asked, out / "toy", Options(jobs=1, device="cpu"),
                 on_round=lambda name, row: rounds.append(row["round"]), stopped=lambda: len(rounds) >= ends_after)
    found: dict[str, Any] = collect.collected([path], out)["experiments"]["toy"]["methods"]["fedavg"]
    return found


def test_a_run_that_has_not_ended_is_collected_as_such(toml: Path, tmp_path: Path) -> None:
    found = gone(toml, tmp_path / "out", ends_after=3)
    assert set(found["seeds"]) == {"0"}
    assert {key: found["seeds"]["0"][key] for key in ("round", "of", "ended", "judged")} == {
        "round": 3, "of": 4, "ended": False, "judged": 2,
    }
    assert found["over"]["round"] == 2
    assert page.progress(found["seeds"]["0"]) == "3 of 4, unfinished"
    reached = found["reached"][1]["at"]["rounds"]
    assert (reached["sign"], reached["value"]) == (">", 3)


def test_figures_are_over_the_seeds_that_have_ended(toml: Path, tmp_path: Path) -> None:
    gone(toml, tmp_path / "out", seeds=(0,))
    found = gone(toml, tmp_path / "out", ends_after=2)
    assert [one["ended"] for one in found["seeds"].values()] == [True, False]
    assert (found["over"]["seeds"], found["over"]["round"]) == ([0], 4)
    assert [point[0] for point in found["curve"]] == [2, 4]


def test_a_mean_over_seeds_is_that_of_their_last_rounds(toml: Path, tmp_path: Path) -> None:
    found = gone(toml, tmp_path / "out")
    each = [found["seeds"][seed]["figures"]["accuracy.pooled"] for seed in ("0", "1")]
    over = found["over"]["figures"]["accuracy.pooled"]
    assert over["mean"] == pytest.approx(np.mean(each))
    assert over["std"] == pytest.approx(np.std(each, ddof=1))
    assert "before.accuracy.mean" in found["over"]["figures"]


def test_seeds_of_two_machines_give_what_one_machine_would(toml: Path, tmp_path: Path) -> None:
    gone(toml, tmp_path / "out")
    whole = collect.collected([toml], tmp_path / "out")
    for seed in ("0", "1"):
        (tmp_path / seed / "toy").mkdir(parents=True)
        (tmp_path / "out" / "toy" / f"fedavg-s{seed}").rename(tmp_path / seed / "toy" / f"fedavg-s{seed}")
    first = read_again(collect.collected([toml], tmp_path / "0"))
    assert set(first["experiments"]["toy"]["methods"]["fedavg"]["seeds"]) == {"0"}
    both = collect.collected([toml], tmp_path / "1", kept=first)
    assert read_again(both) == read_again(whole)
    assert collect.collected([toml], tmp_path / "none", kept=read_again(whole)) == read_again(whole)


def test_seeds_without_curves_are_not_put_together_with_new_ones(toml: Path, tmp_path: Path) -> None:
    gone(toml, tmp_path / "first", seeds=(0,))
    first = collect.collected([toml], tmp_path / "first")
    del first["experiments"]["toy"]["methods"]["fedavg"]["seeds"]["0"]["curve"]
    gone(toml, tmp_path / "second", seeds=(1,))
    with pytest.raises(DataError, match="no curve of their own"):
        collect.collected([toml], tmp_path / "second", kept=first)


def test_a_run_that_went_further_elsewhere_is_kept(toml: Path, tmp_path: Path) -> None:
    gone(toml, tmp_path / "far", seeds=(0,))
    far = read_again(collect.collected([toml], tmp_path / "far"))
    gone(toml, tmp_path / "near", ends_after=3, seeds=(0,))
    assert collect.collected([toml], tmp_path / "near", kept=far) == far


def test_what_is_set_differently_now_is_not_kept(toml: Path, tmp_path: Path) -> None:
    gone(toml, tmp_path / "out", seeds=(0,))
    kept, said = collect.collected([toml], tmp_path / "out"), list[str]()
    text = toml.read_text()
    toml.write_text(text.replace("local_steps = 2", "local_steps = 3"))
    assert collect.collected([toml], tmp_path / "none", kept=kept, say=said.append)["experiments"] == {}
    toml.write_text(text.replace("every = 2", "every = 1"))
    assert collect.collected([toml], tmp_path / "none", kept=kept, say=said.append)["experiments"] == {}
    assert "no fedavg has the settings of the kept runs" in said[0]
    assert "toy: its settings have changed" in said[1]


def read_again(result: dict[str, Any]) -> dict[str, Any]:
    again: dict[str, Any] = json.loads(json.dumps(result))
    return again


def test_a_cell_tells_the_round_of_runs_that_have_not_ended(toml: Path, tmp_path: Path) -> None:
    method = gone(toml, tmp_path / "out", ends_after=3)
    result = {"experiments": {"toy": {"methods": {"fedavg": method}}}}
    value = method["seeds"]["0"]["figures"]["accuracy.mean"]
    assert page.cell(result, "toy", "fedavg", "accuracy.mean") == f"{100 * value:.2f} (round 2 of 4)"
    assert page.cell(result, "toy", "another", "accuracy.mean") == ABSENT
    assert "3 of 4, unfinished" in page.runs(result)


def test_methods_and_seeds_can_be_taken_apart(toml: Path) -> None:
    asked = experiments.load(toml)
    assert [one.name for one in experiments.runs(run.taken(asked, [5], ["fedavg"]))] == ["fedavg-s5"]
    with pytest.raises(ConfigError, match="fedavgg"):
        run.taken(asked, (), ["fedavgg"])


def test_every_place_of_a_page_has_its_table() -> None:
    text = "a\n<!-- table one -->\nold\n<!-- end -->\nb\n<!-- table two -->\n<!-- end -->\n"
    tables = {"one": markdown.table(["x"], [["1"]]), "two": markdown.table(["y"], [["2"]])}
    filled = markdown.filled(text, tables)
    assert "old" not in filled
    assert "| 1 |" in filled
    assert markdown.filled(filled, tables) == filled
    with pytest.raises(ValueError, match="two"):
        markdown.filled(text, {"one": ""})


# The attack -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", attack.NETWORKS)
@pytest.mark.parametrize("case", CASES)
def test_the_attackers_gradient_is_the_devices_where_image_and_means_are(name: str, case: str) -> None:
    torch.manual_seed(3)
    network, label = attack.network_of(name, (1, 28, 28), 0), torch.zeros(1, dtype=torch.int64)
    images = torch.rand(11, 1, 28, 28).double()
    sent, means, margin = attack.sent_by_device(case, network, images, label)
    own = images if case.endswith("-episode") else images[:1]
    loss = attack.loss_of(case, network, label, margin)(own, means)
    left = float(attack.distance(attack.gradient(loss, network), sent))
    whole = float(attack.distance(sent, [torch.zeros_like(g) for g in sent]))
    assert whole > 0
    assert left < 1e-20 * whole


@pytest.mark.slow
def test_an_image_comes_back_from_the_gradient_of_fedavg() -> None:
    """On eight pixels a side. Noise alone has an error of about a sixth."""
    network, label = attack.network_of("dlg", (1, 8, 8), 0), torch.zeros(1, dtype=torch.int64)
    image = torch.linspace(0, 1, 64).double().reshape(1, 1, 8, 8)
    found, left = attack.attacked("fedavg", network, torch.cat([image, torch.rand(10, 1, 8, 8)]), label, 200, 0)
    assert found.shape == (1, 1, 8, 8)
    assert left < 1e-6
    assert float((found - image).square().mean()) < 0.01


def test_of_an_episode_the_nearest_found_image_of_the_same_class_counts() -> None:
    asked = torch.arange(11.0).reshape(11, 1, 1, 1)
    labels = torch.cat([torch.zeros(1, dtype=torch.int64), attack.SUPPORT])
    turned = asked[[5, 4, 3, 2, 1, 0, 10, 9, 8, 7, 6]] + 0.25
    nearest, errors = attack.matched(turned, asked, labels)
    assert nearest.tolist() == [5, 4, 3, 2, 1, 0, 10, 9, 8, 7, 6]
    assert errors.tolist() == [0.0625] * 11
    nearest, errors = attack.matched(asked.flip(0), asked, labels)  # of the other class all but the sixth
    assert (int(nearest[0]), float(errors[0])) == (5, 25.0)


@pytest.mark.slow
def test_cases_that_are_there_are_not_made_again(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv(set_cache.FOLDER_VARIABLE, str(sets))
    little = ["--data", "omniglot", "--networks", "dlg", "--images", "1", "--iterations", "2", "--out", str(tmp_path)]
    attack.main([*little, "--cases", "fedavg"])
    attack.main([*little, "--cases", "fedavg", "proto"])
    assert [line.split()[2] for line in capsys.readouterr().out.splitlines()] == ["fedavg", "proto"]
    found = json.loads((tmp_path / "attack.json").read_text())
    assert set(found["attacks"]["omniglot, dlg"]) == {"fedavg", "proto"}
    assert (tmp_path / "attack.png").read_bytes().startswith(b"\x89PNG")
    attack.main([*little, "--cases", "fedavg", "--iterations", "3"])
    found = json.loads((tmp_path / "attack.json").read_text())
    assert (set(found["attacks"]["omniglot, dlg"]), found["iterations"]) == ({"fedavg"}, 3)


@pytest.mark.slow
def test_the_ratios_page_has_every_method_under_both_models(
    sets: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(set_cache.FOLDER_VARIABLE, str(sets))
    (path,) = run.files("ratio", ["acid-5"])
    result = collect.collected([path], ran(path, tmp_path), ratio.details)
    tables = ratio.tables(result, {})
    for title in ACARS.values():
        assert [line.split(" | ")[2] for line in tables["rounds"].splitlines() if f"| {title} |" in line] == [
            "as served", "mean of the latest"]
        assert f"| {title} | `client_lr" in tables["settings"]
    assert page.page(path.parent, result).count("<!-- end -->") == 5


def test_until_the_worst_device_counts_what_a_seed_sent_that_never_got_there() -> None:
    curves = [[[25.0, 0.1], [50.0, 0.3]], [[25.0, 0.3], [50.0, 0.2]]]
    assert ratio._until(curves, 0.3) == {"value": 37.5, "std": pytest.approx(17.7, abs=0.1)}
    assert ratio._until(curves, 0.31) == {"value": 50.0, "sign": ">"}
    assert ratio._until([], 0.3) is None
