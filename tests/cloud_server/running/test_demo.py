"""The whole path as real processes: a demo from nothing to its report, also stopped, killed and resumed; and the
README's walkthrough, command by command."""

from __future__ import annotations

import json
import os
import platform
import re
import shutil
import signal
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx2
import numpy as np
import pytest

from cloud_server.commands import cli
from cloud_server.identity.create_fleet import create_fleet
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device, Evaluation
from cloud_server.records.fleet_folder import Fleet
from cloud_server.results.result import validate
from cloud_server.running.demo_setup import Options, demo_fleet_toml, write_devices
from fleet_core.data.samples import load
from tests.support.programs import (
    Program,
    Programs,
    alive,
    clean_environ,
    closed_rounds,
    command_of,
    descendants,
    edge_agent,
    metafleet,
    run_to_end,
    write_samples,
)
from tests.support.waiting import PATIENCE_S

pytestmark = pytest.mark.slow

FEW = ("--devices", 3, "--new-devices", 1)
COUNTERS = ("payload_bytes", "mqtt_bytes", "wire_bytes")


@dataclass(frozen=True)
class Run:
    """A demo that ended."""

    folder: Path
    done: subprocess.CompletedProcess[str]

    @property
    def result(self) -> dict[str, Any]:
        return json.loads((self.folder / "result.json").read_text())


@pytest.fixture(scope="module")
def demo(tmp_path_factory: pytest.TempPathFactory) -> Run:
    """Three devices and a new one, two rounds, no baseline, on a private broker."""
    folder = tmp_path_factory.mktemp("demo")
    data, out = write_samples(folder / "data.npz"), folder / "run"
    done = run_to_end(metafleet("demo", *FEW, "--rounds", 2, "--no-baseline", "--data", data, "--out", out))
    assert done.returncode == 0, done.stderr
    return Run(out, done)


# A demo --------------------------------------------------------------------------------------------------------------


def test_a_demo_ends_with_a_table_a_valid_result_and_a_page(demo: Run) -> None:
    assert validate(demo.result) == []
    assert [row["round"] for row in demo.result["rounds"]] == [1, 2]
    assert [(row["participants"], row["asked"]) for row in demo.result["rounds"]] == [(3, 3), (3, 3)]
    assert {row["device"]: row["new"] for row in demo.result["personalization"]} == {
        "d0": False, "d1": False, "d2": False, "d3": True
    }
    assert "d3 (new)" in demo.done.stdout
    assert "round 2/2  3 of 3 devices" in demo.done.stderr
    assert "\x1b" not in demo.done.stdout + demo.done.stderr
    assert Fleet.load(demo.folder / "fleet").config.fleet.enrolment == "listed", "a stranger's message enrols nobody"


BROWSER = """\
#!{python}
import sys, urllib.request
from pathlib import Path
with urllib.request.urlopen(sys.argv[1]) as page:
    Path({seen!r}).write_text(page.read().decode())
"""


def begin(demo: Run, folder: Path, **options: Any) -> list[str]:
    """The command that goes on with a demo of these options in ``folder``, which has got no further than to its graph
    and first weights: those of ``demo``, since another export would give the same."""
    (folder / "fleet").mkdir(parents=True)
    for name in ("graph.safetensors", "weights.safetensors"):
        shutil.copy(demo.folder / "fleet" / name, folder / "fleet" / name)
    note = {**json.loads((demo.folder / "demo.json").read_text()), **options}
    (folder / "demo.json").write_text(json.dumps(note))
    return metafleet("demo", "--devices", note["devices"], "--new-devices", note["new_devices"], "--rounds",
                     note["rounds"], "--data", note["data"], *([] if note["baseline"] else ["--no-baseline"]),
                     "--out", folder)


def test_a_demo_opens_its_console_in_the_browser_of_the_user(demo: Run, programs: Programs, tmp_path: Path) -> None:
    """The browser is a script that keeps the page, and that ends before ``webbrowser.open`` returns."""
    browser, seen, out = tmp_path / "browser", tmp_path / "seen.html", tmp_path / "run"
    browser.write_text(BROWSER.format(python=sys.executable, seen=str(seen)))
    browser.chmod(0o755)
    run = programs.start(
        *begin(demo, out, devices=1, new_devices=0, rounds=2000), "--open",
        environ=clean_environ(BROWSER=f"{browser} %s"),
    )
    run.until(lambda: seen.exists() and seen.read_text().endswith("</html>\n"))
    assert "<title>Metafleet console</title>" in seen.read_text()
    url = next(line for line in run.text().splitlines() if line.startswith("console: ")).removeprefix("console: ")
    run.until(lambda: closed_rounds(out / "fleet"))
    with httpx2.stream("GET", f"{url}events", timeout=PATIENCE_S) as answer:
        event = next(line for line in answer.iter_lines() if line.startswith("data: "))
    told = json.loads(event.removeprefix("data: "))
    assert told["set"]["d/d0"]["board"]
    run.process.terminate()
    assert run.exit_code() == 130
    with pytest.raises(httpx2.ConnectError):
        httpx2.get(url)


