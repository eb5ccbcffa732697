"""The fleet's folder on the operator's machine, and its file ``fleet.toml``.

    fleet.toml            the settings: method, rounds, model, link
    fleet.key, fleet.pub  the signing key (mode 0600) and the public key for agents
    ca.key, ca.pem, …     certificates, and the broker's files in mosquitto/ (see ``identity.fleet_certificates``)
    graph.safetensors     graphs, layout and golden outputs, made once by ``metafleet init``
    train.safetensors     the graph with which devices train without torch, if the method has one
    weights.safetensors   the first weights
    ledger.sqlite         rounds, devices, updates, bytes, joules, accuracy
    state/, spool/        checkpoints of closed rounds, verified updates of the open one
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from cloud_server.records import tariff as tariffs
from cloud_server.records.tariff import Tariff
from fleet_core.algorithms.interface import Method
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import config, schema, storage
from fleet_core.base.errors import CodecError, ConfigError, StateError
from fleet_core.base.moving import Moving
from fleet_core.base.processes import typed
from fleet_core.base.trees import Params
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.model import graph_bundle, payloads, select_arrays
from fleet_core.model.choose_codec import AUTO
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import MODEL_GROUPS, InputSpec, Layout
from fleet_core.model.select_arrays import TrainSection
from fleet_core.protocol.signing import Signer, load_public

NAME = r"[A-Za-z0-9_-]{1,64}"
SERVE_MIN_CHANGE = 0.001
ABOVE_0 = {"above": 0, "max": 1e18}


@dataclass(frozen=True)
class FleetSection:
    """The table ``fleet``. ``about`` is the comment above the key in a new fleet.toml."""

    name: str = field(metadata={"pattern": NAME, "words": "1 to 64 letters, digits, '-' or '_'",
                                "about": "The fleet's name in every topic; devices know it, so it stays."})
    method: str = field(default="pfldyn-proto", metadata={
        "choices": METHODS, "about": "What is learned and how; 'metafleet methods' lists what there is."})
    rounds: int = field(default=30, metadata={"min": 1, "max": 1_000_000, "about":
        "Rounds of training in all. To go on after the last one: raise this and start the server again."})
    cohort: int = field(default=0, metadata={"min": 0, "max": 1_000_000, "about":
        "Devices that are asked to train in a round, drawn anew for each round; 0: all that are on."})
    min_devices: int = field(default=1, metadata={"min": 1, "max": 1_000_000, "about":
        "A round begins when this many devices are on and can train."})
    quorum: float = field(default=0.5, metadata={"above": 0, "max": 1, "about":
        "A round closes only with updates of at least this share of the devices that it asked."})
    deadline_s: float = field(default=120.0, metadata={"above": 0, "max": 1e6, "about":
        "Seconds that a round waits for devices that are on and have not delivered; with all updates it closes at once."
    })
    first_wait_s: float = field(default=30.0, metadata={"min": 0, "max": 1e6, "about":
        "Seconds that round 1 waits for enrolled devices that are not on yet; 0: it does not wait."})
    serve_every: int = field(default=10, metadata={"min": 1, "max": 1_000_000, "about":
        "Devices get a new model to answer with after every this many rounds, and after the last one."})
    serve_min_change: float = field(default=SERVE_MIN_CHANGE, metadata={"min": 0, "max": 1, "about":
        "They get it only if its weights changed by this share of their norm; 0: if a bit differs."})
    enrolment: str = field(default="open", metadata={"choices": ("open", "listed"), "about":
        "open: every device that reaches the broker joins; listed: only those of 'metafleet devices enroll'."})
    seed: int = field(default=0, metadata={"min": 0, "max": 2**53, "about":
        "Seed of the first weights and of the draw of cohorts."})


@dataclass(frozen=True)
class ModelSection:
    """name: a named model or ``package.module:build``. classes: names in the order of the labels; they never change."""

    name: str = field(metadata={"max_length": 200})
    input: InputSpec
    classes: tuple[str, ...] = field(metadata={"max_length": 10_000})
    options: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class LinkSection:
    """broker: mqtt(s)://host:port; None for a private broker. enrolment: mqtts://host:port of the enrolment port; None
    for the port after the broker's. ca: PEM file, beside fleet.toml, of the authority that signs the broker's
    certificate; None for the fleet's own, ``system`` for those that the system trusts. plain: allow mqtt:// beyond this
    machine. chunk_bytes: maximum payload of one publish."""

    broker: str | None = None
    enrolment: str | None = None
    ca: str | None = None
    plain: bool = False
    up: str = field(default="int8", metadata={"choices": (*CODECS, AUTO), "about":
        "How updates travel to the server: int8 (a byte a value), fp32 (exact), auto (by round); "
        "'metafleet codecs' lists all."})
    down: str = field(default="int8", metadata={"choices": (*CODECS, AUTO), "about":
        "How models travel to the devices: the same choice."})
    chunk_bytes: int = field(default=61440, metadata={"min": 1024, "max": 1 << 24})
    skip_below: float = field(default=0.0, metadata={"min": 0, "max": 1, "about":
        "An update whose norm is below this share of the last rounds' mean is not sent (0.2, say); 0: all are."})
    max_update_norm: float = field(default=1e4, metadata={"above": 0, "about":
        "An update whose Euclidean norm is above this is refused."})


@dataclass(frozen=True)
class Amounts:
    """Limits; None for no limit. bytes: up and down, by the largest counter that is reported (wire, MQTT or payload).
    joules: of work, without idle. money: in the currency of tariff.toml, without fee and included volume."""

    bytes: float | None = field(default=None, metadata=ABOVE_0)
    joules: float | None = field(default=None, metadata=ABOVE_0)
    money: float | None = field(default=None, metadata=ABOVE_0)


@dataclass(frozen=True)
class BudgetSection(Amounts):
    """The fleet's limits, at which no further round opens. target_accuracy: mean over the devices that train, at which
    none does either. patience: after how many evaluations in a row without a gain none does; a gain is more than
    ``min_gain`` over the best before. device_day: of one device on one day (UTC), after which it is not asked until the
    next."""

    target_accuracy: float | None = field(default=None, metadata={"above": 0, "max": 1})
    patience: int | None = field(default=None, metadata={"min": 1, "max": 1_000_000})
    min_gain: float = field(default=0.002, metadata={"min": 0, "max": 1})
    device_day: Amounts = field(default_factory=Amounts)


@dataclass(frozen=True)
class FleetConfig:
    """fleet.toml. hyper: the method's hyper-parameters; unknown names are refused. budget: None for no limits."""

    fleet: FleetSection
    model: ModelSection
    link: LinkSection = field(default_factory=LinkSection)
    train: TrainSection = field(default_factory=TrainSection)
    hyper: Mapping[str, Any] = field(default_factory=dict)
    budget: BudgetSection | None = None


