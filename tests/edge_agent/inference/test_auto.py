"""``auto``: a device weighs ways to personalize by its own samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.commands import device_commands
from edge_agent.inference import relearn
from edge_agent.inference.mixed_plans import mixed_plans
from edge_agent.inference.personalizers import Plan, plan_of
from edge_agent.inference.service import Service
from fleet_core.algorithms.methods.pfedgp import Gaussian
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.board.device_settings import Personalize
from tests.support import homes
from tests.support.inprocess import toy

X = toy(5).x[:6]
AUTO = '[personalize]\nby = "auto"\n[serve]\nworse_by = 1.0\n'
Y = np.repeat([0, 1, 2], 12)


def blobs(apart: float) -> Any:
    """Embedded samples of three classes, float32 [36, 4]."""
    centre = np.eye(3, 4)[Y] * apart
    return (centre + np.random.default_rng(0).normal(scale=0.3, size=(len(Y), 4))).astype(np.float32)


def device(folder: Path, method: str = "fedavg-meta") -> Service:
    return homes.service_with_model(homes.home(folder / "d0", toy(1), toml=AUTO), method)


def kept(service: Service) -> Any:
    return service.stored.personalization(service.slots.pointer().slot)


@pytest.mark.parametrize(
    ("method", "kinds"),
    [
        ("fedavg-meta", ["none", "proto", "head", "knn"]),
        ("pfldyn-proto", ["proto", "head", "knn"]),
        ("knn-per", ["knn", "none", "proto", "head"]),
        ("pfedgp", ["gp", "proto", "head", "knn"]),
    ],
)
def test_candidates_begin_with_the_methods_own(method: str, kinds: list[str]) -> None:
    one = METHODS[method]
    plan = plan_of(Personalize("auto"), one, one.hyper(), homes.graph_for(method))
    assert [candidate.kind for candidate in plan.candidates] == kinds


@pytest.mark.parametrize("plan", [
    Plan("proto", "proto"), Plan("head", "head", steps=50), Plan("knn", "knn", mixture=1.0),
    Plan("knn", "knn"), Plan("gp", "gp", gaussian=Gaussian()),
], ids=["proto", "head", "votes", "knn", "gp"])  # fmt: skip
def test_every_way_outweighs_a_head_that_knows_nothing(plan: Plan) -> None:
    guess = np.full((len(Y), 3), 1 / 3, np.float32)
    auto = Plan("auto", "auto", candidates=(Plan("none", "none"), plan))
    found = mixed_plans(auto, blobs(3.0), Y, 3, guess).ways
    assert found["none"].accuracy == pytest.approx(1 / 3)
    assert found[plan.kind].accuracy == 1.0
    assert found[plan.kind].weight > 0.6


def test_a_head_that_knows_all_outweighs_embeddings_that_say_nothing() -> None:
    right = np.eye(3, dtype=np.float32)[Y]
    auto = Plan("auto", "auto", candidates=(Plan("none", "none"), Plan("proto", "proto"), Plan("knn", "knn")))
    found = mixed_plans(auto, blobs(0.0), Y, 3, right).ways
    assert found["proto"].accuracy < 0.7
    assert found["none"].weight > 2 * found["proto"].weight


def test_frequent_classes_are_likelier_among_the_class_means_that_are_weighed() -> None:
    method = METHODS["pfldyn-proto"]
    plan = plan_of(Personalize("auto"), method, method.hyper(), homes.graph_for("pfldyn-proto"))
    assert [one.kind for one in plan.candidates if one.frequent] == ["proto"]
    assert not plan_of(Personalize("proto"), method, method.hyper(), homes.graph_for("pfldyn-proto")).frequent
    for way in ("proto", "method"):
        choice = Personalize(way, frequent=True)
        assert plan_of(choice, method, method.hyper(), homes.graph_for("pfldyn-proto")).frequent


@pytest.mark.parametrize("method", ["fedavg-meta", "pfldyn-proto", "knn-per", "pfedgp"])
def test_the_device_answers_by_the_mixture_and_says_so(
    method: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    service = device(tmp_path, method)
    said, place = relearn.personalize(service), service.slots.folder.parent
    auto = kept(service).settings["auto"]
    found = service.answers(X)
    assert said.how == kept(service).how == found.personalization == "auto"
    assert said.auto == auto
    assert homes.restored(place).answers(X) == found
    device_commands.status(place, as_json=True)
    assert json.loads(capsys.readouterr().out)["auto"] == auto
    device_commands.status(place, as_json=False)
    assert f"weighs by cross-validation on {auto['samples']} of its own" in " ".join(capsys.readouterr().out.split())


def test_the_mixtures_answer_is_the_tempered_mean_of_the_ways_answers(tmp_path: Path) -> None:
    service = device(tmp_path)
    relearn.personalize(service)
    auto, mixed = kept(service).settings["auto"], service.predict(X)
    total = np.zeros_like(mixed)
    for way, figures in auto["ways"].items():
        relearn.personalize(service, Personalize(way))
        if way != "proto":
            total += figures["weight"] * service.predict(X)
    assert set(auto["ways"]) == {"none", "proto", "head", "knn"}
    untempered = mixed.astype(np.float64) ** auto["temperature"]
    untempered /= untempered.sum(1, keepdims=True)
    means = (untempered - total) / auto["ways"]["proto"]["weight"]
    np.testing.assert_allclose(means.sum(1), 1.0, atol=1e-3)
    assert (means > -1e-3).all(), "what is left are the class means' probabilities"


def test_a_device_weighs_again_with_a_new_label_and_embeds_it_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    service = device(tmp_path)
    relearn.personalize(service)
    before = kept(service).settings["auto"]["samples"]
    rows = homes.counted_runs(monkeypatch)
    assert relearn.learn(service, X[:1], ["a"])["personalization"] == "auto"
    assert kept(service).settings["auto"]["samples"] == before + 1
    assert 1 in rows, "only the new sample was embedded"
