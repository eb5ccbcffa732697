"""The schedule of frozen arrays, from closed rounds alone."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import pytest

from fleet_core.base.moving_arrays import Moving
from fleet_core.model.choose_codec import ERRORS, RISE, WINDOW
from fleet_core.model.choose_frozen import AGAIN, LONGEST_REST, REST, SMALL, Chosen, Schedule, next_arrays
from tests.support.paths import ROOT

A, B = "body/a", "body/b"


def played(
    rounds: Iterable[Mapping[str, float]], losses: Iterable[float | None] = (), of: Schedule | None = None
) -> Schedule:
    """After rounds with these moves, of which only those of moving arrays count."""
    schedule, told = of or Schedule(), iter(losses)
    for moves in rounds:
        frozen, _ = schedule.choice()
        schedule = schedule.after({n: m for n, m in moves.items() if n not in frozen}, next(told, None))
    return schedule


def settled() -> Schedule:
    """``A`` has come to rest and ``B`` moves on."""
    after = played([{A: 1.0, B: 1.0}] * WINDOW + [{A: 0.09, B: 1.0}] * WINDOW)
    assert after.choice()[0] == {A}
    return after


def until_the_probe(schedule: Schedule, moves: Mapping[str, float]) -> tuple[Schedule, int]:
    """(before the probe, rounds before it)."""
    for count in range(2 * LONGEST_REST):
        if schedule.choice()[0] == frozenset():
            return schedule, count
        schedule = played([moves], of=schedule)
    raise AssertionError


def test_nothing_is_frozen_before_a_window_of_moves_and_while_they_are_large() -> None:
    assert Schedule().choice() == (frozenset(), "none at rest")
    assert played([{A: 1.0, B: 0.01}] * 40).choice()[0] == frozenset(), "small is against its own largest move"


def test_an_array_whose_moves_have_become_small_is_frozen_with_the_figures() -> None:
    before = played([{A: 1.0, B: 1.0}] * WINDOW + [{A: 0.09, B: 1.0}] * (WINDOW - 1))
    assert before.choice()[0] == frozenset()
    assert settled().choice()[1] == (
        f"came to rest, by the share of their largest move: a 0.09; 1 of 2 at rest, next probe in {REST} rounds")


def test_a_single_large_move_does_not_make_the_others_small() -> None:
    """The largest is that of the mean over a window."""
    spike = [{A: 1.0, B: 1.0}] * WINDOW + [{A: 20.0, B: 1.0}] + [{A: 1.0, B: 1.0}] * 3 * WINDOW
    assert played(spike).choice()[0] == frozenset()


def test_one_array_moves_always() -> None:
    after = played([{A: 1.0, B: 1.0}] * WINDOW + [{A: 0.01, B: 0.02}] * WINDOW)
    assert after.choice()[0] == {A}, "that whose share is largest"
    assert played([{A: 0.01, B: 0.0}] * 3 * WINDOW, of=after).choice()[0] == {A}


def test_an_array_that_never_moves_is_frozen() -> None:
    assert played([{A: 0.0, B: 1.0}] * WINDOW).choice()[0] == {A}


def test_after_a_rest_all_arrays_are_probed_and_the_next_probe_comes_later_each_time() -> None:
    schedule, rests = settled(), []
    for _ in range(3):
        schedule, count = until_the_probe(schedule, {A: 0.05, B: 1.0})
        rests.append(count)
        assert schedule.choice() == (frozenset(), f"a probe of all arrays after {count} rounds")
        schedule = played([{A: AGAIN - 0.01, B: 1.0}], of=schedule)
        assert schedule.choice()[0] == {A}
        assert "the probe found all at rest" in schedule.choice()[1]
    assert rests == [REST, 2 * REST, 3 * REST]


def test_a_probe_is_never_longer_away_than_the_longest_rest() -> None:
    schedule = settled()
    for _ in range(LONGEST_REST // REST + 2):
        schedule, count = until_the_probe(schedule, {A: 0.0, B: 1.0})
        schedule = played([{A: 0.0, B: 1.0}], of=schedule)
    assert count == schedule.rest == LONGEST_REST


def test_an_array_that_moves_again_in_a_probe_goes_on_and_the_next_probe_comes_sooner() -> None:
    schedule = settled()
    for _ in range(3):
        schedule, _ = until_the_probe(schedule, {A: 0.0, B: 1.0})
        schedule = played([{A: 0.0, B: 1.0}], of=schedule)
    assert schedule.rest == 4 * REST
    schedule, _ = until_the_probe(schedule, {A: 0.0, B: 1.0})
    schedule = played([{A: AGAIN + 0.01, B: 1.0}], of=schedule)
    frozen, reason = schedule.choice()
    assert frozen == frozenset()
    share = f"{AGAIN + 0.01:.2g}"
    assert reason == f"move again after the probe, by the share of their largest move: a {share}; none at rest"
    assert schedule.rest == 2 * REST
    assert played([{A: 0.05, B: 1.0}] * (WINDOW - 2), of=schedule).choice()[0] == frozenset(), "it has a new window"
    assert played([{A: 0.01, B: 1.0}] * WINDOW, of=schedule).choice()[0] == {A}


def test_a_loss_that_rises_while_arrays_rest_thaws_all() -> None:
    schedule = played([{A: 1.0, B: 1.0}] * WINDOW + [{A: 0.05, B: 1.0}] * WINDOW, [1.0] * 2 * WINDOW)
    schedule = played([{B: 1.0}] * WINDOW, [1.5, 1.6, 1.5, 1.6, 1.5][:WINDOW], of=schedule)
    assert schedule.choice()[0] == {A}, "a window of rounds is waited for"
    schedule = played([{B: 1.0}], [1.6], of=schedule)
    frozen, reason = schedule.choice()
    assert frozen == frozenset()
    assert reason.startswith("loss rose from")
    assert "all move again" in reason
    assert played([{A: 0.01, B: 1.0}] * (WINDOW - 1), of=schedule).choice()[0] == frozenset()
    assert played([{A: 0.01, B: 1.0}] * WINDOW, of=schedule).choice()[0] == {A}


def test_a_loss_that_is_not_known_or_falls_thaws_nothing() -> None:
    for losses in ([None] * 30, [1 / n for n in range(1, 31)]):
        assert played([{A: 1.0, B: 1.0}] * WINDOW + [{A: 0.01, B: 1.0}] * 2 * WINDOW, losses).choice()[0] == {A}


def test_many_arrays_are_counted_and_not_all_named() -> None:
    names = [f"body/layer.{n:02}" for n in range(20)]
    after = played([dict.fromkeys((*names, B), 1.0)] * WINDOW + [{**dict.fromkeys(names, SMALL / 2), B: 1.0}] * WINDOW)
    assert f"layer.02 {SMALL / 2:g}, layer.03 {SMALL / 2:g}, and 16 more; 20 of 21 at rest" in after.choice()[1]


def test_the_page_says_the_figures_of_the_code() -> None:
    page = (ROOT / "docs" / "freezing.md").read_text(encoding="utf-8")
    for said in (
        f"the mean of an array's last {WINDOW} moves is at most {SMALL:g} of the largest such mean",
        f"| a probe | {REST} rounds after", f"its move in a probe is above {AGAIN:g} of", f"at most {LONGEST_REST};",
        f"the mean loss of {WINDOW} rounds is above that of the {WINDOW} before by more than {RISE * 100:g} % and "
        f"{ERRORS:g} standard errors",
    ):
        assert said in page


# With patterns --------------------------------------------------------------------------------------------------------


def test_without_a_schedule_the_patterns_decide_and_there_is_no_reason() -> None:
    assert next_arrays(Moving(frozenset({A})), [A, B], None) == Chosen(Moving(frozenset({A})), "")


def test_the_schedule_freezes_among_what_is_selected() -> None:
    chosen = next_arrays(Moving(frozenset({"head/c"})), [A, B, "head/c"], settled())
    assert chosen.moving.frozen == {A, "head/c"}


@pytest.mark.parametrize("selected", [{B}, {B, "head/c"}])
def test_patterns_that_leave_only_what_rests_let_it_move(selected: set[str]) -> None:
    chosen = next_arrays(Moving(frozenset(selected)), [A, B], settled())
    assert chosen.moving.frozen == selected
    assert "moves again" in chosen.reason
