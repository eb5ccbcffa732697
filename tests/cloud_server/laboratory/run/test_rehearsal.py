"""A few rounds before a run say how many bytes its updates and models take."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from statistics import mean
from typing import Any

import numpy as np
import pytest

from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import planned_costs
from cloud_server.laboratory.plan import workload as workloads
from cloud_server.laboratory.plan.planned_bytes import Asked, Rehearsed
from cloud_server.laboratory.run import rehearsal
from fleet_core.base.errors import ConfigError
from fleet_core.base.moving_arrays import Moving
from fleet_core.data.samples import Samples
from fleet_core.learning import models
from fleet_core.model.layout import InputSpec
from tests.support import lab

pytestmark = pytest.mark.usefixtures("no_fsync", "torch_threads")

CODECS = {"codec_up": "int8", "codec_down": "int8"}


@pytest.fixture
def experiment(tmp_path: Path) -> experiments.Experiment:
    made = lab.experiment(lab.recordings(tmp_path / "all.npz"), "fedavg", {"local_steps": 2}, cohort=0, **CODECS)
    return replace(made, budget=experiments.Budget(rehearsal.ROUNDS))


def asked(experiment: experiments.Experiment, **more: Any) -> Asked:
    layout = workloads.layout_of(experiment, workloads.build(experiment))
    run = experiments.runs(experiment)[0]
    given = {"label": "x", "method": run.method, "hyper": run.hyper, "layout": layout, "rounds": 9, "devices": 3,
             "first": models.initial(layout, run.seed), "seed": run.seed, **CODECS}
    return Asked(**{**given, **more})


def test_on_its_own_samples_a_rehearsal_sends_what_the_simulation_sends(
    tmp_path: Path, experiment: experiments.Experiment
) -> None:
    rows = lab.run_first(experiment, tmp_path / "run").rounds()[1:]
    found = rehearsal.rehearsed(asked(experiment), 1.0, workloads.build(experiment))
    assert found.up == pytest.approx(mean(row["payload_bytes"]["up"] for row in rows) / 3, abs=1)
    assert found.down == pytest.approx(mean(row["payload_bytes"]["down"] for row in rows) / 3, abs=1)
    assert found.about == f"of {rehearsal.ROUNDS} rounds with 3 devices on its own samples"


@pytest.mark.parametrize("spec", [
    InputSpec((3, 20), "float32", 1.0, (5.0, 0.0, -1.0), (2.0, 1.0, 0.1)),
    InputSpec((1, 8, 8), "uint8", 1 / 255, (0.5,), (0.2,)),
])
def test_generated_samples_are_what_the_input_expects(spec: InputSpec) -> None:
    layout = models.describe("mlp", spec, ("a", "b"), {"hidden": [4]})
    work = rehearsal.generated(layout, 3)
    assert work.samples.x.shape[1:] == spec.shape
    assert work.samples.x.dtype == spec.dtype
    assert [np.unique(work.own(share).y).tolist() for share in work.train] == [[0, 1]] * 3
    channels = (1, -1, *[1] * (len(spec.shape) - 1))
    seen = (work.samples.x * spec.scale - np.reshape(spec.mean, channels)) / np.reshape(spec.std, channels)
    assert abs(seen.mean()) < 0.3
    assert 0.5 < seen.std() < 2


def test_a_rehearsal_gives_the_plans_sizes_and_the_plan_says_so(experiment: experiments.Experiment) -> None:
    run = asked(experiment, rounds=4)
    noise = planned_costs.planned(run, None)
    found = planned_costs.planned(run, None, lambda one, flops: Rehearsed(100, 50, "of a rehearsal"))
    assert found.kinds["update"].up == 4 * 3 * 100
    assert found.kinds["model"].down < noise.kinds["model"].down
    assert (found.sizes, noise.sizes.partition(":")[0]) == (
        "of a rehearsal", "of random values, which compress less than real updates")


@pytest.mark.parametrize(("flops", "moving", "why"), [
    (1e15, Moving(), "a rehearsal would take long"),
    (1.0, Moving(frozenset({"head/weight"})), "some arrays are frozen"),
])
def test_where_there_is_no_rehearsal_the_plan_says_why_and_takes_noise(
    experiment: experiments.Experiment, flops: float, moving: Moving, why: str
) -> None:
    run = asked(experiment, moving=moving)
    with pytest.raises(ConfigError, match=why):
        rehearsal.rehearsed(run, flops)
    found = planned_costs.planned(run, None, lambda one, _: rehearsal.rehearsed(one, flops))
    assert found.sizes.endswith(why)
    assert found.payload_bytes == planned_costs.planned(run, None).payload_bytes


def test_no_samples_are_generated_for_an_input_of_whole_numbers() -> None:
    layout = models.describe("char-lstm", InputSpec((20,), "int64"), tuple("abc"), {})
    with pytest.raises(ConfigError, match="whole numbers"):
        rehearsal.generated(layout, 2)


@pytest.mark.parametrize(("client", "rows"), [
    (None, [3, 3, 2, 2]), (np.array(["b", "a"] * 5), [5, 5]), (np.array([*"abcdeabcde"]), [2, 2, 2, 2]),
])
def test_samples_are_divided_by_client_or_evenly(client: np.ndarray[Any, Any] | None, rows: list[int]) -> None:
    spec = InputSpec((3,), "float32")
    samples = Samples(np.zeros((10, 3), np.float32), np.arange(10) % 2, client, classes=("a", "b"))
    work = rehearsal.divided(samples, models.describe("mlp", spec, ("a", "b"), {"hidden": [4]}))
    assert [len(share.train) for share in work.train] == rows
    assert len({row for share in work.train for row in share.train.tolist()}) == sum(rows)
