"""The laboratory's figures compared with plain loops: costs, and how the devices' models did."""

from __future__ import annotations

import tracemalloc
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn

from cloud_server.laboratory.plan import workload
from cloud_server.laboratory.plan.workload import Workload
from cloud_server.laboratory.run import round_figures
from cloud_server.laboratory.run.device_work import ClassMoments, DeviceEvaluation
from cloud_server.laboratory.run.round_figures import Costs
from cloud_server.laboratory.run.run_folder import Store
from cloud_server.laboratory.run.simulate import costs_of
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage
from fleet_core.data.partitions import Share, support_query
from fleet_core.data.samples import Samples, save
from fleet_core.power.radio import RadioModel
from fleet_core.tasks import calibration
from tests.support import lab

pytestmark = pytest.mark.usefixtures("no_fsync", "torch_threads")

Array = np.ndarray[Any, Any]
FEDAVG = {"local_steps": 2, "batch": 12, "finetune_steps": 0}
BODY, HEAD, MEANS = 8 * 6 + 6, 6 * 3 + 3, 3 * 6 + 3
"""Number of values of the tiny model, and of totals and counts of three class means."""


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return lab.recordings(tmp_path / "all.npz")


# How models did, from counts ------------------------------------------------------------------------------------------


def test_the_calibration_error_is_of_the_answers_of_all_devices_together() -> None:
    rng, answers = np.random.default_rng(1), []
    for _ in range(3):
        sure, right = rng.uniform(0.3, 1, 40), rng.random(40) < 0.7
        answers.append((sure, right, np.array([[right.sum(), 40 - right.sum(), 0], [0, 0, 0]])))
    every = [DeviceEvaluation(str(n), "train", 0.0, confusion, gaps=calibration.gaps(sure, right).tolist())
             for n, (sure, right, confusion) in enumerate(answers)]
    gap_B = calibration.gaps(*(np.concatenate(column) for column in list(zip(*answers, strict=True))[:2]))
    wanted = calibration.expected_calibration_error(gap_B, 120)
    assert round_figures.evaluated(every)["calibration_error"] == pytest.approx(wanted)


def plain_f1(pairs: list[tuple[int, int]]) -> float:
    """Mean over the classes of the truth; pairs of (truth, answer)."""
    scores = []
    for k in {truth for truth, _ in pairs}:
        hits = sum(truth == answer == k for truth, answer in pairs)
        precision = hits / max(1, sum(answer == k for _, answer in pairs))
        recall = hits / sum(truth == k for truth, _ in pairs)
        scores.append(2 * precision * recall / (precision + recall) if hits else 0.0)
    return sum(scores) / len(scores)


def test_accuracies_variance_and_f1_are_those_of_a_plain_loop() -> None:
    rng = np.random.default_rng(0)
    pairs = {f"d{n}": [(int(rng.integers(4)), int(rng.integers(6))) for _ in range(5 + 9 * n)] for n in range(4)}
    evaluations = []
    for name, own in pairs.items():
        confusion = np.zeros((5, 6), np.int64)
        for truth, answer in own:
            confusion[truth, answer] += 1
        evaluations.append(DeviceEvaluation(name, "train", 0.0, confusion))
    found = round_figures.evaluated(
        [*evaluations, DeviceEvaluation("d9", "train", 0.0, error="no class has two samples")]
    )
    shares = {name: sum(truth == answer for truth, answer in own) / len(own) for name, own in pairs.items()}
    everything = [pair for own in pairs.values() for pair in own]
    mean = sum(shares.values()) / 4
    assert found["accuracy"] == pytest.approx({
        "mean": mean, "worst": min(shares.values()), "best": max(shares.values()),
        "variance": sum((share - mean) ** 2 for share in shares.values()) / 4,
        "pooled": sum(truth == answer for truth, answer in everything) / len(everything),
    })
    assert found["devices"] == pytest.approx(shares)
    assert "calibration_error" not in found, "no device has told its gaps"
    assert found["macro_f1"] == pytest.approx(plain_f1(everything))
    assert found["not_evaluated"] == {"d9": "no class has two samples"}


