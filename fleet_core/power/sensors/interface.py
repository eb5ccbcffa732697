"""The interface of power sensors, and the small text files under /sys that Linux provides for them."""

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
    """watts: the sum. rails: {label: watts} of the rails that were read, including those that are not in the sum."""

    watts: float
    rails: Mapping[str, float] = field(default_factory=dict)


class Sensor(Protocol):
    """A source of the present watts."""

    @property
    def name(self) -> str:
        """Short, and the same in all processes of a machine."""

    @property
    def source(self) -> str:
        """The chip, its rails, and how they are combined."""

    @property
    def misses(self) -> str:
        """The consumers that the sensor does not measure, or empty."""

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
        hint = f"as root: chmod a+r {path} (until the next boot), or give --meter-watts IDLE BUSY"
        raise PowerError("may not be read by this user", where=str(path), hint=hint) from error
    except OSError as error:
        raise PowerError(f"cannot be read: {error.strerror}", where=str(path)) from error


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
    """Like ``text_of``; None when the file does not exist."""
    return text_of(path) if path.exists() else None
