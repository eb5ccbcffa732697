"""``[privacy]``: how much updates may reveal of a device's samples; and which settings that goes together with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fleet_core.algorithms.interface import Method
from fleet_core.base.schema import Problem
from fleet_core.robust import settings as robust

NONE, LOCAL, CENTRAL = "none", "local", "central"
MODES = (NONE, LOCAL, CENTRAL)


@dataclass(frozen=True)
class PrivacySection:
    """The table ``privacy`` of fleet.toml and of an experiment. clip: C, Euclidean norm over all arrays that are sent.
    noise_multiplier: the noise's standard deviation in each value, over C; of one update (local) or of a round's sum
    (central). delta: for which epsilon is stated. epsilon: no round opens that would pass it; None for no limit."""

    mode: str = field(default=NONE, metadata={"choices": MODES, "about":
        "Who adds noise to updates: none, local (each device) or central (the aggregator); see docs/privacy.md."})
    clip: float = field(default=1.0, metadata={"above": 0, "max": 1e9, "about":
        "An update is scaled down to this norm; set it near the median norm of honest ones."})
    noise_multiplier: float = field(default=1.0, metadata={"above": 0, "max": 1e9, "about":
        "Standard deviation of the noise in each value, over clip."})
    delta: float = field(default=1e-5, metadata={"above": 0, "max": 0.1, "about":
        "The probability for which epsilon does not hold: well below one over the number of devices."})
    epsilon: float | None = field(default=None, metadata={"above": 0, "max": 1e9})

    @property
    def on(self) -> bool:
        return self.mode != NONE

    def max_update_norm(self, wanted: float | None) -> float | None:
        """The constant bound of a norm, None for the adaptive one. With central noise it is constant: whether an update
        is used may not depend on those of others."""
        return robust.CEILING if wanted is None and self.mode == CENTRAL else wanted


def check(
    section: PrivacySection, method: Method, hyper: Any, *, auto: bool, skip_below: float, rule: str
) -> Iterator[Problem]:
    """What does not go together with the section. auto: a codec is chosen by round. rule: the robust rule."""
    if not section.on:
        return
    key, name, mode = "privacy.mode", method.name, section.mode
    if not method.shared:
        yield Problem(key, f"{name} sends nothing: expected '{NONE}' with this method")
    elif not method.server.sums or not method.cumulative or method.up_scalars:
        yield Problem(key, f"noise is set for a sum of updates of one norm, and {name} does not sum or average them "
                           f"over devices: expected '{NONE}' with this method")
    if getattr(hyper, "weighted", False):
        yield Problem(key, f"'{mode}' bounds each device alike, and with weighted = true one counts as often as it has "
                           "samples: expected hyper.weighted = false")
    if auto:
        yield Problem(key, f"'{mode}' and the codec auto: it chooses by the devices' losses and what their codec left "
                           "out, and every manifest shows its choice: expected a codec by name")
    if skip_below:
        yield Problem(key, f"'{mode}' and skip_below: the norm below which updates are skipped is made of those of "
                           "updates, and every manifest shows it: expected skip_below = 0")
    if mode != CENTRAL:
        return
    kept = [role for role in method.client.keeps if role != "personal"]
    if kept:
        yield Problem(key, f"'{CENTRAL}' noise is in the aggregator's {kept[0]} and in no device's, so {name} walks "
                           f"away from its minimum: expected '{LOCAL}', or a method whose devices keep no {kept[0]}")
    if rule != robust.NONE:
        yield Problem(key, f"'{CENTRAL}' noise is set for a sum in which a device counts for clip at most, and under "
                           f"the robust rule '{rule}' its update decides what becomes of others: expected "
                           f"robust.rule = '{robust.NONE}' or '{LOCAL}'")


def remark(section: PrivacySection, rule: str) -> str:
    """What users may not expect of the section, or empty."""
    if section.mode == LOCAL and rule != robust.NONE:
        return (f"the robust rule {rule} sees updates with noise, which hides small lies as it hides samples; see "
                "docs/privacy.md")
    return ""
