"""``tariff.toml``: what data and electricity cost, and the capacity of a device's battery.

1 MB is 10^6 bytes, 1 kWh is 3.6 · 10^6 J. Prices are per device. A price that is not in the file is unknown, not 0.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from fleet_core.base import config, schema
from fleet_core.base.schema import Problem

FILE = "tariff.toml"
MB, J_PER_KWH, J_PER_WH = 1e6, 3.6e6, 3600.0
PRICE = {"min": 0, "max": 1e9}


@dataclass(frozen=True)
class Tariff:
    """currency: ISO 4217. source: where the prices are from. per_mb: price of data in both directions; instead of it,
    per_mb_up and per_mb_down. monthly_fee: fee of a device. included_mb: free data of a device in a month. per_kwh:
    price of electricity. battery_wh: capacity of a device's battery."""

    currency: str = field(metadata={"pattern": r"[A-Z]{3}", "words": "three capital letters, such as EUR"})
    source: str = field(metadata={"max_length": 500})
    per_mb: float | None = field(default=None, metadata=PRICE)
    per_mb_up: float | None = field(default=None, metadata=PRICE)
    per_mb_down: float | None = field(default=None, metadata=PRICE)
    monthly_fee: float = field(default=0.0, metadata=PRICE)
    included_mb: float = field(default=0.0, metadata={"min": 0, "max": 1e12})
    per_kwh: float | None = field(default=None, metadata=PRICE)
    battery_wh: float | None = field(default=None, metadata={"above": 0, "max": 1e9})

    def data(self, up_bytes: float, down_bytes: float) -> float | None:
        """The price of these bytes, without fee and included volume; None if the price is unknown."""
        up = self.per_mb if self.per_mb_up is None else self.per_mb_up
        down = self.per_mb if self.per_mb_down is None else self.per_mb_down
        return None if up is None or down is None else (up * up_bytes + down * down_bytes) / MB

    def month_of_data(self, up_bytes: float, down_bytes: float) -> float | None:
        """The price of a device's bytes in a month, without the fee. The included volume is subtracted from both
        directions in proportion."""
        total = up_bytes + down_bytes
        charged = max(0.0, total - MB * self.included_mb) / total if total else 0.0
        return self.data(charged * up_bytes, charged * down_bytes)

    def energy(self, joules: float) -> float | None:
        """The price of so much electricity; None if the price is unknown."""
        return None if self.per_kwh is None else self.per_kwh * joules / J_PER_KWH


def load(path: Path) -> Tariff:
    """The tariff in a file. Raises a ConfigError that lists every mistake."""
    text, where = config.text_of(path), str(path)
    tables = config.tables(text, where)
    tariff, problems = schema.read(Tariff, tables)
    problems += _contradictions(tables)
    if tariff is None or problems:
        raise config.mistakes(problems, text, where)
    return tariff


def of_folder(folder: Path, named: Path | None = None) -> Tariff | None:
    """The tariff in the file ``named``, else in the folder's tariff.toml; None if there is neither. Raises
    ConfigError."""
    if named is None and not (folder / FILE).exists():
        return None
    return load(named or folder / FILE)


def _contradictions(tables: Mapping[str, Any]) -> Iterator[Problem]:
    given = {"per_mb_up", "per_mb_down"} & tables.keys()
    if given and "per_mb" in tables:
        yield Problem("per_mb", "is the price of both directions: give it, or per_mb_up and per_mb_down")
    elif len(given) == 1:
        lacking = ({"per_mb_up", "per_mb_down"} - given).pop()
        yield Problem(lacking, f"missing beside {given.pop()}: give both, or per_mb for both directions")
    if tables.get("included_mb") and not given and "per_mb" not in tables:
        yield Problem("included_mb", "without a price of what is above it: give per_mb")
