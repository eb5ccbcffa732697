"""The methods that both sides have, and their settings, so that a device makes as many gradient steps on both sides.

``Setting`` is PFLlib's benchmark (batches of 10, one epoch a round) except for the rate and, on this small scale, the
number of images.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

DEVICES = 20
DATA_SET = "division"
"""PFLlib's name for the samples."""


@dataclass(frozen=True)
class Setting:
    """train, test: samples of a device. rate: of all local steps. epochs: passes of a device in a round.
    tuning_epochs: passes of the fine-tuning before the evaluation."""

    train: int = 150
    test: int = 50
    batch: int = 10
    rate: float = 0.05
    epochs: int = 1
    tuning_epochs: int = 5

    @property
    def steps(self) -> int:
        return self.epochs * (self.train // self.batch)

    @property
    def tuning_steps(self) -> int:
        return self.tuning_epochs * (self.train // self.batch)


SETTING = Setting()


@dataclass(frozen=True)
class Pair:
    """name: our method. ours: its hyper-parameters. server: PFLlib's module and class. split: whether PFLlib divides
    the network into base and head. theirs: PFLlib's options that differ from ``theirs.DEFAULTS``."""

    name: str
    ours: Callable[[Setting], dict[str, Any]]
    server: tuple[str, str]
    split: bool = False
    theirs: Mapping[str, Any] | None = None


def plain(setting: Setting, steps: int | None = None, **other: Any) -> dict[str, Any]:
    return {"local_steps": setting.steps if steps is None else steps, "batch": setting.batch,
            "client_lr": setting.rate, **other}


def tuned(setting: Setting) -> dict[str, Any]:
    return plain(setting, finetune_steps=setting.tuning_steps, finetune_lr=setting.rate)


def meta(setting: Setting) -> dict[str, Any]:
    """PFLlib takes batches of twice the size, half of them to adapt, in two passes a round."""
    return {"local_steps": 2 * setting.epochs * (setting.train // (2 * setting.batch)), "draws": "pass",
            "support_batch": setting.batch, "query_batch": setting.batch, "client_lr": setting.rate,
            "inner_lr": setting.rate}


ENVELOPE, SEARCH_STEPS, SEARCH_RATE, DECAY = 15.0, 5, 0.01, 0.001


def moreau(setting: Setting) -> dict[str, Any]:
    """DECAY: ``mu`` of PFLlib's optimizer, which shrinks θ in each step of the search."""
    return plain(setting, envelope=ENVELOPE, personal_steps=SEARCH_STEPS, personal_lr=SEARCH_RATE, answer="last",
                 weight_decay=DECAY)


METHODS = {
    "FedAvg": Pair("fedavg", plain, ("serveravg", "FedAvg"), split=True),
    "FedAvg, fine-tuned": Pair("fedavg-meta", tuned, ("serveravg", "FedAvg"), split=True),
    "Per-FedAvg": Pair("per-fedavg-fo", meta, ("serverperavg", "PerAvg")),
    "pFedMe": Pair("pfedme", moreau, ("serverpFedMe", "pFedMe"),
                   theirs={"lamda": ENVELOPE, "K": SEARCH_STEPS, "p_learning_rate": SEARCH_RATE, "beta": 1.0}),
    "FedRep": Pair("fedrep", lambda s: plain(s, 2 * s.steps, head_steps=s.steps), ("serverrep", "FedRep"), split=True),
    "FedBABU": Pair("fedbabu", tuned, ("serverbabu", "FedBABU"), split=True),
    "LG-FedAvg": Pair("lg-fedavg", plain, ("serverlg", "LG_FedAvg"), split=True),
    "FedProto": Pair("fedproto", lambda s: plain(s, pull=0.1, pull_form="norm"), ("serverproto", "FedProto"),
                     split=True),
    "FedProto, no pull": Pair("fedproto", lambda s: plain(s, pull=0.0), ("serverproto", "FedProto"), split=True,
                              theirs={"lamda": 0.0}),
    "FedProto, both by the mean square, pull 1": Pair(
        "fedproto", lambda s: plain(s, pull=1.0, pull_form="square"), ("serverproto", "FedProto"), split=True),
    "FedProto, pull 1": Pair("fedproto", lambda s: plain(s, pull=1.0, pull_form="norm"), ("serverproto", "FedProto"),
                             split=True),
}
