"""Devices that train without torch, in a whole fleet: rounds, personalization, and what goes wrong."""

from __future__ import annotations

import os
import select
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.ledger.ledger_tables import Device, Evaluation, Update
from cloud_server.records import training_graph
from edge_agent.compute.onnx_trainer import GraphJobs
from edge_agent.compute.worker import Done, Inline, Job, Threaded
from edge_agent.connection.update_upload import Uploader
from edge_agent.device.state import DeviceState
from edge_agent.rounds.train_job import ATTEMPTS
from fleet_core.base import storage, trees
from fleet_core.base.errors import RoundError
from fleet_core.model import graph_bundle, train_graph
from fleet_core.model.layout import Layout
from fleet_core.training.graph_engine import GraphSteps
from tests.support.inprocess import Killed, World, config_text, toy, world
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.usefixtures("one_torch_thread", "no_fsync")

ROUNDS = 3
DEVICES = ("d0", "d1", "d2")


def fleet(folder: Path, method: str, engines: tuple[str, ...], **options: Any) -> World:
    """Three devices, whose engines are ``engines``, after ``ROUNDS`` rounds and the answers to the last."""
    w = world(folder, config_text(method, rounds=ROUNDS, devices=3, hyper="client_lr = 0.05", **options),
              train_graph=True)
    for number, (name, engine) in enumerate(zip(DEVICES, engines, strict=True)):
        w.start_agent(name, toy(number), engine=engine)
    w.start_server()
    assert w.pump(lambda: w.closed() == ROUNDS and evaluated(w) == set(DEVICES)), w.lines[-20:]
    return w


def layout_of(w: World) -> Layout:
    return graph_bundle.unpack(w.fleet.graph_bytes()).layout


def evaluated(w: World) -> set[str]:
    return {row.device for row in w.server.ledger.rows(Evaluation, round=ROUNDS)}


def counted(w: World) -> list[tuple[int, str]]:
    return [(row.round, row.device) for row in w.server.ledger.rows(Update, status="counted")]


def served(w: World) -> trees.Params:
    found: trees.Params = w.server.checkpoint.state.served
    return found


@pytest.mark.parametrize("method", ["pfldyn-proto", *(
    pytest.param(name, marks=pytest.mark.slow) for name in ("fedavg", "fedper", "pfedme", "fedproto"))])
@pytest.mark.slow
def test_a_mixed_fleet_ends_where_one_of_torch_alone_ends(tmp_path: Path, method: str) -> None:
    """In fp32, so that no rounding of a codec turns a last digit into a step of its grid; every device answers."""
    link = 'up = "fp32"\ndown = "fp32"'
    torch, mixed, onnx = (
        fleet(tmp_path / str(number), method, engines, link=link)
        for number, engines in enumerate((("torch",) * 3, ("torch", "onnx", "onnx"), ("onnx",) * 3))
    )
    for other in (mixed, onnx):
        assert counted(other) == counted(torch)
        gap = trees.norm(trees.subtract(served(torch), served(other)))
        assert gap <= 1e-5 * trees.norm(served(torch))
        assert [(row.device, row.confusion) for row in other.server.ledger.rows(Evaluation, round=ROUNDS)] == [
            (row.device, row.confusion) for row in torch.server.ledger.rows(Evaluation, round=ROUNDS)]
    for w in (torch, mixed, onnx):
        w.close()


@pytest.mark.slow
def test_presence_and_ledger_say_the_engine(tmp_path: Path) -> None:
    w = fleet(tmp_path, "pfldyn-proto", ("torch", "onnx", "torch"))
    engines = {row.name: list(row.capabilities["engines"]) for row in w.server.ledger.rows(Device)}
    assert engines == {"d0": ["torch"], "d1": ["onnx"], "d2": ["torch"]}
    home = DeviceState(w.folder / "devices" / "d1").folder
    assert len(list(home.glob("steps-*.safetensors"))) == 1
    assert not list(DeviceState(w.folder / "devices" / "d0").folder.glob("steps-*"))
    w.close()


def test_a_fleet_without_the_graph_does_not_ask_a_device_without_torch_and_says_why(tmp_path: Path) -> None:
    w = world(tmp_path, config_text("pfldyn-proto", rounds=2, devices=1))
    w.start_agent("d0", toy(0))
    w.start_agent("d1", toy(1), engine="onnx")
    w.start_server()
    assert w.pump(lambda: w.closed() == 2), w.lines[-20:]
    assert {name for _, name in counted(w)} == {"d0"}
    (row,) = w.server.ledger.rows(Device, name="d1")
    assert row.cannot == "does not train: it has no torch, and the fleet no graph for training with pfldyn-proto"
    w.close()


