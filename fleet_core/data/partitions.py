"""Samples of many clients as one set for each of them."""

from __future__ import annotations

from fleet_core.data.samples import Samples
from fleet_core.errors import DataError


def by_client(samples: Samples) -> dict[str, Samples]:
    """{client: its samples}, clients sorted by name. Raises DataError where the samples name no client."""
    if samples.client is None:
        raise DataError("the samples name no client", expected="a 'client' array or column")
    return {name: samples.of_client(name) for name in samples.clients}
