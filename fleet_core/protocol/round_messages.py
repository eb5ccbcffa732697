"""The messages of a round: the manifest that opens it, the manifest of an upload, and a whole update."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from fleet_core.base import schema
from fleet_core.base.errors import MessageError
from fleet_core.protocol import messages
from fleet_core.protocol.chunks import MAX_BLOB_BYTES, Blob
from fleet_core.protocol.messages import ID, ROUND, whole
from fleet_core.protocol.secure_messages import SecureRules

MAX_NORM = 1e30
PLACES = {"max_length": 60_000, "pattern": r"[0-9,-]+"}
"""Limits on places in a layout as text; enough for every second of 10,000 arrays."""
WHOLE = "w"
"""Stands for the chunk's number in the topic of a whole update."""
ID_BYTES, LENGTH_BYTES = 16, 4
SMALLEST_CHUNK = 1024


@dataclass(frozen=True)
class MethodRef:
    """A method by name and version, with every hyper-parameter."""

    name: str = field(metadata={"max_length": 64})
    version: int = 1
    hyper: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Cohort:
    """Who takes part: devices by name, or a rule that each device applies to itself (see ``protocol.cohort``)."""

    devices: tuple[str, ...] | None = None
    rule: str | None = None
    seed: int = 0
    limit: str = ""


@dataclass(frozen=True)
class ModelRef:
    """A model to fetch.

    model: id of the decoded weights. base: id of the weights that ``blob`` is a delta to, or None. For a device that
    lacks the base: chain: a list of deltas that lead to it (``protocol.chain_message``); full: the same model without
    a base. arrays: those in which the model differs from its base, which are all that the delta has, as places in the
    layout (``Layout.places``); None for all. part: values of these arrays, whole, for a device that holds other weights
    whose remaining arrays have the id ``rest``.
    """

    model: str = field(metadata={"pattern": ID})
    blob: Blob
    codec: str = field(metadata={"max_length": 32})
    base: str | None = field(default=None, metadata={"pattern": ID})
    full: Blob | None = None
    round: int = field(default=0, metadata=ROUND)
    chain: Blob | None = None
    arrays: str | None = field(default=None, metadata=PLACES)
    part: Blob | None = None
    rest: str | None = field(default=None, metadata={"pattern": ID})

    def blobs(self) -> list[Blob]:
        """The blobs named here."""
        return [blob for blob in (self.blob, self.full, self.chain, self.part) if blob is not None]


@dataclass(frozen=True)
class Counted:
    """The updates that round ``round`` counted: their ``mark``s, or, when there are many, a blob with one per line."""

    round: int = field(metadata=ROUND)
    ids: tuple[str, ...] | None = None
    blob: Blob | None = None


@dataclass(frozen=True)
class PrivacyRules:
    """How a device clips and noises its update (``fleet_core.privacy``), before anything else. It refuses a manifest
    with an unknown mode. clip: Euclidean norm. noise: standard deviation over clip, which a device
    adds in the mode ``local`` alone."""

    mode: str = field(metadata={"choices": ("local", "central")})
    clip: float = field(metadata={"above": 0, "max": 1e9})
    noise: float = field(metadata={"above": 0, "max": 1e9})

    def __str__(self) -> str:
        return f"{self.mode} clip {self.clip!r} noise {self.noise!r}"


@dataclass(frozen=True)
class UploadRules:
    """max: bytes of one update. chunk: bytes of one publish. codecs: those accepted, the preferred one first.
    least_norm: in place of an update of a smaller Euclidean norm a note (``nothing``) is sent; 0: every update is sent.
    privacy: None for updates as they are. secure: the rules of secure aggregation; None for none. whole: bytes of the
    largest update that may come with its offer, in one message."""

    max: int = field(default=1 << 28, metadata=whole(MAX_BLOB_BYTES, 1))
    chunk: int = field(default=61440, metadata=whole(1 << 24, SMALLEST_CHUNK))
    codecs: tuple[str, ...] = ("fp32",)
    least_norm: float = field(default=0.0, metadata={"min": 0, "max": MAX_NORM})
    privacy: PrivacyRules | None = None
    secure: SecureRules | None = None
    whole: int = field(default=0, metadata=whole(1 << 24))

    @property
    def local_noise(self) -> float:
        """The multiplier of the noise that each device adds; 0 for none."""
        return self.privacy.noise if self.privacy is not None and self.privacy.mode == "local" else 0.0