def test_the_report_of_a_demo_is_self_contained_and_made_again_by_report(demo: Run, tmp_path: Path) -> None:
    page = (demo.folder / "report.html").read_text()
    assert page.startswith("<!")
    assert re.findall(r"""(?:src|href)\s*=\s*["']?(?!#|data:)([^"'\s>]+)|url\((?!["']?(?:data:|#))""", page) == []
    done = run_to_end(metafleet("report", demo.folder, "--out", tmp_path / "again.html"))
    assert (done.returncode, done.stdout) == (0, f"{tmp_path / 'again.html'}\n")
    assert "d3" in (tmp_path / "again.html").read_text()


def test_the_bytes_of_a_demo_are_counted_three_times(demo: Run) -> None:
    for row in demo.result["rounds"]:
        for way in ("up", "down"):
            payload, mqtt, wire = (row[name][way] for name in COUNTERS)
            assert 0 < payload <= wire
            assert 0 < mqtt <= wire


@pytest.mark.skipif(
    (platform.system(), platform.machine()) != ("Linux", "x86_64"), reason="no other machine's profile is written"
)
def test_the_joules_of_a_demo_have_a_source_and_if_they_are_modelled_a_spread(demo: Run) -> None:
    energy = demo.result["totals"]["energy_j"]
    assert energy["value"] > 0
    assert "train" in energy["by_phase"]
    for part in energy["by_phase"].values():
        measured = part["source"].startswith("measured: RAPL")
        assert measured or "x86-64: other hardware" in part["source"]
        assert measured or part["low"] < part["value"] < part["high"]
    assert demo.result["totals"]["absent_energy"]["radio: none: the broker is on this machine"] == 4
    assert re.search(r"^energy +\d", demo.done.stdout, re.MULTILINE)


def test_a_demo_without_a_baseline_has_no_before(demo: Run) -> None:
    for row in demo.result["personalization"]:
        assert "after" in row
        assert not {"before", "fine_tuned"} & row.keys()


def test_a_device_holds_its_own_samples_and_nobody_elses(demo: Run) -> None:
    for name in ("d0", "d1", "d2", "d3"):
        with np.load(demo.folder / "devices" / name / "samples.npz") as own:
            assert set(own["client"]) == {name}


@pytest.mark.parametrize("device", ["d0", "d3"])
def test_a_device_of_a_demo_answers_and_personalizes_without_torch(demo: Run, tmp_path: Path, device: str) -> None:
    np.save(tmp_path / "one.npy", np.eye(3, 8, dtype=np.float32)[2] * 3)
    home = shutil.copytree(demo.folder / "devices" / device, tmp_path / device)
    for arguments, key, value in (
        (("predict", tmp_path / "one.npy"), "labels", ["c"]),
        (("personalize",), "personalization", "proto"),
        (("status",), "trained_round", 0 if device == "d3" else 2),
    ):
        command = edge_agent(*arguments, "--home", home, "--json")
        done = run_to_end([command[0], "-X", "importtime", *command[1:]])
        assert done.returncode == 0, done.stderr
        assert json.loads(done.stdout)[key] == value
        imported = set(re.findall(r"\| +([\w.]+)$", done.stderr, re.MULTILINE))
        assert "edge_agent.inference.service" in imported
        assert not {"torch", "onnx"} & imported


def test_the_same_command_on_a_finished_run_changes_no_round(demo: Run, tmp_path: Path) -> None:
    out = shutil.copytree(demo.folder, tmp_path / "run")
    data = demo.folder.with_name("data.npz")
    done = run_to_end(metafleet("demo", *FEW, "--rounds", 2, "--no-baseline", "--data", data, "--out", out, "--json"))
    assert done.returncode == 0, done.stderr
    again = json.loads(done.stdout)
    assert [row["loss"] for row in again["rounds"]] == [row["loss"] for row in demo.result["rounds"]]
    other = run_to_end(metafleet("demo", *FEW, "--rounds", 3, "--data", data, "--out", out))
    assert (other.returncode, other.stdout) == (2, "")
    assert "holds a run with other options" in other.stderr


