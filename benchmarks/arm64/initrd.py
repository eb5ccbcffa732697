"""The kernel's first file system: busybox and the drivers of the emulated disk, which switches to the card's root.

Packages: busybox-static and the kernel's modules, both from the root that ``root`` made.
"""

from __future__ import annotations

import gzip
import io
import lzma
import stat
from pathlib import Path

DRIVERS = (
    "virtio", "virtio_ring", "virtio_pci_modern_dev", "virtio_pci_legacy_dev", "virtio_pci", "virtio_mmio",
    "virtio_blk", "failover", "net_failover", "virtio_net",
)  # fmt: skip
"""In the order of their dependencies; a driver that is built into the kernel has no file."""
INIT = """\
#!/bin/busybox sh
/bin/busybox mount -t devtmpfs dev /dev
/bin/busybox mount -t proc proc /proc
/bin/busybox mount -t sysfs sys /sys
for driver in {drivers}; do /bin/busybox insmod /lib/$driver; done
n=0
until [ -b /dev/vda2 ] || [ $n = 120 ]; do /bin/busybox sleep 1; n=$((n + 1)); done
/bin/busybox mount -t ext4 /dev/vda2 /card || exec /bin/busybox sh
for place in dev proc sys; do /bin/busybox mount --move /$place /card/$place; done
exec /bin/busybox switch_root /card /sbin/init
"""


def write(root: Path, path: Path) -> None:
    """Writes the archive for the kernel of ``root``."""
    modules = {each.name.split(".ko")[0].replace("-", "_"): each for each in (root / "lib/modules").rglob("*.ko*")}
    drivers = [modules[name] for name in DRIVERS if name in modules]
    archive = Archive()
    for folder in ("bin", "lib", "dev", "proc", "sys", "card"):
        archive.add(folder, b"", stat.S_IFDIR | 0o755)
    archive.add("bin/busybox", (root / "bin/busybox").read_bytes(), stat.S_IFREG | 0o755)
    for driver in drivers:
        data = driver.read_bytes()
        archive.add(f"lib/{driver.stem}", lzma.decompress(data) if driver.suffix == ".xz" else data,
                    stat.S_IFREG | 0o644)
    init = INIT.format(drivers=" ".join(driver.stem for driver in drivers))
    archive.add("init", init.encode(), stat.S_IFREG | 0o755)
    path.write_bytes(gzip.compress(archive.finished(), 1))


class Archive:
    """cpio's "new ASCII" format, which the kernel unpacks."""

    def __init__(self) -> None:
        self._out, self._number = io.BytesIO(), 0

    def add(self, name: str, data: bytes, mode: int) -> None:
        self._number += 1
        fields = (self._number, mode, 0, 0, 1, 0, len(data), 0, 0, 0, 0, len(name) + 1, 0)
        self._padded(b"070701" + "".join(f"{field:08x}" for field in fields).encode() + name.encode() + b"\0")
        self._padded(data)

    def finished(self) -> bytes:
        self.add("TRAILER!!!", b"", 0)
        return self._out.getvalue()

    def _padded(self, data: bytes) -> None:
        self._out.write(data + b"\0" * (-len(data) % 4))
