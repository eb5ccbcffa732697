"""The files for a device's TLS connection to its broker, or none where plain MQTT is allowed."""

from __future__ import annotations

from pathlib import Path
from typing import TypedDict

from fleet_core.board.device_settings import Settings
from fleet_core.link.mqtt import check_plain, parse_url


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
