"""``metafleet server install``: installs the aggregator of a fleet as a systemd service."""

from __future__ import annotations

import os
import pwd
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cloud_server.records.fleet_folder import Fleet
from cloud_server.records.key_files import CREDENTIAL
from fleet_core.base import processes, storage
from fleet_core.base.errors import ConfigError, StateError
from fleet_core.base.processes import typed

SYSTEM = Path("/etc/systemd/system")

UNIT = """\
# Written by 'metafleet server install'.
[Unit]
Description=Metafleet aggregator of the fleet {fleet}
Wants=network-online.target
After=network-online.target time-sync.target

[Service]
{account}WorkingDirectory={parent}
ExecStart={command}
# The aggregator ends its broker itself.
KillMode=mixed
Restart=on-failure
RestartSec=5
LimitNOFILE=65536
NoNewPrivileges=yes
PrivateTmp=yes
ProtectSystem=strict
ReadWritePaths={folder}
{credential}
[Install]
WantedBy={target}
"""


@dataclass(frozen=True)
class Service:
    """A fleet's service. path, text: its unit file. user: it is a service of the calling user, not of the system."""

    path: Path
    text: str
    user: bool

    @property
    def name(self) -> str:
        return self.path.name


def service_of(
    fleet: Fleet, options: Sequence[str], *, user: bool, home: Path | None = None, passphrase: Path | None = None
) -> Service:
    """The service that runs ``metafleet server start`` with these options. A system service runs as the owner of the
    fleet's folder. home: of the calling user. passphrase: the file with the passphrase of the fleet's keys; systemd
    reads it as root and shows it to the service alone. systemd decrypts a file that ends in .cred, as systemd-creds
    makes it.

    Raises ConfigError if that owner is root, or a path cannot be written in a unit file."""
    folder = fleet.folder.resolve()
    command = processes.command("cloud_server.commands.cli", "server", "start", str(folder), "--quiet", *options)
    secret = () if passphrase is None else (str(passphrase.resolve()),)
    for word in (*command, str(folder), *secret):
        if any(c.isspace() or c in '%"\'\\$' for c in word):
            raise ConfigError("a unit file cannot contain this path", where=word,
                              hint="a folder without spaces, quotes and %")
    account = "" if user else f"User={_owner(folder)}\n"
    text = UNIT.format(fleet=fleet.config.fleet.name, account=account, parent=folder.parent, folder=folder,
                       command=shlex.join(command), credential="".join(map(_credential, secret)),
                       target="default.target" if user else "multi-user.target")
    units = (home or Path.home()) / ".config/systemd/user" if user else SYSTEM
    return Service(units / f"metafleet-{fleet.config.fleet.name}.service", text, user)


def _credential(path: str) -> str:
    load = "LoadCredentialEncrypted" if path.endswith(".cred") else "LoadCredential"
    return f"{load}={CREDENTIAL}:{path}\n"


def _owner(folder: Path) -> str:
    uid = folder.stat().st_uid
    if uid == 0:
        raise ConfigError("belongs to root, and an aggregator should not run as root", where=str(folder),
                          hint=f"sudo useradd --system metafleet; sudo chown -R metafleet {typed(folder)}")
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def install(service: Service) -> None:
    """Writes the unit, and has systemd enable and start it. Raises ConfigError without systemd or the rights, and
    StateError if systemd refuses."""
    systemctl = shutil.which("systemctl")
    if systemctl is None:
        raise ConfigError("there is no systemctl on this machine", hint="--print shows the unit")
    if not service.user and os.geteuid() != 0:
        raise ConfigError("installing a system service needs root", where=str(service.path),
                          hint="sudo, or --user for a service of your own")
    service.path.parent.mkdir(parents=True, exist_ok=True)
    storage.write_atomic(service.path, service.text.encode())
    scope = ["--user"] if service.user else []
    for command in (["daemon-reload"], ["enable", service.name], ["restart", service.name]):
        done = subprocess.run([systemctl, *scope, *command], capture_output=True, text=True, check=False)
        if done.returncode:
            raise StateError(f"systemctl {' '.join(command)}: {done.stderr.strip() or done.returncode}",
                             where=str(service.path))
