"""Energy meters, the model and the book. No sensor is at hand: counters and processes are file trees shaped like
/sys/class/powercap and /proc, and clocks are numbers."""

from __future__ import annotations

import os
import tempfile
import threading
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import firmware_profiles
from fleet_core.base.error_bounds import Spread
from fleet_core.base.errors import ConfigError, PowerError
from fleet_core.board import probe
from fleet_core.board import profile as profiles
from fleet_core.board.profile import Compute, Power, Profile, Radio
from fleet_core.power.choose_meter import choose_meter
from fleet_core.power.energy_model import STATED, BoardModel, WattsModel
from fleet_core.power.joules_by_phase import JoulesByPhase
from fleet_core.power.meter import Interval
from fleet_core.power.radio import radio_of
from fleet_core.power.rapl import Rapl
from fleet_core.power.sensors.cpu import TICKS_PER_S, process_cpu_s
from fleet_core.protocol.device_messages import MAX_SOURCE
from tests.support.waiting import PATIENCE_S

WRAP_UJ = 262_143_328_850
A, B = 101, 102
PI = probe.Machine("aarch64", 64, 4, model="Raspberry Pi 4 Model B Rev 1.4")


class Machine:
    """A tree like /sys and /proc, and a clock, all moved by hand."""

    def __init__(self, root: Path, *, start_uj: int = 0, name: str = "package-0"):
        self.root, self.now_s, self.busy_ticks = root, 1000.0, 50
        self.cpu_ticks: dict[int, int] = {}
        self.starts: dict[int, int] = {}
        self.package = self.add_zone("intel-rapl:0", name, start_uj)
        for pid in (A, B):
            self.process(pid)
        self._write_machine()

    def add_zone(self, folder: str, name: str, energy_uj: int) -> Path:
        zone = self.root / "sys/class/powercap" / folder
        zone.mkdir(parents=True)
        (zone / "name").write_text(name + "\n")
        (zone / "max_energy_range_uj").write_text(f"{WRAP_UJ}\n")
        (zone / "energy_uj").write_text(f"{energy_uj}\n")
        return zone

    def process(self, pid: int, *, ticks: int = 0, ended_children_ticks: int = 0, start: int | None = None) -> None:
        start = self.starts.setdefault(pid, 7) if start is None else start
        self.starts[pid] = start
        folder = self.root / "proc" / str(pid)
        (folder / "task" / str(pid)).mkdir(parents=True, exist_ok=True)
        self.cpu_ticks[pid] = ticks
        fields = ["S", *["0"] * 10, str(ticks), "0", str(ended_children_ticks), "0", *["0"] * 4, str(start), "0", "0"]
        (folder / "stat").write_text(f"{pid} (edge agent) 1) {' '.join(fields)}\n")

    def children(self, pid: int, *child_pids: int) -> None:
        (self.root / f"proc/{pid}/task/{pid}/children").write_text(" ".join(map(str, child_pids)) + " ")

    def end(self, pid: int) -> None:
        (self.root / f"proc/{pid}/stat").unlink()

    def run(self, seconds: float, joules: float, cpu_s: Mapping[int, float], others_cpu_s: float = 0.0) -> None:
        """Time passes: the counter counts, the processes work."""
        self.now_s += seconds
        energy = self.package / "energy_uj"
        energy.write_text(str((int(energy.read_text()) + round(joules * 1e6)) % (WRAP_UJ + 1)))
        for pid, spent_s in cpu_s.items():
            self.process(pid, ticks=self.cpu_ticks[pid] + round(spent_s * TICKS_PER_S))
        self.busy_ticks += round((sum(cpu_s.values()) + others_cpu_s) * TICKS_PER_S)
        self._write_machine()

    def _write_machine(self) -> None:
        (self.root / "proc").mkdir(exist_ok=True)
        idle_ticks = 999_999  # in the fourth field: must not count as busy
        (self.root / "proc/stat").write_text(f"cpu  {self.busy_ticks} 0 0 {idle_ticks} 77 0 0 0 5 0\ncpu0 1 1 1 1\n")

    def clock(self) -> float:
        return self.now_s

    def rapl(self, pid: int = A, idle_w: float | None = 2.0) -> Rapl:
        return Rapl(idle_w, root=self.root, pid=pid, clock=self.clock)


