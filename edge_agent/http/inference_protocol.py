"""The Open Inference Protocol v2 over HTTP/REST with its binary tensor data extension: requests into answers.

KServe, "Predict Protocol, Version 2" and "Open Inference Protocol", REST; Triton, "Binary Tensor Data Extension". There
are no sockets here: ``InferenceProtocol.answer`` gives a request its response.

One model, named as the fleet; its version is the round of the meta-model. One input ``x``, raw samples. The outputs:
``probabilities`` FP32 [n, N], ``label`` BYTES [n], and ``unknown`` BOOL [n] where the device tells which samples are
far from all that it knows. An answer's parameters say from which round, model and personalization it came.

Beside the protocol: ``POST /v2/models/NAME/samples`` takes labelled samples, inputs ``x`` and ``label``, which
personalize at once. A label that is no class is refused, unless the request's parameter ``new_classes`` is true.
"""

from __future__ import annotations

import json
import re
import threading
import typing
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from edge_agent.http import tensors
from edge_agent.http.http_messages import Refused, Request, Response, as_error, as_json
from edge_agent.http.tensors import Form
from fleet_core import __version__
from fleet_core.base.errors import ConfigError, DataError, FleetError, MessageError, StateError
from fleet_core.protocol.device_messages import Answer

Array = np.ndarray[Any, Any]

HEADER_LENGTH = "Inference-Header-Content-Length"
MAX_JSON_BYTES = 4 << 20
"""Numbers take up to ten times the memory of their JSON, and lists more; larger batches come as binary data."""
EXTENSIONS = ("binary_tensor_data", "labelled_samples")
NOT_READY = "no model has been served to this device yet"


@dataclass(frozen=True)
class Facts:
    """What answers now. shape, dtype: of one raw sample. unknown: whether that is told. graph: that answers, as in
    ``messages.Answer``. ready: False while the device waits for its first labelled samples to answer from."""

    shape: tuple[int, ...]
    dtype: str
    classes: tuple[str, ...]
    round: int
    unknown: bool
    graph: str = ""
    ready: bool = True


class Model(typing.Protocol):
    """What stands behind the protocol; called by several threads."""

    @property
    def name(self) -> str: ...

    def facts(self) -> Facts | None:
        """None while there is nothing to answer with."""

    def answer(self, x: Array) -> Answer:
        """Raises FleetError."""

    def learn(self, x: Array, labels: Sequence[str], *, new: bool) -> Mapping[str, Any]:
        """new: labels that are no classes yet may become some, of this device alone. Raises FleetError."""


@dataclass(frozen=True)
class Asked:
    """What a request says, without its JSON. outputs: name -> whether as binary data; empty for all, as ``binary``
    says. labels: of labelled samples; new_classes: whether they may name classes that there are not yet."""

    id: str | None
    x: Array
    labels: Sequence[str]
    outputs: Mapping[str, bool]
    binary: bool
    new_classes: bool = False


