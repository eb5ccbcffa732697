"""A device at the other end of SSH: what it is, what is on it, and the steps of ``device.sh`` on it.

What cannot work is refused before anything is written: a 32-bit system, another architecture, an older glibc, another
Python than the wheels', programs that are missing, no root.
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
OTHER_CONTENT, NOT_ARMED, TAKEN_OVER, BUSY = 3, 4, 5, 6
REFUSED = {
    OTHER_CONTENT: ("the device runs this version with other content", "make the package anew: its version tells"),
    NOT_ARMED: ("the device has returned to the version before", "run the same command again"),
    TAKEN_OVER: ("another run has taken over this device", "let that one end"),
    BUSY: ("another run is at work on this device", "let it end, then run the same command again"),
}


class NotArmed(FlashError):
    """The device returned on its own: there is nothing to confirm or to take back."""


@dataclass(frozen=True)
class Found:
    """What the machine is. missing: programs that flashing needs and that are not there."""

    arch: str = ""
    bits: str = ""
    glibc: str = ""
    python: str = ""
    root: bool = False
    missing: tuple[str, ...] = ()


    @property
    def python_version(self) -> str | None:
        """As ``3.11``, or None where there is none."""
        found = re.fullmatch(r"Python (\d+\.\d+)\..*", self.python)
        return None if found is None else found[1]


@dataclass(frozen=True)
class Health:
    """active: what systemd says of the unit. boot, version: what the agent wrote when it was last connected."""

    current: str = ""
    active: str = ""
    boot: str = ""
    version: str = ""


@dataclass(frozen=True)
class Facts:
    """placed: {version: sum of its manifest}. ready: versions that were set up. armed: a version that was not
    confirmed. last_return: which version the device left on its own, when and why. files: {path: sum} of settings.
    own: the device.toml that enrolment made on the device; empty before that."""

    health: Health
    free_kib: int = 0
    placed: dict[str, str] = field(default_factory=dict)
    ready: tuple[str, ...] = ()
    armed: str = ""
    last_return: str = ""
    files: dict[str, str] = field(default_factory=dict)
    own: str = ""


class Remote:
    """An open connection, and this run's name on the device."""

    def __init__(self, connection: Connection):
        self.connection, self.where = connection, connection.target.url
        self.run = secrets.token_hex(8)
        self._sudo = ""
        self._script = SCRIPT.read_bytes()

    # What writes nothing

    def machine(self) -> Found:
        """What it is; and whether there is root, without a password."""
        told = _lines(self._told("sh -s -- machine", "looking at the system", feed=self._script).out)
        root = told.get("root") == "0"
        if not root:
            self._sudo = "sudo -n -- "
            root = self._root()
        return Found(told.get("arch", ""), told.get("bits", ""), told.get("glibc", ""), told.get("python", ""), root,
                     tuple(told.get("missing", "").split()))

    def facts(self) -> Facts:
        """What is there."""
        text = self._asked("facts").out
        told = _lines(text)
        named = {kind: {key.partition(" ")[2]: value for key, value in told.items() if key.startswith(f"{kind} ")}
                 for kind in ("version", "ready", "file")}
        own = "".join(f"{line[4:]}\n" for line in text.splitlines() if line.startswith("own="))
        return Facts(
            _health(told), int(told["free_kib"]) if told.get("free_kib", "").isdigit() else 0, named["version"],
            tuple(named["ready"]), told.get("armed", ""), told.get("last_return", ""), named["file"], own,
        )

    def health(self) -> Health:
        return _health(_lines(self._asked("health").out))

    # What writes

    def begin(self) -> None:
        """The script is put there, and this run owns the device."""
        put = (f"umask 077; mkdir -p {FOLDER} && chmod 755 /opt/metafleet && cat >{ON_DEVICE}.new && "
               f"mv {ON_DEVICE}.new {ON_DEVICE} && exec /bin/sh {ON_DEVICE} begin {self.run}")
        answer = self.connection.run(f"{self._sudo}sh -c {shlex.quote(put)}", what="beginning", feed=self._script)
        self._check(answer, "beginning")

    def step(self, verb: str, *arguments: str, what: str, feed: Feed | bytes = b"", timeout_s: float = 60.0) -> str:
        """One verb of ``device.sh``, in this run's name. Raises FlashError; NotArmed where the device had returned."""
        answer = self.connection.run(self._line(verb, self.run, *arguments), what=what, feed=feed, timeout_s=timeout_s)
        self._check(answer, what)
        return answer.out

    def _line(self, *words: str) -> str:
        return f"{self._sudo}/bin/sh {ON_DEVICE} {shlex.join(words)}"

    def _asked(self, *words: str) -> Answer:
        return self._told(f"{self._sudo}sh -s -- {shlex.join(words)}", "looking at what is there", feed=self._script)

    def _told(self, command: str, what: str, *, feed: bytes) -> Answer:
        answer = self.connection.run(command, what=what, feed=feed)
        self._check(answer, what)
        return answer

    def _root(self) -> bool:
        answer = self.connection.run(f"{self._sudo}true", what="asking for root")
        if answer.code == 0:
            return True
        user = self.connection.target.user or "your user"
        if re.search(r"not found|No such file", answer.errors):
            raise FlashError(f"there is no sudo, and {user} is not root", where=self.where, hint="log in as root")
        raise FlashError(
            f"sudo does not let {user} be root without a password: {last_line(answer.errors)}", where=self.where,
            hint=f"on the device: echo '{user} ALL=(ALL) NOPASSWD: ALL' | sudo tee /etc/sudoers.d/metafleet",
        )

    def _check(self, answer: Answer, what: str) -> None:
        if answer.code == 0:
            return
        if answer.code in REFUSED:
            text, hint = REFUSED[answer.code]
            raise (NotArmed if answer.code == NOT_ARMED else FlashError)(text, where=self.where, hint=hint)
        raise FlashError(f"{what} failed: {first_line(answer.errors)}", where=self.where)


