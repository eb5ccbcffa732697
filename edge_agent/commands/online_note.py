"""A note in the device's home that its agent has reached its broker: by it a flash sees that the device is back.

``{"boot": …, "version": …}``; ``boot`` is another one at each start, as in the presence. The note stays when the agent
ends: whether it still runs is the system's to say.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path

from edge_agent.device.version import running
from fleet_core.base import storage
from fleet_core.base.errors import StateError

NAME = "online.json"


def tell(home: Path, boot: str, log: Callable[[str], None]) -> None:
    """A disk that does not take it is said, and does not keep the agent from its work."""
    note = json.dumps({"boot": boot, "version": running()})
    try:
        storage.write_atomic(home / NAME, note.encode(), durable=False)
    except StateError as error:
        log(f"a flash will not see that this device is on: {error}")