def plain_nvar(z_ND: Array, y_N: Array) -> float:
    """Lim et al., Table 4: over classes, over samples, ‖c_k − z‖² / ‖c_k − n_k‖²."""
    centre = {k: z_ND[y_N == k].mean(0) for k in np.unique(y_N)}
    ratios = []
    for k, c in centre.items():
        nearest = min(((c - other) ** 2).sum() for j, other in centre.items() if j != k)
        ratios.append(np.mean([((c - z) ** 2).sum() / nearest for z in z_ND[y_N == k]]))
    return float(np.mean(ratios))


def test_normalized_variance_is_that_of_a_plain_loop() -> None:
    rng = np.random.default_rng(1)
    y_N = rng.integers(0, 4, 60) * 2  # classes without samples do not count
    z_ND = rng.normal(size=(60, 3)) + y_N[:, None]
    evaluations = []
    for rows in np.array_split(np.arange(60), 3):
        total, squares = np.zeros((8, 3)), np.zeros(8)
        for z, y in zip(z_ND[rows], y_N[rows], strict=True):
            total[y] += z
            squares[y] += (z**2).sum()
        moments = ClassMoments(total, squares, np.bincount(y_N[rows], minlength=8))
        evaluations.append(DeviceEvaluation("", "train", 0.0, np.eye(8, 9), moments=moments))
    assert round_figures.nvar(evaluations) == pytest.approx(plain_nvar(z_ND, y_N))
    alone = ClassMoments(np.ones((8, 3)), np.ones(8), np.eye(8, dtype=int)[0])
    assert round_figures.nvar([DeviceEvaluation("", "train", 0.0, moments=alone)]) is None
    assert round_figures.nvar([DeviceEvaluation("", "train", 0.0)]) is None


# How models did, from the served model and the samples ----------------------------------------------------------------


def evaluated(store: Store) -> dict[str, torch.Tensor]:
    """The served model's arrays after the last round, by group and number of axes."""
    path = sorted((store.folder / "state").glob("round-*"))[-1]
    arrays, _ = storage.unpack(path.read_bytes())
    role = "served" if any(name.startswith("served/") for name in arrays) else "model"
    parts = {name: name.split("/") for name in arrays}
    return {f"{parts[n][1]}{a.ndim}": torch.tensor(a).float() for n, a in arrays.items() if parts[n][0] == role}


class Plain(nn.Module):
    """The tiny MLP, written out."""

    def __init__(self, weights: dict[str, torch.Tensor]):
        super().__init__()
        self.first, self.head = nn.Linear(8, 6), nn.Linear(6, 3)
        self.first.weight, self.first.bias = nn.Parameter(weights["body2"]), nn.Parameter(weights["body1"])
        if "head2" in weights:
            self.head.weight, self.head.bias = nn.Parameter(weights["head2"]), nn.Parameter(weights["head1"])

    def embed(self, x: Array) -> torch.Tensor:
        return torch.relu(self.first(torch.tensor(x)))

    def answers(self, x: Array) -> Array:
        return self.head(self.embed(x)).argmax(1).numpy()

    def step(self, x: Array, y: Array, lr: float) -> None:
        self.zero_grad()
        loss = nn.functional.cross_entropy(self.head(self.embed(x)), torch.tensor(y))
        parameters = list(self.parameters())
        slopes = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, slope in zip(parameters, slopes, strict=True):
                parameter.sub_(lr * slope)


def nearest_means(model: Plain, support: tuple[Array, Array], query_x: Array) -> Array:
    with torch.no_grad():
        z, q = model.embed(support[0]).numpy(), model.embed(query_x).numpy()
    names = np.unique(support[1])
    centre = np.stack([z[support[1] == k].mean(0) for k in names])
    return names[((q[:, None] - centre) ** 2).sum(2).argmin(1)]


def of(work: Workload, share: Share, rows: Array) -> tuple[Array, Array]:
    return work.samples.x[rows], share.relabelled(work.samples.y[rows])