def refuse(found: Found, machine: Machine, where: str) -> None:
    """Raises FlashError where the package cannot run on what was found."""
    if is_narrow(found.arch) or found.bits == "32":
        kernel = "" if is_narrow(found.arch) else ", under a 64-bit kernel"
        raise FlashError(f"it {WHY_NOT_32_BIT} ({found.arch}{kernel})", where=where, hint=WIDE_HINT)
    if found.arch != machine.arch:
        raise FlashError(f"it is a {found.arch} machine", where=where, expected=f"{machine.arch} ({machine.board})",
                         hint="take the profile of this board: metafleet profiles")
    glibc = re.fullmatch(r"glibc (\d+)\.(\d+).*", found.glibc)
    if glibc is None or (int(glibc[1]), int(glibc[2])) < _numbers(machine.glibc):
        raise FlashError(f"it has {found.glibc or 'no glibc'}", where=where, expected=f"glibc {machine.glibc} or newer",
                         hint="write a newer system image to the board")
    if found.python_version != machine.python:
        said = found.python if found.python_version else "no python3"
        raise FlashError(f"it has {said}", where=where, expected=f"Python {machine.python}, which the wheels are for",
                         hint="name the system that it runs as os in the device's file: metafleet profiles show")
    if found.missing:
        raise FlashError(f"it has no {', '.join(found.missing)}", where=where, hint="install them on the device")


def _health(told: dict[str, str]) -> Health:
    try:
        online = json.loads(told.get("online") or "{}")
    except ValueError:
        online = {}
    online = online if isinstance(online, dict) else {}
    return Health(told.get("current", ""), told.get("active", ""), str(online.get("boot", "")),
                  str(online.get("version", "")))


def _lines(text: str) -> dict[str, str]:
    """``key=value`` lines."""
    return {key: value.strip() for key, found, value in (line.partition("=") for line in text.splitlines()) if found}


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:2])
