"""DEVICE.toml: one device as a person writes it down, from which ``metafleet flash`` makes it.

    name = "kitchen"
    fleet = "living-lab"                      # the fleet's folder, beside this file or absolute
    board = "raspberry-pi-4b"                 # metafleet profiles
    image = "raspios-trixie-arm64-lite.img.xz"    # to begin from; not for ssh://
    broker = "mqtts://192.168.1.10:8883"      # as the device reaches it; default: the fleet's
    wheels = ["my_lab-1.0-py3-none-any.whl"]  # of your own, with a model or a method; they come along

    [wifi]
    ssid = "Home"
    country = "DE"                            # the password: here, or in METAFLEET_WIFI_PASSWORD

    [ssh]
    user = "me"
    authorized_keys = ["~/.ssh/id_ed25519.pub"]

    [data]                                    # these go into the device's own device.toml as they are
    samples = "/srv/samples.npz"

All mistakes are reported at once. The Wi-Fi password is in no message, and in no object's text. METAFLEET_SSH_KEY may
hold a key, or the file of one, in place of authorized_keys.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from firmware_profiles.package import own_wheels
from fleet_core.base import config, schema
from fleet_core.base.errors import ConfigError
from fleet_core.base.schema import Problem

PASSWORD = "METAFLEET_WIFI_PASSWORD"
SSH_KEY = "METAFLEET_SSH_KEY"
"""A public key, or a file that holds some, in place of [ssh] authorized_keys."""
MASK = "********"
"""Stands wherever a password or a token would be shown."""
NAME = r"[A-Za-z0-9_-]{1,64}"
HOSTNAME = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
RESERVED = ("root", "metafleet")
KEY_TYPES = r"(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(256|384|521)|sk-(ssh-ed25519|ecdsa-sha2-nistp256)@openssh\.com)"
MAX_KEY_BYTES = 1 << 14


@dataclass(frozen=True)
class Wifi:
    """A network that takes a password. security: ``wpa2`` for all that take WPA2, with WPA3 beside it or not; ``wpa3``
    for one that takes WPA3 alone. password: 8 to 63 characters; for WPA2 also the 64 hex digits derived from it."""

    ssid: str = field(metadata={"max_length": 32})
    country: str = field(metadata={"pattern": r"[A-Z]{2}", "words": "two capital letters, as DE"})
    password: str | None = field(default=None, repr=False, metadata={"max_length": 64})
    hidden: bool = False
    security: str = field(default="wpa2", metadata={"choices": ("wpa2", "wpa3")})

    @property
    def key(self) -> str:
        """What is written: for WPA2 64 hex digits in place of the password, PBKDF2 as in IEEE 802.11i, annex H.4; WPA3
        (SAE) derives nothing beforehand and needs the password itself."""
        if self.security == "wpa3":
            return self.password or ""
        if self.password == MASK:
            return "*" * 64
        if re.fullmatch(r"[0-9A-Fa-f]{64}", self.password or ""):
            return self.password or ""
        return hashlib.pbkdf2_hmac("sha1", (self.password or "").encode(), self.ssid.encode(), 4096, 32).hex()


@dataclass(frozen=True)
class Ssh:
    """user: that may log in, by key only. authorized_keys: public keys, or files that hold them."""

    user: str = field(metadata={
        "pattern": r"[a-z_][a-z0-9_-]{0,31}", "words": "1 to 32 small letters, digits, '-' or '_'",
    })
    authorized_keys: tuple[str, ...] = field(default=(), metadata={"max_length": MAX_KEY_BYTES})


@dataclass(frozen=True)
class DeviceFile:
    """The whole file. os: a release that the board's profile names. hostname: default, the name in lower case.
    wheels: files of one's own."""

    name: str = field(metadata={"pattern": NAME, "words": "1 to 64 letters, digits, '-' or '_'"})
    fleet: str = field(metadata={"max_length": 4096})
    board: str = field(metadata={"max_length": 64})
    os: str | None = field(default=None, metadata={"max_length": 64})
    image: str | None = field(default=None, metadata={"max_length": 4096})
    broker: str | None = field(default=None, metadata={"max_length": 512})
    hostname: str | None = field(default=None, metadata={
        "pattern": HOSTNAME, "words": "1 to 63 small letters, digits or '-'",
    })
    wheels: tuple[str, ...] = field(default=(), metadata={"max_length": 4096})
    wifi: Wifi | None = None
    ssh: Ssh | None = None
    data: Mapping[str, Any] = field(default_factory=dict)
    train: Mapping[str, Any] = field(default_factory=dict)
    personalize: Mapping[str, Any] = field(default_factory=dict)
    serve: Mapping[str, Any] = field(default_factory=dict)
    power: Mapping[str, Any] = field(default_factory=dict)

    @property
    def host(self) -> str:
        """The name that the device has in its network."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:63].rstrip("-")
        return self.hostname or plain or "metafleet"

    @property
    def tables(self) -> dict[str, dict[str, Any]]:
        """The tables that go into the device's own device.toml; those that are empty are left out."""
        named = ("data", "train", "personalize", "serve", "power")
        return {name: dict(getattr(self, name)) for name in named if getattr(self, name)}

    def masked(self) -> DeviceFile:
        """The same with stars in place of the Wi-Fi password and the ssh keys: what may be shown."""
        wifi = None if self.wifi is None else replace(self.wifi, password=_stars(self.wifi))
        keys = () if self.ssh is None else tuple(map(_starred, self.ssh.authorized_keys))
        ssh = None if self.ssh is None else replace(self.ssh, authorized_keys=keys)
        return replace(self, wifi=wifi, ssh=ssh)


