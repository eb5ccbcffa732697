"""Reads a FAT file system's kind, serial number and free space (Microsoft's FAT specification of 2005, ECMA-107).

``partition_files`` writes to it by mtools.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import BinaryIO

from fleet_core.base.errors import FlashError

BLOCK_BYTES = 1 << 20


@dataclass(frozen=True)
class Fat:
    """bits: 12, 16 or 32. serial: as in /dev/disk/by-uuid. cluster_bytes: the unit in which files take space."""

    bits: int
    serial: str
    cluster_bytes: int
    clusters: int
    free_bytes: int


def is_fat(sector: bytes) -> bool:
    """Whether the first 512 bytes of a partition are those of FAT 12, 16 or 32."""
    if len(sector) < 512 or sector[510:512] != b"\x55\xaa" or sector[0] not in (0xEB, 0xE9):
        return False
    size, cluster, reserved, tables = struct.unpack_from("<HBHB", sector, 11)
    powers_of_2 = size in (512, 1024, 2048, 4096) and cluster and cluster & (cluster - 1) == 0
    return bool(powers_of_2 and reserved and tables in (1, 2) and (sector[21] >= 0xF0))


def read(file: BinaryIO, start: int, size: int) -> Fat:
    """The file system in ``size`` bytes from the byte ``start`` on. Raises FlashError if it is damaged."""
    file.seek(start)
    sector = file.read(512)
    if not is_fat(sector):
        raise FlashError("the first partition is no FAT file system")
    bytes_each, per_cluster, reserved, tables, root_entries, total16 = struct.unpack_from("<HBHBHH", sector, 11)
    table16, total32, table32 = *struct.unpack_from("<H", sector, 22), *struct.unpack_from("<II", sector, 32)
    total, table = total16 or total32, table16 or table32
    used = reserved + tables * table + -(-root_entries * 32 // bytes_each)
    clusters = (total - used) // per_cluster
    bits = 12 if clusters < 4085 else 16 if clusters < 65525 else 32
    fits = (clusters + 2) * bits <= table * bytes_each * 8
    if clusters < 1 or total * bytes_each > size or not fits:
        raise FlashError("the FAT file system of the first partition is damaged", hint="fetch the image again")
    serial = struct.unpack_from("<I", sector, 67 if bits == 32 else 39)[0]
    free = _free_clusters(file, start + reserved * bytes_each, clusters, bits)
    serial_text = f"{serial >> 16:04X}-{serial & 0xFFFF:04X}"
    return Fat(bits, serial_text, bytes_each * per_cluster, clusters, free * bytes_each * per_cluster)


def _free_clusters(file: BinaryIO, at: int, clusters: int, bits: int) -> int:
    """The number of zero entries in the table at ``at``; the first two entries belong to no cluster."""
    file.seek(at)
    if bits == 12:
        table = file.read((clusters + 2) * 3 // 2 + 2)
        return sum(not _entry12(table, n) for n in range(2, clusters + 2))
    width = bits // 8
    left, free, first = (clusters + 2) * width, 0, True
    while left and (block := file.read(min(left, BLOCK_BYTES))):
        left -= len(block)
        entries = memoryview(block[: len(block) // width * width]).cast("H" if bits == 16 else "I").tolist()
        mask = 0xFFFF if bits == 16 else 0x0FFFFFFF
        free += sum(not entry & mask for entry in entries[2 if first else 0 :])
        first = False
    return free


def _entry12(table: bytes, number: int) -> int:
    pair = int.from_bytes(table[number * 3 // 2 : number * 3 // 2 + 2], "little")
    return pair >> 4 if number % 2 else pair & 0xFFF


def needed(fat: Fat, sizes: list[int], folders: int) -> int:
    """Bytes that files of these sizes and this number of folders take: whole clusters, and some for the names."""
    names = folders + 1 + len(sizes) * 256 // fat.cluster_bytes
    return (sum(-(-size // fat.cluster_bytes) for size in sizes) + names + 8) * fat.cluster_bytes
