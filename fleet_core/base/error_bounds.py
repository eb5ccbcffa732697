"""A relative spread: a modelled figure with the bounds between which it lies."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Spread:
    """A modelled figure v lies between low · v and high · v."""

    low: float = field(metadata={"min": 0, "max": 1})
    high: float = field(metadata={"min": 1, "max": 1e6})
