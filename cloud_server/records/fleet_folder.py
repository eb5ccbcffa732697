"""The fleet's folder on the operator's machine, and its file ``fleet.toml``.

    fleet.toml            the settings: method, rounds, model, link
    fleet.key, fleet.pub  the signing key (mode 0600) and the public key for agents
    successions.json, …   a roll-over of that key: see ``signing_keys``
    keys.seal             where private keys have a passphrase: see ``key_files``
    ca.key, ca.pem, …     certificates, and the broker's files in mosquitto/ (see ``identity.fleet_certificates``)
    graph.safetensors     graphs, layout and golden outputs, made once by ``metafleet init``
    train.safetensors     the graph with which devices train without torch, if the method has one
    weights.safetensors   the first weights
    backbone.safetensors  the frozen backbone, if the model has one
    ledger.sqlite         rounds, devices, updates, bytes, joules, accuracy
    state/, spool/        checkpoints of closed rounds, verified updates of the open one
"""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.parse import urlsplit

from cloud_server.records import signing_keys
from cloud_server.records import tariff as tariffs
from cloud_server.records.fleet_settings import FleetConfig
from cloud_server.records.tariff import Tariff
from fleet_core.algorithms.interface import Method, read_hyper
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.backbone import backbone_file
from fleet_core.base import config, schema, storage
from fleet_core.base.errors import CodecError, ConfigError, StateError
from fleet_core.base.moving_arrays import Moving
from fleet_core.base.processes import typed
from fleet_core.base.trees import Params
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.link.host_names import is_loopback
from fleet_core.model import graph_bundle, payloads, select_arrays
from fleet_core.model.choose_codec import AUTO
from fleet_core.model.graph_bundle import Graph
from fleet_core.model.layout import MODEL_GROUPS, Layout
from fleet_core.privacy import settings as privacy
from fleet_core.protocol.signing import Signer, load_public
from fleet_core.robust import settings as robust
from fleet_core.robust.screening import Screening

if TYPE_CHECKING:
    from fleet_core.data.samples import Samples


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
        _check_alerts(settings, path)
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
        """The codec of updates, or ``auto``; lossless for a method that does not sum updates over rounds."""
        return self.config.link.up if self.method.cumulative else "fp32"

    @property
    def codec_down(self) -> str:
        """The codec of models, or ``auto``. Lossless for a method whose models are sums over samples: these have no
        common scale, and quantization by a frequent class would lose a rare one."""
        return self.config.link.down if self.method.cumulative else "fp32"

    @property
    def skip_below(self) -> float:
        """The setting; 0 for a method that does not sum updates over rounds, because a skipped update would be lost."""
        return self.config.link.skip_below if self.method.cumulative else 0.0

    @property
    def screening(self) -> Screening:
        """The rules that refuse, drop or change updates when a round closes."""
        bound = self.config.privacy.max_update_norm(self.config.link.max_update_norm)
        return Screening(self.method, self.config.robust, bound)

    def remarks(self) -> list[str]:
        """Sentences about what users may not expect: what the method sends, and which settings it overrides."""
        if not self.method.received:
            nothing = len(payloads.encode("fp32", {}))
            text = f"a device fetches a model of {nothing} bytes once, and sends as many in each round"
            return [f"{self.method.name} shares nothing: {text}"]
        section = self.config.robust
        rules = robust.remark(section, self.method), privacy.remark(self.config.privacy, section.rule)
        return [*self._privacy_remarks(), *self._overridden_settings(), *self._codec_remarks(), *filter(None, rules)]

    def _privacy_remarks(self) -> list[str]:
        """What the method's messages reveal about a device's samples that other methods' messages do not."""
        if self.method.per_device:
            return [f"{self.method.name} makes a model for each device, which every device of the fleet may read at "
                    "the broker during the round; it goes whole and as fp32, whatever codec the link has for models"]
        if "prototypes" not in self.method.shared:
            return []
        return [f"{self.method.name} sends every device's class means and their counts, which reveal something about "
                "its samples"]

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
        """Codecs with which the method is known to miss the minimiser."""
        return [
            f"{self.method.name} with {codec} {way} {text}; see docs/codecs.md"
            for way, codec in (("up", self.codec_up), ("down", self.codec_down))
            if codec != AUTO
            for text in CODECS[codec].remarks(way, self.method.client.keeps)
        ]

    def selected(self, layout: Layout) -> Moving:
        """The arrays that ``[train] only`` selects. Raises ConfigError with every mistake in it."""
        path = self.folder / "fleet.toml"
        text = config.text_of(path) if path.exists() else ""
        return select_arrays.moving_of(self.config.train, layout, self.method, text, str(path))

    def signer(self) -> Signer:
        """The key that signs now. Raises StateError if it is missing, or encrypted and the passphrase is not there."""
        return signing_keys.signer(self.folder, time.time())

    def public_key(self) -> str:
        """64 hex digits. Raises StateError if it is missing."""
        return load_public(self.folder / "fleet.pub")

    def lasting_id(self) -> str:
        """8 hex digits that do not change when the fleet gets another key. Raises StateError."""
        return signing_keys.first(self.folder)[:8]

    def graph_bytes(self) -> bytes:
        """The graph bundle that is published. Raises StateError if it is missing, or its model is not the one in
        fleet.toml."""
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
            "classes": (layout.classes, model.classes), "task": (layout.task, model.task),
            "options": (schema.plain(layout.options), schema.plain(model.options)),
            "backbone": (layout.backbone, model.backbone),
            "graphs": (set(graph.graphs) >= set(method.graphs), True),
        }
        wrong = [name for name, (found, wanted) in pairs.items() if found != wanted]
        if wrong:
            raise StateError(
                f"is the graph of another model: {', '.join(wrong)} differ from fleet.toml", where=str(path),
                hint="make a new fleet in an empty folder: a fleet keeps its model",
            )

    def backbone_bytes(self) -> bytes | None:
        """The file of the model's backbone; None if it has none. Raises StateError if it is missing or of another
        backbone."""
        wanted, path = self.config.model.backbone, self.folder / backbone_file.NAME
        if wanted is None:
            return None
        data = storage.read_bytes(path, limit=backbone_file.MAX_BYTES) if path.exists() else b""
        if backbone_file.identity(data) != wanted.id:
            raise StateError("is another backbone than that of fleet.toml" if data else "the backbone is missing",
                             where=str(path), expected=wanted.id,
                             hint="put the fleet's file back: every device and every weight belongs to it")
        return data

    def samples(self, layout: Layout, path: Path) -> Samples:
        """A file's samples as the model takes them: features if the fleet has a backbone. Raises DataError."""
        from fleet_core.data import samples  # not needed, nor its memory, by a running server

        raw = layout.sample
        found = samples.load(path, dtype=raw.dtype, shape=raw.shape, fit=raw.fit, sound_hz=raw.sound_hz,
                             **layout.reading)
        if layout.backbone is None:
            return found
        from fleet_core.backbone.features import of_file

        return of_file(self.folder / backbone_file.NAME).samples(found, keep=False)

    def first(self, layout: Layout) -> Params:
        """The first values of every group, float32: the model's weights, and zeros for the method's other groups."""
        wire = layout.extended(self.method.down, self.method.shared)
        besides = tuple(group for group in self.method.down if group not in MODEL_GROUPS)
        return wire.ordered({**self.weights(layout), **wire.zeros(besides)})

    def weights(self, layout: Layout) -> Params:
        """The model's first weights, float32. Raises StateError if they are missing or of another model."""
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


