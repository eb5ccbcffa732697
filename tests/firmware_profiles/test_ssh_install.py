"""Installing and updating a running device over a real sshd, with rollback."""

from __future__ import annotations

import json
import os
import platform
import re
import signal
import sys
import tarfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from firmware_profiles.package import device_package
from firmware_profiles.package.board_needs import Machine
from firmware_profiles.package.device_package import Signing
from firmware_profiles.ssh import release as releases
from firmware_profiles.ssh import remote_install, ssh_connection
from firmware_profiles.ssh.release import Release, Setting
from firmware_profiles.ssh.remote import Found, Remote, refuse
from firmware_profiles.ssh.remote_install import Outcome
from fleet_core.base.errors import FlashError
from fleet_core.protocol.signing import Signer
from tests.support.loopback_board import DEAF, DIES, GOOD, SIGNING, USER, Board, make_program, until

pytestmark = [pytest.mark.needs("sshd", "ssh", "unshare", "nsenter", "flock", "pkill"), pytest.mark.slow]

DEVICE_TOML = b'[device]\nname = "kitchen"\nfleet = "lab"\nbroker = "mqtts://hub:8883"\n\n[data]\nsamples = "s.npz"\n'
STEPS = ("want", "take", "place", "change", "confirm")


@pytest.fixture(autouse=True)
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(remote_install, "POLL_S", 0.05)


def a_machine() -> Machine:
    python = f"{sys.version_info[0]}.{sys.version_info[1]}"
    return Machine("x86-64", platform.machine(), python, glibc="2.17", first_boot="ssh")


def a_release(folder: Path, version: str = "1.0-aaa", agent: str = GOOD, settings: bytes = DEVICE_TOML,
              **home: bytes) -> Release:
    program = make_program(folder, version, agent)
    named = {"device.toml": settings, "enrol.token": b"secret", **home}
    return releases.of(device_package.make("kitchen", a_machine(), program, named, signing=SIGNING))


def flash(board: Board, release: Release, *, user: str = "root", told: list[str] | None = None, patience_s: int = 300,
          margin_s: int = 60, watch: remote_install.Watch | None = None) -> Outcome:
    said = [] if told is None else told
    with ssh_connection.Connection(ssh_connection.parse(board.url(user), board.config)) as connection:
        remote = Remote(connection)
        refuse(remote.machine(), release.machine, remote.where)
        return remote_install.install(
            remote, lambda with_token: release if with_token else bare(release), lambda stage, far: said.append(stage),
            patience_s=patience_s, margin_s=margin_s, watch=watch,
        )


def bare(release: Release) -> Release:
    """The release without the token."""
    return replace(release, settings=tuple(s for s in release.settings if not s.path.endswith(".token")))


def current(board: Board) -> str:
    link = board.path("/opt/metafleet/current")
    return os.readlink(link) if link.is_symlink() else ""


def online(board: Board) -> str:
    path = board.path("/var/lib/metafleet/online.json")
    return json.loads(path.read_text())["boot"] if path.exists() else ""


def tree(board: Board) -> dict[str, float]:
    """{path: modification time} of everything that flashing may write."""
    roots = [board.path(path) for path in ("/opt", "/etc/metafleet", "/etc/systemd/system")]
    return {str(path): path.lstat().st_mtime for root in roots for path in root.rglob("*")}


def kept(board: Board) -> set[str]:
    return {path.name for path in board.path("/opt/metafleet").iterdir() if not path.name.startswith(".")} - {"current"}


# Success


def test_a_first_install_puts_everything_in_its_place_and_again_writes_nothing(board: Board, tmp_path: Path) -> None:
    release = a_release(tmp_path)
    outcome = flash(board, release)
    assert outcome == Outcome("kitchen", "1.0-aaa", "", True, outcome.sent_bytes)
    assert outcome.sent_bytes == sum(size for _, size in release.content.files.values())
    assert current(board) == "1.0-aaa"
    assert board.path("/opt/metafleet/1.0-aaa/lib/with blank (1).py").read_text() == "1.0-aaa"
    assert board.sh("cd /opt/metafleet/current && sha256sum -c --quiet MANIFEST.sha256") == ""
    assert board.sh("stat -c '%a %U %G' /var/lib/metafleet /etc/metafleet/device.toml /var/lib/metafleet/enrol.token "
                    "/etc/systemd/system/metafleet.service").splitlines() == [
        "700 metafleet metafleet", "640 root metafleet", "600 metafleet metafleet", "644 root root"]
    assert board.sh("cat /var/lib/metafleet/device.toml") == DEVICE_TOML.decode()
    assert not board.path("/opt/metafleet/.flash/armed").exists()
    before, boot = tree(board), online(board)
    assert flash(board, release) == Outcome("kitchen", "1.0-aaa", "1.0-aaa", False)
    assert (tree(board), online(board)) == (before, boot)


