"""Puts a named set into the cache: from its public sites, or from a local copy."""

from __future__ import annotations

import contextlib
import fcntl
import hashlib
import shutil
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

from fleet_core.base.errors import DataError, StateError
from fleet_core.data.samples import load
from fleet_core.data.sets import cifar, har, idx, omniglot, set_cache, shakespeare, spoken
from fleet_core.data.sets.archives import gunzip
from fleet_core.data.sets.download import Show, digest, download, unseen
from fleet_core.data.sets.registry import Entry, Original
from fleet_core.data.sets.set_cache import TEST, TRAIN, Note, Parts, Source

READERS: Mapping[str, Callable[[Mapping[str, Path]], Parts]] = {
    "mnist": idx.mnist,
    "fashion_mnist": idx.fashion_mnist,
    "cifar_10": cifar.cifar_10,
    "cifar_100": cifar.cifar_100,
    "omniglot": omniglot.omniglot,
    "har": har.har,
    "spoken_digits": spoken.spoken_digits,
    "spoken_digits_raw": spoken.spoken_digits_raw,
    "shakespeare": shakespeare.shakespeare,
}
OWN_FORM = "a local copy in metafleet's form, not checked by sha256"


def fetch(entry: Entry, show: Show = unseen) -> Note:
    """Downloads the originals, converts them, stores the result and deletes the originals.

    Raises DataError when the set has no public site or its files are not as registered, LinkError, StateError.
    """
    if not entry.files:
        raise DataError(f"'{entry.name}' cannot be fetched", expected=entry.source,
                        hint=f"metafleet datasets fetch {entry.name} --from PATH")
    downloads = set_cache.home() / entry.name / "downloads"
    with _alone(entry):
        fetched = {file.name: download(file, downloads, show) for file in entry.files}
        sources = tuple(Source(file.name, fetched[file.name][1], file.sha256, file.bytes) for file in entry.files)
        note = _convert(entry, {name: path for name, (path, _) in fetched.items()}, sources)
        shutil.rmtree(downloads, ignore_errors=True)
    return note


def take(entry: Entry, path: Path, *, remark: str = "") -> Note:
    """Stores a local copy: the original file, a folder with the originals, or metafleet's own form.

    Originals are recognised by their sha256, also unpacked if the registry lists that form. metafleet's form is a .npz,
    or a folder with ``train.npz`` and, if there is a test part, ``test.npz``. Its shape, dtype and classes are checked,
    and the note says that its sha256 was not. Raises DataError and StateError.
    """
    if not path.exists():
        raise DataError("does not exist", where=str(path))
    if entry.reader == set_cache.IN_PACKAGE:
        raise DataError(f"'{entry.name}' ships with the package")
    if path.is_file() and path.suffix.lower() == ".npz":
        return _own(entry, path, None, remark)
    if (path / TRAIN).is_file():
        return _own(entry, path / TRAIN, path / TEST if (path / TEST).is_file() else None, remark)
    with _alone(entry):
        found = _originals(entry, path)
        return _convert(entry, found, tuple(map(source, found, found.values())), remark)


def keep(entry: Entry, parts: Parts, sources: tuple[Source, ...], *, remark: str) -> Note:
    """Stores samples that were not read from the registered originals. Raises DataError and StateError."""
    with _alone(entry):
        return set_cache.store(entry, parts, sources, checked=False, remark=remark)


def source(name: str, path: Path) -> Source:
    """A local file as a source of the note."""
    return Source(name, str(path), _digest(path), path.stat().st_size)


def _digest(path: Path) -> str:
    try:
        return digest(path)
    except OSError as error:
        raise DataError(f"cannot be read: {error.strerror or error}", where=str(path)) from error


def _convert(entry: Entry, files: Mapping[str, Path], sources: tuple[Source, ...], remark: str = "") -> Note:
    return set_cache.store(entry, READERS[entry.reader](files), sources, checked=True, remark=remark)


def _own(entry: Entry, train: Path, test: Path | None, remark: str) -> Note:
    paths = [train] if test is None else [train, test]
    parts = load(train, dtype=entry.dtype), None if test is None else load(test, dtype=entry.dtype)
    return keep(entry, parts, tuple(source(path.name, path) for path in paths),
                remark="; ".join(filter(None, (OWN_FORM, remark))))


def _originals(entry: Entry, path: Path) -> dict[str, Path]:
    """The file of each original at ``path``. Raises DataError that lists all missing and wrong files."""
    if not entry.files:
        raise DataError("is not a copy of this set in metafleet's form", where=str(path),
                        expected=f"a .npz, or a folder with {TRAIN}")
    found, problems = {}, []
    for original in entry.files:
        candidates = _candidates(original, path)
        right = [file for file in candidates if _is(original, file)]
        if right:
            found[original.name] = right[0]
        elif candidates:
            problems.append(f"{candidates[0]} has sha256 {_digest(candidates[0])}, expected {original.sha256}")
        else:
            problems.append(f"{original.name} is missing")
    if problems:
        raise DataError("; ".join(problems), where=str(path),
                        expected=f"the originals of '{entry.name}': {', '.join(f.name for f in entry.files)}")
    return found


def _candidates(original: Original, path: Path) -> list[Path]:
    """The files that may be the original: the given file, or the files in the folder with one of its names."""
    if path.is_file():
        return [path]
    return [path / name for name in (original.name, *(form.name for form in original.same)) if (path / name).is_file()]


def _is(original: Original, file: Path) -> bool:
    """Whether the file is the original, another form of it, or such a form compressed again."""
    known = {original.sha256, *(form.sha256 for form in original.same)}
    if _digest(file) in known:
        return True
    if not original.same or file.suffix != ".gz":
        return False
    try:
        content = gunzip(file, max(form.bytes for form in original.same))
    except DataError:
        return False
    return hashlib.sha256(content).hexdigest() in known


@contextlib.contextmanager
def _alone(entry: Entry) -> Iterator[None]:
    """Locks the set's folder. Raises DataError when another process is fetching the set."""
    folder = set_cache.home() / entry.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        lock = (folder / ".lock").open("w")
    except OSError as error:
        raise StateError(f"cannot be written: {error.strerror or error}", where=str(folder),
                         hint=f"check permissions, or set {set_cache.FOLDER_VARIABLE}") from error
    with lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise DataError(f"'{entry.name}' is being fetched by another process", where=str(folder)) from error
        yield
