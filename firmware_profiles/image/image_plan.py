"""Decides what is written where in an image: the first-boot files, the package, and the place of the program."""

from __future__ import annotations

import hashlib
import struct
import tempfile
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

from firmware_profiles.image import disk_partitions, fat, first_boot, partition_files, stream
from firmware_profiles.image.disk_partitions import Partition
from firmware_profiles.image.fat import Fat
from firmware_profiles.image.partition_files import IN_ROOT, ON_FAT
from firmware_profiles.package.device_file import DeviceFile
from firmware_profiles.package.device_package import FOLDER, File, Package
from fleet_core.base.errors import FlashError

SPARE_BYTES = 16 << 20
"""Bytes left free in the root file system."""

EXT_NEEDS_RECOVERY = 0x4


@dataclass(frozen=True)
class Plan:
    """files: for the first partition. program_at: ``ON_FAT`` or ``IN_ROOT``. free_bytes: of the first partition,
    before."""

    files: tuple[File, ...]
    program_at: str
    boot: Partition
    root: Partition | None
    free_bytes: int

    @property
    def end(self) -> int:
        """Bytes up to the end of the last of the two partitions: what a card must have at least."""
        return max(part.start + part.size for part in (self.boot, self.root) if part is not None)


def plan_of(image: Path, package: Package, device: DeviceFile) -> Plan:
    """The plan for an unpacked image. Raises FlashError if the image cannot be used."""
    with image.open("rb") as file:
        return _plan(image, file, image.stat().st_size, package, device)


def planned(source: Path, package: Package, device: DeviceFile) -> Plan:
    """The plan for an image that may be packed, from its beginning alone. ``device`` may be masked. Raises ConfigError,
    FlashError."""
    with tempfile.TemporaryDirectory(prefix="metafleet-") as name:
        start = Path(name) / "start.img"
        with start.open("w+b") as file:
            size = stream.MAX_IMAGE_BYTES if stream.is_packed(source) else source.stat().st_size
            for block in stream.blocks(source):
                file.write(block)
                if file.tell() >= min(size, _needed_bytes(file)):
                    break
        with start.open("rb") as file:
            return _plan(start, file, max(size, start.stat().st_size), package, device)


def _needed_bytes(file: BinaryIO) -> int:
    """How much of an image's beginning a plan needs: up to the end of the first FAT, and the root's first block."""
    at = file.tell()
    try:
        partitions = disk_partitions.read(file, stream.MAX_IMAGE_BYTES)
        unseen = [partition.start + 512 for partition in partitions if partition.start + 512 > at]
        try:
            boot = disk_partitions.boot(file, partitions)
        except FlashError:
            if not unseen:
                raise
            return min(unseen)
        after = [partition.start for partition in partitions if partition.start >= boot.start + boot.size]
        return max([boot.start + boot.size, *(start + 4096 for start in after[:1])])
    finally:
        file.seek(at)


def _plan(image: Path, file: BinaryIO, size: int, package: Package, device: DeviceFile) -> Plan:
    """size: of the whole image, of which ``file`` may have the beginning only."""
    partitions = disk_partitions.read(file, size)
    boot, root = disk_partitions.boot(file, partitions), disk_partitions.root(file, partitions)
    file_system = fat.read(file, boot.start, boot.size)
    instance = f"metafleet-{package.device}-{hashlib.sha256(package.program.sha256.encode()).hexdigest()[:12]}"
    first = first_boot.files(package.machine, device, serial=file_system.serial,
                             key=package.signing.signer.public, instance=instance,
                             cmdline=partition_files.cmdline(image, boot))
    files = (*first, *(File(f"{FOLDER}/{f.path}", f.data, f.mode, f.secret) for f in package.files))
    program_at = _program_at(file, files, package, file_system, root)
    return Plan(files, program_at, boot, root, file_system.free_bytes)


def _program_at(
    file: BinaryIO, files: tuple[File, ...], package: Package, file_system: Fat, root: Partition | None
) -> str:
    """Raises FlashError if neither partition has room for the program."""
    sizes = [len(each.data) for each in files]
    folders = len({str(Path(each.path).parent) for each in files})
    program, free = package.program.size_bytes, file_system.free_bytes
    if fat.needed(file_system, [*sizes, program], folders) <= free:
        return ON_FAT
    root_free = 0 if root is None else _ext_free_bytes(file, root)
    if fat.needed(file_system, sizes, folders) <= free and program + SPARE_BYTES <= root_free:
        return IN_ROOT
    raise FlashError(
        f"the program of {_mib(program)} fits neither into the first partition, with {_mib(free)} free, nor into the "
        f"root, with {_mib(root_free)} free",
        hint="make the image larger (truncate, parted, resize2fs), or take another one",
    )


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"


def _ext_free_bytes(file: BinaryIO, root: Partition) -> int:
    """By the superblock of an ext4 file system; 0 if it was not cleanly unmounted."""
    file.seek(root.start + 1024)
    block = file.read(1024)
    if len(block) < 1024 or struct.unpack_from("<I", block, 0x60)[0] & EXT_NEEDS_RECOVERY:
        return 0
    free, log_size = struct.unpack_from("<I", block, 0x0C)[0], struct.unpack_from("<I", block, 0x18)[0]
    return int(free) << (10 + min(int(log_size), 6))