def test_an_update_sends_what_has_changed_and_two_versions_before_it_are_kept(board: Board, tmp_path: Path) -> None:
    for version in ("1.0-aaa", "1.1-bbb", "1.2-ccc"):
        flash(board, a_release(tmp_path, version))
    outcome = flash(board, a_release(tmp_path, "1.3-ddd"))
    assert (outcome.previous, current(board)) == ("1.2-ccc", "1.3-ddd")
    assert outcome.sent_bytes < 1000  # lib/same.py is linked
    assert kept(board) == {"1.1-bbb", "1.2-ccc", "1.3-ddd"}


def test_what_python_has_compiled_of_a_version_goes_with_it(board: Board, tmp_path: Path) -> None:
    versions = ("1.0-aaa", "1.1-bbb", "1.2-ccc", "1.3-ddd")
    compiled = board.path("/var/cache/metafleet/opt/metafleet")
    for version in versions:
        (compiled / version / "lib").mkdir(parents=True)
        flash(board, a_release(tmp_path, version))
    assert {path.name for path in compiled.iterdir()} == set(versions[1:])


def test_changed_settings_alone_restart_the_agent_and_send_no_program(board: Board, tmp_path: Path) -> None:
    flash(board, a_release(tmp_path))
    boot = online(board)
    outcome = flash(board, a_release(tmp_path, settings=DEVICE_TOML.replace(b"s.npz", b"t.npz")))
    assert (outcome.changed, outcome.sent_bytes) == (True, 0)
    assert online(board) != boot
    assert "t.npz" in board.sh("cat /var/lib/metafleet/device.toml")


def test_an_enrolled_device_keeps_its_identity_and_gets_no_token(board: Board, tmp_path: Path) -> None:
    flash(board, a_release(tmp_path))
    own = f"\n{DEVICE_TOML.decode()}".replace("hub", "other") + '\n[tls]\ncertificate = "identity-1.pem"\n'
    board.sh("rm /var/lib/metafleet/enrol.token /var/lib/metafleet/device.toml")
    board.path("/var/lib/metafleet/device.toml").write_text(own)
    flash(board, a_release(tmp_path))
    assert board.path("/var/lib/metafleet/device.toml").read_text() == own
    flash(board, a_release(tmp_path, settings=DEVICE_TOML.replace(b"s.npz", b"t.npz")))
    assert board.path("/var/lib/metafleet/device.toml").read_text() == own.replace("s.npz", "t.npz")
    assert not board.path("/var/lib/metafleet/enrol.token").exists()


def test_a_version_that_came_on_a_card_is_used_as_it_is(board: Board, tmp_path: Path) -> None:
    release = a_release(tmp_path)
    flash(board, release)
    board.sh("cd /opt/metafleet/current && rm MANIFEST.sha256 .ready")
    assert flash(board, release).sent_bytes == 0
    board.sh("cd /opt/metafleet/current && rm MANIFEST.sha256 && echo damaged > lib/same.py")
    with pytest.raises(FlashError, match="runs this version with other content"):
        flash(board, release)


def test_a_user_with_sudo_can_flash_and_one_without_gets_an_error(board: Board, tmp_path: Path) -> None:
    with pytest.raises(FlashError, match=r"pi cannot become root.*a password is required"):
        flash(board, a_release(tmp_path), user=USER)
    assert not board.path("/opt/metafleet").exists()


# What cannot work is refused before anything is written


@pytest.mark.parametrize(
    ("found", "expected"),
    [
        ({"arch": "armv7l", "bits": "32"}, r"32-bit system.*armv7l(.|\n)*64-bit image"),
        ({"bits": "32"}, "under a 64-bit kernel"),
        ({"arch": "riscv64"}, r"riscv64 machine; expected .*x86-64"),
        ({"glibc": "glibc 2.16"}, r"glibc 2\.16; expected glibc 2\.17"),
        ({"glibc": ""}, "no glibc"),
        ({"python": "Python 3.6.9"}, r"Python 3\.6\.9; expected Python 3\."),
        ({"python": "sh: python3: not found"}, "no python3"),
        ({"missing": ("systemctl", "tar")}, "it has no systemctl, tar"),
    ],
)
def test_a_system_that_cannot_run_it_is_refused(found: dict[str, Any], expected: str) -> None:
    machine = a_machine()
    fits = Found(machine.arch, "64", "glibc 2.36", f"Python {machine.python}.4", True)
    refuse(fits, machine, "ssh://x")
    with pytest.raises(FlashError, match=expected):
        refuse(replace(fits, **found), machine, "ssh://x")


