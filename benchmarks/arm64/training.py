"""A board that trains with its pinned torch, as a Cortex-A53 in one round and as a Cortex-A72 in the next, each time
together with two x86-64 devices."""

from __future__ import annotations

from benchmarks.arm64 import proof, scene
from benchmarks.arm64.proof import Notes, Proof
from benchmarks.arm64.scene import Scene

CPUS = {"cortex-a53": ("Cortex-A53", 512), "cortex-a72": ("Cortex-A72", 1024)}
"""QEMU's name: (the core, memory in MiB of the smallest board that has it)."""
PINS = {"torch": "2.9.1", "onnxruntime": "1.23.2"}
DESKS = ("desk-1", "desk-2")
ROUND_S = 1800.0


def play(world: Scene, notes: Notes) -> None:
    world.found(rounds=len(CPUS), quorum=1, min_devices=1 + len(DESKS), deadline_s=ROUND_S)
    world.flash("raspberry-pi-3b-plus")
    world.passed("flashed; first start")
    world.first_boot()
    for patient, name in enumerate(DESKS, 1):
        world.desk(name, patient)
    for number, (cpu, (core, memory_mib)) in enumerate(CPUS.items(), 1):
        world.passed(f"starts as {core}, {memory_mib} MiB")
        world.boot(cpu, memory_mib)
        proof.is_on(world)
        if number == 1:
            world.until(lambda: len(world.rounds()) == 1, 120)
            world.metafleet("server", "pause", str(world.fleet))  # the next round is for the other processor
        else:
            world.metafleet("server", "resume", str(world.fleet))
        _round(world, notes, number, core)
        _wheels(world, notes, core)
        proof.switched_off(world, notes)
        proof.is_off(world)


def _round(world: Scene, notes: Notes, number: int, core: str) -> None:
    """One real round with all three devices."""
    world.until(lambda: proof.closed(world) == number, ROUND_S)
    world.passed(f"round {number} is closed")
    row = world.rounds()[number - 1]
    counted = {name: [each for each in world.updates(name) if each.round == number and each.status == "counted"]
               for name in (scene.BOARD, *DESKS)}
    notes.same(f"{core}: the round was asked of the board and of two devices of x86-64", set(row.cohort), set(counted))
    notes.same(f"{core}: the round closed with one update of each, the board's among them",
               {name: len(found) for name, found in counted.items()}, dict.fromkeys(counted, 1))
    own = counted[scene.BOARD][0]
    notes.holds(f"{core}: its training came to a loss that is a number", own.loss is not None and 0 < own.loss < 10)
    notes.facts |= {f"{core}: loss of its update": own.loss, f"{core}: samples": own.samples,
                    f"{core}: bytes of its update": own.payload_bytes}


def _wheels(world: Scene, notes: Notes, core: str) -> None:
    """Checks the processor and the versions that trained."""
    notes.same(f"{core}: the kernel finds that processor", proof.processor(world), core)
    lib = "/opt/metafleet/current/lib"
    found = {name: world.on_board(f"cd {lib} && ls -d {name}-*.dist-info").strip() for name in PINS}
    notes.same(f"{core}: with the wheels that the profile pins",
               found, {name: f"{name}-{version}.dist-info" for name, version in PINS.items()})
    notes.facts |= {name: version for name, version in PINS.items()}


PROOF = Proof("training", "Torch trains on Cortex-A53 and Cortex-A72, in real rounds with two x86-64 devices", play)
