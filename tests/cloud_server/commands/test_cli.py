"""Both command lines: stdout, stderr and exit codes; bad input leaves nothing half-written."""

from __future__ import annotations

import json
import os
import re
import shutil
import socket
import sqlite3
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from contextlib import closing, suppress
from dataclasses import fields, replace
from datetime import datetime
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cloud_server.choices.first_settings import topic_name
from cloud_server.commands import cli as operator_cli
from cloud_server.commands import lab
from cloud_server.identity.device_folder import DeviceFile
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Device, Round
from cloud_server.records.fleet_folder import Fleet
from cloud_server.running import aggregator_process
from edge_agent.commands import cli as device_cli
from edge_agent.device.state import DeviceState
from fleet_core import __version__
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import config, processes
from fleet_core.board.device_settings import Settings, settings_of
from fleet_core.data.samples import load, save
from fleet_core.link.interface import Connected, Message
from fleet_core.link.mqtt import MqttLink
from fleet_core.protocol import topics
from tests.support.cli import Ran, Run, runner
from tests.support.homes import SENSORS
from tests.support.paths import ROOT
from tests.support.programs import metafleet, programs_in, run_to_end, small_fleet, write_samples
from tests.support.waiting import PATIENCE_S

NOBODY = "mqtt://127.0.0.1:9"  # the discard port, where no broker is
COLOUR = re.compile(r"\x1b\[[0-9;]*[34][0-7]")


