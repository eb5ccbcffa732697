"""``freeze = "auto"``: chooses the arrays to freeze in a round from how far each moved in earlier rounds.

An array is frozen when its moves have become small compared with its largest ones. Now and then a round is a probe: all
arrays move, and those whose move is no longer small stay unfrozen. If a probe finds every array at rest, the next one
comes later, else sooner. ``Schedule`` depends only on closed rounds: fleet, simulation and a restarted aggregator
freeze the same.

After Chen, Xu, Wang, Li, Li, Chen, Zhang, "Communication-Efficient Federated Learning with Adaptive Parameter
Freezing", ICDCS 2021: freezing for a while and probing, additive increase and multiplicative decrease of that while.
There a value is at rest if its moves cancel out over a window; here an array is at rest if the norm of its moves has
fallen, which needs no memory of the size of the model. Layers settle one after another: Brock et al., "FreezeOut",
2017.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field, replace
from statistics import fmean as mean

from fleet_core.base.errors import shortened
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.model.choose_codec import WINDOW, rise

SMALL, AGAIN = 0.2, 0.4
"""An array is at rest if the mean of its last ``WINDOW`` moves is at most ``SMALL`` of the largest such mean so far. It
is unfrozen if its move in a probe is above ``AGAIN`` of that."""
REST, LONGEST_REST = 10, 100
"""Rounds until the first probe. After a probe that found all arrays at rest, the interval grows by ``REST``; else it is
halved."""
LISTED = 4
"""The most arrays that a reason names."""


@dataclass(frozen=True)
class Chosen:
    """What a round trains. reason: one sentence with the figures; empty if only patterns decide."""

    moving: Moving = EVERYTHING
    reason: str = ""


def next_arrays(selected: Moving, sent: Collection[str], schedule: Schedule | None) -> Chosen:
    """What the next round trains. selected: by patterns. sent: the arrays of the model that the method sends. schedule:
    None for none. At least one array that is sent always moves, even if the patterns have changed."""
    if schedule is None:
        return Chosen(selected)
    frozen, reason = schedule.choice()
    moving = Moving(selected.frozen | frozen)
    if moving.frozen.issuperset(sent):
        return Chosen(selected, "all that is selected would be at rest: it moves again")
    return Chosen(moving, reason)


@dataclass(frozen=True)
class Schedule:
    """The state after the closed rounds so far. moves: array -> norms of its last moves, the newest last, ``WINDOW`` at
    most. largest: the largest mean of ``WINDOW`` moves. frozen: the arrays at rest. rest: rounds from one probe to the
    next. waited: rounds since the last one, or since some array is at rest. losses: of the last rounds. why: what the
    last round changed."""

    moves: Mapping[str, Sequence[float]] = field(default_factory=dict)
    largest: Mapping[str, float] = field(default_factory=dict)
    frozen: frozenset[str] = frozenset()
    rest: int = field(default_factory=lambda: REST)
    waited: int = 0
    losses: tuple[float, ...] = ()
    why: str = ""

    @property
    def probes(self) -> bool:
        """Whether the next round is a probe."""
        return bool(self.frozen) and self.waited >= self.rest

    def choice(self) -> tuple[frozenset[str], str]:
        """(the arrays that rest in the next round, why)."""
        if self.probes:
            return frozenset(), f"a probe of all arrays after {self.waited} rounds"
        left = self.rest - self.waited
        state = f"{len(self.frozen)} of {len(self.moves)} at rest, next probe in {left} rounds"
        return self.frozen, "; ".join(filter(None, (self.why, state if self.frozen else "none at rest")))

    def after(self, moved: Mapping[str, float], loss: float | None) -> Schedule:
        """The schedule after one more closed round. moved: norm of the move of every array that was sent."""
        probed, losses = self.probes, (*self.losses, *([] if loss is None else [loss]))[-2 * WINDOW :]
        if self.frozen and self.waited >= WINDOW and (risen := rise(losses)):
            return Schedule(dict.fromkeys(self.moves, ()), self.largest, why=f"{risen}: all move again")
        moves = {**self.moves, **{name: (*self.moves.get(name, ()), norm)[-WINDOW:] for name, norm in moved.items()}}
        means = {name: mean(moves[name]) for name in moved if len(moves[name]) == WINDOW}
        largest = {**self.largest, **{n: max(value, self.largest.get(n, 0.0)) for n, value in means.items()}}
        waited = self.waited + bool(self.frozen)
        after = replace(self, moves=moves, largest=largest, losses=losses, waited=waited, why="")
        return after._probed(moved) if probed else after._settled(means)

    def _probed(self, moved: Mapping[str, float]) -> Schedule:
        """The schedule after a probe: arrays that move again start a new window."""
        again = {n: share for n in sorted(self.frozen & moved.keys()) if (share := self._share(n, moved[n])) > AGAIN}
        if not again:
            longer = min(self.rest + REST, LONGEST_REST)
            return replace(self, rest=longer, waited=0, why="the probe found all at rest")
        moves = {**self.moves, **{name: (moved[name],) for name in again}}
        return replace(self, moves=moves, frozen=self.frozen - again.keys(), rest=max(REST, self.rest // 2), waited=0,
                       why=f"move again after the probe, by the share of their largest move: {_told(again)}")

    def _settled(self, means: Mapping[str, float]) -> Schedule:
        """Freezes the arrays that have come to rest, except one, so that one always moves."""
        small = {n: share for n in sorted(means.keys() - self.frozen) if (share := self._share(n, means[n])) <= SMALL}
        if small and self.moves.keys() <= self.frozen | small.keys():
            del small[max(small, key=lambda name: small[name])]
        if not small:
            return self
        why = f"came to rest, by the share of their largest move: {_told(small)}"
        return replace(self, frozen=self.frozen | small.keys(), why=why)

    def _share(self, name: str, move: float) -> float:
        largest = self.largest.get(name, 0.0)
        return move / largest if largest else 0.0


def _told(shares: Mapping[str, float]) -> str:
    names = [f"{name.partition('/')[2]} {share:.2g}" for name, share in shares.items()]
    return ", ".join(shortened(names, LISTED))
