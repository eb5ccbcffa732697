"""What an agent may do on a machine: a pure function of the board's profile, of what was found, and of the user's wish.

Limits from memory are a rule of thumb, kept on the safe side. Its figures: a CIFAR LeNet (797,962 parameters) trained
in an emulated ARM64 machine with 512 MB at a peak of 377 MB; on x86-64 a round takes 30 to 43 bytes per parameter
beside what torch itself takes, and about 1.2 MiB per sample of a LeNet's batch
(``benchmarks/boards/training_memory.json``). A profile or device.toml that names a limit is believed instead.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleet_core.board import profile as profiles
from fleet_core.board.probe import Machine
from fleet_core.board.profile import Profile

LEAST_TRAINING_MIB = 400  # what an emulated 512 MB machine had, less what a board's graphics take
LENET_PARAMETERS = 800_000
BYTES_PER_PARAMETER = 64  # measured 42, and the update that is encoded beside it
SAMPLE_MIB = 1.2
TORCH_MIB = 320
LEAST_GLIBC = (2, 27)
LEAST_PYTHON = (3, 10)
OF_WHAT_IS_SOLD = 0.7  # graphics and firmware take the rest


@dataclass(frozen=True)
class Wish:
    """The user's, from device.toml: take part in training; limits in place of the board's; threads of the trainer."""

    train: bool = True
    max_parameters: int | None = None
    max_batch: int | None = None
    threads: int = 1


@dataclass(frozen=True)
class Complaint:
    """Something that is wrong: with ``what``, and what to do about it."""

    what: str
    problem: str
    hint: str


@dataclass(frozen=True)
class Limits:
    """What the agent keeps to. why: it does not train, or empty. Limits are None where nothing is known to limit."""

    train: bool
    why: str = ""
    max_parameters: int | None = None
    max_batch: int | None = None

    def refuses(self, parameters: int) -> str:
        """Why a model of so many parameters is not trained here, or empty."""
        if not self.train:
            return self.why
        if self.max_parameters is not None and parameters > self.max_parameters:
            return f"{parameters} parameters are over this board's {self.max_parameters}"
        return ""


def limits(board: Profile | None, found: Machine, wish: Wish) -> Limits:
    """Training on or off, batch and model limits."""
    why = _why_not(board, found, wish)
    if why:
        return Limits(False, why)
    can = board.can if board is not None else profiles.Can()
    return Limits(
        True, "",
        _first(wish.max_parameters, can.train_parameters, _parameters(found)),
        _first(wish.max_batch, can.train_batch, _batch(found)),
    )


def complaints(board: Profile | None, found: Machine, wish: Wish) -> tuple[Complaint, ...]:
    """All that is wrong between the profile, the machine and the wish."""
    of_the_board = () if board is None else _of_the_board(board, found)
    return (*_of_the_system(found), *of_the_board, *_of_the_wish(board, found, wish))


def _why_not(board: Profile | None, found: Machine, wish: Wish) -> str:
    if not wish.train:
        return "device.toml says so ([train] enabled = false)"
    if profiles.is_narrow(found.arch) or found.bits < 64:
        return f"a {found.bits}-bit system has no torch"
    if board is not None and not board.can.train:
        return f"the profile of {board.name} says that it cannot"
    if "torch" not in found.packages:
        return "torch is not installed"
    if found.memory_mib is not None and found.memory_mib < LEAST_TRAINING_MIB:
        return f"{found.memory_mib} MiB of memory are less than {LEAST_TRAINING_MIB}"
    return ""


def _parameters(found: Machine) -> int | None:
    """Half of what lies above the least goes to the model, the rest stays the system's."""
    if found.memory_mib is None:
        return None
    return LENET_PARAMETERS + (found.memory_mib - LEAST_TRAINING_MIB) * (1 << 20) // 2 // BYTES_PER_PARAMETER


def _batch(found: Machine) -> int | None:
    return None if found.memory_mib is None else max(1, int((found.memory_mib - TORCH_MIB) / 2 / SAMPLE_MIB))


def _of_the_system(found: Machine) -> Iterator[Complaint]:
    if profiles.is_narrow(found.arch) or found.bits < 64:
        yield Complaint("architecture", f"{found.arch} with a {found.bits}-bit Python {profiles.WHY_NOT_32_BIT}",
                        profiles.WIDE_HINT)
    if found.glibc is not None and _numbers(found.glibc) < LEAST_GLIBC:
        yield Complaint("glibc", f"{found.glibc} is older than any wheel takes", "install a newer system image")
    if found.python and _numbers(found.python) < LEAST_PYTHON:
        yield Complaint("Python", f"{found.python} is too old", "uv python install 3.11 brings one of its own")
    if "onnxruntime" not in found.packages:
        yield Complaint("onnxruntime", "is not installed: nothing can be answered", "pip install metafleet")


def _of_the_board(board: Profile, found: Machine) -> Iterator[Complaint]:
    if found.arch != board.arch and not profiles.is_narrow(found.arch):
        yield Complaint("architecture", f"{found.arch} is not the profile's {board.arch}",
                        "take the profile of this board: metafleet profiles")
    if board.cores is not None and found.cores != board.cores:
        yield Complaint("cores", f"{found.cores} instead of {board.cores}",
                        "is the board another one, or are cores shut off (taskset, isolcpus, a container)?")
    if board.memory_mib and found.memory_mib is not None and not _sold(board.memory_mib, found.memory_mib):
        sold = ", ".join(map(str, board.memory_mib))
        yield Complaint("memory", f"{found.memory_mib} MiB fit none of the variants, {sold}",
                        "is the board another one, or memory held back (gpu_mem in config.txt, a container)?")
    if board.glibc is not None and found.glibc is not None and _numbers(found.glibc) < _numbers(board.glibc):
        yield Complaint("glibc", f"{found.glibc} is older than the {board.glibc} that the profile's wheels need",
                        "install a newer system image")
    for package, pin in board.wheels.pins.items():
        version = found.packages.get(package)
        if version is not None and version.partition("+")[0] != pin:
            yield Complaint(package, f"{version} is not the profile's {pin} ({board.wheels.source})",
                            f"pip install {package}=={pin}")


def _of_the_wish(board: Profile | None, found: Machine, wish: Wish) -> Iterator[Complaint]:
    if wish.train and not limits(board, found, wish).train:
        why = _why_not(board, found, wish)
        torch = "torch is not installed" in why
        yield Complaint("training", f"is asked for, and {why}",
                        'pip install "metafleet[train]", or [train] enabled = false' if torch
                        else "[train] enabled = false in device.toml")
    if wish.threads > found.cores:
        yield Complaint("threads", f"{wish.threads} for {found.cores} cores", "lower [train] threads in device.toml")


def _sold(variants: tuple[int, ...], found_mib: int) -> bool:
    return any(OF_WHAT_IS_SOLD * variant <= found_mib <= variant for variant in variants)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
