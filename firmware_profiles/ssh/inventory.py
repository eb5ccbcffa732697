"""INVENTORY.toml: the devices that ``metafleet flash --all`` installs, with their addresses.

    [[devices]]
    file = "kitchen.toml"                     # its DEVICE.toml, beside this file or absolute
    to = "ssh://pi@kitchen.local"
    accept_host_key = "SHA256:..."            # if its host key is not known here yet

    [[devices]]
    file = "cellar.toml"
    to = "ssh://pi@192.168.1.17:2222"
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from firmware_profiles.ssh import ssh_connection
from fleet_core.base import config, schema
from fleet_core.base.errors import ConfigError
from fleet_core.base.schema import Problem

MAX_DEVICES = 10_000


@dataclass(frozen=True)
class Entry:
    """file: path of the device file. to: ssh://user@host[:port]."""

    file: str = field(metadata={"max_length": 4096})
    to: str = field(metadata={"max_length": 512})
    accept_host_key: str | None = field(default=None, metadata={"pattern": ssh_connection.FINGERPRINT.pattern})

    @property
    def name(self) -> str:
        """The file's name without its suffix."""
        return Path(self.file).stem


@dataclass(frozen=True)
class Inventory:
    devices: tuple[Entry, ...] = field(metadata={"max_length": MAX_DEVICES})


def load(path: Path) -> tuple[Entry, ...]:
    """The devices; their file paths are relative to the inventory. Raises ConfigError that lists every mistake."""
    text = config.text_of(path)
    inventory, problems = schema.read(Inventory, config.tables(text, str(path)))
    entries = () if inventory is None else tuple(
        replace(entry, file=str(path.parent / Path(os.path.expanduser(entry.file)))) for entry in inventory.devices
    )
    problems += _problems(entries)
    if inventory is None or problems:
        raise config.mistakes(problems, text, str(path))
    return entries


def _problems(entries: tuple[Entry, ...]) -> Iterator[Problem]:
    for field_name in ("file", "to"):
        values = [getattr(entry, field_name) for entry in entries]
        counts = Counter(values)
        for number, value in enumerate(values):
            if counts[value] > 1 and values.index(value) < number:
                yield Problem(f"devices[{number}].{field_name}", f"'{value}' is there twice")
    for number, entry in enumerate(entries):
        if not Path(entry.file).is_file():
            yield Problem(f"devices[{number}].file", f"there is no file '{entry.file}'")
        try:
            ssh_connection.parse(entry.to)
        except ConfigError as error:
            yield Problem(f"devices[{number}].to", str(error))
