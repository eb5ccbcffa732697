"""The Open Inference Protocol v2 over HTTP/REST with the binary tensor data extension: turns requests into responses.

KServe, "Predict Protocol, Version 2" and "Open Inference Protocol", REST; Triton, "Binary Tensor Data Extension". There
are no sockets here.

One model, named as the fleet; its version is the round of the served model. One input ``x``, raw samples. Outputs:
``probabilities`` FP32 [n, N], ``label`` BYTES [n], and ``unknown`` BOOL [n] if the device detects samples of unknown
classes. A fleet that predicts numbers has one output, ``values`` FP32 [n, K], and one with several labels has
``probabilities`` FP32 [n, K] and ``answered`` BOOL [n, K]; their names are in the metadata. A fleet that detects
anomalies has ``score`` FP32 [n] and ``alarm`` BOOL [n]. An answer's parameters name its round, model and
personalization, and the calibration error once it is known; the metadata say how the model does on the device's
held-back samples.

Not in the protocol: ``POST /v2/models/NAME/samples`` takes labelled samples, inputs ``x`` and ``label``, or ``target``
FP32 [n, K] or ``labels`` UINT8 [n, K], and personalizes at once. A label that is no class is refused, unless the
request's parameter ``new_classes`` is true. ``GET /v2/models/NAME/unlabelled`` lists stored samples without a label,
``GET /v2/models/NAME/unlabelled/ID`` is one of them, and ``POST /v2/models/NAME/label`` gives the sample ``id`` its
``label``, or its ``target``, a list of numbers, or its ``labels``, a list of names.
"""

from __future__ import annotations

import json
import re
import threading
import typing
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import numpy as np

from edge_agent.http import tensors
from edge_agent.http.http_messages import Head, Refused, Request, Response, as_error, as_json
from edge_agent.http.tensors import Form
from fleet_core import __version__
from fleet_core.base.errors import ConfigError, DataError, FleetError, MessageError, StateError
from fleet_core.link.host_names import is_ours
from fleet_core.model.layout import InputSpec
from fleet_core.protocol.device_messages import Answer
from fleet_core.tasks.anomaly import NO_THRESHOLD

Array = np.ndarray[Any, Any]

HEADER_LENGTH = "Inference-Header-Content-Length"
MAX_JSON_BYTES = 4 << 20
"""Parsed numbers take up to ten times the memory of their JSON, and lists more; larger batches need binary data."""
EXTENSIONS = ("binary_tensor_data", "labelled_samples", "unlabelled_samples")
LIVE = "/v2/health/live"
NOT_READY = "no model has been served to this device yet"


@dataclass(frozen=True)
class Facts:
    """The model that answers now. shape, dtype: of one raw sample. unknown: whether unknown classes are detected.
    graph: as in ``messages.Answer``. ready: False while the device needs its first labelled samples. spec: of the
    model's input, if other shapes are taken too. values: names of the numbers of a fleet that predicts numbers. labels:
    names of the labels of a fleet with several. scores: the fleet detects anomalies."""

    shape: tuple[int, ...]
    dtype: str
    classes: tuple[str, ...]
    round: int
    unknown: bool
    graph: str = ""
    ready: bool = True
    spec: InputSpec | None = None
    values: tuple[str, ...] = ()
    labels: tuple[str, ...] = ()
    scores: bool = False

    @property
    def truth(self) -> dict[str, Form]:
        """The input that holds what a labelled sample is."""
        if self.labels:
            return {"labels": Form("UINT8", (len(self.labels),))}
        return {"target": Form("FP32", (len(self.values),))} if self.values else {"label": Form("BYTES")}

    @property
    def names(self) -> dict[str, tuple[str, ...]]:
        """What the numbers of the first output are."""
        if self.scores:
            return {}
        return {"labels": self.labels} if self.labels else {"values": self.values} if self.values else {
            "classes": self.classes}


class Model(typing.Protocol):
    """The model behind the protocol; several threads call it."""

    @property
    def name(self) -> str: ...

    def facts(self) -> Facts | None:
        """None if no model was served."""

    def answer(self, x: Array) -> Answer:
        """Raises FleetError."""

    def held_back(self) -> Mapping[str, Any]:
        """The number of the device's held-back samples and how they are answered; empty without any."""

    def calibration_error(self) -> float | None:
        """On the held-back samples; None as long as they were not answered."""

    def learn(self, x: Array, labels: Sequence[str] | Array, *, new: bool) -> Mapping[str, Any]:
        """labels: or targets [n, K]. new: labels may name new classes of this device. Raises FleetError."""

    def unlabelled(self) -> Sequence[Mapping[str, Any]]:
        """Stored samples without a label, as plain values, as ``Device.unlabelled``. Raises FleetError."""

    def unlabelled_sample(self, name: str) -> Array:
        """[*shape]. Raises FleetError."""

    def label(self, name: str, label: str | Sequence[float] | Sequence[str], *, new: bool) -> Mapping[str, Any]:
        """Labels the unlabelled sample of this id. label: or targets [K], or names. new: as in ``learn``. Raises
        FleetError."""


