"""``metafleet flash``: what is refused before a token is made, what a dry run shows, and what the image contains."""

from __future__ import annotations

import dataclasses
import io
import json
import os
import tomllib
import zipfile
from pathlib import Path
from typing import Any

import pytest

from cloud_server.devices import flash as flash_cli
from cloud_server.devices import prepare_flash
from cloud_server.identity import token_enrolment
from cloud_server.ledger.ledger import Ledger
from firmware_profiles.image import block_device, partition_files
from firmware_profiles.package import board_needs, program
from firmware_profiles.package.progress_line import Progress, span
from fleet_core.backbone import backbone_file
from fleet_core.base.errors import ConfigError, FlashError
from fleet_core.board import catalogue
from fleet_core.protocol import enrolment_token
from tests.support import backbones, disks, homes, wheels
from tests.support.disks import MIB
from tests.support.loopback_board import random_program
from tests.support.pki import lab_fleet

PASSWORD = "hunter2-and-more"
PROGRAMS = ("mcopy", "mkfs.vfat", "mke2fs", "debugfs", "sfdisk")
DEVICE = f"""name = "kitchen"
fleet = "lab"
board = "raspberry-pi-4b"
broker = "mqtts://broker.example"

[wifi]
ssid = "Home"
country = "DE"
password = "{PASSWORD}"

[data]
samples = "/srv/samples.npz"
"""


@pytest.fixture(scope="module")
def desk(tmp_path_factory):
    """A fleet with certificates, a device file and an image file in one folder."""
    folder = tmp_path_factory.mktemp("desk")
    lab_fleet(folder)
    (folder / "os.img").write_bytes(bytes(MIB))
    return folder


@pytest.fixture(scope="module")
def system(desk):
    """The image contains a system."""
    disks.card(desk / "os.img")


@pytest.fixture(autouse=True)
def built(tmp_path, monkeypatch):
    """A program in the cache."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for variable in ("METAFLEET_WIFI_PASSWORD", "METAFLEET_SSH_KEY", "METAFLEET_PROFILES"):
        monkeypatch.delenv(variable, raising=False)
    made = random_program(tmp_path, MIB)
    monkeypatch.setattr(program, "make", lambda *_, **__: made)
    return made


def device(desk: Path, text: str = DEVICE, name: str = "kitchen.toml") -> Path:
    path = desk / name
    path.write_text(text)
    return path


def flash(desk: Path, to: str, path: Path | None = None, **options) -> None:
    options = {"source": desk / "os.img", "yes_erase": None, "dry_run": False, "as_json": True, "rehearse": False,
               **options}
    flash_cli.flash(path or device(desk), to, **options)


def invitations(desk: Path) -> list[str]:
    """The fleet's tokens."""
    with Ledger(desk / "lab/ledger.sqlite", create=False) as ledger:
        return [key for key in ledger.requests() if key.startswith("invite/")]


def shown_of(facts: dict[str, Any]) -> list[dict[str, Any]]:
    """The files that are shown, without the text of PACKAGE, which has the time of its signature."""
    return [{key: value for key, value in file.items() if key != "content" or not file["path"].endswith("/PACKAGE")}
            for file in facts["files"]]


@pytest.mark.needs(*PROGRAMS)
@pytest.mark.usefixtures("system")
def test_a_flashed_image_holds_a_token_of_the_fleet_and_nothing_secret_is_printed(desk, tmp_path, capsys):
    out, before = tmp_path / "out.img", len(invitations(desk))
    flash(desk, f"image:{out}")
    (tmp_path / "kitchen.token").write_bytes(disks.on_fat(out, "metafleet/home/enrol.token"))
    issued = enrolment_token.load(tmp_path / "kitchen.token")
    assert (issued.device, issued.fleet, issued.broker) == ("kitchen", "lab", "mqtts://broker.example")
    assert len(invitations(desk)) == before + 1
    assert f"invite/{issued.id}" in invitations(desk)
    settings = disks.on_fat(out, "metafleet/etc/device.toml").decode()
    assert settings == '\n[data]\nsamples = "/srv/samples.npz"\n\n[board]\nprofile = "profile.toml"\n'
    assert disks.on_fat(out, "metafleet/etc/profile.toml") == catalogue.path_of("raspberry-pi-4b").read_bytes()
    printed = capsys.readouterr()
    facts = json.loads(printed.out)
    assert (facts["written"], facts["device"]) == (True, "kitchen")
    for secret in (PASSWORD, issued.private_key, issued.certificate):
        assert secret not in printed.out + printed.err


