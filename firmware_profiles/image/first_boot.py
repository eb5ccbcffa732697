"""The files on the first partition that set up a fresh system at its first start, without a screen.

``cloud-init`` (Raspberry Pi OS from Trixie on, Ubuntu): user-data, network-config and meta-data, NoCloud. ``firstrun``
(Raspberry Pi OS Bookworm): firstrun.sh, named in cmdline.txt. Both set the host name, the user who may log in and the
Wi-Fi, and install a service. At every start until it succeeds, the service installs the package from the first
partition; then it erases the token and the Wi-Fi key there.

For WPA2 only the key that is derived from the Wi-Fi password is written; WPA3 needs the password itself.
"""

from __future__ import annotations

import base64
import re
from pathlib import Path
from typing import Any

from firmware_profiles.package.board_needs import Machine
from firmware_profiles.package.device_file import DeviceFile, Wifi
from firmware_profiles.package.device_package import File
from fleet_core.base.errors import ConfigError, FlashError

JOB = "/usr/local/sbin/metafleet-first-boot"
SERVICE = "metafleet-first-boot.service"
HERE = Path(__file__).parent
ED25519_DER = bytes.fromhex("302a300506032b6570032100")
"""The bytes before the 32 bytes of a public key."""
MAX_CMDLINE_BYTES = 4096
GROUPS = ("adm", "dialout", "audio", "video", "plugdev", "netdev", "gpio", "i2c", "spi", "sudo")
MEMORY_CGROUP = "cgroup_enable=memory"
"""Raspberry Pi kernels have the memory controller off, and a unit's MemoryMax then has no effect."""
OURS = ("systemd.run", "systemd.unit=kernel-command-line.target", "cfg80211.ieee80211_regdom=")
FIRSTRUN = "systemd.run=/boot/firmware/firstrun.sh systemd.run_success_action=reboot " \
           "systemd.unit=kernel-command-line.target"

UNIT = f"""[Unit]
Description=Metafleet, installs what was flashed
After=local-fs.target
RequiresMountsFor=/boot

[Service]
Type=oneshot
ExecStart={JOB}
TimeoutStartSec=1800

[Install]
WantedBy=multi-user.target
"""


def files(
    machine: Machine, device: DeviceFile, *, serial: str, key: str, instance: str, cmdline: str | None
) -> tuple[File, ...]:
    """The files besides the package.

    serial: of the partition's file system. key: the fleet's public key, 64 hex digits. instance: cloud-init runs again
    if it changes. cmdline: the present content of cmdline.txt, or None. Raises FlashError for a system without a first
    boot, and for a malformed cmdline.txt.
    """
    kernel = [File("cmdline.txt", _cmdline(machine, device, cmdline).encode())] if cmdline is not None else []
    if machine.first_boot == "cloud-init":
        return (*_cloud_init(device, _job(serial, key), instance), *kernel)
    if machine.first_boot == "firstrun":
        if cmdline is None:
            raise FlashError("there is no cmdline.txt on the first partition to name firstrun.sh",
                             expected=machine.os or "Raspberry Pi OS")
        script = _firstrun(device, _job(serial, key)).encode()
        return (File("firstrun.sh", script, 0o755, device.wifi is not None), *kernel)
    raise FlashError(f"{machine.os or machine.board} takes no first boot from a card", hint="--to ssh://USER@HOST")


def _cmdline(machine: Machine, device: DeviceFile, before: str) -> str:
    """The kernel's command line with the missing words; unchanged if it has them all."""
    line = before.strip()
    if not line or "\n" in line or len(before) > MAX_CMDLINE_BYTES:
        raise FlashError("cmdline.txt is not one line", hint="fetch the image again")
    words = [word for word in line.split(" ") if word and not word.startswith(OURS)]
    if machine.is_raspberry_pi and MEMORY_CGROUP not in words:
        words.append(MEMORY_CGROUP)
    if device.wifi is not None:
        words.append(f"cfg80211.ieee80211_regdom={device.wifi.country}")
    if machine.first_boot == "firstrun":
        words += FIRSTRUN.split(" ")  # must come last: firstrun.sh cuts the line here
    return " ".join(words) + "\n"


