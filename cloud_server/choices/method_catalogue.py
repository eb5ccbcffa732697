"""Descriptions of the methods: what is sent, what stays on a device, and the hyper-parameters."""

from __future__ import annotations

import inspect
import sys
from dataclasses import fields
from typing import Any

from fleet_core.algorithms.interface import Method, own_steps
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import schema
from fleet_core.base.errors import ConfigError
from fleet_core.model.layout import MODEL_GROUPS
from fleet_core.model.select_arrays import refusal
from fleet_core.personalization.gradient_steps import steps_of, trains

DERIVED = {
    "proto": "class means", "gp": "embedded samples", "knn": "embedded samples", "sgd": "tuned weights",
    "meta-sgd": "tuned weights", "moreau": "personal model",
}
"""Personalizer -> what a device computes from its samples to answer with, besides the groups that it keeps."""


def named(name: str) -> Method:
    """The method of that name. Raises ConfigError."""
    if name not in METHODS:
        near = schema.suggest(name, METHODS)
        raise ConfigError(f"unknown method '{name}'" + (f" (did you mean '{near}'?)" if near else ""),
                          expected=", ".join(METHODS), hint="metafleet methods")
    return METHODS[name]


def facts(method: Method) -> dict[str, Any]:
    """One method as plain values. down, up: what a device receives and sends in a round; models: in units of the shared
    groups. paper_models: the paper's count, if it differs."""
    down, up = method.paper_models or (method.models_down, method.models_up)
    differs = {} if method.paper_models is None else {"paper_models": {"down": down, "up": up}}
    return {
        "name": method.name, "title": method.title, "source": method.source, "version": method.version,
        "adaptation": method.adaptation, "personalizer": method.personalizer,
        "down": {"models": method.models_down, "groups": list(method.received), "scalars": list(method.down_scalars)},
        "up": {"models": method.models_up, "groups": list(method.shared), "scalars": list(method.up_scalars)},
        **differs, "lossy_codecs": method.cumulative, "stays": stays(method),
        "without_torch": without_torch(method), "hyper": schema.plain(method.hyper()),
    }


def stays(method: Method) -> list[str]:
    """What a device keeps and never sends, besides its samples."""
    kept = [role for role in method.client.keeps if role != "personal"]
    unchanged = method.personalizer == "sgd" and not own_steps(method, method.hyper())[1]
    derived = None if unchanged else DERIVED.get(method.personalizer)
    weights = method.personal or (method.shared if method.per_device or method.personalizer == "own" else ())
    return [*weights, *kept, *([derived] if derived else [])]


def without_torch(method: Method) -> str:
    """What a device without torch answers with. ``metafleet init`` makes the graph of a method's steps, and says for
    which models it cannot."""
    if method.personalizer in ("proto", "gp", "knn"):
        return DERIVED[method.personalizer]
    unchanged = "the fleet's model" if set(method.shared) >= set(MODEL_GROUPS) else "nothing"
    if trains(method) or steps_of(method, method.hyper()) is None:
        return unchanged
    return f"tuned weights; {unchanged} if its steps cannot become a graph"


def transfer_text(method: Method, way: str) -> str:
    """What is sent ``down`` or ``up``, in a few words: ``2 models: body, control``."""
    sent = facts(method)[way]
    parts = [*sent["groups"], *(f"{name} (a number)" for name in sent["scalars"])]
    if not parts:
        return "nothing"
    models = "part of a model" if method.personal else f"{sent['models']} model{'s' if sent['models'] > 1 else ''}"
    models += " of its own" if way == "down" and method.per_device else ""
    return f"{models}: {', '.join(parts)}" if sent["models"] else ", ".join(parts)


def rows() -> list[tuple[str, str, str, str, str, str]]:
    """(method, down, up, stays, what, source) of every method."""
    return [
        (m.name, transfer_text(m, "down"), transfer_text(m, "up"), ", ".join(stays(m)) or "nothing", m.title, m.source)
        for m in METHODS.values()
    ]


def settings(method: Method) -> list[tuple[str, str, str]]:
    """(name, default, accepted values) of every hyper-parameter."""
    return [(f.name, _text(f.default), _accepted(f.metadata)) for f in fields(method.hyper)]


def _text(value: Any) -> str:
    if value is None or isinstance(value, bool):
        return str(value).lower()
    return value if isinstance(value, str) else f"{value:g}"


def _accepted(limits: Any) -> str:
    if "choices" in limits:
        return ", ".join(limits["choices"])
    named_limits = (("above", "above"), ("min", "at least"), ("max", "at most"))
    return ", ".join(f"{word} {limits[key]:g}" for key, word in named_limits if key in limits)


def notes(method: Method) -> str:
    """The meaning of the hyper-parameters, from the docstrings of their classes."""
    documented = [c for c in method.hyper.__mro__ if c.__doc__ and not c.__doc__.startswith(f"{c.__name__}(")]
    return "\n\n".join(inspect.cleandoc(c.__doc__ or "") for c in documented if c is not object)


def pages(method: Method) -> dict[str, str]:
    """Module -> its docstring: the paper, its equations, and where the code deviates from it."""
    modules = dict.fromkeys((type(method.client).__module__, type(method.server).__module__))
    return {name: inspect.cleandoc(sys.modules[name].__doc__ or "") for name in modules}


def description(method: Method) -> str:
    """The full text of ``metafleet methods NAME``."""
    paper = method.paper_models
    lines = {
        "source": method.source, "down": transfer_text(method, "down"), "up": transfer_text(method, "up"),
        **({"in print": f"{paper[0]} models down, {paper[1]} up"} if paper else {}),
        "codecs": "any" if method.cumulative else "fp32 only: it sends sums over samples, which a lossy codec would "
                                                  "spoil",
        **({"a part": f"it cannot train a part of the model: it {why}"} if (why := refusal(method)) else {}),
        "stays": ", ".join(stays(method)) or "nothing", "gradient": method.adaptation,
        "answers": f"{method.personalizer}; without torch: {without_torch(method)}",
    }
    head = [f"{method.name}: {method.title}", "", *(f"{name:<10}{text}" for name, text in lines.items())]
    known = settings(method)
    widths = [max(len(row[k]) for row in known) for k in (0, 1)]
    hyper = [f"{name:<{widths[0]}}  {default:<{widths[1]}}  {accepted}".rstrip() for name, default, accepted in known]
    parts = [*head, "", "hyper-parameters", "", *hyper, "", notes(method)]
    for module, text in pages(method).items():
        parts += ["", module, "", text]
    return "\n".join(parts)
