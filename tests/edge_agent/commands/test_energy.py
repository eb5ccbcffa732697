"""``edge-agent energy`` and ``edge-agent doctor``, on constructed trees and on this machine. No hardware was tried."""

from __future__ import annotations

import contextlib
import io
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path

import pytest

from edge_agent.commands import cli, doctor, energy
from edge_agent.compute.measure_speed import Speed
from edge_agent.device import this_board as agents_board
from fleet_core.base.errors import ConfigError, FleetError, PowerError
from fleet_core.board.device_settings import settings_of
from fleet_core.board.probe import Machine
from fleet_core.power import watts_now
from fleet_core.power.sensors.interface import Reading
from tests.support import boards
from tests.support.waiting import PATIENCE_S

KEY = "ab" * 32
DEVICE = f'# mine\n[device]\nname = "pi-1"\nfleet = "f"\nkey = "{KEY}"\n'


def home_with(tmp_path: Path, more: str = "") -> Path:
    home = tmp_path / "home"
    home.mkdir()
    (home / "device.toml").write_text(DEVICE + more)
    return home


def edge_agent(*arguments: str) -> tuple[int, str, BaseException | None]:
    """(exit code, output, error) of the command; an error has the code of the program."""
    out = io.StringIO()
    with contextlib.redirect_stdout(out):
        try:
            cli.parser().run(arguments)
        except SystemExit as end:
            return int(end.code or 0), out.getvalue(), None
        except FleetError as error:
            return error.exit_code, out.getvalue(), error
    return 0, out.getvalue(), None


# calibrate ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("more", [
    "", "\n[power]\n", "\n[power] # mine\nidle_w = 9\nbusy_w = 9.5\n", '\n[power]\nbusy_w = 7\n\n[serve]\nport = 0\n',
    '\n[board]\nprofile = "raspberry-pi-4b"\n\n[power]\nsensor = "none"\nidle_w = 1.0 # old\n[train]\nenabled = false',
])
def test_calibrating_puts_a_meters_watts_into_device_toml_and_keeps_every_other_line(tmp_path: Path, more: str) -> None:
    home = home_with(tmp_path, more)
    path = home / "device.toml"
    path.chmod(0o600)
    before = settings_of(home)
    code, text, _ = edge_agent("energy", "calibrate", "--meter-watts", "2.5", "6", "--home", str(home))
    assert code == 0
    assert "from your meter" in text
    after = settings_of(home)
    assert (after.power.idle_w, after.power.busy_w, after.power.sensor) == (2.5, 6.0, before.power.sensor)
    assert (after.device, after.train, after.serve, after.board) == (
        before.device, before.train, before.serve, before.board)
    kept = [line for line in (DEVICE + more).splitlines() if not line.startswith(("idle_w", "busy_w"))]
    written = path.read_text().splitlines()
    assert [line for line in written if line in kept and line] == [line for line in kept if line]
    assert path.stat().st_mode & 0o777 == 0o600
    assert sorted(p.name for p in home.iterdir()) == ["device.toml"]
    assert agents_board.watts_of(home, after) == (2.5, 6.0)


@pytest.mark.parametrize("more", ["power.idle_w = 1.0\n", "\n[\"power\"]\nidle_w = 1.0\n"])
def test_a_device_toml_that_cannot_be_edited_is_left_unchanged(tmp_path: Path, more: str) -> None:
    home = home_with(tmp_path)
    path = home / "device.toml"
    path.write_text(more + DEVICE if more.startswith("power") else DEVICE + more)
    before = path.read_bytes()
    with pytest.raises(ConfigError, match="by hand"):
        energy.calibrate(home, 1.0, 2.0)
    assert path.read_bytes() == before


