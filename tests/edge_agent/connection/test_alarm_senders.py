"""What hears of an alarm, a command or an MQTT topic: what it gets, how often, and what happens when it fails."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import create_autospec

import pytest

from edge_agent.connection.alarm_senders import AlarmSender, OverAgentsLink, hearing_alarms, over_agents_link, publish
from edge_agent.connection.broker_login import link_to
from edge_agent.device.agent_costs import AgentCosts
from edge_agent.device.state import DeviceState
from edge_agent.inference.service import service_of
from edge_agent.rounds.agent import Agent
from fleet_core.base import processes
from fleet_core.base.errors import ConfigError, LinkError
from fleet_core.board.device_settings import Alarm, Identity, Settings
from fleet_core.link.interface import Connected, Denied, Message
from fleet_core.link.mqtt import MqttLink
from fleet_core.protocol.device_messages import Answer
from tests.support import waiting
from tests.support.brokers import NEEDS_MOSQUITTO, RecordingLink, private_broker, until
from tests.support.pki import credentials_for, fleet_without_model, secured_broker

APPENDS = "import sys; open('heard', 'a').write(sys.stdin.read())"
WAITS = "import os, time\nwhile not os.path.exists('go'): time.sleep(0.02)\n"
WRITES = tuple(processes.python("-c", APPENDS))
QUIET = Answer(outputs=("score",), values=((0.1,), (0.2,)), threshold=0.5, alarms=(False, False), round=3)
LOUD = replace(QUIET, values=((0.1,), (0.7,)), alarms=(False, True))
TOPIC = "fl1/t/a/d0/alarm"


def command(
    home: Path, log: list[str], words: tuple[str, ...] = WRITES, *, timeout_s: float = 30.0, **more: Any
) -> AlarmSender:
    settings = Settings(Identity("d0", "t", "0" * 64), alarm=Alarm(words, every_s=10.0))
    return AlarmSender(settings, partial(processes.told, words, timeout_s=timeout_s, folder=home), log.append, **more)


def heard(home: Path) -> list[dict[str, Any]]:
    text = (home / "heard").read_text() if (home / "heard").exists() else ""
    return [json.loads(one + "}") for one in text.split("}")[:-1]]


def test_it_gets_the_sample_with_the_highest_score_and_runs_at_most_once_in_every_s(tmp_path: Path) -> None:
    now, log = [100.0], list[str]()
    hears = command(tmp_path, log, clock=lambda: now[0])

    def hear(answer: Answer, sample: str = "") -> None:
        hears(answer, sample)
        hears.join(30.0)

    hear(QUIET)
    assert heard(tmp_path) == []
    hear(LOUD, "18a3")
    assert heard(tmp_path) == [{"fleet": "t", "device": "d0", "time": 100.0, "sample": "18a3", "score": 0.7,
                                "threshold": 0.5, "alarms": 1, "round": 3}]
    now[0] = 109.9
    hear(LOUD)
    assert len(heard(tmp_path)) == 1
    now[0] = 110.0
    hear(LOUD)
    second = heard(tmp_path)[1]
    assert (second["alarms"], second["sample"]) == (2, None), "the alarm that was not told is counted"
    now[0] = 5.0  # the clock was set back
    hear(LOUD)
    assert len(heard(tmp_path)) == 3
    assert log == []


def test_nothing_waits_for_it_and_one_runs_at_a_time(tmp_path: Path) -> None:
    now, log = [100.0], list[str]()
    hears = command(tmp_path, log, tuple(processes.python("-c", WAITS + APPENDS)), clock=lambda: now[0])
    began = time.monotonic()
    for _ in range(50):
        hears(LOUD)
        now[0] += 100.0
    assert time.monotonic() - began < 5
    assert heard(tmp_path) == []
    (tmp_path / "go").touch()
    hears.join(30.0)
    assert [one["alarms"] for one in heard(tmp_path)] == [1]
    hears(LOUD)
    hears.join(30.0)
    assert [one["alarms"] for one in heard(tmp_path)] == [1, 50]


def test_a_command_that_fails_hangs_or_is_missing_is_told_in_the_log(tmp_path: Path) -> None:
    log: list[str] = []
    fails = tuple(processes.python("-c", "import sys; sys.stderr.write('no siren'); sys.exit(3)"))
    for words, timeout_s in ((fails, 30.0), (("sleep", "60"), 0.1), (("no-such-program",), 30.0)):
        hears = command(tmp_path, log, words, timeout_s=timeout_s)
        hears(LOUD)
        hears.join(30.0)
    assert log[0] == f"the command for alarms failed: {fails[0]}: exit code 3: no siren"
    assert "timed out" in log[1]
    assert "no-such-program" in log[2]


def test_the_same_failure_is_said_once_until_it_succeeds(tmp_path: Path) -> None:
    now, log, whys = [100.0], list[str](), ["no", "no", "other", "", "other"]
    hears = AlarmSender(Settings(Identity("d0", "t", "0" * 64)), lambda message: whys.pop(0), log.append,
                        what="it", clock=lambda: now[0])
    while whys:
        hears(LOUD)
        hears.join(30.0)
        now[0] += 100.0
    assert log == ["it failed: no", "it failed: other", "it failed: other"]


# A topic --------------------------------------------------------------------------------------------------------------


def topic_settings(url: str, **alarm: Any) -> Settings:
    return Settings(Identity("d0", "t", "0" * 64, broker=url), alarm=Alarm(**{"topic": TOPIC, "every_s": 0.0, **alarm}))


@pytest.fixture
def broker(tmp_path: Path) -> Iterator[str]:
    with private_broker(tmp_path / "broker", "amqtt") as running:
        yield running.url


def reader(url: str) -> RecordingLink:
    """A link on which messages on every topic arrive: one of its own has come through."""
    watched = RecordingLink(MqttLink(url, client_id="reader"))
    watched.link.subscribe("#")
    watched.link.open()

    def arrives() -> bool:
        if watched.link.connected and not watched.link.unacknowledged:
            watched.link.publish("ready", b"")
        return "ready" in watched.topics()

    until(arrives, watched)
    return watched


def of_topic(watched: RecordingLink) -> list[dict[str, Any]]:
    return [json.loads(one.payload) for one in watched.of(Message) if one.topic == TOPIC]


class Answers:
    on_answer: Any = None


@pytest.mark.slow
@pytest.mark.parametrize("other", [False, True])
def test_command_and_topic_get_the_same_object_at_the_fleets_broker_or_another(
    tmp_path: Path, broker: str, other: bool
) -> None:
    settings = topic_settings("mqtt://127.0.0.1:1" if other else broker, command=WRITES,
                              broker=broker if other else "")
    watched, service, log = reader(broker), Answers(), list[str]()
    with hearing_alarms(tmp_path, settings, service, log.append):
        service.on_answer(QUIET, "")
        service.on_answer(LOUD, "18a3")
        until(lambda: of_topic(watched) and heard(tmp_path), watched)
    watched.link.close()
    (told,), (ran,) = of_topic(watched), heard(tmp_path)
    assert {**told, "time": 0} == {**ran, "time": 0}
    assert (told["sample"], told["score"], told["alarms"]) == ("18a3", 0.7, 1)
    assert not [one for one in watched.of(Message) if one.retain and one.topic == TOPIC]
    assert log == []


@pytest.mark.slow
def test_a_running_agent_publishes_over_its_own_connection_and_again_after_a_break(tmp_path: Path, broker: str) -> None:
    settings = topic_settings(broker)
    watched, service, log, over = reader(broker), Answers(), list[str](), over_agents_link(settings)
    assert over is not None
    link = MqttLink(broker, client_id="agent")
    agent = Agent(settings, DeviceState(tmp_path), link, service_of(tmp_path, settings), AgentCosts(), None,
                  alarms=over)
    with hearing_alarms(tmp_path, settings, service, log.append, over):
        service.on_answer(LOUD, "")  # before there is a connection
        agent.step(0.0)
        link.open()

        def step() -> None:
            agent.step(0.02)
            watched.pump()
            service.on_answer(LOUD, "")  # one more, which waits until the one before has been acknowledged

        waiting.until(lambda: of_topic(watched), step)
        link.abort()
        link.open()
        waiting.until(lambda: len(of_topic(watched)) > 2, step)
        assert log == []
    agent.close()
    watched.link.close()


def test_a_broker_that_does_not_answer_is_said_and_nothing_waits_for_it(tmp_path: Path) -> None:
    why = publish(partial(link_to, Alarm(topic=TOPIC), tmp_path, topic_settings("mqtt://127.0.0.1:1")), TOPIC, {},
                  timeout_s=0.3)
    assert why == "Connection refused"
    over = OverAgentsLink(TOPIC, timeout_s=0.05)
    assert over.send({}) == "the broker does not answer"
    stopped = OverAgentsLink(TOPIC)
    sending = threading.Thread(target=stopped.send, args=({},))
    sending.start()
    waiting.until(lambda: not sending.is_alive(), stopped.close)


class Refuses:
    """A link whose broker refuses what is published."""

    connected = True

    def __init__(self) -> None:
        self.events: list[Any] = [Connected(5, None, None)]

    @property
    def unacknowledged(self) -> int:
        return len(self.events)

    def open(self) -> None: ...

    def close(self) -> None: ...

    def poll(self, timeout_s: float, also: Any = ()) -> list[Any]:
        found, self.events = self.events, []
        return found

    def publish(self, topic: str, payload: bytes) -> None:
        self.events.append(Denied(topic, "Not authorized"))


def test_a_message_that_waits_behind_others_on_the_agents_connection_did_not_fail() -> None:
    link = create_autospec(MqttLink, instance=True, connected=True, unacknowledged=40)  # the chunks of an update
    over, outcomes = OverAgentsLink(TOPIC, timeout_s=0.2), list[str]()
    thread = threading.Thread(target=lambda: outcomes.append(over.send({"score": 0.7})))
    thread.start()
    waiting.until(lambda: not thread.is_alive(), lambda: over.tick(link))
    link.publish.assert_called_once_with(TOPIC, b'{"score": 0.7}')
    assert outcomes == [""]


def test_a_broker_that_refuses_the_topic_is_said_with_what_to_do(tmp_path: Path) -> None:
    said = f"the broker refuses {TOPIC}: Not authorized (let this device write the topic"
    link: Any = Refuses()
    assert publish(lambda: link, TOPIC, {}).startswith(said)
    settings, log, whys = topic_settings("mqtt://127.0.0.1:1"), list[str](), list[str]()
    over = OverAgentsLink(TOPIC)
    agent = Agent(settings, DeviceState(tmp_path), link, service_of(tmp_path, settings), AgentCosts(), None,
                  alarms=over, log=log.append)
    sending = threading.Thread(target=lambda: whys.append(over.send({})))
    sending.start()
    waiting.until(lambda: whys, lambda: agent.step(0.0))
    assert whys[0].startswith(said)
    link.publish("another", b"")
    agent.step(0.0)
    assert log == ["broker: another denied: Not authorized"], "the sender says the rest"


@pytest.mark.parametrize(("alarm", "said"), [
    ({"topic": "plant/#"}, "is not a topic"),
    ({"broker": "mqtt://192.0.2.1"}, "is plain MQTT that leaves this machine"),
    ({"username": "me", "password_file": "no.txt"}, r"no\.txt: there is no such file"),
    ({"topic": "", "broker": "mqtt://127.0.0.1"}, "a broker for alarms and no topic"),
])  # fmt: skip
def test_settings_that_cannot_be_used_are_said_at_the_start(tmp_path: Path, alarm: dict[str, Any], said: str) -> None:
    settings = topic_settings("mqtt://127.0.0.1:1", **alarm)
    with pytest.raises((ConfigError, LinkError), match=said), hearing_alarms(
        tmp_path, settings, Answers(), print, over_agents_link(settings)
    ):
        pass


@NEEDS_MOSQUITTO
@pytest.mark.slow
def test_the_fleets_mosquitto_takes_a_devices_alarms_on_its_own_topic_alone(tmp_path: Path) -> None:
    fleet = fleet_without_model(tmp_path / "fleet")
    whys: list[str] = []
    with secured_broker(fleet) as (running, _):
        agent = RecordingLink(credentials_for(fleet, "d0", tmp_path / "d0").link(running.url, "d0", protocol=5))
        agent.link.open()
        for topic in (TOPIC, "plant/alarms"):
            over = OverAgentsLink(topic)
            sending = threading.Thread(target=lambda over: whys.append(over.send({})), args=(over,))
            sending.start()
            while sending.is_alive():
                agent.pump()
                for denied in agent.of(Denied):
                    over.denied(denied.topic, denied.reason)
                over.tick(agent.link)
        agent.link.close()
    assert whys[0] == ""
    assert "the broker refuses plant/alarms: Not authorized" in whys[1]
