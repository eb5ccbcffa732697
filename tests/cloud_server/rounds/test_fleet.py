"""Whole fleets in one process: the real aggregator and real agents, through everything that can happen to them."""

from __future__ import annotations

import base64
import contextlib
import os
import re
import shutil
import subprocess
import sys
import time
import tracemalloc
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from cloud_server.broadcast import manifest as manifests
from cloud_server.broker import server_messages
from cloud_server.broker.publisher import RETAINED_S, Publisher
from cloud_server.identity.audit_log import Recorder
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device, Evaluation, Round, Traffic, Update
from cloud_server.membership.members import SILENT_S, Members
from cloud_server.membership.training_states import LOSS_ROUNDS, MOST_LOSSES
from cloud_server.records.spool import Spool
from cloud_server.rounds import update_receiver
from cloud_server.rounds.uploads import WRONG_CHUNKS, Uploads
from cloud_server.running import aggregator_process
from edge_agent.compute.trainer import InlineTrainer, TrainerJobs
from edge_agent.compute.training_jobs import Order
from edge_agent.compute.worker import Done, Job, TrainerProcess
from edge_agent.device.state import DeviceState, Pending
from fleet_core.algorithms import aggregation
from fleet_core.algorithms.interface import ClientState, Payload
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import storage, trees
from fleet_core.base.compression import MAGIC, compress
from fleet_core.base.errors import BundleError, ConfigError, LinkError
from fleet_core.codecs import safetensors_payload
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.link.interface import Connected, Disconnected, Message
from fleet_core.link.loopback import LoopbackBroker, LoopbackLink
from fleet_core.model import choose_frozen, payloads
from fleet_core.model.choose_codec import AUTO
from fleet_core.model.layout import InputSpec, Layout
from fleet_core.protocol import chunks, device_messages, messages, topics
from fleet_core.protocol.chunks import Blob, cut
from fleet_core.protocol.device_messages import Answer, Down, Presence, Question, ServerPresence
from fleet_core.protocol.round_messages import WHOLE, Manifest, UpdateRef, UploadManifest, whole_update
from fleet_core.protocol.signing import Signer
from fleet_core.training.local_round import TrainResult
from tests.support.deaths import Death, Plan, deadly
from tests.support.inprocess import CLASSES, Killed, World, config_text, toy, world
from tests.support.stand_ins import BrokerFaults, FakeDevice, SlowTrainer, constant_update
from tests.support.world_checks import (
    TWO_ROUNDS,
    all_evaluated,
    check_duals,
    checkpoint_bits,
    finished,
    opened,
    settled,
    start,
    state_key,
    statuses,
)

pytestmark = pytest.mark.usefixtures("no_fsync", "torch_threads")

TICK_S = 0.25


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., World]]:
    """Make worlds and end them."""
    made: list[World] = []

    def make(method: str = "pfldyn-proto", *, broker: LoopbackBroker | None = None, **options: Any) -> World:
        made.append(world(tmp_path / str(len(made)), config_text(method, **options), broker))
        return made[-1]

    yield make
    for each in made:
        each.close()


# a. every method, to the end ----------------------------------------------------------------------------------------


QUICK = {
    **dict.fromkeys(("fedavg", "fedprox", "feddyn", "scaffold"), "finetune_steps = 2"),
    **dict.fromkeys(("fedmeta-maml", "fedmeta-fomaml", "fedmeta-metasgd", "metavers"), "server_lr = 0.05"),
    **dict.fromkeys(("local", "fedbabu"), "client_lr = 0.3\nfinetune_lr = 0.3"),
    "fedrep": "head_steps = 1\nclient_lr = 0.3\nfinetune_lr = 0.3",
    "pfedme": "client_lr = 0.04\npersonal_lr = 0.05",
}
"""Settings with which a method gets somewhere in eight rounds of three steps."""


@pytest.mark.slow
@pytest.mark.parametrize("method", METHODS)
def test_every_method_learns_and_every_device_is_evaluated(fleet, method):
    w = fleet(method, rounds=8, hyper=QUICK.get(method, ""))
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: finished(w))
    w.start_agent("late", toy(9), train=False)
    assert w.pump(lambda: all_evaluated(w, 8))
    evaluated = w.server.ledger.rows(Evaluation, round=8)
    after = {j.device: j for j in evaluated if j.stage == "after"}
    assert after.keys() == {"d0", "d1", "d2", "late"}
    assert {name for name, j in after.items() if j.new} == {"late"}
    assert min(j.accuracy for j in after.values()) > 0.6, "chance is a third"
    assert all(sum(map(sum, j.confusion)) > 20 for j in after.values())
    alone = set(METHODS[method].shared) >= {"body", "head"}  # the fleet's model answers before a device has its own
    assert len(evaluated) == (8 if alone else 4)
    assert w.agents["late"].service.personalization == METHODS[method].personalizer
    assert statuses(w, 8) == dict.fromkeys(("d0", "d1", "d2"), "counted")


def test_a_fleet_that_is_done_continues_when_more_rounds_are_wanted(fleet):
    w = fleet(rounds=2)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: finished(w))
    path = w.fleet.folder / "fleet.toml"
    path.write_text(path.read_text().replace("rounds = 2", "rounds = 4"))
    w.kill_server()
    w.start_server()
    assert w.pump(lambda: w.closed() == 4)
    assert [r.status for r in w.server.ledger.rounds()] == ["closed"] * 4


def test_the_aggregator_syncs_what_a_power_cut_must_not_take_before_it_says_so(fleet, monkeypatch):
    """A round in the checkpoint, then in the ledger; the next one with its manifest's number, and the list of the blobs
    at the broker, before either is sent. Nothing twice."""
    w, synced = fleet(rounds=4), list[str]()
    whole = Ledger.transaction

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        if path.parent == w.fleet.folder / "state":
            synced.append(path.name.strip(".").partition(".")[0].partition("-")[0])
        elif path == w.fleet.folder / "state":
            synced.append("the folder")

    @contextlib.contextmanager
    def transaction(ledger: Ledger, *, durable: bool = True) -> Iterator[None]:
        outer = not ledger._db.in_transaction
        with whole(ledger, durable=durable):
            yield
        if outer and durable:
            synced.append("the ledger")

    def publish(link: LoopbackLink, topic: str, payload: bytes, **options: Any) -> None:
        if topic == topics.current("t"):
            synced.append("manifest")
        send(link, topic, payload, **options)

    send = LoopbackLink.publish
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Ledger, "transaction", transaction)
    monkeypatch.setattr(LoopbackLink, "publish", publish)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: finished(w))
    second, third = [k for k, what in enumerate(synced) if what == "manifest"][1:3]
    assert synced[second + 1 : third + 1] == [
        "round", "the folder", "the ledger", "the ledger", "published", "the folder", "manifest"]


# b. the server's dual stays the mean of the devices' ----------------------------------------------------------------


class Tampered(TrainerJobs):
    """Sends a million times what it learned, in the given rounds."""

    def __init__(self, *rounds: int) -> None:
        super().__init__()
        self.rounds = rounds

    def round(self, order: Order, broadcast: Payload, state: ClientState) -> TrainResult:
        result = super().round(order, broadcast, state)
        if order.manifest.round not in self.rounds:
            return result
        return replace(result, update=replace(result.update, groups=trees.scale(result.update.groups, 1e6)))


def rough_sea(faults: BrokerFaults, w: World, seed: int) -> None:
    """Uploads and messages about them are lost, duplicated or delayed; a delayed message arrives with a later one."""
    rng = np.random.default_rng(seed)
    held: dict[str, list[Message]] = {}

    def rule(client: str, message: Message) -> list[Message] | None:
        if not any(part in message.topic for part in ("/up/", "/dn", "/rep")):
            return None
        fate = rng.random()
        before = held.pop(client, []) if rng.random() < 0.5 else []
        if fate < 0.05:
            return before
        if fate < 0.10:
            held.setdefault(client, []).append(message)
            return before
        return [message, message, *before] if fate < 0.15 else [*before, message]

    faults.rules.append(rule)


@pytest.mark.slow
@pytest.mark.parametrize("codec", [*CODECS, AUTO])
def test_the_servers_dual_is_the_mean_of_the_devices_after_every_round(fleet, codec):
    faults = BrokerFaults()
    w = fleet(
        rounds=11, broker=LoopbackBroker(faults=faults), fleet="deadline_s = 20", hyper="penalty = 0.1",
        link=f'up = "{codec}"\ndown = "int8"\nmax_update_norm = 100.0\nchunk_bytes = 1024',
    )
    feedback, epochs, moved = codec == AUTO or CODECS[codec].feedback, [], []
    start(w, "d0", "d1", "d2", shift=0.5)
    rough_sea(faults, w, seed=len(codec))
    w.trainers["d0"].inner = InlineTrainer(workshop=Tampered(3, 4))
    for number in range(1, 12):
        assert w.pump(lambda n=number: w.closed() >= n and settled(w) and (opened(w, n + 1) or w.server.finished),
                      tick_s=TICK_S, steps=4000)
        epochs.append(w.server.checkpoint.state.dual_epoch)
        moved.append(trees.norm(w.server.checkpoint.state.memory["dual"]))
        check_duals(w, feedback)
        if number == 2:
            w.start_agent("d3", toy(3, shift=2.0))
        if number == 5:
            w.server.ledger.request("revoke/d1", "yes")
        if number == 7:
            w.kill_agent("d2")
            w.lose_disk("d2")
            w.start_agent("d2")
    assert min(moved[1:5]) > 1e-3, "there is something to compare"
    assert epochs[:5] == [0] * 5
    assert sorted(set(epochs)) == [0, 1, 2]
    rows = w.server.ledger.rows(Update)
    assert {u.status for u in rows if u.device == "d0" and u.round in (3, 4)} == {"refused"}
    assert all("norm" in u.reason for u in rows if u.status == "refused")
    assert max(u.round for u in rows if u.device == "d1" and u.status == "counted") <= 6
    assert any(u.device == "d3" and u.status == "counted" for u in rows)
    assert w.logged("d2 lost its training state")


@pytest.mark.slow
def test_a_device_that_loses_its_state_again_and_again_restarts_the_duals_three_times_alone(fleet):
    w = fleet(rounds=10, fleet="deadline_s = 20")
    start(w, "d0", "d1", "d2")
    for number in range(1, 11):
        assert w.pump(lambda n=number: w.closed() >= n and settled(w), steps=4000)
        w.kill_agent("d2")
        w.lose_disk("d2")
        w.start_agent("d2")
    assert w.server.checkpoint.state.dual_epoch == MOST_LOSSES
    its = w.server.ledger.rows(Update, device="d2")
    assert [u.status for u in its] == ["counted"] * 7 + ["refused"] * 3
    assert "lost its training state, 3 times before in 20 rounds" in its[-1].reason
    assert {u.status for u in w.server.ledger.rows(Update, device="d0")} == {"counted"}
    assert all(r.closed_at is not None and r.closed_at - r.opened_at < 20 for r in w.server.ledger.rounds()), "no wait"


