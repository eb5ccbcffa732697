"""``python -m benchmarks.soak.jumping_clock FILE HOME BROKER``: an agent whose clock is FILE's seconds ahead."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path
from unittest.mock import patch

from edge_agent.commands import run
from fleet_core.base import processes

CONNECT_S = "60"


def main() -> None:
    file, home, broker = sys.argv[1:]
    true_time = time.time

    def ahead() -> float:
        with suppress(OSError, ValueError):
            return true_time() + float(Path(file).read_text())
        return true_time()

    with patch.object(time, "time", ahead):
        processes.guarded(lambda: run.main(["--home", home, CONNECT_S, broker]))


if __name__ == "__main__":
    main()
