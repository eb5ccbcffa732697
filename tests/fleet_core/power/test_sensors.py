"""Power sensors on constructed file trees and outputs (``tests/support/boards.py``), and joules from their watts. No
hardware was tried; clocks are numbers."""

from __future__ import annotations

import contextlib
import logging
import os
import threading
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from edge_agent.device.agent_costs import AgentCosts
from fleet_core.base.errors import PowerError
from fleet_core.board import catalogue
from fleet_core.board.profile import Power, Profile, Radio
from fleet_core.power.background_sampling import pause_s, repeating
from fleet_core.power.choose_meter import choose_meter, sensor_of
from fleet_core.power.energy_model import BoardModel, WattsModel
from fleet_core.power.joules_by_phase import JoulesByPhase
from fleet_core.power.radio import radio_of
from fleet_core.power.rapl import Rapl
from fleet_core.power.sampled_meter import GAP_S, LONGEST_REUSE_S, Sampled, SampledCounter
from fleet_core.power.sensors import hwmon, ina3221, pmic
from fleet_core.power.sensors.interface import Reading
from fleet_core.power.watts_now import sources
from tests.fleet_core.power.test_power import A, B, Machine, joules
from tests.support import boards
from tests.support.waiting import PATIENCE_S

ORIN = {"VDD_IN": (5000, 1200), "VDD_CPU_GPU_CV": (5000, 300), "VDD_SOC": (5000, 250)}
AGX = {
    "1-0040": {"VDD_GPU_SOC": (12_000, 500), "VDD_CPU_CV": (12_000, 250), "VIN_SYS_5V0": (5000, 600)},
    "1-0041": {"NC": (0, 0), "VDDQ_VDD2_1V8AO": (5000, 100)},
}

# PMIC -----------------------------------------------------------------------------------------------------------------


def test_the_pmics_rails_are_volts_times_amperes_and_volts_alone_are_no_rail() -> None:
    rails = pmic.rails_of(boards.PMIC)
    assert rails == pytest.approx({"3V7_WL_SW": 0.37, "3V3_SYS": 0.66, "1V8_SYS": 0.9, "VDD_CORE": 1.5})


def test_the_pi_5s_profile_corrects_the_sum_to_the_input_and_says_so(tmp_path: Path) -> None:
    boards.vcgencmd(tmp_path)
    sensor = sensor_of(catalogue.load("raspberry-pi-5").power, tmp_path)
    assert sensor.read().watts == pytest.approx(1.1451 * boards.PMIC_W + 0.5879)
    assert sensor.source == "PMIC, sum of V·A · 1.1451 + 0.5879 W (a fit)"


@pytest.mark.parametrize("text", [
    "", 'error=1 error_msg="Command not registered"', "EXT5V_V volt(24)=5.1V", "VDD_A current(0)=-1A\nVDD_V volt(1)=1V",
    "VDD_A current(0)=1e9A\nVDD_V volt(1)=1V", "VDD_A current(0)=1A", "\x00" * 100,
])
def test_what_is_no_reading_of_the_pmic_is_refused(text: str) -> None:
    with pytest.raises(PowerError, match="expected volts and amperes of rails"):
        pmic.rails_of(text)


@given(st.text(max_size=300))
def test_no_text_makes_the_pmics_reader_fail_in_another_way(text: str) -> None:
    with contextlib.suppress(PowerError):
        assert all(watts >= 0 for watts in pmic.rails_of(text).values())


def test_a_pmic_that_may_not_be_asked_says_which_group_helps(tmp_path: Path) -> None:
    with pytest.raises(PowerError, match="does not exist"):
        pmic.sensor(1, 0, tmp_path)
    boards.vcgencmd(tmp_path, "VCHI initialization failed", code=255)
    with pytest.raises(PowerError, match=r"VCHI initialization failed\nhint: .*group video"):
        pmic.sensor(1, 0, tmp_path)


# INA3221 --------------------------------------------------------------------------------------------------------------


def test_vdd_in_is_the_whole_orin_and_no_rail_is_added_to_it(tmp_path: Path) -> None:
    boards.orin(tmp_path, {"1-0040": ORIN})
    for power in (Power("ina3221"), catalogue.load("jetson-orin-nano").power):
        sensor = sensor_of(power, tmp_path)
        assert sensor.read() == Reading(6.0, {"VDD_IN": 6.0})
        assert (sensor.source, sensor.misses) == ("INA3221 VDD_IN", "")
    assert ina3221.sensor((), tmp_path).read_all().rails == pytest.approx(
        {"VDD_IN": 6.0, "VDD_CPU_GPU_CV": 1.5, "VDD_SOC": 1.25})


