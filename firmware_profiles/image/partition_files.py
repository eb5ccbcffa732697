"""Reads and writes files in the partitions of an image by mtools and debugfs, without root and without mounting."""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

from firmware_profiles.image.disk_partitions import Partition
from firmware_profiles.package.device_package import FOLDER, File, Package
from firmware_profiles.package.program import sha256_of
from fleet_core.base.errors import ConfigError, FlashError

PATH = os.pathsep.join(["/usr/sbin", "/sbin", "/usr/local/sbin", "/opt/homebrew/sbin"])
IN_ROOT = "/opt/metafleet-program.tar.gz"
ON_FAT = f"{FOLDER}/program.tar.gz"
MAX_CMDLINE_BYTES = 8192


def which(program: str) -> str | None:
    """The path of a program; system programs need not be on the user's PATH."""
    return shutil.which(program) or shutil.which(program, path=PATH)


def needed(program: str, package: str) -> str:
    """The path of a program. Raises ConfigError, naming its package, if it is not installed."""
    path = which(program)
    if path is None:
        raise ConfigError(f"{program} is not installed",
                          hint=f"install {package} (apt-get install {package}, brew install {package})")
    return path


# FAT ------------------------------------------------------------------------------------------------------------------


def cmdline(image: Path, boot: Partition) -> str | None:
    """The content of cmdline.txt, or None if there is none."""
    done = subprocess.run([needed("mtype", "mtools"), *_drive(image, boot), "::cmdline.txt"], capture_output=True,
                          env=_environ())
    return done.stdout[:MAX_CMDLINE_BYTES].decode("ascii", "replace") if done.returncode == 0 else None


def has_folder(image: Path, boot: Partition, folder: str) -> bool:
    command = [needed("mdir", "mtools"), *_drive(image, boot), "-b", f"::{folder}"]
    return subprocess.run(command, capture_output=True, env=_environ()).returncode == 0


def put_files(image: Path, boot: Partition, files: tuple[File, ...]) -> None:
    """Writes the files with their folders, and reads them back. Raises FlashError."""
    for folder in sorted({parent for file in files for parent in _parents(file.path)}):
        if not has_folder(image, boot, folder):
            _call("mmd", *_drive(image, boot), f"::{folder}")
    for file in files:
        _call("mcopy", *_drive(image, boot), "-o", "-", f"::{file.path}", data=file.data)
        if _call("mtype", *_drive(image, boot), f"::{file.path}") != file.data:
            raise FlashError(f"{file.path} is not what was written")


def _parents(path: str) -> Iterator[str]:
    parts = path.split("/")[:-1]
    return ("/".join(parts[: count + 1]) for count in range(len(parts)))


def put_program_on_fat(image: Path, boot: Partition, package: Package) -> None:
    """Writes the program as ``ON_FAT``, and reads it back. Raises FlashError."""
    _call("mcopy", *_drive(image, boot), "-o", str(package.program.path), f"::{ON_FAT}")
    with tempfile.TemporaryDirectory(dir=image.parent, prefix=".metafleet-") as name:
        _call("mcopy", *_drive(image, boot), f"::{ON_FAT}", f"{name}/back")
        _check_copy(Path(name) / "back", package)


def _drive(image: Path, boot: Partition) -> list[str]:
    return ["-i", f"{image}@@{boot.start}"]


# ext4 -----------------------------------------------------------------------------------------------------------------


def put_program_in_root(image: Path, root: Partition, package: Package) -> None:
    """Writes the program as ``IN_ROOT``, owned by root, mode 0600, and reads it back. Raises FlashError."""
    debugfs = needed("debugfs", "e2fsprogs")
    with tempfile.TemporaryDirectory(dir=image.parent, prefix=".metafleet-") as name:
        folder = Path(name)
        (folder / "program").symlink_to(package.program.path.resolve())
        (folder / "image").symlink_to(image.resolve())
        target = f"image?offset={root.start}"
        # Making what exists already would leak an inode and damage the file system.
        has_opt = b"Type: directory" in _call(debugfs, "-R", "stat /opt", target, cwd=folder)
        has_program = b"Type: regular" in _call(debugfs, "-R", f"stat {IN_ROOT}", target, cwd=folder)
        commands = [*([] if has_opt else ["mkdir /opt"]), *([f"rm {IN_ROOT}"] if has_program else []), "cd /opt",
                    f"write program {Path(IN_ROOT).name}"]
        commands += [f"set_inode_field {IN_ROOT} {field}" for field in ("uid 0", "gid 0", "mode 0100600")]
        (folder / "commands").write_text("\n".join(commands) + "\n")
        _call(debugfs, "-w", "-f", "commands", target, cwd=folder)
        _call(debugfs, "-R", f"dump {IN_ROOT} back", target, cwd=folder)
        _check_copy(folder / "back", package)


def _check_copy(copied: Path, package: Package) -> None:
    if not copied.exists() or sha256_of(copied) != package.program.sha256:
        raise FlashError("the program in the image is not what was written", hint="is the disk sound?")


def _environ() -> dict[str, str]:
    return {**os.environ, "MTOOLS_SKIP_CHECK": "1", "MTOOLSRC": os.devnull, "LC_ALL": "C.UTF-8"}


def _call(program: str, *arguments: str, data: bytes | None = None, cwd: Path | None = None) -> bytes:
    """The output of a program. Raises FlashError with its last error line."""
    command = [program if "/" in program else needed(program, "mtools"), *arguments]
    done = subprocess.run(command, input=data or b"", capture_output=True, cwd=cwd, env=_environ())
    if done.returncode != 0:
        with contextlib.suppress(IndexError):
            raise FlashError(f"{Path(program).name}: {done.stderr.decode(errors='replace').strip().splitlines()[-1]}")
        raise FlashError(f"{Path(program).name} failed with exit code {done.returncode}")
    return done.stdout
