"""The name and password with which a client logs in at a broker that asks for them.

The table ``[broker_login]`` of device.toml, fleet.toml and a device file. The password is in a separate file, which no
other user of the machine may read. It is in no message and in no log.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import TypedDict

from fleet_core.base.config import check_private
from fleet_core.base.errors import ConfigError

FILE = "broker.password"
"""Where a device has its password, below its home."""
MAX_BYTES = 4096


@dataclass(frozen=True)
class BrokerLogin:
    """username: at the broker; None: no login. password_file: relative to the folder of the file that names it."""

    username: str | None = field(default=None, metadata={"max_length": 512})
    password_file: str | None = field(default=None, metadata={"max_length": 4096})


class Login(TypedDict, total=False):
    """Arguments of ``MqttLink``."""

    username: str
    password: str


def login_of(folder: Path, section: BrokerLogin) -> Login:
    """The login, empty for none. Raises ConfigError for a password without a name, or a password file that others can
    read."""
    if section.username is None:
        if section.password_file is not None:
            raise ConfigError("a password needs its name", where="password_file", hint="add username beside it")
        return {}
    if section.password_file is None:
        return {"username": section.username}
    return {"username": section.username, "password": password_in(folder / section.password_file)}


def password_in(path: Path) -> str:
    """The line of the file. Raises ConfigError, which never quotes the file, and StateError."""
    from fleet_core.base import storage  # numpy, which most commands that read device.toml do not need

    if not path.is_file():
        raise ConfigError("there is no such file", where=str(path), expected="a file with the broker's password")
    check_private(path)
    data = storage.read_bytes(path, limit=MAX_BYTES)
    try:
        password = data.decode().removesuffix("\n").removesuffix("\r")
    except UnicodeDecodeError:
        password = ""
    if not password or "\n" in password:
        raise ConfigError("holds no password", where=str(path), expected="one line of UTF-8 text")
    return password
