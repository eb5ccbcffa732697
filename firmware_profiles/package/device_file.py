"""DEVICE.toml: the user's description of a device, which ``metafleet flash`` reads.

    name = "kitchen"
    fleet = "living-lab"                      # the fleet's folder, beside this file or absolute
    board = "raspberry-pi-4b"                 # metafleet profiles
    image = "raspios-trixie-arm64-lite.img.xz"    # the system's image; not for ssh://
    broker = "mqtts://192.168.1.10:8883"      # as the device reaches it; default: the fleet's
    wheels = ["my_lab-1.0-py3-none-any.whl"]  # your own, with a model or a method; they are installed too

    [wifi]
    ssid = "Home"
    country = "DE"                            # password: here, or in METAFLEET_WIFI_PASSWORD

    [ssh]
    user = "me"
    authorized_keys = ["~/.ssh/id_ed25519.pub"]

    [broker_login]                            # at a broker that asks for a name and a password
    username = "kitchen"
    password_file = "kitchen.password"        # beside this file; copied to the device

    [data]                                    # copied to the device's device.toml
    samples = "/srv/samples.npz"

All mistakes are reported at once. The Wi-Fi password is in no message and no repr. METAFLEET_SSH_KEY may hold a key, or
the path of a key file, in place of authorized_keys.
"""

from __future__ import annotations

import base64
import binascii
import contextlib
import hashlib
import os
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
"""Environment variable with a public key or a file of keys; replaces [ssh] authorized_keys."""
MASK = "********"
"""Shown in place of a password or a token."""
NAME = r"[A-Za-z0-9_-]{1,64}"
HOSTNAME = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
RESERVED = ("root", "metafleet")
FOR_THE_AGENT = (
    "data", "train", "personalize", "serve", "metrics", "power", "radio", "unlabelled", "alarm", "privacy",
    "broker_login", "source", "button",
)
"""Tables that are copied to the device."""
KEY_TYPES = r"(ssh-ed25519|ssh-rsa|ecdsa-sha2-nistp(256|384|521)|sk-(ssh-ed25519|ecdsa-sha2-nistp256)@openssh\.com)"
MAX_KEY_BYTES = 1 << 14


@dataclass(frozen=True)
class Wifi:
    """A network with a password. security: ``wpa2`` if the network accepts WPA2, ``wpa3`` if it accepts WPA3 only.
    password: 8 to 63 characters; for WPA2 also the 64 hex digits derived from it."""

    ssid: str = field(metadata={"max_length": 32})
    country: str = field(metadata={"pattern": r"[A-Z]{2}", "words": "two capital letters, as DE"})
    password: str | None = field(default=None, repr=False, metadata={"max_length": 64})
    hidden: bool = False
    security: str = field(default="wpa2", metadata={"choices": ("wpa2", "wpa3")})

    @property
    def key(self) -> str:
        """The key to write to the device: for WPA2 64 hex digits derived from the password by PBKDF2 (IEEE 802.11i,
        annex H.4); for WPA3 (SAE) the password itself, from which nothing can be derived beforehand."""
        if self.security == "wpa3":
            return self.password or ""
        if self.password == MASK:
            return "*" * 64
        if re.fullmatch(r"[0-9A-Fa-f]{64}", self.password or ""):
            return self.password or ""
        return hashlib.pbkdf2_hmac("sha1", (self.password or "").encode(), self.ssid.encode(), 4096, 32).hex()


@dataclass(frozen=True)
class Ssh:
    """user: may log in, by key only. authorized_keys: public keys, or files of them."""

    user: str = field(metadata={
        "pattern": r"[a-z_][a-z0-9_-]{0,31}", "words": "1 to 32 small letters, digits, '-' or '_'",
    })
    authorized_keys: tuple[str, ...] = field(default=(), metadata={"max_length": MAX_KEY_BYTES})


@dataclass(frozen=True)
class DeviceFile:
    """The whole file. os: words of a system that the board's profile names. hostname: default, the name in lower case.
    wheels: the user's wheel files."""

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
    metrics: Mapping[str, Any] = field(default_factory=dict)
    power: Mapping[str, Any] = field(default_factory=dict)
    radio: Mapping[str, Any] = field(default_factory=dict)
    unlabelled: Mapping[str, Any] = field(default_factory=dict)
    alarm: Mapping[str, Any] = field(default_factory=dict)
    privacy: Mapping[str, Any] = field(default_factory=dict)
    broker_login: Mapping[str, Any] = field(default_factory=dict)
    source: tuple[Mapping[str, Any], ...] = ()
    button: tuple[Mapping[str, Any], ...] = ()

    @property
    def host(self) -> str:
        """The device's host name."""
        plain = re.sub(r"[^a-z0-9]+", "-", self.name.lower()).strip("-")[:63].rstrip("-")
        return self.hostname or plain or "metafleet"

    @property
    def tables(self) -> dict[str, Any]:
        """The tables to copy to the device's device.toml, without empty ones."""
        return {name: table for name in FOR_THE_AGENT if (table := schema.plain(getattr(self, name)))}

    def masked(self) -> DeviceFile:
        """A copy to show, with stars in place of the Wi-Fi password and the ssh keys."""
        wifi = None if self.wifi is None else replace(self.wifi, password=_masked_password(self.wifi))
        keys = () if self.ssh is None else tuple(map(_masked_key, self.ssh.authorized_keys))
        ssh = None if self.ssh is None else replace(self.ssh, authorized_keys=keys)
        return replace(self, wifi=wifi, ssh=ssh)