@dataclass(frozen=True)
class InferenceRequest:
    """A parsed request. outputs: {name: whether as binary data}; empty for all outputs, as ``binary`` says. labels: of
    labelled samples, or targets [n, K]; new_classes: whether they may name new classes."""

    id: str | None
    x: Array
    labels: Sequence[str] | Array
    outputs: Mapping[str, bool]
    binary: bool
    new_classes: bool = False


class InferenceProtocol:
    """The protocol for one model. names: host names by which this device may be reached, beside ``localhost`` and any
    address. check(head): raises Refused for a client that may not ask; everyone may ask for ``/v2/health/live``."""

    def __init__(self, model: Model, names: Iterable[str] = (), check: Callable[[Head], None] = lambda head: None):
        self._model, self._check = model, check
        self._names = {"localhost", *(name.lower() for name in names)}
        self._reading = threading.Lock()  # only one request's JSON is in memory at a time
        of_model = r"/v2/models/(?P<name>[^/]+)(?:/versions/(?P<version>[^/]+))?"
        self._routes: list[tuple[str, re.Pattern[str], Callable[[Request, str | None], Response]]] = [
            ("GET", re.compile(LIVE), self._live),
            ("GET", re.compile("/v2/health/ready"), self._ready),
            ("GET", re.compile("/v2/?"), self._server_metadata),
            ("GET", re.compile(of_model), self._model_metadata),
            ("GET", re.compile(f"{of_model}/ready"), self._model_ready),
            ("POST", re.compile(f"{of_model}/infer"), self._infer),
            ("POST", re.compile(f"{of_model}/samples"), self._samples),
            ("GET", re.compile(f"{of_model}/unlabelled"), self._unlabelled),
            ("GET", re.compile(f"{of_model}/unlabelled/[^/]+"), self._unlabelled_sample),
            ("POST", re.compile(f"{of_model}/label"), self._label),
        ]

    def answer(self, request: Request) -> Response:
        """The response to a request; an error response if it is refused."""
        try:
            return self._route(request)
        except Refused as refused:
            return as_error(refused)
        except (MessageError, DataError, ConfigError) as error:
            return as_error(Refused(400, str(error)))
        except FleetError as error:
            return as_error(Refused(503 if isinstance(error, StateError) else 500, str(error)))

    def _route(self, request: Request) -> Response:
        head = request.head
        if not is_ours(head.headers.get("host", "localhost"), self._names):
            raise Refused(421, f"this device is not reached by the name '{head.headers['host'][:100]}'; [serve] names "
                               "in device.toml allows names")
        if head.path != LIVE:
            self._check(head)
        for verb, pattern, action in self._routes:
            match = pattern.fullmatch(head.path)
            if match is None:
                continue
            if verb != ("GET" if head.method == "HEAD" else head.method):
                raise Refused(405, f"{head.method[:20]} is not for {head.path[:200]}, expected {verb}",
                              {"Allow": "GET, HEAD" if verb == "GET" else verb})
            if verb == "POST" and "origin" in head.headers:
                raise Refused(403, "requests of web pages are refused: this server has no accounts")
            named = match.groupdict()
            if named.get("name", self._model.name) != self._model.name:
                raise Refused(404, f"there is no model '{named['name'][:100]}', expected '{self._model.name}'")
            return action(request, named.get("version"))
        raise Refused(404, f"there is nothing at {head.path[:200]}")

    # Health and metadata ----------------------------------------------------------------------------------------------

    def _live(self, request: Request, version: str | None) -> Response:
        return as_json({"live": True})

    def _ready(self, request: Request, version: str | None) -> Response:
        facts = self._model.facts()
        ready = facts is not None and facts.ready
        return as_json({"live": True, "ready": ready}, 200 if ready else 400)

    def _model_ready(self, request: Request, version: str | None) -> Response:
        facts = self._model.facts()
        ready = facts is not None and facts.ready and version in (None, str(facts.round))
        return as_json({"name": self._model.name, "ready": ready}, 200 if ready else 400)

    def _server_metadata(self, request: Request, version: str | None) -> Response:
        return as_json({"name": "edge-agent", "version": __version__, "extensions": EXTENSIONS})

    def _model_metadata(self, request: Request, version: str | None) -> Response:
        facts = self._facts()
        self._check_version(version, facts.round)
        any_size = facts.spec is not None and facts.spec.fit != "refuse"
        shape = [facts.shape[0], -1, -1] if any_size else facts.shape
        x = {"name": "x", "datatype": tensors.OF_NUMPY[facts.dtype], "shape": [-1, *shape]}
        held_back = self._model.held_back()
        return as_json({
            "name": self._model.name, "versions": [str(facts.round)], "platform": "onnxruntime_onnx", "inputs": [x],
            "outputs": _described(facts), **facts.names, "graph": facts.graph,
            **({"held_back": held_back} if held_back else {}),
        })

    def _facts(self) -> Facts:
        facts = self._model.facts()
        if facts is None:
            raise Refused(503, NOT_READY)
        return facts

    def _check_version(self, version: str | None, number: int) -> None:
        if version not in (None, str(number)):
            raise Refused(404, f"there is no version '{version[:100]}', expected '{number}', the round of the model")

    # Answer -----------------------------------------------------------------------------------------------------------

    def _infer(self, request: Request, version: str | None) -> Response:
        facts = self._facts()
        self._check_version(version, facts.round)
        parsed = self._parse(request, {"x": _form(facts)})
        answer = self._model.answer(parsed.x)
        self._check_version(version, answer.round)
        if facts.scores and answer.threshold is None:
            raise Refused(503, NO_THRESHOLD)
        return _response(parsed, answer, self._model.name, self._model.calibration_error())

    def _samples(self, request: Request, version: str | None) -> Response:
        facts = self._facts()
        self._check_version(version, facts.round)
        parsed = self._parse(request, {"x": _form(facts), **facts.truth})
        return as_json(self._model.learn(parsed.x, parsed.labels, new=parsed.new_classes))

    def _unlabelled(self, request: Request, version: str | None) -> Response:
        self._check_version(version, self._facts().round)
        return as_json(self._model.unlabelled())

    def _unlabelled_sample(self, request: Request, version: str | None) -> Response:
        self._check_version(version, self._facts().round)
        name = request.head.path.rpartition("/")[2]
        x = self._model.unlabelled_sample(name)
        return as_json({"id": name, "datatype": tensors.OF_NUMPY[str(x.dtype)], "shape": x.shape,
                        "data": x.ravel().tolist()})

    def _label(self, request: Request, version: str | None) -> Response:
        facts = self._facts()
        self._check_version(version, facts.round)
        with self._reading:
            body, _ = _split(request)
        where = "the request's parameters"
        new = tensors.flag(tensors.parameters_of(body, where), "new_classes", False, where)
        name, label = _text(body, "id"), _given_label(body, facts)
        return as_json(self._model.label(name, label, new=new))

    def _parse(self, request: Request, forms: Mapping[str, Form]) -> InferenceRequest:
        with self._reading:
            return parse_request(request, forms)


