"""Devices that missed rounds fetch the deltas that they missed, and end with the same weights as all others."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.broadcast.delta_chain import LINK_BYTES, NAMED_BYTES, DeltaChain, Holder, chain_of
from cloud_server.ledger.ledger_tables import Round, Traffic
from cloud_server.records import checkpoint as checkpoints
from cloud_server.records.checkpoint import Checkpoint, Checkpoints, Delta
from edge_agent.device.manifest_method import method_of
from fleet_core.algorithms.interface import ServerState
from fleet_core.base import storage, trees
from fleet_core.link.interface import Message
from fleet_core.link.loopback import LoopbackBroker
from fleet_core.model import payloads
from fleet_core.protocol import messages, topics
from fleet_core.protocol.chain_message import MAX_LINKS, Chain
from fleet_core.protocol.round_messages import Manifest
from tests.support.deaths import Death, Plan, deadly
from tests.support.inprocess import Killed, World, config_text, toy, world
from tests.support.stand_ins import BrokerFaults
from tests.support.world_checks import check_duals, checkpoint_bits, finished, opened, settled, statuses

pytestmark = pytest.mark.usefixtures("no_fsync", "torch_threads")

NAMES = ("d0", "d1", "d2", "d3", "d4")


# Which deltas it has --------------------------------------------------------------------------------------------------


def delta(number: int, size: int = 100) -> Delta:
    first = number == 1
    return Delta(number, f"m{number}", "drawn" if first else "int8", None if first else f"m{number - 1}", bytes(size))


def closed(number: int, size: int = 100) -> Checkpoint:
    """The checkpoint after a round, with the deltas of all rounds."""
    return Checkpoint(number, ServerState({}, {}), deltas=tuple(delta(n, size) for n in range(1, number + 1)))


def chain(number: int, whole: int, size: int = 100) -> DeltaChain:
    """The chain of a round."""
    return chain_of(closed(number - 1, size), delta(number, size), whole, 1024)


def rounds(deltas: tuple[Delta, ...]) -> list[int]:
    return [one.round for one in deltas]


def test_the_deltas_with_their_list_cost_less_than_the_whole() -> None:
    each = 100 + LINK_BYTES
    assert rounds(chain(9, 100 + 3 * each + 1).earlier) == [6, 7, 8]
    assert rounds(chain(9, 100 + 3 * each).earlier) == [7, 8]
    assert chain(9, 100).earlier == ()
    assert chain(1, 10_000).earlier == ()


def test_it_has_64_links_at_most() -> None:
    assert rounds(chain(100, 1 << 30).earlier) == list(range(100 - MAX_LINKS, 100))
    assert rounds(chain(100, 1 << 30).kept) == list(range(101 - MAX_LINKS, 101))


def test_a_delta_as_large_as_the_whole_is_not_kept() -> None:
    assert chain(9, 10_000, size=9_000).kept == ()
    assert rounds(chain(9, 1000).kept) == [8, 9]


def test_deltas_that_do_not_lead_to_the_base_are_not_named() -> None:
    assert chain_of(closed(5), replace(delta(6), base="other"), 10_000, 1024).earlier == ()
    assert chain_of(replace(closed(5), deltas=()), delta(6), 10_000, 1024).earlier == ()


def test_a_device_fetches_what_leads_from_the_last_model_that_it_holds() -> None:
    made = chain(5, 10_000)
    listed = len(made.listed)
    assert made.fetched(("m4",)) == [100]
    assert made.fetched(("m3",)) == [listed, 100, 100]
    assert made.fetched(("m1", "m2")) == [listed, 100, 100, 100]
    assert made.fetched(()) == [listed, *[100] * 5], "it begins with the seed"
    later = chain(9, 100 + 3 * (100 + LINK_BYTES) + 1)
    assert later.fetched(("m4",)) == [len(later.listed), later.whole]
    assert later.suits(Holder("m5", True))
    assert not later.suits(Holder("m5", False))
    assert not later.suits(Holder("m4", True))


def test_it_is_named_beside_the_whole_only_where_it_saves_more_than_all_manifests_grow() -> None:
    made = chain(9, 100 + 3 * (100 + LINK_BYTES) + 1)
    on_it, off_it, older = Holder("m6", True), Holder("m2", True), Holder("m6", False)
    saved = made.whole - sum(made.fetched(("m6",)))
    assert made.pays([on_it], listening=1_000_000), "it takes the place of the whole"
    assert made.pays([on_it, older], listening=saved // NAMED_BYTES)
    assert not made.pays([on_it, older], listening=saved // NAMED_BYTES + 1)
    assert not made.pays([on_it, off_it], listening=saved // NAMED_BYTES), "the other one fetches the list in vain"
    assert not made.pays([off_it, older], listening=1)
    assert not made.pays([], listening=1)
    assert not chain(9, 100).pays([on_it], listening=1)


def test_a_checkpoint_keeps_the_deltas_and_one_of_a_version_without_them_has_none(tmp_path: Path) -> None:
    states = Checkpoints(tmp_path)
    states.save(closed(3))
    assert states.load(3, {}).deltas == closed(3).deltas
    arrays, metadata = storage.unpack(states.path(3).read_bytes())
    older = {name: array for name, array in arrays.items() if not name.startswith("deltas/")}
    del metadata["sha256"]
    checkpoints._write(states.path(3), older, metadata)
    assert states.load(3, {}).deltas == ()


# In a fleet -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def fleet(tmp_path: Path) -> Iterator[Callable[..., World]]:
    made: list[World] = []

    def make(method: str = "pfldyn-proto", *, broker: LoopbackBroker | None = None, rounds: int = 8, seed: int = 0,
             codec: str = "ternary", devices: int = len(NAMES), started: bool = True) -> World:
        text = config_text(method, rounds=rounds, devices=devices, fleet=f"cohort = 2\nseed = {seed}",
                           link=f'up = "int8"\ndown = "{codec}"',
                           hyper="support_batch = 12\nquery_batch = 12" if "proto" in method else "")
        w = world(tmp_path / str(len(made)), text.replace("hidden = [6]", "hidden = [80]"), broker)
        made.append(w)
        w.start_server()
        for n, name in enumerate(NAMES if started else ()):
            w.start_agent(name, toy(n))
        return w

    yield make
    for each in made:
        each.close()


def cohort(w: World, number: int) -> tuple[str, ...]:
    return tuple(w.server.ledger.rows(Round, round=number)[0].cohort)


def held(w: World, name: str) -> str:
    """Id of the training model on the device's disk."""
    weights = w.agents[name].home.weights("model")
    return payloads.identity(weights.params) if weights is not None else ""


