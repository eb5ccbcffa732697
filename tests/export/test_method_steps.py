"""What ``metafleet init`` exports for a method's gradient steps, and what it reports where they cannot become a
graph."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import pytest

from benchmarks.on_device.exports import FAMILIES
from export import adapt_graph, method_steps
from export.first_model import first
from export.graph import export_graph
from export.method_steps import with_steps
from fleet_core.algorithms.interface import own_steps
from fleet_core.algorithms.methods.registry import METHODS, PRODUCT
from fleet_core.base import trees
from fleet_core.base.errors import BundleError, CodecError
from fleet_core.learning import models
from fleet_core.model import graph_bundle
from fleet_core.model.graph_bundle import AdaptInfo, Graph
from fleet_core.model.layout import MODEL_GROUPS, InputSpec
from fleet_core.personalization.gradient_steps import steps_of, trains
from tests.support.paths import ROOT

LAYOUT = models.describe("mlp", InputSpec((6,)), ("a", "b", "c"), {"hidden": [5]})
LINEAR = models.describe("logistic", InputSpec((6,)), ("a", "b", "c"), {})
STEPPING = {name for name, method in METHODS.items() if steps_of(method, method.hyper()) is not None}


@cache
def exported() -> Graph:
    return export_graph(LAYOUT, kinds=("embed", "predict"), seed=3)


Asked = list[tuple[tuple[str, ...], bool]]


def made_of(
    monkeypatch: pytest.MonkeyPatch, name: str, refused: tuple[tuple[str, ...], ...] = (), **hyper: Any
) -> tuple[Graph, Asked, list[str]]:
    """(result of ``with_steps``, the graphs it tried, what it logged); steps that move ``refused`` groups cannot become
    a graph."""
    asked: Asked = []

    def fake(graph: Graph, *, rates: bool, groups: tuple[str, ...]) -> Graph:
        asked.append((groups, rates))
        if groups in refused:
            raise BundleError(f"no steps of {' and '.join(groups)}")
        return Graph(graph.layout, graph.graphs, graph.golden, graph.info, b"adapt", graph.first)

    monkeypatch.setattr(method_steps, "with_adapt", fake)
    method, said = METHODS[name], list[str]()
    initial = models.initial(LAYOUT, 1)
    return with_steps(exported(), method, method.hyper(**hyper), initial, said.append), asked, said


def test_the_methods_that_step_are_those_of_maml_meta_sgd_fine_tuning_and_own_groups() -> None:
    personalizers = {METHODS[name].personalizer for name in STEPPING}
    assert personalizers == {"sgd", "meta-sgd", "own"}
    for name in METHODS.keys() - STEPPING:
        method = METHODS[name]
        as_it_is = method.personalizer == "sgd" and own_steps(method, method.hyper())[1] == 0
        assert as_it_is or trains(method) or method.personalizer in ("proto", "gp", "knn"), name


@pytest.mark.parametrize("name", sorted(STEPPING))
@pytest.mark.slow
def test_a_stepping_method_is_exported_with_what_moves_its_rates_and_what_stays_on_a_device(
    monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    method = METHODS[name]
    graph, asked, said = made_of(monkeypatch, name)
    model = method.moving if method.personalizer == "own" else (*method.shared, *method.personal)
    assert asked == [(tuple(g for g in MODEL_GROUPS if g in model), method.personalizer == "meta-sgd")]
    assert graph.adapt
    kept = trees.only(models.initial(LAYOUT, 1), method.personal)
    assert graph.first.keys() == kept.keys()
    for group, named in kept.items():
        for key, array in named.items():
            np.testing.assert_array_equal(graph.first[group][key], array)
    assert len(said) == 1


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(METHODS.keys() - STEPPING))
def test_a_method_that_does_not_step_has_no_such_graph(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    graph, asked, said = made_of(monkeypatch, name)
    assert (graph.adapt, asked) == (b"", [])
    trained = "makes a device's model by training in rounds"
    assert [trained in line for line in said] == ([True] if trains(METHODS[name]) else [])


def test_one_model_for_all_steps_where_it_is_told_to(monkeypatch: pytest.MonkeyPatch) -> None:
    assert made_of(monkeypatch, "fedavg", finetune_steps=3)[0].adapt


def test_where_the_whole_does_not_become_a_graph_the_head_alone_steps_and_that_is_reported(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    graph, asked, said = made_of(monkeypatch, "pfldyn-maml", (MODEL_GROUPS,))
    assert [groups for groups, _ in asked] == [MODEL_GROUPS, ("head",)]
    assert graph.adapt
    assert "no steps of body and head" in said
    assert said[-1] == "a device without torch adapts only the head; pfldyn-maml adapts body and head"


@pytest.mark.parametrize(
    ("name", "refused", "last"),
    [
        ("pfldyn-maml", (MODEL_GROUPS, ("head",)), "answers with the fleet's model as it is, not personalized"),
        ("lg-fedavg", (("body",),), "cannot answer"),
        ("local", (MODEL_GROUPS,), "cannot answer"),
    ],
)
def test_where_nothing_becomes_a_graph_it_is_reported_what_a_device_does_then(
    monkeypatch: pytest.MonkeyPatch, name: str, refused: tuple[tuple[str, ...], ...], last: str
) -> None:
    graph, asked, said = made_of(monkeypatch, name, refused)
    assert tuple(groups for groups, _ in asked) == refused
    assert (graph.adapt, graph.first) == (b"", {})
    assert said[-1] == f"a device without torch {last}"


def test_what_a_device_would_keep_must_fit_in_the_bundle(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(method_steps, "MAX_FIRST_BYTES", 4 * LAYOUT.parameters(("head",)) - 1)
    graph, asked, said = made_of(monkeypatch, "fedper")
    assert (graph.adapt, asked) == (b"", [])
    assert said == ["the personal groups of fedper are over 0 MiB: a device without torch cannot answer"]


@pytest.mark.slow
def test_the_first_bundle_of_a_fleet_holds_the_steps_of_its_method_and_says_what_it_took() -> None:
    method, said = METHODS["fedper"], list[str]()
    data, weights = first(
        "mlp", LINEAR.input, LINEAR.classes, {"hidden": [4]}, head=True, seed=2, method=method, hyper=method.hyper(),
        say=said.append,
    )  # fmt: skip
    graph = graph_bundle.unpack(data)
    assert graph.info.adapt is not None
    assert (graph.info.adapt.groups, graph.info.adapt.rates) == (("head",), False)
    initial = graph_bundle.weights_from_bytes(weights, graph.layout, ("body", "head"))
    for name, array in initial["head"].items():
        np.testing.assert_array_equal(graph.first["head"][name], array)
    assert said[0] == "exporting mlp: embed, predict …"
    assert said[-1].startswith("made and checked in ")


@pytest.mark.parametrize("groups", [MODEL_GROUPS, ("head",)])
@pytest.mark.parametrize("rates", [False, True])
def test_steps_take_of_a_served_model_what_their_graph_has(groups: tuple[str, ...], rates: bool) -> None:
    graph = exported()
    stepping = replace(graph, info=replace(graph.info, adapt=AdaptInfo(groups, rates, 0.1)))
    served = LAYOUT.extended(("rates",), MODEL_GROUPS).seeded(1)
    wanted = stepping.adapt_weights(0)
    inputs = stepping.adapt_inputs(served)
    assert {g: list(named) for g, named in inputs.items()} == {g: list(n) for g, n in wanted.items()}
    kept = replace(stepping, first=trees.only(served, ("head",)))
    shared = {group: named for group, named in served.items() if group != "head"}
    np.testing.assert_array_equal(kept.adapt_inputs(shared)["head"]["head.bias"], served["head"]["head.bias"])
    for missing in ("body", "rates")[: 1 + rates]:
        with pytest.raises(CodecError):
            stepping.adapt_inputs({group: named for group, named in served.items() if group != missing})


def test_first_values_that_are_no_whole_group_are_refused() -> None:
    graph = exported()
    own = trees.only(models.initial(LAYOUT, 0), ("head",))
    wrong = {
        "half": {"head": dict(list(own["head"].items())[:1])},
        "not finite": trees.apply(lambda a: a * np.nan, own),
        "of no group": {"tail": own["head"]},
    }
    whole = Graph(graph.layout, graph.graphs, graph.golden, graph.info, b"", own)
    assert graph_bundle.unpack(graph_bundle.pack(whole)).first.keys() == {"head"}
    for first_values in wrong.values():
        torn = Graph(graph.layout, graph.graphs, graph.golden, graph.info, b"", first_values)
        with pytest.raises(BundleError, match="initial values"):
            graph_bundle.unpack(graph_bundle.pack(torn))


# Every family ---------------------------------------------------------------------------------------------------------

@pytest.mark.slow
def test_the_steps_of_a_whole_lenet_pass_the_gate(monkeypatch: pytest.MonkeyPatch) -> None:
    """test_adapt_graph tests the other families; a record holds all of them with every method."""
    monkeypatch.setattr(adapt_graph, "PASS_BYTES", 20_000)
    options = {"channels": [2, 3], "hidden": [6, 5]}
    layout = models.describe("lenet-lim", InputSpec((1, 8, 8)), ("a", "b", "c"), options)
    graph, method, said = export_graph(layout, kinds=("predict",), seed=3), METHODS["pfldyn-maml"], list[str]()
    made = with_steps(graph, method, method.hyper(), models.initial(layout, 0), said.append)
    assert made.info.adapt is not None
    assert made.info.adapt.groups == MODEL_GROUPS
    assert said == ["exporting its steps (body, head), and comparing them with torch's …"]


@pytest.mark.slow
def test_a_recurrent_family_steps_its_head_alone_or_says_that_it_has_no_answers() -> None:
    options = {"width": 5, "layers": 1}
    layout = models.describe("char-lstm", InputSpec((4,), "int64"), ("a", "b", "c"), options)
    graph, initial = export_graph(layout, kinds=("embed", "predict"), seed=3), models.initial(layout, 0)
    lines = list[str]()
    maml, own = METHODS["pfldyn-maml"], METHODS["lg-fedavg"]
    made = with_steps(graph, maml, maml.hyper(), initial, lines.append)
    assert made.info.adapt is not None
    assert made.info.adapt.groups == ("head",)
    assert lines[1] == "the model 'char-lstm' has recurrent layers (LSTM), whose steps cannot be exported"
    assert lines[-1] == "a device without torch adapts only the head; pfldyn-maml adapts body and head"
    lines.clear()
    assert with_steps(graph, own, own.hyper(), initial, lines.append).adapt == b""
    assert lines[-1] == "a device without torch cannot answer"


def recorded() -> dict[str, Any]:
    families: dict[str, Any] = json.loads((ROOT / "benchmarks" / "on_device" / "exports.json").read_text())["families"]
    return families


def test_the_record_of_every_method_on_every_family_is_complete() -> None:
    families = recorded()
    assert families.keys() == FAMILIES.keys()
    for name, family in families.items():
        assert family["methods"].keys() == PRODUCT.keys(), name


@pytest.mark.parametrize("family", FAMILIES)
def test_on_every_family_a_method_has_its_graph_or_it_is_reported_why_not(family: str) -> None:
    for name, found in recorded()[family]["methods"].items():
        method = METHODS[name]
        how = steps_of(method, method.hyper())
        assert set(found["graphs"]) == {*method.graphs, *(["adapt"] if found["steps"] else [])}, name
        if how is None:
            assert (found["steps"], bool(found["said"])) == ([], trains(method)), name
        elif tuple(found["steps"]) == how.groups:
            assert (found["said"], found["rates"]) == ([], how.rates), name
        else:
            assert found["steps"] in ([], ["head"]), name
            assert any("without torch" in line for line in found["said"]), name