def test_an_update_that_is_judged_again_after_a_restart_is_judged_as_before(fleet):
    """The loss that was noted for this update does not count against it."""
    w = fleet(rounds=2)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: w.closed() >= 1 and settled(w))
    states, unknown = w.server._parts.receiver._states, UpdateRef(1, "f" * 32)
    for closed in range(1, 1 + MOST_LOSSES):
        assert states.refusal("d0", unknown, closed, 1) == ""
        states.check("d0", unknown, closed, 1)
        assert states.refusal("d0", unknown, closed, 1) == ""
    assert "3 times before in 20 rounds" in states.refusal("d0", unknown, 1 + MOST_LOSSES, 1)
    assert states.refusal("d0", unknown, 1 + LOSS_ROUNDS, 1) == ""


def test_devices_that_commit_without_being_counted_would_be_noticed(fleet):
    """The check above can fail."""
    w = fleet(rounds=3)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: w.closed() >= 1 and settled(w) and opened(w, 2))
    home = DeviceState(w.folder / "devices" / "d0")
    state = home.state(state_key(w, 0))
    assert state is not None
    doubled = {"dual": trees.scale(state["dual"], 2.0), "residual": state["residual"]}
    path = next(home.folder.glob("methods/*/state.safetensors"))
    path.write_bytes(storage.pack(storage.flatten_roles(doubled), {"round": "1"}))
    with pytest.raises(AssertionError):
        check_duals(w, feedback=True)


# c. death at any moment ---------------------------------------------------------------------------------------------


@pytest.fixture(params=[("", 0.0), ("", 0.0, 0), ("", 0.6), ('only = ["layers.0.weight"]', 0.0),
                        ('freeze = "auto"', 0.0)],
                ids=["all are sent", "in chunks", "one is too small", "part", "auto"])
def founded(tmp_path: Path, request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> World:
    """A fleet that has not run yet, with two devices' samples. In round 2 one of them has too little to send, or not; a
    schedule freezes from then on. Updates come whole, or in chunks."""
    monkeypatch.setattr(choose_frozen, "WINDOW", 1)
    monkeypatch.setattr(choose_frozen, "SMALL", 2.0)
    for in_all in request.param[2:]:
        monkeypatch.setattr(manifests, "WHOLE_IN_ALL", in_all)
    return founded_fleet(tmp_path, *request.param[:2])


def founded_fleet(tmp_path: Path, train: str = "", skip_below: float = 0.0, *, train_graph: bool = False) -> World:
    text = config_text(**{**TWO_ROUNDS, "link": f"{TWO_ROUNDS['link']}\nskip_below = {skip_below}"})
    text += f"\n[train]\n{train}\n"
    w = world(tmp_path / "founded", text)
    start(w, "d0", "d1")
    w.close()
    shutil.rmtree(w.fleet.folder)
    return world(tmp_path / "founded", text, train_graph=train_graph)


def live(
    founded: World, folder: Path, actor: str, plan: Plan, engine: str = "torch"
) -> tuple[World, Death, list[tuple[str, str]]]:
    """A run in which ``actor`` dies as planned, and restarts. engine: d1's. Also returns the chunks that were sent
    although the aggregator had the whole update on disk when it died."""
    shutil.copytree(founded.folder, folder)
    faults = BrokerFaults()
    broker = LoopbackBroker(faults=faults)
    w = World(folder, replace(founded.fleet, folder=folder / "fleet"), broker)
    death = Death(actor, None, w, plan=plan)
    sent_again = list[tuple[str, str]]()
    spooled = set[tuple[str, str]]()

    def look() -> None:
        """Which of the updates that were in the spool at the last death have been sent since then."""
        sent = {(m.topic.split("/")[5], m.topic.split("/")[3]) for _, m in faults.seen
                if "/up/" in m.topic and not m.topic.endswith("/m")}
        sent_again.extend(sorted(sent & spooled))

    with pytest.MonkeyPatch.context() as patch:
        deadly(patch, death)
        w.start_server()
        w.start_agent("d0")
        w.start_agent("d1", engine=engine)
        for _ in range(1500):
            if finished(w) and settled(w):
                break
            try:
                w.step(0.1)
            except Killed:
                w.acting = ""
                if actor == "server":
                    look()
                    spooled = {(p.parent.name, p.stem) for p in (w.fleet.folder / "spool").glob("*/*.json")}
                    faults.seen.clear()
                    w.kill_server()
                    w.start_server()
                else:
                    w.kill_agent(actor)
                    w.start_agent(actor, engine=engine if actor == "d1" else "torch")
        look()
    return w, death, sent_again


@pytest.mark.slow
@pytest.mark.parametrize("actor", ["server", "d1"])
def test_a_death_at_any_moment_changes_nothing(founded, tmp_path, actor):
    check_deaths(founded, tmp_path, actor)


@pytest.mark.slow
def test_a_death_at_any_moment_of_a_device_that_trains_without_torch_changes_nothing(tmp_path):
    check_deaths(founded_fleet(tmp_path, train_graph=True), tmp_path, "d1", engine="onnx")


def check_deaths(founded: World, tmp_path: Path, actor: str, engine: str = "torch") -> None:
    """``actor`` dies at each of its acts, once in each round of a run."""
    undisturbed, none, _ = live(founded, tmp_path / "whole", actor, {}, engine)
    wanted = checkpoint_bits(undisturbed)
    skipped = [u.skipped for u in undisturbed.server.ledger.rows(Update)]
    assert sum(skipped) == bool(founded.fleet.config.link.skip_below)
    assert undisturbed.server.finished
    assert none.points > 20
    undisturbed.close()
    for plan in none.plans():
        w, death, asked_twice = live(founded, tmp_path / "killed", actor, plan, engine)
        assert death.where
        assert w.server.finished, f"killed at {death.where}"
        assert settled(w), death.where
        assert checkpoint_bits(w) == wanted, death.where
        assert not asked_twice, death.where
        check_duals(w, feedback=True)
        rounds = w.server.ledger.rounds()
        assert [(r.round, r.status, r.cohort) for r in rounds] == [(n, "closed", ("d0", "d1")) for n in (1, 2)]
        counted = [(u.round, u.device) for u in w.server.ledger.rows(Update)]
        assert counted == [(1, "d0"), (1, "d1"), (2, "d0"), (2, "d1")], death.where
        assert [u.skipped for u in w.server.ledger.rows(Update)] == skipped, death.where
        assert all_evaluated(w, 2), death.where
        retained = {t.split("/")[3] for t in w.broker.retained if t.startswith("fl1/t/b/")}
        named = {b.id for b in w.agents["d0"].manifest.blobs()}
        assert retained == named, f"{death.where}: what no manifest names is cleared"
        w.close()
        shutil.rmtree(w.folder)


@pytest.mark.slow
def test_connections_that_die_again_and_again_lose_nothing(fleet):
    w = fleet(rounds=6, link="chunk_bytes = 1024")
    start(w, "d0", "d1", "d2")
    rng = np.random.default_rng(3)
    for _ in range(4000):
        if finished(w) and settled(w):
            break
        w.step(0.1)
        if rng.random() < 0.15:
            link = rng.choice([w.server.link, *(a.link for a in w.agents.values())])
            if link.connected:
                w.broker.drop(link.client_id)
    assert finished(w)
    assert settled(w)
    check_duals(w, feedback=True)
    assert [r.status for r in w.server.ledger.rounds()] == ["closed"] * 6


@pytest.mark.slow
@pytest.mark.parametrize("whose", ["d1", "the aggregator"])
def test_an_evaluation_that_was_lost_with_a_connection_is_reported_on_the_next(fleet, whose):
    faults = BrokerFaults()
    w = fleet(rounds=1, broker=LoopbackBroker(faults=faults))
    start(w, "d0", "d1", "d2")
    lost = faults.drop("/a/d1/rep")
    assert w.pump(lambda: {row.device for row in w.server.ledger.rows(Evaluation, round=1)} == {"d0", "d2"})
    assert not w.pump(lambda: all_evaluated(w, 1), steps=50, tick_s=TICK_S)
    lost()
    w.broker.drop((w.agents[whose] if whose == "d1" else w.server).link.client_id)
    assert w.pump(lambda: all_evaluated(w, 1), tick_s=TICK_S)


def test_a_broker_that_comes_back_without_its_memory_is_given_everything_again(fleet):
    w = fleet(rounds=4)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: w.closed() == 2)
    w.broker.stop(forget_retained=True)
    for _ in range(20):
        w.step(0.5)
    w.broker.start()
    assert w.pump(lambda: finished(w), tick_s=0.1)
    w.start_agent("late", toy(9), train=False)
    assert w.pump(lambda: all_evaluated(w, 4))


class Recorded(LoopbackLink):
    """A link that records the topics that it published."""

    sent: list[str]

    def publish(self, topic: str, payload: bytes, *, retain: bool = False, qos: int = 1) -> None:
        self.sent.append(topic)
        super().publish(topic, payload, retain=retain, qos=qos)


@dataclass
class StoredModels:
    """A publisher with its own broker."""

    folder: Path
    now: float = 0.0

    def __post_init__(self) -> None:
        self.broker = LoopbackBroker()
        self.link = Recorded(self.broker, "server")
        self.link.sent = []
        self.link.open()
        self.link.poll(0)
        self.publisher = Publisher("t", self.link, self.folder / "shelf.json", clock=lambda: self.now, log=print)
        self.blobs = [Blob.of(bytes([n]) * 2500, 1024) for n in range(2)]
        for n, blob in enumerate(self.blobs):
            self.publisher.blob(blob, bytes([n]) * 2500)
        self.publisher.manifest(b"manifest", {blob.id for blob in self.blobs})
        self.turn()

    def turn(self) -> list[str]:
        """The topics that it publishes in one turn."""
        for event in self.link.poll(0):
            if isinstance(event, Message):
                self.publisher.heard(event.topic, event.payload)
        self.publisher.tick()
        sent, self.link.sent = self.link.sent, []
        return sent

    def reconnect(self) -> None:
        self.broker.drop("server")
        self.link.poll(0)
        self.link.poll(0)
        self.publisher.reconnected()

    def topics(self, n: int) -> list[str]:
        return [topics.chunk("t", self.blobs[n].id, k) for k in range(3)]


def test_a_broker_that_kept_everything_is_given_nothing_again(tmp_path):
    shelf = StoredModels(tmp_path)
    shelf.reconnect()
    assert shelf.turn() == []
    assert shelf.publisher.idle
    shelf.now += 60
    assert shelf.turn() == []
    assert not shelf.link.filters, "what was asked back is not listened to for good"


