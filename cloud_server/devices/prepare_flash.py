"""Reads a device file with its fleet, board and broker, and makes the package for the device.

Only ``invited`` changes the fleet: it makes the one-time token. It is called last, after every check.
"""

from __future__ import annotations

import json
import os
import tempfile
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from cloud_server.devices import devices
from cloud_server.identity import device_folder, token_authority, token_enrolment
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Invitation
from cloud_server.records.fleet_folder import Fleet
from firmware_profiles.package import board_needs as machine
from firmware_profiles.package import device_file, device_package, own_wheels, program
from firmware_profiles.package.board_needs import Machine
from firmware_profiles.package.device_file import DeviceFile
from firmware_profiles.package.device_package import Package, Signing
from firmware_profiles.package.program import Program
from fleet_core.algorithms.methods.registry import PRODUCT
from fleet_core.algorithms.plugins import GROUP
from fleet_core.base import config, schema
from fleet_core.base.errors import ConfigError
from fleet_core.base.schema import Problem
from fleet_core.board import catalogue, source_settings
from fleet_core.board import device_settings as agents
from fleet_core.board import profile as boards
from fleet_core.board.source_settings import BUTTONS, SOURCES, Button, Source
from fleet_core.link import broker_password
from fleet_core.link.broker_password import BrokerLogin
from fleet_core.link.host_names import is_loopback
from fleet_core.link.mqtt import check_plain, parse_url
from fleet_core.protocol import enrolment_token

VALID_S = 30 * 86400.0  # a token's lifetime
TOKEN_STEP_BYTES = 1024
TABLES = {"data": agents.Data, "train": agents.Training, "personalize": agents.Personalize, "serve": agents.Serve,
          "metrics": agents.Metrics, "power": agents.Power, "radio": agents.Radio, "unlabelled": agents.Unlabelled,
          "alarm": agents.Alarm, "privacy": agents.Demands, "broker_login": BrokerLogin}


@dataclass(frozen=True)
class Sensors:
    """The lists of tables for the agent."""

    source: tuple[Source, ...] = field(default=(), metadata={"variants": SOURCES, "max_length": 32})
    button: tuple[Button, ...] = field(default=(), metadata={"variants": BUTTONS, "max_length": 32})


@dataclass(frozen=True)
class Prepared:
    """Everything that is known before a token is made. broker: its URL. without_token: the broker asks for no
    certificate: it is mqtt://, or the device logs in there."""

    device: DeviceFile
    fleet: Fleet
    profile: Path
    machine: Machine
    broker: str
    without_token: bool

    @property
    def wheels(self) -> tuple[Path, ...]:
        """The user's own wheels, which are installed too."""
        return tuple(map(Path, self.device.wheels))


def prepare(path: Path, *, python: str | None = None) -> Prepared:
    """The device file with its fleet, board and broker. python: the version found on the device. Raises ConfigError."""
    device = device_file.load(path, os.environ, partial(_problems, path.parent))
    fleet = Fleet.load(path.parent / Path(os.path.expanduser(device.fleet)))
    profile = _profile(device.board, path.parent)
    train, engine = device.train.get("enabled", True) is not False, str(device.train.get("engine", "auto"))
    system = machine.of(boards.load(profile), device.os, train=train, engine=engine, python=python)
    program.check_python(system)
    _check_own_code(fleet, system, device, path)
    broker = devices.broker_for_token(device.broker, fleet)
    url = parse_url(broker)
    if is_loopback(url.host):
        raise ConfigError(f"the device would look for the broker at {url.host} on itself", where=str(path),
                          hint='broker = "mqtts://ADDRESS" as the device reaches it')
    check_plain(broker, fleet.config.link.plain)
    broker_password.login_of(path.parent, BrokerLogin(**device.broker_login))
    return Prepared(device, fleet, profile, system, broker, not url.tls or bool(device.broker_login))


def _check_own_code(fleet: Fleet, system: Machine, device: DeviceFile, path: Path) -> None:
    """Raises ConfigError if the fleet uses a model or method of the user's own and no wheel of the device has it."""
    model, method = fleet.config.model.name, fleet.config.fleet.method
    module, _, build = model.partition(":")
    own = []
    if build and system.torch and not any(own_wheels.holds(Path(wheel), module) for wheel in device.wheels):
        own.append(f"model '{model}'")
    if method not in PRODUCT and not any(method in own_wheels.entry_points(Path(w), GROUP) for w in device.wheels):
        own.append(f"method '{method}'")
    if own:
        raise ConfigError(f"the fleet's {' and '.join(own)} would not be on the device",
                          where=str(path), hint='wheels = ["my_lab-1.0-py3-none-any.whl"], as python -m build makes it')


