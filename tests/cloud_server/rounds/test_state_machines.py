"""Both transfers, with every fault of the network and deaths of both ends: nothing false is accepted, and all ends
well. Hypothesis draws what happens; once faults stop, every transfer ends within a bounded time."""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from cloud_server.broker import publisher as publisher_module
from cloud_server.broker.publisher import Publisher
from cloud_server.rounds import uploads as intake_module
from cloud_server.rounds.uploads import Uploads
from edge_agent.connection.blob_download import Fetcher
from edge_agent.connection.update_upload import Uploader
from fleet_core.base.errors import LinkError, MessageError
from fleet_core.link.interface import Connected, Event, Message
from fleet_core.link.loopback import LoopbackBroker, LoopbackLink
from fleet_core.protocol import messages, topics
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.device_messages import Down
from fleet_core.protocol.round_messages import UploadManifest

pytestmark = pytest.mark.slow

FLEET = "f"
CHUNK = 1024
LIMIT = 1 << 16

some = st.integers(0, 999)
seconds = st.sampled_from([0.3, 1.0, 4.5, 5.5])
LITTLE_TIME = settings(max_examples=120, stateful_step_count=40, deadline=None, derandomize=True)


# Up ------------------------------------------------------------------------------------------------------------------

NAMES = ("d0", "d1", "d2")
IN_ALL = 11
RESERVED_BYTES = 40_000


@dataclass
class Wire:
    """A device's link, as far as an uploader uses it."""

    send: Callable[[str, bytes], None]
    connected: bool = True

    def publish(self, topic: str, payload: bytes, **_: Any) -> None:
        if not self.connected:
            raise LinkError("is not connected")
        self.send(topic, payload)


@dataclass(frozen=True)
class Update:
    """What a device offers in one round."""

    round: int
    data: bytes

    @functools.cached_property
    def upload(self) -> UploadManifest:
        return UploadManifest(Blob.of(self.data, CHUNK), "fp32", "0" * 32, "m", "l")

    def chunk(self, k: int) -> bytes:
        return self.data[k * CHUNK : (k + 1) * CHUNK]


@dataclass
class Device:
    """uploader: None while it is dead."""

    wire: Wire
    uploader: Uploader | None
    update: Update
    acknowledged: bool = False


@functools.cache
def update_of(name: str, number: int) -> Update:
    """An update of 12 to 20 different chunks."""
    count = 12 + 4 * NAMES.index(name)
    return Update(number, b"".join(f"{name} {number} {n:3d} ".encode().ljust(CHUNK, b".") for n in range(count))[:-9])


