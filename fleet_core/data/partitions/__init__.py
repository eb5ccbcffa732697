"""Divides a data set among devices, as in the papers' experiments: named partitions, new devices, novel classes.

Everything is a function of its arguments and a seed.
"""

from __future__ import annotations

from fleet_core.data.partitions.named import PARTITIONS, Partition, partition
from fleet_core.data.partitions.new_devices import Newcomers, hold_out, newcomers, support_query, time_split, within
from fleet_core.data.partitions.shares import Share, pool

__all__ = [
    "PARTITIONS",
    "Newcomers",
    "Partition",
    "Share",
    "hold_out",
    "newcomers",
    "partition",
    "pool",
    "support_query",
    "time_split",
    "within",
]
