"""Models and the client's loop: what a device's round receives, returns and keeps, for every method."""

from __future__ import annotations

import ast
import sys
import types
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from fleet_core import learning
from fleet_core.algorithms.interface import OWN_LABELS, Payload
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage, trees
from fleet_core.base.errors import ConfigError, DataError, RoundError
from fleet_core.learning import local_training, models, personal_model
from fleet_core.learning.layer_flops import flops_per_sample
from fleet_core.model.layout import MODEL_GROUPS, InputSpec, Layout
from fleet_core.training import round_plans
from fleet_core.training.local_round import TrainResult
from tests.support.simulation import (
    SEED,
    TOY,
    Fleet,
    equal_bits,
    flat,
    hyper_of,
    max_difference,
    toy_layout,
    toy_samples,
)

pytestmark = pytest.mark.usefixtures("one_torch_thread")

every_method = pytest.mark.parametrize("name", METHODS)
SMALL: dict[str, Any] = {
    "local_steps": 4, "client_lr": 0.1, "batch": 20, "support_batch": 10, "query_batch": 10, "head_steps": 2,
    "shots": 3, "query_shots": 4, "inner_steps": 2, "personal_steps": 2,
}  # fmt: skip


# Models


def test_lenet_has_the_parameters_of_the_paper() -> None:
    layout = models.describe("lenet", InputSpec((1, 32, 32)), [str(i) for i in range(10)], {})
    assert layout.parameters(("body", "head")) == 794_762
    assert layout.embedding == 192


def test_cnn1d_is_small_and_takes_heartbeats() -> None:
    layout = models.describe("cnn1d", InputSpec((3, 128)), ("N", "S", "V"), {})
    assert layout.parameters(("body", "head")) < 40_000
    assert layout.embedding == 64
    assert models.build(layout)(torch.zeros(2, 3, 128)).shape == (2, 3)


def test_only_the_head_is_in_group_head() -> None:
    layout = toy_layout()
    assert {t.name: t.group for t in layout.tensors} == {
        "layers.0.weight": "body",
        "layers.0.bias": "body",
        "head.weight": "head",
        "head.bias": "head",
    }


def test_a_layout_survives_json() -> None:
    layout = models.describe("mlp", TOY, ("a", "b"), {"hidden": (5, 4)})
    assert Layout.from_json(layout.to_json()) == layout
    assert models.build(Layout.from_json(layout.to_json()))(torch.zeros(1, 6)).shape == (1, 2)


def test_preprocessing_is_per_channel_and_inside_the_model() -> None:
    spec = InputSpec((2, 4, 4), "uint8", scale=0.5, mean=(1.0, 2.0), std=(2.0, 4.0))
    network = models.Network(nn.Linear(1, 1), spec)
    prepared = network.prepare(torch.full((1, 2, 4, 4), 10, dtype=torch.uint8))
    assert torch.equal(prepared[0, 0], torch.full((4, 4), 2.0))
    assert torch.equal(prepared[0, 1], torch.full((4, 4), 0.75))


def test_first_weights_depend_on_the_seed_alone() -> None:
    layout = toy_layout()
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first = models.initial(layout, 1)
    assert torch.equal(torch.rand(1), expected), "the caller's random numbers are left alone"
    torch.manual_seed(6)
    assert all((a == b).all() for a, b in zip(flat(first), flat(models.initial(layout, 1)), strict=True))
    assert not (first["body"]["layers.0.weight"] == models.initial(layout, 2)["body"]["layers.0.weight"]).any()
    layout.check(first, ("body", "head"))
    assert {a.dtype for a in flat(first)} == {np.dtype(np.float32)}


class PersonalFiles(nn.Module):
    """A user's model with test-specific parts."""

    def __init__(self, shape: tuple[int, ...], classes: int, *layers: nn.Module) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(shape[0], 4), *layers)
        self.head = nn.Linear(4, classes)

    def embed(self, x: Tensor) -> Tensor:
        z: Tensor = self.layers(x)
        return z


