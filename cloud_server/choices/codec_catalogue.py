"""Descriptions of the codecs, and the options ``--codec`` and ``--codecs``."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from fleet_core.base import schema
from fleet_core.base.errors import ConfigError
from fleet_core.codecs.interface import Codec
from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.codecs.vector import size
from fleet_core.model.choose_codec import AUTO, LADDERS, WAYS

DEFAULT_MODEL: dict[str, tuple[int, ...]] = {
    "body/convs.0.weight": (16, 3, 7), "body/convs.1.weight": (32, 16, 5), "body/convs.2.weight": (24, 32, 5),
    "body/hidden.weight": (64, 384), "head/head.weight": (3, 64), "body/hidden.bias": (64,), "head/head.bias": (3,),
    **{f"body/{kind}": (width,) for k, width in enumerate((16, 32, 24))
       for kind in (f"convs.{k}.bias", f"norms.{k}.weight", f"norms.{k}.bias")},
}
"""The arrays of the model that ``metafleet demo`` trains: 31 787 values."""

NONE = "none"
ABOUT_AUTO = "chosen for each round and way"


def facts(codec: Codec) -> dict[str, Any]:
    """One codec as plain values. bits: per value, for normal noise in the default model's arrays."""
    return {
        "name": codec.name, "bits": round(bits(codec), 2), "lossless": codec.lossless, "feedback": codec.feedback,
        "feedback_down": codec.feedback_down, "unbiased": codec.unbiased, "about": codec.about,
    }


def auto_facts() -> dict[str, Any]:
    """``auto`` with the keys of ``facts``. codecs: way -> the codecs that it chooses from, the largest first."""
    unknown = dict.fromkeys(("bits", "lossless", "feedback", "feedback_down", "unbiased"))
    return {"name": AUTO, **unknown, "about": ABOUT_AUTO, "codecs": LADDERS}


def rows() -> list[tuple[str, str, str, str, str]]:
    """(codec, bits, feedback, unbiased, about) of every codec, and of ``auto``."""
    return [
        *((c.name, f"{bits(c):.2f}", _feedback(c), "yes" if c.unbiased else "no", c.about) for c in CODECS.values()),
        (AUTO, "", "", "", "; ".join([ABOUT_AUTO, *(f"{way}: {', '.join(LADDERS[way])}" for way in WAYS)])),
    ]


def bits(codec: Codec) -> float:
    """Bits per value, for normal noise in the arrays of the default model."""
    rng = np.random.default_rng(0)
    noise = {name: rng.normal(size=shape).astype(np.float32) for name, shape in DEFAULT_MODEL.items()}
    return 8 * len(codec.encode(noise, (0, 1, 0))) / size(DEFAULT_MODEL)


def _feedback(codec: Codec) -> str:
    ways = [way for way, has in zip(WAYS, (codec.feedback, codec.feedback_down), strict=True) if has]
    return " and ".join(ways) or "no"


def chosen(text: str) -> dict[str, str]:
    """Keys of ``[link]`` from ``NAME`` for both ways, from ``up:NAME,down:NAME``, or from ``up:NAME`` or ``down:NAME``
    alone. Raises ConfigError."""
    ways = dict(part.split(":", 1) for part in text.split(",")) if _is_by_way(text) else dict.fromkeys(WAYS, text)
    _check(ways.values(), "--codec", "up:NAME,down:NAME")
    return ways


def several(text: str) -> tuple[str, ...]:
    """The codecs of ``NAME,UP/DOWN,…``; no codec for ``none``. Raises ConfigError."""
    named = () if text == NONE else tuple(dict.fromkeys(part.strip() for part in text.split(",")))
    _check([name for one in named for name in by_way(one).values()], "--codecs", f"UP/DOWN; or {NONE}")
    return named


def by_way(codec: str) -> dict[str, str]:
    """Keys of ``[link]`` from ``NAME`` for both ways or ``UP/DOWN``."""
    up, slash, down = codec.partition("/")
    return dict(zip(WAYS, (up, down if slash else up), strict=True))


def option(codec: str) -> str:
    """What ``--codec`` takes for ``NAME`` or ``UP/DOWN``."""
    return ",".join(f"{way}:{name}" for way, name in by_way(codec).items()) if "/" in codec else codec


def _check(names: Iterable[str], where: str, other: str) -> None:
    for name in names:
        if name not in (*CODECS, AUTO):
            near = schema.suggest(name, (*CODECS, AUTO))
            raise ConfigError(f"unknown codec '{name}'" + (f" (did you mean '{near}'?)" if near else ""),
                              where=where, expected=f"{', '.join((*CODECS, AUTO))}; or {other}",
                              hint="metafleet codecs")


def _is_by_way(text: str) -> bool:
    named = [part.partition(":")[0] for part in text.split(",")]
    return set(named) <= set(WAYS) and len(set(named)) == len(named) and text.count(":") == len(named)