@pytest.mark.parametrize("watts", [(5.0, 4.0), (-1.0, 4.0), (float("nan"), 4.0), (1.0, float("inf"))])
def test_impossible_watts_are_refused(tmp_path: Path, watts: tuple[float, float]) -> None:
    home = home_with(tmp_path)
    before = (home / "device.toml").read_bytes()
    with pytest.raises(ConfigError, match="--meter-watts"):
        energy.calibrate(home, *watts)
    assert (home / "device.toml").read_bytes() == before


def test_calibrating_without_a_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="there is no device here"):
        energy.calibrate(tmp_path, 1.0, 2.0)


# watts now ------------------------------------------------------------------------------------------------------------


def test_watts_of_every_source_are_averaged_by_time_and_one_that_breaks_says_why() -> None:
    now, said = [0.0], [7.0, 2.0, 4.0, 4.0, 4.0]
    lines: list[str] = []

    def breaks() -> Reading:
        if now[0] > 0.5:
            raise PowerError("broke")
        return Reading(1.0)

    found = watts_now.Available((watts_now.Source("a", True, "", lambda: Reading(said.pop(0), {"r": 1.0})),
                        watts_now.Source("b", True, "", breaks)), {"c": "is not there"}, ())

    def sleep(seconds: float) -> None:
        now[0] += seconds

    (tally,), absent = energy.read_all(found, 3.0, log=lines.append, clock=lambda: now[0], sleep=sleep)
    assert tally.watts == [2.0, 4.0, 4.0, 4.0], "the first reading is left out"
    assert tally.mean_w == pytest.approx((0.75 * 3 + 1.5 * 4) / 2.25)
    assert absent == {"b": "broke", "c": "is not there"}
    assert lines[0] == "a: 2.00 W"


def test_energy_without_a_source_of_watts_gives_a_hint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watts_now, "sources", lambda *_: watts_now.Available((), {"model": "no watts"}, ()))
    _, _, error = edge_agent("energy", "--seconds", "0.1", "--home", str(tmp_path))
    assert isinstance(error, PowerError)
    assert "calibrate" in str(error)
    code, text, _ = edge_agent("energy", "--seconds", "0.1", "--home", str(tmp_path), "--json")
    assert code == 0
    assert json.loads(text)["sources"] == []
    assert json.loads(text)["absent"] == {"model": "no watts"}


def test_the_users_watts_are_shown_as_modelled(tmp_path: Path) -> None:
    home = home_with(tmp_path, "[power]\nidle_w = 2.0\nbusy_w = 6.0\n")
    code, text, _ = edge_agent("energy", "--seconds", "0.1", "--home", str(home), "--json")
    assert code == 0
    (source,) = (s for s in json.loads(text)["sources"] if "--meter-watts" in s["source"])
    assert not source["measured"]
    assert 2.0 <= source["watts"]["least"] <= source["watts"]["mean"] <= source["watts"]["most"]
    assert source["readings"] >= 3


def test_calibrating_the_radio_keeps_the_watts_and_replaces_the_default(tmp_path: Path) -> None:
    home = home_with(tmp_path, '[power]\nidle_w = 2.0\nbusy_w = 6.0\n\n[radio]\nkind = "wifi"\n')
    assert "Huang" in agents_board.radio_of(home, settings_of(home)).source
    code, text, _ = edge_agent("energy", "calibrate", "--radio-j-per-byte", "3e-6", "--home", str(home))
    assert code == 0
    assert "3e-06 J per byte, from your meter" in text
    after = settings_of(home)
    assert (after.power.idle_w, after.radio.kind, after.radio.j_per_byte) == (2.0, "wifi", 3e-6)
    assert agents_board.radio_of(home, after).joules(1e6, 0) == pytest.approx(3)


@pytest.mark.parametrize("arguments", [(), ("--radio-j-per-byte", "2")])
def test_calibrating_nothing_or_an_impossible_radio_is_refused(tmp_path: Path, arguments: tuple[str, ...]) -> None:
    home = home_with(tmp_path)
    code, _, error = edge_agent("energy", "calibrate", *arguments, "--home", str(home))
    assert code == 2
    assert isinstance(error, ConfigError)
    assert (home / "device.toml").read_text() == DEVICE


