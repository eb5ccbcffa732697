"""One side's runs: a process that has loaded its programs forks for each run that it is asked for.

So a run's seconds and peak are those of the run, and loading torch is not repeated. ``serve`` is that process: it reads
a line of JSON with the arguments, and writes one with the answer and what the run took. ``Side`` asks it.
"""

from __future__ import annotations

import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.overhead.processes import ROOT

THREADS = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)}


def serve(run: Callable[..., dict[str, float]]) -> None:
    """run: the arguments of a line -> figures."""
    for line in sys.stdin:
        answer, told = os.pipe()
        started = time.perf_counter()
        child = os.fork()
        if not child:
            _answer(run, json.loads(line), told)
        os.close(told)
        with os.fdopen(answer) as pipe:
            said = pipe.read()
        _, status, usage = os.wait4(child, 0)
        if status:
            sys.exit(f"the run ended with {os.waitstatus_to_exitcode(status)}")
        print(json.dumps({
            **json.loads(said), "seconds": round(time.perf_counter() - started, 2),
            "cpu_s": round(usage.ru_utime + usage.ru_stime, 2), "peak_mb": round(usage.ru_maxrss * 1024 / 1e6, 1),
        }), flush=True)


def _answer(run: Callable[..., dict[str, float]], asked: dict[str, Any], told: int) -> None:
    try:
        with contextlib.redirect_stdout(sys.stderr):
            found = run(**asked)
        os.write(told, json.dumps(found).encode())
        os._exit(0)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)


class Side:
    """The process of one side. Raises SystemExit with what it said when a run fails."""

    def __init__(self, command: Sequence[str]) -> None:
        self._said = tempfile.TemporaryFile("w+")  # noqa: SIM115
        self._process = subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=self._said, text=True,
            env={**os.environ, **THREADS},
        )

    def run(self, asked: Mapping[str, Any]) -> dict[str, Any]:
        process = self._process
        assert process.stdin is not None
        assert process.stdout is not None
        process.stdin.write(json.dumps(asked) + "\n")
        process.stdin.flush()
        if answer := process.stdout.readline():
            return dict(json.loads(answer))
        self._said.seek(0)
        raise SystemExit(f"a run failed: {dict(asked)}\n{self._said.read()[-3000:]}")

    def close(self) -> None:
        self._process.communicate()
        self._said.close()
