"""Reads untrusted mappings (JSON messages, TOML tables) into frozen dataclasses, and reports every mistake at once.

A field's annotation is its type: bool, int, float, str, tuple[T, ...], Mapping[str, T], a dataclass, or ``T | None``.
Limits are metadata: ``field(metadata={"min": …, "above": …, "max": …, "pattern": …, "choices": …, "max_length": …})``.
``words`` describes the pattern in errors. ``key`` is the field's name outside Python, where that differs. ``was`` is a
former name that is still read. ``sparse``: written only if it differs from its default, so that older files keep their
bytes. ``variants``: dataclasses by the value of their key ``kind``, of a table that may be any of them.
"""

from __future__ import annotations

import dataclasses
import difflib
import json
import math
import re
import types
import typing
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fleet_core.base.errors import StateError

K = TypeVar("K")
T = TypeVar("T")
V = TypeVar("V")

MAX_ITEMS = 100_000
MAX_TEXT = 1_000_000
MAX_DEPTH = 20


@dataclasses.dataclass(frozen=True)
class Problem:
    """One mistake: the dotted key, what is wrong with it, and a suggestion or None."""

    key: str
    what: str
    hint: str | None = None

    def __str__(self) -> str:
        return f"{self.key}: {self.what}" + (f" (did you mean '{self.hint}'?)" if self.hint else "")


def suggest(word: str, known: Collection[str]) -> str | None:
    """The known word that is most similar to ``word``, or None when none is similar."""
    near = difflib.get_close_matches(word, list(known), n=1, cutoff=0.6)
    return near[0] if near else None


def did_you_mean(word: str, known: Collection[str]) -> str:
    """`` (did you mean '…'?)`` for the end of an error message, or empty when no known word is similar."""
    near = suggest(word, known)
    return f" (did you mean '{near}'?)" if near else ""


def present(values: Mapping[K, V | None]) -> dict[K, V]:
    """``values`` without those that are None."""
    return {key: value for key, value in values.items() if value is not None}


def read(cls: type[T], data: Any, *, unknown: str = "error") -> tuple[T | None, list[Problem]]:
    """Reads ``data`` as a ``cls``. Returns (object, []) or (None, problems).

    unknown: what to do with unknown keys: ``"error"`` for files that people write, ``"ignore"`` for messages, which may
    come from a newer minor version.
    """
    problems: list[Problem] = []
    value = _dataclass(cls, data, "", unknown, problems)
    return (None, problems) if problems else (value, [])


def stored(cls: type[T], data: bytes, path: Path, hint: str, *, unknown: str = "error") -> T:
    """What the JSON file at ``path`` holds, whose bytes are ``data``. hint: what to do if it is damaged. Raises
    StateError."""
    try:
        found, problems = read(cls, json.loads(data), unknown=unknown)
    except (ValueError, RecursionError) as error:
        raise StateError("is damaged", where=str(path), hint=hint) from error
    if found is None:
        raise StateError(f"is damaged: {problems[0]}", where=str(path), hint=hint)
    return found


def plain(value: Any) -> Any:
    """A dataclass as plain mappings, lists and scalars, ready for JSON."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        shown = [(f, getattr(value, f.name)) for f in dataclasses.fields(value)]
        return {f.metadata.get("key", f.name): plain(held) for f, held in shown
                if not ("sparse" in f.metadata and held == f.default)}
    if isinstance(value, Mapping):
        return {k: plain(v) for k, v in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain(v) for v in value]
    return value


def renamed(cls: type[Any], data: Any, at: str = "") -> list[tuple[str, str]]:
    """(dotted former name, present name) of every key in ``data`` that has its former name."""
    found = []
    if isinstance(data, Mapping):
        for name, (declared, kind) in _fields(cls).items():
            was: str = declared.metadata.get("was", name)
            if was in data and was != name:
                found.append((_join(at, was), name))
            if dataclasses.is_dataclass(kind):
                found += renamed(typing.cast("type[Any]", kind), data.get(name, data.get(was)), _join(at, name))
    return found


_KNOWN: dict[type[Any], dict[str, tuple[dataclasses.Field[Any], Any]]] = {}


def _fields(cls: type[Any]) -> dict[str, tuple[dataclasses.Field[Any], Any]]:
    if cls not in _KNOWN:
        hints = typing.get_type_hints(cls)
        _KNOWN[cls] = {f.metadata.get("key", f.name): (f, hints[f.name]) for f in dataclasses.fields(cls)}
    return _KNOWN[cls]


def _dataclass(cls: type[Any], data: Any, at: str, unknown: str, problems: list[Problem]) -> Any:
    if not isinstance(data, Mapping):
        problems.append(Problem(at or "(top)", f"expected a table, found {_kind(data)}"))
        return None
    fields, before = _fields(cls), len(problems)
    former = {declared.metadata.get("was") for declared, _ in fields.values()}
    values: dict[str, Any] = {}
    if unknown == "error":
        for key in data:
            if key not in fields and key not in former:
                problems.append(Problem(_join(at, str(key)), "unknown key", suggest(str(key), fields)))
    for name, (declared, annotation) in fields.items():
        given = name if name in data else declared.metadata.get("was")
        if given in data:
            values[declared.name] = _value(
                annotation, data[given], _join(at, str(given)), declared.metadata, unknown, problems
            )
        elif declared.default is dataclasses.MISSING and declared.default_factory is dataclasses.MISSING:
            problems.append(Problem(_join(at, name), f"missing, expected {_name(annotation)}"))
    return None if len(problems) > before else cls(**values)


def _value(kind: Any, data: Any, at: str, limits: Mapping[str, Any], unknown: str, problems: list[Problem]) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None and type(None) in arguments:
            return None
        return _value(next(a for a in arguments if a is not type(None)), data, at, limits, unknown, problems)
    if dataclasses.is_dataclass(kind):
        chosen = _variant(limits["variants"], data, at, problems) if "variants" in limits else kind
        return None if chosen is None else _dataclass(typing.cast("type[Any]", chosen), data, at, unknown, problems)
    if origin is tuple:
        return _items(arguments[0], data, at, limits, unknown, problems)
    if origin in (Mapping, dict):
        if not isinstance(data, Mapping) or len(data) > MAX_ITEMS or not all(map(_is_text, data)):
            problems.append(Problem(at, f"expected a table, found {_kind(data)}"))
            return None
        return {k: _value(arguments[1], v, _join(at, k), limits, unknown, problems) for k, v in data.items()}
    if kind is Any:
        if not _is_plain(data, MAX_DEPTH):
            problems.append(Problem(at, "expected plain text, numbers, lists and tables"))
        return data
    wrong = _scalar_problem(kind, data, limits)
    if wrong:
        problems.append(Problem(at, wrong, _choice_hint(data, limits)))
        return None
    return float(data) if kind is float else data


def _variant(variants: Mapping[str, type[Any]], data: Any, at: str, problems: list[Problem]) -> type[Any] | None:
    """The variant that the table's key ``kind`` names; None for a problem."""
    if not isinstance(data, Mapping):
        problems.append(Problem(at, f"expected a table, found {_kind(data)}"))
        return None
    if "kind" not in data:
        problems.append(Problem(_join(at, "kind"), f"missing, expected one of {', '.join(sorted(variants))}"))
        return None
    wrong = _scalar_problem(str, data["kind"], {"choices": variants})
    if wrong:
        problems.append(Problem(_join(at, "kind"), wrong, _choice_hint(data["kind"], {"choices": variants})))
        return None
    return variants[data["kind"]]