def test_new_devices_are_held_out_and_evaluated_after_learning_from_a_share_of_their_samples(data: Path) -> None:
    hyper = {**FEDAVG, "finetune_steps": 3, "finetune_lr": 0.3}
    asked = lab.experiment(
        data, "fedavg", hyper, cohort=0, partition={"kind": "iid", "options": {"devices": 6}, "seed": 4},
        evaluation={"every": 0, "new_devices": 0.3, "support": [0.2, 0.5]},
    )
    store, work = lab.run_first(asked, data.parent / "run"), workload.build(asked)
    last = store.rounds()[-1]
    assert len(work.new) == 2
    assert {share.name for share in work.new}.isdisjoint(last["devices"])
    for support in (0.2, 0.5):
        found, before = last["new_devices"][f"{support:g}"], []
        for share in work.new:
            own, later = (of(work, share, rows) for rows in support_query(share, work.samples.y, support, seed=4))
            model = Plain(evaluated(store))
            before.append((model.answers(later[0]) == later[1]).mean())
            for _ in range(3):
                model.step(*own, 0.3)
            assert found["devices"][share.name] == pytest.approx((model.answers(later[0]) == later[1]).mean())
        assert found["before"]["accuracy"]["mean"] == pytest.approx(np.mean(before))
    assert "new_devices" not in store.rounds()[0]


def test_a_new_device_can_learn_from_the_first_of_its_time(data: Path) -> None:
    asked = lab.experiment(data, "fedavg", FEDAVG, cohort=0,
                           evaluation={"every": 0, "new_devices": 0.3, "support": [0.25], "support_split": "time"})
    work = workload.build(asked)
    (share,) = work.new
    time = work.samples.time
    assert time is not None
    support, query = work.divided(share, 0.25, seed=0)
    rows = np.sort(share.rows)
    assert len(support.y) + len(query.y) == len(rows) == 90
    early = rows[np.argsort(time[rows], kind="stable")][: len(support.y)]
    np.testing.assert_array_equal(support.x, work.samples.x[early])
    end = 0.75 * time[rows].min() + 0.25 * time[rows].max()
    assert time[early].max() < end <= np.setdiff1d(time[rows], time[early]).min()
    last = lab.run_first(asked, data.parent / "run").rounds()[-1]
    answers = Plain(evaluated(Store(data.parent / "run"))).answers(query.x)
    assert last["new_devices"]["0.25"]["devices"][share.name] == pytest.approx((answers == query.y).mean())


@pytest.mark.parametrize("partition", [
    {"kind": "natural", "options": {"split": "time", "train_fraction": 0.6}},
    {"kind": "iid", "options": {"devices": 6}},
])
def test_within_training_nothing_that_is_evaluated_otherwise_is_looked_at(
    data: Path, partition: dict[str, Any]
) -> None:
    evaluation = {"every": 0, "new_devices": 0.34, "support": [0.5]}
    outside = workload.build(
        lab.experiment(data, "fedavg", FEDAVG, cohort=0, partition=partition, evaluation=evaluation)
    )
    asked = lab.experiment(data, "fedavg", FEDAVG, cohort=0, partition=partition,
                           evaluation={**evaluation, "within_training": True})
    inside = workload.build(asked)
    learned_from = {share.name: set(share.train.tolist()) for share in outside.train}
    assert {share.name for share in (*inside.train, *inside.new)} == set(learned_from)
    assert inside.new
    for share in (*inside.train, *inside.new):
        assert set(share.rows.tolist()) == learned_from[share.name]
        assert 0.5 < len(share.train) / len(share.rows) < 0.8
        assert share.test.size
    if inside.samples.time is not None and partition["kind"] == "natural":
        time = inside.samples.time
        assert all(time[share.train].max() <= time[share.test].min() for share in inside.train)


def test_the_served_model_as_it_is_stands_beside_what_devices_make_of_it(data: Path) -> None:
    asked = lab.experiment(data, "fedavg", {**FEDAVG, "finetune_steps": 20}, cohort=0)
    store, work = lab.run_first(asked, data.parent / "run"), workload.build(asked)
    last, pairs = store.rounds()[-1], []
    for share in work.train:
        x, y = of(work, share, share.test)
        pairs += list(zip(y.tolist(), Plain(evaluated(store)).answers(x).tolist(), strict=True))
    assert last["before"]["accuracy"]["pooled"] == pytest.approx(np.mean([truth == answer for truth, answer in pairs]))
    assert last["before"]["macro_f1"] == pytest.approx(plain_f1(pairs))
    assert last["before"]["accuracy"] != last["accuracy"]
    assert "before" not in lab.run_first(lab.experiment(data), data.parent / "proto").rounds()[-1]


