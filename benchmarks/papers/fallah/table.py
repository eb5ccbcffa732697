"""Fallah's Table 1 beside ours."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def tables(result: Mapping[str, Any], paper: Mapping[str, Any]) -> dict[str, str]:
    return {}
