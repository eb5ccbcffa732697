"""The named methods, each one row of choices."""

from __future__ import annotations

from dataclasses import dataclass

from fleet_core.algorithms.average import AverageClient, AverageServer
from fleet_core.algorithms.dyn import Dyn, DynClient, DynServer
from fleet_core.algorithms.seam import LocalSgd, Method


@dataclass(frozen=True, kw_only=True)
class Episodic(LocalSgd):
    """support_batch: |D|, samples that adapt. query_batch: |D'|, disjoint samples that give the meta-gradient."""

    support_batch: int = 50
    query_batch: int = 50


@dataclass(frozen=True, kw_only=True)
class Plain(LocalSgd):
    """batch: samples per gradient, without a split in support and query."""

    batch: int = 100


@dataclass(frozen=True, kw_only=True)
class FineTune(Plain):
    """finetune_lr, finetune_steps: SGD on all of the device's own samples when the model is judged, never
    differentiated (the best of ``benchmarks/heartbeat/choose.py`` on its validation split)."""

    finetune_lr: float = 0.05
    finetune_steps: int = 50


@dataclass(frozen=True, kw_only=True)
class Maml(Episodic):
    """inner_lr: η (Fallah, Chen: α), the adaptation rate. inner_steps: SGD steps of the adaptation."""

    inner_lr: float = 0.01
    inner_steps: int = 1


@dataclass(frozen=True, kw_only=True)
class PFLDynProto(Dyn, Episodic):
    """PFLDyn with Proto adaptation."""


@dataclass(frozen=True, kw_only=True)
class PFLDynMaml(Dyn, Maml):
    """PFLDyn with MAML adaptation (Acar: penalty 0.01, five inner steps at 0.01)."""

    penalty: float = 0.01
    inner_steps: int = 5


ACAR = "Acar et al. 2021, Debiasing Model Updates for Improving Personalized Federated Training, Alg. 1-2"
FALLAH = "Fallah et al. 2020, Personalized Federated Learning: A Meta-Learning Approach, Alg. 1"
MCMAHAN = "McMahan et al. 2017, Communication-Efficient Learning of Deep Networks from Decentralized Data, Alg. 1"

METHODS: dict[str, Method] = {
    method.name: method
    for method in (
        Method("fedavg", "Federated averaging of one model for all", MCMAHAN, FineTune,
               AverageClient(), AverageServer(), adaptation="none", personalizer="sgd"),
        Method("p-avg-proto", "Averaging with prototype adaptation", ACAR, Episodic,
               AverageClient(), AverageServer(), adaptation="proto", personalizer="proto", shared=("body",)),
        Method("pfldyn-proto", "Dynamic regularization with prototype adaptation", ACAR, PFLDynProto,
               DynClient(), DynServer(), adaptation="proto", personalizer="proto", shared=("body",)),
        Method("pfldyn-maml", "Dynamic regularization with MAML adaptation", ACAR, PFLDynMaml,
               DynClient(), DynServer(), adaptation="maml-exact", personalizer="sgd"),
        Method("per-fedavg-fo", "Averaging with first-order MAML adaptation", FALLAH, Maml,
               AverageClient(), AverageServer(), adaptation="maml-first-order", personalizer="sgd"),
    )
}
