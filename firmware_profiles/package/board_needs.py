"""What flashing needs to know of a board, as plain values from the board's profile."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field

from fleet_core.base import schema
from fleet_core.base.errors import ConfigError
from fleet_core.board.limits import TORCH_FROM_MIB
from fleet_core.board.profile import LEAST_ISA, TORCH_BELOW, Image, Profile

UV_GLIBC_MINORS = (17, 28, *range(31, 41))
"""The minor versions of glibc 2 that uv has a platform for."""

FIRST_BOOT = ("cloud-init", "firstrun", "ssh")


@dataclass(frozen=True)
class Machine:
    """One board with one operating system.

    Args:
        board: the profile's name.
        arch: as ``uname -m`` prints it: aarch64 or x86_64.
        python: the system's Python, as ``3.13``, for which wheels are picked.
        glibc: the newest glibc that the wheels may need, as ``2.28``.
        first_boot: what sets up the system at its first start: cloud-init, firstrun, or ssh for nothing on the card.
        os: the system's name, for people.
        pins: exact versions by package.
        torch: the requirement for torch, as ``torch>=2.9``; empty if it is not included.
        memory_max: MemoryMax of the agent's unit.
        groups: groups that the agent joins, if they exist, for the board's power sensor.
        devices: device files that the agent needs.
    """

    board: str
    arch: str
    python: str
    glibc: str = "2.28"
    first_boot: str = "cloud-init"
    os: str = ""
    pins: Mapping[str, str] = field(default_factory=dict)
    torch: str = ""
    memory_max: str = "80%"
    groups: tuple[str, ...] = ()
    devices: tuple[str, ...] = ()

    @property
    def platform(self) -> str:
        """uv's platform for this system, with the newest glibc that uv knows and the system has."""
        major, minor = (int(part) for part in self.glibc.split(".")[:2])
        known = max((m for m in UV_GLIBC_MINORS if (2, m) <= (major, minor)), default=17)
        return f"{self.arch}-manylinux_2_{known}"

    @property
    def is_raspberry_pi(self) -> bool:
        """Whether the kernel reads cmdline.txt from the first partition."""
        return re.match(r"raspberry-pi", self.board) is not None


def of(
    profile: Profile, os: str | None = None, *, train: bool = True, engine: str = "auto", python: str | None = None
) -> Machine:
    """The machine of a board's profile.

    os: words of the name of one of its systems, as ``bookworm``; None for the first. train, engine: of ``[train]`` in
    the device file. python: found on the device, replaces the profile's. Raises ConfigError for a system that the
    profile does not name.
    """
    image = _image(profile, os)
    python = python or image.python or profile.wheels.python
    if python is None:
        raise ConfigError(f"the profile does not say which Python '{image.name}' has", where=profile.name,
                          hint='add python = "3.13" to its [[images]]')
    sensor = profile.power.sensor
    return Machine(
        board=profile.name, arch=profile.arch, python=".".join(python.split(".")[:2]), glibc=profile.glibc or "2.28",
        first_boot=image.first_boot, os=image.name, pins=profile.wheels.pins,
        torch=_torch(profile) if train and _takes_torch(profile, engine) else "",
        memory_max=profile.memory_max or _memory_share(profile),
        groups=("video",) if sensor == "pmic" else (), devices=("/dev/vcio",) if sensor == "pmic" else (),
    )


def _takes_torch(profile: Profile, engine: str) -> bool:
    """Whether torch is for this board: not if it cannot train, nor by default if every variant has too little memory
    for anything beside it."""
    if not profile.can.train or engine == "onnx":
        return False
    return engine == "torch" or max(profile.memory_mib, default=TORCH_FROM_MIB) >= TORCH_FROM_MIB


def _torch(profile: Profile) -> str:
    """The versions for the board's processor, within which the profile may pin one."""
    below = TORCH_BELOW.get(profile.isa or LEAST_ISA, "") if profile.arch == "aarch64" else ""
    return f"torch>=2.9{below and f',<{below}'}"


def _memory_share(profile: Profile) -> str:
    """The agent's share of the memory by default; larger on a small board, which does little else."""
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
