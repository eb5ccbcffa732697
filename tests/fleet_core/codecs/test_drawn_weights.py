"""First weights as a seed: exact for torch's default initialisation, refused for all else."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from fleet_core.base import storage, trees
from fleet_core.base.errors import CodecError
from fleet_core.codecs.frame import pack
from fleet_core.codecs.kinds.drawn_weights import DrawnPart, DrawnWeights
from fleet_core.codecs.kinds.registry import CODECS, DRAWN
from fleet_core.learning import models
from fleet_core.model import payloads
from fleet_core.model.layout import InputSpec, Layout

NETWORKS: list[tuple[str, tuple[int, ...], dict[str, Any]]] = [
    ("mlp", (10,), {}), ("mlp", (1,), {"hidden": [1, 3]}), ("logistic", (4,), {}), ("cnn1d", (2, 128), {}),
    ("ds-cnn", (6, 64), {}), ("lenet", (3, 32, 32), {}), ("lenet-lim", (1, 28, 28), {}), ("conv4", (1, 28, 28), {}),
]

BODILESS = ("logistic", "body")


def layout_of(name: str, shape: tuple[int, ...], options: dict[str, Any], classes: int = 3) -> Layout:
    return models.describe(name, InputSpec(shape=shape), tuple("abcdef"[:classes]), options)


@pytest.mark.parametrize("seed", [0, 7, 2**40 + 5])
@pytest.mark.parametrize(("name", "shape", "options"), NETWORKS)
def test_first_weights_follow_from_their_seed(
    name: str, shape: tuple[int, ...], options: dict[str, Any], seed: int
) -> None:
    layout = layout_of(name, shape, options)
    weights = models.initial(layout, seed)
    form, data = payloads.encode_whole(weights, seed)
    assert form == DrawnWeights.name
    assert len(data) < 25 + 12 * len(layout.tensors)
    assert payloads.identity(payloads.decode(form, data, layout, ("body", "head"))) == payloads.identity(weights)


@pytest.mark.slow
@pytest.mark.parametrize("seed", [0, 2**40 + 5])
@pytest.mark.parametrize(
    ("name", "shape", "options", "group"),
    [(*network, group) for network in NETWORKS for group in ("body", "head") if (network[0], group) != BODILESS],
)
def test_a_part_of_first_weights_follows_from_their_seed(
    name: str, shape: tuple[int, ...], options: dict[str, Any], group: str, seed: int
) -> None:
    layout = layout_of(name, shape, options)
    part = {group: models.initial(layout, seed)[group]}
    form, data = payloads.encode_whole(part, seed, layout.others((group,)))
    assert form in DRAWN
    assert payloads.identity(payloads.decode(form, data, layout, (group,))) == payloads.identity(part)


def test_a_head_is_drawn_after_its_body() -> None:
    layout = layout_of("mlp", (10,), {})
    head = {"head": models.initial(layout, 3)["head"]}
    assert payloads.encode_whole(head, 3, layout.others(("head",)))[0] == DrawnPart.name
    assert payloads.encode_whole(head, 3)[0] == "fp32", "nothing was drawn before"
    assert payloads.encode_whole(head, 4, layout.others(("head",)))[0] == "fp32"


@pytest.mark.parametrize("start", [-2, 2**26 + 1000, 2**62])
def test_words_beyond_the_most_before_a_part_are_refused(start: int) -> None:
    layout = layout_of("mlp", (10,), {})
    arrays = storage.flatten({"head": models.initial(layout, 3)["head"]})
    body = bytearray(DrawnPart().body(arrays, (3, layout.others(("head",)))))
    shapes = {name: array.shape for name, array in arrays.items()}
    assert set(DrawnPart().decode(pack(bytes(body)), shapes)) == set(shapes)
    for at in (4, 16):
        body[at : at + 8] = start.to_bytes(8, "little", signed=True)
    with pytest.raises(CodecError, match="words that are not there"):
        DrawnPart().decode(pack(bytes(body)), shapes)


def test_parts_that_are_far_from_each_other_are_refused() -> None:
    layout = layout_of("mlp", (10,), {})
    arrays = storage.flatten({"head": models.initial(layout, 3)["head"]})
    body = bytearray(DrawnPart().body(arrays, (3, layout.others(("head",)))))
    body[4:12] = (0).to_bytes(8, "little")
    with pytest.raises(CodecError, match="words that are not there"):
        DrawnPart().decode(pack(bytes(body)), {name: array.shape for name, array in arrays.items()})


def test_arrays_that_are_constant_beside_them_go_too() -> None:
    layout = layout_of("mlp", (10,), {})
    weights = models.initial(layout, 3) | {"control": {"a": np.zeros((500, 20)), "b": np.full(3, -0.25, np.float32)}}
    form, _ = payloads.encode_whole(weights, 3)
    assert form == DrawnWeights.name


def trained(weights: Any) -> Any:
    weights["body"]["layers.0.weight"].flat[5] += 1e-6
    return weights


def scaled(weights: Any) -> Any:
    return trees.apply(lambda a: a * 1.5 + 0.01, weights)


@pytest.mark.parametrize("changed", [trained, scaled])
def test_other_weights_go_whole(changed: Any) -> None:
    layout = layout_of("mlp", (10,), {})
    weights = changed(models.initial(layout, 3))
    form, data = payloads.encode_whole(weights, 3)
    assert form == "fp32"
    assert payloads.identity(payloads.decode(form, data, layout, ("body", "head"))) == payloads.identity(weights)
    with pytest.raises(CodecError, match="not drawn from the seed 3"):
        payloads.encode(DrawnWeights.name, weights, (3,))


def test_weights_of_another_seed_go_whole() -> None:
    assert payloads.encode_whole(models.initial(layout_of("mlp", (10,), {}), 3), 4)[0] == "fp32"


def test_an_embedding_table_goes_whole() -> None:
    spec = InputSpec(shape=(8,), dtype="int64")
    layout = models.describe("char-lstm", spec, ("a", "b"), {"vocabulary": 30})
    assert payloads.encode_whole(models.initial(layout, 3), 3)[0] == "fp32"


@pytest.mark.parametrize("start", [-2, 10_000, 2**62])
def test_words_beyond_the_model_are_refused(start: int) -> None:
    arrays = storage.flatten(models.initial(layout_of("mlp", (10,), {}), 3))
    shapes = {name: array.shape for name, array in arrays.items()}
    body = bytearray(DrawnWeights().body(arrays, (3,)))
    body[4:12] = start.to_bytes(8, "little", signed=True)
    with pytest.raises(CodecError, match="words that are not there"):
        DrawnWeights().decode(pack(bytes(body)), shapes)


def test_nobody_can_choose_it_for_updates() -> None:
    assert not DRAWN.keys() & CODECS.keys()
