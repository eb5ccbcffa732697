"""Malformed payloads, up and down: refused before memory is taken, reported with their device, without after-effects.

test_fleet tests most of what an aggregator refuses; this file tests the rest, the memory it takes, and what a device
refuses: from a broker that lies, and from an aggregator that has the fleet's key and is wrong.
"""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.ledger.ledger_tables import Update
from cloud_server.records.spool import MAX_MANIFEST_BYTES, Spool
from cloud_server.rounds.uploads import SILENCE_S, WRONG_CHUNKS, Uploads
from fleet_core.base import storage, trees
from fleet_core.base.compression import compress
from fleet_core.base.errors import MessageError, StateError
from fleet_core.codecs import safetensors_payload
from fleet_core.link.interface import Message
from fleet_core.link.loopback import LoopbackLink
from fleet_core.model import payloads
from fleet_core.model.layout import InputSpec, Layout
from fleet_core.protocol import messages, round_messages, topics
from fleet_core.protocol.chunks import Blob, cut
from fleet_core.protocol.device_messages import Down, Report
from fleet_core.protocol.round_messages import Manifest, ModelRef, UploadManifest
from fleet_core.protocol.signing import Signer
from tests.support.inprocess import World, config_text, toy, world
from tests.support.stand_ins import FakeDevice, constant_update

SMALL_BYTES = 2 << 20  # of Python's memory, for what is refused
HUGE_BYTES = 1 << 32  # the largest that a message can name


@contextmanager
def taking_little() -> Iterator[None]:
    """Fails when the block holds more than ``SMALL_BYTES`` at any moment."""
    tracemalloc.start()
    try:
        yield
        assert tracemalloc.get_traced_memory()[1] < SMALL_BYTES
    finally:
        tracemalloc.stop()


def started(folder: Path, **options: Any) -> World:
    w = world(folder, config_text(devices=1, **options))
    w.start_server()
    return w


def consistent(size: int, chunk: int) -> Blob:
    """A consistent manifest of ``size`` bytes that do not exist."""
    count = -(-size // chunk)
    return Blob("0" * 32, "0" * 64, size, chunk, count, "0" * 16 * count)


# Up ------------------------------------------------------------------------------------------------------------------


@pytest.fixture
def liar(tmp_path: Path) -> Iterator[FakeDevice]:
    """A fleet of one lying device, in its first round."""
    w = started(tmp_path, link='up = "fp32"\nmax_update_norm = 50.0')
    fake = FakeDevice(w, "liar")
    fake.announce()
    assert w.pump(lambda: w.server.open is not None)
    w.step()
    yield fake
    w.close()


def refused(liar: FakeDevice, reason: str, status: str = "refused") -> None:
    """Counted in the ledger under the device's name, reported to the device, and logged."""
    rows = liar.w.server.ledger.rows(Update)
    assert [(row.device, row.status, reason in row.reason) for row in rows] == [("liar", status, True)]
    assert (liar.downs()[-1].t, reason in liar.downs()[-1].reason) == ("reject", True)
    assert liar.w.logged("liar: update refused: ")
    assert not list((liar.w.fleet.folder / "spool").glob("*/*.update"))


@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (consistent(HUGE_BYTES, 1 << 24), "a blob of 4294967296 bytes"),
        (replace(consistent(2048, 1024), size=HUGE_BYTES), "a blob of 4294967296 bytes"),
        (replace(consistent(2048, 1024), n=1_000_000), "1000000 chunks"),
        (replace(consistent(2048, 1024), n=5, hashes="0" * 80), "5 chunks"),
    ],
)
def test_an_offer_of_a_blob_that_cannot_be_takes_no_memory(liar: FakeDevice, blob: Blob, reason: str) -> None:
    offer = liar.update(b"x", blob=blob)
    with taking_little():
        liar.offer(offer, 1)
        liar.w.step()
    refused(liar, reason)


def test_an_offer_of_too_many_chunks_is_refused_as_a_message(liar: FakeDevice) -> None:
    offer = liar.update(b"x", blob=replace(consistent(4096, 1024), n=1_000_001))
    liar.offer(offer, 1)
    liar.w.step()
    assert liar.w.logged("liar: update refused: its announcement cannot be read: ")
    assert liar.w.logged("a malformed UploadManifest: blob.n: 1000001 is over the limit")
    assert liar.w.server.ledger.rows(Update) == []
    assert [down.t for down in liar.downs()] == ["heard", "reject"]