# A demo that is stopped or killed ------------------------------------------------------------------------------------


def started(
    demo: Run, programs: Programs, rounds: int, baseline: bool = False, **environ: str
) -> tuple[Program, list[str], set[int]]:
    """A demo with a closed round, its command, and the ids of all processes that it started."""
    out = programs.folder / "run"
    command = begin(demo, out, rounds=rounds, baseline=baseline)
    program = programs.start(*command, environ=clean_environ(**environ))
    program.until(lambda: closed_rounds(out / "fleet"))
    return program, command, descendants(program.process.pid)


def test_a_demo_that_was_interrupted_leaves_nobody_and_continues_to_its_end(demo: Run, programs: Programs) -> None:
    rounds, out = 16, programs.folder / "run"
    program, command, pids = started(demo, programs, rounds, baseline=True)
    assert len(pids) >= 5, "the broker, the aggregator and three agents"
    program.process.send_signal(signal.SIGINT)
    assert program.exit_code() == 130
    assert alive(pids) == set()
    assert f"the same command with --out {out} continues" in program.text()
    assert "Traceback" not in program.text()
    before = closed_rounds(out / "fleet")
    assert before == list(range(1, len(before) + 1))
    assert len(before) < rounds
    assert not (out / "result.json").exists()

    done = run_to_end([*command, "--json"])
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout)
    assert validate(result) == []
    assert [row["round"] for row in result["rounds"]] == list(range(1, rounds + 1))
    assert {row["participants"] for row in result["rounds"]} == {3}
    check_baseline(result)


def check_baseline(result: dict[str, Any]) -> None:
    """FedAvg as it is and fine-tuned stand before and beside the method's result."""
    assert [row["device"] for row in result["personalization"]] == ["d0", "d1", "d2", "d3"]
    for row in result["personalization"]:
        methods = {stage: row[stage]["method"] for stage in ("before", "fine_tuned", "after")}
        assert methods == {"before": "fedavg", "fine_tuned": "fedavg", "after": "pfldyn-proto"}
        assert row["after"]["accuracy"] > 0.5


def test_a_demo_that_is_killed_takes_its_processes_with_it(demo: Run, programs: Programs) -> None:
    program, _, pids = started(demo, programs, 500)
    program.process.kill()
    witness = programs.start("sleep", "60")  # a process to wait for beside it
    witness.until(lambda: not alive(pids))


def test_a_demo_on_the_embedded_broker_survives_the_death_of_an_agent(demo: Run, programs: Programs) -> None:
    out = programs.folder / "run"
    program, _, pids = started(demo, programs, 15, METAFLEET_BROKER="embedded")
    assert "broker: amqtt at" in program.text()
    (agent,) = (pid for pid in pids if f"--home {out / 'devices' / 'd1'}" in command_of(pid))
    os.kill(agent, signal.SIGKILL)
    assert program.exit_code() == 0, program.text()
    assert "agent d1 ended with exit code -9 and is started again" in program.text()
    assert closed_rounds(out / "fleet") == list(range(1, 16))
    result = json.loads((out / "result.json").read_text())
    assert validate(result) == []
    assert len(result["personalization"]) == 4
    assert alive(pids) == set()


# Tasks without classes ------------------------------------------------------------------------------------------------


def recordings(path: Path, truths: dict[str, Any]) -> Path:
    """Three devices with 60 samples each of 16 features, with these truths in place of classes."""
    x = np.random.default_rng(0).normal(size=(180, 16)).astype(np.float32)
    np.savez(path, x=x, client=np.repeat(["a", "b", "c"], 60), time=np.tile(np.arange(60.0), 3), **truths)
    return path


SPIKED = np.where(np.arange(180) % 5 == 4, "V", "N")
BITS = np.arange(360).reshape(180, 2) % 2 > 0
TASKS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "regression": ({"y": np.arange(180) / 7, "outputs": np.array(["load"])}, {}),
    "multi-label": ({"y": BITS, "labels": np.array(["speech", "music"])}, {}),
    "anomaly": ({"y": SPIKED}, {"normal": "N"}),
    "anomaly without labels": ({}, {"per_day": 5.0}),
}