def _stars(wifi: Wifi) -> str:
    """As long as the password is, where it is written as it is."""
    return "*" * len(wifi.password or MASK) if wifi.security == "wpa3" else MASK


Check = Callable[[Mapping[str, Any]], list[Problem]]


def _starred(key: str) -> str:
    """As long as it is, without the key itself."""
    kind, _, rest = key.partition(" ")
    blob, space, comment = rest.partition(" ")
    return f"{kind} {'*' * len(blob)}{space}{comment}"


def load(path: Path, environ: Mapping[str, str], check: Check | None = None) -> DeviceFile:
    """The file, with keys read and wheels found where they lie; a password and a key in ``environ`` take the place of
    the file's.

    check: finds what else is wrong with its tables. Raises ConfigError that lists every mistake, by line.
    """
    text = config.text_of(path)
    tables = config.tables(text, str(path))
    device, problems = schema.read(DeviceFile, tables)
    wifi, wrong = _wifi(tables.get("wifi"), environ)
    ssh, more = _ssh(tables.get("ssh"), environ, path.parent)
    wheels, missing = _wheels(tables.get("wheels"), path.parent)
    problems += [*wrong, *more, *missing, *(() if check is None else check(tables))]
    if device is None or problems:
        raise _listed(problems, text, path)
    return replace(device, wifi=wifi, ssh=ssh, wheels=wheels)


def _listed(problems: list[Problem], text: str, path: Path) -> ConfigError:
    ordered = sorted(problems, key=lambda problem: config.line_of(text, problem.key))
    return ConfigError("\n".join(config.located(problem, text, str(path)) for problem in ordered))


def _wifi(table: Any, environ: Mapping[str, str]) -> tuple[Wifi | None, list[Problem]]:
    """The network with the environment's password, and what is wrong beside what its types say."""
    wifi = None if table is None else schema.read(Wifi, table)[0]
    if wifi is None:
        return None, []
    password, problems = environ.get(PASSWORD) or wifi.password, []
    if not 1 <= len(wifi.ssid.encode()) <= 32 or not wifi.ssid.isprintable():
        problems.append(Problem("wifi.ssid", "expected 1 to 32 bytes of printable text"))
    if password is None:
        problems.append(Problem("wifi.password", f"missing, and {PASSWORD} is not set"))
    elif not re.fullmatch(r"[ -~]{8,63}|[0-9A-Fa-f]{64}", password):
        problems.append(Problem("wifi.password", "expected 8 to 63 characters of ASCII, or 64 hex digits"))
    elif wifi.security == "wpa3" and len(password) == 64:
        problems.append(Problem("wifi.password", "is a key that was derived for WPA2; WPA3 needs the password"))
    return replace(wifi, password=password), problems


def _ssh(table: Any, environ: Mapping[str, str], folder: Path) -> tuple[Ssh | None, list[Problem]]:
    """Who may log in, with the environment's key or the files' in place of the files, and what is wrong."""
    ssh = None if table is None else schema.read(Ssh, table)[0]
    if ssh is None:
        return None, []
    entries = (environ[SSH_KEY],) if environ.get(SSH_KEY) else ssh.authorized_keys
    keys: list[str] = []
    problems: list[Problem] = []
    if ssh.user in RESERVED:
        problems.append(Problem("ssh.user", f"'{ssh.user}' is the system's own, expected another name"))
    for number, entry in enumerate(entries):
        found = [entry.strip()] if re.match(r"(ssh-|ecdsa-|sk-)", entry) else _keys_in(entry, folder)
        if not found or not all(map(is_public_key, found)):
            what = "is no public key, and no file of public keys (as in ~/.ssh/id_ed25519.pub)"
            problems.append(Problem(f"ssh.authorized_keys[{number}]", what))
        else:
            keys += found
    if not entries:
        problems.append(Problem("ssh.authorized_keys", f"is empty, and {SSH_KEY} is not set: nobody could log in"))
    return replace(ssh, authorized_keys=tuple(dict.fromkeys(keys))), problems


def _wheels(entries: Any, folder: Path) -> tuple[tuple[str, ...], list[Problem]]:
    """The paths of the wheels, and what is wrong with them beside what their type says."""
    named_here = entries if isinstance(entries, list) and all(isinstance(e, str) for e in entries) else []
    paths = [_beside(folder, entry) for entry in named_here]
    problems, seen = [], dict[str, int]()
    for number, path in enumerate(paths):
        first = seen.setdefault(own_wheels.package(path), number)
        what = own_wheels.wrong(path) or (f"is the package of wheels[{first}] once more" if first < number else "")
        if what:
            problems.append(Problem(f"wheels[{number}]", what))
    return tuple(map(str, paths)), problems


def _beside(folder: Path, entry: str) -> Path:
    """What a file names: in its folder, or absolute; a home that there is not is taken as it is written."""
    with contextlib.suppress(RuntimeError):
        return (folder / Path(entry).expanduser()).absolute()
    return (folder / entry).absolute()


def _keys_in(entry: str, folder: Path) -> list[str]:
    path = _beside(folder, entry)
    try:
        if path.stat().st_size > MAX_KEY_BYTES:
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError, ValueError):
        return []
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def is_public_key(text: str) -> bool:
    """Whether ``text`` is one line of OpenSSH's authorized_keys, without options (RFC 4253, section 6.6)."""
    found = re.fullmatch(rf"{KEY_TYPES} ([A-Za-z0-9+/]+={{0,2}})( [ -~]*)?", text)
    if found is None:
        return False
    try:
        blob = base64.b64decode(found[4], validate=True)
    except binascii.Error:
        return False
    name = found[1].encode()
    return blob[: 4 + len(name)] == len(name).to_bytes(4, "big") + name and len(blob) > 4 + len(name)
