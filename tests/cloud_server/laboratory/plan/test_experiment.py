"""Experiment files: their meaning, and that every mistake is found before anything is computed."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.run import simulate as laboratory
from cloud_server.laboratory.run.simulate import Options
from fleet_core.base.errors import ConfigError, FleetError
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.data.samples import Samples, save
from fleet_core.model.choose_codec import AUTO
from tests.support import lab

SYNTHETIC = """\
cohort = 3
[data]
set = "synthetic"
options = {devices = 4, least = 20, most = 40}
[model]
name = "mlp"
[budget]
rounds = 2
[[method]]
name = "fedavg"
hyper.local_steps = 2
[[method]]
name = "pfldyn-proto"
hyper.penalty = 0.2
"""


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A file with a valid experiment."""
    (tmp_path / "lab.toml").write_text(SYNTHETIC)
    return tmp_path / "lab.toml"


def mistakes(path: Path, changes: Mapping[str, str], *settings: str) -> list[str]:
    """The errors of the file after replacing old text with new."""
    text = path.read_text()
    for old, new in changes.items():
        assert old in text
        text = text.replace(old, new)
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        experiments.load(path, settings)
    assert caught.value.exit_code == 2
    return str(caught.value).replace(f"{path}:", "").splitlines()


# What is asked for ----------------------------------------------------------------------------------------------------


def test_every_combination_of_a_grid_and_every_seed_is_a_run(tmp_path: Path) -> None:
    asked = lab.experiment(tmp_path, seeds=[1, 5], method=[
        {"name": "pfldyn-proto", "label": "ours", "hyper": {"local_steps": 2},
         "grid": {"client_lr": [0.1, 1e-7], "distance": ["norm"]}},
        {"name": "fedavg"},
    ])
    found = experiments.runs(asked)
    assert [run.name for run in found] == [
        "ours,client_lr=0.1,distance=norm-s1", "ours,client_lr=0.1,distance=norm-s5",
        "ours,client_lr=1e-07,distance=norm-s1", "ours,client_lr=1e-07,distance=norm-s5", "fedavg-s1", "fedavg-s5",
    ]
    assert [(run.hyper.client_lr, run.hyper.local_steps, run.seed) for run in found[:3]] == [
        (0.1, 2, 1), (0.1, 2, 5), (1e-7, 2, 1),
    ]
    assert {run.hyper.distance for run in found[:4]} == {"norm"}


def test_values_that_differ_in_the_last_digit_are_runs_of_their_own(tmp_path: Path) -> None:
    grid = {"client_lr": [0.12345678, 0.12345679]}
    assert len(experiments.runs(lab.experiment(tmp_path, method=[{"name": "fedavg", "grid": grid}]))) == 2


def test_settings_of_the_command_line_go_over_the_file(path: Path) -> None:
    found = experiments.load(path, [
        "budget.rounds=7", "seeds=[3, 4]", "codec_up=int8", "method.1.hyper.penalty=0.5", "evaluation.support=[0.3]",
        "data.options.devices=6", "model.name=tests.support.lab:build",
    ])
    assert (found.budget.rounds, found.seeds, found.codec_up) == (7, (3, 4), "int8")
    assert [section.hyper for section in found.method] == [{"local_steps": 2}, {"penalty": 0.5}]
    assert (found.evaluation.support, found.data.options["devices"], found.model.name) == (
        (0.3,),
        6,
        "tests.support.lab:build",
    )


# Mistakes of the file -------------------------------------------------------------------------------------------------


