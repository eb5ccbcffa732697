"""Answers over HTTP, requested by a third-party client and by plain HTTP, equal those over MQTT and in Python, while
models are swapped and samples are taught."""

from __future__ import annotations

import base64
import contextlib
import http.client
import json
import shutil
import signal
import socket
import ssl
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tritonclient.http as triton
from tritonclient.utils import InferenceServerException

from benchmarks.on_device import asking, swap
from edge_agent import Device
from edge_agent.device.slots import Slots
from edge_agent.device.state import DeviceState, Weights
from edge_agent.http import access, serve
from edge_agent.http.client_limits import Limits
from edge_agent.http.http_messages import Response
from edge_agent.http.http_server import HttpServer
from edge_agent.inference import relearn
from edge_agent.inference.service import Service, service_of
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.errors import ConfigError
from fleet_core.board.device_settings import Identity, Serve, Settings, settings_of
from fleet_core.model import graph_bundle, payloads
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import Answer, Question
from tests.support import homes
from tests.support.inprocess import World, config_text, toy, world
from tests.support.programs import CLASSES, Programs, edge_agent
from tests.support.stand_ins import FakeDevice
from tests.support.waiting import PATIENCE_S
from tests.support.world_checks import finished as fleet_finished

X = np.random.default_rng(0).normal(size=(70, 8)).astype(np.float32)  # more than one batch of the session
CLIENTS = 8


@pytest.fixture
def home(finished: Path, tmp_path: Path) -> Path:
    """A device that was served a model of round 2 and answers from its own prototypes."""
    return Path(shutil.copytree(finished / "d1", tmp_path / "d1"))


@pytest.fixture
def service(home: Path) -> Service:
    return restored(home)


def restored(home: Path) -> Service:
    """The device's service; the models in these tests may be worse than the ones before."""
    settings = settings_of(home)
    found = service_of(home, replace(settings, serve=replace(settings.serve, worse_by=1.0)))
    found.restore()
    return found


@pytest.fixture
def lines() -> list[str]:
    return []


@pytest.fixture
def server(home: Path, service: Service, lines: list[str]) -> Iterator[HttpServer]:
    running = serve.start(home, settings_of(home), service, lines.append)
    yield running
    running.stop()


@pytest.fixture
def client(server: HttpServer) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(f"{server.host}:{server.port}") as made:
        yield made


def said(server: HttpServer, verb: str, path: str, body: bytes | None = None, **headers: str) -> tuple[int, Any]:
    """One request with the standard library."""
    connection = http.client.HTTPConnection(server.host, server.port, timeout=PATIENCE_S)
    try:
        connection.request(verb, path, body, {name.replace("_", "-"): value for name, value in headers.items()})
        response = connection.getresponse()
        return response.status, json.loads(response.read())
    finally:
        connection.close()