NOTES = {
    f"{section}.{key.name}": str(key.metadata["about"])
    for section, kind in (("fleet", FleetSection), ("link", LinkSection), ("train", TrainSection))
    for key in fields(kind)
    if "about" in key.metadata
}
"""Comments for the keys of fleet.toml that users may want to change."""


@dataclass(frozen=True)
class Fleet:
    """A fleet's folder, read and checked."""

    folder: Path
    config: FleetConfig
    method: Method
    hyper: Any

    @staticmethod
    def load(folder: Path) -> Fleet:
        """Reads fleet.toml. Raises ConfigError with all mistakes."""
        path = folder / "fleet.toml"
        if not path.exists():
            check_folder(folder)
            raise ConfigError("there is no fleet here", where=str(folder), hint=f"metafleet init {typed(folder)}")
        settings = config.load(FleetConfig, path)
        _check_budget(settings, path)
        return Fleet(folder, settings, *method_of(settings, path))

    @property
    def ledger_path(self) -> Path:
        return self.folder / "ledger.sqlite"

    @property
    def tariff(self) -> Tariff | None:
        """The prices in the folder's tariff.toml, or None. Raises ConfigError."""
        return tariffs.of_folder(self.folder)

    @property
    def codec_up(self) -> str:
        """The codec of updates, or ``auto``; lossless if the server does not sum them over rounds."""
        return self.config.link.up if self.method.cumulative else "fp32"

    @property
    def codec_down(self) -> str:
        """The codec of models, or ``auto``; lossless for sums over samples, because they have no common scale and a
        rare class would be lost in the quantization of a frequent one."""
        return self.config.link.down if self.method.cumulative else "fp32"

    @property
    def skip_below(self) -> float:
        """0 if the server does not sum updates over rounds: what is not sent could not be made up for."""
        return self.config.link.skip_below if self.method.cumulative else 0.0

    def remarks(self) -> list[str]:
        """What users may not expect of the method: what it sends, and which settings it overrides."""
        if not self.method.received:
            nothing = len(payloads.encode("fp32", {}))
            text = f"a device fetches a model of {nothing} bytes once, and sends as many a round"
            return [f"{self.method.name} shares nothing: {text}"]
        return [*self._privacy_remarks(), *self._overridden_settings(), *self._codec_remarks()]

    def _privacy_remarks(self) -> list[str]:
        """What this method's messages reveal about a device's samples, beyond other methods'."""
        if self.method.per_device:
            return [f"{self.method.name} makes a model for each device, which every device of the fleet may read at "
                    "the broker during the round; it goes whole and as fp32, whatever codec the link has for models"]
        if "prototypes" not in self.method.shared:
            return []
        return [f"{self.method.name} sends every device's class means and their counts: they leave it by this method's "
                "design, and tell about its samples"]

    def _overridden_settings(self) -> list[str]:
        name, link, steps = self.method.name, self.config.link, self.hyper.local_steps
        if getattr(self.hyper, "head_steps", 0) >= steps:
            text = f"head_steps = {self.hyper.head_steps} of local_steps = {steps} move the head alone"
            return [f"{name} never trains what is shared: {text}"]
        texts = []
        if (self.codec_up, self.codec_down) != (link.up, link.down):
            text = f"all goes as fp32, not as {link.up} up and {link.down} down"
            texts.append(f"{name} sends sums over samples, which a lossy codec would spoil: {text}")
        if self.skip_below != link.skip_below:
            texts.append(f"{name} sends sums over samples, which count in their own round alone: skip_below does not "
                         "apply")
        return texts

    def _codec_remarks(self) -> list[str]:
        """Where the method is known to miss the minimiser with these codecs."""
        return [
            f"{self.method.name} with {codec} {way} {text}; see docs/codecs.md"
            for way, codec in (("up", self.codec_up), ("down", self.codec_down))
            if codec != AUTO
            for text in CODECS[codec].remarks(way, self.method.client.keeps)
        ]

    def selected(self, layout: Layout) -> Moving:
        """The arrays that ``[train] only`` names. Raises ConfigError with every mistake in it."""
        path = self.folder / "fleet.toml"
        text = config.text_of(path) if path.exists() else ""
        return select_arrays.moving_of(self.config.train, layout, self.method, text, str(path))

    def signer(self) -> Signer:
        """The fleet's signing key. Raises StateError if it is missing."""
        return Signer.load(self.folder / "fleet.key")

    def public_key(self) -> str:
        """64 hex digits. Raises StateError if it is missing."""
        return load_public(self.folder / "fleet.pub")

    def graph_bytes(self) -> bytes:
        """The graph bundle that is published. Raises StateError if it is missing or of another model than in
        fleet.toml. """
        path = self.folder / "graph.safetensors"
        if not path.exists():
            raise StateError("the graph is missing", where=str(path), hint=f"metafleet init {typed(self.folder)}")
        data = storage.read_bytes(path, limit=graph_bundle.MAX_BYTES)
        self._check_graph(graph_bundle.unpack(data), path)
        return data

    def _check_graph(self, graph: Graph, path: Path) -> None:
        model, layout, method = self.config.model, graph.layout, self.method
        pairs = {
            "name": (layout.model, model.name), "input": (layout.input, model.input),
            "classes": (layout.classes, model.classes),
            "options": (schema.plain(layout.options), schema.plain(model.options)),
            "graphs": (set(graph.graphs) >= set(method.graphs), True),
        }
        wrong = [name for name, (found, wanted) in pairs.items() if found != wanted]
        if wrong:
            raise StateError(
                f"is the graph of another model: {', '.join(wrong)} differ from fleet.toml", where=str(path),
                hint="make the fleet anew in an empty folder: a fleet keeps its model",
            )

    def first(self, layout: Layout) -> Params:
        """The first values of every group, float32: the model's weights, and zeros for the method's other groups."""
        wire = layout.extended(self.method.down, self.method.shared)
        besides = tuple(group for group in self.method.down if group not in MODEL_GROUPS)
        return wire.ordered({**self.weights(layout), **wire.zeros(besides)})

    def weights(self, layout: Layout) -> Params:
        """The model's first weights, float32. Raises StateError."""
        path = self.folder / "weights.safetensors"
        if not path.exists():
            raise StateError("the first weights are missing", where=str(path),
                             hint=f"metafleet init {typed(self.folder)}")
        groups = tuple(dict.fromkeys(t.group for t in layout.tensors))
        data = storage.read_bytes(path, limit=1 << 33)
        try:
            return graph_bundle.weights_from_bytes(data, layout, groups)
        except CodecError as error:
            raise StateError(
                f"are not this model's first weights: {error.what}", where=str(path), expected=error.expected,
                hint=f"delete them, then: metafleet init {typed(self.folder)}",
            ) from error

    def running(self) -> bool:
        """Whether an aggregator runs on this folder."""
        import fcntl

        path = self.folder / ".lock"
        if not path.exists():
            return False
        with open(path, "rb") as handle:
            try:
                fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
            except BlockingIOError:
                return True
        return False

    def check_idle(self) -> None:
        """Raises StateError if an aggregator runs on this folder."""
        if self.running():
            raise self._busy()

    @contextlib.contextmanager
    def lock(self) -> Any:
        """Ensures one aggregator per folder. Raises StateError if another one runs."""
        import fcntl

        handle = os.open(self.folder / ".lock", os.O_RDWR | os.O_CREAT, 0o600)
        try:
            try:
                fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise self._busy() from error
            yield
        finally:
            os.close(handle)

    def _busy(self) -> StateError:
        return StateError("another aggregator is running here", where=str(self.folder), hint="stop it")