@pytest.mark.parametrize("lost", ["a blob", "the manifest", "an older manifest", "all"])
def test_a_broker_that_lost_a_part_is_given_that_part_the_manifest_last(tmp_path, lost):
    shelf = StoredModels(tmp_path)
    wanted = dict(shelf.broker.retained)
    current = topics.current("t")
    missing = {"a blob": shelf.topics(1), "all": list(wanted)}.get(lost, [current])
    for topic in missing:
        del shelf.broker.retained[topic]
    if lost == "an older manifest":
        shelf.broker.retained[current] = b"older"
    shelf.reconnect()
    assert shelf.turn() == [], "what is still under way may come"
    shelf.now += RETAINED_S + 0.1
    assert shelf.turn() == missing
    assert shelf.broker.retained == wanted


def test_a_round_that_opens_before_it_is_clear_what_is_lost_is_announced_after_its_blobs(tmp_path):
    shelf = StoredModels(tmp_path)
    shelf.broker.retained.clear()
    shelf.reconnect()
    shelf.turn()
    newer = Blob.of(b"x", 1024)
    shelf.publisher.blob(newer, b"x")
    shelf.publisher.manifest(b"newer", {newer.id, shelf.blobs[0].id})
    assert shelf.turn() == []
    shelf.now += RETAINED_S + 0.1
    sent = shelf.turn()
    assert [t for t in sent if t not in shelf.topics(1)] == [
        *shelf.topics(0), topics.chunk("t", newer.id, 0), topics.current("t")
    ]
    assert shelf.broker.retained[topics.current("t")] == b"newer"
    assert not set(shelf.topics(1)) & shelf.broker.retained.keys()


def test_a_broker_whose_packets_are_too_small_for_a_chunk_is_refused_with_what_to_write(fleet):
    w = fleet(link="chunk_bytes = 61440")
    server = w.start_server()
    server.link.inbox.append(Connected(5, 61440 + 256, None))
    server.step(0)
    server.link.inbox.append(Connected(5, 60000, None))
    with pytest.raises(ConfigError, match=r"link\.chunk_bytes is 61440") as caught:
        server.step(0)
    assert "takes packets of 60000 bytes" in str(caught.value)
    assert f"hint: write chunk_bytes = {60000 - 256} under" in str(caught.value)
    assert caught.value.where == str(w.fleet.folder / "fleet.toml")


def test_a_broker_without_retained_messages_is_named_as_the_cause(fleet):
    w = fleet()
    server = w.start_server()
    server.link.inbox.append(Disconnected("the broker refused the connection: Retain not supported"))
    server.step(0)
    assert w.logged("Retain not supported: a fleet needs a broker with retained messages")


def test_a_broker_that_refuses_is_quoted_when_the_aggregator_gives_up(fleet):
    w = fleet()
    w.broker.stop()
    aggregator = SimpleNamespace(coordinator=w.start_server(), step=w.server.step, held_up="")
    with pytest.raises(LinkError, match="no broker answered in 0 s: the broker does not answer"):
        aggregator_process._await_broker(cast("Any", aggregator), "mqtt://there", lambda: False, 0.0)


# d. what is refused -------------------------------------------------------------------------------------------------


@pytest.fixture
def liar(fleet) -> FakeDevice:
    """A fleet of one lying device, in its first round."""
    w = fleet(devices=1, link='up = "fp32"\nmax_update_norm = 50.0')
    w.start_server()
    fake = FakeDevice(w, "liar")
    fake.announce()
    assert w.pump(lambda: opened(w, 1))
    w.step()
    return fake


BLOB = Blob.of(b"x" * 3000, 1024)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"layout": "other"}, "layout other"),
        ({"base": "0" * 32}, "base model 0000"),
        ({"dual_epoch": 7}, "dual epoch 7"),
        ({"method": "fedavg"}, "method fedavg"),
        ({"codec": "int8"}, "codec int8"),
        ({"blob": Blob.of(b"x" * 500_000, 1024)}, "a blob of 500000 bytes"),
        ({"blob": replace(BLOB, n=99)}, "99 chunks"),
        ({"blob": replace(BLOB, id="0" * 32)}, "not the start of its root"),
        ({"samples": 10**9}, "samples 1e+09, expected at most"),
        ({"metrics": {"loss": 1e30}}, "loss 1e+30, expected at most"),
    ],
)
def test_an_offer_that_does_not_fit_the_round_is_refused_and_named(liar, change, reason):
    upload = liar.update(b"x" * 3000, **change)
    liar.offer(upload, 1)
    liar.w.step()
    assert "0 of 1 devices delivered" in liar.w.server.stalled
    assert reason in liar.downs()[-1].reason
    assert liar.downs()[-1].t == "reject"
    assert [(u.status, reason in u.reason) for u in liar.w.server.ledger.rows(Update)] == [("refused", True)]
    assert liar.w.logged(reason)


def nan_update(w: World) -> bytes:
    bad = constant_update(w)
    first = next(iter(bad["body"].values()))
    first.reshape(-1)[0] = np.nan
    return safetensors_payload.payload(storage.pack(storage.flatten(bad)), words=True)


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (nan_update, "not finite"),
        (lambda w: payloads.encode("fp32", constant_update(w, 1e6)), "norm"),
        (lambda w: payloads.encode("fp32", {"body": {"other": np.zeros(3, np.float32)}}), "has shape"),
        (lambda w: payloads.encode("int8", constant_update(w)), "not a multiple of 4"),
        (lambda w: b"no update at all", "not a zstd frame"),
        (lambda w: compress(bytes(1 << 22)), "not a zstd frame of at most"),
        (lambda w: safetensors_payload.payload(b"\xff" * 64, words=True), "not safetensors"),
    ],
)
def test_a_complete_but_invalid_update_is_refused_and_named(liar, make, reason):
    data = make(liar.w)
    upload = liar.update(data)
    liar.offer(upload, 1)
    liar.w.step()
    assert liar.downs()[-1].t == "need"
    liar.send(upload, 1, data)
    liar.w.step()
    assert "0 of 1 devices delivered" in liar.w.server.stalled
    row = liar.w.server.ledger.rows(Update)[0]
    assert row.status == "refused"
    assert reason in row.reason
    assert liar.downs()[-1].t == "reject"
    assert not list((liar.w.fleet.folder / "spool").glob("*/*.json"))


@pytest.mark.parametrize("said", [b"{", b"[]", b'{"codec":"fp32"}'])
def test_a_round_does_not_wait_for_a_device_whose_announcement_cannot_be_read(fleet, said):
    w = fleet(devices=2, fleet="quorum = 0.5", link='up = "fp32"')
    w.start_server()
    liar, honest = FakeDevice(w, "liar"), FakeDevice(w, "honest")
    for fake in (liar, honest):
        fake.announce()
    assert w.pump(lambda: opened(w, 1))
    w.step()
    liar.link.publish(topics.upload(w.name, "liar", 1, "m"), said)
    data = payloads.encode("fp32", constant_update(w))
    upload = honest.update(data)
    honest.offer(upload, 1)
    w.step()
    honest.send(upload, 1, data)
    assert w.pump(lambda: w.closed() == 1, tick_s=0.0), "no deadline passes: the clock stands still"
    assert [(down.t, down.ok) for down in liar.downs()][-1:] == [("reject", False)]
    assert "liar: its announcement cannot be read" in w.server.ledger.rows(Round, round=1)[0].note


def test_a_round_does_not_wait_for_a_device_that_sends_wrong_bytes(fleet):
    w = fleet(devices=2, fleet="quorum = 0.5", link='up = "fp32"')
    w.start_server()
    liar, honest = FakeDevice(w, "liar"), FakeDevice(w, "honest")
    for fake in (liar, honest):
        fake.announce()
    assert w.pump(lambda: opened(w, 1))
    w.step()
    data = payloads.encode("fp32", constant_update(w))
    upload = liar.update(data)
    liar.offer(upload, 1)
    w.step()
    for _ in range(WRONG_CHUNKS):
        liar.send(upload, 1, bytes(len(data)))
        w.step()
    assert liar.downs()[-1].t == "reject"
    honest.offer(honest.update(data), 1)
    w.step()
    honest.send(honest.update(data), 1, data)
    assert w.pump(lambda: w.closed() == 1, tick_s=0.0), "no deadline passes: the clock stands still"
    assert statuses(w, 1) == {"liar": "refused", "honest": "counted"}
    assert "were not as announced" in w.server.ledger.rows(Round, round=1)[0].note


def test_a_chunk_with_another_hash_is_refused_and_requested_again(liar):
    data = payloads.encode("fp32", constant_update(liar.w))
    upload = liar.update(data)
    liar.offer(upload, 1)
    liar.w.step()
    liar.send(upload, 1, bytes(len(data)))
    liar.w.step()
    assert liar.w.logged("does not match its hash")
    assert liar.w.closed() == 0
    asked = len(liar.downs())
    for _ in range(30):
        liar.w.step(TICK_S)
    assert len(liar.downs()) > asked
    liar.send(upload, 1, data)
    assert liar.w.pump(lambda: liar.w.closed() == 1)
    assert statuses(liar.w, 1) == {"liar": "counted"}


def test_an_offer_of_a_counted_update_is_answered_with_done_again(liar):
    """The first 'done' was lost, and the round closed meanwhile."""
    data = payloads.encode("fp32", constant_update(liar.w))
    upload = liar.update(data)
    liar.offer(upload, 1)
    liar.w.step()
    liar.send(upload, 1, data)
    assert liar.w.pump(lambda: liar.w.closed() == 1)
    liar.inbox = [m for m in liar.inbox if not m.topic.endswith("/dn")]
    liar.offer(upload, 1)
    liar.w.step()
    assert liar.downs()[-1] == Down("done", 1, upload.id)
    assert statuses(liar.w, 1) == {"liar": "counted"}


def test_a_device_that_is_not_in_the_cohort_or_not_enrolled_is_refused(fleet):
    w = fleet(devices=2, fleet="cohort = 1", link='up = "fp32"')
    w.start_server()
    fakes = {name: FakeDevice(w, name) for name in ("f0", "f1")}
    for fake in fakes.values():
        fake.announce()
    assert w.pump(lambda: opened(w, 1))
    w.step()
    (inside,) = w.server.open.cohort
    outside = fakes["f0" if inside == "f1" else "f1"]
    outside.offer(outside.update(b"x" * 3000), 1)
    w.step()
    assert outside.downs()[-1].reason == "not in this round's cohort"
    assert [(u.device, u.status) for u in w.server.ledger.rows(Update)] == [(outside.name, "refused")]
    stranger = FakeDevice(w, "stranger")
    stranger.offer(stranger.update(b"x" * 3000), 1)
    stranger.link.publish(topics.report(w.name, "stranger"), b'{"round":1}')
    w.step()
    assert w.logged("stranger: is not enrolled")
    assert w.server.ledger.device("stranger") is None
    assert opened(w, 1), "nobody else was disturbed"


