"""A board's profile: a TOML file in which every constant has a cited source.

A constant without a source is left out of the file and reported as absent where it would be needed. All mistakes of a
file are reported at once, as ``file:line: key: problem``.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet_core.base import config, schema
from fleet_core.base.errors import ConfigError
from fleet_core.base.schema import Problem

ARCHITECTURES = ("aarch64", "x86_64")
NARROW = ("armv6", "armv7", "armhf", "armel", "i386", "i486", "i586", "i686")
WHY_NOT_32_BIT = "is a 32-bit system, for which there is no torch and no onnxruntime wheel at any version"
WIDE_HINT = "write the 64-bit image of the operating system to the board"
SENSORS = ("none", "rapl", "pmic", "ina3221", "hwmon")
FIRST_BOOT = ("cloud-init", "firstrun", "ssh", "none")
TOTAL = "VDD_IN"
TEXT, LINES = 500, 32
VERSION = r"\d+(\.\d+){1,3}"
MEMORY_MAX = r"([1-9]\d?|100)%|[1-9]\d{0,11}[KMG]"
"""As in systemd.resource-control(5): a share of the system's memory, or bytes."""
PACKAGES = ("torch", "onnxruntime", "numpy")
LEAST_ISA = "armv8.0"
TORCH_BELOW = {"armv8.0": "2.10", "armv8.2": "2.11"}
"""The first torch that an aarch64 board cannot use, by instruction set: 2.10 dies of an illegal instruction on ARMv8.0
(pytorch issue 176993), and 2.11 asks for gigabytes of CUDA."""


@dataclass(frozen=True)
class Image:
    """An operating system for the board. first_boot: how it gets its settings; ``ssh``: it must be running already.
    python: the version that comes with it."""

    name: str = field(metadata={"max_length": 200})
    first_boot: str = field(metadata={"choices": FIRST_BOOT})
    python: str | None = field(default=None, metadata={"pattern": VERSION})
    note: str | None = field(default=None, metadata={"max_length": TEXT})


@dataclass(frozen=True)
class Wheels:
    """python: the version for the agent. pins: {package: version}. source: who found that these work here."""

    python: str | None = field(default=None, metadata={"pattern": VERSION})
    pins: Mapping[str, str] = field(default_factory=dict, metadata={"pattern": VERSION})
    source: str | None = field(default=None, metadata={"max_length": TEXT})


@dataclass(frozen=True)
class Can:
    """What the board can do. train_parameters: of the largest model. train_batch: the largest batch. Without them the
    limits follow from the memory. source: the reason for these values."""

    serve: bool = True
    personalize: bool = True
    train: bool = True
    train_parameters: int | None = field(default=None, metadata={"min": 1, "max": 10**12})
    train_batch: int | None = field(default=None, metadata={"min": 1, "max": 1_000_000})
    source: str | None = field(default=None, metadata={"max_length": TEXT})


@dataclass(frozen=True)
class Power:
    """Watts of the whole board at its input, and its sensor.

    chip: the ``name`` of a hwmon meter. rails: labels of the rails that are summed; empty for the meter's own total.
    scale, offset_w: convert the sum of the rails to the input's watts; ``correction`` is their source. misses: what the
    sensor does not measure. per_processor: idle_w and busy_w are those of one logical processor. other_watts: (idle,
    busy) from other sources; the spread of modelled joules covers them.
    """

    sensor: str = field(default="none", metadata={"choices": SENSORS})
    chip: str | None = field(default=None, metadata={"max_length": 64})
    rails: tuple[str, ...] = field(default=(), metadata={"max_length": LINES})
    scale: float = field(default=1.0, metadata={"above": 0, "max": 100})
    offset_w: float = field(default=0.0, metadata={"min": -1000, "max": 1000})
    correction: str | None = field(default=None, metadata={"max_length": TEXT})
    misses: str | None = field(default=None, metadata={"max_length": TEXT})
    idle_w: float | None = field(default=None, metadata={"min": 0, "max": 100_000})
    busy_w: float | None = field(default=None, metadata={"min": 0, "max": 100_000})
    per_processor: bool = False
    other_watts: tuple[tuple[float, ...], ...] = field(
        default=(), metadata={"min": 0, "max": 100_000, "max_length": LINES}
    )
    source: str | None = field(default=None, metadata={"max_length": TEXT})