def _described(facts: Facts) -> list[dict[str, Any]]:
    """The outputs in the model's metadata."""
    if facts.scores:
        return [{"name": "score", "datatype": "FP32", "shape": [-1]},
                {"name": "alarm", "datatype": "BOOL", "shape": [-1]}]
    (of, names), = facts.names.items()
    outputs = [{"name": "values" if of == "values" else "probabilities", "datatype": "FP32", "shape": [-1, len(names)]}]
    if of == "classes":
        outputs.append({"name": "label", "datatype": "BYTES", "shape": [-1]})
        outputs += [{"name": "unknown", "datatype": "BOOL", "shape": [-1]}] if facts.unknown else []
    if of == "labels":
        outputs.append({"name": "answered", "datatype": "BOOL", "shape": [-1, len(names)]})
    return outputs


def _text(body: Mapping[str, Any], key: str) -> str:
    """Raises MessageError."""
    found = body.get(key)
    if not isinstance(found, str):
        raise MessageError(f"'{key}' is {tensors.shown(found)}", expected="text")
    return found


def _given_label(body: Mapping[str, Any], facts: Facts) -> str | list[float] | list[str]:
    """A sample's class, or its targets, or the names of its labels. Raises MessageError."""
    (key,) = facts.truth
    if key == "target":
        return _target(body.get(key), facts.values)
    if key == "label":
        return _text(body, key)
    names = body.get(key)
    if not isinstance(names, list) or not all(isinstance(one, str) for one in names):
        raise MessageError(f"'{key}' is {tensors.shown(names)}",
                           expected=f"a list of some of {', '.join(facts.labels[:20])}, or an empty one")
    return names


def _target(given: Any, outputs: Sequence[str]) -> list[float]:
    """A sample's targets. Raises MessageError."""
    numbers = given if isinstance(given, list) else []
    if len(numbers) != len(outputs) or not all(type(one) in (int, float) for one in numbers):
        raise MessageError(f"'target' is {tensors.shown(given)}",
                           expected=f"a list with a number for each of {', '.join(outputs[:20])}")
    return numbers


