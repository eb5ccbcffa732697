"""Installing a program that the device has fetched: what root believes, what it refuses, and how it goes back."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
from pathlib import Path

import pytest

from firmware_profiles.package.device_package import Signing
from firmware_profiles.pulled import update_package
from firmware_profiles.pulled.update_package import UpdatePackage
from fleet_core.base.errors import FlashError
from fleet_core.protocol.signing import Signer
from tests.support import fake_root as roots
from tests.support.fake_root import DEAF, FakeRoot, an_update, fake_root
from tests.support.loopback_board import SIGNING

pytestmark = pytest.mark.needs("flock")


@pytest.fixture
def device(tmp_path: Path) -> FakeRoot:
    return fake_root(tmp_path)


@pytest.mark.slow
def test_a_signed_program_is_installed_beside_the_one_that_runs_and_stays_when_its_agent_is_connected(
    device: FakeRoot, tmp_path: Path
) -> None:
    result = device.pull(an_update(tmp_path, "1.1-bbb"), "7 2")
    assert (result, device.runs) == ({"serial": "7", "attempt": "2", "outcome": "running", "why": ""}, "1.1-bbb")
    assert (device.programs / "1.1-bbb/lib/with blank (1).py").read_text() == "1.1-bbb"
    assert os.stat(device.programs / "1.1-bbb/lib/same.py").st_nlink == 2  # shared with the version before
    assert (device.path / "etc/systemd/system/metafleet.service").read_text() == roots.UNITS["metafleet.service"]
    assert not (device.programs / ".flash/armed").exists()
    assert not (device.inbox / "ready").exists()


@pytest.mark.slow
def test_a_program_whose_agent_does_not_come_up_connected_is_left_again(device: FakeRoot, tmp_path: Path) -> None:
    result = device.pull(an_update(tmp_path, "1.1-bbb", DEAF))
    assert (result["outcome"], device.runs) == ("back", "1.0-aaa")
    assert "did not reach its broker within 0 s" in result["why"]
    assert not (device.path / "etc/systemd/system/metafleet.service").exists()  # there was none before


FOREIGN = Signing("attic", Signer(bytes(32)))


@pytest.mark.slow
def test_what_the_fleets_key_has_not_signed_is_refused_and_nothing_stays(device: FakeRoot, tmp_path: Path) -> None:
    good, foreign = an_update(tmp_path, "1.1-bbb"), an_update(tmp_path, "1.2-ccc", signing=FOREIGN)
    forged = dataclasses.replace(good, statement=good.statement.replace(b"older no", b"older yes"))
    another = dataclasses.replace(good, statement=SIGNING.signer.sign(b"metafleet bundle 1\n{}"))
    for package, words in ((foreign, "is signed by key"), (forged, "signature that does not match"),
                           (dataclasses.replace(good, statement=b""), "carries no Ed25519 signature"),
                           (another, "the signed text is not about the program")):
        result = device.pull(package)
        assert words in result["why"]
        assert result["outcome"] == "refused"
    assert device.runs == "1.0-aaa"
    assert {path.name for path in device.programs.iterdir()} == {"1.0-aaa", "current", ".flash", "update-result"}


@pytest.mark.slow
def test_an_archive_that_is_truncated_too_long_or_another_is_refused(device: FakeRoot, tmp_path: Path) -> None:
    good, other = an_update(tmp_path, "1.1-bbb"), an_update(tmp_path, "1.2-ccc")
    data = good.archive.read_bytes()
    for bad, words in ((data[:-100], "is not what was signed"), (data + b"x", "has more than"),
                       (data[:-1] + b"x", "is not what was signed"), (b"", "is not what was signed")):
        device.give(good)
        (device.inbox / "program.tar.gz").unlink()
        (device.inbox / "program.tar.gz").write_bytes(bad)
        device.update("pull")
        assert words in device.result["why"]
        assert device.result["outcome"] == "refused"
    device.give(dataclasses.replace(good, archive=other.archive))
    device.update("pull")
    assert device.result["outcome"] == "refused"
    assert device.runs == "1.0-aaa"


@pytest.mark.slow
def test_a_small_file_that_is_changed_on_the_way_is_refused(device: FakeRoot, tmp_path: Path) -> None:
    good = an_update(tmp_path, "1.1-bbb")
    for name in good.files:
        result = device.pull(dataclasses.replace(good, files={**good.files, name: "evil\n"}))
        assert (result["outcome"], result["why"].strip()) == ("refused", f"{name} is not what was signed")
    assert not (device.path / "etc/systemd/system/metafleet.service").exists()


@pytest.mark.slow
def test_a_program_for_another_machine_or_python_is_refused(device: FakeRoot, tmp_path: Path) -> None:
    assert "it is for riscv64" in device.pull(an_update(tmp_path, "1.1-bbb", arch="riscv64"))["why"]
    assert "it is for Python 3.9" in device.pull(an_update(tmp_path, "1.1-bbb", python="3.9"))["why"]
    assert device.runs == "1.0-aaa"


@pytest.mark.slow
def test_an_archive_that_writes_outside_its_folder_changes_nothing_there(device: FakeRoot, tmp_path: Path) -> None:
    """Even with the fleet's signature, which it gets only by mistake: ``content_of`` refuses such an archive first."""
    for more in ({"../outside": b"evil"}, {"lib/link": b"->/etc"}):
        with pytest.raises(FlashError, match=r"not a plain file|holds 2 folders"):
            an_update(tmp_path, "1.1-bbb", more=more)
    plain = an_update(tmp_path, "1.1-bbb")
    evil = roots.a_program(tmp_path, "1.1-bbb", roots.GOOD, {"../outside": b"evil", "lib/l": b"->/etc"},
                           plain.arch, plain.python)
    text = plain.statement.partition(b"\n")[2].decode().splitlines()
    text[8] = f"archive {evil.sha256} {evil.size_bytes}"
    result = device.pull(dataclasses.replace(plain, statement=SIGNING.signer.sign("\n".join([*text, ""]).encode())))
    assert result["outcome"] == "refused"
    assert not (device.programs / "outside").exists()
    assert not (device.path / "outside").exists()


