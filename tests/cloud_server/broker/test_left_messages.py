"""What devices leave at the broker is cleared: retained messages that are not their presence, and the presence of
devices that are gone."""

from __future__ import annotations

from pathlib import Path

import pytest

from cloud_server.broker.left_messages import ABSENT_S, LOOK_S, SWEEP_S
from cloud_server.devices import devices
from cloud_server.identity import audit_log
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import Report
from tests.support.inprocess import World, config_text, toy, without_fsync, world

LEFT = ("fl1/t/a/d0/rep", "fl1/t/a/d0/up/1/m", "fl1/t/a/d0/up/7/3", "fl1/t/a/d0/up/x/y", "fl1/t/a/d0/alarm",
        "fl1/t/a/d0/an/1")


@pytest.fixture(autouse=True)
def no_fsync(monkeypatch: pytest.MonkeyPatch) -> None:
    without_fsync(monkeypatch)


@pytest.fixture
def fleet(tmp_path: Path) -> World:
    """Two devices; no round begins, because it needs three."""
    made = world(tmp_path, config_text("fedavg"))
    made.start_server()
    for name in ("d0", "d1"):
        made.start_agent(name, toy(int(name[1])))
    assert made.pump(lambda: made.server._members.listening == 2)
    return made


def left(fleet: World) -> set[str]:
    """Topics of devices with retained messages."""
    return {topic for topic in fleet.broker.retained if topic.startswith("fl1/t/a/")}


PRESENCES = {topics.presence("t", "d0"), topics.presence("t", "d1")}


def test_a_retained_message_is_cleared_as_it_comes_and_its_sender_is_named(fleet: World) -> None:
    """All but answers, to which the aggregator is not always subscribed."""
    for topic in LEFT[:-1]:
        fleet.broker.publish(topic, messages.encode(Report(0)), retain=True)
    assert fleet.pump(lambda: left(fleet) == PRESENCES)
    assert sum("left a retained message at the broker" in line for line in fleet.lines) == 1
    said = [entry for entry in audit_log.read(fleet.fleet.folder) if entry.get("action") == "refuse"]
    assert [entry["device"] for entry in said] == ["d0"]
    assert "a retained message: fl1/t/a/d0/rep" in said[0]["text"]
    fleet.close()


def test_what_was_left_while_no_aggregator_was_there_is_cleared_at_its_start(fleet: World) -> None:
    fleet.kill_server()
    for topic in LEFT:
        fleet.broker.publish(topic, b"x", retain=True)
    assert set(LEFT) < left(fleet)
    fleet.start_server()
    assert fleet.pump(lambda: left(fleet) == PRESENCES)
    fleet.close()


def test_answers_are_looked_at_for_a_moment_every_ten_minutes(fleet: World) -> None:
    answers = topics.answer("t", "+", "+")
    assert fleet.pump(lambda: answers not in fleet.server.link.filters, steps=int(LOOK_S / 0.02) + 100)
    fleet.broker.publish(LEFT[-1], b"x", retain=True)
    assert not fleet.pump(lambda: left(fleet) == PRESENCES, steps=100)
    fleet.clock.seconds += SWEEP_S
    assert fleet.pump(lambda: left(fleet) == PRESENCES)
    fleet.close()


def test_a_device_that_is_revoked_leaves_no_presence(fleet: World) -> None:
    devices.devices_revoke(fleet.fleet.folder, "d1")
    assert fleet.pump(lambda: left(fleet) == {topics.presence("t", "d0")})
    fleet.broker.publish(topics.presence("t", "d1"), b'{"st":"on"}', retain=True)
    assert fleet.pump(lambda: left(fleet) == {topics.presence("t", "d0")}), "nor when it goes on sending"
    fleet.close()


def test_a_device_that_is_off_for_a_month_leaves_no_presence_until_it_comes_back(fleet: World) -> None:
    fleet.kill_agent("d1")
    assert fleet.pump(lambda: fleet.server._members.listening == 1)
    fleet.clock.seconds += ABSENT_S - SWEEP_S
    assert not fleet.pump(lambda: left(fleet) != PRESENCES, steps=10)
    fleet.clock.seconds += 2 * SWEEP_S
    assert fleet.pump(lambda: left(fleet) == {topics.presence("t", "d0")})
    fleet.start_agent("d1")
    assert fleet.pump(lambda: left(fleet) == PRESENCES and fleet.server._members.listening == 2)
    fleet.close()
