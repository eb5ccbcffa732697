"""Run the tests as on a machine with only Python and coreutils: `python -m tests.support.bare [pytest arguments]`.

Only test files that start programs run; the others do not depend on what is installed.

PATH is one folder with coreutils and this Python. As root on Linux the system program folders, which the product also
searches, are empty.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.support.paths import ROOT

COREUTILS = (
    "arch b2sum base32 base64 basename basenc cat chcon chgrp chmod chown chroot cksum comm cp csplit cut date dd df "
    "dir dircolors dirname du echo env expand expr factor false fmt fold groups head hostid id install join link ln "
    "logname ls md5sum mkdir mkfifo mknod mktemp mv nice nl nohup nproc numfmt od paste pathchk pinky pr printenv "
    "printf ptx pwd readlink realpath rm rmdir runcon seq sha1sum sha224sum sha256sum sha384sum sha512sum shred shuf "
    "sleep sort split stat stdbuf stty sum sync tac tail tee test timeout touch tr true truncate tsort tty uname "
    "unexpand uniq unlink users vdir wc who whoami yes"
)
HELPERS = "brokers|pki|programs|disks|faults|fleet_processes|loopback_board|netns|stepped_fleet|wheels"
STARTS = re.compile(rf"subprocess|shutil\.which|tests\.support\.({HELPERS})")
SYSTEM_FOLDERS = ("/usr/sbin", "/usr/local/sbin")
HIDE = 'mount=$1; for folder in $2; do "$mount" -t tmpfs -o size=64k none "$folder" || exit 1; done; shift 2; exec "$@"'


def bare_path(folder: Path) -> str:
    """A PATH with only coreutils and this machine's Python, made in ``folder``."""
    found = {name: shutil.which(name) for name in COREUTILS.split()}
    python = str(Path(sys.executable).resolve())
    for name, program in {**found, "python3": python, "python": python}.items():
        if program:
            (folder / name).symlink_to(program)
    return str(folder)


def hidden(command: list[str]) -> list[str]:
    """``command`` with the system program folders hidden; unchanged where mounting is not allowed."""
    programs = [shutil.which(name) for name in ("unshare", "sh", "mount")]
    if sys.platform != "linux" or os.geteuid() != 0 or None in programs:
        return command
    unshare, shell, mount = map(str, programs)
    folders = " ".join(folder for folder in SYSTEM_FOLDERS if Path(folder).is_dir())
    inside = [unshare, "--mount", shell, "-c", HIDE, "sh", mount, folders]
    tried = subprocess.run([*inside, sys.executable, "-c", ""], capture_output=True, check=False)
    return [*inside, *command] if tried.returncode == 0 else command


def starting_programs(folder: Path) -> list[str]:
    """Test files in ``folder`` that start programs, directly or through a support module."""
    return [str(path) for path in sorted(folder.rglob("test_*.py")) if STARTS.search(path.read_text())]


def main(arguments: list[str]) -> int:
    """Return pytest's exit code. CI is unset, because there a skip for a missing program is a failure."""
    with tempfile.TemporaryDirectory(prefix="mf-bare-") as folder:
        command = hidden([sys.executable, "-m", "pytest", *arguments, *starting_programs(ROOT / "tests")])
        if command[0] == sys.executable:
            print("the folders of system programs cannot be hidden here: PATH alone is bare", file=sys.stderr)
        environ = {name: value for name, value in os.environ.items() if name not in ("CI", "METAFLEET_SHARED")}
        return subprocess.run(command, env={**environ, "PATH": bare_path(Path(folder))}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
