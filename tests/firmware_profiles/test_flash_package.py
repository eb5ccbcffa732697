"""What a board gets: the program with its wheels, the unit, the package, and the installer."""

from __future__ import annotations

import configparser
import gzip
import hashlib
import json
import os
import re
import subprocess
import sys
import tarfile
import zipfile
from dataclasses import replace
from pathlib import Path
from typing import Any, cast

import pytest
from cyclonedx.model.bom import Bom

from edge_agent.device import signed_program
from firmware_profiles.package import agent_wheel, device_package, program, sbom, systemd_unit
from firmware_profiles.package.board_needs import Machine
from fleet_core import __version__
from fleet_core.base.errors import ConfigError, FlashError, StateError
from fleet_core.protocol import program_statement
from fleet_core.protocol.signing import Signer, Verifier
from tests.support import wheels
from tests.support.loopback_board import SIGNING

PI = Machine("raspberry-pi-4b", "aarch64", "3.13", pins={"torch": "2.9.1", "onnxruntime": "1.23.2"}, groups=("video",))
TOKEN = b"one-time-7d3f"
PAUSE = device_package.INSTALL.with_name("pause.sh")


@pytest.fixture(scope="module")
def index(tmp_path_factory):
    return wheels.wheel_folder(tmp_path_factory.mktemp("wheels") / "index")


@pytest.fixture(scope="module", autouse=True)
def _modules_as_they_are_now():
    """Freeze the modules: an edit of the source during the tests would make another program."""
    files = list(agent_wheel._modules())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(agent_wheel, "_modules", lambda: files)
        yield


@pytest.fixture(scope="module")
def cache(tmp_path_factory):
    return tmp_path_factory.mktemp("cache")


@pytest.fixture(scope="module")
def made(cache, index):
    return program.make(PI, cache=cache, say=lambda line: None, index=index)


def content(made, name: str) -> str:
    with tarfile.open(made.path) as archive:
        file = archive.extractfile(f"{made.version}/{name}")
        assert file is not None
        return file.read().decode()


@pytest.mark.slow
def test_the_program_holds_the_agent_and_the_boards_own_pinned_wheels(made):
    assert 'TAG = "cp313-cp313-manylinux_2_28_aarch64"' in content(made, "lib/onnxruntime/__init__.py")
    assert 'VERSION = "1.23.2"' in content(made, "lib/onnxruntime/__init__.py")
    with tarfile.open(made.path) as archive:
        names = set(archive.getnames())
        assert {entry.uid for entry in archive} == {0}
    assert f"{made.version}/lib/edge_agent/commands/cli.py" in names
    assert f"{made.version}/lib/fleet_core/py.typed" in names
    assert "direct_url.json" not in content(made, f"lib/metafleet-{__version__}.dist-info/RECORD")
    assert not [name for name in names if "/torch/" in name or "cloud_server" in name or "direct_url" in name]
    assert {part.name for part in made.parts} >= {"metafleet", "onnxruntime", "numpy"}
    assert made.sha256 == hashlib.sha256(made.path.read_bytes()).hexdigest()


def test_it_says_what_the_agent_was_built_from_and_its_licences(made):
    assert made.built_from == agent_wheel._source()
    assert ("onnxruntime", "1.23.2", "MIT", "0.0") in program.listing(made)
    result = json.loads(content(made, "manifest.json"))
    assert (result["version"], result["python"]) == (made.version, "3.13")
    assert "built_from" not in result, "a path of this machine"


