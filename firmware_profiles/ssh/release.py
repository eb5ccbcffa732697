"""A package in the form in which a running device installs it: the program's files with their hashes, the settings by
path, and a script that prepares the system.

The program's folder becomes /opt/metafleet/VERSION, with ``MANIFEST.sha256`` for ``sha256sum -c``. Settings are small
files anywhere, which are replaced one by one and restored when the device rolls back.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import tarfile
from collections.abc import Callable, Collection
from dataclasses import dataclass, field, replace
from io import BytesIO
from typing import IO

from firmware_profiles.package import program_files, systemd_unit
from firmware_profiles.package.board_needs import Machine
from firmware_profiles.package.device_file import MASK
from firmware_profiles.package.device_package import Package, Signing
from firmware_profiles.package.program import Program
from firmware_profiles.package.program_files import Content
from fleet_core.base import config
from fleet_core.base.errors import FlashError
from fleet_core.protocol import program_statement

VERSION = re.compile(program_statement.VERSION)
SETTINGS = "metafleet settings 1"
"""The first line of the signed text about a device's settings."""
UNITS = "/etc/systemd/system"
GROUP = re.compile(r"[a-z_][a-z0-9_-]{0,31}")
DEVICE_TOML = f"{systemd_unit.STATE}/device.toml"
ENROLMENT_TABLES = ("device", "tls")
"""Tables of device.toml that enrolment writes; the operator's file does not replace them."""

PREPARE = """id {user} >/dev/null 2>&1 || useradd --system --user-group --home-dir {state} --no-create-home \\
    --shell /usr/sbin/nologin {user}
for group in {groups}; do
    if getent group "$group" >/dev/null; then usermod -a -G "$group" {user}; fi
done
mkdir -p {config} {state}
chown {user}:{user} {state}
chmod 0700 {state}
for name in {links}; do
    [ -e "{state}/$name" ] || ln -sfn "{config}/$name" "{state}/$name"
done
"""


@dataclass(frozen=True)
class Setting:
    """One file. path: absolute. owner: user and group. secret: the content is never shown."""

    path: str
    data: bytes = field(repr=False)
    mode: int = 0o644
    owner: tuple[str, str] = ("root", "root")
    secret: bool = False

    @property
    def shown(self) -> str:
        """The content, or stars in place of a secret."""
        return f"{MASK}\n" if self.secret else self.data.decode(errors="replace")

    @property
    def sha256(self) -> str:
        return hashlib.sha256(self.data).hexdigest()


@dataclass(frozen=True)
class Release:
    """prepare: an idempotent script for the device. program: its archive has one folder."""

    device: str
    machine: Machine
    version: str
    settings: tuple[Setting, ...]
    prepare: str
    program: Program
    signing: Signing

    @property
    def statement(self) -> bytes:
        """The signed statement of the program and of ``prepare``. Raises FlashError."""
        return self.signing.statement(self.program, {"prepare": self.prepare.encode()})

    def sign_settings(self, run: str, data: bytes) -> bytes:
        """The signed text about a tar of settings, valid for one run only."""
        digest = hashlib.sha256(data).hexdigest()
        return self.signing.signer.sign(f"{SETTINGS}\ndevice {self.device}\nrun {run}\nsha256 {digest}\n".encode())

    @property
    def content(self) -> Content:
        """Raises FlashError if the archive cannot be installed."""
        return program_files.content_of(self.program.path)

    def for_device(self, device_toml: str) -> Release:
        """The release for a device that has enrolled with this device.toml (empty if it has not): its enrolment tables
        are kept, the others are the operator's."""
        if not device_toml:
            return self
        new = next((setting for setting in self.settings if setting.path == f"{systemd_unit.CONFIG}/device.toml"), None)
        if new is None:
            return self
        device, operators = config.tables(device_toml, DEVICE_TOML), config.tables(new.data.decode(), new.path)
        tables = {**operators, **{name: device[name] for name in ENROLMENT_TABLES if name in device}}
        data = device_toml.encode() if tables == device else config.toml(tables).encode()
        merged = Setting(DEVICE_TOML, data, 0o600, (systemd_unit.USER, systemd_unit.USER))
        return replace(self, settings=(*self.settings, merged))

    def send(self, names: Collection[str], sent: Callable[[int], None]) -> Callable[[IO[bytes]], None]:
        """A function that writes these files of the program as a .tar.gz. sent: called with the bytes of each file."""

        def feed(stream: IO[bytes]) -> None:
            with gzip.GzipFile("", "wb", 1, stream) as packed, \
                    tarfile.open(fileobj=packed, mode="w|") as new, program_files.opened(self.program.path) as old:
                for entry, name in program_files.files_in(old, self.program.path):
                    if name in names:
                        new.addfile(_entry(name, entry.size, 0o755 if entry.mode & 0o100 else 0o644),
                                    old.extractfile(entry))
                        sent(entry.size)

        return feed


def of(package: Package) -> Release:
    """The release of a package. Raises FlashError for a version or a group that is no safe name."""
    version, machine, user = package.program.version, package.machine, systemd_unit.USER
    if not VERSION.fullmatch(version):
        raise FlashError(f"'{version[:80]}' cannot be a version", expected=VERSION.pattern)
    settings, links = [], []
    for file in package.files:
        folder, _, name = file.path.rpartition("/")
        if folder == "etc":
            settings.append(Setting(f"{systemd_unit.CONFIG}/{name}", file.data, 0o640, ("root", user)))
            links.append(name)
        elif folder == "home":
            settings.append(Setting(f"{systemd_unit.STATE}/{name}", file.data, 0o600, (user, user), file.secret))
        elif file.path == systemd_unit.NAME or file.path in systemd_unit.UPDATE:
            settings.append(Setting(f"{UNITS}/{file.path}", file.data))
    wrong = [group for group in machine.groups if not GROUP.fullmatch(group)]
    if wrong:
        raise FlashError(f"'{wrong[0][:80]}' is not a group", where=machine.board)
    prepare = PREPARE.format(user=user, state=systemd_unit.STATE, config=systemd_unit.CONFIG, links=" ".join(links),
                             groups=" ".join(machine.groups))
    return Release(package.device, machine, version, tuple(settings), prepare, package.program, package.signing)


def packed(settings: Collection[Setting]) -> bytes:
    """A tar of the settings, with paths relative to /."""
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for setting in settings:
            entry = _entry(setting.path.lstrip("/"), len(setting.data), setting.mode)
            entry.uname, entry.gname = setting.owner
            archive.addfile(entry, BytesIO(setting.data))
    return buffer.getvalue()


def _entry(name: str, size: int, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.uname, entry.gname = size, mode, "root", "root"
    return entry
