"""The command line of ``edge-agent``: what it takes and what it says, and which libraries its commands load."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from argparse import Namespace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from edge_agent.commands import cli
from edge_agent.commands.arguments import EXAMPLES, Parser
from fleet_core.base.errors import ConfigError
from tests.support import homes
from tests.support.cli import runner
from tests.support.inprocess import toy
from tests.support.paths import ROOT
from tests.support.programs import clean_environ, edge_agent, programs_in
from tests.support.waiting import PATIENCE_S

HERE = Path(".")


def asked(*arguments: str) -> dict[str, Any]:
    """The options as the command gets them."""
    found: list[Namespace] = []
    parser = cli.parser()
    for leaf in leaves(parser):
        if leaf.get_default("action") != leaf._show_help:
            leaf.set_defaults(action=found.append)
    parser.run(arguments)
    return {name: value for name, value in vars(found[0]).items() if name not in ("action", "verbose")}


def leaves(parser: Parser) -> list[Parser]:
    return [parser, *(leaf for each in parser.commands.values() for leaf in leaves(each))]


@pytest.fixture
def run(monkeypatch, capsys):
    for name in ("METAFLEET_HOME", "METAFLEET_BROKER", "METAFLEET_TOKEN", "METAFLEET_PLAIN"):
        monkeypatch.delenv(name, raising=False)
    return runner(monkeypatch, capsys, "edge-agent", cli.main)


# What it takes --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "options"), [
    ("predict x.npy", {"inputs": Path("x.npy"), "home": HERE, "as_json": False}),
    ("predict --json x.npy --home=d", {"inputs": Path("x.npy"), "home": Path("d"), "as_json": True}),
    ("personalize", {"home": HERE, "as_json": False, "by": None, "steps": None, "rate": None, "int8": None}),
    ("personalize --by adapt --steps=5 --rate 0.1 --int8 --fp32",
     {"home": HERE, "as_json": False, "by": "adapt", "steps": 5, "rate": 0.1, "int8": False}),
    ("run", {"home": HERE, "broker": None, "connect_s": 60.0, "token": None, "plain": False}),
    ("run --token t --plain --connect-s 5 --broker mqtt://b:1",
     {"home": HERE, "broker": "mqtt://b:1", "connect_s": 5.0, "token": Path("t"), "plain": True}),
    ("serve --port 0 --host :: --open", {"home": HERE, "host": "::", "port": 0, "open": True}),
    ("samples add x.npy --label -1 --new-class",
     {"file": Path("x.npy"), "label": "-1", "labels": None, "target": None, "new_class": True, "home": HERE}),
    ("samples add x.npy --target=-1.5,2",
     {"file": Path("x.npy"), "label": None, "labels": None, "target": "-1.5,2", "new_class": False,
          "home": HERE}),
    ("samples drop --last 2", {"last": 2, "home": HERE}),
    ("energy --seconds 0.1", {"home": HERE, "profile": None, "seconds": 0.1, "as_json": False}),
    ("doctor --profile pi --run --measure",
     {"home": HERE, "profile": "pi", "run": True, "measure": True, "as_json": False}),
])
def test_a_command_gets_its_options(monkeypatch: pytest.MonkeyPatch, line: str, options: dict[str, Any]) -> None:
    monkeypatch.delenv("METAFLEET_HOME", raising=False)
    assert asked(*line.split()) == options


def test_energy_calibrate_gets_its_own_options(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAFLEET_HOME", "at")
    found = asked("energy", "calibrate", "--meter-watts", "2.5", "6")
    assert (found["meter_watts"], found["radio_j_per_byte"], found["home"]) == ([2.5, 6.0], None, Path("at"))


def test_options_come_from_the_environment_unless_given(monkeypatch: pytest.MonkeyPatch) -> None:
    variables = {"HOME": "at", "BROKER": "mqtt://b:1", "TOKEN": "t", "PLAIN": "true"}
    for name, value in variables.items():
        monkeypatch.setenv(f"METAFLEET_{name}", value)
    told = {"home": Path("at"), "broker": "mqtt://b:1", "connect_s": 60.0, "token": Path("t"), "plain": True}
    assert asked("run") == told
    assert asked("run", "--home", "d", "--broker", "mqtt://c:1") == {**told, "home": Path("d"), "broker": "mqtt://c:1"}
    for name in variables:
        monkeypatch.setenv(f"METAFLEET_{name}", "")
    assert asked("run") == {"home": HERE, "broker": None, "connect_s": 60.0, "token": None, "plain": False}
    monkeypatch.setenv("METAFLEET_PLAIN", "0")
    assert not asked("run")["plain"]


# What it says ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("line", "words"), [
    ("predic x.npy", "edge-agent: there is no command 'predic' (did you mean 'predict'?)"),
    ("samples ad", "edge-agent samples: there is no command 'ad' (did you mean 'add'?)"),
    ("predict --hom d x.npy", "edge-agent predict: there is no option '--hom' (did you mean '--home'?)"),
    ("predict --jso=1 x.npy", "there is no option '--jso' (did you mean '--json'?)"),
    ("--home d predict x.npy", "edge-agent: there is no option '--home'"),
    ("energy calibrate --seconds-more 1", "edge-agent energy calibrate: there is no option '--seconds-more'"),
    ("predict", "edge-agent predict: the following arguments are required: INPUT"),
    ("predict x.npy y.npy", "unrecognized arguments: y.npy"),
    ("predict x.npy --home", "edge-agent predict: argument --home: expected one argument"),
    ("samples drop --last 0", "argument --last: '0' is not a whole number from 1"),
    ("serve --port 65536", "argument --port: '65536' is not a whole number from 0 to 65535"),
    ("serve --port http", "argument --port: 'http' is not a whole number from 0 to 65535"),
    ("energy --seconds nan", "argument --seconds: 'nan' is not a number from 0.1 to 86400"),
    ("personalize --steps few", "edge-agent personalize: argument --steps: "),
    ("energy calibrate", "edge-agent energy calibrate: give --meter-watts IDLE BUSY"),
    ("energy calibrate --meter-watts 1", "argument --meter-watts: expected 2 arguments"),
])
def test_wrong_arguments_are_named_with_what_was_meant(run, line: str, words: str) -> None:
    done = run(*line.split())
    assert (done.code, done.out) == (2, "")
    assert done.err.startswith("error: ")
    assert words in done.err
    assert "Traceback" not in done.err


def test_verbose_shows_the_traceback_wherever_it_stands(run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("METAFLEET_VERBOSE", "")
    assert "Traceback" in run("predict", "--verbose").err


def test_help_of_every_command_shows_its_options_and_ends_well(run) -> None:
    for leaf in leaves(cli.parser()):
        path = leaf.prog.split()[1:]
        done = run(*path, "--help")
        assert (done.code, done.err) == (0, "")
        assert done.out == run(*path, "-h").out
        assert all(option in done.out for option in leaf._option_string_actions)
        assert all(name in done.out for name in leaf.commands)


def test_the_help_of_every_command_has_an_example_whose_words_it_takes(run) -> None:
    doing = [leaf for leaf in leaves(cli.parser()) if leaf.get_default("action") != leaf._show_help]
    assert {leaf.prog.removeprefix("edge-agent ") for leaf in doing} == set(EXAMPLES)
    for name, example in EXAMPLES.items():
        assert example.startswith(f"edge-agent {name}")
        asked(*example.split()[1:])
        assert f"Example: {example}" in " ".join(run(*name.split(), "--help").out.split())


@pytest.mark.parametrize("line", ["", "samples"])
def test_without_a_command_the_help_is_shown_as_an_error(run, line: str) -> None:
    done = run(*line.split())
    assert (done.code, done.out) == (2, "")
    assert done.err == run(*line.split(), "--help").out


def test_two_parsers_of_one_name_are_not_confused() -> None:
    parser = Parser("p", "A program.")
    parser.command("a", "A group.").command("b", "A command.", lambda given: None)
    with pytest.raises(ConfigError, match="p: there is no command 'b'"):
        parser.run(["b"])


# What it loads --------------------------------------------------------------------------------------------------------

LOADED = '''
import atexit, os, sys

started = set(sys.modules)  # an environment may load some at every start

def tell():
    names = {name.partition(".")[0] for name, module in sys.modules.copy().items()
             if name not in started and "site-packages" in (getattr(module, "__file__", None) or "")}
    with open(os.environ["LOADED"], "a") as file:
        file.write(f"{' '.join(sys.orig_argv[1:])}: {' '.join(sorted(names))}\\n")

atexit.register(tell)
'''
"""As sitecustomize.py it writes which third-party modules each Python process had loaded at its end."""
DEVICES = {"numpy", "onnxruntime", "safetensors", "paho", "cryptography", "_cffi_backend", "backports", "tomli"}
"""All that a device may load without torch; backports.zstd and tomli with the Pythons that lack them."""
IF_INSTALLED = {"socks"}
"""What paho uses if it is installed. No package of a device installs it; the driver of the tests' browser does."""


