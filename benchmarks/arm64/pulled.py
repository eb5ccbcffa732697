"""Programs that the board fetches itself (``metafleet updates``), and programs that Mender installs, with the board's
own systemd: path unit, ``setpriv``, timer, restart.

An update comes although the power is cut while it is fetched; a broken one goes back by itself, also when the power is
cut before it is final. Mender is Debian's client, used without a server, with artifacts of Debian's mender-artifact.
"""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

from benchmarks.arm64 import over_ssh, proof, scene
from benchmarks.arm64.over_ssh import BOARD_KIND, BROKEN, GOOD, SERVES, SLOW_S, asked, current
from benchmarks.arm64.proof import Notes, Proof
from benchmarks.arm64.root import MENDER
from benchmarks.arm64.scene import Scene
from fleet_core import __version__

PART = "/var/lib/metafleet/update/program.part"
CUT_AT_KIB = 4096
"""The power is cut when the board has so much of the program."""
UNDONE = f"{__version__}.post3"
MODULES = "/usr/share/mender/modules/v3"


def pulled(world: Scene, notes: Notes) -> None:
    before = over_ssh.device(world, notes)
    notes.same("systemd watches for a program", asked(world, "systemctl is-active metafleet-update.path"), "active")
    _cut_while_fetching(world, notes, before)
    _goes_back(world, notes)
    _cut_before_it_is_final(world, notes)
    notes.same("after all of it the identity is the same", proof.identity(world), before)
    notes.holds("it enrolled once", proof.certificates(world) == 1)
    proof.switched_off(world, notes, cut=True)


def _cut_while_fetching(world: Scene, notes: Notes, before: dict[str, str]) -> None:
    first = current(world)
    _start(world, over_ssh.checkout(world.folder / "good", GOOD))
    world.until(lambda: _fetched_kib(world) >= CUT_AT_KIB, SLOW_S)
    proof.cut_the_power(world)
    notes.same("the power was cut while the program was fetched", _state(world)["st"], "going")
    world.boot()
    proof.is_on(world)
    notes.same("the board runs the program before", current(world), first)
    _ends(world, "done")
    notes.holds("the program that was cut off came, was installed and made final", current(world).startswith(GOOD))
    notes.same("the version before is kept", asked(world, f"ls -d /opt/metafleet/{first}"), f"/opt/metafleet/{first}")
    over_ssh.well(world)
    notes.holds("the aggregator hears of the new version", True)
    notes.same("the timer of the rollback is taken down", over_ssh.timers(world), "")
    notes.same("key, certificate and settings are the same", proof.identity(world), before)


def _goes_back(world: Scene, notes: Notes) -> None:
    good = current(world)
    _start(world, over_ssh.checkout(world.folder / "broken", BROKEN, broken=True))
    world.until(lambda: current(world).startswith(BROKEN), SLOW_S)
    notes.holds("systemd has the timer of the rollback", "metafleet-return-" in over_ssh.timers(world))
    why = _ends(world, "failed")
    notes.facts["why the broken program went back"] = why
    notes.holds("a program whose agent does not start is taken back, and the fleet learns why", "its broker" in why)
    notes.same("the update is halted", _update(world)["st"], "halted")
    notes.same("the board runs the program before", current(world), good)
    over_ssh.well(world)


def _cut_before_it_is_final(world: Scene, notes: Notes) -> None:
    good = current(world)
    world.metafleet("updates", "resume", str(world.fleet))
    world.until(lambda: current(world).startswith(BROKEN), SLOW_S)
    proof.cut_the_power(world)
    world.boot()
    why = _ends(world, "failed")
    notes.facts["why the program went back after the cut"] = why
    notes.same("cut off before it is final, the board goes back when it starts", current(world), good)
    over_ssh.well(world)


def _start(world: Scene, source: Path) -> None:
    """Announces the program of the checkout ``source``."""
    world.metafleet("updates", "start", str(world.fleet), _device_file(world), "--device", scene.BOARD, source=source)
    world.passed(f"announced: {source.name}")


def _ends(world: Scene, state: str) -> str:
    """Waits until the board is done or has failed; returns why."""
    world.until(lambda: _state(world)["st"] in ("done", "failed") and _update(world)["st"] != "running", 2 * SLOW_S)
    found = _state(world)
    world.passed(f"the update: {found['st']} {found['why']}")
    if found["st"] != state:
        raise AssertionError(f"the update: {found}, not {state}")
    return str(found["why"])


