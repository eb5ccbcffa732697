"""CPU seconds and memory of an agent and its children."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from edge_agent.device.process_usage import ProcessUsage, own_usage
from fleet_core.power.sensors.cpu import process_peak_mib

needs_proc = pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="needs Linux's /proc")
BUSY_MIB = 60


@needs_proc
@pytest.mark.allowed_skip("needs Linux's /proc")
def test_a_child_that_ended_is_counted_with_its_memory() -> None:
    before = own_usage()
    program = f"held = bytearray({BUSY_MIB} << 20)\nsum(range(3_000_000))"
    subprocess.run([sys.executable, "-c", program], check=True)
    after = own_usage()
    assert before.cpu_s is not None
    assert after.cpu_s is not None
    assert after.cpu_s > before.cpu_s
    assert after.peak_mib is not None
    assert after.peak_mib > BUSY_MIB


@needs_proc
@pytest.mark.allowed_skip("needs Linux's /proc")
def test_a_child_that_runs_is_counted_too() -> None:
    alone = process_peak_mib(Path("/"), os.getpid())
    program = f"held = bytearray({BUSY_MIB} << 20)\nprint(flush=True)\ninput()"
    with subprocess.Popen([sys.executable, "-c", program], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as child:
        assert child.stdout is not None
        child.stdout.readline()
        together = process_peak_mib(Path("/"), os.getpid())
        child.communicate(b"\n")
    assert alone is not None
    assert together is not None
    assert together > alone + BUSY_MIB


def test_without_proc_both_are_absent(tmp_path: Path) -> None:
    assert own_usage(tmp_path) == ProcessUsage(None, None)