def test_a_refused_system_is_left_unchanged(board: Board, tmp_path: Path) -> None:
    for command, answer, expected in (
        ("python3 --version", "Python 3.6.9", "Python 3.6.9"), ("getconf LONG_BIT", "32", "32-bit"),
        ("uname -m", "armv7l", "armv7l"),
    ):
        board.answer_with(command, answer)
        with pytest.raises(FlashError, match=expected):
            flash(board, a_release(tmp_path))
    assert not board.path("/opt/metafleet").exists()


def test_an_archive_with_a_link_or_a_name_that_a_shell_misreads_is_refused(tmp_path: Path) -> None:
    for name, kind in (("v/a\nb", tarfile.REGTYPE), ("v/../b", tarfile.REGTYPE), ("v/a", tarfile.SYMTYPE)):
        entry = tarfile.TarInfo(name)
        entry.type = kind
        with tarfile.open(tmp_path / "bad.tar.gz", "w:gz") as archive:
            archive.addfile(entry)
        release = a_release(tmp_path)
        bad = replace(release, program=replace(release.program, path=tmp_path / "bad.tar.gz"))
        with pytest.raises(FlashError, match="not a plain file"):
            assert bad.content


# What the fleet's key has not signed is refused; the version that runs stays


def test_the_first_flash_puts_the_fleets_key_in_place_and_the_program_can_be_checked(
    board: Board, tmp_path: Path
) -> None:
    flash(board, a_release(tmp_path))
    assert board.sh("cat /etc/metafleet/fleet.pub").strip() == SIGNING.signer.public
    assert "every file is as the fleet lab signed it" in board.sh("/opt/metafleet/current/bin/edge-agent verify")
    board.sh("echo evil >> /opt/metafleet/current/lib/same.py")
    assert "lib/same.py differ" in board.sh("/opt/metafleet/current/bin/edge-agent verify")


def test_a_program_of_another_fleet_is_refused_until_the_key_is_removed(board: Board, tmp_path: Path) -> None:
    flash(board, a_release(tmp_path))
    boot, other = online(board), Signing("attic", Signer(bytes(32)))
    foreign = replace(a_release(tmp_path, "1.1-bbb"), signing=other)
    with pytest.raises(FlashError, match=r"(?s)its version: .*is signed by key.*sudo rm /etc/metafleet/fleet\.pub"):
        flash(board, foreign)
    assert (current(board), online(board), kept(board)) == ("1.0-aaa", boot, {"1.0-aaa"})
    settings = replace(a_release(tmp_path, settings=DEVICE_TOML.replace(b"s.npz", b"t.npz")), signing=other)
    with pytest.raises(FlashError, match="is signed by key"):
        flash(board, settings)
    assert "s.npz" in board.sh("cat /var/lib/metafleet/device.toml")
    board.sh("rm /etc/metafleet/fleet.pub")
    assert flash(board, foreign).changed


@pytest.mark.parametrize(("signed", "words"), [
    (lambda statement: statement.partition(b"\n")[2], "carries no Ed25519 signature"),
    (lambda statement: statement.replace(b"older no", b"older yes"), "has a signature that does not match"),
    (lambda statement: SIGNING.signer.sign(b"metafleet bundle 1\n{}"), "the signed text is not about the program"),
])
def test_a_program_with_a_missing_or_a_wrong_signature_is_refused(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, signed: Callable[[bytes], bytes], words: str
) -> None:
    flash(board, a_release(tmp_path))
    new = a_release(tmp_path, "1.1-bbb")
    statement = new.statement
    monkeypatch.setattr(Release, "statement", signed(statement))
    with pytest.raises(FlashError, match=words):
        flash(board, new)
    assert (current(board), kept(board)) == ("1.0-aaa", {"1.0-aaa"})


