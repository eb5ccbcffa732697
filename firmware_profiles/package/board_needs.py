"""What flashing asks of a board: plain values, which the command line takes out of the board's profile."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet_core.base import schema
from fleet_core.base.errors import ConfigError
from fleet_core.board.profile import Image, Profile

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


def of(profile: Profile, os: str | None = None, *, train: bool = True, python: str | None = None) -> Machine:
    """The machine of a board's profile.

    os: words of one of its systems' names, as ``bookworm``; None for the first. train: as the device file wishes; the
    profile may say that the board cannot. python: that was found on the device, in place of the profile's. Raises
    ConfigError for a system that the profile does not name.
    """
    image = _image(profile, os)
    python = python or image.python or profile.wheels.python
    if python is None:
        raise ConfigError(f"the profile does not say which Python '{image.name}' has", where=profile.name,
                          hint='add python = "3.13" to its [[images]]')
    sensor = profile.power.sensor
    return Machine(
        board=profile.name, arch=profile.arch, python=".".join(python.split(".")[:2]), glibc=profile.glibc or "2.28",
        first_boot=image.first_boot, os=image.name, pins=profile.wheels.pins, train=train and profile.can.train,
        memory_max=profile.memory_max or _share(profile),
        groups=("video",) if sensor == "pmic" else (), devices=("/dev/vcio",) if sensor == "pmic" else (),
    )


def _share(profile: Profile) -> str:
    """Of the memory, for the agent, where the profile does not say: a small board is for little else."""
    return "90%" if max(profile.memory_mib, default=2048) <= 1024 else "80%"


def _image(profile: Profile, os: str | None) -> Image:
    names = [image.name for image in profile.images]
    for image in profile.images:
        if os is None or all(word in image.name.lower() for word in os.lower().split()):
            return image
    words = {word.strip(",").lower() for name in names for word in name.split()}
    near = schema.suggest(os or "", words)
    meant = f" (did you mean '{near}'?)" if near else ""
    raise ConfigError(f"os: the profile has no system '{(os or 'at all')[:64]}'{meant}", where=profile.name,
                      expected=f"words of one of: {'; '.join(names) or 'none'}")