def test_normalized_variance_is_taken_under_the_evaluated_encoder_over_all_devices(data: Path) -> None:
    asked = lab.experiment(data, cohort=0)
    store, work = lab.run_first(asked, data.parent / "run"), workload.build(asked)
    rows = np.concatenate([share.test for share in work.train])
    with torch.no_grad():
        z_ND = Plain(evaluated(store)).embed(work.samples.x[rows]).double().numpy()
    assert store.rounds()[-1]["nvar"] == pytest.approx(plain_nvar(z_ND, work.samples.y[rows]))


def test_the_gradient_step_at_test_takes_the_test_samples_where_that_is_asked(data: Path) -> None:
    hyper = {**lab.EPISODES, "inner_lr": 0.7}
    accuracies = []
    for test_step in (False, True):
        asked = lab.experiment(data, "per-fedavg-fo", hyper, evaluation={"every": 0, "test_step": test_step})
        store, work = lab.run_first(asked, data.parent / f"run{test_step}"), workload.build(asked)
        for share in work.train:
            later, model = of(work, share, share.test), Plain(evaluated(store))
            model.step(*(later if test_step else of(work, share, share.train)), 0.7)
            right = (model.answers(later[0]) == later[1]).mean()
            assert store.rounds()[-1]["devices"][share.name] == pytest.approx(right)
        accuracies.append(store.rounds()[-1]["devices"])
    assert accuracies[0] != accuracies[1]


def test_novel_classes_are_kept_from_training_and_learned_by_new_devices(tmp_path: Path) -> None:
    asked = lab.experiment(
        tmp_path, data={"set": "synthetic", "options": {"devices": 6, "least": 60, "most": 90}},
        partition={"kind": "natural"}, cohort=0, evaluation={"every": 0, "novel_classes": [1, 4, 7], "novel": {
            "devices": 2, "classes_per_device": 3, "shots": 3, "queries": 5}},
    )
    store, work = lab.run_first(asked, tmp_path / "run"), workload.build(asked)
    assert not {1, 4, 7} & {int(k) for share in work.train for k in work.samples.y[share.rows]}
    found = store.rounds()[-1]["novel_classes"]
    for share in work.novel:
        own, later = of(work, share, share.train), of(work, share, share.test)
        assert (len(own[1]), len(later[1])) == (9, 15)
        right = (nearest_means(Plain(evaluated(store)), own, later[0]) == later[1]).mean()
        assert found["devices"][share.name] == pytest.approx(right)


def test_permuted_labels_are_evaluated_in_the_numbers_of_the_set(data: Path) -> None:
    options = {"devices": 3, "classes_per_device": 2, "train_per_device": 20, "test_per_device": 12}
    asked = lab.experiment(data, cohort=0, partition={"kind": "alid", "options": options, "seed": 2})
    store, work = lab.run_first(asked, data.parent / "run"), workload.build(asked)
    pairs = []
    for share in work.train:
        assert share.labels is not None
        own, (x, _) = of(work, share, share.train), of(work, share, share.test)
        answers = [share.labels[k] for k in nearest_means(Plain(evaluated(store)), own, x)]
        pairs += list(zip(work.samples.y[share.test].tolist(), answers, strict=True))
    assert {share.labels for share in work.train} & {(1, 0), (2, 1), (0, 2)}
    last = store.rounds()[-1]
    assert last["macro_f1"] == pytest.approx(plain_f1(pairs))
    assert last["accuracy"]["pooled"] == pytest.approx(np.mean([truth == answer for truth, answer in pairs]))


# What was spent -------------------------------------------------------------------------------------------------------

SENT = {  # values up and down, models transmitted per device and round
    "fedavg": (BODY + HEAD, BODY + HEAD, 2), "pfldyn-proto": (BODY, BODY, 2), "scaffold": (75, 150, 3),
    "pflscaf-proto": (BODY, 2 * BODY, 3), "fedmeta-metasgd": (150, 150, 4), "fedproto": (MEANS, MEANS, 0),
    "lg-fedavg": (HEAD, HEAD, 2), "fedper": (BODY, BODY, 2), "local": (0, 0, 0),
}


