"""Flashing into an image: the original stays, the file systems stay sound, and an interrupted run leaves nothing that
looks finished."""

from __future__ import annotations

import hashlib
import lzma
import os
import re
import signal
import subprocess
import tempfile
from dataclasses import replace
from pathlib import Path

import pytest
import yaml
from backports import zstd
from hypothesis import given, settings
from hypothesis import strategies as st

from firmware_profiles.image import card_image, first_boot, image_plan, partition_files, stream
from firmware_profiles.image.partition_files import IN_ROOT, ON_FAT
from firmware_profiles.package import device_package
from firmware_profiles.package.board_needs import Machine
from firmware_profiles.package.device_file import MASK, DeviceFile, Ssh, Wifi
from fleet_core.base.errors import ConfigError, FlashError
from fleet_core.protocol.program_statement import Statement
from fleet_core.protocol.signing import Signer
from tests.support import disks
from tests.support.disks import MIB
from tests.support.loopback_board import SIGNING, random_program

TRIXIE = Machine("raspberry-pi-4b", "aarch64", "3.13")
BOOKWORM = replace(TRIXIE, python="3.11", first_boot="firstrun", os="Raspberry Pi OS Bookworm")
PASSWORD, TOKEN = "correct horse", b"one-time-7d3f"
WIFI = Wifi("Café: \"x\"", "DE", PASSWORD)
DEVICE = DeviceFile("kitchen", "fleet", "raspberry-pi-4b", wifi=WIFI,
                    ssh=Ssh("me", ("ssh-ed25519 AAAA me@laptop",)))
NEEDS = pytest.mark.needs("mcopy", "mkfs.vfat", "mke2fs", "debugfs", "sfdisk")


def packed(folder: Path, size: int = MIB, machine: Machine = TRIXIE) -> device_package.Package:
    return device_package.make(
        "kitchen", machine, random_program(folder, size), {"device.toml": b"[device]\n", "token": TOKEN},
        signing=SIGNING,
    )


@pytest.fixture(scope="module")
def card(tmp_path_factory):
    return disks.card(tmp_path_factory.mktemp("card") / "card.img")


def files(machine: Machine = TRIXIE, device: DeviceFile = DEVICE, cmdline: str | None = "rootwait\n") -> dict[str, str]:
    made = first_boot.files(machine, device, serial="FEDA-0001", key=SIGNING.signer.public, instance="i-1",
                            cmdline=cmdline)
    return {file.path: file.data.decode() for file in made}


def the_job() -> str:
    return first_boot._job("FEDA-0001", SIGNING.signer.public)


# First boot -----------------------------------------------------------------------------------------------------------


def test_cloud_init_gets_everything_as_valid_yaml():
    made = files()
    assert made["user-data"].startswith("#cloud-config\n")
    told = yaml.safe_load(made["user-data"])
    assert (told["hostname"], told["users"][0]["name"], told["ssh_pwauth"]) == ("kitchen", "me", False)
    assert told["users"][0]["ssh_authorized_keys"] == ["ssh-ed25519 AAAA me@laptop"]
    job, service = told["write_files"]
    assert job["content"] == the_job()
    assert f"ExecStart={job['path']}\n" in service["content"]
    assert ["sh", "-c", "systemctl enable metafleet-first-boot.service"] in told["runcmd"]
    points = yaml.safe_load(made["network-config"])["wifis"]["wlan0"]["access-points"]
    assert points == {'Café: "x"': {"password": WIFI.key}}
    assert yaml.safe_load(made["meta-data"])["instance-id"] == "i-1"


WORDS = st.text(st.characters(codec="utf-8", exclude_characters="\x85\ufeff"), max_size=20)
VALUES = st.recursive(
    st.booleans() | st.integers(-9, 9) | WORDS,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(WORDS, inner, max_size=3), max_leaves=10,
)


@pytest.mark.slow
@settings(max_examples=200, deadline=None)
@given(st.dictionaries(WORDS, VALUES, min_size=1, max_size=4))
def test_values_written_as_yaml_are_read_back_the_same(value):
    assert yaml.safe_load(first_boot.yaml_text(value)) == value