def _job(serial: str, key: str) -> str:
    if not re.fullmatch(r"[0-9A-F]{4}-[0-9A-F]{4}", serial):
        raise FlashError(f"'{serial}' is not a serial number of a FAT file system")
    text = (HERE / "first_boot.sh").read_text(encoding="utf-8")
    return text.replace("@SERIAL@", serial).replace("@KEY@", _pem(key))


def _pem(key: str) -> str:
    """An Ed25519 public key as OpenSSL reads it (RFC 8410)."""
    encoded = base64.b64encode(ED25519_DER + bytes.fromhex(key)).decode()
    return f"-----BEGIN PUBLIC KEY-----\n{encoded}\n-----END PUBLIC KEY-----"


# cloud-init -----------------------------------------------------------------------------------------------------------


def _cloud_init(device: DeviceFile, job: str, instance: str) -> list[File]:
    user_data = "#cloud-config\n" + yaml_text(_user_data(device, job))
    meta_data = yaml_text({"instance-id": instance, "local-hostname": device.host, "dsmode": "local"})
    files = [File("user-data", user_data.encode()), File("meta-data", meta_data.encode())]
    if device.wifi is not None:
        files.append(File("network-config", yaml_text(_network(device.wifi)).encode(), secret=True))
    return files


def yaml_text(value: Any) -> str:
    """Block YAML of plain values. Values that are texts are double-quoted, so that none is read as another type, or
    literal blocks if they have several lines. Raises ConfigError if PyYAML is not installed."""
    try:
        import yaml  # in the extra ``flash``; a device does not have it
    except ModuleNotFoundError as error:
        raise ConfigError("PyYAML, which writes cloud-init's files, is not installed",
                          hint='pip install "metafleet[flash]"') from error

    # PyYAML has no types: to mypy its class is Any, unless types-PyYAML happens to be installed.
    class Dumper(yaml.SafeDumper):  # type: ignore[misc, unused-ignore]
        def represent_mapping(self, tag: str, mapping: Any, flow_style: bool | None = None) -> Any:
            node = super().represent_mapping(tag, mapping, flow_style)
            for key, _ in node.value:
                key.style = None  # quoted only where that is needed
            return node

    def quoted(dumper: Any, text: str) -> Any:
        return dumper.represent_scalar("tag:yaml.org,2002:str", text, style="|" if "\n" in text else '"')

    Dumper.add_representer(str, quoted)
    return str(yaml.dump(value, Dumper=Dumper, sort_keys=False, width=float("inf")))


def _user_data(device: DeviceFile, job: str) -> dict[str, Any]:
    """https://docs.cloud-init.io, modules set_hostname, users_groups, write_files, runcmd."""
    data: dict[str, Any] = {"hostname": device.host, "manage_etc_hosts": True, "ssh_pwauth": False}
    commands = ["systemctl daemon-reload", f"systemctl enable {SERVICE}", f"systemctl start --no-block {SERVICE}"]
    if device.ssh is not None:
        data["users"] = [{
            "name": device.ssh.user, "shell": "/bin/bash", "lock_passwd": True, "groups": ", ".join(GROUPS),
            "sudo": "ALL=(ALL) NOPASSWD:ALL", "ssh_authorized_keys": list(device.ssh.authorized_keys),
        }]
        commands.append("systemctl enable --now ssh || true")
    if device.wifi is not None:
        commands.insert(0, "rfkill unblock wifi || true")
    data["write_files"] = [
        {"path": JOB, "permissions": "0755", "content": job},
        {"path": f"/etc/systemd/system/{SERVICE}", "permissions": "0644", "content": UNIT},
    ]
    data["runcmd"] = [["sh", "-c", command] for command in commands]
    return data