@pytest.mark.slow
def test_a_program_that_was_signed_before_the_newest_one_is_refused_unless_its_signature_allows_it(
    device: FakeRoot, tmp_path: Path
) -> None:
    old, allowed = an_update(tmp_path, "1.1-bbb"), an_update(tmp_path, "1.1-bbb", older=True)
    assert device.pull(an_update(tmp_path, "1.2-ccc"))["outcome"] == "running"
    replayed = device.pull(old)
    assert replayed["outcome"] == "refused"
    assert "signed before what was installed" in replayed["why"]
    assert device.runs == "1.2-ccc"
    assert device.pull(allowed)["outcome"] == "running"
    assert device.pull(old)["outcome"] == "refused"
    assert device.runs == "1.1-bbb"


def test_links_in_the_agents_folder_do_not_show_what_only_root_may_read(device: FakeRoot, tmp_path: Path) -> None:
    secret = device.path / "secret"
    secret.write_text("root's own\n")
    device.give(an_update(tmp_path, "1.1-bbb"))
    (device.inbox / "PACKAGE").unlink()
    (device.inbox / "PACKAGE").symlink_to(secret)
    device.update("pull")
    assert device.result["outcome"] == "refused"
    assert "root's own" not in str(device.result)


@pytest.mark.slow
def test_a_request_that_has_its_answer_is_not_tried_again(device: FakeRoot, tmp_path: Path) -> None:
    device.pull(an_update(tmp_path, "1.1-bbb", DEAF), "5 1")
    assert device.pull(an_update(tmp_path, "1.2-ccc"), "5 1")["outcome"] == "back"
    assert device.runs == "1.0-aaa"
    assert device.pull(an_update(tmp_path, "1.2-ccc"), "5 2")["outcome"] == "running"


def test_a_request_that_is_no_two_numbers_is_dropped(device: FakeRoot, tmp_path: Path) -> None:
    assert device.pull(an_update(tmp_path, "1.1-bbb"), "$(touch /evil) 1") == {}
    assert device.runs == "1.0-aaa"


@pytest.mark.slow
def test_killed_at_any_command_it_leaves_a_version_that_runs_and_the_next_try_succeeds(
    device: FakeRoot, tmp_path: Path
) -> None:
    """The stand-ins kill the script's process group at the n-th command that changes the disk."""
    package = an_update(tmp_path, "1.1-bbb")
    killers = ("mv", "cp", "ln", "tar", "sync", "mkdir", "rm")
    for name in killers:
        script = device.path / "bin" / name
        script.write_text(
            f'#!/bin/sh\nif [ -n "$DIE_AT" ]; then echo x >>"{device.path}/commands"\n'
            f'[ "$(wc -l <"{device.path}/commands")" -ne "$DIE_AT" ] || kill -9 0; fi\n'
            f'PATH={os.environ["PATH"]} exec {name} "$@"\n')
        script.chmod(0o755)
    at, ended = 1, False
    while not ended:
        (device.path / "commands").unlink(missing_ok=True)
        device.give(package)
        process = subprocess.Popen(
            ["/bin/sh", str(device.programs / "current/bin/update"), "pull"], env=device.environment(DIE_AT=str(at)),
            stderr=subprocess.DEVNULL, start_new_session=True)
        ended = process.wait(120) != -signal.SIGKILL
        runs = device.runs
        assert runs in ("1.0-aaa", "1.1-bbb"), at
        assert (device.programs / runs / "bin/edge-agent").exists()
        if not ended:  # the device starts anew: what was armed goes back
            boot = device.programs / ".flash/device.sh"
            if boot.exists():
                subprocess.run(["/bin/sh", str(boot), "boot"], env=device.environment(), check=False,
                               capture_output=True, timeout=120)
            assert not (device.programs / ".flash/armed").exists(), at
            confirmed = device.runs != "1.0-aaa"
            assert not confirmed or device.result["outcome"] == "running" or _is_confirmed(device, package), at
        at += 3
    assert at > 20
    assert device.pull(package)["outcome"] == "running"
    assert device.runs == "1.1-bbb"


