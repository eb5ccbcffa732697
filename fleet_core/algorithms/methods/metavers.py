"""MetaVers: prototypes with a margin that grows.

Lim, Ha, Yoon, "MetaVers: Meta-Learned Versatile Representations for Personalized Federated Learning", WACV 2024, eq.
1-7. Proto training with a centroid triplet term; its margin is max(m_glob, m_i), where m_i, the mean distance of
the device's class centroids, goes up and m_glob comes down.

Without ``window_mean`` eq. 7 sums W − 1 values of m_glob and the mean of the reported m_i and divides by W. The printed
sum ends before the value in use; here that is the last of the W − 1. While fewer exist, it divides by their number,
without the 0 of the first round. With ``window_mean`` the last W reported means are averaged, as in the authors'
program, which also begins with rounds of the cross-entropy alone (``warm_up``) and differs in the loss (``MetaVers``).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

from fleet_core.algorithms.interface import ClientState, GradFn, Payload, ServerState, Update, count, weight
from fleet_core.algorithms.methods.average import AverageClient, AverageServer, Averaging
from fleet_core.algorithms.step_measures import with_constants
from fleet_core.base.trees import Params

MARGIN = "margin"


@dataclass(frozen=True, kw_only=True)
class Margins(Averaging):
    """window: W, the number of values that are averaged. window_mean: average the reported means instead of m_glob.
    loss_share: γ, weight of the cross-entropy; 1 − γ is that of the triplets. warm_up: number of first rounds with the
    cross-entropy alone."""

    window: int = count(50, most=1000)
    window_mean: bool = True
    loss_share: float = weight(0.5, most=1)
    warm_up: int = count(0, least=0, most=1_000_000)


class VersClient(AverageClient):
    """FedAvg's steps with the fleet's margin; sends the mean of the device's own margins as a scalar."""

    def run(
        self, broadcast: Payload, state: ClientState, steps: Iterable[GradFn], hyper: Any
    ) -> tuple[Payload, ClientState]:
        measured: list[Params] = []
        share = hyper.loss_share if broadcast.scalars["round"] > hyper.warm_up else 1.0
        constants = {MARGIN: {"value": broadcast.scalars[MARGIN], "loss_share": share}}
        update, state = super().run(broadcast, state, with_constants(steps, constants, measured), hyper)
        own = sum(step[MARGIN]["value"] for step in measured) / len(measured)
        return replace(update, scalars={MARGIN: own}), state


class VersServer(AverageServer):
    """Averages models and moves the margin (eq. 6, 7)."""

    def broadcast(self, state: ServerState) -> Payload:
        return Payload(state.model, {MARGIN: state.scalars.get(MARGIN, 0.0)})

    def apply(self, state: ServerState, updates: Iterable[Update], members: int, hyper: Any) -> ServerState:
        reported = [update.payload.scalars[MARGIN] for update in updates]
        here = sum(reported) / len(reported)
        after = super().apply(state, updates, members, hyper)
        past = history(state)
        if hyper.window_mean:
            kept = [*past, here][-hyper.window:]
            margin = sum(kept) / len(kept)
        else:
            past = past[len(past) - (hyper.window - 1):] if len(past) >= hyper.window else past
            margin = (sum(past) + here) / (len(past) + 1)
            kept = [*past, margin]
        listed = {f"past.{i:04d}": value for i, value in enumerate(kept)}
        others = {k: v for k, v in after.scalars.items() if not k.startswith("past.")}
        return replace(after, scalars={**others, **listed, MARGIN: margin})


def history(state: ServerState) -> list[float]:
    """The values with which the next margin is averaged, oldest first."""
    return [state.scalars[key] for key in sorted(state.scalars) if key.startswith("past.")]
