"""The package of one device: its board's program, settings, one-time token, systemd unit and installer.

A plain folder, ``metafleet/``, on the card's first partition or sent over SSH:

    install.sh          installs everything; POSIX shell, no network
    package.env         the program's version and SHA-256, and the system that it is for
    program.tar.gz      the agent and its wheels (``firmware_profiles.package.program``)
    metafleet.service   the unit; metafleet-update.* install a program that the agent fetches
    PACKAGE             what the fleet's key signs: the archive, and the SHA-256 of every other file but the token
    MANIFEST.sha256     the program's files
    etc/                device.toml, the authority's certificate, the board's profile
    home/               the one-time token; installed with mode 0600 and then erased here
"""

from __future__ import annotations

import hashlib
import os
import re
import shlex
import shutil
import time
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath

from firmware_profiles.package import program_files, systemd_unit
from firmware_profiles.package.board_needs import Machine
from firmware_profiles.package.program import Program
from fleet_core.base.errors import ConfigError
from fleet_core.protocol import program_statement
from fleet_core.protocol.program_statement import Statement
from fleet_core.protocol.signing import Signer

FOLDER = "metafleet"
INSTALL = Path(__file__).with_name("install.sh")
FLEET_KEY = "fleet.pub"
"""The fleet's public key, with which the device checks every later flash."""
IN_ETC = (".toml", ".pem", ".crt", ".pub")
PLAIN_NAME = re.compile(r"[A-Za-z0-9_-][A-Za-z0-9._-]{0,99}")


@dataclass(frozen=True)
class File:
    """path: relative, with ``/``. secret: the content is never shown."""

    path: str
    data: bytes = field(repr=False)
    mode: int = 0o644
    secret: bool = False


@dataclass(frozen=True)
class Signing:
    """The fleet and the key that sign flashed programs."""

    fleet: str
    signer: Signer = field(repr=False)

    def statement(self, program: Program, files: Mapping[str, bytes], *, older: bool = False) -> bytes:
        """The signed statement of a program, with ``files`` that come with it. older: the program may be older than the
        one that runs. Raises FlashError for an archive that cannot be read."""
        manifest = program_files.content_of(program.path).manifest
        hashes = {name: hashlib.sha256(data).hexdigest() for name, data in files.items()}
        text = Statement(
            self.fleet, program.version, program.python, program.arch, int(time.time() * 1000),
            hashlib.sha256(manifest).hexdigest(), program.sha256, program.size_bytes, older,
            hashes,
        ).text()
        return self.signer.sign(text)


@dataclass(frozen=True)
class Package:
    """files: all but the program's archive; paths are relative to the package's folder."""

    device: str
    machine: Machine
    program: Program
    files: tuple[File, ...]
    signing: Signing

    @property
    def size_bytes(self) -> int:
        return self.program.size_bytes + sum(len(file.data) for file in self.files)


def make(
    device: str, machine: Machine, program: Program, home: Mapping[str, bytes], secret: Iterable[str] = (), *,
    signing: Signing,
) -> Package:
    """The package of ``device``.

    home: files of the agent's home by name. Settings and certificates (``.toml``, ``.pem``, ``.crt``) are installed in
    /etc/metafleet with a link in the home; other files, and those in ``secret``, in the home itself. Raises
    ConfigError, and FlashError for a program that cannot be read.
    """
    secrets = set(secret)
    home = {**home, FLEET_KEY: f"{signing.signer.public}\n".encode()}
    files = [
        File("install.sh", INSTALL.read_bytes(), 0o755),
        File("package.env", _environment(machine, program).encode()),
        *(File(name, text.encode()) for name, text in systemd_unit.texts(machine).items()),
    ]
    for name, data in sorted(home.items()):
        if not PLAIN_NAME.fullmatch(name):
            raise ConfigError(f"'{name}' is not a plain file name", where=device)
        in_home = name in secrets or PurePosixPath(name).suffix not in IN_ETC
        files.append(File(f"{'home' if in_home else 'etc'}/{name}", data, 0o600 if in_home else 0o644, secret=in_home))
    files.append(File(program_statement.MANIFEST, program_files.content_of(program.path).manifest))
    signed = {file.path: file.data for file in files if not file.path.startswith("home/")}
    files.append(File(program_statement.FILE, signing.statement(program, signed)))
    return Package(device, machine, program, tuple(files), signing)


def _environment(machine: Machine, program: Program) -> str:
    """package.env, which install.sh reads."""
    values = {
        "VERSION": program.version, "PYTHON": machine.python, "ARCH": machine.arch, "SHA256": program.sha256,
        "GROUPS_WANTED": " ".join(machine.groups),
    }
    return "".join(f"{name}={shlex.quote(value)}\n" for name, value in values.items())


def save(package: Package, folder: Path) -> Path:
    """Writes the package to ``folder``/metafleet, secrets with mode 0600; the program is hard-linked if possible, else
    copied. Returns the package's folder."""
    package_folder = folder / FOLDER
    for file in package.files:
        path = package_folder / file.path
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, file.mode)
        with os.fdopen(handle, "wb") as opened:
            os.fchmod(opened.fileno(), file.mode)
            opened.write(file.data)
    program = package_folder / "program.tar.gz"
    program.unlink(missing_ok=True)
    try:
        os.link(package.program.path, program)
    except OSError:
        shutil.copyfile(package.program.path, program)
    return package_folder
