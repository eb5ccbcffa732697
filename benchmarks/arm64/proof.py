"""A proof: a scene with an emulated board, the statements that held, and other facts."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from benchmarks.arm64 import image, scene
from benchmarks.arm64.root import BOOKWORM, Debian
from benchmarks.arm64.scene import Scene
from cloud_server.ledger.ledger import Ledger
from cloud_server.ledger.ledger_tables import Certificate

PARTS = {"0xd03": "Cortex-A53", "0xd08": "Cortex-A72", "0xd0b": "Cortex-A76"}
"""CPU part numbers of Arm's cores, as /proc/cpuinfo has them."""
HOME = "/var/lib/metafleet"
BOOT_S = 900.0


@dataclass
class Notes:
    """held: statements that were checked and true. facts: other values, by name."""

    say: Callable[[str], None]
    held: list[str] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)

    def holds(self, sentence: str, condition: object) -> None:
        """Raises AssertionError if ``condition`` does not hold."""
        if not condition:
            raise AssertionError(f"does not hold: {sentence}")
        if sentence not in self.held:
            self.held.append(sentence)
        self.say(f"  holds: {sentence}")

    def same(self, sentence: str, found: object, expected: object) -> None:
        """Raises AssertionError with both values if they differ."""
        if found != expected:
            raise AssertionError(f"does not hold: {sentence}\nfound    {found}\nexpected {expected}")
        self.holds(sentence, True)


@dataclass(frozen=True)
class Proof:
    """play: plays the scene and records what held; raises AssertionError if something does not hold. programs: that it
    needs on this machine besides those of every scene."""

    name: str
    title: str
    play: Callable[[Scene, Notes], None]
    debian: Debian = BOOKWORM
    programs: tuple[str, ...] = ()


# Checks that several proofs share ----------------------------------------------------------------------------------


def is_on(world: Scene) -> None:
    """Waits until the board is on in the fleet's ledger."""
    world.until(lambda: world.device().get("state") == "on", BOOT_S)
    world.passed("the board is on")


def is_off(world: Scene) -> None:
    """Waits until the fleet's ledger says that the board is off, after the machine has ended."""
    world.machine = None
    world.until(lambda: world.device()["state"] == "off", 120)


def cut_the_power(world: Scene) -> None:
    """Cuts the power without a shutdown."""
    assert world.machine is not None
    world.machine.kill()
    world.passed("the power is cut")
    is_off(world)


def identity(world: Scene) -> dict[str, str]:
    """{file: SHA-256} of the board's identity: its key, its certificate, its own settings."""
    told = world.on_board(f"sudo sh -c 'cd {HOME} && sha256sum *.pem *.key device.toml'")
    return sums(told)


def state(world: Scene) -> dict[str, str]:
    """{file: SHA-256} of the training state that is committed on the board; empty if there is none."""
    return sums(world.on_board(f"sudo sh -c 'cd {HOME} && sha256sum methods/*/state.safetensors || true'"))


def sums(told: str) -> dict[str, str]:
    """Parses the output of sha256sum."""
    return {name: digest for digest, name in (line.split(maxsplit=1) for line in told.splitlines())}


def certificates(world: Scene, device: str = scene.BOARD) -> int:
    """The number of certificates that the fleet has issued to the device."""
    with Ledger(world.fleet / "ledger.sqlite", create=False) as ledger:
        return len(ledger.rows(Certificate, device=device))


def processor(world: Scene) -> str:
    """The core that the kernel reports, by its part number; never another machine's."""
    found = re.search(r"CPU part\s*: (\S+)", world.on_board("cat /proc/cpuinfo"))
    part = "" if found is None else found[1]
    return PARTS.get(part, part)


def closed(world: Scene) -> int:
    """The number of closed rounds."""
    return sum(each.status == "closed" for each in world.rounds())


def switched_off(world: Scene, notes: Notes, *, cut: bool = False) -> None:
    """Shuts the board down and checks its card. cut: its power was cut before."""
    world.power_off()
    image.check(world.card, cut=cut)
    notes.holds("both file systems of the card are sound afterwards" + (
        ", but for FAT's mark that it was not closed in order" if cut else ""), True)