def test_the_former_name_of_a_table_is_read_and_told(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path.write_text(path.read_text() + "[judge]\nevery = 7\n")
    found = experiments.load(path, ["judge.devices=3"])
    assert (found.evaluation.every, found.evaluation.devices) == (7, 3)
    assert f"{path}:15: judge: is now 'evaluation'" in capsys.readouterr().err


def test_unknown_keys_are_reported_at_once_with_their_lines_and_suggestions(path: Path) -> None:
    changes = {"rounds = 2": "round = 2", "cohort": "cohrot", "[model]": "[model]\noption = {}"}
    assert mistakes(path, changes) == [
        "1: cohrot: unknown key (did you mean 'cohort'?)",
        "6: model.option: unknown key (did you mean 'options'?)",
        "9: budget.round: unknown key (did you mean 'rounds'?)",
        "8: budget.rounds: missing, expected a whole number",
    ]


def test_a_hyper_parameter_that_the_method_lacks_is_reported_with_the_line_of_that_method(path: Path) -> None:
    changes = {"hyper.penalty = 0.2": "hyper.local_step = 5", "hyper.local_steps": "hyper.local_step"}
    assert mistakes(path, changes) == [
        "11: method[0].hyper.local_step: unknown key (did you mean 'local_steps'?)",
        "14: method[1].hyper.local_step: unknown key (did you mean 'local_steps'?)",
    ]


def test_a_hyper_parameter_in_a_table_of_its_method_has_its_line(path: Path) -> None:
    more = '[method.hyper]\npenalty = -1\n[[method]]\nname = "fedprox"\n[method.grid]\nproximty = [1, 2, 3]\n'
    assert mistakes(path, {"hyper.penalty = 0.2\n": more}) == [
        "15: method[1].hyper.penalty: -1 must be above 0",
        "19: method[2].grid.proximty: unknown key (did you mean 'proximity'?)",
    ]


METHOD = "hyper.local_steps = 2"  # its line is 11
ENCODED = ", ".join(sorted([*CODECS, AUTO, "none"]))
PARTITIONS = "acid, alid, classes, dirichlet, half-and-half, iid, natural, power-law"
MANY = list(range(1, 600))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("rounds = 2", "rounds = 0", "8: budget.rounds: 0 is below the least allowed, 1"),
        ("rounds = 2", "rounds = 2\njoules = -1", "9: budget.joules: -1 is below the least allowed, 0"),
        ("rounds = 2", "rounds = 2\njoules = 5", "9: budget.joules: are modelled for a board: name it with board"),
        ("cohort = 3", "seeds = [1, 2, 1]", "1: seeds: expected one or more, all different"),
        ("cohort = 3", "seeds = []", "1: seeds: expected one or more, all different"),
        ("cohort = 3", "seeds = [-1]", "1: seeds[0]: -1 is below the least allowed, 0"),
        (
            "cohort = 3",
            'codec_up = "int9"',
            f"1: codec_up: unknown value 'int9', expected one of {ENCODED} (did you mean 'int8'?)",
        ),
        (
            "[model]",
            '[partition]\nkind = "dirichlet"\noptions = {concentraton = 1.0}\n[model]',
            "7: partition.options.concentraton: unknown key (did you mean 'concentration'?)",
        ),
        (
            "[model]",
            '[partition]\nkind = "acid"\noptions.devices = 0\n[model]',
            "7: partition.options.devices: 0 is below the least allowed, 1",
        ),
        (
            "[model]",
            '[partition]\nkind = "acdi"\n[model]',
            f"6: partition.kind: unknown value 'acdi', expected one of {PARTITIONS} (did you mean 'acid'?)",
        ),
        ("[model]", '[train]\nfreeze = "atuo"\n[model]',
         "6: train.freeze: unknown value 'atuo', expected one of auto, never (did you mean 'auto'?)"),
        ("[data]", '[data]\npath = "x.npz"', "4: data.set: give either data.set or data.path"),
        ('set = "synthetic"\n', "", "2: data.set: give either data.set or data.path"),
        (
            'set = "synthetic"',
            'set = "all.npz"',
            "3: data.set: no data set is named 'all.npz' (did you mean data.path = \"all.npz\"?)",
        ),
        ("[data]", '[data]\nfile = "all.npz"', "3: data.file: unknown key (did you mean 'path'?)"),
        ("[data]", "[data]\nwindow = 64", "3: data.window: is only for a file of readings: give data.path"),
        (
            "[model]",
            "[evaluation]\nsupport = [0.2, 1.0]\n[model]",
            "6: evaluation.support[1]: 1.0 is over the limit of 0.99",
        ),
        ("[model]", "[evaluation]\nsupport = [0.2, 0.2]\n[model]", "6: evaluation.support: has a duplicate value"),
        (
            "[model]",
            "[evaluation]\nnew_devices = 0.6\nvalidation = 0.4\n[model]",
            "6: evaluation.new_devices: leaves no device to train",
        ),
        (
            "[model]",
            "[evaluation]\nnovel = {devices = 2}\n[model]",
            "6: evaluation.novel: no class is novel: name some in novel_classes",
        ),
        (
            "[model]",
            "[evaluation]\nnovel_classes = [1]\nwithin_training = true\n[model]",
            "7: evaluation.within_training: the training samples have no novel classes",
        ),
        (
            "[model]",
            "[evaluation]\nnovel_classes = [1]\nnovel = {shot = 2}\n[model]",
            "7: evaluation.novel.shot: unknown key (did you mean 'shots'?)",
        ),
        ("[model]", "[evaluation]\ntargets = [80]\n[model]", "6: evaluation.targets[0]: 80 is over the limit of 1"),
        (
            "[model]",
            "[evaluation]\nevery = 2.5\n[model]",
            "6: evaluation.every: expected a whole number, found a number",
        ),
        (METHOD, "grid.client_lr = 0.1", "11: method[0].grid.client_lr: expected a list of values"),
        (METHOD, "grid.client_lr = []", "11: method[0].grid.client_lr: expected a list of values"),
        (METHOD, "hyper.batch = 5\ngrid.batch = [5]", "12: method[0].grid.batch: is also in hyper"),
        (
            METHOD,
            f"grid = {{batch = {MANY}, local_steps = {MANY}, warm = {MANY}}}",
            "11: method[0].grid: gives more than 1000 runs",
        ),
        ("cohort = 3", f"seeds = {MANY}", "9: method: 1198 runs are over the limit of 1000"),
        (METHOD, "grid.client_lr = [0.1, 0.1]", "9: method: 'fedavg,client_lr=0.1' names 2 runs: give them labels"),
        ('"pfldyn-proto"\nhyper.penalty = 0.2', '"fedavg"', "9: method: 'fedavg' names 2 runs: give them labels"),
        (METHOD, 'label = "a/b"', r"11: method[0].label: 'a/b' does not match [A-Za-z0-9_.=,+-]{1,100}"),
    ],
)
def test_a_mistake_is_reported_with_its_line(path: Path, old: str, new: str, said: str) -> None:
    assert mistakes(path, {old: new}) == [said]


