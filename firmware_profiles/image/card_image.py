"""Makes a card's image from a copy of a system's image, without root and without mounting anything.

The first-boot files and the package go into the FAT partition by mtools at its offset. Where the program does not fit
there it goes into the ext4 root by debugfs, as /opt/metafleet-program.tar.gz; the installer finds it in either place.
All of it happens in a file of another name, which takes its own at the end, on the disk as well.
"""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import os
import shutil
import struct
import subprocess
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from firmware_profiles.image import disk_partitions, fat, first_boot, root_system, stream
from firmware_profiles.image.disk_partitions import Partition
from firmware_profiles.image.fat import Fat
from firmware_profiles.package.device_file import DeviceFile
from firmware_profiles.package.device_package import FOLDER, File, Package
from firmware_profiles.package.program import sha256_of
from fleet_core.base.errors import ConfigError, FlashError

PATH = os.pathsep.join(["/usr/sbin", "/sbin", "/usr/local/sbin", "/opt/homebrew/sbin"])
IN_ROOT = "/opt/metafleet-program.tar.gz"
ON_FAT = f"{FOLDER}/program.tar.gz"
SPARE_BYTES = 16 << 20  # left free in the root
EXT_NEEDS_RECOVERY = 0x4

Progress = Callable[[str, int, int], None]
"""Called with what is being done, how much of it is, and how much it is in all, in bytes."""


@dataclass(frozen=True)
class Plan:
    """What is written where. files: onto the first partition. program_at: ON_FAT, or IN_ROOT. free_bytes: of the first
    partition before."""

    files: tuple[File, ...]
    program_at: str
    boot: Partition
    root: Partition | None
    free_bytes: int


def write(
    source: Path, to: Path, package: Package, device: DeviceFile, progress: Progress = lambda what, done, total: None,
    *, last: Callable[[], Package] | None = None,
) -> Plan:
    """The image at ``to``, readable by its owner alone because it holds the token; in place of one that was there.

    last: gives what is written in place of ``package``, with the same files; asked when all that can be refused has
    been. Raises ConfigError where ``to`` is the source or a device, FlashError for an image that cannot be used.
    """
    _check(source, to)
    temporary = to.with_name(f".{to.name}.unfinished")
    with _of(source, str(to)), _held(temporary):
        copy(source, temporary, progress)
        _looked_at(temporary, package, device)
        plan = _fill(temporary, package if last is None else last(), device, progress)
        _take_name(temporary, to)
        return plan


@contextlib.contextmanager
def _of(source: Path, where: str) -> Iterator[None]:
    """Errors say which image they are of. where: for those of the system."""
    try:
        yield
    except OSError as error:
        raise FlashError(f"cannot be written: {error.strerror or error}", where=where) from error
    except FlashError as error:
        if error.where is None:
            raise FlashError(error.what, where=str(source), expected=error.expected, hint=error.hint) from error
        raise


@contextlib.contextmanager
def _held(temporary: Path) -> Iterator[None]:
    """An empty file with mode 0600, held against a second run and gone in the end. One that a killed run has left is
    taken over."""
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


def _take_name(temporary: Path, to: Path) -> None:
    """With all of it on the disk."""
    with temporary.open("rb") as file:
        os.fsync(file.fileno())
    os.replace(temporary, to)
    folder = os.open(to.parent, os.O_RDONLY)
    os.fsync(folder)
    os.close(folder)


def examine(
    source: Path, package: Package, device: DeviceFile, folder: Path,
    progress: Progress = lambda what, done, total: None,
) -> None:
    """Refuses what ``write`` would refuse for what is in the whole image: a 32-bit system, another Python. A packed one
    is unpacked in ``folder`` for it, and gone in the end. Raises as ``write``."""
    with _of(source, str(folder)):
        if not is_packed(source):
            return _looked_at(source, package, device)
        with tempfile.NamedTemporaryFile(dir=folder) as file:
            copy(source, Path(file.name), progress)
            _looked_at(Path(file.name), package, device)


def _looked_at(image: Path, package: Package, device: DeviceFile) -> None:
    with image.open("rb") as file:
        plan = _plan(image, file, image.stat().st_size, package, device)
    root_system.check(image, plan.root, package.machine)


def planned(source: Path, package: Package, device: DeviceFile) -> Plan:
    """What ``write`` would do, from the image's beginning alone; ``device`` may be masked. Raises as ``write``."""
    with tempfile.TemporaryDirectory(prefix="metafleet-") as name:
        start = Path(name) / "start.img"
        with start.open("w+b") as file:
            size = _size(source)
            for block in stream.blocks(source):
                file.write(block)
                if file.tell() >= min(size, _wanted(file)):
                    break
        with start.open("rb") as file:
            return _plan(start, file, max(size, start.stat().st_size), package, device)


