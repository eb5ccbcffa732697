"""The embedded broker as a process: ``python -m cloud_server.broker.embedded HOST PORT``.

By default amqtt listens on every interface; here it listens only on the given loopback address, where anyone may
connect. It speaks MQTT 3.1.1, stores nothing on disk, and is meant for a first try with a few agents.
"""

from __future__ import annotations

import asyncio
import logging
import sys
from typing import Any

from amqtt.broker import Broker
from amqtt.mqtt.connect import ConnectPacket, ConnectPayload
from amqtt.mqtt.protocol.broker_handler import BrokerProtocolHandler

HEADER_BYTES = 10  # of a CONNECT packet before its payload
MQTT_3_1_1 = 4
FORWARDED_CHECK_S = 0.01


class TolerantPayload:
    """amqtt 0.12.1 parses an MQTT 5 CONNECT as if it were 3.1.1, and waits for bytes that never come.

    This class skips the payload of such a packet, so that amqtt answers *unacceptable protocol version*.
    """

    @classmethod
    async def from_stream(cls, reader: Any, fixed_header: Any, variable_header: Any) -> Any:
        if variable_header.proto_level == MQTT_3_1_1:
            return await ConnectPayload.from_stream(reader, fixed_header, variable_header)
        await reader.read(fixed_header.remaining_length - HEADER_BYTES)
        return ConnectPayload(client_id="refused", will_topic="refused", will_message=b"")


_wait_disconnect = BrokerProtocolHandler.wait_disconnect


async def wait_disconnect(handler: Any) -> Any:
    """amqtt 0.12.1 acknowledges a publish before it forwards it, and drops what it has not forwarded when the publisher
    disconnects. From Python 3.12 on that is most of a burst: ``asyncio.wait_for`` lets nothing else run in between.

    Here a disconnect waits until everything that was acknowledged is forwarded.
    """
    acknowledged = handler.session.delivered_message_queue
    packet = await _wait_disconnect(handler)
    while not acknowledged.empty():
        await asyncio.sleep(FORWARDED_CHECK_S)
    return packet


async def serve(host: str, port: int) -> None:
    ConnectPacket.PAYLOAD = TolerantPayload
    BrokerProtocolHandler.wait_disconnect = wait_disconnect
    broker = Broker(
        {
            "listeners": {"default": {"type": "tcp", "bind": f"{host}:{port}"}},
            "plugins": {"amqtt.plugins.authentication.AnonymousAuthPlugin": {"allow_anonymous": True}},
        }
    )
    await broker.start()
    await asyncio.Event().wait()


if __name__ == "__main__":
    logging.basicConfig(level=logging.WARNING)
    asyncio.run(serve(sys.argv[1], int(sys.argv[2])))
