"""The Open Inference Protocol as a function of requests: what it answers, what it refuses, and that arbitrary bytes do
nothing else."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from edge_agent.http import http_messages
from edge_agent.http.http_messages import Head, Refused, Request, Response, body_length, parse_head
from edge_agent.http.inference_protocol import HEADER_LENGTH, MAX_JSON_BYTES, Facts, InferenceProtocol
from edge_agent.http.tensors import MAX_SAMPLES
from fleet_core.base.errors import BundleError, ConfigError, DataError, FleetError, StateError
from fleet_core.protocol.device_messages import Answer

X = [[1.0, 2.0], [3.0, -4.0]]
CLASSES = ("a", "b", "c")


class Sums:
    """A model whose class is the sign of a sample's sum; positive samples count as unknown."""

    name = "sums"

    def __init__(self, dtype: str = "float32", *, unknown: bool = False, error: FleetError | None = None):
        self.now: Facts | None = Facts((2,), dtype, CLASSES, 7, unknown, "embed")
        self.unknown, self.error = unknown, error
        self.held: Mapping[str, Any] = {}
        self.learned: list[tuple[np.ndarray, Sequence[str] | np.ndarray]] = []

    def facts(self) -> Facts | None:
        return self.now

    def held_back(self) -> Mapping[str, Any]:
        return self.held

    def calibration_error(self) -> float | None:
        return self.held.get("calibration_error")

    def answer(self, x: np.ndarray) -> Answer:
        if self.error is not None:
            raise self.error
        sums = [float(row.sum()) for row in x]
        rows = tuple((0.125, 0.25, 0.625) if s > 0 else (0.625, 0.25, 0.125) for s in sums)
        labels = tuple("c" if s > 0 else "a" for s in sums)
        told = tuple(s > 0 for s in sums) if self.unknown else ()
        return Answer(labels, rows, told, 7, "abc", "proto", graph="embed")

    def learn(self, x: np.ndarray, labels: Sequence[str] | np.ndarray, *, new: bool) -> Mapping[str, Any]:
        if self.error is not None:
            raise self.error
        self.learned.append((x, labels))
        return {"added": len(labels), "new": new}

    def unlabelled(self) -> Sequence[Mapping[str, Any]]:
        return [{"id": "ab", "time": 1.0}]

    def unlabelled_sample(self, name: str) -> np.ndarray:
        if name != "ab":
            raise DataError(f"no unlabelled sample '{name}'")
        return np.array([1, 2], np.float32)

    def label(self, name: str, label: str | Sequence[float] | Sequence[str], *, new: bool) -> Mapping[str, Any]:
        return {"id": name, "label": label, "new": new}


def get(path: str, model: Sums | None = None, method: str = "GET", **headers: str) -> tuple[int, Any]:
    response = InferenceProtocol(model or Sums()).answer(Request(Head(method, path, headers)))
    return response.status, json.loads(response.body)


def post(
    said: Any, binary: bytes = b"", path: str = "/v2/models/sums/infer", model: Sums | None = None, **headers: str
) -> Response:
    head = json.dumps(said).encode()
    if binary:
        headers[HEADER_LENGTH.lower()] = str(len(head))
    return InferenceProtocol(model or Sums()).answer(Request(Head("POST", path, headers), head + binary))


def x_of(data: Any = X, datatype: str = "FP32", shape: Sequence[Any] = (2, 2), **more: Any) -> dict[str, Any]:
    return {"name": "x", "datatype": datatype, "shape": list(shape), "data": data, **more}


def outputs(response: Response) -> dict[str, Any]:
    assert response.status == 200, response.body
    return {output["name"]: output for output in json.loads(response.body)["outputs"]}


def refused(response: Response, words: str, status: int = 400) -> None:
    """The protocol's error object, with ``words`` in it."""
    assert response.status == status, response.body
    assert response.headers["Content-Type"] == "application/json"
    result = json.loads(response.body)
    assert list(result) == ["error"]
    assert words in result["error"]


# What it is -----------------------------------------------------------------------------------------------------------


