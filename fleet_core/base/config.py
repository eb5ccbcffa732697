"""Reads TOML files into frozen dataclasses, and checks files with secrets that they name.

Reports every mistake at once, as ``file:line: key: problem``.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any, TypeVar

from fleet_core.base import processes, schema
from fleet_core.base.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
MAX_CONFIG_BYTES = 1 << 20
TOP, ANY = -1, -2
"""Of a line, in place of the number of a list's item: before every table, and wherever."""
_Place = tuple[int, tuple[str, ...]]


def load(cls: type[T], path: Path) -> T:
    """Reads the file as a ``cls``. Raises ConfigError that lists every mistake."""
    return parse(cls, text_of(path), str(path))


def text_of(path: Path) -> str:
    """A configuration file's text. Raises ConfigError when it cannot be read or is over 1 MiB."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError("is over 1 MiB", where=str(path), expected="a configuration file")
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}", where=str(path)) from error


def check_private(path: Path) -> None:
    """Raises ConfigError for a file with a secret that other users of the machine can read."""
    if path.stat().st_mode & 0o077:
        raise ConfigError("can be read by others", where=str(path), hint=f"chmod 600 {path}")


def tables(text: str, where: str) -> dict[str, Any]:
    """TOML text as plain tables; ``where`` names it in errors. Raises ConfigError."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"is not TOML: {error}", where=where) from error


def parse(cls: type[T], text: str, where: str) -> T:
    """Reads TOML text as a ``cls``, and warns on stderr about former names of keys. ``where`` names the text in
    messages. Raises ConfigError that lists every mistake."""
    data = tables(text, where)
    for former, present in schema.renamed(cls, data):
        processes.say(rename_warning(former, present, text, where))
    value, problems = schema.read(cls, data)
    if value is None:
        raise mistakes(problems, text, where)
    return value


def rename_warning(former: str, present: str, text: str, where: str) -> str:
    """The warning about a key that is written by its former name."""
    return f"{where}:{line_of(text, former)}: {former}: is now '{present}'; the next version no longer reads it"


def mistakes(problems: Iterable[schema.Problem], text: str, where: str) -> ConfigError:
    """One error that lists every problem, a line each."""
    return ConfigError("\n".join(located(problem, text, where) for problem in problems))


def located(problem: schema.Problem, text: str, where: str) -> str:
    """``file:line: key: problem``."""
    return f"{where}:{line_of(text, problem.key)}: {problem}"


def line_of(text: str, key: str) -> int:
    """The line that sets the dotted ``key``. When the key is absent: the line of its nearest table, or 1."""
    parts = tuple(re.sub(r"\[\d+\]", "", key).split("."))
    listed = re.match(r"\w+\[(\d+)\]", key)
    items = (int(listed[1]) + 1, TOP) if listed else (ANY,)
    first, last, depth = _lines_of(text)
    if found := [first[place] for item in items if (place := (item, parts)) in first]:
        return min(found)
    tables = (parts[:length] for length in range(1, min(len(parts), depth + 1)))
    return max((last.get((item, table), 1) for table in tables for item in items), default=1)


@lru_cache(maxsize=1)
def _lines_of(text: str) -> tuple[dict[_Place, int], dict[_Place, int], int]:
    """(place -> first line, place -> last line, the longest key's parts). A place: (number of the list's item, key)."""
    first: dict[_Place, int] = {}
    last: dict[_Place, int] = {}
    table: tuple[str, ...] = ()
    blocks = Counter[str]()
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*(\[+)\s*([\w.\-\"]+)\s*\]+", line)
        setting = None if header else re.match(r"\s*([\w.\-\"]+)\s*=", line)
        if header:
            table = tuple(header[2].replace('"', "").split("."))
            blocks[header[2]] += header[1] == "[["
        if header or setting:
            key = table + tuple(setting[1].replace('"', "").split(".")) if setting else table
            for item in (ANY, blocks[table[0]] if table else TOP):
                first.setdefault((item, key), number)
                last[item, key] = number
    return first, last, max((len(key) for _, key in first), default=0)


def toml(value: Any, prefix: str = "", notes: Mapping[str, str] = MappingProxyType({})) -> str:
    """A mapping of scalars, lists, tables and lists of tables as TOML text; None is left out. notes: dotted key -> the
    comment above it."""
    lines: list[str] = []
    tables: list[tuple[str, str, Any]] = []
    for key, item in value.items():
        name = f"{prefix}{key}"
        if isinstance(item, dict):
            tables.append((name, f"[{name}]", item))
        elif isinstance(item, (list, tuple)) and item and isinstance(item[0], dict):
            tables += [(name, f"[[{name}]]", one) for one in item]
        elif item is not None:
            note = notes.get(name)
            lines += [*([f"# {note}"] if note else []), f"{key} = {_literal(item)}"]
    body = "\n".join(lines) + ("\n" if lines else "")
    for name, head, item in tables:
        body += f"\n{head}\n" + toml(item, name + ".", notes)
    return body


def _literal(item: Any) -> str:
    if isinstance(item, bool):
        return "true" if item else "false"
    if isinstance(item, (list, tuple)):
        return "[" + ", ".join(_literal(i) for i in item) + "]"
    if isinstance(item, str):
        escaped = item.replace("\\", "\\\\").replace('"', '\\"')
        return '"' + re.sub(r"[\x00-\x1f\x7f]", lambda m: f"\\u{ord(m[0]):04x}", escaped) + '"'
    return repr(item)