def _is_confirmed(device: FakeRoot, package: UpdatePackage) -> bool:
    """Cut off between the confirmation and its answer: the program stays, and the agent asks again."""
    return device.pull(package)["outcome"] == "running"


# Mender


def mender(device: FakeRoot, folder: Path, state: str, **more: str) -> subprocess.CompletedProcess[str]:
    """As Mender calls a module: in the folder of its file API, with the state and the folder."""
    return device.update(state, str(folder), script="mender",
                         METAFLEET_UPDATE=str(device.programs / "current/bin/update"), **more)


def deploy(device: FakeRoot, folder: Path, *, fail_after: str = "") -> list[tuple[str, int]]:
    """Mender's order of states (its update modules' protocol, version 3). fail_after: another part of the artifact
    fails then."""
    ran: list[tuple[str, int]] = []

    def run(state: str) -> bool:
        ran.append((state, mender(device, folder, state).returncode))
        return ran[-1][1] == 0 and state != fail_after

    rollback = mender(device, folder, "SupportsRollback").stdout.strip() == "Yes"
    installed = run("Download") and run("ArtifactInstall")
    reboot = installed and mender(device, folder, "NeedsArtifactReboot").stdout.strip()
    assert reboot in (False, "No")
    if not installed or not run("ArtifactCommit"):
        if rollback:
            run("ArtifactRollback")
        run("ArtifactFailure")
    run("Cleanup")
    return ran


@pytest.mark.slow
def test_mender_takes_a_good_program_through_its_states(device: FakeRoot, tmp_path: Path) -> None:
    update_package.save(an_update(tmp_path, "1.1-bbb"), tmp_path / "api/files")
    assert deploy(device, tmp_path / "api") == [
        ("Download", 0), ("ArtifactInstall", 0), ("ArtifactCommit", 0), ("Cleanup", 0)]
    assert device.runs == "1.1-bbb"
    assert not (device.programs / ".flash/armed").exists()


@pytest.mark.slow
@pytest.mark.parametrize("fail_after", ["ArtifactInstall", ""])
def test_mender_goes_back_when_a_program_or_another_part_fails(
    device: FakeRoot, tmp_path: Path, fail_after: str
) -> None:
    package = an_update(tmp_path, "1.1-bbb", roots.GOOD if fail_after else DEAF)
    update_package.save(package, tmp_path / "api/files")
    ran = deploy(device, tmp_path / "api", fail_after=fail_after)
    assert [state for state, _ in ran] == ["Download", "ArtifactInstall", "ArtifactRollback", "ArtifactFailure",
                                           "Cleanup"]
    assert dict(ran)["ArtifactInstall"] == (0 if fail_after else 8)
    assert device.runs == "1.0-aaa"
    assert not (device.programs / ".flash/armed").exists()


def test_mender_leaves_alone_what_somebody_else_has_armed(device: FakeRoot, tmp_path: Path) -> None:
    package = an_update(tmp_path, "1.1-bbb")
    update_package.save(package, tmp_path / "api/files")
    armed = device.programs / ".flash/armed"
    armed.mkdir(parents=True)
    (armed / "run").write_text("of-an-operator\n")
    assert mender(device, tmp_path / "api", "ArtifactInstall").returncode == 6
    assert mender(device, tmp_path / "api", "ArtifactFailure").returncode == 0
    assert armed.exists()
    assert device.runs == "1.0-aaa"


def test_mender_brings_no_program_of_another_fleet(device: FakeRoot, tmp_path: Path) -> None:
    update_package.save(an_update(tmp_path, "1.1-bbb", signing=FOREIGN), tmp_path / "api/files")
    done = mender(device, tmp_path / "api", "ArtifactInstall")
    assert done.returncode == 7
    assert "is signed by key" in done.stderr
    assert mender(device, tmp_path / "api", "SomethingOfALaterMender").stdout == ""
    assert device.runs == "1.0-aaa"