def test_refusals_of_one_device_do_not_fill_the_ledger(fleet):
    w = fleet(devices=2, link='up = "fp32"')
    w.start_server()
    fakes = [FakeDevice(w, name) for name in ("f0", "f1")]
    for fake in fakes:
        fake.announce()
    assert w.pump(lambda: opened(w, 1))
    w.step()
    for n in range(50):
        fakes[0].offer(fakes[0].update(b"x" * (100 + n), layout="other"), 1)
    w.step()
    assert len(w.server.ledger.rows(Update)) == update_receiver.REFUSALS_NOTED


@pytest.mark.parametrize(
    "report",
    [
        b'{"round":99}',
        b'{"round":1,"judged_round":7}',
        b'{"round":1,"energy":[{"phase":"dance","joules":1,"source":"","measured":true}]}',
        b'{"round":1,"judged_round":0,"judgements":[{"stage":"after","method":"m","confusion":[[1,2],[3]]}]}',
        b'{"round":1,"traffic":{"mqtt_up":-1}}',
        b'{"round":1,"failed":"\\ud800"}',
        b"",
        b"\xff",
    ],
)
def test_an_impossible_report_changes_no_book(liar, report):
    before = liar.w.server.ledger.facts()
    liar.link.publish(topics.report(liar.w.name, "liar"), report)
    liar.w.step()
    assert liar.w.server.ledger.rows(Traffic) == []
    assert liar.w.server.ledger.rows(Evaluation) == []
    assert liar.w.server.ledger.facts() == before


@pytest.mark.parametrize(
    "topic", ["st", "up/1/m", "up/1/0", "up/x/m", "up/1/zzz", "rep", "dn", "nonsense", "up/999999999/m"]
)
def test_any_bytes_on_any_topic_leave_the_aggregator_standing(liar, topic):
    for payload in (b"", b"{}", b"null", b"\x00" * 99, b'{"st":"on","beat":true}', b"[" * 9999):
        liar.link.publish(f"fl1/{liar.w.name}/a/liar/{topic}", payload)
        liar.w.step()
    data = payloads.encode("fp32", constant_update(liar.w))
    upload = liar.update(data)
    liar.offer(upload, 1)
    liar.w.step()
    liar.send(upload, 1, data)
    assert liar.w.pump(lambda: liar.w.closed() == 1)


def forged(w: World, signer: Signer, **changes: Any) -> bytes:
    now = messages.decode(Manifest, w.broker.retained[topics.current(w.name)].partition(b"\n")[2])
    return signer.sign(messages.encode(replace(now, seq=now.seq + 1000, round=50, **changes)))


@pytest.mark.slow
@pytest.mark.parametrize(
    ("change", "refusal"),
    [
        ({"fleet": "another"}, "a round of fleet 'another'"),
        ({"seq": 5}, "old sequence number"),
        ({"exp": 1}, "has expired"),
        ({"v": 2}, "protocol 2"),
    ],
)
def test_an_agent_refuses_a_signed_round_that_is_not_for_it_now(fleet, change, refusal):
    w = fleet(devices=1)
    start(w, "d0")
    assert w.pump(lambda: finished(w))
    now = w.agents["d0"].manifest
    signed = w.fleet.signer().sign(messages.encode(replace(now, **{"seq": now.seq + 1000, **change})))
    w.broker.publish(topics.current(w.name), signed)
    w.step()
    assert w.logged(refusal)
    assert w.agents["d0"].manifest == now


def test_an_agent_refuses_what_the_fleets_key_did_not_sign(fleet):
    w = fleet(devices=1)
    start(w, "d0")
    assert w.pump(lambda: finished(w))
    now = w.agents["d0"].manifest
    genuine = w.fleet.signer().sign(messages.encode(replace(now, seq=now.seq + 1)))
    for payload, refusal in (
        (Signer(bytes(32)).sign(messages.encode(now)), "is signed by key"),
        (genuine.replace(b'"round":3', b'"round":9'), "signature that does not match"),
        (messages.encode(now), "carries no Ed25519 signature"),
        (b"", "carries no Ed25519 signature"),
    ):
        w.broker.publish(topics.current(w.name), payload)
        w.step()
        assert refusal in w.lines[-1]
        assert w.agents["d0"].manifest == now
    w.broker.publish(topics.current(w.name), genuine)
    w.step()
    assert w.agents["d0"].manifest.seq == now.seq + 1


def test_a_restarted_agent_still_refuses_what_it_has_outgrown(fleet):
    w = fleet(devices=1)
    start(w, "d0")
    assert w.pump(lambda: opened(w, 2))
    old = w.broker.retained[topics.current(w.name)]
    assert w.pump(lambda: finished(w))
    w.kill_server()
    w.kill_agent("d0")
    w.broker.retained[topics.current(w.name)] = old
    w.start_agent("d0")
    for _ in range(3):
        w.step()
    assert w.logged("old sequence number")
    assert w.agents["d0"].manifest is None


def test_words_from_the_broker_alone_cannot_settle_what_is_pending(fleet):
    """Only the signed record does: a forged or stray 'reject' or 'counted' costs nothing."""
    faults = BrokerFaults()
    w = fleet(rounds=3, broker=LoopbackBroker(faults=faults))
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: w.agents["d0"]._updates.pending is not None)
    pending = w.agents["d0"]._updates.pending
    words = [Down("reject", 1, pending.upload.id, ok=False), Down("done", 1, pending.upload.id),
             Down("counted", 1, pending.upload.id, ok=False, device="d0")]
    for word in words:
        w.broker.publish(topics.down(w.name, "d0"), messages.encode(word))
        w.agents["d0"].step(0)
        assert w.agents["d0"]._updates.pending is pending
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    check_duals(w, feedback=True)


class Senders:
    """Devices that answer every grant, except the ``dead``. most: the most chunks under way, of one device and of
    all."""

    def __init__(self, number: int):
        self.now = 0.0
        self.intake = Uploads(self.granted, lambda: self.now, 1 << 20)
        self.data = {f"d{n}": bytes([n % 256]) * 20_000 for n in range(number)}
        self.blobs = {name: Blob.of(data, 1024) for name, data in self.data.items()}
        self.grants: list[tuple[str, list[int]]] = []
        self.most = [0, 0]
        self.dead: set[str] = set()
        self.whole: dict[str, bytes] = {}
        for name, blob in self.blobs.items():
            self.intake.offer(name, 1, UploadManifest(blob, "fp32", "0" * 32, "m", "l"))

    def granted(self, device: str, down: Down) -> None:
        wanted = chunks.from_ranges(down.miss, self.blobs[device].n)
        self.grants.append((device, wanted))
        now = [len(upload.granted) for upload in self.intake._uploads.values()]
        self.most = [max(self.most[0], *now), max(self.most[1], sum(now))]

    def run(self, steps: int = 10_000) -> None:
        """Answer every grant with its chunks, in turn; time passes when nothing is left to send."""
        for _ in range(steps):
            if len(self.whole) + len(self.dead) == len(self.data):
                return
            if not self.grants:
                self.now += 1.0
                self.intake.tick()
                continue
            device, wanted = self.grants.pop(0)
            for k in wanted if device not in self.dead else []:
                done = self.intake.chunk(device, 1, k, cut(self.data[device], self.blobs[device])[k])
                if done is not None:
                    self.whole[device] = done[1].take()


def test_credit_bounds_what_is_under_way_and_every_upload_ends():
    senders = Senders(150)
    senders.dead = {f"d{n}" for n in range(70)}  # more than all the credit there is
    senders.run()
    assert senders.whole == {name: data for name, data in senders.data.items() if name not in senders.dead}
    assert senders.most == [8, 100]


def test_memory_for_uploads_is_bounded_and_the_rest_wait(monkeypatch):
    monkeypatch.setattr("cloud_server.rounds.uploads.RESERVED_BYTES", 70_000)
    senders = Senders(12)
    assert [bool(wanted) for _, wanted in senders.grants] == [True] * 3 + [False] * 9, "who waits is told so"
    senders.run()
    assert senders.whole == senders.data


# e. late and absent -------------------------------------------------------------------------------------------------


def test_a_late_update_is_recorded_as_late_and_its_state_discarded(fleet):
    faults = BrokerFaults()
    w = fleet(rounds=3, broker=LoopbackBroker(faults=faults), fleet="deadline_s = 5", link="chunk_bytes = 1024")
    w.start_server()
    lift = faults.drop("/a/d0/up/1/")
    for n in range(3):
        w.start_agent(f"d{n}", toy(n))
    assert w.pump(lambda: w.server.open is not None and len(w.server.open.received) == 2)
    for _ in range(8):
        w.step(TICK_S)
    assert w.closed() == 0, "until the deadline the round waits for a device that is alive"
    pending = w.agents["d0"]._updates.pending
    assert w.pump(lambda: w.closed() == 1, tick_s=TICK_S)
    lift()
    offer = messages.encode(pending.upload)
    w.broker.publish(topics.upload(w.name, "d0", 1, "m"), offer)  # it had been under way all the time
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    assert statuses(w, 1) == {"d0": "late", "d1": "counted", "d2": "counted"}
    assert statuses(w, 2) == dict.fromkeys(("d0", "d1", "d2"), "counted")
    assert w.logged("d0: round 1: the update was not counted, its state is discarded")
    check_duals(w, feedback=True)


def test_an_upload_that_is_cut_off_by_the_end_of_the_round_is_late(fleet, monkeypatch):
    monkeypatch.setattr(manifests, "WHOLE_IN_ALL", 0)
    faults = BrokerFaults()
    w = fleet(rounds=2, broker=LoopbackBroker(faults=faults), fleet="deadline_s = 5", link="chunk_bytes = 1024")
    lift = faults.drop("/a/d0/up/1/0")
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: w.closed() == 1, tick_s=TICK_S)
    lift()
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    assert statuses(w, 1) == {"d0": "late", "d1": "counted", "d2": "counted"}
    check_duals(w, feedback=True)


@pytest.mark.slow
@pytest.mark.parametrize("counted", [True, False])
def test_a_device_that_was_away_for_long_asks_what_became_of_its_update(fleet, counted):
    faults = BrokerFaults()
    w = fleet(rounds=9, devices=2, broker=LoopbackBroker(faults=faults), fleet="deadline_s = 3")
    unheld = faults.drop("/a/d1/up/2/")
    if not counted:
        faults.drop("/a/d0/up/2/")
    start(w, "d0", "d1", "d2", shift=1.0)
    agent = w.agents["d0"]
    assert w.pump(lambda: agent._updates.pending is not None and agent._updates.pending.round == 2
                  and (not counted or (opened(w, 2) and "d0" in w.server.open.received)))
    kept = agent._updates.pending
    w.kill_agent("d0")
    unheld()
    assert w.pump(lambda: w.closed() == 2 + manifests.COUNTED_ROUNDS, tick_s=TICK_S)
    assert statuses(w, 2).get("d0") == ("counted" if counted else None)
    home = DeviceState(w.folder / "devices" / "d0")
    before = home.state(kept.key)
    lost = faults.drop("/a/d0/dn")
    agent = w.start_agent("d0")
    for _ in range(8):
        w.step(0.1)
    assert agent._updates.pending is not None, "the answer was lost"
    lost()
    assert w.pump(lambda: agent._updates.pending is None or agent._updates.pending.round > 2, tick_s=TICK_S)
    after = home.state(kept.key)
    assert before is not None
    assert after is not None
    moved = trees.norm(trees.subtract(after["dual"], before["dual"]))
    assert (moved > 0) == counted
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    check_duals(w, feedback=True)


