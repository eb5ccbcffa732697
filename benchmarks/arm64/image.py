"""A card's image with the two partitions of Raspberry Pi OS, FAT ``bootfs`` and ext4 ``rootfs``, made without loop
device and mount."""

from __future__ import annotations

import os
import subprocess
from pathlib import Path

MIB = 1 << 20
PROGRAMS = ("sfdisk", "mkfs.vfat", "mke2fs", "mcopy")
FAT_AT, FAT_MIB, ROOT_MIB = 4, 512, 1600
FAT_MARK = 65
"""The byte in FAT32's boot sector that marks it as not cleanly unmounted."""
CMDLINE = "console=ttyAMA0 root=/dev/vda2 rootfstype=ext4 fsck.repair=yes rootwait"


def write(root: Path, path: Path) -> None:
    """Writes an image of the file system ``root``, as its manufacturer would ship it, with nothing of any device in
    it."""
    root_at = FAT_AT + FAT_MIB
    with path.open("wb") as file:
        file.truncate((root_at + ROOT_MIB) * MIB)
    table = (f"label: dos\nlabel-id: 0x5eed1e55\nstart={FAT_AT}MiB, size={FAT_MIB}MiB, type=c, bootable\n"
             f"start={root_at}MiB, type=83\n")  # fmt: skip
    _run("sfdisk", "-q", str(path), text=table)
    _run("mkfs.vfat", "-F", "32", "-n", "bootfs", "-i", "5EED1E55", "--offset", str(FAT_AT * MIB // 512), str(path),
         str(FAT_MIB << 10))  # fmt: skip
    _run("mke2fs", "-q", "-t", "ext4", "-O", "^metadata_csum_seed,^orphan_file", "-L", "rootfs", "-d", str(root),
         "-E", f"offset={root_at * MIB},lazy_itable_init=1,lazy_journal_init=1", str(path), f"{ROOT_MIB}M")  # fmt: skip
    cmdline = path.with_suffix(".cmdline")
    cmdline.write_text(CMDLINE + "\n")
    _run("mcopy", "-o", "-i", f"{path}@@{FAT_AT * MIB}", str(cmdline), "::cmdline.txt")
    cmdline.unlink()


def put(path: Path, file: Path, folder: str, name: str) -> None:
    """Puts a file into an existing folder of the root, readable by everybody."""
    commands = path.with_suffix(".commands")
    fields = "".join(f"set_inode_field {folder}/{name} {field}\n" for field in ("uid 0", "gid 0", "mode 0100644"))
    commands.write_text(f"cd {folder}\nwrite {file} {name}\n{fields}")
    _run("debugfs", "-w", "-f", str(commands), f"{path}?offset={(FAT_AT + FAT_MIB) * MIB}")
    commands.unlink()


def folder(path: Path, name: str) -> None:
    """Makes a folder of the root, below an existing one."""
    _run("debugfs", "-w", "-R", f"mkdir {name}", f"{path}?offset={(FAT_AT + FAT_MIB) * MIB}")


def cmdline(path: Path) -> str:
    """The kernel's command line from cmdline.txt of the FAT partition, as a board's firmware reads it."""
    return _run("mtype", "-i", f"{path}@@{FAT_AT * MIB}", "::cmdline.txt").strip()


def check(path: Path, *, cut: bool = False) -> None:
    """Raises CalledProcessError if a file system of the image is not clean. cut: the power was cut before; FAT's mark
    of this, which stays until a repair, is then allowed."""
    parts = ((FAT_AT, FAT_MIB, ("fsck.vfat", "-n")), (FAT_AT + FAT_MIB, ROOT_MIB, ("e2fsck", "-fn")))
    for place, size, program in parts:
        part = path.with_suffix(".part")
        with path.open("rb") as whole, part.open("wb") as file:
            whole.seek(place * MIB)
            for _ in range(size):
                block = whole.read(MIB)
                if block.count(0) == len(block):
                    file.seek(len(block), 1)  # a hole
                else:
                    file.write(block)
            file.truncate(size * MIB)
            if cut and place == FAT_AT:
                file.seek(FAT_MARK)
                file.write(b"\0")
        try:
            _run(*program, str(part))
        finally:
            part.unlink()


def _run(*command: str, text: str | None = None) -> str:
    environment = {**os.environ, "MTOOLS_SKIP_CHECK": "1"}  # disk geometry, unused
    done = subprocess.run(command, check=True, input=text, text=True, capture_output=True, env=environment)
    return done.stdout