def _form(facts: Facts) -> Form:
    return Form(tensors.OF_NUMPY[facts.dtype], facts.shape, facts.spec)


# Requests -------------------------------------------------------------------------------------------------------------


def parse_request(request: Request, forms: Mapping[str, Form]) -> InferenceRequest:
    """forms: of the inputs. Raises MessageError, and Refused if the request is too large."""
    body, binary = _split(request)
    inputs = tensors.read(body.get("inputs"), forms, binary)
    request_id = body.get("id")
    if request_id is not None and not isinstance(request_id, str):
        raise MessageError(f"'id' is {tensors.shown(request_id)}", expected="text")
    where = "the request's parameters"
    parameters = tensors.parameters_of(body, where)
    as_binary = tensors.flag(parameters, "binary_data_output", False, where)
    outputs = dict(_outputs(body.get("outputs") or [], as_binary))
    new_classes = tensors.flag(parameters, "new_classes", False, where)
    labels = next((inputs[name] for name in ("labels", "target", "label") if name in inputs), ())
    return InferenceRequest(request_id, inputs["x"], labels, outputs, as_binary, new_classes)


def _split(request: Request) -> tuple[dict[str, Any], memoryview]:
    """(JSON, binary data after it)."""
    length, text = len(request.body), request.head.headers.get(HEADER_LENGTH.lower())
    if text is not None:
        if not re.fullmatch("[0-9]{1,18}", text) or int(text) > length:
            raise MessageError(f"{HEADER_LENGTH} is '{text[:20]}'", expected=f"at most {length}, the body's length")
        length = int(text)
    if length > MAX_JSON_BYTES:
        raise Refused(413, f"{length} bytes of JSON are over the limit of {MAX_JSON_BYTES}: send the tensors as binary "
                           "data")
    try:
        parsed = json.loads(bytes(request.body[:length]), parse_constant=_refuse_constant)
    except (ValueError, RecursionError) as error:
        raise MessageError(f"the request is not JSON: {str(error)[:200]}") from error
    if not isinstance(parsed, dict):
        raise MessageError("the request is not a JSON object")
    return parsed, memoryview(request.body)[length:]


def _refuse_constant(constant: str) -> typing.NoReturn:
    raise ValueError(f"JSON has no number {constant}")


def _outputs(outputs: Any, as_binary: bool) -> Iterator[tuple[str, bool]]:
    """(name, whether as binary data) of each requested output."""
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


def _available(answer: Answer) -> dict[str, tuple[str, Sequence[int], Sequence[Any]]]:
    """Output -> type, shape and values."""
    n, rows = answer.samples, answer.values or answer.probabilities
    if answer.threshold is not None:
        return {"score": ("FP32", (n,), [row[0] for row in rows]), "alarm": ("BOOL", (n,), answer.alarms)}
    numbers = "FP32", (n, len(rows[0])), list(chain.from_iterable(rows))
    return {"values": numbers} if answer.values else {
        "probabilities": numbers,
        **({} if answer.label_sets else {"label": ("BYTES", (n,), answer.labels)}),
        **({"answered": ("BOOL", numbers[1], _answered(answer))} if answer.label_sets else {}),
        **({"unknown": ("BOOL", (n,), answer.unknown)} if answer.unknown else {}),
    }


def _answered(answer: Answer) -> list[bool]:
    """Whether each label of each sample is answered, row by row."""
    return [name in names for names in map(set, answer.label_sets) for name in answer.outputs]


def _response(
    request: InferenceRequest, answer: Answer, name: str, calibration_error: float | None
) -> Response:
    available = _available(answer)
    outputs, tails = [], []
    for output, binary in (request.outputs or dict.fromkeys(available, request.binary)).items():
        if output not in available:
            raise MessageError(f"there is no output '{output[:80]}'", expected=f"one of {', '.join(available)}")
        written, tail = tensors.write(output, *available[output], binary)
        outputs.append(written)
        tails.append(tail)
    response = as_json({
        "model_name": name, "model_version": str(answer.round),
        **({} if request.id is None else {"id": request.id}),
        "parameters": {"round": answer.round, "model": answer.model, "personalization": answer.personalization,
                       "graph": answer.graph,
                       **({} if answer.threshold is None else {"threshold": answer.threshold}),
                       **({} if calibration_error is None else {"calibration_error": calibration_error})},
        "outputs": outputs,
    })
    if not any("parameters" in output for output in outputs):
        return response
    headers = {"Content-Type": "application/octet-stream", HEADER_LENGTH: str(len(response.body))}
    return Response(200, response.body + b"".join(tails), headers)
