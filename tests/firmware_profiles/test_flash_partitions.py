"""Partition tables and FAT, compared with random tables, sfdisk and mkfs.vfat; damaged ones are refused."""

from __future__ import annotations

import io
import struct
import subprocess
import zlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from firmware_profiles.image import disk_partitions, fat
from firmware_profiles.image.disk_partitions import Partition
from fleet_core.base.errors import FlashError
from tests.support import disks
from tests.support.disks import MIB

SECTORS = st.sampled_from(disk_partitions.SECTOR_BYTES)


def mbr(entries: list[tuple[int, int, int]]) -> bytearray:
    """An MBR with entries (type, start, count) in sectors."""
    sector = bytearray(512)
    for number, (kind, start, count) in enumerate(entries):
        struct.pack_into("<4xB3xII", sector, 446 + 16 * number, kind, start, count)
    sector[510:] = b"\x55\xaa"
    return sector


def gpt(entries: list[tuple[int, int]], sector: int, each: int = 128) -> bytearray:
    """MBR, header and 128 entries (first, last) in sectors."""
    table = bytearray(128 * each)
    for number, (first, last) in enumerate(entries):
        struct.pack_into("<16s16sQQ", table, number * each, b"t" * 16, b"u" * 16, first, last)
    header = bytearray(disk_partitions.GPT_HEADER.pack(
        b"EFI PART", b"\0\0\1\0", 92, 0, 0, 1, 0, 34, 0, b"d" * 16, 2, 128, each, zlib.crc32(table)))
    struct.pack_into("<I", header, 16, zlib.crc32(header))
    image = bytearray(2 * sector + len(table))
    image[:512] = mbr([(0xEE, 1, 0xFFFFFFFF)])
    image[sector : sector + 92] = header
    image[2 * sector :] = table
    return image


def read(image: bytes, size: int | None = None) -> tuple[Partition, ...]:
    return disk_partitions.read(io.BytesIO(image), size or len(image))


@st.composite
def layouts(draw, least: int, most: int):
    """Random (first, count), in order and without overlap."""
    found, at = [], least
    for _ in range(draw(st.integers(1, 4))):
        at += draw(st.integers(0, most))
        count = draw(st.integers(1, most))
        found.append((at, count))
        at += count
    return found


@settings(deadline=None)
@given(layouts(1, 1 << 20))
def test_an_mbr_gives_its_partitions_in_bytes(layout):
    image = mbr([(0x83, start, count) for start, count in layout])
    wanted = tuple(Partition(n, start * 512, count * 512) for n, (start, count) in enumerate(layout, start=1))
    assert read(bytes(image), 1 << 40) == wanted


@settings(deadline=None)
@given(layouts(40, 1 << 30), SECTORS, st.sampled_from([128, 256]))
def test_a_gpt_gives_its_partitions_in_bytes_for_both_sizes_of_sectors(layout, sector, each):
    image = gpt([(first, first + count - 1) for first, count in layout], sector, each)
    wanted = tuple(Partition(n, first * sector, count * sector) for n, (first, count) in enumerate(layout, start=1))
    assert read(bytes(image), 1 << 50) == wanted


@pytest.mark.slow
@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_damaged_gpt_is_refused_or_its_damage_does_not_matter(data):
    sound = gpt([(100, 199), (200, 1000)], 512)
    image = bytearray(sound)
    at = data.draw(st.integers(0, len(image) - 1))
    image[at] ^= data.draw(st.integers(1, 255))
    try:
        found = read(bytes(image), MIB)
    except FlashError:
        return
    assert found == read(bytes(sound), MIB)


@settings(max_examples=300, deadline=None)
@given(st.binary(max_size=8192), st.booleans())
def test_any_bytes_are_read_or_refused_with_a_flash_error(noise, signed):
    image = bytearray(noise.ljust(1024, b"\0"))
    if signed:
        image[510:512] = b"\x55\xaa"
    file = io.BytesIO(bytes(image))
    try:
        found = disk_partitions.read(file, len(image))
        disk_partitions.root(file, found)
        place = disk_partitions.boot(file, found)
        fat.read(file, place.start, place.size)
    except FlashError:
        pass


