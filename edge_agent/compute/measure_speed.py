"""FLOP/s of this machine, measured on it in about ten seconds, and kept in the device's home for plans.

Two programs: float32 products of growing matrices by numpy, and a small convolution by ONNX Runtime where that is
installed. Training small models reaches less than either, so the lower of the two is an upper bound for it.
"""

from __future__ import annotations

import importlib.util
import json
import os
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

import numpy as np

from fleet_core.base import schema, storage
from fleet_core.base.errors import StateError
from fleet_core.board.profile import Compute

FILE = "speed.json"
SIZES = (64, 128, 256, 512, 1024)
PROGRAM_S = 5.0
X_SHAPE, W_SHAPE, Y_SHAPE = (16, 16, 32, 32), (32, 16, 3, 3), (16, 32, 30, 30)
CONVOLUTION_FLOP = 2.0 * np.prod(Y_SHAPE) * np.prod(W_SHAPE[1:])

Clock = Callable[[], float]


@dataclass(frozen=True)
class Speed:
    """measured_on: date, UTC. cores: that computed. matmul: {side of the square matrices: FLOP/s}. convolution: FLOP/s,
    None without onnxruntime."""

    measured_on: str = field(metadata={"pattern": r"\d{4}-\d\d-\d\d"})
    cores: int = field(metadata={"min": 1})
    matmul: Mapping[str, float] = field(metadata={"above": 0})
    convolution: float | None = field(default=None, metadata={"above": 0})

    @property
    def flop_per_s(self) -> float:
        """The lower of two figures: the fastest product's and the convolution's."""
        return min(max(self.matmul.values()), self.convolution or float("inf"))

    def compute(self) -> Compute:
        """As a profile's ``[compute]``."""
        by = "numpy matmul" if self.convolution is None else "the lower of numpy matmul, ONNX Runtime convolution"
        return Compute(self.flop_per_s, f"measured here, on {self.measured_on}: {by}")


def measure(seconds: float = PROGRAM_S, clock: Clock = time.perf_counter, now: Clock = time.time) -> Speed:
    """seconds: of each of the two programs. now: Unix seconds."""
    rng = np.random.default_rng(0)
    matmul: dict[str, float] = {}
    for side in SIZES:
        a, b = rng.random((2, side, side), dtype=np.float32)
        out = np.empty_like(a)
        matmul[str(side)] = _rate(partial(np.matmul, a, b, out=out), 2.0 * side**3, seconds / len(SIZES), clock)
    convolution, cores = None, os.cpu_count() or 1
    if importlib.util.find_spec("onnxruntime") is not None:
        from edge_agent.compute.onnx_session import open_function

        run = open_function(convolution_graph(), threads=cores)
        inputs = {"x": rng.random(X_SHAPE, dtype=np.float32), "w": rng.random(W_SHAPE, dtype=np.float32)}
        convolution = _rate(lambda: run(inputs), CONVOLUTION_FLOP, seconds, clock)
    return Speed(time.strftime("%Y-%m-%d", time.gmtime(now())), cores, matmul, convolution)


def write(home: Path, speed: Speed) -> None:
    storage.write_json(home / FILE, {**schema.plain(speed), "flop_per_s": speed.flop_per_s,
                                     "source": speed.compute().source})


def read(home: Path) -> Speed | None:
    """What was measured before, or None. Raises StateError for a damaged file."""
    path = home / FILE
    if not path.exists():
        return None
    try:
        speed, problems = schema.read(Speed, json.loads(storage.read_bytes(path, limit=1 << 16)), unknown="ignore")
    except ValueError as error:
        raise StateError(f"is not JSON: {error}", where=str(path), hint="edge-agent doctor --measure") from error
    if speed is None or not speed.matmul:
        raise StateError(f"is damaged: {'; '.join(map(str, problems))}", where=str(path),
                         hint="edge-agent doctor --measure")
    return speed


def _rate(work: Callable[[], object], flop: float, seconds: float, clock: Clock) -> float:
    """FLOP/s over as many runs as fit into ``seconds``, at least one. A first run is not counted."""
    work()
    begin_s, runs = clock(), 0
    while not runs or clock() - begin_s < seconds:
        work()
        runs += 1
    return runs * flop / (clock() - begin_s)


def convolution_graph() -> bytes:
    """An ONNX file, y = Conv(x, w), without padding. Devices have no package that writes ONNX."""
    node = b"".join([_field(1, b"x"), _field(1, b"w"), _field(2, b"y"), _field(4, b"Conv")])
    values = [_value(11, "x", X_SHAPE), _value(11, "w", W_SHAPE), _value(12, "y", Y_SHAPE)]
    graph = b"".join([_field(1, node), _field(2, b"convolution"), *values])
    return b"".join([_field(1, 8), _field(7, graph), _field(8, _field(2, 13))])  # IR version 8, operator set 13


def _value(number: int, name: str, shape: tuple[int, ...]) -> bytes:
    """A graph's input or output: float32 of that shape."""
    dims = b"".join(_field(1, _field(1, size)) for size in shape)
    return _field(number, _field(1, name.encode()) + _field(2, _field(1, _field(1, 1) + _field(2, dims))))


def _field(number: int, value: int | bytes) -> bytes:
    """One field of a Protocol Buffers message: a varint, or bytes with their length."""
    if isinstance(value, int):
        return _varint(number << 3) + _varint(value)
    return _varint(number << 3 | 2) + _varint(len(value)) + value


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])