def fetched(w: World, name: str, number: int) -> int:
    rows = w.server.ledger.rows(Traffic, round=number, device=name, direction="down", kind="model")
    return sum(row.payload_bytes for row in rows)


def whole(w: World) -> int:
    return len(payloads.encode("fp32", w.server.checkpoint.published))


def manifest(w: World) -> Manifest:
    """The retained manifest."""
    signed = w.broker.retained[topics.current(w.name)]
    return messages.decode(Manifest, signed.split(b"\n", 1)[1])


def at_broker(w: World) -> set[str]:
    """Ids of the blobs that the broker keeps."""
    found = (topics.parse(w.name, topic) for topic in w.broker.retained)
    return {address.key for address in found if address is not None and address.kind == "b"}


def missing(w: World, number: int) -> list[str]:
    """The devices of a round's cohort that were not in the one before."""
    return [name for name in cohort(w, number) if name not in cohort(w, number - 1)]


def run_to(w: World, number: int) -> None:
    """Runs until a round is closed, and each device of it has the announced weights and has reported its bytes."""
    assert w.pump(lambda: w.closed() >= number)
    assert {held(w, name) for name in cohort(w, number)} == {w.server.ledger.rows(Round, round=number)[0].model_id}
    assert w.pump(lambda: all(fetched(w, name, number) for name in cohort(w, number)))


def asked_first(w: World, name: str) -> int:
    """The number of the open round, once it asks the device."""
    assert w.pump(lambda: w.server.open is not None and name in w.server.open.cohort)
    return int(w.server.open.number)


