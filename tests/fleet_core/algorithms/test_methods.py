"""What two methods have in common where their choices agree (identities 1 and 5): on quadratics in float64, and with
the real client loop on toy samples where the draws matter."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fleet_core.algorithms.interface import OWN_LABELS, ClientState, LocalSgd, Payload, ServerState, Update
from fleet_core.algorithms.methods.fedproto import PrototypeClient, PrototypeServer, Pull
from fleet_core.algorithms.methods.metavers import Margins, VersClient, VersServer, history
from fleet_core.algorithms.methods.moreau import Moreau, MoreauClient
from fleet_core.algorithms.methods.partial_sharing import HeadFirst, HeadFirstClient, KeepingClient
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.learning import local_training
from tests.support.quadratics import (
    DEVICES,
    SIZE,
    SMOOTHNESS,
    QuadraticFleet,
    bits,
    fleet_of,
    random_cohorts,
    tree,
    vector,
)
from tests.support.simulation import Fleet, equal_bits, flat, hyper_of, max_difference, toy_layout, toy_samples

EXACT: dict[str, Any] = {"client_lr": 1 / SMOOTHNESS, "clip_norm": 0.0, "local_steps": 10}
STEPS: dict[str, Any] = {
    "local_steps": 4, "client_lr": 0.05, "clip_norm": 0.0, "batch": 20, "support_batch": 12, "query_batch": 8,
    "inner_steps": 1, "inner_lr": 0.1,
}  # fmt: skip


def quadratic(name: str, **hyper: Any) -> QuadraticFleet:
    return fleet_of(name, hyper_of(name, **{**EXACT, **hyper}), DEVICES)


def toys(name: str, **hyper: Any) -> Fleet:
    """Three devices with their own samples, one of them with more than the others."""
    data = [toy_samples(n, seed=n) for n in (60, 61, 90)]
    return Fleet(name, hyper_of(name, **{**STEPS, **hyper}), data, toy_layout())


def play(fleet: QuadraticFleet, rounds: int = 6) -> list[bytes]:
    """The model's bits after every round of five of eight devices."""
    found = []
    for active in random_cohorts(DEVICES, 5, rounds, seed=2):
        fleet.round(active)
        found.append(bits(trees.only(fleet.state.model, ("body", "head"))))
    return found


# FedMeta and Per-FedAvg (identity 1) ----------------------------------------------------------------------------------

BETA = 0.05


def test_fedmeta_with_a_server_sgd_is_per_fedavg_with_one_step() -> None:
    """Round after round with the same cohorts and batches; the server's rate is the device's."""
    meta = toys("fedmeta-maml", local_steps=1, server_optimizer="sgd", server_lr=BETA)
    fallah = toys("per-fedavg-exact", local_steps=1, client_lr=BETA)
    first = vector(meta.state.model)
    for active in ([0, 1, 2], [0, 2], [1]):
        meta.round(active)
        fallah.round(active)
        assert max_difference(meta.state.model, fallah.state.model) < 1e-6
    assert np.abs(vector(meta.state.model) - first).max() > 1e-3


def test_fedmeta_with_a_server_sgd_is_per_fedavg_with_one_step_to_rounding_in_float64() -> None:
    meta = quadratic("fedmeta-maml", local_steps=1, server_optimizer="sgd", server_lr=BETA)
    fallah = quadratic("per-fedavg-exact", local_steps=1, client_lr=BETA)
    for active in random_cohorts(DEVICES, 3, 10, seed=1):
        meta.round(active)
        fallah.round(active)
        np.testing.assert_allclose(meta.model, fallah.model, rtol=1e-13)


def test_a_device_of_fedmeta_sends_the_mean_of_its_gradients_all_taken_at_the_broadcast() -> None:
    seen, slopes = [], iter([np.full(SIZE, 1.0), np.full(SIZE, 5.0)])

    def gradient(at: Params) -> Params:
        seen.append(vector(at))
        return tree(next(slopes))

    client, hyper = METHODS["fedmeta-maml"].client, METHODS["fedmeta-maml"].hyper(local_steps=2)
    update, state = client.run(Payload(tree(np.ones(SIZE)), {"round": 1.0}), {}, [gradient] * 2, hyper)
    np.testing.assert_array_equal(vector(update.groups), np.full(SIZE, 3.0))
    np.testing.assert_array_equal(seen, np.ones((2, SIZE)))
    assert state == {}