def test_a_server_without_a_model_is_live_and_not_ready() -> None:
    model = Sums()
    model.now = None
    assert get("/v2/health/live", model) == (200, {"live": True})
    assert get("/v2/health/ready", model) == (400, {"live": True, "ready": False})
    assert get("/v2/models/sums/ready", model) == (400, {"name": "sums", "ready": False})
    assert get("/v2/models/sums", model)[0] == 503
    refused(post({"inputs": [x_of()]}, model=model), "no model", 503)


def test_a_model_is_ready_in_the_version_that_answers_and_no_other() -> None:
    assert get("/v2/health/ready") == (200, {"live": True, "ready": True})
    assert get("/v2/models/sums/ready") == (200, {"name": "sums", "ready": True})
    assert get("/v2/models/sums/versions/7/ready")[0] == 200
    assert get("/v2/models/sums/versions/6/ready") == (400, {"name": "sums", "ready": False})


def test_the_server_says_what_it_is() -> None:
    status, said = get("/v2")
    assert (status, said["name"]) == (200, "edge-agent")
    assert said["extensions"] == ["binary_tensor_data", "labelled_samples", "unlabelled_samples"]
    assert get("/v2/") == (status, said)


def test_unlabelled_samples_are_listed_shown_and_labelled() -> None:
    assert get("/v2/models/sums/unlabelled") == (200, [{"id": "ab", "time": 1.0}])
    assert get("/v2/models/sums/unlabelled/ab") == (
        200, {"id": "ab", "datatype": "FP32", "shape": [2], "data": [1.0, 2.0]})
    assert get("/v2/models/sums/unlabelled/cd") == (400, {"error": "no unlabelled sample 'cd'"})
    assert get("/v2/models/sums/unlabelled", method="POST")[0] == 405
    assert get("/v2/models/sums/versions/6/unlabelled")[0] == 404


@pytest.mark.parametrize(("body", "status", "words"), [
    ({"id": "ab", "label": "b"}, 200, ""),
    ({"id": "ab", "label": "b", "parameters": {"new_classes": True}}, 200, ""),
    ({"id": "ab"}, 400, "'label' is"), ({"id": 7, "label": "b"}, 400, "'id' is"), ([], 400, "not a JSON object"),
    ({"id": "ab", "label": "b", "parameters": {"new_classes": 1}}, 400, "'new_classes' is"),
])  # fmt: skip
def test_a_label_comes_with_an_id(body: Any, status: int, words: str) -> None:
    request = Request(Head("POST", "/v2/models/sums/label"), json.dumps(body).encode())
    response = InferenceProtocol(Sums()).answer(request)
    found = json.loads(response.body)
    assert (response.status, words in str(found)) == (status, True)
    if status == 200:
        assert found == {"id": "ab", "label": "b", "new": "parameters" in body}