def _profile(board: str, folder: Path) -> Path:
    """The board's profile file. Raises ConfigError."""
    return folder / board if board.endswith(".toml") else catalogue.path_of(board)


def _problems(folder: Path, tables: Mapping[str, Any]) -> list[Problem]:
    """Mistakes in what a device file refers to, and in the tables that are for the agent, by the agent's own schema."""
    found = []
    for name, kind in TABLES.items():
        if isinstance(table := tables.get(name), dict):
            _, problems = schema.read(kind, table)
            found += [Problem(f"{name}.{problem.key}", problem.what, problem.hint) for problem in problems]
    sensors, problems = schema.read(Sensors, {key: tables[key] for key in ("source", "button") if key in tables})
    found += problems
    if sensors is not None:
        with _collecting("source", found):
            source_settings.check(sensors.source, sensors.button, "")
    fleet, board = tables.get("fleet"), tables.get("board")
    if isinstance(fleet, str) and not (folder / Path(os.path.expanduser(fleet)) / "fleet.toml").is_file():
        found.append(Problem("fleet", f"there is no fleet here: '{fleet[:200]}' (metafleet init makes one)"))
    if isinstance(board, str):
        with _collecting("board", found):
            if not (path := _profile(board, folder)).is_file():
                raise ConfigError(f"there is no file '{path}'")
    if isinstance(tables.get("broker"), str):
        with _collecting("broker", found):
            parse_url(tables["broker"])
    return found


@contextmanager
def _collecting(key: str, found: list[Problem]) -> Iterator[None]:
    """Appends a ConfigError to ``found`` as a problem of ``key``."""
    try:
        yield
    except ConfigError as error:
        found.append(Problem(key, error.what + (f", expected {error.expected}" if error.expected else "")))


# The package ----------------------------------------------------------------------------------------------------------


def package_of(made: Prepared, built: Program, secret: bytes | None, *, with_token: bool = True) -> Package:
    """The device's package. secret: the token; None for a placeholder of the same length, for a dry run. with_token:
    False for a device that is already enrolled. The fleet's key signs it. Raises FleetError."""
    tables: dict[str, Any] = {**made.device.tables, "board": {"profile": "profile.toml"}}
    home = {"profile.toml": made.profile.read_bytes()}
    backbone, data = made.fleet.config.model.backbone, made.fleet.backbone_bytes()
    if backbone is not None and data is not None:
        home[f"backbone-{backbone.id}.safetensors"] = data  # what the agent would fetch first
    if made.without_token:
        login = BrokerLogin(**made.device.broker_login)
        login_tables, files = device_folder.login_parts(made.fleet, made.broker, login, Path())
        tables, home = {**tables, **login_tables}, {**home, **files}
        with tempfile.TemporaryDirectory() as folder:
            path = device_folder.write_device_folder(made.fleet, made.device.name, Path(folder), made.broker, **tables)
            home["device.toml"] = path.read_bytes()
    else:
        home["device.toml"] = config.toml(tables).encode()
        if with_token:
            home[enrolment_token.FILE] = b"*" * len(_token(made)[0]) if secret is None else secret
    signing = Signing(made.fleet.config.fleet.name, made.fleet.signer())
    return device_package.make(made.device.name, made.machine, built, home, (enrolment_token.FILE,), signing=signing)


def invited(made: Prepared) -> bytes:
    """A new one-time token for the device, registered in the ledger; empty if the broker needs none."""
    name = made.device.name
    with Ledger(made.fleet.ledger_path) as ledger:
        if made.without_token:
            ledger.request_enrolment(name)
            return b""
        secret, invitation = _token(made)
        ledger.request(f"{token_authority.INVITE}{invitation.id}", json.dumps(schema.plain(invitation)))
    return secret


def _token(made: Prepared) -> tuple[bytes, Invitation]:
    """(a token file's content, its row for the ledger). The token is worthless until the ledger has the row. Signatures
    differ by some bytes, so the file is padded with empty lines to keep the placeholder of a dry run as long."""
    url = token_enrolment.enrolment_url(made.fleet, made.broker)
    issued, invitation = token_enrolment.make_token(made.fleet, made.device.name, made.broker, url, VALID_S)
    text = config.toml(schema.plain(issued)).encode()
    return text + b"\n" * (-len(text) % TOKEN_STEP_BYTES), invitation
