"""What a served model costs, and that devices hold the bits that the aggregator announced."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.broadcast.served_model import PRECISION, Audience, encode_served, fetched_bytes, is_new
from cloud_server.ledger.ledger_tables import Evaluation, Traffic
from cloud_server.records import checkpoint
from cloud_server.records.checkpoint import Checkpoint, ServedModel
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.learning import models
from fleet_core.model import payloads
from fleet_core.model.layout import InputSpec, Layout
from tests.support.inprocess import CLASSES, World, config_text, toy, world

pytestmark = pytest.mark.usefixtures("no_fsync")

NAMES = ("d0", "d1", "d2")
EVERYONE = Audience(10, 10, 10, 1.0)
LAST = Audience(10, 10, 10, 0.0)


# Encoded --------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def layout() -> Layout:
    return models.describe("mlp", InputSpec((8,)), CLASSES, {"hidden": [60]})


def moved(tree: Any, by: float, seed: int) -> Any:
    """``tree`` and noise of ``by`` of its norm."""
    rng = np.random.default_rng(seed)
    noise = trees.apply(lambda a: rng.normal(size=a.shape), tree)
    return trees.axpy(by * trees.norm(tree) / trees.norm(noise), noise, trees.widened(tree))


def closed(layout: Layout, method: str, *, served: float | None = None, step: float = 0.01) -> Checkpoint:
    """After round 10: the model is ``step`` away from the one that devices hold; the served one is the same, or
    ``served`` away from it."""
    rule = METHODS[method]
    wire = layout.extended(rule.down, rule.shared)
    first = wire.ordered({**models.initial(layout, 0), **wire.zeros(rule.besides)})
    state = rule.server.init(trees.widened(trees.only(first, rule.received)), rule.hyper())
    published = trees.apply(lambda a: np.asarray(a, np.float32), rule.server.broadcast(state).groups)
    model = moved(state.model, step, 1)
    return Checkpoint(10, replace(state, model=model, served=model if served is None else moved(model, served, 2)),
                      published)


def encoded(layout: Layout, method: str, after: Checkpoint, codec: str = "int8", audience: Audience = EVERYONE,
            before: ServedModel | None = None) -> ServedModel:
    rule = METHODS[method]
    return encode_served(rule, after, before, codec, layout.extended(rule.down, rule.shared), 0, audience)


def lost(made: ServedModel, after: Checkpoint) -> float:
    exact = after.state.served
    return float(trees.norm(trees.subtract(trees.widened(made.weights), exact)) / trees.norm(exact))


@pytest.mark.slow
@pytest.mark.parametrize("codec", CODECS)
@pytest.mark.parametrize("method", ["fedavg", "pfldyn-maml", "scaffold"])
def test_a_device_decodes_the_announced_bits_and_they_are_near_the_aggregators(
    layout: Layout, codec: str, method: str
) -> None:
    after = closed(layout, method, served=0.01 if method == "pfldyn-maml" else None)
    made, rule = encoded(layout, method, after, codec, LAST), METHODS[method]
    assert lost(made, after) <= PRECISION
    if made.base is not None:
        base = trees.only(after.published or {}, rule.shared)
        assert made.base == payloads.identity(base)
        wire = layout.extended(rule.down, rule.shared)
        delta = payloads.decode(made.codec, made.data, wire, rule.shared)
        assert payloads.identity(payloads.apply_delta(base, delta)) == payloads.identity(made.weights)


def test_the_next_training_model_is_served_where_it_has_the_same_weights(layout: Layout) -> None:
    for method in ("fedavg", "scaffold"):
        after = closed(layout, method)
        made = encoded(layout, method, after)
        assert made.following, method
        assert fetched_bytes(made, None, NAMES, NAMES, NAMES) == 0
        assert fetched_bytes(made, None, NAMES, NAMES, ("d0",)) > 0
    last = encoded(layout, "scaffold", closed(layout, "scaffold"), audience=LAST)
    assert (last.following, last.base is None) == (False, False), "no training model follows it: a delta"
    assert not encoded(layout, "pfldyn-maml", closed(layout, "pfldyn-maml", served=0.01)).following


def test_the_base_with_the_fewest_bytes_is_taken(layout: Layout) -> None:
    """Few devices hold the training model of the round; all hold the served model before."""
    after = closed(layout, "feddyn", served=0.01)
    near = trees.apply(lambda a: np.asarray(a, np.float32), moved(after.state.served, 0.02, 3))
    before = ServedModel(5, near, source="another")
    few = encoded(layout, "feddyn", after, audience=Audience(100, 100, 10, 0.1), before=before)
    assert few.base == payloads.identity(near)
    assert fetched_bytes(few, before, NAMES, (), ()) == 3 * len(few.data)
    alone = encoded(layout, "feddyn", after, audience=Audience(100, 100, 2, 0.02))
    whole = len(payloads.encode("fp32", alone.weights))
    assert fetched_bytes(alone, None, NAMES, ("d0",), ()) == len(alone.data) + 2 * whole


def test_an_older_agent_takes_the_whole_of_a_method_with_more_groups_in_training(layout: Layout) -> None:
    """It looks for the id of its training model, and would add a delta to all groups of that."""
    after = closed(layout, "scaffold", served=0.01)
    made = encoded(layout, "scaffold", after)
    assert made.base not in (None, payloads.identity(after.published or {}))


def test_a_codec_that_loses_too_much_gives_way_to_a_finer_one_or_the_whole(layout: Layout) -> None:
    after = closed(layout, "feddyn", served=0.05)
    made = encoded(layout, "feddyn", after, "topk-01")
    assert (made.codec, made.base is None) == ("int8", False)
    far = encoded(layout, "feddyn", closed(layout, "feddyn", served=5.0), "topk-01")
    assert (far.codec, far.base, far.data) == ("fp32", None, b"")
    assert lost(far, closed(layout, "feddyn", served=5.0)) < 1e-7


def test_what_counts_as_new(layout: Layout) -> None:
    first = encoded(layout, "fedavg", closed(layout, "fedavg"))
    assert not is_new(first, first, 0.0, last=True)
    other = ServedModel(20, trees.apply(lambda a: np.asarray(a, np.float32), moved(first.weights, 1e-4, 4)), source="x")
    assert is_new(other, first, 0.0, last=False)
    assert not is_new(other, first, 0.001, last=False)
    assert is_new(other, first, 0.001, last=True)


# A fleet --------------------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Any]:
    made: list[World] = []

    def make(
        method: str, rounds: int = 4, every: int = 2, codec: str = "int8", devices: int = 3, more: str = ""
    ) -> World:
        link = f'up = "{codec}"\ndown = "{codec}"'
        text = config_text(method, rounds=rounds, devices=devices, fleet=more, link=link)
        text = text.replace(f"serve_every = {rounds}", f"serve_every = {every}").replace("[6]", "[40]")
        w = world(tmp_path / f"{len(made)}", text)
        made.append(w)
        return w

    yield make
    for w in made:
        w.close()


def begin(w: World, names: tuple[str, ...] = NAMES) -> World:
    w.start_server()
    for n, name in enumerate(names):
        w.start_agent(name, toy(n, shift=0.3 * n))
    return w


def evaluated(w: World, number: int, names: tuple[str, ...] = NAMES) -> bool:
    return {row.device for row in w.server.ledger.rows(Evaluation, round=number)} >= set(names)


def served_bytes(w: World, device: str) -> int:
    return sum(row.payload_bytes for row in w.server.ledger.rows(Traffic, device=device, kind="serve"))


def check_bits(w: World, *names: str) -> None:
    """Devices hold what the aggregator announced and has on its disk."""
    reference = w.server._parts.served.reference
    _, kept = checkpoint.served(w.fleet.folder / "state" / "served.safetensors")
    assert payloads.identity(kept) == reference.model
    for name in names:
        held = w.agents[name].service.slots.weights()
        assert payloads.identity(held.params) == held.model == reference.model, name


@pytest.mark.parametrize("method", ["fedavg", "scaffold"])
@pytest.mark.slow
def test_devices_that_train_fetch_the_served_model_with_the_next_training_model(fleet: Any, method: str) -> None:
    w = begin(fleet(method))
    assert w.pump(lambda: evaluated(w, 2) and w.closed() >= 3)
    assert [served_bytes(w, name) for name in NAMES] == [0, 0, 0]
    assert w.pump(lambda: evaluated(w, 4))
    check_bits(w, *NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["int8", "int4", "topk-10"])
def test_a_model_of_its_own_goes_as_a_delta_to_what_devices_hold(fleet: Any, codec: str) -> None:
    w = begin(fleet("pfldyn-maml", rounds=2, codec=codec))
    assert w.pump(lambda: evaluated(w, 2))
    reference = w.server._parts.served.reference
    assert reference.base is not None
    assert reference.blob.size < reference.full.size / 2
    assert [served_bytes(w, name) for name in NAMES] == [reference.blob.size] * 3
    check_bits(w, *NAMES)


@pytest.mark.slow
def test_it_is_fetched_before_the_next_training_model_replaces_its_base(fleet: Any) -> None:
    w = begin(fleet("pfldyn-proto", rounds=3, every=2))
    assert w.pump(lambda: w.closed() >= 2 and w.server.served_round == 2)
    first = w.server._parts.served.reference
    assert w.pump(lambda: evaluated(w, 2))
    assert first.base is not None
    assert [served_bytes(w, name) for name in NAMES] == [first.blob.size] * 3
    assert w.pump(lambda: evaluated(w, 3))
    check_bits(w, *NAMES)


@pytest.mark.slow
@pytest.mark.parametrize("method", ["fedavg", "pfldyn-proto", "scaffold", "fedper", "pfedhn"])
def test_a_new_device_and_one_that_missed_the_base_fetch_the_whole(fleet: Any, method: str) -> None:
    w = begin(fleet(method, devices=2))
    assert w.pump(lambda: evaluated(w, 2))
    w.kill_agent("d2")
    assert w.pump(lambda: evaluated(w, 4, ("d0", "d1")), tick_s=0.1)
    before = w.server.ledger.rows(Traffic, device="d2", kind="serve")
    w.start_agent("new", toy(8), train=False)
    reference = w.server._parts.served.reference
    shared = METHODS[method].shared
    holds_base = reference.base and w.start_agent("d2")._tasks.models.weights(reference.base, shared) is not None
    assert w.pump(lambda: evaluated(w, 4, (*NAMES, "new")))
    whole = reference.blob if reference.full is None else reference.full
    assert served_bytes(w, "new") == whole.size
    missed = served_bytes(w, "d2") - sum(row.payload_bytes for row in before)
    assert missed == (reference.blob if holds_base else whole).size
    check_bits(w, *NAMES, "new")


def test_a_device_whose_base_is_not_what_it_should_be_fetches_the_whole(fleet: Any) -> None:
    w = begin(fleet("pfldyn-proto", rounds=2))
    assert w.pump(lambda: w.closed() == 1)
    agent = w.agents["d0"]
    sound = agent._tasks.models.weights

    def spoilt(model: str, groups: tuple[str, ...]) -> Any:
        found = sound(model, groups)
        if found is not None and model == agent._tasks.models.base:
            return type(found)(found.model, found.round, trees.apply(lambda a: a + np.float32(1), found.params))
        return found

    agent._tasks.models.weights = spoilt
    assert w.pump(lambda: evaluated(w, 2))
    reference = w.server._parts.served.reference
    assert served_bytes(w, "d0") == reference.blob.size + reference.full.size
    assert w.logged("d0: the delta does not fit what is held here: the whole model is needed")
    check_bits(w, *NAMES)


def test_a_restarted_aggregator_publishes_the_same(fleet: Any) -> None:
    w = begin(fleet("pfldyn-proto", rounds=3, every=2))
    assert w.pump(lambda: w.server.served_round == 2)
    before = w.server._parts.served.reference
    w.kill_server()
    assert w.start_server()._parts.served.reference == before
    w.kill_server()
    (w.fleet.folder / "state" / "served.safetensors").unlink()  # killed before it was written
    assert w.start_server()._parts.served.reference == before
    assert w.pump(lambda: evaluated(w, 3))
    check_bits(w, *NAMES)
    assert [row.served_id is not None for row in w.server.ledger.rounds()] == [False, True, True]


def test_a_served_model_that_the_version_before_wrote_is_served_whole(fleet: Any) -> None:
    w = begin(fleet("pfldyn-proto", rounds=2))
    assert w.pump(lambda: evaluated(w, 2))
    path = w.fleet.folder / "state" / "served.safetensors"
    number, weights = checkpoint.served(path)
    w.kill_server()
    checkpoint._write(path, {f"{g}/{n}": a for g, named in weights.items() for n, a in named.items()},
                      {"round": str(number)})
    reference: Any = w.start_server()._parts.served.reference
    assert (reference.base, reference.codec, reference.full, reference.round) == (None, "fp32", None, 2)


@pytest.mark.slow
def test_nothing_is_published_when_nothing_changes_until_the_last_round(fleet: Any) -> None:
    w = begin(fleet("fedavg", rounds=5, every=1, more="serve_min_change = 1.0"))
    assert w.pump(lambda: w.closed() >= 4)
    assert w.server.served_round == 1
    assert w.pump(lambda: evaluated(w, 5))
    ids = [row.served_id is not None for row in w.server.ledger.rounds()]
    assert ids == [True, False, False, False, True]
    check_bits(w, *NAMES)


def test_a_method_with_weights_of_devices_is_announced_and_costs_nothing_when_the_shared_ones_stay(fleet: Any) -> None:
    w = begin(fleet("fedper", rounds=3, every=1, more="serve_min_change = 1.0"))
    assert w.pump(lambda: evaluated(w, 1) and evaluated(w, 2))
    first = w.server.ledger.rounds()[0].served_id
    assert w.server.ledger.rounds()[1].served_id == first
    assert w.pump(lambda: evaluated(w, 3))
    check_bits(w, *NAMES)
