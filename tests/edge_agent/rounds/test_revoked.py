"""A revoked device is told so with the fleet's signature, stops, and can be enrolled again."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Callable, Iterator
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cloud_server.ledger import ledger_tables as tables
from cloud_server.ledger.ledger import APPLICATION, Ledger
from cloud_server.ledger.ledger_tables import Update
from fleet_core.link.interface import Message
from fleet_core.link.loopback import LoopbackBroker
from fleet_core.protocol import messages, topics
from fleet_core.protocol.device_messages import Down
from fleet_core.protocol.signing import Signer
from tests.support.brokers import free_port
from tests.support.fleet_processes import processes, tiny_fleet
from tests.support.inprocess import World, config_text, toy, without_fsync, world
from tests.support.programs import metafleet, run_to_end, small_fleet

TICK_S = 0.1
SAID = "this device was revoked by the fleet t on "


@pytest.fixture
def fleet(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., World]]:
    without_fsync(monkeypatch)
    made: list[World] = []

    def make(broker: LoopbackBroker | None = None, **options: Any) -> World:
        made.append(world(tmp_path / "w", config_text(**{"devices": 1, "rounds": 1, **options}), broker))
        w = made[-1]
        w.start_server()
        for n in range(2):
            w.start_agent(f"d{n}", toy(n))
        return w

    yield make
    for each in made:
        each.close()


def pump(w: World, until: Callable[[], bool]) -> None:
    assert w.pump(until, tick_s=TICK_S), "\n".join(w.lines)


def finished(w: World) -> bool:
    return w.server is not None and w.server.finished and w.server.settled


def stopped(w: World, name: str) -> bool:
    return name not in w.agents and w.logged(f"{name}: {SAID}")


def test_a_revoked_device_is_told_at_once_with_the_date_and_stops(fleet):
    w = fleet()
    pump(w, lambda: finished(w))
    w.server.ledger.request("revoke/d1", repr(w.clock.wall()))
    pump(w, lambda: stopped(w, "d1"))
    day = time.strftime("%Y-%m-%d", time.gmtime(w.clock.wall()))
    assert w.logged(f"d1: {SAID}{day}\nhint: 'metafleet devices enroll' with the name d1 lets it in again")
    pump(w, lambda: w.server.ledger.device("d1").state == "off")
    assert "d0" in w.agents


def test_one_that_was_away_is_told_when_it_comes_back_and_again_at_every_start(fleet):
    w = fleet()
    pump(w, lambda: finished(w))
    w.kill_agent("d1")
    w.server.ledger.request("revoke/d1", repr(w.clock.wall()))
    pump(w, lambda: w.logged("d1 revoked"))
    for _ in range(2):
        w.start_agent("d1")
        pump(w, lambda: stopped(w, "d1"))
        w.lines.clear()


def test_one_that_comes_while_no_aggregator_runs_is_told_when_one_does(fleet):
    w = fleet()
    pump(w, lambda: finished(w))
    w.kill_server()
    with Ledger(w.fleet.ledger_path) as ledger:
        ledger.request("revoke/d1", "yes")
    for _ in range(20):
        w.step(TICK_S)
    assert "d1" in w.agents
    w.start_server()
    pump(w, lambda: stopped(w, "d1"))


def test_a_word_that_is_lost_comes_again_when_the_device_is_heard_of(fleet):
    lost: list[Message] = []

    def once(client: str, message: Message) -> list[Message]:
        if b'"t":"revoked"' not in message.payload or lost:
            return [message]
        lost.append(message)
        return []

    w = fleet(LoopbackBroker(faults=once))
    pump(w, lambda: finished(w))
    w.server.ledger.request("revoke/d1", repr(w.clock.wall()))
    pump(w, lambda: bool(lost))
    w.broker.drop(w.agents["d1"].link.client_id)
    pump(w, lambda: stopped(w, "d1"))


def test_enrolling_lets_it_in_again(fleet):
    w = fleet(rounds=40)
    pump(w, lambda: w.closed() == 2)
    w.server.ledger.request("revoke/d1", repr(w.clock.wall()))
    pump(w, lambda: stopped(w, "d1"))
    w.server.ledger.request("enroll/d1", repr(w.clock.wall()))
    w.start_agent("d1")
    began = w.closed()
    pump(w, lambda: any(u.round > began for u in w.server.ledger.rows(Update, device="d1", status="counted")))


def test_what_was_asked_while_no_aggregator_ran_is_carried_out_in_its_order(fleet):
    w = fleet()
    pump(w, lambda: finished(w))
    w.kill_agent("d1")
    w.kill_server()
    with Ledger(w.fleet.ledger_path) as ledger:
        ledger.request("revoke/d1", "100.0")
        ledger.request("enroll/d1", "101.0")
        ledger.request("enroll/d0", "100.0")
        ledger.request("revoke/d0", "101.0")
    w.start_server()
    pump(w, lambda: stopped(w, "d0"))
    w.start_agent("d1")
    pump(w, lambda: w.server.ledger.device("d1").state == "on")
    assert [d.status for d in w.server.ledger.devices()] == ["revoked", "enrolled"]


@pytest.mark.slow
@pytest.mark.parametrize("wrong", ["key", "device", "boot", "seq", "no seq", "unsigned"])
def test_nobody_else_can_stop_a_device(fleet, tmp_path, wrong):
    w = fleet()
    pump(w, lambda: finished(w))
    agent = w.agents["d1"]
    word = Down("revoked", 1, device="d1", boot=agent.boot, seq=agent.manifest.seq, at=1e9)
    said = {"device": replace(word, device="d0"), "boot": replace(word, boot="an older life"), "no seq":
            replace(word, seq=None), "seq": replace(word, seq=agent.manifest.seq - 1)}.get(wrong, word)
    signer = Signer.create(tmp_path / "another.key") if wrong == "key" else w.fleet.signer()
    body = messages.encode(said)
    w.broker.publish(topics.down("t", "d1"), body if wrong == "unsigned" else signer.sign(body), retain=True)
    for _ in range(10):
        w.step(TICK_S)
    assert w.agents["d1"] is agent
    assert not w.logged(SAID)
    w.broker.publish(topics.down("t", "d1"), w.fleet.signer().sign(messages.encode(word)))
    pump(w, lambda: stopped(w, "d1"))


def test_a_word_of_an_earlier_life_does_not_end_the_one_after_it_was_let_in_again(fleet):
    lines: list[Message] = []

    def record(client: str, message: Message) -> list[Message]:
        lines.extend([message] if b'"t":"revoked"' in message.payload else [])
        return [message]

    w = fleet(LoopbackBroker(faults=record))
    pump(w, lambda: finished(w))
    w.server.ledger.request("revoke/d1", repr(w.clock.wall()))
    pump(w, lambda: stopped(w, "d1"))
    w.server.ledger.request("enroll/d1", repr(w.clock.wall()))
    w.start_agent("d1")
    w.broker.publish(lines[-1].topic, lines[-1].payload, retain=True)
    pump(w, lambda: w.server.ledger.device("d1").state == "on")
    for _ in range(10):
        w.step(TICK_S)
    assert "d1" in w.agents


def test_a_strangers_device_that_was_never_enrolled_continues(fleet):
    w = fleet(fleet='enrolment = "listed"\n')
    for _ in range(20):
        w.step(TICK_S)
    assert w.agents.keys() == {"d0", "d1"}
    assert w.logged("d1 is not enrolled")


def test_both_sides_say_that_they_are_connected_after_a_loss(fleet):
    w = fleet()
    pump(w, lambda: finished(w))
    assert not w.logged("broker: connected")
    for client in (w.agents["d1"].link.client_id, w.server.link.client_id):
        w.broker.drop(client)
    pump(w, lambda: w.lines.count("broker: connected") == 1)
    pump(w, lambda: w.lines.count("d1: broker: connected") == 1)
    assert [line for line in w.lines if line.startswith("d1: ")][-1] == "d1: broker: connected"


def test_a_ledger_of_the_version_before_knows_no_date(tmp_path):
    path = tmp_path / "ledger.sqlite"
    with closing(sqlite3.connect(path)) as made:
        made.executescript(tables.SCHEMA + tables.ADDED[2])
        made.execute("INSERT INTO devices VALUES ('d0', 'revoked', 1, 1, 1, 'off', '', '', '{}', NULL, 1, 0)")
        made.execute(f"PRAGMA application_id = {APPLICATION}")
        made.execute("PRAGMA user_version = 2")
        made.commit()
    with Ledger(path) as ledger:
        (found,) = ledger.devices()
        assert (found.status, found.revoked_at) == ("revoked", None)
        ledger.put(replace(found, revoked_at=5.0))
        assert ledger.devices()[0].revoked_at == 5.0


@pytest.mark.slow
def test_the_list_shows_what_waits_for_the_aggregator(tmp_path):
    place = small_fleet(tmp_path / "fleet").folder
    with Ledger(place / "ledger.sqlite") as ledger:
        ledger.put(tables.Device(name="d0"))
    assert run_to_end(metafleet("devices", "enroll", place, "d1", "--to", tmp_path / "d1")).returncode == 0
    for name in ("d0", "d1"):
        shown = run_to_end(metafleet("devices", "revoke", place, name, "--json"))
        assert json.loads(shown.stdout)["aggregator"] == "off"
    run_to_end(metafleet("devices", "enroll", place, "d2", "--to", tmp_path / "d2"))
    lines = run_to_end(metafleet("devices", "list", place)).stdout.splitlines()
    assert [" ".join(line.split()[:3]) for line in lines[1:]] == [
        "d0 enrolled, revoke", "d1 revoke pending", "d2 enroll pending"]
    facts = json.loads(run_to_end(metafleet("devices", "list", place, "--json")).stdout)
    assert [d["pending"] for d in facts] == ["revoke", "revoke", "enroll"]


@pytest.mark.slow
def test_over_a_plain_broker_the_process_of_a_revoked_device_ends_with_its_own_exit_code(tmp_path):
    folder = tiny_fleet(tmp_path / "run", rounds=2)
    with processes(folder, f"mqtt://127.0.0.1:{free_port()}", hosts_broker=True) as running:
        running.start("server")
        running.programs.started[0].wait_for("broker: amqtt at")
        running.start("d0", "d1")
        running.until(lambda: running.closed() == 2)
        assert run_to_end(metafleet("devices", "revoke", folder / "fleet", "d1")).returncode == 0
        program = running.running.pop("d1")
        assert program.exit_code() == 77
        assert "error: this device was revoked by the fleet t on 20" in program.text()