@pytest.fixture
def package(monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    """An installed package ``bring.own``."""
    module = types.ModuleType("bring_own")
    monkeypatch.setitem(sys.modules, "bring_own", module)
    return module


def test_a_users_own_model_is_imported_by_name(package: types.ModuleType) -> None:
    package.__dict__["build"] = lambda shape, classes, width=1: PersonalFiles(shape, classes)
    layout = models.describe("bring_own:build", TOY, ("a", "b"), {"width": 3})
    assert layout.embedding == 4
    assert models.build(layout)(torch.zeros(5, 6)).shape == (5, 2)


def test_running_statistics_are_refused(package: types.ModuleType) -> None:
    package.__dict__["build"] = lambda shape, classes: PersonalFiles(shape, classes, nn.BatchNorm1d(4))
    with pytest.raises(ConfigError, match="running statistics"):
        models.describe("bring_own:build", TOY, ("a", "b"), {})
    package.__dict__["build"] = lambda shape, classes: PersonalFiles(
        shape, classes, nn.BatchNorm1d(4, track_running_stats=False)
    )
    assert models.describe("bring_own:build", TOY, ("a", "b"), {}).embedding == 4


@pytest.mark.parametrize(
    ("build", "complaint"),
    [
        (lambda shape, classes: nn.Linear(6, 2), "no embed"),
        (lambda shape, classes: PersonalFiles((shape[0] + 1,), classes), "does not take samples of shape"),
        (lambda shape, classes: PersonalFiles(shape, classes + 1), "the head of the model"),
        (
            lambda shape, classes: PersonalFiles(shape, classes, nn.Unflatten(1, (2, 2))),
            r"embed\(x\) of the model .* returns",
        ),
        (lambda shape, classes: PersonalFiles(shape, classes).double(), "float64"),
        (lambda shape, classes: 1 / 0, "cannot be built"),
    ],
)
def test_a_users_own_model_that_does_not_fit_is_refused(
    package: types.ModuleType, build: Callable[..., Any], complaint: str
) -> None:
    package.__dict__["build"] = build
    with pytest.raises(ConfigError, match=complaint):
        models.describe("bring_own:build", TOY, ("a", "b"), {})


@pytest.mark.parametrize(
    ("name", "spec", "options", "complaint"),
    [
        ("cnn2d", TOY, {}, "did you mean 'cnn1d'"),
        ("no_such_package:build", TOY, {}, "install the package of 'no_such_package'"),
        ("nowhere:build", TOY, {}, "cannot be imported"),
        ("os:system", TOY, {}, "'os:system' is in Python's own library"),
        ("importlib.metadata:version", TOY, {}, "is in Python's own library"),
        ("mlp", TOY, {"hiden": [3]}, "did you mean 'hidden'"),
        ("mlp", TOY, {"activation": "tanh"}, "expected relu or elu"),
        ("lenet", InputSpec((1, 8, 8)), {}, "16 pixels"),
        ("lenet", TOY, {}, "cannot be built"),
        ("mlp", InputSpec((6,), mean=(1.0,)), {}, "input.mean has 1 values"),
        ("mlp", InputSpec((1, 6), std=(0.0,)), {}, "not above 0"),
        ("mlp", InputSpec((6,), "int64", scale=2.0), {}, "tokens"),
    ],
)
def test_a_mistake_in_the_models_description_is_named(
    name: str, spec: InputSpec, options: dict[str, Any], complaint: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        models.describe(name, spec, ("a", "b"), options)
    assert complaint in str(caught.value)


def test_another_version_of_the_model_is_refused() -> None:
    layout = toy_layout()
    with pytest.raises(ConfigError, match="other arrays"):
        models.build(replace(layout, options={"hidden": [9]}))



# The client's loop


def fleet(name: str, *data: Any, together: bool = False, layout: Layout | None = None, **hyper: Any) -> Fleet:
    """A fleet after one round, so that nothing that it sends down is still zero."""
    chosen = hyper_of(name, **{**SMALL, **hyper})
    made = Fleet(name, chosen, data or [toy_samples(), toy_samples(90, seed=1)], layout or toy_layout(), together)
    made.round()
    return made


def round_of(name: str, *samples: Any, **hyper: Any) -> TrainResult:
    """A first round of one device."""
    return Fleet(name, hyper_of(name, **{**SMALL, **hyper}), samples or [toy_samples()], toy_layout()).trained()[0]


@pytest.mark.slow
@every_method
def test_equal_generators_give_equal_bits(name: str) -> None:
    one, other = fleet(name), fleet(name)
    first, again = one.trained()[1], other.trained()[1]
    other.number += 1
    later = other.trained()[1]
    assert equal_bits(first.update.groups, again.update.groups)
    assert first.update.scalars == again.update.scalars
    assert all(equal_bits(first.pending[role], again.pending[role]) for role in first.pending)
    assert (first.loss, first.flops, first.steps) == (again.loss, again.flops, again.steps)
    assert first.loss != later.loss


@every_method
def test_what_crosses_the_wire_is_what_the_method_says(name: str) -> None:
    played = fleet(name)
    method, sent, result = played.method, played.broadcast(), played.trained()[0]
    played.wire.check(sent.groups, method.down)
    assert set(sent.scalars) == {"round", "seed", *method.down_scalars}
    played.wire.check(result.update.groups, method.shared)
    assert set(result.update.scalars) == set(method.up_scalars)
    assert {a.dtype for a in flat(result.update.groups)} <= {np.dtype(np.float32)}
    assert all(np.abs(a).max() > 0 for a in flat(result.update.groups))
    assert all(np.abs(a).max() > 0 for a in flat(sent.groups))
    assert (result.samples, result.steps, result.left_out) == (60, method_steps(name), {})


def method_steps(name: str) -> int:
    return int(hyper_of(name, **SMALL).local_steps)


@every_method
def test_the_models_that_a_method_transmits_are_counted_in_values(name: str) -> None:
    """Prototypes are no model; what remains is a multiple of the model's shared groups."""
    played = fleet(name)
    method, layout = played.method, played.layout
    model = layout.parameters(tuple(g for g in method.shared if g in MODEL_GROUPS))
    means = 3 * (8 + 1) if "prototypes" in method.shared else 0
    values = {way: sum(a.size for a in flat(groups)) for way, groups in (
        ("down", played.broadcast().beside(played.per_device(0)).groups), ("up", played.trained()[0].update.groups)
    )}
    assert values == {"down": method.models_down * model + means, "up": method.models_up * model + means}
    paper = method.paper_models or (method.models_down, method.models_up)
    assert paper[0] == method.models_down
    assert paper[1] >= method.models_up


@pytest.mark.slow
@every_method
def test_a_device_keeps_what_the_method_says_in_float32_through_a_file(name: str) -> None:
    played = fleet(name)
    state = played.states[0]
    assert set(state) == set(played.method.client.keeps)
    assert {a.dtype for tree in state.values() for a in flat(tree)} <= {np.dtype(np.float32)}
    arrays, _ = storage.unpack(storage.pack(storage.flatten_roles(state)))
    back = storage.unflatten_roles(arrays)
    assert storage.flatten_roles(back).keys() == storage.flatten_roles(state).keys()
    assert all(equal_bits(played.layout.ordered(back[role]), played.layout.ordered(state[role])) for role in state)
    expected = played.trained()[0]
    played.states[0] = back
    assert equal_bits(played.trained()[0].update.groups, expected.update.groups)


LOCAL: dict[str, dict[str, Any]] = {
    "decayed and clipped": {"weight_decay": 0.01, "clip_norm": 0.2, "lr_decay": 0.5},
    "adam": {"local_optimizer": "adam", "client_lr": 0.01},
}


@pytest.mark.slow
@every_method
@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("local", LOCAL)
def test_clients_side_by_side_do_what_each_does_alone(name: str, local: str, padded: bool) -> None:
    """Five devices, two with other batch sizes than the rest; some took part before, some did not."""
    data = [toy_samples(n, seed=i) for i, n in enumerate((80, 80, 9, 85, 12))]
    alone, together = (fleet(name, *data, together=way, **LOCAL[local]) for way in (False, True))
    together.padded = padded
    for played in (alone, together):
        played.states[1] = {}
        played.round([0, 2, 1, 4, 3])
    expected = alone.broadcast().groups
    assert max_difference(expected, together.broadcast().groups) < 1e-4 * biggest(expected)
    together.state, together.states = alone.state, alone.states
    one, many = alone.trained(), together.trained()
    assert one.keys() == many.keys()
    for i, result in one.items():
        assert max_difference(result.update.groups, many[i].update.groups) < 1e-5 * biggest(result.update.groups)
        for role, tree in result.pending.items():
            assert max_difference(tree, many[i].pending[role]) < 1e-5 * biggest(tree)
        assert many[i].loss == pytest.approx(result.loss, rel=1e-4)
        assert many[i].update.scalars == pytest.approx(dict(result.update.scalars), rel=1e-5)
        assert replace(many[i], **unlike(result)) == result


@pytest.mark.parametrize(("padded", "stacks"), [(False, [[0, 1, 3], [2], [4]]), (True, [[2, 4], [0, 1, 3]])])
def test_padded_clients_of_similar_sizes_are_one_stack(padded: bool, stacks: list[list[int]]) -> None:
    """Those that draw more than twice as much form another stack."""
    data = [toy_samples(n, seed=i) for i, n in enumerate((80, 80, 9, 85, 12))]
    fleet = Fleet("fedavg", hyper_of("fedavg", local_steps=2, batch=30), data, toy_layout())
    plans = [round_plans.plan_of(fleet.method, one, fleet.hyper) for one in fleet.participants()]
    assert (round_plans.of_similar_size(plans) if padded else round_plans.of_equal_size(plans)) == stacks


def biggest(tree: trees.Params) -> float:
    return max([1.0, *(float(np.abs(a).max()) for a in flat(tree))])


def unlike(result: TrainResult) -> dict[str, Any]:
    """Figures that may differ between the two ways of computing."""
    return {key: getattr(result, key) for key in ("update", "pending", "loss", "seconds")}


@pytest.fixture
def as_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """torch's meta device stands for a GPU: it refuses arrays of another device as a GPU does. What comes back from it
    is zeros."""
    cpu, number = Tensor.cpu, Tensor.__float__
    monkeypatch.setattr(Tensor, "cpu", lambda self: torch.zeros_like(self, device="cpu") if self.is_meta else cpu(self))
    monkeypatch.setattr(Tensor, "__float__", lambda self: 1.0 if self.is_meta else number(self))


@pytest.mark.slow
@every_method
@pytest.mark.parametrize("together", [False, True])
@pytest.mark.usefixtures("as_on_a_gpu")
def test_every_array_of_a_round_and_of_an_answer_is_where_the_model_is(name: str, together: bool) -> None:
    played = fleet(name, *(toy_samples(40, seed=i) for i in range(2)), together=together)
    played.model.to("meta")
    trained = played.trained()
    served = trees.apply(lambda a: a.astype(np.float32), trees.only(played.state.served, played.method.shared))
    params = personal_model.adapt(
        played.method, played.model, played.layout, served, *toy_samples(), played.hyper, trained[0].pending,
        {"round": 1.0, "seed": float(SEED)},
    )
    assert np.isfinite(trained[0].loss)
    assert all(not array.any() for array in flat(trained[0].update.groups))
    assert local_training.embed(played.model, params, toy_samples()[0]).shape == (60, 8)


def test_arrays_of_two_devices_are_refused_there(as_on_a_gpu: None) -> None:
    with pytest.raises(RuntimeError, match="expected device"):
        models.build(toy_layout()).to("meta")(torch.zeros(2, 6))


def test_side_by_side_the_client_that_diverges_is_found_as_alone() -> None:
    good, (x, y) = toy_samples(), toy_samples(seed=1)
    for together in (False, True):
        data = [good, (np.full_like(x, 3e38), y)]
        played = Fleet("fedavg", hyper_of("fedavg", **SMALL), data, toy_layout(), together)
        with pytest.raises(RoundError, match=r"the loss is (nan|inf) at step 1"):
            played.trained()


def test_a_round_is_sgd_on_one_batch_after_the_other() -> None:
    """FedAvg written out: the same draws, three batches of a pass and one of the next."""
    x, y = toy_samples(50)
    fleet = Fleet("fedavg", hyper_of("fedavg", local_steps=4, client_lr=0.1, batch=20, clip_norm=0.0), [(x, y)])
    rng = np.random.default_rng([SEED, 1, 0])
    rng.integers(2**31)  # the seed of the model's own random layers
    passes = [rng.permutation(50) for _ in range(2)]
    sent = fleet.broadcast().groups
    w = [torch.tensor(a, requires_grad=True) for a in flat(sent)]
    for rows in (passes[0][:20], passes[0][20:40], passes[0][40:], passes[1][:20]):
        hidden = nn.functional.elu(torch.tensor(x[rows]) @ w[0].T + w[1])
        loss = nn.functional.cross_entropy(hidden @ w[2].T + w[3], torch.tensor(y[rows]))
        slopes = torch.autograd.grad(loss, w)
        w = [(a - 0.1 * g).detach().requires_grad_() for a, g in zip(w, slopes, strict=True)]
    for found, a, b in zip(flat(fleet.trained()[0].update.groups), w, flat(sent), strict=True):
        np.testing.assert_allclose(found, a.detach().numpy() - b, atol=1e-6)


def test_random_layers_draw_from_the_rounds_generator_and_are_off_outside_training(
    package: types.ModuleType,
) -> None:
    """One sample, so that nothing but the dropout is drawn."""
    package.__dict__["build"] = lambda shape, classes: PersonalFiles(shape, classes, nn.Dropout(0.5))
    layout = models.describe("bring_own:build", TOY, ("a", "b", "c"), {})
    fleet = Fleet("fedavg", hyper_of("fedavg", local_steps=3), [toy_samples(1)], layout)
    torch.manual_seed(5)
    expected = torch.rand(1)
    torch.manual_seed(5)
    first, again = (fleet.trained()[0].update.groups for _ in range(2))
    assert torch.equal(torch.rand(1), expected), "the caller's random numbers are left alone"
    fleet.number += 1
    assert equal_bits(first, again)
    assert not equal_bits(first, fleet.trained()[0].update.groups)
    assert not fleet.model.training


def test_a_first_dual_comes_from_zero() -> None:
    result = round_of("pfldyn-proto", penalty=0.25)
    for dual, delta in zip(flat(result.pending["dual"]), flat(result.update.groups), strict=True):
        np.testing.assert_allclose(dual, -0.25 * delta, rtol=1e-6)


@every_method
def test_what_a_round_is_given_is_left_as_it_was(name: str) -> None:
    played = fleet(name)
    sent = played.broadcast().beside(played.per_device(0))
    before = trees.apply(lambda a: a.copy(), sent.groups)
    kept = {role: trees.apply(lambda a: a.copy(), tree) for role, tree in played.states[0].items()}
    local_training.train_round(
        played.method, played.model, played.layout, sent, played.states[0], *played.data[0], played.hyper,
        np.random.default_rng(0),
    )  # fmt: skip
    assert equal_bits(before, sent.groups)
    assert all(equal_bits(kept[role], played.states[0][role]) for role in kept)


def test_progress_counts_the_steps() -> None:
    method, layout, seen = METHODS["fedavg"], toy_layout(), []
    broadcast = Payload(models.initial(layout, 0), {"round": 1})
    local_training.train_round(
        method, models.build(layout), layout, broadcast, {}, *toy_samples(), method.hyper(local_steps=3),
        np.random.default_rng(0), lambda done, total: seen.append((done, total)),
    )  # fmt: skip
    assert seen == [(1, 3), (2, 3), (3, 3)]


@pytest.mark.parametrize("already", [False, True])
def test_subnormals_count_as_zero_in_training_and_personalizing_alone(already: bool) -> None:
    """Where the processor can do so; the caller's own setting is left as it was."""
    able = torch.set_flush_denormal(True)
    torch.set_flush_denormal(already)
    tiny, seen = torch.tensor(1e-40), []
    played = fleet("per-fedavg-exact")
    played.model.register_forward_pre_hook(lambda *_: seen.append(bool(tiny * 1.0 == 0)))
    try:
        played.trained()
        trained, seen = seen, []
        played.own(played.data[0])
        assert set(trained) == {able}
        assert set(seen) == {able}
        assert bool(tiny * 1.0 == 0) == (already and able)
    finally:
        torch.set_flush_denormal(False)


@pytest.mark.parametrize("name", ["p-avg-proto", "metavers", "pfldyn-proto"])
def test_a_class_with_one_sample_is_left_out_and_named(name: str) -> None:
    x, y = toy_samples(40, labels=(0, 1))
    result = round_of(name, (np.concatenate([x, x[:1]]), np.append(y, 2)))
    assert result.left_out == {2: 1}


@every_method
def test_answers_from_own_samples_alone_accept_a_label_that_the_fleet_does_not_know(name: str) -> None:
    x, y = toy_samples()
    if METHODS[name].adaptation in OWN_LABELS:
        assert round_of(name, (x, y + 4)).loss > 0
    else:
        with pytest.raises(DataError, match="the label 6 is not a class of the fleet"):
            round_of(name, (x, y + 4))


@pytest.mark.parametrize(
    "samples",
    [
        (np.zeros((4, 5), np.float32), np.zeros(4, np.int64)),
        (np.zeros((4, 6), np.float64), np.zeros(4, np.int64)),
        (np.zeros((4, 6), np.float32), np.zeros(3, np.int64)),
        (np.zeros((0, 6), np.float32), np.zeros(0, np.int64)),
        (np.zeros((4, 6), np.float32), np.full(4, -1)),
    ],
)
def test_samples_of_another_form_are_refused(samples: Any) -> None:
    with pytest.raises(DataError):
        round_of("fedavg", samples)


@pytest.mark.parametrize(("name", "rate"), [("fedavg", {"client_lr": 1e30}), ("pfedme", {"personal_lr": 1e30})])
def test_a_loss_that_is_not_finite_ends_the_round(name: str, rate: dict[str, float]) -> None:
    """At the step that met it, however many gradients a step takes."""
    with pytest.raises(RoundError, match=r"the loss is nan at step (1|2)\b"):
        round_of(name, clip_norm=0.0, weight_decay=1e30, **rate)


# Operations


FORMS: dict[str, dict[str, Any]] = {
    **{name: {} for name in METHODS},
    "metavers": {"clip_norm": 1.0},
    "per-fedavg-exact, third": {"independent_hessian_batch": True},
    "per-fedavg-hf, third": {"independent_hessian_batch": True, "inner_steps": 2},
    "pfedme, long": {"personal_steps": 9},
}


@pytest.mark.parametrize("form", FORMS)
def test_counted_operations_are_those_of_torchs_counter(form: str) -> None:
    """Within a fifth: gradients in the samples themselves are not taken, and losses are not counted."""
    name, layout = form.partition(",")[0], models.describe("mlp", TOY, ("a", "b", "c"), {"hidden": [32, 32, 32]})
    played = Fleet(name, hyper_of(name, **{**SMALL, **FORMS[form]}), [toy_samples()], layout)
    forward = flops_per_sample(played.model, layout)
    assert forward == 2 * (6 * 32 + 2 * 32 * 32 + 32 * 3)
    with FlopCounterMode(display=False) as counter:
        result = played.trained()[0]
    assert result.flops == pytest.approx(counter.get_total_flops(), rel=0.2)


def test_layers_of_unknown_cost_are_not_guessed(package: types.ModuleType) -> None:
    package.__dict__["build"] = lambda shape, classes: PersonalFiles(shape, classes, nn.PReLU())
    layout = models.describe("bring_own:build", TOY, ("a", "b", "c"), {})
    assert flops_per_sample(models.build(layout), layout) is None
    assert Fleet("fedavg", hyper_of("fedavg", **SMALL), [toy_samples()], layout).trained()[0].flops is None


# Answers


def test_logits_do_not_depend_on_how_many_samples_are_requested() -> None:
    layout, (x, _) = toy_layout(), toy_samples(round_plans.CHUNK + 3)
    network, weights = models.build(layout), models.initial(layout, 0)
    logits = local_training.predict_logits(network, weights, x)
    np.testing.assert_allclose(logits[-2:], local_training.predict_logits(network, weights, x[-2:]), atol=1e-6)
    assert logits.shape == (round_plans.CHUNK + 3, 3)
    assert local_training.embed(network, weights, x).shape == (round_plans.CHUNK + 3, 8)


def test_the_learning_package_uses_no_optimizer_and_no_transform() -> None:
    """Each costs a device about 70 MB."""
    used = set()
    for path in Path(learning.__file__).parent.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ImportFrom) and node.module:
                used |= {f"{node.module}.{alias.name}" for alias in node.names}
            elif isinstance(node, ast.Attribute):
                used.add(ast.unparse(node))
    assert "torch.autograd.grad" in used
    assert {name for name in used if name.startswith(("torch.func", "torch.optim"))} == {
        "torch.func.functional_call", "torch.func.vmap"  # only for clients side by side
    }
