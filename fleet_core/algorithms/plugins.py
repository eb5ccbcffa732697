"""Methods that other installed packages bring: entry points of the group ``metafleet.methods``.

    [project.entry-points."metafleet.methods"]
    ditto = "my_lab.ditto:DITTO"

They are looked for when a name is asked for that is none of the product's, or when all are listed; a process that does
neither imports nothing of them. What is no method is left out and told on stderr, and the others are there.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

from fleet_core.algorithms.interface import ADAPTATIONS, PERSONALIZERS, ClientRule, Method, ServerRule, own_steps
from fleet_core.base.processes import say

if TYPE_CHECKING:
    from importlib.metadata import EntryPoint

GROUP = "metafleet.methods"
OR_INSTALL = ", or install the package that brings it"
"""What else may help where a method is not known here."""
NAME = r"[a-z0-9][a-z0-9.-]{0,63}"


def packages() -> list[str]:
    """The installed packages that bring methods."""
    return sorted({_package(point) for point in _points()})


def _points() -> list[EntryPoint]:
    import importlib.metadata  # 2 MB, which a device that answers does without

    return sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.module


class Methods(Mapping[str, Method]):
    """name -> row: the product's first, then those of installed packages. say: for a line about each that is left out.
    """

    def __init__(self, product: Mapping[str, Method], say: Callable[[str], None] = say) -> None:
        self._product, self._say = product, say
        self._lock, self._looked, self._found = threading.RLock(), False, dict[str, Method]()

    def __getitem__(self, name: str) -> Method:
        return self._product[name] if name in self._product else self._installed()[name]

    def __iter__(self) -> Iterator[str]:
        return iter((*self._product, *self._installed()))

    def __len__(self) -> int:
        return len(self._product) + len(self._installed())

    def _installed(self) -> dict[str, Method]:
        with self._lock:  # another thread waits; a package that asks while it is imported finds none yet
            if not self._looked:
                self._looked = True
                self._found = self._look()
            return self._found

    def _look(self) -> dict[str, Method]:
        found = dict[str, Method]()
        for point in _points():
            try:
                row = point.load()
            except (Exception, SystemExit) as error:  # importing runs anyone's code
                row, wrong = None, f"cannot be imported: {type(error).__name__}: {error}"
            else:
                wrong = self._wrong(point.name, row) or ("is brought by two packages" if point.name in found else "")
            if wrong:
                self._say(f"the method '{point.name}' of the installed package {_package(point)} is left out: "
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
        version: Any = row.version
        if type(version) is not int or version < 1:
            return f"has the version {version!r}, expected a whole number from 1"
        client: Any = row.client
        server: Any = row.server
        if not isinstance(client, ClientRule) or not isinstance(server, ServerRule):
            return "has no ClientRule and ServerRule as its client and server"
        for what, value, known in (("adaptation", row.adaptation, ADAPTATIONS),
                                   ("personalizer", row.personalizer, PERSONALIZERS)):
            if value not in known:
                return f"has the {what} '{value}', expected one of {', '.join(known)}"
        try:
            own_steps(row, row.hyper())
        except Exception as error:  # its hyper-parameters are anyone's code
            return f"has hyper-parameters that do not do: {type(error).__name__}: {error}"
        return ""
