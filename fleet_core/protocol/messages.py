"""Messages as JSON that a person can read in ``mosquitto_sub``, and the limits that their fields share.

The messages are frozen dataclasses in ``round_messages`` and ``device_messages``. Within a major version, unknown keys
are ignored, missing keys take their defaults, and no default changes, so that a fleet can be updated one device at a
time.
"""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any, TypeVar

from fleet_core.base import compression, schema
from fleet_core.base.errors import CodecError, MessageError

PROTOCOL = 1
MAX_MESSAGE_BYTES = 1 << 20
MESSAGE_LEVEL = 12
PLAIN, PACKED, SHORT = 0, 1, 2
"""How a message is written, and what a reader can read: JSON; under zstd if that is shorter; also with the
dictionary."""
DICTIONARY = Path(__file__).with_name("dictionary-1.txt")
"""Typical messages, whose words zstd then need not send. The file never changes; another dictionary would get another
number, here and in ``SHORT_MARK``."""
SHORT_MARK = b"\x01"
"""Before a zstd frame that was made with the dictionary."""
ID = r"[0-9a-f]{32}"

T = TypeVar("T")


def whole(maximum: int, minimum: int = 0) -> dict[str, int]:
    """Field metadata: a whole number from ``minimum`` to ``maximum``."""
    return {"min": minimum, "max": maximum}


ROUND = whole(1_000_000_000)


def encode(message: Any, *, packed: int = PLAIN, without: Collection[str] = ()) -> bytes:
    """A message as compact JSON, without fields at their default, which a reader fills in. packed: what the reader can
    read, ``PLAIN`` to ``SHORT``. without: keys whose values the reader knows already."""
    kept = {key: value for key, value in _short(message).items() if key not in without}
    text = json.dumps(kept, separators=(",", ":"), allow_nan=False).encode()
    if packed >= SHORT:
        return min(text, SHORT_MARK + compression.compress(text, MESSAGE_LEVEL, dictionary=_dictionary()), key=len)
    return min(text, compression.compress(text, MESSAGE_LEVEL), key=len) if packed else text


def decode(
    cls: type[T], data: bytes, *, limit: int = MAX_MESSAGE_BYTES, known: Mapping[str, Any] | None = None,
) -> T:
    """Reads JSON in any of the three forms, of at most ``limit`` bytes, as a ``cls``. known: values of keys that the
    message leaves out (``without``). Raises MessageError that names the faulty keys."""
    if len(data) > limit:
        raise MessageError(f"a message of {len(data)} bytes", expected=f"at most {limit}")
    try:
        value = json.loads(plain(data, limit))
    except (ValueError, RecursionError, CodecError) as error:
        raise MessageError("a message is not JSON") from error
    if known and isinstance(value, dict):
        value |= known
    message, problems = schema.read(cls, value, unknown="ignore")
    if message is None:
        raise MessageError(f"a malformed {cls.__name__}: " + "; ".join(map(str, problems[:5])))
    return message


def plain(data: bytes, limit: int = MAX_MESSAGE_BYTES) -> bytes:
    """The JSON of a message. Raises CodecError."""
    if data.startswith(SHORT_MARK):
        return compression.decompress(data[len(SHORT_MARK):], limit, dictionary=_dictionary())
    return compression.decompress(data, limit) if data.startswith(compression.MAGIC) else data


@functools.lru_cache(maxsize=1)
def _dictionary() -> bytes:
    return DICTIONARY.read_bytes()


def _short(value: Any) -> Any:
    if dataclasses.is_dataclass(value):
        given = ((f, getattr(value, f.name)) for f in dataclasses.fields(value))
        return {f.metadata.get("key", f.name): _short(v) for f, v in given if v is not None and v != _default(f)}
    if isinstance(value, Mapping):
        return {k: _short(v) for k, v in value.items() if v is not None}
    return [_short(v) for v in value] if isinstance(value, (list, tuple)) else value


def _default(field: dataclasses.Field[Any]) -> Any:
    """The field's default; MISSING without one."""
    return field.default if field.default_factory is dataclasses.MISSING else field.default_factory()
