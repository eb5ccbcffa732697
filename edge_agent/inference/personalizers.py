"""Decides how a device personalizes a served model, from the user's choice, the method, the graph and the device.

Personalizers: class means (Snell et al. 2017), a fitted head (Raghu et al. 2020; without classes that of the task),
nearest neighbours (Marfoq et al. 2022), the gradient steps of MAML (Finn et al. 2017) and Meta-SGD (Li et al. 2017).
The graph ``adapt`` or the trainer takes the gradient steps.
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
from fleet_core.tasks.anomaly import Anomaly
from fleet_core.tasks.regression import Regression

ON_SHARED_ENCODER = ("proto", "head", "knn")
"""Personalizers that a user can choose wherever the fleet shares the encoder."""

EMBEDS = (*ON_SHARED_ENCODER, "gp", "auto")
"""Personalizers that need embedded samples only. They can learn classes that the fleet does not have."""

NEIGHBOURS = 10
HEAD_STEPS = 50


@dataclass(frozen=True)
class Plan:
    """How to personalize.

    kind: ``proto``, ``head``, ``knn``, ``gp``, ``none``; ``auto``: a mixture of ``candidates``; ``steps``: gradient
    steps by the graph ``adapt``; ``trainer``: gradient steps by torch; ``left``: the method's own personalizer cannot
    run here. how: the personalizer's name in answers. steps, rate: number and learning rate of gradient steps, or the
    steps of a fitted head; rate None: the fleet learns the rates. distance: the distance to class means. frequent: as
    in ``Prototypes``. neighbours, mixture: options of ``knn``. gaussian: options of Gaussian processes. candidates:
    what ``auto`` weighs. int8: embed with the quantized encoder if the slot has one.
    """

    kind: str
    how: str
    steps: int = 0
    rate: float | None = None
    distance: str = "squared"
    frequent: bool = False
    neighbours: int = NEIGHBOURS
    mixture: float | None = None
    gaussian: Gaussian | None = None
    candidates: tuple[Plan, ...] = ()
    int8: bool = False


def plan_of(
    choice: Personalize, method: Method, hyper: Any, graph: Graph, *, trainer: bool = False, trained: bool = False
) -> Plan:
    """The plan that follows from ``choice``. trainer: a trainer is available. trained: this device has trained personal
    groups.

    Raises ConfigError, naming the possible choices, if the method, graph or device does not support ``choice``.
    """
    plan = _of_choice(choice, method, hyper, graph, trainer=trainer, trained=trained)
    if choice.int8 and plan.kind not in EMBEDS:
        raise ConfigError(
            f"int8 needs a personalizer that embeds samples, and this one is {plan.kind}",
            expected="one of " + ", ".join(ON_SHARED_ENCODER), hint="leave out int8 (at the command line: --fp32)",
        )  # fmt: skip
    if choice.frequent and plan.kind not in ("proto", "auto"):
        raise ConfigError(f"frequent is a setting of class means, and this personalizer is {plan.kind}",
                          expected="proto", hint="leave out frequent, or set by = \"proto\"")
    return replace(plan, int8=choice.int8)


def possible_choices(method: Method, graph: Graph) -> list[str]:
    """The values of ``[personalize] by`` that work with this method and graph."""
    named = (*ON_SHARED_ENCODER, "adapt", "none", "auto")
    return ["method", *(by for by in named if not _why_impossible(by, method, graph))]


def takes_gradient_steps(method: Method, hyper: Any) -> bool:
    """Whether the method personalizes by gradient steps, or by groups that the device trains."""
    if method.personalizer == "sgd":
        return bool(method.personal or getattr(hyper, "inner_steps", getattr(hyper, "finetune_steps", 0)))
    return method.personalizer in ("meta-sgd", "own", "moreau", "fleet-proto")


def answers_unpersonalized(method: Method, graph: Graph) -> bool:
    """Whether the shared groups are a complete model, with a head."""
    return "predict" in graph.graphs and {tensor.group for tensor in graph.layout.tensors} <= set(method.shared)


def _of_choice(
    choice: Personalize, method: Method, hyper: Any, graph: Graph, *, trainer: bool, trained: bool
) -> Plan:
    if choice.by == "method":
        return _of_method(choice, method, hyper, graph, trainer=trainer, trained=trained)
    why = _why_impossible(choice.by, method, graph)
    if why:
        raise ConfigError(
            f"cannot personalize by {choice.by}: {why}",
            expected="one of " + ", ".join(possible_choices(method, graph)),
        )
    if choice.by == "adapt":
        return _gradient_steps(choice, method, hyper, graph)
    _refuse_steps_and_rate(choice)
    if choice.by == "auto":
        return Plan("auto", "auto", candidates=_candidates(method, hyper, graph))
    if choice.by == "head" and isinstance(graph.layout.task, (Regression, Anomaly)) and choice.steps is not None:
        raise ConfigError("a head of numbers is fitted in closed form, without steps", hint="leave out the steps")
    if choice.by == "head":
        return Plan("head", "head", steps=choice.steps or HEAD_STEPS)
    if choice.by == "knn":
        return _knn(method, hyper)
    return Plan(choice.by, choice.by, distance=getattr(hyper, "distance", "squared"), frequent=choice.frequent)


def _candidates(method: Method, hyper: Any, graph: Graph) -> tuple[Plan, ...]:
    """The plans without gradient steps, the method's own first. Class means count how frequent a class is."""
    own = _of_method(Personalize(), method, hyper, graph, trainer=False, trained=False)
    named = [by for by in ("none", *ON_SHARED_ENCODER) if not _why_impossible(by, method, graph)]
    plans = [_of_choice(Personalize(by), method, hyper, graph, trainer=False, trained=False) for by in named]
    if own.kind in EMBEDS:
        plans = [own, *(plan for plan in plans if plan.kind != own.kind)]
    return tuple(replace(plan, frequent=plan.kind == "proto") for plan in plans)