def test_a_method_that_there_is_not_is_reported_with_the_nearest(path: Path) -> None:
    (said,) = mistakes(path, {'name = "fedavg"': 'name = "fedagv"'})
    assert said.startswith("10: method[0].name: unknown value 'fedagv'")
    assert said.endswith("(did you mean 'fedavg'?)")


def test_a_label_that_is_too_long_for_a_folder_is_reported(path: Path) -> None:
    names = ("client_lr", "lr_decay", "clip_norm", "weight_decay", "server_lr")
    grid = ", ".join(f"{name} = [0.12345678901234567]" for name in names)
    message = mistakes(path, {METHOD: f'label = "{"x" * 90}"\ngrid = {{{grid}}}'})
    assert message == [f"9: method: '{'x' * 40}…' has 242 characters: give it a shorter label"]


# Mistakes of the command line -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("setting", "said"),
    [
        ("budget.rounds", "--set budget.rounds; expected --set key=value"),
        ("=3", "--set =3; expected --set key=value"),
        ("cohort.size=3", "--set cohort.size=3; expected a key of the experiment"),
        ("cohort.size.more=3", "--set cohort.size.more=3; expected a key of the experiment"),
        ("method.2.name=fedavg", "--set method.2.name=fedavg; expected a key of the experiment"),
        ("method.-1.name=fedavg", "--set method.-1.name=fedavg; expected a key of the experiment"),
        ("method.name=fedavg", "--set method.name=fedavg; expected a key of the experiment"),
        ("method.0=fedavg", "--set method.0=fedavg; expected a key of the experiment"),
        ("budget.rounds=0", "--set budget.rounds=0: budget.rounds: 0 is below the least allowed, 1"),
        ("budget.rounds=many", "--set budget.rounds=many: budget.rounds: expected a whole number, found text"),
        ("budgte.rounds=4", "--set budgte.rounds=4: budgte: unknown key (did you mean 'budget'?)"),
        ("seeds=[1, 1]", "--set seeds=[1, 1]: seeds: expected one or more, all different"),
        ("seeds=[0, -1]", "--set seeds=[0, -1]: seeds[1]: -1 is below the least allowed, 0"),
        ("method.0.hyper.penalty=1", "--set method.0.hyper.penalty=1: method[0].hyper.penalty: unknown key"),
    ],
)
def test_a_mistake_in_a_setting_is_told_as_it_was_typed(path: Path, setting: str, said: str) -> None:
    assert mistakes(path, {}, setting)[0] == said


