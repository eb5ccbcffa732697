"""Runs a device's sources in threads beside the agent, and stores what they give.

A source that fails is opened again after a wait that doubles (``fleet_core.base.backoff``); the agent goes on. What
each gave, and its last error, are in ``sources.json`` of the device's folder, for ``edge-agent status`` and ``doctor``.
"""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path

from edge_agent.inference.device_api import Device
from edge_agent.inference.service import Service
from edge_agent.sources.interface import Feed, Item, Lost
from fleet_core.base import schema, storage
from fleet_core.base.backoff import Backoff
from fleet_core.base.errors import BundleError, ConfigError, DataError, FleetError, StateError
from fleet_core.board import source_settings as kinds
from fleet_core.board.device_settings import Settings
from fleet_core.board.source_settings import Source
from fleet_core.data.live import Cutter, Cutting, Readings, Taken
from fleet_core.model.layout import InputSpec

FILE = "sources.json"
READ_S = 0.5
TOLD_S = 30.0
"""Interval between writes of the counts, to spare a card; a change of a source's state is written at once."""
FIRST_S, LAST_S = 1.0, 300.0
STABLE_S = 60.0
"""After it ran for this time, a source that fails is opened again after the first, shortest wait."""
MAX_SAMPLES_PER_S = 20
SLACK = 0.9
"""Share of ``every_s`` that is enough, because a sensor's clock is not exact."""
END_S = 5.0
MAX_WHY = 500

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class State:
    """What a source does, and what it gave since the start.

    state: ``waits`` for a model, ``runs``, ``failed``, ``ended``. readings: rows of numbers and whole samples. samples:
    made of them. kept, labelled: stored without a label, and with one. lost: what could not be used. last_lost,
    last_error: why. at: Unix seconds of the last change.
    """

    state: str = field(default="waits", metadata={"max_length": 20})
    readings: int = 0
    samples: int = 0
    kept: int = 0
    labelled: int = 0
    lost: int = 0
    last_lost: str = ""
    last_error: str = ""
    at: float = 0.0


def states(home: Path) -> dict[str, State]:
    """What the agent wrote, by the names of sources; empty if there is nothing to read."""
    try:
        found = json.loads(storage.read_bytes(home / FILE, limit=1 << 20))
        read = {str(name): schema.read(State, plain, unknown="ignore")[0] for name, plain in found.items()}
        return {name: state for name, state in read.items() if state is not None}
    except (StateError, OSError, ValueError, AttributeError):
        return {}


def open_feed(source: Source, name: str, home: Path, settings: Settings, spec: InputSpec) -> Feed:
    """The open sensor. home: the device's folder. spec: of a raw sample. Raises FleetError, OSError."""
    if isinstance(source, kinds.CommandSource):
        from edge_agent.sources.command import CommandFeed  # a board loads what it uses

        return CommandFeed(source, home)
    if isinstance(source, kinds.FolderSource):
        from edge_agent.sources.folder import FolderFeed

        return FolderFeed(source, home, spec, source.stride or settings.data.stride, home / f"sources-{name}.taken")
    if isinstance(source, kinds.SerialSource):
        from edge_agent.sources.serial_port import SerialFeed

        return SerialFeed(source, home)
    if isinstance(source, kinds.MqttSource):
        from edge_agent.sources.topic import TopicFeed

        return TopicFeed(source, home, settings)
    if isinstance(source, kinds.IioSource):
        from edge_agent.sources.iio import IioFeed

        return IioFeed(source)
    if isinstance(source, kinds.MicrophoneSource):
        from edge_agent.sources.microphone import MicrophoneFeed, WaveFeed

        return MicrophoneFeed(source, home) if source.file is None else WaveFeed(source, home)
    if isinstance(source, kinds.CameraSource):
        from edge_agent.sources.camera import camera_feed

        return camera_feed(source, home, spec)
    raise ConfigError(f"there is no source of the kind '{source.kind}'")


class Maker:
    """Makes the samples of one source. spec: of a raw sample."""

    def __init__(self, source: Source, settings: Settings, spec: InputSpec):
        self._spec, self._cutter = spec, None if len(spec.shape) > 2 else Cutter(spec, cutting(source, settings))

    def made(self, items: Sequence[Item] | None) -> Iterator[Taken | Lost]:
        """The samples that ``items`` make, and what is lost; None: nothing more will come."""
        for item in items if items is not None else (Lost(),):
            try:
                if isinstance(item, Readings):
                    yield from (self._cutter or Cutter(self._spec, Cutting())).more(item)
                    continue
                if isinstance(item, Lost) and self._cutter is not None:
                    yield from self._cutter.end()
                yield item
            except FleetError as error:
                yield Lost(one_line(error))


