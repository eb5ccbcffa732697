"""The algebra of the methods: what must hold to rounding, and what a wrong rule would do, on quadratics in float64.

The numbers of the wrong rules were measured here with the same seeds; each is a bound that the right rule meets with
orders of magnitude to spare.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from cloud_server.broadcast import encode_model
from cloud_server.checkpoint import Checkpoint
from edge_agent.personalize import Prototypes
from fleet_core import codecs, layout, storage
from fleet_core.algorithms import closing, trees
from fleet_core.algorithms.average import AverageClient, AverageServer
from fleet_core.algorithms.dyn import Dyn, DynClient, DynServer
from fleet_core.algorithms.methods import METHODS
from fleet_core.algorithms.seam import GradFn, LocalSgd, Payload, ServerState, Update, descend, rate
from fleet_core.algorithms.trees import Params
from fleet_core.data.episodes import Episodes
from fleet_core.learning import gradients, losses, models
from tests.quadratics import (
    GROUPS,
    LAYOUT,
    SIZE,
    Cohort,
    Quadratic,
    Send,
    Vector,
    draws,
    int8,
    minimiser,
    quadratics,
    top_k,
    tree,
    vector,
)

MU, SMOOTHNESS = 0.5, 8.0
DEVICES = quadratics(8, seed=0, mu=MU, smoothness=SMOOTHNESS)


def dyn(penalty: float = 2.0, *, local_steps: int = 10, devices: dict[str, Quadratic] = DEVICES, **how: Any) -> Cohort:
    hyper = Dyn(local_steps=local_steps, client_lr=1 / (SMOOTHNESS + penalty), clip_norm=0.0, penalty=penalty)
    return Cohort(DynClient(), DynServer(), hyper, devices, **how)


def average(local_steps: int, *, client_lr: float = 1 / SMOOTHNESS, **how: Any) -> Cohort:
    hyper = LocalSgd(local_steps=local_steps, client_lr=client_lr, clip_norm=0.0)
    return Cohort(AverageClient(), AverageServer(), hyper, **{"losses": DEVICES, **how})


# PFLDyn reaches the minimiser of the mean, averaging does not (identity 3) --------------------------------------------


@pytest.mark.parametrize(("penalty", "rounds"), [(MU, 220), (1.0, 120), (SMOOTHNESS, 90)])
def test_pfldyn_with_all_devices_finds_the_minimiser_of_the_mean(penalty: float, rounds: int) -> None:
    fleet = dyn(penalty)
    for _ in range(rounds):
        fleet.round()
    assert fleet.error < 1e-8


@pytest.mark.parametrize(("penalty", "rounds"), [(1.0, 520), (SMOOTHNESS, 140)])
def test_pfldyn_with_two_of_eight_devices_finds_it_too(penalty: float, rounds: int) -> None:
    fleet = dyn(penalty)
    for active in draws(DEVICES, 2, rounds, seed=1):
        fleet.round(active)
    assert fleet.error < 1e-8


def test_averaging_with_one_local_step_is_gradient_descent_and_finds_it() -> None:
    fleet = average(1)
    for _ in range(200):
        fleet.round()
    assert fleet.error < 1e-12


@pytest.mark.parametrize(("local_steps", "bias"), [(5, 0.35), (20, 0.45)])
def test_averaging_with_more_steps_stops_elsewhere(local_steps: int, bias: float) -> None:
    """K steps take w − c_i to A_i (w − c_i), A_i = (I − β H_i)^K; averaging rests where Σ (I − A_i)(w − c_i) = 0."""
    fleet = average(local_steps)
    for _ in range(120):
        fleet.round()
    moved = {
        name: np.eye(SIZE) - np.linalg.matrix_power(np.eye(SIZE) - loss.hessian / SMOOTHNESS, local_steps)
        for name, loss in DEVICES.items()
    }
    rest = np.linalg.solve(sum(moved.values()), sum(moved[name] @ loss.minimum for name, loss in DEVICES.items()))
    np.testing.assert_allclose(fleet.model, rest, atol=1e-8)
    assert fleet.error > bias


# The dual is the device's gradient, and the server's is their mean (identity 4) -------------------------------------


def test_after_an_exact_local_minimisation_the_dual_is_the_gradient_there() -> None:
    fleet = dyn(local_steps=150)
    for active in draws(DEVICES, 2, 20, seed=1):
        fleet.round(active)
        for device in fleet.devices.values():
            if device.latest is not None:
                slope = device.loss.slope(vector(device.latest))
                np.testing.assert_allclose(vector(device.state["dual"]), slope, atol=1e-10)


def rounds_with_losses(fleet: Cohort, rounds: int, *, until: int) -> Iterator[None]:
    """Until then a tenth of the updates are lost (dropped, late or refused), and a fifth of the devices hear late."""
    rng = np.random.default_rng(3)
    for number in range(rounds):
        lost, unheard = ([n for n in DEVICES if number < until and rng.random() < share] for share in (0.1, 0.2))
        fleet.round(lost=lost, unheard=unheard)
        yield


def test_the_servers_dual_is_the_mean_of_all_devices_duals_after_every_round_whatever_is_lost() -> None:
    fleet = dyn()
    for _ in rounds_with_losses(fleet, 130, until=60):
        np.testing.assert_allclose(fleet.server_dual, fleet.mean_dual(), atol=1e-13)
    assert any(len(names) < 7 for names in fleet.counted.values())
    assert fleet.error < 1e-8


def test_a_device_that_commits_what_was_not_counted_leaves_a_permanent_error() -> None:
    fleet = dyn(commits_anyway=True)
    for _ in rounds_with_losses(fleet, 130, until=60):
        pass
    assert fleet.error > 0.1


@pytest.mark.parametrize(("told", "right"), [(True, True), (False, False)])
def test_a_device_that_enrols_brings_a_dual_of_zero_and_the_server_must_know(told: bool, right: bool) -> None:
    later = quadratics(10, seed=0, mu=MU, smoothness=SMOOTHNESS)
    fleet = dyn()
    for number in range(100):
        name = {3: "device-8", 9: "device-9"}.get(number)
        if name is not None:
            fleet.enrol(name, later[name], told=told)
        fleet.round([n for n in fleet.devices if n != "device-9" or number > 20])
        gap = np.abs(fleet.server_dual - fleet.mean_dual()).max()
        assert number < 3 or bool(gap < 1e-13) is right
    assert (fleet.error < 1e-8) is right
    assert right or fleet.error > 0.01


@pytest.mark.parametrize(("told", "right"), [(True, True), (False, False)])
def test_a_device_that_leaves_starts_every_dual_again(told: bool, right: bool) -> None:
    fleet = dyn()
    for number in range(140):
        if number == 40:
            fleet.round(unheard=["device-5"])  # its counted state is of the old epoch and must not come back
            fleet.leave("device-3", told=told)
        fleet.round(draws(fleet.devices, 5, 1, seed=number)[0] if number < 60 else ())
        gap = np.abs(fleet.server_dual - fleet.mean_dual()).max()
        assert number < 40 or bool(gap < 1e-13) is right
    assert fleet.state.dual_epoch == int(told)
    assert (fleet.error < 1e-8) is right
    assert right or fleet.error > 0.1


def test_averaging_remembers_nothing_so_that_a_changing_fleet_changes_nothing() -> None:
    rule, state = AverageServer(), AverageServer().init(tree(np.ones(SIZE)), LocalSgd())
    assert rule.joined(state, 9) is state
    assert rule.left(state, 7) is state


# The two models of a server -----------------------------------------------------------------------------------------


def test_the_judged_model_is_the_mean_of_all_latest_models_when_all_take_part() -> None:
    fleet = dyn()
    for _ in range(20):
        fleet.round()
        np.testing.assert_allclose(vector(fleet.state.judged), fleet.mean_latest(), atol=1e-14)
    assert np.abs(fleet.model - fleet.mean_latest()).max() > 1e-4  # the model has the −g/α term


def test_the_running_mean_is_about_as_near_to_the_optimum_as_the_mean_of_all_latest_models() -> None:
    """Two of eight active: at most 4.1 times as far from the 20th round on, and at most 0.34 apart."""
    fleet, gaps = dyn(), []
    for number, active in enumerate(draws(DEVICES, 2, 200, seed=1)):
        fleet.round(active)
        judged, mean, optimum = vector(fleet.state.judged), fleet.mean_latest(), fleet.optimum
        gaps.append(np.linalg.norm(judged - mean))
        assert number < 20 or np.linalg.norm(judged - optimum) < 6 * np.linalg.norm(mean - optimum)
    assert max(gaps) < 0.5
    assert gaps[-1] < 1e-5


def test_an_average_judges_what_it_trains() -> None:
    state = AverageServer().init(tree(np.zeros(SIZE)), LocalSgd())
    updates = [Update("a", Payload(tree(np.ones(SIZE)))), Update("b", Payload(tree(np.full(SIZE, 2.0))))]
    after = AverageServer().apply(state, updates, 5, LocalSgd())
    np.testing.assert_array_equal(vector(after.model), np.full(SIZE, 1.5))
    assert after.judged is after.model


def test_the_pfldyn_server_divides_by_the_fleet_and_not_by_the_cohort() -> None:
    """Acar Alg. 2, Update₁ by hand: m = 4, Σ delta = 3, α = 2: g = −2/4·3 = −1.5; w = 1.5 + 1.5/2."""
    hyper = Dyn(penalty=2.0)
    state = DynServer().init(tree(np.zeros(SIZE)), hyper)
    updates = [Update("a", Payload(tree(np.ones(SIZE)))), Update("b", Payload(tree(np.full(SIZE, 2.0))))]
    after = DynServer().apply(state, updates, 4, hyper)
    np.testing.assert_array_equal(vector(after.memory["dual"]), np.full(SIZE, -1.5))
    np.testing.assert_array_equal(vector(after.model), np.full(SIZE, 2.25))
    np.testing.assert_array_equal(vector(after.judged), np.full(SIZE, 0.75))  # half the fleet: half the way


# Under a lossy codec ------------------------------------------------------------------------------------------------

PLAIN, FEEDBACK = int8("int8-plain"), int8("int8")


def gap_of_duals(fleet: Cohort) -> float:
    """How far g is from mean(g_i) + (α/m) Σ e_i; without feedback the residuals are zero."""
    expected = fleet.mean_dual() + fleet.hyper.penalty * fleet.mean_residual()
    return float(np.abs(fleet.server_dual - expected).max())


def lossy(penalty: float, send: Send, dual: str, active: list[list[str]]) -> tuple[float, float]:
    """(error at the end, largest gap of the duals after any round)."""
    fleet, gaps = dyn(penalty, local_steps=10, send=send, dual=dual), []
    for names in active:
        fleet.round(names)
        gaps.append(gap_of_duals(fleet))
    return fleet.error, max(gaps)


HALF = draws(DEVICES, 4, 130, seed=1)


@pytest.mark.parametrize("send", [FEEDBACK, PLAIN], ids=["feedback, own delta", "no feedback, decoded delta"])
def test_int8_updates_reach_the_minimiser_by_the_products_two_ways(send: Send) -> None:
    error, gap = lossy(2.0, send, "agent", HALF)
    assert error < 1e-6
    assert gap < 1e-6  # updates are rounded to float32


@pytest.mark.parametrize("feedback", [True, False], ids=["feedback, own delta", "no feedback, decoded delta"])
def test_sparse_updates_reach_the_minimiser_by_the_products_two_ways(feedback: bool) -> None:
    error, gap = lossy(4.0, top_k(2, feedback=feedback), "agent", [[]] * 100)
    assert error < 1e-8
    assert gap < 1e-12


SPARSE = top_k(2, feedback=False)


@pytest.mark.parametrize(
    ("penalty", "send", "floor"), [(2.0, PLAIN, 2e-4), (4.0, SPARSE, 0.1)], ids=["int8", "top-k"]
)
def test_the_own_delta_without_feedback_is_biased(penalty: float, send: Send, floor: float) -> None:
    error, gap = lossy(penalty, send, "own", HALF)
    assert error > floor
    assert gap > floor


def test_the_decoded_delta_with_feedback_counts_the_residual_twice() -> None:
    """int8 still gets there, for it loses little; sending two of six values diverges."""
    _, gap = lossy(2.0, FEEDBACK, "decoded", HALF[:60])
    assert gap > 1e-3
    error, gap = lossy(4.0, top_k(2, feedback=True), "decoded", [[]] * 80)
    assert error > 1
    assert gap > 1


def test_the_duals_keep_their_sum_under_a_codec_while_updates_are_lost_and_devices_come_and_go() -> None:
    fleet = dyn(send=FEEDBACK)
    for number, _ in enumerate(rounds_with_losses(fleet, 140, until=40)):
        if number == 10:
            fleet.enrol("device-8", Quadratic(np.eye(SIZE), np.ones(SIZE)))
        if number == 30:
            fleet.leave("device-8")
        assert gap_of_duals(fleet) < 1e-6
    assert fleet.error < 1e-6


class Downlink:
    """What devices decode of each round's model, by the aggregator's own rule for what it publishes."""

    def __init__(self, codec: str):
        self.codec, self.number = codec, 0
        self.held: Params | None = None
        self.lost: Params | None = None

    def __call__(self, state: ServerState) -> Params:
        self.number += 1
        before = Checkpoint(self.number, state, self.held, self.lost)
        sent = encode_model(state.model, before, self.codec, LAYOUT, GROUPS)
        self.held, self.lost = sent.decoded, sent.lost
        return trees.widened(self.held)


def whole_int8(state: ServerState) -> Params:
    """The full weights as int8 in every round."""
    return trees.widened(codecs.decode("int8", codecs.encode("int8", state.model), LAYOUT, GROUPS))


@pytest.mark.parametrize("codec", ["fp32", "int8", "int8-plain"])
def test_a_model_that_comes_as_a_delta_costs_pfldyn_nothing_but_float32(codec: str) -> None:
    fleet = dyn(publish=Downlink(codec))
    for _ in range(70):
        fleet.round()
    assert fleet.error < 1e-6


def test_a_full_model_as_int8_stops_at_a_visible_error() -> None:
    fleet = dyn(publish=whole_int8)
    for _ in range(70):
        fleet.round()
    assert fleet.error > 1e-4


def steep_and_flat() -> dict[str, Quadratic]:
    """One steep coordinate about which devices disagree, and flat ones in the same array with one minimum for all."""
    rng = np.random.default_rng(0)
    curvature = np.diag([1, 1, 1, 0.01, 0.003, 1])
    return {f"device-{i}": Quadratic(curvature, np.array([0, 0, rng.normal(), 1, 1, 0])) for i in range(8)}


def strayed(build: Callable[..., Cohort], codec: str) -> float:
    """Largest distance, in the last half of 120 rounds, from the run whose model comes down as it is."""
    devices = steep_and_flat()
    fleet, reference = build(devices, publish=Downlink(codec)), build(devices)
    distances = []
    for active in draws(devices, 2, 120, seed=1):
        fleet.round(active)
        reference.round(active)
        distances.append(float(np.linalg.norm(fleet.model - reference.model)))
    return max(distances[60:])


def average_of_two(devices: dict[str, Quadratic], **how: Any) -> Cohort:
    return average(5, client_lr=0.2, losses=devices, **how)


def dyn_of_two(devices: dict[str, Quadratic], **how: Any) -> Cohort:
    return Cohort(DynClient(), DynServer(), Dyn(local_steps=5, client_lr=0.2, penalty=1.0), devices, **how)


@pytest.mark.parametrize(("build", "bound", "gain"), [(average_of_two, 5e-3, 3), (dyn_of_two, 1e-4, 10)])
def test_adding_what_the_last_model_lost_frees_the_coordinates_that_move_less_than_a_step(
    build: Callable[..., Cohort], bound: float, gain: float
) -> None:
    """Where the steep coordinate goes on moving, int8 rounds the flat ones' moves to zero unless they add up."""
    feedback, plain = strayed(build, "int8"), strayed(build, "int8-plain")
    assert feedback < bound
    assert plain > gain * feedback