def test_an_aggregator_between_lives_does_not_deny_an_update_that_it_holds(fleet):
    """The open round is in the ledger, not yet in memory: its updates are not decided."""
    faults = BrokerFaults()
    w = fleet(rounds=2, broker=LoopbackBroker(faults=faults))
    unheld = faults.drop("/a/d2/up/1/")
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 1) and len(w.server.open.received) >= 1)
    unheld()
    device = next(iter(w.server.open.received))
    upload = w.server.open.received[device]
    w.kill_server()
    server = w.start_server()
    server.ledger.request("paused", "yes")
    for _ in range(3):
        server.step(0)
        w.clock.seconds += 1
    fake = FakeDevice(w, device)
    ask = device_messages.Report(1, pending=UpdateRef(1, upload.id))
    fake.link.publish(topics.report(w.name, device), messages.encode(ask))
    server.step(0)
    fake.poll()
    assert not [m for m in fake.inbox if m.payload.startswith(b"ed25519:") and m.topic.endswith("/dn")]
    server.ledger.request("paused", "no")
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    check_duals(w, feedback=True)


def test_a_round_that_is_resumed_waits_for_devices_that_are_starting_too(fleet):
    """Every device left in order after two of three updates, which is a quorum; all three are still counted."""
    faults = BrokerFaults()
    w = fleet(rounds=1, broker=LoopbackBroker(faults=faults), fleet="quorum = 0.5\ndeadline_s = 1000")
    unheld = faults.drop("/a/d2/up/1/")
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 1) and len(w.server.open.received) == 2)
    w.kill_server()
    for name in ("d0", "d1", "d2"):
        w.agents.pop(name).close()
    unheld()
    w.start_server()
    w.start_agent("d0")
    assert not w.pump(lambda: w.closed() == 1, steps=500), "ten seconds"
    for name in ("d1", "d2"):
        w.start_agent(name)
    assert w.pump(lambda: finished(w))
    assert statuses(w, 1) == dict.fromkeys(("d0", "d1", "d2"), "counted")


def test_a_round_that_is_resumed_ends_at_its_deadline_without_those_that_do_not_come_back(fleet):
    faults = BrokerFaults()
    w = fleet(rounds=1, broker=LoopbackBroker(faults=faults), fleet="quorum = 0.5\ndeadline_s = 20")
    faults.drop("/a/d2/up/1/")
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 1) and len(w.server.open.received) == 2)
    w.kill_server()
    w.agents.pop("d2").close()
    began = w.clock.seconds
    w.start_server()
    assert w.pump(lambda: w.closed() == 1)
    assert w.clock.seconds - began > 20
    assert statuses(w, 1) == {"d0": "counted", "d1": "counted"}


# f. deadline, quorum, failures --------------------------------------------------------------------------------------


def test_an_open_round_is_looked_over_ten_times_a_second_and_not_at_every_message(fleet, monkeypatch):
    w = fleet(rounds=1, devices=2, fleet="quorum = 1.0")
    w.start_server()
    FakeDevice(w, "absent").announce()
    w.start_agent("d0", toy(0))
    assert w.pump(lambda: opened(w, 1))
    looks: list[Any] = []
    monkeypatch.setattr(type(w.server), "_close_if_due", lambda server, opened: looks.append(opened))
    for _ in range(250):
        w.step(0.004)
    assert 9 <= len(looks) <= 11


def test_a_manifest_takes_the_shortest_form_that_every_device_that_is_on_reads(fleet):
    def body() -> bytes:
        return w.broker.retained[topics.current(w.name)].partition(b"\n")[2]

    w = fleet(rounds=3, devices=2)
    start(w, "d0", "d1")
    assert w.pump(lambda: w.closed() == 1)
    assert body().startswith(messages.SHORT_MARK)
    packed = messages.decode(Manifest, body())
    older = Presence("on", "boot", methods=dict.fromkeys(METHODS, 1), codecs=("fp32", "int8"))
    old = replace(older, boot="boot2", packed=True, train=False)
    w.broker.publish(topics.presence(w.name, "old"), messages.encode(old), retain=True)
    w.step(0.1)
    assert body().startswith(MAGIC)
    assert messages.decode(Manifest, body()).seq > packed.seq
    w.broker.publish(topics.presence(w.name, "older"), messages.encode(older), retain=True)
    w.step(0.1)
    assert body().startswith(b"{")
    plain = messages.decode(Manifest, body())
    assert plain.round >= packed.round
    assert plain.seq > packed.seq
    w.broker.publish(topics.presence(w.name, "older"), messages.encode(Presence("off", "boot", ver="1")), retain=True)
    assert w.pump(lambda: w.closed() == 3)
    assert body().startswith(MAGIC), "it has gone"
    w.kill_server()
    assert w.start_server()._members.all_read() == messages.PACKED, "the ledger says who was on"


@pytest.mark.parametrize(
    ("reads", "first"),
    [({}, messages.SHORT_MARK), ({"dictionary": 0}, MAGIC), ({"packed": False, "dictionary": 0}, b"{")],
    ids=["this version", "the version before", "an older one"],
)
def test_reports_and_offers_take_the_shortest_form_that_the_aggregator_reads(fleet, monkeypatch, reads, first):
    monkeypatch.setattr(server_messages, "ServerPresence", lambda **given: ServerPresence(**{**given, **reads}))
    monkeypatch.setattr(manifests, "WHOLE_IN_ALL", 0)
    w, seen = fleet(rounds=2, devices=1), []

    def see(client, message):
        seen.append(message)
        return [message]

    w.broker.faults = see
    start(w, "d0")
    assert w.pump(lambda: w.closed() == 2)
    sent = [one.payload for one in seen if one.topic.endswith(("/rep", "/m"))]
    assert len(sent) >= 4
    assert {one.startswith(first) for one in sent} == {True}


@pytest.mark.slow
def test_little_is_kept_in_memory_of_a_device(tmp_path):
    def roster(ledger: Ledger) -> Members:
        return Members(ledger, everyone=True, quarantined={}, cannot=lambda presence: None,
                       audit=Recorder(tmp_path, time.time, print), clock=lambda: 0.0, now=lambda: 0.0,
                       log=lambda line: None)

    def announce(known: Members, n: int) -> None:
        presence = Presence("on", f"boot{n}", methods=dict.fromkeys(METHODS, 1), codecs=tuple(CODECS), base="b")
        known.on_presence(f"device{n}", messages.decode(Presence, messages.encode(presence)), 0)

    with Ledger(tmp_path / "ledger.sqlite") as ledger:
        first = roster(ledger)
        announce(first, 800)
        tracemalloc.start()
        for n in range(800):
            announce(first, n)
        limit_bytes = 800 * 1500
        assert tracemalloc.get_traced_memory()[0] < limit_bytes
        tracemalloc.reset_peak()
        before = tracemalloc.get_traced_memory()[0]
        again = roster(ledger)
        assert tracemalloc.get_traced_memory()[1] - before < limit_bytes, "nor are all rows read at once at a start"
        tracemalloc.stop()
        assert again.members() == first.members() == first.ready()
        assert again.awaited()
        assert not again.ready(), "nobody has been heard of yet"


def test_a_dead_device_holds_up_nobody(fleet):
    w = fleet(rounds=3, devices=2, fleet="deadline_s = 1000")
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 2))
    w.kill_agent("d2")
    began = w.clock.seconds
    assert w.pump(lambda: w.closed() == 3)
    assert w.clock.seconds - began < 10
    assert statuses(w, 3) == {"d0": "counted", "d1": "counted"}


def with_one_at_work(fleet, name: str):
    """A fleet of two agents, and a third device that was heard at work a moment ago."""
    w = fleet(rounds=2, broker=LoopbackBroker(faults=BrokerFaults()), fleet="deadline_s = 1000")
    w.start_server()
    for n in range(2):
        w.start_agent(f"d{n}", toy(n))
    fake = FakeDevice(w, name)
    fake.announce()
    assert w.pump(lambda: opened(w, 1))
    fake.announce(beat=True, ph="train")
    w.step(0)
    return w


def test_a_device_that_falls_silent_at_work_holds_up_nobody(fleet):
    """A power cut while training: no last will comes before the keepalive ends."""
    w = with_one_at_work(fleet, "cut")
    heard = w.clock.seconds
    assert w.pump(lambda: w.closed() == 1, tick_s=TICK_S)
    assert SILENT_S <= w.clock.seconds - heard <= 5


def test_the_aggregators_own_long_work_makes_nobody_silent(fleet, monkeypatch):
    w = with_one_at_work(fleet, "busy")

    def long_work() -> None:
        w.clock.seconds += 2 * SILENT_S

    with monkeypatch.context() as patch:
        patch.setattr(w.server._requests, "tick", long_work)
        w.server.step(0)
    members = w.server._members
    assert members.alive("busy"), "what it sent in the meantime is not read yet"
    w.clock.seconds += SILENT_S
    assert not members.alive("busy")


def test_a_device_that_is_killed_is_off_within_a_second_by_its_will(fleet):
    w = fleet(rounds=1, fleet="deadline_s = 1000")
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 1))
    w.kill_agent("d2")
    killed = w.clock.seconds
    assert w.pump(lambda: w.server.ledger.rows(Device, name="d2")[0].state == "off")
    assert w.clock.seconds - killed <= 1


def test_an_upload_that_waits_for_its_turn_is_not_taken_for_dead(fleet, monkeypatch):
    monkeypatch.setattr(manifests, "WHOLE_IN_ALL", 0)
    faults = BrokerFaults()
    w = fleet(rounds=1, broker=LoopbackBroker(faults=faults), fleet="deadline_s = 1000")
    lift = faults.drop("/a/d0/dn")
    start(w, "d0", "d1", "d2")
    for _ in range(80):
        w.step(TICK_S)
    assert w.closed() == 0
    lift()
    assert w.pump(lambda: w.closed() == 1, tick_s=TICK_S)
    assert statuses(w, 1) == dict.fromkeys(("d0", "d1", "d2"), "counted")


