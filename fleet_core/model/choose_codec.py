"""``codec = "auto"``: which codec a round uses each way, from what the rounds before it measured.

Each way has a ladder of codecs, the dearest first. A run begins with the dearest and goes a step down where it can, a
step up where it must. ``choose`` depends on its arguments alone: fleet and simulation choose the same, and a restarted
aggregator chooses the same again.

That a training run can bear more compression later than at its beginning is the finding of Agarwal et al., "Adaptive
Gradient Communication via Critical Learning Regime Identification", MLSys 2021; their rule needs gradients.
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
"""From dear to cheap. Up, ``ternary`` is no better than ``topk-10`` and sends as much or more; ``topk-1`` costs
macro-F1 (benchmarks/cost)."""
MOST_LEFT = {"up": 1.5, "down": 0.7}
"""Of ``Past.left``. Down, ``ternary`` leaves out half of a move or more, and ``topk-1`` more than this."""
WINDOW = 5
"""Rounds whose mean loss is compared with that of as many before."""
RISE, ERRORS = 0.1, 2.0
"""The loss has risen where it is higher by this share and by this many standard errors: the rounds of a small cohort
differ in their loss."""
STAY = 3
"""Rounds with a codec before a cheaper one is tried."""
REST, LONGEST_REST = 10, 80
"""Rounds before a codec that was left for a dearer one is tried again; each further time doubles them."""
LOOK_BACK = 5 * LONGEST_REST
"""Rounds of the past that ``choose`` looks at."""


@dataclass(frozen=True)
class Past:
    """One way of a closed round. loss: mean over its devices. left: norm of what decoding left out, over that of the
    model's move. Up: mean norm over the devices, over the move that the round made. Down: over the move that was sent.
    Each None where it is not known."""

    codec: str
    loss: float | None
    left: float | None


@dataclass(frozen=True)
class Choice:
    """A round's codec one way. reason: one sentence with the figures."""

    codec: str
    reason: str


def next_choice(way: str, wanted: str, keeps: Collection[str], past: Sequence[Past]) -> Choice:
    """``wanted`` if it is a codec; for ``auto`` by ``choose``. keeps: the states of the method's devices."""
    return Choice(wanted, "") if wanted != AUTO else choose(way, ladder(way, keeps), past)


def possible(way: str, wanted: str, keeps: Collection[str]) -> tuple[str, ...]:
    """Every codec that ``next_choice`` may return."""
    return (wanted,) if wanted != AUTO else ladder(way, keeps)


def ladder(way: str, keeps: Collection[str]) -> tuple[str, ...]:
    """The codecs to choose from, the dearest first, without those that miss with these states."""
    return tuple(name for name in LADDERS[way] if not CODECS[name].remarks(way, keeps))


def mean_of_known(values: Iterable[float | None]) -> float | None:
    """The same bits in any order; None without values."""
    known = [value for value in values if value is not None]
    return mean(known) if known else None


def backlog(norms: Iterable[float | None], move: float) -> float | None:
    """``Past.left`` of updates. norms: of what each device left out, None where it does not say."""
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
    """How the mean loss of the last ``WINDOW`` rounds is above that of as many before; empty where it is not."""
    before, after = losses[-2 * WINDOW : -WINDOW], losses[-WINDOW:]
    if len(before) < WINDOW:
        return ""
    by, error = mean(after) - mean(before), math.hypot(_error(before), _error(after))
    if by > RISE * abs(mean(before)) and by > ERRORS * error:
        return f"loss rose {_change(losses)}, by more than {RISE:.0%} and {ERRORS:g} standard errors"
    return ""


def _error(losses: Sequence[float]) -> float:
    """Standard error of their mean; finite also where a square is not."""
    count = len(losses)
    return math.dist(losses, [mean(losses)] * count) / math.sqrt(count * (count - 1))


def _well(way: str, past: Sequence[Past]) -> str:
    """The figures, where nothing is worse."""
    left, change = past[-1].left, _change(_losses(past))
    said = [] if left is None else [f"left out {left:.2g} of the model's move, at most {MOST_LEFT[way]:g}"]
    return ", ".join([*said, f"loss went {change}"] if change else said) or "no figures yet"


def _losses(past: Sequence[Past]) -> list[float]:
    """Of the last ``2 * WINDOW`` rounds; empty where one is not known."""
    known = [one.loss for one in past[-2 * WINDOW:] if one.loss is not None]
    return known if len(known) == 2 * WINDOW else []


def _change(losses: Sequence[float]) -> str:
    before, after = losses[-2 * WINDOW : -WINDOW], losses[-WINDOW:]
    return f"from {mean(before):.3g} to {mean(after):.3g} in {WINDOW} rounds" if before else ""


def _since(past: Sequence[Past]) -> int:
    """How many of the last rounds had the last one's codec."""
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