def test_a_network_with_wpa3_only_gets_the_password_itself():
    made = replace(DEVICE, wifi=replace(WIFI, security="wpa3", password=r"back\slash and more"))
    points = yaml.safe_load(files(device=made)["network-config"])["wifis"]["wlan0"]["access-points"]
    auth = {"key-management": "sae", "password": r"back\slash and more"}
    assert points == {'Café: "x"': {"auth": auth}}
    assert "key-mgmt=sae\npsk=back\\\\slash\\sand\\smore\n" in files(BOOKWORM, made)["firstrun.sh"]
    plain = replace(DEVICE, wifi=replace(WIFI, security="wpa3"))
    shown, whole = files(device=plain.masked()), files(device=plain)
    assert PASSWORD not in "".join(shown.values())
    assert {name: len(text) for name, text in shown.items()} == {name: len(text) for name, text in whole.items()}


@pytest.mark.parametrize("machine", [TRIXIE, BOOKWORM])
def test_what_grows_the_root_at_the_first_start_stays_in_the_kernels_line(machine):
    """As pi-gen writes it: firstboot grows the root and removes itself from the line."""
    line = ("console=tty1 root=PARTUUID=4f5e-02 rootfstype=ext4 fsck.repair=yes rootwait quiet resize "
            "init=/usr/lib/raspberrypi-sys-mods/firstboot")
    assert files(machine, cmdline=line + "\n")["cmdline.txt"].startswith(line + " ")


def test_without_wifi_the_systems_own_network_is_left_as_it_is():
    assert set(files(device=replace(DEVICE, wifi=None))) == {"user-data", "meta-data", "cmdline.txt"}


def test_cmdline_gets_what_is_missing_once_and_stays_one_line():
    once = files(BOOKWORM)["cmdline.txt"]
    assert once.startswith("rootwait cgroup_enable=memory cfg80211.ieee80211_regdom=DE systemd.run=/boot/firmware/")
    assert files(BOOKWORM, cmdline=once)["cmdline.txt"] == once
    with pytest.raises(FlashError, match="not one line"):
        files(cmdline="a\nb\n")


def test_bookworm_without_a_cmdline_and_a_system_without_first_boot_are_refused():
    with pytest.raises(FlashError, match=r"no cmdline\.txt"):
        files(BOOKWORM, cmdline=None)
    with pytest.raises(FlashError, match="ssh://"):
        files(replace(TRIXIE, first_boot="ssh"))