# First-order MAML is exact where the Hessian's term vanishes (identity 2) -------------------------------------------

Loss = Callable[[Params], Tensor]


def flat(params: Params) -> Tensor:
    return torch.cat([array.reshape(-1) for named in params.values() for array in named.values()])


def bowl(seed: int) -> tuple[Loss, Tensor, Tensor]:
    """½ (w − c)ᵀ H (w − c), H and c."""
    rng = np.random.default_rng(seed)
    root = torch.tensor(rng.normal(size=(SIZE, SIZE)))
    hessian, center = root @ root.T, torch.tensor(rng.normal(size=SIZE))
    return lambda w: 0.5 * (flat(w) - center) @ hessian @ (flat(w) - center), hessian, center


def at_ones() -> Params:
    return models.to_torch(tree(np.ones(SIZE)))


def both_orders(support: Loss, query: Loss, lr: float, steps: int) -> tuple[Tensor, Tensor]:
    exact = gradients.maml_exact(support, query, lr, steps)(at_ones())
    first_order = gradients.maml_first_order(support, query, lr, steps)(at_ones())
    assert torch.equal(exact[0], first_order[0])  # the same loss either way
    return flat(exact[1]), flat(first_order[1])


@pytest.mark.parametrize("steps", [1, 3])
def test_maml_gradients_on_quadratics_are_those_of_the_closed_form(steps: int) -> None:
    (support, h, c), (query, hq, cq) = bowl(0), bowl(1)
    shrink = torch.linalg.matrix_power(torch.eye(SIZE, dtype=torch.float64) - 0.01 * h, steps)
    at_query = hq @ (shrink @ (torch.ones(SIZE, dtype=torch.float64) - c) + c - cq)
    exact, first_order = both_orders(support, query, 0.01, steps)
    torch.testing.assert_close(first_order, at_query, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(exact, shrink @ at_query, rtol=1e-12, atol=1e-12)
    assert torch.linalg.vector_norm(exact - first_order) > 0.03 * torch.linalg.vector_norm(exact)


def test_first_order_is_exact_with_an_inner_rate_of_zero() -> None:
    exact, first_order = both_orders(bowl(0)[0], bowl(1)[0], 0.0, 2)
    assert torch.equal(exact, first_order)


def test_first_order_is_exact_where_the_support_loss_is_linear_in_the_parameters() -> None:
    slope = torch.arange(SIZE, dtype=torch.float64)
    exact, first_order = both_orders(lambda w: flat(w) @ slope, bowl(1)[0], 0.1, 3)
    assert torch.equal(exact, first_order)


# Proto does not know the numbers of its labels (identity 6) ---------------------------------------------------------

ROTATED = np.array([2, 4, 0, 1, 3])
SPEC = layout.InputSpec(shape=(4,))


@pytest.fixture(scope="module")
def clouds() -> tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]]:
    """60 samples float64 [60, 4] of five classes."""
    rng = np.random.default_rng(0)
    y = np.arange(60) % 5
    return rng.normal(size=(60, 4)) + rng.normal(size=(5, 4))[y], y


