"""Power meters of Linux's hwmon: INA219, INA226 and any other that reports watts, or volts and amperes.

``/sys/class/hwmon/hwmon*/``: ``power*_input`` in µW, ``in*_input`` in mV, ``curr*_input`` in mA (the kernel's
Documentation/hwmon/sysfs-interface). The numbers of hwmon devices and channels change from boot to boot, so meters are
found by ``name`` and label. Channels that are labelled NC (not connected) or disabled are ignored.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from fleet_core.base import schema
from fleet_core.base.errors import PowerError
from fleet_core.power.sensors.interface import Reading, number_of, optional_text

FOLDER = "sys/class/hwmon"
NOT_CONNECTED = "NC"


@dataclass(frozen=True)
class Channel:
    """One rail. inputs: a file in µW or mW, or two in mV and mA."""

    label: str
    inputs: tuple[Path, ...]
    watts_per_unit: float

    def watts(self) -> float:
        """Raises PowerError."""
        product = 1
        for path in self.inputs:
            product *= number_of(path)
        return max(0.0, product * self.watts_per_unit)


@dataclass(frozen=True)
class Rails:
    """A Sensor: the sum of some channels of one chip. others: read by ``read_all`` only."""

    chip: str
    counted: tuple[Channel, ...]
    others: tuple[Channel, ...] = ()
    misses: str = ""

    @property
    def name(self) -> str:
        return re.sub(r"[^A-Za-z0-9]+", "-", f"{self.chip}-{'-'.join(c.label for c in self.counted)}")[:80]

    @property
    def source(self) -> str:
        return f"{self.chip} {' + '.join(c.label for c in self.counted if c.label != self.chip)}".rstrip()

    def read(self) -> Reading:
        """Reads the counted rails only, because each further rail costs as much time."""
        rails = {channel.label: channel.watts() for channel in self.counted}
        return Reading(sum(rails.values()), rails)

    def read_all(self) -> Reading:
        """Also reads the rails that are not counted."""
        reading = self.read()
        return Reading(reading.watts, {**reading.rails, **{c.label: c.watts() for c in self.others}})


def find_meter(chip: str, rails: Sequence[str], root: Path, misses: str = "") -> Rails:
    """The meter whose ``name`` is ``chip``. rails: labels to sum; may be empty when it has one channel.

    Raises PowerError that lists the candidates when there is no such meter or rail, or more than one.
    """
    folders = [folder for folder in _folders(root) if optional_text(folder / "name") == chip]
    if not folders:
        names = sorted({name for folder in _folders(root) if (name := optional_text(folder / "name"))})
        raise PowerError(f"no meter is called '{chip[:64]}'{schema.did_you_mean(chip, names)}",
                         where=str(root / FOLDER), expected=f"one of {', '.join(names) or 'none: there is no meter'}")
    channels = [channel for folder in folders for channel in channels_of(folder)]
    return select_channels(chip, channels, rails, str(root / FOLDER), misses)


def select_channels(
    chip: str, channels: Sequence[Channel], rails: Sequence[str], where: str, misses: str = ""
) -> Rails:
    """The channels with the labels ``rails``, or the only channel when there are none. Raises PowerError."""
    labels = [channel.label for channel in channels]
    if not rails:
        if len(channels) != 1:
            raise PowerError(f"{chip} has {len(channels)} channels: {', '.join(labels) or 'none that reports watts'}",
                             where=where, expected="one", hint='name those to sum: rails = ["…"]')
        return Rails(chip, tuple(channels), misses=misses)
    for rail in rails:
        if labels.count(rail) != 1:
            near = schema.suggest(rail, labels)
            raise PowerError(
                f"{labels.count(rail) or 'no'} rails of {chip} are labelled '{rail[:64]}'"
                + (f" (did you mean '{near}'?)" if near and near != rail else ""),
                where=where, expected=f"one of {', '.join(labels) or 'none'}, once",
            )
    counted = tuple(channel for rail in rails for channel in channels if channel.label == rail)
    return Rails(chip, counted, tuple(c for c in channels if c not in counted), misses)


def channels_of(folder: Path, numbers: str = r"\d+") -> Iterator[Channel]:
    """The channels of a hwmon device that report watts. numbers: a pattern of channel numbers. Raises PowerError."""
    device_label = optional_text(folder / "label")
    found = {match[1] for path in folder.glob("*_input") if (match := re.fullmatch(rf"(?:power|in)({numbers})_input",
                                                                                   path.name))}
    for number in sorted(found, key=int):
        power, volts, amperes = (folder / f"{kind}{number}_input" for kind in ("power", "in", "curr"))
        labels = (optional_text(folder / f"{kind}{number}_label") for kind in ("power", "in", "curr"))
        label = next((text for text in labels if text), device_label or optional_text(folder / "name") or folder.name)
        if label == NOT_CONNECTED or optional_text(folder / f"in{number}_enable") == "0":
            continue
        if power.exists():
            yield Channel(label, (power,), 1e-6)
        elif volts.exists() and amperes.exists():
            yield Channel(label, (volts, amperes), 1e-6)


def list_meters(root: Path) -> list[str]:
    """``name: labels`` of every meter that reports watts, for people who write a profile."""
    lines = []
    for folder in _folders(root):
        try:
            labels = [channel.label for channel in channels_of(folder)]
            if labels:
                lines.append(f"{optional_text(folder / 'name')}: {', '.join(labels)}")
        except PowerError as error:
            lines.append(str(error))
    return lines


def _folders(root: Path) -> list[Path]:
    return sorted((root / FOLDER).glob("hwmon*"))