def _wanted(file: BinaryIO) -> int:
    """How much of an image's beginning must be there to see the first FAT, and the root's first block."""
    at = file.tell()
    try:
        found = disk_partitions.read(file, stream.MAX_IMAGE_BYTES)
        unseen = [partition.start + 512 for partition in found if partition.start + 512 > at]
        try:
            boot = disk_partitions.boot(file, found)
        except FlashError:
            if not unseen:
                raise
            return min(unseen)
        after = [partition.start for partition in found if partition.start >= boot.start + boot.size]
        return max([boot.start + boot.size, *(start + 4096 for start in after[:1])])
    finally:
        file.seek(at)


def _size(source: Path) -> int:
    return stream.MAX_IMAGE_BYTES if is_packed(source) else source.stat().st_size


def is_packed(source: Path) -> bool:
    """Whether it is an .img.xz or .img.zst, by its content."""
    with source.open("rb") as file:
        start = file.read(6)
    return start == stream.XZ or start[:4] == stream.ZST


def _check(source: Path, to: Path) -> None:
    needed("mcopy", "mtools")
    check_source(source)
    if not to.parent.is_dir():
        raise ConfigError("there is no such folder", where=str(to.parent))
    if to.exists() and not to.is_file():
        raise ConfigError("is no plain file", where=str(to), hint="a card is flashed with --to /dev/NAME")
    if to.exists() and to.samefile(source):
        raise ConfigError("is the image to begin from, which stays as it is", where=str(to), hint="another name")
    if to.exists() and to.stat().st_size and not _is_ours(to):
        raise ConfigError("is there already, and no image that flash made", where=str(to),
                          hint="delete it, or take another name")


def check_source(source: Path) -> None:
    """Raises ConfigError where there is no file."""
    if not source.is_file():
        raise ConfigError("there is no image here", where=str(source), hint="--image FILE.img.xz")


def _is_ours(image: Path) -> bool:
    """Whether a package is on the first partition of an image that is not packed."""
    try:
        with image.open("rb") as file:
            boot = disk_partitions.boot(file, disk_partitions.read(file, image.stat().st_size))
    except FlashError:
        return False
    return _holds(image, boot, FOLDER)


def needed(program: str, of: str) -> str:
    """The path of a program. Raises ConfigError when it is not installed."""
    found = shutil.which(program) or shutil.which(program, path=PATH)
    if found is None:
        raise ConfigError(f"{program} is not installed", hint=f"install {of} (apt-get install {of}, brew install {of})")
    return found


def copy(source: Path, to: Path, progress: Progress = lambda what, done, total: None) -> None:
    """The unpacked image; runs of zeros become holes. Raises FlashError for a size that no card has."""
    with to.open("wb") as file:
        for block in stream.blocks(source, lambda done, total: progress("copying", done, total)):
            if block.count(0) == len(block):
                file.seek(len(block), os.SEEK_CUR)
            else:
                file.write(block)
        size = file.tell()
        file.truncate(size)
    if size % 512 or not size:
        raise FlashError(f"{size} bytes are no whole number of sectors", where=str(source), hint="was it cut short?")


# What goes where ------------------------------------------------------------------------------------------------------


def _plan(image: Path, file: BinaryIO, size: int, package: Package, device: DeviceFile) -> Plan:
    found = disk_partitions.read(file, size)
    boot, root = disk_partitions.boot(file, found), disk_partitions.root(file, found)
    room = fat.read(file, boot.start, boot.size)
    instance = f"metafleet-{package.device}-{hashlib.sha256(package.program.sha256.encode()).hexdigest()[:12]}"
    first = first_boot.files(package.machine, device, serial=room.serial, instance=instance,
                            cmdline=_cmdline(image, boot))
    files = (*first, *(File(f"{FOLDER}/{f.path}", f.data, f.mode, f.secret) for f in package.files))
    at = _program_at(file, files, package, room, root)
    return Plan(files, at, boot, root, room.free_bytes)


