"""Gradient steps on a device without torch: the graph ``adapt`` in a child process that ends."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.ledger.ledger_tables import Evaluation
from edge_agent.compute import adapter
from edge_agent.compute.adapter import AdapterProcess
from edge_agent.compute.worker import Job
from edge_agent.device.manifest_method import hyper_of
from edge_agent.inference import relearn
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage
from fleet_core.base.errors import DataError, RoundError
from fleet_core.data.samples import Samples, stratified
from fleet_core.learning import models, personal_model
from fleet_core.model import graph_bundle
from tests.support import homes
from tests.support.inprocess import config_text, toy, world
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S
from tests.support.world_checks import finished

STEPPING = {
    "per-fedavg-fo": {"inner_steps": 1, "inner_lr": 0.2},
    "fedavg-meta": {"finetune_steps": 10, "finetune_lr": 0.1},
    "fedmeta-metasgd": {},
    "local": {"finetune_steps": 10, "finetune_lr": 0.1},
    "fedbabu": {"finetune_steps": 3, "finetune_lr": 0.1},
}


def device(folder: Path, method: str, hyper: dict[str, Any] | None = None, samples: Samples | None = None) -> Any:
    place = homes.home(folder / "d0", samples or toy(1))
    return homes.service_with_model(place, method, hyper=STEPPING.get(method) if hyper is None else hyper)


def order(service: Any, **other: Any) -> Job:
    """The job that the service would submit."""
    served = service.stored.served()
    plan = service.plan(served.method, served.hyper, trainer=False)
    made = service.steps(plan)
    return Job("adapt", {**made.header, **other})


@pytest.mark.parametrize("method", STEPPING)
@pytest.mark.slow
def test_the_steps_are_torchs(tmp_path: Path, method: str) -> None:
    service = device(tmp_path, method)
    done = adapter.handle(order(service))
    assert done.error == ""
    own, made = service.local().own(), METHODS[method]
    wanted = personal_model.adapt(
        made, models.build(homes.layout()), homes.layout(), homes.served_weights(method), own.x, own.y,
        hyper_of(made, STEPPING[method]), None, {"seed": 0.0, "round": 1.0},
    )
    flat = storage.flatten(wanted)
    assert done.arrays.keys() == flat.keys()
    for key, array in flat.items():
        np.testing.assert_allclose(done.arrays[key], array, rtol=1e-3, atol=1e-5)
    start = storage.flatten({**models.initial(homes.layout(), 0), **homes.served_weights(method)})
    assert max(float(np.abs(done.arrays[key] - start[key]).max()) for key in flat) > 1e-3
    assert (done.header["samples"], done.header["of"]) == (len(own), len(own))


WITHOUT_TORCH = """
import json, sys
sys.modules.update(torch=None, onnx=None, onnxscript=None)  # as if they were not installed
from edge_agent.compute import adapter
from edge_agent.compute.worker import Job
done = adapter.handle(Job("adapt", json.loads(sys.argv[1])))
print(json.dumps([done.error, sorted(done.arrays)]))
"""


@pytest.mark.slow
def test_a_child_process_takes_the_steps_without_torch_and_ends(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = device(tmp_path, "fedavg-meta")
    job = order(service)
    command = [sys.executable, "-c", WITHOUT_TORCH, json.dumps(job.header)]
    bare = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S, check=False)
    started: list[int] = []
    begin = AdapterProcess._start

    def noted(self: AdapterProcess) -> Any:
        child = begin(self)
        started.append(child.pid)
        return child

    monkeypatch.setattr(AdapterProcess, "_start", noted)
    done = adapter.run(job)
    assert done.error == ""
    assert json.loads(bare.stdout) == ["", sorted(done.arrays)], bare.stderr
    inline = adapter.handle(job)
    assert all(np.array_equal(done.arrays[key], array) for key, array in inline.arrays.items())
    with pytest.raises(ProcessLookupError):
        os.kill(started[0], 0)


@pytest.mark.slow
def test_a_killed_child_process_ends_the_job_with_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    service = device(tmp_path, "fedavg-meta")
    begin, before = AdapterProcess._start, service.answers(toy(2).x[:4])

    def killed(self: AdapterProcess) -> Any:
        child = begin(self)
        child.send_signal(signal.SIGKILL)
        child.wait()
        return child

    monkeypatch.setattr(AdapterProcess, "_start", killed)
    with pytest.raises(RoundError, match="the adapter process"):
        relearn.personalize(service)
    assert service.answers(toy(2).x[:4]) == before


@pytest.mark.slow
def test_of_many_samples_a_stratified_subset_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(adapter, "MAX_SUPPORT", 12)
    monkeypatch.setattr(adapter, "run", adapter.handle)
    service = device(tmp_path, "fedavg-meta")
    said = relearn.personalize(service)
    assert (said.how, said.samples, said.of) == ("sgd", 12, len(service.local().own()))


@pytest.mark.parametrize("most", [1, 3, 7, 30, 99, 1000])
def test_a_stratified_subset_has_as_many_samples_of_each_class(most: int) -> None:
    y = np.array([0] * 80 + [3] * 5 + [1] * 15)
    rows = stratified(y, most)
    assert len(rows) == min(most, len(y))
    assert (np.diff(rows) > 0).all()
    counts = np.bincount(y[rows], minlength=4)
    for label, there in ((0, 80), (1, 15), (3, 5)):
        assert counts[label] == there or counts[label] + 1 >= counts.max()
    if most == 30:
        assert rows[rows < 80].max() > 60, "of the whole recording"


@pytest.mark.slow
@pytest.mark.parametrize(("change", "words"), [
    ({"rate": 1e30}, "diverged"),
    ({"model": "0" * 32}, "are not here"),
    ({"graph": "graph-none.safetensors"}, "cannot be read"),
    ({"samples": "/nowhere/samples.npz"}, "no samples yet"),
])
def test_an_error_in_a_job_is_its_result(tmp_path: Path, change: dict[str, Any], words: str) -> None:
    done = adapter.handle(order(device(tmp_path, "fedavg-meta"), **change))
    assert words in done.error
    assert done.arrays == {}


@pytest.mark.slow
def test_samples_of_another_shape_or_dtype_are_refused(tmp_path: Path) -> None:
    graph, weights = homes.stepping(), homes.weights_of(homes.served_weights("fedavg-meta"))
    wrong = Samples(np.zeros((3, 7), np.float32), np.arange(3))
    with pytest.raises(DataError, match="the samples are float32"):
        adapter.after_steps(graph, weights, wrong, 1, 0.1)


# In the agent ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize(("method", "how"), [("fedavg-meta", "sgd"), ("fedmeta-metasgd", "meta-sgd"), ("local", "own")])
def test_an_agent_without_torch_makes_its_own_weights_by_the_graph(tmp_path: Path, method: str, how: str) -> None:
    w = world(tmp_path, config_text(method, rounds=2, devices=1))
    path = w.fleet.folder / "graph.safetensors"
    assert graph_bundle.unpack(path.read_bytes()).layout.hash == homes.layout().hash
    path.write_bytes(graph_bundle.pack(homes.graph_for(method)))
    w.start_server()
    w.start_agent("d0", toy(0))
    assert w.pump(lambda: finished(w))
    w.start_agent("bare", toy(8), trainer=False)
    w.start_agent("torch", toy(8), train=False)
    assert w.pump(lambda: {row.device for row in w.server.ledger.rows(Evaluation, stage="after")} >= {"bare", "torch"})
    bare, other = (w.agents[name].service.answers(toy(5).x[:6]) for name in ("bare", "torch"))
    assert (bare.round, bare.personalization) == (2, how)
    np.testing.assert_allclose(bare.probabilities, other.probabilities, atol=1e-3)
    assert not w.logged("bare: " + method)
    again = homes_of(w, "bare")
    assert again.answers(toy(5).x[:6]) == bare
    w.close()


def homes_of(w: Any, name: str) -> Any:
    service = type(w.agents[name].service)(w.agents[name].home, w.agents[name].service.stored._data)
    service.restore()
    return service
