"""A device at the other end of SSH: its system, what is installed on it, and the steps of ``device.sh``.

Refused before anything is written: a 32-bit system, another architecture, an older glibc, another Python than the
wheels', missing programs, no root.
"""

from __future__ import annotations

import json
import re
import secrets
import shlex
from dataclasses import dataclass, field
from pathlib import Path

from firmware_profiles.package.board_needs import Machine
from firmware_profiles.ssh.ssh_connection import Answer, Connection, Feed, first_line, last_line
from fleet_core.base.errors import FlashError
from fleet_core.board.profile import WHY_NOT_32_BIT, WIDE_HINT, is_narrow

SCRIPT = Path(__file__).with_name("device.sh")
FOLDER = "/opt/metafleet/.flash"
ON_DEVICE = f"{FOLDER}/device.sh"
OTHER_CONTENT, NOT_ARMED, TAKEN_OVER, BUSY, UNSIGNED = 3, 4, 5, 6, 7
EXIT_CODES = {
    OTHER_CONTENT: ("the device runs this version with other content", "make the package again, with another version"),
    NOT_ARMED: ("the device has returned to its former version", "run the same command again"),
    TAKEN_OVER: ("another run has taken over this device", "let that one end"),
    BUSY: ("another run is working on this device", "let it end, then run the same command again"),
}
"""{exit code of device.sh: (error, hint)}."""
UNSIGNED_HINT = ("flash it from the folder of the fleet that it belongs to. For a new fleet or key, or if the agent "
                 "there cannot check, remove the key first: sudo rm /etc/metafleet/fleet.pub")


class NotArmed(FlashError):
    """The device rolled back by itself: there is nothing to confirm or to roll back."""


@dataclass(frozen=True)
class Found:
    """The device's system. missing: programs that flashing needs and that are not installed."""

    arch: str = ""
    bits: str = ""
    glibc: str = ""
    python: str = ""
    root: bool = False
    missing: tuple[str, ...] = ()

    @property
    def python_version(self) -> str | None:
        """As ``3.11``, or None without Python."""
        match = re.fullmatch(r"Python (\d+\.\d+)\..*", self.python)
        return None if match is None else match[1]


@dataclass(frozen=True)
class Health:
    """active: the unit's state in systemd. boot, version: from the note that the agent wrote when it last connected."""

    current: str = ""
    active: str = ""
    boot: str = ""
    version: str = ""


@dataclass(frozen=True)
class Facts:
    """placed: {version: SHA-256 of its manifest}. ready: versions that were prepared. armed: a version that is not
    confirmed yet. last_return: the version that the device rolled back by itself, when and why. files: {path: SHA-256}
    of the settings. own: the device.toml that enrolment wrote on the device; empty before that."""

    health: Health
    free_kib: int = 0
    placed: dict[str, str] = field(default_factory=dict)
    ready: tuple[str, ...] = ()
    armed: str = ""
    last_return: str = ""
    files: dict[str, str] = field(default_factory=dict)
    own: str = ""


