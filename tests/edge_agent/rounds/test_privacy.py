"""Personalization never leaves a device: everything that an agent sends is read, and compared with what it has on disk.

A secret is a vector: a sample, a class mean, or the difference of the device's own weights from the fleet's. It is
found where something that was sent has its direction, within an angle larger than rounding to eight bits makes; so
scaling, a codec or another dtype does not hide it.
"""

from __future__ import annotations

import base64
import contextlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.lib.stride_tricks import sliding_window_view

from cloud_server.choices import method_catalogue
from edge_agent.compute.onnx_session import open_kind
from edge_agent.device.state import read_state
from edge_agent.http.http_messages import Head, Request
from edge_agent.http.inference_protocol import InferenceProtocol
from edge_agent.http.serve import ServedModel
from edge_agent.inference import relearn
from edge_agent.rounds.agent import Agent
from fleet_core.algorithms.methods.registry import METHODS, PRODUCT
from fleet_core.base import storage, trees
from fleet_core.base.compression import compress, decompress
from fleet_core.base.errors import FleetError
from fleet_core.base.trees import Params
from fleet_core.codecs import safetensors_payload
from fleet_core.model import payloads
from fleet_core.model.layout import Layout
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import Question
from fleet_core.protocol.round_messages import WHOLE, UploadManifest, whole_update
from tests.support.inprocess import CLASSES, World, config_text, toy, world
from tests.support.stand_ins import FakeDevice
from tests.support.world_checks import finished

pytestmark = pytest.mark.slow

Array = np.ndarray[Any, Any]

ANGLE = 0.02
TAUGHT, ASKED = 12, 20
LEAST = 6  # numbers that a secret has; the direction of fewer is not telling


# What is sent ---------------------------------------------------------------------------------------------------------