def test_the_appendix_of_fedmeta_is_averaging_by_samples_with_adam_on_the_devices() -> None:
    meta = toys("fedmeta-maml", form="appendix", client_lr=0.01)
    same_thing = toys("per-fedavg-exact", local_optimizer="adam", weighted=True, client_lr=0.01)
    for _ in range(2):
        meta.round()
        same_thing.round()
    assert max_difference(meta.state.model, same_thing.state.model) == 0
    algorithm_1 = toys("fedmeta-maml", client_lr=0.01)
    algorithm_1.round()
    assert not equal_bits(algorithm_1.state.model, meta.state.model)


# Degenerate cases (identity 5) ----------------------------------------------------------------------------------------


def test_the_joint_method_with_class_means_alone_is_p_avg_proto_and_leaves_the_head() -> None:
    joint, proto = toys("fedavg-joint", means_share=1.0), toys("p-avg-proto")
    first = joint.state.model
    for active in ([0, 1, 2], [0, 2]):
        joint.round(active)
        proto.round(active)
        assert max_difference(trees.only(joint.state.model, ("body",)), proto.state.model) < 1e-7
    assert equal_bits(trees.only(joint.state.model, ("head",)), trees.only(first, ("head",)))
    assert np.abs(flat(proto.trained()[0].update.groups)[0]).max() > 1e-3


@pytest.mark.parametrize("distance", ["squared", "norm"])
def test_metavers_with_the_cross_entropy_alone_is_p_avg_proto(distance: str) -> None:
    """The same distance, server and draws."""
    vers = toys("metavers", loss_share=1.0, shots=0, server_optimizer="sgd", server_lr=1.0, distance=distance)
    proto = toys("p-avg-proto", distance=distance)
    for active in ([0, 1, 2], [0, 2]):
        vers.round(active)
        proto.round(active)
        assert max_difference(vers.state.model, proto.state.model) < 1e-7
    assert np.abs(flat(vers.trained()[0].update.groups)[0]).max() > 1e-3


def test_prox_with_no_proximity_is_averaging_to_the_bit() -> None:
    assert play(quadratic("fedprox", proximity=0.0)) == play(quadratic("fedavg"))
    assert play(quadratic("fedprox", proximity=0.5)) != play(quadratic("fedavg"))


@pytest.mark.parametrize(("scaf", "plain"), [("scaffold", "fedavg"), ("pflscaf-maml", "per-fedavg-exact")])
def test_scaf_with_all_controls_zero_is_averaging_for_that_round(scaf: str, plain: str) -> None:
    one, other = play(quadratic(scaf), 2), play(quadratic(plain), 2)
    assert one[0] == other[0]
    assert one[1] != other[1]


def test_dyn_with_all_duals_zero_makes_the_steps_of_prox() -> None:
    dyn, prox = quadratic("feddyn", penalty=0.5), quadratic("fedprox", proximity=0.5)
    for fleet in (dyn, prox):
        fleet.round(["device-1", "device-4"])
    for name in ("device-1", "device-4"):
        one, other = (fleet.devices[name].latest for fleet in (dyn, prox))
        assert one is not None
        assert other is not None
        np.testing.assert_allclose(vector(one), vector(other), rtol=1e-14)


TWO = [Update("a", Payload(tree(np.ones(SIZE)))), Update("b", Payload(tree(np.full(SIZE, 3.0))))]


def test_a_server_sgd_at_rate_1_averages_and_at_rate_b_mixes() -> None:
    """pFedMe: (1 − b) w + b mean(w_i)."""
    w = np.linspace(-1, 1, SIZE)
    for b in (1.0, 0.25, 2.0):
        method, hyper = METHODS["pfedme"], METHODS["pfedme"].hyper(server_lr=b)
        after = method.server.apply(method.server.init(tree(w), hyper), TWO, 9, hyper)
        np.testing.assert_allclose(vector(after.model), (1 - b) * w + b * (w + 2), rtol=1e-14)