def test_the_model_says_its_tensors_classes_and_version() -> None:
    status, said = get("/v2/models/sums", Sums(unknown=True))
    assert status == 200
    assert said["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 2]}]
    shapes = {output["name"]: (output["datatype"], output["shape"]) for output in said["outputs"]}
    assert shapes == {"probabilities": ("FP32", [-1, 3]), "label": ("BYTES", [-1]), "unknown": ("BOOL", [-1])}
    assert (said["name"], said["versions"], said["classes"]) == ("sums", ["7"], list(CLASSES))
    assert said["graph"] == "embed"
    assert get("/v2/models/sums/versions/7", Sums(unknown=True)) == (status, said)


def test_the_metadata_and_answers_say_how_far_probabilities_can_be_trusted_if_the_device_knows() -> None:
    model = Sums()
    assert "held_back" not in get("/v2/models/sums", model)[1]
    assert "calibration_error" not in json.loads(post({"inputs": [x_of()]}, model=model).body)["parameters"]
    model.held = {"samples": 40, "accuracy": 0.9, "calibration_error": 0.05}
    assert get("/v2/models/sums", model)[1]["held_back"] == model.held
    said = json.loads(post({"inputs": [x_of()]}, model=model).body)
    assert said["parameters"]["calibration_error"] == 0.05


def test_an_unknown_path_model_or_version_is_not_found() -> None:
    for path in ("/", "/v1/models", "/v2/models/other", "/v2/models/sums/versions/6", "/v2/models/sums/config"):
        status, said = get(path)
        assert (status, list(said)) == (404, ["error"]), path
    refused(post({"inputs": [x_of()]}, path="/v2/models/other/infer"), "'other', expected 'sums'", 404)
    refused(post({"inputs": [x_of()]}, path="/v2/models/sums/versions/8/infer"), "'8', expected '7'", 404)


def test_another_verb_is_answered_with_the_one_that_is_allowed() -> None:
    response = InferenceProtocol(Sums()).answer(Request(Head("DELETE", "/v2/models/sums")))
    assert (response.status, response.headers["Allow"]) == (405, "GET, HEAD")
    response = InferenceProtocol(Sums()).answer(Request(Head("GET", "/v2/models/sums/infer")))
    assert (response.status, response.headers["Allow"]) == (405, "POST")


def test_a_web_page_that_asks_from_elsewhere_is_refused() -> None:
    for path in ("/v2/models/sums/infer", "/v2/models/sums/samples"):
        refused(post({"inputs": [x_of()]}, path=path, origin="http://example.org"), "web pages", 403)


@pytest.mark.parametrize("host", ["evil.example", "evil.example:8080", "localhost.evil.example", "", "1.2.3.4.evil"])
def test_a_name_that_a_web_page_has_pointed_at_this_device_is_refused(host: str) -> None:
    for path in ("/v2/models/sums/infer", "/v2/models/sums/samples"):
        refused(post({"inputs": [x_of()]}, path=path, host=host), "not reached by the name", 421)
    assert get("/v2/models/sums", host=host)[0] == 421


@pytest.mark.parametrize("host", ["localhost", "localhost:80", "192.168.1.7:8080", "[::1]:80", "[::1]", "Pi-07.local"])
def test_an_address_and_the_devices_own_names_are_let_through(host: str) -> None:
    request = Request(Head("GET", "/v2/models/sums", {"host": host}))
    assert InferenceProtocol(Sums(), ["pi-07.local"]).answer(request).status == 200


# Answers --------------------------------------------------------------------------------------------------------------


def test_an_answer_says_its_probabilities_label_and_where_they_come_from() -> None:
    response = post({"id": "42", "inputs": [x_of()]})
    result = json.loads(response.body)
    found = outputs(response)
    assert found["probabilities"]["data"] == [0.125, 0.25, 0.625, 0.625, 0.25, 0.125]
    assert found["probabilities"]["shape"] == [2, 3]
    assert found["label"] == {"name": "label", "datatype": "BYTES", "shape": [2], "data": ["c", "a"]}
    assert "unknown" not in found
    assert (result["model_name"], result["model_version"], result["id"]) == ("sums", "7", "42")
    assert result["parameters"] == {"round": 7, "model": "abc", "personalization": "proto", "graph": "embed"}
    assert response.headers["Content-Type"] == "application/json"


def test_a_sample_of_an_unknown_class_is_marked() -> None:
    found = outputs(post({"inputs": [x_of()]}, model=Sums(unknown=True)))
    assert found["unknown"] == {"name": "unknown", "datatype": "BOOL", "shape": [2], "data": [True, False]}


def test_flat_and_nested_data_are_the_same() -> None:
    assert outputs(post({"inputs": [x_of([1, 2.0, 3, -4])]})) == outputs(post({"inputs": [x_of()]}))


@pytest.mark.parametrize(("dtype", "datatype", "code"), [("float32", "FP32", "f"), ("uint8", "UINT8", "B"),
                                                         ("int64", "INT64", "q")])
def test_binary_data_is_read_and_written(dtype: str, datatype: str, code: str) -> None:
    tensor = {"name": "x", "datatype": datatype, "shape": [2, 2], "parameters": {"binary_data_size": 0}}
    data = struct.pack(f"<4{code}", 1, 2, 0, 0)
    tensor["parameters"] = {"binary_data_size": len(data)}
    wanted = [{"name": "label", "parameters": {"binary_data": True}},
              {"name": "unknown", "parameters": {"binary_data": True}},
              {"name": "probabilities", "parameters": {"binary_data": False}}]
    response = post({"inputs": [tensor], "outputs": wanted}, data, model=Sums(dtype, unknown=True))
    assert response.status == 200, response.body
    assert response.headers["Content-Type"] == "application/octet-stream"
    length = int(response.headers[HEADER_LENGTH])
    label, unknown, probabilities = json.loads(response.body[:length])["outputs"]
    assert label["parameters"] == {"binary_data_size": 10}
    assert unknown["parameters"] == {"binary_data_size": 2}
    assert response.body[length:] == b"\x01\0\0\0c\x01\0\0\0a\x01\x00"
    assert probabilities["data"] == [0.125, 0.25, 0.625, 0.625, 0.25, 0.125]


def test_all_outputs_are_binary_if_the_request_wants_it() -> None:
    response = post({"inputs": [x_of()], "parameters": {"binary_data_output": True}})
    length = int(response.headers[HEADER_LENGTH])
    said = {output["name"]: output for output in json.loads(response.body[:length])["outputs"]}
    assert np.frombuffer(response.body[length : length + 24], "<f4").tolist()[:3] == [0.125, 0.25, 0.625]
    assert said["probabilities"]["parameters"] == {"binary_data_size": 24}
    assert all("data" not in output for output in said.values())


def test_only_the_requested_outputs_are_returned_in_their_order() -> None:
    result = json.loads(post({"inputs": [x_of()], "outputs": [{"name": "label"}]}).body)
    assert [output["name"] for output in result["outputs"]] == ["label"]


def test_a_binary_array_is_the_models_own() -> None:
    model = Sums()
    names = {"name": "label", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": 5}}
    x = {"name": "x", "datatype": "FP32", "shape": [1, 2], "parameters": {"binary_data_size": 8}}
    response = post({"inputs": [x, names]}, struct.pack("<2f", 0.5, -1) + b"\x01\0\0\0b",
                    path="/v2/models/sums/samples", model=model)
    assert (response.status, json.loads(response.body)) == (200, {"added": 1, "new": False})
    ((learned, labels),) = model.learned
    assert (learned.tolist(), str(learned.dtype), list(labels)) == ([[0.5, -1]], "float32", ["b"])
    assert learned.flags.writeable


def test_labelled_samples_need_a_label_each() -> None:
    path = "/v2/models/sums/samples"
    label = {"name": "label", "datatype": "BYTES", "shape": [1], "data": ["b"]}
    refused(post({"inputs": [x_of()]}, path=path), "'label' is missing")
    refused(post({"inputs": [x_of(), label]}, path=path), "2 of x and 1 of label")
    model = Sums()
    response = post({"inputs": [x_of(), {**label, "shape": [2], "data": ["b", "c"]}]}, path=path, model=model)
    assert response.status == 200
    assert model.learned[0][1] == ["b", "c"]
    inputs, parameters = [x_of(), {**label, "shape": [2], "data": ["b", "c"]}], {"new_classes": True}
    assert json.loads(post({"inputs": inputs, "parameters": parameters}, path=path).body)["new"]
    refused(post({"inputs": inputs, "parameters": {"new_classes": "c"}}, path=path), "'new_classes' is 'c'")


@pytest.mark.parametrize(("error", "status"), [
    (DataError("no such class"), 400), (ConfigError("no such class"), 400), (StateError("no such class"), 503),
    (BundleError("no such class"), 500),
])
def test_what_the_model_refuses_has_its_status(error: FleetError, status: int) -> None:
    refused(post({"inputs": [x_of()]}, model=Sums(error=error)), "no such class", status)


# Refused --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("said", "words"), [
    ([], "not a JSON object"),
    ({}, "'inputs' is missing"),
    ({"inputs": {}}, "'inputs' is an object"),
    ({"inputs": []}, "'x' is missing"),
    ({"inputs": [3]}, "named missing"),
    ({"inputs": [x_of(name="y")]}, "named 'y'"),
    ({"inputs": [x_of(), x_of()]}, "twice"),
    ({"inputs": [x_of(datatype="FP64")]}, "'FP64'; expected FP32"),
    ({"inputs": [x_of(shape=[2, 3])]}, "its shape is [2, 3]"),
    ({"inputs": [x_of(shape=[2, 2, 1])]}, "hint: x.reshape(-1, 2)"),
    ({"inputs": [x_of(datatype="UINT8")]}, "'UINT8'; expected FP32\nhint: give the values on the scale"),
    ({"inputs": [x_of(shape=[0, 2])]}, "its shape is [0, 2]"),
    ({"inputs": [x_of(shape=[MAX_SAMPLES + 1, 2])]}, "expected [1 to 4096, 2]"),
    ({"inputs": [x_of(shape=[2.0, 2])]}, "no list of at most 8 integers"),
    ({"inputs": [x_of(shape=[True, 2])]}, "no list of at most 8 integers"),
    ({"inputs": [x_of(shape=[2])]}, "its shape is [2]"),
    ({"inputs": [x_of(shape=[])]}, "its shape is []"),
    ({"inputs": [x_of([1, 2, 3])]}, "3 values"),
    ({"inputs": [x_of([[1, 2], [3]])]}, "the nesting of its"),
    ({"inputs": [x_of([[1, 2], [3, [4]]])]}, "not FP32"),
    ({"inputs": [x_of("1234")]}, "'data' is '1234'"),
    ({"inputs": [x_of([1, 2, 3, "4"])]}, "not FP32"),
    ({"inputs": [x_of([1, 2, 3, True])]}, "not FP32"),
    ({"inputs": [x_of([1, 2, 3, None])]}, "not FP32"),
    ({"inputs": [x_of([1, 2, 3, 1e39])]}, "not finite"),
    ({"inputs": [x_of([1, 2, 3, 10**400])]}, "out of the range"),
    ({"inputs": [{**x_of(), "parameters": {"binary_data_size": 0}}]}, "'binary_data_size' is '0'"),
    ({"inputs": [{**x_of(), "parameters": {"shared_memory_region": "r"}}]}, "shared memory extension"),
    ({"inputs": [{**x_of(), "parameters": []}]}, "'parameters' is not an object"),
    ({"inputs": [x_of()], "id": 7}, "'id' is '7'"),
    ({"inputs": [x_of()], "parameters": {"sequence_id": 7}}, "sequence extension"),
    ({"inputs": [x_of()], "parameters": {"binary_data_output": 1}}, "true or false"),
    ({"inputs": [x_of()], "outputs": {"name": "label"}}, "'outputs' is an object"),
    ({"inputs": [x_of()], "outputs": [{"name": "label"}, {"name": "label"}]}, "twice"),
    ({"inputs": [x_of()], "outputs": [{"name": "logits"}]}, "no output 'logits'; expected one of probabilities, label"),
    ({"inputs": [x_of()], "outputs": [{"name": "unknown"}]}, "no output 'unknown'"),
    ({"inputs": [x_of()], "outputs": [{"name": "label", "parameters": {"classification": 2}}]}, "classification"),
])
def test_a_malformed_request_is_refused_with_the_reason(said: Any, words: str) -> None:
    refused(post(said), words)


