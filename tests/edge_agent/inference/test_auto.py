"""``auto``: a device chooses how to personalize by its own samples."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.commands import device_commands
from edge_agent.inference import relearn
from edge_agent.inference.chosen_plan import chosen_plan
from edge_agent.inference.personalizers import Plan, plan_of
from edge_agent.inference.service import Service
from fleet_core.algorithms.methods.pfedgp import Gaussian
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.board.device_settings import Personalize
from fleet_core.personalization.choose_way import FOLDS
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
def test_every_way_is_chosen_over_a_head_that_knows_nothing(plan: Plan) -> None:
    guess = np.full((len(Y), 3), 1 / 3, np.float32)
    auto = Plan("auto", "auto", candidates=(Plan("none", "none"), plan))
    found, choice = chosen_plan(auto, blobs(3.0), Y, 3, guess)
    assert found is plan
    assert choice.judged["none"].accuracy == pytest.approx(1 / 3)
    assert choice.judged[plan.kind].accuracy == 1.0


def test_a_head_that_knows_all_is_kept_where_the_embeddings_say_nothing() -> None:
    right = np.eye(3, dtype=np.float32)[Y]
    auto = Plan("auto", "auto", candidates=(Plan("none", "none"), Plan("proto", "proto"), Plan("knn", "knn")))
    found, choice = chosen_plan(auto, blobs(0.0), Y, 3, right)
    assert found.kind == "none"
    assert choice.judged["proto"].accuracy < 0.7


def test_the_device_answers_by_the_chosen_way_and_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    service = device(tmp_path)
    said, place = relearn.personalize(service), service.slots.folder.parent
    auto = kept(service).settings["auto"]
    assert said.how == auto["way"] == service.answers(X).personalization
    assert said.auto == auto
    assert set(auto["judged"]) == {"none", "proto", "head", "knn"}
    found = service.answers(X)
    assert homes.restored(place).answers(X) == found
    device_commands.status(place, as_json=True)
    assert json.loads(capsys.readouterr().out)["auto"] == auto
    device_commands.status(place, as_json=False)
    assert f"chose {auto['way']} by cross-validated accuracy" in " ".join(capsys.readouterr().out.split())
    relearn.personalize(service, Personalize(auto["way"]))
    np.testing.assert_allclose(service.predict(X), found.probabilities, atol=1e-5)


def test_a_device_that_chose_the_served_model_restarts_with_it_and_chooses_again_with_a_new_label(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet_core.personalization.choose_way.LEAST", 10**6)
    service = device(tmp_path)
    relearn.personalize(service)
    place = service.slots.folder.parent
    assert (kept(service).how, service.answers(X).personalization) == ("none", "none")
    assert service.answers(X) == homes.restored(place).answers(X)
    monkeypatch.setattr("fleet_core.personalization.choose_way.LEAST", FOLDS)
    rows = homes.counted_runs(monkeypatch)
    assert relearn.learn(service, X[:1], ["a"])["personalization"] == kept(service).how
    assert kept(service).settings["auto"]["samples"] > FOLDS
    assert 1 in rows, "only the new sample was embedded"
