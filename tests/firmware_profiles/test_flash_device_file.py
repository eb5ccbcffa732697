"""DEVICE.toml is accepted whole, or refused with all mistakes at once; the Wi-Fi password is never shown."""

from __future__ import annotations

import base64
import hashlib
from pathlib import Path

import pytest

from firmware_profiles.package import device_file
from firmware_profiles.package.device_file import MASK, PASSWORD, SSH_KEY, DeviceFile, is_public_key, load
from fleet_core.base.errors import ConfigError
from fleet_core.base.schema import Problem
from tests.support import wheels

SECRET = "hunter2-and-more"


def public_key(kind: str = "ssh-ed25519") -> str:
    """A key as long as a real one: RSA with 4096 bits."""
    name, size = kind.encode(), 524 if kind == "ssh-rsa" else 36
    return f"{kind} {base64.b64encode(len(name).to_bytes(4, 'big') + name + bytes(size)).decode()} me@laptop"


WHOLE = f"""
name = "Kitchen_1"
fleet = "living-lab"
board = "raspberry-pi-4b"
broker = "mqtts://192.168.1.10"

[wifi]
ssid = "Café"
country = "DE"
password = "{SECRET}"

[ssh]
user = "me"
authorized_keys = ["id.pub", "{public_key('ssh-rsa')}"]

[data]
samples = "/srv/samples.npz"
"""


def read(folder: Path, text: str, environ: dict[str, str] | None = None) -> DeviceFile:
    (folder / "id.pub").write_text(f"# mine\n{public_key()}\n")
    path = folder / "kitchen.toml"
    path.write_text(text)
    return load(path, environ or {})


def test_a_key_derived_for_wpa2_is_refused_for_wpa3(tmp_path):
    text = WHOLE.replace(f'"{SECRET}"', f'"{"ab" * 32}"\nsecurity = "wpa3"')
    with pytest.raises(ConfigError, match=r"kitchen\.toml:10: wifi\.password: is a key derived for WPA2"):
        read(tmp_path, text)


def test_wheels_are_found_beside_the_file_and_all_their_problems_are_reported(tmp_path):
    index = tmp_path / "wheels"
    index.mkdir()
    mine = wheels.wheel(index, "my_lab", "1.0")
    wheels.wheel(index, "My.Lab", "1.1", "cp313-cp313-manylinux_2_28_aarch64")
    wheels.wheel(index, "metafleet", "9.9")
    torn = wheels.wheel(index, "torn", "1.0")
    torn.write_bytes(torn.read_bytes()[:-100])
    (index / "my_lab-1.0.tar.gz").touch()
    listed = 'wheels = ["wheels/my_lab-1.0-py3-none-any.whl"'
    text = WHOLE.replace("\n[wifi]", f"{listed}]\n\n[wifi]", 1)
    assert read(tmp_path, text).wheels == (str(mine),)
    assert read(tmp_path, WHOLE).wheels == ()
    names = ("My.Lab-1.1-cp313-cp313-manylinux_2_28_aarch64.whl", "metafleet-9.9-py3-none-any.whl",
             "torn-1.0-py3-none-any.whl", "my_lab-1.0.tar.gz", "gone-1.0-py3-none-any.whl")
    far = ("~nobody-of-that-name/x-1.0-py3-none-any.whl", f"{'x' * 3000}-1.0-py3-none-any.whl")
    wrong = text.replace(listed, ", ".join([listed, *(f'"wheels/{name}"' for name in names),
                                                 *(f'"{name}"' for name in far)]))
    with pytest.raises(ConfigError) as told:
        read(tmp_path, wrong.replace('"DE"', '"Germany"'))
    lines = [line.partition("kitchen.toml:")[2] for line in str(told.value).splitlines()]
    for number, (line, what) in enumerate(zip(lines, (
        "is the same package as wheels[0]", "is the agent, which is always installed", "is not a valid wheel",
        "is not a wheel (python -m build makes one", "there is no file '",
        "there is no file '", "there is no file '",
    ), strict=False), 1):
        assert line.startswith(f"6: wheels[{number}]: "), line
        assert what in line
    assert "wifi.country" in lines[7]


def test_a_whole_file_is_read_with_its_keys_and_tables(tmp_path):
    device = read(tmp_path, WHOLE)
    assert device.host == "kitchen-1"
    assert device.ssh is not None
    assert device.ssh.authorized_keys == (public_key(), public_key("ssh-rsa"))
    assert device.tables == {"data": {"samples": "/srv/samples.npz"}}


def test_the_password_is_in_no_text_of_the_object_and_masked_where_it_is_shown(tmp_path):
    device = read(tmp_path, WHOLE)
    assert device.wifi is not None
    assert SECRET not in repr(device) + str(device) + f"{device.wifi}"
    masked = device.masked().wifi
    assert masked is not None
    assert (masked.password, masked.key) == (MASK, "*" * 64)