@pytest.mark.parametrize("envelope", [0.5, 3.0])
def test_pfedme_finds_the_minimum_of_the_moreau_envelope_and_moves_w_towards_it(envelope: float) -> None:
    """On a quadratic θ = (H + λI)⁻¹ (H c + λ w), and two steps of w ← w − ηλ(w − θ(w))."""
    hyper = Moreau(local_steps=2, client_lr=0.01, envelope=envelope, personal_steps=400, personal_lr=0.1)
    loss, w = DEVICES["device-0"], np.ones(SIZE)
    update, state = MoreauClient().run(Payload(tree(w), {"round": 1.0}), {}, [loss.gradient] * 2, hyper)
    there: Any = w
    theta: Any = w
    for _ in range(2):
        theta = np.linalg.solve(loss.hessian + envelope * np.eye(SIZE), loss.hessian @ loss.minimum + envelope * there)
        there = there - 0.01 * envelope * (there - theta)
    np.testing.assert_allclose(vector(state["personal"]), theta, atol=1e-12)
    np.testing.assert_allclose(vector(update.groups), there - w, atol=1e-13)


def test_pfedmes_search_starts_where_the_last_one_ended_or_else_from_w() -> None:
    """One inner step of rate a from s is s − a (∇f(s) + λ (s − w))."""
    loss, w, a, envelope = DEVICES["device-0"], np.ones(SIZE), 0.05, 2.0
    for warm in (True, False):
        hyper = Moreau(
            local_steps=2, client_lr=0.1, envelope=envelope, personal_steps=1, personal_lr=a, warm_start=warm
        )
        _, state = MoreauClient().run(Payload(tree(w), {"round": 1.0}), {}, [loss.gradient] * 2, hyper)
        first = w - a * loss.slope(w)
        moved = w - 0.1 * envelope * (w - first)
        start = first if warm else moved
        wanted = start - a * (loss.slope(start) + envelope * (start - moved))
        np.testing.assert_allclose(vector(state["personal"]), wanted, rtol=1e-13)


def test_meta_sgd_starts_as_maml_with_one_step_at_the_first_rate() -> None:
    learned, fixed = toys("fedmeta-metasgd", first_rate=0.1), toys("fedmeta-maml", inner_lr=0.1, inner_steps=1)
    for i, result in learned.trained().items():
        body_and_head, rates = trees.parted(result.update.groups, "rates")
        assert max_difference(body_and_head, fixed.trained()[i].update.groups) < 1e-7
        assert max(np.abs(a).max() for a in flat(rates)) > 1e-4
    assert {float(a) for array in flat(trees.only(learned.state.model, ("rates",))) for a in array.ravel()} == {0.1}
    learned.round()
    assert not np.allclose(flat(trees.only(learned.state.model, ("rates",)))[0], 0.1)


# Sharing less changes what travels, not what a device does in its first round


def first_model(name: str, **hyper: Any) -> Params:
    """What device 0 has after one round from the first weights, whatever it sends of it."""
    fleet = toys(name, **hyper)
    result, start = fleet.trained()[0], trees.only(fleet.broadcast().groups, ("body", "head"))
    sent = trees.add(start, result.update.groups) if start else {}
    return fleet.layout.ordered({**sent, **result.pending.get("personal", {})})


@pytest.mark.parametrize("name", ["fedper", "lg-fedavg", "local", "knn-per", "fedproto", "fedprox", "scaffold"])
def test_in_the_first_round_all_that_train_the_whole_model_make_the_same_steps(name: str) -> None:
    """Personal groups start alike on all devices; there are no class means, controls or distances to the anchor yet."""
    hyper = {"proximity": 0.0} if name == "fedprox" else {}
    assert max_difference(first_model(name, **hyper), first_model("fedavg")) < 1e-6


def test_fedrep_without_head_steps_equals_fedbabu_and_with_head_steps_alone_sends_nothing() -> None:
    body_only = toys("fedrep", head_steps=0).trained()[0]
    assert max_difference(body_only.update.groups, toys("fedbabu").trained()[0].update.groups) == 0
    head_only = toys("fedrep", head_steps=4).trained()[0]
    assert max(np.abs(a).max() for a in flat(head_only.update.groups)) == 0
    assert max_difference(head_only.pending["personal"], body_only.pending["personal"]) > 1e-3


