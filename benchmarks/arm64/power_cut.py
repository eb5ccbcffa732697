"""The power of a board is cut while it trains in a round: the emulator is killed, without a shutdown."""

from __future__ import annotations

from benchmarks.arm64 import proof, scene
from benchmarks.arm64.proof import Notes, Proof
from benchmarks.arm64.scene import Scene

ROUNDS, CUT_IN = 2, 2
ROUND_S = 1800.0


def play(world: Scene, notes: Notes) -> None:
    world.found(rounds=ROUNDS, quorum=1, min_devices=2, deadline_s=ROUND_S)
    world.flash("raspberry-pi-3b-plus")
    world.passed("flashed; first start")
    world.first_boot()
    world.desk()
    world.boot()
    world.until(lambda: len(world.rounds()) == 1, proof.BOOT_S)
    world.metafleet("server", "pause", str(world.fleet))  # a pause to look at the state
    world.until(lambda: proof.closed(world) == 1, ROUND_S)
    world.until(lambda: proof.state(world), 300)
    identity, state = proof.identity(world), proof.state(world)
    notes.holds("round 1 left a training state on the board", state)
    _cut(world, notes)
    world.boot()
    proof.is_on(world)
    notes.same("key, certificate and settings are the same after the cut", proof.identity(world), identity)
    notes.same("the training state is that of the last round that was counted", proof.state(world), state)
    notes.holds("meanwhile the round was still open", proof.closed(world) == 1)
    _goes_on(world, notes, state)
    proof.switched_off(world, notes, cut=True)


def _cut(world: Scene, notes: Notes) -> None:
    """Cuts the power while the board trains in round ``CUT_IN``."""
    world.metafleet("server", "resume", str(world.fleet))
    world.until(lambda: len(world.rounds()) == CUT_IN and _trains(world), 300)
    proof.cut_the_power(world)
    notes.holds("the power was cut in mid-round: the board trained, and had delivered nothing",
                proof.closed(world) == CUT_IN - 1 and len(world.updates(scene.BOARD)) == CUT_IN - 1)
    notes.holds("the aggregator learned that the board was gone, and kept the round open",
                proof.closed(world) == CUT_IN - 1)


def _trains(world: Scene) -> bool:
    """Whether the board's trainer runs; it ends between rounds."""
    return world.on_board("pgrep -f [e]dge_agent.compute.trainer || true").strip() != ""


def _goes_on(world: Scene, notes: Notes, state: dict[str, str]) -> None:
    world.until(lambda: proof.closed(world) == ROUNDS, ROUND_S)
    world.passed("all rounds are closed")
    wanted = [(number, "counted") for number in range(1, ROUNDS + 1)]
    for name in (scene.BOARD, scene.DESK):
        found = [(each.round, each.status) for each in world.updates(name)]
        notes.same(f"of {name} one update of each round was counted, none twice", found, wanted)
    world.until(lambda: proof.state(world) != state, 300)
    notes.holds("the training state on the board went on with the rounds", True)
    notes.holds("it did not enrol again", proof.certificates(world) == 1)
    notes.facts["loss of its updates"] = [round(each.loss, 4) for each in world.updates(scene.BOARD) if each.loss]


PROOF = Proof("power-cut", "A power cut in mid-round leaves identity and state, and the run goes on", play)