@pytest.mark.slow
def test_devices_that_missed_rounds_fetch_deltas_and_hold_the_same_weights_as_all(fleet: Any) -> None:
    w = fleet()
    lengths = []
    for number in range(1, 9):
        assert w.pump(lambda n=number: opened(w, n))
        lengths.append(len(w.server.open.chain.earlier))
        if number > 1:
            assert w.server.open.model.full is None, "nobody needs it"
        run_to(w, number)
    assert w.pump(lambda: finished(w) and settled(w))
    late = {(name, number): fetched(w, name, number) for number in range(2, 9) for name in missing(w, number)}
    assert len(late) > 5
    assert max(late.values()) < whole(w) / 2
    assert lengths == [0, 1, 2, 3, 4, 5, 6, 6]
    check_duals(w, feedback=True)


@pytest.mark.slow
def test_the_broker_keeps_the_deltas_of_the_chain_and_no_others(fleet: Any) -> None:
    w = fleet(codec="int8", rounds=7)
    named = []
    for number in range(2, 8):
        assert w.pump(lambda n=number: opened(w, n))
        assert w.pump(lambda: w.server.settled)
        now = manifest(w)
        links = {link.blob.id for link in w.server.open.chain.links}
        assert at_broker(w) == {blob.id for blob in now.blobs()} | links
        named.append(len(links))
        run_to(w, number)
    assert max(named) > 1
    assert named[-1] < 6, "those of the first rounds do not pay any more"


@pytest.mark.slow
def test_a_device_that_joins_begins_with_the_seed(fleet: Any) -> None:
    w = fleet(rounds=40)
    run_to(w, 1)
    w.start_agent("late", toy(9))
    number = asked_first(w, "late")
    assert number > 2
    way = w.server.open.chain.fetched(())
    run_to(w, number)
    assert fetched(w, "late", number) == sum(way) < whole(w)


@pytest.mark.slow
def test_a_method_that_shares_a_head_alone_sends_it_as_a_seed_and_by_deltas(fleet: Any) -> None:
    w = fleet("lg-fedavg", rounds=6)
    for number in range(1, 7):
        run_to(w, number)
    assert {fetched(w, name, 1) for name in cohort(w, 1)} <= set(range(100))
    assert missing(w, 6)
    assert max(fetched(w, name, 6) for name in missing(w, 6)) < whole(w)


@pytest.mark.slow
def test_where_first_weights_are_no_seed_a_device_that_joins_gets_the_whole(fleet: Any) -> None:
    w = fleet(rounds=40, seed=5)  # the weights were drawn from seed 0
    run_to(w, 5)
    w.start_agent("late", toy(9))
    number = asked_first(w, "late")
    run_to(w, number)
    assert fetched(w, "late", number) > whole(w) * 0.99


@pytest.mark.slow
def test_a_restarted_aggregator_names_the_same_chain(fleet: Any) -> None:
    undisturbed = fleet(rounds=6)
    run_to(undisturbed, 6)
    w = fleet(rounds=6)
    run_to(w, 4)
    assert w.pump(lambda: opened(w, 5))
    before, links = w.server.open.model, w.server.open.chain.earlier
    assert before.chain is not None
    w.kill_server()
    w.broker.retained.clear()
    w.start_server()
    assert w.pump(lambda: opened(w, 5))
    assert w.server.open.chain.earlier == links
    assert replace(w.server.open.model, chain=before.chain) == before, "the chain is named once somebody asks"
    run_to(w, 6)
    for number in range(1, 7):
        rows = [one.server.ledger.rows(Round, round=number)[0] for one in (undisturbed, w)]
        assert rows[0].model_id == rows[1].model_id
        assert {name: fetched(w, name, number) for name in cohort(w, number)} == {
            name: fetched(undisturbed, name, number) for name in cohort(w, number)}