def test_below_quorum_the_round_waits_on_beyond_its_deadline(fleet):
    w = fleet(rounds=2, fleet="deadline_s = 5\nquorum = 0.9")
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 1))
    w.kill_agent("d2")
    for _ in range(100):
        w.step(TICK_S)
    assert w.closed() == 0
    assert w.logged("2 of 3 updates at the deadline, waiting on d2 (off for ")
    assert "waiting on d2 (off for " in w.server.ledger.facts()["stalled"]
    assert "metafleet devices revoke" in w.server.stalled
    w.start_agent("d2")
    assert w.pump(lambda: w.closed() == 2, tick_s=TICK_S)
    assert statuses(w, 1) == dict.fromkeys(("d0", "d1", "d2"), "counted")


@pytest.mark.parametrize(
    ("lost", "whole", "said"),
    [("/up/1/m", False, "no offer came"), ("/up/1/0", False, "offered, but no chunk came after [2-9] grants"),
     ("/up/1/", True, "no offer came")],
)  # fmt: skip
def test_a_device_whose_publishes_the_broker_swallows_is_named_with_the_likely_cause(
    fleet, lost, whole, said, monkeypatch
):
    if not whole:
        monkeypatch.setattr(manifests, "WHOLE_IN_ALL", 0)
    faults = BrokerFaults()
    w = fleet(rounds=1, broker=LoopbackBroker(faults=faults), fleet="deadline_s = 15\nquorum = 1.0",
              link="chunk_bytes = 65536")
    lift = faults.drop(f"/a/d2{lost}")
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: w.server.stalled != "", tick_s=TICK_S)
    assert re.search(rf"waiting on d2 \(on, phase upload, heard [01] s ago; {said}\)", w.server.stalled)
    assert "message_size_limit or max_packet_size against link.chunk_bytes" in w.server.stalled
    assert "revoke" not in w.server.stalled, "it is there"
    lift()
    assert w.pump(lambda: w.closed() == 1, tick_s=TICK_S)
    assert w.server.stalled == ""


def test_a_large_cohort_that_stays_away_is_named_in_part_and_counted(fleet):
    w = fleet(rounds=1, devices=14, fleet="deadline_s = 5\nquorum = 1.0")
    w.start_server()
    for n in range(13):
        FakeDevice(w, f"f{n:02}").announce()
    w.start_agent("d0", toy(0))
    assert w.pump(lambda: opened(w, 1))
    FakeDevice(w, "f00").announce(beat=True, ph="train")
    FakeDevice(w, "f01").announce(st="off")
    assert w.pump(lambda: w.server.stalled != "", tick_s=TICK_S)
    text = w.server.stalled
    assert re.search(r"1 of 14 updates at the deadline, waiting on f00 \(on, phase train, silent for [56] s\)", text)
    assert "f01 (off for 5 s)" in text or "f01 (off for 6 s)" in text
    assert "f09 (on, phase idle" in text
    assert "f10" not in text
    assert "and 3 more" in text


def test_revoking_dead_devices_lets_a_round_below_quorum_close(fleet):
    w = fleet(rounds=2, devices=3, fleet="deadline_s = 5\nquorum = 0.9")
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 1))
    w.kill_agent("d1")
    w.kill_agent("d2")
    for _ in range(30):
        w.step(TICK_S)
    assert w.closed() == 0
    w.server.ledger.request("revoke/d1", "yes")
    w.server.ledger.request("revoke/d2", "yes")
    assert w.pump(lambda: w.closed() == 1, tick_s=TICK_S)
    w.start_agent("d3", toy(3))
    w.start_agent("d4", toy(4))
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    assert w.server.checkpoint.state.dual_epoch == 1
    check_duals(w, feedback=True)


def test_a_round_whose_whole_cohort_was_revoked_is_opened_for_others(fleet):
    w = fleet(rounds=1, devices=1)
    start(w, "d0")
    assert w.pump(lambda: opened(w, 1))
    w.kill_agent("d0")
    w.server.ledger.request("revoke/d0", "yes")
    w.start_agent("d1", toy(1))
    assert w.pump(lambda: finished(w), tick_s=TICK_S)
    (row,) = w.server.ledger.rounds()
    assert (row.status, row.cohort) == ("closed", ("d1",))


def test_a_fleet_in_which_every_device_fails_says_why_and_continues_when_they_are_mended(fleet):
    w = fleet(rounds=2, fleet="deadline_s = 5")
    start(w, "d0", "d1", "d2")
    files = {name: w.folder / "devices" / name / "samples.npz" for name in w.agents}
    whole = {name: path.read_bytes() for name, path in files.items()}
    for path in files.values():
        path.write_bytes(b"no samples")
    assert w.pump(lambda: w.server.stalled != "")
    assert re.search(r"d0: train: .*samples.npz", w.server.stalled)
    assert w.server.ledger.facts()["stalled"] == w.server.stalled
    assert w.server.ledger.rounds()[0].status == "open"
    for name, path in files.items():
        path.write_bytes(whole[name])
    assert w.pump(lambda: finished(w), tick_s=TICK_S)
    assert w.server.ledger.facts()["stalled"] == ""


def test_one_device_with_malformed_samples_says_so_and_the_others_go_on(fleet):
    w = fleet(rounds=2, fleet="deadline_s = 1000")
    start(w, "d0", "d1", "d2")
    path = w.folder / "devices" / "d1" / "samples.npz"
    good = path.read_bytes()
    path.write_bytes(b"no samples")
    assert w.pump(lambda: w.closed() == 1)
    assert "d1: train: " in w.server.ledger.rounds()[0].note
    assert w.agents["d1"].phase == "failed"
    path.write_bytes(good)
    assert w.pump(lambda: finished(w))
    assert statuses(w, 2)["d1"] == "counted", "it is tried again in the next round"


def test_a_device_that_cannot_personalize_says_so_and_lives(fleet):
    w = fleet(rounds=2)
    start(w, "d0", "d1", "d2")
    w.start_agent("new", toy(7), train=False)
    (w.folder / "devices" / "new" / "samples.npz").write_bytes(b"no samples")
    assert w.pump(lambda: w.server.finished)
    for _ in range(5):
        w.step()
    assert w.logged("new: serve: ")
    assert w.logged("round 2: new: serve: "), "the aggregator heard of it"
    assert {j.device for j in w.server.ledger.rows(Evaluation)} == {"d0", "d1", "d2"}


class Broken(InlineTrainer):
    """A trainer whose child dies at its first job."""

    died = False

    def poll(self) -> Done | None:
        done = super().poll()
        if done is None or self.died:
            return done
        self.died = True
        return Done(done.kind, {}, error="the trainer process ended with exit code -9")


def test_a_trainer_that_dies_costs_its_device_one_round(fleet):
    w = fleet(rounds=2, fleet="deadline_s = 1000")
    w.start_server()
    for n in range(3):
        w.start_agent(f"d{n}", toy(n))
    w.trainers["d1"].inner = Broken()
    assert w.pump(lambda: finished(w))
    assert w.server.ledger.rounds()[0].note == "d1: train: the trainer process ended with exit code -9"
    assert statuses(w, 2) == dict.fromkeys(("d0", "d1", "d2"), "counted")


@pytest.mark.parametrize(
    ("program", "wanted"),
    [("import sys; sys.exit(3)", "exit code 3"), ("import os; os.write(1, b'x' * 99); input()", "malformed")],
)
def test_a_trainer_process_that_dies_or_babbles_ends_its_job_with_an_error(monkeypatch, program, wanted):
    trainer = TrainerProcess()
    popen = subprocess.Popen
    monkeypatch.setattr(subprocess, "Popen", lambda command, **more: popen([command[0], "-c", program], **more))
    for _ in range(2):
        trainer.submit(Job("train", {"round": 1}))
        done = next(found for found in map(lambda _: trainer.poll(), range(10_000_000)) if found is not None)
        assert wanted in done.error or "did not take the job" in done.error
        assert done.kind == "train"
        assert not trainer.busy
    trainer.stop()


def test_a_trainer_process_that_cannot_be_started_ends_its_job_with_an_error(monkeypatch):
    monkeypatch.setattr(sys, "executable", "/nowhere/python")
    trainer = TrainerProcess()
    trainer.submit(Job("train", {"round": 1}))
    done = trainer.poll()
    assert done is not None
    assert "did not take the job" in done.error
    assert not trainer.busy


# g. the ledger ------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("codec", ["fp32", "int8"])
def test_the_booked_payload_is_what_the_broker_delivered(fleet, codec):
    faults = BrokerFaults()
    w = fleet(rounds=4, broker=LoopbackBroker(faults=faults), fleet="cohort = 2",
              link=f'up = "{codec}"\ndown = "{codec}"\nchunk_bytes = 1024')
    start(w, "d0", "d1", "d2")
    w.start_agent("new", toy(5), train=False)
    assert w.pump(lambda: finished(w))
    up: dict[str, int] = {}
    down: dict[str, int] = {}
    for client, message in faults.seen:
        parts = message.topic.split("/")
        if parts[2] == "b" and client != w.server.boot:
            name = next(n for n, a in w.agents.items() if a.boot == client)
            down[name] = down.get(name, 0) + len(message.payload)
        elif "/up/" in message.topic and parts[-1] != "m":
            data = whole_update(message.payload)[1] if parts[-1] == WHOLE else message.payload
            up[parts[3]] = up.get(parts[3], 0) + len(data)
    booked = {name: volume.payload for name, volume in w.server.ledger.volume("device").items()}
    assert {name: volume.up for name, volume in booked.items() if volume.up} == up
    assert {name: volume.down for name, volume in booked.items()} == down
    assert [r.models_transmitted for r in w.server.ledger.rounds()] == [4.0] * 4
    by_kind = w.server.ledger.totals().payload_by_kind
    graph = len(w.fleet.graph_bytes())
    assert by_kind["graph"].down == 4 * graph
    served = w.server._parts.served.reference
    hold_base = w.server.ledger.rounds()[-1].cohort
    fetched = [served.blob if served.full is None or name in hold_base else served.full for name in w.agents]
    assert by_kind["serve"].down == sum(blob.size for blob in fetched)
    uploads = sum(u.payload_bytes for u in w.server.ledger.rows(Update, status="counted"))
    assert by_kind["update"].up == uploads


def test_a_report_that_comes_twice_or_late_is_booked_once(fleet):
    faults = BrokerFaults()
    w = fleet(rounds=3, broker=LoopbackBroker(faults=faults))
    first: list[Message] = []

    def again(client: str, message: Message) -> list[Message] | None:
        if "/a/d0/rep" not in message.topic or first:
            return [message, first[0], message] if "/a/d0/rep" in message.topic else None
        first.append(message)
        return [message]

    faults.rules.append(again)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: finished(w))
    for _ in range(3):
        w.step()
    booked = w.server.ledger.volume("device")["d0"].payload
    assert booked.up == sum(u.payload_bytes for u in w.server.ledger.rows(Update, device="d0"))
    assert booked.down == w.server.ledger.volume("device")["d1"].payload.down


def test_joules_and_flops_are_booked_per_round_or_absent(fleet):
    w = fleet(rounds=2)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: finished(w))
    assert w.server.ledger.joules() == {}, "there is no meter, so there are no joules"
    flops = w.server.ledger.flops()
    assert flops[1] == flops[2] > 0