@pytest.mark.slow
def test_a_graph_of_another_estimator_than_the_fleets_is_not_published(tmp_path: Path) -> None:
    """fleet.toml was changed after 'metafleet init'; another 'init' makes the graph anew."""
    w = world(tmp_path, config_text("pfldyn-proto", rounds=1, devices=1), train_graph=True)
    layout = layout_of(w)
    assert training_graph.read(w.fleet, layout) is not None
    other = replace(w.fleet, hyper=replace(w.fleet.hyper, distance="norm"))
    assert training_graph.read(other, layout) is None


@pytest.mark.slow
def test_a_round_syncs_to_the_disk_only_what_a_power_cut_must_not_take(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The last signed time; the update, before it becomes the pending one; the pending one's name, before it is
    offered; the committed one's name. Models are fetched again, attempts are counted from 0 again."""
    synced: list[str] = []
    home = tmp_path / "devices" / "d1"

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.is_relative_to(home):
            synced.append("the folder" if path == home else path.parent.name if path.is_dir() else path.name)

    def offered(uploader: Uploader, *update: Any) -> bool:
        synced.append("offered")
        return offer(uploader, *update)

    offer = Uploader.offer
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Uploader, "offer", offered)
    w = world(tmp_path, config_text("pfldyn-proto", rounds=ROUNDS, devices=1), train_graph=True)
    w.start_agent("d1", toy(1), engine="onnx")
    w.start_server()
    assert w.pump(lambda: w.closed() == ROUNDS and evaluated(w) == {"d1"}), w.lines[-20:]
    first, second = [k for k, what in enumerate(synced) if what == "offered"][:2]
    names = [what.strip(".").partition(".")[0].partition("-")[0] for what in synced[first + 1 : second + 1]]
    assert names == ["clock", "the folder", "methods", "made", "methods", "offered"]
    w.close()


# Faults ---------------------------------------------------------------------------------------------------------------


def broken_golden(graph: train_graph.TrainGraph) -> train_graph.TrainGraph:
    return replace(graph, golden={**graph.golden, "train": graph.golden["train"] * 1.1})


def lacking_operator(graph: train_graph.TrainGraph) -> train_graph.TrainGraph:
    data = graph.graphs["train"]
    assert b"MatMul" in data or b"Gemm" in data
    for name in (b"MatMul", b"Gemm"):
        data = data.replace(name, b"X" * len(name))
    return replace(graph, graphs={"train": data})


@pytest.mark.slow
@pytest.mark.parametrize(("broken", "why"), [
    (broken_golden, "does not give its golden outputs here"), (lacking_operator, "cannot be opened"),
])
def test_a_graph_that_does_not_run_here_is_refused_with_its_reason_and_the_device_answers(
    tmp_path: Path, broken: Callable[[train_graph.TrainGraph], train_graph.TrainGraph], why: str
) -> None:
    w = world(tmp_path, config_text("pfldyn-proto", rounds=2, devices=1), train_graph=True)
    path, layout = training_graph.path_of(w.fleet), layout_of(w)
    graph = train_graph.unpack(storage.read_bytes(path, limit=1 << 24), layout)
    storage.write_atomic(path, train_graph.pack(broken(graph)))
    w.start_agent("d0", toy(0))
    w.start_agent("d1", toy(1), engine="onnx")
    w.start_server()
    assert w.pump(lambda: w.closed() == 2 and "d1" in {row.device for row in w.server.ledger.rows(Evaluation, round=2)})
    assert {name for _, name in counted(w)} == {"d0"}
    assert w.logged(why)
    assert w.agents["d1"].service.answering is not None
    w.close()


@pytest.mark.parametrize(("error", "why"), [
    (MemoryError(), "there is not enough memory for this round"),
    (RuntimeError("[ONNXRuntimeError] : 6 : bad_alloc"), "bad_alloc"),
    (None, "the loss is nan at step"),
])
def test_a_step_that_fails_commits_nothing_and_the_next_round_counts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception | None, why: str
) -> None:
    w = world(tmp_path, config_text("pfldyn-proto", rounds=2, devices=1), train_graph=True)
    w.start_agent("d0", toy(0), engine="onnx")
    run, calls = GraphSteps._run, [0]

    def failing(self: GraphSteps, at: Any, batch: Any) -> Any:
        calls[0] += 1
        if calls[0] != 2:
            return run(self, at, batch)
        if error is not None:
            raise error
        _, slope, found = run(self, at, batch)
        return np.float32("nan"), slope, found

    monkeypatch.setattr(GraphSteps, "_run", failing)
    w.start_server()
    assert w.pump(lambda: w.logged(why)), w.lines[-10:]
    home = DeviceState(w.folder / "devices" / "d0").folder
    assert not list(home.rglob("pending*")) + list(home.rglob("state.safetensors")) + list(home.rglob("made-*"))
    w.clock.seconds += 10_000
    assert w.pump(lambda: w.closed() == 2, tick_s=5), w.lines[-10:]
    assert counted(w)
    w.close()


