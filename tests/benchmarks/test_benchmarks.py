"""Small versions of the overhead benchmarks, so that they keep working: two devices and two rounds, as processes; and
how memory is counted, on made-up tables."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from benchmarks.overhead import fan_in, idle, memory, networks, run
from benchmarks.overhead.peers.run import persisted
from benchmarks.overhead.processes import Processes
from benchmarks.overhead.run import Figures, Setting
from benchmarks.overhead.workload import Workload
from benchmarks.simulation import loop, ours, subnormals
from benchmarks.simulation import memory as simulated_memory
from benchmarks.simulation import run as simulated
from benchmarks.simulation.workload import WORKLOADS
from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan import workload as workloads
from fleet_core.learning import models
from tests.support import lab, netns
from tests.support.brokers import NEEDS_MOSQUITTO
from tests.support.waiting import PATIENCE_S

LINUX = pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
SMALL = Workload(devices=2, rounds=2)
TIMES = ("first_round_s", "seconds_per_round")


# Memory of a device as if it ran alone --------------------------------------------------------------------------------


def mapping(name: str, inode: int, *, rss: int, anonymous: int = 0, swap: int = 0, offset: int = 0) -> str:
    """One mapping of a smaps file, sizes in kB."""
    return (
        f"7f0000000000-7f0000100000 r-xp {offset:08x} fe:00 {inode}                     {name}\n"
        f"Size:               1024 kB\nKernelPageSize:        4 kB\nRss:                {rss} kB\n"
        f"Pss:                   1 kB\nShared_Clean:       {rss - anonymous} kB\nPrivate_Dirty:      {anonymous} kB\n"
        f"Anonymous:          {anonymous} kB\nAnonHugePages:         0 kB\nSwap:               {swap} kB\n"
        "SwapPss:               0 kB\nVmFlags: rd mr mw me sd\n"
    )


def pages(*mappings: str) -> memory.Pages:
    return memory.parse("".join(mappings).encode())


def kib(size: int) -> float:
    return size / 1024


def test_pages_of_a_file_that_two_processes_map_count_once() -> None:
    agent = pages(mapping("/lib/a.so", 7, rss=100), mapping("/lib/a.so", 7, rss=10, offset=4096))
    trainer = pages(mapping("/lib/a.so", 7, rss=300), mapping("/lib/torch.so", 8, rss=1000))
    assert kib(memory.together([agent, trainer])) == 300 + 10 + 1000
    assert kib(memory.together([agent])) == 110


def test_pages_that_other_devices_share_count_in_full() -> None:
    """Rss, not Pss, which divides by the number of processes that map a page."""
    assert kib(memory.together([pages(mapping("/lib/a.so", 7, rss=100))])) == 100


def test_memory_of_a_process_s_own_counts_in_each_process() -> None:
    heap = pages(mapping("[heap]", 0, rss=50, anonymous=50), mapping("", 0, rss=20, anonymous=20))
    assert kib(memory.together([heap, heap])) == 140


def test_pages_of_a_file_that_were_written_are_the_process_s_own() -> None:
    written = pages(mapping("/lib/a.so", 7, rss=100, anonymous=60))
    assert kib(written.anonymous) == 60
    assert kib(memory.together([written, written])) == 2 * 60 + 40


def test_what_was_swapped_out_is_memory_too() -> None:
    assert kib(memory.together([pages(mapping("[heap]", 0, rss=50, anonymous=50, swap=25))])) == 75


def test_equal_inodes_of_two_disks_are_two_files() -> None:
    other = mapping("/data/a.so", 7, rss=100).replace("fe:00", "fe:01")
    assert kib(memory.together([pages(mapping("/lib/a.so", 7, rss=100)), pages(other)])) == 200


def test_a_process_that_ends_meanwhile_holds_nothing() -> None:
    assert memory.parse(b"").resident == 0


def test_both_units_are_reported() -> None:
    assert memory.both(350_000_000) == {"mib": 333.8, "mb": 350.0}


@LINUX
def test_a_look_sees_a_process_and_its_child_as_one_device() -> None:
    ours = memory.Watch([os.getpid()], every_s=0.0)
    ours.look()
    code = "import sys; held = bytearray(64 << 20); print(1, flush=True); sys.stdin.read()"
    with subprocess.Popen([sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        both = memory.Watch([os.getpid()], every_s=0.0)
        both.look()
        child.communicate()
    assert 64 << 20 < both.peak - ours.peak < 80 << 20  # python and libc are counted once
    assert both.peak <= both.bound


@LINUX
def test_a_child_that_a_thread_started_belongs_to_the_device() -> None:
    children: list[subprocess.Popen[bytes]] = []
    done = threading.Event()

    def start() -> None:
        children.append(subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE))
        done.wait(PATIENCE_S)

    thread = threading.Thread(target=start)
    thread.start()
    try:
        while not children:
            assert thread.is_alive()
        assert children[0].pid in memory.family(os.getpid())
    finally:
        done.set()
        thread.join()
        for child in children:
            child.communicate(b"\n")


@LINUX
def test_looks_are_spaced() -> None:
    watch = memory.Watch([os.getpid()], every_s=3600)
    watch.look()
    watch.look()
    assert watch.looks == 1


# Rooms ---------------------------------------------------------------------------------------------------------------


@pytest.mark.needs("ip")
def test_the_bytes_of_a_room_are_those_that_its_processes_send(tmp_path: Path) -> None:
    netns.need_namespaces()
    send = "import socket as s; s.socket(2, s.SOCK_DGRAM).sendto(bytes(1000), ('{}', 9))"
    with networks.separate(2) as network, Processes(tmp_path) as processes:
        sender = processes.start(network.nodes[1], sys.executable, "-c", send.format(network.address))
        processes.until(lambda: sender.poll() == 0, 20)
        traffic = network.traffic()
        assert network.nodes[0].traffic() == networks.Traffic(0, 0)
    assert traffic is not None
    assert traffic.up == 1000 + 20 + 8


@pytest.mark.needs("ip")
def test_rooms_are_gone_when_the_benchmark_is_interrupted() -> None:
    netns.need_namespaces()
    there: list[str] = []

    def interrupted() -> None:
        with networks.separate(2) as network:
            there.extend(node.namespace or "" for node in (network.hub, *network.nodes))
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        interrupted()
    left = netns.names()
    assert len(set(there)) == 3
    assert [name for name in there if name in left] == []


def test_a_process_that_fails_ends_the_benchmark_with_its_words(tmp_path: Path) -> None:
    with networks.shared(1) as network, Processes(tmp_path) as processes:
        processes.start(network.nodes[0], sys.executable, "-c", "raise SystemExit('no luck')")
        with pytest.raises(SystemExit, match="ended with 1\nno luck"):
            processes.until(lambda: False, 20)


# Small runs ----------------------------------------------------------------------------------------------------------


@LINUX
@NEEDS_MOSQUITTO
@pytest.mark.slow
def test_floor_and_fleet_run_and_tell_all_figures(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "SETTLE_S", 0.1)
    namespaces = netns.unavailable() is None
    setting = Setting(namespaces, counting=namespaces)
    floor, fleet = run.run_floor(SMALL, setting), run.run_fleet(SMALL, setting, "int8")
    for name in (*TIMES, "device_work_bytes", "device_work_bound_bytes", "server_bytes", "device_cpu_s"):
        assert (floor[name] or 0) > 0, name
        assert (fleet[name] or 0) > 0, name
    assert bytes_of(fleet, "agent_session_bytes") < bytes_of(fleet, "device_work_bytes")
    assert bytes_of(fleet, "server_rest_bytes") < bytes_of(fleet, "server_bytes")
    if namespaces:
        assert floor["wire_ratio_to_raw"] == pytest.approx(2.1, rel=0.05)
        assert fleet["wire_ratio_to_raw"] == pytest.approx(fleet["wire_ratio_to_raw_by_agents"], rel=0.01)


def bytes_of(figures: Figures, name: str) -> float:
    found = figures[name]
    assert found is not None
    return found


@LINUX
@NEEDS_MOSQUITTO
@pytest.mark.slow
def test_devices_that_all_connect_as_the_aggregator_starts_are_all_counted() -> None:
    found = fan_in.measure(20, 1, 0.0, 60.0, at_once=True)
    assert (found["lost"], found["refused"], found["devices_on"]) == (0, 0, 20)


def test_one_round_is_refused_for_it_has_no_seconds_per_round(capsys: pytest.CaptureFixture[str]) -> None:
    for count in ("0", "1", "-3"):
        with pytest.raises(SystemExit) as caught:
            run.arguments(None).parse_args(["--rounds", count, "--out", "x.json"])
        assert caught.value.code == 2
        assert f"argument --rounds: {count} is too few: seconds per round" in capsys.readouterr().err
    options = run.arguments(None).parse_args(["--rounds", str(run.FEWEST_ROUNDS), "--out", "x.json"])
    assert run.pace(0.0, [1.0 + k for k in range(options.rounds)])["seconds_per_round"] == 1.0


# What is written -----------------------------------------------------------------------------------------------------


def test_the_outcome_has_medians_both_units_and_ratios_and_bytes_of_the_run_that_counted_them() -> None:
    def timed(seconds: float, size: int) -> Figures:
        return {"seconds_per_round": seconds, "device_work_bytes": size, "wire_ratio_to_raw": 9.0}

    runs = {"floor": [timed(s, 10**8) for s in (0.2, 0.1, 0.4)], "int8": [timed(0.3, 2 * 10**8)] * 3}
    found = run.outcome(SMALL, runs, {"int8": {"wire_ratio_to_raw": 0.3}}, namespaces=True)
    assert found["round_ratio"] == {"floor": 1.0, "int8": 1.5}
    assert found["medians"]["int8"]["device_work"] == {"mib": 190.7, "mb": 200.0}
    assert found["medians"]["int8"]["wire_ratio_to_raw"] == 0.3


def test_a_keepalive_of_a_minute_is_within_the_bar_of_an_idle_hour() -> None:
    assert idle.keepalive_bytes() == 3 * 52 + 4
    assert idle.keepalive_kb_per_hour(60) == pytest.approx(9.6)
    assert idle.keepalive_kb_per_hour(60, ethernet=True) < idle.BAR_KB_PER_HOUR < idle.keepalive_kb_per_hour(
        30, ethernet=True
    )


def test_the_ends_of_rounds_are_read_from_the_words_of_a_server() -> None:
    said = (
        "2026-11-20 14:11:03,981 - FedAvg - INFO - [run=1] - Start persist model on server.\n"
        "2026-11-20 14:11:03,990 - FedAvg - INFO - [run=1] - End persist model on server.\n"
        "2026-11-20 14:11:06,999 - FedAvg - INFO - [run=1] - End persist model on server.\n"
    )
    first, second = persisted(said)
    assert second - first == pytest.approx(3.009)


# The simulation benchmark ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet, 1 step", "mlp, 10 steps"])
def test_the_laboratory_and_the_loop_take_the_same_steps(tmp_path: Path, torch_threads: None, name: str) -> None:
    """One client, two steps on all of its samples, from the same weights."""
    workload = replace(WORKLOADS[name], clients=1, samples=6, batch=6, local_steps=2)
    asked = ours.experiment(workload, 1, tmp_path)
    store = lab.run_first(asked, tmp_path / "run")
    layout = workloads.layout_of(asked, workloads.build(asked))
    first = [torch.tensor(array) for named in models.initial(layout, 0).values() for array in named.values()]
    assert experiments.runs(asked)[0].seed == 0
    model = loop.MODELS[workload.model](workload.shape)
    assert [p.shape for p in model.parameters()] == [p.shape for p in first]
    with torch.no_grad():
        for parameter, value in zip(model.parameters(), first, strict=True):
            parameter.copy_(value)
    x, y = map(torch.tensor, workload.data(0))
    loop.train(model, torch.optim.SGD(model.parameters(), 0.01), x, y, workload.batch, workload.local_steps)
    checkpoint = store.resume(layout.ordered(models.initial(layout, 0)))
    assert checkpoint is not None
    found = [torch.tensor(a) for named in checkpoint.state.model.values() for a in named.values()]
    for parameter, before, after in zip(model.parameters(), first, found, strict=True):
        torch.testing.assert_close(after.float(), parameter.detach(), rtol=1e-4, atol=1e-6)
        assert not torch.equal(parameter, before)


def test_uneven_clients_have_from_the_least_to_the_most() -> None:
    workload = WORKLOADS["mlp, uneven"]
    sizes = [len(workload.data(k)[1]) for k in range(workload.clients)]
    assert (sizes[0], sizes[-1]) == (workload.least, workload.samples)
    assert sizes == sorted(sizes)


@pytest.mark.slow
def test_rounds_beside_the_loop_give_seconds_of_both_and_their_ratio(torch_threads: None) -> None:
    workload = replace(WORKLOADS["mlp, 10 steps"], clients=2, samples=8, batch=4, local_steps=1, pairs=2)
    for found in simulated.beside_loop(workload, kept=True).values():
        assert min(found.values()) > 0
        assert found["ratio"] == pytest.approx(found["ours"] / found["loop"], rel=0.1)


def test_updates_per_second_use_the_median_round_and_processor_time_all_rounds_but_the_first() -> None:
    code = "print('INFO: starting', flush=True)\nfor end in (10.0, 10.5, 12.5, 13.0): print('end', end, flush=True)"
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as process:
        looks, said = simulated.followed(process)
    assert said.startswith("INFO: starting\n")
    assert [when for when, _ in looks] == [10.0, 10.5, 12.5, 13.0]
    looks = [(when, 3.0 + 2 * k) for k, (when, _) in enumerate(looks)]
    found = simulated.pace(WORKLOADS["lenet, 1 step"], looks)
    assert found == {"updates_per_second": 16.0, "cpu_seconds_per_update": 0.25}
    runs = [{"seconds": {"ours": s}, "ratio": 2 * s} for s in (3.0, 1.0, 2.0)]
    assert simulated.summary(runs) == {"seconds": {"ours": 2.0}, "ratio": 4.0}


@pytest.mark.slow
def test_what_subnormals_cost_is_of_the_same_step_in_turn() -> None:
    found = subnormals.beside(0.0, 1, length=4)
    assert min(found.values()) > 0
    assert found["ratio"] == pytest.approx(found["kept"] / found["flushed"], rel=0.1)


@pytest.mark.slow
def test_the_memory_of_many_devices_is_reported_with_the_states_on_the_disk(torch_threads: None) -> None:
    found = simulated_memory.measure(9, 2)
    assert found["peak_bytes"] > 100 << 20
    assert found["devices_with_state"] in (8, 9)
    assert found["states_bytes"] > found["devices_with_state"] * 3_000_000