def test_it_has_a_bill_of_materials_with_every_distribution(tmp_path, cache, index, made):
    bom = cast("Any", Bom).from_json(json.loads(content(made, sbom.FILE)))
    assert {(one.name, one.version) for one in bom.components} == {(part.name, part.version) for part in made.parts}
    assert {one.name for one in bom.components if one.purl is None} == {"metafleet"}
    runtime = next(one for one in bom.components if one.name == "onnxruntime")
    assert str(runtime.purl) == "pkg:pypi/onnxruntime@1.23.2"
    assert [one.id for one in runtime.licenses] == ["MIT"]
    assert json.loads(program.bill_of(made.path)) == json.loads(content(made, sbom.FILE))
    mine = program.make(PI, [wheels.wheel(tmp_path, "my_lab", "1.0")], cache=cache, say=lambda line: None, index=index)
    assert {one["name"] for one in json.loads(program.bill_of(mine.path))["components"] if "purl" not in one} == {
        "metafleet", "my_lab"}


def test_the_same_wheels_give_the_same_bytes_whoever_builds_where_and_when(tmp_path, index, made, monkeypatch):
    elsewhere = tmp_path / "another folder"
    elsewhere.mkdir()
    monkeypatch.chdir(elsewhere)
    monkeypatch.setenv("TZ", "Asia/Tokyo")
    monkeypatch.setenv("LANG", "C")
    monkeypatch.setenv("TMPDIR", str(elsewhere))
    monkeypatch.setattr(agent_wheel, "_source", lambda: "the source in another folder")
    before = os.umask(0o077)
    try:
        again = program.make(PI, cache=elsewhere / "cache", say=lambda line: None, index=index)
    finally:
        os.umask(before)
    assert again.built_from != made.built_from
    assert again.path.read_bytes() == made.path.read_bytes()
    assert str(tmp_path).encode() not in gzip.decompress(made.path.read_bytes())


def test_torch_is_included_only_if_the_board_trains_and_as_pinned(cache, index, made):
    training = program.make(replace(PI, torch="torch>=2.9,<2.10"), cache=cache, say=lambda line: None, index=index)
    assert ("torch", "2.9.1") in {(part.name, part.version) for part in training.parts}
    assert training.version != made.version


@pytest.mark.slow
@pytest.mark.parametrize(("python", "arch"), [("3.11", "aarch64"), ("3.10", "aarch64"), ("3.13", "x86_64")])
def test_every_board_gets_the_wheels_of_its_own_python_and_processor(cache, index, python, arch):
    machine = replace(PI, python=python, arch=arch)
    found = program.make(machine, cache=cache, say=lambda line: None, index=index)
    tag = f"cp{python.replace('.', '')}"
    assert f'"{tag}-{tag}-manylinux_2_28_{arch}"' in content(found, "lib/onnxruntime/__init__.py")
    assert ("tomli" in {part.name for part in found.parts}) == (python == "3.10")


def left_out() -> set[str]:
    lines = program.LEFT_OUT.read_text().splitlines()
    return {line.partition(";")[0] for line in lines if not line.startswith("#")}


@pytest.mark.slow
def test_what_nothing_on_a_device_imports_is_left_out_unless_torch_or_a_wheel_of_the_user_may_need_it(
    tmp_path, cache, index, made
):
    assert left_out() == {*wheels.WITH_ONNXRUNTIME, "pycparser"}
    assert left_out().isdisjoint({part.name for part in made.parts})
    mine = wheels.wheel(tmp_path, "my_lab", "1.0")
    for machine, own in ((replace(PI, torch="torch>=2.9,<2.10"), []), (PI, [mine])):
        found = program.make(machine, own, cache=cache, say=lambda line: None, index=index)
        assert left_out() <= {part.name for part in found.parts}


def test_a_cached_program_is_not_made_again_and_needs_no_index(cache, made, index, monkeypatch):
    monkeypatch.setattr(program, "_unpack", lambda *_: pytest.fail("made again"))
    assert program.make(PI, cache=cache, say=lambda line: None, index=index) == made


