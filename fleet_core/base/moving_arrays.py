"""Which arrays of a model move in a round: are trained, sent and aggregated. The others are frozen, and stay as they
are."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet_core.base.trees import Params

MIRRORED = ("rates", "control")
"""Groups that hold one array, named ``group.name``, for each array of the model."""


@dataclass(frozen=True)
class Moving:
    """frozen: "group/name" of the model's arrays that do not move. An array of ``MIRRORED`` moves with the one that it
    mirrors; anything else that is no array of the model (such as a margin) always moves."""

    frozen: frozenset[str] = frozenset()

    @property
    def everything(self) -> bool:
        return not self.frozen

    def has(self, group: str, name: str) -> bool:
        return (name.replace(".", "/", 1) if group in MIRRORED else f"{group}/{name}") not in self.frozen

    def of(self, tree: Params) -> dict[str, dict[str, Any]]:
        """The arrays of ``tree`` that move; groups without any are left out."""
        return self._part(tree, moves=True) if self.frozen else {g: dict(named) for g, named in tree.items()}

    def rest(self, tree: Params) -> dict[str, dict[str, Any]]:
        """The frozen arrays of ``tree``."""
        return self._part(tree, moves=False) if self.frozen else {}

    def _part(self, tree: Params, *, moves: bool) -> dict[str, dict[str, Any]]:
        parts = {g: {n: a for n, a in named.items() if self.has(g, n) is moves} for g, named in tree.items()}
        return {g: named for g, named in parts.items() if named}


EVERYTHING = Moving()
