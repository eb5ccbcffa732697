"""Reads the method that a manifest names: its row in ``METHODS``, its hyper-parameters, and the arrays sent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fleet_core.algorithms.interface import Method
from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.algorithms.plugins import OR_INSTALL
from fleet_core.base import schema
from fleet_core.base.errors import ConfigError, MessageError
from fleet_core.model.layout import Layout
from fleet_core.protocol.round_messages import Manifest


def method_of(manifest: Manifest) -> Method:
    """The manifest's method. Raises MessageError if this agent lacks the method or its version."""
    reference = manifest.method
    method = METHODS.get(reference.name)
    if method is None or method.version != reference.version:
        raise MessageError(f"method {reference.name} version {reference.version} is unknown here",
                           hint=f"update this agent{OR_INSTALL}")
    return method


def hyper_of(method: Method, values: Mapping[str, Any]) -> Any:
    """The method's hyper-parameters. Values of None are not sent, so a missing value is None here. Raises
    ConfigError."""
    hyper, problems = schema.read(method.hyper, values)
    if hyper is None:
        raise ConfigError("; ".join(map(str, problems)), where=method.name)
    return hyper


def wire(layout: Layout, method: Method) -> Layout:
    """The arrays that are sent: those of the model's ``layout`` and the method's additional ones."""
    return layout.extended(method.down, method.shared)
