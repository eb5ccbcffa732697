"""A connection to a device over OpenSSH: addresses, host keys, errors, limits."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest

from firmware_profiles.ssh import ssh_connection
from fleet_core.base.errors import ConfigError, FlashError
from tests.support.loopback_board import USER, Board

needs_board = pytest.mark.needs("sshd", "ssh", "unshare", "nsenter", "pkill")


def target(board: Board, user: str = "root") -> ssh_connection.Target:
    return ssh_connection.parse(board.url(user), board.config)


# Addresses


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("ssh://pi@pi-07.local", ssh_connection.Target("pi-07.local", "pi")),
        ("ssh://root@10.0.0.7:2222/", ssh_connection.Target("10.0.0.7", "root", 2222)),
        ("ssh://board", ssh_connection.Target("board")),
        ("ssh://pi@[fe80::1%25eth0]:22", ssh_connection.Target("fe80::1%25eth0", "pi", 22)),
    ],
)
def test_an_address_is_read(url: str, expected: ssh_connection.Target) -> None:
    assert ssh_connection.parse(url) == expected


@pytest.mark.parametrize(
    "url",
    ["http://pi@host", "ssh://", "ssh://-oProxyCommand=x", "ssh://pi@-host", "ssh://-l@host", "ssh://pi@host:0",
     "ssh://pi@host:99999", "ssh://pi@host/folder", "ssh://a b@host", "ssh://pi:secret@host", "host", "ssh://pi@[::1"],
)
def test_a_malformed_address_is_refused(url: str) -> None:
    with pytest.raises(ConfigError, match="expected ssh://"):
        ssh_connection.parse(url)


def test_a_password_in_an_address_is_not_repeated() -> None:
    with pytest.raises(ConfigError) as error:
        ssh_connection.parse("ssh://pi:secret@host")
    assert "secret" not in str(error.value)


# A connection


@needs_board
def test_commands_share_one_connection_and_their_exit_codes_are_kept(board: Board) -> None:
    with ssh_connection.Connection(target(board)) as device:
        first = device.run("echo $SSH_CONNECTION; exit 3", what="a try")
        second = device.run("cat; echo $SSH_CONNECTION; echo wrong >&2", what="a try", feed=b"fed ")
    assert (first.code, second.code, second.errors) == (3, 0, "wrong\n")
    assert second.out == f"fed {first.out}"


@needs_board
def test_output_without_end_is_cut_and_a_step_without_end_is_ended(board: Board) -> None:
    with ssh_connection.Connection(target(board)) as device:
        much = device.run("head -c 3000000 /dev/zero", what="a try")
        with pytest.raises(FlashError, match=r"no end within 0\.3 s: waiting"):
            device.run("cat >/dev/null; exec sleep 100", what="waiting", timeout_s=0.3)
        assert device.run("echo on", what="a try").out == "on\n"
    assert len(much.out) == ssh_connection.MAX_OUTPUT_BYTES


@needs_board
def test_a_connection_that_is_lost_is_reported_with_the_step(board: Board) -> None:
    with (
        ssh_connection.Connection(target(board)) as device,
        pytest.raises(FlashError, match="connection was lost: a try"),
    ):
        device.run("kill -9 $PPID", what="a try")


# Host keys


@pytest.mark.slow
@needs_board
def test_an_unknown_host_key_is_refused_with_its_fingerprint_and_taken_up_by_it(board: Board) -> None:
    board.known.unlink()
    with pytest.raises(FlashError) as error, ssh_connection.Connection(target(board)):
        pass
    assert f"--accept-host-key {board.fingerprint()}" in str(error.value)
    assert not board.known.exists()
    for _ in range(2):
        with ssh_connection.Connection(target(board), accept=board.fingerprint()) as device:
            assert device.run("echo in", what="a try").out == "in\n"
    assert len(board.known.read_text().splitlines()) == 1
    with ssh_connection.Connection(target(board)):
        pass


@needs_board
def test_a_key_with_another_fingerprint_is_not_taken_up(board: Board) -> None:
    board.known.unlink()
    other = "SHA256:" + "A" * 43
    with pytest.raises(FlashError, match="shows another key"), ssh_connection.Connection(target(board), accept=other):
        pass
    with pytest.raises(ConfigError, match="not a fingerprint"), ssh_connection.Connection(target(board), accept="yes"):
        pass
    assert not board.known.exists()


@needs_board
def test_a_changed_host_key_is_refused_even_when_its_fingerprint_is_given(board: Board) -> None:
    kind, key, *_ = (board.folder / "key.pub").read_text().split()
    board.known.write_text(f"[127.0.0.1]:{board.port} {kind} {key}\n")
    for accept in (None, board.fingerprint()):
        with (
            pytest.raises(FlashError, match="host key has changed") as error,
            ssh_connection.Connection(target(board), accept),
        ):
            pass
        assert board.fingerprint() in str(error.value)
        assert f"ssh-keygen -R '[127.0.0.1]:{board.port}' -f {board.known}" in str(error.value)


# What else goes wrong at the start


@needs_board
def test_a_refused_login_is_reported(board: Board) -> None:
    with pytest.raises(FlashError, match=r"refused the login.*\n.*ssh-copy-id"), ssh_connection.Connection(
        target(board, "nobody-here")
    ):
        pass


@pytest.mark.needs("ssh")
def test_a_machine_that_does_not_answer_is_reported(tmp_path: Path) -> None:
    with socket.socket() as silent:
        silent.bind(("127.0.0.1", 0))  # bound and not listening: refused
        port = silent.getsockname()[1]
        with pytest.raises(FlashError, match=r"no connection: .*refused"), ssh_connection.Connection(
            ssh_connection.Target("127.0.0.1", USER, port, Path("/dev/null"))
        ):
            pass
    with pytest.raises(FlashError, match="no host of that name"), ssh_connection.Connection(
        ssh_connection.Target("no-such-host.invalid", USER, None, Path("/dev/null"))
    ):
        pass