@pytest.mark.slow
@pytest.mark.needs(*PROGRAMS)
@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("as_json", [True, False])
def test_a_dry_run_shows_every_file_with_its_size_and_makes_no_token(desk, tmp_path, capsys, as_json):
    before = invitations(desk)
    flash(desk, f"image:{tmp_path / 'dry.img'}", dry_run=True, as_json=as_json)
    shown = capsys.readouterr().out
    assert invitations(desk) == before
    assert not list(tmp_path.glob("*.img"))
    assert PASSWORD not in shown
    flash(desk, f"image:{tmp_path / 'out.img'}")
    written = json.loads(capsys.readouterr().out)
    for file in written["files"]:
        assert len(disks.on_fat(tmp_path / "out.img", file["path"])) == file["size_bytes"], file["path"]
        assert file["path"] in shown
    if as_json:
        assert shown_of(json.loads(shown)) == shown_of(written)
    else:
        assert "samples = \"/srv/samples.npz\"" in shown
        assert "0.1.0-abc" in shown


@pytest.mark.needs(*PROGRAMS)
@pytest.mark.usefixtures("system")
def test_a_token_is_as_long_as_the_one_that_was_shown_whatever_its_signature(desk, tmp_path, capsys, monkeypatch):
    real, shorter = token_enrolment.make_token, iter(range(0, 40, 4))

    def uneven(*arguments):
        issued, invitation = real(*arguments)
        return dataclasses.replace(issued, certificate=issued.certificate[next(shorter) :]), invitation

    monkeypatch.setattr(token_enrolment, "make_token", uneven)
    flash(desk, f"image:{tmp_path / 'dry.img'}", dry_run=True)
    dry = json.loads(capsys.readouterr().out)
    flash(desk, f"image:{tmp_path / 'out.img'}")
    assert shown_of(json.loads(capsys.readouterr().out)) == shown_of(dry)
    sizes = {file["path"]: file["size_bytes"] for file in dry["files"]}
    assert len(disks.on_fat(tmp_path / "out.img", "metafleet/home/enrol.token")) == sizes["metafleet/home/enrol.token"]
    assert next(shorter) > 4


@pytest.mark.slow
@pytest.mark.needs(*PROGRAMS)
@pytest.mark.usefixtures("system")
def test_a_card_is_written_after_its_name_was_given_and_not_without(desk, tmp_path, capsys, monkeypatch):
    path = tmp_path / "sdx"
    path.write_bytes(b"\xaa" * (50 * MIB))
    monkeypatch.setattr("sys.stdin", io.StringIO("sdx\n"))
    before = invitations(desk)
    for rehearse, typed, said in ((True, None, "--yes-erase sdx"), (True, "sdy", "nothing was written"),
                                  (False, "sdx", "not a block device")):
        with pytest.raises(ConfigError, match=said):
            flash(desk, str(path), rehearse=rehearse, yes_erase=typed)
    assert set(path.read_bytes()) == {0xAA}
    small = tmp_path / "sdz"
    small.write_bytes(bytes(MIB))
    with pytest.raises(ConfigError, match="too small"):
        flash(desk, str(small), rehearse=True, yes_erase="sdz")
    assert invitations(desk) == before
    capsys.readouterr()
    killed = tmp_path / "cache/metafleet/card-killed"
    killed.mkdir(parents=True)
    (killed / "card.img").write_bytes(b"a token")
    os.utime(killed, (0, 0))
    flash(desk, str(path), rehearse=True, yes_erase="sdx")
    printed = capsys.readouterr()
    assert "a plain file in place of a card, 0.1 GB: everything on it will be erased" in printed.err
    done = json.loads(printed.out)["card"]
    assert done["bytes"] == (desk / "os.img").stat().st_size
    assert "metafleet/install.sh" in disks.names_on_fat(path)
    assert list((tmp_path / "cache").rglob("*.img")) == []
    disks.check(path)


