"""Writes the folder that an agent starts from: the device's name, its fleet, broker and the fleet's public key."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloud_server.identity import fleet_certificates
from cloud_server.records import signing_keys
from cloud_server.records.fleet_folder import Fleet
from fleet_core.base import config, schema, storage
from fleet_core.base.errors import ConfigError
from fleet_core.link import broker_password
from fleet_core.link.broker_password import BrokerLogin
from fleet_core.link.host_names import is_loopback
from fleet_core.link.mqtt import parse_url
from fleet_core.protocol import topics

MAX_CA_BYTES = 1 << 20


@dataclass(frozen=True)
class DeviceFile:
    """The tables of a device.toml as they are written, without the agent's defaults."""

    device: Mapping[str, Any] = field(default_factory=dict)
    data: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    board: Mapping[str, Any] = field(default_factory=dict)
    power: Mapping[str, Any] = field(default_factory=dict)
    radio: Mapping[str, Any] = field(default_factory=dict)
    personalize: Mapping[str, Any] = field(default_factory=dict)
    serve: Mapping[str, Any] = field(default_factory=dict)
    metrics: Mapping[str, Any] = field(default_factory=dict)
    tls: Mapping[str, Any] = field(default_factory=dict)
    unlabelled: Mapping[str, Any] = field(default_factory=dict)
    alarm: Mapping[str, Any] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)
    broker_login: Mapping[str, Any] = field(default_factory=dict)
    source: tuple[Mapping[str, Any], ...] = ()
    button: tuple[Mapping[str, Any], ...] = ()


def write_device_folder(fleet: Fleet, name: str, folder: Path, broker: str, **sections: dict[str, Any]) -> Path:
    """Writes ``device.toml`` in ``folder`` and returns its path. sections: other tables (data, train, power); tables of
    an existing file that are not given stay. Raises ConfigError if the folder is a fleet's or another device's."""
    topics.check_name(name, "device")
    identity: dict[str, Any] = {**_identity(fleet, name), "broker": broker}
    if not (parse_url(broker).tls or is_loopback(parse_url(broker).host)):
        identity["plain"] = True
    path = folder / "device.toml"
    check_folder(fleet, name, folder)
    known = _known(path)
    wanted = {**known, "device": identity, **sections}
    if wanted != known:
        storage.write_atomic(path, config.toml(wanted).encode())
    return path


def login_parts(
    fleet: Fleet, broker: str, section: BrokerLogin, folder: Path
) -> tuple[dict[str, dict[str, Any]], dict[str, bytes]]:
    """(tables of device.toml, files beside it) of a device that logs in at ``broker`` and shows no certificate; empty
    without a login. section: its password file is relative to ``folder``. Raises ConfigError, StateError."""
    login, files = broker_password.login_of(folder, section), dict[str, bytes]()
    if not login:
        return {}, files
    tables: dict[str, dict[str, Any]] = {"broker_login": {"username": login["username"]}}
    if "password" in login:
        tables["broker_login"]["password_file"] = broker_password.FILE
        files[broker_password.FILE] = login["password"].encode() + b"\n"
    authority = fleet_certificates.broker_authority(fleet) if parse_url(broker).tls else None
    if authority is not None:
        tables["tls"] = {"ca": "ca.pem"}
        files["ca.pem"] = storage.read_bytes(authority, limit=MAX_CA_BYTES)
    return tables, files


def check_folder(fleet: Fleet, name: str, folder: Path | None) -> None:
    """Raises ConfigError if the folder is a fleet's or another device's."""
    if folder is None:
        return
    if (folder / "fleet.toml").exists():
        raise ConfigError("is a fleet's own folder", where=str(folder), hint="take an empty one")
    path, identity = folder / "device.toml", _identity(fleet, name)
    known = _known(path)
    for key in ("name", "fleet", "key"):
        found = known.get("device", identity).get(key)
        if found != identity[key] and (key != "key" or found not in signing_keys.known(fleet.folder)):
            raise ConfigError(f"is another device's folder: its {key} is '{found}'", where=str(path),
                              expected=f"'{identity[key]}'", hint="take an empty one")


def _identity(fleet: Fleet, name: str) -> dict[str, str]:
    return {"name": name, "fleet": fleet.config.fleet.name, "key": fleet.public_key()}


def _known(path: Path) -> dict[str, Any]:
    """The non-empty tables of the file; none if there is no file."""
    if not path.exists():
        return {}
    tables = schema.plain(config.load(DeviceFile, path))
    return {name: table for name, table in tables.items() if table}