@pytest.mark.parametrize(
    ("entries", "said"),
    [
        ([], "is empty"), ([(0x83, 1, 2**32 - 1)], "the image at"), ([(0x83, 0, 10)], "overlaps"),
        ([(0x83, 10, 10), (0x83, 19, 1)], "overlaps"), ([(0xEE, 1, 100)], "its GPT is missing"),
    ],
)
def test_an_impossible_partition_table_is_refused(entries, said):
    with pytest.raises(FlashError, match=said):
        read(bytes(mbr(entries)).ljust(MIB, b"\0"))


@pytest.mark.needs("sfdisk", "mkfs.vfat", "mke2fs", "mcopy")
@pytest.mark.parametrize("label", ["dos", "gpt"])
def test_boot_and_root_are_found_in_an_image_of_sfdisks(tmp_path, label):
    image = disks.card(tmp_path / "card.img", label=label)
    with image.open("rb") as file:
        found = disk_partitions.read(file, image.stat().st_size)
        assert disk_partitions.boot(file, found) == Partition(1, MIB, 16 * MIB)
        assert disk_partitions.root(file, found) == Partition(2, 17 * MIB, 24 * MIB)


@pytest.mark.needs("sfdisk")
def test_a_card_without_a_fat_is_refused_and_an_extended_partition_is_passed_over(tmp_path):
    lines = ("label: dos", "start=2048, size=2048, type=83", "start=4096, size=8192, type=5",
             "start=6144, size=2048, type=83")
    image = disks.table(tmp_path / "card.img", 16 * MIB, "\n".join(lines) + "\n")
    with image.open("rb") as file:
        found = disk_partitions.read(file, 16 * MIB)
        assert found == (Partition(1, MIB, MIB),)
        assert disk_partitions.root(file, found) is None
        with pytest.raises(FlashError, match="no partition with a FAT"):
            disk_partitions.boot(file, found)


@pytest.mark.needs("mkfs.vfat")
def test_an_mbr_of_a_disk_with_4096_byte_sectors_leads_to_its_fat(tmp_path):
    image = tmp_path / "card.img"
    image.write_bytes(bytes(mbr([(0xC, 256, 4096)])).ljust(20 * MIB, b"\0"))
    disks.call("mkfs.vfat", "-S", "4096", "--offset", str(MIB // 4096), image, str(16 * 1024))
    with image.open("rb") as file:
        assert disk_partitions.boot(file, disk_partitions.read(file, 20 * MIB)) == Partition(1, MIB, 16 * MIB)


@pytest.mark.needs("mkfs.vfat", "mcopy")
@pytest.mark.parametrize(("bits", "mib"), [(12, 2), (16, 16), (32, 64)])
def test_the_free_space_of_a_fat_is_what_mtools_reports(tmp_path, bits, mib):
    image = tmp_path / "fat.img"
    with image.open("wb") as file:
        file.truncate(mib * MIB)
    disks.call("mkfs.vfat", "-F", str(bits), "-i", "1234ABCD", image)
    (tmp_path / "some").write_bytes(bytes(777_777))
    disks.call("mcopy", "-i", image, tmp_path / "some", "::some")
    with image.open("rb") as file:
        found = fat.read(file, 0, mib * MIB)
    told = disks.call("mdir", "-i", image, "::").splitlines()[-2]
    free = int("".join(filter(str.isdigit, told)))
    assert (found.bits, found.serial, found.free_bytes) == (bits, "1234-ABCD", free)
    room = found.free_bytes
    (tmp_path / "rest").write_bytes(bytes(room))
    done = subprocess.run(["mcopy", "-i", str(image), str(tmp_path / "rest"), "::rest"], capture_output=True)
    assert done.returncode == 0, done.stderr
    with image.open("rb") as file:
        assert fat.read(file, 0, mib * MIB).free_bytes == 0
