"""benchmarks/peers: both sides get the same samples and the same network, and the page has the figures of the result.
PFLlib itself is not here."""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from benchmarks.peers import division, ours, run, theirs
from benchmarks.peers.methods import DATA_SET, METHODS, SETTING
from benchmarks.peers.network import NETWORKS, Theirs
from benchmarks.peers.turns import Side
from cloud_server.laboratory.plan import workload as workloads
from fleet_core.base.errors import ConfigError
from fleet_core.data.samples import Samples
from fleet_core.learning import local_training, models

SMALL = replace(SETTING, train=20, test=6, batch=5, tuning_epochs=1)
DEVICES, NUMBER = 4, 4000


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Images whose first pixel is their row of the set, divided among four devices."""
    rng, half = np.random.default_rng(0), NUMBER // 2
    rows = np.arange(half)
    for name, shape in (("mnist", (1, 28, 28)), ("cifar-10", (3, 32, 32))):
        x = rng.integers(0, 256, (NUMBER, *shape)).astype(np.uint8)
        x[:, 0, 0, 0], x[:, 0, 0, 1] = np.arange(NUMBER) % 256, np.arange(NUMBER) // 256
        whole = Samples(x, np.arange(NUMBER) % 10, classes=tuple("0123456789"))
        division.write(division.divided(
            whole.take(rows), whole.take(rows + half), (SMALL.train, SMALL.test), devices=DEVICES
        ), tmp_path / name)
    return tmp_path


def test_the_page_has_the_figures_of_the_result() -> None:
    page = (run.HERE / "README.md").read_text(encoding="utf-8")
    assert run.page(json.loads(run.RESULT.read_text(encoding="utf-8"))["runs"]) == page


def test_both_sides_read_the_same_samples_of_the_same_devices(folder: Path) -> None:
    asked = ours.experiment(folder, "FedAvg", "mlp", 0, 1, SMALL)
    workload = workloads.build(asked)
    assert len(workload.train) == DEVICES
    images = set()
    for number, share in enumerate(workload.train):
        for part, own, size in (("train", workload.own(share), 20), ("test", workload.later(share), 6)):
            with np.load(folder / "mnist" / "dataset" / DATA_SET / part / f"{number}.npz", allow_pickle=True) as file:
                other = file["data"].tolist()
            np.testing.assert_array_equal(own.x, other["x"])
            np.testing.assert_array_equal(own.y, other["y"])
            assert len(own.y) == size
            assert -1 <= own.x.min() < 0 < own.x.max() <= 1
            images |= {tuple(image[0, 0, :2]) for image in own.x}
    assert len(images) == DEVICES * 26  # no image twice


@pytest.mark.parametrize("network", NETWORKS)
def test_both_sides_begin_with_the_same_network(folder: Path, network: str) -> None:
    asked = ours.experiment(folder, "FedAvg", network, 3, 1, SMALL)
    workload = workloads.build(asked)
    layout = workloads.layout_of(asked, workload)
    x = workload.samples.x[:4]
    logits = local_training.predict_logits(models.build(layout), models.initial(layout, 3), x)
    first = [torch.tensor(array) for array in ours.first_weights(folder, network, 3)]
    whole = Theirs(network, x.shape[1:], first)
    np.testing.assert_allclose(whole(torch.tensor(x)).detach().numpy(), logits, atol=1e-5)
    split = theirs.Split(whole)
    np.testing.assert_allclose(split(torch.tensor(x)).detach().numpy(), logits, atol=1e-5)
    assert [name.split(".")[0] for name, _ in split.named_parameters()][-3:] == ["base", "head", "head"]


@pytest.mark.parametrize("method", METHODS)
def test_every_method_runs_on_our_side(folder: Path, method: str) -> None:
    assert 0 <= ours.run(folder, method, "mlp", 0, 1, SMALL)["accuracy"] <= 1


def test_pfllib_runs_as_many_rounds_as_we_do() -> None:
    asked = theirs.arguments("pFedMe", 10, SETTING)
    assert len(range(asked.global_rounds + 1)) == 10
    assert (asked.beta, asked.lamda) == (1.0, 15.0)


def test_personal_models_of_pfedme_outlive_what_the_model_gets() -> None:
    model = torch.nn.Linear(1, 1)

    def update(model: torch.nn.Module, new: Any) -> None:
        for own, given in zip(model.parameters(), new, strict=True):
            own.data = given.clone()

    client = SimpleNamespace(personalized_params=list(model.parameters()), update_parameters=update)
    theirs.keep_personal(client)
    personal = [array.detach().clone() for array in model.parameters()]
    client.update_parameters(model, [array + 1 for array in personal])
    assert all(map(torch.equal, client.personalized_params, personal))


def test_a_side_answers_with_its_costs_and_a_failed_run_says_why() -> None:
    program = "from benchmarks.peers.turns import serve; serve(lambda value: {'accuracy': 1 / value})"
    side = Side([sys.executable, "-c", program])
    found = side.run({"value": 2})
    assert found["accuracy"] == 0.5
    assert found["peak_mb"] > 1
    with pytest.raises(SystemExit, match="ZeroDivisionError"):
        side.run({"value": 0})
    side.close()


def test_without_pfllib_the_command_says_what_it_needs(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="PFLlib is not given"):
        run.checkout(None)
    with pytest.raises(ConfigError, match=r"has no system/flcore/servers/serverbase\.py"):
        run.checkout(tmp_path)
