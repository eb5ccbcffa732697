"""The agent's child processes after the agent has died."""

from __future__ import annotations

import io
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest

from edge_agent.compute.worker import write_frame
from fleet_core.base import processes
from tests.support.paths import ROOT
from tests.support.waiting import PATIENCE_S


@pytest.mark.slow
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


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs /proc")
def test_the_peak_of_a_child_is_its_own_and_not_that_of_the_process_that_started_it() -> None:
    held = np.ones((400, 1 << 20), np.uint8)
    code = "from edge_agent.compute.training_jobs import peak_mib; print(peak_mib())"
    said = subprocess.run(processes.python("-c", code), cwd=ROOT, capture_output=True, text=True, timeout=PATIENCE_S)
    assert 10 < float(said.stdout) < held.nbytes / (1 << 20)
