"""Reads the partition table of a disk image: MBR and GPT (UEFI specification 2.10, chapter 5), with limits.

Sectors of 512 and of 4096 bytes. A GPT with valid checksums has precedence over its protective MBR. File systems are
recognized by their content, because the partition types of images are often wrong.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import BinaryIO

from firmware_profiles.image import fat
from fleet_core.base.errors import FlashError

SECTOR_BYTES = (512, 4096)
PROTECTIVE = 0xEE
EXTENDED = (0x05, 0x0F, 0x85)
GPT_HEADER = struct.Struct("<8s4sIIIQQQQ16sQIII")
MAX_ENTRIES = 1024
MAX_ENTRY_BYTES = 1024
EXT_MAGIC_AT = 1024 + 56


@dataclass(frozen=True)
class Partition:
    """number: as in Linux. start, size: in bytes."""

    number: int
    start: int
    size: int


def read(file: BinaryIO, size: int) -> tuple[Partition, ...]:
    """The partitions of an image of ``size`` bytes, in the order of its table, without logical ones.

    Raises FlashError if there is no table, or if it is damaged or does not fit the image.
    """
    first = _at(file, 0, 512)
    if len(first) < 512 or first[510:] != b"\x55\xaa":
        raise FlashError("has no partition table", expected="an image of a whole card, not of one partition")
    for sector in SECTOR_BYTES:
        if _at(file, sector, 8) == b"EFI PART":
            return _checked(_gpt(file, size, sector), size)
    if any(first[446 + 16 * n + 4] == PROTECTIVE for n in range(4)):
        raise FlashError("its GPT is missing, there is only the protective MBR", hint="fetch the image again")
    return _checked(_mbr(file, first, size), size)


def boot(file: BinaryIO, partitions: Sequence[Partition]) -> Partition:
    """The first partition with a FAT file system. Raises FlashError."""
    for partition in partitions:
        if fat.is_fat(_at(file, partition.start, 512)):
            return partition
    raise FlashError("has no partition with a FAT file system", expected="one that the board boots from")


def root(file: BinaryIO, partitions: Sequence[Partition]) -> Partition | None:
    """The largest partition with an ext2, ext3 or ext4 file system, or None."""
    ext = [p for p in partitions if _at(file, p.start + EXT_MAGIC_AT, 2) == b"\x53\xef"]
    return max(ext, key=lambda partition: partition.size, default=None)


def _at(file: BinaryIO, offset: int, count: int) -> bytes:
    file.seek(offset)
    return file.read(count)


def _checked(partitions: Sequence[Partition], size: int) -> tuple[Partition, ...]:
    """Raises FlashError if a partition is outside the image or overlaps another."""
    end = 0
    for partition in sorted(partitions, key=lambda p: p.start):
        if partition.start < max(end, 512):
            raise FlashError(f"partition {partition.number} overlaps the table or a partition before it",
                             hint="fetch the image again")
        end = partition.start + partition.size
        if end > size:
            raise FlashError(f"partition {partition.number} ends at {end} bytes, the image at {size}",
                             hint="was it cut short? fetch the image again")
    if not partitions:
        raise FlashError("its partition table is empty")
    return tuple(partitions)


# MBR ------------------------------------------------------------------------------------------------------------------


def _mbr(file: BinaryIO, first: bytes, size: int) -> list[Partition]:
    """An MBR does not state its sector size: 512 bytes, unless a FAT is found with 4096 only."""
    tables = {sector: list(_primaries(first, sector)) for sector in SECTOR_BYTES}
    for sector in SECTOR_BYTES:
        inside = [p for p in tables[sector] if p.start + p.size <= size]
        if any(fat.is_fat(_at(file, partition.start, 512)) for partition in inside):
            return tables[sector]
    return tables[512]


def _primaries(first: bytes, sector: int) -> Iterator[Partition]:
    for number in range(4):
        kind, start, count = struct.unpack_from("<4xB3xII", first, 446 + 16 * number)
        if kind and kind not in EXTENDED and count:
            yield Partition(number + 1, start * sector, count * sector)


# GPT ------------------------------------------------------------------------------------------------------------------


def _gpt(file: BinaryIO, size: int, sector: int) -> list[Partition]:
    damaged = FlashError("its GPT is damaged", hint="fetch the image again")
    block = _at(file, sector, sector)
    if len(block) < GPT_HEADER.size:
        raise damaged
    fields = GPT_HEADER.unpack_from(block)
    length, header_crc = fields[2], fields[3]
    at, count, each, entries_crc = fields[10:14]
    if not GPT_HEADER.size <= length <= len(block):
        raise damaged
    if zlib.crc32(block[:16] + bytes(4) + block[20:length]) != header_crc:
        raise damaged
    if not (1 <= count <= MAX_ENTRIES and 128 <= each <= MAX_ENTRY_BYTES and each % 8 == 0 and at * sector < size):
        raise damaged
    entries = _at(file, at * sector, count * each)
    if len(entries) != count * each or zlib.crc32(entries) != entries_crc:
        raise damaged
    return list(_entries(entries, each, sector, damaged))


def _entries(entries: bytes, each: int, sector: int, damaged: FlashError) -> Iterator[Partition]:
    for number in range(len(entries) // each):
        kind, first, last = struct.unpack_from("<16s16xQQ", entries, number * each)
        if kind == bytes(16):
            continue
        if last < first:
            raise damaged
        yield Partition(number + 1, first * sector, (last - first + 1) * sector)