def _of_method(
    choice: Personalize, method: Method, hyper: Any, graph: Graph, *, trainer: bool, trained: bool
) -> Plan:
    if method.personalizer == "proto":
        _refuse_steps_and_rate(choice)
        return Plan("proto", "proto", distance=hyper.distance, frequent=choice.frequent)
    if method.personalizer == "gp":
        _refuse_steps_and_rate(choice)
        return Plan("gp", "gp", gaussian=gaussian_of(hyper))
    if method.personalizer == "knn":
        _refuse_steps_and_rate(choice)
        return _knn(method, hyper)
    if not takes_gradient_steps(method, hyper):
        return Plan("none", "none")
    has_steps_or_rate = choice.steps is not None or choice.rate is not None
    if trainer and not has_steps_or_rate:
        return Plan("trainer", method.personalizer)
    keeps_trained_weights = trained and method.personalizer == "own"
    if graph.adapt and not keeps_trained_weights and not trains(method) and steps_of(method, hyper) is not None:
        return _gradient_steps(choice, method, hyper, graph)
    return Plan("left", "none")


def _gradient_steps(choice: Personalize, method: Method, hyper: Any, graph: Graph) -> Plan:
    defaults = steps_of(method, hyper) or Steps(("head",), False, 0.01, 10)
    learned = graph.info.adapt is not None and graph.info.adapt.rates
    if learned and choice.rate is not None:
        raise ConfigError(f"{method.name} learns the rates of its gradient steps: a rate cannot be given",
                          hint="leave out the rate")
    rate = None if learned else (choice.rate or defaults.lr)
    name = "meta-sgd" if learned else method.personalizer
    return Plan("steps", name, steps=choice.steps or defaults.number, rate=rate)


def _knn(method: Method, hyper: Any) -> Plan:
    count, mixture = getattr(hyper, "neighbours", NEIGHBOURS), getattr(hyper, "mixture", None)
    return Plan("knn", "knn", neighbours=count, mixture=mixture if set(method.shared) >= {"head"} else 1.0)


def _refuse_steps_and_rate(choice: Personalize) -> None:
    if choice.rate is not None or (choice.steps is not None and choice.by != "head"):
        raise ConfigError(
            f"steps or a rate for personalizing by {choice.by}",
            expected="steps or a rate with 'adapt', or steps with 'head'",
        )


def _why_impossible(by: str, method: Method, graph: Graph) -> str:
    """Why ``by`` does not work with this method and graph; empty if it does."""
    groups, task = {tensor.group for tensor in graph.layout.tensors}, graph.layout.task
    if task is not None and by in ("proto", "knn", "auto"):
        return f"it compares classes, and this fleet's task is {task.kind}"
    if by in (*ON_SHARED_ENCODER, "auto"):
        if "embed" not in graph.graphs:
            return "the fleet's bundle has no graph 'embed'"
        if not groups - {"head"} <= set(method.shared):
            return f"with {method.name} each device has its own encoder"
    if by == "adapt" and not graph.adapt:
        return "the fleet's bundle has no graph 'adapt' of gradient steps"
    if by == "adapt" and trains(method):
        return f"{method.name} makes a device's model by training in rounds"
    if by == "none" and not answers_unpersonalized(method, graph):
        return f"the groups that {method.name} shares are not a complete model"
    return ""
