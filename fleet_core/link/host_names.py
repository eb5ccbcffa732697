"""Host names of this machine. The ``Host`` of an HTTP request must be one of them: a web page elsewhere could point its
own name at this machine (DNS rebinding)."""

from __future__ import annotations

import ipaddress
import socket
from collections.abc import Collection


def is_loopback(host: str) -> bool:
    """Whether ``host`` is this machine: a loopback address or ``localhost``."""
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return host == "localhost"


def of_this_machine(*more: str) -> tuple[str, ...]:
    """``more`` and the machine's own name, with and without ``.local``."""
    machine = socket.gethostname()
    return (*more, machine, f"{machine}.local")


def is_ours(host: str, names: Collection[str]) -> bool:
    """Whether ``host``, the header's value, is an IP address or one of ``names``, with or without a port.

    A web page elsewhere can point its own name at this machine, but it cannot redirect an address. names: lower case.
    """
    name, colon, port = host.rpartition(":")
    if not colon or not port.isdecimal() or host.endswith("]"):
        name = host
    name = name.lower().rstrip(".")
    if name in names:
        return True
    try:
        ipaddress.ip_address(name.strip("[]"))
    except ValueError:
        return False
    return True