def test_on_a_device_prototypes_are_permuted_with_the_labels_to_the_bit(
    clouds: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
) -> None:
    x, y = clouds
    z = x.astype(np.float32)
    plain, permuted = (Prototypes.from_support(lambda a: a, z[:40], labels[:40], 5) for labels in (y, ROTATED[y]))
    np.testing.assert_array_equal(permuted.prototypes[ROTATED], plain.prototypes)
    answers, renamed = plain.probabilities(z[40:]).argmax(1), permuted.probabilities(z[40:]).argmax(1)
    np.testing.assert_array_equal(renamed, ROTATED[answers])
    assert len(set(answers)) == 5


def test_in_training_predictions_are_permuted_with_the_labels(
    clouds: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
) -> None:
    x, y = clouds
    z, rotated = torch.tensor(x), torch.tensor(ROTATED)
    scores, renamed = (
        losses.proto_logits(z[40:], *losses.prototypes(z[:40], labels[:40], 5))
        for labels in (torch.tensor(y), rotated[torch.tensor(y)])
    )
    assert torch.equal(renamed.argmax(1), rotated[scores.argmax(1)])
    torch.testing.assert_close(renamed[:, rotated], scores, rtol=1e-13, atol=0)  # the sums of a matrix product


def test_a_step_of_proto_training_is_the_same_for_permuted_labels(
    clouds: tuple[np.ndarray[Any, Any], np.ndarray[Any, Any]],
) -> None:
    x, y = clouds
    described = models.describe("mlp", SPEC, "abcde", {"hidden": [8]})
    network = models.build(described).double()
    method, hyper = METHODS["pfldyn-proto"], METHODS["pfldyn-proto"].hyper(local_steps=1)
    start = trees.apply(lambda a: a.double(), method.params(models.to_torch(models.initial(described, 0))))

    def trained(labels: np.ndarray[Any, Any]) -> Params:
        support, query = next(Episodes(labels, 20, 20, np.random.default_rng(1)))
        parts = [torch.tensor(part) for index in (support, query) for part in (x[index], labels[index])]
        step = gradients.estimator("proto", network, 5, hyper)(gradients.Episode(*parts))
        state = method.client.init(start, hyper)
        update, _ = method.client.run(Payload(start, {"round": 1.0}), state, [gradients.recorded(step, [])], hyper)
        return update.groups

    plain, permuted = trained(y), trained(ROTATED[y])
    assert trees.norm(plain) > 1e-3
    assert trees.norm(trees.subtract(plain, permuted)) < 1e-14


