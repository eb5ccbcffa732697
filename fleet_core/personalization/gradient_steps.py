"""The gradient steps with which a device personalizes a served model, as the method and its hyper-parameters say."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from fleet_core.algorithms.interface import LARGEST, MOST, Method, own_steps

MODEL = ("body", "head")


@dataclass(frozen=True)
class Steps:
    """groups: the groups of the model that change. rates: whether each value has a learned learning rate instead of
    ``lr``. number: number of full-batch steps."""

    groups: tuple[str, ...] = field(metadata={"choices": MODEL})
    rates: bool
    lr: float = field(metadata={"min": 0.0, "max": LARGEST})
    number: int = field(metadata={"min": 1, "max": MOST})


def steps_of(method: Method, hyper: Any) -> Steps | None:
    """The steps of a device that took no part in training; None when the method takes none, or trains (``trains``)."""
    if method.personalizer == "meta-sgd":
        return Steps(_of_model(method.shared), True, 0.0, 1)
    lr, number = own_steps(method, hyper)
    if not number:
        return None
    return Steps(_of_model(method.moving), False, lr, number)


def trains(method: Method) -> bool:
    """Whether only the method's own training, with its losses and draws of samples, makes a device's model."""
    return method.personalizer in ("moreau", "fleet-proto")


def _of_model(groups: tuple[str, ...]) -> tuple[str, ...]:
    return tuple(group for group in MODEL if group in groups)
