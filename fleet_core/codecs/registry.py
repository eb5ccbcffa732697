"""All codecs, by name."""

from __future__ import annotations

from fleet_core.base import schema
from fleet_core.base.errors import CodecError
from fleet_core.codecs.fp32 import Fp32
from fleet_core.codecs.int8 import Int8, Int8Plain
from fleet_core.codecs.interface import Codec

CODECS: dict[str, Codec] = {c.name: c for c in (Fp32(), Int8(), Int8Plain())}


def codec(name: str) -> Codec:
    """Raises CodecError for a name that is not in ``CODECS``."""
    if name not in CODECS:
        near = schema.suggest(name, CODECS)
        raise CodecError(f"unknown codec '{name[:40]}'" + (f" (did you mean '{near}'?)" if near else ""),
                         expected="one of " + ", ".join(CODECS))
    return CODECS[name]