@pytest.mark.slow
def test_serving_personalizing_and_running_load_a_devices_packages_and_no_more(tmp_path: Path) -> None:
    place = homes.home(tmp_path / "d0", toy(1))
    homes.service_with_model(place, "pfldyn-maml")
    np.save(tmp_path / "x.npy", toy(5).x[:3])
    (tmp_path / "first").mkdir()
    (tmp_path / "first" / "sitecustomize.py").write_text(LOADED)
    environ = clean_environ(LOADED=str(tmp_path / "loaded"), PYTHONPATH=f"{tmp_path / 'first'}:{ROOT}")

    def ended(*arguments: object) -> subprocess.CompletedProcess[str]:
        return subprocess.run(edge_agent(*arguments), cwd=ROOT, env=environ, capture_output=True, text=True,
                              timeout=PATIENCE_S)

    def loaded() -> list[tuple[str, set[str]]]:
        """(command, its modules) of each process that has ended since the last call."""
        lines = (tmp_path / "loaded").read_text().splitlines()
        (tmp_path / "loaded").unlink()
        return [(command, set(names.split())) for command, _, names in (line.rpartition(": ") for line in lines)]

    assert ended("--help").returncode == 0
    assert loaded()[0][1] == set()
    assert ended("personalize", "--home", place, "--by", "adapt").returncode == 0
    assert ended("predict", tmp_path / "x.npy", "--home", place).returncode == 0
    processes = loaded()
    assert len(processes) >= 3, "steps have a process of their own"
    assert processes[-1][1] <= {"numpy", "onnxruntime", "safetensors", "backports", "tomli"}
    with programs_in(tmp_path) as programs:
        program = programs.start(*edge_agent("serve", "--home", place, "--port", 0), environ=environ, cwd=ROOT)
        program.wait_for("answers at http://127.0.0.1:")
        port = int(program.text().partition("http://127.0.0.1:")[2].partition("/")[0])
        assert urllib.request.urlopen(f"http://127.0.0.1:{port}/v2/health/ready").status == 200
    done = ended("run", "--home", place, "--broker", "mqtt://127.0.0.1:1", "--connect-s", 1)
    assert (done.returncode, done.stdout) == (1, ""), done.stderr
    processes += loaded()
    assert {name for _, names in processes for name in names} - DEVICES - IF_INSTALLED == set(), processes
    assert {"paho", "onnxruntime"} <= processes[-1][1], "it was the agent that ended"


