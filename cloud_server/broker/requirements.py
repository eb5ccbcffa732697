"""Checks that a broker meets a fleet's requirements, and explains what to change if it does not."""

from __future__ import annotations

from cloud_server.records.fleet_folder import Fleet
from fleet_core.base.errors import ConfigError
from fleet_core.link.mqtt_connection import NO_RETAINED

PACKET_OVERHEAD_BYTES = 256  # topic and MQTT header of a chunk
NOT_RETAINED = "Retain not supported"


def check_packets(fleet: Fleet, limit_bytes: int | None) -> None:
    """Raises ConfigError if the fleet's chunks exceed the broker's maximum packet size. None: no limit."""
    chunk = fleet.config.link.chunk_bytes
    if limit_bytes is None or chunk + PACKET_OVERHEAD_BYTES <= limit_bytes:
        return
    most = limit_bytes - PACKET_OVERHEAD_BYTES
    raise ConfigError(
        f"link.chunk_bytes is {chunk}, and this broker takes packets of {limit_bytes} bytes at most",
        where=str(fleet.folder / "fleet.toml"), expected=f"at most {most}",
        hint=f"write chunk_bytes = {most} under [link], or raise the broker's limit (mosquitto: max_packet_size)",
    )


def explained(reason: str) -> str:
    """The reason for a disconnect, with advice if the broker does not support retained messages."""
    if NOT_RETAINED in reason or NO_RETAINED in reason:
        return f"{reason}: a fleet needs a broker with retained messages (mosquitto: retain_available true)"
    return reason
