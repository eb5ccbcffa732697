"""A device's root folder in a folder of the test, where ``update.sh`` acts as on a board: real scripts and signatures,
stand-ins for systemd. No namespaces, no process stays: restarting the unit runs the new program's ``run`` to its end.
"""

from __future__ import annotations

import gzip
import io
import itertools
import os
import platform
import subprocess
import sys
import tarfile
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from firmware_profiles.package.device_package import Signing
from firmware_profiles.package.program import DEVICE_SCRIPTS, Program, sha256_of
from firmware_profiles.pulled import update_package
from firmware_profiles.pulled.update_package import UpdatePackage
from tests.support.loopback_board import SIGNING
from tests.support.paths import ROOT

PYTHON = f"{sys.version_info[0]}.{sys.version_info[1]}"
ATTEMPTS = itertools.count(1)
UNITS = {"metafleet.service": "[Service]\nExecStart=x\n", "metafleet-update.service": "one\n"}

AGENT = f'''#!/bin/sh
[ "$1" != verify ] || PYTHONPATH={ROOT} exec {sys.executable} -m edge_agent.commands.cli "$@"
'''
GOOD = AGENT + """\
echo "{\\"boot\\": \\"$$\\", \\"version\\": \\"VERSION\\"}" >"$METAFLEET_ROOT/var/lib/metafleet/online.json"
"""
DEAF = AGENT

SYSTEMCTL = """#!/bin/sh
echo "$*" >>"$METAFLEET_ROOT/asked"
case " $* " in
*" restart "*metafleet.service*) "$METAFLEET_ROOT/opt/metafleet/current/bin/edge-agent" run ;;
*" is-active "*) echo active ;;
esac
"""


@dataclass(frozen=True)
class FakeRoot:
    """path: stands for / of the device."""

    path: Path

    @property
    def programs(self) -> Path:
        return self.path / "opt/metafleet"

    @property
    def inbox(self) -> Path:
        """Where the agent puts what it has fetched."""
        return self.path / "var/lib/metafleet/update"

    @property
    def runs(self) -> str:
        link = self.programs / "current"
        return os.readlink(link) if link.is_symlink() else ""

    @property
    def result(self) -> dict[str, str]:
        """The outcome of the last update."""
        path = self.programs / "update-result"
        return dict(line.partition("=")[::2] for line in path.read_text().splitlines()) if path.exists() else {}

    def environment(self, **more: str) -> dict[str, str]:
        return {**os.environ, "METAFLEET_ROOT": str(self.path), "PATH": f"{self.path}/bin:{os.environ['PATH']}",
                "METAFLEET_PATIENCE_S": "0", **more}

    def update(self, *words: str, script: str = "update", **more: str) -> subprocess.CompletedProcess[str]:
        """Runs the running program's ``update``, as root's units or Mender do."""
        return subprocess.run(["/bin/sh", str(self.programs / "current/bin" / script), *words], text=True,
                              env=self.environment(**more), capture_output=True, check=False, timeout=120)

    def give(self, package: UpdatePackage, ready: str = "") -> None:
        """Puts a package where the agent puts it. ready: serial and attempt; default: a new attempt."""
        update_package.save(package, self.inbox)
        (self.inbox / "ready").write_text(ready or f"1 {next(ATTEMPTS)}")

    def pull(self, package: UpdatePackage, ready: str = "", **more: str) -> dict[str, str]:
        self.give(package, ready)
        self.update("pull", **more)
        return self.result


def fake_root(folder: Path, version: str = "1.0-aaa", signing: Signing = SIGNING) -> FakeRoot:
    """A device on which ``version`` runs, signed by the fleet."""
    made = FakeRoot(folder)
    for path in ("opt/metafleet", "etc/metafleet", "etc/systemd/system", "var/lib/metafleet/update", "bin"):
        (folder / path).mkdir(parents=True)
    for name, text in {"systemctl": SYSTEMCTL, "systemd-run": "#!/bin/sh\nexit 0\n"}.items():
        (folder / "bin" / name).write_text(text)
        (folder / "bin" / name).chmod(0o755)
    (folder / "etc/metafleet/fleet.pub").write_text(f"{signing.signer.public}\n")
    first = an_update(folder, version, signing=signing)
    with tarfile.open(first.archive) as archive:
        archive.extractall(made.programs, filter="fully_trusted")
    (made.programs / version / "PACKAGE").write_bytes(first.statement)
    (made.programs / "current").symlink_to(version)
    (folder / "var/lib/metafleet/online.json").write_text(f'{{"boot": "0", "version": "{version}"}}\n')
    return made


def an_update(folder: Path, version: str, agent: str = GOOD, *, signing: Signing = SIGNING, older: bool = False,
              arch: str = platform.machine(), python: str = PYTHON, units: Mapping[str, str] = UNITS,
              more: Mapping[str, bytes] = {}) -> UpdatePackage:
    """An update whose agent is a script. more: files or, with a value that begins with ``->``, links in its archive."""
    program = a_program(folder, version, agent, more, arch, python)
    files = {"prepare": "true\n", **units}
    statement = signing.statement(program, {name: text.encode() for name, text in files.items()}, older=older)
    return UpdatePackage(version, python, arch, statement, files, program.path)


def a_program(folder: Path, version: str, agent: str, more: Mapping[str, bytes], arch: str, python: str) -> Program:
    scripts = {name: (ROOT / "firmware_profiles" / path).read_bytes() for name, path in DEVICE_SCRIPTS.items()}
    files = {"bin/edge-agent": agent.replace("VERSION", version).encode(), **scripts, "lib/same.py": b"same\n" * 1000,
             "lib/with blank (1).py": version.encode(), **more}
    path = folder / f"{version}.tar.gz"
    with gzip.open(path, "wb") as packed, tarfile.open(fileobj=packed, mode="w|") as archive:
        for name, data in files.items():
            entry = tarfile.TarInfo(name if name.startswith(("/", "..")) else f"{version}/{name}")
            entry.mode = 0o755 if name.startswith("bin/") else 0o644
            if data.startswith(b"->"):
                entry.type, entry.linkname = tarfile.SYMTYPE, data[2:].decode()
                archive.addfile(entry)
            else:
                entry.size = len(data)
                archive.addfile(entry, io.BytesIO(data))
    return Program(version, path, sha256_of(path), path.stat().st_size, 0, python, arch, "a test", ())
