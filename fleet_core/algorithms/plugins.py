"""Methods of other installed packages: entry points of the group ``metafleet.methods``.

    [project.entry-points."metafleet.methods"]
    ditto = "my_lab.ditto:DITTO"

They are imported when a name is looked up that is not one of the product's, or when all methods are listed. An entry
point that is not a valid method is left out with a line on stderr.
"""

from __future__ import annotations

import inspect
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
"""The end of a hint about an unknown method."""
NAME = r"[a-z0-9][a-z0-9.-]{0,63}"
RENAMED: tuple[tuple[type[Any], str, str], ...] = (
    (ClientRule, "settle", "after_loss"), (ServerRule, "given", "per_device"), (ServerRule, "heard", "as_received"),
)
"""(interface, former name, present name) of functions that a method written for an older version may define."""


def packages() -> list[str]:
    """The installed packages that bring methods."""
    return sorted({_package(point) for point in _points()})


def _points() -> list[EntryPoint]:
    import importlib.metadata  # 2 MB that a process which only answers does not need

    return sorted(importlib.metadata.entry_points(group=GROUP), key=lambda point: point.name)


def _package(point: EntryPoint) -> str:
    return point.dist.name if point.dist else point.module


class Methods(Mapping[str, Method]):
    """name -> method: the product's first, then those of installed packages. say: prints a line about each entry point
    that is left out."""

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
        with self._lock:  # reentrant: a package that looks up methods while it is imported finds none yet
            if not self._looked:
                self._looked = True
                self._found = self._look()
            return self._found

    def _look(self) -> dict[str, Method]:
        found = dict[str, Method]()
        for point in _points():
            try:
                row = point.load()
            except (Exception, SystemExit) as error:  # importing runs the package's code
                row, problem = None, f"cannot be imported: {type(error).__name__}: {error}"
            else:
                problem = self._problem(point.name, row)
                if not problem and point.name in found:
                    problem = "has the name of another package's method"
            if problem:
                self._say(f"the method '{point.name}' of the installed package {_package(point)} is left out: "
                          f"{point.value} {problem}")
            else:
                found[point.name] = row
        return found

    def _problem(self, name: str, row: Any) -> str:
        """Why ``row`` cannot be the method ``name``; empty when it can."""
        if not isinstance(row, Method):
            return f"is of type {type(row).__name__}, expected Method"
        if row.name != name:
            return f"is named '{row.name}': give the entry point that name"
        if name in self._product:
            return "has the name of one of the product's methods: use another"
        if not re.fullmatch(NAME, name):
            return "has a name that is not lower case letters, digits, '.' and '-', at most 64"
        version: Any = row.version
        if type(version) is not int or version < 1:
            return f"has the version {version!r}, expected a whole number from 1"
        client: Any = row.client
        server: Any = row.server
        if not isinstance(client, ClientRule) or not isinstance(server, ServerRule):
            return "needs a ClientRule as client and a ServerRule as server"
        former = _former_names(client, server)
        if former:
            return former
        for what, value, known in (("adaptation", row.adaptation, ADAPTATIONS),
                                   ("personalizer", row.personalizer, PERSONALIZERS)):
            if value not in known:
                return f"has the {what} '{value}', expected one of {', '.join(known)}"
        try:
            inspect.signature(server.joined).bind(None, 2, 1)
        except TypeError:
            return "its server's joined takes other arguments than (state, members, new)"
        try:
            own_steps(row, row.hyper())
        except Exception as error:  # hyper-parameters are the package's code
            return f"has unsuitable hyper-parameters: {type(error).__name__}: {error}"
        return ""


def _former_names(*rules: ClientRule | ServerRule) -> str:
    """Which functions of ``rules`` have a former name, under which nothing calls them; empty when none has.

    A rule that defines both names works with both versions and is accepted.
    """
    return "; ".join(
        f"defines {base.__name__}.{former}, which is now called {present}: rename it"
        for rule in rules for base, former, present in RENAMED
        if isinstance(rule, base) and hasattr(rule, former)
        and getattr(type(rule), present) is getattr(base, present)
    )