def test_a_damaged_file_of_the_graph_is_fetched_again(tmp_path: Path) -> None:
    w = world(tmp_path, config_text("pfldyn-proto", rounds=4, devices=1), train_graph=True)
    w.start_agent("d0", toy(0), engine="onnx")
    w.start_server()
    assert w.pump(lambda: w.closed() == 1)
    w.kill_agent("d0")
    (path,) = DeviceState(w.folder / "devices" / "d0").folder.glob("steps-*.safetensors")
    path.write_bytes(path.read_bytes()[:-9])
    w.start_agent("d0", engine="onnx")
    assert w.pump(lambda: w.closed() == 4), w.lines[-20:]
    assert (4, "d0") in counted(w)
    w.close()


def test_the_jobs_keep_one_graph_open(tmp_path: Path) -> None:
    w = world(tmp_path, config_text("pfldyn-proto", rounds=3, devices=1), train_graph=True)
    w.start_agent("d0", toy(0), engine="onnx")
    jobs = GraphJobs()
    w.trainers["d0"].inner = Inline(jobs.handle)
    w.start_server()
    assert w.pump(lambda: w.closed() == 3)
    assert len(jobs._engines) == 1
    w.close()


def test_an_agent_that_ends_in_the_same_round_again_and_again_leaves_it_out(tmp_path: Path) -> None:
    """As when the system kills it because memory runs out."""
    w = world(tmp_path, config_text("pfldyn-proto", rounds=2, devices=2), train_graph=True)
    w.start_server()
    w.start_agent("d0", toy(0))
    w.start_agent("d1", toy(1), engine="onnx")
    for _ in range(ATTEMPTS):
        w.trainers["d1"].inner = Inline(lambda job: raising())
        with pytest.raises(Killed):
            w.pump(lambda: False)
        w.kill_agent("d1")
        w.start_agent("d1", engine="onnx")
    assert w.pump(lambda: w.logged("the agent ended 5 times while it trained this round")), w.lines[-20:]
    assert w.pump(lambda: w.closed() == 2, tick_s=1.0), w.lines[-20:]
    assert (1, "d1") not in counted(w)
    assert (2, "d1") in counted(w)
    w.close()


def raising() -> Any:
    raise Killed


def test_a_thread_gives_results_one_after_the_other_and_lets_its_memory_go(tmp_path: Path) -> None:
    made: list[Slow] = []

    def make() -> Slow:
        made.append(Slow())
        return made[-1]

    worker = Threaded(make)
    for number in range(2):
        worker.submit(Job("train", {"n": number}))
        assert worker.busy
        with pytest.raises(RoundError, match="busy"):
            worker.submit(Job("train", {}))
        made[-1].go.set()
        select.select(worker.descriptors(), [], [], PATIENCE_S)
        done = worker.poll()
        assert done is not None
        assert done.header == {"n": number}
        assert worker.descriptors() == ()
        assert worker.poll() is None
    assert len(made) == 1
    worker.stop()
    worker.submit(Job("train", {"n": 2}))
    assert len(made) == 2
    worker.stop()
    assert made[1].cancelled
    assert worker.descriptors() == ()


class Slow:
    """Ends when it is told to, or cancelled."""

    def __init__(self) -> None:
        self.go, self.cancelled = threading.Event(), False

    def handle(self, job: Job) -> Done:
        self.go.wait(PATIENCE_S)
        return Done(job.kind, job.header)

    def cancel(self) -> None:
        self.cancelled = True
        self.go.set()


def test_what_ends_the_thread_is_an_error_of_the_job() -> None:
    class Broken(Slow):
        def handle(self, job: Job) -> Done:
            raise SystemExit(3)

    worker = Threaded(Broken)
    worker.submit(Job("adapt", {}))
    select.select(worker.descriptors(), [], [], PATIENCE_S)
    done = worker.poll()
    assert done is not None
    assert "SystemExit" in done.error


def test_a_cancelled_round_ends_with_its_step_and_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    w = world(tmp_path, config_text("pfldyn-proto", rounds=1, devices=1), train_graph=True)
    w.start_agent("d0", toy(0), engine="onnx")
    jobs, run = GraphJobs(), GraphSteps._run

    def cancelling(self: GraphSteps, at: Any, batch: Any) -> Any:
        jobs.cancel()
        return run(self, at, batch)

    monkeypatch.setattr(GraphSteps, "_run", cancelling)
    w.trainers["d0"].inner = Inline(jobs.handle)
    w.start_server()
    assert w.pump(lambda: w.logged("stopped after 1 of 3 steps")), w.lines[-10:]
    assert not list(DeviceState(w.folder / "devices" / "d0").folder.rglob("made-*"))
    w.close()