@pytest.mark.parametrize("name", TASKS)
def test_devices_of_a_demo_have_the_samples_that_its_task_reads(name: str, tmp_path: Path) -> None:
    arrays, asked = TASKS[name]
    data = recordings(tmp_path / "all.npz", arrays)
    options = Options(devices=2, new_devices=1, data=str(data), task=name.split()[0], method="fedavg-meta", **asked)
    made = create_fleet(tmp_path / "fleet", demo_fleet_toml(options), cli._export)
    training, joining = write_devices(options, tmp_path, made)
    assert [home.name for home in (*training, *joining)] == ["a", "b", "c"]
    task = made.config.model.task
    assert task is not None
    assert task.kind == options.task
    own = load(training[1] / "samples.npz", **task.reading)
    np.testing.assert_array_equal(own.x, np.load(data)["x"][60:120])
    wanted = arrays.get("y", np.zeros(180))[60:120]
    truths = wanted == "V" if name == "anomaly" else wanted
    np.testing.assert_array_equal(own.y.reshape(60, -1), np.reshape(truths, (60, -1)))


def test_a_demo_without_classes_shows_the_measure_of_its_task(tmp_path: Path) -> None:
    data, out = recordings(tmp_path / "all.npz", TASKS["multi-label"][0]), tmp_path / "run"
    done = run_to_end(metafleet("demo", "--devices", 2, "--new-devices", 1, "--rounds", 1, "--data", data, "--task",
                                "multi-label", "--out", out))
    assert done.returncode == 0, done.stderr
    assert "no FedAvg baseline: it is computed for classes alone" in done.stderr
    assert "micro-F1" in done.stdout
    assert "micro-F1" in (out / "report.html").read_text()
    result = json.loads((out / "result.json").read_text())
    assert validate(result) == []
    assert result["method"] == "fedavg-meta"
    assert {row["device"] for row in result["personalization"]} == {"a", "b", "c"}


# The README's walkthrough ---------------------------------------------------------------------------------------------


def test_a_users_own_fleet_is_made_by_the_commands_of_the_readme(programs: Programs) -> None:
    fleet, data = programs.folder / "greenhouse", write_samples(programs.folder / "samples.npz")
    done = run_to_end(metafleet("init", fleet, "--data", data, "--rounds", 2, "--no-train-graph", "--no-trial"))
    assert done.returncode == 0, done.stderr
    server = programs.start(*metafleet("server", "start", fleet, "--port", 0))
    server.wait_for("broker: ")
    broker = {"METAFLEET_BROKER": re.findall(r"mqtt://\S+", server.text())[0]}
    for name in ("d0", "d1"):
        home = programs.folder / name
        done = run_to_end(metafleet("devices", "enroll", fleet, name, "--to", home), environ=broker)
        assert done.returncode == 0, done.stderr
        with np.load(data) as everything:
            mine = everything["client"] == name
            np.savez(home / "samples.npz", x=everything["x"][mine], y=everything["y"][mine])
        agent = programs.start(*edge_agent("run", "--home", home))
        agent.wait_for(f"{name} is on")
    server.wait_for("all 2 rounds are closed")
    server.wait_for("round 2/2")

    np.save(programs.folder / "new.npy", np.eye(3, 8, dtype=np.float32)[:2] * 3)
    with Ledger(fleet / "ledger.sqlite", create=False) as ledger:
        server.until(lambda: {row.device for row in ledger.rows(Evaluation, round=2)} == {"d0", "d1"})
    done = run_to_end(metafleet("predict", fleet, "d1", programs.folder / "new.npy", "--json"), environ=broker)
    assert done.returncode == 0, done.stderr
    answer = json.loads(done.stdout)
    assert (answer["labels"], answer["round"], answer["personalization"]) == (["a", "b"], 2, "proto")

    facts = json.loads(run_to_end(metafleet("server", "status", fleet, "--json")).stdout)
    assert (facts["running"], facts["on"], facts["rounds_closed"]) == (True, ["d0", "d1"], 2)
    agent.process.send_signal(signal.SIGTERM)
    assert agent.exit_code() == 0, agent.text()
    with Ledger(fleet / "ledger.sqlite", create=False) as ledger:
        server.until(lambda: ledger.rows(Device, name="d1")[0].state == "off")
    server.process.send_signal(signal.SIGINT)
    assert server.exit_code() == 0, server.text()
    assert "Traceback" not in server.text() + agent.text()
