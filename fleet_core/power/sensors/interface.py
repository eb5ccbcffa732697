"""What a power sensor is: watts now, in all and by rail. And the small text files in which Linux tells of them."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

from fleet_core.base.errors import PowerError

MAX_BYTES = 128


@dataclass(frozen=True)
class Reading:
    """watts: at the input of what the sensor measures. rails: {label: watts} of what it reads, whether in the sum or
    not."""

    watts: float
    rails: Mapping[str, float] = field(default_factory=dict)


class Sensor(Protocol):
    """Watts at this moment."""

    @property
    def name(self) -> str:
        """Short, alike in all processes of a machine."""

    @property
    def source(self) -> str:
        """The chip, its rails, and what is done with them."""

    @property
    def misses(self) -> str:
        """What it does not see, or empty."""

    def read(self) -> Reading:
        """Raises PowerError."""


def text_of(path: Path) -> str:
    """A file of /sys, stripped. Raises PowerError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            return os.read(descriptor, MAX_BYTES).decode("ascii", "replace").strip()
        finally:
            os.close(descriptor)
    except PermissionError as error:
        raise PowerError("may not be read by this user", where=str(path), hint=f"as root: chmod a+r {path}") from error
    except OSError as error:
        raise PowerError(f"does not read: {error.strerror}", where=str(path)) from error


def number_of(path: Path) -> int:
    """A file of /sys that holds one whole number. Raises PowerError."""
    text = text_of(path)
    try:
        if len(text) > 20:
            raise ValueError
        return int(text)
    except ValueError as error:
        raise PowerError(f"reads '{text[:40]}'", where=str(path), expected="a whole number") from error


def optional_text(path: Path) -> str | None:
    """The same as ``text_of``; None where the file is not there."""
    return text_of(path) if path.exists() else None
