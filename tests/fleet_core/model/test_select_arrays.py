"""Patterns of ``[train] only``: what they choose, and every mistake in them at once, with near names."""

from __future__ import annotations

import re

import pytest

from fleet_core.algorithms.methods.registry import METHODS
from fleet_core.base.errors import ConfigError
from fleet_core.base.moving_arrays import EVERYTHING
from fleet_core.model import select_arrays
from fleet_core.model.layout import InputSpec, Layout, TensorSpec
from fleet_core.model.select_arrays import TrainSection, selected
from tests.support.paths import ROOT

NAMES = ("convs.0.base.weight", "convs.0.base.bias", "convs.0.adapter.down.weight", "convs.0.adapter.up.weight",
         "norm.weight", "head.weight", "head.bias")
LAYOUT = Layout("net", InputSpec((2, 8)), ("a", "b"), 4, tuple(
    TensorSpec(name, "head" if name.startswith("head") else "body", (2,)) for name in NAMES
))


def moving(only: list[str], method: str = "fedavg") -> list[str]:
    found, problems = selected(only, LAYOUT, METHODS[method])
    assert not problems
    return [t.name for t in LAYOUT.part(found).tensors]


@pytest.mark.parametrize(("only", "wanted"), [
    (["head.*"], NAMES[5:]),
    (["*.adapter.*"], NAMES[2:4]),
    (["*.adapter.*", "head.weight"], [*NAMES[2:4], "head.weight"]),
    (["convs.?.base.*"], NAMES[:2]),
])
def test_what_matches_moves(only: list[str], wanted: list[str]) -> None:
    assert moving(only) == [*wanted]


def test_no_pattern_is_the_whole_model() -> None:
    assert selected([], LAYOUT, METHODS["fedavg"]) == (EVERYTHING, [])


@pytest.mark.parametrize(("only", "method", "said"), [
    (["hed.*"], "fedavg", "train.only[0]: no array of the model net is named 'hed.*' (did you mean 'head.*'?)"),
    (["*.adaptr.*"], "fedavg", "no array of the model net is named '*.adaptr.*' (did you mean '*.adapter.*'?)"),
    (["head.wieght"], "fedavg", "is named 'head.wieght' (did you mean 'head.weight'?)"),
    (["zzz"], "fedavg", "train.only[0]: no array of the model net is named 'zzz'"),
    (["*"], "fedavg", "train.only: names every array that fedavg trains: leave it out"),
    (["convs.*", "norm.*"], "pfldyn-proto", "train.only: names every array that pfldyn-proto trains: leave it out"),
    (["head.*"], "pfldyn-proto", "train.only: names no array of the body, which is all that pfldyn-proto sends"),
    (["convs.*"], "lg-fedavg", "train.only: names no array of the head, which is all that lg-fedavg sends"),
])
def test_a_mistake_is_said_with_what_may_have_been_meant(only: list[str], method: str, said: str) -> None:
    with pytest.raises(ConfigError) as caught:
        select_arrays.moving_of(TrainSection(tuple(only)), LAYOUT, METHODS[method])
    assert said in caught.value.what
    assert caught.value.hint == f"the arrays: {', '.join(NAMES)}"


def test_every_mistake_is_said_at_once() -> None:
    _, problems = selected(["hed.*", "head.*", "nrom.*"], LAYOUT, METHODS["p-avg-proto"])
    assert [problem.key for problem in problems] == ["train.only[0]", "train.only[2]", "train.only"]


def test_a_mistake_is_said_with_the_line_of_the_file() -> None:
    text = '[fleet]\nname = "t"\n[train]\nfreeze = "never"\nonly = ["hed.*"]\n'
    with pytest.raises(ConfigError, match=r"fleet\.toml:5: train\.only\[0\]"):
        select_arrays.moving_of(TrainSection(("hed.*",)), LAYOUT, METHODS["fedavg"], text, "fleet.toml")


def test_a_head_of_a_devices_own_may_stay_as_it_was_drawn() -> None:
    assert moving(["convs.*", "norm.*"], "fedper") == [*NAMES[:5]]


@pytest.mark.parametrize(("method", "why"), [
    ("pfedhn", "makes the whole model of every device anew"), ("fedproto", "shares prototypes"),
    ("fedmeta-metasgd", "shares rates"), ("local", "shares nothing"),
])
def test_a_method_that_cannot_freeze_says_why(method: str, why: str) -> None:
    section = TrainSection(("head.*",), "auto")
    assert [problem.key for problem in select_arrays.check(section, METHODS[method])] == ["train.only", "train.freeze"]
    assert why in select_arrays.refusal(METHODS[method])


def test_all_other_methods_can_as_the_page_says() -> None:
    refused = {name for name, method in METHODS.items() if select_arrays.refusal(method)}
    assert refused == {"pfedhn", "fedproto", "fedmeta-metasgd", "local"}
    page = (ROOT / "docs" / "freezing.md").read_text(encoding="utf-8").partition("## What does not go")[2]
    assert set(re.findall(r"^\| `([\w-]+)` \|", page.partition("\n## ")[0], re.MULTILINE)) == refused
    assert not list(select_arrays.check(TrainSection(), METHODS["local"])), "nothing is asked of it"
