"""Decides which updates of a round are used: by the norm bound, then by the robust rule. Aggregator and simulation call
it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from statistics import median

from fleet_core.algorithms.interface import Method, Payload, ServerRule, Update
from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.robust import norm_bound, returning_devices, settings
from fleet_core.robust.clip import clip
from fleet_core.robust.history import history
from fleet_core.robust.interface import Choice, Memory, Rule
from fleet_core.robust.krum import krum
from fleet_core.robust.median import median as middle
from fleet_core.robust.median import trimmed
from fleet_core.robust.norm_bound import Measure
from fleet_core.robust.returning_devices import Returning
from fleet_core.robust.settings import NONE, RobustSection

RULES: dict[str, Rule] = {
    settings.CLIP: clip, settings.MEDIAN: middle, settings.TRIMMED: trimmed, settings.KRUM: krum,
    settings.HISTORY: history,
}
SCORES = "scores"
"""The key of the rule's scores in a checkpoint's facts."""
MOST_SAMPLES = 10.0
"""With a robust rule, a device's number of samples counts as at most this many times the median number."""
LIMITS = {"samples": 1e7, "loss": 1e6}
"""What a device may say of its update at most."""
CLIPPED_AWAY = 0.2
"""An update whose factor is below this is noted with its device."""


@dataclass(frozen=True)
class Screened:
    """used: what the server rule gets, in closing order, iterable any number of times. refused: device -> why its
    update is not used. remarks: device -> how its update was changed, if little of it is left. facts, arrays: for the
    checkpoint."""

    used: Iterable[Update]
    refused: Mapping[str, str] = field(default_factory=dict)
    remarks: Mapping[str, str] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)
    arrays: Params = field(default_factory=dict)


@dataclass(frozen=True)
class Screening:
    """How a fleet or a run screens. max_update_norm: None for the adaptive bound."""

    method: Method
    section: RobustSection = field(default_factory=RobustSection)
    max_update_norm: float | None = None

    @property
    def adaptive(self) -> bool:
        return self.max_update_norm is None and bool(self.method.shared)

    @property
    def duals(self) -> bool:
        """Whether devices keep a dual or control, so that honest updates end near zero."""
        return type(self.method.server).left is not ServerRule.left

    @property
    def ceiling(self) -> float:
        """The norm above which an update is refused whatever the others send; also the limit of numbers sent with
        it."""
        return settings.CEILING if self.max_update_norm is None else self.max_update_norm

    def too_much(self, samples: float, loss: float, scalars: Mapping[str, float]) -> list[str]:
        """What a device says of its update that is above its limit; such an update is refused."""
        said = [("samples", samples, LIMITS["samples"]), ("loss", loss, LIMITS["loss"])]
        said += [(name, value, self.ceiling) for name, value in scalars.items()]
        return [f"{name} {value:g}, expected at most {most:g}" for name, value, most in said if not abs(value) <= most]

    def measure(self, update: Update) -> Measure:
        return norm_bound.measure(update, per_sample=not self.method.cumulative)

    def screen(
        self, updates: Iterable[Update], facts: Mapping[str, str], arrays: Params,
        measures: Mapping[str, Measure] | None = None, *, model: Params | None = None,
    ) -> Screened:
        """updates: received, in closing order, iterable again. facts, arrays: of the last checkpoint. measures: of the
        updates by device, where they are known already. model: that the round's devices started from."""
        refused: dict[str, str] = {}
        own = (norm_bound.FACT, returning_devices.FACT, SCORES)
        kept = {key: value for key, value in facts.items() if key not in own}
        if self.adaptive:
            known = measures or {update.device: self.measure(update) for update in updates}
            held = norm_bound.norms_of(model) if model is not None and self.method.cumulative else {}
            back = Returning.of(facts).after(known) if self.duals and known else None
            refused = norm_bound.refused(known, facts, held, back)
            kept |= norm_bound.facts_after(known, facts)
            if back is not None:
                kept |= back.facts(norm_bound.usual(known, facts))
        if self.section.rule == NONE:
            return Screened(_Used(updates, refused) if refused else updates, refused, facts=kept)
        memory = Memory(arrays, json.loads(facts.get(SCORES, "{}")))
        choice = RULES[self.section.rule](_Used(updates, refused), self.section.share, memory)
        refused |= choice.dropped
        if choice.memory.scores:
            kept[SCORES] = json.dumps(choice.memory.scores, sort_keys=True)
        used = _Used(updates, refused, choice).with_common_numbers()
        return Screened(used, refused, _remarks(choice), kept, choice.memory.arrays)


def _remarks(choice: Choice) -> dict[str, str]:
    return {device: f"clipped to {factor:.2g} of its norm" for device, factor in choice.factors.items()
            if factor < CLIPPED_AWAY}


class _Used(Iterable[Update]):
    """``updates`` without the refused ones, changed as the rule chose."""

    def __init__(
        self, updates: Iterable[Update], refused: Mapping[str, str], choice: Choice | None = None,
        scalars: Mapping[str, float] | None = None, most_samples: float = float("inf"),
    ):
        self._updates, self._refused, self._choice = updates, refused, choice
        self._scalars, self._most_samples = scalars, most_samples

    def with_common_numbers(self) -> _Used:
        """These updates with the median of every number that is sent, and bounded numbers of samples: a rule on arrays
        is useless if one device's number decides."""
        samples, scalars = [], dict[str, list[float]]()
        for update in self:
            samples.append(update.samples)
            for name, value in update.payload.scalars.items():
                scalars.setdefault(name, []).append(value)
        common = {name: median(values) for name, values in scalars.items()}
        return _Used(self._updates, self._refused, self._choice, common, MOST_SAMPLES * median(samples))

    def __iter__(self) -> Iterator[Update]:
        for update in self._updates:
            if update.device not in self._refused:
                yield self._changed(update)

    def _changed(self, update: Update) -> Update:
        groups, choice = update.payload.groups, self._choice
        if choice is not None and choice.instead is not None:
            groups = choice.instead
        elif choice is not None and update.device in choice.factors:
            groups = trees.scale(groups, choice.factors[update.device])
        scalars = update.payload.scalars if self._scalars is None else self._scalars
        return replace(update, payload=Payload(groups, scalars), samples=int(min(update.samples, self._most_samples)))
