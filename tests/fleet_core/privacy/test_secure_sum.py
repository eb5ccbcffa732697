"""Secure aggregation as pure state machines: the sum is exact, whoever vanishes; fewer than the threshold give none;
neither side does what could reveal more."""

from __future__ import annotations

import datetime
import pickle
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_core.base.errors import MessageError
from fleet_core.privacy import masks
from fleet_core.privacy.masks import Array
from fleet_core.privacy.secure_collector import Collector
from fleet_core.privacy.secure_participant import Participant
from fleet_core.privacy.secure_sum import neighbours
from fleet_core.protocol.secure_messages import Revealed, SealedShares
from tests.support import secure
from tests.support.secure import NOW, authority, identity, int8, session, step_of

STEPS = ("shares", "masked", "unmask")


def updates(devices: int, count: int = 50) -> dict[str, Array]:
    return {f"d{k}": int8(k, count) for k in range(devices)}


@settings(max_examples=25, deadline=None)
@given(st.data())
def test_the_sum_is_that_of_the_plain_values_whoever_vanishes_and_whenever(data: st.DataObject) -> None:
    devices = data.draw(st.integers(4, 8))
    values = updates(devices)
    may = devices - session(devices).needed(devices)
    lost = data.draw(st.lists(st.sampled_from(sorted(values)), max_size=may, unique=True))
    at = {name: data.draw(st.sampled_from(STEPS)) for name in lost}
    gone = {step: [name for name in lost if at[name] == step] for step in STEPS}
    server, _, total = secure.run(values, session(devices), gone)
    there = [name for name in values if name not in gone["shares"] + gone["masked"]]
    assert sorted(server.there) == there
    assert np.array_equal(total, sum(values[name].astype(np.int64) for name in there))


def test_with_few_neighbours_each_the_sum_is_the_same() -> None:
    values = updates(12)
    server, _, total = secure.run(values, session(12, neighbours=6), {"masked": ["d3"], "unmask": ["d7"]})
    assert {len(around) for around in server.graph.values()} == {6}
    assert np.array_equal(total, sum(values[n].astype(np.int64) for n in values if n != "d3"))


@pytest.mark.parametrize("count", [0, 4, 6, 50])
def test_neighbours_are_mutual(count: int) -> None:
    graph = neighbours([f"d{k}" for k in range(9)], "s", count)
    assert all(a in graph[b] for a in graph for b in graph[a])
    assert all(a not in graph[a] and len(graph[a]) == (count or 8) % 9 for a in graph if count < 9)


@pytest.mark.parametrize("step", STEPS)
def test_fewer_than_the_threshold_give_no_sum(step: str) -> None:
    with pytest.raises(MessageError, match=r"threshold|shares that do not fit"):
        secure.run(updates(5), session(5), {step: ["d0", "d1", "d2"]})


def test_the_aggregator_holds_no_single_update() -> None:
    """Known values are planted: all that the aggregator holds has no run of them, and what it can take away of a
    device's masked update leaves numbers that look drawn."""
    values = {name: np.full(64, 77 + k, np.int8) for k, name in enumerate(updates(5))}
    kept: dict[str, Array] = {}
    server, _, total = secure.run(values, session(5), {"masked": ["d4"]}, seen=kept.__setitem__)
    memory = pickle.dumps((server.keys, server.shares, server.revealed, server.senders, server.there, kept, total))
    assert np.full(8, 77 + 78 + 79 + 80).tobytes() in memory  # the sum is, and would be found
    for value in values.values():
        for kind in (np.int8, np.int16, np.int32, np.int64, np.float32):
            assert value[:8].astype(kind).tobytes() not in memory
    for name, masked in kept.items():
        own = server._secret(name)  # all that it can take away of a device that is there
        rest = masks.whole(masked - masks.stream(own, 64, 16)) - values[name]
        assert len(set(rest.tolist())) > 50
    assert set(total.tolist()) == {77 + 78 + 79 + 80}


# A device refuses -----------------------------------------------------------------------------------------------------


def shared(devices: int = 5, **rules: float) -> tuple[Collector, dict[str, Participant]]:
    """Both sides, once every device has shared."""
    given = session(devices, threshold=rules.get("threshold", 0.6))
    made = {f"d{k}": Participant(given, identity(f"d{k}")) for k in range(devices)}
    server = Collector(given, authority().certificate)
    for name, device in made.items():
        server.add_keys(name, device.keys(), NOW)
    server.start_sharing()
    for name, device in made.items():
        server.add_shares(name, device.seal(step_of(server, name).peers, authority().certificate, NOW))
    server.start_masking()
    return server, made


def test_a_device_reveals_once_and_only_of_enough_devices() -> None:
    server, made = shared()
    device = made["d0"]
    device.mask(step_of(server, "d0").boxes, int8(0))
    server.start_unmasking(made)
    asked = step_of(server, "d0")
    for wrong in (
        replace(asked, there=("d0", "d1"), gone=("d2", "d3", "d4")),  # too few
        replace(asked, there=("d0", "d1", "d2"), gone=("d3",)),  # not all
        replace(asked, gone=("d1",)),  # both kinds of share of one device
        replace(asked, there=("d1", "d2", "d3", "d4"), gone=("d0",)),  # the device's own share
    ):
        with pytest.raises(MessageError, match="a sum of"):
            device.reveal(wrong)
    answer = device.reveal(asked)
    assert answer == device.reveal(asked)
    assert answer.keys == {}
    with pytest.raises(MessageError, match="in one already"):
        device.reveal(replace(asked, there=asked.there[:-1], gone=asked.there[-1:]))


