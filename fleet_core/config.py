"""TOML files into frozen dataclasses: every mistake at once, as ``file:line: key: problem``, with a suggestion."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, TypeVar

from fleet_core import schema
from fleet_core.errors import ConfigError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

T = TypeVar("T")
MAX_CONFIG_BYTES = 1 << 20


def load(cls: type[T], path: Path) -> T:
    """The file as a ``cls``. Raises ConfigError that lists every mistake."""
    try:
        if path.stat().st_size > MAX_CONFIG_BYTES:
            raise ConfigError("is over 1 MiB", where=str(path), expected="a configuration file")
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"cannot be read: {getattr(error, 'strerror', None) or error}", where=str(path)) from error
    return parse(cls, text, str(path))


def parse(cls: type[T], text: str, where: str) -> T:
    """TOML text as a ``cls``; ``where`` names it in messages."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise ConfigError(f"is no TOML: {error}", where=where) from error
    value, problems = schema.read(cls, data)
    if value is None:
        raise ConfigError("\n".join(located(problem, text, where) for problem in problems))
    return value


def located(problem: schema.Problem, text: str, where: str) -> str:
    """``file:line: key: problem``."""
    return f"{where}:{line_of(text, problem.key)}: {problem}"


def line_of(text: str, key: str) -> int:
    """The line that sets the dotted ``key``; of its nearest table when the key is absent; else 1."""
    parts = re.sub(r"\[\d+\]", "", key).split(".")
    table: list[str] = []
    nearest = 1
    for number, line in enumerate(text.splitlines(), start=1):
        header = re.match(r"\s*\[+\s*([\w.\-\"]+)\s*\]+", line)
        if header:
            table = header[1].replace('"', "").split(".")
            if table == parts[: len(table)]:
                nearest = number
            continue
        setting = re.match(r"\s*([\w.\-\"]+)\s*=", line)
        if setting and table + setting[1].replace('"', "").split(".") == parts:
            return number
    return nearest


def toml(value: Any, prefix: str = "") -> str:
    """A plain mapping of scalars, lists and tables as TOML text; None is left out."""
    lines, tables = [], []
    for key, item in value.items():
        if isinstance(item, dict):
            tables.append((key, item))
        elif item is not None:
            lines.append(f"{key} = {_literal(item)}")
    body = "\n".join(lines) + ("\n" if lines else "")
    for key, item in tables:
        name = f"{prefix}{key}"
        body += f"\n[{name}]\n" + toml(item, name + ".")
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
