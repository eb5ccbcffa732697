"""How a device logs in at its broker, or at another one that device.toml names: TLS files, name and password."""

from __future__ import annotations

import secrets
from pathlib import Path
from typing import TypedDict

from fleet_core.board.device_settings import Settings
from fleet_core.board.source_settings import Mqtt
from fleet_core.link.broker_password import BrokerLogin, login_of
from fleet_core.link.mqtt import MAX_INCOMING_BYTES, MqttLink, check_plain, parse_url


class TlsFiles(TypedDict, total=False):
    """Arguments of ``MqttLink``."""

    ca: Path
    cert: Path
    key: Path


def has_certificate(settings: Settings) -> bool:
    """Whether device.toml names a certificate and key of this device, whichever connection it uses."""
    return settings.tls.certificate is not None and settings.tls.key is not None


def tls_files(home: Path, settings: Settings, *, plain: bool = False) -> TlsFiles:
    """The TLS files for the device's broker; none for mqtt://. Raises ConfigError if plain MQTT would leave this
    machine and neither ``plain`` nor device.toml allows it."""
    check_plain(settings.device.broker, plain or settings.device.plain)
    files: TlsFiles = {}
    if not parse_url(settings.device.broker).tls:
        return files
    if settings.tls.ca is not None:
        files["ca"] = home / settings.tls.ca
    if settings.tls.certificate is not None:
        files["cert"] = home / settings.tls.certificate
    if settings.tls.key is not None:
        files["key"] = home / settings.tls.key
    return files


def link_to(about: Mqtt, home: Path, settings: Settings, max_incoming_bytes: int = MAX_INCOMING_BYTES) -> MqttLink:
    """A further connection, not opened: to the broker of ``about``, or without one to the fleet's, there with the
    device's own certificate and login unless ``about`` has a login. Raises ConfigError."""
    device, own = settings.device, not about.broker
    files: TlsFiles = tls_files(home, settings) if own else {}
    if not own:
        check_plain(about.broker, about.plain)
    named = BrokerLogin(about.username, about.password_file)
    login = login_of(home, settings.broker_login if own and named == BrokerLogin() else named)
    return MqttLink(
        about.broker or device.broker, client_id=f"{device.fleet}-{device.name}-{secrets.token_hex(4)}",
        max_incoming_bytes=max_incoming_bytes, **files, **login,
    )
