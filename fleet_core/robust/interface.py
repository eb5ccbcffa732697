"""The arguments and the result of a robust rule.

A rule is a pure function of a round's updates, in closing order, and of its memory. So a round closes with the same
bits in any order of arrival, in a fleet and in a simulation, and after a restart.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Protocol

from fleet_core.algorithms.interface import Update
from fleet_core.base.trees import Params


@dataclass(frozen=True)
class Memory:
    """What a rule remembers from round to round: arrays by group and name, and a number for each device. It is part of
    the checkpoint."""

    arrays: Params = field(default_factory=dict)
    scores: Mapping[str, float] = field(default_factory=dict)


@dataclass(frozen=True)
class Choice:
    """dropped: device -> why its update is not used. factors: device -> factor of its update, if not 1. instead: groups
    that replace those of every used update, or None. memory: for the next round."""

    dropped: Mapping[str, str] = field(default_factory=dict)
    factors: Mapping[str, float] = field(default_factory=dict)
    instead: Params | None = None
    memory: Memory = field(default_factory=Memory)


class Rule(Protocol):
    def __call__(self, updates: Iterable[Update], share: float, memory: Memory) -> Choice:
        """updates: can be iterated again; at least one. share: as in ``RobustSection``. At least one update stays."""
        ...


def hostile(count: int, share: float, kept: int = 1) -> int:
    """f, how many of ``count`` updates are taken for hostile: ``share`` of them, rounded up, at most (``count`` −
    ``kept``) / 2."""
    return max(0, min(math.ceil(share * count - 1e-9), (count - kept) // 2))
