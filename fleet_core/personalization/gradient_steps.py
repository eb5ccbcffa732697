"""The gradient steps by which a device makes a served model its own, read off the method's row and hyper-parameters."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fleet_core.algorithms.interface import LARGEST, MOST, Method, own_steps

MODEL = ("body", "head")


@dataclass(frozen=True)
class Steps:
    """groups: of the model that move. rates: whether each value has a learned rate, in place of ``lr`` for all.
    number: of the full-batch steps."""

    groups: tuple[str, ...] = field(metadata={"choices": MODEL})
    rates: bool
    lr: float = field(metadata={"min": 0.0, "max": LARGEST})
    number: int = field(metadata={"min": 1, "max": MOST})


def steps_of(method: Method, hyper: Any) -> Steps | None:
    """The steps of a device that took no part in training; None where the method makes none, or steps in rounds of its
    own (``trains``)."""
    if method.personalizer == "meta-sgd":
        return Steps(_of_model(method.shared), True, 0.0, 1)
    lr, number = own_steps(method, hyper)
    if not number:
        return None
    return Steps(_of_model(method.moving), False, lr, number)


def trains(method: Method) -> bool:
    """Whether a device's own model comes of the method's rounds, with its own losses and draws, and of nothing less."""
    return method.personalizer in ("moreau", "fleet-proto")


def _of_model(groups: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(group for group in MODEL if group in groups)