def test_what_is_written_is_the_derived_key_of_ieee_802_11i(tmp_path):
    device = read(tmp_path, WHOLE.replace("Café", "IEEE").replace(SECRET, "password"))
    assert device.wifi is not None
    assert device.wifi.key == "f42c6fc52df0ebef9ebb4b90b38a5f902e83fe1b135a70e23aed762e9710a12e"  # annex H.4.1
    derived = hashlib.pbkdf2_hmac("sha1", b"a password", "Café".encode(), 4096, 32).hex()
    spoken = read(tmp_path, WHOLE, {PASSWORD: "a password"}).wifi
    assert spoken is not None
    assert spoken.key == derived


def test_a_key_of_the_environment_replaces_the_files_and_is_masked_too(tmp_path):
    text = WHOLE.replace('authorized_keys = ["id.pub",', '# ["id.pub",')
    for spoken in (public_key("ssh-rsa"), "id.pub"):
        device = read(tmp_path, text, {SSH_KEY: spoken})
        assert device.ssh is not None
        assert device.ssh.authorized_keys == ((spoken,) if " " in spoken else (public_key(),))
        masked = device.masked().ssh
        assert masked is not None
        assert device.ssh.authorized_keys[0].split()[1] not in masked.authorized_keys[0]
        assert len(masked.authorized_keys[0]) == len(device.ssh.authorized_keys[0])
    with pytest.raises(ConfigError, match=f"is empty, and {SSH_KEY} is not set"):
        read(tmp_path, text)


def test_all_mistakes_are_reported_at_once_with_line_and_suggestion(tmp_path):
    text = WHOLE.replace("broker =", "brokr =").replace('"DE"', '"Germany"').replace('user = "me"', "user = 7")
    with pytest.raises(ConfigError) as told:
        read(tmp_path, text)
    lines = str(told.value).splitlines()
    assert [line.rpartition("kitchen.toml:")[2].split(": ")[0] for line in lines] == ["5", "9", "13"]
    assert "did you mean 'broker'" in lines[0]
    assert SECRET not in str(told.value)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ((SECRET, "short"), "wifi.password: expected 8 to 63"),
        ((SECRET, "x" * 65), "wifi.password: 65 characters"),
        (('ssid = "Café"', 'ssid = "\\n"'), "wifi.ssid: expected 1 to 32 bytes"),
        (('ssid = "Café"', f'ssid = "{"é" * 17}"'), "wifi.ssid: expected 1 to 32 bytes"),
        (('"id.pub"', '"none.pub"'), "authorized_keys[0]: is neither a public key"),
        (('user = "me"', 'user = "root"'), "'root' is a system user"),
        (('name = "Kitchen_1"', 'name = "Kitchen 1"'), "name: 'Kitchen 1' does not match"),
        ((f'password = "{SECRET}"\n', ""), f"wifi.password: missing, and {PASSWORD} is not set"),
    ],
)
def test_a_mistake_is_refused_and_named(tmp_path, change, said):
    with pytest.raises(ConfigError) as told:
        read(tmp_path, WHOLE.replace(*change))
    assert said in str(told.value)
    assert "short" not in str(told.value)


def test_a_private_key_is_no_key_to_log_in_with(tmp_path):
    lines = ("-----BEGIN OPENSSH PRIVATE KEY-----", "b3BlbnNzaC1r", "-----END OPENSSH PRIVATE KEY-----")
    (tmp_path / "id").write_text("\n".join(lines))
    with pytest.raises(ConfigError, match="is neither a public key") as told:
        read(tmp_path, WHOLE.replace("id.pub", "id"))
    assert "b3Blbn" not in str(told.value)


@pytest.mark.parametrize(
    "text", ["ssh-ed25519 AAAA", "ssh-ed25519 !!!!", f"{public_key()}\n", f'command="x" {public_key()}',
             public_key("ssh-rsa").replace("ssh-rsa", "ssh-ed25519", 1), "ssh-dss " + public_key().split()[1]]
)
def test_a_malformed_line_of_authorized_keys_is_refused(text):
    assert not is_public_key(text)


def test_mistakes_in_the_tables_for_the_device_are_reported_with_the_others(tmp_path):
    path = tmp_path / "kitchen.toml"
    path.write_text('name = "a b"\nfleet = "f"\nboard = "b"\n\n[data]\nsample = 1\n')

    def check(tables):
        assert (tables["board"], tables["data"]) == ("b", {"sample": 1})
        return [Problem("data.sample", "unknown key", "samples")]

    with pytest.raises(ConfigError) as told:
        device_file.load(path, {}, check)
    assert "kitchen.toml:1: name" in str(told.value)
    assert "kitchen.toml:6: data.sample: unknown key (did you mean 'samples'?)" in str(told.value)