def test_the_cards_name_is_typed_where_somebody_is_there(monkeypatch, capsys):
    class Keyboard(io.StringIO):
        def isatty(self):
            return True

    card = block_device.Card(Path("/dev/sdx"), "SD Reader", 15_931_539_456)
    monkeypatch.setattr("sys.stdin", Keyboard("sdy\nsdx\n"))
    with pytest.raises(ConfigError, match="nothing was written"):
        flash_cli.confirm(card, None)
    flash_cli.confirm(card, None)
    assert "/dev/sdx: SD Reader, 15.9 GB: everything on it will be erased" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (("mqtts://broker.example", "mqtts://localhost"), "on itself"),
        (("mqtts://broker.example", "mqtt://broker.example"), "mqtt"),
        (('"raspberry-pi-4b"', '"raspberry-pi-4"'), "did you mean 'raspberry-pi-4b'"),
        (('"raspberry-pi-4b"', '"jetson-orin-nano"'), "ssh://"),
        (("samples =", "sampels ="), "data.sampels: unknown key (did you mean 'samples'?)"),
        (('fleet = "lab"', 'fleet = "other"'), "there is no fleet here"),
        (('name = "kitchen"', 'name = "kitchen"\nos = "bookwurm"'), "did you mean 'bookworm'"),
    ],
)
def test_what_cannot_work_is_refused_before_a_token_is_made(desk, tmp_path, change, said):
    before = invitations(desk)
    with pytest.raises(ConfigError) as told:
        flash(desk, f"image:{tmp_path / 'out.img'}", device(desk, DEVICE.replace(*change), "wrong.toml"))
    assert said in str(told.value)
    assert invitations(desk) == before


def test_a_users_own_model_or_method_is_not_exported_without_its_package(desk, tmp_path):
    made = prepare_flash.prepare(device(desk))
    config = made.fleet.config
    model = dataclasses.replace(config, model=dataclasses.replace(config.model, name="my_lab:build"))
    method = dataclasses.replace(model, fleet=dataclasses.replace(config.fleet, method="ditto"))
    training, serving = dataclasses.replace(made.machine, torch="torch"), dataclasses.replace(made.machine, torch="")

    def checked(config: Any, machine: Any, described: Any = made.device) -> None:
        fleet = dataclasses.replace(made.fleet, config=config)
        prepare_flash._check_own_code(fleet, machine, described, tmp_path / "kitchen.toml")

    checked(config, training)
    checked(model, serving)
    with pytest.raises(ConfigError, match=r"model 'my_lab:build' would not be on the device(.|\n)*wheels = "):
        checked(model, training)
    with pytest.raises(ConfigError, match=r"model 'my_lab:build' and method 'ditto' would"):
        checked(method, training)
    with pytest.raises(ConfigError, match=r"the fleet's method 'ditto' would not"):
        checked(method, serving)
    wheel = wheels.wheel(tmp_path, "my_lab", "1.0")
    described = dataclasses.replace(made.device, wheels=(str(wheel),))
    checked(model, training, described)
    with pytest.raises(ConfigError, match=r"the fleet's method 'ditto' would not"):
        checked(method, training, described)
    with zipfile.ZipFile(wheel, "a") as archive:
        archive.writestr("my_lab-1.0.dist-info/entry_points.txt", "[metafleet.methods]\nditto = my_lab.ditto:DITTO\n")
    checked(method, training, described)
    with pytest.raises(ConfigError, match=r"the fleet's model 'my_lab:build' would not"):
        checked(model, training, dataclasses.replace(described, wheels=(str(wheels.wheel(tmp_path, "my", "1")),)))


def test_all_mistakes_of_a_device_file_are_reported_at_once_and_by_line(desk, tmp_path):
    text = DEVICE.replace('"kitchen"', '"kit chen"').replace('"lab"', '"lap"').replace("raspberry", "rasberry")
    text = text.replace("mqtts://", "https://").replace(PASSWORD, "short").replace('"DE"', '"Germany"')
    text = text.replace("samples =", "sampels =") + '\n[ssh]\nuser = "root"\nauthorized_keys = ["none.pub"]\n'
    with pytest.raises(ConfigError) as told:
        flash(desk, f"image:{tmp_path / 'out.img'}", device(desk, text, "wrong.toml"))
    lines = [line.rpartition("wrong.toml:")[2] for line in str(told.value).splitlines()]
    assert [line.split(": ")[:2] for line in lines] == [
        ["1", "name"], ["2", "fleet"], ["3", "board"], ["4", "broker"], ["8", "wifi.country"],
        ["12", "data.sampels"], ["15", "ssh.user"], ["16", "ssh.authorized_keys[0]"]]
    assert "expected 1 to 64 letters" in lines[0]
    assert "did you mean 'raspberry-pi-4b'" in lines[2]
    with pytest.raises(ConfigError, match=r"wrong\.toml:9: wifi\.password: expected 8 to 63"):
        flash(desk, "image:x", device(desk, text.replace("Germany", "DE"), "wrong.toml"))


