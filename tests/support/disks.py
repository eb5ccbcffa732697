"""Disk images with an sfdisk partition table, FAT and ext4, made without root and without mounting."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping
from pathlib import Path

PATH = os.environ["PATH"] + ":/usr/sbin:/sbin"
MIB = 1 << 20


def call(*command: str | int | Path, text: str | None = None) -> str:
    """Run a program and return its output; a failure shows it."""
    done = subprocess.run([str(part) for part in command], input=text, capture_output=True, text=True,
                          env={**os.environ, "PATH": PATH})
    assert done.returncode == 0, f"{command}: {done.stdout}{done.stderr}"
    return done.stdout


def table(path: Path, size: int, lines: str) -> Path:
    """An empty image of ``size`` bytes with the partition table that sfdisk makes from ``lines``."""
    with path.open("wb") as file:
        file.truncate(size)
    call("sfdisk", "--quiet", path, text=lines)
    return path


def card(path: Path, *, boot_mib: int = 16, root_mib: int = 24, label: str = "dos", bits: int = 0,
         folders: tuple[str, ...] = ("etc", "opt"), links: Mapping[str, str] | None = None) -> Path:
    """A board's image: FAT at 1 MiB with config.txt and cmdline.txt, then ext4."""
    fat_type, root_type = ("c", "83") if label == "dos" else ("EBD0A0A2-B9E5-4433-87C0-68B6B72699C7", "L")
    lines = (f"label: {label}", f"start=2048, size={boot_mib * 2048}, type={fat_type}",
             f"start={(boot_mib + 1) * 2048}, size={root_mib * 2048}, type={root_type}")
    table(path, (boot_mib + root_mib + 2) * MIB, "\n".join(lines) + "\n")
    bits = bits or (16 if boot_mib < 40 else 32)
    call("mkfs.vfat", "--offset", "2048", "-F", bits, "-n", "bootfs", "-i", "FEDA0001", path, boot_mib * 1024)
    root = path.with_suffix(".tree")
    for folder in folders:
        (root / folder).mkdir(parents=True)
    for name, to in (links or {}).items():
        (root / name).symlink_to(to)
    call("mke2fs", "-q", "-t", "ext4", "-L", "rootfs", "-d", root, "-E", f"offset={(boot_mib + 1) * MIB}", path,
         f"{root_mib}m")
    line = "console=serial0,115200 root=PARTUUID=1234-02 rootfstype=ext4 fsck.repair=yes rootwait quiet"
    for name, content in (("config.txt", "arm_64bit=1\n"), ("cmdline.txt", line + "\n")):
        (root / name).write_text(content)
        call("mcopy", "-i", f"{path}@@{MIB}", root / name, f"::{name}")
    return path


def check(path: Path, boot_mib: int = 16, root_mib: int = 24) -> None:
    """Check copies of both file systems with fsck.vfat and e2fsck."""
    with path.open("rb") as file:
        file.seek(MIB)
        fat, ext = path.with_suffix(".fat"), path.with_suffix(".ext")
        fat.write_bytes(file.read(boot_mib * MIB))
        ext.write_bytes(file.read(root_mib * MIB))
    call("fsck.vfat", "-n", fat)
    call("e2fsck", "-f", "-n", ext)
    fat.unlink()
    ext.unlink()


def on_fat(path: Path, name: str) -> bytes:
    done = subprocess.run(["mtype", "-i", f"{path}@@{MIB}", f"::{name}"], capture_output=True)
    assert done.returncode == 0, done.stderr
    return done.stdout


def names_on_fat(path: Path) -> set[str]:
    """Every file and folder on the FAT partition."""
    listed = call("mdir", "-b", "-/", "-a", "-i", f"{path}@@{MIB}", "::")
    return {line.removeprefix("::/").rstrip("/") for line in listed.splitlines()}
