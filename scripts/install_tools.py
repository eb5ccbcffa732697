"""Installs the programs that the tests need and this machine lacks: `make tools`. Asks before it runs anything.

Only the standard library. Debian and Ubuntu (apt-get), Fedora (dnf), macOS (brew).
"""

from __future__ import annotations

import argparse
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass

FOLDERS = ("/usr/sbin", "/sbin", "/usr/local/sbin", "/opt/homebrew/sbin", "/opt/local/sbin")  # PATH may lack them


@dataclass(frozen=True)
class Tool:
    """A program, and the package that has it in each system; none where the system has it anyway or cannot use it."""

    apt: str
    dnf: str
    brew: str | None = None


TOOLS = {
    "bash": Tool("bash", "bash", "bash"),
    "chromedriver": Tool("chromium-driver", "chromedriver", "chromedriver"),
    "chromium": Tool("chromium", "chromium", "chromium"),
    "debootstrap": Tool("debootstrap", "debootstrap"),
    "debugfs": Tool("e2fsprogs", "e2fsprogs", "e2fsprogs"),
    "depmod": Tool("kmod", "kmod"),
    "dpkg-deb": Tool("dpkg", "dpkg"),
    "e2fsck": Tool("e2fsprogs", "e2fsprogs", "e2fsprogs"),
    "flock": Tool("util-linux", "util-linux-core"),
    "fsck.vfat": Tool("dosfstools", "dosfstools", "dosfstools"),
    "gzip": Tool("gzip", "gzip"),
    "ip": Tool("iproute2", "iproute"),
    "losetup": Tool("mount", "util-linux-core"),
    "make": Tool("make", "make"),
    "mcopy": Tool("mtools", "mtools", "mtools"),
    "mke2fs": Tool("e2fsprogs", "e2fsprogs", "e2fsprogs"),
    "mkfs.vfat": Tool("dosfstools", "dosfstools", "dosfstools"),
    "mosquitto": Tool("mosquitto", "mosquitto", "mosquitto"),
    "mount": Tool("mount", "util-linux-core"),
    "nsenter": Tool("util-linux", "util-linux-core"),
    "openssl": Tool("openssl", "openssl", "openssl"),
    "pkill": Tool("procps", "procps-ng"),
    "qemu-system-aarch64": Tool("qemu-system-arm", "qemu-system-aarch64-core", "qemu"),
    "sfdisk": Tool("fdisk", "util-linux"),
    "ssh": Tool("openssh-client", "openssh-clients"),
    "ssh-keygen": Tool("openssh-client", "openssh"),
    "sshd": Tool("openssh-server", "openssh-server"),
    "systemd-analyze": Tool("systemd", "systemd"),
    "tar": Tool("tar", "tar"),
    "unshare": Tool("util-linux", "util-linux-core"),
}
COMMANDS = {
    "apt": ["apt-get", "install", "--yes", "--no-install-recommends"],
    "dnf": ["dnf", "install", "--assumeyes"],
    "brew": ["brew", "install"],
}


def find(program: str) -> str | None:
    """The path of ``program``, also in the folders of system programs."""
    return shutil.which(program, path=os.pathsep.join((os.environ.get("PATH", ""), *FOLDERS)))


def missing() -> list[str]:
    """The programs of TOOLS that this machine lacks."""
    return [program for program in TOOLS if find(program) is None]


def manager() -> str | None:
    """The package manager of this machine, as TOOLS names it."""
    programs = {"apt": "apt-get", "dnf": "dnf", "brew": "brew"}
    return next((name for name, program in programs.items() if shutil.which(program)), None)


def packages(programs: Iterable[str], system: str) -> list[str]:
    """The packages of ``system`` that have ``programs``, each once."""
    found = (getattr(TOOLS[program], system) for program in programs)
    return list(dict.fromkeys(package for package in found if package))


def commands(wanted: list[str], system: str, *, root: bool) -> list[list[str]]:
    """What installs the packages ``wanted``."""
    sudo = [] if root or system == "brew" else ["sudo"]
    update = [[*sudo, "apt-get", "update", "--quiet"]] if system == "apt" else []
    return [*update, [*sudo, *COMMANDS[system], *wanted]]


def main(arguments: list[str] | None = None) -> int:
    """Exit code 0 when nothing is missing or all of it was installed, 1 otherwise."""
    parser = argparse.ArgumentParser(description="Installs the programs that the tests need and this machine lacks.")
    parser.add_argument("--yes", action="store_true", help="install without asking")
    options = parser.parse_args(arguments)
    lacking, system = missing(), manager()
    wanted = packages(lacking, system) if system else []
    if not lacking:
        print("every program that the tests need is on this machine")
        return 0
    print(f"not on this machine: {', '.join(lacking)}")
    if not wanted:
        print("hint: install them with the package manager of your system" if system is None else
              f"{system} has no package for them; their tests are skipped")
        return int(system is None)
    plan = commands(wanted, str(system), root=os.geteuid() == 0)
    print(*(f"  {shlex.join(command)}" for command in plan), sep="\n")
    if not (options.yes or confirmed()):
        print("nothing was installed")
        return 1
    return max(subprocess.run(command, check=False).returncode for command in plan)


def confirmed() -> bool:
    """Whether a person says yes; without a terminal nobody does."""
    return sys.stdin.isatty() and input("Run this? [y/N] ").strip().lower() in ("y", "yes")


if __name__ == "__main__":
    sys.exit(main())
