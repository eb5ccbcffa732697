"""The INA3221 of NVIDIA's Jetson boards: three channels of volts and amperes, in the layouts of two kernels.

* Orin (JetPack 5 and 6): hwmon, ``/sys/bus/i2c/drivers/ina3221/1-0040/hwmon/hwmon*/in{1,2,3}_label``, ``inN_input`` in
  mV, ``currN_input`` in mA. ``in4`` to ``in7`` are shunt voltages, ``curr4`` a sum: they are no channels. ``VDD_IN`` is
  the whole board, the other rails are parts of it. The AGX has no ``VDD_IN``: its rails are summed, and what the
  carrier board draws is not in the sum.
* Nano (JetPack 4): ``/sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0/in_power0_input`` in mW, ``POM_5V_IN``;
  ``rail_name_0`` names it where it is there.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path

from fleet_core.base.errors import PowerError
from fleet_core.power.sensors.hwmon import NOT_CONNECTED, Channel, Rails, channels_of, chosen
from fleet_core.power.sensors.interface import optional_text

HWMON = "sys/bus/i2c/drivers/ina3221"
IIO = "sys/bus/i2c/drivers/ina3221x"
TOTALS = ("VDD_IN", "POM_5V_IN")
FIRST = "POM_5V_IN"  # what in_power0_input is where no file names it
CHIP = "INA3221"


def sensor(rails: Sequence[str], root: Path, misses: str = "") -> Rails:
    """rails: labels to sum; none: the total where there is one, else all. Raises PowerError."""
    channels = [*_hwmon(root), *_iio(root)]
    if not channels:
        raise PowerError("is not there, or shows no channel", where=f"{root / HWMON}, {root / IIO}", expected=CHIP,
                         hint="is this a Jetson, with NVIDIA's kernel?")
    labels = [channel.label for channel in channels]
    if rails:
        return chosen(CHIP, channels, rails, str(root / HWMON), misses)
    total = next((label for label in TOTALS if label in labels), None)
    if total is not None:
        return chosen(CHIP, channels, (total,), str(root / HWMON), misses)
    carrier = "the carrier board: there is no VDD_IN, the rails are summed"
    return chosen(CHIP, channels, labels, str(root / HWMON), misses or carrier)


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
