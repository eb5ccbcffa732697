"""A Debian root file system for arm64, unpacked from packages on this machine without running any foreign instruction.

    python -m benchmarks.arm64.root FOLDER [bookworm|trixie]

debootstrap fetches and checks the packages (first stage). Its second stage would run the packages' scripts in the
foreign system; their work is done here instead: accounts, mount points, links. It is a small Debian with systemd, a
network by DHCP, an SSH server and a FAT partition at /boot/firmware, as Raspberry Pi OS has one, and no desktop. Trixie
also has cloud-init, with the settings of Raspberry Pi OS (RPi-Distro/pi-gen, stage2/04-cloud-init).
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

PACKAGES = (
    "systemd", "systemd-sysv", "systemd-timesyncd", "udev", "dbus", "python3", "ca-certificates", "iproute2", "procps",
    "kmod", "openssh-server", "sudo", "busybox-static", "linux-image-cloud-arm64",
)  # fmt: skip
PROGRAMS = ("debootstrap", "dpkg-deb", "depmod", "ssh-keygen", "tar")
USERS = ("messagebus:x:100:100::/nonexistent:/usr/sbin/nologin", "sshd:x:101:65534::/run/sshd:/usr/sbin/nologin")
GROUPS = ("messagebus:x:100:",)
FILES = {
    "etc/hostname": "board\n",
    "etc/hosts": "127.0.0.1 localhost board\n",
    "etc/machine-id": "",
    "etc/default/locale": "LANG=C.UTF-8\n",
    "etc/fstab": (
        "LABEL=rootfs / ext4 defaults,noatime 0 1\n"
        "LABEL=bootfs /boot/firmware vfat defaults,x-systemd.device-timeout=180s 0 2\n"
    ),
    "etc/systemd/network/20-wired.network": (
        "[Match]\nName=en* eth*\n[Network]\nDHCP=ipv4\nLinkLocalAddressing=no\nIPv6AcceptRA=no\n"
    ),
    "etc/pam.d/common-auth": "auth required pam_permit.so\n",
    "etc/pam.d/common-account": "account required pam_permit.so\n",
    "etc/pam.d/common-password": "password required pam_permit.so\n",
    "etc/pam.d/common-session": "session required pam_permit.so\n",
    "etc/pam.d/common-session-noninteractive": "session required pam_permit.so\n",
    "etc/ssh/sshd_config": "PasswordAuthentication no\nUsePAM yes\nSubsystem sftp /usr/lib/openssh/sftp-server\n",
    # An emulated processor is slow: timeouts are long.
    "etc/systemd/system.conf.d/slow.conf": "[Manager]\nDefaultTimeoutStartSec=300s\nDefaultDeviceTimeoutSec=300s\n",
}
"""Files that the packages' own scripts, or the maker of an image, would write."""
LINKS = {
    "etc/localtime": "/usr/share/zoneinfo/Etc/UTC",
    "etc/systemd/system/multi-user.target.wants/systemd-networkd.service":
        "/lib/systemd/system/systemd-networkd.service",
    "etc/systemd/system/multi-user.target.wants/ssh.service": "/lib/systemd/system/ssh.service",
    "etc/systemd/system/default.target": "/lib/systemd/system/multi-user.target",
    "usr/bin/awk": "/bin/busybox",
}  # fmt: skip
CLOUD_INIT = {
    "etc/cloud/cloud.cfg.d/99_raspberry-pi.cfg": (
        "datasource_list: [ NoCloud, None ]\ndatasource:\n  NoCloud:\n    seedfrom: file:///boot/firmware\n"
        "ssh_deletekeys: false\nssh_genkeytypes: []\n"
    ),
    "etc/systemd/system/cloud-init-local.service.d/boot.conf": "[Unit]\nRequiresMountsFor=/boot/firmware\n",
}
CLOUD_INIT_UNITS = ("cloud-init-main", "cloud-init-local", "cloud-init-network", "cloud-config", "cloud-final")
CLOUD_INIT_LINKS = {
    "usr/bin/nc": "nc.openbsd",
    **{f"etc/systemd/system/cloud-init.target.wants/{name}.service": f"/lib/systemd/system/{name}.service"
       for name in CLOUD_INIT_UNITS},
}
FOLDERS = ("boot/firmware", "proc", "sys", "dev", "run", "tmp", "mnt", "media", "srv", "home", "opt", "var/lib/dbus")


@dataclass(frozen=True)
class Debian:
    """A release: its Python, and the packages, files and links that it has in addition to the common ones. folder: the
    name of the folder with its image."""

    release: str
    python: str
    folder: str
    packages: tuple[str, ...] = ()
    files: Mapping[str, str] = field(default_factory=dict)
    links: Mapping[str, str] = field(default_factory=dict)


