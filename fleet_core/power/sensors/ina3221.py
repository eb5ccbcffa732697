"""The INA3221 of NVIDIA's Jetson boards: three channels of volts and amperes, in the layouts of two kernels.

* Orin (JetPack 5 and 6): hwmon, ``/sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon*/in{1,2,3}_label``, ``inN_input`` in
  mV, ``currN_input`` in mA. ``in4`` to ``in7`` are shunt voltages and ``curr4`` is a sum, not channels. ``VDD_IN`` is
  the whole board; the other rails are parts of it. The AGX has no ``VDD_IN``: its rails are summed, which does not
  include the carrier board.
* Nano (JetPack 4): ``/sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0/in_power0_input`` in mW, ``POM_5V_IN``; the file
  ``rail_name_0``, if present, names the rail.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fleet_core.base.errors import PowerError
from fleet_core.power.sensors.hwmon import NOT_CONNECTED, Channel, Rails, channels_of, select_channels
from fleet_core.power.sensors.interface import optional_text

HWMON = "sys/bus/i2c/drivers/ina3221"
IIO = "sys/bus/i2c/drivers/ina3221x"
TOTALS = ("VDD_IN", "POM_5V_IN")
FIRST = "POM_5V_IN"  # the rail of in_power0_input when no file names it
CHIP = "INA3221"


def sensor(rails: Sequence[str], root: Path, misses: str = "") -> Rails:
    """rails: labels to sum; empty: the total if there is one, else all rails. Raises PowerError."""
    channels = [*_hwmon(root), *_iio(root)]
    if not channels:
        raise PowerError("does not exist or has no channel", where=f"{root / HWMON}, {root / IIO}", expected=CHIP,
                         hint="is this a Jetson with NVIDIA's kernel?")
    if not rails:
        labels = [channel.label for channel in channels]
        rails = next(((label,) for label in TOTALS if label in labels), ())
        if not rails:
            rails, misses = labels, misses or "the carrier board: there is no VDD_IN, the rails are summed"
    return select_channels(CHIP, channels, rails, str(root / HWMON), misses)


def _hwmon(root: Path) -> Iterator[Channel]:
    for folder in sorted((root / HWMON).glob("*/hwmon/hwmon*")):
        yield from channels_of(folder, "[123]")


def _iio(root: Path) -> Iterator[Channel]:
    for folder in sorted((root / IIO).glob("*/iio:device*")):
        for number in range(3):
            power = folder / f"in_power{number}_input"
            label = optional_text(folder / f"rail_name_{number}") or (FIRST if number == 0 else None)
            if power.exists() and label not in (None, NOT_CONNECTED):
                yield Channel(str(label), (power,), 1e-3)
