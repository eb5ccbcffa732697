"""The agent's child processes after the agent has died."""

from __future__ import annotations

import io
import os
import subprocess

import pytest

from edge_agent.compute.worker import write_frame
from fleet_core.base import processes
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S


@pytest.mark.parametrize("module", ["trainer", "adapter"])
def test_a_child_whose_agent_is_gone_ends_without_a_word(module: str) -> None:
    reading, writing = os.pipe()
    os.close(reading)
    child = subprocess.Popen(
        processes.command(f"edge_agent.compute.{module}"), cwd=ROOT, stdin=subprocess.PIPE, stdout=writing,
        stderr=subprocess.PIPE,
    )
    os.close(writing)
    job = io.BytesIO()
    write_frame(job, {"kind": "adapt"}, {})
    _, printed = child.communicate(job.getvalue(), timeout=PATIENCE_S)
    assert printed.decode() == ""
    assert child.returncode == 0
