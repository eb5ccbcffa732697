"""Files and outputs of power sensors, built from their documentation; no hardware was at hand."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

PMIC = """\
     3V7_WL_SW_A current(0)=0.10000000A
       3V3_SYS_A current(1)=0.20000000A
       1V8_SYS_A current(2)=0.50000000A
      VDD_CORE_A current(7)=2.00000000A
     3V7_WL_SW_V volt(8)=3.70000000V
       3V3_SYS_V volt(9)=3.30000000V
       1V8_SYS_V volt(10)=1.80000000V
      VDD_CORE_V volt(15)=0.75000000V
         EXT5V_V volt(24)=5.13788000V
          BATT_V volt(25)=0.00146800V
"""
PMIC_W = 0.1 * 3.7 + 0.2 * 3.3 + 0.5 * 1.8 + 2.0 * 0.75


def write(folder: Path, files: Mapping[str, object]) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    for name, value in files.items():
        (folder / name).write_text(f"{value}\n")
    return folder


def hwmon(root: Path, number: int, name: str, **files: object) -> Path:
    """One /sys/class/hwmon device."""
    return write(root / f"sys/class/hwmon/hwmon{number}", {"name": name, **files})


def ina219(root: Path, number: int, power_uw: int, name: str = "ina219", **files: object) -> Path:
    """Shunt voltage in in0, bus voltage in in1, as Linux's ina2xx driver writes them."""
    readings = {"in0_input": 3, "in1_input": 5000, "curr1_input": power_uw // 5000, "power1_input": power_uw}
    return hwmon(root, number, name, **readings, **files)


def orin(root: Path, chips: Mapping[str, Mapping[str, tuple[int, int]]]) -> list[Path]:
    """JetPack 6's layout of {I2C address: {label: (mV, mA)}}, including shunt voltages and sums."""
    folders = []
    for at, (address, rails) in enumerate(chips.items()):
        files: dict[str, object] = {"name": "ina3221", "in7_label": "sum of shunt voltages", "curr4_input": 99_999}
        for number, (label, (millivolts, milliamperes)) in enumerate(rails.items(), start=1):
            files |= {f"in{number}_label": label, f"in{number}_input": millivolts, f"in{number}_enable": 1,
                      f"curr{number}_input": milliamperes, f"in{number + 3}_input": 4321}
        folders.append(write(root / f"sys/bus/i2c/drivers/ina3221/{address}/hwmon/hwmon{at + 3}", files))
    return folders


def nano(root: Path, *milliwatts: int, names: tuple[str, ...] = ()) -> Path:
    """JetPack 4's layout."""
    files: dict[str, object] = {f"in_power{number}_input": value for number, value in enumerate(milliwatts)}
    files |= {f"rail_name_{number}": name for number, name in enumerate(names)}
    return write(root / "sys/bus/i2c/drivers/ina3221x/6-0040/iio:device0", files)


def vcgencmd(root: Path, text: str = PMIC, code: int = 0) -> Path:
    """A stand-in for vcgencmd that prints ``text`` and exits with ``code``."""
    program = root / "usr/bin/vcgencmd"
    program.parent.mkdir(parents=True, exist_ok=True)
    (program.parent / "said").write_text(text)
    program.write_text(f'#!/bin/sh\n[ "$1" = pmic_read_adc ] || exit 9\ncat "{program.parent}/said"\nexit {code}\n')
    program.chmod(0o755)
    return program