def delivered(liar: FakeDevice, data: bytes, **changes: Any) -> None:
    """Offered, granted and sent whole."""
    upload = liar.update(data, **changes)
    liar.offer(upload, 1)
    liar.w.step()
    assert liar.downs()[-1].t == "need"
    with taking_little():
        liar.send(upload, 1, data)
        liar.w.step()


def with_first(value: float) -> Callable[[World], bytes]:
    """An update whose first number is ``value``, bypassing the codec, which would not send it."""

    def make(w: World) -> bytes:
        bad = constant_update(w)
        next(iter(bad["body"].values())).reshape(-1)[0] = value
        return safetensors_payload.payload(storage.pack(storage.flatten(bad)), words=True)

    return make


def bomb(w: World) -> bytes:
    """A few kilobytes that decompress to sixteen million."""
    return compress(bytes(1 << 24))


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (with_first(np.nan), "not finite"),
        (with_first(np.inf), "not finite"),
        (with_first(float(np.finfo(np.float32).max)), "an update of norm inf"),
        (bomb, "not a zstd frame of at most"),
    ],
)
def test_an_update_whose_numbers_or_size_are_absurd_is_refused(
    liar: FakeDevice, make: Callable[[World], bytes], reason: str
) -> None:
    delivered(liar, make(liar.w))
    refused(liar, reason)


def test_a_whole_of_right_chunks_that_is_not_the_announced_blob_is_refused(liar: FakeDevice) -> None:
    data = payloads.encode("fp32", constant_update(liar.w))
    right = Blob.of(data, 1024)
    whole = right.id + "0" * 32
    wrong = Blob(right.id, whole, right.size, right.chunk, right.n, right.hashes)
    delivered(liar, data, blob=wrong)
    refused(liar, "does not match its ")


def test_an_offer_for_a_round_that_is_over_is_late_and_takes_no_memory(liar: FakeDevice) -> None:
    data = payloads.encode("fp32", constant_update(liar.w))
    delivered(liar, data)
    assert liar.w.pump(lambda: liar.w.closed() == 1)
    other = payloads.encode("fp32", constant_update(liar.w, 0.02))
    with taking_little():
        liar.offer(liar.update(other), 1)
        liar.w.step()
    rows = liar.w.server.ledger.rows(Update, round=1)
    assert sorted((row.status, row.reason) for row in rows) == [("counted", ""), ("late", "the round is closed")]


def test_chunks_that_are_not_the_announced_ones_are_counted_under_their_device(liar: FakeDevice) -> None:
    """Of other bytes, of another length, of none; a chunk that was not requested does not count."""
    data = payloads.encode("fp32", constant_update(liar.w))
    upload = liar.update(data)
    right = cut(data, upload.blob)
    liar.send(upload, 1, data)
    liar.offer(upload, 1)
    liar.w.step()
    for k, part in ((0, bytes(len(right[0]))), (0, right[0] + b"x"), (upload.blob.n, b"x")):
        liar.link.publish(topics.upload(liar.w.name, "liar", 1, k), part)
    liar.w.step()
    assert liar.w.logged("refused fl1/t/a/liar/up/1/0: blob ")
    counted = liar.w.server._parts.receiver._uploads.wrong_chunks
    assert counted == {"liar": 3}
    liar.send(upload, 1, data)
    liar.w.step()
    assert liar.downs()[-1].t == "done"
    assert counted == {"liar": 3}


def test_an_update_of_many_wrong_chunks_is_refused_and_booked_with_the_reason(liar: FakeDevice) -> None:
    data = payloads.encode("fp32", constant_update(liar.w))
    upload = liar.update(data)
    liar.offer(upload, 1)
    liar.w.step()
    for n in range(WRONG_CHUNKS):
        assert not liar.w.server.ledger.rows(Update, round=1)
        liar.link.publish(topics.upload(liar.w.name, "liar", 1, 0), bytes([n]))
        liar.w.step()
    (row,) = liar.w.server.ledger.rows(Update, round=1)
    assert (row.device, row.status) == ("liar", "refused")
    assert row.reason.startswith(f"{WRONG_CHUNKS} chunks were not as announced, at last: ")
    assert liar.downs()[-1].t == "reject"