@pytest.mark.slow
def test_a_wheel_of_the_user_is_added_with_its_dependencies_and_makes_another_program(tmp_path, cache, index, made):
    wheels.wheel(Path(index[2]), "einops", "0.8.0")
    mine = wheels.wheel(tmp_path, "my_lab", "1.0", requires=("einops",))
    found = program.make(PI, [mine], cache=cache, say=lambda line: None, index=index)
    assert {part.name for part in found.parts} - {part.name for part in made.parts} - left_out() == {"my_lab", "einops"}
    assert 'VERSION = "1.0"' in content(found, "lib/my_lab/__init__.py")
    with tarfile.open(found.path) as archive:
        assert not [name for name in archive.getnames() if "direct_url" in name]
    assert str(tmp_path) not in content(found, "lib/my_lab-1.0.dist-info/RECORD")
    with zipfile.ZipFile(mine, "a") as archive:
        archive.writestr("my_lab/more.py", "")
    again = program.make(PI, [mine], cache=cache, say=lambda line: None, index=index)
    assert len({made.version, found.version, again.version}) == 3


@pytest.mark.slow
def test_a_program_that_is_damaged_in_the_cache_is_made_again_with_the_same_bytes(tmp_path, index, made):
    first = program.make(PI, cache=tmp_path, say=lambda line: None, index=index)
    assert first.path.read_bytes() == made.path.read_bytes()
    first.path.write_bytes(first.path.read_bytes()[:-1])
    again = program.make(PI, cache=tmp_path, say=lambda line: None, index=index)
    assert again.path.read_bytes() == made.path.read_bytes()
    assert not list(tmp_path.glob(".making-*"))


def test_wheels_that_cannot_be_found_are_named(tmp_path, index):
    machine = replace(PI, pins={"onnxruntime": "9.9"})
    with pytest.raises(FlashError, match=r"onnxruntime==9.9"):
        program.make(machine, cache=tmp_path, say=lambda line: None, index=index)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


def test_a_python_that_is_too_old_for_the_agent_is_refused():
    with pytest.raises(ConfigError, match=r"Python 3\.6; expected 3\.10"):
        program.check_python(replace(PI, python="3.6"))


def test_an_old_glibc_gets_the_newest_wheels_that_uv_knows_for_it():
    platforms = {glibc: replace(PI, glibc=glibc).platform for glibc in ("2.17", "2.27", "2.28", "2.36", "2.99")}
    assert platforms == {
        "2.17": "aarch64-manylinux_2_17", "2.27": "aarch64-manylinux_2_17", "2.28": "aarch64-manylinux_2_28",
        "2.36": "aarch64-manylinux_2_36", "2.99": "aarch64-manylinux_2_40",
    }


# The unit -------------------------------------------------------------------------------------------------------------


def test_the_unit_confines_the_agent_and_restarts_it():
    parser: Any = configparser.ConfigParser(strict=False, interpolation=None)
    parser.optionxform = str
    parser.read_string(systemd_unit.text(replace(PI, memory_max="400M", devices=("/dev/vcio",))))
    service = parser["Service"]
    wanted = {
        "User": "metafleet", "NoNewPrivileges": "yes", "ProtectSystem": "strict", "Restart": "always",
        "Type": "notify", "MemoryMax": "400M", "DeviceAllow": "/dev/vcio rw", "CapabilityBoundingSet": "",
        "RestartPreventExitStatus": "77",
    }
    assert {key: service[key] for key in wanted} == wanted
    assert int(service["WatchdogSec"]) > 0
    assert not [key for key in service if key.startswith("RestartS") and key != "RestartSec"]  # of systemd 254
    assert service["SystemCallFilter"].startswith("~"), "an older systemd leaves unknown groups out of what is allowed"
    assert service["ExecStartPre"] == "-/opt/metafleet/current/bin/pause before"


@pytest.mark.needs("systemd-analyze")
def test_systemd_reads_the_unit_without_a_complaint(tmp_path):
    path = tmp_path / systemd_unit.NAME
    path.write_text(re.sub(r"/opt/metafleet/current/bin/\S+", "/bin/true", systemd_unit.text(PI)))
    done = subprocess.run(["systemd-analyze", "verify", "--man=no", str(path)], capture_output=True, text=True)
    assert [line for line in done.stderr.splitlines() if systemd_unit.NAME in line] == []