def test_the_number_of_a_channel_does_not_matter(tmp_path: Path) -> None:
    boards.orin(tmp_path, {"1-0040": dict(reversed(ORIN.items()))})
    assert ina3221.sensor((), tmp_path).read().watts == pytest.approx(6.0)


def test_an_agxs_rails_are_summed_over_both_chips_without_nc_and_the_carrier_is_said_to_be_missing(
    tmp_path: Path,
) -> None:
    boards.orin(tmp_path, AGX)
    sensor = ina3221.sensor((), tmp_path)
    assert sensor.read().watts == pytest.approx(6 + 3 + 3 + 0.5)
    assert "the carrier board" in sensor.misses
    meter = Sampled(sensor, root=Machine(tmp_path).root, pid=A)
    assert "the carrier board" in meter.absent_terms["board"]


def test_a_channel_that_is_shut_off_is_left_out(tmp_path: Path) -> None:
    (folder,) = boards.orin(tmp_path, {"1-0040": {"A": (1000, 1000), "B": (1000, 2000)}})
    (folder / "in1_enable").write_text("0\n")
    assert ina3221.sensor((), tmp_path).read().rails == {"B": 2.0}


@pytest.mark.parametrize("names", [(), ("POM_5V_IN", "POM_5V_GPU", "POM_5V_CPU")])
def test_the_nanos_first_channel_is_its_input_in_milliwatts(tmp_path: Path, names: tuple[str, ...]) -> None:
    boards.nano(tmp_path, 2345, 400, 900, names=names)
    for power in (Power("ina3221"), catalogue.load("jetson-nano").power):
        reading = sensor_of(power, tmp_path).read()
        assert reading.watts == pytest.approx(2.345)
        assert reading.rails == pytest.approx({"POM_5V_IN": 2.345})


def test_the_nanos_input_is_found_by_its_name_where_there_is_one(tmp_path: Path) -> None:
    boards.nano(tmp_path, 400, 2345, names=("POM_5V_GPU", "POM_5V_IN"))
    assert ina3221.sensor((), tmp_path).read().watts == pytest.approx(2.345)


def test_a_rail_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    boards.orin(tmp_path, {"1-0040": ORIN})
    with pytest.raises(PowerError, match=r"no rails of INA3221 are labelled 'VDD_INN' \(did you mean 'VDD_IN'\?\)"):
        ina3221.sensor(("VDD_INN",), tmp_path)
    with pytest.raises(PowerError, match="is this a Jetson"):
        ina3221.sensor((), tmp_path / "elsewhere")


# hwmon ----------------------------------------------------------------------------------------------------------------


def test_an_ina219_is_found_by_name_whatever_its_number_and_reads_microwatts(tmp_path: Path) -> None:
    boards.hwmon(tmp_path, 0, "cpu_thermal", temp1_input=45_000)
    boards.ina219(tmp_path, 7, 3_250_000)
    sensor = sensor_of(Power("hwmon", "ina219"), tmp_path)
    assert sensor.read().watts == pytest.approx(3.25)
    assert sensor.source == "ina219"
    assert hwmon.list_meters(tmp_path) == ["ina219: ina219"]


def test_a_meter_without_a_power_file_is_volts_times_amperes(tmp_path: Path) -> None:
    boards.hwmon(tmp_path, 1, "ina226", in1_input=12_000, curr1_input=250)
    assert hwmon.find_meter("ina226", (), tmp_path).read().watts == pytest.approx(3.0)


def test_two_meters_of_one_name_are_told_apart_by_label_and_never_by_number(tmp_path: Path) -> None:
    boards.ina219(tmp_path, 2, 1_000_000, label="board")
    boards.ina219(tmp_path, 3, 7_000_000, label="fan")
    with pytest.raises(PowerError, match=r"ina219 has 2 channels: board, fan; expected one\nhint: .*rails"):
        hwmon.find_meter("ina219", (), tmp_path)
    assert hwmon.find_meter("ina219", ("board",), tmp_path).read().watts == pytest.approx(1.0)
    assert hwmon.find_meter("ina219", ("fan", "board"), tmp_path).read().watts == pytest.approx(8.0)


