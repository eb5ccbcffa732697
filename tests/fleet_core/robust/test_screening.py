"""Which updates are used, and as what: the adaptive bound, every robust rule, and the order of arrival."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from fleet_core.algorithms import aggregation
from fleet_core.algorithms.interface import Payload, Update
from fleet_core.algorithms.methods.registry import METHODS, PRODUCT
from fleet_core.robust import blocks, norm_bound
from fleet_core.robust.interface import Memory, Rule, hostile
from fleet_core.robust.krum import distances, krum
from fleet_core.robust.median import median, trimmed
from fleet_core.robust.norm_bound import FACT, TIMES, WINDOW
from fleet_core.robust.screening import MOST_SAMPLES, RULES, Screened, Screening
from fleet_core.robust.settings import CEILING, RobustSection, check

FEDAVG = METHODS["fedavg"]
Array = np.ndarray[Any, Any]


def tree(values: Array) -> dict[str, dict[str, Array]]:
    return {"body": {"a": values[:4].reshape(2, 2), "b": values[4:6]}, "head": {"c": values[6:]}}


def honest(count: int = 9, seed: int = 0, size: float = 1.0) -> list[Update]:
    """Updates around a common direction, float32, in closing order."""
    rng = np.random.default_rng(seed)
    values = size * (1 + 0.3 * rng.normal(size=(count, 8)))
    made = {f"d{i}": tree(row.astype(np.float32)) for i, row in enumerate(values)}
    return [Update(name, Payload(made[name]), 10) for name in aggregation.order(made)]


def changed(updates: list[Update], **factors: float) -> list[Update]:
    """Some devices' updates times a factor."""
    return [replace(u, payload=Payload({g: {n: a * np.float32(factors.get(u.device, 1.0)) for n, a in named.items()}
                                        for g, named in u.payload.groups.items()})) for u in updates]


def screening(rule: str = "none", bound: float | None = None, method: str = "fedavg", share: float = 0.3) -> Screening:
    return Screening(METHODS[method], RobustSection(rule, share), bound)


def mean(updates: Iterable[Update]) -> Array:
    return np.asarray(np.mean([blocks.flat(update.payload.groups) for update in updates], axis=0))


def replaced(rule: Rule, updates: list[Update]) -> Array:
    instead = rule(updates, 0.3, Memory()).instead
    assert instead is not None
    return blocks.flat(instead)


def rounds(screen: Screening, several: Iterable[list[Update]]) -> list[Screened]:
    facts: Mapping[str, str] = {}
    arrays: Any = {}
    found = []
    for updates in several:
        found.append(screen.screen(updates, facts, arrays))
        facts, arrays = found[-1].facts, found[-1].arrays
    return found


# The bound ------------------------------------------------------------------------------------------------------------


def test_an_update_far_above_the_median_is_refused_in_the_first_round_too():
    found = screening().screen(changed(honest(), d3=-10.0), {}, {})
    assert set(found.refused) == {"d3"}
    assert f"{TIMES:g} times the median" in found.refused["d3"]
    assert [u.device for u in found.used] == [u.device for u in honest() if u.device != "d3"]


def test_honest_updates_pass_unchanged():
    given = honest()
    found = screening().screen(given, {}, {})
    assert found.used is given
    assert not found.refused


def test_an_explicit_number_is_a_constant_and_nothing_is_remembered():
    found = screening(bound=50.0).screen(changed(honest(), d3=-10.0), {}, {})
    assert (found.refused, found.facts) == ({}, {})
    assert screening(bound=50.0).ceiling == 50.0
    assert screening().ceiling == CEILING


def test_each_group_has_a_bound_of_its_own():
    given = honest()
    groups = given[0].payload.groups
    given[0] = replace(given[0], payload=Payload({**groups, "head": {"c": groups["head"]["c"] * np.float32(10)}}))
    found = screening().screen(given, {}, {})
    assert set(found.refused) == {given[0].device}
    assert "its head" in found.refused[given[0].device]


def test_in_a_converged_fleet_a_small_change_of_the_model_is_not_refused():
    model = tree(np.full(8, 50.0, np.float32))
    past = rounds(screening(), [honest(seed=n, size=1e-4) for n in range(6)])[-1].facts
    back = changed(honest(size=1e-4), d1=1000.0, d2=100_000.0)
    assert set(screening().screen(back, past, {}).refused) == {"d1", "d2"}
    found = screening().screen(back, past, {}, model=model)
    assert set(found.refused) == {"d2"}
    assert "1% of the model's norm" in found.refused["d2"]
    summed = screening(method="fedproto").screen(back, {}, {}, model=model)
    assert set(summed.refused) == {"d1", "d2"}, "sums are no changes of the model"


