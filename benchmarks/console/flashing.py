"""``metafleet`` with a simulated installation of devices, for the console's benchmark.

The console, its waves and its page are the product's own. An installation takes about four seconds and reports its
progress ten times a second; nothing is sent. ``python -m benchmarks.console.flashing console FLEET``.
"""

from __future__ import annotations

import time
from typing import Any
from unittest.mock import patch

from cloud_server.commands import cli
from cloud_server.devices import flash_in_waves, flash_over_ssh
from firmware_profiles.ssh import side_by_side
from firmware_profiles.ssh.inventory import Entry
from firmware_profiles.ssh.remote_install import Outcome, Tell
from firmware_profiles.ssh.side_by_side import Result
from fleet_core.base.errors import FlashError

STAGES = (("looking", 3), ("making the program", 2), ("uploading", 24), ("installing", 6), ("waiting", 5))
STEP_S = 0.1
FAILING = 40  # one device in so many never comes back


def _install(entry: Entry, tell: Tell) -> Outcome:
    for stage, steps in STAGES:
        for step in range(steps):
            tell(stage, f"{2 * step} of {2 * steps} MB" if stage == "uploading" else "")
            time.sleep(STEP_S)
    if sum(entry.name.encode()) % FAILING == 0:
        raise FlashError("the agent did not come up; the device rolled back", where=entry.to)
    return Outcome(entry.name, "0.2.0", "0.1.0", True)


def _flashed(entries: Any, choices: Any, jobs: int, waves: Any, *, show: Any, stop: Any) -> list[Result]:
    return side_by_side.flash_all(entries, _install, show, jobs, waves, stop)


if __name__ == "__main__":
    with patch.object(flash_over_ssh, "flashed", _flashed), patch.object(flash_in_waves, "_missing", lambda: ()):
        cli.main()