@dataclass(frozen=True)
class Compute:
    """effective_flop_per_s: achieved when training small models with all cores. providers: providers of onnxruntime
    that are measured for a backbone, in addition to those that always are (``fleet_core.backbone.providers``)."""

    effective_flop_per_s: float | None = field(default=None, metadata={"above": 0, "max": 1e18})
    source: str | None = field(default=None, metadata={"max_length": TEXT})
    providers: tuple[str, ...] = field(default=(), metadata={"pattern": r"[A-Za-z0-9]{1,40}ExecutionProvider",
                                                             "max_length": LINES})


@dataclass(frozen=True)
class Radio:
    """j_per_byte: joules above idle per byte sent or received."""

    j_per_byte: float | None = field(default=None, metadata={"min": 0, "max": 1})
    source: str | None = field(default=None, metadata={"max_length": TEXT})


@dataclass(frozen=True)
class Profile:
    """A board. name: as on the command line. arch: as printed by ``uname -m``. isa: the instruction set of its Cortex
    cores: armv8.0 of A53, A57 and A72, armv8.2 of A55 and later; armv8.0 if left out. memory_mib: nominal memory of
    each variant. memory_max: what the agent may use of the system's memory; by a rule if left out. glibc: the oldest
    version that its wheels support. tried: on which hardware it was tested, or that it was not."""

    name: str = field(metadata={"pattern": r"[a-z0-9][a-z0-9.\-]{0,63}"})
    title: str = field(metadata={"max_length": 200})
    arch: str = field(metadata={"choices": ARCHITECTURES})
    isa: str | None = field(default=None, metadata={"choices": tuple(TORCH_BELOW)})
    soc: str | None = field(default=None, metadata={"max_length": 200})
    cores: int | None = field(default=None, metadata={"min": 1, "max": 4096})
    memory_mib: tuple[int, ...] = field(default=(), metadata={"min": 16, "max": 1 << 30, "max_length": LINES})
    memory_max: str | None = field(default=None, metadata={"pattern": MEMORY_MAX})
    glibc: str | None = field(default=None, metadata={"pattern": VERSION})
    tried: str = field(default="not said", metadata={"max_length": TEXT})
    images: tuple[Image, ...] = field(default=(), metadata={"max_length": LINES})
    wheels: Wheels = field(default_factory=Wheels)
    can: Can = field(default_factory=Can)
    power: Power = field(default_factory=Power)
    compute: Compute = field(default_factory=Compute)
    radio: Radio = field(default_factory=Radio)


def load(path: Path) -> Profile:
    """Reads a profile. Raises ConfigError that lists every mistake as ``file:line: key: problem``."""
    text, where = config.text_of(path), str(path)
    tables = config.tables(text, where)
    profile, problems = schema.read(Profile, tables)
    known = {problem.key for problem in problems}
    narrow = [p for p in _narrow(tables) if p.key in known]  # replaces the schema's message
    problems = [p for p in problems if p.key not in {n.key for n in narrow}]
    problems += [*narrow, *(p for p in _contradictions(tables) if p.key not in known)]
    if profile is None or problems:
        lines = [(config.line_of(text, p.key), config.located(p, text, where)) for p in problems]
        raise ConfigError("\n".join(line for _, line in sorted(lines)))
    return profile


def is_narrow(arch: str) -> bool:
    """Whether ``arch``, as printed by ``uname -m``, is a 32-bit architecture."""
    return arch.lower().startswith(NARROW) or arch.lower() == "arm"