def infer(server: HttpServer, x: np.ndarray, name: str = "desk") -> tuple[int, Any]:
    tensor = {"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.tolist()}
    return said(server, "POST", f"/v2/models/{name}/infer", json.dumps({"inputs": [tensor]}).encode())


def tensor_of(x: np.ndarray, binary: bool = True, name: str = "x", datatype: str = "FP32") -> triton.InferInput:
    made = triton.InferInput(name, list(x.shape), datatype)
    made.set_data_from_numpy(x, binary_data=binary)
    return made


def same(result: triton.InferResult, answer: Answer) -> None:
    """Equal in all six digits."""
    wanted = np.array(answer.probabilities, np.float32)
    np.testing.assert_array_equal(result.as_numpy("probabilities"), wanted)
    labels = [label.decode() if isinstance(label, bytes) else label for label in result.as_numpy("label")]
    assert labels == list(answer.labels)
    facts = dict(result.get_response()["parameters"])
    assert 0 <= facts.pop("calibration_error", 0) <= 1, "over HTTP alone"
    assert facts == {"round": answer.round, "model": answer.model, "personalization": answer.personalization,
                     "graph": answer.graph}


# A client of Triton's -------------------------------------------------------------------------------------------------


def test_tritonclient_finds_server_and_model_alive_ready_and_described(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("desk")
    assert client.is_model_ready("desk", "2")
    assert not client.is_model_ready("desk", "3")
    assert not client.is_model_ready("other")
    assert "binary_tensor_data" in client.get_server_metadata()["extensions"]
    model = client.get_model_metadata("desk")
    assert (model["name"], model["versions"], model["classes"]) == ("desk", ["2"], list(CLASSES))
    assert model["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 8]}]
    assert {output["name"] for output in model["outputs"]} >= {"probabilities", "label"}


@pytest.mark.parametrize("count", [1, 5, 70])
@pytest.mark.parametrize("binary_in", [True, False])
@pytest.mark.parametrize("binary_out", [True, False])
def test_tritonclient_gets_the_answers_of_the_python_call(
    client: triton.InferenceServerClient, service: Service, count: int, binary_in: bool, binary_out: bool
) -> None:
    outputs = [triton.InferRequestedOutput(name, binary_data=binary_out) for name in ("probabilities", "label")]
    result = client.infer("desk", [tensor_of(X[:count], binary_in)], outputs=outputs, request_id="42")
    same(result, service.answers(X[:count]))
    assert result.get_response()["id"] == "42"
    same(client.infer("desk", [tensor_of(X[:count], binary_in)], model_version="2"), service.answers(X[:count]))


def test_many_requests_of_one_tritonclient_at_once(server: HttpServer, service: Service) -> None:
    with triton.InferenceServerClient(f"{server.host}:{server.port}", concurrency=4) as client:
        asked = [client.async_infer("desk", [tensor_of(X[k : k + 1])]) for k in range(20)]
        for k, each in enumerate(asked):
            same(each.get_result(), service.answers(X[k : k + 1]))


@pytest.mark.parametrize(("ask", "status", "words"), [
    (lambda c: c.infer("other", [tensor_of(X)]), "404", "no model 'other'"),
    (lambda c: c.infer("desk", [tensor_of(X)], model_version="3"), "404", "no version '3'"),
    (lambda c: c.get_model_metadata("other"), "404", "no model 'other'"),
    (lambda c: c.infer("desk", [tensor_of(X[:, :7])]), "400", "its shape is [70, 7]"),
    (lambda c: c.infer("desk", [tensor_of(X, name="y")]), "400", "named 'y'"),
    (lambda c: c.infer("desk", [tensor_of(X.astype(np.float64), datatype="FP64")]), "400", "expected FP32"),
    (lambda c: c.infer("desk", [tensor_of(X + np.nan)]), "400", "not finite"),
    (lambda c: c.infer("desk", [tensor_of(X)], outputs=[triton.InferRequestedOutput("z")]), "400", "no output 'z'"),
    (lambda c: c.infer("desk", [tensor_of(X)], sequence_id=7), "400", "sequence"),
    (lambda c: c.infer("desk", [tensor_of(X)], request_compression_algorithm="gzip"), "415", "compressed"),
    (lambda c: c.infer("desk", [tensor_of(np.zeros((4097, 8), np.float32))]), "400", "1 to 4096"),
    (lambda c: c.get_model_config("desk"), "404", "nothing at"),
])
def test_tritonclient_receives_the_error(
    client: triton.InferenceServerClient, ask: Callable[[Any], Any], status: str, words: str
) -> None:
    with pytest.raises(InferenceServerException) as caught:
        ask(client)
    assert caught.value.status() == status
    assert words in caught.value.message()
    assert client.is_server_ready()


# Plain HTTP -----------------------------------------------------------------------------------------------------------


def test_plain_http_gets_the_same_answer(server: HttpServer, service: Service) -> None:
    status, found = infer(server, X[:3])
    answer = service.answers(X[:3])
    outputs = {output["name"]: output["data"] for output in found["outputs"]}
    assert (status, found["model_name"], found["model_version"]) == (200, "desk", "2")
    assert outputs["label"] == list(answer.labels)
    assert outputs["probabilities"] == np.array(answer.probabilities).ravel().tolist()


def test_labelled_samples_personalize_at_once(server: HttpServer, service: Service, home: Path) -> None:
    x = np.full((20, 8), -4, np.float32)
    before = service.answers(x[:1])
    labels = np.array(["c"] * 20, dtype=np.object_)
    body, length = triton.InferenceServerClient.generate_request_body(
        [tensor_of(x), tensor_of(labels, name="label", datatype="BYTES")]
    )
    status, facts = said(server, "POST", "/v2/models/desk/samples", body,
                         Inference_Header_Content_Length=str(length))
    assert (status, facts["added"], facts["personalization"]) == (200, 20, "proto")
    _, found = infer(server, x[:1])
    assert found["outputs"][0]["data"][2] > before.probabilities[0][2]
    again = service_of(home, settings_of(home))
    again.restore()
    assert again.answers(x[:1]) == service.answers(x[:1]), "and another process answers so too"


def test_a_late_label_personalizes_at_once(server: HttpServer, service: Service, home: Path) -> None:
    name = Device(home).add(X[0])
    status, listed = said(server, "GET", "/v2/models/desk/unlabelled")
    assert (status, [one["id"] for one in listed]) == (200, [name])
    _, one = said(server, "GET", f"/v2/models/desk/unlabelled/{name}")
    np.testing.assert_array_equal(np.array(one["data"], np.float32), X[0])
    body = json.dumps({"id": name, "label": "b"}).encode()
    assert said(server, "POST", "/v2/models/desk/label", body) == (
        200, {"id": name, "label": "b", "personalization": "proto"})
    assert service.local().added() == 1
    status, found = said(server, "POST", "/v2/models/desk/label", body)
    assert (status, "no unlabelled sample" in found["error"]) == (400, True)


@pytest.mark.parametrize(("label", "x", "words"), [
    ("d", [0.0] * 8, "unknown class 'd'"), ("a", [0.0] * 7, "its shape is [1, 7]"),
])
def test_samples_that_cannot_be_learned_change_nothing(
    server: HttpServer, service: Service, label: str, x: list[float], words: str
) -> None:
    inputs = [{"name": "x", "datatype": "FP32", "shape": [1, len(x)], "data": x},
              {"name": "label", "datatype": "BYTES", "shape": [1], "data": [label]}]
    before = service.answers(X)
    status, found = said(server, "POST", "/v2/models/desk/samples", json.dumps({"inputs": inputs}).encode())
    assert (status, words in found["error"]) == (400, True), found
    assert service.answers(X) == before
    assert not service.local().added_path.exists()


def test_a_new_class_is_learned_if_the_request_allows_it(
    server: HttpServer, client: triton.InferenceServerClient
) -> None:
    x = np.full((6, 8), -9, np.float32)
    inputs = [{"name": "x", "datatype": "FP32", "shape": [6, 8], "data": x.tolist()},
              {"name": "label", "datatype": "BYTES", "shape": [6], "data": ["frost"] * 6}]
    request = {"inputs": inputs, "parameters": {"new_classes": True}}
    status, _ = said(server, "POST", "/v2/models/desk/samples", json.dumps(request).encode())
    assert status == 200
    model, result = client.get_model_metadata("desk"), client.infer("desk", [tensor_of(x[:1])])
    assert model["classes"] == [*CLASSES, "frost"]
    assert model["outputs"][0]["shape"] == [-1, 4]
    assert result.as_numpy("probabilities").shape == (1, 4)
    assert result.as_numpy("label").tolist() == [b"frost"]


def test_samples_of_unknown_classes_are_marked(home: Path, lines: list[str]) -> None:
    with (home / "device.toml").open("a") as file:
        file.write("\n[serve]\nunknown = true\n")
    settings = settings_of(home)
    service = service_of(home, settings)
    service.restore()
    running = serve.start(home, settings, service, lines.append)
    own = service.local().own().x
    x = np.concatenate([own, np.full((1, 8), 500, np.float32)])
    try:
        with triton.InferenceServerClient(f"{running.host}:{running.port}") as client:
            assert client.get_model_metadata("desk")["outputs"][-1]["name"] == "unknown"
            told = client.infer("desk", [tensor_of(x)]).as_numpy("unknown")
        assert told.dtype == bool
        assert told[-1]
        assert told[:-1].mean() < 0.5
        assert infer(running, x)[1]["outputs"][-1]["data"] == told.tolist()
    finally:
        running.stop()


def test_a_device_without_a_served_model_is_alive_and_not_ready(home: Path, lines: list[str]) -> None:
    shutil.rmtree(home / "slots")
    service = service_of(home, settings_of(home))
    serve.Follower(service, lines.append).check()
    running = serve.start(home, settings_of(home), service, lines.append)
    try:
        assert said(running, "GET", "/v2/health/live") == (200, {"live": True})
        assert said(running, "GET", "/v2/health/ready")[0] == 400
        assert infer(running, X)[0] == 503
    finally:
        running.stop()


def test_a_port_that_is_open_to_everyone_says_so(home: Path, service: Service, lines: list[str]) -> None:
    running = serve.start(home, settings_of(home).listening("0.0.0.0", 0, open=True), service, lines.append)
    running.stop()
    assert any("open to everyone" in line for line in lines)
    assert not list(home.glob("serve.*"))


def trusting(home: Path) -> ssl.SSLContext:
    return ssl.create_default_context(cafile=str(home / access.CERTIFICATE))


def over_tls(server: HttpServer, trust: ssl.SSLContext, path: str, **headers: str) -> tuple[int, Any]:
    connection = http.client.HTTPSConnection("localhost", server.port, timeout=PATIENCE_S, context=trust)
    with contextlib.closing(connection):
        connection.request("GET", path, headers=headers)
        response = connection.getresponse()
        return response.status, json.loads(response.read())


def test_beyond_this_machine_a_client_needs_tls_and_the_token(home: Path, service: Service, lines: list[str]) -> None:
    settings = settings_of(home).listening("0.0.0.0", 0)
    settings = replace(settings, serve=replace(settings.serve, names=("localhost",)))
    for _ in range(2):  # the second start takes the files that the first has made
        running = serve.start(home, settings, service, lines.append)
        trust, token = trusting(home), (home / access.TOKEN).read_text().strip()
        try:
            assert over_tls(running, trust, "/v2", Authorization=f"Bearer {token}")[0] == 200
            for wrong in ("", f"Bearer {token}x", token, f"Basic {token}"):
                status, body = over_tls(running, trust, "/v2", Authorization=wrong)
                assert status == 401
                assert "token" in body["error"]
            assert over_tls(running, trust, "/v2/health/live")[0] == 200
            with pytest.raises(ssl.SSLCertVerificationError):
                over_tls(running, ssl.create_default_context(), "/v2")
            with pytest.raises((http.client.HTTPException, OSError)):
                said(running, "GET", "/v2")
        finally:
            running.stop()
    assert [home / name for name in (access.TOKEN, access.KEY) if (home / name).stat().st_mode & 0o077] == []
    assert token not in "".join(lines)


def test_a_token_and_a_certificate_are_asked_for_on_this_machine_too_if_they_are_set(
    home: Path, service: Service, lines: list[str]
) -> None:
    settings = settings_of(home)
    made = replace(settings, serve=replace(settings.serve, token="mine.token"))
    running = serve.start(home, made, service, lines.append)
    try:
        assert said(running, "GET", "/v2")[0] == 401
        token = (home / "mine.token").read_text().strip()
        assert said(running, "GET", "/v2", Authorization=f"Bearer {token}")[0] == 200
    finally:
        running.stop()
    (home / "mine.token").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        serve.start(home, made, service, lines.append)
    with pytest.raises(ConfigError, match="belong together"):
        access.access_of(home, Serve(certificate="a.pem"), ())
    (home / "a.pem").write_text("no certificate")
    with pytest.raises(ConfigError, match="cannot be used for TLS"):
        access.access_of(home, Serve(certificate="a.pem", key="a.pem"), ())


def test_a_server_with_tls_ends_slow_clients_and_finishes_what_it_has_begun(
    home: Path, service: Service, lines: list[str]
) -> None:
    """A client that does not begin TLS holds a place until a new one needs it, and the server's end does not wait."""
    access.create(home / access.CERTIFICATE, home / access.KEY, ["localhost"])
    tls = access.access_of(home, Serve(certificate=access.CERTIFICATE, key=access.KEY), ()).tls
    limits = Limits(connections=2, head_s=PATIENCE_S, idle_s=PATIENCE_S, stop_s=PATIENCE_S)
    running = HttpServer(lambda request: Response(200, b"{}"), limits=limits, tls=tls, log=lines.append).start()
    with contextlib.ExitStack() as silent:
        for _ in range(2):
            silent.enter_context(socket.create_connection((running.host, running.port)))
        assert over_tls(running, trusting(home), "/") == (200, {})
        running.stop()
    assert lines == []


# Over MQTT and over HTTP ----------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pfldyn-proto", "per-fedavg-fo"])
def test_an_agent_answers_alike_over_mqtt_and_over_http_and_learns_at_once(tmp_path: Path, method: str) -> None:
    w = world(tmp_path, config_text(method, rounds=2, devices=1))
    (w.fleet.folder / "graph.safetensors").write_bytes(graph_bundle.pack(homes.graph_for(method)))
    w.start_server()
    agent = w.start_agent("d0", toy(0))
    running = serve.start(w.folder / "devices" / "d0", settings_with(w), agent.service, w.lines.append)
    try:
        assert infer(running, X, w.name)[0] == 503
        assert w.pump(lambda: fleet_finished(w))
        before = asked(w, X)
        with triton.InferenceServerClient(f"{running.host}:{running.port}") as client:
            for binary in (True, False):
                same(client.infer(w.name, [tensor_of(X, binary)]), before)
            assert before.round == 2
            said = taught(running, w.name, np.full((2, 8), -4, np.float32), "c")
            after = asked(w, X)
            same(client.infer(w.name, [tensor_of(X)]), after)
            assert (said["personalization"], said["added"]) == (after.personalization, 2)
            assert after.probabilities != before.probabilities
    finally:
        running.stop()
        w.close()


def taught(server: HttpServer, name: str, x: np.ndarray, label: str) -> Any:
    """The device's answers about samples that it was taught."""
    inputs = [{"name": "x", "datatype": "FP32", "shape": list(x.shape), "data": x.tolist()},
              {"name": "label", "datatype": "BYTES", "shape": [len(x)], "data": [label] * len(x)}]
    status, found = said(server, "POST", f"/v2/models/{name}/samples", json.dumps({"inputs": inputs}).encode())
    assert status == 200, found
    return found


def settings_with(w: World) -> Settings:
    """Settings to serve as a device of ``w``."""
    return Settings(Identity("d0", w.name, w.fleet.public_key()))


def asked(w: World, x: np.ndarray) -> Answer:
    """The answer of d0 over MQTT."""
    asker = FakeDevice(w, "asker")
    asker.link.subscribe(topics.answer(w.name, "d0", "+"))
    question = Question(x.shape, str(x.dtype), base64.b64encode(x.tobytes()).decode())
    asker.link.publish(topics.question(w.name, "d0", "q"), messages.encode(question))
    w.agents["d0"].step(0)
    asker.poll()
    return messages.decode(Answer, asker.inbox[-1].payload)


# Swaps under load -----------------------------------------------------------------------------------------------------


def rounds_of(home: Path, count: int) -> list[Weights]:
    """Models of later rounds with different weights."""
    held = Slots(DeviceState(home)).weights()
    assert held is not None
    made = []
    for number in range(3, 3 + count):
        rng = np.random.default_rng(number)
        params = trees.apply(lambda a, rng=rng: (a + rng.normal(size=a.shape)).astype(np.float32), held.params)
        made.append(Weights(payloads.identity(params), number, params))
    return made


class Clients:
    """Threads that repeat the same request, each over its own connection, until they are stopped."""

    def __init__(self, server: HttpServer, count: int = CLIENTS):
        tensor = {"name": "x", "datatype": "FP32", "shape": [5, 8], "data": X[:5].ravel().tolist()}
        self._server, self._body = server, json.dumps({"inputs": [tensor]})
        self.answers: dict[tuple[Any, ...], int] = {}
        self.wrong: list[Any] = []
        self._came, self._enough = threading.Condition(), threading.Event()
        self._begun = threading.Barrier(count + 1)
        self._threads = [threading.Thread(target=self._ask) for _ in range(count)]

    def __enter__(self) -> Clients:
        for thread in self._threads:
            thread.start()
        self._begun.wait(PATIENCE_S)
        return self

    def __exit__(self, *_: object) -> None:
        self._enough.set()
        for thread in self._threads:
            thread.join()

    def await_answers(self, count: int) -> None:
        """Wait for that many more answers, or fail."""
        with self._came:
            until = sum(self.answers.values()) + count
            assert self._came.wait_for(lambda: self.wrong or sum(self.answers.values()) >= until, PATIENCE_S)

    def _ask(self) -> None:
        connection = http.client.HTTPConnection(self._server.host, self._server.port, timeout=PATIENCE_S)
        self._begun.wait(PATIENCE_S)
        try:
            while not self._enough.is_set():
                connection.request("POST", "/v2/models/desk/infer", self._body)
                response = connection.getresponse()
                self._note(response.status, json.loads(response.read()))
        except (OSError, http.client.HTTPException) as error:
            self.wrong.append(error)
        finally:
            connection.close()

    def _note(self, status: int, found: Any) -> None:
        with self._came:
            self._came.notify()
            if status != 200:
                self.wrong.append(found)
                return
            data = {output["name"]: tuple(output["data"]) for output in found["outputs"]}
            key = (found["model_version"], found["parameters"]["model"], data["probabilities"], data["label"])
            self.answers[key] = self.answers.get(key, 0) + 1


def key_of(answer: Answer) -> tuple[Any, ...]:
    return str(answer.round), answer.model, tuple(p for row in answer.probabilities for p in row), answer.labels


@pytest.mark.slow
def test_every_answer_is_of_one_model_while_models_are_swapped_under_load(
    server: HttpServer, service: Service, home: Path
) -> None:
    method, models = METHODS["pfldyn-proto"], rounds_of(home, 12)
    wanted = {key_of(service.answers(X[:5]))}
    with Clients(server) as clients:
        for weights in models:
            service.load(method, {}, weights)
            wanted.add(key_of(service.answers(X[:5])))
            clients.await_answers(CLIENTS)
    assert clients.wrong == []
    assert len(wanted) == len(models) + 1
    assert set(clients.answers) <= wanted
    assert len(clients.answers) > 2


@pytest.mark.slow
def test_every_answer_is_of_one_model_while_another_process_brings_new_ones(
    server: HttpServer, service: Service, home: Path, lines: list[str]
) -> None:
    agents = restored(home)
    follower = serve.Follower(service, lines.append)
    wanted = {key_of(service.answers(X[:5]))}
    with Clients(server) as clients:
        for weights in rounds_of(home, 5):
            agents.load(METHODS["pfldyn-proto"], {}, weights)
            follower.check()
            assert service.answers(X[:5]) == agents.answers(X[:5])
            wanted.add(key_of(service.answers(X[:5])))
    assert clients.wrong == []
    assert set(clients.answers) <= wanted
    assert [line for line in lines if line.startswith("answers from round")] == [
        f"answers from round {number}, personalization: proto" for number in range(3, 8)
    ]


def test_a_file_that_another_process_damages_is_logged_once_and_the_old_model_answers(
    service: Service, home: Path, lines: list[str]
) -> None:
    follower, before = serve.Follower(service, lines.append), service.answers(X)
    slots = Slots(DeviceState(home))
    held = slots.weights()
    assert held is not None
    DeviceState(home).save_weights(
        f"slots/{slots.pointer().slot}/serve", replace(held, facts={"method": "of tomorrow"})
    )
    slots.point(slots.pointer())
    for _ in range(2):
        follower.check()
    assert ["of tomorrow" in line for line in lines] == [True]
    assert service.answers(X) == before


# As a process ---------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_edge_agent_serve_answers_follows_and_ends_in_order(programs: Programs, home: Path, service: Service) -> None:
    program = programs.start(*edge_agent("serve", "--home", home, "--port", 0))
    program.wait_for("answers at http://127.0.0.1:")
    port = int(program.text().partition("http://127.0.0.1:")[2].partition("/")[0])
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        same(client.infer("desk", [tensor_of(X)]), service.answers(X))
        relearn.learn(service, np.full((20, 8), -4, np.float32), ["c"] * 20)
        wanted = np.array(service.answers(X).probabilities, np.float32)
        program.until(lambda: np.array_equal(
            client.infer("desk", [tensor_of(X)]).as_numpy("probabilities"), wanted
        ))
    if Path("/proc/self/maps").exists():
        assert "torch" not in Path(f"/proc/{program.process.pid}/maps").read_text()
    program.process.send_signal(signal.SIGTERM)
    assert program.exit_code() == 0
    assert "Traceback" not in program.text()


@pytest.mark.slow
def test_edge_agent_run_answers_over_http_if_a_port_is_set(programs: Programs, home: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    with (home / "device.toml").open("a") as file:
        file.write(f"\n[serve]\nport = {port}\n")
    program = programs.start(*edge_agent("run", "--home", home, "--broker", "mqtt://127.0.0.1:1"))
    program.wait_for(f"answers at http://127.0.0.1:{port}/v2/models/desk")
    with triton.InferenceServerClient(f"127.0.0.1:{port}") as client:
        assert client.is_server_live()
        assert client.is_server_ready(), "from its disk, before the fleet is there"
    program.process.send_signal(signal.SIGTERM)
    program.exit_code()
    assert "Traceback" not in program.text()


# The benchmark of swaps -----------------------------------------------------------------------------------------------


def test_the_benchmark_of_swaps_counts_what_fails_and_what_no_model_answers() -> None:
    answer = Answer(("a",), ((0.75, 0.25),), round=3, model="m")
    outputs: dict[str, list[Any]] = {"probabilities": [0.75, 0.25], "label": ["a"]}
    good = swap.print_of(answer)
    assert good == asking.fingerprint("m", outputs), "over HTTP as in Python"
    half = asking.fingerprint("m", {**outputs, "probabilities": [0.75, 0.250001]})
    noted = [{"answers": {good: 5, half: 2}, "failed": ["503: no"], "milliseconds": [1.0] * 7},
             {"answers": {good: 1}, "failed": [], "milliseconds": [3.0]}]
    found = swap.summary([good, "another"], noted, 60)
    assert {key: found[key] for key in ("requests", "failed", "answers_of_no_model", "models_seen", "swaps")} == {
        "requests": 8, "failed": 1, "answers_of_no_model": 2, "models_seen": 1, "swaps": 1,
    }


def test_the_benchmarks_client_notes_answers_and_failures(server: HttpServer, service: Service) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [1, 8], "data": X[0].tolist()}
    body = json.dumps({"inputs": [tensor]}).encode()
    found = asking.ask(server.host, server.port, "/v2/models/desk/infer", body, 0.1)
    assert (list(found["answers"]), found["failed"]) == ([swap.print_of(service.answers(X[:1]))], [])
    lost = asking.ask(server.host, server.port, "/v2/models/other/infer", body, 0.01)
    assert lost["failed"][0].startswith("404")