class Upload(RuleBasedStateMachine):
    """Three devices send updates, round after round, to one aggregator. Credit and memory are small."""

    def __init__(self) -> None:
        super().__init__()
        self.surroundings = contextlib.ExitStack()
        little = mock.patch.multiple(intake_module, IN_ALL=IN_ALL, RESERVED_BYTES=RESERVED_BYTES)
        self.surroundings.enter_context(little)
        self.now, self.round, self.refused = 0.0, 1, 0
        self.up: list[tuple[str, str, bytes]] = []
        self.down: list[tuple[str, Down]] = []
        self.received: dict[str, bytes] = {}
        self.intake = self.new_intake()
        self.devices = {name: self.new_device(name) for name in NAMES}

    def new_intake(self) -> Uploads:
        return Uploads(lambda name, down: self.down.append((name, down)), lambda: self.now, LIMIT)

    def new_device(self, name: str) -> Device:
        wire = Wire(lambda topic, payload: self.up.append((name, topic, payload)))
        made = Device(wire, None, update_of(name, self.round))
        self.begin(name, made)
        return made

    def begin(self, name: str, device: Device) -> None:
        """Start the device's process, which offers what it has on disk."""
        link: Any = device.wire  # of a Link, an uploader uses only ``connected`` and ``publish``
        device.uploader = Uploader(FLEET, name, link, lambda: self.now, lambda size: None)
        device.uploader.offer(device.update)

    # What the ends do with a message ----------------------------------------------------------------------------------

    def arrives_up(self, name: str, topic: str, payload: bytes) -> None:
        address = topics.parse(FLEET, topic)
        assert address is not None
        number = int(address.key)
        if address.part == "m":
            return self.offered(name, number, messages.decode(UploadManifest, payload))
        try:
            whole = self.intake.chunk(name, number, int(address.part), payload)
        except MessageError:
            self.refused += 1
            return
        if whole is not None:
            data = whole[1].take()
            assert (number, data) == (self.round, update_of(name, self.round).data), "what is taken is what was sent"
            self.received[name] = data
            self.down.append((name, Down("done", number, whole[0].id)))

    def offered(self, name: str, number: int, upload: UploadManifest) -> None:
        if number != self.round:
            self.down.append((name, Down("reject", number, upload.id, ok=False)))
        elif name in self.received:
            self.down.append((name, Down("done", number, upload.id)))
        else:
            self.intake.offer(name, number, upload)

    def arrives_down(self, name: str, down: Down) -> None:
        device = self.devices[name]
        if device.uploader is None:
            return
        if down.t == "need":
            try:
                device.uploader.on_need(down)
            except LinkError:
                return
        elif device.uploader.active and (down.r, down.id) == (device.update.round, device.update.upload.id):
            device.uploader.stop()
            device.acknowledged = down.t == "done"

    # What the network does --------------------------------------------------------------------------------------------

    @rule(count=st.integers(1, 30))
    def goes_well(self, count: int) -> None:
        for _ in range(count):
            if self.up:
                self.arrives_up(*self.up.pop(0))
            if self.down:
                self.arrives_down(*self.down.pop(0))

    @precondition(lambda self: self.up)
    @rule(at=some)
    def overtakes_up(self, at: int) -> None:
        self.arrives_up(*self.up.pop(at % len(self.up)))

    @precondition(lambda self: self.down)
    @rule(at=some)
    def overtakes_down(self, at: int) -> None:
        self.arrives_down(*self.down.pop(at % len(self.down)))

    @precondition(lambda self: self.up)
    @rule(at=some, twice=st.booleans())
    def is_lost_or_doubled_up(self, at: int, twice: bool) -> None:
        found = self.up.pop(at % len(self.up))
        self.up += [found, found] if twice else []

    @precondition(lambda self: self.down)
    @rule(at=some, twice=st.booleans())
    def is_lost_or_doubled_down(self, at: int, twice: bool) -> None:
        found = self.down.pop(at % len(self.down))
        self.down += [found, found] if twice else []

    @precondition(lambda self: any(not topic.endswith("/m") for _, topic, _ in self.up))
    @rule(at=some)
    def is_damaged(self, at: int) -> None:
        parts = [n for n, (_, topic, _) in enumerate(self.up) if not topic.endswith("/m")]
        name, topic, payload = self.up.pop(parts[at % len(parts)])
        before = self.refused
        known = len(self.received)
        self.arrives_up(name, topic, payload[:-1] + b"#")
        assert len(self.received) == known
        assert self.refused <= before + 1

    @rule(name=st.sampled_from(NAMES))
    def link_goes_or_comes(self, name: str) -> None:
        self.devices[name].wire.connected = not self.devices[name].wire.connected

    @rule()
    def network_loses_everything(self) -> None:
        self.up.clear()
        self.down.clear()

    # What the ends do -------------------------------------------------------------------------------------------------

    @rule(passed=seconds)
    def time_passes(self, passed: float) -> None:
        self.now += passed
        self.intake.tick()
        for device in self.devices.values():
            if device.uploader is not None:
                device.uploader.tick()

    @rule(name=st.sampled_from(NAMES), noticed=st.booleans())
    def device_dies(self, name: str, noticed: bool) -> None:
        self.devices[name].uploader = None
        if noticed:
            self.intake.drop(name)

    @rule(name=st.sampled_from(NAMES))
    def device_starts(self, name: str) -> None:
        self.begin(name, self.devices[name])

    @rule()
    def aggregator_starts_anew(self) -> None:
        """What was complete is on its disk; the round is announced again, and every device that hears of it offers."""
        self.intake = self.new_intake()
        self.everybody_offers()

    @rule()
    def next_round(self) -> None:
        self.intake.clear()
        self.received.clear()
        self.round += 1
        for name, device in self.devices.items():
            device.update, device.acknowledged = update_of(name, self.round), False
        self.everybody_offers()

    def everybody_offers(self) -> None:
        for device in self.devices.values():
            if device.uploader is not None:
                device.uploader.offer(device.update)

    # What must hold ---------------------------------------------------------------------------------------------------

    @invariant()
    def credit_is_bounded_and_none_is_lost(self) -> None:
        given = [len(upload.granted) for upload in self.intake._uploads.values()]
        assert max(given, default=0) <= intake_module.PER_DEVICE
        assert self.intake._credit >= 0
        assert self.intake._credit + sum(given) == IN_ALL

    @invariant()
    def memory_is_bounded_and_none_is_lost(self) -> None:
        held = [u.manifest.blob.size for u in self.intake._uploads.values() if u.inbox is not None]
        assert self.intake._held_bytes == sum(held) <= RESERVED_BYTES

    @invariant()
    def done_is_said_of_what_is_held(self) -> None:
        assert {name for name, device in self.devices.items() if device.acknowledged} <= self.received.keys()

    def teardown(self) -> None:
        with self.surroundings:
            self.ends()

    def ends(self) -> None:
        """From now on nothing is lost. The dead stay dead, including one that was just granted chunks."""
        for device in self.devices.values():
            device.wire.connected = True
        for name in [name for name, upload in self.intake._uploads.items() if upload.granted][:1]:
            self.device_dies(name, noticed=False)
        alive = {name for name, device in self.devices.items() if device.uploader is not None}
        for _ in range(100):  # the dead hold what they were granted for half a minute each, one after the other
            self.time_passes(1.0)
            while self.up or self.down:
                self.goes_well(1)
        assert alive <= self.received.keys()
        assert all(self.devices[name].acknowledged for name in alive)
        assert (self.intake._credit, self.intake._held_bytes) == (IN_ALL, 0), "all is given back"


