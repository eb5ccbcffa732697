"""The power chip (PMIC) of the Raspberry Pi 5: ``vcgencmd pmic_read_adc``, volts and amperes of each rail.

A line of it reads ``3V3_SYS_A current(1)=0.04488498A`` or ``3V3_SYS_V volt(9)=3.30858100V``. Rails with both are
multiplied and summed; ``EXT5V_V`` and ``BATT_V`` have volts alone. The sum is less than what the board draws at its
input: a profile's ``scale`` and ``offset_w`` correct it (pitop documentation: 1.1451 and 0.5879 W), which is a fit over
boards and loads, not a measurement of this one.
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
    """Sensor: watts = scale · ΣVA + offset_w."""

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
    """Raises PowerError where the program is not there or does not answer."""
    found = shutil.which("vcgencmd") if root == Path("/") else None
    made = Pmic(Path(found) if found else root / PROGRAM, scale, offset_w, misses)
    made.read()
    return made


def rails_of(text: str) -> dict[str, float]:
    """{rail: watts} of the rails of which ``text`` has both volts and amperes. Raises PowerError when there is none."""
    found: dict[str, dict[str, float]] = {"A": {}, "V": {}}
    for line in text[:MAX_TEXT].splitlines():
        match = LINE.fullmatch(line)
        if match:
            found[match[2]][match[1]] = float(match[3])
    rails = {name: amperes * found["V"][name] for name, amperes in found["A"].items() if name in found["V"]}
    if not rails:
        raise PowerError(f"says '{text.strip()[:80]}'", where="vcgencmd pmic_read_adc",
                         expected="volts and amperes of rails", hint="only the Raspberry Pi 5 has them")
    return rails


def _output(program: Path) -> str:
    try:
        done = subprocess.run([program, "pmic_read_adc"], stdin=subprocess.DEVNULL, capture_output=True,
                              timeout=TIMEOUT_S, check=False)
    except FileNotFoundError as error:
        raise PowerError("is not there", where=str(program), hint="Raspberry Pi OS brings it") from error
    except (OSError, subprocess.TimeoutExpired) as error:
        raise PowerError(f"does not run: {error}", where=str(program), hint=VIDEO) from error
    if done.returncode:
        said = (done.stderr or done.stdout).decode("utf-8", "replace").strip()[:200]
        raise PowerError(f"ends with {done.returncode}: {said}", where=f"{program} pmic_read_adc", hint=VIDEO)
    return done.stdout.decode("utf-8", "replace")