@pytest.mark.slow
def test_after_a_checkpoint_of_the_version_before_the_chain_begins_anew(fleet: Any) -> None:
    w = fleet(rounds=8)
    run_to(w, 3)
    w.kill_server()
    path = sorted((w.fleet.folder / "state").glob("round-*"))[-1]
    arrays, metadata = storage.unpack(path.read_bytes())
    del metadata["sha256"], metadata["deltas"]
    older = {name: array for name, array in arrays.items() if not name.startswith("deltas/")}
    checkpoints._write(path, older, metadata)
    w.start_server()
    number = w.closed() + 1
    assert w.pump(lambda: opened(w, number))
    assert w.server.open.chain.earlier == ()
    run_to(w, number)
    assert all(fetched(w, name, number) > whole(w) * 0.99 for name in missing(w, number))
    run_to(w, 8)
    assert len(w.server.checkpoint.deltas) == 8 - number + 1


def of_the_version_before(agent: Any) -> None:
    """The agent knows no chain and does not say that it does."""
    send, models = agent._reporter._send, agent._tasks.models

    def without(topic: str, payload: bytes, **more: Any) -> None:
        content = json.loads(messages.plain(payload))
        content.pop("base" if "want" in content else "chain", None)
        send(topic, json.dumps(content).encode(), **more)

    agent._reporter._send = without
    models.next_blob = lambda seen: models.blob_for(seen.model, method_of(seen).down)


@pytest.mark.slow
def test_an_agent_of_the_version_before_gets_the_whole_and_the_others_their_deltas(fleet: Any) -> None:
    w = fleet()
    of_the_version_before(w.agents["d0"])
    for number in range(1, 9):
        run_to(w, number)
        assert "d0" not in cohort(w, number) or statuses(w, number)["d0"] == "counted"
    late = {(name, number): fetched(w, name, number) for number in range(2, 9) for name in missing(w, number)}
    of_old = [size for (name, _), size in late.items() if name == "d0"]
    assert of_old
    assert min(of_old) > whole(w) * 0.99
    assert max(size for (name, _), size in late.items() if name != "d0") < whole(w) / 2


@pytest.mark.slow
def test_a_device_that_comes_back_while_all_others_hold_the_base_asks_and_gets_the_chain(fleet: Any) -> None:
    w = fleet(devices=2, started=False, rounds=6)
    for n in range(3):
        w.start_agent(f"d{n}", toy(n))
    w.kill_agent("d2")
    assert w.pump(lambda: w.closed() >= 3)
    assert w.server.open is None or w.server.open.model.chain is None
    w.start_agent("d2")
    number = asked_first(w, "d2")
    run_to(w, number)
    assert fetched(w, "d2", number) < whole(w) / 2


@pytest.mark.slow
def test_an_aggregator_that_dies_at_any_moment_goes_on_with_the_same_chain(fleet: Any) -> None:
    def live(plan: Plan) -> tuple[World, Death]:
        w = fleet(rounds=4)
        death = Death("server", None, w, plan=plan)
        with pytest.MonkeyPatch.context() as patch:
            deadly(patch, death)
            for _ in range(1500):
                if finished(w) and settled(w) and w.server.settled:
                    break
                try:
                    w.step(0.1)
                except Killed:
                    w.acting = ""
                    w.kill_server()
                    w.start_server()
        return w, death

    undisturbed, none = live({})
    wanted = undisturbed.server.checkpoint.deltas
    assert rounds(wanted) == [1, 2, 3, 4]
    for plan in none.plans(3):
        w, death = live(plan)
        assert death.where
        assert w.server.finished, death.where
        assert w.server.checkpoint.deltas == wanted, death.where
        assert checkpoint_bits(w) == checkpoint_bits(undisturbed), death.where
        for name in NAMES:
            sizes = [sum(fetched(one, name, number) for number in range(1, 5)) for one in (w, undisturbed)]
            assert sizes[0] == sizes[1], death.where
        assert at_broker(w) == {blob.id for blob in manifest(w).blobs()}, f"{death.where}: what is not named is cleared"
        w.close()


# What goes wrong ------------------------------------------------------------------------------------------------------


def spoilt(w: World, change: Callable[[Chain], bytes]) -> None:
    """The aggregator's lists are changed before they are signed."""
    models = w.server._parts.models
    listed = models._listed

    def wrong(made: DeltaChain) -> Any:
        blob = listed(made)
        return blob and models.blob(change(Chain(made.links)))

    models._listed = wrong


