"""How a device makes a served model its own: what was chosen, against what method, graph and device have for it.

Snell et al. 2017 (class means), Raghu et al. 2020 (a head alone), Marfoq et al. 2022 (neighbours), Finn et al. 2017 and
Li et al. 2017 (the steps of MAML and Meta-SGD). Gradient steps are those of the graph ``adapt``, or of the trainer.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from fleet_core.algorithms.interface import Method
from fleet_core.algorithms.methods.pfedgp import Gaussian, gaussian_of
from fleet_core.base.errors import ConfigError
from fleet_core.board.device_settings import Personalize
from fleet_core.model.graph_bundle import Graph
from fleet_core.personalization.gradient_steps import Steps, steps_of, trains

CHOSEN = ("proto", "head", "knn")
"""The ways that can be chosen on any encoder that the fleet shares."""

EMBEDS = (*CHOSEN, "gp")
"""The ways that need embedded samples and nothing else, and take classes that the fleet does not have."""

NEIGHBOURS = 10
HEAD_STEPS = 50


@dataclass(frozen=True)
class Plan:
    """kind: proto, head, knn, none; ``steps`` of the graph ``adapt``; ``trainer`` for steps with torch; ``left`` where
    the method's own way cannot be gone here. how: what the answers then say of themselves. steps, rate: of gradient
    steps, or of a fitted head; rate None where rates are learned. distance, neighbours, mixture: of nearest samples.
    gaussian: of Gaussian processes. int8: embed by the quantized encoder, where there is one."""

    kind: str
    how: str
    steps: int = 0
    rate: float | None = None
    distance: str = "squared"
    neighbours: int = NEIGHBOURS
    mixture: float | None = None
    gaussian: Gaussian | None = None
    int8: bool = False


def plan_of(
    choice: Personalize, method: Method, hyper: Any, graph: Graph, *, trainer: bool = False, trained: bool = False
) -> Plan:
    """What is to be done. trainer: there is one. trained: this device has trained groups of its own.

    Raises ConfigError for a choice that this method, graph or device has not what it takes for; it names those that
    work.
    """
    plan = _chosen(choice, method, hyper, graph, trainer=trainer, trained=trained)
    if choice.int8 and plan.kind not in EMBEDS:
        raise ConfigError(
            "the int8 encoder for answers that are of no embedded samples", expected="one of " + ", ".join(CHOSEN),
            hint="leave out int8 (at the command line: --fp32)",
        )  # fmt: skip
    return replace(plan, int8=choice.int8)


def _chosen(
    choice: Personalize, method: Method, hyper: Any, graph: Graph, *, trainer: bool, trained: bool
) -> Plan:
    if choice.by == "method":
        return _of_method(choice, method, hyper, graph, trainer=trainer, trained=trained)
    why = _lacking(choice.by, method, graph)
    if why:
        raise ConfigError(
            f"cannot personalize by {choice.by}: {why}", expected="one of " + ", ".join(working(method, graph))
        )
    if choice.by == "adapt":
        return _steps(choice, method, hyper, graph)
    _refuse_unused(choice)
    if choice.by == "head":
        return Plan("head", "head", steps=choice.steps or HEAD_STEPS)
    if choice.by == "knn":
        return _knn(method, hyper)
    return Plan(choice.by, choice.by, distance=getattr(hyper, "distance", "squared"))


def working(method: Method, graph: Graph) -> list[str]:
    """The choices that work with this method and graph."""
    return ["method", *(by for by in (*CHOSEN, "adapt", "none") if not _lacking(by, method, graph))]


def by_trainer(method: Method, hyper: Any) -> bool:
    """Whether the device's own weights take gradient steps, or the groups that its trainer keeps."""
    if method.personalizer == "sgd":
        return bool(method.personal or getattr(hyper, "inner_steps", getattr(hyper, "finetune_steps", 0)))
    return method.personalizer in ("meta-sgd", "own", "moreau", "fleet-proto")


def is_whole(method: Method, graph: Graph) -> bool:
    """Whether what the fleet shares answers by itself."""
    return "predict" in graph.graphs and {tensor.group for tensor in graph.layout.tensors} <= set(method.shared)


def _of_method(
    choice: Personalize, method: Method, hyper: Any, graph: Graph, *, trainer: bool, trained: bool
) -> Plan:
    if method.personalizer == "proto":
        _refuse_unused(choice)
        return Plan("proto", "proto", distance=hyper.distance)
    if method.personalizer == "gp":
        _refuse_unused(choice)
        return Plan("gp", "gp", gaussian=gaussian_of(hyper))
    if method.personalizer == "knn":
        _refuse_unused(choice)
        return _knn(method, hyper)
    if not by_trainer(method, hyper):
        return Plan("none", "none")
    chosen = choice.steps is not None or choice.rate is not None
    if trainer and not chosen:
        return Plan("trainer", method.personalizer)
    kept = trained and method.personalizer == "own"
    if graph.adapt and not kept and not trains(method) and steps_of(method, hyper) is not None:
        return _steps(choice, method, hyper, graph)
    return Plan("left", "none")


def _steps(choice: Personalize, method: Method, hyper: Any, graph: Graph) -> Plan:
    how = steps_of(method, hyper) or Steps(("head",), False, 0.01, 10)
    learned = graph.info.adapt is not None and graph.info.adapt.rates
    if learned and choice.rate is not None:
        raise ConfigError(f"a rate for the gradient steps of {method.name}, whose rates are learned")
    rate = None if learned else (choice.rate or how.lr)
    return Plan("steps", "meta-sgd" if learned else method.personalizer, steps=choice.steps or how.number, rate=rate)


def _knn(method: Method, hyper: Any) -> Plan:
    count, mixture = getattr(hyper, "neighbours", NEIGHBOURS), getattr(hyper, "mixture", None)
    return Plan("knn", "knn", neighbours=count, mixture=mixture if set(method.shared) >= {"head"} else 1.0)


def _refuse_unused(choice: Personalize) -> None:
    if choice.rate is not None or (choice.steps is not None and choice.by != "head"):
        raise ConfigError(
            f"steps or a rate for personalizing by {choice.by}", expected="adapt, or a head, which takes steps"
        )


def _lacking(by: str, method: Method, graph: Graph) -> str:
    """Why this way cannot be gone; empty where it can."""
    groups = {tensor.group for tensor in graph.layout.tensors}
    if by in CHOSEN:
        if "embed" not in graph.graphs:
            return "the fleet's bundle has no graph 'embed'"
        if not groups - {"head"} <= set(method.shared):
            return f"{method.name} leaves the encoder to each device"
    if by == "adapt" and not graph.adapt:
        return "the fleet's bundle has no graph 'adapt' of gradient steps"
    if by == "adapt" and trains(method):
        return f"{method.name} makes a device's own model in rounds of training"
    if by == "none" and not is_whole(method, graph):
        return f"what the fleet shares by {method.name} does not answer by itself"
    return ""