@dataclass(frozen=True)
class Manifest:
    """The signed message that describes the current round.

    open: whether updates are being collected. exp: Unix ms after which the manifest is void. per_device (``given`` on
    the wire): a ``PerDevice`` list of what each device of the cohort alone receives; None for most methods. train: the
    arrays that the round trains, as places in the layout (``Layout.places``); None for all. steps: the graph ``train``
    (``fleet_core.model.train_graph``), for devices that train without torch; None: there is none. backbone: the file of
    the layout's backbone; None for a layout without one.
    """

    v: int
    fleet: str = field(metadata={"max_length": 64})
    round: int = field(metadata=ROUND)
    seq: int = field(metadata=whole(1 << 53))
    exp: int = field(metadata=whole(1 << 53))
    deadline_s: float = field(metadata={"above": 0, "max": 1e7})
    method: MethodRef
    cohort: Cohort
    model: ModelRef
    graph: Blob | None = None
    serve: ModelRef | None = None
    layout: str = ""
    scalars: Mapping[str, float] = field(default_factory=dict)
    dual_epoch: int = field(default=0, metadata=ROUND)
    counted: tuple[Counted, ...] = ()
    up: UploadRules = field(default_factory=UploadRules)
    open: bool = True
    per_device: Blob | None = field(default=None, metadata={"key": "given"})
    train: str | None = field(default=None, metadata=PLACES)
    steps: Blob | None = None
    backbone: Blob | None = field(default=None, metadata={"sparse": True})

    def blobs(self) -> list[Blob]:
        """Every blob that the manifest names."""
        single = [self.graph, self.steps, self.backbone, self.per_device, *(record.blob for record in self.counted)]
        models = [model for model in (self.model, self.serve) if model is not None]
        return [blob for blob in single if blob is not None] + [blob for model in models for blob in model.blobs()]


@dataclass(frozen=True)
class PerDevice:
    """The blob, in fp32, that each device of a round fetches for itself alone.

    This list is a blob of its own, so that the manifest has one size for any cohort; the manifest's signature covers it
    through its id.
    """

    devices: tuple[str, ...] = field(metadata={"max_length": 1_000_000})
    blobs: tuple[Blob, ...] = field(metadata={"max_length": 1_000_000})

    def of(self, device: str) -> Blob | None:
        """None for a device that is not listed."""
        return dict(zip(self.devices, self.blobs, strict=False)).get(device)


@dataclass(frozen=True)
class UpdateRef:
    """A round and an update id."""

    round: int = field(metadata=ROUND)
    id: str = field(metadata={"pattern": ID})


NO_UPDATE = UpdateRef(0, "0" * 32)


@dataclass(frozen=True)
class Cost:
    """What an update cost the device: bytes of payload, CPU seconds, and energy in joules with its source or None."""

    bytes: int = 0
    cpu_s: float = 0.0
    flops: float | None = None
    energy: Mapping[str, Any] | None = None


@dataclass(frozen=True)
class UploadManifest:
    """Announces an update.

    base: id of the weights it was trained from. after: according to the device's training state, its last update that
    was counted in this dual epoch; ``NO_UPDATE`` when there was none; None when the device does not say. residual:
    Euclidean norm of what the codec left out; None when the device does not say, or sends nothing. train: the arrays
    that it has, as in the round's manifest. privacy: the ``PrivacyRules`` that the device followed, as text; with
    ``local`` noise, samples and loss are left out. secure: the session in which it was masked; then samples, loss and
    residual are left out.
    """

    blob: Blob
    codec: str = field(metadata={"max_length": 32})
    base: str = field(metadata={"pattern": ID})
    method: str = field(metadata={"max_length": 64})
    layout: str = field(metadata={"max_length": 64})
    dual_epoch: int = 0
    samples: int = field(default=0, metadata=whole(1 << 40))
    scalars: Mapping[str, float] = field(default_factory=dict)
    metrics: Mapping[str, float] = field(default_factory=dict)
    cost: Cost = field(default_factory=Cost)
    after: UpdateRef | None = None
    residual: float | None = field(default=None, metadata={"min": 0, "max": MAX_NORM})
    train: str | None = field(default=None, metadata=PLACES)
    privacy: str = field(default="", metadata={"max_length": 200})
    secure: str = field(default="", metadata={"max_length": 32})

    @property
    def id(self) -> str:
        return self.blob.id


def with_its_bytes(upload: UploadManifest, data: bytes, *, packed: int) -> bytes:
    """A whole update in one message: its id, the length of its offer, the offer without ``blob``, and the bytes."""
    offer = messages.encode(upload, packed=packed, without=("blob",))
    return bytes.fromhex(upload.id) + len(offer).to_bytes(LENGTH_BYTES, "big") + offer + data


def whole_update(message: bytes) -> tuple[UploadManifest, bytes]:
    """Reads ``with_its_bytes``. Raises MessageError unless the bytes are those that the id names."""
    begin = ID_BYTES + LENGTH_BYTES
    end = begin + int.from_bytes(message[ID_BYTES:begin], "big")
    data = message[end:]
    if not data:
        raise MessageError(f"a whole update of {len(message)} bytes", expected="its id, its offer and its bytes")
    blob = Blob.of(data, max(len(data), SMALLEST_CHUNK))
    if bytes.fromhex(blob.id) != message[:ID_BYTES]:
        raise MessageError("a whole update does not match its id")
    return messages.decode(UploadManifest, message[begin:end], known={"blob": schema.plain(blob)}), data


def mark(round_number: int, device: str, update_id: str) -> str:
    """Identifies an update in ``Counted``, 32 hex digits. Other devices and rounds may have sent the same bytes."""
    import hashlib  # loads OpenSSL, 4 MB that a process which only answers does not need

    return hashlib.sha256(f"{round_number}/{device}/{update_id}".encode()).hexdigest()[:32]
