"""``metafleet flash`` over SSH into the running board, with the board's own systemd: an update that works, and updates
that do not, with the operator there, with the operator gone, and with a power cut in between.

The versions are other checkouts on the operator's machine: the modules that run here, changed in one place.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
from pathlib import Path

from benchmarks.arm64 import proof, scene
from benchmarks.arm64.proof import Notes, Proof
from benchmarks.arm64.scene import Scene
from edge_agent.commands import run
from fleet_core import __version__

BOARD_KIND = "raspberry-pi-3b-plus"
SERVES = "[train]\nenabled = false\n"
PACKAGES = ("fleet_core", "edge_agent", "cloud_server", "firmware_profiles", "export")
GOOD, BROKEN = f"{__version__}.post1", f"{__version__}.post2"
PATIENCE_S = 240
SHORT_S = 45
"""How long the operator waits for an update that will fail; the device waits a minute longer."""
FLASH = "/opt/metafleet/.flash"
SLOW_S = 600.0


def play(world: Scene, notes: Notes) -> None:
    before = device(world, notes)
    first = current(world)
    _update(world, notes, first)
    _restart(world, notes, before)
    good = current(world)
    _operator_there(world, notes, good)
    _operator_gone(world, notes, good)
    _power_cut(world, notes, good)
    notes.same("after all of it the identity is the same", proof.identity(world), before)
    notes.holds("it enrolled once", proof.certificates(world) == 1)
    proof.switched_off(world, notes, cut=True)


def device(world: Scene, notes: Notes) -> dict[str, str]:
    """A board that is flashed, enrolled and on; returns its identity."""
    world.found(rounds=1)
    world.flash(BOARD_KIND, tables=SERVES)
    world.desk()
    world.passed("flashed; first start")
    world.first_boot()
    world.boot()
    proof.is_on(world)
    notes.facts["systemd"] = world.on_board("systemctl --version").split()[1]
    return proof.identity(world)


def _update(world: Scene, notes: Notes, first: str) -> None:
    """A version that works."""
    told = _flash(world, checkout(world.folder / "good", GOOD), PATIENCE_S)
    world.passed(f"updated: {told.strip()}")
    notes.holds("an update over SSH was confirmed", current(world).startswith(f"{GOOD}-"))
    notes.same("the version before is kept", world.on_board(f"ls -d /opt/metafleet/{first}").strip(),
               f"/opt/metafleet/{first}")
    world.until(lambda: world.device()["version"].startswith(GOOD), SLOW_S)
    notes.holds("the aggregator hears of the new version", True)
    again = _flash(world, world.folder / "good", PATIENCE_S)
    notes.holds("flashing it again finds nothing to do", "runs already" in again)
    notes.same("the timer of the way back is taken down", timers(world), "")


def _restart(world: Scene, notes: Notes, before: dict[str, str]) -> None:
    assert world.machine is not None
    subprocess.run(world.ssh("sudo systemctl reboot"), capture_output=True)
    world.machine.ended(300)
    proof.is_off(world)
    world.boot()
    proof.is_on(world)
    notes.same("after a reboot it is the same device: key, certificate and settings", proof.identity(world), before)
    notes.holds("and runs the new version", current(world).startswith(f"{GOOD}-"))


def _operator_there(world: Scene, notes: Notes, good: str) -> None:
    """A version whose agent does not start; the command waits, and rolls back."""
    well(world)
    try:
        told = _flash(world, checkout(world.folder / "broken", BROKEN, broken=True), SHORT_S)
    except AssertionError as error:
        told = str(error)
    notes.holds("flashing a version whose agent does not start fails, and says so", "did not come back" in told)
    _is_back(world, notes, good, "a broken update is taken back", f"not back within {SHORT_S} s")


def _operator_gone(world: Scene, notes: Notes, good: str) -> None:
    """The same, and the operator's machine is gone before it can roll back."""
    _armed(world)
    notes.holds("systemd has the timer of the way back", "metafleet-return-" in timers(world))
    _is_back(world, notes, good, "with the operator gone, the board returns by its timer",
             "nobody confirmed it in time")


