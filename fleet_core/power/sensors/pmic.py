"""The power chip (PMIC) of the Raspberry Pi 5: ``vcgencmd pmic_read_adc``, volts and amperes of each rail.

Its lines are like ``3V3_SYS_A current(1)=0.04488498A`` or ``3V3_SYS_V volt(9)=3.30858100V``. Volts times amperes are
summed over the rails that have both; ``EXT5V_V`` and ``BATT_V`` have only volts. The sum is less than what the board
draws at its input. A profile's ``scale`` and ``offset_w`` correct it (pitop documentation: 1.1451 and 0.5879 W); this
correction is a fit over boards and loads, not a measurement of this board.
"""

from __future__ import annotations

import re
import shutil
import subprocess
from dataclasses import dataclass
from pathlib import Path

from fleet_core.base.errors import PowerError
from fleet_core.power.sensors.interface import Reading

PROGRAM = "usr/bin/vcgencmd"
LINE = re.compile(r"\s*(\w{1,40})_([AV])\s+(?:current|volt)\(\d{1,3}\)=(\d{1,6}(?:\.\d{1,12})?)[AV]\s*")
TIMEOUT_S = 2.0
MAX_TEXT = 1 << 14
VIDEO = "the user must be in the group video: sudo usermod -aG video USER, then log in again"


@dataclass(frozen=True)
class Pmic:
    """A Sensor: watts = scale · ΣVA + offset_w."""

    program: Path
    scale: float = 1.0
    offset_w: float = 0.0
    misses: str = ""
    name = "pmic"

    @property
    def source(self) -> str:
        corrected = self.scale != 1 or self.offset_w != 0
        return "PMIC, sum of V·A" + (f" · {self.scale:g} + {self.offset_w:g} W (a fit)" if corrected else "")

    def read(self) -> Reading:
        rails = rails_of(_output(self.program))
        return Reading(self.scale * sum(rails.values()) + self.offset_w, rails)


def sensor(scale: float, offset_w: float, root: Path, misses: str = "") -> Pmic:
    """Raises PowerError when the program does not exist or fails."""
    program = shutil.which("vcgencmd") if root == Path("/") else None
    pmic = Pmic(Path(program) if program else root / PROGRAM, scale, offset_w, misses)
    pmic.read()
    return pmic


def rails_of(text: str) -> dict[str, float]:
    """{rail: watts} of the rails with both volts and amperes. Raises PowerError when there is none."""
    values: dict[str, dict[str, float]] = {"A": {}, "V": {}}
    for line in text[:MAX_TEXT].splitlines():
        match = LINE.fullmatch(line)
        if match:
            values[match[2]][match[1]] = float(match[3])
    rails = {name: amperes * values["V"][name] for name, amperes in values["A"].items() if name in values["V"]}
    if not rails:
        raise PowerError(f"prints '{text.strip()[:80]}'", where="vcgencmd pmic_read_adc",
                         expected="volts and amperes of rails", hint="only the Raspberry Pi 5 has them")
    return rails


def _output(program: Path) -> str:
    try:
        done = subprocess.run([program, "pmic_read_adc"], stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise PowerError("does not exist", where=str(program), hint="it is part of Raspberry Pi OS") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PowerError(f"cannot be run: {error}", where=str(program), hint=VIDEO) from error
    if done.returncode:
        output = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[:200]
        raise PowerError(f"exits with {done.returncode}: {output}", where=f"{program} pmic_read_adc", hint=VIDEO)
    return done.stdout.decode("utf-8", "replace")