def test_an_agent_is_started_before_its_libraries_are_loaded(tmp_path: Path) -> None:
    program = """
import sys
from edge_agent.commands import cli
from fleet_core.base import processes
def told(*command):
    print(*command, *{"numpy", "cryptography", "paho", "ssl", "onnxruntime"} & set(sys.modules))
processes.exec_module = told
cli.main()
"""
    home = homes.home(tmp_path / "d0", toy(1))
    command = [sys.executable, "-c", program, "run", "--home", str(home), "--plain"]
    done = subprocess.run(command, cwd=ROOT, env=clean_environ(), capture_output=True, text=True, timeout=PATIENCE_S)
    assert done.stdout.split() == ["edge_agent.commands.run", "--home", str(home), "60.0", "--plain"], done.stderr


def test_the_operators_program_says_what_to_install_where_only_a_devices_packages_are() -> None:
    program = """
import importlib.util, sys
found = importlib.util.find_spec
importlib.util.find_spec = lambda name, *more: None if name in ("typer", "rich") else found(name, *more)
sys.modules.update(typer=None, rich=None)
from cloud_server.commands.start import main
main()
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert (done.returncode, done.stdout) == (2, "")
    assert "typer and rich" in done.stderr
    assert 'hint: pip install "metafleet[server]"' in done.stderr


def test_json_is_the_only_thing_on_stdout(tmp_path: Path, run) -> None:
    place = homes.home(tmp_path / "d0", toy(1))
    homes.service_with_model(place, "pfldyn-proto")
    np.save(tmp_path / "x.npy", toy(5).x[:3])
    done = run("predict", tmp_path / "x.npy", "--home", place, "--json")
    assert json.loads(done.out)["round"] == 1


def test_who_asks_on_the_device_is_told_how_far_its_probabilities_can_be_trusted(tmp_path: Path, run) -> None:
    place = homes.home(tmp_path / "d0", toy(1))
    homes.service_with_model(place, "pfldyn-proto")
    np.save(tmp_path / "x.npy", toy(5).x[:3])
    held_back = homes.restored(place).held_back()
    assert held_back is not None
    error = held_back.figures["calibration_error"]
    said = f"on {held_back.samples} held-back samples: accuracy {held_back.text}, calibration error {error:.3f}"
    assert said in run("predict", tmp_path / "x.npy", "--home", place).err
    (place / "samples.npz").write_bytes(b"damaged")
    answered = run("predict", tmp_path / "x.npy", "--home", place)
    assert "sample" in answered.out
    assert "calibration" not in answered.err
