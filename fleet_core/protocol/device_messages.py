"""The messages between one device and the aggregator: presence, reports, enrolment, questions and their answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet_core.base.error_bounds import Spread
from fleet_core.protocol import messages
from fleet_core.protocol.messages import ID, MAX_MESSAGE_BYTES, ROUND, whole
from fleet_core.protocol.round_messages import UpdateRef
from fleet_core.protocol.secure_messages import SecureStep

MAX_SOURCE, MAX_ABSENT = 200, 16
"""Characters of a source of joules or of a reason why there are none; reasons in a report."""
MAX_BOARD = 100
AMOUNT = {"min": 0, "max": 1e12}


def reads(packed: bool, dictionary: int) -> int:
    """What the sender of a presence with these fields can read, as ``packed`` of ``messages.encode``."""
    return messages.SHORT if packed and dictionary else int(packed)


@dataclass(frozen=True)
class UpdateState:
    """The state of the last program that the device was asked to fetch.

    system: the system that programs must be made for, as ``aarch64 3.13``. serial, attempt: of the announcement; 0
    before the first one. st: fetching, installing, running (it stays), back (the device went back to the previous
    program), refused. why: the reason for the last two, or for a delay of the others.
    """

    system: str = field(default="", metadata={"max_length": 64})
    serial: int = field(default=0, metadata=whole(10**16))
    attempt: int = field(default=0, metadata=whole(1_000_000))
    st: str = field(default="", metadata={"choices": ("", "fetching", "installing", "running", "back", "refused")})
    why: str = field(default="", metadata={"max_length": 500})


@dataclass(frozen=True)
class Presence:
    """A device's state.

    boot: changes at every start. ph: phase. train: whether it can train. cannot: why it cannot, or empty. most:
    parameters of the largest model that it trains, 0 for no limit. base: id of the model that it holds. chain: whether
    it takes a model as a ``Chain`` of deltas. beat: this is a heartbeat, of which only the phase counts. packed:
    whether it reads manifests under zstd. dictionary: number of the newest dictionary with which it reads them. parts:
    whether it can train a part of a model; None: it does not say. engines: with which it can train, of ``torch`` and
    ``onnx``, the preferred one first; empty: it has torch alone. board: what it is, for people; empty from agents that
    do not say. private: whether it follows ``PrivacyRules``. secure: whether it follows ``SecureRules``: it knows them,
    and has a certificate. key: id of the newest key of the fleet that it has; empty in a fleet that never had another.
    ca: id of the authority of its certificate, likewise. update: of programs that it fetches itself; None: it cannot.
    moved: number of samples that it had answered when it noticed drift; 0: it has noticed none. demands_secure,
    demands_noise: what the device demands of rounds (``device_settings.Demands``). numbers: whether it also masks the
    numbers beside an update.
    """

    st: str = field(metadata={"choices": ("on", "off")})
    boot: str = field(default="", metadata={"max_length": 64})
    ph: str = field(default="idle", metadata={"max_length": 32})
    ver: str = field(default="", metadata={"max_length": 32})
    proto: int = 1
    methods: Mapping[str, int] = field(default_factory=dict)
    codecs: tuple[str, ...] = ("fp32",)
    layouts: tuple[str, ...] = ()
    ram: int = 0
    train: bool = True
    cannot: str = field(default="", metadata={"max_length": 200})
    most: int = field(default=0, metadata=whole(1 << 40))
    base: str = field(default="", metadata={"max_length": 32})
    chain: bool = False
    beat: bool = False
    packed: bool = False
    dictionary: int = field(default=0, metadata={**whole(1_000), "sparse": True})
    parts: bool | None = None
    engines: tuple[str, ...] = field(default=(), metadata={"max_length": 16})
    board: str = field(default="", metadata={"max_length": MAX_BOARD})
    private: bool = False
    secure: bool = False
    update: UpdateState | None = None
    key: str = field(default="", metadata={"max_length": 16})
    ca: str = field(default="", metadata={"max_length": 40})
    moved: int = field(default=0, metadata={**whole(1 << 53), "sparse": True})
    demands_secure: bool = field(default=False, metadata={"sparse": True})
    demands_noise: float = field(default=0.0, metadata={"min": 0, "max": 1e9, "sparse": True})
    numbers: bool = field(default=False, metadata={"sparse": True})

    @property
    def reads(self) -> int:
        return reads(self.packed, self.dictionary)


@dataclass(frozen=True)
class Evaluation:
    """Answers of a device's model on its test samples.

    stage: before personalization, fine_tuned, or after personalization. confusion: counts, row = truth, column =
    answer; empty for a task. gaps: of the bins of confidence (``calibration.gaps``); empty for a task, and from agents
    that do not send them. samples, sums: of a task, from which its measures follow (``Regression.sums``).
    """

    stage: str = field(metadata={"choices": ("before", "fine_tuned", "after")})
    method: str = field(metadata={"max_length": 64})
    confusion: tuple[tuple[int, ...], ...] = field(metadata={"max_length": 1000, "min": 0, "max": 1 << 40})
    samples: int = field(default=0, metadata={**whole(1 << 40), "sparse": True})
    sums: Mapping[str, tuple[float, ...]] | None = field(default=None, metadata={"max_length": 1000, "sparse": True})
    gaps: tuple[float, ...] = field(default=(), metadata={"max_length": 100, "min": -1e12, "max": 1e12, "sparse": True})


@dataclass(frozen=True)
class Alone:
    """What the device could answer without the fleet, on the test samples of its evaluations.

    frequent: the most frequent class of its own labelled samples. method, confusion: of the plain baseline
    (``fleet_core.personalization.plain_baseline``) fitted to those samples, as in ``Evaluation``; empty without one.
    """

    frequent: int = field(metadata=whole(1_000_000))
    method: str = field(default="", metadata={"max_length": 64})
    confusion: tuple[tuple[int, ...], ...] = field(default=(), metadata={"max_length": 1000, "min": 0, "max": 1 << 40})


@dataclass(frozen=True)
class Energy:
    """Joules of one phase (train, adapt, serve, radio, idle) since the agent started. spread: None if measured, and
    from agents that do not send it."""

    phase: str = field(metadata={"max_length": 16})
    joules: float = field(metadata={"min": 0, "max": 1e12})
    source: str = field(metadata={"max_length": MAX_SOURCE})
    measured: bool
    spread: Spread | None = None


@dataclass(frozen=True)
class Traffic:
    """Bytes since the agent started. mqtt: at the socket, before TLS. wire: with TCP and IP headers, or None.
    retransmitted: TCP payload that the device sent again, or None. connected_s: seconds with a connection, or None."""

    mqtt_up: int = field(default=0, metadata=whole(1 << 60))
    mqtt_down: int = field(default=0, metadata=whole(1 << 60))
    wire_up: int | None = field(default=None, metadata=whole(1 << 60))
    wire_down: int | None = field(default=None, metadata=whole(1 << 60))
    payload: Mapping[str, int] = field(default_factory=dict, metadata=whole(1 << 60))
    retransmitted: int | None = field(default=None, metadata=whole(1 << 60))
    connected_s: float | None = field(default=None, metadata=AMOUNT)


@dataclass(frozen=True)
class RenewalRequest:
    """A device asks for its next certificate.

    csr: a signing request with a new key, DER in base64. signature: by the present key over
    ``certificates.renewal_to_sign``, DER in base64. serial: of the present certificate, in hex.
    """

    csr: str = field(metadata={"max_length": 4096})
    signature: str = field(metadata={"max_length": 256})
    serial: str = field(metadata={"pattern": r"[0-9a-f]{1,40}"})


@dataclass(frozen=True)
class Report:
    """Metrics and costs outside an upload.

    failed: why the device delivers no update this round. want: ``full`` when it lacks the base of the round's model,
    ``chunks`` when retained chunks do not arrive. base: with ``full``, id of the training model that it holds, or
    empty; None from agents that take no chain of deltas. pending: an update of an older round; the device asks whether
    it was counted. flops: since the agent started. renew: asks for the next certificate; such a report holds nothing
    else. alone: the baseline of the evaluations, None where it was not measured. absent_terms: "term: reason" for what
    the joules do not include. cpu_s: of the agent and its children since the agent started. peak_mib: most memory that
    they may have held since.
    """

    round: int = field(metadata=ROUND)
    boot: str = field(default="", metadata={"max_length": 64})
    evaluated_round: int | None = field(default=None, metadata={**ROUND, "key": "judged_round"})
    evaluations: tuple[Evaluation, ...] = field(default=(), metadata={"key": "judgements"})
    energy: tuple[Energy, ...] = ()
    traffic: Traffic | None = None
    flops: float | None = field(default=None, metadata={"min": 0})
    want: str | None = field(default=None, metadata={"choices": ("full", "chunks")})
    base: str | None = field(default=None, metadata={"max_length": 32})
    pending: UpdateRef | None = None
    new: bool = False
    failed: str = field(default="", metadata={"max_length": 500})
    renew: RenewalRequest | None = None
    alone: Alone | None = None
    absent_terms: tuple[str, ...] = field(default=(), metadata={"max_length": MAX_SOURCE})
    cpu_s: float | None = field(default=None, metadata=AMOUNT)
    peak_mib: float | None = field(default=None, metadata=AMOUNT)


@dataclass(frozen=True)
class Down:
    """Aggregator to device.

    t is the kind of message:
    need     accepts an upload and asks (again) for the chunks in ``miss`` (``0-7,12``; empty: none yet)
    done     ends the upload
    reject   refuses the upload
    counted  signed: whether an old update was counted
    heard    acknowledges the presence of the start ``boot``
    renewed  signed: the next certificate of ``device``, DER in base64, or the reason why there is none
    secure   signed: a step of secure aggregation
    revoked  signed: ends the start ``boot`` of ``device``, revoked ``at`` (Unix seconds; None: an older ledger's)

    seq: that of the newest round.
    """

    t: str = field(metadata={"choices": ("need", "done", "reject", "counted", "heard", "renewed", "revoked", "secure")})
    r: int = field(metadata=ROUND)
    id: str = field(default="", metadata={"pattern": ID + "|"})
    miss: str = field(default="", metadata={"max_length": 10_000})
    ok: bool = True
    reason: str = field(default="", metadata={"max_length": 500})
    device: str = field(default="", metadata={"max_length": 64})
    boot: str = field(default="", metadata={"max_length": 64})
    certificate: str | None = field(default=None, metadata={"max_length": 8192})
    seq: int | None = field(default=None, metadata=whole(1 << 53))
    at: float | None = field(default=None, metadata={"min": 0, "max": 1e11})
    secure: SecureStep | None = None


@dataclass(frozen=True)
class EnrolRequest:
    """The holder of a token asks for its device's certificate.

    csr: a signing request, DER in base64. signature: by the token's key over ``enrolment_token.to_sign``, DER in
    base64.
    """

    csr: str = field(metadata={"max_length": 4096})
    signature: str = field(metadata={"max_length": 256})


@dataclass(frozen=True)
class EnrolAnswer:
    """certificate: the device's own, DER in base64; the authority's signature is its only proof. refused: why there is
    none."""

    certificate: str = field(default="", metadata={"max_length": 8192})
    refused: str = field(default="", metadata={"max_length": 500})


@dataclass(frozen=True)
class ServerPresence:
    """The aggregator's presence. st: on or off. boot: changes at every start. packed: whether it reads reports and
    offers under zstd. dictionary: number of the newest dictionary with which it reads them."""

    st: str = field(metadata={"choices": ("on", "off")})
    boot: str = field(default="", metadata={"max_length": 64})
    ver: str = ""
    packed: bool = False
    dictionary: int = field(default=0, metadata={**whole(1_000), "sparse": True})

    @property
    def reads(self) -> int:
        return reads(self.packed, self.dictionary)


@dataclass(frozen=True)
class Question:
    """A request for predictions. x: the raw array's little-endian bytes in base64."""

    shape: tuple[int, ...] = field(metadata={"min": 1, "max": 1_000_000, "max_length": 5})
    dtype: str = field(metadata={"choices": ("float32", "uint8", "int64")})
    x: str = field(metadata={"max_length": MAX_MESSAGE_BYTES})


@dataclass(frozen=True)
class Answer:
    """Predictions for the samples of a ``Question``.

    labels: class names. probabilities: one row per sample. unknown: for each sample, whether it is far from everything
    that the device knows; empty where the device does not tell. round: of the served model. error: why there is no
    answer. classes: names of the columns of ``probabilities`` when the device has classes of its own after the fleet's,
    else empty. graph: the one that answered, ``predict``, or ``embed`` or ``embed-int8`` when samples are compared.
    outputs, values: of a task: names of the numbers, and a row of them for each sample, in the user's unit; labels and
    probabilities are then empty. label_sets: of a fleet with several labels: those of each sample; outputs then names
    the columns of probabilities, and labels and values are empty. thresholds: of the probabilities, from which on each
    label is answered; empty if no sample is held back, and all are 0.5. threshold, alarms: of a fleet that detects
    anomalies: the score above which a sample is an alarm, and whether each is; None and empty if no quiet sample is
    held back.
    """

    labels: tuple[str, ...] = ()
    probabilities: tuple[tuple[float, ...], ...] = ()
    unknown: tuple[bool, ...] = ()
    round: int = 0
    model: str = ""
    personalization: str = ""
    error: str = field(default="", metadata={"max_length": 1000})
    classes: tuple[str, ...] = field(default=(), metadata={"max_length": 11_000})
    graph: str = field(default="", metadata={"max_length": 32})
    outputs: tuple[str, ...] = field(default=(), metadata={"max_length": 1000, "sparse": True})
    values: tuple[tuple[float, ...], ...] = field(default=(), metadata={"sparse": True})
    label_sets: tuple[tuple[str, ...], ...] = field(default=(), metadata={"sparse": True})
    thresholds: tuple[float, ...] = field(default=(), metadata={"sparse": True})
    threshold: float | None = field(default=None, metadata={"sparse": True})
    alarms: tuple[bool, ...] = field(default=(), metadata={"sparse": True})

    @property
    def of_task(self) -> tuple[list[tuple[str, ...]], tuple[str, ...]] | None:
        """A table for people, a row for each sample, and its headings; None of classes."""
        if self.label_sets:
            return [
                (str(n), ", ".join(labels) or "none",
                 " ".join(f"{name} {p:.3f}" for name, p in zip(self.outputs, row, strict=True)))
                for n, (labels, row) in enumerate(zip(self.label_sets, self.probabilities, strict=True))
            ], ("sample", "labels", "probabilities")
        if self.alarms:
            return [(str(n), f"{row[0]:.6g}", f"{self.threshold:.6g}", "ALARM" if alarm else "-")
                    for n, (row, alarm) in enumerate(zip(self.values, self.alarms, strict=True))
                    ], ("sample", "score", "threshold", "alarm")
        if self.outputs:
            return [(str(n), *map("{:.6g}".format, row)) for n, row in enumerate(self.values)
                    ], ("sample", *self.outputs)
        return None

    @property
    def samples(self) -> int:
        """How many samples it answers."""
        return len(self.labels) or len(self.values) or len(self.label_sets)
