"""Plain values as block YAML (1.1 and 1.2 alike) for cloud-init; no more of YAML than that needs.

Texts are quoted, and those of many lines are literal blocks.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

PLAIN_KEY = re.compile(r"[a-z_][a-z0-9_-]*")
BLOCK = re.compile(r"[^\s][\x20-\x7e\n]*\n")
NOT_PLAIN = ("y", "n", "yes", "no", "on", "off", "true", "false", "null")


def text(value: Any) -> str:
    """Mappings, lists, texts, numbers and truth values. Raises TypeError for others."""
    return "\n".join(_lines(value)) + "\n"


def _lines(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return [line for key, item in value.items() for line in _entry(f"{_key(key)}:", item)]
    if isinstance(value, (list, tuple)):
        return [line for item in value for line in _item(item)]
    raise TypeError(f"{type(value).__name__} at the top")


def _entry(head: str, item: Any) -> list[str]:
    if isinstance(item, str) and "\n" in item and BLOCK.fullmatch(item) and not item.endswith("\n\n"):
        return [f"{head} |", *(f"  {line}" if line else "" for line in item.splitlines())]
    if isinstance(item, (Mapping, list, tuple)) and item:
        return [head, *(f"  {line}" if line else "" for line in _lines(item))]
    return [f"{head} {_scalar(item)}"]


def _item(item: Any) -> list[str]:
    if isinstance(item, (list, tuple)) and all(isinstance(part, str) for part in item):
        return [f"- [{', '.join(_scalar(part) for part in item)}]"]
    if isinstance(item, (Mapping, list, tuple)) and item:
        first, *rest = _lines(item)
        return [f"- {first}", *(f"  {line}" if line else "" for line in rest)]
    return [f"- {_scalar(item)}"]


def _key(key: Any) -> str:
    return key if PLAIN_KEY.fullmatch(key) and key not in NOT_PLAIN else _quoted(key)


def _scalar(item: Any) -> str:
    if isinstance(item, str):
        return _quoted(item)
    if isinstance(item, (bool, int)):
        return str(item).lower()
    if isinstance(item, (Mapping, list, tuple)) and not item:
        return "{}" if isinstance(item, Mapping) else "[]"
    raise TypeError(f"{type(item).__name__} in YAML")


def _quoted(text: str) -> str:
    """In double quotes; unlike JSON's, YAML's escapes name whole characters (YAML 1.2.2, section 5.7)."""
    return '"' + "".join(_escaped(character) for character in text) + '"'


def _escaped(character: str) -> str:
    code = ord(character)
    if 0x20 <= code < 0x7F:
        return "\\" + character if character in '"\\' else character
    return f"\\u{code:04x}" if code <= 0xFFFF else f"\\U{code:08x}"