def _update(world: Scene) -> dict[str, Any]:
    found: dict[str, Any] = json.loads(world.metafleet("updates", "status", str(world.fleet), "--json"))
    return found


def _state(world: Scene) -> dict[str, Any]:
    found: dict[str, Any] = _update(world)["devices"][scene.BOARD]
    return found


def _fetched_kib(world: Scene) -> int:
    return int(asked(world, f"sudo du -k {PART} 2>/dev/null | cut -f1") or 0)


# Mender ---------------------------------------------------------------------------------------------------------------


def mender(world: Scene, notes: Notes) -> None:
    before = over_ssh.device(world, notes)
    notes.facts["mender"] = world.on_board("mender --version").split()[0]
    world.on_board(f"sudo mkdir -p {MODULES} /data/mender")  # to which Debian links /var/lib/mender
    world.on_board(f"sudo ln -s /opt/metafleet/current/bin/mender {MODULES}/metafleet-agent")
    for path, line in {"/var/lib/mender/device_type": "device_type=raspberrypi3", "/etc/mender/mender.conf": "{}",
                       "/etc/mender/artifact_info": "artifact_name=first"}.items():
        world.on_board(f"echo '{line}' | sudo tee {path}")
    first = current(world)
    _installs(world, notes, first)
    good = current(world)
    _refuses(world, notes, good)
    _rolls_back(world, notes, good)
    notes.same("after all of it the identity is the same", proof.identity(world), before)
    proof.switched_off(world, notes)


def _installs(world: Scene, notes: Notes, first: str) -> None:
    _install(world, over_ssh.checkout(world.folder / "good", GOOD), works=True)
    notes.holds("Mender installs a program, whose agent reaches its broker", current(world).startswith(GOOD))
    notes.holds("it is not final yet", "metafleet-return-" in over_ssh.timers(world))
    world.on_board("sudo mender commit", SLOW_S)
    over_ssh.well(world)
    notes.same("Mender's commit makes it final", over_ssh.timers(world), "")
    notes.same("the version before is kept", asked(world, f"ls -d /opt/metafleet/{first}"), f"/opt/metafleet/{first}")


def _refuses(world: Scene, notes: Notes, good: str) -> None:
    _install(world, over_ssh.checkout(world.folder / "broken", BROKEN, broken=True), works=False)
    notes.same("a program whose agent does not start fails to install, and goes back", current(world), good)
    over_ssh.well(world)


def _rolls_back(world: Scene, notes: Notes, good: str) -> None:
    _install(world, over_ssh.checkout(world.folder / "undone", UNDONE), works=True)
    world.on_board("sudo mender rollback", SLOW_S)
    notes.same("Mender's rollback before the commit goes back", current(world), good)
    over_ssh.well(world)


def _install(world: Scene, source: Path, *, works: bool) -> None:
    """Makes the artifact of docs/update.md from the checkout ``source``, and has Mender install it."""
    package = world.folder / f"package-{source.name}"
    world.metafleet("updates", "save", str(world.fleet), _device_file(world), str(package), source=source)
    artifact = package.with_suffix(".mender")
    files = [part for path in sorted(package.iterdir()) for part in ("-f", str(path))]
    subprocess.run(["mender-artifact", "write", "module-image", "-T", "metafleet-agent", "-n", source.name, "-t",
                    "raspberrypi3", "-o", str(artifact), *files], check=True, capture_output=True)
    with artifact.open("rb") as data:
        subprocess.run(world.ssh("cat > /tmp/program.mender"), stdin=data, check=True, capture_output=True)
    world.passed(f"Mender's artifact is on the board: {source.name}")
    try:
        world.on_board("sudo mender install /tmp/program.mender", 2 * SLOW_S)
    except AssertionError as error:
        if works:
            raise
        world.passed(f"refused: {str(error).splitlines()[-1]}")
    else:
        if not works:
            raise AssertionError("Mender has installed a broken program")
        world.passed("Mender has installed it")


def _device_file(world: Scene) -> str:
    return str(world.device_file(BOARD_KIND, tables=SERVES))


PULLED = Proof("pulled", "Fetched by the board with a real systemd: an update comes through a power cut, a broken one "
                         "goes back by itself", pulled)
WITH_MENDER = Proof("mender", "Installed by Debian's Mender client: commit, a broken program, rollback", mender, MENDER,
                    ("mender-artifact",))
