"""``[robust]``: how a fleet resists devices that send false updates, and which methods allow that."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from fleet_core.algorithms.interface import Method
from fleet_core.base.schema import Problem

NONE, CLIP, MEDIAN, TRIMMED, KRUM, HISTORY = "none", "clip", "median", "trimmed", "krum", "history"
RULES = (NONE, CLIP, MEDIAN, TRIMMED, KRUM, HISTORY)
REPLACING = (CLIP, MEDIAN, TRIMMED)
"""The rules that change updates. The others drop some and use the rest unchanged."""
CEILING = 1e4
"""Norm above which an update is refused where ``max_update_norm`` is left out, whatever the others send."""


@dataclass(frozen=True)
class RobustSection:
    """The table ``robust`` of fleet.toml and of an experiment. share: of a round's devices that ``trimmed`` and
    ``krum`` take for hostile at most; the other rules do not use it."""

    rule: str = field(default=NONE, metadata={"choices": RULES, "about":
        "How false updates are held out: none, clip, median, trimmed, krum or history; docs/robust.md says which."})
    share: float = field(default=0.3, metadata={"above": 0, "max": 0.45, "about":
        "The largest share of a round's devices that trimmed and krum take for hostile."})


def check(section: RobustSection, method: Method) -> Iterator[Problem]:
    """The problems of the section with this method."""
    if section.rule == NONE or method.server.sums:
        return
    why = "shares nothing" if not method.shared else "does not sum or average updates over devices"
    yield Problem("robust.rule", f"'{section.rule}' replaces the mean by a robust one, and {method.name} {why}: "
                                 f"expected '{NONE}' with this method")


def remark(section: RobustSection, method: Method) -> str:
    """A consequence of the rule with this method that users may not expect, or empty."""
    kept = [role for role in method.client.keeps if role != "personal"]
    if section.rule not in REPLACING or not kept:
        return ""
    return (f"{method.name} with the robust rule {section.rule}: devices keep a {kept[0]} of what they sent, the "
            f"aggregator one of what it used, so the model may end beside the minimiser; {KRUM} and {HISTORY} drop "
            "updates whole and have no such error; see docs/robust.md")
