"""Settings without effect: a method declares exactly those that change no bit, and whoever sets one is told."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

import numpy as np
import pytest

from fleet_core.algorithms.interface import read_hyper
from fleet_core.algorithms.methods.registry import METHODS
from tests.support.simulation import Fleet, flat, hyper_of, toy_samples

pytestmark = pytest.mark.usefixtures("one_torch_thread")

SMALL: dict[str, Any] = {"local_steps": 2, "head_steps": 1, "hyper_width": 4, "batch": 20, "shots": 3, "query_shots": 4,
                         "support_batch": 8, "query_batch": 10, "penalty": 0.2}
OTHER: dict[str, Any] = {
    "lr_decay": 0.5, "weight_decay": 0.3, "clip_norm": 1e-3, "weighted": True, "server_beta1": 0.5,
    "server_beta2": 0.5, "server_epsilon": 0.5, "server_start": 0.5, "batch": 7, "draws": "pass", "distance": "norm",
    "independent_hessian_batch": True, "difference": 0.3, "proximity": 1.0, "control_rate": "initial",
    "warm_start": False, "answer": "last", "margin_distance": "squared", "shots": 2, "query_shots": 2,
    "triplet_sum": True, "margin_divisor": "printed", "negative": "positive", "loss_share": 0.9, "window": 1,
    "window_mean": False, "warm_up": 1, "kernel": "linear", "augmentation_steps": 1, "neighbours": 1, "mixture": 0.9,
    "finetune_steps": 3, "pull": 1.0, "means_share": 0.9, "pull_form": "norm",
}
"""Values other than the default and that of ``SMALL``; numbers that are not here are doubled."""
IMAGES = ("augment",)
"""Settings that only images have."""
FORMS: list[tuple[str, dict[str, Any]]] = [
    *((name, {}) for name in METHODS), ("fedmeta-maml", {"form": "appendix"}), ("metavers", {"shots": 0}),
    ("metavers", {"loss_share": 1.0}), ("metavers", {"fixed_margin": 0.5}),
    ("fedavg", {"server_optimizer": "adam"}), ("fedavg", {"finetune_steps": 2}),
    ("scaffold", {"lr_decay": 0.5}), ("fedmeta-maml", {"server_optimizer": "sgd"}),
]


def other(hyper: Any, key: str) -> Any:
    value = getattr(hyper, key)
    if key == "server_optimizer":
        return "yogi" if value == "sgd" else "sgd"
    if key == "local_optimizer":
        return "adam"
    if key == "form":
        return "appendix" if value == "algorithm-1" else "algorithm-1"
    if key in OTHER and OTHER[key] != value:
        return OTHER[key]
    return value * 2 if value else 1


def bits(name: str, hyper: Any) -> list[bytes]:
    """The bits of everything that two rounds leave, and of a new and a known device's answers."""
    data = [toy_samples(40), toy_samples(50, seed=1), toy_samples(60, seed=2)]
    fleet = Fleet(name, hyper, data)
    for _ in range(2):
        fleet.round()
    state, x = fleet.state, toy_samples(200, seed=9)[0]
    trees = [state.model, state.served, *state.memory.values(), *(t for one in fleet.states for t in one.values()),
             fleet.own(data[0]), fleet.own(data[0], fleet.states[0])]
    arrays = [np.asarray(array) for tree in trees for array in flat(tree)]
    return [array.tobytes() for array in (*arrays, fleet.answers(data[0], x), np.array(list(state.scalars.values())))]


@pytest.mark.slow
@pytest.mark.parametrize(("name", "form"), FORMS)
def test_a_setting_does_nothing_exactly_where_the_method_states_so(name: str, form: dict[str, Any]) -> None:
    hyper = hyper_of(name, **{**SMALL, **form})
    method, before = METHODS[name], bits(name, hyper)
    stated = set(hyper.unread(method))
    asked = [f.name for f in fields(hyper) if f.name not in (*IMAGES, *form)]
    if name == "per-fedavg-fo":  # the batch that nothing uses is drawn, and the next draw is another
        asked.remove("independent_hessian_batch")
    idle = {key for key in asked if bits(name, hyper_of(name, **{**SMALL, **form, key: other(hyper, key)})) == before}
    assert idle == stated & set(asked)


def test_what_does_nothing_is_refused_by_name_with_all_other_mistakes() -> None:
    found, problems = read_hyper(METHODS["fedmeta-maml"], {
        "client_lr": 0.5, "clip_norm": 1.0, "weight_decay": 0.1, "lr_decay": 0.9, "inner_lr": -1, "inner_stepz": 2})
    assert found is None
    assert {problem.key for problem in problems} == {
        "client_lr", "clip_norm", "weight_decay", "lr_decay", "inner_lr", "inner_stepz"}
    assert str(next(p for p in problems if p.key == "client_lr")) == (
        "client_lr: does nothing here: in the form algorithm-1 a device takes no step: the server does, by server_lr")
    appendix, problems = read_hyper(METHODS["fedmeta-maml"], {"client_lr": 0.5, "clip_norm": 1.0, "form": "appendix"})
    assert (appendix.client_lr, problems) == (0.5, [])


@pytest.mark.parametrize("name", METHODS)
def test_all_settings_with_their_defaults_are_accepted(name: str) -> None:
    """As ``metafleet init`` writes them."""
    values = vars(METHODS[name].hyper())
    assert read_hyper(METHODS[name], values) == (METHODS[name].hyper(), [])