def _is_text(data: Any) -> bool:
    """Whether ``data`` is text that UTF-8 can encode. JSON can express lone surrogates, which UTF-8 cannot."""
    return isinstance(data, str) and (data.isascii() or not any("\ud800" <= c <= "\udfff" for c in data))


def _is_plain(data: Any, depth: int) -> bool:
    """Whether ``data`` can be written as JSON again."""
    if isinstance(data, float):
        return math.isfinite(data)
    if isinstance(data, Mapping):
        return depth > 0 and all(_is_text(key) and _is_plain(item, depth - 1) for key, item in data.items())
    if isinstance(data, (list, tuple)):
        return depth > 0 and all(_is_plain(item, depth - 1) for item in data)
    return data is None or isinstance(data, int) or _is_text(data)


def _items(kind: Any, data: Any, at: str, limits: Mapping[str, Any], unknown: str, problems: list[Problem]) -> Any:
    if not isinstance(data, (list, tuple)):
        problems.append(Problem(at, f"expected a list, found {_kind(data)}"))
        return None
    if len(data) > limits.get("max_length", MAX_ITEMS):
        problems.append(Problem(at, f"{len(data)} items are over the limit of {limits.get('max_length', MAX_ITEMS)}"))
        return None
    return tuple(_value(kind, item, f"{at}[{i}]", limits, unknown, problems) for i, item in enumerate(data))


def _scalar_problem(kind: Any, data: Any, limits: Mapping[str, Any]) -> str | None:
    if kind is bool:
        return None if isinstance(data, bool) else f"expected true or false, found {_kind(data)}"
    if kind in (int, float):
        accepted = (int,) if kind is int else (int, float)
        if isinstance(data, bool) or not isinstance(data, accepted):
            return f"expected {_name(kind)}, found {_kind(data)}"
        if not (isinstance(data, int) or math.isfinite(data)) or abs(data) > 1e300:
            return f"expected a finite number, found {data}"
        if "min" in limits and data < limits["min"]:
            return f"{data} is below the least allowed, {limits['min']}"
        if "above" in limits and data <= limits["above"]:
            return f"{data} must be above {limits['above']}"
        if "max" in limits and data > limits["max"]:
            return f"{data} is over the limit of {limits['max']}"
        return None
    if not isinstance(data, str):
        return f"expected {_name(kind)}, found {_kind(data)}"
    if not _is_text(data):
        return "expected text, found a lone surrogate (half of a character)"
    if len(data) > limits.get("max_length", MAX_TEXT):
        return f"{len(data)} characters are over the limit of {limits.get('max_length', MAX_TEXT)}"
    if "pattern" in limits and not re.fullmatch(limits["pattern"], data):
        words = f", expected {limits['words']}" if "words" in limits else f" {limits['pattern']}"
        return f"'{data[:80]}' does not match{words}"
    if "choices" in limits and data not in limits["choices"]:
        return f"unknown value '{data[:80]}', expected one of {', '.join(sorted(limits['choices']))}"
    return None


def _choice_hint(data: Any, limits: Mapping[str, Any]) -> str | None:
    return suggest(data, limits["choices"]) if isinstance(data, str) and "choices" in limits else None


def _join(at: str, key: str) -> str:
    return f"{at}.{key}" if at else key


def _kind(data: Any) -> str:
    names = {bool: "true/false", int: "a whole number", float: "a number", str: "text", list: "a list", dict: "a table"}
    return "nothing" if data is None else names.get(type(data), type(data).__name__)


def _name(kind: Any) -> str:
    named = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    return named.get(kind, "a list" if typing.get_origin(kind) is tuple else "a table")