def _power_cut(world: Scene, notes: Notes, good: str) -> None:
    """The same, and the board's power is cut before the timer ends."""
    _armed(world)
    proof.cut_the_power(world)
    world.boot()
    _is_back(world, notes, good, "cut off while unconfirmed, the board returns when it starts",
             "started anew before it was confirmed")


def _is_back(world: Scene, notes: Notes, good: str, what: str, why: str) -> None:
    world.until(lambda: _last_return(world), SLOW_S)
    world.passed(what)
    told = _last_return(world)
    notes.holds(f"{what} ({why})", why in told and told.startswith(f"{BROKEN}-"))
    notes.same(f"{what}: it runs the version before", current(world), good)
    well(world)
    notes.holds(f"{what}: its agent is up, and on at the broker", True)


def _armed(world: Scene) -> None:
    """Leaves a broken version running unconfirmed: the command that installed it is killed with its connection."""
    command = [str(scene.BIN / "metafleet"), *_arguments(world, SHORT_S)]
    process = subprocess.Popen(command, env=scene.clean(world.folder / "broken"), cwd=world.folder,
                               start_new_session=True, stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL,
                               stderr=subprocess.DEVNULL)
    try:
        world.until(lambda: current(world).startswith(f"{BROKEN}-"), SLOW_S)
    finally:
        os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    world.passed("a broken version is there, and the operator gone")


# Questions to the board -------------------------------------------------------------------------------------------


def asked(world: Scene, command: str) -> str:
    """The output of ``command`` on the board; empty if it does not answer."""
    try:
        return world.on_board(command).strip()
    except (AssertionError, subprocess.TimeoutExpired):
        return ""


def current(world: Scene) -> str:
    return asked(world, "readlink /opt/metafleet/current")


def _last_return(world: Scene) -> str:
    """Why the board rolled back; empty while an update is unconfirmed, and if none was rolled back."""
    return asked(world, f"sudo sh -c '[ -e {FLASH}/armed ] || [ -e {FLASH}/back ] || cat {FLASH}/last-return'")


def timers(world: Scene) -> str:
    return asked(world, "systemctl list-timers --all --no-legend 'metafleet-return-*'")


def well(world: Scene) -> None:
    """Waits until the agent is up and its presence names the good version."""
    world.until(lambda: asked(world, "systemctl is-active metafleet") == "active", SLOW_S)
    world.until(lambda: world.device()["state"] == "on" and world.device()["version"].startswith(GOOD), SLOW_S)


# The operator ---------------------------------------------------------------------------------------------------------


def checkout(folder: Path, version: str, *, broken: bool = False) -> Path:
    """The modules that run here as another version. broken: its agent ends as soon as it starts."""
    here = Path(__file__).resolve().parent.parent.parent
    for package in PACKAGES:
        shutil.copytree(here / package, folder / package, ignore=shutil.ignore_patterns("__pycache__"),
                        dirs_exist_ok=True)
    init = folder / "fleet_core" / "__init__.py"
    init.write_text(init.read_text().replace(f'"{__version__}"', f'"{version}"'))
    if broken:
        start = folder / Path(run.__file__).relative_to(here)
        start.write_text(start.read_text().replace("from __future__ import annotations",
                                                   'from __future__ import annotations\n\nraise SystemExit("broken")'))
    return folder


def _flash(world: Scene, source: Path, patience_s: int) -> str:
    """The output of the command of the checkout ``source``. Raises AssertionError if it fails."""
    return world.metafleet(*_arguments(world, patience_s), source=source)


def _arguments(world: Scene, patience_s: int) -> list[str]:
    config = world.folder / "ssh_config"
    config.write_text(f"IdentityFile {world.key()}\nUserKnownHostsFile {world.folder}/known_hosts\n")
    device = world.device_file(BOARD_KIND, tables=SERVES)
    return ["flash", str(device), "--to", f"ssh://me@127.0.0.1:{world.ssh_port}", "--ssh-config", str(config),
            "--accept-host-key", world.host_key(), "--patience-s", str(patience_s)]


PROOF = Proof("over-ssh", "Flashed over SSH with a real systemd: an update comes, a broken one goes by itself", play)