@pytest.mark.parametrize("shell", ["/bin/sh", pytest.param("bash", marks=pytest.mark.needs("bash"))])
def test_the_scripts_are_plain_shell(tmp_path, shell):
    scripts = {"firstrun.sh": files(BOOKWORM)["firstrun.sh"], "first_boot.sh": the_job()}
    for name, text in scripts.items():
        (tmp_path / name).write_text(text)
        done = subprocess.run([shell, "-n", str(tmp_path / name)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")


def in_folder(text: str, root: Path) -> str:
    """A script with all absolute paths below ``root``."""
    return re.sub(r"(?<![A-Za-z0-9_.}\"/])/(boot|etc|run|home|usr|var)\b", rf"{root}/\1", text)


@pytest.fixture
def system(tmp_path):
    """A folder in place of /, and an environment whose system programs log their calls."""
    programs = tmp_path / "programs"
    programs.mkdir()
    for name in ("systemctl", "mount", "umount", "useradd", "usermod", "chown", "rfkill", "getent"):
        (programs / name).write_text(f'#!/bin/sh\necho "{name} $*" >>{tmp_path}/called\n')
        (programs / name).chmod(0o755)
    (programs / "mountpoint").write_text("#!/bin/sh\nexit 1\n")
    (programs / "mountpoint").chmod(0o755)
    for name in ("boot/firmware/metafleet", "etc/cloud", "run"):
        (tmp_path / name).mkdir(parents=True)
    return tmp_path, {"PATH": f"{programs}:/usr/bin:/bin"}


def run(script: Path, system) -> subprocess.CompletedProcess[str]:
    return subprocess.run(["/bin/sh", str(script)], env=system[1], capture_output=True, text=True)


def put_package(boot: Path, install: str, signer: Signer = SIGNING.signer) -> None:
    """A package whose installer is ``install``, signed."""
    (boot / "metafleet/install.sh").write_text(install)
    files = {"install.sh": hashlib.sha256(install.encode()).hexdigest()}
    text = Statement("lab", "0.1.0-abc", "3.13", "aarch64", 1, "0" * 64, "0" * 64, 1, files=files).text()
    (boot / "metafleet/PACKAGE").write_bytes(signer.sign(text))


@pytest.mark.needs("openssl")
def test_the_first_start_installs_and_erases_what_is_secret(system):
    root = system[0]
    boot = root / "boot/firmware"
    put_package(boot, "echo installed\n")
    (boot / "network-config").write_text(PASSWORD)
    (root / "job").write_text(in_folder(the_job(), root))
    done = run(root / "job", system)
    assert (done.returncode, done.stderr) == (0, "")
    assert (boot / "metafleet.log").read_text() == "Signature Verified Successfully\ninstalled\n"
    assert not (boot / "network-config").exists()
    assert not (boot / "metafleet").exists()
    assert (root / "etc/cloud/cloud-init.disabled").exists()
    assert "systemctl disable metafleet-first-boot.service" in (root / "called").read_text()


@pytest.mark.needs("openssl")
def test_a_first_start_that_fails_leaves_everything_for_the_next(system):
    root = system[0]
    boot = root / "boot/firmware"
    put_package(boot, "echo no room >&2\nexit 1\n")
    (boot / "network-config").write_text(PASSWORD)
    (root / "job").write_text(in_folder(the_job(), root))
    assert run(root / "job", system).returncode == 1
    assert (boot / "network-config").exists()
    assert (boot / "metafleet.log").read_text() == "Signature Verified Successfully\nno room\n"
    assert not (root / "called").exists()


@pytest.mark.needs("openssl")
@pytest.mark.parametrize(("change", "words"), [
    ("a file", "the package is damaged"), ("the signature", "the fleet's key has not signed this package"),
    ("another key", "the fleet's key has not signed this package"), ("no signature", "has not signed"),
])
def test_the_first_start_runs_nothing_that_was_not_signed(system, change, words):
    root = system[0]
    boot = root / "boot/firmware"
    put_package(boot, "echo installed\n", Signer(bytes(32)) if change == "another key" else SIGNING.signer)
    signed = boot / "metafleet/PACKAGE"
    match change:
        case "a file":
            (boot / "metafleet/install.sh").write_text("echo changed\n")
        case "the signature":
            signed.write_bytes(signed.read_bytes().replace(b"older no", b"older yes"))
        case "no signature":
            signed.write_bytes(signed.read_bytes().partition(b"\n")[2])
    (root / "job").write_text(in_folder(the_job(), root))
    assert run(root / "job", system).returncode == 1
    log = (boot / "metafleet.log").read_text()
    assert words in log
    assert "installed" not in log
    assert "changed" not in log
    assert (boot / "metafleet/install.sh").exists()


def test_without_openssl_the_first_start_checks_the_hashes_and_says_so(system):
    root = system[0]
    boot = root / "boot/firmware"
    (root / "programs/openssl").write_text("#!/bin/sh\necho OpenSSL 1.1.1n\n")
    (root / "programs/openssl").chmod(0o755)
    (root / "job").write_text(in_folder(the_job(), root))
    put_package(boot, "echo installed\n")
    (boot / "metafleet/install.sh").write_text("echo changed\n")
    assert run(root / "job", system).returncode == 1
    assert "the package is damaged" in (boot / "metafleet.log").read_text()
    put_package(boot, "echo installed\n")
    assert run(root / "job", system).returncode == 0
    log = (boot / "metafleet.log").read_text()
    assert "the hashes of the package are checked, its signature is not" in log
    assert log.endswith("\ninstalled\n")


def test_bookworms_first_run_leaves_user_wifi_and_service_and_itself_goes(system):
    root = system[0]
    boot, made = root / "boot/firmware", files(BOOKWORM)
    (boot / "firstrun.sh").write_text(in_folder(made["firstrun.sh"], root))
    (boot / "cmdline.txt").write_text(made["cmdline.txt"])
    (root / "etc/hosts").write_text("127.0.0.1\tlocalhost\n127.0.1.1\traspberrypi\n")
    (root / "var/lib/systemd/rfkill").mkdir(parents=True)
    done = run(boot / "firstrun.sh", system)
    assert done.returncode == 0
    assert not (boot / "firstrun.sh").exists()
    assert (boot / "cmdline.txt").read_text() == "rootwait cgroup_enable=memory cfg80211.ieee80211_regdom=DE\n"
    assert (root / "etc/hosts").read_text().endswith("127.0.1.1\tkitchen\n")
    wifi = root / "etc/NetworkManager/system-connections/metafleet.nmconnection"
    assert wifi.stat().st_mode & 0o777 == 0o600
    assert f"psk={WIFI.key}\n" in wifi.read_text()
    assert (root / "home/me/.ssh/authorized_keys").read_text() == "ssh-ed25519 AAAA me@laptop\n"
    assert (root / "usr/local/sbin/metafleet-first-boot").stat().st_mode & 0o777 == 0o755
    assert "systemctl enable metafleet-first-boot.service" in (root / "called").read_text()


# Images as they come --------------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_an_image_is_the_same_however_it_is_packed(tmp_path):
    data = os.urandom(MIB) + bytes(11 * MIB) + os.urandom(512)
    packings = {
        "a.img": data, "a.img.xz": lzma.compress(data[:5], preset=0) + bytes(8) + lzma.compress(data[5:], preset=0),
        "a.img.zst": zstd.compress(data[:MIB]) + zstd.compress(data[MIB:]),
    }
    for name, held in packings.items():
        (tmp_path / name).write_bytes(held)
        card_image.copy(tmp_path / name, tmp_path / "out")
        assert (tmp_path / "out").read_bytes() == data, name
    assert (tmp_path / "out").stat().st_blocks * 512 < 6 * MIB  # whole blocks of zeros took no room


@pytest.mark.parametrize("name", ["a.img.xz", "a.img.zst"])
def test_a_packed_image_that_is_cut_short_or_damaged_is_refused(tmp_path, name):
    data = os.urandom(MIB)
    held = lzma.compress(data) if name.endswith("xz") else zstd.compress(data, options={
        zstd.CompressionParameter.checksum_flag: 1})
    (tmp_path / name).write_bytes(held[:-100])
    with pytest.raises(FlashError, match="cut short"):
        card_image.copy(tmp_path / name, tmp_path / "out")
    (tmp_path / name).write_bytes(held[:5000] + bytes(8) + held[5008:])
    with pytest.raises(FlashError, match="is damaged"):
        card_image.copy(tmp_path / name, tmp_path / "out")


def test_an_image_that_unpacks_to_more_than_any_card_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(stream, "MAX_IMAGE_BYTES", 8 * MIB)
    (tmp_path / "bomb.img.xz").write_bytes(lzma.compress(bytes(16 * MIB)))
    with pytest.raises(FlashError, match="unpacks to more"):
        card_image.copy(tmp_path / "bomb.img.xz", tmp_path / "out")
    (tmp_path / "a.img.gz").write_bytes(b"\x1f\x8b\x08\0\0\0\0\0")
    with pytest.raises(FlashError, match=r"\.gz"):
        card_image.copy(tmp_path / "a.img.gz", tmp_path / "out")


# Flashing into an image -----------------------------------------------------------------------------------------------


@NEEDS
def test_the_package_is_on_the_first_partition_both_systems_are_sound_and_the_original_is_unchanged(tmp_path, card):
    before, made = card.read_bytes(), packed(tmp_path)
    out = tmp_path / "out.img"
    plan = card_image.write(card, out, made, DEVICE)
    assert card.read_bytes() == before
    assert plan.program_at == ON_FAT
    assert disks.names_on_fat(out) == {
        "config.txt", "cmdline.txt", "user-data", "meta-data", "network-config", "metafleet", "metafleet/etc",
        "metafleet/home", "metafleet/install.sh", "metafleet/package.env", "metafleet/metafleet.service",
        "metafleet/etc/device.toml", "metafleet/home/token", "metafleet/program.tar.gz", "metafleet/etc/fleet.pub",
        "metafleet/PACKAGE", "metafleet/MANIFEST.sha256", "metafleet/metafleet-update.path",
        "metafleet/metafleet-update.service",
    }
    assert disks.on_fat(out, "metafleet/program.tar.gz") == made.program.path.read_bytes()
    assert disks.on_fat(out, "metafleet/home/token") == TOKEN
    assert b"cgroup_enable=memory" in disks.on_fat(out, "cmdline.txt")
    assert PASSWORD.encode() not in out.read_bytes()  # its derived key is there, the password is not
    assert out.stat().st_mode & 0o777 == 0o600
    disks.check(out)


@NEEDS
def test_no_secret_is_in_the_command_line_of_a_program_or_left_in_a_temporary_file(tmp_path, card, monkeypatch):
    commands, run_it = [], subprocess.run

    def noted(command, **how):
        commands.append(" ".join(map(str, command)))
        return run_it(command, **how)

    monkeypatch.setattr(subprocess, "run", noted)
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "temporary"))
    (tmp_path / "temporary").mkdir()
    card_image.write(card, tmp_path / "out.img", packed(tmp_path), DEVICE)
    assert DEVICE.wifi is not None
    said = " ".join(commands)
    assert "mcopy" in said
    for secret in (TOKEN.decode(), PASSWORD, DEVICE.wifi.key):
        assert secret not in said
    assert list((tmp_path / "temporary").iterdir()) == []