@pytest.mark.parametrize("first", [True, False])
def test_files_and_settings_that_are_not_those_that_were_signed_are_refused(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, first: bool
) -> None:
    """Hashes are compared on the first flash too, when no signature can be."""
    if not first:
        flash(board, a_release(tmp_path))
    runs, new = current(board), a_release(tmp_path, "1.1-bbb")
    with monkeypatch.context() as patch:
        patch.setattr(Release, "statement", a_release(tmp_path, "1.2-ccc").statement)
        with pytest.raises(FlashError, match="manifest is not what was signed"):
            flash(board, new)
    with monkeypatch.context() as patch:
        patch.setattr(Release, "statement", new.statement)
        with pytest.raises(FlashError, match="prepare is not what was signed"):
            flash(board, replace(new, prepare="true\n"))
    with monkeypatch.context() as patch:
        sign = Release.sign_settings
        patch.setattr(Release, "sign_settings", lambda self, run, data: sign(self, run, data + b"more"))
        with pytest.raises(FlashError, match=r"settings\.tar is not what was signed"):
            flash(board, new)
        patch.setattr(Release, "sign_settings", lambda self, run, data: sign(self, "0" * 16, data))
        with pytest.raises(FlashError, match="the settings of another run"):
            flash(board, new)
    assert current(board) == runs


# Failure


def test_an_update_that_does_not_come_back_is_rolled_back_with_its_settings(board: Board, tmp_path: Path) -> None:
    flash(board, a_release(tmp_path))
    with pytest.raises(FlashError, match=r"1.1-bbb did not come back .* back on 1\.0-aaa, whose unit is active"):
        flash(board, a_release(tmp_path, "1.1-bbb", DIES, DEVICE_TOML.replace(b"s.npz", b"t.npz")), patience_s=0)
    assert current(board) == "1.0-aaa"
    assert board.sh("cat /etc/metafleet/device.toml") == DEVICE_TOML.decode()
    asked = board.path("/run/stand-in/asked").read_text().splitlines()
    assert len([line for line in asked if re.fullmatch(r"stop metafleet-return-[0-9a-f]{16}\.timer", line)]) == 2
    assert not flash(board, a_release(tmp_path)).changed


def test_a_change_that_fails_half_way_is_rolled_back_at_once(board: Board, tmp_path: Path) -> None:
    flash(board, a_release(tmp_path))
    new = a_release(tmp_path, "1.1-bbb", settings=DEVICE_TOML.replace(b"s.npz", b"t.npz"))
    broken = replace(new, settings=(*new.settings, Setting("/etc/passwd/no-folder", b"")))
    with pytest.raises(FlashError, match="changing over failed"):
        flash(board, broken)
    assert current(board) == "1.0-aaa"
    assert board.sh("cat /etc/metafleet/device.toml") == DEVICE_TOML.decode()
    assert not board.path("/opt/metafleet/.flash/armed").exists()


def test_an_archive_that_is_damaged_while_it_is_sent_is_an_error(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = a_release(tmp_path)
    assert release.content.files
    whole = release.program.path.read_bytes()
    monkeypatch.setattr(Release, "content", release.content)
    release.program.path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(FlashError, match=r"tar\.gz: cannot be read"):
        flash(board, release)
    assert current(board) == ""


def test_a_first_install_that_does_not_come_back_leaves_nothing_running(board: Board, tmp_path: Path) -> None:
    with pytest.raises(FlashError, match="nothing ran there before, and nothing runs now"):
        flash(board, a_release(tmp_path, agent=DEAF), patience_s=0)
    assert current(board) == ""
    assert board.sh("systemctl is-active metafleet.service").strip() == "inactive"
    assert not board.path("/etc/metafleet/device.toml").exists()


def test_a_broken_update_rolls_back_when_operator_and_connection_are_gone(board: Board, tmp_path: Path) -> None:
    flash(board, a_release(tmp_path))
    boot = online(board)
    operator = os.fork()
    if operator == 0:  # it waits for a minute, the device for five seconds
        try:
            flash(board, a_release(tmp_path, "1.1-bbb", DEAF), patience_s=60, margin_s=-55)
        finally:
            os._exit(1)
    until(lambda: current(board) == "1.1-bbb", "the update is changed over to")
    os.kill(operator, signal.SIGKILL)
    os.waitpid(operator, 0)
    board.sh("pkill -9 -f 'sshd: root'")
    until(lambda: current(board) == "1.0-aaa" and online(board) != boot, "the version before runs again")
    until(lambda: not board.path("/opt/metafleet/.flash/back").exists(), "the device is done")
    assert "nobody confirmed it in time" in board.path("/opt/metafleet/.flash/last-return").read_text()
    assert flash(board, a_release(tmp_path, "1.2-ccc")).changed


def test_a_device_that_restarts_before_it_is_confirmed_rolls_back(board: Board, tmp_path: Path) -> None:
    flash(board, a_release(tmp_path))
    cut_at(board, a_release(tmp_path, "1.1-bbb", DEAF), "confirm")
    assert current(board) == "1.1-bbb"
    assert "/opt/metafleet/.flash/device.sh boot" in board.path(
        "/etc/systemd/system/metafleet-return.service").read_text()
    assert board.sh("sh /opt/metafleet/.flash/device.sh boot") == ""
    assert current(board) == "1.0-aaa"


@pytest.mark.parametrize("after", [False, True])
def test_a_connection_that_is_lost_while_waiting_is_opened_again(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, after: bool
) -> None:
    """The connection breaks before the device is told that all is well, or after, so that only its answer is lost."""
    flash(board, a_release(tmp_path))
    step, said, broken = Remote.step, list[str](), list[str]()

    def breaking(self: Remote, verb: str, *arguments: str, **options: Any) -> str:
        if verb != "confirm" or broken:
            return step(self, verb, *arguments, **options)
        broken.append(verb)
        if after:
            step(self, verb, *arguments, **options)
        board.sh("pkill -9 -f 'sshd: root'")
        raise ssh_connection.ConnectionLost("the connection was lost: confirming", where=self.where)

    monkeypatch.setattr(Remote, "step", breaking)
    assert flash(board, a_release(tmp_path, "1.1-bbb"), told=said).changed
    assert "the connection was lost: connecting again" in said
    assert current(board) == "1.1-bbb"
    assert not board.path("/opt/metafleet/.flash/armed").exists()


class Cut(Exception):
    """The operator's machine is gone."""


def cut_at(board: Board, release: Release, verb: str) -> None:
    """A run that ends before ``verb``."""
    step = Remote.step

    def dying(self: Remote, asked: str, *arguments: str, **options: Any) -> str:
        if asked == verb:
            raise Cut
        return step(self, asked, *arguments, **options)

    class Blind(remote_install.OnDevice):
        def missing(self, version: str) -> str:
            if verb == "confirm":
                raise Cut
            return super().missing(version)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Remote, "step", dying)
        patch.setattr(remote_install, "OnDevice", Blind)
        with pytest.raises(Cut):
            flash(board, release)


