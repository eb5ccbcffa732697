"""``python -m benchmarks.hostile.hostile_agent FACTOR HOME BROKER``: an agent that sends FACTOR times what it trained.

The agent starts its trainer as this module too, in the place of ``edge_agent.compute.trainer``. The device's state is
that of what it trained.
"""

from __future__ import annotations

import sys
from typing import Any
from unittest.mock import patch

from edge_agent.commands import run
from edge_agent.compute import trainer
from fleet_core.base import processes, trees
from fleet_core.model import payloads

TRAINER, THIS = "edge_agent.compute.trainer", "benchmarks.hostile.hostile_agent"
CONNECT_S = "60"


def main() -> None:
    factor, first, *more = sys.argv[1:]
    if first == TRAINER:
        honest = payloads.send

        def send(name: str, own: Any, *given: Any) -> payloads.Sent:
            return honest(name, trees.scale(own, float(factor)), *given)

        with patch.object(payloads, "send", send):
            sys.exit(trainer.main(more))
    command = processes.command

    def lying(module: str, *arguments: str) -> list[str]:
        return command(THIS, factor, TRAINER, *arguments) if module == TRAINER else command(module, *arguments)

    with patch.object(processes, "command", lying):
        processes.guarded(lambda: run.main(["--home", first, CONNECT_S, *more]))


if __name__ == "__main__":
    main()