def _program_at(file: BinaryIO, files: tuple[File, ...], package: Package, room: Fat, root: Partition | None) -> str:
    sizes = [len(each.data) for each in files]
    folders = len({str(Path(each.path).parent) for each in files})
    program = package.program.size_bytes
    if fat.needed(room, [*sizes, program], folders) <= room.free_bytes:
        return ON_FAT
    small, free = fat.needed(room, sizes, folders), 0 if root is None else _free_in(file, root)
    if small <= room.free_bytes and program + SPARE_BYTES <= free:
        return IN_ROOT
    raise FlashError(
        f"the program of {_mib(program)} fits neither into the first partition, with {_mib(room.free_bytes)} free, nor "
        f"into the root, with {_mib(free)} free", hint="make the image larger (truncate, parted, resize2fs), or take "
        "another one",
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _free_in(file: BinaryIO, root: Partition) -> int:
    """Bytes free in an ext4 file system, by its superblock; 0 where it was not closed in order."""
    file.seek(root.start + 1024)
    block = file.read(1024)
    if len(block) < 1024 or struct.unpack_from("<I", block, 0x60)[0] & EXT_NEEDS_RECOVERY:
        return 0
    free, log_size = struct.unpack_from("<I", block, 0x0C)[0], struct.unpack_from("<I", block, 0x18)[0]
    return int(free) << (10 + min(int(log_size), 6))


def _cmdline(image: Path, boot: Partition) -> str | None:
    done = subprocess.run([needed("mtype", "mtools"), *_drive(image, boot), "::cmdline.txt"], capture_output=True,
                          env=_environ())
    return done.stdout[:8192].decode("ascii", "replace") if done.returncode == 0 else None


# Writing --------------------------------------------------------------------------------------------------------------


def _fill(image: Path, package: Package, device: DeviceFile, progress: Progress) -> Plan:
    with image.open("rb") as file:
        plan = _plan(image, file, image.stat().st_size, package, device)
    total = package.size_bytes
    progress("writing the package", 0, total)
    for folder in sorted({parent for each in plan.files for parent in _parents(each.path)}):
        if not _holds(image, plan.boot, folder):
            _call("mmd", *_drive(image, plan.boot), f"::{folder}")
    for each in plan.files:
        _call("mcopy", *_drive(image, plan.boot), "-o", "-", f"::{each.path}", data=each.data)
        if _call("mtype", *_drive(image, plan.boot), f"::{each.path}") != each.data:
            raise FlashError(f"{each.path} is not what was written")
    if plan.program_at == ON_FAT:
        _program_on_fat(image, plan.boot, package)
    else:
        assert plan.root is not None
        _program_in_root(image, plan.root, package)
    progress("writing the package", total, total)
    return plan


def _parents(path: str) -> Iterator[str]:
    parts = path.split("/")[:-1]
    return ("/".join(parts[: count + 1]) for count in range(len(parts)))


def _program_on_fat(image: Path, boot: Partition, package: Package) -> None:
    _call("mcopy", *_drive(image, boot), "-o", str(package.program.path), f"::{ON_FAT}")
    with tempfile.TemporaryDirectory(dir=image.parent, prefix=".metafleet-") as name:
        _call("mcopy", *_drive(image, boot), f"::{ON_FAT}", f"{name}/back")
        _same(Path(name) / "back", package)


def _program_in_root(image: Path, root: Partition, package: Package) -> None:
    debugfs = needed("debugfs", "e2fsprogs")
    with tempfile.TemporaryDirectory(dir=image.parent, prefix=".metafleet-") as name:
        folder = Path(name)
        (folder / "program").symlink_to(package.program.path.resolve())
        (folder / "image").symlink_to(image.resolve())
        target = f"image?offset={root.start}"
        # debugfs takes no inode back when it makes what is there already, and the file system is damaged.
        made = b"Type: directory" in _call(debugfs, "-R", "stat /opt", target, cwd=folder)
        old = b"Type: regular" in _call(debugfs, "-R", f"stat {IN_ROOT}", target, cwd=folder)
        lines = [*([] if made else ["mkdir /opt"]), *([f"rm {IN_ROOT}"] if old else []), "cd /opt",
                 f"write program {Path(IN_ROOT).name}"]
        lines += [f"set_inode_field {IN_ROOT} {field}" for field in ("uid 0", "gid 0", "mode 0100600")]
        (folder / "commands").write_text("\n".join(lines) + "\n")
        _call(debugfs, "-w", "-f", "commands", target, cwd=folder)
        _call(debugfs, "-R", f"dump {IN_ROOT} back", target, cwd=folder)
        _same(folder / "back", package)


def _same(copied: Path, package: Package) -> None:
    if not copied.exists() or sha256_of(copied) != package.program.sha256:
        raise FlashError("the program in the image is not what was written", hint="is the disk sound?")


def _drive(image: Path, boot: Partition) -> list[str]:
    return ["-i", f"{image}@@{boot.start}"]


def _holds(image: Path, boot: Partition, folder: str) -> bool:
    command = [needed("mdir", "mtools"), *_drive(image, boot), "-b", f"::{folder}"]
    return subprocess.run(command, capture_output=True, env=_environ()).returncode == 0


def _environ() -> dict[str, str]:
    return {**os.environ, "MTOOLS_SKIP_CHECK": "1", "MTOOLSRC": os.devnull, "LC_ALL": "C.UTF-8"}


def _call(program: str, *arguments: str, data: bytes | None = None, cwd: Path | None = None) -> bytes:
    """What a program prints. Raises FlashError with what it complains of."""
    command = [program if "/" in program else needed(program, "mtools"), *arguments]
    done = subprocess.run(command, input=data or b"", capture_output=True, cwd=cwd, env=_environ())
    if done.returncode != 0:
        with contextlib.suppress(IndexError):
            raise FlashError(f"{Path(program).name}: {done.stderr.decode(errors='replace').strip().splitlines()[-1]}")
        raise FlashError(f"{Path(program).name} failed with exit code {done.returncode}")
    return done.stdout
