"""Shared by all readers: their result, how to cut readings into windows, and the size limit."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.shaping import sound

TARGET = "target"
"""The column of the number to predict, unless columns are named."""
SECONDS = 1.0
"""The window of a fleet that learns from sound, unless it is given."""


@dataclass(frozen=True)
class Raw:
    """The arrays of a file: x [N, ...], y [N], client [N] | None, time [N] | None, classes [C] | None. y is empty when
    labels are not required and absent; targets are [N, K], or [N] for one output. outputs: their names, if the file or
    the caller has them.

    row: name of sample i in messages ("row 3" of an array, "line 5" of a text file, "cat/1.png" of a folder).
    notes: sentences for the user about how the file was read.
    """

    x: NDArray[Any]
    y: NDArray[Any]
    client: NDArray[Any] | None
    time: NDArray[Any] | None
    classes: NDArray[Any] | None
    row: Callable[[int], str]
    notes: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cut:
    """How readings and sound are cut into windows, images brought to one size, and which columns are targets.

    shape: shape of the fleet's samples, or None. window: readings in a window, if shape is None. stride: readings
    between the starts of two windows; None: the length of a window, so that windows do not overlap. size: height and
    width of images, if shape is None. fit: as in ``resize.fitted``. rate_hz: of sound; 0: as the files have it.
    seconds: of a window of sound, if shape is None; its stride counts samples of sound. outputs: the columns of a table
    that are targets; None where samples have classes, empty where the file names its targets itself. labels: targets
    are labels, 0 or 1, of which a sample has any number.
    """

    shape: tuple[int, ...] | None = None
    window: int | None = None
    stride: int | None = None
    size: tuple[int, int] | None = None
    fit: str = "refuse"
    rate_hz: int = 0
    seconds: float = SECONDS
    outputs: tuple[str, ...] | None = None
    labels: bool = False

    @property
    def targets(self) -> tuple[str, ...]:
        """The columns of a table that are targets: without a name ``TARGET``."""
        return () if self.outputs is None else self.outputs or (TARGET,)

    def one_class(self, names: Collection[str]) -> str:
        """What to do where a table with these columns has one class for each sample, and labels are wanted; empty
        where it does not have one."""
        one = self.labels and "label" in names
        return "its column 'label' holds one class for each sample: leave out --task multi-label" if one else ""

    def image(self, channels: int) -> tuple[int, ...] | None:
        """The shape of images of so many channels; None if each file keeps its size."""
        size = self.size if self.shape is None else self.shape[1:] if len(self.shape) == 3 else None
        return None if size is None or self.fit == "refuse" else (channels, *size)

    def frames(self, rate_hz: int) -> int:
        """Frames in a window of sound at this rate."""
        return sound.frames_in(rate_hz, self.seconds) if self.shape is None else self.shape[-1]


def spread(labels: Sequence[str]) -> list[int]:
    """An order of files in which each class has about its share of every part, so that a split leaves none out."""
    count, seen = Counter(labels), Counter[str]()
    places = []
    for label in labels:
        places.append((seen[label] + 0.5) / count[label])
        seen[label] += 1
    return sorted(range(len(labels)), key=lambda k: (places[k], labels[k]))


def row_number(index: int) -> str:
    return f"row {index}"


def bound(size_bytes: int, limit_bytes: int, where: Path | str) -> None:
    """Raises DataError for more than ``limit_bytes``."""
    if size_bytes > limit_bytes:
        raise DataError(f"{size_bytes} bytes are over the limit of {limit_bytes}", where=str(where))


def check_file(path: Path, limit_bytes: int) -> None:
    """Raises DataError unless ``path`` is a file of at most ``limit_bytes``."""
    if not path.is_file():
        raise DataError("is not a file", where=str(path))
    bound(path.stat().st_size, limit_bytes, path)
