"""Makes a device's own model with torch (``fleet_core.training.personal_round``)."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from fleet_core.algorithms.interface import ClientState, Method
from fleet_core.base.trees import Params
from fleet_core.learning.local_training import TorchEngine
from fleet_core.model.layout import Layout
from fleet_core.training import personal_round
from fleet_core.training.local_round import NumpyParams
from fleet_core.training.round_plans import Samples


def adapt(
    method: Method, model: nn.Module, layout: Layout, served: Params, x: Samples, y: Samples, hyper: Any,
    state: ClientState | None = None, scalars: Mapping[str, float] | None = None,
) -> NumpyParams:
    """``personal_round.adapt`` with the gradients of ``model``."""
    return personal_round.adapt(TorchEngine(model), method, layout, served, x, y, hyper, state, scalars)