def pause_at(folder: Path, seconds: int) -> str:
    """The pause before a start at an uptime of ``seconds``."""
    (folder / "uptime").write_text(f"{seconds}.25 17.0\n")
    (folder / "slept").write_text("")
    (folder / "sleep").write_text(f'#!/bin/sh\necho "$1" >{folder}/slept\n')
    (folder / "sleep").chmod(0o755)
    environ = {"PATH": f"{folder}:{os.environ['PATH']}", "METAFLEET_UPTIME": str(folder / "uptime")}
    done = subprocess.run(["/bin/sh", str(PAUSE), "before", str(folder / "starts")], env=environ, capture_output=True,
                          text=True)
    assert (done.returncode, done.stderr) == (0, "")
    return (folder / "slept").read_text().strip()


def test_pauses_between_starts_grow_and_a_long_run_resets_them(tmp_path):
    """Five seconds of each pause are the unit's RestartSec."""
    assert [pause_at(tmp_path, 20 + n) for n in range(9)] == ["", "", "5", "15", "35", "75", "155", "295", "295"]
    assert pause_at(tmp_path, 28 + 599) == "295"
    assert [pause_at(tmp_path, 1227), pause_at(tmp_path, 1300), pause_at(tmp_path, 1400)] == ["", "", "5"]
    (tmp_path / "starts").write_text("no number\n")
    assert pause_at(tmp_path, 1401) == ""


def test_an_intended_end_resets_the_pauses_and_a_crash_does_not(tmp_path):
    starts = tmp_path / "starts"
    for result, there in (("watchdog", True), ("success", False), ("success", False)):
        if there:
            starts.write_text("3 17\n")
        command = ["/bin/sh", str(PAUSE), "stopped", str(starts)]
        done = subprocess.run(command, env={**os.environ, "SERVICE_RESULT": result})
        assert (done.returncode, starts.exists()) == (0, there)


@pytest.mark.parametrize("change", [{"memory_max": "80%\nUser=root"}, {"devices": ("/dev/x rw\nUser=root",)}])
def test_a_profile_cannot_write_other_lines_into_the_unit(change):
    with pytest.raises(ConfigError):
        systemd_unit.text(replace(PI, **change))


# The package and its installation -------------------------------------------------------------------------------------


@pytest.fixture
def packed(made, tmp_path):
    home = {"device.toml": b'[device]\nname = "kitchen"\n', "ca.pem": b"PEM", "token": TOKEN}
    return device_package.save(device_package.make("kitchen", PI, made, home, signing=SIGNING), tmp_path / "card")


def install(folder: Path, root: Path) -> subprocess.CompletedProcess[str]:
    environ = {**os.environ, "METAFLEET_ROOT": str(root)}
    return subprocess.run(["/bin/sh", str(folder / "install.sh")], env=environ, capture_output=True, text=True)


@pytest.mark.needs("tar", "gzip")
def test_installing_puts_everything_in_its_place_and_erases_the_token(packed, made, tmp_path):
    root = tmp_path / "root"
    done = install(packed, root)
    assert (done.returncode, done.stderr) == (0, "")
    home = root / "var/lib/metafleet"
    assert os.readlink(root / "opt/metafleet/current") == made.version
    assert (root / "opt/metafleet" / made.version / "lib/edge_agent/commands/cli.py").is_file()
    assert (root / "etc/metafleet/device.toml").read_text() == '[device]\nname = "kitchen"\n'
    assert os.readlink(home / "device.toml") == "/etc/metafleet/device.toml"
    assert (home / "token").read_bytes() == TOKEN
    assert (home / "token").stat().st_mode & 0o777 == 0o600
    assert (root / "etc/systemd/system/metafleet.service").read_text() == systemd_unit.text(PI)
    assert not (packed / "home/token").exists()


