"""What the named sets are: ``sets.toml`` beside this module, read into dataclasses."""

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
    """Another file with the content of an original: unpacked, or as an older place has it."""

    name: str = field(metadata={"pattern": NAME})
    bytes: int = field(metadata={"min": 1})
    sha256: str = field(metadata={"pattern": SHA256})


@dataclass(frozen=True)
class Original:
    """A file as its authors published it.

    urls: tried in this order. same: other files that the reader takes as well.
    """

    name: str = field(metadata={"pattern": NAME})
    urls: tuple[str, ...] = field(metadata={"pattern": "https?://.+"})
    bytes: int = field(metadata={"min": 1})
    sha256: str = field(metadata={"pattern": SHA256})
    same: tuple[Form, ...] = ()


@dataclass(frozen=True)
class Entry:
    """A named set.

    shape, dtype: of one sample, without the batch axis. classes: how many labels there are.
    train, test: samples of the official parts; None where only the converted text tells, 0 where there is no such part.
    client: what the clients are by nature (writers, people), or None. clients: how many.
    terms: what the licence asks for or leaves open. redistribute: whether everyone may pass the data on.
    version: of the reader; what an older one converted is fetched again.
    scale, mean, std: as in InputSpec. figures: where mean and std come from.
    model: the recommended named one; by default that for samples of this shape.
    files: none for what ships with the package or can only be taken from a local copy.
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
        """The recommended input of a model, scaling in the graph."""
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