@pytest.mark.parametrize("name", SENT)
def test_without_a_codec_a_value_takes_four_bytes(data: Path, name: str) -> None:
    hyper = {"local_steps": 1, "batch": 9} if hasattr(METHODS[name].hyper(), "batch") else {"local_steps": 1}
    asked = lab.experiment(data, name, hyper, budget={"rounds": 1}, evaluation={"every": 0})
    (row,) = lab.run_first(asked, data.parent / "run").rounds()
    up, down, models_transmitted = SENT[name]
    assert row["payload_bytes"] == {"up": 2 * 4 * up, "down": 2 * 4 * down}
    assert row["models_transmitted"] == 2 * models_transmitted
    assert row["models_transmitted_paper"] == 2 * (4 if "scaf" in name else models_transmitted)


def test_flops_are_those_of_the_steps(data: Path) -> None:
    (row,) = lab.run_first(lab.experiment(data, "fedavg", FEDAVG, budget={"rounds": 1}), data.parent / "run").rounds()
    forward = 2 * (8 * 6 + 6 * 3)
    assert row["flops"] == 2 * 2 * 12 * 3 * forward  # devices, steps, samples, a backward pass as two forward ones


BOARD = """\
name = "bench"
title = "A board with round constants"
arch = "x86_64"
[power]
idle_w = 2.0
busy_w = 6.0
source = "test"
[compute]
effective_flop_per_s = 1e9
source = "test"
[radio]
j_per_byte = 1e-6
source = "test"
"""


@pytest.fixture
def board(tmp_path: Path) -> Path:
    (tmp_path / "bench.toml").write_text(BOARD)
    return tmp_path / "bench.toml"


def test_joules_are_modelled_from_the_constants_of_the_board(data: Path, board: Path) -> None:
    asked = lab.experiment(data, "fedavg", FEDAVG, board=str(board))
    for row in lab.run_first(asked, data.parent / "run", costs=costs_of(asked)).rounds():
        moved = sum(row["payload_bytes"].values())
        assert row["energy_j"]["value"] == pytest.approx(4e-9 * row["flops"] + 1e-6 * moved)
        assert row["energy_j"]["source"] == "model of bench (test); radio: test"
        value, low, high = (row["energy_j"][key] for key in ("value", "low", "high"))
        assert low < 0.74 * value < 1.26 * value < high
    assert "energy_j" not in lab.run_first(lab.experiment(data, "fedavg", FEDAVG), data.parent / "none").rounds()[0]


def test_a_figure_that_cannot_be_taken_is_absent(data: Path, tmp_path: Path) -> None:
    pi = lab.experiment(data, "fedavg", FEDAVG, board="raspberry-pi-4b", budget={"rounds": 1})
    assert costs_of(pi).joules(1.0, 1.0, 1.0) is None
    (row,) = lab.run_first(pi, tmp_path / "run", costs=costs_of(pi)).rounds()
    assert "energy_j" not in row
    assert Costs(1.0, RadioModel(1.0, 1.0)).joules(None, 5, 5) is None


@pytest.mark.parametrize(("of_rounds", "ends"), [(2.0, 2), (2.01, 3), (0.1, 1)])
@pytest.mark.parametrize("what", ["payload_bytes", "joules"])
def test_a_budget_ends_a_run_in_the_round_that_reaches_it(
    data: Path, board: Path, what: str, of_rounds: float, ends: int
) -> None:
    payload = 2 * 2 * 4 * (BODY + HEAD)
    joules = 1e-6 * payload + 4e-9 * 2 * 2 * 12 * 3 * 132
    budget = {"rounds": 9, what: of_rounds * (payload if what == "payload_bytes" else joules)}
    asked = lab.experiment(data, "fedavg", FEDAVG, board=str(board), budget=budget, evaluation={"every": 0})
    store = lab.run_first(asked, data.parent / "run", costs=costs_of(asked))
    assert [("accuracy" in row) for row in store.rounds()] == [False] * (ends - 1) + [True]
    assert [row["round"] for row in lab.run_first(asked, store.folder, costs=costs_of(asked)).rounds()][-1] == ends