# Down ----------------------------------------------------------------------------------------------------------------

POOL = tuple(f"model {n} ".encode() * 2_200 for n in range(3))  # of 18 chunks each, in two segments
BLOBS = tuple(Blob.of(data, CHUNK) for data in POOL)
WHOLE = {blob.id: data for blob, data in zip(BLOBS, POOL, strict=True)}


@dataclass
class Reader:
    """A device that wants what the newest manifest names."""

    link: LoopbackLink
    fetcher: Fetcher
    wanted: Blob | None = None
    seq: int = 0
    got: dict[str, bytes] = field(default_factory=dict)

    def handle(self, event: Event) -> None:
        if isinstance(event, Message):
            address = topics.parse(FLEET, event.topic)
            assert address is not None
            if address.kind == "cur":
                self.announced(event.payload)
            else:
                self.chunk(address.key, int(address.part), event.payload)
        if isinstance(event, Connected | Message):
            self.advance()

    def announced(self, manifest: bytes) -> None:
        seq, _, blob = manifest.partition(b"\n")
        if int(seq) > self.seq:
            self.seq, self.wanted = int(seq), messages.decode(Blob, blob)
            self.got.clear()
            self.fetcher.keep({self.wanted.id})

    def chunk(self, blob_id: str, k: int, payload: bytes) -> None:
        data = self.fetcher.put(blob_id, k, payload)
        if data is not None:
            assert data == WHOLE[blob_id]
            self.got = {blob_id: data}

    def advance(self) -> None:
        if self.wanted is not None and self.link.connected and self.wanted.id not in self.got:
            self.fetcher.start(self.wanted, LIMIT, "model")


