"""The files with which a device updates itself, for one kind of board: the signed statement of a program, its archive,
and the small files that come with it.

    PACKAGE            the statement that the fleet's key has signed, with the hash of everything else
    program.tar.gz     the program
    prepare            a script that prepares the system
    metafleet*.service, metafleet-update.path     the units

Saved as a folder, it can go onto a plain file server or into a Mender artifact. Settings (device.toml,
certificates) are not part of it: they stay as they are on the device.
"""

from __future__ import annotations

import os
import shutil
from dataclasses import dataclass
from pathlib import Path

from firmware_profiles.package import systemd_unit
from firmware_profiles.package.device_package import Package
from firmware_profiles.ssh import release
from fleet_core.base import storage
from fleet_core.base.errors import FlashError
from fleet_core.protocol import program_statement
from fleet_core.protocol.program_statement import ARCHIVE


@dataclass(frozen=True)
class UpdatePackage:
    """statement: signed. files: {name: content} of the small files. archive: the path of the program's .tar.gz."""

    version: str
    python: str
    arch: str
    statement: bytes
    files: dict[str, str]
    archive: Path

    @property
    def system(self) -> str:
        """As a device names its own."""
        return f"{self.arch} {self.python}"


def of(package: Package, *, older: bool = False) -> UpdatePackage:
    """The update to a device's package, for every device of the same board and system. older: devices take the update
    even if they have had a program that was signed later. Raises FlashError."""
    made = release.of(package)
    files = {"prepare": made.prepare, **systemd_unit.texts(package.machine)}
    statement = made.signing.statement(
        made.program, {name: text.encode() for name, text in files.items()}, older=older,
    )
    return UpdatePackage(made.version, made.program.python, made.program.arch, statement, files, made.program.path)


def save(package: UpdatePackage, folder: Path) -> None:
    """Writes the folder; PACKAGE comes last, so that a folder with it is whole. Raises FlashError, StateError."""
    for name, text in package.files.items():
        storage.write_atomic(folder / name, text.encode())
    archive = folder / ARCHIVE
    try:
        part = folder / f".{ARCHIVE}.part"
        part.unlink(missing_ok=True)
        try:
            os.link(package.archive, part)
        except OSError:
            shutil.copyfile(package.archive, part)
            storage.sync(part)
        storage.move(part, archive)
    except OSError as error:
        raise FlashError(f"cannot be written: {error.strerror or error}", where=str(archive)) from error
    storage.write_atomic(folder / program_statement.FILE, package.statement)


def load(folder: Path) -> UpdatePackage:
    """Reads the folder. The signature is not checked here. Raises StateError, MessageError."""
    signed = storage.read_bytes(folder / program_statement.FILE, limit=program_statement.MAX_BYTES)
    said = program_statement.parse(signed.partition(b"\n")[2])
    files = {name: storage.read_bytes(folder / name, limit=program_statement.MAX_BYTES).decode() for name in said.files}
    return UpdatePackage(said.version, said.python, said.arch, signed, files, folder / ARCHIVE)
