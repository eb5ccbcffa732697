"""A stand-in for a board that is flashed over SSH: a real sshd on a random loopback port in its own mount and process
namespaces, where /etc is a copy and /opt, /var/lib, /var/cache and /run are empty. systemctl, uname, getconf,
python3 and sudo are stand-ins; systemd-run fails, as it does where systemd does not run.

Everything that it started ends with it. Needs Linux, root, openssh-server and util-linux.
"""

from __future__ import annotations

import gzip
import io
import os
import platform
import shutil
import socket
import subprocess
import sys
import tarfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import pytest

from firmware_profiles.package.device_package import Signing
from firmware_profiles.package.program import Program, sha256_of
from fleet_core.protocol.signing import Signer
from tests.support import waiting
from tests.support.brokers import free_port
from tests.support.waiting import PATIENCE_S

SBIN = os.pathsep.join((os.environ.get("PATH", ""), "/usr/sbin", "/sbin"))
USER = "pi"
REPO = Path(__file__).parents[2]
SIGNING = Signing("lab", Signer(bytes(range(32))))
"""The key of the fleet that the devices of tests belong to."""

SETUP = """set -e
mkdir -p "$1/etc"
mount -t tmpfs none "$1/etc"
cp -a /etc/. "$1/etc"
mount --bind "$1/etc" /etc
for folder in /opt /var/lib /var/cache /run; do mount -t tmpfs none $folder; done
mkdir -p /run/sshd /run/stand-in /etc/systemd/system
sed -i "s|^root:.*|root:*:0:0:root:$1:/bin/sh|" /etc/passwd
grep -q '^pi:' /etc/passwd || echo 'pi:*:7654:7654::/tmp:/bin/sh' >> /etc/passwd
"$2" -D -e -f "$1/sshd_config" 2> "$1/sshd.log" &
wait
"""

SSHD_CONFIG = """ListenAddress 127.0.0.1
Port {port}
HostKey {folder}/host_key
AuthorizedKeysFile {folder}/authorized
PidFile none
StrictModes no
UsePAM no
PasswordAuthentication no
KbdInteractiveAuthentication no
PermitRootLogin prohibit-password
MaxStartups 100
SetEnv PATH={folder}/bin:{path}
"""

CLIENT_CONFIG = """Host *
  UserKnownHostsFile {folder}/known_hosts
  GlobalKnownHostsFile /dev/null
  IdentityFile {folder}/key
  IdentitiesOnly yes
"""

SYSTEMCTL = """#!/bin/sh
# Starts and stops a unit's ExecStart; what it was asked is in /run/stand-in/asked.
echo "$*" >> /run/stand-in/asked
while [ "${1#-}" != "$1" ]; do shift; done
verb=$1; shift
while [ "${1#-}" != "$1" ]; do shift; done
unit=$1 pid=/run/stand-in/$1.pid
stop() { [ ! -e "$pid" ] || { kill -9 "$(cat "$pid")" 2>/dev/null; rm -f "$pid"; }; }
case $verb in
start|restart)
    stop
    [ -e "/etc/systemd/system/$unit" ] || { echo "Unit $unit not found." >&2; exit 5; }
    start=$(sed -n 's/^ExecStart=//p' "/etc/systemd/system/$unit")
    setsid sh -c "exec $start" </dev/null >>/run/stand-in/log 2>&1 &
    echo $! > "$pid" ;;
stop) stop ;;
is-active) [ -e "$pid" ] && kill -0 "$(cat "$pid")" 2>/dev/null && echo active || { echo inactive; exit 3; } ;;
esac
"""

# For example "uname -m" prints /run/stand-in/uname-m if that file exists.
TELLER = """#!/bin/sh
[ -e "/run/stand-in/{name}$*" ] && {{ cat "/run/stand-in/{name}$*"; exit; }}
exec {real} "$@"
"""

SUDO = """#!/bin/sh
[ -e /run/stand-in/sudo ] && exec "$@"
echo "sudo: a password is required" >&2
exit 1
"""


CHECKS = f'''#!/bin/sh
[ "$1" != verify ] || PYTHONPATH={REPO} exec {sys.executable} -m edge_agent.commands.cli "$@"
'''
"""Checks signatures as a real agent does."""
GOOD = CHECKS + """
echo "{\\"boot\\": \\"$$\\", \\"version\\": \\"VERSION\\"}" > /var/lib/metafleet/online.json
exec sleep 1000
"""
DEAF = CHECKS + "exec sleep 1000\n"
DIES = CHECKS + "exit 1\n"