def test_a_wrong_chunk_is_no_sign_of_life() -> None:
    """Otherwise a device that sends nothing but those would never be asked again, nor let go of."""
    now, granted = [0.0], list[Down]()
    intake = Uploads(lambda device, message: granted.append(message), lambda: now[0], 1 << 20)
    intake.offer("liar", 1, UploadManifest(
        blob=Blob.of(bytes(3000), 1024), codec="fp32", base="0" * 32, method="fedavg", layout="x"))
    now[0] = SILENCE_S - 1
    with pytest.raises(MessageError):
        intake.chunk("liar", 1, 0, b"x")
    now[0] = SILENCE_S + 1
    intake.tick()
    assert len(granted) == 2


@pytest.fixture
def spool(tmp_path: Path) -> Spool:
    """A spool of one layout, with the update ``whole`` in round 1."""
    layout = Layout("m", InputSpec((1,)), ("a",), 1, ())
    made = Spool(tmp_path, layout, ())
    offer = UploadManifest(blob=Blob.of(b"x", 1024), codec="fp32", base="0" * 32, method="fedavg", layout=layout.hash)
    made.put(1, "whole", offer, b"x")
    return made


def test_a_manifest_in_the_spool_that_is_too_large_to_be_one_is_left_out(spool: Spool, tmp_path: Path) -> None:
    with (tmp_path / "1" / "large.json").open("wb") as file:
        file.truncate(MAX_MANIFEST_BYTES + 1)
    assert list(spool.manifests(1)) == ["whole"]


def test_a_manifest_in_the_spool_that_the_disk_does_not_give_is_not_taken_for_a_torn_one(
    spool: Spool, tmp_path: Path
) -> None:
    (tmp_path / "1" / "folder.json").mkdir()
    with pytest.raises(StateError, match=r"folder\.json: cannot be read") as caught:
        spool.manifests(1)
    assert storage.is_disk_error(caught.value)


def test_an_invalid_public_key_is_named(liar: FakeDevice) -> None:
    path = liar.w.fleet.folder / "fleet.pub"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(StateError, match="holds no Ed25519 key") as caught:
        liar.w.fleet.public_key()
    assert caught.value.where == str(path)


# Down ----------------------------------------------------------------------------------------------------------------


@pytest.fixture
def w(tmp_path: Path) -> Iterator[World]:
    """A device (``d0``) with a trained model, whose aggregator is gone."""
    made = started(tmp_path, rounds=1)
    made.start_agent("d0", toy(0))
    assert made.pump(lambda: made.server.finished and made.agents["d0"].service.round == 1)
    made.kill_server()
    yield made
    made.close()


def announce(w: World, data: bytes, **changes: Any) -> Manifest:
    """Publish round 2 with ``data`` as its model, signed with the fleet's key."""
    now = w.agents["d0"].manifest
    blob = Blob.of(data, 1024)
    model = ModelRef("f" * 32, changes.pop("blob", blob), "fp32", round=2)
    made = replace(now, seq=now.seq + 1, round=2, open=True, cohort=round_messages.Cohort(devices=("d0",)), model=model)
    made = replace(made, **changes)
    for k, part in enumerate(cut(data, blob)):
        w.broker.publish(topics.chunk(w.name, blob.id, k), part, retain=True)
    w.broker.publish(topics.current(w.name), w.fleet.signer().sign(messages.encode(made)), retain=True)
    return made


class Ear:
    """Receives a device's reports."""

    def __init__(self, w: World):
        self.link = LoopbackLink(w.broker, "ear")
        self.link.open()
        self.link.poll(0)
        self.link.subscribe(topics.report(w.name, "d0"))

    def failures(self) -> list[str]:
        said = [event.payload for event in self.link.poll(0) if isinstance(event, Message)]
        return [report.failed for report in (messages.decode(Report, payload) for payload in said) if report.failed]


def other_layout(w: World) -> bytes:
    return payloads.encode("fp32", {"body": {"other": np.zeros(3, np.float32)}})


