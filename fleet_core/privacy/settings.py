"""``[privacy]``: how much updates may reveal of a device's samples, and which settings conflict with that."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from fleet_core.algorithms.interface import Method
from fleet_core.base.schema import Problem
from fleet_core.codecs.kinds.common_scale import LARGEST
from fleet_core.protocol.secure_messages import LEAST, MOST_NEIGHBOURS, MOST_SAMPLES
from fleet_core.robust import settings as robust

NONE, LOCAL, CENTRAL = "none", "local", "central"
MODES = (NONE, LOCAL, CENTRAL)
SPARSE = 100
"""Neighbours of a device in a larger cohort (docs/privacy.md)."""


@dataclass(frozen=True)
class PrivacySection:
    """The table ``privacy`` of fleet.toml and of an experiment. clip: C, Euclidean norm over all arrays that are sent.
    noise_multiplier: the noise's standard deviation in each value, over C; of one update (local) or of a round's sum
    (central). delta: for which epsilon is stated. epsilon: no round opens that would exceed it; None for no limit.
    neighbours: 0 for all other devices, or ``SPARSE`` where there are more."""

    mode: str = field(default=NONE, metadata={"choices": MODES, "about":
        "Who adds noise to updates: none, local (each device) or central (the aggregator); see docs/privacy.md."})
    clip: float = field(default=1.0, metadata={"above": 0, "max": 1e9, "about":
        "An update is scaled down to this norm; set it near the median norm of honest ones."})
    noise_multiplier: float = field(default=1.0, metadata={"above": 0, "max": 1e9, "about":
        "Standard deviation of the noise in each value, over clip."})
    delta: float = field(default=1e-5, metadata={"above": 0, "max": 0.1, "about":
        "The probability for which epsilon does not hold: well below one over the number of devices."})
    epsilon: float | None = field(default=None, metadata={"above": 0, "max": 1e9})
    secure_aggregation: bool = field(default=False, metadata={"about":
        "true: devices mask their updates, and the aggregator gets their sum alone."})
    threshold: float = field(default=0.6, metadata={"above": 0.5, "max": 1, "about":
        "With secure_aggregation: the share of the devices that must stay until the sum is there."})
    least: int = field(default=LEAST, metadata={"min": LEAST, "max": 1_000_000, "about":
        "With secure_aggregation: no sum of fewer devices."})
    neighbours: int = field(default=0, metadata={"min": 0, "max": MOST_NEIGHBOURS, "about":
        "With secure_aggregation: with how many others a device has masks, an even number; 0: all, at most 100."})
    range: float = field(default=0.05, metadata={"above": 0, "max": 1e6, "about":
        "With secure_aggregation: a value of an update is cut off at this; what is cut off is sent in later rounds."})

    most_samples: int = field(default=1000, metadata={"min": 1, "max": MOST_SAMPLES, "about":
        "With secure_aggregation and weights by samples: a device with more of them counts as one with this many."})

    @property
    def on(self) -> bool:
        return self.mode != NONE

    def max_update_norm(self, wanted: float | None) -> float | None:
        """The constant bound of a norm, None for the adaptive one. It is constant with central noise, because the use
        of an update must not depend on other updates, and with secure aggregation, because no norm is known."""
        constant = self.mode == CENTRAL or self.secure_aggregation
        return robust.CEILING if wanted is None and constant else wanted

    @property
    def exponent(self) -> int:
        """The exponent of the smallest power of two that reaches ``range`` when multiplied by 127."""
        return max(-60, min(60, math.ceil(math.log2(self.range / LARGEST))))

    def neighbours_of(self, devices: int) -> int:
        """A device's neighbours in a cohort of ``devices``; 0 for all others."""
        return self.neighbours or (SPARSE if devices > SPARSE + 1 else 0)