@dataclass(frozen=True)
class Board:
    """folder: keys and configuration. config: for ``ssh -F``. root: the board's root file system."""

    folder: Path
    port: int
    root: Path

    @property
    def config(self) -> Path:
        return self.folder / "config"

    @property
    def known(self) -> Path:
        return self.folder / "known_hosts"

    def url(self, user: str = "root") -> str:
        return f"ssh://{user}@127.0.0.1:{self.port}"

    def path(self, path: str) -> Path:
        """A path on the board, as this process sees it."""
        return self.root / path.lstrip("/")

    def answer_with(self, command: str, text: str) -> None:
        """Set what ``uname -m``, ``getconf ...`` or ``python3 --version`` prints until ``as_new``."""
        program, arguments = command.split(maxsplit=1)
        self.path(f"/run/stand-in/{program}{arguments}").write_text(f"{text}\n")

    def trust(self) -> None:
        """Put the board's key into the operator's known_hosts."""
        kind, key, *_ = (self.folder / "host_key.pub").read_text().split()
        self.known.write_text(f"[127.0.0.1]:{self.port} {kind} {key}\n")

    def fingerprint(self) -> str:
        done = subprocess.run(["ssh-keygen", "-lf", str(self.folder / "host_key.pub")], check=True,
                              capture_output=True, text=True).stdout
        return done.split()[1]

    def sh(self, command: str) -> str:
        """Run a command on the board without SSH; return stdout and stderr."""
        pid = self.root.parent.name
        done = subprocess.run(
            ["nsenter", "-t", pid, "-m", "-p", "env", f"PATH={self.folder}/bin:{SBIN}", "sh", "-c", command],
            capture_output=True, text=True, timeout=PATIENCE_S, check=False,
        )
        return done.stdout + done.stderr

    def as_new(self) -> None:
        """Remove all versions, settings and units; the operator knows the host key."""
        self.sh("for f in /run/stand-in/*.pid; do [ -e $f ] && kill -9 $(cat $f); done;"
                "pkill -9 -f '[d]evice.sh linger';"
                "rm -rf /opt/* /var/lib/* /etc/metafleet /etc/systemd/system/metafleet* /run/stand-in/* /run/metafleet")
        self.trust()


@contextmanager
def board(folder: Path) -> Iterator[Board]:
    """A running board. folder: empty, with a short path. Skips the test without root."""
    if os.geteuid() != 0:
        pytest.skip("namespaces of mounts and processes need root")
    (folder / "bin").mkdir()
    for name, text in {"systemctl": SYSTEMCTL, "sudo": SUDO, **_tellers()}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    _key(folder / "host_key")
    _key(folder / "key")
    shutil.copy(folder / "key.pub", folder / "authorized")
    port = free_port()
    (folder / "sshd_config").write_text(SSHD_CONFIG.format(port=port, folder=folder, path=SBIN))
    (folder / "config").write_text(CLIENT_CONFIG.format(folder=folder))
    sshd = shutil.which("sshd", path=SBIN)
    assert sshd is not None
    (folder / "setup.sh").write_text(SETUP)
    process = subprocess.Popen(
        ["unshare", "--mount", "--pid", "--fork", "--kill-child=SIGKILL", "--mount-proc",
         "sh", str(folder / "setup.sh"), str(folder), sshd],
    )
    try:
        until(lambda: _answers(port), f"sshd answers on {port}")
        child = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text().split()[0]
        made = Board(folder, port, Path(f"/proc/{child}/root"))
        made.trust()
        yield made
    finally:
        process.kill()  # its child dies with it, and so does every process in the namespace
        process.wait()


def make_program(folder: Path, version: str, agent: str = GOOD) -> Program:
    """An agent program of three files for this machine; the agent is a script that only reports that it started."""
    files = {
        "bin/edge-agent": agent.replace("VERSION", version).encode(),
        "lib/same.py": b"same\n" * 10_000, "lib/with blank (1).py": version.encode(),
    }
    path = folder / f"{version}.tar.gz"
    with gzip.open(path, "wb") as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(f"{version}/{name}")
            entry.size, entry.mode = len(data), 0o755 if name.startswith("bin/") else 0o644
            archive.addfile(entry, io.BytesIO(data))
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    size = path.stat().st_size
    return Program(version, path, sha256_of(path), size, 0, python, platform.machine(), "a test", ())


def random_program(folder: Path, size: int) -> Program:
    """An agent program for a Raspberry Pi that is one file of noise; its archive has about ``size`` bytes."""
    path = folder / "program.tar.gz"
    with tarfile.open(path, "w:gz", compresslevel=0) as archive:
        entry = tarfile.TarInfo("0.1.0-abc/lib/noise")
        entry.size = size - 20_480  # what tar and gzip add
        archive.addfile(entry, io.BytesIO(os.urandom(entry.size)))
    made = path.stat().st_size
    return Program("0.1.0-abc", path, sha256_of(path), made, made, "3.13", "aarch64", "a test", ())


def until(true: Callable[[], object], what: str) -> None:
    waiting.until(true, reason=lambda: what)


def _tellers() -> dict[str, str]:
    real = {"uname": shutil.which("uname"), "getconf": shutil.which("getconf"), "python3": sys.executable}
    return {name: TELLER.format(name=name, real=program) for name, program in real.items()}


def _key(path: Path) -> None:
    subprocess.run(["ssh-keygen", "-q", "-t", "ed25519", "-N", "", "-C", "test", "-f", str(path)], check=True)


def _answers(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=1) as made:
            return made.recv(4) == b"SSH-"
    except OSError:
        return False