def check_folder(folder: Path) -> None:
    """Raises ConfigError if the path is a file or a device's folder."""
    if folder.is_file():
        raise ConfigError("is a file", where=str(folder), expected="the folder of a fleet")
    if (folder / "device.toml").exists():
        raise ConfigError("is a device's folder", where=str(folder), expected="the folder of a fleet")


def _check_budget(settings: FleetConfig, path: Path) -> None:
    """Raises ConfigError for a limit of money without prices."""
    budget = settings.budget
    if budget is None or (budget.money is None and budget.device_day.money is None):
        return
    prices = tariffs.of_folder(path.parent)
    if prices is None or (prices.data(0, 0) is None and prices.energy(0) is None):
        key = "budget.money" if budget.money is not None else "budget.device_day.money"
        problem = schema.Problem(key, f"needs prices: per_mb or per_kwh in {tariffs.FILE} beside fleet.toml")
        raise ConfigError(config.located(problem, config.text_of(path), str(path)), hint="docs/costs.md")


def method_of(settings: FleetConfig, path: Path) -> tuple[Method, Any]:
    """(method, hyper-parameters). Raises ConfigError that names the wrong keys."""
    method = METHODS[settings.fleet.method]
    hyper, problems = schema.read(method.hyper, settings.hyper)
    named = [schema.Problem(f"hyper.{p.key}", p.what, p.hint) for p in problems]
    named += select_arrays.check(settings.train, method)
    if named:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        raise ConfigError("\n".join(config.located(problem, text, str(path)) for problem in named))
    return method, hyper
