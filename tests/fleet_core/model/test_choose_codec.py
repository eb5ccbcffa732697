"""The rule of ``codec = "auto"``, as a function of the rounds before."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import pytest

from fleet_core.codecs.kinds.registry import CODECS
from fleet_core.model import choose_codec
from fleet_core.model.choose_codec import AUTO, LADDERS, LONGEST_REST, LOOK_BACK, REST, STAY, WAYS, WINDOW, Choice, Past

LADDER = ("int8", "int4", "topk-10")
FALLING = [1.0 / (k + 1) for k in range(40)]


def rounds(*codecs: str, left: float | None = 0.1, losses: Sequence[float | None] = FALLING) -> list[Past]:
    return [Past(codec, loss, left) for codec, loss in zip(codecs, losses, strict=False)]


@pytest.mark.parametrize(
    ("past", "codec", "said"),
    [
        ([], "int8", "starts with int8, the dearest of int8, int4, topk-10"),
        (rounds("fp32"), "int8", "starts with int8"),
        (rounds("int8"), "int8", f"stays with int8 for {STAY} rounds"),
        (rounds(*["int8"] * STAY), "int4", "left out 0.1 of the model's move, at most 1.5: down a step from int8"),
        (rounds(*["int8"] * STAY, "int4"), "int4", f"stays with int4 for {STAY} rounds"),
        (rounds(*["int8"] * STAY, *["int4"] * STAY), "topk-10", "down a step from int4"),
        (rounds(*["topk-10"] * 20), "topk-10", "stays with topk-10, the cheapest"),
        (rounds("int8", "int4", "topk-10", left=2.5), "int4",
         "left out 2.5 of the model's move, above 1.5: up a step from topk-10"),
        (rounds("int8", left=2.5), "int8", "left out 2.5 of the model's move, above 1.5: stays with int8, the dearest"),
        (rounds("topk-10", *["int4"] * (REST - 1)), "int4", f"tries topk-10 again {REST} rounds after it was left"),
        (rounds("topk-10", *["int4"] * REST), "topk-10", "down a step from int4"),
        (rounds("int4", *["int8"] * STAY), "int8", f"tries int4 again {REST} rounds after it was left"),
        (rounds(*["int8"] * 9, left=None), "int8", "stays with int8: how much it leaves out is not known"),
        (rounds(*["topk-10"] * 2 * WINDOW, left=None, losses=[1.0] * WINDOW + [1.2] * WINDOW), "int4",
         f"loss rose from 1 to 1.2 in {WINDOW} rounds, by more than 10% and 2 standard errors: up a step from topk-10"),
        (rounds("int8", *["topk-10"] * (2 * WINDOW - 1), losses=[1.0] * WINDOW + [1.2] * WINDOW), "int4", "loss rose"),
        (rounds(*["int4"] * (WINDOW + 1), *["topk-10"] * (WINDOW - 1), losses=[1.0] * WINDOW + [1.2] * WINDOW),
         "topk-10", "loss went from 1 to 1.2"),
        (rounds(*["topk-10"] * 2 * WINDOW, losses=[0.8, 1.2] * (WINDOW // 2) + [1.0, 0.8] + [1.6, 0.9] * WINDOW),
         "topk-10", "loss went from"),
        (rounds(*["topk-10"] * 2 * WINDOW, losses=[1.0] * WINDOW + [1.05] * WINDOW), "topk-10",
         f"loss went from 1 to 1.05 in {WINDOW} rounds: stays with topk-10, the cheapest"),
        (rounds(*["int4"] * 2 * WINDOW, losses=[None] * 2 * WINDOW), "topk-10", "down a step"),
        (rounds(*["topk-10"] * 2 * WINDOW, losses=[1.0] * WINDOW + [1e300] * WINDOW), "int4",
         "loss rose from 1 to 1e+300"),
        (rounds(*["topk-10"] * 2 * WINDOW, losses=[-1.0] * WINDOW + [-0.95] * WINDOW), "topk-10", "loss went from -1"),
        (rounds(*["topk-10"] * 2 * WINDOW, losses=[-1.0] * WINDOW + [-0.8] * WINDOW), "int4", "loss rose from -1"),
    ],
)
def test_the_next_codec_follows_from_the_rounds_before(past: list[Past], codec: str, said: str) -> None:
    found = choose_codec.choose("up", LADDER, past)
    assert found.codec == codec
    assert said in found.reason


def test_a_model_may_leave_out_less_than_an_update() -> None:
    past = rounds("int8", "int4", "topk-10", left=0.8)
    assert choose_codec.choose("up", LADDER, past).codec == "topk-10"
    assert choose_codec.choose("down", LADDER, past) == Choice(
        "int4", "left out 0.8 of the model's move, above 0.7: up a step from topk-10"
    )


def test_a_model_in_ternary_stays_with_it_and_one_that_loses_more_does_not() -> None:
    """What ternary and topk-1 left out on two sets (benchmarks/cost)."""
    past = rounds(*["int8"] * STAY, *["int4"] * STAY)
    assert choose_codec.choose("down", LADDERS["down"], past).codec == "ternary"
    kept = choose_codec.choose("down", LADDERS["down"], [*past, Past("ternary", 0.1, 0.62)])
    assert (kept.codec, "the cheapest" in kept.reason) == ("ternary", True)
    assert choose_codec.choose("down", LADDERS["down"], [*past, Past("ternary", 0.1, 0.8)]).codec == "int4"


def play(count: int, left: dict[str, float], losses: Sequence[float] = FALLING) -> list[str]:
    """The codecs of a run in which each leaves out that much."""
    past: list[Past] = []
    for loss in losses[:count]:
        codec = choose_codec.choose("up", LADDER, past).codec
        past.append(Past(codec, loss, left[codec]))
    return [one.codec for one in past]


def test_a_run_goes_down_the_ladder_and_tries_a_codec_that_leaves_out_too_much_ever_more_rarely() -> None:
    codecs = play(500, {"int8": 0.01, "int4": 0.1, "topk-10": 9.0}, [1.0] * 500)
    assert codecs[:7] == ["int8"] * STAY + ["int4"] * STAY + ["topk-10"]
    tried = [k for k, codec in enumerate(codecs) if codec == "topk-10"]
    pauses = [after - before - 1 for before, after in itertools.pairwise(tried)]
    assert pauses[:3] == [REST, 2 * REST, 4 * REST]
    assert set(pauses[3:]) == {LONGEST_REST}
    assert set(play(40, {"int8": 0.01, "int4": 0.1, "topk-10": 1.2})[2 * STAY:]) == {"topk-10"}


def test_a_run_whose_loss_rises_goes_up_the_ladder_and_stays_there() -> None:
    codecs = play(30, {"int8": 0.01, "int4": 0.1, "topk-10": 1.2}, [1.1**k for k in range(30)])
    assert codecs[-10:] == ["int8"] * 10


def test_rounds_longer_ago_than_it_looks_back_do_not_matter() -> None:
    past = rounds(*["topk-10"] * 9, *["int8"] * (LOOK_BACK + 1), losses=FALLING * 11)
    assert choose_codec.choose("up", LADDER, past) == choose_codec.choose("up", LADDER, past[-LOOK_BACK:])


def test_a_ladder_leaves_out_what_misses(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(LADDERS, "up", ("int8", "topk-1"))
    assert choose_codec.ladder("up", ["control"]) == ("int8", "topk-1")
    assert choose_codec.ladder("up", ["dual"]) == ("int8",)


def test_no_codec_of_the_ladders_misses() -> None:
    for way in WAYS:
        assert set(LADDERS[way]) <= set(CODECS)
        assert not any(CODECS[name].remarks(way, ["dual", "control"]) for name in LADDERS[way])


def test_a_codec_that_is_named_is_used_without_a_reason() -> None:
    assert choose_codec.next_choice("up", "topk-1", ["dual"], rounds("int8")) == Choice("topk-1", "")
    assert choose_codec.possible("up", "topk-1", ["dual"]) == ("topk-1",)
    assert choose_codec.possible("down", AUTO, ["dual"]) == LADDERS["down"]


def test_a_backlog_is_the_mean_norm_over_the_models_move_where_there_is_one() -> None:
    assert choose_codec.backlog([3.0, None, 1.0], 4.0) == 0.5
    assert choose_codec.backlog([None], 4.0) is None
    assert choose_codec.backlog([1.0], 0.0) is None
    assert choose_codec.backlog([1.0], float("inf")) is None


def test_a_mean_has_the_same_bits_in_any_order_and_needs_a_value() -> None:
    values = [0.1, 0.7, None, 1e9, 0.3, 1e-9]
    assert choose_codec.mean_of_known(values) == choose_codec.mean_of_known(reversed(values))
    assert choose_codec.mean_of_known([None]) is None