def test_two_rails_with_one_label_are_not_guessed_between(tmp_path: Path) -> None:
    boards.ina219(tmp_path, 2, 1_000_000, label="board")
    boards.ina219(tmp_path, 3, 7_000_000, label="board")
    with pytest.raises(PowerError, match="2 rails of ina219 are labelled 'board'"):
        hwmon.find_meter("ina219", ("board",), tmp_path)


def test_a_channel_that_is_not_connected_is_no_rail(tmp_path: Path) -> None:
    boards.hwmon(tmp_path, 1, "pac1934", power1_input=5, power1_label="NC", power2_input=2_000_000, power2_label="5V")
    assert hwmon.find_meter("pac1934", (), tmp_path).read().rails == {"5V": 2.0}


def test_a_meter_that_is_not_there_is_refused_with_those_that_are(tmp_path: Path) -> None:
    boards.ina219(tmp_path, 2, 1_000_000)
    with pytest.raises(PowerError, match=r"did you mean 'ina219'\?.*expected one of ina219"):
        hwmon.find_meter("ina29", (), tmp_path)


@pytest.mark.parametrize("text", ["", "watts", "1.5", "9" * 30, "\x00\xff"])
def test_a_file_that_holds_no_number_is_refused(tmp_path: Path, text: str) -> None:
    folder = boards.ina219(tmp_path, 2, 1)
    (folder / "power1_input").write_text(text, encoding="latin-1")
    with pytest.raises(PowerError, match="expected a whole number"):
        sensor_of(Power("hwmon", "ina219"), tmp_path)


def test_a_current_that_flows_back_is_no_negative_power(tmp_path: Path) -> None:
    boards.hwmon(tmp_path, 1, "ina226", in1_input=12_000, curr1_input=-250)
    assert hwmon.find_meter("ina226", (), tmp_path).read().watts == 0


# Joules from watts ----------------------------------------------------------------------------------------------------


@dataclass
class Dial:
    """A sensor whose value the test sets."""

    watts: float = 0.0
    name: str = "dial"
    source: str = "a dial"
    misses: str = ""
    reads: int = field(default=0)
    broken: bool = False

    def read(self) -> Reading:
        self.reads += 1
        if self.broken:
            raise PowerError("broke")
        return Reading(self.watts)


def meter(machine: Machine, dial: Dial, idle_w: float | None = 0.0, pid: int = A) -> Sampled:
    return Sampled(dial, idle_w, root=machine.root, pid=pid, clock=machine.clock)


@pytest.fixture
def machine(tmp_path: Path) -> Machine:
    return Machine(tmp_path)


@pytest.fixture(autouse=True)
def free(monkeypatch: pytest.MonkeyPatch) -> None:
    """Reading costs nothing, so every settling reads."""
    monkeypatch.setattr("fleet_core.power.sampled_meter.cpu_s", lambda: 0.0)


def test_joules_are_the_trapezoid_between_readings(machine: Machine) -> None:
    dial = Dial(2.0)
    sampled = meter(machine, dial)
    dial.watts = 4.0
    machine.run(2, 0, {A: 2})
    assert joules(sampled.interval()) == pytest.approx((6, 0))
    dial.watts = 0.0
    machine.run(1, 0, {A: 1})
    assert joules(sampled.interval()) == pytest.approx((2, 0))


def test_watts_above_idle_go_by_the_share_of_cpu_time_and_idle_is_the_devices(machine: Machine) -> None:
    sampled = meter(machine, Dial(5.0), idle_w=2.0)
    machine.run(4, 0, {A: 3}, others_cpu_s=1)
    assert joules(sampled.interval()) == pytest.approx((3 * 4 * 0.75, 8))


def test_a_gap_is_not_joined_and_its_seconds_are_unknown(machine: Machine) -> None:
    sampled = meter(machine, Dial(5.0), idle_w=2.0)
    machine.run(GAP_S + 1, 0, {A: 3})
    spent = sampled.interval()
    assert (spent.active_j, spent.idle_j) == (0, 0)
    assert spent.unknown_s == pytest.approx(GAP_S + 1)
    machine.run(GAP_S, 0, {A: 3})
    spent = sampled.interval()
    assert spent.active_j == pytest.approx(3 * GAP_S)
    assert spent.unknown_s == 0