# Closing a round gives the same bits whatever the order and the number of workers (identity 7) ----------------------


@dataclass(frozen=True)
class Closed:
    updates: list[Update]
    total: Params
    count: int


@pytest.fixture(scope="module")
def closed() -> Closed:
    """Updates of sizes so different that another order of the sum gives other bits."""
    rng = np.random.default_rng(0)
    updates = [
        Update(f"pi-{i}", Payload(tree(rng.normal(size=SIZE) * 10.0 ** rng.integers(-9, 9, SIZE)))) for i in range(90)
    ]
    names = {update.device: update for update in updates}
    ordered = [names[name] for name in closing.order(names)]
    return Closed(ordered, *closing.total(ordered, groups))


def groups(update: Update) -> Params:
    return update.payload.groups


def bits(params: Params) -> bytes:
    return vector(params).tobytes()


def arrange(updates: list[Update]) -> list[Update]:
    """As the spool reads them: in closing order, whatever the order of arrival."""
    names = {update.device: update for update in updates}
    return [names[name] for name in closing.order(names)]


@settings(max_examples=40, deadline=None)
@given(shuffle=st.randoms(use_true_random=False), workers=st.integers(1, 7))
def test_any_arrival_and_any_number_of_workers_give_the_same_bits(closed: Closed, shuffle: Any, workers: int) -> None:
    arrived = list(closed.updates)
    shuffle.shuffle(arrived)
    owner = [shuffle.randrange(workers) for _ in range(closing.BUCKETS)]
    partial: list[tuple[int, Params, int]] = []
    for worker in range(workers):
        mine = [update for update in arrived if owner[closing.bucket(update.device)] == worker]
        partial += closing.bucket_sums(arrange(mine), groups)
    result, count = closing.merge(sorted(partial, key=lambda entry: entry[0]))
    assert (bits(result), count) == (bits(closed.total), closed.count)


