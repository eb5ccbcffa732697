"""Shakespeare by role: windows of 80 characters, and the character that follows.

Caldas et al., "LEAF: A Benchmark for Federated Settings" (2018). The file is that of TensorFlow Federated: a SQLite
table of LEAF's roles, one speech per row as a ``tf.train.Example`` with the feature ``snippets``; each role's speeches
are divided into train and test. A client is a role of a play.

Text, window and vocabulary are LEAF's: the speeches of a role in one string, with line ends and repeated spaces as one
space; 80 characters; LEAF's 80 symbols. Deviations: windows begin 10 characters apart (LEAF: one apart, of which a run
then draws a share); a character outside the vocabulary is class 80, *unknown* (LEAF: none). Time is the position of
the window's first character in the role's part.
"""

from __future__ import annotations

import contextlib
import re
import sqlite3
import tempfile
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from fleet_core.base.errors import DataError
from fleet_core.data.samples import Samples
from fleet_core.data.sets.archives import unlzma

VOCABULARY = "\n !\"&'(),-.0123456789:;>?ABCDEFGHIJKLMNOPQRSTUVWXYZ[]abcdefghijklmnopqrstuvwxyz}"
UNKNOWN = len(VOCABULARY)
CLASSES = (*({"\n": "newline", " ": "space"}.get(symbol, symbol) for symbol in VOCABULARY), "unknown")
WINDOW, STRIDE = 80, 10
LIMIT_BYTES = 128 << 20
QUERY = "SELECT client_id, serialized_example_proto FROM examples WHERE split_name = ? ORDER BY client_id, rowid"
FEATURE = b"snippets"
TABLE = np.full(128, UNKNOWN, np.int64)
TABLE[[ord(symbol) for symbol in VOCABULARY]] = np.arange(UNKNOWN)


def shakespeare(files: Mapping[str, Path]) -> tuple[Samples, Samples]:
    """x int64 [N, 80], y int64 [N], client: the role, time: characters."""
    path = files["shakespeare.sqlite.lzma"]
    with tempfile.NamedTemporaryFile(suffix=".sqlite") as plain:
        unlzma(path, plain, LIMIT_BYTES)
        plain.flush()
        return (samples_of(_texts(plain.name, "train", str(path)), str(path)),
                samples_of(_texts(plain.name, "test", str(path)), str(path)))


def windows(text: str) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """(x int64 [n, 80], y int64 [n]) of one role's text; empty for a text of 80 characters or fewer."""
    text = re.sub(r"  +", " ", text.replace("\n", " "))
    points = np.frombuffer(text.encode("utf-32-le", "replace"), "<u4").astype(np.int64)
    symbols = np.where(points < len(TABLE), TABLE[np.minimum(points, len(TABLE) - 1)], UNKNOWN)
    if len(symbols) <= WINDOW:
        return np.empty((0, WINDOW), np.int64), np.empty(0, np.int64)
    rows = np.lib.stride_tricks.sliding_window_view(symbols, WINDOW + 1)[::STRIDE]
    return rows[:, :WINDOW], rows[:, WINDOW]


def samples_of(texts: Iterable[tuple[str, str]], where: str) -> Samples:
    """The windows of (role, text) pairs; roles without a window are left out."""
    cut = [(role, *windows(text)) for role, text in texts]
    cut = [(role, x, y) for role, x, y in cut if len(y)]
    if not cut:
        raise DataError(f"has no role with more than {WINDOW} characters", where=where)
    return Samples(
        np.concatenate([x for _, x, _ in cut]),
        np.concatenate([y for _, _, y in cut]),
        np.concatenate([np.full(len(y), role) for role, _, y in cut]),
        np.concatenate([STRIDE * np.arange(len(y), dtype=np.float64) for _, _, y in cut]),
        CLASSES,
    )


def _texts(database: str, part: str, where: str) -> Iterator[tuple[str, str]]:
    """(role, joined speeches) of one part."""
    speeches: dict[str, list[str]] = {}
    try:
        with contextlib.closing(sqlite3.connect(f"{Path(database).as_uri()}?mode=ro", uri=True)) as connection:
            for role, example in connection.execute(QUERY, (part,)):
                if not isinstance(role, str) or not role or not isinstance(example, bytes):
                    raise DataError("has a row in another format", where=where)
                speeches.setdefault(role, []).append(parse_example(example, where))
    except (sqlite3.Error, UnicodeDecodeError) as error:
        raise DataError(f"is not a database of examples: {error}", where=where) from error
    return ((role, "\n".join(lines)) for role, lines in speeches.items())


def parse_example(data: bytes, where: str) -> str:
    """The text of the feature ``snippets`` of a serialized ``tf.train.Example``. Raises DataError.

    Example {Features features = 1}, Features {map<string, Feature> feature = 1}, Feature {BytesList bytes_list = 1},
    BytesList {repeated bytes value = 1}; a map entry is {key = 1, value = 2}.
    """
    for features in _fields(data, 1, where):
        for pair in _fields(features, 1, where):
            if FEATURE not in _fields(pair, 1, where):
                continue
            values = [value for feature in _fields(pair, 2, where) for listed in _fields(feature, 1, where)
                      for value in _fields(listed, 1, where)]
            if len(values) == 1:
                return values[0].decode("utf-8", "replace")
    raise DataError(f"has an example without exactly one text '{FEATURE.decode()}'", where=where)


def _fields(data: bytes, number: int, where: str) -> list[bytes]:
    """The values of the field ``number`` of a protocol buffer message with only length-delimited fields."""
    found, at = [], 0
    while at < len(data):
        key, at = _varint(data, at, where)
        size, at = _varint(data, at, where)
        if key & 7 != 2 or at + size > len(data):
            raise DataError("has an example that cannot be read", where=where)
        if key >> 3 == number:
            found.append(data[at : at + size])
        at += size
    return found


def _varint(data: bytes, at: int, where: str) -> tuple[int, int]:
    value = 0
    for shift in range(0, 35, 7):
        if at >= len(data):
            raise DataError("has a truncated example", where=where)
        value |= (data[at] & 127) << shift
        at += 1
        if data[at - 1] < 128:
            return value, at
    raise DataError("has an example that cannot be read", where=where)
