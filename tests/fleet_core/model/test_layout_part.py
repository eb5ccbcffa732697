"""Parts of a layout: moving arrays as positions in a message, and the arrays that codecs and checks see."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fleet_core.base.errors import MessageError
from fleet_core.base.moving_arrays import EVERYTHING, Moving
from fleet_core.model.layout import InputSpec, Layout, TensorSpec

LAYOUT = Layout("net", InputSpec((2,)), ("a", "b"), 4, (
    TensorSpec("a.weight", "body", (2, 3)), TensorSpec("a.bias", "body", (3,)), TensorSpec("b", "body", ()),
    TensorSpec("head.weight", "head", (2, 3)), TensorSpec("head.bias", "head", (2,)),
))
WIRE = LAYOUT.extended(("body", "head", "control"), ("body", "head"))


@given(st.sets(st.sampled_from(LAYOUT.keys), max_size=4))
def test_places_and_what_moves_are_each_others_inverse_also_with_a_methods_other_arrays(frozen: set[str]) -> None:
    moving = Moving(frozenset(frozen))
    for layout in (LAYOUT, WIRE):
        assert layout.moving(layout.places(moving)) == moving
    assert LAYOUT.places(moving) == WIRE.places(moving)


def test_places_are_short() -> None:
    assert LAYOUT.places(EVERYTHING) is None
    assert LAYOUT.places(Moving(frozenset({"body/a.weight", "head/head.bias"}))) == "1-3"
    assert LAYOUT.places(Moving(frozenset({"body/a.bias"}))) == "0,2-4"


@pytest.mark.parametrize("text", ["5", "0-5", "3,1", "1,1", "x", "-", "1-", "1,,2", "0-999999999"])
def test_places_that_are_none_are_refused(text: str) -> None:
    with pytest.raises(MessageError, match="is not a list of numbers"):
        LAYOUT.moving(text)


def test_a_part_has_the_arrays_that_move_and_those_that_mirror_them() -> None:
    part = WIRE.part(Moving(frozenset({"body/a.weight", "body/a.bias", "head/head.bias"})))
    assert [f"{t.group}/{t.name}" for t in part.tensors] == [
        "body/b", "head/head.weight", "control/body.b", "control/head.head.weight"]
    assert part.parameters(("body", "head")) == 7
    assert WIRE.part(EVERYTHING) is WIRE