def test_a_gap_is_named_in_the_figures_of_the_phases_in_which_it_fell_and_in_the_total(machine: Machine) -> None:
    book = JoulesByPhase(meter(machine, Dial(5.0), idle_w=1.0))
    with book.phase("serve"):
        machine.run(2, 0, {A: 1})
    with book.phase("train"):
        machine.run(2, 0, {A: 1})
        book.update()
        machine.run(60, 0, {A: 1})
    figures = book.figures()
    assert figures["train"].joules == pytest.approx(8)
    gap = "gap: 60.0 s without readings are not included"
    assert gap in figures["train"].absent_terms
    assert gap in figures["idle"].absent_terms
    assert gap not in figures["serve"].absent_terms
    total = book.total()
    assert total is not None
    assert total.measured
    assert gap in total.absent_terms
    book.take()
    machine.run(1, 0, {A: 1})
    book.update()
    assert gap not in book.figures()["idle"].absent_terms


def test_bytes_are_counted_without_a_reading(machine: Machine) -> None:
    dial = Dial(5.0)
    accounts = AgentCosts(meter(machine, dial))
    reads = dial.reads
    for _ in range(50):
        accounts.payload("model_down", 61_440)
    assert dial.reads == reads


def test_bytes_that_a_model_knows_the_joules_of_are_booked_to_the_radio() -> None:
    book = JoulesByPhase(None, radio_of("wifi", Profile("b", "B", "aarch64", radio=Radio(2e-6, "s"))))
    book.moved(up_bytes=400_000, down_bytes=600_000)
    assert book.figures()["radio"].joules == pytest.approx(2)


def test_two_processes_on_one_sensor_share_what_it_measured(machine: Machine) -> None:
    dial = Dial(10.0)
    a, b = meter(machine, dial, pid=A), meter(machine, dial, pid=B)
    machine.run(1, 0, {A: 1, B: 1})
    first = [joules(one.interval())[0] for one in (a, b)]
    machine.run(2, 0, {A: 0.5, B: 1.5})
    later = [joules(one.interval())[0] for one in (b, a)]
    assert first == pytest.approx([5, 5])
    assert later == pytest.approx([15, 5])


@given(st.lists(st.tuples(st.floats(0, 8), st.floats(0, 50), st.sampled_from("AB")), min_size=1, max_size=10))
def test_the_parts_of_a_sensor_never_exceed_it(steps: list[tuple[float, float, str]]) -> None:
    samples = SampledCounter(Dial(), lambda: 0.0, lambda: 0.0)
    at_s, before, total, most = 0.0, {"at_us": 0, "uw": 0}, 0.0, 0.0
    for seconds, watts, _ in steps:
        at_s += seconds
        now = {"at_us": round(at_s * 1e6), "uw": round(watts * 1e6)}
        total += samples.advance_j(before, now)
        most += max(watts, before["uw"] / 1e6) * (now["at_us"] - before["at_us"]) / 1e6
        before = now
    assert 0 <= total <= most + 1e-6


def test_a_costly_reading_is_kept_so_long_that_it_stays_within_its_share_of_a_core() -> None:
    now, cpu = [0.0], [0.0]
    dial = Dial(3.0)

    class Costly(Dial):
        def read(self) -> Reading:
            cpu[0] += 0.004
            return dial.read()

    samples = SampledCounter(Costly(), lambda: now[0], lambda: cpu[0])
    for tick in range(1000):
        now[0] = tick / 100
        assert samples.read_uj() == {"at_us": round(now[0] * 1e6), "uw": 3_000_000}
    assert dial.reads == 10, "one a second"
    assert cpu[0] / now[0] <= 0.005


def test_a_reading_never_holds_longer_than_it_may() -> None:
    now, cpu = [0.0], [0.0]

    class Slow(Dial):
        def read(self) -> Reading:
            cpu[0] += 1.0
            return super().read()

    slow = Slow()
    samples = SampledCounter(slow, lambda: now[0], lambda: cpu[0])
    samples.read_uj()
    now[0] = LONGEST_REUSE_S
    samples.read_uj()
    assert slow.reads == 2


def test_a_sensor_that_breaks_stops_no_work(machine: Machine) -> None:
    dial = Dial(3.0)
    book = JoulesByPhase(meter(machine, dial))
    machine.run(1, 0, {A: 1})
    book.update()
    dial.broken = True
    with book.phase("train"):
        machine.run(1, 0, {A: 1})
    assert any("broke" in reason for reason in book.figures()["other"].absent_terms)


