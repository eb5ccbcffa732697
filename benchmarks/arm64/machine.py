"""An emulated board: QEMU's ``virt`` machine with one of the boards' processors, a card's image as its disk.

The machine is isolated: it reaches only the forwarded ports of this machine's loopback, and is reached only by SSH if
asked for. Its time and energy say nothing about a board.
"""

from __future__ import annotations

import contextlib
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from benchmarks.arm64 import image

QEMU = "qemu-system-aarch64"
DOOR = "10.0.2.100"
"""The address at which the machine finds the forwarded ports."""
RELAY = """\
import os, select, socket, sys
peer = socket.create_connection(("127.0.0.1", int(sys.argv[1])))
while True:
    ready, _, _ = select.select([0, peer], [], [])
    if 0 in ready:
        data = os.read(0, 65536)
        if not data:
            break
        peer.sendall(data)
    if peer in ready:
        data = peer.recv(65536)
        if not data:
            break
        while data:
            data = data[os.write(1, data):]
"""


@dataclass(frozen=True)
class Board:
    """cpu: one of QEMU's; never ``max``, which has instructions that no board has. doors: ports at ``DOOR`` -> ports of
    this machine. ssh: a port of this machine that is forwarded to the machine's SSH, or None."""

    cpu: str = "cortex-a53"
    memory_mib: int = 512
    cores: int = 2
    doors: Mapping[int, int] = field(default_factory=dict)
    ssh: int | None = None


class Machine:
    """A running board, from ``start`` to ``kill`` or its own end; it does not start again after a reboot."""

    def __init__(self, board: Board, card: Path, kernel: Path, initrd: Path, console: Path):
        self.board, self.card, self.console = board, card, console
        self._kernel, self._initrd = kernel, initrd
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> Machine:
        """Boots with the kernel's command line on the card."""
        self.console.unlink(missing_ok=True)
        relay = self.card.with_name("relay.py")
        relay.write_text(RELAY)
        board = self.board
        # cache=unsafe: no fsync on this machine; what the board wrote survives when QEMU is killed.
        disk = f"if=none,id=card,format=raw,cache=unsafe,file={self.card}"
        net = "user,id=net,restrict=on" + "".join(
            f",guestfwd=tcp:{DOOR}:{port}-cmd:{sys.executable} {relay} {here}" for port, here in board.doors.items()
        )
        if board.ssh is not None:
            net += f",hostfwd=tcp:127.0.0.1:{board.ssh}-:22"
        self._process = subprocess.Popen(
            [
                QEMU, "-machine", "virt", "-cpu", board.cpu, "-accel", "tcg,thread=multi", "-smp", str(board.cores),
                "-m", str(board.memory_mib), "-kernel", str(self._kernel), "-initrd", str(self._initrd),
                "-append", image.cmdline(self.card), "-drive", disk,
                "-device", "virtio-blk-pci,drive=card", "-netdev", net,
                "-device", "virtio-net-pci,netdev=net,romfile=", "-device", "virtio-rng-pci", "-display", "none",
                "-monitor", "none", "-serial", f"file:{self.console}", "-no-reboot",
            ],
            stdin=subprocess.DEVNULL,
        )  # fmt: skip
        return self

    @property
    def runs(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def said(self) -> str:
        """The output of the serial line since this start."""
        return self.console.read_text(errors="replace") if self.console.exists() else ""

    def waits(self) -> dict[str, float]:
        """Seconds for which each thread of the machine has waited for a processor so far; empty if Linux does not
        report it or the machine does not run."""
        found: dict[str, float] = {}
        if self._process is not None:
            for path in Path(f"/proc/{self._process.pid}/task").glob("*/schedstat"):
                with contextlib.suppress(OSError):  # the thread has ended
                    found[path.parent.name] = int(path.read_text().split()[1]) / 1e9
        return found

    def until(self, condition: Callable[[], object], timeout_s: float) -> None:
        """Waits until ``condition`` holds. Fails if the machine ends before, or after ``timeout_s`` of Patience."""
        patience = Patience(self)
        while not condition():
            if not self.runs:
                raise AssertionError(f"the machine has ended:\n{self.said()[-3000:]}")
            if patience.spent_s() > timeout_s:
                raise AssertionError(f"not within {timeout_s:g} s:\n{self.said()[-3000:]}")
            time.sleep(0.5)

    def ended(self, timeout_s: float) -> None:
        """Waits until the machine has switched itself off, or wants to restart."""
        patience = Patience(self)
        while self.runs:
            if patience.spent_s() > timeout_s:
                raise AssertionError(f"still on after {timeout_s:g} s:\n{self.said()[-3000:]}")
            time.sleep(0.1)

    def kill(self) -> None:
        """Cuts the power."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()


@dataclass(frozen=True)
class Look:
    at_s: float
    said: str
    waits: dict[str, float]


class Patience:
    """Seconds without new output on ``machine``'s serial line, less those in which it waited for a processor: they
    distinguish a machine that hangs from one that shares its processors."""

    def __init__(self, machine: Machine | None, clock: Callable[[], float] = time.monotonic):
        self._machine, self._clock = machine, clock
        self._spent_s, self._last = 0.0, self._look()

    def spent_s(self) -> float:
        """Seconds so far. The waits of threads overlap and the longest one between two calls counts, so call it
        often."""
        before, self._last = self._last, self._look()
        waited_s = max((s - before.waits.get(thread, 0.0) for thread, s in self._last.waits.items()), default=0.0)
        if self._last.said != before.said:
            self._spent_s = 0.0
        else:
            self._spent_s += max(0.0, self._last.at_s - before.at_s - waited_s)
        return self._spent_s

    def _look(self) -> Look:
        if self._machine is None:
            return Look(self._clock(), "", {})
        return Look(self._clock(), self._machine.said(), self._machine.waits())
