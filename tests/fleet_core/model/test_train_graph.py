"""The container of the graph ``train``: what is read back, and what is refused."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage
from fleet_core.base.errors import BundleError
from fleet_core.model import train_graph
from fleet_core.model.layout import InputSpec, Layout, TensorSpec
from fleet_core.model.train_graph import FORMAT, TrainGraph, TrainInfo, pack, unpack

LAYOUT = Layout(
    "mlp", InputSpec((2,)), ("a", "b"), 2,
    (TensorSpec("layers.0.weight", "body", (2, 2)), TensorSpec("head.weight", "head", (2, 2))),
)
INFO = TrainInfo(FORMAT, LAYOUT.hash, 0, "entropy", {}, True, 8, 1e-3, 10, 18, "1.23.2")
GRAPH = TrainGraph(
    LAYOUT, INFO, {"train": b"one", "product": b"two"},
    {"x": np.zeros((2, 2), np.float32), "y": np.array([0, 1]), "train": np.ones((3, 2)), "product": np.ones((2, 2))},
    {"head": {"head.weight": np.ones((2, 2), np.float32)}},
)


def test_a_graph_is_read_as_it_was_written() -> None:
    read = unpack(pack(GRAPH), LAYOUT)
    assert (read.info, read.graphs) == (INFO, GRAPH.graphs)
    assert all(np.array_equal(read.golden[name], array) for name, array in GRAPH.golden.items())
    assert np.array_equal(read.first["head"]["head.weight"], GRAPH.first["head"]["head.weight"])
    assert pack(read) == pack(GRAPH)


def test_outputs_and_parameters_are_those_of_the_loss() -> None:
    assert GRAPH.outputs("train") == ["loss", "gradient/body/layers.0.weight", "gradient/head/head.weight"]
    vers = replace(GRAPH, info=replace(INFO, loss="metavers"))
    assert vers.outputs("train") == ["loss", "own", "gradient/body/layers.0.weight"]


def changed(**arrays: Any) -> bytes:
    """The container with other arrays; None leaves one out. ``__`` stands for the slash."""
    held, facts = storage.unpack(pack(GRAPH), where="")
    new = {**held, **{name.replace("__", "/"): array for name, array in arrays.items()}}
    return storage.pack({name: array for name, array in new.items() if array is not None}, facts)


def with_info(**changes: Any) -> bytes:
    held, facts = storage.unpack(pack(GRAPH), where="")
    info = {**json.loads(facts["train"]), **changes}
    return storage.pack(held, {"train": json.dumps(info)})


@pytest.mark.parametrize(("make", "why"), [
    (lambda: b"", "graph train"),
    (lambda: pack(GRAPH)[:-3], "graph train"),
    (lambda: storage.pack({"a": np.zeros(1)}), "metadata of the graph 'train' is malformed"),
    (lambda: with_info(loss="hinge"), "metadata of the graph 'train' is malformed"),
    (lambda: with_info(format=2), "metadata of the graph 'train' is malformed"),
    (lambda: with_info(layout="another"), "is for the layout another"),
    (lambda: changed(golden__y=None), "holds golden/product"),
    (lambda: changed(graph__product=None), "holds golden/product"),
    (lambda: changed(more=np.zeros(1)), "holds "),
    (lambda: changed(graph__train=np.zeros(0, np.uint8)), "not a one-dimensional uint8"),
    (lambda: changed(graph__train=np.zeros(3)), "not a one-dimensional uint8"),
    (lambda: changed(golden__x=np.zeros((2, 3), np.float32)), "golden x is float32"),
    (lambda: changed(golden__y=np.array([0, 2])), "not a class of the layout"),
    (lambda: changed(golden__train=np.full((3, 2), np.nan)), "not finite"),
    (lambda: changed(**{"first__head__head.weight": np.zeros((1, 2), np.float32)}), "initial values do not match"),
])
def test_what_is_no_graph_for_this_layout_is_refused(make: Callable[[], bytes], why: str) -> None:
    with pytest.raises(BundleError, match=why):
        unpack(make(), LAYOUT)


def test_a_graph_over_the_limit_is_not_read(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(train_graph, "MAX_BYTES", 10)
    with pytest.raises(BundleError, match="over the limit of 10"):
        unpack(pack(GRAPH), LAYOUT)


def test_a_graph_trains_with_the_estimators_of_its_loss_and_its_constants() -> None:
    hyper = METHODS["pfldyn-proto"].hyper()
    proto = replace(INFO, loss="proto", product=False, hyper={"distance": "squared"})
    assert proto.refuses("proto", hyper) == ""
    assert "made with distance = 'squared'" in proto.refuses("proto", replace(hyper, distance="norm"))
    assert "is not of the estimator none" in proto.refuses("none", hyper)
    assert "there is no graph for the estimator gp" in proto.refuses("gp", hyper)
    assert INFO.refuses("maml-exact", None) == ""
    assert "not of the estimator maml-exact" in replace(INFO, product=False).refuses("maml-exact", None)


def test_a_graph_from_before_a_setting_trains_with_its_default_alone() -> None:
    hyper = METHODS["metavers"].hyper()
    made = {name: getattr(hyper, name) for name in train_graph.NEEDS["metavers"][2] if name != "fixed_margin"}
    before = replace(INFO, loss="metavers", product=False, hyper=made)
    assert before.refuses("metavers", hyper) == ""
    assert "made with fixed_margin = 0.0" in before.refuses("metavers", replace(hyper, fixed_margin=0.5))


def test_a_graph_that_does_not_say_a_constant_is_refused() -> None:
    hyper = METHODS["fedproto"].hyper()
    whole = replace(INFO, loss="fedproto", product=False, hyper={"pull": hyper.pull, "pull_form": "square"})
    assert whole.refuses("fedproto", hyper) == ""
    assert "made with pull_form = 'square'" in whole.refuses("fedproto", replace(hyper, pull_form="norm"))
    before = replace(whole, hyper={"pull": hyper.pull})
    assert "does not say its pull_form, and the round has 'square'" in before.refuses("fedproto", hyper)