@dataclass
class Wire:
    """Everything that one agent lets out: what it publishes, its will, its log, and its HTTP server's answers to
    anyone; and the models from which its updates were trained."""

    sent: list[tuple[str, bytes]] = field(default_factory=list)
    bases: dict[str, Params] = field(default_factory=dict)

    def tap(self, agent: Agent) -> None:
        link: Any = agent.link  # that of these tests, which shows its will
        publish, will = link.publish, link.will
        self.sent.append((will.topic, will.payload))

        def listening(topic: str, payload: bytes, **how: Any) -> None:
            self.sent.append((topic, payload))
            if "/up/" in topic:
                held = agent.home.weights("model")
                if held is not None:
                    self.bases[held.model] = held.params
            publish(topic, payload, **how)

        link.publish = listening

    def ask(self, agent: Agent, x: Array) -> None:
        """Request everything that the agent's HTTP server offers, including labelled samples."""
        protocol = InferenceProtocol(ServedModel("t", agent.service))
        tensors = [{"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.tolist()}]
        label = {"name": "label", "datatype": "BYTES", "shape": [len(x)], "data": [CLASSES[0]] * len(x)}
        asked: list[tuple[str, str, Any]] = [
            *(("GET", path, None) for path in ("/v2", "/v2/health/ready", "/v2/models/t", "/v2/models/none")),
            ("POST", "/v2/models/t/infer", {"inputs": tensors}),
            ("POST", "/v2/models/t/infer", {"inputs": tensors, "parameters": {"binary_data_output": True}}),
            ("POST", "/v2/models/t/samples", {"inputs": [*tensors, label]}),
            ("POST", "/v2/models/t/samples", {"inputs": tensors}),
        ]
        for verb, path, said in asked:
            body = b"" if said is None else json.dumps(said).encode()
            response = protocol.answer(Request(Head(verb, path, {"content-length": str(len(body))}), body))
            self.sent.append((f"http {verb} {path} {response.status}", response.body))

    def arrays(self, w: World) -> Iterator[Array]:
        """All numbers that can be read out of what was sent, as flat arrays."""
        for topic, payload in self.sent:
            yield from numbers_in(topic.encode())
            yield from numbers_in(payload)
        for base, update in self.updates(w):
            for name, array in storage.flatten(update).items():
                yield array.ravel()
                if name in storage.flatten(base):
                    yield (storage.flatten(base)[name] + array).ravel()

    def updates(self, w: World) -> Iterator[tuple[Params, Params]]:
        """(the model that it was trained from, the update) of every upload, decoded as the aggregator does."""
        parts: dict[str, dict[int, bytes]] = {}
        manifests: dict[str, UploadManifest] = {}
        for topic, payload in self.sent:
            if "/up/" in topic:
                _, _, round_part = topic.partition("/up/")
                number, _, part = round_part.partition("/")
                if part == "m":
                    manifests[number] = messages.decode(UploadManifest, payload)
                elif part == WHOLE:
                    manifests[number], data = whole_update(payload)
                    parts[number] = {0: data}
                else:
                    parts.setdefault(number, {})[int(part)] = payload
        assert manifests.keys() == parts.keys()
        for number, manifest in manifests.items():
            data = b"".join(parts[number][k] for k in sorted(parts[number]))
            layout: Layout = w.server.layout.extended(w.server.method.down, w.server.method.shared)
            update = payloads.decode(manifest.codec, data, layout, w.server.method.shared)
            yield self.bases.get(manifest.base, {}), update


def numbers_in(data: bytes, depth: int = 0) -> Iterator[Array]:
    """Everything that may be numbers in ``data``: words of every size at every offset, JSON and base64 in it,
    safetensors, and compressed data."""
    for dtype in ("<f2", "<f4", "<f8", "<i1", "u1", "<i4", "<i8"):
        size = np.dtype(dtype).itemsize
        for offset in range(min(size, len(data))):
            whole = (len(data) - offset) // size * size
            yield np.frombuffer(data[offset : offset + whole], dtype)
    if depth > 3:
        return
    for inner in _inside(data):
        if isinstance(inner, bytes):
            yield from numbers_in(inner, depth + 1)
        else:
            yield inner


def _inside(data: bytes) -> Iterator[bytes | Array]:
    with contextlib.suppress(FleetError):
        frame = decompress(data, 1 << 24)
        yield frame
        yield safetensors_payload._words(frame)
    with contextlib.suppress(FleetError):
        arrays, _ = storage.unpack(data)
        yield from (array.ravel() for array in arrays.values())
    with contextlib.suppress(ValueError):
        yield from _in_json(json.loads(data))


def _in_json(value: Any) -> Iterator[bytes | Array]:
    """The numbers of a JSON value in order, and what its texts hold."""
    numbers: list[float] = []

    def visit(inner: Any) -> Iterator[bytes]:
        if isinstance(inner, str):
            for decode in (base64.b64decode, bytes.fromhex):
                try:
                    yield decode(inner)
                except ValueError:
                    continue
        elif isinstance(inner, int | float):
            numbers.append(float(inner))
        elif isinstance(inner, dict | list):
            for each in inner.values() if isinstance(inner, dict) else inner:
                yield from visit(each)

    yield from visit(value)
    yield np.array(numbers)


# What is secret -------------------------------------------------------------------------------------------------------


def samples_of(agent: Agent) -> Array:
    """Raw samples [n, D] in the device's files: its recording, and what it was taught."""
    found = []
    for name in ("samples.npz", "added.npz"):
        with np.load(agent.home.folder / name) as file:
            found.append(np.asarray(file["x"], np.float64))
    return np.concatenate(found)


def personal_files(agent: Agent) -> list[dict[str, Array]]:
    """The files that make the device's answers its own."""
    paths = sorted(agent.home.folder.rglob("personal.safetensors"))
    return [storage.unpack(path.read_bytes())[0] for path in paths]


def served(agent: Agent) -> dict[str, Array]:
    """The served model, flat."""
    paths = sorted(agent.home.folder.rglob("serve.safetensors"))
    found = max((storage.unpack(path.read_bytes()) for path in paths), key=lambda read: int(read[1]["round"]))
    return found[0]


def own_weights(agent: Agent) -> list[Array]:
    """Arrays of the device's own weights: unshared ones as they are, others minus the fleet's."""
    fleet, found = served(agent), []
    for arrays in [*personal_files(agent), *_kept_in_training(agent)]:
        for name, array in arrays.items():
            if "/" not in name:
                continue  # not of the model: see ``of_its_own``
            own = array - fleet[name] if name in fleet else array
            if own.size >= LEAST and np.abs(own).max() > 0:
                found.append(own.ravel().astype(np.float64))
    return found


def _kept_in_training(agent: Agent) -> Iterator[dict[str, Array]]:
    """The groups that a method keeps on the device."""
    for path in agent.home.folder.glob("methods/*/state.safetensors"):
        yield storage.flatten(read_state(path).get("personal", {}))


# Found ----------------------------------------------------------------------------------------------------------------


def found(sent: list[Array], secrets: Array | list[Array]) -> int:
    """How many of the ``secrets`` (vectors) have the direction of a part of something ``sent``."""
    by_length: dict[int, list[Array]] = {}
    for secret in secrets:
        by_length.setdefault(len(secret), []).append(np.asarray(secret, np.float64))
    return sum(_seen(sent, _directions(np.stack(group))) for group in by_length.values())


def _seen(sent: list[Array], secrets_ML: Array) -> int:
    length, seen = secrets_ML.shape[1], np.zeros(len(secrets_ML), bool)
    for array in sent:
        if len(array) >= length:
            with np.errstate(over="ignore", invalid="ignore"):
                windows_WL = _directions(sliding_window_view(_finite(array), length))
            seen |= (windows_WL @ secrets_ML.T > np.cos(ANGLE)).any(0)
    return int(seen.sum())


def _finite(array: Array) -> Array:
    wide = array.astype(np.float64)
    return np.where(np.abs(wide) < 1e100, wide, 0.0)


def _directions(rows: Array) -> Array:
    norms = np.sqrt(np.square(rows).sum(1, keepdims=True))
    return np.divide(rows, norms, out=np.zeros(rows.shape), where=norms > 1e-30)


def fleet_of(folder: Path, method: str, **options: Any) -> tuple[World, Wire]:
    """A fleet at the end of its rounds, in which d0 was also taught samples and queried by a stranger, and what d0 has
    sent."""
    text = config_text(method, rounds=3, devices=2, **options).replace("hidden = [6]", "hidden = [12]")
    w, wire = world(folder, text), Wire()
    w.start_server()
    w.start_agent("d1", toy(1))
    wire.tap(w.start_agent("d0", toy(0)))
    assert w.pump(lambda: finished(w))
    taught = toy(7, TAUGHT)
    relearn.learn(w.agents["d0"].service, taught.x, [CLASSES[k] for k in taught.y])
    x = np.random.default_rng(5).normal(size=(ASKED, 8)).astype(np.float32)
    asker = FakeDevice(w, "asker")
    question = Question(x.shape, "float32", base64.b64encode(x.tobytes()).decode())
    asker.link.publish(topics.question(w.name, "d0", "q"), messages.encode(question))
    w.agents["d0"].step(0)
    wire.ask(w.agents["d0"], x)
    w.agents["d0"].close()
    kinds = {topic.split("/")[4] for topic, _ in wire.sent if not topic.startswith("http")}
    assert kinds == {"st", "rep", "up", "an"}, "presence, reports, updates and answers were all seen"
    answered = {topic.split()[-1] for topic, _ in wire.sent if topic.startswith("http")}
    assert answered == {"200", "400", "404"}, "answers and refusals over HTTP as well"
    wire.sent += [("log", line.encode()) for line in w.lines if line.startswith("d0: ")]
    return w, wire


def of_its_own(agent: Agent) -> list[Array]:
    """Everything that makes the device's answers its own: class means, a head and embedded samples; weights minus the
    fleet's."""
    rows = [
        row for arrays in personal_files(agent) for name in ("prototypes", "weight", "z")
        for row in arrays.get(name, np.empty((0, LEAST))) if np.abs(row).max() > 0
    ]
    return [*rows, *own_weights(agent)]


# The tests ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("link", ["", 'up = "fp32"'])
def test_no_prototype_and_no_sample_leaves_a_device_that_answers_by_class_means(tmp_path: Path, link: str) -> None:
    w, wire = fleet_of(tmp_path, "pfldyn-proto", link=link)
    agent, sent = w.agents["d0"], list(wire.arrays(w))
    prototypes = [row for arrays in personal_files(agent) for row in arrays["prototypes"]]
    assert len(prototypes) >= 3
    assert found(sent, prototypes) == 0
    assert found(sent, samples_of(agent)) == 0
    w.server.close()


@pytest.mark.parametrize("method", ["per-fedavg-fo", "fedrep"])
def test_no_personal_weight_and_no_sample_leaves_a_device_with_weights_of_its_own(tmp_path: Path, method: str) -> None:
    """With MAML the adapted weights, with FedRep the head."""
    w, wire = fleet_of(tmp_path, method)
    agent, sent = w.agents["d0"], list(wire.arrays(w))
    own = own_weights(agent)
    assert sum(map(len, own)) >= 36, "at least a head"
    against = [array for base, update in wire.updates(w) for array in less_served(agent, base, update)]
    assert found([*sent, *against], own) == 0
    assert found(sent, samples_of(agent)) == 0
    w.server.close()


BY_PERSONALIZER = {method.personalizer: method.name for method in reversed(PRODUCT.values()) if method.received}
MORE = [name for kind, name in BY_PERSONALIZER.items() if kind not in ("proto", "sgd", "own", "fleet-proto")]
"""A method of each kind of personalization that the other tests here do not have."""


@pytest.mark.parametrize("method", MORE)
def test_nothing_of_its_own_leaves_a_device_whatever_makes_its_answers_its_own(tmp_path: Path, method: str) -> None:
    w, wire = fleet_of(tmp_path, method)
    agent = w.agents["d0"]
    own = of_its_own(agent)
    assert len(own) >= 3
    against = [array for base, update in wire.updates(w) for array in less_served(agent, base, update)]
    sent = [*wire.arrays(w), *against]
    assert found(sent, own) == 0
    assert found(sent, samples_of(agent)) == 0
    w.server.close()


def less_served(agent: Agent, base: Params, update: Params) -> Iterator[Array]:
    """A model that was sent, minus the one that answers: the result of adaptation, if the adapted model had been
    sent."""
    fleet, whole = served(agent), storage.flatten(base)
    for name, array in storage.flatten(update).items():
        if name in fleet and name in whole:
            yield (whole[name] + array - fleet[name]).ravel()


def test_the_class_means_that_fedproto_shares_by_its_design_are_found_and_said(tmp_path: Path) -> None:
    w, wire = fleet_of(tmp_path, "fedproto")
    agent, sent = w.agents["d0"], list(wire.arrays(w))
    (kept,) = _kept_in_training(agent)
    body = storage.unflatten({name: array for name, array in kept.items() if name.startswith("body/")})
    own = agent.service.local().own()
    x, y = own.x[: -TAUGHT - ASKED], own.y[: -TAUGHT - ASKED]  # it was taught the others after its last round
    z = open_kind(agent.service.graph, "embed", agent.service.layout.ordered(body)).run(x)
    means = [z[y == k].mean(0) for k in range(3)]
    assert found(sent, means) == 3
    assert found(sent, samples_of(agent)) == 0
    assert "prototypes" in method_catalogue.transfer_text(METHODS["fedproto"], "up")
    (said,) = [line for line in w.fleet.remarks() if "class means" in line]
    assert "which reveal something about its samples" in said, "by 'metafleet init' and 'metafleet server start'"
    w.server.close()


@pytest.fixture(scope="module")
def secret() -> Array:
    return np.random.default_rng(1).normal(size=12).astype(np.float32)


HIDING: Mapping[str, Any] = {
    "raw": lambda v: b"abc" + v.tobytes(),
    "double": lambda v: v.astype(np.float64).tobytes(),
    "half": lambda v: b"a" + v.astype(np.float16).tobytes(),
    "json": lambda v: json.dumps({"more": {"a": "b", "v": [round(float(p), 4) for p in v]}}).encode(),
    "base64 in json": lambda v: json.dumps({"v": base64.b64encode(v.tobytes()).decode()}).encode(),
    "hex in json": lambda v: json.dumps([v.tobytes().hex()]).encode(),
    "safetensors": lambda v: storage.pack({"a": np.zeros(3, np.float32), "v": v * 1000}),
    "compressed": lambda v: compress(storage.pack({"v": v})),
    "fp32": lambda v: payloads.encode("fp32", {"body": {"v": -v / 3, "w": v[::-1]}}),
    "int8": lambda v: payloads.encode("int8", {"body": {"v": np.concatenate([v, v[:5]])}}),
}


@pytest.mark.parametrize("way", HIDING)
def test_a_secret_would_be_found_in_whatever_form_it_was_sent(way: str, secret: Array) -> None:
    sign = -1 if way == "fp32" else 1
    other = np.random.default_rng(2).normal(size=12)
    sent = list(numbers_in(HIDING[way](secret)))
    assert found(sent, np.stack([sign * secret, other])) == 1


def test_an_agent_that_sent_its_adapted_weights_as_its_update_would_be_found(tmp_path: Path) -> None:
    """The update of the last round is replaced by what MAML made of the served model."""
    w, wire = fleet_of(tmp_path, "per-fedavg-fo", link='up = "fp32"')
    agent = w.agents["d0"]
    (base, update) = list(wire.updates(w))[-1]
    (arrays,) = [storage.unflatten(found) for found in personal_files(agent)[-1:]]
    adapted = trees.apply(lambda own, held: own - held, trees.only(arrays, tuple(update)), base)
    against = list(less_served(agent, base, adapted))
    assert found(against, own_weights(agent)) == len(own_weights(agent))
    w.server.close()
