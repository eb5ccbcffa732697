"""``[train]``: selects by patterns the arrays that rounds train, and says which methods allow that."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from fnmatch import fnmatchcase

from fleet_core.algorithms.interface import Method
from fleet_core.base.config import located
from fleet_core.base.errors import ConfigError, shortened
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.base.schema import Problem, suggest
from fleet_core.model.layout import MODEL_GROUPS, Layout, TensorSpec

NEVER, AUTO = "never", "auto"
MOST_PATTERNS, MOST_NAMES = 1000, 40


@dataclass(frozen=True)
class TrainSection:
    """The table ``train`` of fleet.toml and of an experiment. only: patterns of names in the layout, as of a shell;
    empty for all arrays. freeze: ``auto`` leaves arrays out while they hardly move."""

    only: tuple[str, ...] = field(default=(), metadata={"max_length": MOST_PATTERNS, "about":
        "Arrays that devices train and send, by name, with * and ?: [\"head.*\"]; empty: the whole model."})
    freeze: str = field(default=NEVER, metadata={"choices": (NEVER, AUTO), "about":
        "auto: arrays that hardly move any more are left out of most rounds; never: none is."})

    @property
    def parts(self) -> bool:
        """Whether a round may train a part of the model."""
        return bool(self.only) or self.freeze == AUTO


def refusal(method: Method) -> str:
    """Why no array can be frozen with this method, or empty."""
    if method.per_device:
        return "makes the whole model of every device anew in each round"
    others = [group for group in method.shared if group not in MODEL_GROUPS]
    if others:
        return f"shares {' and '.join(others)}, which belong to no array of the model alone"
    if not method.shared:
        return "shares nothing: no round sends an array"
    return ""


def moving_of(section: TrainSection, layout: Layout, method: Method, text: str = "", where: str = "") -> Moving:
    """The arrays that the section's patterns select. text, where: of its file, for messages. Raises ConfigError with
    every mistake."""
    moving, problems = selected(section.only, layout, method)
    if problems:
        told = (located(problem, text, where) if text else str(problem) for problem in problems)
        raise ConfigError("\n".join(told),
                          hint=f"the arrays: {', '.join(shortened([t.name for t in layout.tensors], MOST_NAMES))}")
    return moving


def check(section: TrainSection, method: Method) -> Iterator[Problem]:
    """The mistakes that can be found without the layout."""
    why = refusal(method)
    if why and section.only:
        yield Problem("train.only", f"{method.name} {why}")
    if why and section.freeze == AUTO:
        yield Problem("train.freeze", f"{method.name} {why}")


def selected(only: Sequence[str], layout: Layout, method: Method) -> tuple[Moving, list[Problem]]:
    """(the arrays that these patterns select, every mistake in them)."""
    if not only:
        return EVERYTHING, []
    own = [t for t in layout.tensors if t.group in MODEL_GROUPS]
    problems = [
        Problem(f"train.only[{k}]", f"no array of the model {layout.model} is named '{pattern}'", _near(pattern, own))
        for k, pattern in enumerate(only) if not any(fnmatchcase(t.name, pattern) for t in own)
    ]
    chosen = [t for t in own if any(fnmatchcase(t.name, pattern) for pattern in only)]
    trained = [t for t in own if t.group in (*method.shared, *method.personal)]
    if trained and all(t in chosen for t in trained):
        problems.append(Problem("train.only", f"names every array that {method.name} trains: leave it out"))
    elif chosen and not any(t.group in method.shared for t in chosen):
        sent = " and ".join(group for group in MODEL_GROUPS if group in method.shared)
        problems.append(Problem("train.only", f"names no array of the {sent}, which is all that {method.name} sends"))
    return Moving(frozenset(f"{t.group}/{t.name}" for t in own if t not in chosen)), problems


def _near(pattern: str, own: Sequence[TensorSpec]) -> str | None:
    """The pattern with its longest piece of plain text replaced by a similar part of a name."""
    parts = [t.name.split(".") for t in own]
    known = {".".join(words[i:j]) for words in parts for i in range(len(words)) for j in range(i + 1, len(words) + 1)}
    piece = max(re.split(r"[*?]", pattern), key=len).strip(".")
    near = suggest(piece, known)
    return pattern.replace(piece, near) if near else None
