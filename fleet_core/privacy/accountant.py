"""Epsilon of rounds, by Google's dp-accounting (Rényi divergences of the Gaussian mechanism).

Neighbours are two fleets in which one device holds other samples, whatever they are; its clipped update may differ by
2 C, and noise of z C is z / 2 of that. If neighbours differ by the presence of a device, as in some papers, epsilon is
about half of this.
"""

from __future__ import annotations

import importlib.util
from collections import Counter
from collections.abc import Iterable, Mapping
from typing import Any

from fleet_core.base.errors import ConfigError

Rounds = Mapping[float, int]
"""Noise multiplier -> number of rounds with it, of one device."""


class Accountant:
    """Epsilon for a delta. sampled: (n, N) if each round draws n of N devices, unknown to everyone who sees the model.
    Raises ConfigError if dp-accounting is not installed."""

    def __init__(self, delta: float, sampled: tuple[int, int] | None = None):
        self._delta, self._sampled, self._library = delta, sampled, _library()
        self._known: dict[tuple[tuple[float, int], ...], float] = {}

    def epsilon(self, rounds: Rounds) -> float:
        """Epsilon of a device that took part in ``rounds``."""
        key = tuple(sorted((noise, count) for noise, count in rounds.items() if count))
        if key not in self._known:
            self._known[key] = self._composed(key) if key else 0.0
        return self._known[key]

    def _composed(self, rounds: Iterable[tuple[float, int]]) -> float:
        library = self._library
        accountant = library.rdp.RdpAccountant(neighboring_relation=library.NeighboringRelation.REPLACE_ONE)
        for noise, count in rounds:
            event = library.GaussianDpEvent(noise / 2)
            if self._sampled is not None:
                event = library.SampledWithoutReplacementDpEvent(self._sampled[1], self._sampled[0], event)
            accountant.compose(event, count)
        return float(accountant.get_epsilon(self._delta))


class Spent:
    """The epsilon that the devices of a fleet have spent."""

    def __init__(self, accountant: Accountant):
        self._accountant = accountant
        self._rounds: dict[str, Counter[float]] = {}

    def add(self, devices: Iterable[str], noise: float) -> None:
        """Counts a round that asked ``devices``."""
        for name in devices:
            self._rounds.setdefault(name, Counter())[noise] += 1

    @property
    def epsilon(self) -> float:
        """Epsilon of the device that has spent most."""
        return max(map(self._accountant.epsilon, self._rounds.values()), default=0.0)

    @property
    def most(self) -> int:
        """The largest number of rounds in which a device was asked."""
        return max((sum(rounds.values()) for rounds in self._rounds.values()), default=0)

    def after_another(self, noise: float) -> float:
        """``epsilon`` if every device is asked in one more round."""
        known = [Counter[float](), *self._rounds.values()]
        return max(self._accountant.epsilon(rounds + Counter([noise])) for rounds in known)


def check_installed() -> None:
    """Raises ConfigError if dp-accounting is not installed."""
    if importlib.util.find_spec("dp_accounting") is None:
        raise ConfigError("epsilon needs dp-accounting, which is not installed", where="privacy.mode",
                          hint='pip install "metafleet[privacy]"')


def _library() -> Any:
    check_installed()
    import dp_accounting
    import dp_accounting.rdp

    return dp_accounting
