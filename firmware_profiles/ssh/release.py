"""A package as it is installed on a running device: the program's files with their hashes, the settings by path, and a
script that prepares the system.

The program's folder becomes /opt/metafleet/VERSION, with ``MANIFEST.sha256`` for ``sha256sum -c``. Settings are small
files anywhere, which are replaced one by one and restored when the device rolls back.
"""

from __future__ import annotations

import gzip
import hashlib
import re
import tarfile
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import lru_cache
from io import BytesIO
from pathlib import Path
from typing import IO

from firmware_profiles.package import systemd_unit
from firmware_profiles.package.board_needs import Machine
from firmware_profiles.package.device_file import MASK
from firmware_profiles.package.device_package import Package
from fleet_core.base import config
from fleet_core.base.errors import FlashError

VERSION = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")
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
class Content:
    """The content of a program's archive. files: {path in the version's folder: (SHA-256 in hex, bytes)}."""

    folder: str
    files: dict[str, tuple[str, int]]

    @property
    def manifest(self) -> bytes:
        return "".join(f"{digest}  {name}\n" for name, (digest, _) in sorted(self.files.items())).encode()


@dataclass(frozen=True)
class Release:
    """archive: a .tar.gz of one folder. prepare: an idempotent script for the device."""

    device: str
    machine: Machine
    version: str
    archive: Path
    settings: tuple[Setting, ...]
    prepare: str

    @property
    def content(self) -> Content:
        """Raises FlashError if the archive cannot be installed."""
        status = self.archive.stat()
        return _content(self.archive, status.st_mtime_ns, status.st_size)

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
                    tarfile.open(fileobj=packed, mode="w|") as new, _opened(self.archive) as old:
                for entry, name in _files(old, self.archive):
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
        elif file.path == systemd_unit.NAME:
            settings.append(Setting(f"/etc/systemd/system/{systemd_unit.NAME}", file.data))
    wrong = [group for group in machine.groups if not GROUP.fullmatch(group)]
    if wrong:
        raise FlashError(f"'{wrong[0][:80]}' is no group", where=machine.board)
    prepare = PREPARE.format(user=user, state=systemd_unit.STATE, config=systemd_unit.CONFIG, links=" ".join(links),
                             groups=" ".join(machine.groups))
    return Release(package.device, machine, version, package.program.path, tuple(settings), prepare)


def packed(settings: Collection[Setting]) -> bytes:
    """A tar of the settings, with paths relative to /."""
    buffer = BytesIO()
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for setting in settings:
            entry = _entry(setting.path.lstrip("/"), len(setting.data), setting.mode)
            entry.uname, entry.gname = setting.owner
            archive.addfile(entry, BytesIO(setting.data))
    return buffer.getvalue()


@lru_cache(maxsize=16)
def _content(path: Path, mtime_ns: int, size: int) -> Content:
    """Read once for all devices; ``mtime_ns`` and ``size`` distinguish a file that was replaced."""
    del mtime_ns, size
    files, folders = {}, set()
    with _opened(path) as archive:
        for entry, name in _files(archive, path):
            stream = archive.extractfile(entry)
            assert stream is not None
            files[name] = (_sha256(stream), entry.size)
            folders.add(entry.name.partition("/")[0])
    if len(folders) != 1:
        raise FlashError(f"holds {len(folders)} folders", where=str(path), expected="one, the version's")
    return Content(folders.pop(), files)


def _sha256(stream: IO[bytes]) -> str:
    digest = hashlib.sha256()
    while block := stream.read(1 << 20):
        digest.update(block)
    return digest.hexdigest()


@contextmanager
def _opened(path: Path) -> Iterator[tarfile.TarFile]:
    try:
        with tarfile.open(path, "r|gz") as archive:
            yield archive
    except (tarfile.TarError, OSError, EOFError) as error:
        raise FlashError(f"cannot be read: {error}", where=str(path), hint="delete it, and run this again") from error


def _files(archive: tarfile.TarFile, path: Path) -> Iterator[tuple[tarfile.TarInfo, str]]:
    """(file, path in the version's folder) of the archive. Raises FlashError for names that sha256sum or a shell would
    misread, and for entries that are no plain files."""
    for entry in archive:
        if entry.isdir():
            continue
        _, _, name = entry.name.partition("/")
        plain = re.fullmatch(r"[ -\[\]-~]+", name) and ".." not in name.split("/") and ": FAILED" not in name
        if not entry.isfile() or not plain or name[0] in "/ ":
            raise FlashError(f"'{entry.name[:200]!a}' is no plain file", where=str(path))
        yield entry, name


def _entry(name: str, size: int, mode: int) -> tarfile.TarInfo:
    entry = tarfile.TarInfo(name)
    entry.size, entry.mode, entry.uname, entry.gname = size, mode, "root", "root"
    return entry
