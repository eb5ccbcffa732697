"""A board with 512 MB and no torch takes part in rounds: a Raspberry Pi Zero 2 W as its profile has it, on an emulated
Cortex-A53, with two x86-64 devices that have torch.

Its memory is that of the agent and its child processes, read from smaps over SSH a few times a minute. This misses a
peak between two readings; the kernel's high-water marks do not.
"""

from __future__ import annotations

import json
import re

import numpy as np

from benchmarks.arm64 import proof, scene
from benchmarks.arm64.proof import Notes, Proof
from benchmarks.arm64.scene import Scene
from benchmarks.overhead.memory import parse, together

BOARD, MEMORY_MIB, ROUNDS, PORT = "raspberry-pi-zero-2-w", 512, 3, 8080
DESKS = ("desk-1", "desk-2")
ROUND_S = 1800.0
LOOK = """sudo sh -c '
for pid in $(pgrep -u metafleet); do echo "process $pid"; grep VmHWM /proc/$pid/status; cat /proc/$pid/smaps; done
grep -E "MemAvailable|SwapTotal" /proc/meminfo'"""


class Memory:
    """The most that the agent's processes held together at one reading, the largest high-water mark of one, and the
    least that the machine had left; MB of 10^6 bytes."""

    def __init__(self, world: Scene):
        self.world = world
        self.most, self.high_water, self.least_left, self.swap = 0.0, 0.0, float("inf"), 0

    def look(self) -> bool:
        """Always returns true, for use in a condition."""
        told = self.world.on_board(LOOK)
        processes = [part.encode() for part in told.split("process ")[1:]]
        self.most = max(self.most, together(map(parse, processes)) / 1e6)
        marks = [int(kib) for kib in re.findall(r"VmHWM:\s+(\d+) kB", told)]
        self.high_water = max([self.high_water, *(kib * 1024 / 1e6 for kib in marks)])
        left, swap = (int(re.findall(rf"{name}:\s+(\d+) kB", told)[0]) for name in ("MemAvailable", "SwapTotal"))
        self.least_left, self.swap = min(self.least_left, left * 1024 / 1e6), max(self.swap, swap)
        return True


def play(world: Scene, notes: Notes) -> None:
    world.found(rounds=ROUNDS, quorum=1, min_devices=1 + len(DESKS), deadline_s=ROUND_S)
    world.flash(BOARD, tables=f"[serve]\nport = {PORT}\n")
    world.passed("flashed; first start")
    world.first_boot()
    for patient, name in enumerate(DESKS, 1):
        world.desk(name, patient)
    world.boot("cortex-a53", MEMORY_MIB)
    proof.is_on(world)
    lib = world.on_board("ls /opt/metafleet/current/lib").split()
    notes.holds("no torch is on the board, and onnxruntime is", "torch" not in lib and "onnxruntime" in lib)
    memory = Memory(world)
    world.until(lambda: memory.look() and proof.closed(world) == ROUNDS, ROUND_S)
    world.passed("all rounds are closed")
    for name in (scene.BOARD, *DESKS):
        notes.same(f"of {name} one update of each round was counted",
                   [(each.round, each.status) for each in world.updates(name)],
                   [(number, "counted") for number in range(1, ROUNDS + 1)])
    losses = [each.loss for each in world.updates(scene.BOARD)]
    notes.holds("its losses are numbers", all(loss is not None and 0 <= loss < 10 for loss in losses))
    world.until(lambda: memory.look() and world.serves(scene.BOARD, ROUNDS), 600)
    notes.holds("it answers, personalized, from the model of the last round", True)
    _over_http(world, notes)
    memory.look()
    notes.same("there is no swap", memory.swap, 0)
    notes.facts |= {
        "memory of the agent's processes together, at most seen, MB": round(memory.most, 1),
        "largest high-water mark of a process, MB": round(memory.high_water, 1),
        "memory that the machine had left, at least seen, MB": round(memory.least_left, 1),
        "losses of its updates": [round(loss, 4) for loss in losses if loss is not None],
        "bytes of its updates": [each.payload_bytes for each in world.updates(scene.BOARD)],
    }
    proof.switched_off(world, notes)


def _over_http(world: Scene, notes: Notes) -> None:
    """Asks the board's own HTTP server, on the board."""
    body = json.dumps({"inputs": [{"name": "x", "shape": [1, 3, 128], "datatype": "FP32",
                                   "data": np.zeros(3 * 128).tolist()}]})
    fleet = world.fleet.name
    told = world.on_board(
        f"echo '{body}' > /tmp/asked.json && python3 -c \"import urllib.request as u; print(u.urlopen("
        f"'http://127.0.0.1:{PORT}/v2/models/{fleet}/infer', open('/tmp/asked.json', 'rb').read()).read().decode())\"")
    outputs = {output["name"]: output["data"] for output in json.loads(told)["outputs"]}
    notes.holds("it answers over HTTP", abs(sum(outputs["probabilities"]) - 1) < 1e-4)


PROOF = Proof("featherweight", "A board with 512 MB and no torch takes part in rounds, and answers", play)