def joules(spent: Interval) -> tuple[float, float]:
    """(above idle, idle), both known."""
    assert spent.active_j is not None
    assert spent.idle_j is not None
    return spent.active_j, spent.idle_j


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


# RAPL ---------------------------------------------------------------------------------------------------------------


def test_the_sensor_counts_joules_since_it_was_opened(machine: Machine) -> None:
    meter = machine.rapl()
    assert meter.read_j() == 0
    machine.run(1, 12.5, {})
    machine.run(1, 0.25, {})
    assert meter.read_j() == pytest.approx(12.75)


def test_a_counter_that_wraps_continues_counting(tmp_path: Path) -> None:
    machine = Machine(tmp_path, start_uj=WRAP_UJ - 3_000_000)
    meter = machine.rapl()
    machine.run(2, 10, {A: 1})
    assert meter.read_j() == pytest.approx(10)
    assert joules(meter.interval()) == pytest.approx((10 - 2 * 2.0, 4))


def test_packages_add_up_and_the_platform_and_parts_do_not(machine: Machine) -> None:
    second = machine.add_zone("intel-rapl:1", "package-1", 5)
    platform = machine.add_zone("intel-rapl:2", "psys", 5)
    part = machine.add_zone("intel-rapl:0:0", "core", 5)
    meter = machine.rapl()
    for zone in (second, platform, part):
        (zone / "energy_uj").write_text("7000005")
    machine.run(1, 1, {})
    assert meter.read_j() == pytest.approx(8)
    assert meter.source == "RAPL package-0, package-1"


def test_joules_above_idle_go_by_the_share_of_cpu_time_and_idle_is_the_devices(machine: Machine) -> None:
    meter = machine.rapl(idle_w=2.0)
    machine.run(10, 120, {A: 3}, others_cpu_s=1)
    assert joules(meter.interval()) == pytest.approx((75, 20))
    assert joules(meter.interval()) == (0, 0)


def test_without_idle_watts_the_meter_says_that_idle_draw_is_within_the_work(machine: Machine) -> None:
    meter = machine.rapl(idle_w=None)
    machine.run(10, 120, {A: 1}, others_cpu_s=1)
    spent = meter.interval()
    assert spent.active_j == pytest.approx(60)
    assert spent.idle_j is None
    assert "idle" in meter.absent_terms
    assert "idle draw included" in meter.source


def test_the_cpu_time_of_children_running_and_ended_is_the_processs(machine: Machine) -> None:
    machine.process(A, ticks=1 * TICKS_PER_S, ended_children_ticks=2 * TICKS_PER_S)
    machine.process(201, ticks=4 * TICKS_PER_S)
    machine.process(202, ticks=8 * TICKS_PER_S)
    machine.children(A, 201)
    machine.children(201, 202)
    assert process_cpu_s(machine.root, A) == pytest.approx(15)
    assert process_cpu_s(machine.root, 999) is None


def test_two_processes_that_read_at_different_moments_do_not_exceed_the_sensor(machine: Machine) -> None:
    """A reads over 10 s, B over the later 5 s, in which most joules were spent. By each one's own two readings A's half
    of 100 J and B's 80 J would make 130 J."""
    a = machine.rapl(A, idle_w=0)
    machine.run(5, 20, {A: 5})
    b = machine.rapl(B, idle_w=0)
    machine.run(5, 80, {B: 5})
    spent_a, spent_b = a.interval().active_j, b.interval().active_j
    assert spent_a == pytest.approx(20)
    assert spent_b == pytest.approx(80)


steps = st.lists(
    st.tuples(
        st.floats(0, 100),  # seconds
        st.floats(0, 500),  # joules
        st.floats(0, 20),  # CPU seconds of A, of B and of others
        st.floats(0, 20),
        st.floats(0, 20),
        st.sampled_from(["", "A", "B", "AB"]),  # who reads the shared account
    ),
    min_size=1,
    max_size=12,
)


