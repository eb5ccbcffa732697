"""Cost of HTTP: the latency of a request compared with the Python call, and the memory of ``edge-agent serve``.

    python -m benchmarks.on_device.over_http --out benchmarks/on_device/over_http.json        memory: Linux

One raw sample per request over one kept connection. A request as JSON, one as binary data, and a Python call of the
same service in this process take turns. The memory is the kernel's high-water mark of the serving process, after these
requests and after eight clients at once. MB are 10^6 bytes. Limits: 2 ms more than the call, 85 MB.

Beside other work on the machine a request waits for a processor three times, and a call never: ``--real-time`` gives
client and server real-time priority, as if the machine had no other work (Linux, root).
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import re
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.on_device import homes
from benchmarks.on_device.asking import clients, collected, serving
from benchmarks.on_device.cases import CASES
from cloud_server.results.result import environment
from edge_agent.http.tensors import OF_NUMPY
from edge_agent.inference.service import service_of
from fleet_core.base.storage import write_json
from fleet_core.board.device_settings import settings_of

AGENT = str(Path(sys.executable).with_name("edge-agent"))
PATH = "/v2/models/bench/infer"
BARS = {"above_ms": 2.0, "peak_mb": 85.0}
WARM, CLIENTS, CROWD_S = 50, 8, 5.0


def requests(x: Any) -> dict[str, tuple[bytes, dict[str, str]]]:
    """(body, headers) of a request for ``x``, by its form."""
    tensor = {"name": "x", "datatype": OF_NUMPY[str(x.dtype)], "shape": list(x.shape)}
    as_json = json.dumps({"inputs": [{**tensor, "data": x.ravel().tolist()}]}).encode()
    head = json.dumps({"inputs": [{**tensor, "parameters": {"binary_data_size": x.nbytes}}],
                       "parameters": {"binary_data_output": True}}).encode()
    return {"json": (as_json, {}), "binary": (head + x.tobytes(), {"Inference-Header-Content-Length": str(len(head))})}


def timed(ways: dict[str, Callable[[], Any]], count: int) -> dict[str, dict[str, float]]:
    """Milliseconds of each, in turn."""
    found: dict[str, list[float]] = {name: [] for name in ways}
    for number in range(WARM + count):
        for name, way in ways.items():
            begun = time.perf_counter()
            way()
            if number >= WARM:
                found[name].append(1000 * (time.perf_counter() - begun))
    return {name: {"median": statistics.median(each), "min": min(each), "p90": sorted(each)[int(0.9 * count)]}
            for name, each in found.items()}


def posted(connection: http.client.HTTPConnection, body: bytes, headers: dict[str, str]) -> None:
    connection.request("POST", PATH, body, headers)
    response = connection.getresponse()
    response.read()
    assert response.status == 200


def memory(pid: int) -> dict[str, float]:
    """peak_mb, now_mb of a process."""
    status = Path(f"/proc/{pid}/status").read_text()
    found = {key: re.search(rf"{key}:\s+(\d+) kB", status) for key in ("VmHWM", "VmRSS")}
    return {name: int(match[1]) * 1024 / 1e6 for name, match in zip(("peak_mb", "now_mb"), found.values(), strict=True)
            if match}


def measured(home: Path, sample: Path, count: int) -> dict[str, Any]:
    """The figures of one device."""
    x = np.load(sample)[None]
    service = service_of(home, settings_of(home))
    service.restore()
    asked = requests(x)
    (home / "asked.json").write_bytes(asked["json"][0])
    with serving([AGENT, "serve", "--home", str(home), "--port", "0"]) as (process, host, port):
        connection = http.client.HTTPConnection(host, port, timeout=30)
        ways: dict[str, Callable[[], Any]] = {"call": lambda: service.answers(x)}
        for name, (body, headers) in asked.items():
            ways[name] = partial(posted, connection, body, headers)
        milliseconds = timed(ways, count)
        alone = memory(process.pid)
        crowd = collected(clients(CLIENTS, host, port, PATH, home / "asked.json", CROWD_S))
        assert not any(each["failed"] for each in crowd)
        return {"milliseconds": milliseconds, "memory": alone, "memory_crowd": memory(process.pid),
                "crowd_requests": sum(len(each["milliseconds"]) for each in crowd)}


@contextmanager
def real_time(wanted: bool) -> Iterator[None]:
    """Real-time priority for this process and its new children."""
    if wanted:
        os.sched_setscheduler(0, os.SCHED_RR, os.sched_param(10))
    try:
        yield
    finally:
        if wanted:
            os.sched_setscheduler(0, os.SCHED_OTHER, os.sched_param(0))


def against_limits(runs: list[dict[str, Any]]) -> dict[str, float]:
    """The figures that have a limit; medians over the runs."""
    def above(form: str) -> float:
        each = [run["milliseconds"] for run in runs]
        return float(statistics.median(ms[form]["median"] - ms["call"]["median"] for ms in each))

    return {
        "json_above_ms": above("json"), "binary_above_ms": above("binary"),
        "peak_mb": statistics.median(run["memory"]["peak_mb"] for run in runs),
        "crowd_peak_mb": statistics.median(run["memory_crowd"]["peak_mb"] for run in runs),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--count", type=int, default=400)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--real-time", action="store_true")
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    found: dict[str, Any] = {}
    for model in options.models:
        with tempfile.TemporaryDirectory() as room:
            place = homes.made(CASES[model], Path(room) / "made")
            for way, home in place.homes.items():
                with real_time(options.real_time):
                    runs = [measured(home, place.x, options.count) for _ in range(options.repeats)]
                found[f"{model} {way}"] = {"judged": against_limits(runs), "runs": runs}
                print(model, way, json.dumps({k: round(v, 3) for k, v in against_limits(runs).items()}), flush=True)
    if options.out:
        write_json(options.out, {"bars": BARS, "count": options.count, "real_time": options.real_time,
                                 "environment": environment(), "found": found})


if __name__ == "__main__":
    main()