def _network(wifi: Wifi) -> dict[str, Any]:
    """Wi-Fi, and Ethernet by DHCP. https://docs.cloud-init.io, network configuration version 2."""
    access_point: dict[str, Any] = {"password": wifi.key}
    if wifi.security == "wpa3":
        access_point = {"auth": {"key-management": "sae", "password": wifi.key}}
    if wifi.hidden:
        access_point["hidden"] = True
    return {
        "version": 2,
        "ethernets": {"eth0": {"dhcp4": True, "dhcp6": True, "optional": True}},
        "wifis": {"wlan0": {"dhcp4": True, "dhcp6": True, "optional": True, "regulatory-domain": wifi.country,
                            "access-points": {wifi.ssid: access_point}}},
    }


# firstrun.sh ----------------------------------------------------------------------------------------------------------


def _firstrun(device: DeviceFile, job: str) -> str:
    steps = [f"echo {device.host} >/etc/hostname",
             rf"sed -i 's|^127\.0\.1\.1.*|127.0.1.1\t{device.host}|' /etc/hosts"]
    if device.ssh is not None:
        steps += _user(device.ssh.user, device.ssh.authorized_keys)
    if device.wifi is not None:
        steps += [
            _put("/etc/NetworkManager/system-connections/metafleet.nmconnection", "0600", _connection(device.wifi)),
            "rfkill unblock wifi",
            'for state in /var/lib/systemd/rfkill/*:wlan; do [ ! -f "$state" ] || echo 0 >"$state"; done',
        ]
    steps += [_put(JOB, "0755", job), _put(f"/etc/systemd/system/{SERVICE}", "0644", UNIT),
              f"systemctl enable {SERVICE}"]
    return (HERE / "firstrun.sh").read_text(encoding="utf-8").replace("@STEPS@", "\n".join(steps))


def _put(path: str, mode: str, content: str) -> str:
    return f"put {path} {mode} <<'END-OF-FILE'\n{content}END-OF-FILE"


def _user(name: str, keys: tuple[str, ...]) -> list[str]:
    home = f"/home/{name}"
    groups = " ".join(GROUPS)
    return [
        f"id {name} >/dev/null 2>&1 || useradd --create-home --shell /bin/bash {name}",
        f'for group in {groups}; do if getent group "$group" >/dev/null; then usermod -a -G "$group" {name}; fi; done',
        f"mkdir -p {home}/.ssh",
        _put(f"{home}/.ssh/authorized_keys", "0600", "\n".join(keys) + "\n"),
        f"chmod 0700 {home}/.ssh",
        f"chown -R {name}:{name} {home}/.ssh",
        _put(f"/etc/sudoers.d/010_{name}", "0440", f"{name} ALL=(ALL) NOPASSWD:ALL\n"),
        _put("/etc/ssh/sshd_config.d/metafleet.conf", "0644", "PasswordAuthentication no\n"),
        "systemctl enable ssh",
        "systemctl disable userconfig 2>/dev/null",
    ]


def _connection(wifi: Wifi) -> str:
    """nm-settings-keyfile(5); the SSID as numbers, which need no escapes."""
    ssid = "".join(f"{byte};" for byte in wifi.ssid.encode())
    kind = "sae" if wifi.security == "wpa3" else "wpa-psk"
    key = wifi.key.replace("\\", "\\\\").replace(" ", "\\s")
    return "\n".join([
        "[connection]", "id=metafleet", "type=wifi", "",
        "[wifi]", "mode=infrastructure", f"ssid={ssid}", *(["hidden=true"] if wifi.hidden else []), "",
        "[wifi-security]", f"key-mgmt={kind}", f"psk={key}", "",
        "[ipv4]", "method=auto", "", "[ipv6]", "method=auto", "",
    ])