class Download(RuleBasedStateMachine):
    """One model after the other is published in retained chunks, and a device downloads the newest."""

    def __init__(self) -> None:
        super().__init__()
        self.surroundings = contextlib.ExitStack()
        self.surroundings.enter_context(mock.patch.object(publisher_module, "MAX_UNACKNOWLEDGED", 9))
        self.surroundings.enter_context(mock.patch("os.fsync"))
        self.folder = Path(self.surroundings.enter_context(tempfile.TemporaryDirectory()))
        self.now, self.seq, self.current = 0.0, 0, 0
        self.fates: deque[str] = deque()
        self.held: list[Message] = []
        self.broker_died = False
        self.broker = LoopbackBroker(faults=self.delivery)
        self.saved = dict(self.broker.retained)
        self.link = LoopbackLink(self.broker, "aggregator")
        self.link.open()
        self.publisher = self.new_publisher()
        self.reader = self.new_reader()
        self.is_published(0)

    def new_publisher(self) -> Publisher:
        shelf = self.folder / "published.json"
        return Publisher(FLEET, self.link, shelf, clock=lambda: self.now, log=lambda line: None)

    def new_reader(self) -> Reader:
        link = LoopbackLink(self.broker, "device")
        link.open()
        link.subscribe(topics.current(FLEET))
        fetcher = Fetcher(FLEET, link, lambda: self.now, lambda kind, size: None, missing=self.is_missed)
        return Reader(link, fetcher)

    def is_missed(self, kind: str, times: int) -> None:
        """The device reports it to the aggregator, if the aggregator hears it."""
        if self.link.connected:
            self.publisher.again()

    def delivery(self, client: str, message: Message) -> list[Message]:
        """What happens to a chunk on its way to a client; manifests arrive, or the connection ends."""
        if message.topic == topics.current(FLEET) or not self.fates:
            return [message]
        fate = self.fates.popleft()
        if fate == "kept" and client == "device":
            self.held.append(message)
        return {"comes": [message], "twice": [message, message]}.get(fate, [])

    # What the network does --------------------------------------------------------------------------------------------

    @rule(fates=st.lists(st.sampled_from(["comes", "twice", "lost", "kept"]), min_size=1, max_size=20))
    def deliveries_change(self, fates: list[str]) -> None:
        self.fates.extend(fates)

    @precondition(lambda self: self.held)
    @rule(at=some)
    def what_was_kept_comes(self, at: int) -> None:
        message = self.held.pop(at % len(self.held))
        if self.reader.link.connected:
            self.reader.link.inbox.append(message)

    @rule(at=some)
    def somebody_lies(self, at: int) -> None:
        """A chunk with other bytes under a correct name."""
        blob = BLOBS[at % len(BLOBS)]
        before = dict(self.reader.got)
        self.broker.publish(topics.chunk(FLEET, blob.id, at % blob.n), bytes(blob.length(at % blob.n)))
        self.device_works()
        assert self.reader.got.keys() <= before.keys() | {self.reader.wanted.id if self.reader.wanted else ""}

    @rule(client=st.sampled_from(["device", "aggregator"]))
    def connection_ends(self, client: str) -> None:
        link = self.reader.link if client == "device" else self.link
        if link.connected:
            self.broker.drop(client)

    @rule()
    def broker_saves(self) -> None:
        self.saved = dict(self.broker.retained)

    @rule(goes_on=st.booleans())
    def broker_dies_and_comes_back_with_what_it_had_saved(self, goes_on: bool) -> None:
        if goes_on:
            self.all_goes_on(times=4)
        self.broker_died = True
        self.broker.stop()
        self.broker.retained = dict(self.saved)
        self.held.clear()
        self.broker.start()

    # What the ends do -------------------------------------------------------------------------------------------------

    @rule(which=st.integers(0, len(POOL) - 1))
    def is_published(self, which: int) -> None:
        """A new round; its model may be one that was published before."""
        self.current, self.seq = which, self.seq + 1
        blob = self.publisher.blob(BLOBS[which], POOL[which])
        self.publisher.manifest(b"%d\n" % self.seq + messages.encode(blob), {blob.id})

    @rule()
    def aggregator_works(self) -> None:
        for event in self.link.poll(0):
            if isinstance(event, Connected):
                self.publisher.reconnected()
            elif isinstance(event, Message):
                self.publisher.heard(event.topic, event.payload)
        self.publisher.tick()

    @rule()
    def device_works(self) -> None:
        for event in self.reader.link.poll(0):
            with contextlib.suppress(MessageError):
                self.reader.handle(event)
        self.reader.fetcher.tick()

    @rule(passed=seconds)
    def time_passes(self, passed: float) -> None:
        self.now += passed
        self.aggregator_works()
        self.device_works()

    @rule(times=st.integers(3, 9))
    def all_goes_on(self, times: int) -> None:
        for _ in range(times):
            self.time_passes(1.0)

    @rule()
    def device_starts_anew(self) -> None:
        if self.reader.link.connected:
            self.broker.kill("device")
        self.held.clear()
        self.reader = self.new_reader()

    @rule(goes_on=st.booleans())
    def aggregator_starts_anew(self, goes_on: bool) -> None:
        if goes_on:
            self.all_goes_on(times=4)
        if self.link.connected:
            self.broker.kill("aggregator")
        self.link = LoopbackLink(self.broker, "aggregator")
        self.link.open()
        self.publisher = self.new_publisher()
        self.is_published(self.current)

    # What must hold ---------------------------------------------------------------------------------------------------

    @invariant()
    def one_blob_at_a_time_and_only_the_wanted_one(self) -> None:
        target, wanted = self.reader.fetcher.target, self.reader.wanted
        assert target is None or (wanted is not None and target == wanted.id)

    def teardown(self) -> None:
        with self.surroundings:
            self.ends()

    def ends(self) -> None:
        """From now on nothing is lost."""
        self.fates.clear()
        self.held.clear()
        for _ in range(200):
            if not self.at_rest:
                self.time_passes(1.0)
        blob = BLOBS[self.current]
        assert self.at_rest
        assert self.reader.got == {blob.id: POOL[self.current]}
        lying = {topic for topic in self.broker.retained if topic != topics.current(FLEET)}
        named = {topics.chunk(FLEET, blob.id, k) for k in range(blob.n)}
        assert named <= lying if self.broker_died else named == lying, "what nobody names is cleared"

    @property
    def at_rest(self) -> bool:
        heard = self.link.connected and self.reader.link.connected and self.reader.seq == self.seq
        return heard and self.publisher.idle and BLOBS[self.current].id in self.reader.got


def test_a_blob_of_which_some_chunks_were_cleared_is_published_again_whole() -> None:
    """An aggregator dies while it clears a model, and its next life publishes the same one again."""
    download = Download()
    download.all_goes_on(times=5)
    download.is_published(which=1)
    for _ in range(20):
        left = sum(BLOBS[0].id in topic for topic in download.broker.retained)
        if left < BLOBS[0].n:
            break
        download.aggregator_works()
    assert 0 < left < BLOBS[0].n
    download.aggregator_starts_anew(goes_on=False)
    download.is_published(which=0)
    download.teardown()


TestUpload = Upload.TestCase
TestUpload.settings = LITTLE_TIME
TestDownload = Download.TestCase
TestDownload.settings = LITTLE_TIME
