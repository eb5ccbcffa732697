"""``codec = "auto"``: chooses a round's codec up and down from what earlier rounds measured.

Each direction has a ladder of codecs, the one with the most bytes first. A run begins with that one, goes a step down
when it can and a step up when it must. ``choose`` depends only on its arguments: fleet, simulation and a restarted
aggregator choose the same.

Agarwal et al., "Adaptive Gradient Communication via Critical Learning Regime Identification", MLSys 2021, found that
training bears more compression later than at its beginning; their rule needs gradients.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from statistics import fmean as mean

from fleet_core.codecs.kinds.registry import CODECS

AUTO = "auto"
WAYS = ("up", "down")
LADDERS = {"up": ("int8", "int4", "topk-10"), "down": ("int8", "int4", "ternary")}
"""From most to fewest bytes. Up, ``ternary`` is no better than ``topk-10`` and sends as much or more; ``topk-1`` costs
macro-F1 (benchmarks/cost)."""
MOST_LEFT = {"up": 1.5, "down": 0.7}
"""The most that ``Past.left`` may be. Down, ``ternary`` leaves out half of a move or more, and ``topk-1`` more than
this."""
WINDOW = 5
"""Number of rounds whose mean loss is compared with that of the same number of rounds before them."""
RISE, ERRORS = 0.1, 2.0
"""The loss has risen if it is higher by more than this share and this many standard errors, because the loss of a small
cohort varies between rounds."""
STAY = 3
"""Rounds with a codec before a cheaper one is tried."""
REST, LONGEST_REST = 10, 80
"""Rounds before a codec that was given up is tried again; doubled each further time."""
LOOK_BACK = 5 * LONGEST_REST
"""Rounds of the past that ``choose`` looks at."""


@dataclass(frozen=True)
class Past:
    """One direction of a closed round. loss: mean over its devices. left: norm of what decoding left out, over that of
    the model's move. Up: mean norm over the devices, over the move that the round made. Down: over the move that was
    sent. Each is None if unknown."""

    codec: str
    loss: float | None
    left: float | None


@dataclass(frozen=True)
class Choice:
    """A round's codec in one direction. reason: one sentence with the figures."""

    codec: str
    reason: str


def next_choice(way: str, wanted: str, keeps: Collection[str], past: Sequence[Past]) -> Choice:
    """``wanted`` if it is a codec; for ``auto`` by ``choose``. keeps: the states of the method's devices."""
    return Choice(wanted, "") if wanted != AUTO else choose(way, ladder(way, keeps), past)


def possible(way: str, wanted: str, keeps: Collection[str]) -> tuple[str, ...]:
    """Every codec that ``next_choice`` may return."""
    return (wanted,) if wanted != AUTO else ladder(way, keeps)


def ladder(way: str, keeps: Collection[str]) -> tuple[str, ...]:
    """The codecs to choose from, without those with which methods that keep these states miss the minimum."""
    return tuple(name for name in LADDERS[way] if not CODECS[name].remarks(way, keeps))


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """The mean of the known values, with the same bits in any order; None without any."""
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def backlog(norms: Iterable[float | None], move: float) -> float | None:
    """``Past.left`` of updates. norms: for each device, the norm of what its codec left out; None if the device does
    not report it."""
    known = mean_of_known(norms)
    return known / move if known is not None and 0 < move < math.inf else None


def choose(way: str, codecs: Sequence[str], past: Sequence[Past]) -> Choice:
    """The next round's codec of the ladder ``codecs``. past: the last rounds, the newest last; ``LOOK_BACK`` are
    enough."""
    past = past[-LOOK_BACK:]
    if not past or past[-1].codec not in codecs:
        return Choice(codecs[0], f"starts with {codecs[0]}, the dearest of {', '.join(codecs)}")
    now = past[-1]
    at = codecs.index(now.codec)
    worse = _worse(way, past)
    if worse:
        return Choice(codecs[at - 1], f"{worse}: up a step from {now.codec}") if at else Choice(
            now.codec, f"{worse}: stays with {now.codec}, the dearest")
    if at + 1 == len(codecs):
        return Choice(now.codec, f"{_well(way, past)}: stays with {now.codec}, the cheapest")
    if now.left is None:
        return Choice(now.codec, f"stays with {now.codec}: how much it leaves out is not known")
    waits = _waits(codecs, past)
    if waits:
        return Choice(now.codec, f"{_well(way, past)}: {waits}")
    return Choice(codecs[at + 1], f"{_well(way, past)}: down a step from {now.codec}")


def _worse(way: str, past: Sequence[Past]) -> str:
    """Why the codec is too cheap, or empty."""
    left, bound = past[-1].left, MOST_LEFT[way]
    if left is not None and left > bound:
        return f"left out {left:.2g} of the model's move, above {bound:g}"
    return rise(_losses(past)) if _since(past) >= WINDOW else ""


def rise(losses: Sequence[float]) -> str:
    """Says how far the mean loss of the last ``WINDOW`` rounds is above that of the ``WINDOW`` rounds before; empty if
    it is not above it."""
    before, after = losses[-2 * WINDOW : -WINDOW], losses[-WINDOW:]
    if len(before) < WINDOW:
        return ""
    by, error = mean(after) - mean(before), math.hypot(_error(before), _error(after))
    if by > RISE * abs(mean(before)) and by > ERRORS * error:
        return f"loss rose {_change(losses)}, by more than {RISE:.0%} and {ERRORS:g} standard errors"
    return ""


def _error(losses: Sequence[float]) -> float:
    """Standard error of the mean; finite even if a square is not."""
    count = len(losses)
    return math.dist(losses, [mean(losses)] * count) / math.sqrt(count * (count - 1))


def _well(way: str, past: Sequence[Past]) -> str:
    """The figures in words, when nothing has become worse."""
    left, change = past[-1].left, _change(_losses(past))
    said = [] if left is None else [f"left out {left:.2g} of the model's move, at most {MOST_LEFT[way]:g}"]
    return ", ".join([*said, f"loss went {change}"] if change else said) or "no figures yet"


def _losses(past: Sequence[Past]) -> list[float]:
    """The losses of the last ``2 * WINDOW`` rounds; empty if one is unknown."""
    known = [one.loss for one in past[-2 * WINDOW:] if one.loss is not None]
    return known if len(known) == 2 * WINDOW else []


def _change(losses: Sequence[float]) -> str:
    before, after = losses[-2 * WINDOW : -WINDOW], losses[-WINDOW:]
    return f"from {mean(before):.3g} to {mean(after):.3g} in {WINDOW} rounds" if before else ""


def _since(past: Sequence[Past]) -> int:
    """For how many rounds the present codec has been used."""
    return next((k for k, one in enumerate(reversed(past)) if one.codec != past[-1].codec), len(past))


def _waits(codecs: Sequence[str], past: Sequence[Past]) -> str:
    """Why no cheaper codec is tried yet, or empty."""
    now, at = past[-1].codec, codecs.index(past[-1].codec)
    if _since(past) < STAY:
        return f"stays with {now} for {STAY} rounds"
    cheaper, names = codecs[at + 1], [one.codec for one in past]
    left = [k for k, pair in enumerate(itertools.pairwise(names)) if pair[0] == cheaper and pair[1] in codecs[:at + 1]]
    rest = min(REST * 2 ** (len(left) - 1), LONGEST_REST)
    if left and len(names) - 1 - left[-1] < rest:
        return f"tries {cheaper} again {rest} rounds after it was left"
    return ""
