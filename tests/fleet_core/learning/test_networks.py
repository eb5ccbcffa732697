"""Bad networks and brokers with limits: the run ends with the right sums, or says why it cannot. Real aggregator,
agents, links and mosquitto.

The network is the tests' own proxy, which needs no rights and no tools. A lost segment arrives one retransmission
later, as with TCP.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from cloud_server.ledger.ledger_tables import Update
from cloud_server.rounds.coordinator import Coordinator
from edge_agent.rounds.agent import Agent
from tests.support.brokers import NEEDS_MOSQUITTO
from tests.support.faults import NetworkFaults, Proxy, mosquitto
from tests.support.fleet_processes import LONG, check_end, processes, reference_run, tiny_fleet
from tests.support.programs import metafleet, programs_in
from tests.support.stepped_fleet import SteppedFleet, stepped

pytestmark = [NEEDS_MOSQUITTO, pytest.mark.slow]

ROUNDS = 3


@pytest.fixture(scope="module")
def founded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tiny_fleet(tmp_path_factory.mktemp("founded"), rounds=ROUNDS)


@pytest.fixture(scope="module")
def whole(founded: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return reference_run(founded, tmp_path_factory.mktemp("whole") / "run")


def server_of(running: SteppedFleet) -> Coordinator:
    assert running.server is not None
    return running.server


def opened(running: SteppedFleet, number: int) -> bool:
    now = server_of(running).open
    return now is not None and now.number == number


def received(running: SteppedFleet) -> set[str]:
    now = server_of(running).open
    return set() if now is None else set(now.received)


WEATHERS = {
    "2 % loss": (NetworkFaults(loss=0.02), "lost"),
    "10 % loss": (NetworkFaults(loss=0.1), "lost"),
    "connections that are reset": (NetworkFaults(reset_every=100), "reset"),
    "64 kbit/s": (NetworkFaults(bytes_per_s=8000), "bytes"),
    "messages that come twice": (NetworkFaults(duplicated=0.3), "duplicated"),
    "messages out of order": (NetworkFaults(reordered=0.3), "reordered"),
    "all of it": (NetworkFaults(loss=0.02, duplicated=0.2, reordered=0.2), "lost"),
}


@pytest.mark.parametrize("name", WEATHERS)
def test_a_run_through_a_bad_network_ends_as_an_undisturbed_one(
    founded: Path, whole: Path, tmp_path: Path, name: str
) -> None:
    faults, counted = WEATHERS[name]
    folder = shutil.copytree(founded, tmp_path / "run")
    with mosquitto(tmp_path / "broker") as broker, Proxy(broker.port, faults) as proxy:
        with stepped(folder, proxy.url) as running:
            running.start()
            running.finish()
        assert getattr(proxy.counts, counted) > 0, "the network was bad"
    check_end(folder, whole)


def test_a_half_open_link_is_noticed_by_its_silence_and_the_run_continues(
    founded: Path, whole: Path, tmp_path: Path
) -> None:
    folder = shutil.copytree(founded, tmp_path / "run")
    with (
        mosquitto(tmp_path / "broker") as broker,
        Proxy(broker.port) as proxy,
        stepped(folder, proxy.url, keepalive_s=1) as running,
    ):
        running.start()
        running.until(lambda: opened(running, 2), what="round 2")
        proxy.faults.half_open = True
        links = [server_of(running).link, *(agent.link for agent in running.agents.values())]
        running.until(lambda: not any(link.connected for link in links), "all links given up")
        assert running.logged("the broker is silent (keepalive timeout)")
        proxy.faults.half_open = False
        running.finish()
    check_end(folder, whole)


def test_a_partition_that_heals_costs_only_time(founded: Path, whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(founded, tmp_path / "run")
    with mosquitto(tmp_path / "broker") as broker, Proxy(broker.port) as proxy, stepped(folder, broker.url) as running:
        running.start_server()
        running.start_agent("d0")
        cut_off = running.start_agent("d1", proxy.url)
        running.until(lambda: opened(running, 2), what="round 2")
        proxy.cut()
        running.until(lambda: not cut_off.link.connected, "d1 is cut off")
        running.until(lambda: "d0" in received(running), "d0 goes on")
        assert running.closed() == 1, "the round waits for d1"
        proxy.faults.closed = False
        running.finish()
    check_end(folder, whole)


def uploads_second(agent: Agent) -> bool:
    """Whether the device is about to send its update of round 2."""
    return agent.phase == "upload" and agent.manifest is not None and agent.manifest.round == 2


def test_an_aggregator_that_is_cut_off_continues_where_it_was(founded: Path, whole: Path, tmp_path: Path) -> None:
    folder = shutil.copytree(founded, tmp_path / "run")
    with mosquitto(tmp_path / "broker") as broker, Proxy(broker.port) as proxy, stepped(folder, broker.url) as running:
        running.start_server(proxy.url)
        agents = [running.start_agent("d0"), running.start_agent("d1")]
        running.until(lambda: opened(running, 2) and all(map(uploads_second, agents)))
        proxy.cut()
        running.until(lambda: all(agent.phase == "upload" for agent in agents), "updates that nobody takes")
        assert running.closed() == 1
        proxy.faults.closed = False
        running.finish()
    check_end(folder, whole)


def test_sixty_clients_that_connect_at_once_are_all_counted(tmp_path: Path) -> None:
    folder = tiny_fleet(tmp_path / "run", rounds=1, devices=60, hidden=6)
    with mosquitto(tmp_path / "broker") as broker, stepped(folder, broker.url) as running:
        running.start()
        running.finish()
    check_end(folder)


# Brokers with limits -------------------------------------------------------------------------------------------------

LIMITS = {
    "packets of 128 KiB": "max_packet_size 131072\n",
    "payloads of 60 KiB": "message_size_limit 61440\n",
}


@pytest.mark.parametrize("protocol", [5, 3])
@pytest.mark.parametrize("name", LIMITS)
def test_a_broker_with_small_packets_takes_the_default_chunks(tmp_path: Path, name: str, protocol: int) -> None:
    folder = tiny_fleet(tmp_path / "run", rounds=1, hidden=8000, chunk_bytes=61440, codec="fp32")
    with (
        mosquitto(tmp_path / "broker", LIMITS[name]) as broker,
        stepped(folder, broker.url, protocol=protocol) as running,
    ):
        running.start()
        running.finish()
        assert min(row.chunks for row in running.ledger.rows(Update)) > 1, "some were of full size"
    check_end(folder)


@pytest.mark.parametrize("protocol", [5, 3] if LONG else [5])
def test_a_queue_of_a_hundred_messages_overflows_and_nothing_is_lost(tmp_path: Path, protocol: int) -> None:
    folder = tiny_fleet(tmp_path / "run", rounds=1, devices=30, hidden=6500, chunk_bytes=16_384, codec="fp32")
    limits = "max_queued_messages 100\nmax_inflight_messages 10\n"
    dropped = "messages are being dropped for client t-aggregator"
    with (
        mosquitto(tmp_path / "broker", limits) as broker,
        # A broker that hears nothing for 1.5 keepalives ends the session, and with it the queue.
        stepped(folder, broker.url, protocol=protocol, keepalive_s=3600) as running,
    ):
        running.start()
        running.until(lambda: opened(running, 1) and server_of(running).settled, what="round 1")
        asleep_until(running, lambda: dropped in broker.log.read_text())
        running.finish()
    check_end(folder)


@pytest.mark.parametrize("protocol", [5, 3])
def test_more_than_a_thousand_chunks_pass_a_queue_of_a_hundred_messages(tmp_path: Path, protocol: int) -> None:
    """Credit keeps the chunks on the way below what the broker may hold."""
    folder = tiny_fleet(tmp_path / "run", rounds=1, hidden=25_000, codec="fp32")
    with mosquitto(tmp_path / "broker", "max_queued_messages 100\nmax_inflight_messages 10\n") as broker:
        with stepped(folder, broker.url, protocol=protocol) as running:
            running.start()
            running.finish()
            assert min(row.chunks for row in running.ledger.rows(Update)) > 500
        assert "dropped" not in broker.log.read_text()
    check_end(folder)


def asleep_until(running: SteppedFleet, condition: Callable[[], bool]) -> None:
    """The aggregator does nothing until ``condition`` holds."""
    running.server_sleeps = True
    running.until(condition)
    running.server_sleeps = False


@pytest.mark.parametrize("protocol", [5, 3])
@pytest.mark.parametrize(("denied", "told"), [("up/#", "d1: broker: fl1/t/a/d1/up/1/m"), ("dn", "fl1/t/a/d1/dn")])
def test_a_device_that_may_not_send_or_hear_does_not_hold_up_the_others(
    tmp_path: Path, protocol: int, denied: str, told: str
) -> None:
    folder = tiny_fleet(tmp_path / "run", rounds=2, quorum=0.5, deadline_s=1.0)
    rules = tmp_path / "acl"
    rules.write_text(f"topic readwrite fl1/#\ntopic deny fl1/t/a/d1/{denied}\n")
    with (
        mosquitto(tmp_path / "broker", f"acl_file {rules}\n") as broker,
        stepped(folder, broker.url, protocol=protocol) as running,
    ):
        running.start()
        running.until(lambda: running.closed() == 2, "two rounds")
        counted = [(row.round, row.device) for row in running.ledger.rows(Update, status="counted")]
        assert counted == [(1, "d0"), (2, "d0")]
        if protocol == 5:
            assert running.logged(f"{told} denied: Not authorized")


WALLS = {
    "rounds": "topic deny fl1/t/r/#",
    "models": "topic deny fl1/t/b/#",
    "updates": "topic deny fl1/t/a/+/up/#",
}


@pytest.mark.parametrize(
    ("protocol", "name"),
    [(5, "rounds"), (5, "models"), (5, "updates"), (3, "rounds"), (3, "models"), (3, "updates")],
)
def test_a_run_that_a_brokers_rules_hold_up_says_so(tmp_path: Path, protocol: int, name: str) -> None:
    folder, rules = tiny_fleet(tmp_path / "run", rounds=1, devices=1, deadline_s=0.5), tmp_path / "acl"
    rules.write_text(f"topic readwrite fl1/#\n{WALLS[name]}\n")
    with (
        mosquitto(tmp_path / "broker", f"acl_file {rules}\n") as broker,
        stepped(folder, broker.url, protocol=protocol) as running,
    ):
        running.start()
        said = re.compile(r"broker.*(denied|may deny)")
        running.until(lambda: any(map(said.search, running.lines)), "who does not let what pass")
        assert running.closed() == 0


def test_a_broker_whose_packets_are_too_small_for_a_chunk_is_named(tmp_path: Path) -> None:
    folder = tiny_fleet(tmp_path / "run", rounds=1, devices=1, hidden=8000, chunk_bytes=61440, codec="fp32")
    with mosquitto(tmp_path / "broker", "max_packet_size 61440\n") as broker, processes(folder, broker.url) as running:
        running.start("server", "d0")
        server = running.running["server"]
        assert server.exit_code() != 0
        assert re.search(r"broker.* packets of 61440 bytes at most", server.text())
        assert "chunk_bytes" in server.text()
        assert "Traceback" not in server.text()


@pytest.mark.parametrize("limit", ["max_packet_size 61440", "message_size_limit 50000"])
def test_a_broker_of_3_1_1_that_takes_no_chunk_is_named(tmp_path: Path, limit: str) -> None:
    """It cannot say so: it hangs up, or accepts the chunk and drops it."""
    folder = tiny_fleet(tmp_path / "run", rounds=1, devices=1, hidden=8000, chunk_bytes=61440, codec="fp32",
                        deadline_s=0.5)
    with mosquitto(tmp_path / "broker", limit + "\n") as broker, stepped(folder, broker.url, protocol=3) as running:
        running.start()
        running.until(lambda: running.logged("chunk_bytes"), "what may be too large")


def test_a_broker_that_refuses_a_chunk_for_its_size_is_named(tmp_path: Path) -> None:
    folder = tiny_fleet(tmp_path / "run", rounds=1, devices=1, hidden=8000, chunk_bytes=61440, codec="fp32")
    with mosquitto(tmp_path / "broker", "message_size_limit 50000\n") as broker, stepped(folder, broker.url) as running:
        running.start()
        said = re.compile(r"broker: .* fl1/t/b/\S+ with 61440 bytes was in flight: perhaps over the broker's limit")
        running.until(lambda: any(map(said.search, running.lines)), "which message, and why")


def test_a_broker_that_refuses_retained_messages_is_named(tmp_path: Path, founded: Path) -> None:
    folder = shutil.copytree(founded, tmp_path / "run")
    with mosquitto(tmp_path / "broker", "retain_available false\n") as broker, programs_in(tmp_path) as programs:
        command = metafleet("server", "start", folder / "fleet", "--broker", broker.url, "--quiet", "--connect-s", 2)
        program = programs.start(*command)
        assert program.exit_code() != 0
        assert re.search("[Rr]etain not supported", program.text()), program.text()
