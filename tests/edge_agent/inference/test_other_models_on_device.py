"""A recurrent model, a pooling one and a user's own on a device: the answers are what torch computes, without the
model's code."""

from __future__ import annotations

import sys
import types
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from edge_agent.compute import adapter
from edge_agent.device.state import DeviceState
from edge_agent.inference import relearn
from edge_agent.inference.service import Service
from export.graph import export_graph
from export.method_steps import with_steps
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage
from fleet_core.base.errors import DataError
from fleet_core.board.device_settings import Personalize
from fleet_core.data.samples import Samples
from fleet_core.learning import local_training, losses, models
from fleet_core.model import graph_bundle
from fleet_core.model.layout import InputSpec, Layout
from fleet_core.personalization.linear_head import Head
from tests.support import homes

pytestmark = pytest.mark.slow

METHOD = "pfldyn-maml"
FAMILIES: dict[str, tuple[str, InputSpec, dict[str, Any]]] = {
    "lstm": ("char-lstm", InputSpec((6,), "int64"), {"width": 8, "layers": 1}),
    "pooled": ("ds-cnn", InputSpec((3, 4)), {"channels": (8, 6)}),
    "own": ("bring_mine:build", InputSpec((3, 4)), {"width": 5}),
}


class Mine(nn.Module):
    """A user's model with layers that no family combines."""

    def __init__(self, classes: int, width: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(12, width), nn.SiLU(), nn.LayerNorm(width))
        self.head = nn.Linear(width, classes)

    def embed(self, x: Tensor) -> Tensor:
        z: Tensor = self.layers(x)
        return z


@pytest.fixture(autouse=True)
def mine() -> Iterator[None]:
    module = types.ModuleType("bring_mine")
    module.__dict__["build"] = lambda shape, classes, width: Mine(classes, width)
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "bring_mine", module)
        patch.setattr(adapter, "run", adapter.handle)
        yield


def drawn(spec: InputSpec, seed: int, number: int = 60) -> Samples:
    """Three separable classes."""
    rng = np.random.default_rng(seed)
    y = np.arange(number) % 3
    if spec.dtype == "int64":
        x = np.where(rng.random((number, 6)) < 0.7, y[:, None], rng.integers(0, 3, (number, 6)))
    else:
        x = rng.normal(size=(number, 3, 4)) + 2 * np.eye(3)[y][:, :, None]
    return Samples(x.astype(spec.dtype), y, time=np.arange(number, dtype=np.float64), classes=homes.CLASSES)


@cache
def made(family: str) -> tuple[Layout, bytes]:
    """(the model, its graphs with steps) as ``metafleet init`` makes them."""
    name, spec, options = FAMILIES[family]
    layout, said = models.describe(name, spec, homes.CLASSES, options), list[str]()
    graph = export_graph(layout, kinds=("embed", "predict"))
    graph = with_steps(graph, METHODS[METHOD], METHODS[METHOD].hyper(), models.initial(layout, 1), said.append)
    return layout, graph_bundle.pack(graph)


def device(folder: Path, family: str) -> Service:
    """A device that was served first weights, and knows the model by its graphs alone."""
    layout, data = made(family)
    place = homes.home(folder / "d0", drawn(layout.input, 0), toml="[serve]\nworse_by = 1.0\n")
    DeviceState(place).save_graph("a" * 32, data)
    weights = homes.weights_of(models.initial(layout, 1))
    with pytest.MonkeyPatch.context() as patch:
        patch.delitem(sys.modules, "bring_mine")
        service = homes.reopened(place)
        service.install("a" * 32, graph_bundle.unpack(data))
        service.load(METHODS[METHOD], {}, weights)
    return service


@pytest.mark.parametrize("family", FAMILIES)
def test_class_means_a_head_and_steps_on_a_device_are_torchs(tmp_path: Path, family: str) -> None:
    layout, _ = made(family)
    service, asked = device(tmp_path, family), drawn(layout.input, 5, 7).x
    own, weights, network = service.local().own(), models.initial(layout, 1), models.build(layout)
    z, at = (local_training.embed(network, weights, x) for x in (own.x, asked))
    relearn.personalize(service, Personalize("proto"))
    means = losses.prototypes(torch.tensor(z), torch.tensor(own.y), 3)
    wanted = torch.softmax(losses.proto_logits(torch.tensor(at), *means), 1).numpy()
    np.testing.assert_allclose(service.predict(asked), wanted, atol=1e-5)
    relearn.personalize(service, Personalize("head"))
    np.testing.assert_allclose(service.predict(asked), Head.fit(z, own.y, 3).probabilities(at), atol=1e-5)
    assert relearn.personalize(service, Personalize("adapt", steps=2, rate=0.1)).how == "sgd"
    found = service.stored.personalization(service.slots.pointer().slot)
    assert found is not None
    first = storage.flatten(weights)
    moved = {key.partition("/")[0] for key, array in found.arrays.items() if np.abs(array - first[key]).max() > 1e-6}
    assert moved == ({"head"} if family == "lstm" else {"body", "head"})
    stepped = storage.unflatten(dict(found.arrays))
    logits = torch.tensor(local_training.predict_logits(network, stepped, asked))
    np.testing.assert_allclose(service.predict(asked), torch.softmax(logits, 1).numpy(), atol=1e-5)
    assert homes.restored(service.slots.folder.parent).answers(asked) == service.answers(asked)


@pytest.mark.parametrize("way", ["proto", "adapt"])
def test_a_token_that_the_model_does_not_know_is_refused_and_harms_nothing(tmp_path: Path, way: str) -> None:
    """It arrives from a stranger over MQTT or HTTP, or with a label."""
    service = device(tmp_path, "lstm")
    relearn.personalize(service, Personalize(way))
    with service.slots.writing():
        service.slots.set_choice(Personalize(way))
    good, bad = drawn(FAMILIES["lstm"][1], 5, 7).x, np.full((1, 6), 99)
    before = service.answers(good)
    with pytest.raises(DataError, match="does not take these samples"):
        service.answers(bad)
    with pytest.raises(DataError, match="does not take these samples"):
        relearn.learn(service, bad, ["a"])
    assert not service.local().added_path.exists()
    assert service.answers(good) == before
    assert relearn.learn(service, good[:1], ["a"])["personalization"] == before.personalization
