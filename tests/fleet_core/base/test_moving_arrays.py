"""Which arrays move: parts of trees, and the arrays that mirror those of the model."""

from __future__ import annotations

import pytest

from fleet_core.base import trees
from fleet_core.base.moving_arrays import EVERYTHING, Moving

TREE = {"body": {"a": 1, "b.weight": 2}, "head": {"c": 3}}
WITH_CONTROL = {**TREE, "control": {"body.a": 4, "body.b.weight": 5, "head.c": 6}, "margin": {"value": 7}}


def test_a_part_and_the_rest_are_the_whole() -> None:
    moving = Moving(frozenset({"body/b.weight", "head/c"}))
    part, rest = moving.of(WITH_CONTROL), moving.rest(WITH_CONTROL)
    assert part == {"body": {"a": 1}, "control": {"body.a": 4}, "margin": {"value": 7}}
    assert rest == {"body": {"b.weight": 2}, "head": {"c": 3}, "control": {"body.b.weight": 5, "head.c": 6}}
    assert trees.merged(part, rest) == WITH_CONTROL


def test_everything_moves_where_nothing_is_frozen() -> None:
    assert EVERYTHING.everything
    assert EVERYTHING.of({**TREE, "empty": {}}) == {**TREE, "empty": {}}
    assert EVERYTHING.rest(TREE) == {}


@pytest.mark.parametrize("group", ["control", "rates"])
def test_a_mirrored_array_moves_with_its_model(group: str) -> None:
    moving = Moving(frozenset({"body/b.weight"}))
    assert not moving.has(group, "body.b.weight")
    assert moving.has(group, "body.a")
    assert moving.has(group, "head.b.weight")


def test_merging_keeps_the_order_of_the_whole_and_takes_the_values_of_the_part() -> None:
    found = trees.merged(TREE, {"head": {"d": 8, "c": 9}, "more": {"e": 10}})
    assert found == {"body": TREE["body"], "head": {"c": 9, "d": 8}, "more": {"e": 10}}
    assert list(found["head"]) == ["c", "d"]
    assert TREE["head"] == {"c": 3}
