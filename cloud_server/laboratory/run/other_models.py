"""Other models than the served one with which a run can evaluate its devices, so that methods are compared alike.

``server`` is the server's own model. ``latest-mean`` is the mean of all devices' latest models, which Acar et al. (ICML
2021) evaluate; a device that never took part counts with the first weights. It needs a model of each device on the
disk. ``running-mean`` starts from the first weights and moves by P/m towards the mean of a round's P models out of m;
for PFLDyn and PFLScaf it is the served model. The last two exist only if devices send changes of the model.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from pathlib import Path
from typing import Any

from cloud_server.laboratory.plan.experiment import LATEST, RUNNING, SERVER
from cloud_server.laboratory.run.run_folder import OTHER_MODELS, Clients
from fleet_core.algorithms import aggregation
from fleet_core.algorithms.interface import Method, ServerState, Update
from fleet_core.base import trees
from fleet_core.base.trees import Params

MODEL = "model"


class OtherModels:
    """The other models of one run, stored in ``folder``. first: the server's model before the first round."""

    def __init__(
        self, wanted: Collection[str], method: Method, hyper: Any, folder: Path, names: Sequence[str], first: Params
    ):
        able = method.server.sends_changes(hyper)
        self._wanted = [kind for kind in wanted if kind == SERVER or able]
        self._method, self._names = method, names
        self._first = trees.widened(trees.only(first, method.shared))
        self._latest, self._running = Clients(folder / OTHER_MODELS / LATEST), Clients(folder / OTHER_MODELS / RUNNING)
        self._written = set[str]()

    def resume(self, number: int) -> None:
        """Deletes models written after round ``number``."""
        for kept in (self._latest, self._running):
            kept.forget_after(number)

    def close(self, number: int, sent: Params, updates: Iterable[Update], refused: Collection[str]) -> None:
        """Takes the models of round ``number``. sent: the model that devices started from."""
        if not {RUNNING, LATEST} & set(self._wanted):
            return
        anchor, total, count = trees.widened(trees.only(sent, self._method.shared)), None, 0
        for update in updates:
            if update.device in refused:
                continue
            moved = trees.merged(anchor, _sum(anchor, update.payload.groups))
            total, count = moved if total is None else trees.add(total, moved), count + 1
            if LATEST in self._wanted:
                self._latest.save(update.device, number, {MODEL: moved})
                self._written.add(update.device)
        if RUNNING in self._wanted and total is not None:
            before, mean = self._running_mean(number - 1), trees.scale(total, 1 / count)
            after = aggregation.running_mean(before, mean, count, len(self._names))
            self._running.save(RUNNING, number, {MODEL: after})

    def saved(self, number: int) -> None:
        """Call it when the rounds up to ``number`` count; deletes older models."""
        for device in self._written:
            self._latest.drop_older(device, number)
        self._running.drop_older(RUNNING, number)
        self._written = set()

    def weights(self, number: int, state: ServerState) -> dict[str, Params]:
        """Kind -> float32 weights after round ``number``; kinds that the method does not have are left out."""
        made: dict[str, Params] = {}
        for kind in self._wanted:
            if kind == LATEST:
                made[kind] = self._mean_of_latest(number)
            elif kind == RUNNING:
                made[kind] = self._running_mean(number)
            elif set(self._method.shared) <= set(state.model):
                made[kind] = trees.only(state.model, self._method.shared)
        return {kind: trees.apply(lambda a: a.astype("float32"), model) for kind, model in made.items()}

    def _mean_of_latest(self, number: int) -> Params:
        total = trees.zeros_like(self._first)
        for name in self._names:
            trees.accumulate(total, self._latest.load(name, number).get(MODEL, self._first))
        return trees.scale(total, 1 / len(self._names))

    def _running_mean(self, number: int) -> Params:
        return self._running.load(RUNNING, number).get(MODEL, self._first)


def _sum(anchor: Params, change: Params) -> Params:
    """``anchor`` + ``change``, for the arrays in ``change``; a round may train only a part of the model."""
    return {g: {n: anchor[g][n] + a for n, a in named.items()} for g, named in change.items() if g in anchor}
