"""The embedded broker as a process of its own: ``python -m cloud_server.amqtt_main HOST PORT``.

amqtt's own defaults listen on every interface; here it listens on the one loopback address that it is given, where
anyone may connect. It speaks MQTT 3.1.1, keeps nothing on disk, and is meant for a first try with a few agents.
"""

from __future__ import annotations

import asyncio
import logging
import sys

from amqtt.broker import Broker


async def serve(host: str, port: int) -> None:
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