@pytest.mark.needs("tar", "gzip")
def test_what_was_installed_can_be_checked_against_the_fleets_signature(packed, made, tmp_path):
    root = tmp_path / "root"
    assert install(packed, root).returncode == 0
    folder, verifier = root / "opt/metafleet/current", Verifier(SIGNING.signer.public)
    statement = signed_program.check_installed(folder, verifier)
    assert (statement.version, statement.archive, statement.fleet) == (made.version, made.sha256, "lab")
    assert set(statement.files) >= {"install.sh", "metafleet.service", "etc/fleet.pub", "etc/device.toml"}
    assert not [name for name in statement.files if name.startswith("home/")]
    assert (root / "etc/metafleet/fleet.pub").read_text().strip() == SIGNING.signer.public
    (folder / "lib/edge_agent/commands/cli.py").write_text("import evil")
    with pytest.raises(FlashError, match=r"lib/edge_agent/commands/cli\.py differ"):
        signed_program.check_installed(folder, verifier)
    with pytest.raises(FlashError, match="is signed by key"):
        signed_program.check_installed(folder, Verifier(Signer(bytes(32)).public))
    (folder / program_statement.FILE).unlink()
    with pytest.raises(StateError, match="cannot be read"):
        signed_program.check_installed(folder, verifier)


@pytest.mark.needs("tar", "gzip")
def test_an_installation_that_was_cut_off_is_finished_by_the_next(packed, made, tmp_path):
    root = tmp_path / "root"
    torn = root / "opt/metafleet/.new" / made.version
    torn.mkdir(parents=True)
    (torn / "manifest.json").write_text("{")
    whole = (packed / "program.tar.gz").read_bytes()
    (packed / "program.tar.gz").unlink()
    (packed / "program.tar.gz").write_bytes(whole[:1000])
    cut = install(packed, root)
    assert cut.returncode == 1
    assert "damaged" in cut.stderr
    assert not (root / "opt/metafleet/current").exists()
    assert (packed / "home/token").exists()
    (packed / "program.tar.gz").write_bytes(whole)
    for _ in range(2):
        assert install(packed, root).returncode == 0
    assert json.loads((root / "opt/metafleet/current/manifest.json").read_text())["version"] == made.version
    assert not (root / "opt/metafleet/.new").exists()


def test_what_was_installed_starts_the_agent_without_pip(made, tmp_path):
    """The program's own start, with this machine's wheels, because the board's are for another processor."""
    with tarfile.open(made.path) as archive:
        archive.extractall(tmp_path, filter="data")
    lib = tmp_path / made.version / "lib"
    for path in lib.iterdir():
        if path.name.partition("-")[0] not in ("edge_agent", "fleet_core", "metafleet"):
            path.rename(tmp_path / path.name)
    site = next(path for path in sys.path if path.endswith("site-packages"))
    start = tmp_path / made.version / "bin/edge-agent"
    text = start.read_text().replace('/lib"', f'/lib:{site}"').replace("exec python3", f"exec {sys.executable} -S")
    start.write_text(text)
    done = subprocess.run([str(start), "--version"], capture_output=True, text=True, cwd=tmp_path)
    assert (done.stdout.strip(), done.stderr) == (__version__, "")


def test_a_package_shows_no_secret_and_takes_plain_names_only(made):
    shown = repr(device_package.make("kitchen", PI, made, {"token": TOKEN, "device.toml": b""}, signing=SIGNING))
    assert TOKEN.decode() not in shown
    with pytest.raises(ConfigError, match="not a plain file name"):
        device_package.make("kitchen", PI, made, {"../token": TOKEN}, signing=SIGNING)


def test_the_installer_is_plain_posix_shell():
    shell = "/bin/dash" if os.path.exists("/bin/dash") else "/bin/sh"
    for script in (device_package.INSTALL, PAUSE):
        done = subprocess.run([shell, "-n", str(script)], capture_output=True, text=True)
        assert (done.returncode, done.stderr) == (0, "")
