"""A card for a system with cloud-init, which sets up the device at its first start: the real cloud-init of Debian
trixie, with the settings of Raspberry Pi OS for it."""

from __future__ import annotations

import json

import numpy as np

from benchmarks.arm64 import proof, root, scene
from benchmarks.arm64.proof import Notes, Proof
from benchmarks.arm64.scene import Scene
from fleet_core.data.heartbeat import load_heartbeat

RESULT = "/run/cloud-init/result.json"
TOLERANCE = 1e-5


def play(world: Scene, notes: Notes) -> None:
    world.found()
    world.flash("raspberry-pi-zero-2-w", system="trixie", tables="[train]\nenabled = false\n")
    world.desk()
    world.passed("flashed; first start")
    world.boot()
    proof.is_on(world)
    _first_start(world, notes)
    _answers(world, notes)
    proof.switched_off(world, notes)


def _first_start(world: Scene, notes: Notes) -> None:
    """Checks what cloud-init did."""
    told = json.loads(world.on_board(f"cat {RESULT}"))["v1"]
    notes.facts |= {"cloud_init": world.on_board("cloud-init --version 2>&1").split()[-1],
                    "systemd": world.on_board("systemctl --version").split()[1],
                    "python": world.on_board("python3 --version").split()[1], "datasource": told["datasource"]}
    notes.holds("cloud-init found the card's files", "NoCloud" in told["datasource"])
    notes.same("cloud-init ran without an error", told["errors"], [])
    notes.same("the host has the device's name", world.on_board("hostname").strip(), scene.BOARD)
    notes.same("the user that the file names may log in, by key, and be root", world.on_board("sudo id -un").strip(),
               "root")  # fmt: skip
    left = world.on_board("sudo find /var/lib/metafleet /boot/firmware -name '*.token' -o -name program.tar.gz")
    notes.same("the token is spent and erased, the package is gone from the first partition", left, "")
    notes.holds("cloud-init is switched off for all further starts", _exists(world, "/etc/cloud/cloud-init.disabled"))
    notes.holds("it enrolled once", proof.certificates(world) == 1)
    notes.same("the processor is the one that was asked for", proof.processor(world), "Cortex-A53")


def _answers(world: Scene, notes: Notes) -> None:
    samples = load_heartbeat()
    x = samples.of_client(samples.clients[0]).x[-20:]
    world.until(lambda: world.serves(scene.DESK) and world.serves(scene.BOARD), 300)
    desk, board = (world.answer(name, x) for name in (scene.DESK, scene.BOARD))
    notes.same("it answers with the labels of x86-64", board["labels"], desk["labels"])
    apart = float(np.abs(np.array(board["probabilities"]) - desk["probabilities"]).max())
    notes.facts["largest_difference"] = apart
    notes.holds(f"probabilities are within {TOLERANCE:g} of those of x86-64", apart <= TOLERANCE)


def _exists(world: Scene, path: str) -> bool:
    return world.on_board(f"[ ! -e {path} ] || echo yes").strip() == "yes"


PROOF = Proof("cloud-init", "A flashed card makes a device of itself by cloud-init", play, root.TRIXIE)