def check(
    section: PrivacySection, method: Method, hyper: Any, *, auto: bool, skip_below: float, rule: str
) -> Iterator[Problem]:
    """The conflicts of the section with other settings. auto: a codec is chosen by round. rule: the robust rule."""
    if not section.on:
        return
    key, name, mode = "privacy.mode", method.name, section.mode
    if not method.shared:
        yield Problem(key, f"{name} sends nothing: expected '{NONE}' with this method")
    elif not method.server.sums or not method.cumulative or method.up_scalars:
        yield Problem(key, f"noise is for a sum of updates of bounded norm, and {name} does not sum or average updates "
                           f"over devices: expected '{NONE}' with this method")
    if method.server.weighted(hyper):
        yield Problem(key, f"'{mode}' bounds each device alike, but weighted = true counts a device by its samples: "
                           "expected hyper.weighted = false, and no form that weights")
    if auto:
        yield Problem(key, f"'{mode}' excludes the codec auto, which chooses by the devices' losses and residuals and "
                           "shows its choice in every manifest: expected a codec by name")
    if skip_below:
        yield Problem(key, f"'{mode}' excludes skip_below, whose norm is computed from the updates' norms and is in "
                           "every manifest: expected skip_below = 0")
    if mode != CENTRAL:
        return
    kept = [role for role in method.client.keeps if role != "personal"]
    if kept:
        yield Problem(key, f"'{CENTRAL}' noise enters the aggregator's {kept[0]} and no device's, so {name} moves away "
                           f"from its minimum: expected '{LOCAL}', or a method whose devices keep no {kept[0]}")
    if rule != robust.NONE:
        yield Problem(key, f"'{CENTRAL}' noise is for a sum in which a device counts for clip at most, but with the "
                           f"robust rule '{rule}' its update decides how others count: expected robust.rule = "
                           f"'{robust.NONE}' or '{LOCAL}'")


def check_secure(
    section: PrivacySection, method: Method, hyper: Any, *, up: str, skip_below: float, rule: str,
    max_update_norm: float | None,
) -> Iterator[Problem]:
    """The conflicts of secure aggregation with other settings. up: the codec of updates. rule: the robust rule."""
    if not section.secure_aggregation:
        return
    key, name = "privacy.secure_aggregation", method.name
    if not method.shared:
        yield Problem(key, f"{name} sends nothing: expected false with this method")
    elif not method.cumulative:
        yield Problem(key, f"{name} sends sums over samples: one byte does not hold them, and a class that a single "
                           "device has would show that device's samples in the sum: expected false with this method")
    elif not method.server.sums:
        yield Problem(key, f"the aggregator gets only a sum, and {name} needs each device's update: expected false, or "
                           "a method that sums or averages updates")
    if up != "int8":
        yield Problem(key, f"the sum needs whole numbers of one scale, as in int8, not the codec {up}: expected 'int8' "
                           "for updates")
    if skip_below:
        yield Problem(key, "skip_below needs the norms of single updates, which nobody sees: expected skip_below = 0")
    if rule != robust.NONE:
        yield Problem(key, f"the robust rule '{rule}' looks at single updates, which nobody sees: expected "
                           f"robust.rule = '{robust.NONE}' or false")
    if max_update_norm is not None:
        yield Problem(key, "max_update_norm refuses single updates by their norm, which nobody sees: leave it out; "
                           "privacy.range bounds each value on the device")
    if section.mode == CENTRAL:
        yield Problem(key, f"'{CENTRAL}' noise needs the aggregator to clip each update once it is decoded: expected "
                           f"privacy.mode = '{LOCAL}' or '{NONE}'")
    if section.neighbours % 2 or 0 < section.neighbours < section.least - 1:
        yield Problem("privacy.neighbours", f"expected 0, or an even number from {section.least - 1} on")


def remark(section: PrivacySection, rule: str) -> str:
    """A consequence of the section that users may not expect, or empty."""
    if section.mode == LOCAL and rule != robust.NONE:
        return (f"the robust rule {rule} sees updates with noise, which hides small false changes as it hides samples; "
                "see docs/privacy.md")
    return ""
