"""pFedHN: the hypernetwork's products compared with autograd in float64, its rule with the paper's steps in a plain
loop, and what a fleet fetches for each device."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch

from cloud_server.records.fleet_folder import Fleet as LiveFleet
from edge_agent.device.state import DeviceState
from edge_agent.rounds import device_payload
from fleet_core.algorithms.interface import Payload, Update
from fleet_core.algorithms.methods.pfedhn import NETWORK, HyperServer, embedding_of, embeddings
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.errors import MessageError
from fleet_core.model import hypernetwork, payloads
from fleet_core.protocol import messages
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.round_messages import PerDevice
from tests.support.inprocess import config_text
from tests.support.simulation import Fleet, equal_bits, flat, hyper_of, max_difference, toy_samples

MODEL: dict[str, dict[str, Any]] = {
    "body": {"a": np.arange(6.0).reshape(2, 3), "b": np.ones(2)}, "head": {"c": np.zeros((1, 2))},
}
RULE = HyperServer()


def random_like(tree: trees.Params, seed: int) -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(seed)
    return trees.apply(lambda a: rng.normal(size=a.shape), tree)


def network(seed: int = 0) -> hypernetwork.Weights:
    """A network without zero weights."""
    made = hypernetwork.initial(MODEL, 4, 5, 3, np.random.default_rng(seed))
    return {n: a + 0.3 * np.random.default_rng([seed, i]).normal(size=a.shape) for i, (n, a) in enumerate(made.items())}


def by_torch(weights: dict[str, torch.Tensor], v: torch.Tensor) -> dict[str, torch.Tensor]:
    h = v
    for number in range(3):
        h = torch.relu(weights[f"hidden.{number}.weight"] @ h + weights[f"hidden.{number}.bias"])
    h = h / np.sqrt(5)
    names = [f"{group}.{name}" for group, named in MODEL.items() for name in named]
    return {name: weights[f"{name}.weight"] @ h + weights[f"{name}.bias"] for name in names}


def test_products_are_those_of_autograd_in_float64() -> None:
    weights, v, change = network(), np.random.default_rng(1).normal(size=4), random_like(MODEL, 2)
    leaves = {name: torch.tensor(array, requires_grad=True) for name, array in weights.items()}
    at = torch.tensor(v, requires_grad=True)
    made = by_torch(leaves, at)
    for group, named in hypernetwork.generate(weights, v, MODEL).items():
        for name, array in named.items():
            np.testing.assert_allclose(array.reshape(-1), made[f"{group}.{name}"].detach().numpy(), rtol=1e-12)
    flat_change = {f"{g}.{n}": torch.tensor(a.reshape(-1)) for g, named in change.items() for n, a in named.items()}
    along = torch.stack([made[name] @ c for name, c in flat_change.items()]).sum()
    *slopes, slope = torch.autograd.grad(along, [*leaves.values(), at])
    found, back = hypernetwork.vector_jacobian(weights, v, change)
    assert list(found) == list(weights)
    for (name, array), expected in zip(found.items(), slopes, strict=True):
        np.testing.assert_allclose(array, expected.numpy(), rtol=1e-10, atol=1e-12, err_msg=name)
    np.testing.assert_allclose(back, slope.numpy(), rtol=1e-10)
    assert np.abs(back).max() > 1e-3


def test_products_are_finite_differences_of_the_generated_weights() -> None:
    weights, v, change = network(3), np.random.default_rng(4).normal(size=4), random_like(MODEL, 5)
    _, back = hypernetwork.vector_jacobian(weights, v, change)

    def along(v: Any) -> float:
        made = hypernetwork.generate(weights, v, MODEL)
        return sum(float((a * b).sum()) for a, b in zip(flat(made), flat(change), strict=True))

    for place, unit in enumerate(np.eye(4)):
        slope = (along(v + 1e-6 * unit) - along(v - 1e-6 * unit)) / 2e-6
        assert slope == pytest.approx(back[place], rel=1e-6, abs=1e-9)


def test_every_devices_first_model_is_the_fleets() -> None:
    state = RULE.init(MODEL, hyper_of("pfedhn"))
    for device in ("a", "b"):
        assert equal_bits(RULE.per_device(state, device), trees.widened(MODEL))
    assert not np.array_equal(embedding_of(state, "a"), embedding_of(state, "b"))
    np.testing.assert_array_equal(embedding_of(state, "a"), embedding_of(RULE.init(MODEL, hyper_of("pfedhn")), "a"))


def test_a_round_moves_the_network_by_the_mean_of_the_products_and_each_embedding_by_its_own() -> None:
    hyper = hyper_of("pfedhn", server_lr=0.3, embedding_lr=0.2, embedding=4)
    state = replace(RULE.init(MODEL, hyper), model={NETWORK: network(6)})
    updates = [Update(name, Payload(random_like(MODEL, number))) for number, name in enumerate(("a", "b"))]
    expected, moved = dict(network(6)), {}
    for update in updates:
        v = embedding_of(state, update.device)
        products, back = hypernetwork.vector_jacobian(network(6), v, update.payload.groups)
        moved[update.device] = embedding_of(state, update.device) + 0.2 * back
        expected = {name: array + 0.3 * products[name] / 2 for name, array in expected.items()}
    after = RULE.apply(state, updates, 5, hyper)
    for name, array in after.model[NETWORK].items():
        np.testing.assert_allclose(array, expected[name], rtol=1e-12, atol=1e-14)
    for name, v in moved.items():
        np.testing.assert_allclose(embeddings(after)[name], v, rtol=1e-12)
    middle = (moved["a"] + moved["b"]) / 2
    assert max_difference(after.served, hypernetwork.generate(expected, middle, MODEL)) < 1e-12
    assert embedding_of(after, "c").tolist() == embedding_of(state, "c").tolist()


def test_a_step_draws_the_generated_model_towards_what_its_device_has_found() -> None:
    """The products are a direction of ascent of ⟨θ, Δθ⟩."""
    hyper = hyper_of("pfedhn", server_lr=0.01, embedding_lr=0.01)
    state = RULE.init(MODEL, hyper)
    change = random_like(MODEL, 0)
    for _ in range(3):
        before = RULE.per_device(state, "a")
        state = RULE.apply(state, [Update("a", Payload(change))], 1, hyper)
        step = trees.subtract(RULE.per_device(state, "a"), before)
        assert sum(float((a * b).sum()) for a, b in zip(flat(step), flat(change), strict=True)) > 0


@pytest.mark.slow
def test_devices_whose_classes_are_swapped_come_to_models_of_their_own() -> None:
    """One model cannot answer for both devices; a model per device can. The server's models are evaluated as they
    arrive, before any step on the device."""
    x, y = toy_samples(90)
    data = [(x, y), (x, (y + 1) % 3), (x, y), (x, (y + 1) % 3)]
    fleet = Fleet("pfedhn", hyper_of("pfedhn", local_steps=5, batch=30, client_lr=0.1), data)
    for _ in range(60):
        fleet.round()
    test_x, test_y = toy_samples(90, seed=1)
    answers = {}
    for device in range(2):
        params = fleet.per_device(device)
        answers[device] = np.asarray(hypernetwork_logits(fleet, params, test_x).argmax(1))
    assert (answers[0] == test_y).mean() > 0.9
    assert (answers[1] == (test_y + 1) % 3).mean() > 0.9


def hypernetwork_logits(fleet: Fleet, params: trees.Params, x: Any) -> Any:
    from fleet_core.learning import local_training

    return local_training.predict_logits(fleet.model, params, x)


def test_the_row_gives_every_device_a_model_of_its_own_and_nothing_to_all() -> None:
    method = METHODS["pfedhn"]
    assert (method.down, method.received, method.per_device) == ((), ("body", "head"), ("body", "head"))
    assert all(not METHODS[name].per_device for name in METHODS if name != "pfedhn")


def test_a_list_of_what_is_given_names_each_devices_blob_and_is_bounded() -> None:
    blobs = tuple(Blob.of(bytes([n]) * 2000, 1024) for n in range(3))
    listed = messages.decode(PerDevice, messages.encode(PerDevice(("a", "b", "c"), blobs)))
    assert (listed.of("b"), listed.of("nobody")) == (blobs[1], None)
    with pytest.raises(MessageError):
        messages.decode(PerDevice, b'{"devices": ["a"], "blobs": [{"id": "x"}]}')


class Asked:
    """A fetcher that fetches nothing and records requests."""

    def __init__(self) -> None:
        self.ids: list[str] = []

    def start(self, blob: Blob, limit: int, kind: str) -> None:
        self.ids.append(blob.id)


def test_a_device_fetches_the_list_and_then_its_own_blob_and_no_other(tmp_path: Path) -> None:
    fleet = Fleet("pfedhn", hyper_of("pfedhn"), [toy_samples()])
    made = {name: trees.scale(fleet.per_device(0), factor) for name, factor in (("a", 1.0), ("b", 2.0))}
    weights = {name: payloads.encode("fp32", fleet.wire.ordered(groups)) for name, groups in made.items()}
    blobs = {name: Blob.of(data, 1024) for name, data in weights.items()}
    data = messages.encode(PerDevice(tuple(blobs), tuple(blobs.values())))
    method = SimpleNamespace(name="pfedhn", version=1)
    manifest: Any = SimpleNamespace(per_device=Blob.of(data, 1024), round=3, method=method)
    asked: Any = Asked()
    service: Any = SimpleNamespace(layout=fleet.layout)
    here = device_payload.DevicePayload("a", DeviceState(tmp_path), service, asked)
    assert not here.is_here(manifest)
    here.take(manifest, manifest.per_device.id, data)
    assert not here.is_here(manifest)
    assert asked.ids == [manifest.per_device.id, blobs["a"].id]
    assert here.named(manifest) == {blobs["a"].id}
    assert (here.is_of(manifest, blobs["a"].id), here.is_of(manifest, blobs["b"].id)) == (True, False)
    here.take(manifest, blobs["a"].id, weights["a"])
    assert here.is_here(manifest)
    held = DeviceState(tmp_path).weights(device_payload.NAME)
    assert held is not None
    assert equal_bits(fleet.wire.ordered(held.params), fleet.wire.ordered(made["a"]))
    stranger = device_payload.DevicePayload("c", DeviceState(tmp_path / "c"), service, asked)
    stranger.take(manifest, manifest.per_device.id, data)
    with pytest.raises(MessageError, match="no weights for this device"):
        stranger.is_here(manifest)


def test_the_operator_is_told_that_a_devices_model_can_be_read_by_others(tmp_path: Path) -> None:
    (tmp_path / "fleet.toml").write_text(config_text("pfedhn"))
    (told,) = LiveFleet.load(tmp_path).remarks()
    assert told.startswith("pfedhn makes a model for each device, which every device of the fleet may read")
