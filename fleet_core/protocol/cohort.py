"""Selection of a round's cohort: a function of seed and round that aggregator and devices both compute."""

from __future__ import annotations

import hashlib
from collections.abc import Collection, Iterable

from fleet_core.protocol.round_messages import Cohort

LISTED = 64


def rank(seed: int, round_number: int, device: str) -> str:
    """A device's draw in a round, 16 hex digits; the devices with the smallest draws take part."""
    return hashlib.sha256(f"{seed}:{round_number}:{device}".encode()).hexdigest()[:16]


def select(seed: int, round_number: int, devices: Iterable[str], size: int) -> list[str]:
    """The ``size`` devices (0: all) with the smallest draws, by name."""
    ranked = sorted(devices, key=lambda name: (rank(seed, round_number, name), name))
    return sorted(ranked[: size or None])


def announce(seed: int, round_number: int, chosen: list[str], not_asked: Collection[str] = ()) -> Cohort:
    """The cohort as a message: names for up to 64 devices; above that the rule, whose size does not grow, unless the
    rule includes a device that must not be asked."""
    limit = max((rank(seed, round_number, name) for name in chosen), default="")
    if len(chosen) <= LISTED or any(rank(seed, round_number, name) <= limit for name in not_asked):
        return Cohort(devices=tuple(chosen))
    return Cohort(rule="rank", seed=seed, limit=limit)


def includes(cohort: Cohort, round_number: int, device: str) -> bool:
    """Whether ``device`` is in the cohort."""
    if cohort.devices is not None:
        return device in cohort.devices
    return cohort.rule == "rank" and rank(cohort.seed, round_number, device) <= cohort.limit