def test_a_device_masks_once_and_for_enough_devices() -> None:
    server, made = shared()
    boxes = dict(step_of(server, "d0").boxes)
    with pytest.raises(MessageError, match="2 devices that shared"):
        made["d0"].mask({"d1": boxes["d1"]}, int8(0))
    with pytest.raises(MessageError, match="not neighbours"):
        made["d0"].mask({**boxes, "x": ""}, int8(0))
    made["d0"].mask(boxes, int8(0))
    with pytest.raises(MessageError, match="masked already"):
        made["d0"].mask(boxes, int8(1))


def test_a_device_shares_with_devices_of_its_fleet_alone() -> None:
    given = session(4)
    own, others = Participant(given, identity("d0")), [Participant(given, identity(f"d{k}")).keys() for k in (1, 2, 3)]
    ca = authority().certificate
    stranger = Participant(given, identity("d3", "other")).keys()
    later = datetime.datetime.now(datetime.UTC) + datetime.timedelta(days=36_500)
    elsewhere = Participant(replace(given, round=2), identity("d3")).keys()
    old = Participant(session(4, id="b" * 32), identity("d3")).keys()
    for last, now, said in (
        (stranger, NOW, "no certificate issued by"), (others[2], later, "has ended"),
        (replace(others[2], mask=others[1].mask), NOW, "did not sign"), (elsewhere, NOW, "did not sign"),
        (old, NOW, "another session"), (replace(others[2], device="d9"), NOW, "another device"),
        (replace(others[2], device="d0"), NOW, "come twice"),
    ):
        with pytest.raises(MessageError, match=said):
            own.seal([*others[:2], last], ca, now)
    with pytest.raises(MessageError, match="2 devices of a sum"):
        own.seal(others[:1], ca, NOW)
    boxes = own.seal(others, ca, NOW)
    assert own.seal(others, ca, NOW) is boxes
    with pytest.raises(MessageError, match="other neighbours"):
        own.seal(others[:2], ca, NOW)


# The aggregator refuses -----------------------------------------------------------------------------------------------


def test_a_device_that_lies_is_found_out_and_the_sum_not_used() -> None:
    server, made = shared()
    sent = {name: device.mask(step_of(server, name).boxes, int8(k)) for k, (name, device) in enumerate(made.items())}
    server.start_unmasking(n for n in sent if n != "d4")
    for name in server.there:
        honest = made[name].reveal(step_of(server, name))
        server.add_revealed(name, replace(honest, keys=dict.fromkeys(honest.keys, "AAAA")) if name == "d1" else honest)
    assert server.complete
    with pytest.raises(MessageError, match=r"d4: shares (that do not fit|of another key)"):
        server.total(sent[name] for name in server.there)


def test_values_that_no_honest_devices_can_have_are_refused() -> None:
    values = updates(5) | {"d0": np.full(50, 5000, np.int16)}
    with pytest.raises(MessageError, match="did not follow the protocol"):
        secure.run(values, session(5))


def test_what_comes_too_late_twice_or_from_others_changes_nothing() -> None:
    server, made = shared()
    before = dict(server.shares)
    server.add_keys("d9", Participant(server.session, identity("d9")).keys(), NOW)
    server.add_shares("d0", SealedShares("a" * 32, {}))
    server.add_revealed("d0", _revealed(server))
    assert (server.shares, "d9" in server.keys, server.revealed) == (before, False, {})
    with pytest.raises(MessageError, match="keys of d0"):
        server.add_keys("d1", made["d0"].keys(), NOW)
    server.start_unmasking(made)
    with pytest.raises(MessageError, match="not asked for"):
        server.add_revealed("d0", replace(_revealed(server), keys={"d1": "AAAA"}))


def _revealed(server: Collector) -> Revealed:
    return Revealed(server.session.rules.session, {}, {})


def test_a_device_that_is_restarted_before_it_has_shared_is_left_out_and_the_others_go_on() -> None:
    """Nobody could open the shares of its new keys, and its masks would not cancel."""
    given = session(4)
    devices = {name: Participant(given, identity(name)) for name in updates(4)}
    server = Collector(given, authority().certificate)
    for name, device in devices.items():
        server.add_keys(name, device.keys(), NOW)
    server.start_sharing()
    peers = step_of(server, "d1").peers
    devices["d1"] = Participant(given, identity("d1"))
    server.add_keys("d1", devices["d1"].keys(), NOW)
    assert server.step("d1") is None
    server.add_keys("d0", devices["d0"].keys(), NOW)
    assert server.step("d0") is not None, "the same keys again"
    for name in ("d0", "d2", "d3"):
        server.add_shares(name, devices[name].seal(step_of(server, name).peers, authority().certificate, NOW))
    server.add_shares("d1", devices["d1"].seal(peers, authority().certificate, NOW))
    server.start_masking()
    assert server.senders == {"d0", "d2", "d3"}
