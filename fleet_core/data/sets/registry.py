"""The registry of named data sets: ``sets.toml`` beside this module, read into dataclasses."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from pathlib import Path

from fleet_core.base import config, schema
from fleet_core.base.errors import DataError
from fleet_core.model.layout import InputSpec

FILE = Path(__file__).with_name("sets.toml")
SHA256 = "[0-9a-f]{64}"
NAME = "[A-Za-z0-9][A-Za-z0-9 ._+-]*"


@dataclass(frozen=True)
class Form:
    """Another file with the content of an original: unpacked, or as an older site publishes it."""

    name: str = field(metadata={"pattern": NAME})
    bytes: int = field(metadata={"min": 1})
    sha256: str = field(metadata={"pattern": SHA256})


@dataclass(frozen=True)
class Original:
    """A file as its authors published it. urls: tried in this order. same: other files that the reader accepts."""

    name: str = field(metadata={"pattern": NAME})
    urls: tuple[str, ...] = field(metadata={"pattern": "https?://.+"})
    bytes: int = field(metadata={"min": 1})
    sha256: str = field(metadata={"pattern": SHA256})
    same: tuple[Form, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A named set.

    shape, dtype: shape and dtype of one sample, without the batch axis. classes: number of labels.
    train, test: number of samples of the official parts; None when known only after conversion, 0 without such a part.
    client: what the clients are (writers, people), or None. clients: their number.
    terms: what the licence requires or leaves open. redistribute: whether everyone may redistribute the data.
    version: version of the reader; sets converted by an older version are fetched again.
    scale, mean, std: as in InputSpec. figures: source of mean and std.
    model: the recommended named model; by default the one for samples of this shape.
    files: none for sets that ship with the package or can only be taken from a local copy.
    """

    title: str
    task: str
    source: str
    licence: str
    redistribute: bool
    reader: str
    version: int
    shape: tuple[int, ...]
    dtype: str
    classes: int
    train: int | None = None
    test: int | None = None
    client: str | None = None
    clients: int | None = None
    terms: str = ""
    scale: float = 1.0
    mean: tuple[float, ...] = ()
    std: tuple[float, ...] = ()
    figures: str = ""
    model: str = ""
    files: tuple[Original, ...] = ()
    name: str = ""

    @property
    def samples(self) -> int | None:
        return None if self.train is None or self.test is None else self.train + self.test

    @property
    def input_spec(self) -> InputSpec:
        """The recommended input of a model."""
        return InputSpec(self.shape, self.dtype, self.scale, self.mean, self.std)

    @property
    def download_bytes(self) -> int:
        return sum(file.bytes for file in self.files)


@dataclass(frozen=True)
class _Registry:
    sets: Mapping[str, Entry]


@cache
def entries() -> Mapping[str, Entry]:
    """Every named set by its name."""
    read = config.parse(_Registry, FILE.read_text(encoding="utf-8"), str(FILE)).sets
    return {name: replace(entry, name=name) for name, entry in read.items()}


def entry(name: str) -> Entry:
    """The named set. Raises DataError with a suggestion."""
    if name not in entries():
        raise DataError(
            f"no data set is named '{name}'{schema.did_you_mean(name, entries())}",
            expected=f"one of {', '.join(entries())}",
            hint="metafleet datasets lists them",
        )
    return entries()[name]