# Devices that fail ----------------------------------------------------------------------------------------------------


def with_a_wild_one(path: Path, scale: float) -> Path:
    """The samples of d1 are scaled by ``scale``."""
    from fleet_core.data.samples import load

    tame = load(lab.recordings(path))
    assert tame.client is not None
    x = np.where((tame.client == "d1")[:, None], tame.x * np.float32(scale), tame.x)
    save(path, Samples(x, tame.y, tame.client, tame.time, tame.classes))
    return path


@pytest.mark.parametrize("side_by_side", [1, 4])
@pytest.mark.parametrize("codec", ["none", "int8"])
@pytest.mark.parametrize(("scale", "lr", "why"), [(1e30, 0.1, "the loss is "), (1e17, 1e6, "value that is not finite")])
def test_a_device_that_diverges_is_refused_counted_and_named_and_the_others_go_on(
    tmp_path: Path, side_by_side: int, codec: str, scale: float, lr: float, why: str
) -> None:
    hyper = {"local_steps": 1, "support_batch": 9, "query_batch": 9, "clip_norm": 0, "client_lr": lr}
    data = with_a_wild_one(tmp_path / "wild.npz", scale)
    asked = lab.experiment(data, "pfldyn-proto", hyper, cohort=0, codec_up=codec, budget={"rounds": 1},
                           max_update_norm=1e300)
    store = lab.run_first(asked, tmp_path / "run", side_by_side=side_by_side)
    (row,) = store.rounds()
    assert (row["participants"], row["refused"]) == (2, 1)
    assert why in row["errors"]["d1"]
    assert np.isfinite(row["loss"])
    assert all(np.isfinite(array.numpy()).all() for array in evaluated(store).values())
    assert lab.device_state(store, "d1") == {}
    roles = {name.partition("/")[0] for name in lab.device_state(store, "d0")}
    assert roles == ({"dual", "residual"} if codec == "int8" else {"dual"})


def test_a_refused_update_was_computed_and_sent_too(tmp_path: Path) -> None:
    data, hyper = with_a_wild_one(tmp_path / "wild.npz", 1e3), {"local_steps": 1, "batch": 9, "clip_norm": 0}
    rows = []
    for bound in (1e300, 10.0):
        asked = lab.experiment(data, "fedavg", hyper, cohort=0, budget={"rounds": 1}, max_update_norm=bound)
        rows += lab.run_first(asked, tmp_path / f"run-{bound:g}").rounds()
    assert [row["refused"] for row in rows] == [0, 1]
    for key in ("flops", "payload_bytes"):
        assert rows[0][key] == rows[1][key]


# Memory ---------------------------------------------------------------------------------------------------------------


def many(path: Path, devices: int) -> Path:
    rng = np.random.default_rng(0)
    names = np.repeat([f"d{n:03}" for n in range(devices)], 6)
    y = np.tile([0, 1, 0, 1, 0, 1], devices)
    save(path, Samples(rng.normal(size=(y.size, 8)).astype(np.float32), y, names, np.arange(y.size, dtype=float)))
    return path


@pytest.mark.slow
def test_memory_does_not_grow_with_the_number_of_devices(tmp_path: Path) -> None:
    """States of 36 kB each are on disk; a further device adds a few names and rows to memory."""
    peaks, hyper = dict[int, int](), {"local_steps": 1, "support_batch": 2, "query_batch": 2}
    for devices in (20, 120):
        asked = lab.experiment(
            many(tmp_path / f"{devices}.npz", devices), "pfldyn-proto", hyper, cohort=20,
            model={"name": "mlp", "options": {"hidden": [1000]}}, budget={"rounds": 10},
            evaluation={"every": 0, "devices": 1},
        )
        tracemalloc.start()
        store = lab.run_first(asked, tmp_path / str(devices))
        peaks[devices] = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        took_part = sum(bool(lab.device_state(store, f"d{n:03}")) for n in range(devices))
        assert took_part > 0.7 * devices
    assert peaks[120] - peaks[20] < 100 * 36_000 / 10