def test_the_bound_follows_a_fleet_whose_updates_shrink_and_one_whose_updates_grow():
    small = rounds(screening(), [honest(seed=n, size=0.8**n) for n in range(12)])
    assert not any(one.refused for one in small)
    late = screening().screen(changed(honest(size=0.8**12), d1=-20.0), small[-1].facts, {})
    assert set(late.refused) == {"d1"}
    grown = rounds(screening(), [honest(seed=n, size=1.0 if n < 5 else 20.0) for n in range(11)])
    assert grown[5].refused, "twenty times the norm from one round to the next is suspicious"
    assert list(grown[5].used), "and some are used nevertheless"
    assert not any(one.refused for one in grown[9:]), "but nobody is shut out for good"


def test_most_of_one_round_cannot_move_the_bound():
    facts = rounds(screening(), [honest(seed=n) for n in range(WINDOW)])[-1].facts
    few = honest(5)
    found = screening().screen(changed(few, d0=-10.0, d1=-10.0, d2=-10.0), facts, {})
    assert set(found.refused) == {"d0", "d1", "d2"}


def test_norms_of_another_set_of_arrays_are_not_compared():
    facts = rounds(screening(), [honest(seed=n, size=0.01) for n in range(WINDOW)])[-1].facts
    part = [replace(u, payload=Payload({"body": {"b": u.payload.groups["body"]["b"]}})) for u in honest()]
    assert not screening().screen(part, facts, {}).refused
    assert screening().screen(honest(), facts, {}).refused


def test_two_devices_are_never_refused_for_each_other():
    for factor in (1.0, 30.0, 1e3):
        assert not any(one.refused for one in rounds(screening(), [changed(honest(2), d0=factor)] * 8))


def test_updates_of_zero_count_neither_for_the_bound_nor_against_it():
    found = screening().screen(changed(honest(), **{f"d{n}": 0.0 for n in range(6)}), {}, {})
    assert not found.refused


def test_sums_over_samples_are_compared_per_sample():
    given = [replace(u, samples=1000) if u.device == "d0" else u for u in changed(honest(), d0=90.0)]
    assert not screening(method="fedproto").screen(given, {}, {}).refused
    assert screening().screen(given, {}, {}).refused


def test_what_is_remembered_is_small_whatever_the_number_of_devices():
    found = rounds(screening(), [honest(500, seed=n) for n in range(WINDOW + 2)])[-1]
    kept = json.loads(found.facts[FACT])
    assert len(kept) == WINDOW
    assert all(len(values) == norm_bound.KEPT for _, row in kept for values in row.values())


def test_measures_that_are_known_give_the_same_as_those_that_are_computed():
    given, screen = changed(honest(), d3=-10.0), screening()
    known = {update.device: screen.measure(update) for update in given}
    one, other = screen.screen(given, {}, {}), screen.screen(given, {}, {}, known)
    assert (one.refused, one.facts) == (other.refused, other.facts)


# The rules ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("rule", RULES)
def test_ten_times_the_opposite_ruins_the_plain_mean_and_no_rule(rule):
    several = [changed(honest(seed=n), d3=-10.0) for n in range(4)]
    wanted = mean(honest())
    plain = mean(rounds(screening(bound=CEILING), several)[-1].used)
    assert plain @ wanted < 0, "the mean points the other way"
    found = mean(rounds(screening(rule, bound=CEILING), several)[-1].used)
    assert found @ wanted > 0.5 * wanted @ wanted


@pytest.mark.parametrize("rule", RULES)
def test_the_order_of_the_devices_names_decides_no_bit(rule):
    """Every rule is a function of closing order, which is the same for any order of arrival."""
    arrived = changed(honest(), d1=-3.0, d7=2.0)
    ordered = {u.device: u for u in reversed(arrived)}
    again = [ordered[name] for name in aggregation.order(ordered)]
    one, other = (rounds(screening(rule), [several] * 3)[-1] for several in (arrived, again))
    assert one.refused == other.refused
    assert one.facts == other.facts
    assert mean(one.used).tobytes() == mean(other.used).tobytes()


@pytest.mark.parametrize("rule", RULES)
@pytest.mark.parametrize("count", [1, 2, 3])
def test_a_round_of_few_devices_always_uses_one(rule, count):
    found = rounds(screening(rule), [changed(honest(count), d0=-10.0)] * 6)
    assert all(list(one.used) for one in found)