def _check_alerts(settings: FleetConfig, path: Path) -> None:
    """Raises ConfigError for a webhook that is no URL, or that would be plain HTTP beyond this machine."""
    url = "" if settings.alerts is None else settings.alerts.webhook
    if not url:
        return
    parts = urlsplit(url)
    if not parts.hostname or not (parts.scheme == "https" or (parts.scheme == "http" and is_loopback(parts.hostname))):
        raise ConfigError("is not an address for alerts", where=f"{path}: alerts.webhook",
                          expected="https://…, or http:// on this machine")


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


def _too_few(settings: FleetConfig) -> Iterator[schema.Problem]:
    """Problems with settings that allow rounds with fewer devices than secure aggregation needs."""
    least, fleet = settings.privacy.least, settings.fleet
    if fleet.min_devices < least:
        yield schema.Problem("fleet.min_devices", f"{fleet.min_devices} devices are fewer than privacy.least: expected "
                                                  f"{least} or more")
    if 0 < fleet.cohort < least:
        yield schema.Problem("fleet.cohort", f"{fleet.cohort} devices are fewer than privacy.least: expected 0, or "
                                             f"{least} or more")


def _check_task(settings: FleetConfig, method: Method) -> Iterator[schema.Problem]:
    """Problems of a fleet whose model answers with no class: methods and settings that need classes."""
    task, budget = settings.model.task, settings.budget
    if task is None:
        return
    if settings.model.classes:
        yield schema.Problem("model.classes", f"a model of {task.kind} has no classes: expected []")
    if method.needs_classes:
        able = ", ".join(name for name, one in METHODS.items() if not one.needs_classes)
        yield schema.Problem("fleet.method", f"{method.name} cannot learn {task.kind}: it {method.needs_classes}; "
                                             f"expected one of {able}")
    accuracies = {"robust.roll_back": settings.robust.roll_back > 0}
    accuracies |= {} if budget is None else {"budget.target_accuracy": budget.target_accuracy is not None,
                                             "budget.patience": budget.patience is not None}
    for key, given in accuracies.items():
        if given:
            yield schema.Problem(key, f"needs accuracies, and a fleet of {task.kind} has none: leave it out")


def method_of(settings: FleetConfig, path: Path) -> tuple[Method, Any]:
    """(method, hyper-parameters). Raises ConfigError that names the wrong keys."""
    method = METHODS[settings.fleet.method]
    hyper, problems = read_hyper(method, settings.hyper)
    named = [schema.Problem(f"hyper.{p.key}", p.what, p.hint) for p in problems]
    named += [*select_arrays.check(settings.train, method), *robust.check(settings.robust, method)]
    named += _check_task(settings, method)
    if hyper is not None:
        named += privacy.check(
            settings.privacy, method, hyper, auto=AUTO in (settings.link.up, settings.link.down),
            skip_below=settings.link.skip_below, rule=settings.robust.rule,
        )
        named += privacy.check_secure(
            settings.privacy, method, hyper, up=settings.link.up, skip_below=settings.link.skip_below,
            rule=settings.robust.rule, max_update_norm=settings.link.max_update_norm,
        )
    if settings.privacy.secure_aggregation:
        named += _too_few(settings)
    if settings.robust.quarantine and settings.robust.rule == robust.KRUM:
        named.append(schema.Problem("robust.quarantine", "not with the rule krum, which drops its share of updates in "
                                                         "every round, hostile or not: expected false"))
    if named:
        text = path.read_text(encoding="utf-8") if path.exists() else ""
        raise config.mistakes(named, text, str(path))
    return method, hyper