@settings(max_examples=60, deadline=None)
@given(steps=steps, idle_w=st.one_of(st.none(), st.floats(0, 20)), b_joins=st.integers(0, 5))
@pytest.mark.slow
def test_phases_and_processes_on_one_sensor_never_exceed_it(
    steps: list[tuple[float, float, float, float, float, str]], idle_w: float | None, b_joins: int
) -> None:
    with tempfile.TemporaryDirectory() as folder:
        machine = Machine(Path(folder), start_uj=WRAP_UJ - 200_000_000)
        sensor = machine.rapl(A, idle_w)
        books = {"A": JoulesByPhase(sensor)}
        for number, (seconds, joules, a_s, b_s, others_s, who) in enumerate(steps):
            if number == b_joins:
                books["B"] = JoulesByPhase(machine.rapl(B, idle_w))
            for name in who:
                if name in books:
                    with books[name].phase("train"):
                        machine.run(seconds / 2, joules / 2, {A: a_s / 2, B: b_s / 2}, others_s / 2)
            machine.run(seconds, joules, {A: a_s, B: b_s}, others_s)
        for book in books.values():
            book.update()
        totals = [figure.joules for book in books.values() if (figure := book.total())]
        assert min(totals) >= 0
        assert sum(totals) <= sensor.read_j() + 1e-6 * len(steps)


def test_nothing_is_lost_when_only_metered_processes_work(machine: Machine) -> None:
    a, b = machine.rapl(A), machine.rapl(B)
    handed_j = 0.0
    for reader in (a, b, a, a, b):
        machine.run(2, 30, {A: 1, B: 0.5})
        handed_j += sum(joules(reader.interval()))
    for reader in (a, b):
        handed_j += sum(joules(reader.interval()))
    assert handed_j == pytest.approx(150)


def test_a_process_that_takes_a_dead_ones_number_does_not_take_its_joules(machine: Machine) -> None:
    a = machine.rapl(A, idle_w=0)
    machine.rapl(B, idle_w=0)
    machine.run(1, 10, {A: 1, B: 1})
    a.interval()
    machine.end(B)
    machine.process(B, ticks=0, start=8)
    heir = machine.rapl(B, idle_w=0)
    machine.run(1, 4, {A: 1, B: 1})
    assert heir.interval().active_j == pytest.approx(2)


@pytest.mark.parametrize("text", ["", '{"energy_uj": {"package-0": 1', "[]", '{"members": 3}', "\x00\xff"])
def test_a_torn_account_is_begun_anew(machine: Machine, text: str) -> None:
    meter = machine.rapl(idle_w=0)
    machine.run(1, 50, {A: 1})
    (account,) = (machine.root / "tmp").glob("*/rapl.json")
    account.write_text(text, encoding="latin-1")
    assert meter.interval().active_j == 0
    machine.run(1, 5, {A: 1})
    assert meter.interval().active_j == pytest.approx(5)


def test_the_account_is_for_its_user_alone(machine: Machine) -> None:
    machine.rapl()
    (account,) = (machine.root / "tmp").glob("*/rapl.json")
    assert account.stat().st_mode & 0o077 == 0
    assert account.parent.stat().st_mode & 0o077 == 0


