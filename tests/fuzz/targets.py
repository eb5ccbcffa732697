"""The parsers of bytes that come from outside, each as a function of the bytes, with inputs to begin from.

A parser may refuse an input with the product's own errors only. What it returns is thrown away.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import io
import itertools
import json
import re
import tempfile
import types
import typing
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cloud_server.identity import audit_log
from cloud_server.records import tariff
from cloud_server.records.fleet_settings import FleetConfig
from edge_agent.device import fleet_keys
from edge_agent.http import http_messages, inference_protocol
from edge_agent.http.http_messages import Head, Refused, Request
from edge_agent.http.tensors import Form
from edge_agent.sources.text_lines import TextLines
from firmware_profiles.package import device_file
from firmware_profiles.ssh import inventory
from fleet_core.backbone import backbone_file
from fleet_core.backbone.backbone_file import BackboneFile, BackboneInfo
from fleet_core.base import config, schema, storage
from fleet_core.base.errors import FleetError
from fleet_core.board import profile
from fleet_core.board.device_settings import Settings
from fleet_core.codecs.kinds import registry
from fleet_core.data import readers
from fleet_core.data.readers import Cut
from fleet_core.model import graph_bundle, payloads, train_graph
from fleet_core.model.layout import InputSpec, Layout, TensorSpec
from fleet_core.protocol import (
    certificates,
    chunks,
    device_messages,
    enrolment_token,
    messages,
    program_statement,
    round_messages,
    secure_messages,
    succession,
    topics,
)
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.signing import Signer
from tests.support.simulation import toy_layout

LIMIT_BYTES = 1 << 20
"""The limit of the readers of samples: the fuzzer's inputs are shorter, but may claim to hold more."""

CORPUS = Path(__file__).with_name("corpus")
"""First inputs that would differ each time they are made."""

Parser = Callable[[bytes], object]

LAYOUT = Layout(
    "mlp", InputSpec((4,)), ("a", "b"), 3,
    (TensorSpec("w", "body", (3, 4)), TensorSpec("b", "body", (3,)), TensorSpec("h", "head", (2, 3))),
)
GROUPS = ("body", "head")
FORMS: Mapping[str, Form] = {"x": Form("FP32", (2, 2)), "label": Form("BYTES")}


@dataclass(frozen=True)
class Target:
    """parse: raises the product's errors alone, or those in ``refusals``. seeds(): valid inputs."""

    parse: Parser
    seeds: Callable[[], list[bytes]]
    refusals: tuple[type[Exception], ...] = (FleetError,)

    def __call__(self, data: bytes) -> None:
        with contextlib.suppress(*self.refusals):
            self.parse(data)


# Messages -------------------------------------------------------------------------------------------------------------


def example(kind: Any, metadata: Mapping[str, Any] | None = None) -> Any:
    """A valid value of a field's type, with every field of a message set."""
    rules = metadata or {}
    if "choices" in rules:
        return next(iter(rules["choices"]))
    origin, inside = typing.get_origin(kind), typing.get_args(kind)
    if origin in (typing.Union, types.UnionType):
        return example(next(one for one in inside if one is not type(None)), rules)
    if origin is tuple:
        return (example(inside[0], rules),)
    if origin is not None and issubclass(origin, Mapping):
        return {"k": example(inside[1], {})}
    if dataclasses.is_dataclass(kind) and isinstance(kind, type):
        hints = typing.get_type_hints(kind)
        return kind(**{f.name: example(hints[f.name], f.metadata) for f in dataclasses.fields(kind) if f.init})
    if kind is str:
        pattern = rules.get("pattern", "")
        known = ("a", "0" * 32, "0" * 64, "0" * 16, "1-2", "")
        return next((text for text in known if re.fullmatch(pattern, text)), "a")
    return {bool: True, int: rules.get("min", 1), float: min(1.5, rules.get("max", 1.5))}.get(kind, 1)