def test_numbers_of_another_kind_are_not_rounded() -> None:
    for data in ([1, 2, 3, 256], [1, 2, 3, -1], [1, 2, 3, 4.5], [1, 2, 3, 10**30]):
        response = post({"inputs": [x_of(data, "UINT8")]}, model=Sums("uint8"))
        assert response.status == 400, data


@pytest.mark.parametrize(("size", "binary", "words"), [
    (16, struct.pack("<4f", 1, 2, 3, float("nan")), "not finite"),
    (12, b"\0" * 16, "12 bytes of binary data"),
    (16, b"\0" * 17, "1 bytes follow"),
    (17, b"\0" * 16, "'binary_data_size' is '17'"),
    (-1, b"\0" * 16, "'binary_data_size' is '-1'"),
    ("16", b"\0" * 16, "'binary_data_size' is '16'"),
    (True, b"\0" * 16, "'binary_data_size' is 'True'"),
])
def test_binary_data_that_does_not_fit_is_refused(size: Any, binary: bytes, words: str) -> None:
    tensor = {"name": "x", "datatype": "FP32", "shape": [2, 2], "parameters": {"binary_data_size": size}}
    refused(post({"inputs": [tensor]}, binary), words)


@pytest.mark.parametrize("data", [b"\x01\0\0\0", b"\xff\xff\xff\xffb", b"\x01\0\0\0\xff", b"\x01\0\0\0bb", b"\x01"])
def test_malformed_binary_texts_are_refused(data: bytes) -> None:
    label = {"name": "label", "datatype": "BYTES", "shape": [1], "parameters": {"binary_data_size": len(data)}}
    response = post({"inputs": [x_of([[1, 2]], shape=[1, 2]), label]}, data, path="/v2/models/sums/samples")
    assert response.status == 400, response.body


