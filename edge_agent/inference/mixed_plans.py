"""Answers of a device's plans from its embedded samples, and their weights in a mixture. No torch.

Shapes: S stored samples, D embedding width, N classes.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import numpy as np

from edge_agent.inference.personalizers import Plan
from fleet_core.base.errors import StateError
from fleet_core.personalization.linear_head import Head
from fleet_core.personalization.mixture import Mixture, mixture_of
from fleet_core.personalization.nearest import Neighbours, Prototypes

Array = np.ndarray[Any, Any]


def needs_head(plan: Plan) -> bool:
    """Whether a plan answers with the fleet's head, alone or beside neighbours."""
    return plan.kind == "none" or (plan.kind == "knn" and plan.mixture != 1.0)


def mixed_plans(plan: Plan, z_SD: Array, y_S: Array, n_classes: int, head_SN: Array | None) -> Mixture:
    """The mixture of ``plan.candidates`` that answers the device's own samples best, by their kinds.

    z_SD, y_S: embedded samples in the order of their recording, and their labels. head_SN: the probabilities of the
    fleet's head for them; None if no candidate needs it. Raises StateError without a sample.
    """
    if not len(y_S):
        raise StateError("there is no labelled sample to personalize with", hint="add some: edge-agent samples add")
    return mixture_of({one.kind: partial(answers, one, z_SD, y_S, n_classes, head_SN) for one in plan.candidates}, y_S)


def answers(
    plan: Plan, z_SD: Array, y_S: Array, n_classes: int, head_SN: Array | None, train: Array, test: Array
) -> Array:
    """The probabilities of the rows ``test``, personalized on the rows ``train``."""
    z, y = z_SD[train], y_S[train]
    if plan.kind == "proto":
        means = Prototypes.empty(n_classes, z.shape[1], distance=plan.distance, frequent=plan.frequent)
        return means.add(z, y).probabilities(z_SD[test])
    if plan.kind == "head":
        return Head.fit(z, y, n_classes, steps=plan.steps).probabilities(z_SD[test])
    if plan.kind == "gp":
        from fleet_core.personalization.gaussian_process import Processes  # 1.5 MB that no other personalizer needs

        assert plan.gaussian is not None
        return Processes.of(z, y, n_classes, plan.gaussian).probabilities(z_SD[test])
    of_head = np.zeros((len(y_S), n_classes), np.float32) if head_SN is None else head_SN
    if plan.kind == "none":
        return of_head[test]
    near = Neighbours.of(z, y, of_head[train], plan.neighbours, plan.mixture)
    return near.probabilities(z_SD[test], of_head[test])