def test_fedrep_moves_its_head_under_the_received_body_and_then_the_body_under_that_head() -> None:
    loss, hyper = DEVICES["device-0"], HeadFirst(local_steps=3, head_steps=2, client_lr=0.1, clip_norm=0.0)
    whole = tree(np.ones(SIZE))
    body, head = trees.only(whole, ("body",)), trees.only(whole, ("head",))
    update, state = HeadFirstClient().run(
        Payload(body, {"round": 1.0}), {"personal": head}, [loss.gradient] * 3, hyper
    )
    at = np.ones(SIZE)
    for moving in (slice(5, 6), slice(5, 6), slice(0, 5)):
        at[moving] -= 0.1 * loss.slope(at)[moving]
    np.testing.assert_allclose(vector(state["personal"]), at[5:], rtol=1e-14)
    np.testing.assert_allclose(vector(update.groups), at[:5] - 1, rtol=1e-14)


def test_fedbabus_head_is_the_first_one_in_every_round_and_on_every_device() -> None:
    fleet = toys("fedbabu")
    seen = []
    client = fleet.method.client
    run = client.run

    def spy(broadcast: Payload, state: Mapping[str, Params], steps: Any, hyper: Any) -> Any:
        seen.append(trees.apply(lambda a: a.numpy().copy(), state["personal"]))
        return run(broadcast, state, steps, hyper)

    fleet.method = replace(fleet.method, client=type("Spy", (type(client),), {"run": staticmethod(spy)})())
    for _ in range(2):
        fleet.round()
    assert len(seen) == 6
    assert all(equal_bits(head, seen[0]) for head in seen)


def test_a_device_that_keeps_groups_continues_from_its_own() -> None:
    loss, hyper = DEVICES["device-0"], LocalSgd(local_steps=1, client_lr=0.1, clip_norm=0.0)
    own = trees.only(tree(np.full(SIZE, 3.0)), ("head",))
    body = trees.only(tree(np.ones(SIZE)), ("body",))
    update, state = KeepingClient().run(Payload(body, {"round": 1.0}), {"personal": own}, [loss.gradient], hyper)
    at = np.array([1.0] * 5 + [3.0])
    stepped = at - 0.1 * loss.slope(at)
    np.testing.assert_allclose(vector(state["personal"]), stepped[5:], rtol=1e-14)
    np.testing.assert_allclose(vector(update.groups), stepped[:5] - 1, rtol=1e-14)


# What is measured: margins and class means ----------------------------------------------------------------------------


def margins(hyper: Margins, reports: list[list[float]]) -> list[float]:
    """The margin that is sent before each round, and after the last."""
    rule, found = VersServer(), []
    state = rule.init(tree(np.zeros(SIZE)), hyper)
    for number, reported in enumerate(reports, start=1):
        found.append(rule.broadcast(state).scalars["margin"])
        updates = [Update(f"d{i}", Payload(tree(np.ones(SIZE)), {"margin": own})) for i, own in enumerate(reported)]
        state = rule.apply(replace(state, round=number), updates, 9, hyper)
        assert len(history(state)) <= hyper.window
    return [*found, rule.broadcast(state).scalars["margin"]]


REPORTS = [[4.0, 2.0], [1.0], [2.0, 6.0], [8.0], [5.0]]


def test_the_fleets_margin_is_the_mean_of_its_own_last_values_and_the_devices_mean() -> None:
    """Lim, eq. 7 with W = 3, over what exists at the start: 0 | 3 | (3 + 1)/2 | (3 + 2 + 4)/3 | (2 + 3 + 8)/3 | …"""
    m4 = (2 + 3 + 8) / 3
    assert margins(Margins(window=3, window_mean=False), REPORTS) == pytest.approx([0, 3, 2, 3, m4, (3 + m4 + 5) / 3])
    assert margins(Margins(window=3, window_mean=True), REPORTS) == pytest.approx([0, 3, 2, 8 / 3, 13 / 3, 17 / 3])


def test_a_window_of_one_takes_the_devices_mean_alone() -> None:
    for window_mean in (False, True):
        assert margins(Margins(window=1, window_mean=window_mean), REPORTS) == pytest.approx([0, 3, 1, 4, 8, 5])