@pytest.mark.parametrize("limit", [1, 8 * 9 * 3, 1 << 20])
def test_parts_of_any_size_give_the_same(limit, monkeypatch):
    given = honest()
    whole = [replaced(median, given), distances(given)]
    monkeypatch.setattr(blocks.blocks, "__defaults__", (limit,))
    parts = [replaced(median, given), distances(given)]
    assert np.array_equal(whole[0], parts[0])
    np.testing.assert_allclose(whole[1], parts[1], rtol=1e-12, atol=1e-12)


def test_median_and_trimmed_mean_are_those_of_numpy():
    given = honest(9)
    stacked = np.stack([blocks.flat(u.payload.groups) for u in given])
    found = replaced(median, given)
    np.testing.assert_array_equal(found, np.median(stacked, axis=0).astype(np.float32))
    found = replaced(trimmed, given)
    np.testing.assert_array_equal(found, np.sort(stacked, axis=0)[3:6].mean(axis=0).astype(np.float32))


def test_krum_drops_as_many_as_it_is_told_and_the_farthest():
    given = changed(honest(10), d4=-1.0, d5=-1.0)
    assert set(krum(given, 0.2, Memory()).dropped) == {"d4", "d5"}
    direct = [[np.square(blocks.flat(a.payload.groups) - blocks.flat(b.payload.groups)).sum() for b in given]
              for a in given]
    np.testing.assert_allclose(distances(given), direct, atol=1e-9)


def test_how_many_are_taken_for_hostile():
    assert [hostile(n, 0.3) for n in (1, 2, 3, 5, 10, 20)] == [0, 0, 1, 2, 3, 6]
    assert [hostile(n, 0.3, 3) for n in (1, 4, 5, 7, 20)] == [0, 0, 1, 2, 6]
    assert hostile(30, 0.1) == 3, "0.1 * 30 is a little above 3"


def test_clipping_leaves_short_updates_and_notes_what_is_hardly_left():
    given = changed(honest(), d3=-100.0)
    found = screening("clip", bound=CEILING).screen(given, {}, {})
    norms = {u.device: float(np.linalg.norm(blocks.flat(u.payload.groups))) for u in found.used}
    before = {u.device: float(np.linalg.norm(blocks.flat(u.payload.groups))) for u in given}
    most = float(np.median(list(before.values())))
    assert norms == pytest.approx({name: min(length, most) for name, length in before.items()}, rel=1e-5)
    assert set(found.remarks) == {"d3"}


def test_history_drops_a_device_that_pulls_against_the_others_and_takes_it_back():
    pulling = [changed(honest(seed=n), d2=-1.0) for n in range(6)]
    found = rounds(screening("history"), [*pulling, *(honest(seed=n) for n in range(6, 30))])
    assert set(found[5].refused) == {"d2"}
    assert not found[-1].refused


@pytest.mark.parametrize("rule", RULES)
def test_one_devices_numbers_do_not_decide(rule):
    """Scalars that cross the wire, and claimed numbers of samples, which weigh updates in a weighted mean."""
    given = [replace(u, payload=Payload(u.payload.groups, {"margin": 1e4 if u.device == "d0" else 1.0}),
                     samples=10_000_000 if u.device == "d0" else 10) for u in honest()]
    used = list(screening(rule).screen(given, {}, {}).used)
    assert {u.payload.scalars["margin"] for u in used} == {1.0}
    assert max(u.samples for u in used) <= MOST_SAMPLES * 10


# Methods --------------------------------------------------------------------------------------------------------------


def test_methods_that_sum_are_those_that_may_have_a_rule():
    refused = {name for name, method in PRODUCT.items() if list(check(RobustSection("median"), method))}
    assert refused == {"local", "fedproto", "pfedhn"}
    assert not list(check(RobustSection(), METHODS["pfedhn"]))


@pytest.mark.parametrize(("samples", "loss", "scalars", "wrong"), [
    (10**7, -1e6, {"margin": 50.0}, []),
    (10**9, 0.5, {}, ["samples 1e+09, expected at most 1e+07"]),
    (1, float("nan"), {"margin": -51.0}, ["loss nan, expected at most 1e+06", "margin -51, expected at most 50"]),
    (10**9, 1e30, {"loss": 0.0, "samples": 1.0},
     ["samples 1e+09, expected at most 1e+07", "loss 1e+30, expected at most 1e+06"]),
])
def test_what_a_device_says_of_its_update_has_limits_that_no_number_of_its_own_hides(
    samples: int, loss: float, scalars: dict[str, float], wrong: list[str]
) -> None:
    assert screening(bound=50.0).too_much(samples, loss, scalars) == wrong
