"""Methods that other installed packages bring: entry points of the group ``metafleet.methods``.

    [project.entry-points."metafleet.methods"]
    ditto = "my_lab.ditto:DITTO"

They are looked for when a name is asked for that is none of the product's, or when all are listed; a process that does
neither imports nothing of them. What is no method is left out and told on stderr, and the others are there.
"""

from __future__ import annotations

import importlib.metadata
import re
from collections import UserDict
from collections.abc import Callable, Mapping
from functools import cached_property
from typing import Any

from fleet_core.algorithms.seam import ADAPTATIONS, PERSONALIZERS, Method
from fleet_core.runtime import say

GROUP = "metafleet.methods"
NAME = r"[a-z0-9][a-z0-9.-]{0,63}"


class Installed(UserDict[str, Method]):
    """name -> row. product: the rows that no package can replace. say: for a line about each that is left out."""

    def __init__(self, product: Mapping[str, Method], say: Callable[[str], None] = say) -> None:
        self._product, self._say = product, say

    @cached_property
    def data(self) -> dict[str, Method]:  # type: ignore[override]  # found at the first look, not at the start
        self.__dict__["data"] = found = dict[str, Method]()  # a package that asks while it is imported finds none yet
        for point in sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name):
            try:
                row = point.load()
            except Exception as error:  # importing runs anyone's code
                row, wrong = None, f"cannot be imported: {type(error).__name__}: {error}"
            else:
                wrong = self._wrong(point.name, row) or ("is brought by two packages" if point.name in found else "")
            if wrong:
                package = point.dist.name if point.dist else point.module
                self._say(f"the method '{point.name}' of the installed package {package} is left out: "
                          f"{point.value} {wrong}")
            else:
                found[point.name] = row
        return found

    def _wrong(self, name: str, row: Any) -> str:
        """Why ``row`` cannot be the method ``name``; empty where it can."""
        if not isinstance(row, Method):
            return f"is no Method but {type(row).__name__}"
        if row.name != name:
            return f"is named '{row.name}': give the entry point that name"
        if name in self._product:
            return "has the name of one of the product's: take another"
        if not re.fullmatch(NAME, name):
            return "has a name that is not lower case letters, digits, '.' and '-', at most 64"
        for what, value, known in (("adaptation", row.adaptation, ADAPTATIONS),
                                   ("personalizer", row.personalizer, PERSONALIZERS)):
            if value not in known:
                return f"has the {what} '{value}', expected one of {', '.join(known)}"
        return ""
