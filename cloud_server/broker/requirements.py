"""What a fleet needs of its broker, and what to do about one that does not give it."""

from __future__ import annotations

from cloud_server.records.fleet_folder import Fleet
from fleet_core.base.errors import ConfigError
from fleet_core.link.mqtt_connection import NO_RETAINED

PACKET_ROOM_BYTES = 256  # for the topic and MQTT's own, beside a chunk
NOT_RETAINED = "Retain not supported"


def check_packets(fleet: Fleet, limit_bytes: int | None) -> None:
    """Raises ConfigError when the fleet's chunks do not pass a broker that takes packets of ``limit_bytes``."""
    chunk = fleet.config.link.chunk_bytes
    if limit_bytes is None or chunk + PACKET_ROOM_BYTES <= limit_bytes:
        return
    most = limit_bytes - PACKET_ROOM_BYTES
    raise ConfigError(
        f"link.chunk_bytes is {chunk}, and this broker takes packets of {limit_bytes} bytes at most",
        where=str(fleet.folder / "fleet.toml"), expected=f"at most {most}",
        hint=f"write chunk_bytes = {most} under [link], or raise the broker's limit (mosquitto: max_packet_size)",
    )


def explained(reason: str) -> str:
    """Why a connection ended, and what to do where the broker's words do not say it."""
    if NOT_RETAINED in reason or NO_RETAINED in reason:
        return f"{reason}: a fleet needs a broker with retained messages (mosquitto: retain_available true)"
    return reason
