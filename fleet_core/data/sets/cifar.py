"""CIFAR-10 and CIFAR-100 (Krizhevsky 2009) from their binary version; the pickled version is never read.

A record is one label byte (CIFAR-100: the coarse one, then the fine one) and 3,072 bytes of a 3×32×32 image.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path

import numpy as np

from fleet_core.base.errors import DataError
from fleet_core.data.samples import Samples
from fleet_core.data.sets.archives import tar_files

SHAPE = (3, 32, 32)
PIXELS = 3 * 32 * 32
LIMIT_BYTES = 512 << 20
OBJECTS = ("airplane", "automobile", "bird", "cat", "deer", "dog", "frog", "horse", "ship", "truck")
TEN = "cifar-10-batches-bin"
HUNDRED = "cifar-100-binary"
FINE_NAMES = "fine_label_names.txt"


def parse_records(data: bytes, label_bytes: int, classes: tuple[str, ...], where: str) -> Samples:
    """x uint8 [N, 3, 32, 32]; y int64 [N], the last label byte. Raises DataError."""
    record = label_bytes + PIXELS
    if not data or len(data) % record:
        raise DataError(f"holds {len(data)} bytes", where=where, expected=f"a multiple of {record}")
    records = np.frombuffer(data, np.uint8).reshape(-1, record)
    y = records[:, label_bytes - 1].astype(np.int64)
    if y.max() >= len(classes):
        raise DataError(f"holds label {y.max()}", where=where, expected=f"0 to {len(classes) - 1}")
    return Samples(np.ascontiguousarray(records[:, label_bytes:]).reshape(-1, *SHAPE), y, classes=classes)


def cifar_10(files: Mapping[str, Path]) -> tuple[Samples, Samples]:
    """x uint8 [N, 3, 32, 32], y int64 [N]: the five training batches in order, and the test batch."""
    path = files["cifar-10-binary.tar.gz"]
    batches = [f"data_batch_{k}.bin" for k in range(1, 6)]
    found = _members(path, TEN, (*batches, "test_batch.bin"))
    train = b"".join(found[name] for name in batches)
    return (parse_records(train, 1, OBJECTS, f"{path}: data_batch_1 to 5"),
            parse_records(found["test_batch.bin"], 1, OBJECTS, f"{path}: test_batch.bin"))


def cifar_100(files: Mapping[str, Path]) -> tuple[Samples, Samples]:
    """x uint8 [N, 3, 32, 32], y int64 [N]: the fine labels, with the archive's names."""
    path = files["cifar-100-binary.tar.gz"]
    found = _members(path, HUNDRED, ("train.bin", "test.bin", FINE_NAMES))
    names = tuple(found[FINE_NAMES].decode("ascii", "replace").split())
    if len(set(names)) != 100 or len(names) != 100:
        raise DataError(f"names {len(names)} classes", where=f"{path}: {FINE_NAMES}", expected="100")
    return (parse_records(found["train.bin"], 2, names, f"{path}: train.bin"),
            parse_records(found["test.bin"], 2, names, f"{path}: test.bin"))


def _members(path: Path, folder: str, names: tuple[str, ...]) -> dict[str, bytes]:
    wanted = {f"{folder}/{name}": name for name in names}
    found = {wanted[name]: data for name, data in tar_files(path, wanted.__contains__, LIMIT_BYTES)}
    missing = [name for name in names if name not in found]
    if missing:
        raise DataError(f"lacks {', '.join(missing)}", where=str(path), expected="the binary version")
    return found
