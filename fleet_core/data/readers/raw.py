"""What every reader of a file returns, how it is told to cut readings, and the bound that all keep."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fleet_core.base.errors import DataError


@dataclass(frozen=True)
class Raw:
    """Arrays as a file has them: x [N, ...], y [N], client [N] | None, time [N] | None, classes [C] | None. y is empty
    where nobody asked for labels and there are none.

    row: the name of sample i in messages ("row 3" of an array, "line 5" of a text file, "cat/1.png" of a folder).
    notes: what a person should know about how the file was read.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    client: NDArray[Any] | None
    time: NDArray[Any] | None
    classes: NDArray[Any] | None
    row: Callable[[int], str]
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cut:
    """How a table of readings becomes windows.

    shape: of the fleet's sample, None where there is no fleet yet. window: readings in a window, where no shape says
    it. stride: from the first reading of a window to that of the next; None for ``window``, so that none overlap.
    """

    shape: tuple[int, ...] | None = None
    window: int | None = None
    stride: int | None = None


def row_number(index: int) -> str:
    return f"row {index}"


def bound(size_bytes: int, limit_bytes: int, where: Path | str) -> None:
    """Raises DataError for more than the limit."""
    if size_bytes > limit_bytes:
        raise DataError(f"{size_bytes} bytes are over the limit of {limit_bytes}", where=str(where))
