"""The container of the aggregator: its files match the project, and it is built where a builder runs."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import typer
import yaml
from packaging.specifiers import SpecifierSet

from cloud_server.broker import mosquitto_config
from cloud_server.broker.mosquitto_config import ENROLMENT_PORT, PORT, BrokerSetup
from cloud_server.commands import cli
from tests.support.paths import ROOT

FOLDER = ROOT / "container"
FILE, COMPOSE, PAGE = FOLDER / "Containerfile", FOLDER / "compose.yaml", ROOT / "docs" / "container.md"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))
NO_BUILDER = "no builder of images runs here"
BASE = "METAFLEET_CONTAINER_BASE"
"""The environment's variable that names an image to build on where no registry is reached."""
INSTRUCTIONS = {"ARG", "FROM", "WORKDIR", "COPY", "RUN", "ENV", "USER", "VOLUME", "ENTRYPOINT", "CMD"}


def instructions() -> list[tuple[str, str]]:
    """(instruction, its text) of the Containerfile; continued lines are joined."""
    text = re.sub(r"\\\n\s*", " ", FILE.read_text(encoding="utf-8"))
    lines = [line for line in text.splitlines() if line and not line.startswith("#")]
    return [(word, rest) for word, _, rest in (line.partition(" ") for line in lines)]


def of(word: str) -> list[str]:
    return [rest for instruction, rest in instructions() if instruction == word]


def default(argument: str) -> str:
    """The default of an ``ARG``."""
    given, = (value for name, _, value in (text.partition("=") for text in of("ARG")) if name == argument)
    return given


def services() -> dict[str, Any]:
    found: dict[str, Any] = yaml.safe_load(COMPOSE.read_text(encoding="utf-8"))["services"]
    return found


def sources() -> set[str]:
    """What is copied from the repository."""
    return {source for copied in of("COPY") if not copied.startswith("--from=") for source in copied.split()[:-1]}


def test_only_known_instructions() -> None:
    assert {word for word, _ in instructions()} == INSTRUCTIONS


def test_what_is_copied_exists_is_all_of_the_wheel_and_is_not_left_out() -> None:
    copied = sources()
    assert {name for name in copied if not (ROOT / name).exists()} == set()
    assert set(PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]) <= copied
    assert {PROJECT["project"]["readme"], *PROJECT["project"]["license-files"]} <= copied
    kept = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    assert {name.partition("/")[0] for name in copied} == kept


def test_python_and_extras_are_the_projects() -> None:
    assert {text.split()[0] for text in of("FROM")} == {"${BASE}"}
    version, = re.findall(r"^docker\.io/library/python:(\d+\.\d+)-slim$", default("BASE"))
    assert version in {"3.11", "3.12", "3.13", "3.14"}, "a Python that requirements/constraints.txt is for"
    assert SpecifierSet(PROJECT["project"]["requires-python"]).contains(version)
    assert ".whl)[${EXTRAS}]" in " ".join(of("RUN"))
    assert set(default("EXTRAS").split(",")) <= set(PROJECT["project"]["optional-dependencies"])
    entry, = of("ENTRYPOINT")
    assert set(json.loads(entry)) <= set(PROJECT["project"]["scripts"])


def started() -> list[tuple[str, list[str]]]:
    """(where, arguments of ``metafleet``)."""
    command, = of("CMD")
    mine = [(name, one["command"]) for name, one in services().items() if one["image"] == "metafleet"]
    return [("Containerfile", json.loads(command)), *mine]


@pytest.mark.parametrize(("where", "arguments"), started())
def test_the_commands_are_metafleets(where: str, arguments: list[str]) -> None:
    command: Any = typer.main.get_command(cli.app)
    rest = list(arguments)
    while hasattr(command, "commands"):
        command = command.commands[rest.pop(0)]
    given = command.make_context(where, rest).params
    assert given["fleet"] == Path("/fleet")


def test_the_broker_runs_the_configuration_that_the_page_says_to_write(tmp_path: Path) -> None:
    broker = services()["mosquitto"]
    at, = re.findall(r"--at (\S+)", PAGE.read_text(encoding="utf-8"))
    assert broker["command"] == ["mosquitto", "-c", f"{at}/mosquitto.conf"]
    assert [volume.rsplit(":", 1)[1] for volume in broker["volumes"]] == [at]
    assert broker["volumes"][0].rsplit(":", 1)[0].endswith("/mosquitto")
    setup = BrokerSetup(("pi-hub.local", "mosquitto"), at=at)
    conf = mosquitto_config.write(tmp_path, "greenhouse", setup, ()).read_text()
    named = re.findall(r"(?m)^(?:persistence_location|cafile|crlfile|acl_file|certfile|keyfile) (\S+)$", conf)
    assert len(named) == 10
    assert all(path.startswith(f"{at}/") for path in named)
    assert broker["ports"] == [f"{port}:{port}" for port in (PORT, ENROLMENT_PORT)]
    assert [int(port) for port in re.findall(r"(?m)^listener (\d+)$", conf)] == [PORT, ENROLMENT_PORT]
    aggregator = services()["aggregator"]["command"]
    assert aggregator[aggregator.index("--broker") + 1] == f"mqtts://mosquitto:{PORT}"


def test_the_compose_file_has_what_the_page_sets_and_builds_this_file() -> None:
    text = COMPOSE.read_text(encoding="utf-8")
    variables = set(re.findall(r"\$\{(\w+)", text))
    exported, = re.findall(r"(?m)^export (.*)$", PAGE.read_text(encoding="utf-8"))
    assert variables == set(re.findall(r"(\w+)=", exported))
    build = services()["aggregator"]["build"]
    assert (COMPOSE.parent / build["context"] / build["dockerfile"]).resolve() == FILE
    assert {user for one in services().values() for user in [one["user"]]} == {"${FLEET_USER:-1000:1000}"}


def builder() -> str | None:
    """A program that can build images on this machine."""
    for name in ("podman", "buildah", "docker"):
        if shutil.which(name) and subprocess.run([name, "info"], capture_output=True, check=False).returncode == 0:
            return name
    return None


@pytest.mark.slow
@pytest.mark.allowed_skip(NO_BUILDER)
def test_the_image_is_built_and_knows_its_commands() -> None:
    program = builder()
    if program is None:
        pytest.skip(NO_BUILDER)
    base = os.environ.get(BASE, default("BASE"))
    if BASE not in os.environ and subprocess.run([program, "pull", base], capture_output=True, check=False).returncode:
        pytest.skip(f"{NO_BUILDER} that gets {base}; {BASE} may name another image with Python and pip")
    image = "metafleet-test"
    built = [program, "build", "--build-arg", f"BASE={base}", "-f", str(FILE), "-t", image, str(ROOT)]
    subprocess.run(built, check=True)
    if program == "buildah":
        made = subprocess.run(["buildah", "from", image], capture_output=True, text=True, check=True).stdout.strip()
        run, clean = ["buildah", "run", made, "--", "metafleet"], ["buildah", "rm", made]
    else:
        run, clean = [program, "run", "--rm", image], []
    try:
        said = subprocess.run([*run, "--version"], capture_output=True, text=True, check=True)
        assert re.fullmatch(r"\S*\d+\.\d+\.\d+\s*", said.stdout)
    finally:
        if clean:
            subprocess.run(clean, check=True)
