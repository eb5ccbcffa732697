"""A manifest's method as this agent has it: its row, its hyper-parameters, and the arrays that cross the wire."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import fields, replace
from typing import Any

from fleet_core.algorithms.interface import Method
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.algorithms.plugins import OR_INSTALL
from fleet_core.base import schema
from fleet_core.base.errors import ConfigError, MessageError
from fleet_core.model.layout import Layout
from fleet_core.protocol.round_messages import Manifest

BATCHES = ("batch", "support_batch", "query_batch")


def method_of(manifest: Manifest) -> Method:
    """The manifest's method. Raises MessageError for one, or a version of one, that this agent lacks."""
    reference = manifest.method
    method = METHODS.get(reference.name)
    if method is None or method.version != reference.version:
        what = f"method {reference.name} version {reference.version}"
        raise MessageError(what, hint=f"update this agent{OR_INSTALL}")
    return method


def hyper_of(method: Method, values: Mapping[str, Any]) -> Any:
    """The method's hyper-parameters; what is None does not travel, and is None again here. Raises ConfigError."""
    hyper, problems = schema.read(method.hyper, values)
    if hyper is None:
        raise ConfigError("; ".join(map(str, problems)), where=method.name)
    return hyper


def capped(hyper: Any, most: int | None) -> Any:
    """``hyper`` with no batch of more than ``most`` samples, which is what the board has room for."""
    known = {f.name: getattr(hyper, f.name) for f in fields(hyper) if f.name in BATCHES}
    return hyper if most is None else replace(hyper, **{name: min(size, most) for name, size in known.items()})


def cut(asked: Any, used: Any) -> dict[str, float]:
    """{batch: samples} of those that ``capped`` made smaller: a round with other batches than the others' is told."""
    sizes = {f.name: (getattr(asked, f.name), getattr(used, f.name)) for f in fields(used) if f.name in BATCHES}
    return {name: float(less) for name, (size, less) in sizes.items() if less < size}


def wire(layout: Layout, method: Method) -> Layout:
    """The arrays that cross the wire: the model's ``layout`` and what ``method`` has besides."""
    return layout.extended(method.down, method.shared)
