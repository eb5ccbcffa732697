"""The gradient steps that a fleet's method asks of a device, in its graph bundle; what cannot be exported is said.

Where the steps of a whole model do not become a graph, its head alone steps (Raghu et al. 2020, "Rapid Learning or
Feature Reuse?", ANIL): with a method's own rate and number of steps, but not what the method does with torch.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

from export.adapt import HEAD, with_adapt
from fleet_core.algorithms.interface import Method
from fleet_core.base import trees
from fleet_core.base.errors import BundleError
from fleet_core.base.trees import Params
from fleet_core.model.graph_bundle import MAX_FIRST_BYTES, Graph
from fleet_core.personalization.gradient_steps import Steps, steps_of, trains

Say = Callable[[str], None]


def with_steps(graph: Graph, method: Method, hyper: Any, initial: Params, say: Say) -> Graph:
    """``graph`` with ``adapt``, where the method steps and its steps become a graph. initial: the model's first
    weights, of which the bundle takes the groups that stay on a device."""
    if trains(method):
        say(f"{method.name} makes a device's own model in rounds of training: {_without(graph, method)}")
        return graph
    how = steps_of(method, hyper)
    if how is None:
        return graph
    if 4 * graph.layout.parameters(method.personal) > MAX_FIRST_BYTES:
        say(f"what {method.name} leaves to a device is over {MAX_FIRST_BYTES >> 20} MiB: {_without(graph, method)}")
        return graph
    own = trees.only(initial, method.personal)
    return _stepping(replace(graph, first=own), method, how, say) or graph


def _stepping(graph: Graph, method: Method, how: Steps, say: Say) -> Graph | None:
    """None where no steps become a graph."""
    for groups in dict.fromkeys((how.groups, HEAD) if method.personalizer != "own" else (how.groups,)):
        say(f"exporting its steps ({', '.join(groups)}), and comparing them with torch's …")
        try:
            made = with_adapt(graph, rates=how.rates, groups=groups)
        except BundleError as error:
            say(error.what)
            continue
        if groups != how.groups:
            say(f"a device without torch steps the head alone; {method.name} steps {' and '.join(how.groups)}")
        return made
    say(_without(graph, method))
    return None


def _without(graph: Graph, method: Method) -> str:
    """What a device does that has neither torch nor a graph of the steps."""
    if {tensor.group for tensor in graph.layout.tensors} <= set(method.shared):
        return "a device without torch answers with the fleet's model as it is, not personalized"
    return "a device without torch has no answers"
