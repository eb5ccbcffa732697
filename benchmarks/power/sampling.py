"""Cost of reading a power sensor, as a share of a core: an agent's meter over a minute, by sensor.

    python benchmarks/power/sampling.py [--seconds 60] > benchmarks/power/sampling.json

No hardware: the sensors are constructed file trees and a program that prints a constructed output (compiled if there is
a C compiler, otherwise a shell script, which costs more than vcgencmd does). For each sensor the second line also
counts the bytes of forty chunks per second and a phase of work every five seconds, as an agent does in a round.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))

from edge_agent.device.agent_costs import AgentCosts  # noqa: E402
from fleet_core.board.profile import Power  # noqa: E402
from fleet_core.power.choose_meter import sensor_of  # noqa: E402
from fleet_core.power.sampled_meter import Sampled, SampledCounter  # noqa: E402
from tests.support import boards  # noqa: E402

PROGRAM = '#include <stdio.h>\nint main(void) {{ fputs({text}, stdout); return 0; }}\n'
LIMIT = 0.005


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--seconds", type=float, default=60.0)
    seconds = parser.parse_args().seconds
    cases = [(sensor, chunks) for sensor in ("ina3221", "hwmon", "pmic") for chunks in (0, 40)]
    rows = [measured(sensor, chunks, seconds) for sensor, chunks in cases]
    print(json.dumps({
        "machine": platform.machine(), "cores": os.cpu_count(), "python": platform.python_version(),
        "seconds": seconds, "limit": LIMIT, "sensors": "constructed", "rows": rows,
    }, indent=1))


def measured(sensor: str, chunks_a_second: int, seconds: float) -> dict[str, object]:
    """The figures of ``run`` in a separate process, so that nothing else is counted."""
    program = f"from benchmarks.power.sampling import run; run({sensor!r}, {chunks_a_second}, {seconds})"
    done = subprocess.run([sys.executable, "-c", program], cwd=ROOT, check=True, capture_output=True, text=True)
    return dict(json.loads(done.stdout))


def run(sensor: str, chunks_a_second: int, seconds: float) -> None:
    """share_of_a_core: CPU seconds of this process and its children ÷ seconds, less those of the same loop without a
    meter."""
    with tempfile.TemporaryDirectory() as folder:
        root = tree(Path(folder), sensor)
        meter = Sampled(sensor_of(power_of(sensor), root), 1.0)
        counter = meter._share._counter
        assert isinstance(counter, SampledCounter)
        with_meter = loop(AgentCosts(meter), chunks_a_second, seconds)
        readings = counter.readings
        without = loop(AgentCosts(None), chunks_a_second, seconds)
        print(json.dumps({
            "sensor": sensor, "chunks_a_second": chunks_a_second, "readings_a_second": round(readings / seconds, 2),
            "share_of_a_core": round(with_meter - without, 5), "within": with_meter - without <= LIMIT,
        }))


def loop(accounts: AgentCosts, chunks_a_second: int, seconds: float) -> float:
    before_s, end_s, turn = cpu_s(), time.monotonic() + seconds, 0
    with accounts.metering():
        while time.monotonic() < end_s:
            if chunks_a_second:
                accounts.payload("model_down", 61_440)
                if turn % (5 * chunks_a_second) == 0:
                    accounts.begin("train")
                    accounts.end("train")
            turn += 1
            time.sleep(1 / (chunks_a_second or 2))
    return (cpu_s() - before_s) / seconds


def cpu_s() -> float:
    used = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return sum(one.ru_utime + one.ru_stime for one in used)


def tree(root: Path, sensor: str) -> Path:
    """The sensor's files, with this machine's own /proc."""
    (root / "proc").symlink_to("/proc")
    if sensor == "ina3221":
        boards.orin(root, {"1-0040": {"VDD_IN": (5000, 1200), "VDD_CPU_GPU_CV": (5000, 300), "VDD_SOC": (5000, 250)}})
    elif sensor == "hwmon":
        boards.ina219(root, 2, 3_000_000)
    elif shutil.which("cc"):
        program = boards.vcgencmd(root)
        source = root / "said.c"
        source.write_text(PROGRAM.format(text=json.dumps(boards.PMIC)))
        program.unlink()
        subprocess.run(["cc", "-O1", "-o", str(program), str(source)], check=True)
    else:
        boards.vcgencmd(root)
    return root


def power_of(sensor: str) -> Power:
    return Power(sensor, chip="ina219" if sensor == "hwmon" else None)


if __name__ == "__main__":
    main()
