"""What flashing asks of a board: plain values, which the command line takes out of the board's profile."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

UV_KNOWS = (17, 28, *range(31, 41))
FIRST_BOOT = ("cloud-init", "firstrun", "ssh")


@dataclass(frozen=True)
class Machine:
    """One board with one operating system.

    Args:
        board: the profile's name.
        arch: as ``uname -m`` says: aarch64 or x86_64.
        python: the system's Python, as ``3.13``; what the wheels are for.
        glibc: the oldest that the wheels may need, as ``2.28``.
        first_boot: how the system is told what to do: cloud-init, firstrun, or ssh for none on the card.
        os: the system, for people.
        pins: exact versions by package.
        train: whether torch comes along.
        memory_max: of the agent's unit, as systemd spells it.
        groups: that the agent needs for the board's power sensor, where they exist.
        devices: that it needs under /dev.
    """

    board: str
    arch: str
    python: str
    glibc: str = "2.28"
    first_boot: str = "cloud-init"
    os: str = ""
    pins: Mapping[str, str] = field(default_factory=dict)
    train: bool = False
    memory_max: str = "80%"
    groups: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def platform(self) -> str:
        """As uv names it: the tags of the wheels that this system takes; uv knows not every glibc."""
        major, minor = (int(part) for part in self.glibc.split(".")[:2])
        known = max((m for m in UV_KNOWS if (2, m) <= (major, minor)), default=17)
        return f"{self.arch}-manylinux_2_{known}"

    @property
    def is_raspberry_pi(self) -> bool:
        """Whether its kernel reads cmdline.txt from the first partition."""
        return re.match(r"raspberry-pi", self.board) is not None