def refuse(monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """Reading a file of this name is refused, as it is to a user other than root."""
    os_open = os.open

    def guarded(path: Any, *args: Any, **options: Any) -> int:
        if Path(path).name == name:
            raise PermissionError(13, "Permission denied", str(path))
        return os_open(path, *args, **options)

    monkeypatch.setattr(os, "open", guarded)


def test_a_counter_that_only_root_may_read_says_what_to_do(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    refuse(monkeypatch, "energy_uj")
    with pytest.raises(PowerError, match=r"energy_uj: may not be read by this user\nhint: as root: chmod a\+r"):
        machine.rapl()


@pytest.mark.parametrize("text", ["", "-5", "watts", "1.5", "9" * 30])
def test_a_counter_that_reads_no_number_is_refused(machine: Machine, text: str) -> None:
    (machine.package / "energy_uj").write_text(text)
    with pytest.raises(PowerError, match=r"energy_uj: reads .*; expected (a whole number|microjoules, at least 0)"):
        machine.rapl()


def test_a_machine_without_a_package_is_refused(tmp_path: Path) -> None:
    Machine(tmp_path, name="psys")
    with pytest.raises(PowerError, match="no processor package"):
        Rapl(root=tmp_path)


# models -------------------------------------------------------------------------------------------------------------

BOARD = Profile(
    "board",
    "A board",
    "aarch64",
    power=Power(idle_w=2.0, busy_w=7.0, source="sheet 1"),
    compute=Compute(1e9, "sheet 2"),
    radio=Radio(3e-6, "sheet 3"),
)


def test_a_board_is_modelled_by_its_work_and_its_time() -> None:
    now = [100.0]
    model = BoardModel(BOARD, clock=lambda: now[0])
    now[0] = 110.0
    assert model.interval() == Interval(None, 20.0)
    assert model.interval() == Interval(None, 0.0)
    assert model.compute_j(4e9) == pytest.approx(4 * (7 - 2))
    assert model.absent_terms == {}
    assert model.source == "model of board (sheet 1; sheet 2)"
    assert not model.measured


@pytest.mark.parametrize(
    ("change", "absent"),
    [
        ({"power": Power(idle_w=2.0, busy_w=7.0)}, {"compute", "idle"}),
        ({"power": Power(idle_w=2.0, source="sheet 1")}, {"compute"}),
        ({"power": Power(busy_w=7.0, source="sheet 1")}, {"compute", "idle"}),
        ({"compute": Compute(1e9, None)}, {"compute"}),
        ({"compute": Compute(None, "sheet 2")}, {"compute"}),
        ({"power": Power(idle_w=2.0, busy_w=7.0, source="sheet 1", per_processor=True)}, {"compute", "idle"}),
    ],
)
def test_a_constant_without_a_cited_source_makes_its_term_absent(change: dict[str, object], absent: set[str]) -> None:
    model = BoardModel(Profile(**{**vars(BOARD), **change}))
    assert set(model.absent_terms) == absent
    assert (model.compute_j(1e9) is None) == ("compute" in absent)
    assert (model.interval().idle_j is None) == ("idle" in absent)


def test_the_users_watts_count_cpu_seconds_and_the_processes_share_the_idle_draw(machine: Machine) -> None:
    a = WattsModel(10, 50, processors=4, root=machine.root, pid=A, clock=machine.clock)
    b = WattsModel(10, 50, processors=4, root=machine.root, pid=B, clock=machine.clock)
    machine.run(8, 0, {A: 6, B: 2}, others_cpu_s=20)
    assert joules(a.interval()) == pytest.approx((60, 40))
    assert joules(b.interval()) == pytest.approx((20, 40))
    assert not a.measured
    assert a.spreads["compute"] == STATED


def test_the_users_watts_hold_where_there_is_no_proc(tmp_path: Path) -> None:
    now = [0.0]
    meter = WattsModel(10, 50, root=tmp_path, clock=lambda: now[0])
    sum(range(200_000))
    now[0] = 3.0
    spent = meter.interval()
    assert spent.idle_j == pytest.approx(30)
    assert spent.active_j is not None
    assert spent.active_j >= 0


# profiles -----------------------------------------------------------------------------------------------------------


def shipped(name: str) -> Profile:
    return profiles.load(firmware_profiles.folder() / f"{name}.toml")


# the book -----------------------------------------------------------------------------------------------------------


def test_joules_go_to_the_phase_that_is_open_and_to_other_where_none_is(machine: Machine) -> None:
    book = JoulesByPhase(machine.rapl(idle_w=1))
    machine.run(1, 3, {A: 1})
    with book.phase("train"):
        machine.run(10, 60, {A: 5})
    with book.phase("serve"):
        machine.run(1, 5, {A: 1})
    machine.run(1, 2, {A: 1})
    book.update()
    booked = {name: figure.joules for name, figure in book.figures().items()}
    assert booked == pytest.approx({"train": 50, "serve": 4, "other": 3, "idle": 13})
    total = book.total()
    assert total is not None
    assert total.joules == pytest.approx(70)
    assert total.measured
    assert total.absent_terms == ("board: RAPL measures only the processor package",)
    assert total.spread is None


def test_a_modelled_book_counts_operations_bytes_and_time_and_marks_them_as_modelled() -> None:
    now = [0.0]
    book = JoulesByPhase(BoardModel(BOARD, clock=lambda: now[0]), radio_of("wifi", BOARD))
    with book.phase("train") as work:
        now[0] = 2.0
        work.flops += 2e9
    book.moved(up_bytes=300_000, down_bytes=200_000)
    plain = book.plain()
    assert {name: figure["value"] for name, figure in plain.items()} == pytest.approx(
        {"train": 10, "idle": 4, "radio": 1.5}
    )
    assert plain["train"] == {
        "value": pytest.approx(10),
        "source": "model of board (sheet 1; sheet 2)",
        "measured": False,
        "absent_terms": [],
        "low": pytest.approx(10 * 0.74 / 1.26),
        "high": pytest.approx(10 * 1.26 / 0.74),
    }
    assert (plain["radio"]["source"], plain["radio"]["low"]) == ("sheet 3", pytest.approx(1.5 * 0.74))
    total = book.total()
    assert total is not None
    assert total.plain()["low"] == pytest.approx(sum(figure["low"] for figure in plain.values()))


def test_a_term_without_a_constant_leaves_no_figure_and_is_named_in_the_total() -> None:
    book = JoulesByPhase(choose_meter(shipped("raspberry-pi-4b")))
    with book.phase("train") as work:
        work.flops += 1e12
    assert set(book.figures()) == {"idle"}
    total = book.total()
    assert total is not None
    assert total.absent_terms == ("compute: no cited effective FLOP/s",)


def test_without_a_meter_every_figure_is_absent() -> None:
    book = JoulesByPhase(None)
    with book.phase("train") as work:
        work.flops += 1e9
    assert (book.figures(), book.total(), book.take()) == ({}, None, {})


def test_phases_open_at_once_share_evenly(machine: Machine) -> None:
    book = JoulesByPhase(machine.rapl(idle_w=0))
    with book.phase("train"):
        machine.run(1, 4, {A: 1})
        with book.phase("serve"):
            machine.run(1, 6, {A: 1})
    assert {n: f.joules for n, f in book.figures().items() if f.joules} == pytest.approx({"train": 7, "serve": 3})


class OneJoule:
    """A meter without a lock: one joule per reading, counted in two steps."""

    source, measured, absent_terms = "one joule a reading", True, MappingProxyType[str, str]({})
    includes_radio, spreads = True, MappingProxyType[str, Spread]({})

    def __init__(self) -> None:
        self.readings = 0

    def interval(self) -> Interval:
        before = self.readings
        os.sched_yield()
        self.readings = before + 1
        return Interval(1.0, None)

    def compute_j(self, flops: float) -> None:
        return None


def test_phases_of_several_threads_lose_no_joule() -> None:
    meter = OneJoule()
    book = JoulesByPhase(meter)
    gate = threading.Barrier(3)

    def work(name: str) -> None:
        gate.wait(PATIENCE_S)
        for _ in range(200):
            with book.phase(name):
                pass

    threads = [threading.Thread(target=work, args=(name,)) for name in ("train", "serve", "adapt")]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
    total = book.total()
    assert total is not None
    assert total.joules == pytest.approx(3 * 200 * 2)
    assert meter.readings == 3 * 200 * 2


def test_a_report_takes_each_joule_once(machine: Machine) -> None:
    book = JoulesByPhase(machine.rapl(idle_w=0))
    with book.phase("adapt"):
        machine.run(1, 5, {A: 1})
    first = book.take()
    machine.run(1, 2, {A: 1})
    second = book.take()
    assert first["adapt"].joules == pytest.approx(5)
    assert "adapt" not in second
    assert second["other"].joules == pytest.approx(2)


def test_a_meter_that_stops_reading_stops_no_work_and_every_figure_says_so(
    machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    book = JoulesByPhase(machine.rapl(idle_w=0))
    with book.phase("train"):
        machine.run(1, 5, {A: 1})
    with book.phase("train"):
        (machine.package / "energy_uj").unlink()
    figure = book.figures()["train"]
    assert figure.joules == pytest.approx(5)
    assert figure.absent_terms[-1].startswith("meter: ")
    assert "energy is no longer measured" in caplog.text


def test_an_invalid_phase_is_refused() -> None:
    with pytest.raises(PowerError, match="'idle'"), JoulesByPhase(None).phase("idle"):
        pass


def test_a_phase_closes_when_its_work_fails(machine: Machine) -> None:
    book = JoulesByPhase(machine.rapl(idle_w=0))

    def fail() -> None:
        with book.phase("train"):
            machine.run(1, 5, {A: 1})
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    machine.run(1, 2, {A: 1})
    booked = {name: figure.joules for name, figure in book.take().items()}
    assert booked == pytest.approx({"train": 5, "other": 2, "idle": 0})


# choice -------------------------------------------------------------------------------------------------------------


@pytest.fixture
def this_machine(machine: Machine) -> Machine:
    """A tree on which this process runs."""
    machine.process(os.getpid())
    return machine


def test_a_sensor_that_reads_is_chosen_before_the_users_watts(this_machine: Machine) -> None:
    meter = choose_meter(None, (3.0, 9.0), this_machine.root)
    assert isinstance(meter, Rapl)
    assert "idle" not in meter.absent_terms  # the user's idle watts tell it apart


def test_a_sensor_that_refuses_is_reported_and_the_users_watts_are_taken(
    this_machine: Machine, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    refuse(monkeypatch, "energy_uj")
    assert isinstance(choose_meter(None, (3.0, 9.0), this_machine.root), WattsModel)
    assert choose_meter(None, None, this_machine.root) is None
    assert "hint: as root" in caplog.text


def test_a_pc_without_sensor_watts_and_profile_is_not_measured(tmp_path: Path) -> None:
    assert choose_meter(None, None, tmp_path) is None
    assert choose_meter(shipped("raspberry-pi-5"), None, tmp_path, found=PI) is None


def test_a_machine_without_sensor_is_modelled_by_its_profiles_watts_of_a_processor(tmp_path: Path) -> None:
    power, processors = shipped("x86-64").power, os.cpu_count() or 1
    meter = choose_meter(shipped("x86-64"), None, tmp_path, found=probe.Machine("x86_64", 64, 2))
    assert isinstance(meter, WattsModel)
    assert f"at {processors * (power.idle_w or 0):g} W idle" in meter.source
    assert "x86-64: " in meter.source
    assert len(meter.source) <= MAX_SOURCE, "agents cut it to that"
    assert meter.spreads["compute"].high > 1.26, "servers differ by more than the stated bound"


def test_a_board_itself_is_modelled_by_its_cpu_time_and_a_machine_that_emulates_it_is_not(tmp_path: Path) -> None:
    board = shipped("raspberry-pi-4b")
    meter = choose_meter(board, None, tmp_path, found=PI)
    assert isinstance(meter, WattsModel)
    assert "3.1 W idle, 6.1 W busy (raspberry-pi-4b: Raspberry Pi documentation" in meter.source
    assert meter.spreads["idle"] == Spread(min(0.74, 2.3 / 3.1), 1.26)
    for other in (replace(PI, arch="x86_64"), replace(PI, cores=2), replace(PI, model="linux,dummy-virt")):
        assert isinstance(choose_meter(board, None, tmp_path, found=other), BoardModel)


def test_a_named_board_is_not_charged_with_another_machines_sensor(this_machine: Machine) -> None:
    assert isinstance(choose_meter(shipped("x86-64"), None, this_machine.root), Rapl)
    meter = choose_meter(shipped("raspberry-pi-4b"), None, this_machine.root)
    assert isinstance(meter, BoardModel)
    assert "Raspberry Pi documentation" in meter.source


@pytest.mark.parametrize("watts", [(5.0, 4.0), (-1.0, 4.0), (1.0, float("inf")), (float("nan"), 4.0)])
def test_watts_that_cannot_be_are_refused(watts: tuple[float, float], tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="--meter-watts"):
        choose_meter(None, watts, tmp_path)