@pytest.mark.needs(*PROGRAMS)
@pytest.mark.usefixtures("system")
@pytest.mark.parametrize("dry_run", [True, False])
def test_an_image_of_another_system_costs_no_token_and_a_dry_run_says_so_too(desk, tmp_path, dry_run):
    card = disks.card(tmp_path / "old.img", folders=("etc", "usr/lib/arm-linux-gnueabihf"))
    before = invitations(desk)
    with pytest.raises(FlashError, match="32-bit system"):
        flash(desk, f"image:{tmp_path / 'out.img'}", source=card, dry_run=dry_run)
    assert invitations(desk) == before
    assert not list(tmp_path.glob("*out.img*"))


def test_a_32_bit_board_is_refused_with_the_reason(desk, tmp_path):
    text = catalogue.path_of("raspberry-pi-4b").read_text().replace('"aarch64"', '"armv7l"')
    (desk / "old.toml").write_text(text)
    path = device(desk, DEVICE.replace('"raspberry-pi-4b"', '"old.toml"'), "narrow.toml")
    with pytest.raises(ConfigError, match=r"32-bit system, for which there is no torch"):
        flash(desk, f"image:{tmp_path / 'out.img'}", path)


def test_an_image_that_is_not_there_is_reported_before_anything_is_made(desk, tmp_path, monkeypatch):
    monkeypatch.setattr(program, "make", lambda *_, **__: pytest.fail("a program was made"))
    with pytest.raises(ConfigError, match=r"none\.img: there is no image here"):
        flash(desk, f"image:{tmp_path / 'out.img'}", source=tmp_path / "none.img")


def test_without_a_named_broker_the_device_is_given_the_fleets_own(desk):
    path = device(desk, DEVICE.replace('broker = "mqtts://broker.example"\n', ""), "own.toml")
    assert prepare_flash.prepare(path).broker == "mqtts://192.0.2.7:8883"


@pytest.mark.parametrize("to", ["sdb", "usb:/dev/sdb", ""])
def test_an_invalid_target_is_refused(desk, to):
    with pytest.raises(ConfigError, match="is not a target"):
        flash(desk, to)


# Boards and progress --------------------------------------------------------------------------------------------------


def test_every_board_that_boots_from_a_card_says_which_python_it_has():
    found = {}
    for name, profile in catalogue.all_of().items():
        for system in profile.images:
            if system.first_boot in ("cloud-init", "firstrun"):
                found[name, system.name] = board_needs.of(profile, system.name)
    assert {m.board for m in found.values()} >= {
        "raspberry-pi-5", "raspberry-pi-4b", "raspberry-pi-3b-plus", "raspberry-pi-zero-2-w"}
    assert {m.python for m in found.values()} == {"3.11", "3.12", "3.13"}
    old = {m.board: m.pins["torch"] == "2.9.1" for m in found.values()}
    assert old == {name: name != "raspberry-pi-5" for name in old}


def test_a_board_asks_for_what_its_sensor_needs_and_for_a_python_that_is_new_enough():
    five, nano = catalogue.load("raspberry-pi-5"), catalogue.load("jetson-nano")
    assert (board_needs.of(five).groups, board_needs.of(five).devices) == (("video",), ("/dev/vcio",))
    with pytest.raises(ConfigError, match=r"Python 3\.6"):
        program.check_python(board_needs.of(nano))
    small = board_needs.of(catalogue.load("raspberry-pi-zero-2-w"))
    assert (small.memory_max, board_needs.of(five).memory_max) == ("90%", "80%")
    assert board_needs.of(dataclasses.replace(five, memory_max="800M")).memory_max == "800M"
    assert board_needs.of(dataclasses.replace(five, memory_max=None, memory_mib=(1024,))).memory_max == "90%"


def test_torch_is_for_boards_that_train_with_memory_for_it_unless_the_device_file_names_an_engine():
    five, four, zero, nano, pc = (catalogue.load(name) for name in (
        "raspberry-pi-5", "raspberry-pi-4b", "raspberry-pi-zero-2-w", "jetson-nano", "x86-64"))
    of = board_needs.of
    assert (of(five).torch, of(four).torch, of(pc, python="3.13").torch) == (
        "torch>=2.9,<2.11", "torch>=2.9,<2.10", "torch>=2.9")
    assert (of(zero).torch, of(nano).torch, of(five, train=False).torch, of(five, engine="onnx").torch) == ("",) * 4
    assert of(zero, engine="torch").torch == "torch>=2.9,<2.10"
    assert of(zero, engine="torch", train=False).torch == ""
    sold = dataclasses.replace(zero, memory_mib=(512, 1024), isa=None)
    assert of(sold).torch == of(dataclasses.replace(zero, memory_mib=())).torch == "torch>=2.9,<2.10"


