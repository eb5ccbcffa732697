"""Adam and Yogi on trees.

Kingma and Ba, "Adam: A Method for Stochastic Optimization", ICLR 2015, Algorithm 1; Reddi et al., "Adaptive Federated
Optimization", ICLR 2021, Algorithm 2 (FedAdam, FedYogi). Reddi's server starts the second moment at τ² and does not
correct the bias of the start: ``corrected=False`` with ``start``. The default is Kingma's form.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from fleet_core.base import trees
from fleet_core.base.trees import Params

LOCAL = ("sgd", "adam")
SERVER = ("sgd", "adam", "yogi")


@dataclass(frozen=True)
class ClassMoments:
    """first, second: running means of the direction and of its square. count: directions seen, a number in the place of
    each array: an array that was frozen in between has seen fewer."""

    first: Params
    second: Params
    count: Params

    @staticmethod
    def begin(direction: Params, start: float = 0.0) -> ClassMoments:
        """The moments before the first direction. start: initial second moment."""
        zero = trees.zeros_like(direction)
        return ClassMoments(zero, trees.apply(lambda a: a + start, zero), trees.apply(lambda a: 0, direction))


def adam(
    direction: Params, before: ClassMoments | None, *, beta1: float = 0.9, beta2: float = 0.999, epsilon: float = 1e-8,
    corrected: bool = True, start: float = 0.0, yogi: bool = False,
) -> tuple[dict[str, dict[str, Any]], ClassMoments]:
    """(step per unit of learning rate, new moments).

    before: the moments so far, None at the first direction. epsilon: τ of Reddi et al. start: initial second moment.
    yogi: use Yogi's rule for the second moment, v ← v − (1 − β₂) Δ² sign(v − Δ²).
    """
    before = ClassMoments.begin(direction, start) if before is None else before
    count = trees.apply(lambda n: n + 1, before.count)
    first = trees.apply(lambda m, d: m * beta1 + d * (1 - beta1), before.first, direction)
    second = trees.apply(
        (lambda v, d: v - d * d * _sign(v - d * d) * (1 - beta2)) if yogi
        else (lambda v, d: v * beta2 + d * d * (1 - beta2)),
        before.second, direction,
    )

    def stepped(m: Any, v: Any, n: int) -> Any:
        scale1, scale2 = (1 / (1 - beta**n) if corrected else 1.0 for beta in (beta1, beta2))
        return m * scale1 / ((v * scale2) ** 0.5 + epsilon)

    return trees.apply(stepped, first, second, count), ClassMoments(first, second, count)


def _sign(array: Any) -> Any:
    return (array > 0) * 1.0 - (array < 0) * 1.0
