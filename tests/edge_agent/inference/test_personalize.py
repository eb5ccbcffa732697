"""The device's side without torch: sessions from graph and weights, prototypes, answers."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.compute import onnx_session as sessions
from edge_agent.inference.predictor import Predictor
from export.graph import export_graph, samples
from fleet_core.base import storage, trees
from fleet_core.base.errors import BundleError, CodecError, DataError, StateError
from fleet_core.learning import local_training, losses, models
from fleet_core.model import graph_bundle
from fleet_core.model.layout import InputSpec, Layout
from fleet_core.personalization.nearest import Prototypes, softmax
from tests.support.paths import ROOT

SUPPORT, QUERY = 90, 2 * sessions.BATCH + 5


@pytest.fixture(scope="module")
def layout() -> Layout:
    return models.describe("cnn1d", InputSpec((3, 128), mean=(0.0, 1.0, 1.0)), ("N", "S", "V"), {})


@pytest.fixture(scope="module")
def graph(layout: Layout) -> graph_bundle.Graph:
    return graph_bundle.unpack(graph_bundle.pack(export_graph(layout, kinds=("embed", "predict"))))


@pytest.fixture(scope="module")
def network(layout: Layout) -> models.Network:
    return models.build(layout)


@pytest.fixture(scope="module")
def weights(layout: Layout) -> Any:
    return trees.scale(models.initial(layout, 1), 2.0)  # as far from uncertain as a trained model


def float32(values: Any) -> np.ndarray[Any, Any]:
    return np.asarray(values, np.float32)


# Sessions


@pytest.mark.slow
def test_a_session_gives_torchs_embedding_over_several_batches(
    graph: graph_bundle.Graph, network: models.Network, weights: Any
) -> None:
    x = samples(graph.layout.input, QUERY, 1)
    found = sessions.open_kind(graph, "embed", weights).run(x)
    assert found.shape == (QUERY, 64)
    np.testing.assert_allclose(found, local_training.embed(network, weights, x), atol=1e-4, rtol=1e-5)


def test_a_session_keeps_its_own_weights(graph: graph_bundle.Graph, weights: Any) -> None:
    mine = trees.apply(lambda a: a.copy(), weights)
    x = samples(graph.layout.input, 3, 1)
    session = sessions.open_kind(graph, "predict", mine)
    before = session.run(x)
    for named in mine.values():
        for array in named.values():
            array[...] = 7
    assert np.array_equal(session.run(x), before)
    assert not np.array_equal(sessions.open_kind(graph, "predict", mine).run(x), before)


def test_weights_in_a_mapped_file_are_not_copied_and_those_in_memory_are(weights: Any, tmp_path: Path) -> None:
    storage.write_arrays(tmp_path / "w", storage.flatten(weights))
    mapped, _ = storage.map_file(tmp_path / "w", limit=1 << 20)
    for name, array in storage.flatten(weights).items():
        assert sessions._immutable(mapped[name]) is mapped[name]
        frozen = array.view()
        frozen.flags.writeable = False  # its owner still writes
        wide = array.astype(np.float64)
        assert not any(np.shares_memory(sessions._immutable(a), a) for a in (array, frozen, wide))


def test_an_output_outlives_the_session(graph: graph_bundle.Graph, weights: Any) -> None:
    x = samples(graph.layout.input, 2, 1)
    session = sessions.open_kind(graph, "embed", weights)
    first = session.run(x)
    kept = first.copy()
    session.run(x[::-1])
    del session
    assert np.array_equal(first, kept)


def test_weights_that_the_graph_does_not_take_are_refused(graph: graph_bundle.Graph, weights: Any) -> None:
    body = trees.only(weights, ("body",))
    with pytest.raises(BundleError, match="cannot be opened"):
        sessions.open_session(graph.graphs["predict"], body)
    with pytest.raises(BundleError, match="cannot be opened"):
        sessions.open_session(graph.graphs["embed"], weights)
    with pytest.raises(BundleError, match="cannot be opened"):
        sessions.open_session(b"no graph", body)
    with pytest.raises(CodecError):
        sessions.open_kind(graph, "predict", body)
    with pytest.raises(BundleError, match="no graph 'predict'"):
        sessions.open_kind(replace(graph, graphs={"embed": graph.graphs["embed"]}), "predict", weights)


@pytest.mark.parametrize(
    "x",
    [
        np.zeros((2, 3, 127), np.float32),
        np.zeros((3, 128), np.float32),
        np.zeros((2, 3, 128), np.float64),
        np.zeros((0, 3, 128), np.float32),
        np.full((1, 3, 128), np.nan, np.float32),
    ],
)
def test_input_of_another_shape_is_refused(graph: graph_bundle.Graph, weights: Any, x: np.ndarray[Any, Any]) -> None:
    with pytest.raises(DataError):
        sessions.open_kind(graph, "embed", weights).run(x)


def test_golden_outputs_are_met_and_a_bundle_that_misses_them_is_refused(graph: graph_bundle.Graph) -> None:
    sessions.check_golden(graph)
    off = {**graph.golden, "predict": graph.golden["predict"] + 0.01}
    for wrong in (
        replace(graph, golden=off),
        replace(graph, info=replace(graph.info, seed=1)),
        replace(graph, graphs={**graph.graphs, "predict": b"no graph"}),
        replace(graph, graphs={"embed": graph.graphs["predict"]}),
    ):
        with pytest.raises(BundleError):
            sessions.check_golden(wrong)


# Prototypes


def test_the_running_mean_is_the_mean() -> None:
    rng = np.random.default_rng(0)
    z, y = rng.standard_normal((200, 5)).astype(np.float32) + 3, rng.integers(0, 3, 200)
    at_once = Prototypes.from_support(lambda x: x, z, y, 3)
    one_by_one = Prototypes.empty(3, 5)
    for i in range(len(y)):
        one_by_one = one_by_one.add(z[i : i + 1], y[i : i + 1])
    for label in range(3):
        np.testing.assert_allclose(at_once.prototypes[label], z[y == label].mean(0), rtol=1e-6)
    np.testing.assert_allclose(one_by_one.prototypes, at_once.prototypes, rtol=2e-6)
    np.testing.assert_array_equal(one_by_one.counts, np.bincount(y))


def test_a_class_without_samples_is_never_answered() -> None:
    found = Prototypes.empty(3, 2).add(float32([[5, 5], [9, 9]]), np.array([0, 2]))
    p = found.probabilities(float32([[0, 0], [1e4, -1e4]]))  # the origin is where class 1 would be
    assert (p[:, 1] == 0).all()
    np.testing.assert_allclose(p.sum(1), 1)
    more = found.add(float32([[0, 0]]), np.array([1]))
    assert more.probabilities(float32([[0, 0]])).argmax(1) == [1]


def test_without_any_sample_there_is_no_answer() -> None:
    with pytest.raises(StateError, match="no labelled sample"):
        Prototypes.empty(3, 2).probabilities(np.zeros((1, 2), np.float32))


@pytest.mark.parametrize("label", [-1, 3])
def test_a_label_without_a_class_is_refused(label: int) -> None:
    with pytest.raises(DataError):
        Prototypes.empty(3, 2).add(np.zeros((1, 2), np.float32), np.array([label]))


@settings(max_examples=50, deadline=None)
@given(st.lists(st.floats(-(2.0**126), 2.0**126, width=32), min_size=4, max_size=4))
def test_probabilities_are_probabilities_at_any_distance(values: list[float]) -> None:
    z = float32(values).reshape(2, 2)
    found = Prototypes.empty(2, 2).add(float32([[0, 1], [1, 0]]), np.array([0, 1]))
    p = found.probabilities(z)
    assert ((p >= 0) & (p <= 1)).all()
    np.testing.assert_allclose(p.sum(1), 1, rtol=1e-5)


def test_softmax_does_not_overflow() -> None:
    p = softmax(float32([[1e5, 1e5, -np.inf], [-1e5, -1e5 + 1, -1e5]]))
    np.testing.assert_allclose(p, [[0.5, 0.5, 0], np.exp([0, 1, 0]) / np.exp([0, 1, 0]).sum()], rtol=1e-5)


def test_prototypes_survive_the_disk_and_only_their_owner_reads_them(tmp_path: Path) -> None:
    path = tmp_path / "state" / "prototypes.safetensors"
    kept = Prototypes.empty(3, 2, weights="round 30").add(float32([[5, 5], [9, 8]]), np.array([0, 2]))
    kept.save(path)
    again = Prototypes.load(path)
    np.testing.assert_array_equal(again.prototypes, kept.prototypes)
    np.testing.assert_array_equal(again.counts, kept.counts)
    assert again.weights == "round 30"
    assert path.stat().st_mode & 0o777 == 0o600
    assert [p.name for p in path.parent.iterdir()] == [path.name]


@pytest.mark.parametrize(
    "arrays",
    [
        {},
        {"prototypes": np.zeros((3, 2), np.float32)},
        {"prototypes": np.zeros((3, 2), np.float32), "counts": np.zeros(2, np.int64)},
        {"prototypes": np.zeros((3, 2), np.float64), "counts": np.zeros(3, np.int64)},
        {"prototypes": np.zeros((3, 2), np.float32), "counts": np.zeros(3, np.float32)},
        {"prototypes": np.zeros((3, 2), np.float32), "counts": np.full(3, -1)},
        {"prototypes": np.full((3, 2), np.nan, np.float32), "counts": np.ones(3, np.int64)},
    ],
)
def test_a_file_without_sound_prototypes_is_refused(tmp_path: Path, arrays: dict[str, Any]) -> None:
    path = tmp_path / "prototypes.safetensors"
    path.write_bytes(storage.pack(arrays))
    with pytest.raises(StateError):
        Prototypes.load(path)
    with pytest.raises(StateError):
        Prototypes.load(tmp_path / "absent")


# Answers


def test_prototype_answers_are_torchs(graph: graph_bundle.Graph, network: models.Network, weights: Any) -> None:
    x, y = samples(graph.layout.input, SUPPORT + QUERY, 2), np.arange(SUPPORT) % 2  # class 2 has no support
    embed = sessions.open_kind(graph, "embed", weights).run
    prototypes = Prototypes.from_support(embed, x[:SUPPORT], y, 3)
    found = Predictor.proto(graph, weights, prototypes).probabilities(x[SUPPORT:])
    z = torch.tensor(local_training.embed(network, weights, x))
    scores = losses.proto_logits(z[SUPPORT:], *losses.prototypes(z[:SUPPORT], torch.tensor(y), 3))
    np.testing.assert_allclose(found, torch.softmax(scores, 1).numpy(), atol=1e-5)
    assert np.ptp(found[:, 0]) > 0.1, "answers that differ, else their parity says nothing"


def test_head_answers_are_torchs(graph: graph_bundle.Graph, network: models.Network, weights: Any) -> None:
    x = samples(graph.layout.input, QUERY, 3)
    predictor = Predictor.head(graph, weights)
    logits = torch.tensor(local_training.predict_logits(network, weights, x))
    found = predictor.probabilities(x)
    np.testing.assert_allclose(found, torch.softmax(logits, 1).numpy(), atol=1e-5)
    np.testing.assert_array_equal(predictor.labels(x), found.argmax(1))
    assert np.ptp(found[:, 0]) > 0.1


def test_the_answering_process_loads_no_torch(graph: graph_bundle.Graph, weights: Any, tmp_path: Path) -> None:
    (tmp_path / "graph").write_bytes(graph_bundle.pack(graph))
    (tmp_path / "weights").write_bytes(graph_bundle.weights_bytes(weights))
    program = """
import sys
from pathlib import Path
import numpy as np
from edge_agent.inference import predictor
from edge_agent.compute import onnx_session
from fleet_core.model import graph_bundle
graph = graph_bundle.unpack(Path("graph").read_bytes())
onnx_session.check_golden(graph)
weights = graph_bundle.weights_from_bytes(Path("weights").read_bytes(), graph.layout, ("body", "head"))
x = graph.golden["x"]
embed = onnx_session.open_kind(graph, "embed", weights).run
prototypes = predictor.Prototypes.from_support(embed, x, np.array([0, 1, 2, 2]), 3)
print(predictor.Predictor.proto(graph, weights, prototypes).labels(x[:2]).tolist())
print(sorted({"torch", "onnx", "onnxscript"} & set(sys.modules)))
"""
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=tmp_path, env={"PYTHONPATH": str(ROOT)}, capture_output=True, text=True
    )
    assert (done.stdout, done.stderr, done.returncode) == ("[0, 1]\n[]\n", "", 0)