def test_progress_tells_share_speed_and_time_left():
    now, out = [0.0], io.StringIO()
    progress = Progress(out, lambda: now[0])
    for now[0] in range(0, 101):
        progress("writing", int(now[0]) * 1_000_000, 100_000_000)
    lines = out.getvalue().splitlines()
    assert lines[0] == "writing: 0 % of 100 MB"
    assert lines[4] == "writing: 40 % of 100 MB, 1.0 MB/s, 1 min 0 s left"
    assert lines[-1] == "writing: 100 % of 100 MB, 1.0 MB/s, 1 min 40 s"
    assert len(lines) == 11
    assert [span(s) for s in (0.4, 59, 3599, 3660)] == ["0 s", "59 s", "59 min 59 s", "1 h 1 min"]


def test_what_a_plan_does_not_hold_cannot_be_shown(desk):
    """The package in a dry run is made without the token."""
    made = prepare_flash.prepare(device(desk))
    packed = prepare_flash.package_of(made, program.make(made.machine, say=print), None)
    secret = next(file for file in packed.files if file.path == "home/enrol.token")
    assert set(secret.data) == {ord("*")}
    assert dataclasses.replace(secret).secret
    assert partition_files.ON_FAT == "metafleet/program.tar.gz"


def test_the_tables_of_sensors_and_privacy_reach_the_device(desk, tmp_path):
    made = prepare_flash.prepare(device(desk, DEVICE + homes.SENSORS))
    packed = prepare_flash.package_of(made, program.make(made.machine, say=print), None)
    text = next(file.data for file in packed.files if file.path == "etc/device.toml").decode()
    wanted = tomllib.loads(homes.SENSORS)
    assert {key: table for key, table in tomllib.loads(text).items() if key in wanted} == wanted


def test_the_login_at_a_broker_reaches_the_device_in_place_of_a_token(desk):
    (desk / "kitchen.password").write_text(f"{PASSWORD}\n")
    (desk / "kitchen.password").chmod(0o600)
    login = '[broker_login]\nusername = "kitchen"\npassword_file = "kitchen.password"\n'
    made, before = prepare_flash.prepare(device(desk, DEVICE + login)), invitations(desk)
    assert prepare_flash.invited(made) == b""
    assert invitations(desk) == before
    packed = prepare_flash.package_of(made, program.make(made.machine, say=print), b"")
    files = {file.path: file for file in packed.files}
    assert (files["home/broker.password"].data, files["home/broker.password"].mode) == (f"{PASSWORD}\n".encode(), 0o600)
    assert files["home/broker.password"].secret, "its content is never shown"
    assert "home/enrol.token" not in files
    assert [path for path, file in files.items() if PASSWORD.encode() in file.data] == ["home/broker.password"]
    tables = tomllib.loads(files["etc/device.toml"].data.decode())
    assert tables["broker_login"] == {"username": "kitchen", "password_file": "broker.password"}
    assert tables["device"]["broker"] == "mqtts://broker.example"
    assert tables["tls"] == {"ca": "ca.pem"}
    assert files["etc/ca.pem"].data == (desk / "lab/ca.pem").read_bytes()
    (desk / "kitchen.password").chmod(0o644)
    with pytest.raises(ConfigError, match="can be read by others"):
        prepare_flash.prepare(device(desk, DEVICE + login))


def test_mistakes_in_tables_of_sensors_are_reported_with_the_others(desk):
    wrong = homes.SENSORS.replace('"folder"', '"foldr"').replace("max_age_s = 60.0", "max_age = 1")
    with pytest.raises(ConfigError) as refused:
        prepare_flash.prepare(device(desk, DEVICE + wrong))
    assert "unlabelled.max_age: unknown key (did you mean 'max_age_s'?)" in str(refused.value)
    assert "source[1].kind: unknown value 'foldr'" in str(refused.value)
    nowhere = homes.SENSORS.replace('source = "pump"', 'source = "pum"')
    with pytest.raises(ConfigError, match="button 1: there is no source 'pum'"):
        prepare_flash.prepare(device(desk, DEVICE + nowhere))


def test_the_fleets_backbone_is_flashed_too(desk):
    found = backbone_file.described(backbones.write(desk / "lab" / backbone_file.NAME))
    made = prepare_flash.prepare(device(desk))
    model = dataclasses.replace(made.fleet.config.model, backbone=found)
    fleet = dataclasses.replace(made.fleet, config=dataclasses.replace(made.fleet.config, model=model))
    made = dataclasses.replace(made, fleet=fleet)
    packed = prepare_flash.package_of(made, program.make(made.machine, say=print), None)
    file = next(file for file in packed.files if file.path == f"home/backbone-{found.id}.safetensors")
    assert backbone_file.identity(file.data) == found.id
