"""The parts that do not depend on a fleet: kernel, initrd and the untouched image of one Debian, made once in a
folder."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

from benchmarks.arm64 import image, initrd, root
from benchmarks.arm64.root import BOOKWORM, Debian


class Base:
    """Bookworm lies in ``folder`` itself, another Debian in a folder there. turn: a lock file, held by the
    scene whose board runs."""

    def __init__(self, folder: Path, say: Callable[[str], None], debian: Debian = BOOKWORM):
        self.debian = debian
        self.folder = folder / debian.folder
        self.kernel, self.initrd = self.folder / "vmlinuz", self.folder / "initrd.gz"
        self.image, self.root = self.folder / "base.img", self.folder / "root"
        self.turn = folder / ".turn"
        if not self.image.exists():
            self._make(say)

    def _make(self, say: Callable[[str], None]) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        if not self.root.exists():
            say(f"a root file system for arm64, out of packages of Debian {self.debian.release}")
            root.make(self.root, self.debian)
        shutil.copy(root.kernel(self.root), self.kernel)
        initrd.write(self.root, self.initrd)
        part = self.folder / "base.part"
        image.write(self.root, part)
        part.rename(self.image)