@pytest.mark.parametrize("name", METHODS)
def test_every_method_closes_to_the_same_bits_for_any_arrival(closed: Closed, name: str) -> None:
    method, hyper = METHODS[name], METHODS[name].hyper()
    state = method.server.init(tree(np.ones(SIZE)), hyper)
    one = method.server.apply(state, arrange(closed.updates), 100, hyper)
    two = method.server.apply(state, arrange(closed.updates[::-1]), 100, hyper)
    assert bits(one.model) == bits(two.model)
    assert bits(one.judged) == bits(two.judged)
    assert {k: bits(v) for k, v in one.memory.items()} == {k: bits(v) for k, v in two.memory.items()}


def test_the_order_of_the_sum_matters_so_that_it_must_be_fixed(closed: Closed) -> None:
    other = groups(closed.updates[-1])
    for update in closed.updates[-2::-1]:
        other = trees.add(other, groups(update))
    assert bits(other) != bits(closed.total)
    np.testing.assert_allclose(vector(other), vector(closed.total), rtol=1e-9)


def test_a_sum_of_no_updates_is_an_error() -> None:
    with pytest.raises(ValueError, match="no updates"):
        closing.total([], groups)


# The steps on a device ----------------------------------------------------------------------------------------------


def constant(value: Vector) -> GradFn:
    return lambda at: tree(value)


