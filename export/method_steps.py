"""Adds the gradient steps of a fleet's method to its graph bundle, and says what cannot be exported.

If the steps of the whole model cannot be exported, only the head is adapted (Raghu et al. 2020, "Rapid Learning or
Feature Reuse?", ANIL), with the method's rate and number of steps; with torch the method adapts more.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from export.adapt_graph import HEAD, with_adapt
from fleet_core.algorithms.interface import Method
from fleet_core.base import trees
from fleet_core.base.errors import BundleError
from fleet_core.base.trees import Params
from fleet_core.model.graph_bundle import MAX_FIRST_BYTES, Graph
from fleet_core.personalization.gradient_steps import Steps, steps_of, trains

Say = Callable[[str], None]


def with_steps(graph: Graph, method: Method, hyper: Any, initial: Params, say: Say) -> Graph:
    """``graph`` with ``adapt`` if the method takes gradient steps that can be exported, else as it is. initial: the
    model's first weights; the bundle gets their personal groups."""
    if trains(method):
        say(f"{method.name} makes a device's model by training in rounds: {_without_steps(graph, method)}")
        return graph
    steps = steps_of(method, hyper)
    if steps is None:
        return graph
    if 4 * graph.layout.parameters(method.personal) > MAX_FIRST_BYTES:
        say(f"the personal groups of {method.name} are over {MAX_FIRST_BYTES >> 20} MiB: "
            f"{_without_steps(graph, method)}")
        return graph
    personal = trees.only(initial, method.personal)
    return _export_steps(replace(graph, first=personal), method, steps, say) or graph


def _export_steps(graph: Graph, method: Method, steps: Steps, say: Say) -> Graph | None:
    """None if no steps can be exported."""
    for groups in dict.fromkeys((steps.groups, HEAD) if method.personalizer != "own" else (steps.groups,)):
        say(f"exporting its steps ({', '.join(groups)}), and comparing them with torch's …")
        try:
            exported = with_adapt(graph, rates=steps.rates, groups=groups)
        except BundleError as error:
            say(error.what)
            continue
        if groups != steps.groups:
            say(f"a device without torch adapts only the head; {method.name} adapts {' and '.join(steps.groups)}")
        return exported
    say(_without_steps(graph, method))
    return None


def _without_steps(graph: Graph, method: Method) -> str:
    """What a device does without torch and without a graph of the steps."""
    if {tensor.group for tensor in graph.layout.tensors} <= set(method.shared):
        return "a device without torch answers with the fleet's model as it is, not personalized"
    return "a device without torch cannot answer"