def test_malformed_or_too_large_json_is_refused() -> None:
    protocol = InferenceProtocol(Sums())

    def posted(body: bytes, **headers: str) -> Response:
        return protocol.answer(Request(Head("POST", "/v2/models/sums/infer", headers), body))

    for body in (b"", b"{", b"\xff\xfe", b"[" * 100_000, b'{"inputs": NaN}', b"1" * 10_000):
        assert posted(body).status == 400, body[:20]
    assert posted(b" " * (MAX_JSON_BYTES + 1)).status == 413
    for length in ("7", "-1", "x", "1e1", "9" * 30):
        refused(posted(b"{}", **{HEADER_LENGTH.lower(): length}), HEADER_LENGTH)


# HTTP -----------------------------------------------------------------------------------------------------------------


def test_a_head_is_read() -> None:
    head = parse_head(b"POST http://h:1/v2/x?a=b HTTP/1.1\r\nHost: h\r\nA:  b \t\r\na: c\r\nContent-Length: 12")
    assert (head.method, head.path, head.keep_alive) == ("POST", "/v2/x", True)
    assert head.headers == {"host": "h", "a": "b, c", "content-length": "12"}
    assert body_length(head, 12) == 12
    assert not parse_head(b"GET / HTTP/1.0").keep_alive
    assert not parse_head(b"GET / HTTP/1.1\r\nHost: h\r\nConnection: x ,  Close").keep_alive