def test_metavers_trains_with_the_fleets_margin_and_reports_the_mean_of_its_own() -> None:
    given, measured = [], iter([2.0, 5.0])

    def gradient(at: Params) -> Params:
        given.append(at["margin"]["value"])
        return {**tree(np.ones(SIZE)), "margin": {"value": next(measured)}}

    sent = Payload(tree(np.zeros(SIZE)), {"margin": 1.5, "round": 1.0})
    update, state = VersClient().run(sent, {}, [gradient] * 2, Margins(local_steps=2, client_lr=0.1))
    assert given == [1.5, 1.5]
    assert (dict(update.scalars), state) == ({"margin": 3.5}, {})
    np.testing.assert_allclose(vector(update.groups), -0.2)


def test_metavers_warms_up_with_the_cross_entropy_alone() -> None:
    given = []

    def gradient(at: Params) -> Params:
        given.append(at["margin"]["loss_share"])
        return {**tree(np.ones(SIZE)), "margin": {"value": 1.0}}

    hyper = Margins(local_steps=1, client_lr=0.1, loss_share=0.4, warm_up=2)
    for number in (1, 2, 3):
        VersClient().run(Payload(tree(np.zeros(SIZE)), {"margin": 1.5, "round": number}), {}, [gradient], hyper)
    assert given == [1, 1, 0.4]


def test_fedproto_measures_once_after_its_steps_and_an_absent_class_keeps_its_mean() -> None:
    """Tan, eq. 6 without its second division: means weighted by counts are totals over counts."""
    first = {"prototypes": {"total": np.array([[9.0, 9], [2, 4], [7, 7]]), "count": np.array([9.0, 2, 7])}}
    hyper, calls = Pull(local_steps=3, client_lr=0.1, clip_norm=0.0), []

    def gradient(at: Params) -> Params:
        assert at["prototypes"] is first["prototypes"]
        calls.append(float(at["body"]["w"]))
        means = {"total": at["body"]["w"] * np.eye(3)[:, :2], "count": np.array([1.0, 3, 0])}
        return {"body": {"w": np.ones(())}, "prototypes": means}

    state: ClientState = {"personal": {"body": {"w": np.array(2.0)}}}
    update, state = PrototypeClient().run(Payload(first, {"round": 1.0}), state, [gradient] * 4, hyper)
    assert calls == pytest.approx([2.0, 1.9, 1.8, 1.7])
    assert float(state["personal"]["body"]["w"]) == pytest.approx(1.7)
    np.testing.assert_allclose(update.groups["prototypes"]["total"], 1.7 * np.eye(3)[:, :2])
    other = Payload({"prototypes": {"total": np.array([[3.0, 0], [0, 0], [0, 0]]), "count": np.array([2.0, 0, 0])}})
    updates = [Update("a", update), Update("b", other)]
    after = PrototypeServer().apply(ServerState(first, first), updates, 5, hyper).model["prototypes"]
    assert after["count"].tolist() == [3.0, 3.0, 7.0]
    np.testing.assert_allclose(after["total"], np.array([[4.7, 0], [0, 1.7], [7, 7]]))


def test_fedprotos_class_means_are_those_of_the_trained_model_over_all_samples() -> None:
    fleet = toys("fedproto")
    result = fleet.round([1])[1]
    body = {"body": result.pending["personal"]["body"]}
    x, y = fleet.data[1]
    z = local_training.embed(fleet.model, body, x)
    for k in range(3):
        np.testing.assert_allclose(result.update.groups["prototypes"]["total"][k], z[y == k].sum(0), rtol=1e-4)
        assert result.update.groups["prototypes"]["count"][k] == (y == k).sum()


def test_nothing_of_a_device_that_shares_nothing_leaves_it() -> None:
    fleet = toys("local")
    result = fleet.round()[0]
    assert (dict(result.update.groups), dict(result.update.scalars)) == ({}, {})
    assert (dict(fleet.state.model), fleet.broadcast().groups) == ({}, {})


@pytest.mark.parametrize("name", METHODS)
def test_every_method_is_a_row_of_choices_that_exist(name: str) -> None:
    method = METHODS[name]
    groups = {"body", "head", "rates", "control", "prototypes"}
    assert method.name == name
    assert set(method.shared) | set(method.besides) | set(method.personal) <= groups
    assert not set(method.shared) & set(method.personal)
    assert ("head" in method.shared + method.personal) is (method.adaptation not in OWN_LABELS)
    assert method.title
    assert method.source
    assert bool(method.personal) is (isinstance(method.client, KeepingClient))
