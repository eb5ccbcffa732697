"""Makes the folder that an agent starts from: who it is, where its broker is, whose signature it believes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from cloud_server.fleet import Fleet
from fleet_core import config, storage, topics
from fleet_core.errors import ConfigError


def device_folder(fleet: Fleet, name: str, folder: Path, broker: str, **sections: dict[str, Any]) -> Path:
    """``device.toml`` in ``folder``. sections: its other tables (data, train, power). Raises ConfigError when the
    folder is another device's."""
    topics.check_name(name, "device")
    identity = {"name": name, "fleet": fleet.config.fleet.name, "key": fleet.public_key(), "broker": broker}
    path = folder / "device.toml"
    text = config.toml({"device": identity, **sections})
    if path.exists() and f'name = "{name}"' not in path.read_text(encoding="utf-8"):
        raise ConfigError("is another device's folder", where=str(path), hint="take an empty one")
    storage.write_atomic(path, text.encode())
    return path