class InferenceProtocol:
    """The protocol for one model."""

    def __init__(self, model: Model):
        self._model = model
        self._reading = threading.Lock()  # one request's JSON is in memory at a time
        of_model = r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?"
        self._routes: list[tuple[str, re.Pattern[str], Callable[[Request, str | None], Response]]] = [
            ("GET", re.compile("/v2/health/live"), self._live),
            ("GET", re.compile("/v2/health/ready"), self._ready),
            ("GET", re.compile("/v2/?"), self._of_server),
            ("GET", re.compile(of_model), self._of_model),
            ("GET", re.compile(f"{of_model}/ready"), self._model_ready),
            ("POST", re.compile(f"{of_model}/infer"), self._infer),
            ("POST", re.compile(f"{of_model}/samples"), self._samples),
        ]

    def answer(self, request: Request) -> Response:
        """The response to a request, whatever is wrong with it."""
        try:
            return self._routed(request)
        except Refused as refused:
            return as_error(refused)
        except (MessageError, DataError, ConfigError) as error:
            return as_error(Refused(400, str(error)))
        except FleetError as error:
            return as_error(Refused(503 if isinstance(error, StateError) else 500, str(error)))

    def _routed(self, request: Request) -> Response:
        head = request.head
        for verb, pattern, action in self._routes:
            match = pattern.fullmatch(head.path)
            if match is None:
                continue
            if verb != ("GET" if head.method == "HEAD" else head.method):
                raise Refused(405, f"{head.method[:20]} is not for {head.path[:200]}, expected {verb}",
                              {"Allow": "GET, HEAD" if verb == "GET" else verb})
            if verb == "POST" and "origin" in head.headers:
                raise Refused(403, "requests of web pages are refused: nothing here knows who may ask")
            named = match.groupdict()
            if named.get("name", self._model.name) != self._model.name:
                raise Refused(404, f"there is no model '{named['name'][:100]}', expected '{self._model.name}'")
            return action(request, named.get("version"))
        raise Refused(404, f"there is nothing at {head.path[:200]}")

    # What it is -------------------------------------------------------------------------------------------------------

    def _live(self, request: Request, version: str | None) -> Response:
        return as_json({"live": True})

    def _ready(self, request: Request, version: str | None) -> Response:
        """A 4xx status means no."""
        facts = self._model.facts()
        ready = facts is not None and facts.ready
        return as_json({"live": True, "ready": ready}, 200 if ready else 400)

    def _model_ready(self, request: Request, version: str | None) -> Response:
        facts = self._model.facts()
        ready = facts is not None and facts.ready and version in (None, str(facts.round))
        return as_json({"name": self._model.name, "ready": ready}, 200 if ready else 400)

    def _of_server(self, request: Request, version: str | None) -> Response:
        return as_json({"name": "edge-agent", "version": __version__, "extensions": EXTENSIONS})

    def _of_model(self, request: Request, version: str | None) -> Response:
        facts = self._facts()
        self._check_version(version, facts.round)
        outputs = [
            {"name": "probabilities", "datatype": "FP32", "shape": [-1, len(facts.classes)]},
            {"name": "label", "datatype": "BYTES", "shape": [-1]},
            *([{"name": "unknown", "datatype": "BOOL", "shape": [-1]}] if facts.unknown else []),
        ]
        x = {"name": "x", "datatype": tensors.OF_NUMPY[facts.dtype], "shape": [-1, *facts.shape]}
        return as_json({
            "name": self._model.name, "versions": [str(facts.round)], "platform": "onnxruntime_onnx", "inputs": [x],
            "outputs": outputs, "classes": facts.classes, "graph": facts.graph,
        })

    def _facts(self) -> Facts:
        facts = self._model.facts()
        if facts is None:
            raise Refused(503, NOT_READY)
        return facts

    def _check_version(self, version: str | None, number: int) -> None:
        if version not in (None, str(number)):
            raise Refused(404, f"there is no version '{version[:100]}', expected '{number}', the round that answers")

    # Answer -----------------------------------------------------------------------------------------------------------

    def _infer(self, request: Request, version: str | None) -> Response:
        facts = self._facts()
        self._check_version(version, facts.round)
        asked = self._read(request, {"x": _form(facts)})
        answer = self._model.answer(asked.x)
        self._check_version(version, answer.round)
        return _answered(asked, answer, self._model.name)

    def _samples(self, request: Request, version: str | None) -> Response:
        facts = self._facts()
        self._check_version(version, facts.round)
        asked = self._read(request, {"x": _form(facts), "label": Form("BYTES")})
        return as_json(self._model.learn(asked.x, asked.labels, new=asked.new_classes))

    def _read(self, request: Request, forms: Mapping[str, Form]) -> Asked:
        with self._reading:
            return read_request(request, forms)


def _form(facts: Facts) -> Form:
    return Form(tensors.OF_NUMPY[facts.dtype], facts.shape)


# Requests -------------------------------------------------------------------------------------------------------------