def test_a_broker_on_this_machine_is_reached_without_a_radio_unless_device_toml_says_so(tmp_path: Path) -> None:
    home = home_with(tmp_path)
    assert agents_board.radio_of(home, settings_of(home)).absent == "none: the broker is on this machine"
    (home / "device.toml").write_text(DEVICE + '[radio]\nkind = "lte"\n')
    assert agents_board.radio_of(home, settings_of(home)).source.startswith("LTE")


# doctor ---------------------------------------------------------------------------------------------------------------

FOUND = Machine("aarch64", 64, 6, 7620, "2.35", "3.10.12", packages={"torch": "2.10.0", "onnxruntime": "1.23.2"})
FOUR = replace(FOUND, packages={"torch": "2.9.1", "onnxruntime": "1.23.2"})


@pytest.fixture
def on_orin(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("fleet_core.board.probe.machine", lambda root: FOUND)


@pytest.mark.usefixtures("on_orin")
def test_a_board_that_fits_its_profile_has_no_complaints(tmp_path: Path) -> None:
    home = home_with(tmp_path, '[board]\nprofile = "jetson-orin-nano"\n')
    boards.orin(tmp_path, {"1-0040": {"VDD_IN": (5000, 1000)}})
    seen = doctor.examine(home, None, tmp_path)
    assert seen.complaints == ()
    assert seen.notes == ()
    assert seen.sensor == "INA3221 VDD_IN: 5.00 W"
    sides = {what: (profile, here) for what, profile, here in doctor.rows(seen)}
    assert sides["glibc"] == ("2.28 or later", "2.35")
    assert sides["torch"] == ("2.10.0", "2.10.0")
    assert sides["training"] == ("yes", "on, engine torch")


@pytest.mark.usefixtures("on_orin")
def test_a_sensor_that_does_not_read_is_wrong_and_the_hint_is_kept(tmp_path: Path) -> None:
    home = home_with(tmp_path, '[board]\nprofile = "jetson-orin-nano"\n')
    (complaint,) = doctor.examine(home, None, tmp_path).complaints
    assert complaint.what == "sensor"
    assert complaint.hint == "is this a Jetson with NVIDIA's kernel?"


def test_what_is_wrong_is_printed_with_hints_and_exit_code_1(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet_core.board.probe.machine", lambda root: FOUR)
    home = home_with(tmp_path, '[board]\nprofile = "raspberry-pi-4b"\n[train]\nthreads = 9\n')
    code, text, _ = edge_agent("doctor", "--home", str(home))
    assert code == 1
    assert "wrong: cores: 6 instead of 4\n  hint: " in text
    assert "wrong: threads: 9 for 6 cores" in text
    code, text, _ = edge_agent("doctor", "--home", str(home), "--json")
    result = json.loads(text)
    assert code == 1
    assert [one["what"] for one in result["wrong"]] == ["cores", "threads"]
    assert result["profile"]["name"] == "raspberry-pi-4b"
    assert result["found"]["memory_mib"] == 7620
    assert result["training"]["train"] is True


@pytest.mark.usefixtures("on_orin")
def test_measuring_keeps_flop_per_second_in_the_devices_home_and_the_next_call_shows_them(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    speed = Speed("2026-01-02", 4, {"64": 3e9}, 2e9)
    monkeypatch.setattr("edge_agent.compute.measure_speed.measure", lambda: speed)
    home = home_with(tmp_path, "[train]\nenabled = false\n")
    code, text, _ = edge_agent("doctor", "--measure", "--home", str(home), "--json")
    assert code == 0
    assert json.loads(text)["speed"]["flop_per_s"] == 2e9
    assert json.loads(text)["speed"]["source"].startswith("measured here, on 2026-01-02")
    code, text, _ = edge_agent("doctor", "--home", str(home))
    assert "2e+09 (measured here, on 2026-01-02" in text


@pytest.mark.usefixtures("on_orin")
def test_measuring_without_a_device_keeps_nothing_and_gives_the_lines_of_a_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("edge_agent.compute.measure_speed.measure", lambda: Speed("2026-01-02", 4, {"64": 3e9}))
    _, text, _ = edge_agent("doctor", "--measure", "--home", str(tmp_path), "--json")
    assert list(tmp_path.iterdir()) == []
    note = json.loads(text)["notes"][-1]
    assert note.startswith("FLOP/s are not kept without a device.toml")
    assert "[compute]\neffective_flop_per_s = 3e+09\nsource = \"measured here, on 2026-01-02" in note


@pytest.mark.parametrize(("program", "expected"), [
    ("import os, signal; os.kill(os.getpid(), signal.SIGILL)",
     "2.10.0 is ended by SIGILL: this processor lacks instructions that it uses"),
    ("raise ImportError('no libgomp')", "2.10.0 does not run: ImportError: no libgomp"),
    ("", None),
])
def test_a_library_that_dies_on_this_processor_is_found_in_a_child(program: str, expected: str | None) -> None:
    probes = {"torch": program, "onnxruntime": "raise SystemExit(1)"}
    told = doctor.failing({"torch": "2.10.0"}, probes)
    assert [complaint.problem for complaint in told] == ([] if expected is None else [expected])


def test_the_libraries_that_are_here_run() -> None:
    assert doctor.failing({"onnxruntime": "this one"}) == ()


@pytest.mark.usefixtures("on_orin")
def test_without_a_device_or_a_profile_it_is_noted_and_not_wrong(tmp_path: Path) -> None:
    seen = doctor.examine(tmp_path, None, tmp_path)
    assert seen.complaints == ()
    assert [("no device.toml" in note, "no profile" in note) for note in seen.notes] == [(True, False), (False, True)]


def test_a_profile_may_be_a_file_beside_device_toml(tmp_path: Path) -> None:
    home = home_with(tmp_path, '[board]\nprofile = "mine.toml"\n')
    (home / "mine.toml").write_text('name = "mine"\ntitle = "Mine"\narch = "aarch64"\n[can]\ntrain = false\n')
    board = agents_board.profile_of(home, settings_of(home))
    assert board is not None
    assert board.title == "Mine"
    assert agents_board.limits_of(home, settings_of(home)).train is False


def test_an_agent_says_at_its_start_what_differs_from_the_profile(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("fleet_core.board.probe.machine", lambda: FOUR)
    home = home_with(tmp_path, '[board]\nprofile = "raspberry-pi-4b"\n')
    assert agents_board.remarks(home, settings_of(home)) == ["cores: 6 instead of 4"]


@pytest.mark.parametrize(("more", "expected"), [
    ({"sensor": '"pmci"'}, "device.toml:8: power.sensor: unknown value 'pmci'"),
    ({"chips": '"x"'}, "did you mean 'chip'"),
])
def test_a_sensor_that_device_toml_misspells_is_refused_with_a_suggestion(
    tmp_path: Path, more: Mapping[str, str], expected: str
) -> None:
    lines = "\n".join(f"{key} = {value}" for key, value in more.items())
    with pytest.raises(ConfigError, match=expected.replace("?", r"\?")):
        settings_of(home_with(tmp_path, f"\n[power]\n{lines}\n"))


def test_neither_command_imports_torch_or_onnxruntime(tmp_path: Path) -> None:
    program = ("import sys, edge_agent.commands.cli, edge_agent.commands.doctor, edge_agent.commands.energy; "
               "print([m for m in ('torch', 'onnxruntime', 'onnx') if m in sys.modules])")
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=PATIENCE_S
    )
    assert done.stdout.strip() == "[]"