@pytest.mark.parametrize(("head", "status"), [
    (b"", 400), (b"GET /", 400), (b"GET  / HTTP/1.1\r\nHost: h", 400), (b"GET / HTTP/1.1", 400),
    (b"GET / HTTP/2.0\r\nHost: h", 505), (b"GET / HTTP/1.1\nHost: h", 400), (b"GET / HTTP/1.1\r\nHost : h", 400),
    (b"GET / HTTP/1.1\r\nHost: h\r\n folded", 400), (b"GET / HTTP/1.1\r\nHost: h\r\nHost: h", 400),
    (b"GET / HTTP/1.1\r\nHost: h\r\na: \0", 400), (b"GET / HTTP/1.1\r\nHost: h" + b"\r\na: b" * 64, 431),
])
def test_a_malformed_head_is_refused(head: bytes, status: int) -> None:
    with pytest.raises(Refused) as caught:
        parse_head(head)
    assert caught.value.status == status


@pytest.mark.parametrize(("headers", "status"), [
    ({"transfer-encoding": "chunked"}, 411), ({"transfer-encoding": "chunked", "content-length": "1"}, 400),
    ({"content-encoding": "gzip", "content-length": "1"}, 415), ({}, 411), ({"content-length": "+1"}, 400),
    ({"content-length": "1, 1"}, 400), ({"content-length": "101"}, 413), ({"content-length": "1", "expect": "a"}, 417),
])
def test_an_unsupported_body_is_refused_before_it_is_read(headers: dict[str, str], status: int) -> None:
    with pytest.raises(Refused) as caught:
        body_length(Head("POST", "/", headers), 100)
    assert caught.value.status == status