def read_request(request: Request, forms: Mapping[str, Form]) -> Asked:
    """An inference request object and its binary data; the inputs are of these ``forms``. Raises MessageError, and
    Refused for one that is too large."""
    said, binary = _split(request)
    found = tensors.read(said.get("inputs"), forms, binary)
    request_id = said.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise MessageError(f"'id' is {tensors.shown(request_id)}", expected="text")
    where = "the request's parameters"
    parameters = tensors.parameters_of(said, where)
    as_binary = tensors.flag(parameters, "binary_data_output", False, where)
    outputs = dict(_outputs(said.get("outputs") or [], as_binary))
    new_classes = tensors.flag(parameters, "new_classes", False, where)
    return Asked(request_id, found["x"], found.get("label", ()), outputs, as_binary, new_classes)


def _split(request: Request) -> tuple[dict[str, Any], memoryview]:
    """(the JSON, the binary data behind it)."""
    length, text = len(request.body), request.head.headers.get(HEADER_LENGTH.lower())
    if text is not None:
        if not re.fullmatch("[0-9]{1,18}", text) or int(text) > length:
            raise MessageError(f"{HEADER_LENGTH} is '{text[:20]}'", expected=f"at most {length}, the body's length")
        length = int(text)
    if length > MAX_JSON_BYTES:
        raise Refused(413, f"{length} bytes of JSON are over the limit of {MAX_JSON_BYTES}: send the tensors as binary "
                           "data")
    try:
        said = json.loads(bytes(request.body[:length]), parse_constant=_no_number)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the request is no JSON: {str(error)[:200]}") from error
    if not isinstance(said, dict):
        raise MessageError("the request is no JSON object")
    return said, memoryview(request.body)[length:]


def _no_number(constant: str) -> typing.NoReturn:
    raise ValueError(f"{constant} is no number of JSON")


def _outputs(outputs: Any, as_binary: bool) -> Iterator[tuple[str, bool]]:
    """(name, whether as binary data) of each output that is asked for."""
    if not isinstance(outputs, list):
        raise MessageError(f"'outputs' is {tensors.shown(outputs)}", expected="a list")
    seen: set[str] = set()
    for output in outputs:
        name = output.get("name") if isinstance(output, dict) else None
        if not isinstance(name, str):
            raise MessageError(f"an output's name is {tensors.shown(name)}", expected="text")
        where = f"output '{name[:80]}'"
        if name in seen:
            raise MessageError("it comes twice", where=where)
        seen.add(name)
        yield name, tensors.flag(tensors.parameters_of(output, where), "binary_data", as_binary, where)


# Responses ------------------------------------------------------------------------------------------------------------


def _answered(asked: Asked, answer: Answer, name: str) -> Response:
    n = len(answer.labels)
    known: dict[str, tuple[str, Sequence[int], Sequence[Any]]] = {
        "probabilities": ("FP32", (n, len(answer.probabilities[0])), list(chain.from_iterable(answer.probabilities))),
        "label": ("BYTES", (n,), answer.labels),
        **({"unknown": ("BOOL", (n,), answer.unknown)} if answer.unknown else {}),
    }
    outputs, tails = [], []
    for output, binary in (asked.outputs or dict.fromkeys(known, asked.binary)).items():
        if output not in known:
            raise MessageError(f"there is no output '{output[:80]}'", expected=f"one of {', '.join(known)}")
        written, tail = tensors.write(output, *known[output], binary)
        outputs.append(written)
        tails.append(tail)
    said = {
        "model_name": name, "model_version": str(answer.round),
        **({} if asked.id is None else {"id": asked.id}),
        "parameters": {"round": answer.round, "model": answer.model, "personalization": answer.personalization,
                       "graph": answer.graph},
        "outputs": outputs,
    }
    response = as_json(said)
    if not any("parameters" in output for output in outputs):
        return response
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(response.body))}
    return Response(200, response.body + b"".join(tails), headers)