@pytest.mark.slow
@NEEDS
def test_a_flashed_image_can_be_flashed_again_from_a_packed_one(tmp_path, card):
    first, source = tmp_path / "first.img", tmp_path / "card.img.xz"
    source.write_bytes(lzma.compress(card.read_bytes(), preset=0))
    card_image.write(source, first, packed(tmp_path), DEVICE)
    again = card_image.write(first, tmp_path / "second.img", packed(tmp_path, machine=BOOKWORM), DEVICE)
    assert "firstrun.sh" in disks.names_on_fat(tmp_path / "second.img")
    assert again.program_at == ON_FAT
    disks.check(tmp_path / "second.img")


@pytest.mark.slow
@NEEDS
@pytest.mark.parametrize("folders", [("etc", "opt"), ("etc",)])
def test_a_program_too_large_for_the_first_partition_goes_into_the_root(tmp_path, folders):
    card = disks.card(tmp_path / "card.img", boot_mib=4, root_mib=64, bits=12, folders=folders)
    made = packed(tmp_path, 6 * MIB)
    for out in (tmp_path / "out.img", tmp_path / "again.img"):
        plan = card_image.write(card, out, made, DEVICE)
        assert plan.program_at == IN_ROOT
        assert "metafleet/program.tar.gz" not in disks.names_on_fat(out)
        root = f"{out}?offset={5 * MIB}"
        told = disks.call("debugfs", "-R", f"stat {IN_ROOT}", root)
        assert "Mode:  0600" in told
        assert f"Size: {made.program.size_bytes}" in told
        disks.check(out, 4, 64)
        card = out