def cutting(source: Source, settings: Settings) -> Cutting:
    """How the readings of ``source`` are cut."""
    return Cutting(source.stride or settings.data.stride, source.rate_hz, source.to_hz, source.gain, source.offset)


def one_line(error: BaseException) -> str:
    return str(error).replace("\n", "; ")[:MAX_WHY] or type(error).__name__


class Running:
    """One source, in a thread of its own. changed: called repeatedly, with True if the source's state has changed,
    False if only its counts may have."""

    def __init__(
        self, source: Source, name: str, service: Service, home: Path, settings: Settings, log: Callable[[str], None],
        changed: Callable[[bool], None], opener: Callable[[Source, str, Path, Settings, InputSpec], Feed] = open_feed,
    ):
        self.name, self.state = name, State()
        self.last: tuple[Taken, str] | None = None
        """The last sample and its id in the buffer; the id is empty if it is not there."""
        self._source, self._service, self._home, self._settings = source, service, home, settings
        self._log, self._changed, self._opener = log, changed, opener
        self._backoff = Backoff(name, time.monotonic, FIRST_S, LAST_S)
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._run, name=f"source-{name}", daemon=True)
        self._device: Device | None = None
        self._kept_at: float | None = None
        self._second, self._in_second = 0.0, 0
        self._unanswered = ""  # why the last sample was not answered

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def join(self) -> None:
        self._thread.join(END_S)

    def _run(self) -> None:
        while not self._stopped.is_set():
            began = time.monotonic()
            try:
                if self._has_model() and self._pump():
                    return
                continue
            except (FleetError, OSError) as error:
                why = one_line(error)
            except Exception as error:
                logger.exception("the source %s ends because of an error in it", self.name)
                why = f"{type(error).__name__}: {one_line(error)}"
            stable = time.monotonic() - began > STABLE_S
            if stable:
                self._backoff.reset()
            if stable or why != self.state.last_error:
                self._log(f"source {self.name}: {why}; the agent tries again")
            self._tell(state="failed", last_error=why)
            self._stopped.wait(self._backoff.wait_s)
            self._backoff.repeat()

    def _has_model(self) -> bool:
        """Whether the shape of samples is known; waits a second if it is not."""
        try:
            self._service.known_classes()
        except (StateError, BundleError):
            self._tell(state="waits")
            self._stopped.wait(1.0)
            return False
        return True

    def _pump(self) -> bool:
        """Stores what comes, until the source ends (True), is stopped, or the fleet has samples of another shape."""
        spec = self._service.layout.sample
        maker = Maker(self._source, self._settings, spec)
        feed = self._opener(self._source, self.name, self._home, self._settings, spec)
        self._tell(state="runs")
        ended = False
        try:
            while not (ended or self._stopped.is_set()) and self._service.layout.sample == spec:
                items = feed.read(READ_S)
                ended = items is None
                self.take(maker, items)
                self._changed(False)
        finally:
            feed.close()
            self.take(maker, None)
        if ended:
            self._log(f"source {self.name} has ended, {self.state.kept + self.state.labelled} samples are stored")
            self._tell(state="ended")
        return ended

    # What comes -------------------------------------------------------------------------------------------------------

    def take(self, maker: Maker, items: Sequence[Item] | None) -> None:
        """Stores the samples that ``items`` make. Raises StateError, BundleError."""
        came = sum(len(item.time) if isinstance(item, Readings) else isinstance(item, Taken) for item in items or ())
        if came:
            self.state = replace(self.state, readings=self.state.readings + came)
        for made in maker.made(items):
            if isinstance(made, Taken):
                self._store(made)
            elif isinstance(made, Lost) and made.why:
                self._lost(made.why)
        if came:
            self.state = replace(self.state, at=time.time())

    def _store(self, sample: Taken) -> None:
        self.state = replace(self.state, samples=self.state.samples + 1)
        self.last = (sample, "")
        since = None if self._kept_at is None else sample.time - self._kept_at
        if not sample.label and since is not None and 0 <= since < SLACK * self._source.every_s:
            return
        self._slow_down()
        try:
            self._add(sample)
        except DataError as error:
            self._lost(one_line(error))

    def _add(self, sample: Taken) -> None:
        self._device = device = self._device or Device(self._home, self._service)
        try:
            if sample.label:
                device.add(sample.x, device.typed(sample.label), sample.time)
                self.last, self.state = None, replace(self.state, labelled=self.state.labelled + 1)
                return
        except ConfigError as error:  # the sample is kept, and may be labelled later
            self._lost(one_line(error))
        self.last = (sample, name := device.add(sample.x, time=sample.time))
        self._kept_at, self.state = sample.time, replace(self.state, kept=self.state.kept + 1)
        if self._settings.alarm.command or self._settings.alarm.topic:
            self._answer(sample, name)

    def _answer(self, sample: Taken, name: str) -> None:
        """Asks the model, so that the device's command and topic hear of an alarm. name: the sample's id."""
        try:
            self._service.answers(sample.x[None], name=name)
            self._unanswered = ""
        except FleetError as error:
            if one_line(error) != self._unanswered:
                self._unanswered = one_line(error)
                self._log(f"source {self.name}: its samples raise no alarm: {self._unanswered}")

    def _slow_down(self) -> None:
        """Waits if ``MAX_SAMPLES_PER_S`` were stored in this second; so the source must wait, too."""
        now = time.monotonic()
        if now - self._second > 1.0:
            self._second, self._in_second = now, 0
        self._in_second += 1
        if self._in_second > MAX_SAMPLES_PER_S:
            self._stopped.wait(max(0.0, self._second + 1.0 - now))

    def label(self, label: str) -> str:
        """Gives the last sample its label, as ``Device.typed`` reads it; returns what became of it. Raises ConfigError,
        DataError, StateError."""
        last, self.last = self.last, None
        if last is None:
            return f"no sample of {self.name} waits for a label"
        device = self._device or Device(self._home, self._service)
        sample, name = last
        try:
            if name:
                device.label(name, device.typed(label))
            else:
                device.add(sample.x, device.typed(label), sample.time)
        except ConfigError:
            self.last = last
            raise
        self.state = replace(self.state, labelled=self.state.labelled + 1)
        self._tell()
        return f"the last sample of {self.name} is {label}"

    # What it does -----------------------------------------------------------------------------------------------------

    def _lost(self, why: str) -> None:
        self.state = replace(self.state, lost=self.state.lost + 1, last_lost=why[:MAX_WHY])

    def _tell(self, *, state: str | None = None, last_error: str | None = None) -> None:
        before = self.state
        self.state = replace(before, state=state or before.state, at=time.time(),
                             last_error=before.last_error if last_error is None else last_error)
        self._changed(self.state.state != before.state)


