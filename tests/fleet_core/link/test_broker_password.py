"""The name and password for a broker: read from a file that nobody else can read, and quoted nowhere."""

from __future__ import annotations

from pathlib import Path

import pytest

from fleet_core.base.errors import ConfigError
from fleet_core.link.broker_password import BrokerLogin, login_of


def password(folder: Path, data: bytes, mode: int = 0o600) -> BrokerLogin:
    path = folder / "broker.password"
    path.write_bytes(data)
    path.chmod(mode)
    return BrokerLogin("pi", "broker.password")


@pytest.mark.parametrize(("data", "read"), [(b"geheim", "geheim"), (b"two words \r\n", "two words "),
                                            ("schlüssel\n".encode(), "schlüssel")])
def test_the_password_is_the_line_of_its_file(tmp_path: Path, data: bytes, read: str) -> None:
    assert login_of(tmp_path, password(tmp_path, data)) == {"username": "pi", "password": read}


def test_a_name_may_come_alone_and_without_one_nothing_is_shown(tmp_path: Path) -> None:
    assert login_of(tmp_path, BrokerLogin("pi")) == {"username": "pi"}
    assert login_of(tmp_path, BrokerLogin()) == {}


@pytest.mark.parametrize(("data", "mode", "said"), [
    (b"geheim\n", 0o640, "can be read by others\nhint: chmod 600"), (b"geheim\n", 0o604, "can be read by others"),
    (b"", 0o600, "holds no password"), (b"\n", 0o600, "holds no password"), (b"geheim\nzwei\n", 0o600, "one line"),
    (b"geheim\xff", 0o600, "UTF-8"),
])
def test_a_file_that_is_no_password_or_open_to_others_is_refused_and_not_quoted(
    tmp_path: Path, data: bytes, mode: int, said: str
) -> None:
    with pytest.raises(ConfigError, match=said) as refused:
        login_of(tmp_path, password(tmp_path, data, mode))
    assert "geheim" not in str(refused.value)


def test_a_password_without_its_name_or_its_file_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="needs its name"):
        login_of(tmp_path, BrokerLogin(None, "broker.password"))
    with pytest.raises(ConfigError, match="there is no such file"):
        login_of(tmp_path, BrokerLogin("pi", "elsewhere"))
