"""The messages of the protocol as frozen dataclasses: JSON that a person can read in ``mosquitto_sub``.

Within the major version unknown keys are ignored and a missing key has its default, so that fleets can be updated one
device at a time. Every parser is bounded.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from fleet_core.base import schema
from fleet_core.base.errors import MessageError

PROTOCOL = 1
MAX_MESSAGE_BYTES = 1 << 20
MAX_BLOB_BYTES = 1 << 32
ID = r"[0-9a-f]{32}"
CHUNK_HASH_DIGITS = 16

T = TypeVar("T")


def _whole(maximum: int, minimum: int = 0) -> dict[str, int]:
    return {"min": minimum, "max": maximum}


@dataclass(frozen=True)
class Blob:
    """Bytes cut in chunks. root: sha256, in hex, over the sha256s of the chunks in order; id: its first 32 digits.
    size, chunk: bytes. n: chunks. hashes: the first 16 hex digits of each chunk's sha256, one after the other."""

    id: str = field(metadata={"pattern": ID})
    root: str = field(metadata={"pattern": r"[0-9a-f]{64}"})
    size: int = field(metadata=_whole(MAX_BLOB_BYTES, 1))
    chunk: int = field(metadata=_whole(1 << 24, 1024))
    n: int = field(metadata=_whole(1_000_000, 1))
    hashes: str = field(metadata={"max_length": 16_000_000})

    @staticmethod
    def of(data: bytes, chunk: int) -> Blob:
        import hashlib  # loads OpenSSL: 4 MB that answering does without

        view = memoryview(data)
        digests = [hashlib.sha256(view[k : k + chunk]).digest() for k in range(0, max(1, len(data)), chunk)]
        root = hashlib.sha256(b"".join(digests)).hexdigest()
        hashes = "".join(digest.hex()[:CHUNK_HASH_DIGITS] for digest in digests)
        return Blob(root[:32], root, len(data), chunk, len(digests), hashes)

    def check(self, limit: int) -> Blob:
        """Itself when it is consistent and at most ``limit`` bytes. Raises MessageError, before memory is taken."""
        if self.size > limit:
            raise MessageError(f"a blob of {self.size} bytes", expected=f"at most {limit}")
        if self.n != -(-self.size // self.chunk) or len(self.hashes) != self.n * CHUNK_HASH_DIGITS:
            raise MessageError(f"{self.n} chunks of {self.chunk} bytes do not make {self.size} bytes")
        if not self.root.startswith(self.id):
            raise MessageError("a blob's id is not the start of its root")
        return self

    def length(self, k: int) -> int:
        """Bytes of chunk ``k``."""
        return min(self.chunk, self.size - k * self.chunk)

    def hash(self, k: int) -> str:
        return self.hashes[k * CHUNK_HASH_DIGITS : (k + 1) * CHUNK_HASH_DIGITS]


@dataclass(frozen=True)
class MethodRef:
    """A method by name and version, with every hyper-parameter."""

    name: str = field(metadata={"max_length": 64})
    version: int = 1
    hyper: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cohort:
    """Who takes part: the devices by name, or the rule that each device can apply to itself (see ``cohort``)."""

    devices: tuple[str, ...] | None = None
    rule: str | None = None
    seed: int = 0
    limit: str = ""


@dataclass(frozen=True)
class ModelRef:
    """A model to fetch. model: id of the decoded weights. base: id of the weights that the blob is a delta to, or None.
    full: the same model whole, for a device that lacks the base."""

    model: str = field(metadata={"pattern": ID})
    blob: Blob
    codec: str = field(metadata={"max_length": 32})
    base: str | None = field(default=None, metadata={"pattern": ID})
    full: Blob | None = None
    round: int = field(default=0, metadata=_whole(1_000_000_000))

    def blobs(self) -> list[Blob]:
        """The blobs that give this model."""
        return [self.blob] if self.full is None else [self.blob, self.full]


@dataclass(frozen=True)
class Counted:
    """The updates that round ``round`` counted, by ``mark``, or in a blob (one mark a line) when there are many."""

    round: int = field(metadata=_whole(1_000_000_000))
    ids: tuple[str, ...] | None = None
    blob: Blob | None = None


@dataclass(frozen=True)
class UploadRules:
    """max: bytes of one update. chunk: bytes of one publish. codecs: accepted, the preferred one first."""

    max: int = field(default=1 << 28, metadata=_whole(MAX_BLOB_BYTES, 1))
    chunk: int = field(default=61440, metadata=_whole(1 << 24, 1024))
    codecs: tuple[str, ...] = ("fp32",)


@dataclass(frozen=True)
class Manifest:
    """The current round, signed. open: updates are being collected. exp: Unix ms after which it is void. given: a list
    (``PerDevice``) of blobs, one for each device that is asked, of what it alone receives to train on; none for most
    methods."""

    v: int
    fleet: str = field(metadata={"max_length": 64})
    round: int = field(metadata=_whole(1_000_000_000))
    seq: int = field(metadata=_whole(1 << 53))
    exp: int = field(metadata=_whole(1 << 53))
    deadline_s: float = field(metadata={"above": 0, "max": 1e7})
    method: MethodRef
    cohort: Cohort
    model: ModelRef
    graph: Blob | None = None
    serve: ModelRef | None = None
    layout: str = ""
    scalars: Mapping[str, float] = field(default_factory=dict)
    dual_epoch: int = field(default=0, metadata=_whole(1_000_000_000))
    counted: tuple[Counted, ...] = ()
    up: UploadRules = field(default_factory=UploadRules)
    open: bool = True
    per_device: Blob | None = field(default=None, metadata={"key": "given"})

    def blobs(self) -> list[Blob]:
        """Every blob that it names."""
        single = [self.graph, self.per_device, *(record.blob for record in self.counted)]
        models = [model for model in (self.model, self.serve) if model is not None]
        return [blob for blob in single if blob is not None] + [blob for model in models for blob in model.blobs()]


@dataclass(frozen=True)
class PerDevice:
    """What every device of a round fetches for itself alone, in fp32: devices by name, and the blob of each. It is a
    blob of its own, so that the manifest has one size for any cohort; the manifest's signature covers it by its id."""

    devices: tuple[str, ...] = field(metadata={"max_length": 1_000_000})
    blobs: tuple[Blob, ...] = field(metadata={"max_length": 1_000_000})

    def of(self, device: str) -> Blob | None:
        """None for a device that is not listed."""
        return dict(zip(self.devices, self.blobs, strict=False)).get(device)


@dataclass(frozen=True)
class Presence:
    """A device's state. boot: changes at every start. ph: phase. train: it can train. base: model id that it holds.
    cannot: why it does not, or empty. most: parameters of the largest model that it trains, 0 for any. beat: a
    heartbeat; it says nothing but the phase."""

    st: str = field(metadata={"choices": ("on", "off")})
    boot: str = field(default="", metadata={"max_length": 64})
    ph: str = field(default="idle", metadata={"max_length": 32})
    ver: str = field(default="", metadata={"max_length": 32})
    proto: int = PROTOCOL
    methods: Mapping[str, int] = field(default_factory=dict)
    codecs: tuple[str, ...] = ("fp32",)
    layouts: tuple[str, ...] = ()
    ram: int = 0
    train: bool = True
    cannot: str = field(default="", metadata={"max_length": 200})
    most: int = field(default=0, metadata=_whole(1 << 40))
    base: str = field(default="", metadata={"max_length": 32})
    beat: bool = False


@dataclass(frozen=True)
class Cost:
    """What an update cost the device: bytes of payload, CPU seconds, energy in joules with its source or None."""

    bytes: int = 0
    cpu_s: float = 0.0
    flops: float | None = None
    energy: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class UpdateRef:
    """A round and an update id."""

    round: int = field(metadata=_whole(1_000_000_000))
    id: str = field(metadata={"pattern": ID})


BEGINS = UpdateRef(0, "0" * 32)


@dataclass(frozen=True)
class UploadManifest:
    """Announces an update. base: id of the weights it was trained from. after: the device's last update that was
    counted in this dual epoch, as its training state has it; ``BEGINS`` for a device without; None if it does not say.
    """

    blob: Blob
    codec: str = field(metadata={"max_length": 32})
    base: str = field(metadata={"pattern": ID})
    method: str = field(metadata={"max_length": 64})
    layout: str = field(metadata={"max_length": 64})
    dual_epoch: int = 0
    samples: int = field(default=0, metadata=_whole(1 << 40))
    scalars: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    after: UpdateRef | None = None

    @property
    def id(self) -> str:
        return self.blob.id


@dataclass(frozen=True)
class Evaluation:
    """How a device's own model did on samples that it never trained on. stage: before, fine_tuned or after.
    confusion: counts, row = truth, column = answer."""

    stage: str = field(metadata={"choices": ("before", "fine_tuned", "after")})
    method: str = field(metadata={"max_length": 64})
    confusion: tuple[tuple[int, ...], ...] = field(metadata={"max_length": 1000, "min": 0, "max": 1 << 40})


@dataclass(frozen=True)
class Alone:
    """What a device could answer without the fleet, on the samples of its evaluations. frequent: the class that most of
    its own labelled samples have. method, confusion: of the plain baseline
    (``fleet_core.personalization.plain_baseline``) fitted to these, counts as in ``Evaluation``; empty where there is
    none."""

    frequent: int = field(metadata=_whole(1_000_000))
    method: str = field(default="", metadata={"max_length": 64})
    confusion: tuple[tuple[int, ...], ...] = field(default=(), metadata={"max_length": 1000, "min": 0, "max": 1 << 40})


@dataclass(frozen=True)
class Energy:
    """Joules of one phase (train, adapt, serve, radio, idle) since the agent's boot."""

    phase: str = field(metadata={"max_length": 16})
    joules: float = field(metadata={"min": 0, "max": 1e12})
    source: str = field(metadata={"max_length": 200})
    measured: bool


@dataclass(frozen=True)
class Traffic:
    """Bytes since the agent's boot. mqtt: of the socket before TLS; wire: with TCP and IP headers, or None."""

    mqtt_up: int = field(default=0, metadata=_whole(1 << 60))
    mqtt_down: int = field(default=0, metadata=_whole(1 << 60))
    wire_up: int | None = field(default=None, metadata=_whole(1 << 60))
    wire_down: int | None = field(default=None, metadata=_whole(1 << 60))
    payload: Mapping[str, int] = field(default_factory=dict, metadata=_whole(1 << 60))


@dataclass(frozen=True)
class RenewalRequest:
    """A device asks for its next certificate. csr: a signing request with a new key, DER in base64. signature: of the
    present key over ``certificates.renewal``, DER in base64. serial: of the present certificate, in hex."""

    csr: str = field(metadata={"max_length": 4096})
    signature: str = field(metadata={"max_length": 256})
    serial: str = field(metadata={"pattern": r"[0-9a-f]{1,40}"})


@dataclass(frozen=True)
class Report:
    """Metrics and costs outside an upload. failed: why the device delivers nothing this round. want: ``full`` when it
    lacks the base of the round's model, ``chunks`` when what is retained does not come. pending: an update of an older
    round whose fate it asks for. flops: since boot. renew: asks for the next certificate, and reports nothing else.
    alone: beside the evaluations; None where it was not measured."""

    round: int = field(metadata=_whole(1_000_000_000))
    boot: str = field(default="", metadata={"max_length": 64})
    evaluated_round: int | None = field(default=None, metadata={**_whole(1_000_000_000), "key": "judged_round"})
    evaluations: tuple[Evaluation, ...] = field(default=(), metadata={"key": "judgements"})
    energy: tuple[Energy, ...] = ()
    traffic: Traffic | None = None
    flops: float | None = field(default=None, metadata={"min": 0})
    want: str | None = field(default=None, metadata={"choices": ("full", "chunks")})
    pending: UpdateRef | None = None
    new: bool = False
    failed: str = field(default="", metadata={"max_length": 500})
    renew: RenewalRequest | None = None
    alone: Alone | None = None


@dataclass(frozen=True)
class Down:
    """Aggregator to device. t: ``need`` grants, acknowledges and asks again for the chunks in ``miss`` (``0-7,12``), or
    for none yet; ``done`` ends an upload; ``reject`` refuses it; ``counted`` says what became of an old update and is
    signed; ``heard`` acknowledges the presence of the life ``boot``; ``renewed`` is signed and brings the next
    certificate of ``device``, DER in base64, or says the reason why there is none; ``revoked`` is signed and ends the
    life ``boot`` of ``device``, which was taken out of the fleet ``at`` (Unix seconds, None for an older ledger's);
    seq: as high as that of the newest round."""

    t: str = field(metadata={"choices": ("need", "done", "reject", "counted", "heard", "renewed", "revoked")})
    r: int = field(metadata=_whole(1_000_000_000))
    id: str = field(default="", metadata={"pattern": ID + "|"})
    miss: str = field(default="", metadata={"max_length": 10_000})
    ok: bool = True
    reason: str = field(default="", metadata={"max_length": 500})
    device: str = field(default="", metadata={"max_length": 64})
    boot: str = field(default="", metadata={"max_length": 64})
    certificate: str | None = field(default=None, metadata={"max_length": 8192})
    seq: int | None = field(default=None, metadata=_whole(1 << 53))
    at: float | None = field(default=None, metadata={"min": 0, "max": 1e11})


@dataclass(frozen=True)
class EnrolRequest:
    """A token's bearer asks for the certificate of its device. csr: a signing request, DER in base64. signature: of the
    token's key over ``token.signed``, DER in base64."""

    csr: str = field(metadata={"max_length": 4096})
    signature: str = field(metadata={"max_length": 256})


@dataclass(frozen=True)
class EnrolAnswer:
    """certificate: the device's own, DER in base64; it needs no other proof than its issuer's signature. refused: why
    there is none."""

    certificate: str = field(default="", metadata={"max_length": 8192})
    refused: str = field(default="", metadata={"max_length": 500})


@dataclass(frozen=True)
class ServerPresence:
    """The aggregator's presence: on or off, and an epoch that changes at every start."""

    st: str = field(metadata={"choices": ("on", "off")})
    boot: str = field(default="", metadata={"max_length": 64})
    ver: str = ""


@dataclass(frozen=True)
class Question:
    """A prediction asked for: ``x`` holds base64 of the raw array's bytes, little-endian."""

    shape: tuple[int, ...] = field(metadata={"min": 1, "max": 1_000_000, "max_length": 5})
    dtype: str = field(metadata={"choices": ("float32", "uint8", "int64")})
    x: str = field(metadata={"max_length": MAX_MESSAGE_BYTES})


@dataclass(frozen=True)
class Answer:
    """labels: class names. probabilities: one row a sample. unknown: which samples are far from all that the device
    knows, empty where that is not told. round: of the meta-model. error: why there is no answer. classes: the names
    of the probabilities, where the device has classes of its own after the fleet's; else empty. graph: that answered,
    ``predict``, or ``embed`` or ``embed-int8`` where it is compared with the device's own samples."""

    labels: tuple[str, ...] = ()
    probabilities: tuple[tuple[float, ...], ...] = ()
    unknown: tuple[bool, ...] = ()
    round: int = 0
    model: str = ""
    personalization: str = ""
    error: str = field(default="", metadata={"max_length": 1000})
    classes: tuple[str, ...] = field(default=(), metadata={"max_length": 11_000})
    graph: str = field(default="", metadata={"max_length": 32})


def mark(round_number: int, device: str, update_id: str) -> str:
    """An update in a list of counted ones: other devices, and other rounds, may have sent the same bytes."""
    import hashlib

    return hashlib.sha256(f"{round_number}/{device}/{update_id}".encode()).hexdigest()[:32]


def encode(message: Any) -> bytes:
    """A message as compact JSON; fields that are None are left out."""
    return json.dumps(_pruned(schema.plain(message)), separators=(",", ":"), allow_nan=False).encode()


def decode(cls: type[T], data: bytes, *, limit: int = MAX_MESSAGE_BYTES) -> T:
    """JSON bytes as a ``cls``. Raises MessageError that names the keys at fault."""
    if len(data) > limit:
        raise MessageError(f"a message of {len(data)} bytes", expected=f"at most {limit}")
    try:
        value = json.loads(data)
    except (ValueError, RecursionError) as error:
        raise MessageError("a message that is no JSON") from error
    message, problems = schema.read(cls, value, unknown="ignore")
    if message is None:
        raise MessageError(f"a malformed {cls.__name__}: " + "; ".join(map(str, problems[:5])))
    return message


def ranges(numbers: list[int]) -> str:
    """Rising numbers as ``0-7,12``."""
    parts: list[str] = []
    start = previous = -2
    for n in [*numbers, -2]:
        if n != previous + 1:
            if start >= 0:
                parts.append(str(start) if start == previous else f"{start}-{previous}")
            start = n
        previous = n
    return ",".join(parts)


def numbers(text: str, limit: int) -> list[int]:
    """The inverse of ``ranges`` for numbers below ``limit``. Raises MessageError."""
    found: list[int] = []
    for part in text.split(",") if text else []:
        match = re.fullmatch(r"(\d{1,9})(?:-(\d{1,9}))?", part, re.ASCII)
        first, last = (int(match[1]), int(match[2] or match[1])) if match else (0, -1)
        if not first <= last < limit or (found and first <= found[-1]):
            raise MessageError(f"'{text[:80]}' is no list of chunks", expected=f"rising ranges below {limit}")
        found.extend(range(first, last + 1))
    return found


def _pruned(value: Any) -> Any:
    if isinstance(value, dict):
        return {k: _pruned(v) for k, v in value.items() if v is not None}
    return [_pruned(v) for v in value] if isinstance(value, list) else value
