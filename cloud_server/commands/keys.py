"""``metafleet server encrypt-keys``: the passphrase of the fleet's keys."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from cloud_server.devices.devices import FLEET
from fleet_core.base import processes
from fleet_core.base.errors import ConfigError


def add_to(server_app: typer.Typer) -> None:
    server_app.command("encrypt-keys")(encrypt_keys)


def encrypt_keys(
    fleet: FLEET,
    change: Annotated[bool, typer.Option("--change", help="Take another passphrase.")] = False,
    remove: Annotated[bool, typer.Option("--remove", help="Write the keys plain again.")] = False,
) -> None:
    """Give the fleet's keys a passphrase, which every command that signs then asks for."""
    from cloud_server.identity import audit_log
    from cloud_server.records import key_files
    from cloud_server.records.fleet_folder import Fleet

    if change and remove:
        raise ConfigError("--change and --remove at once", expected="one of them")
    made = Fleet.load(fleet)
    with made.lock():  # an aggregator that runs has read them plain, or not
        if change:
            key_files.change(fleet)
        elif remove:
            key_files.decrypt(fleet)
        else:
            encrypt(fleet)
    said = "another passphrase" if change else "keys plain" if remove else "keys encrypted"
    audit_log.done(fleet, "encrypt keys", text=said)
    print(said)
    if not remove:
        processes.say("whoever forgets the passphrase has lost the fleet; copies made before keep what they had")


def encrypt(fleet: Path) -> None:
    """Raises ConfigError, StateError."""
    from cloud_server.records import key_files

    key_files.encrypt(fleet)
