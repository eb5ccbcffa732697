"""Latency of the agent's answers compared with a bare session, and of gradient steps without torch compared with
torch's.

    python -m benchmarks.on_device.latency --out benchmarks/on_device/latency.json

Answers: batch 1, one thread, in a process without torch (``timed.py``). A bare onnxruntime session, the agent's
``Service.predict``, and ``Service.answers`` with names and rounding take turns, on a device that answers by class means
and on one that answers after gradient steps. Limit: the median of ``predict`` within 10 % or 50 µs of the session's,
whichever is more.

Steps: 10 on 50 samples, one thread each, in turn in one process: the graph ``adapt`` through the agent's own call with
its session open, and torch eager in a plain loop of ``torch.autograd.grad``, in wall-clock and CPU time. Limit: as fast
as torch for the MLP, 0.9 × for the others.

Other models, or the other part, stay in ``--out`` as they are.
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.func import functional_call

from benchmarks.on_device import homes
from benchmarks.on_device.cases import CASES, LR, STEPS, SUPPORT, Case, drawn, plain
from benchmarks.on_device.homes import Place
from cloud_server.results.result import environment
from edge_agent.compute.onnx_session import open_steps
from export.adapt_graph import with_adapt
from fleet_core.base.storage import write_json
from fleet_core.learning import models

BARS = {"answer_us": 50.0, "answer_share": 0.10, "steps_mlp": 1.0, "steps_cnn": 0.9}

Call = Callable[[], Any]

CLOCKS = {"wall": time.perf_counter, "processor": time.process_time}
"""CPU time does not count while other work has the core."""


def answers(case: Case, calls: int) -> dict[str, Any]:
    """personalizer -> medians in microseconds of the bare session and the agent's calls."""
    with tempfile.TemporaryDirectory() as room:
        return of_place(homes.made(case, Path(room) / "made"), calls)


def of_place(place: Place, calls: int) -> dict[str, Any]:
    """The same for a ``Place`` of ``homes.made``."""
    found = {}
    for way, home in place.homes.items():
        graph, weights, _ = place.bare[f"predict {way}"]
        command = [sys.executable, "-m", "benchmarks.on_device.timed", str(home), graph, weights, str(place.x)]
        found[way] = with_limit(json.loads(subprocess.check_output([*command, str(calls)])))
    return found


def with_limit(found: dict[str, Any]) -> dict[str, Any]:
    """``found`` with what the agent adds to the bare session, and the limit."""
    added = found["predict_us"] - found["bare_us"]
    allowed = max(BARS["answer_us"], BARS["answer_share"] * found["bare_us"])
    return {**found, "added_us": added, "allowed_us": allowed, "met": added <= allowed}


def steps(case: Case, repeats: int) -> dict[str, Any]:
    """Medians in seconds of ten steps by the graph and by torch, and how many times as fast the graph is."""
    layout = case.layout()
    weights = models.initial(layout, 0)
    x, y = drawn(layout, SUPPORT, 1)
    graph = with_adapt(plain(layout), rates=False)
    run = open_steps(graph.adapt, weights)
    inputs = {"support_x": x, "support_y": y, "steps": np.array(STEPS), "lr": np.array(LR, np.float32)}
    network = models.build(layout).eval()
    each = in_turn({"graph": lambda: run(inputs), "torch": _eager(network, x, y)}, repeats)
    of_clock = {clock: {name: [one[clock] for one in times] for name, times in each.items()} for clock in CLOCKS}
    found: dict[str, Any] = {"each": of_clock["wall"], "each_processor": of_clock["processor"]}
    for clock, ending in (("wall", ""), ("processor", "_processor")):
        graph_s, torch_s = (statistics.median(of_clock[clock][name]) for name in ("graph", "torch"))
        found |= {f"graph{ending}_s": graph_s, f"torch{ending}_s": torch_s, f"times_as_fast{ending}": torch_s / graph_s}
    pairs = [b / a for a, b in zip(found["each"]["graph"], found["each"]["torch"], strict=True)]
    return {**found, "of_pairs": statistics.median(pairs)}


def _eager(network: models.Network, x: Any, y: Any) -> Call:
    """Full-batch steps as a user would write them in torch."""
    first = {name: parameter.detach() for name, parameter in network.named_parameters()}
    samples, labels = torch.tensor(x), torch.tensor(y)

    def run() -> dict[str, torch.Tensor]:
        w = first
        for _ in range(STEPS):
            w = {name: a.detach().requires_grad_() for name, a in w.items()}
            loss = torch.nn.functional.cross_entropy(functional_call(network, w, (samples, "predict")), labels)
            gradient = torch.autograd.grad(loss, list(w.values()))
            w = {name: a.detach() - LR * g for (name, a), g in zip(w.items(), gradient, strict=True)}
        return w

    return run


def in_turn(calls: dict[str, Call], repeats: int) -> dict[str, list[dict[str, float]]]:
    """Seconds of each call by each of ``CLOCKS``, taken in turn ``repeats`` times after three warm-up turns."""
    times: dict[str, list[dict[str, float]]] = {name: [] for name in calls}
    for repeat in range(-3, repeats):
        for name, call in calls.items():
            started = {clock: read() for clock, read in CLOCKS.items()}
            call()
            if repeat >= 0:
                times[name].append({clock: read() - started[clock] for clock, read in CLOCKS.items()})
    return times


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--parts", nargs="+", choices=("answers", "steps"), default=["answers", "steps"])
    parser.add_argument("--calls", type=int, default=2000, help="answers of each kind to time")
    parser.add_argument("--repeats", type=int, default=20, help="repetitions of ten steps")
    parser.add_argument("--out", type=Path, required=True)
    options = parser.parse_args()
    torch.set_num_threads(1)
    known = json.loads(options.out.read_text())["models"] if options.out.exists() else {}
    found: dict[str, Any] = {name: dict(one) for name, one in known.items()}
    for name, part in itertools.product(options.models, options.parts):
        one = answers(CASES[name], options.calls) if part == "answers" else steps(CASES[name], options.repeats)
        found.setdefault(name, {})[part] = one
        print(f"{name}: {said(part, one)}", flush=True)
    write_json(options.out, {"support": SUPPORT, "steps": STEPS, "calls": options.calls, "repeats": options.repeats,
                             "bars": BARS, "environment": environment(), "models": found})


def said(part: str, found: dict[str, Any]) -> str:
    if part == "steps":
        by = found["times_as_fast_processor"]
        return f"ten steps {found['times_as_fast']:.2f} times as fast as torch, {by:.2f} by processor time"
    return ", ".join(f"{way}: session {a['bare_us']:.0f} µs, agent {a['added_us']:+.0f} µs" for way, a in found.items())


if __name__ == "__main__":
    main()