@pytest.fixture
def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Run:
    """Run a command in this process through its own ``main``."""
    for name in ("METAFLEET_BROKER", "METAFLEET_HOME", "METAFLEET_WITH_PARENT"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(processes, "exec_module", become_child)
    monkeypatch.setattr(lab, "choose_model", lambda *arguments: None)  # tested in test_model_trial

    runners = {
        "metafleet": runner(monkeypatch, capsys, "metafleet", operator_cli.main),
        "edge-agent": runner(monkeypatch, capsys, "edge-agent", device_cli.main),
    }
    return lambda program, *arguments: runners[program](*arguments)


def become_child(module: str, *arguments: str) -> None:
    """Replaces ``processes.exec_module``, which would end the tests."""
    done = subprocess.run(
        [sys.executable, "-m", module, *arguments], capture_output=True, text=True, timeout=PATIENCE_S
    )
    print(done.stdout, end="")
    print(done.stderr, end="", file=sys.stderr)
    sys.exit(done.returncode)


@pytest.fixture
def place(finished: Path, tmp_path: Path) -> Path:
    """A copy of the finished fleet and its devices that a test may change."""
    return shutil.copytree(finished, tmp_path / "place")


@pytest.fixture
def data(tmp_path: Path) -> Path:
    return write_samples(tmp_path / "data.npz")


def contents(folder: Path) -> dict[str, bytes]:
    """Every file below ``folder``; a ledger as its rows, without lock files and the ledger's shared memory."""
    files = [path for path in folder.rglob("*") if path.is_file() and path.name != ".lock"]
    return {
        str(path.relative_to(folder)): said(path) if path.suffix == ".sqlite" else path.read_bytes()
        for path in files
        if "sqlite-" not in path.name
    }


def said(ledger: Path) -> bytes:
    with closing(sqlite3.connect(ledger)) as connection:
        return "\n".join(connection.iterdump()).encode()


def refused(ran: Ran, code: int, *words: str) -> None:
    """The command explained the error on stderr, without a traceback, and printed nothing on stdout."""
    assert (ran.code, ran.out) == (code, ""), ran.err
    assert "Traceback" not in ran.err
    for word in words:
        assert word in ran.err


# The methods ---------------------------------------------------------------------------------------------------------


def test_the_methods_say_what_they_send_and_what_stays(run: Run) -> None:
    listed = {method["name"]: method for method in json.loads(run("metafleet", "methods", "--json").out)}
    assert listed.keys() == METHODS.keys()
    scaf, vers, alone = (listed[name] for name in ("pflscaf-proto", "metavers", "local"))
    assert scaf["down"] == {"models": 2, "groups": ["body", "control"], "scalars": []}
    assert scaf["up"] == {"models": 1, "groups": ["body"], "scalars": []}
    assert (scaf["paper_models"], scaf["stays"]) == ({"down": 2, "up": 2}, ["control", "class means"])
    assert vers["up"]["scalars"] == vers["down"]["scalars"] == ["margin"]
    assert (alone["down"], alone["stays"]) == ({"models": 0, "groups": [], "scalars": []}, ["body", "head"])
    assert [name for name, method in listed.items() if not method["lossy_codecs"]] == ["fedproto"]
    assert "paper_models" not in vers
    assert listed["per-fedavg-hf"]["hyper"]["difference"] == METHODS["per-fedavg-hf"].hyper().difference
    rows = run("metafleet", "methods").out.splitlines()
    shown = {row.split()[0]: row for row in rows[1:]}
    assert re.match(r"metavers( +1 model: body, margin \(a number\)){2} +class means", shown["metavers"])
    assert re.match(r"fedper +part of a model: body +part of a model: body +head ", shown["fedper"])
    assert shown["local"].split()[:3] == ["local", "nothing", "nothing"]
    assert all(row.rstrip().endswith(METHODS[row.split()[0]].source) for row in rows[1:])


@pytest.mark.parametrize("name", METHODS)
def test_a_method_is_shown_in_full_with_its_pages_and_all_that_can_be_set(run: Run, name: str) -> None:
    text, machine = run("metafleet", "methods", name).out, json.loads(run("metafleet", "methods", name, "--json").out)
    method = METHODS[name]
    assert text.startswith(f"{name}: {method.title}\n\nsource    {method.source}\n")
    told = "\n".join([machine["notes"], *machine["pages"].values()])
    for setting in machine["hyper"]:
        assert re.search(rf"^{setting} +\S", text, re.MULTILINE), "its default"
        assert re.search(rf"\b{setting}\b", told), "its meaning"
    assert machine["notes"] in text
    assert machine["pages"].keys() >= {type(method.client).__module__, type(method.server).__module__}
    for module, page in machine["pages"].items():
        assert f"\n{module}\n\n{page}" in text
        assert len(page) > 100


def test_deviations_from_a_paper_are_reported_with_the_method(run: Run) -> None:
    assert "Deviation: every device makes the same number of steps" in run("metafleet", "methods", "fedprox").out
    assert "in print  2 models down, 2 up" in run("metafleet", "methods", "pflscaf-maml").out
    assert "codecs    fp32 only" in run("metafleet", "methods", "fedproto").out
    refused(run("metafleet", "methods", "fedprx"), 2, "unknown method 'fedprx'", "did you mean 'fedprox'?")


@pytest.mark.slow
def test_init_says_what_a_method_makes_of_the_link(
    run: Run, place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made = tuple((place / "fleet" / f"{name}.safetensors").read_bytes() for name in ("graph", "weights"))
    monkeypatch.setattr(operator_cli, "_export", lambda settings, head: made)
    monkeypatch.setattr(operator_cli, "_export_train", lambda fleet, layout, first: b"")
    for name, method in (("fleet", "fedproto"), ("other", "pfldyn-proto")):
        settings = tomllib.loads((place / "fleet" / "fleet.toml").read_text())
        settings["fleet"]["method"], settings["hyper"] = method, {}
        (tmp_path / name).mkdir()
        (tmp_path / name / "fleet.toml").write_text(config.toml(settings))
    done = run("metafleet", "init", tmp_path / "fleet")
    assert done.code == 0, done.err
    assert "all goes as fp32, not as int8 up and int8 down" in done.err
    assert "class means and their counts, which reveal something about its samples" in done.err
    done = run("metafleet", "init", tmp_path / "other")
    assert (done.code, "all goes as" in done.err, "class means" in done.err) == (0, False, False)


# What there is to see ------------------------------------------------------------------------------------------------


LISTINGS = {
    "methods": "metafleet methods",
    "status": "metafleet server status {0}/fleet",
    "rounds": "metafleet server rounds {0}/fleet",
    "devices": "metafleet devices list {0}/fleet",
    "device": "metafleet devices show {0}/fleet d0",
    "agent": "edge-agent status --home {0}/d0",
    "personalize": "edge-agent personalize --home {0}/d1",
    "predict": "edge-agent predict {0}/one.npy --home {0}/d1",
}


@pytest.mark.parametrize("command", LISTINGS.values(), ids=LISTINGS)
def test_every_listing_has_a_text_and_a_machine_readable_form(run: Run, place: Path, command: str) -> None:
    np.save(place / "one.npy", np.eye(3, 8, dtype=np.float32)[1] * 3)
    words = command.format(place).split()
    text, machine = run(*words), run(*words, "--json")
    assert (text.code, machine.code) == (0, 0)
    assert text.out
    assert json.loads(machine.out)
    assert machine.err == ""


def test_the_status_of_a_finished_fleet_says_what_was_counted(run: Run, place: Path) -> None:
    facts = json.loads(run("metafleet", "server", "status", place / "fleet", "--json").out)
    assert (facts["rounds_closed"], facts["rounds"], facts["running"]) == (2, 2, False)
    assert facts["totals"]["payload_bytes"]["up"] > 0
    assert facts["programs"] == {__version__: 2}
    with Fleet.load(place / "fleet").lock():
        assert json.loads(run("metafleet", "server", "status", place / "fleet", "--json").out)["running"] is True


def test_the_status_of_many_devices_that_are_away_is_one_line(run: Run, place: Path) -> None:
    with Ledger(place / "fleet" / "ledger.sqlite") as ledger:
        for n in range(40):
            ledger.put(Device(name=f"away{n:02}", took_part=True))
    printed = run("metafleet", "server", "status", place / "fleet").out
    assert "away00, away01, " in printed
    assert "and 30 more; one that never comes back" in printed
    facts = json.loads(run("metafleet", "server", "status", place / "fleet", "--json").out)
    assert len(facts["off"]) == 40


def test_an_answer_names_its_class_and_where_it_comes_from(run: Run, place: Path) -> None:
    np.save(place / "two.npy", np.eye(3, 8, dtype=np.float32)[:2] * 3)
    ran = run("edge-agent", "predict", place / "two.npy", "--home", place / "d1", "--json")
    answer = json.loads(ran.out)
    assert (answer["labels"], answer["round"], answer["personalization"]) == (["a", "b"], 2, "proto")


@pytest.mark.parametrize("program", ["metafleet", "edge-agent"])
def test_the_version_is_reported(run: Run, program: str) -> None:
    assert run(program, "--version") == Ran(0, f"{__version__}\n", "")


def test_a_wrong_command_is_answered_in_plain_text_with_the_nearest_one() -> None:
    done = run_to_end(metafleet("serve"), environ={"FORCE_COLOR": "1"})
    assert done.returncode == 2
    assert "'serve'" in done.stderr
    assert "server" in done.stderr.replace("'serve'", "")
    assert not COLOUR.search(done.stderr)


@pytest.mark.slow
def test_a_fleets_report_is_one_page(run: Run, place: Path) -> None:
    page = place / "page.html"
    assert run("metafleet", "report", place / "fleet", "--out", page).out == f"{page}\n"
    assert page.read_text().startswith("<!")
    assert run("metafleet", "report", place / "fleet", "--out", page, "--against", place / "fleet").code == 0
    assert "Against fleet" in page.read_text()
    found = json.loads(run("metafleet", "report", place / "fleet", "--out", page, "--against", place / "fleet",
                           "--json").out)
    assert (found["this"], found["other"], found["settings"]) == ("fleet", "fleet", [])
    assert all(one["this"] == one["other"] for one in found["figures"])
    assert run("metafleet", "report", place / "fleet", "--out", page, "--json").code == 2


def test_samples_that_were_added_count_at_once(run: Run, place: Path) -> None:
    home = place / "d1"
    before = json.loads(run("edge-agent", "personalize", "--home", home, "--json").out)
    np.save(place / "one.npy", np.eye(3, 8)[2] * 3)
    assert run("edge-agent", "samples", "add", place / "one.npy", "--label", "c", "--home", home).code == 0
    after = json.loads(run("edge-agent", "personalize", "--home", home, "--json").out)
    assert after["samples"] == before["samples"] + 1
    assert after["per_class"]["c"] == before["per_class"]["c"] + 1


# Errors: on stderr, exit code 2 for what a person wrote and 1 for what happened --------------------------------------


@pytest.mark.slow
def test_a_real_process_says_its_error_on_stderr_and_shows_a_traceback_when_asked(tmp_path: Path) -> None:
    plain = run_to_end(metafleet("server", "status", tmp_path))
    verbose = run_to_end(metafleet("server", "status", tmp_path, "--verbose"))
    assert (plain.returncode, plain.stdout, verbose.returncode, verbose.stdout) == (2, "", 2, "")
    assert plain.stderr == f"error: {tmp_path}: there is no fleet here\nhint: metafleet init {tmp_path}\n"
    assert "Traceback" in verbose.stderr
    assert verbose.stderr.endswith(plain.stderr)
    assert list(tmp_path.iterdir()) == []


def malformed(folder: Path) -> Path:
    path = folder / "malformed.npz"
    path.write_bytes(b"PK no zip at all")
    return path


def test_a_missing_or_malformed_data_file_makes_no_fleet_and_no_run(run: Run, tmp_path: Path) -> None:
    bad, fleet, out = malformed(tmp_path), tmp_path / "fleet", tmp_path / "out"
    refused(run("metafleet", "init", fleet, "--data", tmp_path / "none.npz"), 2, "none.npz: does not exist")
    refused(run("metafleet", "init", fleet, "--data", bad), 2, "malformed.npz: cannot be read")
    refused(run("metafleet", "demo", "--data", tmp_path / "none.npz", "--out", out), 2, "none.npz: does not exist")
    refused(run("metafleet", "demo", "--data", bad, "--out", out), 2, "malformed.npz: cannot be read")
    assert [path.name for path in tmp_path.iterdir()] == ["malformed.npz"]


def test_an_unknown_method_is_refused_with_the_one_that_was_meant(run: Run, data: Path, tmp_path: Path) -> None:
    words = ("unknown method 'pfldyn-prto'", "did you mean 'pfldyn-proto'?", "hint: metafleet methods")
    few = ("--devices", 2, "--new-devices", 1)
    for command in (("init", tmp_path / "fleet"), ("demo", "--out", tmp_path / "out", *few)):
        refused(run("metafleet", *command, "--data", data, "--method", "pfldyn-prto"), 2, *words)
    assert list(tmp_path.iterdir()) == [data]


def test_an_unknown_model_makes_no_fleet(run: Run, data: Path, tmp_path: Path) -> None:
    ran = run("metafleet", "init", tmp_path / "fleet", "--data", data, "--model", "mpl")
    refused(ran, 2, "unknown model 'mpl'", "did you mean 'mlp'?")
    assert list(tmp_path.iterdir()) == [data]


def test_images_with_their_channels_last_make_no_fleet_and_are_told_how_to_turn(run: Run, tmp_path: Path) -> None:
    data = tmp_path / "photos.npz"
    np.savez(data, x=np.zeros((4, 32, 32, 3), np.uint8), y=np.array(["cat", "dog"] * 2))
    ran = run("metafleet", "init", tmp_path / "fleet", "--data", data)
    refused(ran, 2, "images of 32 channels, 32 by 3 pixels", "np.moveaxis(x, -1, 1)", "expected images [N, channels")
    assert list(tmp_path.iterdir()) == [data]


def test_a_demo_with_more_devices_than_clients_is_refused(run: Run, data: Path, tmp_path: Path) -> None:
    ran = run("metafleet", "demo", "--data", data, "--devices", 4, "--new-devices", 1, "--out", tmp_path / "out")
    refused(ran, 2, "holds 4 clients; expected 4 that train and 1 that join")
    assert list(tmp_path.iterdir()) == [data]


def test_a_demo_in_which_nothing_is_left_to_evaluate_is_refused_before_it_begins(
    run: Run, data: Path, tmp_path: Path
) -> None:
    few = ("demo", "--data", data, "--devices", 3, "--new-devices", 1, "--out", tmp_path / "out")
    refused(run("metafleet", *few, "--support-seconds", 471), 2, "all 48 samples of d3 are used for learning",
            "hint: lower --support-seconds, or leave it out")
    timeless = load(data)
    save(data, replace(timeless, time=None))
    refused(run("metafleet", *few, "--support-seconds", 60), 2, "of d3, the first 60 s are unknown")
    short = timeless.take(np.r_[0, 48 : len(timeless)])
    save(data, short)
    refused(run("metafleet", *few), 2, "all 1 samples of d0 are used for learning")
    assert list(tmp_path.iterdir()) == [data]


def test_a_demo_takes_no_folder_that_holds_something_else(run: Run, data: Path, tmp_path: Path) -> None:
    out = tmp_path / "out"
    out.mkdir()
    (out / "letter.txt").write_text("dear")
    few = ("--data", data, "--devices", 2, "--new-devices", 1, "--out", out)
    refused(run("metafleet", "demo", *few), 2, "is not empty and holds no run")
    (out / "demo.json").write_text(json.dumps({"devices": 3}))
    refused(run("metafleet", "demo", *few), 2, "holds a run with other options")
    (out / "demo.json").write_text("no json")
    refused(run("metafleet", "demo", *few), 2, "demo.json: is not JSON")
    assert sorted(contents(out)) == ["demo.json", "letter.txt"]


def test_every_mistake_in_fleet_toml_is_reported_at_once_with_its_line(run: Run, place: Path) -> None:
    path = place / "fleet" / "fleet.toml"
    text = path.read_text().replace("rounds = 2\n", "ruonds = 2\n").replace("quorum = 0.5", "quorum = 7")
    text = text.replace('up = "int8"', 'up = "int9"')
    path.write_text(text)
    lines = text.splitlines()
    before = contents(place)
    for command in ("server start", "server status", "devices list", "init"):
        ran = run("metafleet", *command.split(), place / "fleet")
        refused(
            ran, 2,
            f"{path}:{lines.index('ruonds = 2') + 1}: fleet.ruonds: unknown key (did you mean 'rounds'?)",
            f"{path}:{lines.index('quorum = 7') + 1}: fleet.quorum: 7 is over the limit of 1",
            f"""{path}:{lines.index('up = "int9"') + 1}: link.up: unknown value 'int9'""",
        )
    assert contents(place) == before


def test_a_hyper_parameter_that_the_method_does_not_have_is_refused(run: Run, place: Path) -> None:
    path = place / "fleet" / "fleet.toml"
    path.write_text(path.read_text() + "penlty = 0.2\n")
    ran = run("metafleet", "server", "start", place / "fleet")
    refused(ran, 2, f"{path}:{len(path.read_text().splitlines())}: hyper.penlty: unknown key", "'penalty'")


@pytest.mark.slow
def test_every_mistake_in_device_toml_is_reported_at_once(run: Run, place: Path) -> None:
    path = place / "d0" / "device.toml"
    path.write_text(path.read_text().replace('name = "d0"', 'name = "d 0"') + "[trian]\nthreads = 2\n")
    ran = run("edge-agent", "run", "--home", place / "d0")
    refused(ran, 2, f"{path}:3: device.name: 'd 0'", "trian: unknown key (did you mean 'train'?)")


# A broker, a port, a lock ---------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.parametrize("url", ["nonsense", "http://127.0.0.1", "mqtt://127.0.0.1:99999"])
def test_what_is_no_address_of_a_broker_is_refused(run: Run, place: Path, data: Path, url: str) -> None:
    before = contents(place)
    fleet, home = place / "fleet", place / "d0"
    few = ("--data", data, "--devices", 2, "--new-devices", 1)
    for command in (
        ("metafleet", "server", "start", fleet), ("metafleet", "predict", fleet, "d0", data),
        ("metafleet", "devices", "enroll", fleet, "d9", "--to", place / "d9"),
        ("metafleet", "demo", "--out", place / "out", *few), ("edge-agent", "run", "--home", home),
    ):
        refused(run(*command, "--broker", url), 2, f"'{url}': is not the address of a broker")
    assert contents(place) == before


@pytest.mark.slow
def test_a_broker_that_does_not_answer_is_named_and_leaves_all_as_it_was(run: Run, place: Path, data: Path) -> None:
    before = contents(place)
    fleet, home = place / "fleet", place / "d0"
    for command, wait in (
        (("metafleet", "server", "start", fleet), ("--connect-s", 0.2)),
        (("edge-agent", "run", "--home", home), ("--connect-s", 0.2)),
        (("metafleet", "predict", fleet, "d0", data), ("--timeout-s", 0.2)),
    ):
        ran = run(*command, *wait, "--broker", NOBODY)
        refused(ran, 1, f"{NOBODY}: no broker answered", "hint: start the broker, or check --broker")
    assert contents(place) == before


def test_a_demo_whose_broker_does_not_answer_writes_nothing(
    run: Run, data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    check = aggregator_process.check_broker
    monkeypatch.setattr(aggregator_process, "check_broker", lambda url: check(url, timeout_s=0.2))
    few = ("--data", data, "--devices", 2, "--new-devices", 1, "--out", tmp_path / "out")
    refused(run("metafleet", "demo", *few, "--broker", NOBODY), 1, f"{NOBODY}: no broker answered")
    assert list(tmp_path.iterdir()) == [data]


@pytest.fixture
def port() -> Iterator[int]:
    """A port that another socket listens on."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener.getsockname()[1]


@pytest.mark.slow
def test_a_port_in_use_is_reported(run: Run, place: Path, port: int) -> None:
    before = contents(place)
    ran = run("metafleet", "server", "start", place / "fleet", "--port", port)
    refused(ran, 1, f"127.0.0.1:{port}: the port is in use", "hint: choose another port")
    assert contents(place) == before


@pytest.mark.slow
def test_one_folder_has_one_aggregator(run: Run, place: Path) -> None:
    with Fleet.load(place / "fleet").lock():
        ran = run("metafleet", "server", "start", place / "fleet", "--broker", NOBODY)
    refused(ran, 1, f"{place / 'fleet'}: another aggregator is running here")


@pytest.mark.slow
def test_one_home_has_one_agent(run: Run, place: Path) -> None:
    home = DeviceState(place / "d0")
    home.lock()
    ran = run("edge-agent", "run", "--home", place / "d0", "--broker", NOBODY)
    refused(ran, 1, f"{place / 'd0'}: another agent is running here")


@pytest.mark.slow
def test_a_device_that_is_not_on_does_not_keep_one_waiting_for_ever(run: Run, place: Path, data: Path) -> None:
    with Ledger(place / "fleet" / "ledger.sqlite") as ledger:
        seen = datetime(2026, 1, 2, 3, 4, 5).timestamp()
        ledger.put(replace(ledger.rows(Device, name="d0")[0], state="off", last_seen=seen))
    with programs_in(place) as programs:
        server = programs.start(*metafleet("server", "start", place / "fleet", "--port", 0, "--quiet"))
        server.wait_for("broker: ")
        url = re.search(r"mqtt://\S+", server.text())
        assert url is not None
        with closing(MqttLink(url[0], client_id="somebody")) as other:
            # amqtt sends a new client the retained messages of other clients' subscriptions.
            other.open()
            server.until(lambda: any(isinstance(event, Connected) for event in other.poll(0.1)))
            other.subscribe(topics.server("desk"))
            server.until(lambda: any(isinstance(event, Message) for event in other.poll(0.1)))
            ran = run("metafleet", "predict", place / "fleet", "d0", data, "--broker", url[0], "--timeout-s", 0.5)
    refused(ran, 1, "device d0 did not answer in 0.5 s; it was off when last heard of, at 2026-01-02 03:04:05",
            "hint: is d0 on?")


def test_a_device_that_cannot_answer_is_not_asked(run: Run, place: Path, data: Path) -> None:
    fleet = place / "fleet"
    with Ledger(fleet / "ledger.sqlite") as ledger:
        ledger.put(replace(ledger.rows(Device, name="d1")[0], status="revoked"))
    assert run("metafleet", "devices", "enroll", fleet, "d3", "--token", place / "d3.token").code == 0
    for name, words in (("d00", "no device 'd00' (did you mean 'd0'?)"), ("d1", "device 'd1' was revoked"),
                        ("d3", "device 'd3' has not joined yet")):
        ran = run("metafleet", "predict", fleet, name, data, "--broker", NOBODY, "--timeout-s", 60)
        refused(ran, 2, words, f"hint: metafleet devices list {fleet}")


@pytest.mark.slow
def test_pause_and_resume_say_what_they_did(run: Run, place: Path) -> None:
    path = place / "fleet"
    text = (path / "fleet.toml").read_text()
    (path / "fleet.toml").write_text(text.replace("rounds = 2", "rounds = 5"))
    resume = f"until 'metafleet server resume {path}'"
    stopped = f"the aggregator is not running; after its next start it opens no new round {resume}\n"
    assert run("metafleet", "server", "pause", path).out == f"paused: {stopped}"
    assert run("metafleet", "server", "pause", path).out == f"already paused: {stopped}"
    assert f"paused: no further round opens {resume}" in run("metafleet", "server", "status", path).out
    with Fleet.load(path).lock():
        again = run("metafleet", "server", "pause", path).out
        assert again == f"already paused: no further round opens after round 2 {resume}\n"
        assert run("metafleet", "server", "resume", path).out == "resumed: the next round is 3 of 5\n"
        with Ledger(path / "ledger.sqlite") as ledger:
            ledger.put(Round(round=3, opened_at=0.0))
        asked = json.loads(run("metafleet", "server", "pause", path, "--json").out)
        assert asked == {"paused": True, "changed": True, "running": True, "open_round": 3, "last_round": 2,
                         "rounds": 5}
        again = run("metafleet", "server", "pause", path).out
        assert again == f"already paused: round 3 is still completed; no further round opens after it {resume}\n"
        assert run("metafleet", "server", "resume", path).out == "resumed: round 3 of 5 is open\n"
    assert run("metafleet", "server", "resume", path).out == (
        f"was not paused: round 3 of 5 is open; the aggregator is not running: metafleet server start {path}\n"
    )


def test_a_fleet_whose_rounds_are_done_says_how_it_continues(run: Run, place: Path) -> None:
    done = "all 2 rounds are done; to train on, raise rounds in fleet.toml and start the server again\n"
    assert done in run("metafleet", "server", "status", place / "fleet").out
    assert run("metafleet", "server", "resume", place / "fleet").out == f"was not paused: {done}"
    paused = run("metafleet", "server", "pause", place / "fleet").out
    assert "if you raise fleet.rounds, no new round opens" in paused


def test_times_are_dates_for_people_and_seconds_in_json(run: Run, place: Path) -> None:
    fleet, moment = place / "fleet", r"\d{4}-\d\d-\d\d \d\d:\d\d:\d\d[+-]\d\d:\d\d"
    assert run("metafleet", "devices", "enroll", fleet, "d3", "--token", place / "d3.token").code == 0
    for command, dates in ((("devices", "show", fleet, "d0"), 2), (("devices", "show", fleet, "d3"), 1),
                           (("server", "rounds", fleet), 2)):
        shown = run("metafleet", *command).out
        assert len(re.findall(moment, shown)) == dates
        assert not re.search(r"\b\d{10}\b", shown)
    assert isinstance(json.loads(run("metafleet", "server", "rounds", fleet, "--json").out)[0]["opened_at"], float)


def test_a_folder_of_another_kind_is_no_fleet(run: Run, place: Path, data: Path) -> None:
    refused(run("metafleet", "server", "status", place / "d0"), 2, "d0: is a device's folder; expected the folder of a")
    refused(run("metafleet", "init", place / "d0", "--data", data), 2, "d0: is a device's folder")
    refused(run("metafleet", "init", data, "--data", data), 2, "data.npz: is a file")
    refused(run("metafleet", "server", "rounds", place / "d0" / "samples.npz"), 2, "samples.npz: is a file")


# Folders -------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_init_makes_a_fleet_once_and_again_only_what_is_missing(run: Run, data: Path, tmp_path: Path) -> None:
    fleet = tmp_path / "fleet"
    assert run("metafleet", "init", fleet, "--data", data, "--rounds", 2).code == 0
    made = contents(fleet)
    certified = {f"{name}.{kind}" for name in ("ca", "tokens-ca", "aggregator") for kind in ("key", "pem")}
    assert {name for name in made if not name.startswith("mosquitto/")} == certified | {
        "audit.ndjson", "fleet.toml", "fleet.key", "fleet.pub", "graph.safetensors", "train.safetensors",
        "weights.safetensors", "ledger.sqlite",
    }
    made.pop("audit.ndjson")
    assert all(path.stat().st_mode & 0o077 == 0 for path in fleet.rglob("*.key"))
    assert run("metafleet", "init", fleet).code == 0
    assert contents(fleet).items() >= made.items()
    (fleet / "train.safetensors").unlink()
    assert run("metafleet", "init", fleet, "--no-train-graph").code == 0
    assert not (fleet / "train.safetensors").exists()
    (fleet / "graph.safetensors").unlink()
    refused(run("metafleet", "server", "start", fleet), 1, "the graph is missing", f"hint: metafleet init {fleet}")
    assert run("metafleet", "init", fleet, "--data", data, "--rounds", 2).code == 0
    assert contents(fleet).items() >= made.items()


@pytest.mark.slow
def test_init_says_which_methods_devices_need_torch_to_train(run: Run, data: Path, tmp_path: Path) -> None:
    done = run("metafleet", "init", tmp_path / "fleet", "--data", data, "--method", "pfedgp", "--model", "mlp")
    assert done.code == 0
    assert "the estimator gp of pfedgp cannot become a graph: devices of this fleet need torch to train" in done.err
    assert not (tmp_path / "fleet" / "train.safetensors").exists()


@pytest.mark.slow
def test_init_takes_the_arrays_that_rounds_train_and_says_what_does_not_go(
    run: Run, data: Path, tmp_path: Path
) -> None:
    fleet, given = tmp_path / "fleet", ("--data", data, "--method", "fedavg", "--model", "mlp")
    ran = run("metafleet", "init", fleet, *given, "--train", "hed.*", "--train", "layers.*")
    refused(ran, 2, "train.only[0]: no array of the model mlp is named 'hed.*' (did you mean 'head.*'?)",
            "hint: the arrays: layers.0.weight, layers.0.bias, head.weight, head.bias")
    assert not (fleet / "fleet.toml").exists()
    refused(run("metafleet", "init", fleet, *given, "--freeze", "atuo"), 2,
            "--freeze: unknown value 'atuo', expected one of auto, never (did you mean 'auto'?)")
    refused(run("metafleet", "init", fleet, "--data", data, "--method", "pfedhn", "--freeze", "auto"), 2,
            "train.freeze: pfedhn makes the whole model of every device anew in each round")
    kept = ("--train", "head.*", "--freeze", "auto", "--no-train-graph")
    assert run("metafleet", "init", fleet, *given, *kept).code == 0
    path = fleet / "fleet.toml"
    text = path.read_text()
    assert '# Arrays that devices train and send, by name, with * and ?: ["head.*"]; empty: the whole model.\n' in text
    assert 'only = ["head.*"]\n' in text
    assert 'freeze = "auto"\n' in text
    path.write_text(text.replace("head.*", "haed.*", 2))
    ran = run("metafleet", "server", "start", fleet, "--broker", NOBODY)
    refused(ran, 2, "train.only[0]: no array of the model mlp is named 'haed.*' (did you mean 'head.*'?)")


@pytest.mark.slow
def test_a_new_fleet_trains_everything(run: Run, data: Path, tmp_path: Path) -> None:
    assert run("metafleet", "init", tmp_path / "fleet", "--data", data, "--no-train-graph").code == 0
    text = (tmp_path / "fleet" / "fleet.toml").read_text()
    assert "[train]" in text
    assert "\nonly = []\n" in text
    assert '\nfreeze = "never"\n' in text


def test_a_folder_of_another_fleet_is_refused(run: Run, data: Path, place: Path) -> None:
    before = contents(place)
    ran = run("metafleet", "init", place / "fleet", "--data", data, "--method", "fedavg")
    refused(ran, 2, "another fleet is here already")
    refused(run("metafleet", "init", place / "fleet", "--seed", 3), 2, "--seed without --data")
    assert contents(place) == before


@pytest.mark.slow
def test_rounds_without_their_fleet_toml_are_not_given_to_another_fleet(run: Run, data: Path, place: Path) -> None:
    (place / "fleet" / "fleet.toml").unlink()
    before = contents(place)
    refused(run("metafleet", "init", place / "fleet", "--data", data), 2, "fleet.toml: is missing", "put it back")
    assert contents(place) == before


def test_an_empty_folder_needs_data_to_become_a_fleet(run: Run, tmp_path: Path) -> None:
    refused(run("metafleet", "init", tmp_path / "fleet"), 2, "fleet.toml: is missing", "hint: give --data")
    assert list(tmp_path.iterdir()) == []


def test_the_graph_of_another_model_is_refused(run: Run, place: Path) -> None:
    path = place / "fleet" / "fleet.toml"
    path.write_text(path.read_text().replace('classes = ["a", "b", "c"]', 'classes = ["a", "b", "d"]'))
    before = contents(place)
    for command in ("server start", "init"):
        ran = run("metafleet", *command.split(), place / "fleet")
        refused(ran, 1, "graph.safetensors: is the graph of another model: classes")
    assert contents(place) == before


@pytest.mark.slow
def test_the_first_weights_of_another_model_are_refused(run: Run, place: Path, tmp_path: Path) -> None:
    fleet = small_fleet(tmp_path / "young").folder
    assert run("metafleet", "init", tmp_path / "other", "--data", wide(tmp_path), "--no-train-graph").code == 0
    shutil.copy(tmp_path / "other" / "weights.safetensors", fleet)
    before = contents(fleet)
    refused(run("metafleet", "server", "start", fleet, "--broker", NOBODY), 1, "weights.safetensors: are not this")
    refused(run("metafleet", "init", fleet), 1, "weights.safetensors: are not this model's first weights")
    assert contents(fleet) == before


def wide(folder: Path) -> Path:
    """Samples of five dimensions and two classes."""
    x, y = np.random.default_rng(0).normal(size=(6, 5)).astype(np.float32), np.arange(6) % 2
    np.savez(folder / "wide.npz", x=x, y=y, classes=np.array(["p", "q"]))
    return folder / "wide.npz"


@pytest.mark.slow
def test_a_device_whose_graph_is_another_models_gives_no_answer(run: Run, place: Path, tmp_path: Path) -> None:
    assert run("metafleet", "init", tmp_path / "other", "--data", wide(tmp_path), "--no-train-graph").code == 0
    (graph,) = (place / "d1").glob("graph-*")
    shutil.copy(tmp_path / "other" / "graph.safetensors", graph)
    np.save(tmp_path / "x.npy", np.ones(5, np.float32))
    before = contents(place)
    for command in (("predict", tmp_path / "x.npy"), ("personalize",)):
        ran = run("edge-agent", *command, "--home", place / "d1")
        refused(ran, 1, f"{place / 'd1'}: graph and weights here are of different models", "hint: delete graph-")
    assert contents(place) == before


@pytest.mark.slow
def test_a_home_without_a_device_says_how_to_enroll_one(run: Run, tmp_path: Path) -> None:
    for command in ("run", "status", "personalize", "predict x.npy", "samples add x.npy --label a"):
        ran = run("edge-agent", *command.split(), "--home", tmp_path)
        refused(ran, 2, "device.toml: there is no device here", "hint: metafleet devices enroll FLEET NAME --to HOME")
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_home_that_is_another_devices_is_refused(run: Run, place: Path, data: Path, tmp_path: Path) -> None:
    assert run("metafleet", "init", tmp_path / "other", "--data", data, "--no-train-graph").code == 0
    before = contents(place)
    enroll = ("metafleet", "devices", "enroll")
    refused(run(*enroll, place / "fleet", "d7", "--to", place / "d0"), 2, "another device's folder: its name is 'd0'")
    refused(run(*enroll, tmp_path / "other", "d0", "--to", place / "d0"), 2, "its fleet is 'desk'; expected 'other'")
    refused(run(*enroll, place / "fleet", "d7", "--to", place / "fleet"), 2, "is a fleet's own folder")
    refused(run(*enroll, place / "fleet", "d 7", "--to", place / "d7"), 2, "'d 7' is not a valid name of a device")
    assert contents(place) == before


def test_enrolling_again_changes_the_broker_and_keeps_what_a_person_wrote(run: Run, place: Path) -> None:
    path = place / "d0" / "device.toml"
    path.write_text(path.read_text() + "\n[power]\nidle_w = 3.1\nbusy_w = 6.1\n" + SENSORS)
    before = settings_of(place / "d0")
    ran = run("metafleet", "devices", "enroll", place / "fleet", "d0", "--to", place / "d0", "--broker", "mqtt://[::1]")
    assert ran.code == 0
    settings = settings_of(place / "d0")
    assert (settings.device.broker, settings.power.busy_w) == ("mqtt://[::1]", 6.1)
    assert replace(settings, device=before.device) == before
    assert len(settings.source) == 2


def test_a_device_folder_keeps_every_table_that_an_agent_reads() -> None:
    assert {one.name for one in fields(DeviceFile)} == {one.name for one in fields(Settings)}


@pytest.mark.slow
def test_plain_mqtt_to_another_machine_is_requested_by_name(run: Run, place: Path) -> None:
    enroll = ("metafleet", "devices", "enroll", place / "fleet", "d0", "--to", place / "d0", "--broker", "mqtt://pi")
    before = contents(place)
    refused(run(*enroll), 2, "mqtt://pi: is plain MQTT that leaves this machine", "--plain")
    refused(run("metafleet", "server", "start", place / "fleet", "--broker", "mqtt://pi"), 2, "is plain MQTT")
    refused(run("edge-agent", "run", "--home", place / "d0", "--broker", "mqtt://pi"), 2, "is plain MQTT")
    assert contents(place) == before
    assert run(*enroll, "--plain").code == 0
    assert settings_of(place / "d0").device.plain


def test_the_broker_of_a_flag_goes_before_the_environments_and_that_before_the_files(
    run: Run, place: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = place / "fleet" / "fleet.toml"
    path.write_text(path.read_text().replace("[link]\n", '[link]\nbroker = "mqtt://file"\n'))
    command = ("metafleet", "devices", "enroll", place / "fleet", "d0", "--to", place / "d0", "--plain")

    def broker(*flags: str) -> str:
        assert run(*command, *flags).code == 0
        return settings_of(place / "d0").device.broker

    assert broker() == "mqtt://file"
    monkeypatch.setenv("METAFLEET_BROKER", "mqtt://environment")
    assert broker() == "mqtt://environment"
    assert broker("--broker", "mqtt://flag") == "mqtt://flag"


def test_a_device_that_nobody_knows_is_not_shown_and_not_revoked(run: Run, place: Path) -> None:
    for verb in ("show", "revoke"):
        ran = run("metafleet", "devices", verb, place / "fleet", "d00")
        refused(ran, 2, "no device 'd00'", "hint: metafleet devices list")


# Samples and answers -------------------------------------------------------------------------------------------------


BAD_INPUTS: dict[str, tuple[Any, str]] = {
    "shape": (np.zeros((2, 9), np.float32), "has shape [2, 9]; expected [n, 8]"),
    "none": (np.zeros((0, 8), np.float32), "has shape [0, 8]; expected [n, 8]"),
    "nan": (np.full(8, np.nan, np.float32), "has a value that is not a finite number"),
    "text": (np.array(list("abcdefgh")), "has a value that is not a finite number"),
    "large": (np.full(8, 1e300), "has float64 values that float32 cannot represent"),
}


@pytest.mark.slow
@pytest.mark.parametrize(("array", "words"), BAD_INPUTS.values(), ids=BAD_INPUTS)
def test_an_input_that_is_no_sample_is_refused_everywhere(run: Run, place: Path, array: Any, words: str) -> None:
    file = place / "input.npy"
    np.save(file, array)
    before = contents(place)
    for command in (
        ("edge-agent", "predict", file, "--home", place / "d1"),
        ("edge-agent", "samples", "add", file, "--label", "a", "--home", place / "d1"),
        ("metafleet", "predict", place / "fleet", "d1", file),
    ):
        refused(run(*command), 2, f"{file}: {words}")
    assert contents(place) == before


def test_an_input_that_is_no_file_is_refused(run: Run, place: Path) -> None:
    for name in ("none.npy", "none.csv", "none.txt"):
        refused(run("edge-agent", "predict", place / name, "--home", place / "d1"), 2, f"{name}: ")
    (place / "cut.npy").write_bytes(b"\x93NUMPY")
    refused(run("edge-agent", "predict", place / "cut.npy", "--home", place / "d1"), 2, "cut.npy: cannot be read")


def test_a_label_that_is_no_class_is_refused_with_the_one_that_was_meant(run: Run, place: Path) -> None:
    np.save(place / "one.npy", np.zeros(8, np.float32))
    before = contents(place)
    ran = run("edge-agent", "samples", "add", place / "one.npy", "--label", "aa", "--home", place / "d1")
    refused(ran, 2, "unknown class 'aa' (did you mean 'a'?)", "expected one of a, b, c")
    assert contents(place) == before


def test_before_anything_was_served_there_is_no_answer_and_nothing_to_personalize(run: Run, place: Path) -> None:
    home = place / "new"
    assert run("metafleet", "devices", "enroll", place / "fleet", "new", "--to", home).code == 0
    np.save(place / "one.npy", np.zeros(8, np.float32))
    before = contents(home)
    refused(run("edge-agent", "predict", place / "one.npy", "--home", home), 1, "no model has been served", "hint: run")
    refused(run("edge-agent", "personalize", "--home", home), 1, "no model has been served")
    add = ("edge-agent", "samples", "add", place / "one.npy", "--label", "a", "--home", home)
    refused(run(*add), 1, "the fleet's classes are not known here yet")
    assert contents(home) == before
    facts = json.loads(run("edge-agent", "status", "--home", home, "--json").out)
    assert (facts["trained_round"], facts["personalized"]) == (0, False)


def test_a_damaged_ledger_is_named(run: Run, place: Path) -> None:
    path = place / "fleet" / "ledger.sqlite"
    path.write_bytes(b"no ledger at all")
    for command in ("server status", "server rounds", "devices list"):
        refused(run("metafleet", *command.split(), place / "fleet"), 1, str(path))


def test_a_report_of_what_is_no_result_is_refused(run: Run, place: Path) -> None:
    (place / "result.json").write_text("{")
    refused(run("metafleet", "report", place, "--out", place / "page.html"), 1, "result.json: is not JSON")
    (place / "result.json").write_text('{"format": 1}')
    ran = run("metafleet", "report", place, "--out", place / "page.html")
    refused(ran, 1, "result.json: is not a result: method: missing")
    assert not (place / "page.html").exists()


@pytest.mark.slow
def test_a_listing_that_nobody_reads_to_its_end_ends_quietly() -> None:
    reader = subprocess.Popen([sys.executable, "-c", ""], stdin=subprocess.PIPE)
    reader.wait()
    done = subprocess.run(
        metafleet("methods", "--json"), stdout=reader.stdin, stderr=subprocess.PIPE, text=True, timeout=PATIENCE_S,
        check=False,
    )
    with suppress(BrokenPipeError):
        reader.communicate()
    assert (done.returncode, done.stderr) == (1, "")


# Processes ------------------------------------------------------------------------------------------------------------


@pytest.mark.slow
@pytest.mark.skipif(sys.version_info < (3, 11), reason="Python 3.10 has no switch for it")
def test_a_file_of_the_users_in_the_working_folder_stands_in_for_no_module(tmp_path: Path) -> None:
    for module, asked in (("cloud_server.commands.cli", "methods"), ("edge_agent.commands.cli", "--help")):
        (tmp_path / f"{module.partition('.')[0]}.py").write_text('raise SystemExit("a file of the user")')
        bare = subprocess.run([sys.executable, "-m", module, asked], cwd=tmp_path, capture_output=True, text=True)
        assert "a file of the user" in bare.stderr, "then the folder goes before the modules, and the next is a test"
        done = subprocess.run(processes.command(module, asked), cwd=tmp_path, capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def test_no_process_is_started_past_the_command_that_sees_to_that() -> None:
    root = ROOT
    folders = ("fleet_core", "edge_agent", "cloud_server", "export", "firmware_profiles")
    files = [path for folder in folders for path in sorted((root / folder).rglob("*.py"))]
    starting = [path for path in files if "[sys.executable" in path.read_text(encoding="utf-8")]
    assert [path.relative_to(root).as_posix() for path in starting] == ["fleet_core/base/processes.py"]


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["ascii", "latin-1"])
def test_a_terminal_that_lacks_a_letter_is_no_reason_to_fail(tmp_path: Path, encoding: str) -> None:
    done = subprocess.run(
        processes.command("cloud_server.commands.cli", "methods", "pfedme"),
        cwd=tmp_path,
        capture_output=True,
        env={**os.environ, "PYTHONIOENCODING": encoding},
    )
    assert (done.returncode, done.stderr) == (0, b"")
    assert b"\\u03bb" in done.stdout


@pytest.mark.parametrize(("folder", "name"), [
    ("living-lab", "living-lab"), ("my fleet", "my-fleet"), ("Küche (2)", "K-che-2"), ("…", "fleet"),
    ("a" * 70, "a" * 64),
])
def test_a_fleet_is_named_after_its_folder_in_letters_that_a_topic_takes(folder: str, name: str) -> None:
    assert topic_name(folder) == name
    assert topics.NAME.fullmatch(name)


@pytest.mark.slow
def test_a_command_that_is_told_can_be_copied_where_a_path_has_a_space(tmp_path: Path) -> None:
    done = subprocess.run(processes.command("cloud_server.commands.cli", "devices", "list", "my fleet"), cwd=tmp_path,
                          capture_output=True, text=True)
    assert done.stderr.endswith("hint: metafleet init 'my fleet'\n")


@pytest.mark.slow
def test_a_backup_is_a_fleet_with_its_keys_and_its_owners_alone(run, place, tmp_path):
    fleet, to = place / "fleet", tmp_path / "copies" / "monday"
    (fleet / "mosquitto" / "broker.log").write_text("what the broker said")
    ran = run("metafleet", "server", "backup", fleet, "--to", to, "--json")
    assert json.loads(ran.out) == {"folder": str(to), "rounds_closed": 2}
    there = {name for name in contents(to)}
    assert there >= {"fleet.toml", "fleet.key", "ca.key", "tokens-ca.key", "mosquitto/server.key", "ledger.sqlite"}
    assert not {name for name in there if name.endswith((".log", ".lock", ".db"))}
    assert (to.stat().st_mode & 0o777, (to / "ca.key").stat().st_mode & 0o777) == (0o700, 0o600)
    status = [json.loads(run("metafleet", "server", "status", folder, "--json").out) for folder in (fleet, to)]
    assert status[0] == status[1]
    before = contents(to)
    refused(run("metafleet", "server", "backup", fleet, "--to", to), 2, "monday: is there already")
    refused(run("metafleet", "server", "backup", fleet, "--to", fleet / "copy"), 2, "inside the fleet's own folder")
    assert contents(to) == before