@NEEDS
def test_a_program_that_fits_nowhere_is_refused_before_it_is_written(tmp_path, card):
    with pytest.raises(FlashError, match="fits neither into the first partition"):
        card_image.write(card, tmp_path / "out.img", packed(tmp_path, 30 * MIB), DEVICE)
    assert {path.name for path in tmp_path.iterdir()} == {"program.tar.gz"}


@pytest.mark.slow
@NEEDS
def test_a_run_that_is_cut_off_leaves_nothing_that_looks_finished_and_the_next_finishes(tmp_path, card, monkeypatch):
    out, made = tmp_path / "out.img", packed(tmp_path)
    with monkeypatch.context() as patch:
        patch.setattr(partition_files, "put_program_on_fat", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            card_image.write(card, out, made, DEVICE)
    assert {path.name for path in tmp_path.iterdir()} == {"program.tar.gz"}
    killed = os.fork()
    if killed == 0:
        card_image.write(card, out, made, DEVICE, lambda what, done, total: os.kill(os.getpid(), signal.SIGKILL)
                    if what != "copying" else None)
        os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(killed, 0)[1]) == -signal.SIGKILL
    assert {path.name for path in tmp_path.iterdir()} == {"program.tar.gz", ".out.img.unfinished"}
    card_image.write(card, out, made, DEVICE)
    assert {path.name for path in tmp_path.iterdir()} == {"program.tar.gz", "out.img"}
    disks.check(out)


@NEEDS
def test_two_runs_do_not_make_the_same_image_at_once(tmp_path, card):
    with card_image._locked_file(tmp_path / ".out.img.unfinished"), pytest.raises(FlashError, match="another run"):
        card_image.write(card, tmp_path / "out.img", packed(tmp_path), DEVICE)


@NEEDS
def test_a_program_that_arrives_damaged_is_found(tmp_path, card):
    made = packed(tmp_path)
    made.program.path.write_bytes(os.urandom(MIB))
    with pytest.raises(FlashError, match="not what was written"):
        card_image.write(card, tmp_path / "out.img", made, DEVICE)
    assert not (tmp_path / "out.img").exists()