def test_a_step_clips_the_corrected_direction_and_adds_weight_decay_after() -> None:
    """By hand: gradient 3 + correction 1 in one coordinate, clipped to 2; decay 0.5 · 1; rate 0.1."""
    one = np.eye(SIZE)[0]
    hyper = LocalSgd(clip_norm=2.0, weight_decay=0.5)
    after = descend(tree(one), [constant(3 * one)], hyper, 0.1, lambda at: tree(one))
    np.testing.assert_allclose(vector(after), one - 0.1 * (2 + 0.5) * one, atol=1e-15)


def test_a_clip_norm_of_zero_means_none_and_a_small_direction_is_left_alone() -> None:
    one, hyper = np.eye(SIZE)[0], LocalSgd(clip_norm=0.0)
    np.testing.assert_allclose(vector(descend(tree(one), [constant(1e3 * one)], hyper, 1.0)), -999 * one)
    small = tree(0.1 * one)
    assert trees.clip(small, 1.0) is small


def test_the_rate_decays_from_the_second_round_on() -> None:
    hyper = LocalSgd(client_lr=0.1, lr_decay=0.5)
    assert [rate(hyper, number) for number in (1, 2, 3)] == [0.1, 0.05, 0.025]


def test_pfldyn_with_no_dual_is_fedprox_and_leaves_its_arguments_alone() -> None:
    """One quadratic, exact minimisation: argmin f + α/2‖w − w^t‖² = (H + αI)⁻¹ (H c + α w^t)."""
    loss, hyper = DEVICES["device-0"], Dyn(local_steps=200, client_lr=0.1, clip_norm=0.0, penalty=2.0)
    anchor = tree(np.ones(SIZE))
    before = bits(anchor)
    state = DynClient().init(anchor, hyper)
    payload, pending = DynClient().run(Payload(anchor, {"round": 1.0}), state, [loss.gradient] * 200, hyper)
    nearest = np.linalg.solve(loss.hessian + 2 * np.eye(SIZE), loss.hessian @ loss.minimum + 2 * np.ones(SIZE))
    np.testing.assert_allclose(vector(payload.groups) + 1, nearest, atol=1e-12)
    np.testing.assert_allclose(vector(pending["dual"]), -2 * vector(payload.groups), atol=1e-15)
    assert bits(anchor) == before
    assert vector(state["dual"]).tolist() == [0.0] * SIZE


