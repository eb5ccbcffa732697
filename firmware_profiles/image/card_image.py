"""Makes a card's image from a copy of a system's image, without root and without mounting anything.

The first-boot files and the package go into the FAT partition. If the program does not fit there it goes into the ext4
root, as /opt/metafleet-program.tar.gz; the installer looks in both places. The image is made under a temporary name and
renamed at the end, when it is on the disk.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

from firmware_profiles.image import disk_partitions, partition_files, root_system, stream
from firmware_profiles.image.image_plan import Plan, plan_of
from firmware_profiles.image.partition_files import ON_FAT, needed
from firmware_profiles.package.device_file import DeviceFile
from firmware_profiles.package.device_package import FOLDER, Package
from fleet_core.base.errors import ConfigError, FlashError

Progress = Callable[[str, int, int], None]
"""Called with the name of the work, its bytes done, and its bytes in all."""


def write(
    source: Path, to: Path, package: Package, device: DeviceFile, progress: Progress = lambda what, done, total: None,
    *, last: Callable[[], Package] | None = None,
) -> Plan:
    """Makes the image ``to``, readable by its owner only because it holds the token; replaces an earlier one.

    last: gives the package to write in place of ``package``, with the same files; called after all checks. Raises
    ConfigError if ``to`` is the source or a device, FlashError if the image cannot be used.
    """
    _check(source, to)
    temporary = to.with_name(f".{to.name}.unfinished")
    with _errors_name(source, str(to)), _locked_file(temporary):
        copy(source, temporary, progress)
        _check_image(temporary, package, device)
        plan = _fill(temporary, package if last is None else last(), device, progress)
        _rename(temporary, to)
        return plan


def examine(
    source: Path, package: Package, device: DeviceFile, folder: Path,
    progress: Progress = lambda what, done, total: None,
) -> None:
    """The checks of ``write`` that need the whole image: a 32-bit system, another Python. Unpacks a packed image in
    ``folder`` temporarily. Raises as ``write``."""
    with _errors_name(source, str(folder)):
        if not stream.is_packed(source):
            return _check_image(source, package, device)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            copy(source, Path(file.name), progress)
            _check_image(Path(file.name), package, device)


def copy(source: Path, to: Path, progress: Progress = lambda what, done, total: None) -> None:
    """Unpacks the image to a sparse file. Raises FlashError for a size that no card has."""
    with to.open("wb") as file:
        for block in stream.blocks(source, lambda done, total: progress("copying", done, total)):
            if block.count(0) == len(block):
                file.seek(len(block), os.SEEK_CUR)
            else:
                file.write(block)
        size = file.tell()
        file.truncate(size)
    if size % 512 or not size:
        raise FlashError(f"{size} bytes are not a whole number of sectors", where=str(source), hint="was it cut short?")


def _fill(image: Path, package: Package, device: DeviceFile, progress: Progress) -> Plan:
    plan = plan_of(image, package, device)
    progress("writing the package", 0, package.size_bytes)
    partition_files.put_files(image, plan.boot, plan.files)
    if plan.program_at == ON_FAT:
        partition_files.put_program_on_fat(image, plan.boot, package)
    else:
        assert plan.root is not None
        partition_files.put_program_in_root(image, plan.root, package)
    progress("writing the package", package.size_bytes, package.size_bytes)
    return plan


@contextlib.contextmanager
def _errors_name(source: Path, where: str) -> Iterator[None]:
    """FlashErrors without a place name ``source``; errors of the system become FlashErrors that name ``where``."""
    try:
        yield
    except OSError as error:
        raise FlashError(f"cannot be written: {error.strerror or error}", where=where) from error
    except FlashError as error:
        if error.where is None:
            raise FlashError(error.what, where=str(source), expected=error.expected, hint=error.hint) from error
        raise


@contextlib.contextmanager
def _locked_file(temporary: Path) -> Iterator[None]:
    """An empty file with mode 0600, locked against a second run and removed at the end. Reuses the file of a run that
    was killed."""
    handle = os.open(temporary, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        os.close(handle)
        raise FlashError("another run makes the same image", where=str(temporary)) from error
    try:
        os.fchmod(handle, 0o600)
        os.truncate(handle, 0)
        yield
    finally:
        temporary.unlink(missing_ok=True)
        os.close(handle)


def _rename(temporary: Path, to: Path) -> None:
    """Renames after the content is on the disk, and syncs the folder."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, to)
    folder = os.open(to.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


# Checks ---------------------------------------------------------------------------------------------------------------


def check_source(source: Path) -> None:
    """Raises ConfigError if there is no file."""
    if not source.is_file():
        raise ConfigError("there is no image here", where=str(source), hint="--image FILE.img.xz")


def _check(source: Path, to: Path) -> None:
    needed("mcopy", "mtools")
    check_source(source)
    if not to.parent.is_dir():
        raise ConfigError("there is no such folder", where=str(to.parent))
    if to.exists() and not to.is_file():
        raise ConfigError("is not a plain file", where=str(to), hint="a card is flashed with --to /dev/NAME")
    if to.exists() and to.samefile(source):
        raise ConfigError("is the base image, which is never overwritten", where=str(to), hint="another name")
    if to.exists() and to.stat().st_size and not _is_ours(to):
        raise ConfigError("exists already and was not made by flash", where=str(to),
                          hint="delete it, or take another name")


def _is_ours(image: Path) -> bool:
    """Whether an unpacked image has a package on its first partition."""
    try:
        with image.open("rb") as file:
            boot = disk_partitions.boot(file, disk_partitions.read(file, image.stat().st_size))
    except FlashError:
        return False
    return partition_files.has_folder(image, boot, FOLDER)


def _check_image(image: Path, package: Package, device: DeviceFile) -> None:
    root_system.check(image, plan_of(image, package, device).root, package.machine)