MESSAGES: tuple[type[Any], ...] = (
    round_messages.Manifest, round_messages.PerDevice, round_messages.UploadManifest, device_messages.Presence,
    device_messages.Report, device_messages.Down, device_messages.EnrolRequest, device_messages.EnrolAnswer,
    device_messages.ServerPresence, device_messages.Question, device_messages.Answer, secure_messages.SignedKeys,
    secure_messages.SealedShares, secure_messages.Revealed, secure_messages.SecureStep, succession.Succession,
    succession.Announced, succession.Authorities, program_statement.Announcement,
)


def _message(cls: type[Any]) -> Target:
    def seeds() -> list[bytes]:
        full = messages.encode(example(cls))
        return [full, b"{}", messages.encode(example(cls), packed=True)]

    return Target(functools.partial(messages.decode, cls), seeds)


def _whole_update(data: bytes) -> object:
    """``data`` is such a message without its id, which a fuzzer would not find."""
    end = round_messages.LENGTH_BYTES + int.from_bytes(data[: round_messages.LENGTH_BYTES], "big")
    blob = Blob.of(data[end:], max(len(data[end:]), round_messages.SMALLEST_CHUNK))
    return round_messages.whole_update(bytes.fromhex(blob.id) + data)


def _whole_updates() -> list[bytes]:
    content = b"an update"
    upload = dataclasses.replace(
        example(round_messages.UploadManifest), blob=Blob.of(content, round_messages.SMALLEST_CHUNK)
    )
    return [
        round_messages.with_its_bytes(upload, content, packed=packed)[round_messages.ID_BYTES :]
        for packed in (messages.PLAIN, messages.SHORT)
    ]


def _topic(data: bytes) -> object:
    return topics.parse("fleet", data.decode("utf-8", "replace"))


def _ranges(data: bytes) -> object:
    return chunks.from_ranges(data.decode("utf-8", "replace"), 1 << 16)


ROLLED = [Signer(bytes([n]) * 32) for n in range(3)]
LINKS = [
    old.sign(messages.encode(succession.Succession("fleet", n + 1, old.public, new.public, 1, 2))).decode()
    for n, (old, new) in enumerate(itertools.pairwise(ROLLED))
]


def _links(data: bytes) -> object:
    announced = messages.decode(succession.Announced, data)
    return succession.Keyring(ROLLED[0].public, fleet="fleet").extended(announced.links)


def _kept_links(path: Path) -> object:
    return fleet_keys.ring_of(path.parent, ROLLED[0].public, "fleet")


STATEMENT = program_statement.Statement(
    "lab", "0.1.0-abc", "3.13", "aarch64", 1, "0" * 64, "0" * 64, 1, files={"install.sh": "0" * 64},
)


# Models and updates ---------------------------------------------------------------------------------------------------


def _weights() -> dict[str, dict[str, Any]]:
    rng = np.random.default_rng(0)
    return {g: {t.name: rng.normal(size=t.shape).astype(np.float32) for t in LAYOUT.tensors if t.group == g}
            for g in GROUPS}


def _payload(name: str) -> Target:
    return Target(
        lambda data: payloads.decode(name, data, LAYOUT, GROUPS),
        lambda: [payloads.encode(name, _weights(), (0, 1, 2))],
    )


def _safetensors() -> list[bytes]:
    return [storage.pack({"a": np.ones((2, 2), np.float32), "b": np.zeros(0, np.uint8)}, {"k": "v"}), storage.pack({})]


@functools.cache
def _plain() -> graph_bundle.Graph:
    """Small enough for the fuzzer to change: graphs are bytes to a reader that does not open them."""
    from tests.support import bundles

    return dataclasses.replace(bundles.plain(), graphs={kind: b"g" for kind in bundles.plain().graphs})


@functools.cache
def _train_graph() -> train_graph.TrainGraph:
    from tests.support.train_graphs import train_graph as made

    graph = made("fedavg")
    return dataclasses.replace(graph, graphs={kind: b"g" for kind in graph.graphs})


