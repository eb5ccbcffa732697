"""Eight clients send requests without a pause while a device's model is swapped every second: no request may fail, and
every answer must be that of one model, to the last digit.

    python -m benchmarks.on_device.swap --out benchmarks/on_device/swap.json

``agent``: one process takes new weights and answers over HTTP, as ``edge-agent run`` does. ``beside``: this process
takes them, and ``edge-agent serve`` follows the files on disk. A model's expected answers come from Python calls. The
models are small steps away from each other, so that none is refused; each is personalized on 50 samples.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.on_device.asking import clients, collected, fingerprint, serving
from edge_agent.device.state import Weights
from edge_agent.http import serve
from edge_agent.inference.service import Service, service_of
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import processes, trees
from fleet_core.base.storage import write_json
from fleet_core.board.device_settings import settings_of
from fleet_core.model import payloads
from fleet_core.protocol.device_messages import Answer

CLIENTS, EVERY_S, SECONDS = 8, 1.0, 60.0
STEP = 0.003
METHOD = METHODS["pfldyn-proto"]
AGENT = str(Path(sys.executable).with_name("edge-agent"))


def opened(home: Path) -> tuple[Service, Weights]:
    """A device's service, and the weights that it was served."""
    service = service_of(home, settings_of(home))
    service.restore()
    held = service.slots.weights()
    assert held is not None
    return service, held


def moved(held: Weights, number: int) -> Weights:
    """The model of round ``number``: a small step away."""
    rng = np.random.default_rng(number)
    params = trees.apply(lambda a: (a + STEP * rng.normal(size=a.shape)).astype(np.float32), held.params)
    return Weights(payloads.identity(params), held.round + number, params)


def print_of(answer: Answer) -> str:
    rows = [p for row in answer.probabilities for p in row]
    return fingerprint(answer.model, {"probabilities": rows, "label": list(answer.labels)})


def swap(service: Service, held: Weights, x: Any, wanted: Callable[[], bool]) -> list[str]:
    """Takes a new model every second; the fingerprints of their answers. Raises RuntimeError if one was refused."""
    prints, due = [print_of(service.answers(x))], time.monotonic()
    while wanted():
        due += EVERY_S
        weights = moved(held, len(prints))
        service.load(METHOD, {}, weights, trainer=False)
        prints.append(print_of(service.answers(x)))
        if service.answers(x).model != weights.model:
            raise RuntimeError(f"the model of round {weights.round} does not answer")
        time.sleep(max(0.0, due - time.monotonic()))
    return prints


def agent(home: Path, sample: Path) -> None:
    """A process that swaps and serves until its input ends; then it prints the fingerprints."""
    service, held = opened(home)
    server = serve.start(home, settings_of(home).listening("127.0.0.1", 0), service, processes.say)
    try:
        until = time.monotonic() + float(sys.stdin.readline())
        print(json.dumps(swap(service, held, np.load(sample)[None], lambda: time.monotonic() < until)), flush=True)
        sys.stdin.readline()
    finally:
        server.stop()


def summary(prints: list[str], found: list[dict[str, Any]], seconds: float) -> dict[str, Any]:
    """The figures of one run."""
    answers = sum((Counter(each["answers"]) for each in found), Counter[str]())
    milliseconds = sorted(ms for each in found for ms in each["milliseconds"])
    failed = [text for each in found for text in each["failed"]]
    return {
        "clients": len(found), "seconds": seconds, "swaps": len(prints) - 1, "requests": len(milliseconds),
        "failed": len(failed), "failures": failed[:5], "models_seen": len(answers.keys() & set(prints)),
        "answers_of_no_model": sum(n for key, n in answers.items() if key not in prints),
        "milliseconds": {"median": statistics.median(milliseconds), "max": milliseconds[-1],
                         "p99": milliseconds[int(0.99 * len(milliseconds))]},
    }


def measured(way: str, home: Path, sample: Path, seconds: float) -> dict[str, Any]:
    """One run. way: ``agent`` or ``beside``."""
    x, body = np.load(sample)[None], home / "asked.json"
    tensor = {"name": "x", "datatype": "UINT8", "shape": list(x.shape), "data": x.ravel().tolist()}
    body.write_text(json.dumps({"inputs": [tensor]}))
    command = ([AGENT, "serve", "--home", str(home), "--port", "0"] if way == "beside" else
               [sys.executable, "-m", "benchmarks.on_device.swap", "--agent", str(home), str(sample)])
    service, held = opened(home)
    with serving(command) as (process, host, port):
        asking = clients(CLIENTS, host, port, "/v2/models/bench/infer", body, seconds + 3)
        time.sleep(1)
        if way == "beside":
            until = time.monotonic() + seconds
            prints = swap(service, held, x, lambda: time.monotonic() < until)
        else:
            assert process.stdin is not None
            assert process.stdout is not None
            process.stdin.write(f"{seconds}\n")
            process.stdin.flush()
            prints = json.loads(process.stdout.readline())
        return summary(prints, collected(asking), seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agent", nargs=2, type=Path, help=argparse.SUPPRESS)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    if options.agent:
        return agent(*options.agent)
    from benchmarks.on_device import homes  # only making the device's model needs torch
    from benchmarks.on_device.cases import CASES
    from cloud_server.results.result import environment

    found = {}
    for way in ("agent", "beside"):
        with tempfile.TemporaryDirectory() as room:
            place = homes.made(CASES["LeNet"], Path(room) / "made")
            found[way] = measured(way, place.homes["proto"], place.x, options.seconds)
        print(way, json.dumps(found[way]), flush=True)
    if options.out:
        write_json(options.out, {"model": "LeNet", "every_s": EVERY_S, "ways": found, "environment": environment()})


if __name__ == "__main__":
    main()