@NEEDS
def test_the_original_is_never_written_to_and_a_device_is_no_image(tmp_path, card):
    link = tmp_path / "link.img"
    link.symlink_to(card)
    for to, said in ((card, "never overwritten"), (link, "never overwritten"), (Path("/dev/null"), "not a plain file"),
                     (tmp_path / "no" / "out.img", "no such folder")):
        with pytest.raises(ConfigError, match=said):
            card_image.write(card, to, packed(tmp_path), DEVICE)
    (tmp_path / "other.img").write_bytes(card.read_bytes())
    with pytest.raises(ConfigError, match="was not made by flash"):
        card_image.write(card, tmp_path / "other.img", packed(tmp_path), DEVICE)
    assert (tmp_path / "other.img").read_bytes() == card.read_bytes()
    with pytest.raises(ConfigError, match="no image here"):
        card_image.write(tmp_path / "none.img", tmp_path / "out.img", packed(tmp_path), DEVICE)


@pytest.mark.slow
@NEEDS
@pytest.mark.parametrize("packing", ["img", "xz"])
def test_a_plan_is_what_is_written_and_shows_no_secret(tmp_path, card, packing):
    source = tmp_path / f"card.{packing}"
    source.write_bytes(card.read_bytes() if packing == "img" else lzma.compress(card.read_bytes(), preset=0))
    made = packed(tmp_path)
    plan = image_plan.planned(source, made, DEVICE.masked())
    done = card_image.write(source, tmp_path / "out.img", made, DEVICE)
    assert [file.path for file in plan.files] == [file.path for file in done.files]
    assert (plan.program_at, plan.boot, plan.free_bytes) == (done.program_at, done.boot, done.free_bytes)
    shown = {file.path: file.data.decode() for file in plan.files if not file.path.startswith("metafleet/")}
    assert MASK in shown["network-config"]
    assert DEVICE.wifi is not None
    assert DEVICE.wifi.key not in "".join(shown.values())


# The system in the image ----------------------------------------------------------------------------------------------


def with_system(path: Path, python: str | None, library: str) -> Path:
    """A card whose root carries these two marks of a system."""
    links = {"usr/bin/python3": python} if python else {}
    return disks.card(path, folders=("etc", f"usr/lib/{library}", "usr/bin"), links=links)


@NEEDS
@pytest.mark.parametrize(
    ("python", "library", "said"),
    [("python3.11", "aarch64-linux-gnu", r"has Python 3\.11, the package is for 3\.13"),
     (None, "arm-linux-gnueabihf", "32-bit system.*no torch and no onnxruntime")],
)
def test_an_image_of_another_system_is_refused_before_anything_is_written(tmp_path, python, library, said):
    card = with_system(tmp_path / "card.img", python, library)
    with pytest.raises(FlashError, match=said):
        card_image.write(card, tmp_path / "out.img", packed(tmp_path), DEVICE)
    assert not list(tmp_path.glob("*out.img*"))


@pytest.mark.slow
@NEEDS
@pytest.mark.parametrize("packing", ["img", "xz"])
def test_an_image_of_another_system_is_refused_by_a_rehearsal_too_and_before_the_token_is_requested(tmp_path, packing):
    card = with_system(tmp_path / "plain.img", None, "arm-linux-gnueabihf")
    source = tmp_path / f"card.{packing}"
    source.write_bytes(card.read_bytes() if packing == "img" else lzma.compress(card.read_bytes(), preset=0))
    (tmp_path / "scratch").mkdir()
    made, asked = packed(tmp_path), list[bool]()

    def last() -> device_package.Package:
        asked.append(True)
        return made

    with pytest.raises(FlashError, match=rf"card\.{packing}: is a 32-bit system"):
        card_image.examine(source, made, DEVICE.masked(), tmp_path / "scratch")
    with pytest.raises(FlashError, match="32-bit system"):
        card_image.write(source, tmp_path / "out.img", made, DEVICE, last=last)
    assert (asked, list((tmp_path / "scratch").iterdir())) == ([], [])


@NEEDS
def test_an_image_of_the_boards_system_is_accepted(tmp_path):
    card = with_system(tmp_path / "card.img", "/usr/bin/python3.13", "aarch64-linux-gnu")
    card_image.write(card, tmp_path / "out.img", packed(tmp_path), DEVICE)
    disks.check(tmp_path / "out.img")