def first_not_finite(w: World) -> bytes:
    layout = w.agents["d0"].service.layout
    bad = trees.apply(np.array, trees.only(layout.seeded(0), ("body",)))
    next(iter(bad["body"].values())).reshape(-1)[0] = np.nan
    return safetensors_payload.payload(storage.pack(storage.flatten(bad)), words=True)


def another_model(w: World) -> bytes:
    return payloads.encode("fp32", trees.only(w.agents["d0"].service.layout.seeded(5), ("body",)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (other_layout, "has shape"),
        (first_not_finite, "not finite"),
        (another_model, "the decoded model is not the one that was announced"),
        (bomb, "not a zstd frame of at most"),
        (lambda w: b"no model at all", "not a zstd frame"),
        (lambda w: safetensors_payload.payload(b"\xff" * 64, words=True), "not safetensors"),
    ],
)
def test_an_invalid_model_is_refused_and_the_aggregator_told(
    w: World, make: Callable[[World], bytes], reason: str
) -> None:
    device, ear, data = w.agents["d0"], Ear(w), make(w)
    held = device.home.weights("model").model
    announce(w, data)
    with taking_little():
        assert w.pump(lambda: device.phase == "failed")
    assert w.logged(reason)
    assert any(reason in why for why in ear.failures())
    assert device.home.weights("model").model == held, "what it had is untouched"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("blob", "reason"),
    [
        (consistent(HUGE_BYTES, 1 << 24), "a blob of 4294967296 bytes"),
        (replace(consistent(4096, 1024), n=1_000_000), "1000000 chunks"),
        (replace(consistent(4096, 1024), n=5, hashes="0" * 80), "5 chunks"),
    ],
)
def test_a_model_whose_blob_cannot_be_takes_no_memory(w: World, blob: Blob, reason: str) -> None:
    ear = Ear(w)
    with taking_little():
        announce(w, b"", blob=blob)
        w.step()
    assert w.logged(reason)
    assert any(reason in why for why in ear.failures())


def test_a_chunk_of_other_bytes_is_refused_and_the_right_one_taken(w: World) -> None:
    """The broker lies once; its retained messages are correct."""
    data = another_model(w)
    blob = Blob.of(data, 1024)
    topic = topics.chunk(w.name, blob.id, 0)
    announce(w, data)
    right = w.broker.retained[topic]
    w.broker.retained[topic] = bytes(len(right))
    assert w.pump(lambda: w.logged(f"d0: refused {topic}: "))
    assert w.logged("chunk 0 does not match its hash")
    w.broker.retained[topic] = right
    assert w.pump(lambda: w.logged("the decoded model is not the one that was announced")), "all chunks are here"


def test_a_record_of_what_was_counted_that_another_key_signed_settles_nothing(tmp_path: Path) -> None:
    w = started(tmp_path)
    w.start_agent("d0", toy(0))
    agent = w.agents["d0"]
    assert w.pump(lambda: agent._updates.pending is not None)
    pending = agent._updates.pending
    forged = Down("counted", pending.round, pending.upload.id, ok=False, device="d0")
    w.broker.publish(topics.down(w.name, "d0"), Signer(bytes(32)).sign(messages.encode(forged)))
    agent.step(0)
    assert agent._updates.pending is pending
    assert w.logged("is signed by key")
    w.close()


def test_training_state_of_an_old_dual_epoch_is_not_used(w: World) -> None:
    """Another epoch is another key: what was learned under the old one stays where it was."""
    device = w.agents["d0"]
    held = device.home.weights("model")
    data, old = payloads.encode("fp32", held.params), states(w)
    model = ModelRef(held.model, Blob.of(data, 1024), "fp32", round=2)
    made = announce(w, data, dual_epoch=device.manifest.dual_epoch + 1, model=model)
    assert w.pump(lambda: device._updates.pending is not None)
    assert device._updates.pending.upload.dual_epoch == made.dual_epoch
    assert device._updates.pending.key not in old
    assert states(w) == old


def states(w: World) -> dict[str, bytes]:
    """Key -> the committed training state under it."""
    return {path.parent.name: path.read_bytes() for path in (w.folder / "devices").glob("d0/methods/*/state.*")}