def test_settling_continues_in_a_thread_until_the_block_ends() -> None:
    twice, calls = threading.Event(), []

    def settle() -> None:
        calls.append(threading.current_thread().name)
        if len(calls) == 2:
            twice.set()

    with repeating(settle, period_s=0.001):
        assert twice.wait(PATIENCE_S)
    assert set(calls) == {"power"}
    assert "power" not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(("cost_s", "expected_s"), [(0.0, 1.0), (0.004, 1.0), (0.008, 2.0), (1.0, GAP_S / 2)])
def test_settling_that_costs_more_comes_less_often_but_leaves_no_gap(cost_s: float, expected_s: float) -> None:
    assert pause_s(cost_s) == pytest.approx(expected_s)


# The choice -----------------------------------------------------------------------------------------------------------


@pytest.fixture
def this_machine(machine: Machine) -> Machine:
    machine.process(os.getpid())
    return machine


def test_the_profiles_sensor_is_chosen_where_it_reads(this_machine: Machine) -> None:
    boards.orin(this_machine.root, {"1-0040": ORIN})
    meter = choose_meter(catalogue.load("jetson-orin-nano"), None, this_machine.root)
    assert isinstance(meter, Sampled)
    assert meter.source == "INA3221 VDD_IN (idle draw included)"
    assert set(meter.absent_terms) == {"idle", "radio"}
    with_idle = choose_meter(catalogue.load("jetson-orin-nano"), (2.0, 9.0), this_machine.root)
    assert isinstance(with_idle, Sampled)
    assert set(with_idle.absent_terms) == {"radio"}


def test_device_toml_overrides_the_profiles_sensor(this_machine: Machine) -> None:
    boards.ina219(this_machine.root, 2, 3_000_000)
    board = catalogue.load("raspberry-pi-4b")
    assert isinstance(choose_meter(board, None, this_machine.root, Power("hwmon", "ina219")), Sampled)
    assert isinstance(choose_meter(board, None, this_machine.root), BoardModel)
    assert isinstance(choose_meter(None, None, this_machine.root, Power("rapl")), Rapl)
    assert choose_meter(None, None, this_machine.root, Power("none")) is None


def test_a_sensor_that_does_not_read_is_reported_and_the_model_is_taken(
    this_machine: Machine, caplog: pytest.LogCaptureFixture
) -> None:
    board = catalogue.load("raspberry-pi-5")
    with caplog.at_level(logging.WARNING):
        assert isinstance(choose_meter(board, (2.5, 8.0), this_machine.root), WattsModel)
        assert choose_meter(board, None, this_machine.root) is None, "its table has no watts"
    assert "energy is not measured with PMIC: " in caplog.text
    assert "hint: it is part of Raspberry Pi OS" in caplog.text


def test_idle_watts_of_a_profile_without_a_source_tell_nothing_apart(this_machine: Machine) -> None:
    boards.ina219(this_machine.root, 2, 3_000_000)
    board = Profile("b", "B", "aarch64", power=Power("hwmon", "ina219", idle_w=2.0))
    meter = choose_meter(board, None, this_machine.root)
    assert meter is not None
    assert "idle" in meter.absent_terms


# Live -----------------------------------------------------------------------------------------------------------------


def test_every_source_of_watts_is_listed_and_what_is_missing_says_why(machine: Machine) -> None:
    boards.orin(machine.root, {"1-0040": ORIN})
    boards.ina219(machine.root, 2, 3_000_000)
    seen = sources(catalogue.load("jetson-orin-nano"), None, None, machine.root, machine.clock)
    assert [(source.name, source.measured) for source in seen.sources] == [
        ("INA3221 VDD_IN", True), ("RAPL package-0", True)]
    assert "no cited idle watts" in seen.absent["model"]
    assert seen.meters == ("ina219: ina219",)
    ina, rapl = seen.sources
    assert ina.read().rails.keys() == ORIN.keys()
    machine.run(4, 10, {A: 1})
    assert rapl.read().watts == pytest.approx(2.5)


def test_the_users_watts_follow_how_busy_the_processors_are(machine: Machine, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "cpu_count", lambda: 4)
    (source,) = (s for s in sources(None, None, (2.0, 6.0), machine.root, machine.clock).sources if not s.measured)
    machine.run(10, 0, {A: 20})
    assert source.read().watts == pytest.approx(4.0)