class Remote:
    """Runs ``device.sh`` over an open connection. run: this run's name on the device."""

    def __init__(self, connection: Connection):
        self.connection, self.where = connection, connection.target.url
        self.run = secrets.token_hex(8)
        self._sudo = ""
        self._script = SCRIPT.read_bytes()

    # Read only

    def machine(self) -> Found:
        """The device's system. Raises FlashError if the user cannot become root without a password."""
        values = _values(self._run("sh -s -- machine", "looking at the system", feed=self._script))
        if values.get("root") != "0":
            self._sudo = "sudo -n -- "
            self._check_root()
        return Found(values.get("arch", ""), values.get("bits", ""), values.get("glibc", ""), values.get("python", ""),
                     True, tuple(values.get("missing", "").split()))

    def facts(self) -> Facts:
        """What is installed."""
        text = self._run_script("facts")
        values = _values(text)
        by_kind = {kind: {key.partition(" ")[2]: value for key, value in values.items() if key.startswith(f"{kind} ")}
                   for kind in ("version", "ready", "file")}
        own = "".join(f"{line[4:]}\n" for line in text.splitlines() if line.startswith("own="))
        return Facts(
            _health(values), int(values["free_kib"]) if values.get("free_kib", "").isdigit() else 0, by_kind["version"],
            tuple(by_kind["ready"]), values.get("armed", ""), values.get("last_return", ""), by_kind["file"], own,
        )

    def health(self) -> Health:
        return _health(_values(self._run_script("health")))

    # Writing

    def begin(self) -> None:
        """Installs the script; from now on this run owns the device."""
        put = (f"umask 077; mkdir -p {FOLDER} && chmod 755 /opt/metafleet && cat >{ON_DEVICE}.new && "
               f"mv {ON_DEVICE}.new {ON_DEVICE} && exec /bin/sh {ON_DEVICE} begin {self.run}")
        self._run(f"{self._sudo}sh -c {shlex.quote(put)}", "beginning", feed=self._script)

    def step(self, verb: str, *arguments: str, what: str, feed: Feed | bytes = b"", timeout_s: float = 60.0) -> str:
        """Runs one verb of ``device.sh`` in this run's name; returns its output. Raises FlashError; NotArmed if the
        device has rolled back by itself."""
        words = shlex.join((verb, self.run, *arguments))
        return self._run(f"{self._sudo}/bin/sh {ON_DEVICE} {words}", what, feed=feed, timeout_s=timeout_s)

    def _run_script(self, verb: str) -> str:
        """Runs a verb without installing the script."""
        return self._run(f"{self._sudo}sh -s -- {verb}", "looking at what is there", feed=self._script)

    def _run(self, command: str, what: str, *, feed: Feed | bytes, timeout_s: float = 60.0) -> str:
        answer = self.connection.run(command, what=what, feed=feed, timeout_s=timeout_s)
        self._check(answer, what)
        return answer.out

    def _check_root(self) -> None:
        answer = self.connection.run(f"{self._sudo}true", what="asking for root")
        if answer.code == 0:
            return
        user = self.connection.target.user or "your user"
        if re.search(r"not found|No such file", answer.errors):
            raise FlashError(f"there is no sudo, and {user} is not root", where=self.where, hint="log in as root")
        raise FlashError(
            f"{user} cannot become root without a password: {last_line(answer.errors)}", where=self.where,
            hint=f"on the device: echo '{user} ALL=(ALL) NOPASSWD: ALL' | sudo tee /etc/sudoers.d/metafleet",
        )

    def _check(self, answer: Answer, what: str) -> None:
        if answer.code == 0:
            return
        if answer.code in EXIT_CODES:
            text, hint = EXIT_CODES[answer.code]
            raise (NotArmed if answer.code == NOT_ARMED else FlashError)(text, where=self.where, hint=hint)
        if answer.code == UNSIGNED:
            said = first_line(answer.errors).removeprefix("error: ")
            raise FlashError(f"the device refuses this flash and keeps its version: {said}", where=self.where,
                             hint=UNSIGNED_HINT)
        raise FlashError(f"{what} failed: {first_line(answer.errors)}", where=self.where)


def refuse(found: Found, machine: Machine, where: str) -> None:
    """Raises FlashError if the package cannot run on the device's system."""
    if is_narrow(found.arch) or found.bits == "32":
        kernel = "" if is_narrow(found.arch) else ", under a 64-bit kernel"
        raise FlashError(f"it {WHY_NOT_32_BIT} ({found.arch}{kernel})", where=where, hint=WIDE_HINT)
    if found.arch != machine.arch:
        raise FlashError(f"it is a {found.arch} machine", where=where, expected=f"{machine.arch} ({machine.board})",
                         hint="use the profile of this board: metafleet profiles")
    glibc = re.fullmatch(r"glibc (\d+)\.(\d+).*", found.glibc)
    if glibc is None or (int(glibc[1]), int(glibc[2])) < _numbers(machine.glibc):
        raise FlashError(f"it has {found.glibc or 'no glibc'}", where=where, expected=f"glibc {machine.glibc} or newer",
                         hint="write a newer system image to the board")
    if found.python_version != machine.python:
        python = found.python if found.python_version else "no python3"
        raise FlashError(f"it has {python}", where=where, expected=f"Python {machine.python}, which the wheels are for",
                         hint="name its system as os in the device file: metafleet profiles show")
    if found.missing:
        raise FlashError(f"it has no {', '.join(found.missing)}", where=where, hint="install them on the device")


def _health(values: dict[str, str]) -> Health:
    try:
        online = json.loads(values.get("online") or "{}")
    except ValueError:
        online = {}
    online = online if isinstance(online, dict) else {}
    return Health(values.get("current", ""), values.get("active", ""), str(online.get("boot", "")),
                  str(online.get("version", "")))


def _values(text: str) -> dict[str, str]:
    """The values of ``key=value`` lines."""
    return {key: value.strip() for key, equals, value in (line.partition("=") for line in text.splitlines()) if equals}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
