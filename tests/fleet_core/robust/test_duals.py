"""What the identities of PFLDyn and PFLScaf become under a robust rule: exact where updates are dropped whole, and
about what was *used* where they are changed."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import trees
from fleet_core.base.trees import Params
from fleet_core.robust.screening import RULES, Screening
from fleet_core.robust.settings import HISTORY, KRUM, NONE, REPLACING, RobustSection
from tests.support.quadratics import QuadraticFleet, average, dyn, int8, scaf, vector

pytestmark = pytest.mark.slow

HOSTILE = "device-3"
Made = Callable[..., QuadraticFleet]
KINDS: dict[str, tuple[Made, str]] = {"dyn": (dyn, "feddyn"), "scaf": (scaf, "scaffold")}


def fleet(kind: str, rule: str, bound: float | None = None, **how: Any) -> QuadraticFleet:
    make, name = KINDS[kind]
    return make(screening=Screening(METHODS[name], RobustSection(rule, 0.2), bound), **how)


def liar(device: str, update: Params) -> Params:
    return trees.scale(update, -10.0) if device == HOSTILE else update


@pytest.mark.parametrize("kind", KINDS)
def test_without_a_rule_a_clean_fleet_is_the_one_without_screening_bit_for_bit(kind):
    ours, plain = fleet(kind, NONE), KINDS[kind][0]()
    for _ in range(25):
        ours.round()
        plain.round()
    assert ours.model.tobytes() == plain.model.tobytes()
    assert ours.server_dual.tobytes() == plain.server_dual.tobytes()


def test_identity_3_a_clean_fleet_converges_to_the_minimiser_under_the_adaptive_bound():
    ours = fleet("dyn", NONE)
    for _ in range(100):
        ours.round()
    assert ours.error < 1e-6


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("rule", [NONE, KRUM, HISTORY])
@pytest.mark.parametrize("hostile", [False, True])
def test_identity_4_where_updates_are_dropped_the_servers_dual_is_the_mean_of_all_duals(kind, rule, hostile):
    """The device of a dropped update discards the dual that belongs to it, as for any update that is not counted."""
    ours = fleet(kind, rule)
    dropped = 0
    for number in range(40):
        ours.lie = (lambda device, update: trees.scale(update, 30.0) if device == HOSTILE else update) if (
            hostile and number % 2) else None
        ours.round()
        dropped += len(ours.devices) - len(ours.counted[ours.number])
        if ours.lie is None or HOSTILE not in ours.counted[ours.number]:
            np.testing.assert_allclose(ours.server_dual, ours.mean_dual(), atol=1e-9)
        else:
            return  # a lie was counted: from here on the server takes the device for what it said
    assert dropped or rule != KRUM


@pytest.mark.parametrize("rule", [NONE, KRUM, HISTORY])
def test_identity_4_with_error_feedback(rule):
    ours = fleet("dyn", rule, send=int8())
    for _ in range(30):
        ours.round()
        owed = ours.hyper.penalty * ours.mean_residual()
        np.testing.assert_allclose(ours.server_dual, ours.mean_dual() + owed, atol=1e-6)


@pytest.mark.parametrize("rule", REPLACING)
def test_where_updates_are_changed_the_servers_dual_is_what_was_used_makes_it(rule):
    """g = −α/m Σ used: of what the server used, and no longer the mean of the devices' own duals."""
    ours = fleet("dyn", rule)
    used = np.zeros_like(ours.server_dual)
    for _ in range(40):
        ours.round()
        used += np.sum([vector(update.payload.groups) for update in ours.used], axis=0)
        wanted = -ours.hyper.penalty / len(ours.devices) * used
        np.testing.assert_allclose(ours.server_dual, wanted, atol=1e-9)
    assert np.linalg.norm(ours.server_dual - ours.mean_dual()) > 1e-3


@pytest.mark.parametrize("rule", [NONE, *RULES])
def test_a_clean_fleet_of_very_different_devices_ends_at_the_minimiser_only_without_a_rule_or_with_history(rule):
    ours = fleet("dyn", rule)
    for _ in range(120):
        ours.round()
    if rule in (NONE, HISTORY):
        assert ours.error < 1e-5
    else:
        assert 1e-3 < ours.error < 3


def test_at_rest_under_krum_the_duals_of_used_and_dropped_devices_add_up_to_zero():
    """What krum costs: a device that is always dropped pulls with the dual of the last update that was used."""
    ours = fleet("dyn", KRUM)
    for _ in range(120):
        ours.round()
    np.testing.assert_allclose(ours.mean_dual(), 0, atol=1e-3)


@pytest.mark.parametrize("kind", KINDS)
def test_one_device_that_sends_ten_times_the_opposite_ruins_the_model_under_the_constant_bound_alone(kind):
    with np.errstate(all="ignore"):
        ruined = fleet(kind, NONE, bound=1e4, lie=liar)
        for _ in range(25):
            ruined.round()
            if not np.isfinite(ruined.model).all() or ruined.error > 1e3:
                break
    assert not ruined.error < 10
    held = fleet(kind, NONE, lie=liar)
    for _ in range(25):
        held.round()
    assert held.error < 3


def test_fedavg_under_a_rule_that_replaces_is_the_step_to_the_robust_mean():
    ours = average(3, screening=Screening(METHODS["fedavg"], RobustSection("median"), None))
    before = ours.model
    ours.round()
    np.testing.assert_allclose(ours.model, before + vector(ours.used[0].payload.groups), atol=1e-12)