class Sources:
    """All sources of a device."""

    def __init__(self, home: Path, settings: Settings, service: Service, log: Callable[[str], None]):
        self._file, self._log = home / FILE, log
        self._told, self._telling, self._written = 0.0, threading.Lock(), b""
        self.running = [Running(source, name, service, home, settings, log, self._changed)
                        for source, name in zip(settings.source, kinds.names_of(settings.source), strict=True)]

    def label(self, label: str, name: str = "") -> None:
        """Labels the last sample of the source with this name; without a name, of the source that gave a sample
        last."""
        named = [one for one in self.running if name in ("", one.name)]
        waiting = [one for one in named if one.last is not None]
        if not waiting:
            return self._log(f"button {label}: no sample waits for a label")
        latest = max(waiting, key=lambda one: one.last[0].time if one.last is not None else 0.0)
        try:
            self._log(f"button: {latest.label(label)}")
        except FleetError as error:
            self._log(f"button {label}: {one_line(error)}")

    @contextmanager
    def on(self) -> Iterator[None]:
        """Runs the sources while the context lasts."""
        for one in self.running:
            one.start()
        try:
            yield
        finally:
            for one in self.running:
                one.stop()
            for one in self.running:
                one.join()
            self._write()

    def _changed(self, now: bool) -> None:
        if now or time.monotonic() - self._told > TOLD_S:
            self._write()

    def _write(self) -> None:
        """Writes the states. An error of the disk is ignored: only the listing is lost."""
        with self._telling:
            self._told = time.monotonic()
            data = json.dumps({one.name: schema.plain(one.state) for one in self.running}, indent=1).encode()
            if data == self._written:
                return
            try:
                storage.write_atomic(self._file, data, durable=False)
                self._written = data
            except StateError as error:
                logger.warning("%s", error)