Check = Callable[[Mapping[str, Any]], list[Problem]]


def _masked_password(wifi: Wifi) -> str:
    """Of the same length if the password itself is written, so that files keep their size."""
    return "*" * len(wifi.password or MASK) if wifi.security == "wpa3" else MASK


def _masked_key(key: str) -> str:
    """Of the same length."""
    kind, _, rest = key.partition(" ")
    blob, space, comment = rest.partition(" ")
    return f"{kind} {'*' * len(blob)}{space}{comment}"


def load(path: Path, environ: Mapping[str, str], check: Check | None = None) -> DeviceFile:
    """Reads the file, its keys and the paths of its wheels; a password and a key in ``environ`` replace the file's.

    check: finds more problems in the tables. Raises ConfigError that lists every mistake, by line.
    """
    text = config.text_of(path)
    tables = config.tables(text, str(path))
    device, problems = schema.read(DeviceFile, tables)
    wifi, wifi_problems = _wifi(tables.get("wifi"), environ)
    ssh, ssh_problems = _ssh(tables.get("ssh"), environ, path.parent)
    wheels, wheel_problems = _wheels(tables.get("wheels"), path.parent)
    problems += [*wifi_problems, *ssh_problems, *wheel_problems, *(() if check is None else check(tables))]
    if device is None or problems:
        raise _error_of(problems, text, path)
    login = dict(device.broker_login)
    if isinstance(login.get("password_file"), str):
        login["password_file"] = str(_path_of(path.parent, login["password_file"]))
    return replace(device, wifi=wifi, ssh=ssh, wheels=wheels, broker_login=login)


def _error_of(problems: list[Problem], text: str, path: Path) -> ConfigError:
    ordered = sorted(problems, key=lambda problem: config.line_of(text, problem.key))
    return config.mistakes(ordered, text, str(path))


def _wifi(table: Any, environ: Mapping[str, str]) -> tuple[Wifi | None, list[Problem]]:
    """(network with the environment's password, problems that the schema does not find)."""
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
        problems.append(Problem("wifi.password", "is a key derived for WPA2; WPA3 needs the password itself"))
    return replace(wifi, password=password), problems


def _ssh(table: Any, environ: Mapping[str, str], folder: Path) -> tuple[Ssh | None, list[Problem]]:
    """([ssh] with the keys read from the environment or the files, problems that the schema does not find)."""
    ssh = None if table is None else schema.read(Ssh, table)[0]
    if ssh is None:
        return None, []
    entries = (environ[SSH_KEY],) if environ.get(SSH_KEY) else ssh.authorized_keys
    keys: list[str] = []
    problems: list[Problem] = []
    if ssh.user in RESERVED:
        problems.append(Problem("ssh.user", f"'{ssh.user}' is a system user, expected another name"))
    for number, entry in enumerate(entries):
        read = [entry.strip()] if re.match(r"(ssh-|ecdsa-|sk-)", entry) else _keys_in(entry, folder)
        if not read or not all(map(is_public_key, read)):
            what = "is neither a public key nor a file of public keys (as in ~/.ssh/id_ed25519.pub)"
            problems.append(Problem(f"ssh.authorized_keys[{number}]", what))
        else:
            keys += read
    if not entries:
        problems.append(Problem("ssh.authorized_keys", f"is empty, and {SSH_KEY} is not set: nobody could log in"))
    return replace(ssh, authorized_keys=tuple(dict.fromkeys(keys))), problems


def _wheels(entries: Any, folder: Path) -> tuple[tuple[str, ...], list[Problem]]:
    """(paths of the wheels, problems that the schema does not find)."""
    names = entries if isinstance(entries, list) and all(isinstance(e, str) for e in entries) else []
    paths = [_path_of(folder, entry) for entry in names]
    problems, seen = [], dict[str, int]()
    for number, path in enumerate(paths):
        first = seen.setdefault(own_wheels.package(path), number)
        what = own_wheels.problem(path) or (f"is the same package as wheels[{first}]" if first < number else "")
        if what:
            problems.append(Problem(f"wheels[{number}]", what))
    return tuple(map(str, paths)), problems


def _path_of(folder: Path, entry: str) -> Path:
    """Relative to ``folder``, or absolute; ``~`` is kept if there is no such home."""
    with contextlib.suppress(RuntimeError):
        return (folder / Path(os.path.expanduser(entry))).absolute()
    return (folder / entry).absolute()


def _keys_in(entry: str, folder: Path) -> list[str]:
    path = _path_of(folder, entry)
    try:
        if path.stat().st_size > MAX_KEY_BYTES:
            return []
        lines = path.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError, ValueError):
        return []
    return [line.strip() for line in lines if line.strip() and not line.lstrip().startswith("#")]


def is_public_key(text: str) -> bool:
    """Whether ``text`` is one line of OpenSSH's authorized_keys, without options (RFC 4253, section 6.6)."""
    match = re.fullmatch(rf"{KEY_TYPES} ([A-Za-z0-9+/]+={{0,2}})( [ -~]*)?", text)
    if match is None:
        return False
    try:
        blob = base64.b64decode(match[4], validate=True)
    except binascii.Error:
        return False
    name = match[1].encode()
    return blob[: 4 + len(name)] == len(name).to_bytes(4, "big") + name and len(blob) > 4 + len(name)