def _backbone() -> bytes:
    """As above: without an ONNX file that anybody opens."""
    info = BackboneInfo(1, "b", "z", InputSpec((2,)), 3, 0.01, 10, 18, "1.23.2")
    golden = {"x": np.ones((1, 2), np.float32), "z": np.ones((1, 3), np.float32)}
    return backbone_file.pack(BackboneFile(info, b"g", golden))


# Files ----------------------------------------------------------------------------------------------------------------


@functools.cache
def _folder() -> Path:
    """A folder, in memory where the machine has that."""
    memory = Path("/dev/shm")
    holder = tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else None)
    _kept.append(holder)
    return Path(holder.name)


_kept: list[tempfile.TemporaryDirectory[str]] = []


def _file(name: str, read: Callable[[Path], object]) -> Parser:
    def parse(data: bytes) -> object:
        path = _folder() / name
        path.write_bytes(data)
        return read(path)

    return parse


def _samples(name: str, cut: Cut, *seeds: bytes) -> Target:
    """seeds: beside a truncated one."""
    read = _file(name, lambda path: readers.read(path, LIMIT_BYTES, cut, expected="samples"))
    return Target(read, lambda: [*seeds, seeds[0][: len(seeds[0]) // 2]])


def _npz(**arrays: Any) -> bytes:
    made = io.BytesIO()
    np.savez(made, **arrays)
    return made.getvalue()


def _toml(name: str, read: Callable[[Path], object], *seeds: str) -> Target:
    return Target(_file(name, read), lambda: [text.encode() for text in seeds])


FLEET = '''\
[fleet]
name = "f"
method = "fedavg"
[model]
name = "mlp"
classes = ["a", "b"]
[model.input]
shape = [4]
'''
CARD = '''\
name = "kitchen"
fleet = "."
board = "raspberry-pi-4b"
broker = "mqtts://192.168.1.10:8883"
[wifi]
ssid = "Home"
country = "DE"
password = "12345678"
[data]
path = "samples.npz"
'''


def _example(cls: type[Any]) -> str:
    return config.toml(schema.plain(example(cls)))


def _device_file() -> str:
    settings = schema.plain(example(Settings))
    del settings["source"], settings["button"]  # tables, which config.toml does not write
    source, button = 'kind = "command"\ncommand = ["cat"]', 'kind = "gpio"\nline = 17\nlabel = "a"'
    return config.toml(settings) + f"\n[[source]]\n{source}\n\n[[button]]\n{button}\n"


def _profiles() -> Iterator[str]:
    import firmware_profiles

    yield from (path.read_text() for path in sorted(firmware_profiles.folder().glob("*.toml"))[:3])


def _audit(data: bytes) -> object:
    (_folder() / "audit.ndjson").write_bytes(data)
    return audit_log.read(_folder()), audit_log.check(_folder())


# HTTP, tokens, certificates -------------------------------------------------------------------------------------------


def _http(data: bytes) -> object:
    """A head, and its body as a question."""
    text, _, body = data.partition(b"\r\n\r\n")
    head = http_messages.parse_head(text)
    http_messages.body_length(head, LIMIT_BYTES)
    return inference_protocol.parse_request(Request(head, bytearray(body)), FORMS)


def _inference(data: bytes) -> object:
    return inference_protocol.parse_request(Request(Head("POST", "/"), bytearray(data)), FORMS)


QUESTION = json.dumps({
    "id": "1", "inputs": [{"name": "x", "shape": [1, 2, 2], "datatype": "FP32", "data": [1, 2, 3, 4]},
                          {"name": "label", "shape": [1], "datatype": "BYTES", "data": ["a"]}],
    "outputs": [{"name": "label", "parameters": {"binary_data": True}}],
}).encode()


HEAD = b"POST /v2/models/m/infer HTTP/1.1\r\nHost: a\r\nContent-Length: 1\r\n\r\n"


TARGETS: dict[str, Target] = {
    **{re.sub("([a-z])([A-Z])", r"\1-\2", cls.__name__).lower(): _message(cls) for cls in MESSAGES},
    **{f"codec-{name}": _payload(name) for name in registry.CODECS},
    "whole-update": Target(_whole_update, _whole_updates),
    "topic": Target(_topic, lambda: [b"fl1/fleet/d/dev/up/3/m", b"fl1/fleet/en/0"]),
    "ranges": Target(_ranges, lambda: [b"1-3,7", b""]),
    "program-statement": Target(program_statement.parse, lambda: [STATEMENT.text()]),
    "program-manifest": Target(program_statement.parse_manifest, lambda: [f"{'0' * 64}  bin/edge-agent\n".encode()]),
    "successions": Target(_links, lambda: [messages.encode(succession.Announced(tuple(LINKS)))]),
    "fleet-keys": Target(_file(fleet_keys.FILE, _kept_links), lambda: [json.dumps({"links": LINKS}).encode()]),
    "safetensors": Target(lambda data: storage.unpack(data), _safetensors),
    "bundle": Target(graph_bundle.unpack, lambda: [graph_bundle.pack(_plain())]),
    "backbone": Target(backbone_file.parsed, lambda: [_backbone()]),
    "train-graph": Target(
        lambda data: train_graph.unpack(data, toy_layout()), lambda: [train_graph.pack(_train_graph())]
    ),
    "csv": _samples("s.csv", Cut(), b"label,a,b\nx,1,2\ny,3,4\n", b"label,a_0,a_1,b_0,b_1\nx,1,2,3,4\n"),
    "csv-windows": _samples("w.csv", Cut(window=2, stride=1), b"label,time,a\nx,1,2\nx,2,4\ny,3,1\ny,4,1\n"),
    "ndjson": _samples("s.ndjson", Cut(), b'{"label": "x", "x": [1, 2]}\n{"label": "y", "x": [3, 4]}\n'),
    "reading-lines": Target(
        lambda data: TextLines().message(data),
        lambda: [b"time,ax,label\n0.1,9.8,on\n0.2,9.7,\n", b'{"ax": 1, "label": "on"}\n[1, 2]\n',
                 b'{"x": [[1, 2], [3, 4]]}'],
    ),
    "npz": _samples("s.npz", Cut(), _npz(x=np.ones((2, 3), np.float32), y=np.array(["a", "b"]))),
    "fleet-file": _toml("fleet.toml", lambda path: config.load(FleetConfig, path), FLEET),
    "card-file": _toml("card.toml", lambda path: device_file.load(path, {}), CARD),
    "device-file": _toml("device.toml", lambda path: config.load(Settings, path), _device_file()),
    "inventory": _toml("inventory.toml", inventory.load, '[[devices]]\nfile = "tariff.toml"\nto = "ssh://pi@host:22"\n'),
    "tariff": _toml("tariff.toml", tariff.load, 'currency = "EUR"\nsource = "t"\nper_mb = 0.1\n'),
    "profile": Target(_file("p.toml", lambda path: config.load(profile.Profile, path)),
                      lambda: [text.encode() for text in _profiles()]),
    "token": _toml("token.toml", enrolment_token.load, _example(enrolment_token.Token)),
    "http": Target(_http, lambda: [HEAD + QUESTION], (FleetError, Refused)),
    "inference": Target(_inference, lambda: [QUESTION], (FleetError, Refused)),
    "certificate-request": Target(certificates.requested_key, lambda: [(CORPUS / "request.der").read_bytes()]),
    "certificate": Target(
        lambda data: certificates.certificate_of(data, "x"), lambda: [(CORPUS / "certificate.pem").read_bytes()]
    ),
    "audit-log": Target(_audit, lambda: [b'{"id":"1","at":1.0,"by":"x","action":"pause","device":"","previous":""}\n']),
}
