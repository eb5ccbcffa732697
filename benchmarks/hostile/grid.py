"""The grid: data, methods, rules, attacks and shares of hostile devices, in the order in which cells are computed."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict, dataclass
from typing import Any

from cloud_server.laboratory.plan import experiment as experiments
from cloud_server.laboratory.plan.experiment import Experiment
from fleet_core.robust.settings import CEILING, NONE, RULES

DEVICES, SHARES = 20, (0.1, 0.2, 0.3)
SIGN, BOUND, NOISE, LABELS, BACKDOOR, INNER = "sign", "bound", "noise", "labels", "backdoor", "inner"
ATTACKS = (SIGN, BOUND, NOISE, LABELS, BACKDOOR, INNER)
NOBODY = "nobody"
MEAN, ADAPTIVE = "mean", "adaptive"
SETTINGS = (MEAN, ADAPTIVE, *(rule for rule in RULES if rule != NONE))
"""``mean``: no rule and the constant bound of 10,000. ``adaptive``: no rule and the adaptive bound. Others: that rule
and the adaptive bound."""
STEPS = {"client_lr": 0.05, "local_steps": 8, "query_batch": 16, "support_batch": 16}
DATA: dict[str, dict[str, Any]] = {
    "heartbeat-22": {
        "rounds": 12, "model": {"name": "cnn1d"}, "target": 0,
        "partition": {"kind": "natural", "options": {
            "split": "time", "train_fraction": 0.6, "max_clients": DEVICES, "max_samples": 400}},
        "methods": {
            "fedavg-meta": {"batch": 32, "client_lr": 0.2, "finetune_lr": 0.2, "finetune_steps": 20, "local_steps": 8},
            "pfldyn-proto": {**STEPS, "penalty": 0.3}, "pflscaf-proto": STEPS,
            "per-fedavg-fo": {**STEPS, "client_lr": 0.2, "inner_lr": 0.05},
        },
    },
    "mnist": {
        "rounds": 20, "model": {"name": "mlp", "options": {"hidden": [64]}}, "target": 0,
        "partition": {"kind": "natural", "options": {"min_samples": 100, "max_clients": DEVICES}},
        "methods": {
            "fedavg-meta": {"batch": 32, "client_lr": 0.05, "finetune_lr": 0.05, "finetune_steps": 10,
                            "local_steps": 8},
            "pfldyn-proto": {**STEPS, "penalty": 0.3}, "pflscaf-proto": STEPS,
            "per-fedavg-fo": {**STEPS, "inner_lr": 0.05},
        },
    },
}


@dataclass(frozen=True)
class Cell:
    """One run. setting: one of ``SETTINGS``. attack: one of ``ATTACKS``, or ``nobody`` with a share of 0."""

    data: str
    method: str
    setting: str
    attack: str
    share: float
    seed: int = 0

    @property
    def key(self) -> str:
        return " ".join(map(str, asdict(self).values()))


def cells(data: str) -> Iterator[Cell]:
    """Without attackers first; then every attack by a fifth of the devices, then by more and by fewer; in each the
    methods in pairs, so that a grid that ends early has whole tables of two methods."""
    methods = tuple(DATA[data]["methods"])
    for share in (0.0, 0.2, 0.3, 0.1):
        for pair in (methods[:2], methods[2:]):
            for attack in ATTACKS if share else (NOBODY,):
                for method in pair:
                    yield from (Cell(data, method, setting, attack, share) for setting in SETTINGS)


def experiment(cell: Cell, **more: Any) -> Experiment:
    """more: further keys of the experiment."""
    chosen = DATA[cell.data]
    rule = NONE if cell.setting in (MEAN, ADAPTIVE) else cell.setting
    return experiments.read({
        "data": {"set": cell.data}, "partition": chosen["partition"], "model": chosen["model"],
        "budget": {"rounds": chosen["rounds"]}, "evaluation": {"every": 0}, "seeds": [cell.seed],
        "method": [{"name": cell.method, "hyper": chosen["methods"][cell.method]}],
        "robust": {"rule": rule}, **({"max_update_norm": CEILING} if cell.setting == MEAN else {}), **more,
    })