# The table of methods -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", METHODS)
def test_every_method_runs_a_round_and_keeps_its_state_through_a_file(name: str) -> None:
    method = METHODS[name]
    hyper = method.hyper(local_steps=3)
    fleet = Cohort(method.client, method.server, hyper, DEVICES)
    fleet.round(["device-0", "device-1"])
    assert np.linalg.norm(fleet.model) > 0
    state = fleet.devices["device-0"].state
    arrays, _ = storage.unpack(storage.pack(storage.flatten_roles(state)))
    back = storage.unflatten_roles(arrays)
    assert {role: bits(trees.apply(lambda a: a, params)) for role, params in state.items()} == {
        role: bits({g: {n: back[role][g][n] for n in named} for g, named in params.items()})
        for role, params in state.items()
    }


@pytest.mark.parametrize("name", METHODS)
def test_every_method_sends_only_what_it_shares(name: str) -> None:
    method, model = METHODS[name], tree(np.zeros(SIZE))
    assert set(method.params(model)) == set(method.shared) <= set(layout.GROUPS)
    assert ("head" in method.shared) is (method.personalizer != "proto")


def test_the_minimiser_is_where_the_mean_gradient_vanishes() -> None:
    """The helper that the tests above trust."""
    at = minimiser(DEVICES.values())
    np.testing.assert_allclose(sum(loss.slope(at) for loss in DEVICES.values()), np.zeros(SIZE), atol=1e-12)
    assert replace(DEVICES["device-0"], minimum=at).slope(at).tolist() == [0.0] * SIZE
