"""The agent on a device: takes part in rounds, personalizes the model and answers; the data stays where it is.

``Device`` is a device in Python (docs/python-device.md); it is imported when first used.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from edge_agent.inference.device_api import Device as Device


def __getattr__(name: str) -> Any:
    if name == "Device":
        from edge_agent.inference.device_api import Device

        return Device
    raise AttributeError(f"module 'edge_agent' has no attribute '{name}'")
