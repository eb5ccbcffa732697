"""The limits for an agent: a pure function of the board's profile, the machine as found, and the user's settings.

Limits derived from memory are a conservative rule of thumb, based on two measurements. A CIFAR LeNet (797,962
parameters) trained on an emulated ARM64 machine with 512 MB at a peak of 377 MB. On x86-64 a round takes 30 to 43 bytes
per parameter in addition to torch itself, and about 1.2 MiB per sample of a LeNet's batch
(``benchmarks/boards/training_memory.json``). Limits in a profile or in device.toml take precedence.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from fleet_core.board import profile as profiles
from fleet_core.board.probe import Machine
from fleet_core.board.profile import Profile

LENET_PARAMETERS = 800_000
BYTES_PER_PARAMETER = 64  # measured: 42; plus the encoded update
SAMPLE_MIB = 1.2
LEAST_GLIBC = (2, 27)
LEAST_PYTHON = (3, 10)
LEAST_SHARE_OF_SOLD = 0.7  # of the nominal memory; graphics and firmware take the rest
TORCH_FROM_MIB = 1024
"""The least nominal memory with which ``auto`` takes torch and a board is flashed with torch, which would leave little
of 512 MB for anything else."""
PACKAGES = {"torch": "torch", "onnx": "onnxruntime"}
"""What each engine needs installed."""


@dataclass(frozen=True)
class Need:
    """MiB of memory. least: of a machine that trains. own: of a trainer without model and samples."""

    least: int
    own: int


NEEDS = {
    "torch": Need(400, 320),  # 400: an emulated 512 MB machine, minus the memory of a board's graphics
    "onnx": Need(200, 130),
}


@dataclass(frozen=True)
class Wish:
    """The user's settings from device.toml: whether to train, limits that replace the board's, trainer threads, and the
    engine."""

    train: bool = True
    max_parameters: int | None = None
    max_batch: int | None = None
    threads: int = 1
    engine: str = "auto"


@dataclass(frozen=True)
class Complaint:
    """A problem with ``what``, and what to do about it."""

    what: str
    problem: str
    hint: str


@dataclass(frozen=True)
class Limits:
    """train: whether the agent trains. why: the reason why it does not, or empty. Limits are None when unknown.
    engines: those that can train here, the preferred one first; the second one serves in a fleet without a graph
    ``train``."""

    train: bool
    why: str = ""
    max_parameters: int | None = None
    max_batch: int | None = None
    engines: tuple[str, ...] = ("torch",)

    def refuses(self, parameters: int) -> str:
        """Why a model with this many parameters is not trained here, or empty."""
        if not self.train:
            return self.why
        if self.max_parameters is not None and parameters > self.max_parameters:
            return f"{parameters} parameters are over this board's {self.max_parameters}"
        return ""


def limits(board: Profile | None, found: Machine, wish: Wish) -> Limits:
    """Whether to train, and the limits on model and batch."""
    engines = engines_of(found, wish)
    why = _why_not(board, found, wish)
    if why:
        return Limits(False, why, engines=engines)
    can, need = board.can if board is not None else profiles.Can(), NEEDS[engines[0]]
    return Limits(
        True, "",
        _first(wish.max_parameters, can.train_parameters, _parameters(found, need)),
        _first(wish.max_batch, can.train_batch, _batch(found, need)),
        engines,
    )


def engines_of(found: Machine, wish: Wish) -> tuple[str, ...]:
    """The engines that are wanted and installed, the preferred one first."""
    installed = {engine: package in found.packages for engine, package in PACKAGES.items()}
    if wish.engine != "auto":
        return (wish.engine,) if installed[wish.engine] else ()
    small = found.memory_mib is not None and found.memory_mib < LEAST_SHARE_OF_SOLD * TORCH_FROM_MIB
    if installed["torch"] and not small:
        return ("torch",)
    return tuple(engine for engine in ("onnx", "torch") if installed[engine])


def complaints(board: Profile | None, found: Machine, wish: Wish) -> tuple[Complaint, ...]:
    """All problems of the machine, and all contradictions between profile, machine and settings."""
    of_the_board = () if board is None else _of_the_board(board, found)
    return (*_of_the_system(found), *of_the_board, *_of_the_wish(board, found, wish))


def _why_not(board: Profile | None, found: Machine, wish: Wish) -> str:
    if not wish.train:
        return "device.toml says so ([train] enabled = false)"
    if profiles.is_narrow(found.arch) or found.bits < 64:
        return f"a {found.bits}-bit system has neither torch nor onnxruntime"
    if board is not None and not board.can.train:
        return f"the profile of {board.name} says that it cannot"
    engines = engines_of(found, wish)
    if not engines:
        return f"{PACKAGES.get(wish.engine, 'onnxruntime')} is not installed"
    least = NEEDS[engines[0]].least
    if found.memory_mib is not None and found.memory_mib < least:
        return f"{found.memory_mib} MiB of memory are less than {least}"
    return ""


def _parameters(found: Machine, need: Need) -> int | None:
    """Half of the memory above the minimum is for the model, the rest for the system."""
    if found.memory_mib is None:
        return None
    return LENET_PARAMETERS + (found.memory_mib - need.least) * (1 << 20) // 2 // BYTES_PER_PARAMETER


def _batch(found: Machine, need: Need) -> int | None:
    return None if found.memory_mib is None else max(1, int((found.memory_mib - need.own) / 2 / SAMPLE_MIB))


def _of_the_system(found: Machine) -> Iterator[Complaint]:
    if profiles.is_narrow(found.arch) or found.bits < 64:
        yield Complaint("architecture", f"{found.arch} with a {found.bits}-bit Python {profiles.WHY_NOT_32_BIT}",
                        profiles.WIDE_HINT)
    if found.glibc is not None and _numbers(found.glibc) < LEAST_GLIBC:
        yield Complaint("glibc", f"{found.glibc} is too old for any wheel", "install a newer system image")
    if found.python and _numbers(found.python) < LEAST_PYTHON:
        yield Complaint("Python", f"{found.python} is too old", "uv python install 3.11 installs another one")
    if "onnxruntime" not in found.packages:
        yield Complaint("onnxruntime", "is not installed: nothing can be answered", "pip install metafleet")


def _of_the_board(board: Profile, found: Machine) -> Iterator[Complaint]:
    if found.arch != board.arch and not profiles.is_narrow(found.arch):
        yield Complaint("architecture", f"{found.arch} is not the profile's {board.arch}",
                        "use the profile of this board: metafleet profiles")
    if board.cores is not None and found.cores != board.cores:
        yield Complaint("cores", f"{found.cores} instead of {board.cores}",
                        "is it another board, or are cores disabled (taskset, isolcpus, a container)?")
    if board.memory_mib and found.memory_mib is not None and not _sold(board.memory_mib, found.memory_mib):
        sold = ", ".join(map(str, board.memory_mib))
        yield Complaint("memory", f"{found.memory_mib} MiB match none of the variants, {sold}",
                        "is it another board, or is memory reserved (gpu_mem in config.txt, a container)?")
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
        yield Complaint("training", f"is enabled, but {why}",
                        'pip install "metafleet[train]", or [train] engine = "auto"' if torch
                        else "[train] enabled = false in device.toml")
    if wish.threads > found.cores:
        yield Complaint("threads", f"{wish.threads} for {found.cores} cores", "lower [train] threads in device.toml")


def _sold(variants: tuple[int, ...], found_mib: int) -> bool:
    return any(LEAST_SHARE_OF_SOLD * variant <= found_mib <= variant for variant in variants)


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3] if part.isdecimal())


def _first(*values: int | None) -> int | None:
    return next((value for value in values if value is not None), None)
