"""A note in the device's home that the agent has reached its broker; flashing reads it to see that the device is back.

``{"boot": …, "version": …}``; ``boot`` is new at each start, as in the presence. The note stays when the agent ends:
whether it runs is known to systemd.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from edge_agent.device.version import running
from fleet_core.base import storage
from fleet_core.base.errors import StateError

NAME = "online.json"


def write(home: Path, boot: str, log: Callable[[str], None]) -> None:
    """An error of the disk is logged and does not stop the agent."""
    note = json.dumps({"boot": boot, "version": running()})
    try:
        storage.write_atomic(home / NAME, note.encode(), durable=False)
    except StateError as error:
        log(f"a flash will not see that this device is on: {error}")
