"""Makes the folder that an agent starts from: who it is, where its broker is, whose signature it believes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cloud_server.fleet import Fleet
from fleet_core import config, schema, storage, topics
from fleet_core.errors import ConfigError
from fleet_core.link.mqtt import parse_url


@dataclass(frozen=True)
class DeviceFile:
    """The tables of a device.toml, as a person wrote them."""

    device: Mapping[str, Any]
    data: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    power: Mapping[str, Any] = field(default_factory=dict)


def device_folder(fleet: Fleet, name: str, folder: Path, broker: str, **sections: dict[str, Any]) -> Path:
    """``device.toml`` in ``folder``. sections: its other tables (data, train, power); those not given stay as they are.
    Raises ConfigError when the folder is a fleet's or another device's."""
    topics.check_name(name, "device")
    parse_url(broker)
    if (folder / "fleet.toml").exists():
        raise ConfigError("is a fleet's own folder", where=str(folder), hint="take an empty one")
    identity = {"name": name, "fleet": fleet.config.fleet.name, "key": fleet.public_key(), "broker": broker}
    path = folder / "device.toml"
    known = _known(path)
    for key in ("name", "fleet", "key"):
        found = known.get("device", identity).get(key)
        if found != identity[key]:
            raise ConfigError(f"is another device's folder: its {key} is '{found}'", where=str(path),
                              expected=f"'{identity[key]}'", hint="take an empty one")
    wanted = {**known, "device": identity, **sections}
    if wanted != known:
        storage.write_atomic(path, config.toml(wanted).encode())
    return path


def _known(path: Path) -> dict[str, Any]:
    """The file's tables that are not empty; none when there is no file."""
    if not path.exists():
        return {}
    tables = schema.plain(config.load(DeviceFile, path))
    return {name: table for name, table in tables.items() if table}