@pytest.mark.slow
@pytest.mark.parametrize("change", [
    lambda made: Chain(made.links[:-1]).encode(),
    lambda made: Chain((*made.links[:-1], replace(made.links[-1], base="0" * 32))).encode(),
    lambda made: b"no list",
    lambda made: Chain((*(replace(one, codec="unheard-of") for one in made.links),)).encode(),
    lambda made: Chain((*(replace(one, blob=made.links[0].blob) for one in made.links),)).encode(),
], ids=["without the last link", "with a wrong base", "not a list", "with an unknown codec", "with another delta"])
def test_a_chain_that_does_not_lead_to_the_model_gives_way_to_the_whole(
    fleet: Any, change: Callable[[Chain], bytes]
) -> None:
    w = fleet(rounds=5)
    run_to(w, 3)
    spoilt(w, change)
    run_to(w, 5)
    assert w.pump(lambda: finished(w) and settled(w))
    assert missing(w, 5)
    for name in missing(w, 5):
        assert fetched(w, name, 5) > whole(w) * 0.99
        assert w.logged(f"{name}: the chain of deltas cannot be used, the whole model is needed")
    assert set(statuses(w, 5).values()) == {"counted"}


def test_a_newest_delta_that_does_not_fit_after_the_chain_gives_way_to_the_whole(fleet: Any) -> None:
    w = fleet(rounds=3)
    run_to(w, 1)

    def spoil(agent: Any) -> None:
        sound = agent._tasks.models.weights

        def spoilt(model: str, groups: tuple[str, ...]) -> Any:
            found = sound(model, groups)
            if found is None or agent.manifest is None or model != agent.manifest.model.base:
                return found
            return replace(found, params=trees.apply(lambda a: a + np.float32(1), found.params))

        agent._tasks.models.weights = spoilt

    for agent in w.agents.values():
        spoil(agent)
    run_to(w, 3)
    assert w.pump(lambda: finished(w) and settled(w))
    sizes = {name: fetched(w, name, 3) for name in missing(w, 3)}
    assert sizes
    assert all(whole(w) < size < 2 * whole(w) for size in sizes.values())


def test_a_link_that_the_broker_lost_is_published_again(fleet: Any) -> None:
    faults = BrokerFaults()
    w = fleet(rounds=5, broker=LoopbackBroker(faults=faults))
    run_to(w, 3)
    assert w.pump(lambda: opened(w, 4) and w.server.settled)
    for link in w.server.open.chain.links:
        for topic in [topic for topic in w.broker.retained if f"/b/{link.blob.id}/" in topic]:
            del w.broker.retained[topic]
    assert w.pump(lambda: w.closed() >= 5, steps=6000, tick_s=0.1)
    assert all(fetched(w, name, 5) < whole(w) / 2 for name in missing(w, 5))


@pytest.mark.slow
def test_a_device_that_dies_on_its_way_goes_on_from_where_it_is(fleet: Any) -> None:
    faults, on_the_way = BrokerFaults(), list[str]()
    w = fleet(rounds=6, broker=LoopbackBroker(faults=faults))
    run_to(w, 5)
    assert w.pump(lambda: opened(w, 6))
    chain_now = w.server.open.chain
    name = max(cohort(w, 6), key=lambda name: len(chain_now.fetched((held(w, name),))))
    way = chain_now.fetched((held(w, name),))
    assert len(way) > 3
    last = chain_now.links[-1].blob.id

    def stop(client: str, message: Message) -> list[Message] | None:
        if f"/b/{last}/" in message.topic and client.startswith(name):
            on_the_way.append(client)
            return []
        return None

    faults.rules.append(stop)
    assert w.pump(lambda: bool(on_the_way))
    assert held(w, name) == chain_now.earlier[-2].model
    w.kill_agent(name)
    faults.rules.clear()
    w.start_agent(name)
    run_to(w, 6)
    assert fetched(w, name, 6) == way[0] + sum(way[-2:]), "the list again, the last link and the newest delta"