def test_a_response_is_what_a_client_reads() -> None:
    sent = Response(200, b"{}", {"A": "b"}).encode(close=True)
    head, _, body = sent.partition(b"\r\n\r\n")
    lines = head.decode().split("\r\n")
    assert (lines[0], body) == ("HTTP/1.1 200 OK", b"{}")
    assert {"Content-Length: 2", "A: b", "Connection: close"} <= set(lines)
    to_head = Response(200, b"{}").encode(close=False, without_body=True)
    assert to_head.endswith(b"Content-Length: 2\r\n\r\n")


# Any bytes ------------------------------------------------------------------------------------------------------------

NAMES = st.sampled_from(["inputs", "outputs", "id", "parameters", "name", "datatype", "shape", "data", "x", "label",
                         "binary_data_size", "binary_data_output", "binary_data", "FP32", "BYTES", "unknown"])
JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8) | NAMES,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(NAMES | st.text(max_size=4), inner, max_size=4),
    max_leaves=12,
)
TENSORS = st.fixed_dictionaries(
    {"name": st.sampled_from(["x", "label"]) | JSON, "datatype": st.sampled_from(["FP32", "BYTES"]) | JSON,
     "shape": st.sampled_from([[1, 2], [1], [2, 2]]) | JSON},
    optional={"data": st.lists(st.floats() | st.text(max_size=3) | JSON, max_size=4) | JSON,
              "parameters": st.fixed_dictionaries({"binary_data_size": st.integers(-1, 20) | JSON}) | JSON},
)
REQUESTS = st.fixed_dictionaries(
    {"inputs": st.lists(TENSORS, max_size=3) | JSON},
    optional={"id": JSON, "outputs": st.lists(st.fixed_dictionaries({"name": NAMES}), max_size=2) | JSON,
              "parameters": JSON},
)
BODIES = st.binary(max_size=60) | REQUESTS.map(json.dumps).map(str.encode) | JSON.map(json.dumps).map(str.encode)
PATHS = st.sampled_from(["/v2/models/sums/infer", "/v2/models/sums/samples", "/v2/models/sums/versions/7/infer"])
HEADS = st.sampled_from([b"GET / HTTP/1.1", b"POST /v2 HTTP/1.0", b"Host: h", b"Content-Length: 3", b"\r\n", b": ",
                         b"Transfer-Encoding: chunked", b"Expect: x", b"Connection: close", b"\0", b"\n", b" "])


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.lists(HEADS | st.binary(max_size=12), max_size=8).flatmap(
    lambda parts: st.sampled_from([b"", b"\r\n"]).map(lambda between: between.join(parts))
))
def test_any_bytes_are_a_head_or_refused(data: bytes) -> None:
    said = dict[str, str]()
    try:
        length = body_length(parse_head(data), 100)
    except Refused as refused:
        length, said = 0, json.loads(http_messages.as_error(refused).body)
    assert 0 <= length <= 100
    assert not said or said["error"]


@pytest.mark.slow
@settings(max_examples=250, deadline=None)
@given(PATHS, BODIES, st.binary(max_size=24), st.none() | st.integers(-1, 400))
def test_any_body_is_answered_or_refused(path: str, body: bytes, tail: bytes, length: int | None) -> None:
    headers = {} if length is None else {HEADER_LENGTH.lower(): str(len(body) if length > 200 else length)}
    model = Sums(unknown=True)
    response = InferenceProtocol(model).answer(Request(Head("POST", path, headers), bytearray(body + tail)))
    response.encode(close=False)
    if response.status == 200:
        for x, labels in model.learned:
            assert len(x) == len(labels)
            assert np.isfinite(x).all()
    else:
        assert response.status in (400, 404, 413)
        assert list(json.loads(response.body)) == ["error"]


def test_a_head_full_of_blanks_costs_no_more_than_it_is_long() -> None:
    blanks = b" " * 15_000
    for _ in range(50):  # each would take a second if it were read again from every blank
        parse_head(b"GET / HTTP/1.1\r\nHost: h\r\na: b" + blanks + b"c\r\nConnection: x" + blanks + b"y")
