"""A small update comes with its offer in one message; older agents and aggregators offer it and send chunks."""

from __future__ import annotations

import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloud_server.broadcast import manifest as manifests
from cloud_server.ledger.ledger_tables import Update
from edge_agent.connection.update_upload import Offer, Uploader
from fleet_core.base import compression, storage
from fleet_core.codecs import safetensors_payload
from fleet_core.link.loopback import LoopbackBroker, LoopbackLink
from fleet_core.protocol import messages, topics
from fleet_core.protocol.chunks import Blob
from fleet_core.protocol.device_messages import Presence
from fleet_core.protocol.round_messages import WHOLE, UploadManifest, UploadRules, with_its_bytes
from tests.support.inprocess import World, config_text, world
from tests.support.stand_ins import BrokerFaults, FakeDevice, constant_update
from tests.support.world_checks import check_duals, checkpoint_bits, finished, opened, settled, start, statuses

pytestmark = pytest.mark.usefixtures("no_fsync", "torch_threads")

NAMES = ("d0", "d1", "d2")
ALL_COUNTED = dict.fromkeys(NAMES, "counted")


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(**options: Any) -> World:
        made.append(world(tmp_path / str(len(made)), config_text(**options), LoopbackBroker(faults=BrokerFaults())))
        return made[-1]

    yield make
    for each in made:
        each.close()


def seen(w: World) -> Any:
    return w.broker.faults


def parts(w: World, number: int, name: str) -> list[str]:
    """The messages of a device's update: ``w`` whole, ``m`` an offer, a number a chunk."""
    start = topics.upload(w.name, name, number, "")
    return [message.topic.removeprefix(start) for client, message in seen(w).seen if message.topic.startswith(start)]


def run(w: World) -> World:
    start(w, *NAMES)
    assert w.pump(lambda: finished(w) and settled(w))
    return w


def chunks_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """As an aggregator of a version that does not know whole updates."""
    build = UploadRules.__init__

    def older(self: UploadRules, *given: Any, **named: Any) -> None:
        build(self, *given[:6], **{key: value for key, value in named.items() if key != "whole"})

    monkeypatch.setattr(UploadRules, "__init__", older)


# Both forms -----------------------------------------------------------------------------------------------------------


