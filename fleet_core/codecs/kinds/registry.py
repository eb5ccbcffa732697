"""All codecs, by name."""

from __future__ import annotations

from fleet_core.base import schema
from fleet_core.base.errors import CodecError
from fleet_core.codecs.interface import Codec
from fleet_core.codecs.kinds.common_scale import CommonScale, exponent_of
from fleet_core.codecs.kinds.drawn_weights import DrawnPart, DrawnWeights
from fleet_core.codecs.kinds.fp32 import Fp32
from fleet_core.codecs.kinds.half_precision import Bf16, Fp16
from fleet_core.codecs.kinds.int4 import Int4
from fleet_core.codecs.kinds.int8 import Int8, Int8Plain
from fleet_core.codecs.kinds.int8_channel import Int8Channel
from fleet_core.codecs.kinds.int8_random import Int8Random
from fleet_core.codecs.kinds.low_rank import LowRank
from fleet_core.codecs.kinds.random_mask import Mask
from fleet_core.codecs.kinds.ternary import Ternary
from fleet_core.codecs.kinds.top_k import TopK01, TopK01With4Bits, TopK1, TopK1With4Bits, TopK10, TopK10With4Bits
from fleet_core.codecs.no_update import Nothing

ALL: tuple[Codec, ...] = (
    Fp32(), Fp16(), Bf16(), Int8(), Int8Plain(), Int8Channel(), Int8Random(), Int4(), Ternary(), TopK10(), TopK1(),
    TopK01(), TopK10With4Bits(), TopK1With4Bits(), TopK01With4Bits(), LowRank(), Mask(),
)

CODECS: dict[str, Codec] = {c.name: c for c in ALL}
"""The codecs that a user can choose."""

NOTHING = Nothing()
"""The codec of the note for an update that is skipped."""

DRAWN = {form.name: form for form in (DrawnWeights(), DrawnPart())}
"""The codecs of first weights: for a whole model, then for a part."""


def codec(name: str) -> Codec:
    """One of ``CODECS``, ``DRAWN`` or ``NOTHING``, or a ``CommonScale``. Raises CodecError for another name."""
    exponent = exponent_of(name)
    if exponent is not None:
        return CommonScale(exponent)
    others = DRAWN | {NOTHING.name: NOTHING}
    if name in others:
        return others[name]
    if name not in CODECS:
        near = schema.suggest(name, CODECS)
        raise CodecError(f"unknown codec '{name[:40]}'" + (f" (did you mean '{near}'?)" if near else ""),
                         expected="one of " + ", ".join(CODECS))
    return CODECS[name]