BOOKWORM = Debian("bookworm", "3.11", "")
MENDER = Debian("bookworm", "3.11", "mender", ("mender-client",))
TRIXIE = Debian("trixie", "3.13", "trixie", ("cloud-init", "e2fsprogs"), CLOUD_INIT, CLOUD_INIT_LINKS)


def make(root: Path, debian: Debian = BOOKWORM) -> None:
    """Makes the file system in the new folder ``root``. Raises CalledProcessError. Must run as root."""
    staged = root.with_name(root.name + ".part")
    shutil.rmtree(staged, ignore_errors=True)
    staged.parent.mkdir(parents=True, exist_ok=True)
    include = "--include=" + ",".join((*PACKAGES, *debian.packages))
    _run("debootstrap", "--arch=arm64", "--foreign", "--variant=minbase", include, debian.release, str(staged))
    _unpack(staged)
    _settle(staged, debian)
    _run("ssh-keygen", "-A", "-f", str(staged))
    _run("depmod", "-b", str(staged), kernel(staged).name.removeprefix("vmlinuz-"))
    staged.rename(root)


def kernel(root: Path) -> Path:
    return next((root / "boot").glob("vmlinuz-*"))


def _unpack(root: Path) -> None:
    """Unpacks the second stage's packages over the first stage's files."""
    archives = root / "var/cache/apt/archives"
    shutil.rmtree(root / "debootstrap.tmp", ignore_errors=True)
    with ThreadPoolExecutor(2) as several:
        list(several.map(lambda package: _extract(package, root), sorted(archives.glob("*.deb"))))
    for package in archives.glob("*.deb"):
        package.unlink()
    shutil.rmtree(root / "debootstrap", ignore_errors=True)


def _extract(package: Path, root: Path) -> None:
    with subprocess.Popen(["dpkg-deb", "--fsys-tarfile", str(package)], stdout=subprocess.PIPE) as reader:
        _run("tar", "-C", str(root), "-x", "--keep-directory-symlink", stdin=reader.stdout)
    if reader.returncode:
        raise subprocess.CalledProcessError(reader.returncode, reader.args)


def _settle(root: Path, debian: Debian) -> None:
    for name in ("passwd", "group"):
        shutil.copy(root / f"usr/share/base-passwd/{name}.master", root / f"etc/{name}")
    _append(root / "etc/passwd", USERS)
    _append(root / "etc/group", GROUPS)
    passwd = (root / "etc/passwd").read_text()
    (root / "etc/passwd").write_text(passwd.replace("root:*:", "root:x:", 1).replace("root::", "root:x:", 1))
    (root / "etc/shadow").write_text("root:*:19000:0:99999:7:::\n")
    (root / "etc/shadow").chmod(0o640)
    (root / "etc/gshadow").touch()
    for name in FOLDERS:
        place = root / name
        if place.is_symlink():  # the first stage leaves /proc as a link
            place.unlink()
        place.mkdir(parents=True, exist_ok=True)
    (root / "tmp").chmod(0o1777)
    (root / "root").mkdir(mode=0o700, exist_ok=True)
    for name, text in {**FILES, **debian.files}.items():
        (root / name).parent.mkdir(parents=True, exist_ok=True)
        (root / name).write_text(text)
    for name, target in {**LINKS, **debian.links, "usr/bin/python3": f"python{debian.python}"}.items():
        link = root / name
        link.parent.mkdir(parents=True, exist_ok=True)
        link.unlink(missing_ok=True)
        link.symlink_to(target)
    trusted = sorted((root / "usr/share/ca-certificates").rglob("*.crt"))
    (root / "etc/ssl/certs/ca-certificates.crt").write_text("".join(path.read_text() for path in trusted))
    nsswitch = root / "usr/share/libc-bin/nsswitch.conf"
    if nsswitch.exists() and not (root / "etc/nsswitch.conf").exists():
        shutil.copy(nsswitch, root / "etc/nsswitch.conf")
    if shutil.which("systemd-sysusers"):
        subprocess.run(["systemd-sysusers", f"--root={root}"], check=False, capture_output=True)


def _append(path: Path, lines: Sequence[str]) -> None:
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def _run(*command: str, stdin: IO[bytes] | None = None) -> None:
    subprocess.run(command, check=True, stdin=stdin, stdout=subprocess.DEVNULL)


if __name__ == "__main__":
    make(Path(sys.argv[1]), TRIXIE if TRIXIE.release in sys.argv[2:] else BOOKWORM)