def test_a_run_that_is_cut_off_leaves_the_old_version_and_the_next_one_continues(board: Board, tmp_path: Path) -> None:
    flash(board, a_release(tmp_path))
    new = a_release(tmp_path, "1.1-bbb", settings=DEVICE_TOML.replace(b"s.npz", b"t.npz"))
    boot = online(board)
    for verb in STEPS[:-1]:
        cut_at(board, new, verb)
        assert (current(board), online(board)) == ("1.0-aaa", boot), verb
        assert "s.npz" in board.sh("cat /var/lib/metafleet/device.toml")
    cut_at(board, new, "confirm")
    assert current(board) == "1.1-bbb"
    outcome = flash(board, new)
    assert (outcome.changed, outcome.sent_bytes, current(board)) == (True, 0, "1.1-bbb")
    assert not flash(board, new).changed


def test_an_upload_that_is_cut_off_or_damaged_is_sent_again(board: Board, tmp_path: Path) -> None:
    release = a_release(tmp_path)
    cut_at(board, release, "take")
    part = board.path("/opt/metafleet/.1.0-aaa.part")
    (part / "lib").mkdir()
    (part / "lib/same.py").write_bytes(b"same\n")
    (part / "lib/left over.py").write_bytes(b"of an earlier try")
    outcome = flash(board, release)
    assert outcome.sent_bytes == sum(size for _, size in release.content.files.values())
    assert not board.path("/opt/metafleet/current/lib/left over.py").exists()


def test_a_run_that_was_overtaken_by_another_is_refused(board: Board, tmp_path: Path) -> None:
    release = a_release(tmp_path)

    class Overtaken(remote_install.OnDevice):
        def before(self) -> None:
            with ssh_connection.Connection(ssh_connection.parse(board.url(), board.config)) as connection:
                Remote(connection).begin()

    with ssh_connection.Connection(ssh_connection.parse(board.url(), board.config)) as connection:
        remote = Remote(connection)
        assert remote.machine().root
        with pytest.raises(FlashError, match="another run has taken over"):
            remote_install.install(remote, lambda with_token: release, lambda *told: None, watch=Overtaken(remote))


def test_files_that_are_damaged_on_the_way_are_not_installed(
    board: Board, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = a_release(tmp_path)
    other = a_release(tmp_path, "1.0-zzz", agent=DEAF)
    monkeypatch.setattr(Release, "send", lambda self, names, sent: send(other, names, sent))
    with pytest.raises(FlashError, match="verifying failed"):
        flash(board, release)
    assert (current(board), kept(board)) == ("", set())


send: Callable[..., object] = Release.send
