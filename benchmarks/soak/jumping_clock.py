"""``python -m benchmarks.soak.jumping_clock FILE ARGUMENTS``: edge-agent, whose clock is FILE's seconds ahead."""

from __future__ import annotations

import sys
import time
from contextlib import suppress
from pathlib import Path

from edge_agent.commands import cli


def main() -> None:
    file, true_time = Path(sys.argv.pop(1)), time.time

    def ahead() -> float:
        with suppress(OSError, ValueError):
            return true_time() + float(file.read_text())
        return true_time()

    time.time = ahead
    cli.main()


if __name__ == "__main__":
    main()
