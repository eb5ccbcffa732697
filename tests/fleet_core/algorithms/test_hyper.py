"""Hyper-parameters have limits; values outside are refused by name, for every method."""

from __future__ import annotations

import dataclasses
import math
import typing
from functools import cache
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base import schema

FIELDS = [(name, field.name) for name, method in METHODS.items() for field in dataclasses.fields(method.hyper)]


def declared(name: str, key: str) -> dataclasses.Field[Any]:
    return next(field for field in dataclasses.fields(METHODS[name].hyper) if field.name == key)


@cache
def hints(name: str) -> dict[str, Any]:
    return typing.get_type_hints(METHODS[name].hyper)


def kind_of(name: str, key: str) -> type[Any]:
    hint = hints(name)[key]
    return next(kind for kind in (bool, int, float, str) if kind is hint or kind in typing.get_args(hint))


NUMBERS = [field for field in FIELDS if kind_of(*field) in (int, float)]


def problems(name: str, **values: Any) -> list[schema.Problem]:
    read, found = schema.read(METHODS[name].hyper, values)
    assert (read is None) is bool(found)
    return found


@pytest.mark.parametrize("name", METHODS)
def test_the_defaults_are_within_the_limits_and_survive_a_file(name: str) -> None:
    hyper = METHODS[name].hyper()
    read, found = schema.read(METHODS[name].hyper, schema.plain(hyper))
    assert (read, found) == (hyper, [])


@pytest.mark.parametrize("name", METHODS)
def test_a_default_is_that_of_the_nearest_page_that_names_it(name: str) -> None:
    """Where a method combines several pages, none of them brings back a default that another has changed."""
    cls = METHODS[name].hyper
    keys = [field.name for field in dataclasses.fields(cls)]
    assert {key: declared(name, key).default for key in keys} == {key: getattr(cls, key) for key in keys}


@pytest.mark.parametrize("name", METHODS)
def test_every_number_has_limits_on_both_sides_and_every_text_has_choices(name: str) -> None:
    for field in dataclasses.fields(METHODS[name].hyper):
        kind, limits = kind_of(name, field.name), field.metadata
        if kind is str:
            assert field.default in limits["choices"], field.name
        elif kind in (int, float):
            assert math.isfinite(limits["max"]), field.name
            assert limits.get("min", limits.get("above")) in (0, 1), field.name


@given(st.data())
def test_what_is_outside_the_limits_is_refused_by_name_and_what_is_inside_is_taken(data: st.DataObject) -> None:
    name, key = data.draw(st.sampled_from(NUMBERS))
    kind, limits = kind_of(name, key), declared(name, key).metadata
    least, most = limits.get("min", limits.get("above")), limits["max"]
    numbers: Any = st.integers if kind is int else st.floats
    below = data.draw(numbers(max_value=least - 1 if kind is int else -1e-9, min_value=-(10**9)))
    over = data.draw(numbers(min_value=most * 2, max_value=10**12))
    for wrong in (below, over, *([0] if "above" in limits else [])):
        (problem,) = problems(name, **{key: wrong})
        assert problem.key == key
    inside = data.draw(numbers(min_value=least if "min" in limits else 1e-9, max_value=most))
    assert not problems(name, **{key: inside})


@settings(deadline=None)
@given(st.data())
def test_another_kind_of_value_and_an_unknown_name_are_refused(data: st.DataObject) -> None:
    name, key = data.draw(st.sampled_from(FIELDS))
    wrong = 3 if kind_of(name, key) in (str, bool) else data.draw(st.sampled_from(["fast", True, [1], math.nan]))
    (problem,) = problems(name, **{key: wrong})
    assert problem.key == key
    if kind_of(name, key) is str:
        default: Any = declared(name, key).default
        (problem,) = problems(name, **{key: default + "x"})
        assert problem.hint == default
    (problem,) = problems(name, **{key + "x": 1})
    assert problem.hint == key


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("fedavg", {"local_steps": 0}),
        ("fedavg", {"client_lr": -0.1}),
        ("fedavg", {"client_lr": 0}),
        ("fedavg", {"server_beta2": 1.0}),
        ("feddyn", {"penalty": 0}),
        ("pfldyn-maml", {"inner_steps": 0}),
        ("per-fedavg-hf", {"difference": 0}),
        ("metavers", {"loss_share": 2}),
        ("metavers", {"window": 0}),
        ("knn-per", {"neighbours": 0}),
        ("knn-per", {"mixture": 1.5}),
        ("pfedme", {"envelope": 0.0}),
        ("fedproto", {"pull": -1}),
        ("fedrep", {"head_steps": -1}),
    ],
)
def test_what_could_not_work_is_refused(name: str, values: dict[str, Any]) -> None:
    (problem,) = problems(name, **values)
    assert problem.key == next(iter(values))


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("fedprox", {"proximity": 0}),
        ("fedavg-meta", {"clip_norm": 0, "weight_decay": 0, "finetune_steps": 0}),
        ("fedrep", {"head_steps": 0}),
        ("metavers", {"shots": 0, "loss_share": 1}),
        ("knn-per", {"mixture": None, "neighbours": 1}),
        ("fedavg", {"server_start": None, "server_optimizer": "yogi"}),
    ],
)
def test_what_leaves_something_out_is_taken(name: str, values: dict[str, Any]) -> None:
    assert not problems(name, **values)


def test_a_manifest_always_says_the_form_of_fedprotos_pull() -> None:
    """Its default was another one in an earlier version, whose agents read it from the manifest."""
    assert schema.plain(METHODS["fedproto"].hyper())["pull_form"] == "square"