def _narrow(tables: Mapping[str, Any]) -> Iterator[Problem]:
    arch = tables.get("arch")
    if isinstance(arch, str) and is_narrow(arch):
        yield Problem("arch", f"'{arch[:40]}' {WHY_NOT_32_BIT}: {WIDE_HINT}", "x86_64" if "86" in arch else "aarch64")


def _contradictions(tables: Mapping[str, Any]) -> Iterator[Problem]:
    """Mistakes that types cannot express. Reads the raw tables, as the file may have other mistakes as well."""
    for table, figures, source in (
        ("power", ("idle_w", "busy_w", "other_watts"), "source"), ("power", ("scale", "offset_w"), "correction"),
        ("compute", ("effective_flop_per_s",), "source"), ("radio", ("j_per_byte",), "source"),
        ("can", ("train_parameters", "train_batch"), "source"), ("wheels", ("pins",), "source"),
    ):
        yield from _unsourced(table, _table(tables, table), figures, source)
    yield from _watts(_table(tables, "power"))
    pins = _table(_table(tables, "wheels"), "pins")
    yield from _torch(pins.get("torch"), tables)
    for package in pins:
        if package not in PACKAGES:
            yield Problem(f"wheels.pins.{package}", "is not a package that an agent needs",
                          schema.suggest(str(package), PACKAGES))


def _unsourced(name: str, table: Mapping[str, Any], figures: Sequence[str], source: str) -> Iterator[Problem]:
    given = [figure for figure in figures if figure in table]
    cited = table.get(source)
    if given and (cited is None or (isinstance(cited, str) and not cited.strip())):
        yield Problem(f"{name}.{given[0]}", f"has no source: add {source} = \"…\" (a document, or how it was measured) "
                      "or leave the figure out")


def _torch(pin: Any, tables: Mapping[str, Any]) -> Iterator[Problem]:
    """A torch that this processor cannot use."""
    isa = tables.get("isa", LEAST_ISA)
    below = TORCH_BELOW.get(isa) if isinstance(isa, str) else None
    if tables.get("arch") != "aarch64" or below is None or not isinstance(pin, str) or not re.fullmatch(VERSION, pin):
        return
    if [int(part) for part in pin.split(".")] >= [int(part) for part in below.split(".")]:
        yield Problem("wheels.pins.torch", f"{pin} is not for {isa}, expected a version below {below}")


def _watts(power: Mapping[str, Any]) -> Iterator[Problem]:
    idle_w, busy_w, sensor = power.get("idle_w"), power.get("busy_w"), power.get("sensor", "none")
    rails = power.get("rails")
    if isinstance(idle_w, (int, float)) and isinstance(busy_w, (int, float)) and busy_w < idle_w:
        yield Problem("power.busy_w", f"{busy_w:g} is below idle_w, {idle_w:g}")
    others = power.get("other_watts", [])
    for number, pair in enumerate(others if isinstance(others, list) else []):
        watts = isinstance(pair, list) and all(isinstance(value, (int, float)) for value in pair)
        if watts and (len(pair) != 2 or pair[1] < pair[0]):
            yield Problem(f"power.other_watts[{number}]", "is not a pair [IDLE, BUSY] of watts, IDLE ≤ BUSY")
    if others and ("idle_w" not in power or "busy_w" not in power):
        yield Problem("power.other_watts", "needs idle_w and busy_w beside it")
    if sensor == "hwmon" and "chip" not in power:
        yield Problem("power.sensor", "hwmon needs chip = \"…\": the meter's name in /sys/class/hwmon/*/name")
    if isinstance(rails, list) and TOTAL in rails and len(rails) > 1:
        yield Problem("power.rails", f"{TOTAL} is the whole board already: name it alone, or the others without it")
    for key in ("rails", "chip", "misses"):
        if key in power and sensor in ("none", "rapl"):
            yield Problem(f"power.{key}", f"has no effect with sensor = \"{sensor}\"")


def _table(tables: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    found = tables.get(name)
    return found if isinstance(found, Mapping) else {}