def test_a_small_update_is_one_message_up_and_the_round_ends_as_with_chunks(
    fleet: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    w = run(fleet(rounds=2))
    for number in (1, 2):
        assert [parts(w, number, name) for name in NAMES] == [[WHOLE]] * 3
        assert statuses(w, number) == ALL_COUNTED
    check_duals(w, feedback=True)
    whole = w.server.ledger.volume()[None].payload.up
    chunks_only(monkeypatch)
    other = run(fleet(rounds=2))
    for number in (1, 2):
        assert [parts(other, number, name) for name in NAMES] == [["m", "0"]] * 3, "an older aggregator"
    assert checkpoint_bits(other) == checkpoint_bits(w)
    assert other.server.ledger.volume()[None].payload.up == whole


def test_an_agent_that_does_not_know_of_it_sends_chunks_in_the_same_round(
    fleet: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    offer = Uploader.offer

    def older(uploader: Uploader, pending: Offer, whole: int = 0) -> None:
        offer(uploader, pending, 0 if uploader._device == "d1" else whole)

    wanted = checkpoint_bits(run(fleet(rounds=2)))
    monkeypatch.setattr(Uploader, "offer", older)
    w = run(fleet(rounds=2))
    assert [parts(w, 1, name) for name in NAMES] == [[WHOLE], ["m", "0"], [WHOLE]]
    assert checkpoint_bits(w) == wanted


def test_a_whole_update_leaves_room_for_its_offer_in_a_message_of_the_fleets_size(liar: FakeDevice) -> None:
    assert liar.manifest().up.whole == liar.manifest().up.chunk // 2 == 30720


def test_a_larger_round_takes_smaller_updates_whole(
    fleet: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Otherwise more would be on its way to the aggregator than with granted chunks."""
    sizes = [row.payload_bytes for row in run(fleet(rounds=1)).server.ledger.rows(Update)]
    monkeypatch.setattr(manifests, "WHOLE_IN_ALL", 3 * min(sizes) - 1)
    w = run(fleet(rounds=1))
    assert [parts(w, 1, name)[0] for name in NAMES] == ["m"] * 3
    assert statuses(w, 1) == ALL_COUNTED


# What is lost, and deaths ---------------------------------------------------------------------------------------------


def test_a_whole_update_that_is_lost_is_offered_and_sent_in_chunks(
    fleet: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The offer goes at QoS 1, so that an MQTT 5 broker says if it denies it."""
    qualities: dict[str, int] = {}
    publish = LoopbackLink.publish

    def noting(link: LoopbackLink, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1) -> None:
        if "/a/d0/up/" in topic:
            qualities[topic.rpartition("/")[2]] = qos
        publish(link, topic, payload, retain=retain, qos=qos)

    monkeypatch.setattr(LoopbackLink, "publish", noting)
    w = fleet(rounds=1)
    seen(w).drop(f"/a/d0/up/1/{WHOLE}")
    run(w)
    assert parts(w, 1, "d0") == [WHOLE, "m", "0"]
    assert qualities == {WHOLE: 0, "m": 1, "0": 0}
    assert statuses(w, 1) == ALL_COUNTED


def test_after_a_lost_answer_the_offer_alone_is_repeated_and_the_update_counts_once(
    fleet: Callable[..., World]
) -> None:
    w = fleet(rounds=1, fleet="quorum = 1.0")
    lift = seen(w).drop("/a/d0/dn")
    unheld = seen(w).drop("/a/d2/up/")
    start(w, *NAMES)
    assert w.pump(lambda: parts(w, 1, "d0") == [WHOLE, "m"])
    lift()
    unheld()
    assert w.pump(lambda: finished(w) and settled(w))
    assert set(parts(w, 1, "d0")) == {WHOLE, "m"}, "its bytes came once"
    assert statuses(w, 1) == ALL_COUNTED


def test_a_whole_update_that_comes_twice_counts_once(fleet: Callable[..., World]) -> None:
    w = fleet(rounds=2)
    wanted = checkpoint_bits(run(w))
    twice = fleet(rounds=2)
    seen(twice).rules.append(lambda client, m: [m, m] if m.topic.endswith(f"/{WHOLE}") else None)
    run(twice)
    assert [len(twice.server.ledger.rows(Update, round=number)) for number in (1, 2)] == [3, 3]
    assert checkpoint_bits(twice) == wanted


@pytest.mark.parametrize("held", [True, False])
def test_an_aggregator_that_dies_with_a_whole_update_asks_for_nothing_that_it_holds(
    fleet: Callable[..., World], held: bool
) -> None:
    wanted = checkpoint_bits(run(fleet(rounds=1)))
    w = fleet(rounds=1, fleet="quorum = 1.0")
    unheld = seen(w).drop("/a/d2/up/")
    start(w, *NAMES)
    assert w.pump(lambda: opened(w, 1) and len(w.server.open.received) == 2)
    if not held:
        (w.fleet.folder / "spool" / "1" / "d0.update").unlink()
    w.kill_server()
    before = len(parts(w, 1, "d0"))
    unheld()
    w.start_server()
    assert w.pump(lambda: finished(w) and settled(w))
    assert parts(w, 1, "d0")[before:] == (["m"] if held else ["m", "0"])
    assert checkpoint_bits(w) == wanted


# Refusals -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def liar(tmp_path: Path) -> Iterator[FakeDevice]:
    """A fleet of one lying device, in its first round."""
    w = world(tmp_path, config_text(devices=1, link='up = "fp32"\nmax_update_norm = 50.0'))
    w.start_server()
    fake = FakeDevice(w, "liar")
    fake.announce()
    assert w.pump(lambda: w.server.open is not None)
    yield fake
    w.close()


def good(liar: FakeDevice, value: float = 0.01) -> bytes:
    update = {"body": constant_update(liar.w, value)["body"]}
    return safetensors_payload.payload(storage.pack(storage.flatten(update)), words=True)


def sent(liar: FakeDevice, message: bytes, number: int = 1) -> str:
    """The reason of the last refusal, or empty."""
    liar.link.publish(topics.upload(liar.w.name, liar.name, number, WHOLE), message)
    liar.w.step()
    return liar.downs()[-1].reason


def whole(liar: FakeDevice, data: bytes, **changes: Any) -> bytes:
    blob = Blob.of(data, max(len(data), 1024))
    return with_its_bytes(liar.update(data, blob=blob, **changes), data, packed=messages.PLAIN)


def test_a_whole_update_is_checked_as_any_other(liar: FakeDevice) -> None:
    assert "the round is closed" in sent(liar, whole(liar, good(liar)), number=7)
    assert "base model" in sent(liar, whole(liar, good(liar), base="f" * 32))
    assert "codec int9, expected" in sent(liar, whole(liar, good(liar), codec="int9"))
    assert "expected at most 50" in sent(liar, whole(liar, good(liar, 1e6)))
    assert "is truncated" in sent(liar, whole(liar, good(liar)[:-4]))
    limit = liar.w.server._parts.receiver.max_upload_bytes
    assert f"a blob of {limit + 1} bytes; expected at most {limit}" in sent(liar, whole(liar, bytes(limit + 1)))
    assert not list((liar.w.fleet.folder / "spool").glob("*/*"))
    assert {row.status for row in liar.w.server.ledger.rows(Update)} == {"refused"}


def test_a_whole_update_that_cannot_be_read_is_refused_without_waiting_for_it(liar: FakeDevice) -> None:
    message = whole(liar, good(liar))
    offer = messages.encode(liar.update(b"x"))
    for bad in (b"", message[:19], message[:40], message[:-1], message + b"\0", b"\0" + message[1:],
                message[:16] + b"\xff" * 4 + message[20:], offer):
        assert "its announcement cannot be read" in sent(liar, bad) or not bad
    assert "liar" in liar.w.server.open.failed
    assert liar.w.server.ledger.rows(Update) == []


def test_an_offer_that_unpacks_to_more_than_an_update_can_need_is_not_parsed(liar: FakeDevice) -> None:
    bomb = compression.compress(b"[" + b"[]," * (1 << 20) + b"[]]")
    assert len(bomb) < 1000
    liar.link.publish(topics.upload(liar.w.name, liar.name, 1, "m"), bomb)
    tracemalloc.start()
    liar.w.step()
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert "its announcement cannot be read" in liar.downs()[-1].reason
    assert peak < 8 << 20, "a million lists take ten times as much"


def test_an_asked_device_gives_one_update(liar: FakeDevice) -> None:
    data = good(liar)
    assert sent(liar, whole(liar, data)) == ""
    assert liar.downs()[-1].t == "done"
    assert sent(liar, whole(liar, data)) == ""
    if liar.w.server.open is not None and liar.w.server.open.number == 1:
        assert "another update of this round" in sent(liar, whole(liar, good(liar, 0.02)))
    counted = [row for row in liar.w.server.ledger.rows(Update) if row.status == "counted"]
    assert len(counted) <= 1


def test_a_device_that_is_not_asked_cannot_fill_the_spool(liar: FakeDevice) -> None:
    stranger = FakeDevice(liar.w, "stranger")
    stranger.announce()
    liar.w.step()
    data = good(liar)
    upload = replace(liar.update(data), blob=Blob.of(data, 1024))
    assert isinstance(upload, UploadManifest)
    stranger.link.publish(topics.upload(liar.w.name, "stranger", 1, WHOLE), with_its_bytes(upload, data, packed=True))
    liar.w.step()
    assert not list((liar.w.fleet.folder / "spool").glob("*/*"))
    assert stranger.downs()[-1].reason == "not in this round's cohort"


# Heartbeats -----------------------------------------------------------------------------------------------------------


def beats(w: World, name: str) -> list[str]:
    """Phases of a device's heartbeats."""
    told = [message.payload for client, message in seen(w).seen if message.topic == topics.presence(w.name, name)]
    return [one.ph for one in (messages.decode(Presence, payload) for payload in told) if one.beat]


def test_a_device_says_that_it_trains_and_the_rest_follows_from_its_update(fleet: Callable[..., World]) -> None:
    w = run(fleet(rounds=2))
    assert [beats(w, name) for name in NAMES] == [["train"] * 2] * 3
    assert {w.server._members.phase(name) for name in NAMES} == {"idle"}
    w.clock.seconds += 60
    assert all(w.server._members.alive(name) for name in NAMES), "an idle device may be silent"


def test_to_an_older_aggregator_every_phase_is_said(
    fleet: Callable[..., World], monkeypatch: pytest.MonkeyPatch
) -> None:
    chunks_only(monkeypatch)
    w = run(fleet(rounds=1))
    assert [beats(w, name) for name in NAMES] == [["train", "upload", "idle"]] * 3


def test_a_device_whose_update_is_lost_goes_on_with_heartbeats_and_says_when_it_is_idle(
    fleet: Callable[..., World]
) -> None:
    w = fleet(rounds=1, fleet="quorum = 1.0\ndeadline_s = 1000")
    lift = seen(w).drop("/a/d0/up/")
    start(w, *NAMES)
    assert w.pump(lambda: beats(w, "d0")[-2:] == ["upload"] * 2, tick_s=0.25)
    assert w.server._members.alive("d0")
    lift()
    assert w.pump(lambda: finished(w) and settled(w), tick_s=0.25)
    assert beats(w, "d0")[-1] == "idle"
    assert w.server._members.phase("d0") == "idle"
