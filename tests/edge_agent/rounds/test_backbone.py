"""Fleets with a frozen backbone: real aggregator, real agents, on the loopback link."""

from __future__ import annotations

import base64
from pathlib import Path

import numpy as np
import pytest

from cloud_server.ledger.ledger_tables import Evaluation, Update
from edge_agent.connection.blob_download import Receiver
from edge_agent.inference import relearn
from fleet_core.backbone.features import Features
from fleet_core.base.errors import DataError
from fleet_core.protocol.device_messages import Question
from tests.support import backbones
from tests.support.backbones import SHAPE
from tests.support.inprocess import World, world

METHODS = ("fedavg", "pfldyn-maml", "fedmeta-metasgd", "fedper", "pfedme", "knn-per")


@pytest.fixture
def made(tmp_path):
    worlds = []

    def make(method: str = "pfldyn-proto", *, train_graph: bool = False, link: str = "") -> World:
        hyper = "local_steps = 5\n"
        text = backbones.fleet_text(tmp_path / "fleet", method, hyper=hyper, link=link)
        worlds.append(world(tmp_path, text, train_graph=train_graph))
        return worlds[-1]

    yield make
    for one in worlds:
        one.close()


def accuracy(w: World, stage: str) -> float:
    counts = np.sum([row.confusion for row in w.server.ledger.rows(Evaluation, stage=stage)], 0)
    return float(np.trace(counts) / counts.sum())


def run(w: World, engine: str = "torch") -> None:
    w.start_server()
    for k in range(2):
        w.start_agent(f"d{k}", backbones.samples(k), engine=engine)
    assert w.pump(lambda: w.closed() == 2 and len(evaluated(w)) == 2), w.lines


def evaluated(w: World) -> set[str]:
    return {row.device for row in w.server.ledger.rows(Evaluation, round=2)}


@pytest.mark.slow
@pytest.mark.parametrize("engine", ["torch", "onnx"])
def test_a_fleet_learns_on_features_and_answers_raw_samples(made, engine, monkeypatch):
    computed: list[int] = []
    of = Features.of

    def counting(self: Features, x: np.ndarray) -> np.ndarray:
        computed.append(len(x))
        return of(self, x)

    monkeypatch.setattr(Features, "of", counting)
    w = made(train_graph=engine == "onnx")
    run(w, engine)
    assert sum(computed) == 2 * 90  # every sample once, over rounds, personalization and evaluation
    assert accuracy(w, "after") > 0.9
    fresh = backbones.samples(5)
    answer = w.agents["d0"].service.answers(fresh.x)
    right = np.mean([label == "abc"[y] for label, y in zip(answer.labels, fresh.y, strict=True)])
    assert right > 0.9
    sent = [row.payload_bytes for row in w.server.ledger.rows(Update)]
    assert max(sent) < 4000  # the small part alone travels


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_methods_run_on_features(made, method):
    w = made(method)
    run(w)
    assert evaluated(w) == {"d0", "d1"}
    assert w.agents["d0"].service.answers(backbones.samples(5, 2).x).round == 2


def test_the_backbone_goes_on_after_the_agent_was_killed_and_is_fetched_once(made, tmp_path):
    w = made(link="chunk_bytes = 1024\n")
    w.start_server()
    for k in range(2):
        w.start_agent(f"d{k}", backbones.samples(k))

    def partial() -> list[Path]:
        return list((tmp_path / "devices/d0").glob("backbone-*.partial"))

    assert w.pump(lambda: bool(partial())), w.lines
    w.kill_agent("d0")
    w.start_agent("d0")
    assert w.pump(lambda: w.closed() == 2 and len(evaluated(w)) == 2), w.lines
    assert w.logged("CPUExecutionProvider")
    assert not partial()
    w.kill_agent("d0")
    w.start_agent("d0")
    fetched, fetcher = list[str](), w.agents["d0"]._fetcher
    into = fetcher.into

    def noted(inbox: Receiver, kind: str) -> None:
        fetched.append(inbox.blob.id)
        into(inbox, kind)

    fetcher.into = noted
    assert w.pump(lambda: w.agents["d0"].manifest is not None and w.agents["d0"].service.answering is not None)
    assert w.agents["d0"].manifest.backbone.id not in fetched


def test_a_damaged_backbone_is_refused_and_said(made, tmp_path):
    w = made()
    w.start_server()
    w.start_agent("d0", backbones.samples(0))
    identity = w.fleet.config.model.backbone.id
    path = tmp_path / f"devices/d0/backbone-{identity}.safetensors"
    path.write_bytes(b"another file")
    w.start_agent("d1", backbones.samples(1))
    assert w.pump(lambda: w.logged("not the fleet's backbone")), w.lines
    assert not path.exists()


def test_samples_are_added_and_learned_raw(made):
    w = made()
    run(w)
    service, more = w.agents["d0"].service, backbones.samples(8, 4)
    outcome = relearn.learn(service, more.x, ["abc"[y] for y in more.y])
    assert outcome["added"] == 4
    assert service.local().every().x.shape[1:] == (backbones.WIDTH,)
    with pytest.raises(DataError, match=r"expected one or more float32 \[2, 5, 5\]"):
        relearn.learn(service, np.zeros((1, backbones.WIDTH), np.float32), ["a"])


def test_a_question_over_the_broker_has_raw_samples(made):
    w = made()
    run(w)
    x = backbones.samples(5, 2).x
    answer = w.agents["d1"].service.answer(Question(x.shape, "float32", base64.b64encode(x.tobytes()).decode()))
    assert len(answer.labels) == 2
    assert x.shape[1:] == SHAPE


def test_another_backbone_in_the_fleets_folder_is_refused(made, tmp_path):
    w = made()
    (tmp_path / "fleet" / "backbone.safetensors").write_bytes(b"x")
    with pytest.raises(Exception, match="is another backbone"):
        w.start_server()