# h. parts of the fleet, and devices that lack the base --------------------------------------------------------------


@pytest.mark.slow
def test_a_device_that_lacks_the_base_gets_the_whole_model_and_ends_with_the_same_weights(fleet):
    w = fleet(rounds=8, fleet="cohort = 2", link='down = "int8"')
    start(w, "d0", "d1", "d2", "d3")
    full: list[int] = []
    cohorts = set()
    for number in range(1, 9):
        assert w.pump(lambda n=number: w.closed() >= n)
        manifest = next(a.manifest for a in w.agents.values() if a.manifest is not None)
        full += [number] if number > 1 and manifest.model.full is not None else []
        cohort = w.server.ledger.rows(Round, round=number)[0].cohort
        cohorts.add(cohort)
        held = {payloads.identity(w.agents[name].home.weights("model").params) for name in cohort}
        assert held == {w.server.ledger.rows(Round, round=number)[0].model_id}
    assert full, "somebody lacked the base"
    assert len(cohorts) > 2
    assert all(len(c) == 2 for c in cohorts)
    assert w.pump(lambda: finished(w) and settled(w))
    check_duals(w, feedback=True)


def test_the_first_model_goes_as_a_seed_and_whole_to_an_agent_of_the_version_before(fleet):
    w = fleet(rounds=1)
    start(w, "d0", "d1", "d2")
    old = w.agents["d1"]._tasks.models
    old.blob_for = lambda ref, groups: ref.blob if ref.base in (None, old.base) else ref.full
    assert w.pump(lambda: finished(w))
    down = {t.device: t.payload_bytes for t in w.server.ledger.rows(Traffic, round=1, direction="down", kind="model")}
    assert down["d0"] == down["d2"] < 300
    assert down["d1"] > 5 * down["d0"]
    assert {name: statuses(w, 1)[name] for name in down} == dict.fromkeys(("d0", "d1", "d2"), "counted")


@pytest.mark.slow
def test_a_device_that_lost_its_weights_asks_for_the_whole_model(fleet):
    faults = BrokerFaults()
    w = fleet(rounds=4, broker=LoopbackBroker(faults=faults))
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: w.closed() == 2)
    w.kill_agent("d1")
    (w.folder / "devices" / "d1" / "model.safetensors").write_bytes(b"damaged")
    shutil.rmtree(w.folder / "devices" / "d1" / "slots", ignore_errors=True)
    lost = faults.drop("/a/d1/rep")
    w.start_agent("d1")
    for _ in range(3):
        w.step()
    lost()
    assert w.pump(lambda: finished(w), tick_s=TICK_S)
    assert statuses(w, 4)["d1"] == "counted"
    assert "d1" in statuses(w, 3)


@pytest.mark.slow
def test_weights_that_changed_on_the_disk_are_noticed_and_fetched_whole(fleet):
    w = fleet(rounds=4)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 3))
    agent = w.agents["d1"]
    held = agent.home.weights("model")
    agent.home.save_weights("model", replace(held, params=trees.apply(lambda a: a * np.float32(1.5), held.params)))
    assert w.pump(lambda: finished(w), tick_s=TICK_S)
    assert w.logged("d1: the delta does not fit")
    assert statuses(w, 4)["d1"] == "counted"


def test_a_large_cohort_is_announced_by_its_rule_and_counted_in_a_blob(fleet, monkeypatch):
    monkeypatch.setattr("fleet_core.protocol.cohort.LISTED", 1)
    monkeypatch.setattr(manifests, "LISTED_IDS", 1)
    w = fleet(rounds=4, fleet="cohort = 2")
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: finished(w) and settled(w))
    manifest = w.agents["d0"].manifest
    assert all(record.ids is None and record.blob is not None for record in manifest.counted)
    assert [len(statuses(w, n)) for n in range(1, 5)] == [2] * 4
    check_duals(w, feedback=True)


# i. questions -------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("method", ["pfldyn-proto", "per-fedavg-fo"])
def test_a_question_over_mqtt_is_answered_by_the_personalized_model(fleet, method):
    w = fleet(method, rounds=6)
    start(w, "d0", "d1", "d2")
    asker = FakeDevice(w, "asker")
    asker.link.subscribe(topics.answer(w.name, "d0", "+"))
    x = toy(0).x[:7]
    ask = Question(x.shape, "float32", base64.b64encode(x.tobytes()).decode())

    def answer(question_id: str, payload: bytes) -> Answer:
        asker.link.publish(topics.question(w.name, "d0", question_id), payload)
        w.agents["d0"].step(0)
        asker.poll()
        assert asker.inbox[-1].topic == topics.answer(w.name, "d0", question_id)
        return messages.decode(Answer, asker.inbox[-1].payload)

    w.step()
    assert "no model" in answer("early", messages.encode(ask)).error
    assert w.pump(lambda: finished(w))
    good = answer("q1", messages.encode(ask))
    assert (good.error, good.round, good.model) == ("", 6, w.server._parts.served.reference.model)
    assert good.personalization == ("proto" if method == "pfldyn-proto" else "sgd")
    assert set(good.labels) <= set(CLASSES)
    assert np.mean([CLASSES[y] == label for y, label in zip(toy(0).y, good.labels, strict=False)]) > 0.6
    np.testing.assert_allclose(np.sum(good.probabilities, axis=1), 1, atol=1e-5)
    bad = {
        "no json": b"what?",
        "wrong shape": messages.encode(replace(ask, shape=(7, 9))),
        "not base64": messages.encode(replace(ask, x="!!")),
        "another input": messages.encode(Question((1, 3), "float32", base64.b64encode(bytes(12)).decode())),
        "another type": messages.encode(replace(ask, dtype="int64", shape=(28,))),
        "not finite": messages.encode(
            Question((1, 8), "float32", base64.b64encode(np.full((1, 8), np.nan, np.float32).tobytes()).decode())
        ),
    }
    for name, payload in bad.items():
        said = answer("bad", payload)
        assert said.error, name
        assert not said.labels, name
    assert answer("q2", messages.encode(ask)) == good


# Who belongs to the fleet -------------------------------------------------------------------------------------------


def test_a_device_that_enrols_in_mid_round_takes_part_in_the_next(fleet):
    faults = BrokerFaults()
    w = fleet(rounds=3, broker=LoopbackBroker(faults=faults))
    start(w, "d0", "d1", "d2")
    lift = faults.drop("/a/d0/up/2/")
    assert w.pump(lambda: opened(w, 2) and len(w.server.open.received) == 2)
    w.start_agent("d3", toy(3, shift=1.0))
    assert w.pump(lambda: w.server.ledger.device("d3") is not None)
    lift()
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    assert set(statuses(w, 2)) == {"d0", "d1", "d2"}
    assert set(statuses(w, 3)) == {"d0", "d1", "d2", "d3"}
    assert [r.members for r in w.server.ledger.rounds()] == [3, 4, 4]
    check_duals(w, feedback=True)


def test_a_listed_fleet_takes_only_whom_it_was_told_to(fleet):
    w = fleet(rounds=2, devices=1, fleet='enrolment = "listed"')
    start(w, "d0", "d1")
    for _ in range(20):
        w.step(TICK_S)
    assert w.server.ledger.devices() == []
    assert w.server.open is None
    w.server.ledger.request("enroll/d1", "yes")  # it announced itself long ago
    assert w.pump(lambda: w.server.finished, tick_s=TICK_S)
    assert [d.name for d in w.server.ledger.devices()] == ["d1"]
    assert statuses(w, 2) == {"d1": "counted"}
    assert w.server.checkpoint.state.dual_epoch == 0


@pytest.mark.slow
def test_a_device_that_only_serves_can_be_listed_without_costing_the_duals(fleet):
    w = fleet(rounds=4, fleet='enrolment = "listed"')
    for name in ("d0", "d1", "d2"):
        with Ledger(w.fleet.ledger_path) as ledger:
            ledger.request(f"enroll/{name}", "yes")
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 3))
    w.server.ledger.request("enroll/screen", "yes")
    w.start_agent("screen", toy(8), train=False)
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    assert w.server.checkpoint.state.dual_epoch == 0
    assert [r.members for r in w.server.ledger.rounds()] == [3] * 4
    check_duals(w, feedback=True)


@pytest.mark.slow
def test_a_revoked_device_is_heard_no_more_and_can_be_let_in_again(fleet):
    w = fleet(rounds=6, devices=2)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 2))
    w.server.ledger.request("revoke/d2", "yes")
    assert w.pump(lambda: w.closed() >= 4, tick_s=TICK_S)
    assert set(statuses(w, 4)) == {"d0", "d1"}
    assert w.logged("d2: is not enrolled") or "d2" not in statuses(w, 3)
    assert "d2" not in w.agents, "it was told, and has ended"
    w.server.ledger.request("enroll/d2", "yes")
    w.start_agent("d2")
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    assert set(statuses(w, 6)) == {"d0", "d1", "d2"}
    check_duals(w, feedback=True)


def test_a_leave_is_not_forgotten_by_an_aggregator_that_dies_before_the_next_round(fleet):
    w = fleet(rounds=4, devices=2)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 3))
    w.server.ledger.request("revoke/d2", "yes")
    w.clock.seconds += 1
    w.server._requests.tick()
    w.kill_server()
    w.kill_agent("d2")
    w.start_server()
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    assert w.server.checkpoint.state.dual_epoch == 1
    check_duals(w, feedback=True)


def test_a_device_that_lacks_the_method_is_listed_with_the_reason_and_not_asked(fleet, monkeypatch):
    w = fleet(rounds=2)
    w.start_server()
    fake = FakeDevice(w, "old")
    fake.announce(methods={"pfldyn-proto": 99})
    for n in range(3):
        w.start_agent(f"d{n}", toy(n))
    assert w.pump(lambda: finished(w))
    assert w.server.ledger.device("old").cannot == "lacks pfldyn-proto version 1"
    assert all("old" not in r.cohort for r in w.server.ledger.rounds())


def test_an_agent_that_lacks_the_rounds_method_says_so_and_waits(fleet):
    w = fleet(rounds=1, devices=1)
    start(w, "d0")
    assert w.pump(lambda: finished(w))
    now = w.agents["d0"].manifest
    newer = replace(now, seq=now.seq + 1, open=True, round=2, method=replace(now.method, version=99))
    w.broker.publish(topics.current(w.name), w.fleet.signer().sign(messages.encode(newer)))
    w.step()
    assert w.logged("d0: method: method pfldyn-proto version 99")
    w.broker.publish(topics.current(w.name), w.fleet.signer().sign(messages.encode(replace(now, seq=now.seq + 2))))
    w.step()
    assert w.agents["d0"].manifest.seq == now.seq + 2


