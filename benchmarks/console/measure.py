"""Frame times and bytes a second of the console with many devices: `python -m benchmarks.console.measure`.

A generated fleet (1,000 devices by default) is shown in a headless Chromium while a round closes every few seconds,
which changes every tile, and while the fleet is flashed in waves, four devices at a time, by a simulated installation
(`benchmarks.console.flashing`). Each view is scrolled meanwhile. A frame is the time between two animation frames. The
browser draws in software, without a graphics card; a person's screen is smoother. `--pictures FOLDER` writes the
picture of docs/console.md instead.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import tempfile
import threading
import time
from pathlib import Path
from typing import Any

from selenium.webdriver import Chrome

from benchmarks.console.browser import chromium, complaints, emulate
from benchmarks.console.made_fleet import MadeFleet
from fleet_core.base.processes import command

VIEWS = ("fleet", "rounds", "learning", "cost", "flash")
WAVES = "1,5,20"
FLASH = """
const done = arguments[1];
fetch("actions/flash", {method: "POST", headers: {"content-type": "application/json"}, body: arguments[0]})
  .then((answer) => done(answer.status));
"""
WATCH = """
window.frames_ = []; window.longest_ = 0; let before = performance.now(), end = before + arguments[0] * 1000;
const done = arguments[1];
new PerformanceObserver((list) => list.getEntries().forEach((one) => {
  window.longest_ = Math.max(window.longest_, one.duration); })).observe({type: "longtask"});
(function frame(now) {
  frames_.push(now - before); before = now;
  scrollTo(0, (now / 3) % Math.max(1, document.documentElement.scrollHeight - innerHeight));
  now < end ? requestAnimationFrame(frame) : done([frames_.slice(2), longest_]);
})(before);
"""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--devices", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=20, help="closed before the page is opened")
    parser.add_argument("--seconds", type=float, default=15.0, help="for each view")
    parser.add_argument("--every", type=float, default=5.0, help="seconds from one round to the next")
    parser.add_argument("--pictures", type=Path)
    given = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="metafleet-console-") as folder:
        if given.pictures:
            return pictures(Path(folder) / "fleet", given.pictures)
        print(json.dumps(measured(Path(folder) / "fleet", given), indent=2))


class Console:
    """``metafleet console`` on the fleet's folder, until ``end``."""

    def __init__(self, folder: Path):
        arguments = ("console", str(folder), "--port", "0")
        self._process = subprocess.Popen(command("benchmarks.console.flashing", *arguments), stdout=subprocess.PIPE,
                                         stderr=subprocess.DEVNULL, text=True)
        assert self._process.stdout is not None
        self.url = self._process.stdout.readline().strip()

    def cpu_s(self) -> float:
        """Processor seconds so far, as Linux counts them."""
        fields = Path(f"/proc/{self._process.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")

    def end(self) -> None:
        self._process.terminate()
        self._process.wait()


def measured(folder: Path, given: argparse.Namespace) -> dict[str, Any]:
    """Figures by view: frame times in ms, the longest task, bytes a second of events."""
    fleet = MadeFleet(folder, given.devices, given.rounds, 10 * given.rounds)
    fleet.write_inventory()
    console, stop = Console(folder), threading.Event()
    fleet.ledger.close()
    rounds = threading.Thread(target=_play, args=(fleet, stop, given.every))
    try:
        with chromium() as driver:
            driver.set_script_timeout(given.seconds * 20)
            emulate(driver, 1280, 900)
            started = time.monotonic()
            driver.get(console.url)
            while not driver.execute_script("return document.querySelectorAll('.tile').length"):
                time.sleep(0.02)
            first_s = time.monotonic() - started
            rounds.start()
            asked = json.dumps({"waves": WAVES, "most_failures": given.devices})
            if driver.execute_async_script(FLASH, asked) != 200:
                raise SystemExit("the console refused to flash")
            views = {view: _watched(driver, console, view, given.seconds) for view in VIEWS}
            said = complaints(driver)
            run = driver.execute_script("return document.querySelector('main .words').innerText")
    finally:
        stop.set()
        if rounds.is_alive():
            rounds.join()
        console.end()
    return {"devices": given.devices, "closed_before": given.rounds, "a_round_every_s": given.every,
            "processors": os.cpu_count(), "machine": platform.machine(), "first_tiles_s": round(first_s, 2),
            "flash": run, "views": views, "complaints": said}


def _play(fleet: MadeFleet, stop: threading.Event, every_s: float) -> None:
    fleet.reopen()
    while not stop.wait(every_s):
        fleet.play()
    fleet.ledger.close()


def _watched(driver: Chrome, console: Console, view: str, seconds: float) -> dict[str, float]:
    driver.execute_script("location.hash = arguments[0]", f"#/{view}")
    time.sleep(1)
    cpu_s, received, started = console.cpu_s(), _received(driver), time.monotonic()
    frames, longest = driver.execute_async_script(WATCH, seconds)
    took_s, ordered = time.monotonic() - started, sorted(frames)
    return {
        "frames": len(ordered), "median_ms": round(ordered[len(ordered) // 2], 1),
        "p95_ms": round(ordered[int(0.95 * len(ordered))], 1), "longest_ms": round(ordered[-1], 1),
        "longest_task_ms": round(longest, 1), "bytes_a_second": round((_received(driver) - received) / took_s),
        "server_cpu_share": round((console.cpu_s() - cpu_s) / took_s, 3),
    }


def _received(driver: Chrome) -> int:
    """Bytes of events that the page has received."""
    return int(driver.execute_script("return window.received ?? 0"))


def pictures(folder: Path, to: Path) -> None:
    """Writes console.png into ``to``."""
    MadeFleet(folder, 40, 24, 60)
    console = Console(folder)
    try:
        with chromium() as driver:
            emulate(driver, 1280, 820)
            driver.get(console.url)
            while len(driver.find_elements("css selector", ".tile")) < 40:
                time.sleep(0.05)
            driver.save_screenshot(str(to / "console.png"))
            print(to / "console.png")
    finally:
        console.end()


if __name__ == "__main__":
    main()