# What cannot work with its data, before the first round ---------------------------------------------------------------


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return lab.recordings(tmp_path / "all.npz")


def refused(tmp_path: Path, values: Mapping[str, Any]) -> str:
    """Why the experiment does not start; nothing is trained or written."""
    with pytest.raises(FleetError) as caught:
        laboratory.simulate(experiments.read(values), tmp_path / "out", Options(jobs=1))
    assert caught.value.exit_code == 2
    assert not (tmp_path / "out").exists()
    return str(caught.value)


def cut(options: Mapping[str, Any], kind: str = "acid") -> dict[str, Any]:
    return {"kind": kind, "options": dict(options)}


ACID = {"devices": 3, "classes_per_device": 2, "train_per_device": 20, "test_per_device": 10}


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"partition": cut({**ACID, "classes_per_device": 4})}, "4 classes per device where 3 occur"),
        ({"partition": cut({**ACID, "train_per_device": 100})}, "class 0 has 77 samples in the set, 110 are wanted"),
        ({"cohort": 4}, "a cohort of 4 out of 3 devices"),
        ({"model": {"name": "lenet"}}, "it takes images [C, H, W], not samples of shape [8]"),
        ({"model": {"name": "char-lstm"}}, "the model 'char-lstm' takes tokens, not float32"),
        ({"model": {"name": "mpl"}}, "did you mean 'mlp'?"),
        ({"model": {"name": "mlp", "options": {"hiden": [3]}}}, "did you mean 'hidden'?"),
        ({"data": {"set": "cifar-10"}}, "hint: metafleet datasets fetch cifar-10"),
        ({"data": {"set": "cifar10"}}, "did you mean 'cifar-10'?"),
        ({"data": {"path": "nowhere.npz"}}, "nowhere.npz: does not exist"),
        ({"data": {"set": "heartbeat", "options": {"devices": 3}}}, "data.options are for the synthetic set"),
        ({"data": {"set": "synthetic", "options": {"device": 3}}, "partition": {}}, "data.options: "),
        ({"data": {"set": "synthetic", "options": {"beta": -1}}, "partition": {}}, "synthetic: beta is -1"),
        ({"board": "raspberry-pi-4"}, "unknown board 'raspberry-pi-4' (did you mean 'raspberry-pi-4b'?)"),
        ({"board": "nowhere.toml"}, "nowhere.toml: cannot be read"),
        ({"board": "raspberry-pi-4b", "budget": {"rounds": 2, "joules": 1}},
         "budget.joules: joules cannot be modelled without constants: model of raspberry-pi-4b"),
        ({"evaluation": {"new_devices": 0.5, "validation": 0.4}, "partition": cut({**ACID, "devices": 2})},
         "2 devices for 3 parts"),
        ({"evaluation": {"novel_classes": [7]}}, "has no class 7 to exclude"),
        ({"evaluation": {"novel_classes": [2], "novel": {"classes_per_device": 2, "devices": 1}}},
         "2 classes per device where 1 occur"),
        ({"evaluation": {"novel_classes": [2], "novel": {"shots": 0}}}, "shots: 0 is below the least allowed, 1"),
        ({"evaluation": {"novel_classes": [2], "novel": {"shots": 60, "queries": 60, "devices": 1}}}, "class 2 has "),
    ],
)
def test_what_cannot_work_is_refused_before_the_first_round(
    tmp_path: Path, data: Path, change: dict[str, Any], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("METAFLEET_DATA", str(tmp_path / "sets"))
    assert said in refused(tmp_path, lab.settings(data, **change))


def test_a_method_that_needs_a_head_is_refused_for_a_model_without_one(tmp_path: Path, data: Path) -> None:
    headless = {"name": "tests.support.lab:Headless"}
    message = refused(tmp_path, lab.settings(data, "fedavg", {}, model=headless))
    assert message.startswith("fedavg trains the head of a model, and 'tests.support.lab:Headless' has none\nhint: ")
    laboratory.simulate(lab.experiment(data, model=headless, budget={"rounds": 1}), tmp_path / "proto", Options(jobs=1))


def test_logistic_regression_is_trained_whole(tmp_path: Path, data: Path) -> None:
    linear = {"name": "logistic"}
    for method in ("pfedme", "fedavg"):
        asked = lab.experiment(data, method, {"local_steps": 1}, model=linear, budget={"rounds": 1})
        laboratory.simulate(asked, tmp_path / method, Options(jobs=1))


def test_a_method_that_needs_an_encoder_is_refused_for_logistic_regression(tmp_path: Path, data: Path) -> None:
    message = refused(tmp_path, lab.settings(data, "fedproto", {"local_steps": 1}, model={"name": "logistic"}))
    assert "fedproto trains the body of a model, and 'logistic' has none" in message
    asked = lab.experiment(data, "fedavg", {"local_steps": 1}, model={"name": "logistic"}, budget={"rounds": 1})
    laboratory.simulate(asked, tmp_path / "whole", Options(jobs=1))


def sparse(path: Path, labels: Mapping[str, list[int]]) -> Path:
    """Devices with one sample of each given label, in that order of time."""
    y = np.array([label for own in labels.values() for label in own])
    names = np.array([name for name, own in labels.items() for _ in own])
    save(path, Samples(np.ones((len(y), 8), np.float32) * y[:, None], y, names, np.arange(len(y), dtype=float)))
    return path


def test_devices_that_can_draw_no_episode_are_refused_by_name(tmp_path: Path) -> None:
    data = sparse(tmp_path / "few.npz", {"rich": [0, 0, 1, 1, 0, 1], "poor": [0, 1, 1, 1], "poorer": [1, 0]})
    message = refused(tmp_path, lab.settings(data, cohort=0))
    assert message.splitlines() == [
        "poor: no class has two training samples, which pfldyn-proto needs",
        "poorer: no class has two training samples, which pfldyn-proto needs",
        "hint: leave such devices out with the partition's min_samples, or use another partition",
    ]
    lab.run_first(lab.experiment(data, "fedavg", {"local_steps": 1, "finetune_steps": 1}), tmp_path / "run")


def test_gradient_steps_need_two_training_samples_of_any_class(tmp_path: Path) -> None:
    data = sparse(tmp_path / "few.npz", {"rich": [0, 0, 1, 1, 0, 1], "poor": [0, 1, 1, 1], "poorer": [1, 0]})
    message = refused(tmp_path, lab.settings(data, "per-fedavg-fo", cohort=0))
    assert message.splitlines()[0] == "poorer: fewer than two training samples, and per-fedavg-fo needs them"
    assert len(message.splitlines()) == 2


def test_a_new_device_without_a_support_set_is_refused_by_name(tmp_path: Path) -> None:
    data = sparse(tmp_path / "few.npz", {f"d{k}": [0, 1, 2] for k in range(4)})
    message = refused(tmp_path, lab.settings(data, "fedavg", {}, evaluation={"new_devices": 0.5}))
    lines = message.splitlines()
    assert len(lines) == 3
    assert all(line.endswith(", a new device: no class has two samples among 3") for line in lines[:2])


def test_many_devices_that_cannot_are_counted(tmp_path: Path) -> None:
    data = sparse(tmp_path / "few.npz", {f"d{k:02}": [0, 1, 2] for k in range(15)})
    assert refused(tmp_path, lab.settings(data)).splitlines()[10] == "and 5 more"


def test_novel_devices_with_more_classes_than_the_model_are_refused(tmp_path: Path) -> None:
    options = {"devices": 3, "classes_per_device": 1, "train_per_device": 4, "test_per_device": 4}
    values = lab.settings(lab.recordings(tmp_path / "all.npz"), partition=cut(options, "alid"), evaluation={
        "novel_classes": [1, 2], "novel": {"devices": 1, "shots": 2, "queries": 2}})
    assert refused(tmp_path, values).startswith("novel devices with 2 classes, and the model has 1")


# Warnings -------------------------------------------------------------------------------------------------------------


def warnings(values: Mapping[str, Any]) -> list[str]:
    asked = experiments.read(values)
    return laboratory.checked(asked, experiments.runs(asked))


def test_shared_heads_and_class_means_under_labels_of_one_s_own_are_warned_of(tmp_path: Path, data: Path) -> None:
    names = ("fedavg", "fedproto", "pfldyn-proto", "fedper")
    asked = lab.settings(data, partition=cut(ACID, "alid"), method=[{"name": name} for name in names])
    assert warnings(asked) == [
        "fedavg shares a head between devices that number their classes differently",
        "fedproto shares class means between devices that number their classes differently",
    ]
    assert warnings({**asked, "partition": cut(ACID)}) == []


def test_classes_that_are_evaluated_and_not_trained_on_are_warned_of(tmp_path: Path) -> None:
    data = sparse(tmp_path / "few.npz", {"a": [0, 0, 1, 1], "b": [0, 1, 0, 1]})
    values = lab.settings(data, "fedavg", {}, partition=cut({"split": "time", "train_fraction": 0.5}, "natural"))
    assert warnings(values) == ["1 of 2 devices are evaluated on classes that they do not train on"]


def test_a_gpu_that_is_not_there_is_refused(tmp_path: Path, data: Path) -> None:
    for options, said in (
        (Options(device="cuda"), "there is no GPU that torch can use here"),
        (Options(device="cuda", engine="ray"), "Ray's actors compute on processors"),
    ):
        with pytest.raises(ConfigError, match=said):
            laboratory.simulate(lab.experiment(data), tmp_path / "out", options)


# A part of the model --------------------------------------------------------------------------------------------------


def test_a_method_that_cannot_train_a_part_is_named_before_anything_is_computed(tmp_path: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        lab.experiment(tmp_path, train={"only": ["head.*"], "freeze": "auto"},
                       method=[{"name": "fedavg"}, {"name": "pfedhn"}, {"name": "fedproto"}])
    lines = str(caught.value).splitlines()
    assert ["pfedhn" in line or "fedproto" in line for line in lines] == [True] * 4
    assert any("train.only: fedproto shares prototypes" in line for line in lines)
    assert any("train.freeze: pfedhn makes the whole model" in line for line in lines)


def test_patterns_that_do_not_fit_the_model_are_refused_with_the_others_checks(tmp_path: Path) -> None:
    asked = lab.experiment(lab.recordings(tmp_path / "all.npz"), "fedavg", {}, train={"only": ["layer.*", "head.*"]})
    with pytest.raises(ConfigError, match=r"^train\.only\[0\]: no array of the model mlp is named") as caught:
        laboratory.checked(asked, experiments.runs(asked))
    assert "did you mean 'layers.*'?" in str(caught.value)