def test_a_graph_that_fails_its_check_is_fetched_once_and_said(fleet, monkeypatch):
    faults = BrokerFaults()
    w = fleet(rounds=3, broker=LoopbackBroker(faults=faults), fleet="deadline_s = 1000")
    start(w, "d0", "d1", "d2")

    def wrong(graph_id: str, graph: Any) -> None:
        raise BundleError("golden embed is off by 3")

    monkeypatch.setattr(w.agents["d1"].service, "install", wrong)
    assert w.pump(lambda: w.server.finished)
    assert "golden embed is off by 3" in w.server.ledger.rounds()[0].note
    assert "failed its check" in w.server.ledger.rounds()[2].note
    graph = w.agents["d0"].manifest.graph.id
    fetched = [m for c, m in faults.seen if c == w.agents["d1"].boot and f"/b/{graph}/0/0" in m.topic]
    assert len(fetched) == 1
    assert not list((w.folder / "devices" / "d1").glob("graph-*"))


def test_a_damaged_graph_on_the_disk_is_fetched_again(fleet):
    w = fleet(rounds=3)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 2))
    w.kill_agent("d1")
    path = next((w.folder / "devices" / "d1").glob("graph-*"))
    path.write_bytes(path.read_bytes()[:-1] + b"!")
    w.start_agent("d1")
    assert w.pump(lambda: finished(w))
    assert statuses(w, 3)["d1"] == "counted"


@pytest.mark.slow
def test_damaged_training_state_is_set_aside_and_the_fleet_told(fleet):
    w = fleet(rounds=6)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 3) and settled(w))
    w.kill_agent("d1")
    path = next((w.folder / "devices" / "d1").glob("methods/*/state.safetensors"))
    path.write_bytes(b"damaged")
    for pending in (w.folder / "devices" / "d1").glob("methods/*/pending.safetensors"):
        pending.write_bytes(b"damaged too")
    w.start_agent("d1")
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    assert path.with_suffix(".damaged").exists()
    assert w.server.checkpoint.state.dual_epoch == 1
    check_duals(w, feedback=True)


@pytest.mark.slow
def test_a_paused_fleet_closes_its_round_tells_what_was_counted_and_continues_later(fleet):
    w = fleet(rounds=4)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 2))
    w.server.ledger.request("paused", "yes")
    assert w.pump(lambda: w.server.paused and w.server.open is None and settled(w) and all_evaluated(w, w.closed()),
                  tick_s=TICK_S)
    closed = w.closed()
    assert not w.agents["d0"].manifest.open
    w.kill_server()
    w.start_server()
    for _ in range(40):
        w.step(TICK_S)
    assert w.server.paused
    assert w.closed() == closed < 4
    check_duals(w, feedback=True)
    w.server.ledger.request("paused", "no")
    assert w.pump(lambda: finished(w), tick_s=TICK_S)


@pytest.mark.slow
def test_the_served_model_is_evaluated_in_mid_run_too_and_survives_a_restart(fleet):
    w = fleet("per-fedavg-fo", rounds=6, fleet="")
    path = w.fleet.folder / "fleet.toml"
    path.write_text(path.read_text().replace("serve_every = 6", "serve_every = 2"))
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: w.closed() == 3)
    w.kill_server()
    w.start_server()
    before = w.agents["d0"].manifest.seq
    assert w.pump(lambda: w.agents["d0"].manifest.seq > before)
    assert w.agents["d0"].manifest.serve.round == 2
    w.start_agent("new", toy(8), train=False)
    assert w.pump(lambda: finished(w))
    evaluated = {(j.round, j.device) for j in w.server.ledger.rows(Evaluation, stage="after")}
    assert evaluated >= {(n, f"d{k}") for n in (2, 4, 6) for k in range(3)}
    assert [r.served_id is not None for r in w.server.ledger.rounds()] == [False, True, False, True, False, True]


@pytest.mark.slow
@pytest.mark.parametrize("method", ["per-fedavg-fo", "pfldyn-proto"])
def test_a_model_that_is_served_while_devices_train_is_personalized_and_evaluated_anyway(fleet, method):
    w = fleet(method, rounds=4)
    path = w.fleet.folder / "fleet.toml"
    path.write_text(path.read_text().replace("serve_every = 4", "serve_every = 1"))
    w.start_server()
    for n in range(3):
        w.start_agent(f"d{n}", toy(n))
        w.trainers[f"d{n}"].inner = SlowTrainer()
    assert w.pump(lambda: finished(w) and settled(w))
    evaluated = {(j.round, j.device) for j in w.server.ledger.rows(Evaluation, stage="after")}
    assert evaluated >= {(4, f"d{n}") for n in range(3)}
    assert len(evaluated) >= 9, "also in mid-run"
    assert not w.logged("serve: ")
    assert [len(statuses(w, n)) for n in range(1, 5)] == [3] * 4


def test_what_was_trained_for_a_round_that_is_over_is_not_offered_for_the_next(fleet):
    w = fleet(rounds=3, devices=2, fleet="deadline_s = 2")
    start(w, "d0", "d1", "d2")
    slow = SlowTrainer()
    w.trainers["d2"].inner = slow
    assert w.pump(lambda: w.agents["d2"].phase == "train")
    slow.left = 25
    assert w.pump(lambda: finished(w) and settled(w), tick_s=0.1)
    assert set(statuses(w, 1)) == {"d0", "d1"}
    assert statuses(w, 3)["d2"] == "counted"
    assert not w.logged("refused")
    check_duals(w, feedback=True)


def test_updates_are_read_in_closing_order_whatever_order_they_came_in(fleet):
    w = fleet(rounds=1, devices=6)
    start(w, *(f"d{n}" for n in range(6)))
    assert w.pump(lambda: w.server.finished)
    manifests = dict(reversed(w.server._parts.spool.manifests(1).items()))
    order = [update.device for update in w.server._parts.spool.updates(1, manifests)]
    assert order == aggregation.order(manifests) != sorted(manifests)


def test_a_round_that_opens_while_a_device_still_fetches_the_last_is_joined_at_once(fleet):
    faults = BrokerFaults()
    w = fleet(rounds=3, broker=LoopbackBroker(faults=faults), fleet="deadline_s = 5", link="chunk_bytes = 1024")
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 2) and w.agents["d0"].manifest.round == 2)
    blob = w.agents["d0"].manifest.model.blob.id
    agent = w.agents["d0"]

    def starve(client: str, message: Message) -> list[Message] | None:
        return [] if client == agent.boot and "/b/" in message.topic and w.closed() < 2 else None

    faults.rules.append(starve)
    agent._tasks.models.base = ""
    agent._tasks.training.forget()
    agent._fetcher.start(agent.manifest.model.blob, 1 << 20, "model")
    assert agent._fetcher.target == blob
    assert w.pump(lambda: w.closed() == 3, tick_s=TICK_S)
    assert statuses(w, 3)["d0"] == "counted"


@pytest.mark.slow
def test_what_is_pending_when_the_rounds_went_back_is_discarded(fleet):
    """The aggregator's folder was restored from a backup: the device's update belongs to a round that does not exist
    there."""
    w = fleet(rounds=6, devices=2)
    start(w, "d0", "d1")
    assert w.pump(lambda: opened(w, 2))
    w.kill_server()
    shutil.copytree(w.fleet.folder, w.folder / "backup")
    w.start_server()
    outbox = w.agents["d0"]._updates
    assert w.pump(lambda: opened(w, 4) and outbox.pending is not None and outbox.pending.round == 4)
    w.kill_server()
    shutil.rmtree(w.fleet.folder)
    shutil.copytree(w.folder / "backup", w.fleet.folder)
    w.start_server()
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    assert statuses(w, 6) == {"d0": "counted", "d1": "counted"}


@pytest.mark.slow
def test_devices_that_know_more_than_a_restored_backup_start_their_duals_again(fleet):
    """Their duals hold rounds that the aggregator has forgotten."""
    w = fleet(rounds=8, devices=2)
    start(w, "d0", "d1")
    assert w.pump(lambda: opened(w, 2))
    w.kill_server()
    shutil.copytree(w.fleet.folder, w.folder / "backup")
    w.start_server()
    assert w.pump(lambda: opened(w, 5) and settled(w))
    w.kill_server()
    shutil.rmtree(w.fleet.folder)
    shutil.copytree(w.folder / "backup", w.fleet.folder)
    w.kill_agent("d0")
    w.start_server()
    w.start_agent("d0")
    assert w.pump(lambda: finished(w) and settled(w), tick_s=TICK_S)
    assert w.logged("d0 has an update of round 4 that this ledger did not count")
    assert w.logged("every device's dual starts again from zero")
    assert len([line for line in w.lines if "d0 has an update of round" in line]) == 1
    check_duals(w, feedback=True)


def test_an_aggregator_that_is_told_to_stop_leaves_in_order(fleet):
    w = fleet(rounds=2)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: opened(w, 1))
    w.server.close()
    assert b'"st":"off"' in w.broker.retained[topics.server(w.name)]
    w.server.ledger.close()
    w.start_server()
    assert w.pump(lambda: finished(w))
    w.agents.pop("d0").close()
    w.step()
    assert w.server.ledger.rows(Device, name="d0")[0].state == "off"


def test_a_pending_update_that_was_tampered_with_on_the_disk_is_not_sent(fleet):
    w = fleet(rounds=1)
    start(w, "d0", "d1", "d2")
    assert w.pump(lambda: w.agents["d0"]._updates.pending is not None)
    pending: Pending = w.agents["d0"]._updates.pending
    home = w.agents["d0"].home
    assert home.pending() is not None
    whole = bytearray(pending.path.read_bytes())
    whole[pending.start] ^= 1
    pending.path.write_bytes(whole)
    assert home.pending() is None
    assert list(home.folder.glob("methods/*/pending.damaged"))


def test_an_update_that_a_power_cut_tore_is_left_out_of_the_spool(tmp_path):
    layout = Layout("m", InputSpec((1,)), ("a",), 1, ())
    spool = Spool(tmp_path, layout, ())
    whole = UploadManifest(blob=Blob.of(b"x", 1024), codec="fp32", base="0" * 32, method="fedavg", layout=layout.hash)
    spool.put(1, "whole", whole, b"x")
    spool.put(1, "torn", whole, b"x")
    (tmp_path / "1" / "torn.json").write_bytes(b'{"blob": {"id"')
    assert list(spool.manifests(1)) == ["whole"]


def test_a_device_that_answers_by_few_labelled_samples_says_so_once(tmp_path: Path) -> None:
    w = world(tmp_path, config_text(rounds=2, devices=2).replace("serve_every = 2", "serve_every = 1"))
    w.start_server()
    w.start_agent("many", toy(0))
    w.start_agent("some", toy(1, count=12))
    assert w.pump(lambda: finished(w) and settled(w))
    (line,) = (line for line in w.lines if "few labelled samples" in line)
    assert line.startswith("some: note: few labelled samples (")
    assert w.logged("edge-agent samples add")
    w.close()
