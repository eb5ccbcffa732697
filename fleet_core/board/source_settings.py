"""The tables ``[[source]]`` and ``[[button]]`` of device.toml: sensors whose readings become samples, and buttons that
label them. docs/sources.md """

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, TypeVar

from fleet_core.base.errors import ConfigError

NAME = r"[A-Za-z0-9_-]{0,64}"
WORDS: Mapping[str, Any] = MappingProxyType({"max_length": 64})
PATH: Mapping[str, Any] = MappingProxyType({"max_length": 4096})


@dataclass(frozen=True, kw_only=True)
class Source:
    """The settings of every kind.

    name: the name in listings; if left out, the kind. stride: readings between the starts of two windows; if left out,
    that of ``[data]``, or the fleet's. rate_hz: readings a second of the sensor, which are resampled to to_hz, or to
    the fleet's rate if to_hz is left out. gain, offset: calibration, value * gain + offset, with one number for each
    channel or one for all. every_s: seconds in which at most one sample without a label is kept; 0: all are kept.
    """

    kind: str
    name: str = field(default="", metadata={"pattern": NAME})
    stride: int | None = field(default=None, metadata={"min": 1, "max": 1_000_000})
    rate_hz: float = field(default=0.0, metadata={"min": 0, "max": 1_000_000})
    to_hz: float = field(default=0.0, metadata={"min": 0, "max": 1_000_000})
    gain: tuple[float, ...] = field(default=(), metadata={"max_length": 256})
    offset: tuple[float, ...] = field(default=(), metadata={"max_length": 256})
    every_s: float = field(default=0.5, metadata={"min": 0, "max": 86_400})


@dataclass(frozen=True, kw_only=True)
class Lines(Source):
    """Readings in lines of text: CSV, with or without a header, or JSON. columns: names of the columns that are
    channels, in the fleet's order; without a header, the names of all cells. ``label`` and ``time`` are not
    channels."""

    columns: tuple[str, ...] = field(default=(), metadata=WORDS)


@dataclass(frozen=True, kw_only=True)
class CommandSource(Lines):
    """command: a program and its arguments, run in the device's folder; it prints readings."""

    command: tuple[str, ...] = field(metadata=PATH)


@dataclass(frozen=True, kw_only=True)
class SerialSource(Lines):
    """port: as ``/dev/ttyACM0``. baud: bits a second."""

    port: str = field(metadata=PATH)
    baud: int = 115_200


@dataclass(frozen=True, kw_only=True)
class Mqtt:
    """broker: the broker's URL; if left out, that of the fleet's broker. plain: mqtt:// may go to another machine.
    username, password_file: the login at that broker; the file is relative to the device's folder."""

    topic: str = field(metadata={"max_length": 1024})
    broker: str = ""
    plain: bool = False
    username: str | None = None
    password_file: str | None = None


@dataclass(frozen=True, kw_only=True)
class MqttSource(Mqtt, Lines):
    """topic: a filter; each message on it is a reading."""


@dataclass(frozen=True, kw_only=True)
class FolderSource(Source):
    """path: a folder, relative to the device's; each file that appears there is taken once. A file in a subfolder gets
    the subfolder's name as its label."""

    path: str = field(metadata=PATH)
    every_s: float = field(default=0.0, metadata={"min": 0, "max": 86_400})


@dataclass(frozen=True, kw_only=True)
class MicrophoneSource(Source):
    """device: ALSA's name of the microphone (``arecord -L``). rate_hz: the rate at which it is recorded. channels:
    number of channels, which are averaged. file: a .wav file to read in place of the microphone."""

    device: str = "default"
    rate_hz: float = field(default=16_000.0, metadata={"min": 1000, "max": 192_000})
    channels: int = field(default=1, metadata={"min": 1, "max": 64})
    file: str | None = None


@dataclass(frozen=True, kw_only=True)
class CameraSource(Source):
    """by: ``rpicam`` (libcamera's programs, with Pillow) or ``opencv``; ``auto``: the program that is installed.
    camera: the camera's number. width, height: the size at which images are taken, before they are resized to the
    fleet's size; if left out, 640 by 480, or the fleet's size if it takes no other. every_s: seconds from one image to
    the next."""

    by: str = field(default="auto", metadata={"choices": ("auto", "rpicam", "opencv")})
    camera: int = field(default=0, metadata={"min": 0, "max": 255})
    width: int | None = field(default=None, metadata={"min": 16, "max": 16_384})
    height: int | None = field(default=None, metadata={"min": 16, "max": 16_384})
    every_s: float = field(default=1.0, metadata={"min": 0.05, "max": 86_400})


@dataclass(frozen=True, kw_only=True)
class IioSource(Source):
    """device: its folder's name (``iio:device0``) or the sensor's name in it. channels: as ``accel_x``, in the fleet's
    order. rate_hz: how often they are read."""

    device: str = field(metadata={"max_length": 256})
    channels: tuple[str, ...] = field(metadata=WORDS)
    rate_hz: float = field(metadata={"above": 0, "max": 1000})
    folder: str = field(default="/sys/bus/iio/devices", metadata=PATH)


SOURCES: Mapping[str, type[Source]] = MappingProxyType({
    "camera": CameraSource, "command": CommandSource, "folder": FolderSource, "iio": IioSource,
    "microphone": MicrophoneSource, "mqtt": MqttSource, "serial": SerialSource,
})


@dataclass(frozen=True, kw_only=True)
class Button:
    """Labels the last sample of a source. source: the source's name; if left out, the source that gave a sample last.
    label: the class."""

    kind: str
    source: str = field(default="", metadata={"pattern": NAME})
    label: str = field(default="", metadata=WORDS)


@dataclass(frozen=True, kw_only=True)
class GpioButton(Button):
    """line: number of the line on the chip. falling: whether the line is low while the button is pressed."""

    label: str = field(metadata=WORDS)
    line: int = field(metadata={"min": 0, "max": 4096})
    chip: str = field(default="gpiochip0", metadata={"pattern": r"[A-Za-z0-9_./-]{1,128}"})
    falling: bool = True


@dataclass(frozen=True, kw_only=True)
class MqttButton(Mqtt, Button):
    """topic: a filter; a message on it labels. Without a label, the message is the label."""


BUTTONS: Mapping[str, type[Button]] = MappingProxyType({"gpio": GpioButton, "mqtt": MqttButton})

S = TypeVar("S", bound=Source)


def names_of(sources: Sequence[Source]) -> list[str]:
    """The name of each source: its own, or its kind, with a number if it is not the first of that name. Raises
    ConfigError for a name that two sources have."""
    names: list[str] = []
    for source in sources:
        if source.name and source.name in names:
            raise ConfigError(f"two sources have the name '{source.name}'", expected="a name of its own for each")
        name, number = source.name or source.kind, 1
        while name in names:
            number += 1
            name = f"{source.kind}-{number}"
        names.append(name)
    return names


def check(sources: Sequence[Source], buttons: Sequence[Button], where: str) -> None:
    """Raises ConfigError for missing or repeated names of sources, and for empty commands."""
    try:
        names = names_of(sources)
    except ConfigError as error:
        raise ConfigError(error.what, where=where, expected=error.expected) from None
    wrong = [f"button {number}: there is no source '{one.source}'" for number, one in enumerate(buttons, 1)
             if one.source and one.source not in names]
    wrong += [f"source {name}: its {what} is empty" for name, one in zip(names, sources, strict=True)
              for what in ("command", "channels") if getattr(one, what, None) == ()]
    if wrong:
        raise ConfigError("\n".join(wrong), where=where, expected=f"sources: {', '.join(names) or 'none'}")
