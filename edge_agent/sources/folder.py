"""A folder that grows: each file that appears in it is taken once, by the readers of ``edge-agent samples add``."""

from __future__ import annotations

import contextlib
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from edge_agent.sources.interface import Item, Lost
from fleet_core.base import storage
from fleet_core.base.errors import DataError, SourceError
from fleet_core.board.source_settings import FolderSource
from fleet_core.data import unlabelled
from fleet_core.data.live import Taken
from fleet_core.model.layout import InputSpec

KINDS = (".npy", ".csv", ".ndjson", ".jsonl", ".wav", *unlabelled.IMAGES)
SETTLED_S = 1.0
"""A file is taken when nothing has written to it for this time."""
LOOK_S = 1.0
MAX_FILES = 10_000
MAX_FILE_BYTES = 64 << 20


class FolderFeed:
    """Samples of the files in a folder. taken: the file that lists the names of taken files. stride: as in
    ``unlabelled.load``. Raises SourceError."""

    def __init__(
        self, source: FolderSource, home: Path, spec: InputSpec, stride: int | None, taken: Path,
        clock: Callable[[], float] = time.time,
    ):
        self._folder, self._spec, self._stride = home / source.path, spec, stride
        self._file, self._clock = taken, clock
        there = {self._name(path) for path in self._files()}
        self._taken = {name for name in _names(taken) if name in there}
        storage.write_atomic(taken, "".join(f"{name}\n" for name in sorted(self._taken)).encode(), durable=False)

    def read(self, timeout_s: float) -> list[Item] | None:
        for path in self._files():
            name = self._name(path)
            if name in self._taken or not self._settled(path):
                continue
            items = self._items(path)
            self._taken.add(name)
            with contextlib.suppress(OSError), open(self._file, "a", encoding="utf-8") as kept:
                kept.write(f"{name}\n")
            return items
        time.sleep(min(timeout_s, LOOK_S))
        return []

    def close(self) -> None:
        """Does nothing: no file stays open."""

    def _files(self) -> list[Path]:
        """The readable files of the folder and its subfolders, by name."""
        try:
            found = list(self._visible(self._folder))
            for folder in sorted(path for path in self._folder.iterdir() if path.is_dir() and path.name[:1] != "."):
                found += self._visible(folder)
        except OSError as error:
            raise SourceError(f"cannot be read: {error.strerror or error}", where=str(self._folder),
                              expected="a folder") from error
        if len(found) > MAX_FILES:
            raise SourceError(f"has {len(found)} files", where=str(self._folder), expected=f"at most {MAX_FILES}",
                              hint="remove those that were taken")
        return found

    def _visible(self, folder: Path) -> Iterator[Path]:
        with os.scandir(folder) as entries:
            names = sorted(one.name for one in entries if one.name[:1] != "." and one.is_file())
        return (folder / name for name in names if Path(name).suffix.lower() in KINDS and name.isprintable())

    def _name(self, path: Path) -> str:
        return path.relative_to(self._folder).as_posix()

    def _settled(self, path: Path) -> bool:
        try:
            return not 0 <= self._clock() - path.stat().st_mtime < SETTLED_S
        except OSError:
            return False  # it is gone

    def _items(self, path: Path) -> list[Item]:
        label = "" if path.parent == self._folder else path.parent.name
        try:
            written = path.stat()
            if written.st_size > MAX_FILE_BYTES:
                return [Lost(f"{path.name} has {written.st_size} bytes; expected at most {MAX_FILE_BYTES}")]
            x = unlabelled.load(path, self._spec, stride=self._stride)
        except DataError as error:
            return [Lost(str(error).replace("\n", " "))]
        except OSError as error:
            return [Lost(f"{path.name} cannot be read: {error.strerror or error}")]
        return [Taken(one, written.st_mtime, label) for one in x]


def _names(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError):
        return []
